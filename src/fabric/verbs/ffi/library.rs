//! The verbs library, found at run time: a machine without one has no such transport, and says why.

use std::ffi::{c_char, c_int};
use std::path::Path;
use std::sync::OnceLock;

use super::abi::*;

/// Names a library to be used instead of the system's: an emulator, another provider.
pub const LIBRARY_VARIABLE: &str = "FULMEN_VERBS_LIB";

/// Why this machine has no verbs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// No library could be loaded.
    #[error("no verbs library: {why}")]
    NoLibrary {
        /// What was tried, and the loader's words.
        why: String,
    },
    /// A library without a function that is needed.
    #[error("the verbs library {library} has no `{symbol}`")]
    NoSymbol {
        /// The library.
        library: String,
        /// The function.
        symbol: String,
    },
}

macro_rules! library {
    ($($name:ident: fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions that are used; posting and polling go through the context's table.
        pub struct Library {
            /// Where it was found.
            pub name: String,
            $(pub(in crate::fabric::verbs) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Library {
            fn symbols(name: &str, library: &libloading::Library) -> Result<Self, Absent> {
                Ok(Library {
                    name: name.to_owned(),
                    $($name: {
                        let symbol = concat!("ibv_", stringify!($name));
                        // SAFETY: the type is the C declaration's, in rdma-core and Apple's SDK.
                        let found = unsafe { library.get(symbol.as_bytes()) };
                        *found.map_err(|_| Absent::NoSymbol { library: name.into(), symbol: symbol.into() })?
                    },)*
                })
            }
        }
    };
}

library! {
    get_device_list: fn(*mut c_int) -> *mut *mut IbvDevice;
    free_device_list: fn(*mut *mut IbvDevice) -> ();
    get_device_name: fn(*mut IbvDevice) -> *const c_char;
    open_device: fn(*mut IbvDevice) -> *mut IbvContext;
    close_device: fn(*mut IbvContext) -> c_int;
    query_device: fn(*mut IbvContext, *mut IbvDeviceAttr) -> c_int;
    query_port: fn(*mut IbvContext, u8, *mut IbvPortAttr) -> c_int;
    query_gid: fn(*mut IbvContext, u8, c_int, *mut IbvGid) -> c_int;
    alloc_pd: fn(*mut IbvContext) -> *mut IbvPd;
    dealloc_pd: fn(*mut IbvPd) -> c_int;
    reg_mr: fn(*mut IbvPd, *mut std::ffi::c_void, usize, c_int) -> *mut IbvMr;
    dereg_mr: fn(*mut IbvMr) -> c_int;
    create_cq: fn(*mut IbvContext, c_int, *mut std::ffi::c_void, *mut std::ffi::c_void, c_int) -> *mut IbvCq;
    destroy_cq: fn(*mut IbvCq) -> c_int;
    create_qp: fn(*mut IbvPd, *mut IbvQpInitAttr) -> *mut IbvQp;
    destroy_qp: fn(*mut IbvQp) -> c_int;
    modify_qp: fn(*mut IbvQp, *mut IbvQpAttr, c_int) -> c_int;
    query_qp: fn(*mut IbvQp, *mut IbvQpAttr, c_int, *mut IbvQpInitAttr) -> c_int;
}

impl Library {
    /// The library of this process: [`LIBRARY_VARIABLE`]'s, else the system's. It is looked for once and stays
    /// loaded: drivers do not like to be unloaded.
    ///
    /// # Errors
    /// When there is none, or one that lacks a function.
    pub fn find() -> Result<&'static Library, Absent> {
        static FOUND: OnceLock<Result<Library, Absent>> = OnceLock::new();
        let found = FOUND.get_or_init(|| match std::env::var_os(LIBRARY_VARIABLE) {
            Some(path) => Library::load(&[Path::new(&path)]),
            None => Library::load(SYSTEM.map(Path::new).as_slice()),
        });
        found.as_ref().map_err(Clone::clone)
    }

    /// The library at `path`, loaded for the rest of the process's life.
    ///
    /// # Errors
    /// As [`Library::find`].
    pub fn open(path: &Path) -> Result<&'static Library, Absent> {
        Library::load(&[path]).map(|library| &*Box::leak(Box::new(library)))
    }

    fn load(names: &[&Path]) -> Result<Self, Absent> {
        let mut why = String::new();
        for name in names {
            // SAFETY: initialisers of the system's verbs library, or of one that the user named.
            match unsafe { libloading::Library::new(*name) } {
                Ok(library) => {
                    let found = Library::symbols(&name.display().to_string(), &library);
                    std::mem::forget(library);
                    return found;
                }
                Err(e) => {
                    let words =
                        std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
                    why += &format!("{}{}: {words}", if why.is_empty() { "" } else { "; " }, name.display());
                }
            }
        }
        Err(Absent::NoLibrary { why })
    }
}

#[cfg(target_os = "macos")]
const SYSTEM: [&str; 3] = ["librdma.dylib", "/usr/lib/librdma.dylib", "/usr/lib/rdma/libibverbs.dylib"];
#[cfg(not(target_os = "macos"))]
const SYSTEM: [&str; 2] = ["libibverbs.so.1", "libibverbs.so"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_says_what_was_tried() {
        let Err(Absent::NoLibrary { why }) = Library::load(&[Path::new("libfulmen-none.so.7")]) else {
            panic!("found a library that is not there")
        };
        assert!(why.contains("libfulmen-none.so.7"), "{why}");
    }

    #[test]
    fn another_library_lacks_the_functions() {
        let libc = if cfg!(target_os = "macos") { "libSystem.B.dylib" } else { "libc.so.6" };
        match Library::load(&[Path::new(libc)]) {
            Err(Absent::NoSymbol { library, symbol }) => {
                assert_eq!((library.as_str(), symbol.as_str()), (libc, "ibv_get_device_list"));
            }
            Err(Absent::NoLibrary { why }) => println!("skipped: {why}"),
            Ok(_) => panic!("{libc} has verbs?"),
        }
    }
}
