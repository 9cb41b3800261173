//! What the launcher hears of the agents, those below it and those below them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, SyncSender};
use std::time::{Duration, Instant};

use fulmen::job::messages::{News, Stream, Up};

use super::input::Credit;
use super::link::Hear;

/// Whoever waited so long for our own output may have been held up by it.
const HELD_UP: Duration = Duration::from_millis(100);

/// What comes from agents.
#[derive(Debug)]
pub enum Heard {
    /// One said something.
    News(usize, News),
    /// The connection of one below the launcher has ended: what its child said last, and how it ended.
    Gone(usize, Vec<String>, String),
    /// What ranks write cannot be shown: why.
    Mute(String),
}

/// A piece of a rank's output.
pub type Piece = (u32, Stream, Vec<u8>);

/// When each agent was last heard.
#[derive(Clone)]
pub struct Times {
    base: Instant,
    /// Milliseconds after `base`, by host.
    heard: Arc<Vec<AtomicU64>>,
}

impl Times {
    /// Of so many hosts, from now on.
    pub fn of(hosts: usize) -> Times {
        Times { base: Instant::now(), heard: Arc::new((0..hosts).map(|_| AtomicU64::new(0)).collect()) }
    }

    /// When this one was last heard.
    pub fn heard(&self, host: usize) -> Instant {
        self.base + Duration::from_millis(self.heard[host].load(Ordering::Relaxed))
    }

    fn note(&self, host: u32) {
        self.heard[host as usize].store(self.base.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}

/// Where what is heard goes.
#[derive(Clone)]
pub struct Sinks {
    /// News.
    pub news: Sender<Heard>,
    /// Output of ranks; waits when the user's terminal does.
    pub output: SyncSender<Piece>,
    /// What rank 0 has taken of its input.
    pub credit: Credit,
    /// Signs of life.
    pub times: Times,
}

/// Hears one connection.
pub struct Ear {
    hosts: Vec<u32>,
    sinks: Sinks,
}

impl Ear {
    /// These agents speak here, the first of them directly.
    pub fn new(hosts: &[u32], sinks: &Sinks) -> Ear {
        Ear { hosts: hosts.to_vec(), sinks: sinks.clone() }
    }
}

impl Hear for Ear {
    fn take(&mut self, up: Up) -> bool {
        // Nobody speaks for others' hosts.
        if !self.hosts.contains(&up.host) {
            return false;
        }
        self.sinks.times.note(up.host);
        match up.news {
            News::Output { rank, stream, bytes } => {
                let since = Instant::now();
                let sent = self.sinks.output.send((rank, stream, bytes)).is_ok();
                if since.elapsed() > HELD_UP {
                    self.hosts.iter().for_each(|host| self.sinks.times.note(*host));
                }
                sent
            }
            News::Taken(bytes) => {
                self.sinks.credit.give_back(bytes as usize);
                true
            }
            news => self.sinks.news.send(Heard::News(up.host as usize, news)).is_ok(),
        }
    }

    fn gone(self, said: Vec<String>, status: String) {
        let _ = self.sinks.news.send(Heard::Gone(self.hosts[0] as usize, said, status));
    }
}
