//! The process that tries a cable from one end: it may get stuck or crash in a driver. It meets the process at the other
//! end by its standard input and output, which its parents join.

use std::io::{self, Read, Write};
use std::path::Path;

use fulmen::fabric::rendezvous::Rendezvous;
use fulmen::fabric::verbs::Library;
use fulmen::fabric::verbs::probe::{self, Known, Note, Pair};
use fulmen::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::doctor::notes;
use crate::exit::Status;
use crate::interrupt;

/// What is to be tried: the first line of the file of notes.
#[derive(Serialize, Deserialize)]
pub struct Order {
    pub device: String,
    /// Which end this is, 0 or 1.
    pub end: usize,
    pub known: Option<Known>,
}

/// A line that the process adds.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    Step(Note),
    Found(Box<Pair>),
    /// It ended with this error.
    Gave(String),
}

/// Words of both ends: each goes out by standard output, and the other's comes in.
struct Pipes {
    end: usize,
}

/// A longer word is none of ours.
const LONGEST: usize = 1 << 20;

/// A word with its length before it.
pub fn send(to: &mut impl Write, word: &[u8]) -> io::Result<()> {
    to.write_all(&(word.len() as u32).to_le_bytes())?;
    to.write_all(word)?;
    to.flush()
}

/// The next word; an error at the end of the stream.
pub fn receive(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a word of {length} bytes")));
    }
    let mut word = vec![0; length];
    from.read_exact(&mut word)?;
    Ok(word)
}

impl Rendezvous for Pipes {
    fn rank(&self) -> usize {
        self.end
    }

    fn size(&self) -> usize {
        2
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        // Both ends meet after each step: one that is asked to end gives back here what it holds.
        if interrupt::count() > 0 {
            return Err(Error::Interrupted);
        }
        let gone = |_| Error::Unreachable {
            what: "the process at the other end of the cable".into(),
            remedy: "see what is told of that end".into(),
        };
        send(&mut io::stdout().lock(), mine).map_err(gone)?;
        let theirs = receive(&mut io::stdin().lock()).map_err(gone)?;
        Ok(if self.end == 0 { vec![mine.to_vec(), theirs] } else { vec![theirs, mine.to_vec()] })
    }
}

/// The process.
pub fn run(notes: &Path) -> Status {
    let Ok(text) = std::fs::read_to_string(notes) else { return Status::Usage };
    let Ok(Order { device, end, known }) = serde_json::from_str(&text) else { return Status::Usage };
    let Ok(library) = Library::find() else { return Status::Resources };
    // A step that cannot be noted is missed by the reader; what became of it all is not.
    let mut told = |note| drop(notes::add(notes, &Line::Step(note)));
    let line = match probe::pair(&mut Pipes { end }, library, &device, known, &mut told) {
        Ok(pair) => Line::Found(Box::new(pair)),
        Err(error) => Line::Gave(error.to_string()),
    };
    match notes::add(notes, &line) {
        Ok(()) => Status::Passed,
        Err(_) => Status::Resources,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_bounds() {
        let mut bytes = Vec::new();
        for word in [&b"one"[..], b"", b"three"] {
            send(&mut bytes, word).unwrap();
        }
        let mut from = &bytes[..];
        assert_eq!(receive(&mut from).unwrap(), b"one");
        assert_eq!(receive(&mut from).unwrap(), b"");
        assert_eq!(receive(&mut from).unwrap(), b"three");
        assert!(receive(&mut from).is_err(), "the end");
        assert!(receive(&mut &[1, 2][..]).is_err(), "half a length");
        assert!(receive(&mut &[255, 255, 255, 255, 0][..]).is_err(), "no word of ours");
        assert!(receive(&mut &[4, 0, 0, 0, 1][..]).is_err(), "half a word");
    }
}
