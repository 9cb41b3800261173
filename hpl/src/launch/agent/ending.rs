//! Watches the ranks and the launcher, and ends the ranks: they are asked, then get SIGTERM, then SIGKILL.

use std::time::{Duration, Instant};

use fulmen::job::messages::{Complaint, Ending, How, News, Order, ToRank, grace, silence};

use super::super::children::Change;
use super::{Agent, Input};

/// The last words of a rank that has ended are there within this time.
const WORDS: Duration = Duration::from_millis(300);

/// How far the end of the ranks has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Push {
    Asked,
    Terminated,
    Killed,
}

impl Agent {
    /// Looks at every process, and at the launcher.
    pub(super) fn watch(&mut self, now: Instant) {
        let mut news = vec![];
        let asked = self.push.is_some();
        let patience = silence(self.bound());
        for rank in &mut self.ranks {
            while let Some(change) = rank.process.look(rank.keep.is_some()) {
                match change {
                    Change::Stopped => rank.stopped = Some(now),
                    Change::Continued => rank.stopped = None,
                    Change::Ended(how) => {
                        if let Some(guard) = &mut self.guard {
                            guard.leave(rank.process.pid());
                        }
                        if rank.rank == 0 {
                            self.input = Input::None;
                        }
                        // A signal that the agent has not sent is another's doing, whatever it was asked.
                        let asked = match how {
                            How::Signal(libc::SIGSEGV | libc::SIGBUS) => false,
                            How::Signal(_) => rank.signalled,
                            How::Code(_) => asked,
                        };
                        rank.untold = Some((now, how, asked));
                    }
                }
            }
            // What it said last is on its way to this thread: it names the cause. Someone it has started may keep its socket.
            if let Some((_, how, asked)) =
                rank.untold.take_if(|(since, ..)| rank.silent || now - *since > WORDS)
            {
                news.push(News::Ended { rank: rank.rank, how, asked, held: rank.keep.is_some() });
            }
            if let Some(since) = rank.stopped
                && now - since > patience
                && !rank.told
                && !rank.process.ended()
            {
                rank.told = true;
                let words = format!(
                    "was stopped for {:.1} s\n    continue it in time (SIGCONT), or find out who stopped it",
                    (now - since).as_secs_f64()
                );
                news.push(News::Failed {
                    rank: rank.rank,
                    complaint: Complaint { code: 4, follows: false, heard: false, words },
                });
            }
        }
        news.into_iter().for_each(|n| self.tell(n));
        if !self.launcher_gone && now - self.heard.max(self.awake) > patience {
            self.launcher_gone = true;
            let reason = format!("the launcher was silent for {:.1} s", (now - self.heard).as_secs_f64());
            let ending = Ending::new(4, reason);
            // It may only have been stopped, and hear this later.
            self.tell(News::Refused(ending.clone()));
            self.end(ending);
        }
    }

    pub(super) fn end(&mut self, ending: Ending) {
        self.input = Input::None;
        if self.ending.is_none() {
            // What the launcher orders they have heard; of all else they hear here.
            self.pass_down(&Order::End(ending.clone()));
            self.ending = Some((Instant::now(), ending));
        }
    }

    /// Asks, then SIGTERM, then SIGKILL, with a grace between.
    pub(super) fn end_in_order(&mut self, now: Instant) {
        let Some((since, ending)) = &self.ending else { return };
        let waited = now - *since;
        let due = match grace(self.bound()) {
            grace if waited >= 2 * grace => Push::Killed,
            grace if waited >= grace => Push::Terminated,
            _ => Push::Asked,
        };
        if self.push.is_none() {
            for rank in self.ranks.iter().filter(|r| r.joined) {
                let _ = rank.words.send(ToRank::End(ending.clone()));
            }
        }
        if self.push.is_none_or(|p| p < due) {
            self.push(due);
        }
    }

    pub(super) fn push(&mut self, how: Push) {
        self.push = Some(self.push.map_or(how, |p| p.max(how)));
        let mut kept = vec![];
        for rank in self.ranks.iter_mut().filter(|r| !r.process.ended()) {
            let joined = rank.joined && rank.stopped.is_none();
            rank.signalled |= how > Push::Asked || !joined;
            match (how, &rank.keep) {
                // Who cannot be asked is told.
                (Push::Asked, None) if rank.stopped.is_some() => rank.process.signal(libc::SIGKILL),
                (Push::Asked, _) if joined => {}
                (Push::Killed, None) => rank.process.signal(libc::SIGKILL),
                (Push::Killed, Some(why)) => kept.push(News::Kept { rank: rank.rank, why: why.clone() }),
                _ => {
                    rank.process.signal(libc::SIGTERM);
                    rank.process.signal(libc::SIGCONT);
                }
            }
        }
        kept.into_iter().for_each(|n| self.tell(n));
    }
}
