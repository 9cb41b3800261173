//! A BLAS library in this process: found by name or path, its symbols, its integers, its calls.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::vendor::{self, Identity};
use crate::Scalar;

/// Which library is wanted.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Wanted {
    /// The first of the known ones that is there.
    Any,
    /// A known one, by its name in [`KNOWN`].
    Known(&'static str),
    /// This file.
    File(PathBuf),
}

/// Names of a library's files, newest first. A bare name is looked up as the system's loader does.
struct Known {
    name: &'static str,
    linux: &'static [&'static str],
    macos: &'static [&'static str],
}

const KNOWN: &[Known] = &[
    // On Apple silicon it alone reaches the matrix units. Not a file: the loader has it at this name.
    Known {
        name: "accelerate",
        linux: &[],
        macos: &["/System/Library/Frameworks/Accelerate.framework/Accelerate"],
    },
    Known {
        name: "openblas",
        linux: &[
            "libopenblas.so.0",
            "libopenblas.so",
            "libopenblas64_.so.0",
            "libopenblas64.so.0",
            "libscipy_openblas.so",
            "libscipy_openblas64_.so",
        ],
        macos: &[
            "libopenblas.0.dylib",
            "libopenblas.dylib",
            "/opt/homebrew/opt/openblas/lib/libopenblas.dylib",
            "/usr/local/opt/openblas/lib/libopenblas.dylib",
            "libscipy_openblas.dylib",
            "libscipy_openblas64_.dylib",
        ],
    },
    Known {
        name: "mkl",
        linux: &[
            "libmkl_rt.so.3",
            "libmkl_rt.so.2",
            "libmkl_rt.so",
            "/opt/intel/oneapi/mkl/latest/lib/libmkl_rt.so",
            "/opt/intel/oneapi/mkl/latest/lib/intel64/libmkl_rt.so",
        ],
        macos: &["libmkl_rt.2.dylib", "libmkl_rt.dylib"],
    },
    Known {
        name: "blis",
        linux: &["libblis.so.4", "libblis.so.5", "libblis.so", "libblis-mt.so.5", "libblis-mt.so"],
        macos: &["libblis.4.dylib", "libblis.dylib", "/opt/homebrew/opt/blis/lib/libblis.dylib"],
    },
    // Their sequential variants: the threads are ours.
    Known { name: "nvpl", linux: &["libnvpl_blas_lp64_seq.so.0"], macos: &[] },
    Known { name: "armpl", linux: &["libarmpl_lp64.so", "/opt/arm/armpl/lib/libarmpl_lp64.so"], macos: &[] },
    Known {
        name: "system",
        linux: &["libblas.so.3", "libblas64.so.3", "libblas.so"],
        macos: &["libblas.dylib"],
    },
];

impl Known {
    fn files(&self) -> &'static [&'static str] {
        if cfg!(target_os = "macos") { self.macos } else { self.linux }
    }
}

/// The names that [`Wanted::Known`] may have.
pub(crate) fn known_names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|known| known.name)
}

/// How a library spells `dgemm`: Fortran compilers add an underscore, builds with 64-bit integers a suffix,
/// PyPI's OpenBLAS a prefix, Apple's Accelerate a variant name (from macOS 13.3 on; its plain names are those of an
/// older BLAS, deprecated).
const DECORATIONS: &[(&str, &str)] = &[
    ("", "$NEWLAPACK$ILP64"),
    ("", "$NEWLAPACK"),
    ("", "_"),
    ("", "_64_"),
    ("scipy_", "_"),
    ("scipy_", "_64_"),
    ("", "_64"),
    ("", ""),
];

/// Width of the library's integers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ints {
    /// LP64.
    W32,
    /// ILP64.
    W64,
}

impl Ints {
    /// `x` in memory as the library reads it.
    fn encode(self, x: usize) -> Int {
        match self {
            Ints::W64 => Int((x as i64).to_ne_bytes()),
            Ints::W32 => {
                let narrow = i32::try_from(x).expect("blocks are cut to what the library can count");
                let mut bytes = [0; 8];
                bytes[..4].copy_from_slice(&narrow.to_ne_bytes());
                Int(bytes)
            }
        }
    }
}

#[repr(C, align(8))]
struct Int([u8; 8]);

impl Int {
    fn ptr(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }
}

/// `xGEMM`; the last two are the lengths of the character arguments that Fortran passes unseen.
type Gemm = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    *const c_void,
    usize,
    usize,
);

/// `xTRSM`, with four unseen lengths.
type Trsm = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const c_char,
    *const c_char,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    *const c_void,
    usize,
    usize,
    usize,
    usize,
);

/// A library that is loaded for the life of the process, set to one thread a call.
pub(crate) struct Library {
    gemm: [Gemm; 4],
    trsm: [Trsm; 4],
    ints: Ints,
    identity: Identity,
    /// It can't serve two threads at once.
    serial: bool,
}

/// Held during every call of a serial library. One for all: two names may lead to the same code.
static ALONE: Mutex<()> = Mutex::new(());

/// Every library that was loaded. Ranks that are threads of one process share one entry, and so its lock.
static LOADED: Mutex<Vec<&'static Library>> = Mutex::new(Vec::new());

/// A handle to look symbols up in.
pub(crate) struct Symbols(libloading::Library);

impl Symbols {
    /// The symbol's address as a function of type `F`, `None` if there is none.
    ///
    /// # Safety
    /// `F` must be the type of that function, and the library must stay loaded as long as it is used.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: passed on to the caller.
        unsafe { self.0.get::<F>(name) }.ok().map(|symbol| *symbol)
    }
}

impl Library {
    /// Finds, loads and sets up the wanted library.
    ///
    /// # Errors
    /// What was tried, what the loader said, and the remedy.
    pub(crate) fn load(wanted: &Wanted) -> Result<&'static Library, String> {
        let names = |known: &'static Known| known.files().iter().map(Path::new);
        let files: Vec<&Path> = match wanted {
            Wanted::Any => KNOWN.iter().flat_map(names).collect(),
            Wanted::Known(name) => KNOWN.iter().filter(|known| known.name == *name).flat_map(names).collect(),
            Wanted::File(path) => vec![path],
        };
        let mut tried = String::new();
        for file in files {
            match Library::open(file.as_os_str()) {
                Ok(library) => return Ok(library),
                Err(why) => tried += &format!("\n    tried {}: {why}", file.display()),
            }
        }
        let what = match wanted {
            Wanted::Any => "no BLAS library was found".to_string(),
            Wanted::Known("accelerate") if !cfg!(target_os = "macos") => {
                "BLAS `accelerate` is a part of macOS".to_string()
            }
            Wanted::Known(name) => format!("no library of BLAS `{name}` was found"),
            Wanted::File(path) => format!("{} can't be used as a BLAS library", path.display()),
        };
        Err(format!("{what}{tried}\n    {REMEDY}"))
    }

    fn open(file: &OsStr) -> Result<&'static Library, String> {
        let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: a library's initialisers run here; the user named a BLAS, whose initialisers are harmless.
        let symbols = Symbols(unsafe { libloading::Library::new(file) }.map_err(|e| loader_said(&e, file))?);
        let decoration = DECORATIONS
            .iter()
            // SAFETY: only its presence is asked for.
            .find(|(prefix, suffix)| unsafe {
                symbols.function::<Gemm>(&format!("{prefix}dgemm{suffix}")).is_some()
            })
            .ok_or("it exports no dgemm under any known name")?;
        let name = |routine: &str| format!("{}{routine}{}", decoration.0, decoration.1);
        let mut gemm = Vec::new();
        let mut trsm = Vec::new();
        for letter in LETTERS {
            // SAFETY: the BLAS standard fixes these routines' arguments; the library is never unloaded.
            unsafe {
                let (g, t) = (name(&format!("{letter}gemm")), name(&format!("{letter}trsm")));
                gemm.push(symbols.function::<Gemm>(&g).ok_or_else(|| format!("it exports no {g}"))?);
                trsm.push(symbols.function::<Trsm>(&t).ok_or_else(|| format!("it exports no {t}"))?);
            }
        }
        if let Some(known) = loaded.iter().find(|known| std::ptr::fn_addr_eq(known.gemm[1], gemm[1])) {
            return Ok(known);
        }
        let path = file_of(gemm[1] as *const c_void).unwrap_or_else(|| file.into());
        let setup = vendor::set_up(&symbols, &path);
        let ints = width_of_ints(&symbols, &name("isamax")).unwrap_or(if decoration.1.contains("64") {
            Ints::W64
        } else {
            Ints::W32
        });
        let mut library = Library {
            gemm: gemm.try_into().expect("four types"),
            trsm: trsm.try_into().expect("four types"),
            ints,
            serial: setup.serial,
            identity: setup.identity,
        };
        library.warm_up();
        library.identity.finish();
        // It stays until the process ends: other threads may be inside, and its own threads are.
        std::mem::forget(symbols);
        let library: &'static Library = Box::leak(Box::new(library));
        loaded.push(library);
        Ok(library)
    }

    /// One small call: libraries that choose their kernels late have chosen after it.
    fn warm_up(&self) {
        const N: usize = 64;
        let (a, mut c) = (vec![1f64; N * N], vec![0f64; N * N]);
        // SAFETY: all three are N x N.
        unsafe {
            self.gemm(b'N', b'N', [N; 3], 1.0, a.as_ptr(), N, a.as_ptr(), N, 0.0, c.as_mut_ptr(), N);
        }
    }

    /// What it is.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The largest size or leading dimension that it can be given.
    pub(crate) fn limit(&self) -> usize {
        match self.ints {
            Ints::W32 => i32::MAX as usize,
            Ints::W64 => i64::MAX as usize,
        }
    }

    /// Runs `call` as this library wants to be called by this thread.
    fn enter(&self, call: impl FnOnce()) {
        self.identity.prepare_thread();
        let _alone = self.serial.then(|| ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        call();
    }

    /// BLAS's `xGEMM`; `size` is m, n, k.
    ///
    /// # Safety
    /// As for BLAS: the matrices are as large as sizes and leading dimensions say, and C is ours alone.
    pub(crate) unsafe fn gemm<T: Scalar>(
        &self,
        op_a: u8,
        op_b: u8,
        size: [usize; 3],
        alpha: T,
        a: *const T,
        lda: usize,
        b: *const T,
        ldb: usize,
        beta: T,
        c: *mut T,
        ldc: usize,
    ) {
        let ([m, n, k], int) = (size, |x| self.ints.encode(x));
        let (op_a, op_b) = (op_a as c_char, op_b as c_char);
        // SAFETY: the caller's promise; integers have the width that the library was found to read.
        self.enter(|| unsafe {
            self.gemm[index::<T>()](
                &op_a,
                &op_b,
                int(m).ptr(),
                int(n).ptr(),
                int(k).ptr(),
                (&raw const alpha).cast(),
                a.cast(),
                int(lda).ptr(),
                b.cast(),
                int(ldb).ptr(),
                (&raw const beta).cast(),
                c.cast(),
                int(ldc).ptr(),
                1,
                1,
            );
        });
    }

    /// BLAS's `xTRSM`; `flags` are side, uplo, trans, diag.
    ///
    /// # Safety
    /// As for [`Library::gemm`].
    pub(crate) unsafe fn trsm<T: Scalar>(
        &self,
        flags: [u8; 4],
        m: usize,
        n: usize,
        alpha: T,
        a: *const T,
        lda: usize,
        b: *mut T,
        ldb: usize,
    ) {
        let ([side, uplo, op, diag], int) = (flags.map(|f| f as c_char), |x| self.ints.encode(x));
        // SAFETY: as in `gemm`.
        self.enter(|| unsafe {
            self.trsm[index::<T>()](
                &side,
                &uplo,
                &op,
                &diag,
                int(m).ptr(),
                int(n).ptr(),
                (&raw const alpha).cast(),
                a.cast(),
                int(lda).ptr(),
                b.cast(),
                int(ldb).ptr(),
                1,
                1,
                1,
                1,
            );
        });
    }
}

const REMEDY: &str = if cfg!(target_os = "macos") {
    "install one (`brew install openblas`), or give its file: blas:/path/to/library.dylib"
} else {
    "install one (Debian: `apt install libopenblas0-pthread`), or give its file: blas:/path/to/library.so"
};

const LETTERS: [char; 4] = ['s', 'd', 'c', 'z'];

fn index<T: Scalar>() -> usize {
    LETTERS.iter().position(|l| *l == T::LETTER).expect("the four types of BLAS")
}

/// The loader's words, without the file's name that stands before them already.
fn loader_said(e: &libloading::Error, file: &OsStr) -> String {
    let text = std::error::Error::source(e).map_or_else(|| e.to_string(), |source| source.to_string());
    text.trim_start_matches(&*file.to_string_lossy()).trim_start_matches([':', ' ']).to_string()
}

/// The file that an address was loaded from.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: Dl_info is plain data, and dladdr accepts any address.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(PathBuf::from(CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned()))
    }
}

/// Asks `ixamax` for the largest of three elements, their number written so that 32 bits of it say 3 and
/// 64 bits say less than none: a library with 64-bit integers then answers 0. (The decoration alone does
/// not tell: Debian's 64-bit OpenBLAS exports a plain `dgemm_`. The idea is libblastrampoline's.)
fn width_of_ints(symbols: &Symbols, isamax: &str) -> Option<Ints> {
    type Isamax = unsafe extern "C" fn(*const i64, *const f32, *const i64) -> c_int;
    if cfg!(target_endian = "big") {
        return None;
    }
    // SAFETY: BLAS's ISAMAX; it reads at most three elements whichever width it has.
    let answer = unsafe {
        let isamax = symbols.function::<Isamax>(isamax)?;
        isamax(&(3 | !0xffff_ffff), [1.0, 2.0, 3.0].as_ptr(), &1)
    };
    Some(if answer == 3 { Ints::W32 } else { Ints::W64 })
}
