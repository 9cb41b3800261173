//! Agents that this one has started for the launcher: what the launcher orders goes down to them, what they say goes up.

use std::sync::mpsc::Sender;
use std::time::Instant;

use fulmen::job::messages::{Ending, News, Order, Up, grace, silence};

use super::super::branch;
use super::super::link::Hear;
use super::super::outbox::Outbox;
use super::super::ssh::{self, Reach};
use super::{Agent, Event};

/// Passes on what is said on one connection.
struct Pass {
    hosts: Vec<u32>,
    up: Outbox,
    events: Sender<Event>,
}

impl Hear for Pass {
    fn take(&mut self, up: Up) -> bool {
        match self.hosts.contains(&up.host) {
            // When the launcher is slow, so are the ranks that write. When it is gone, nobody's write must fail for that.
            true if matches!(up.news, News::Output { .. }) => drop(self.up.send(&up)),
            true => self.up.say(&up),
            false => return false,
        }
        true
    }

    fn gone(self, said: Vec<String>, status: String) {
        let _ = self.events.send(Event::BranchGone(self.hosts[0], said, status));
    }
}

impl Agent {
    /// Starts the agents below.
    pub(super) fn grow(&mut self) -> Result<(), Ending> {
        let (out, events) = (&self.out, &self.events);
        let hear = |hosts: &[u32]| Pass { hosts: hosts.to_vec(), up: out.clone(), events: events.clone() };
        let grown = branch::grow(&self.start, hear);
        self.branches = grown.map_err(|e| Ending::new(e.exit_code(), e.to_string()))?;
        if let Some(guard) = &mut self.guard {
            self.branches.iter().for_each(|branch| guard.watch(branch.link.pid()));
        }
        Ok(())
    }

    /// How the agents below are reached.
    fn reach(&self) -> Reach {
        let ssh = || Reach::new(None, self.bound());
        Reach::from_words(&self.start.below.ssh).unwrap_or_else(ssh)
    }

    /// To all agents below.
    pub(super) fn pass_down(&self, order: &Order) {
        self.branches.iter().for_each(|branch| branch.link.outbox.say(order));
    }

    /// The connection to an agent below has ended.
    pub(super) fn branch_gone(&mut self, head: u32, said: &[String], status: &str) {
        let Some(at) = self.branches.iter().position(|branch| branch.head() == head) else { return };
        let branch = self.branches.remove(at);
        if let Some(guard) = &mut self.guard {
            guard.leave(branch.link.pid());
        }
        let own = &self.start.place.name;
        let words = self.reach().explain(said, status, &branch.name);
        let words = format!("{words}\nssh was called on {own}, for there are many hosts (--fan-out)");
        self.out.say(&Up { host: head, news: News::Lost { words, well: status == ssh::WELL } });
    }

    /// Connections that do not end by themselves. The launcher watches the agents themselves.
    pub(super) fn watch_branches(&mut self, now: Instant) {
        let abandoned = |branch: &mut branch::Branch| branch.is_abandoned(now).then(|| branch.head());
        let heads: Vec<u32> = self.branches.iter_mut().filter_map(abandoned).collect();
        heads.into_iter().for_each(|head| self.branch_gone(head, &[], "ssh has ended, or was killed"));
        // The agents there have killed their ranks by then.
        if let Some((since, ending)) = &self.ending {
            let late = ending.code != 0 && now - *since > 3 * grace(self.bound());
            let silent = |branch: &&branch::Branch| {
                now.saturating_duration_since(branch.link.heard().max(self.awake)) > silence(self.bound())
            };
            self.branches.iter().filter(|branch| late || silent(branch)).for_each(|branch| branch.link.cut());
        }
    }
}
