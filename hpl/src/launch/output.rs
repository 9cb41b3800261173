//! What the ranks write: to the launcher's own output by whole lines, to files, or nowhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fulmen::job::messages::Stream;

use super::cli::Which;

/// A line longer than this is shown in parts.
const LONGEST_LINE: usize = 1 << 16;

/// See the module. `O` and `E` are where standard output and error go.
pub struct Printer<O, E> {
    out: O,
    err: E,
    tag: bool,
    which: Which,
    /// On a terminal a line that is not finished is shown too, when nothing else comes.
    live: bool,
    folder: Option<PathBuf>,
    files: BTreeMap<(u32, bool), File>,
    lines: BTreeMap<(u32, bool), Vec<u8>>,
    /// Whose line is begun on the terminal.
    begun: Option<(u32, bool)>,
}

impl<O: Write, E: Write> Printer<O, E> {
    /// Shows what `which` says, with tags if `tag`; `live`: unfinished lines too.
    pub fn new(out: O, err: E, tag: bool, which: Which, live: bool) -> Self {
        let (files, lines) = (BTreeMap::new(), BTreeMap::new());
        Printer { out, err, tag, which, live, folder: None, files, lines, begun: None }
    }

    /// Writes each rank's streams to files in this folder too.
    ///
    /// # Errors
    /// When the folder or a file in it cannot be made: found before any work.
    pub fn into_folder(mut self, folder: PathBuf, ranks: usize) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        for rank in 0..ranks as u32 {
            for (err, end) in [(false, "out"), (true, "err")] {
                self.files.insert((rank, err), File::create(folder.join(format!("rank.{rank}.{end}")))?);
            }
        }
        self.folder = Some(folder);
        Ok(self)
    }

    /// A rank wrote this.
    ///
    /// # Errors
    /// When it cannot be passed on.
    pub fn take(&mut self, rank: u32, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        let key = (rank, stream == Stream::Err);
        if let Some(file) = self.files.get_mut(&key) {
            let folder = self.folder.as_deref().unwrap_or(Path::new("")).display();
            let end = if key.1 { "err" } else { "out" };
            let named = |e: io::Error| io::Error::new(e.kind(), format!("{folder}/rank.{rank}.{end}: {e}"));
            file.write_all(bytes).map_err(named)?;
        }
        match self.which {
            Which::None => return Ok(()),
            Which::Rank0 if rank > 0 => return Ok(()),
            _ => {}
        }
        let line = self.lines.entry(key).or_default();
        line.extend_from_slice(bytes);
        let whole = match line.iter().rposition(|b| *b == b'\n') {
            Some(end) => end + 1,
            None if line.len() > LONGEST_LINE => line.len(),
            None => return Ok(()),
        };
        let rest = line.split_off(whole);
        let lines = std::mem::replace(line, rest);
        self.show(key, &lines)
    }

    fn show(&mut self, key: (u32, bool), bytes: &[u8]) -> io::Result<()> {
        let mut text = vec![];
        if self.begun.is_some_and(|k| k != key) {
            text.push(b'\n');
        }
        let continues = self.begun == Some(key);
        if self.tag {
            for (i, line) in bytes.split_inclusive(|b| *b == b'\n').enumerate() {
                if i > 0 || !continues {
                    text.extend(format!("[{}] ", key.0).bytes());
                }
                text.extend_from_slice(line);
            }
        } else {
            text.extend_from_slice(bytes);
        }
        self.begun = (!bytes.ends_with(b"\n")).then_some(key);
        match key.1 {
            false => self.out.write_all(&text).and_then(|()| self.out.flush()),
            true => self.err.write_all(&text).and_then(|()| self.err.flush()),
        }
    }

    /// Nothing has come for a while.
    ///
    /// # Errors
    /// When it cannot be shown.
    pub fn idle(&mut self) -> io::Result<()> {
        if !self.live {
            return Ok(());
        }
        // Nobody's line is broken for another's.
        let key = match self.begun {
            Some(key) => Some(key).filter(|k| self.lines.get(k).is_some_and(|l| !l.is_empty())),
            None => self.lines.iter().find(|(_, l)| !l.is_empty()).map(|(k, _)| *k),
        };
        match key.and_then(|key| self.lines.get_mut(&key).map(|l| (key, std::mem::take(l)))) {
            Some((key, line)) => self.show(key, &line),
            None => Ok(()),
        }
    }

    /// No more will come: what is left is shown.
    ///
    /// # Errors
    /// When it cannot be shown.
    pub fn end(&mut self) -> io::Result<()> {
        let left: Vec<_> =
            std::mem::take(&mut self.lines).into_iter().filter(|(_, l)| !l.is_empty()).collect();
        let last = left.len();
        for (i, (key, mut line)) in left.into_iter().enumerate() {
            // Bytes are added only between two ranks' lines.
            if i + 1 < last {
                line.push(b'\n');
            }
            self.show(key, &line)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(
        tag: bool,
        which: Which,
        live: bool,
        work: impl FnOnce(&mut Printer<&mut Vec<u8>, &mut Vec<u8>>),
    ) -> (String, String) {
        let (mut out, mut err) = (vec![], vec![]);
        let mut printer = Printer::new(&mut out, &mut err, tag, which, live);
        work(&mut printer);
        printer.end().unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn lines_stay_whole() {
        let (out, err) = shown(false, Which::All, false, |p| {
            p.take(0, Stream::Out, b"a").unwrap();
            p.take(1, Stream::Out, b"one\ntw").unwrap();
            p.take(1, Stream::Err, b"oops\n").unwrap();
            p.idle().unwrap();
            p.take(0, Stream::Out, b"b\n").unwrap();
            p.take(1, Stream::Out, b"o").unwrap();
        });
        assert_eq!((out.as_str(), err.as_str()), ("one\nab\ntwo", "oops\n"));
    }

    #[test]
    fn tags_and_choice() {
        let (out, _) = shown(true, Which::All, false, |p| {
            p.take(12, Stream::Out, b"x\ny\n").unwrap();
            p.take(3, Stream::Out, b"z").unwrap();
        });
        assert_eq!(out, "[12] x\n[12] y\n[3] z");
        let (out, _) = shown(false, Which::Rank0, false, |p| {
            p.take(1, Stream::Out, b"no\n").unwrap();
            p.take(0, Stream::Out, b"yes\n").unwrap();
        });
        assert_eq!(out, "yes\n");
    }

    #[test]
    fn on_a_terminal_a_prompt_is_seen() {
        let (out, _) = shown(true, Which::All, true, |p| {
            p.take(0, Stream::Out, b"name? ").unwrap();
            p.idle().unwrap();
            p.take(0, Stream::Out, b"thanks\n").unwrap();
            p.take(0, Stream::Out, b"50 %").unwrap();
            p.idle().unwrap();
            p.take(1, Stream::Out, b"other\n").unwrap();
        });
        assert_eq!(out, "[0] name? thanks\n[0] 50 %\n[1] other\n");
    }

    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let (mut out, mut err) = (vec![], vec![]);
        let mut p = Printer::new(&mut out, &mut err, true, Which::None, false)
            .into_folder(folder.path().join("new"), 2)
            .unwrap();
        p.take(1, Stream::Out, b"x").unwrap();
        p.take(1, Stream::Err, b"y\n").unwrap();
        p.end().unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join("new").join(name)).unwrap();
        assert_eq!(
            (read("rank.1.out"), read("rank.1.err"), read("rank.0.out")),
            ("x".into(), "y\n".into(), "".into())
        );
        assert!(out.is_empty() && err.is_empty());
    }
}
