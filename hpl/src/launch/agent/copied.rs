//! A program that was copied to this host: a folder that is removed when the agent ends.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A folder that is removed when the agent ends.
pub struct Copied(pub Option<PathBuf>);

impl Copied {
    pub fn program(&self) -> PathBuf {
        self.0.as_deref().unwrap_or(Path::new("/nonexistent")).join("program")
    }

    pub fn shown(&self) -> String {
        self.program().display().to_string()
    }

    /// Adds to the program's file, which is made by the first part.
    pub fn append(&self, file: &mut Option<File>, bytes: &[u8]) -> io::Result<()> {
        let file = match file {
            Some(file) => file,
            None => {
                let made = File::options().write(true).create_new(true).mode(0o700).open(self.program())?;
                file.insert(made)
            }
        };
        file.write_all(bytes)
    }

    pub fn remove(&mut self) {
        if let Some(folder) = self.0.take() {
            // Nothing can be done about what cannot be removed.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        self.remove();
    }
}
