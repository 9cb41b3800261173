//! A listener that only processes of this host reach, by a name that nobody can guess and that does not outlast it.

use std::io::Result;
use std::os::unix::net::{UnixListener, UnixStream};

use crate::fabric::rendezvous::random;

/// Where others find it.
pub struct Socket {
    listener: UnixListener,
    name: Name,
}

impl Socket {
    /// A new one.
    pub fn listen() -> Result<Self> {
        let random = random().map_err(|e| std::io::Error::other(e.to_string()))?;
        let unguessable: String = random[..16].iter().map(|b| format!("{b:02x}")).collect();
        let name = Name::new(&unguessable)?;
        Ok(Socket { listener: name.bind()?, name })
    }

    /// For [`connect`].
    pub fn address(&self) -> &[u8] {
        self.name.as_bytes()
    }

    /// The listener, and what keeps its name.
    pub fn open(self) -> (UnixListener, Name) {
        (self.listener, self.name)
    }
}

/// Connects to the socket of this address.
pub fn connect(address: &[u8]) -> Result<UnixStream> {
    os::connect(address)
}

pub use os::Name;

/// Names that are no files, and gone with the listener.
#[cfg(target_os = "linux")]
mod os {
    use std::io::Result;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    /// A listener's name.
    pub struct Name(Vec<u8>);

    impl Name {
        pub fn new(unguessable: &str) -> Result<Self> {
            Ok(Name(format!("fulmen-{unguessable}").into_bytes()))
        }

        pub fn bind(&self) -> Result<UnixListener> {
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&self.0)?)
        }

        pub fn as_bytes(&self) -> &[u8] {
            &self.0
        }
    }

    pub fn connect(address: &[u8]) -> Result<UnixStream> {
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(address)?)
    }
}

/// A file in a folder that only this user sees, both removed with the name.
#[cfg(not(target_os = "linux"))]
mod os {
    use std::ffi::OsStr;
    use std::io::Result;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::DirBuilderExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::{Path, PathBuf};

    /// A listener's name.
    pub struct Name {
        folder: PathBuf,
        file: PathBuf,
    }

    impl Name {
        pub fn new(unguessable: &str) -> Result<Self> {
            // Short: a path of a socket has 103 bytes at most.
            let folder = std::env::temp_dir().join(format!("fulmen-{}", &unguessable[..16]));
            std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
            let file = folder.join("s");
            Ok(Name { folder, file })
        }

        pub fn bind(&self) -> Result<UnixListener> {
            UnixListener::bind(&self.file)
        }

        pub fn as_bytes(&self) -> &[u8] {
            self.file.as_os_str().as_bytes()
        }
    }

    impl Drop for Name {
        fn drop(&mut self) {
            // Nothing more can be done about what is left.
            let _ = std::fs::remove_file(&self.file);
            let _ = std::fs::remove_dir(&self.folder);
        }
    }

    pub fn connect(address: &[u8]) -> Result<UnixStream> {
        UnixStream::connect(Path::new(OsStr::from_bytes(address)))
    }
}
