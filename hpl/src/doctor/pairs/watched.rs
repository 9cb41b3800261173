//! A process that tries one end of a cable, as its parent sees it: its words, its notes, and its end.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::probe::{Note, Pair};
use serde::{Deserialize, Serialize};

use super::child::{self, Line, Order};
use crate::doctor::notes::{self, Sheet};

/// How long a process may say nothing; one that is stuck in a driver costs this.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a process gets to end when it has said its last.
const GRACE: Duration = Duration::from_secs(3);

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ending {
    /// By itself.
    Done,
    /// It could not be started, could not write down what came of it, or ended with a failure of its own.
    Failed,
    /// By this signal.
    Died(i32),
    /// Not at all: it said nothing for so many seconds, and was left alone.
    Hung(u64),
}

/// What it says next.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Word {
    /// A word for the other end.
    Is(Vec<u8>),
    /// No more.
    Over(Ending),
    /// Nothing: this rank tries nothing now.
    None,
}

/// What a process has written down.
#[derive(Default)]
pub struct Notes {
    pub steps: Vec<Note>,
    pub found: Option<Pair>,
    pub gave: Option<String>,
}

/// See the module.
pub struct Watched {
    child: Option<Child>,
    to: Option<ChildStdin>,
    words: Receiver<Vec<u8>>,
    over: Option<Ending>,
    notes: Option<Sheet>,
}

impl Watched {
    /// Starts it. One that cannot be started is over.
    pub fn start(order: &Order) -> Watched {
        let (word, words) = mpsc::channel();
        let started = Sheet::new("pair").and_then(|notes| {
            notes::add(notes.path(), order)?;
            let child = Command::new(std::env::current_exe()?)
                .args(["doctor", "--pair"])
                .arg(notes.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                // Who kills this process's group hard does not hit what holds verbs objects.
                .process_group(0)
                .spawn()?;
            Ok((child, notes))
        });
        let Ok((mut child, notes)) = started else {
            return Watched { child: None, to: None, words, over: Some(Ending::Failed), notes: None };
        };
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let reader = std::thread::Builder::new().name("doctor-pair".into());
        // Without a thread there are no words: it is then over at once.
        let _ = reader.spawn(move || {
            let Some(mut from) = from else { return };
            while let Ok(bytes) = child::receive(&mut from) {
                if word.send(bytes).is_err() {
                    return;
                }
            }
        });
        Watched { child: Some(child), to, words, over: None, notes: Some(notes) }
    }

    /// What it says next; waits for that, but not for ever.
    pub fn next(&mut self) -> Word {
        if let Some(ending) = self.over {
            return Word::Over(ending);
        }
        let ending = match self.words.recv_timeout(PATIENCE) {
            Ok(word) => return Word::Is(word),
            Err(RecvTimeoutError::Timeout) => self.give_up(),
            Err(RecvTimeoutError::Disconnected) => self.ended(),
        };
        self.over = Some(ending);
        Word::Over(ending)
    }

    /// Hands it a word of the other end.
    pub fn hear(&mut self, word: &[u8]) {
        if let Some(to) = &mut self.to
            && child::send(to, word).is_err()
        {
            self.to = None; // it has ended: its next word tells how
        }
    }

    /// Tells it that the other end is gone.
    pub fn hang_up(&mut self) {
        self.to = None;
    }

    /// How it ended, and what it had written down until then.
    pub fn end(mut self) -> (Ending, Notes) {
        self.hang_up();
        let ending = self.over.unwrap_or_else(|| self.ended());
        let text = self.notes.as_ref().map_or(String::new(), Sheet::text);
        let mut notes = Notes::default();
        for line in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
            match line {
                Line::Step(note) => notes.steps.push(note),
                Line::Found(pair) => notes.found = Some(*pair),
                Line::Gave(words) => notes.gave = Some(words),
            }
        }
        (ending, notes)
    }

    /// Its output has ended: so has it, or it will soon.
    fn ended(&mut self) -> Ending {
        let until = Instant::now() + GRACE;
        let Some(child) = &mut self.child else { return Ending::Failed };
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ending::Done,
                Ok(Some(status)) => return status.signal().map_or(Ending::Failed, Ending::Died),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => return self.give_up(),
                Err(_) => return Ending::Failed,
            }
        }
    }

    /// It hears nothing more, so that it ends in order after the step that it is in, and is left alone: killing a process
    /// that holds verbs objects wedges Apple's driver for good.
    fn give_up(&mut self) -> Ending {
        self.hang_up();
        Ending::Hung(PATIENCE.as_secs())
    }
}
