//! Files that are never half-written: the text grows beside the file, as `FILE.partial`, and takes its place at the end. A
//! job that ends early, even one that is killed, leaves what it had written there.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use fulmen::Error;

use crate::params::Sink;

/// Where a report goes.
#[derive(Debug)]
pub enum Target {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A file that is replaced when the report is complete.
    File(Replacement),
    /// Something that is not a plain file, such as `/dev/null` or a pipe: written straight.
    Direct(File),
}

/// A file being written beside the one that it will replace.
#[derive(Debug)]
pub struct Replacement {
    path: PathBuf,
    partial: PathBuf,
    writer: BufWriter<File>,
    /// Whether it was not there before, or its former text is gone.
    ours: bool,
    settled: bool,
}

impl Target {
    /// Opens what a sink names; `flag` is the argument that named it. A file that cannot be written is
    /// found here, before any work, and the file that is there now stays as it is.
    ///
    /// # Errors
    /// [`Error::Argument`], so that the program ends with 2.
    pub fn open(sink: &Sink, flag: &str) -> Result<Target, Error> {
        match sink {
            Sink::Stdout => Ok(Target::Stdout),
            Sink::Stderr => Ok(Target::Stderr),
            Sink::File(path) => Target::file(path).map_err(|e| {
                let remedy = "nothing was run; name a file in a folder that you may write to";
                Error::argument(flag, path.display(), format!("cannot be written: {e}"), remedy)
            }),
        }
    }

    fn file(path: &Path) -> io::Result<Target> {
        // A link stays a link: what it points to is replaced.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let existing = fs::metadata(&path).ok();
        match &existing {
            Some(meta) if meta.is_dir() => return Err(io::Error::other("it is a folder")),
            Some(meta) if !meta.is_file() => {
                return Ok(Target::Direct(OpenOptions::new().write(true).open(&path)?));
            }
            // A file that may not be written may not be replaced either.
            Some(_) => drop(OpenOptions::new().append(true).open(&path)?),
            None => {}
        }
        let mut name =
            path.file_name().ok_or_else(|| io::Error::other("it is no file's name"))?.to_os_string();
        name.push(".partial");
        let partial = path.with_file_name(name);
        let ours = !partial.exists();
        // What a former job has left stays until there is something new.
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&partial)?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(io::Error::other(format!("another job is writing {}", partial.display())));
        }
        if let Some(meta) = existing {
            file.set_permissions(meta.permissions())?;
        }
        let writer = BufWriter::new(file);
        Ok(Target::File(Replacement { path, partial, writer, ours, settled: false }))
    }

    /// The report is complete: the file takes its place.
    ///
    /// # Errors
    /// Of the file system.
    pub fn complete(self) -> io::Result<()> {
        match self {
            Target::File(file) => file.complete(),
            mut other => other.flush(),
        }
    }

    /// The job failed: what was written is kept as `FILE.partial`, and the file that was there before
    /// stays. Returns the partial file's path.
    ///
    /// # Errors
    /// Of the file system.
    pub fn keep_partial(self) -> io::Result<Option<PathBuf>> {
        match self {
            Target::File(file) => file.keep_partial().map(Some),
            mut other => other.flush().map(|()| None),
        }
    }
}

impl Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.ours {
            self.writer.get_ref().set_len(0)?;
            self.ours = true;
        }
        self.writer.write(bytes)
    }

    fn complete(mut self) -> io::Result<()> {
        // What cannot be completed is kept as it is.
        self.settled = true;
        self.writer.flush()?;
        self.writer.get_ref().sync_all()?;
        fs::rename(&self.partial, &self.path)
    }

    fn keep_partial(mut self) -> io::Result<PathBuf> {
        self.settled = true;
        self.writer.flush()?;
        Ok(self.partial.clone())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.settled && self.ours {
            // Nothing worth keeping: the job ended before its first line.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Target::Stdout => io::stdout().write(bytes),
            Target::Stderr => io::stderr().write(bytes),
            Target::File(file) => file.write(bytes),
            Target::Direct(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Target::Stdout => io::stdout().flush(),
            Target::Stderr => io::stderr().flush(),
            Target::File(file) => file.writer.flush(),
            Target::Direct(file) => file.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_old_file_stays_until_the_new_one_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("HPL.out");
        fs::write(&path, "old").unwrap();
        let mut target = Target::open(&Sink::File(path.clone()), "--output").unwrap();
        writeln!(target, "new").unwrap();
        target.flush().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        target.complete().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new\n");
        assert_eq!(names(folder.path()), ["HPL.out"]);
    }

    #[test]
    fn a_failed_job_leaves_a_partial_file_and_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("HPL.out");
        fs::write(&path, "old").unwrap();
        let mut target = Target::open(&Sink::File(path.clone()), "--output").unwrap();
        writeln!(target, "half").unwrap();
        let partial = target.keep_partial().unwrap().unwrap();
        assert_eq!(fs::read_to_string(partial).unwrap(), "half\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["HPL.out", "HPL.out.partial"]);
        drop(Target::open(&Sink::File(path.clone()), "--output").unwrap());
        assert_eq!(names(folder.path()), ["HPL.out", "HPL.out.partial"]);
    }

    #[test]
    fn what_was_written_is_there_when_the_job_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("HPL.out");
        let partial = folder.path().join("HPL.out.partial");
        fs::write(&partial, "of a former job, and longer").unwrap();
        let mut target = Target::open(&Sink::File(path.clone()), "--output").unwrap();
        assert_eq!(fs::read_to_string(&partial).unwrap(), "of a former job, and longer");
        // Two jobs do not write into each other's report.
        let error = Target::open(&Sink::File(path.clone()), "--output").unwrap_err().to_string();
        assert!(error.contains("another job is writing"), "{error}");
        writeln!(target, "new").unwrap();
        target.flush().unwrap();
        std::mem::forget(target); // as a killed process drops nothing
        assert_eq!(fs::read_to_string(&partial).unwrap(), "new\n");
    }

    #[test]
    fn what_cannot_be_written_is_found_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: PathBuf| Target::open(&Sink::File(path), "--output").unwrap_err();
        let error = open(folder.path().join("none/HPL.out"));
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("none/HPL.out: cannot be written: "), "{error}");
        assert!(open(folder.path().to_path_buf()).to_string().contains("it is a folder"));
    }

    #[test]
    fn devices_are_written_straight() {
        let mut target = Target::open(&Sink::File("/dev/null".into()), "--output").unwrap();
        assert!(matches!(target, Target::Direct(_)));
        writeln!(target, "x").unwrap();
        target.complete().unwrap();
    }
}
