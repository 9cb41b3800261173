//! The file in which a process that tries devices notes its steps, and what these are as facts.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use fulmen::fabric::verbs::Step as At;
use fulmen::fabric::verbs::probe::{Note, Outcome as How};
use serde::Serialize;

use super::facts::{Act, Outcome, Step, Wrong};

/// The file, in the folder for such; it goes when this does.
pub struct Sheet(PathBuf);

impl Sheet {
    /// A new one, nobody else's, and not what a link leads to.
    pub fn new(name: &str) -> io::Result<Sheet> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (process, n) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("hpl-run-{name}-{process}-{n}"));
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        OpenOptions::new().write(true).create_new(true).open(&path).map_err(named)?;
        Ok(Sheet(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// What is there by now.
    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // else it is in a folder that the system empties
    }
}

/// Adds a line to the file at `path`.
pub fn add(path: &Path, line: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(line)? + "\n";
    OpenOptions::new().append(true).open(path)?.write_all(text.as_bytes())
}

/// A step that is over; `None` also where how it ended is no failure, or the other end's affair.
pub fn step(note: &Note) -> Option<Step> {
    Some(Step { act: act(note)?, outcome: told_of(note, note.outcome?)? })
}

/// The step in which a process got stuck, or that ended it: the one that has begun. Who was stuck may have come to its end
/// when it was asked to end itself.
pub fn last(notes: &[Note], outcome: Outcome) -> Step {
    let is_it = |note: &&Note| note.outcome.is_none() || matches!(outcome, Outcome::Hung(_));
    Step { act: notes.last().filter(is_it).and_then(act).unwrap_or(Act::Open), outcome }
}

/// What was tried; `None` for what is no step with a device.
fn act(note: &Note) -> Option<Act> {
    Some(match note.step {
        At::Open => Act::Open,
        At::Port => Act::QueryPort,
        At::AllocPd => Act::AllocDomain,
        At::Register => Act::Register(u32::try_from(note.number).unwrap_or(u32::MAX)),
        At::CreateCq => Act::CreateQueue,
        At::CreateQp => Act::CreateUc,
        At::CreateRc => Act::CreateOther,
        At::Init => Act::Init,
        At::ReadyToReceive => Act::ReadyToReceive,
        At::ReadyToSend => Act::ReadyToSend,
        At::PostReceive => Act::PostReceive,
        At::PostSend => Act::PostSend,
        At::Completion | At::Poll => Act::Complete,
        At::WarmUp => Act::WarmUp,
        At::Several => Act::Several,
        At::RoundTrip => Act::RoundTrip,
        At::Stream => Act::Stream,
        At::Write => Act::Write,
        At::Gone => Act::Gone,
        At::Load | At::List | At::Address => return None,
    })
}

fn told_of(note: &Note, how: How) -> Option<Outcome> {
    let is_status = matches!(note.step, At::Completion | At::Several | At::RoundTrip | At::Stream);
    Some(match how {
        How::Done => Outcome::Done,
        How::Refused(status) if is_status => Outcome::Status(status),
        How::Refused(number) => Outcome::Errno(number),
        How::Silent => Outcome::Silent,
        How::Zeros => Outcome::Wrong(Wrong::Zeros),
        How::Garbage => Outcome::Wrong(Wrong::Garbage),
        How::Answered(_) | How::Left => return None,
    })
}
