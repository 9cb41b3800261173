//! Files that are never half-written: the text grows beside the file, as `FILE.partial`, and takes its place at the end. A
//! job that ends early, even one that is killed, leaves what it had written there. What an earlier job has left there is
//! moved to `FILE.partial.1` (or a higher number), not lost.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Seek, Write};
use std::os::fd::{AsFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use fulmen::Error;

use crate::limits;
use crate::params::Sink;
use crate::stdout;

/// As many links in a row as Linux follows.
const MOST_LINKS: usize = 40;

/// The descriptor that a name stands for: `/dev/stdout`, `/dev/fd/63` (as shells write `>(command)`).
fn descriptor(path: &Path) -> Option<RawFd> {
    let name = path.to_str()?;
    match name {
        "/dev/stdout" => Some(libc::STDOUT_FILENO),
        "/dev/stderr" => Some(libc::STDERR_FILENO),
        _ => ["/dev/fd/", "/proc/self/fd/"].iter().find_map(|folder| {
            let number = name.strip_prefix(folder)?.parse().ok();
            number.filter(|number| *number >= 0)
        }),
    }
}

/// What a name means: standard output and error have several, and the plain file that one of them goes to (`>log`) is another. To
/// replace that file would lose what they have written there.
pub fn meant(path: &Path) -> Sink {
    let (out, err) = (io::stdout(), io::stderr());
    let standard = [(out.as_fd(), Sink::Stdout), (err.as_fd(), Sink::Stderr)];
    let file = fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|m| (m.dev(), m.ino()));
    for (at, (standard, sink)) in (libc::STDOUT_FILENO..).zip(standard) {
        let goes_to = || standard.try_clone_to_owned().and_then(|open| File::from(open).metadata()).ok();
        let is_its = || file.is_some() && goes_to().map(|m| (m.dev(), m.ino())) == file;
        if descriptor(path) == Some(at) || is_its() {
            return sink;
        }
    }
    if path == Path::new("-") { Sink::Stdout } else { Sink::File(path.to_path_buf()) }
}

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
    former: Option<Former>,
    settled: bool,
}

/// What an earlier job has left in `FILE.partial`: moved aside, and back if nothing takes its place.
#[derive(Debug)]
struct Former {
    path: PathBuf,
    /// Locked as long as we write: nobody takes the name `FILE.partial` for this file's.
    _file: File,
}

impl Target {
    /// Opens what a sink names; `flag` is the argument that named it. A file that cannot be written is
    /// found here, before any work, and the file that is there now stays as it is.
    ///
    /// # Errors
    /// [`Error::Argument`], so that the program ends with 2; [`Error::System`] if it is for a closed stdout.
    pub fn open(sink: &Sink, flag: &str) -> Result<Target, Error> {
        match sink {
            Sink::Stdout => stdout::must_be_open("the report").map(|()| Target::Stdout),
            Sink::Stderr => Ok(Target::Stderr),
            Sink::File(path) => Target::file(path).map_err(|e| {
                let remedy = "nothing was run; name a file in a folder that you may write to";
                Error::argument(flag, path.display(), format!("cannot be written: {e}"), remedy)
            }),
        }
    }

    /// Whether [`Target::open`] would succeed; nothing stays changed.
    ///
    /// # Errors
    /// As there.
    pub fn try_out(sink: &Sink, flag: &str) -> Result<(), Error> {
        // Who opens a pipe waits for its reader.
        let straight = |path: &PathBuf| fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir());
        match sink {
            Sink::File(path) if straight(path) => Ok(()),
            _ => Target::open(sink, flag).map(drop),
        }
    }

    fn file(path: &Path) -> io::Result<Target> {
        if let Some(number) = descriptor(path) {
            return Ok(Target::Direct(stdout::duplicate(number)?));
        }
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(io::Error::other("it is a folder's name"));
        }
        // A link stays a link: what it points to is replaced, or made.
        let path = place(path)?;
        let existing = fs::metadata(&path).ok();
        match &existing {
            Some(meta) if meta.is_dir() => return Err(io::Error::other("it is a folder")),
            Some(meta) if !meta.is_file() => {
                return Ok(Target::Direct(OpenOptions::new().write(true).open(&path)?));
            }
            // A file that may not be written may not be replaced either.
            Some(file) => {
                may_be_replaced(&path, file)?;
                drop(OpenOptions::new().append(true).open(&path)?);
            }
            None => {}
        }
        let partial = beside(&path, ".partial");
        let (file, former) = begin(&partial)?;
        let mut replacement =
            Replacement { path, partial, writer: BufWriter::new(file), former, settled: false };
        if let Some(meta) = existing {
            replacement.writer.get_mut().set_permissions(meta.permissions())?;
        }
        Ok(Target::File(replacement))
    }

    /// Takes back what was written, where that can be: a file begins anew. Returns whether it could.
    ///
    /// # Errors
    /// Of the file system.
    pub fn restart(&mut self) -> io::Result<bool> {
        let Target::File(file) = self else { return Ok(false) };
        file.writer.rewind()?; // what is buffered is written first
        file.writer.get_ref().set_len(0)?;
        Ok(true)
    }

    /// Starts anew with `bytes`: until all of them are there the former content is. Returns whether that can be, as it can for a
    /// file.
    ///
    /// # Errors
    /// Of the file system.
    pub fn rewrite(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let Target::File(file) = self else { return Ok(false) };
        let next = beside(&file.partial, ".next");
        let written = write_next(&next, bytes, file.writer.get_ref());
        let written = written.and_then(|new| fs::rename(&next, &file.partial).map(|()| new));
        match written {
            Ok(new) => {
                file.writer = BufWriter::new(new); // what the former had in its buffer is of no use any more
                Ok(true)
            }
            Err(e) => {
                let _ = fs::remove_file(&next);
                Err(e)
            }
        }
    }

    /// What was written so far is on the disk, or there is no room for it.
    ///
    /// # Errors
    /// Of the file system.
    pub fn settle_on_disk(&mut self) -> io::Result<()> {
        self.flush()?;
        match self {
            Target::File(file) => file.writer.get_ref().sync_all(),
            _ => Ok(()),
        }
    }

    /// The report is complete: the file takes its place. Returns where the partial report of an earlier job, which was
    /// in the way, is now.
    ///
    /// # Errors
    /// Of the file system; what was written is then still in `FILE.partial`.
    pub fn complete(self) -> io::Result<Option<PathBuf>> {
        match self {
            Target::File(file) => file.complete(),
            mut other => other.flush().map(|()| None),
        }
    }

    /// The job failed: what was written is kept as `FILE.partial`, and the file that was there before
    /// stays. Returns the partial file's path, and where that of an earlier job is now.
    ///
    /// # Errors
    /// Of the file system; the beginning of what was written is then in `FILE.partial`.
    pub fn keep_partial(self) -> io::Result<Option<(PathBuf, Option<PathBuf>)>> {
        match self {
            Target::File(file) => file.keep_partial().map(Some),
            mut other => other.flush().map(|()| None),
        }
    }
}

impl Replacement {
    fn complete(mut self) -> io::Result<Option<PathBuf>> {
        self.settled = true;
        let written = self.writer.flush().and_then(|()| self.writer.get_ref().sync_all());
        written
            .and_then(|()| fs::rename(&self.partial, &self.path))
            .map_err(|e| self.still_in_partial(&e))?;
        Ok(self.former.take().map(|f| f.path))
    }

    fn keep_partial(mut self) -> io::Result<(PathBuf, Option<PathBuf>)> {
        self.settled = true;
        self.writer.flush().map_err(|e| self.still_in_partial(&e))?;
        Ok((self.partial.clone(), self.former.take().map(|f| f.path)))
    }

    fn still_in_partial(&self, e: &io::Error) -> io::Error {
        io::Error::new(e.kind(), format!("{e}; what could be written is in {}", self.partial.display()))
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.settled {
            // Nothing worth keeping: the job ended before its first result.
            let _ = fs::remove_file(&self.partial);
            if let Some(former) = &self.former {
                let _ = fs::rename(&former.path, &self.partial);
            }
        }
    }
}

/// In a folder like `/tmp` only its owner takes a file's place.
fn may_be_replaced(path: &Path, file: &fs::Metadata) -> io::Result<()> {
    const STICKY: u32 = 0o1000;
    let folder = fs::metadata(path.parent().unwrap_or(Path::new("/")))?;
    let user = limits::user();
    match folder.mode() & STICKY != 0 && ![0, folder.uid()].contains(&user) && file.uid() != user {
        true => Err(io::Error::other("it is another user's, who alone may replace it in this folder")),
        false => Ok(()),
    }
}

/// A new, empty, locked file, and what was in its place. Nothing is written through a link, and nothing is lost.
fn begin(partial: &Path) -> io::Result<(File, Option<Former>)> {
    let busy = || io::Error::other(format!("another job is writing {}", partial.display()));
    let lock = |file: &File| match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(busy()),
        _ => Ok(()), // some file systems have no locks
    };
    let foreign = |what: &str| {
        let name = partial.display();
        io::Error::other(format!("{name}, in which it grows, {what}: move that away"))
    };
    let mut former = None;
    match fs::symlink_metadata(partial) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
        Ok(meta) if meta.is_symlink() => return Err(foreign("is a link")),
        Ok(meta) if !meta.is_file() => return Err(foreign("is no plain file")),
        Ok(_) => {
            let file = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(partial)?;
            lock(&file)?;
            let (locked, named) = (file.metadata()?, fs::symlink_metadata(partial)?);
            if (locked.dev(), locked.ino()) != (named.dev(), named.ino()) {
                return Err(busy());
            }
            if locked.nlink() > 1 {
                return Err(foreign("has a second name"));
            }
            if locked.len() == 0 {
                return Ok((file, None));
            }
            let mut aside = (1..1000).map(|i| beside(partial, &format!(".{i}")));
            let path = aside.find(|path| fs::symlink_metadata(path).is_err());
            let path = path.ok_or_else(|| foreign("is the thousandth that jobs have left"))?;
            fs::rename(partial, &path)?;
            former = Some(Former { path, _file: file });
        }
    }
    let made = OpenOptions::new().write(true).create_new(true).open(partial);
    match made {
        Ok(file) => lock(&file).map(|()| (file, former)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(busy()),
        Err(e) => {
            if let Some(former) = former {
                let _ = fs::rename(former.path, partial);
            }
            Err(e)
        }
    }
}

/// A file with `bytes`, locked, and with the permissions of the one that it will replace. One that a killed job has left is
/// made way with; nothing is written through a link.
fn write_next(next: &Path, bytes: &[u8], former: &File) -> io::Result<File> {
    let left = fs::symlink_metadata(next).is_ok_and(|m| m.is_file() && m.nlink() == 1);
    if left {
        fs::remove_file(next)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(next)?;
    file.set_permissions(former.metadata()?.permissions())?;
    let _ = file.try_lock(); // nobody else has it; some file systems have no locks
    file.write_all(bytes)?;
    Ok(file)
}

/// Where a file is, or would be made: links are followed, also those that point to nothing.
fn place(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        if let Ok(there) = fs::canonicalize(&path) {
            return Ok(there);
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match fs::read_link(&path) {
            Ok(target) => path = folder.join(target),
            Err(_) => {
                let name = path.file_name().ok_or_else(|| io::Error::other("it is no file's name"))?;
                return Ok(fs::canonicalize(folder)?.join(name));
            }
        }
    }
    Err(io::Error::other("its links lead nowhere"))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    name.into()
}

/// Whether two names are of one file, whatever links lead to it. Terminals and `/dev/null` hold no two reports apart,
/// and need not.
pub fn same(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()) && !a.file_type().is_char_device(),
        _ => place(a).is_ok_and(|a| place(b).is_ok_and(|b| a == b)),
    }
}

/// Whether writing the report `output` would replace `file`, at once or while it grows.
pub fn replaces(output: &Path, file: &Path) -> bool {
    same(output, file) || place(output).is_ok_and(|output| same(&beside(&output, ".partial"), file))
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Target::Stdout => io::stdout().write(bytes),
            Target::Stderr => io::stderr().write(bytes),
            Target::File(file) => file.writer.write(bytes),
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
        let (partial, former) = target.keep_partial().unwrap().unwrap();
        assert_eq!(former, None);
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
        // Two jobs do not write into each other's report.
        let error = Target::open(&Sink::File(path.clone()), "--output").unwrap_err().to_string();
        assert!(error.contains("another job is writing"), "{error}");
        writeln!(target, "new").unwrap();
        target.flush().unwrap();
        std::mem::forget(target); // as a killed process drops nothing
        assert_eq!(fs::read_to_string(&partial).unwrap(), "new\n");
        let former = folder.path().join("HPL.out.partial.1");
        assert_eq!(fs::read_to_string(former).unwrap(), "of a former job, and longer");
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

    /// Neither a report that succeeds nor one that fails takes what an earlier job has kept; one that does not begin leaves
    /// all as it was.
    #[test]
    fn what_an_earlier_job_has_kept_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("HPL.out");
        let partial = folder.path().join("HPL.out.partial");
        let open = || Target::open(&Sink::File(path.clone()), "--output").unwrap();
        for i in 1..3 {
            fs::write(&partial, format!("job {i}")).unwrap();
            drop(open());
            assert_eq!(fs::read_to_string(&partial).unwrap(), format!("job {i}"));
            let mut target = open();
            writeln!(target, "new").unwrap();
            let aside = folder.path().join(format!("HPL.out.partial.{i}"));
            let told = if i == 1 {
                target.complete().unwrap()
            } else {
                let (kept, former) = target.keep_partial().unwrap().unwrap();
                assert_eq!(fs::read_to_string(kept).unwrap(), "new\n");
                former
            };
            assert_eq!(told.unwrap().canonicalize().unwrap(), aside.canonicalize().unwrap());
            assert_eq!(fs::read_to_string(aside).unwrap(), format!("job {i}"));
        }
        assert_eq!(
            names(folder.path()),
            ["HPL.out", "HPL.out.partial", "HPL.out.partial.1", "HPL.out.partial.2"]
        );
    }

    /// Who is killed while he rewrites leaves the former content or the new one, and others still find the place taken.
    #[test]
    fn what_is_rewritten_is_never_half_there() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let open = || Target::open(&Sink::File(file("x")), "--json");
        let mut target = open().unwrap();
        fs::write(file("x.partial.next"), "of a job that was killed").unwrap();
        for text in ["first, and longer", "second"] {
            // Who has opened the former reads it to its end.
            let mut former = File::open(file("x.partial")).unwrap();
            let before = fs::read_to_string(file("x.partial")).unwrap();
            assert!(target.rewrite(text.as_bytes()).unwrap());
            assert_eq!(io::read_to_string(&mut former).unwrap(), before);
            assert_eq!(fs::read_to_string(file("x.partial")).unwrap(), text);
            assert!(open().unwrap_err().to_string().contains("another job is writing"));
        }
        // A folder that cannot be written to costs the new content only.
        fs::create_dir(file("x.partial.next")).unwrap();
        assert!(target.rewrite(b"third").is_err());
        assert_eq!(fs::read_to_string(file("x.partial")).unwrap(), "second");
        fs::remove_dir(file("x.partial.next")).unwrap();
        target.restart().unwrap();
        writeln!(target, "last").unwrap();
        target.complete().unwrap();
        assert_eq!(
            (fs::read_to_string(file("x")).unwrap().as_str(), names(folder.path()).len()),
            ("last\n", 1)
        );
        assert!(!Target::Direct(File::create("/dev/null").unwrap()).rewrite(b"x").unwrap());
    }

    /// A report grows in no file but its own.
    #[test]
    fn nothing_is_written_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::write(file("victim"), "precious").unwrap();
        let refused = |why: &str| {
            let error = Target::open(&Sink::File(file("x")), "--output").unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(fs::read_to_string(file("victim")).unwrap(), "precious");
            fs::remove_file(file("x.partial")).unwrap();
        };
        std::os::unix::fs::symlink("victim", file("x.partial")).unwrap();
        refused("x.partial, in which it grows, is a link");
        std::os::unix::fs::symlink("nothing", file("x.partial")).unwrap();
        refused("is a link");
        fs::hard_link(file("victim"), file("x.partial")).unwrap();
        refused("has a second name");
        assert_eq!(names(folder.path()), ["victim"]);
    }

    /// A link stays a link, and what it points to is made.
    #[test]
    fn a_link_to_nothing_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::create_dir(file("scratch")).unwrap();
        std::os::unix::fs::symlink("second", file("first")).unwrap();
        std::os::unix::fs::symlink("scratch/x", file("second")).unwrap();
        assert!(same(&file("first"), &file("scratch/x")) && !same(&file("first"), &file("x")));
        let mut target = Target::open(&Sink::File(file("first")), "--output").unwrap();
        writeln!(target, "new").unwrap();
        target.complete().unwrap();
        assert_eq!(fs::read_to_string(file("scratch/x")).unwrap(), "new\n");
        assert!(fs::symlink_metadata(file("first")).unwrap().is_symlink());
        assert_eq!(names(&file("scratch")), ["x"]);
        std::os::unix::fs::symlink("round", file("round")).unwrap();
        let error = Target::open(&Sink::File(file("round")), "--output").unwrap_err().to_string();
        assert!(error.contains("lead nowhere"), "{error}");
    }

    #[test]
    fn one_file_is_known_by_all_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::write(file("a"), "").unwrap();
        fs::hard_link(file("a"), file("b")).unwrap();
        std::os::unix::fs::symlink("b", file("c")).unwrap();
        assert!(same(&file("a"), &file("c")) && same(&file("new"), &folder.path().join("./new")));
        assert!(!same(&file("a"), &file("new")) && !same(Path::new("/dev/null"), Path::new("/dev/null")));
        assert!(
            replaces(&file("new"), &file("new.partial")) && !replaces(&file("new.partial"), &file("new"))
        );
    }

    #[test]
    fn devices_are_written_straight() {
        let mut target = Target::open(&Sink::File("/dev/null".into()), "--output").unwrap();
        assert!(matches!(target, Target::Direct(_)));
        writeln!(target, "x").unwrap();
        target.complete().unwrap();
    }
}
