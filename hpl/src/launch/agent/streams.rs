//! The threads between an agent and a rank.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, Sender};

use fulmen::job::messages::{self, Complaint, Frames, FromRank, GREETING, News, ToRank, Up};

use super::super::outbox::Outbox;
use super::{Event, expect_greeting};

pub fn feed(mut to: ChildStdin, chunks: &Receiver<Vec<u8>>, out: &Outbox, host: u32) {
    let mut open = true;
    for chunk in chunks {
        open = open && to.write_all(&chunk).is_ok();
        out.say(&Up { host, news: News::Taken(chunk.len() as u32) });
    }
}

pub fn hear_rank(index: usize, mut from: UnixStream, events: &Sender<Event>) {
    let mut frames = Frames::default();
    let result = expect_greeting(&mut from, &mut frames).and_then(|()| {
        while let Some(word) = messages::read(&mut from, &mut frames)? {
            if events.send(Event::Rank(index, word)).is_err() {
                break;
            }
        }
        Ok(())
    });
    // A rank that does not use the library says nothing; its end is found by waiting for it.
    if let Err(e) = result
        && e.kind() == io::ErrorKind::InvalidData
    {
        let words = format!(
            "it speaks to its agent in another tongue: {e}\n    build program and launcher from the same source"
        );
        let complaint = Complaint { code: 2, follows: false, heard: false, words };
        let _ = events.send(Event::Rank(index, FromRank::Failed(complaint)));
    }
    let _ = events.send(Event::Silent(index));
}

pub fn tell_rank(mut to: UnixStream, welcome: &ToRank, words: &Receiver<ToRank>) {
    let greeted = to.write_all(GREETING.as_bytes()).and_then(|()| messages::write(&mut to, welcome));
    if greeted.is_err() {
        return;
    }
    let mut waiting = VecDeque::new();
    while let Ok(word) = words.recv() {
        waiting.push_back(word);
        waiting.extend(words.try_iter());
        // Of many beats one is enough.
        let last = waiting.len() - 1;
        for (i, word) in waiting.drain(..).enumerate() {
            if (word != ToRank::Beat || i == last) && messages::write(&mut to, &word).is_err() {
                return;
            }
        }
    }
}
