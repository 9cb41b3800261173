//! What waits to be written to a peer: words of the job first, and bulk (programs' output and input) only as much as
//! fits, so that whoever makes it is held up and not this process's memory filled.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fulmen::job::messages::{GREETING, frame};
use serde::Serialize;

/// Bulk that may wait.
const ROOM: usize = 1 << 20;

#[derive(Default)]
struct Waiting {
    words: VecDeque<Vec<u8>>,
    bulk: VecDeque<Vec<u8>>,
    bulk_bytes: usize,
    /// Nothing will be added.
    closed: bool,
    /// Nothing will be taken: all was written, or cannot be.
    done: bool,
}

/// A handle; clones lead to the same box.
#[derive(Clone, Default)]
pub struct Outbox {
    shared: Arc<(Mutex<Waiting>, Condvar)>,
}

impl Outbox {
    /// Writes what comes to `to`, greeting first, on a thread of its own, until [`Outbox::close`] or an error.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn start(name: &str, mut to: impl Write + Send + 'static) -> std::io::Result<Outbox> {
        let outbox = Outbox::default();
        let mine = outbox.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            // A peer that does not listen any more is found by the reader of its stream.
            let mut written = to.write_all(GREETING.as_bytes()).and_then(|()| to.flush());
            while written.is_ok() {
                let Some(bytes) = mine.take() else { break };
                written = to.write_all(&bytes).and_then(|()| to.flush());
            }
            drop(to);
            mine.lock().done = true;
            mine.shared.1.notify_all();
        })?;
        Ok(outbox)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Vec<u8>> {
        let mut waiting = self.lock();
        loop {
            if let Some(bytes) = waiting.words.pop_front() {
                return Some(bytes);
            }
            if let Some(bytes) = waiting.bulk.pop_front() {
                waiting.bulk_bytes -= bytes.len();
                self.shared.1.notify_all();
                return Some(bytes);
            }
            if waiting.closed {
                return None;
            }
            waiting = self.shared.1.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A word of the job. Never waits.
    pub fn say(&self, message: &impl Serialize) {
        let mut waiting = self.lock();
        // Our own messages are short enough to be framed.
        if let Ok(bytes) = frame(message)
            && !waiting.done
        {
            waiting.words.push_back(bytes);
            self.shared.1.notify_all();
        }
    }

    /// Bulk. Waits until there is room, or the peer is gone: then `false`.
    pub fn send(&self, message: &impl Serialize) -> bool {
        let Ok(bytes) = frame(message) else { return true };
        let mut waiting = self.lock();
        while waiting.bulk_bytes > ROOM && !waiting.done {
            waiting = self.shared.1.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        if waiting.done {
            return false;
        }
        waiting.bulk_bytes += bytes.len();
        waiting.bulk.push_back(bytes);
        self.shared.1.notify_all();
        true
    }

    /// Nothing more will come: the stream is closed when all is written.
    pub fn close(&self) {
        self.lock().closed = true;
        self.shared.1.notify_all();
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        let waiting = self.lock();
        waiting.words.is_empty() && waiting.bulk.is_empty()
    }

    /// Closes, and waits for the last byte, but not longer than `patience`; whether it was written.
    pub fn finish(&self, patience: Duration) -> bool {
        self.close();
        let until = Instant::now() + patience;
        let mut waiting = self.lock();
        while !waiting.done {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            waiting = self.shared.1.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmen::job::messages::{Frames, Order};
    use std::sync::mpsc;

    /// Takes one write at a time, when it is let.
    struct Slow(mpsc::Receiver<()>, Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.recv().map_err(std::io::Error::other)?;
            self.1.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn words_overtake_bulk_and_bulk_waits_for_room() {
        let (go, let_go) = mpsc::channel();
        let written = Arc::new(Mutex::new(vec![]));
        let outbox = Outbox::start("test", Slow(let_go, Arc::clone(&written))).unwrap();
        let chunk = Order::Input(vec![1; ROOM / 2]);
        for _ in 0..2 {
            assert!(outbox.send(&chunk));
        }
        outbox.say(&Order::Beat);
        let more = outbox.clone();
        let waits = std::thread::spawn(move || more.send(&Order::InputEnd));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waits.is_finished());
        for _ in 0..5 {
            go.send(()).unwrap();
        }
        assert!(waits.join().unwrap());
        outbox.finish(Duration::from_secs(10));
        let bytes = written.lock().unwrap().clone();
        let mut frames = Frames::default();
        frames.push(bytes.strip_prefix(GREETING.as_bytes()).unwrap());
        assert_eq!(frames.next::<Order>().unwrap(), Some(Order::Beat));
        for _ in 0..2 {
            assert!(matches!(frames.next::<Order>().unwrap(), Some(Order::Input(_))));
        }
        assert_eq!(frames.next::<Order>().unwrap(), Some(Order::InputEnd));
    }

    #[test]
    fn a_peer_that_is_gone_holds_nobody_up() {
        let (go, let_go) = mpsc::channel();
        let outbox = Outbox::start("test", Slow(let_go, Arc::default())).unwrap();
        drop(go);
        while outbox.send(&Order::Input(vec![1; ROOM])) {}
        outbox.finish(Duration::from_secs(10));
    }
}
