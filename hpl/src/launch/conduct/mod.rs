//! The launcher's decisions, without I/O and without a clock: what agents say and time go in, orders and a verdict
//! come out.
//!
//! ```text
//! Checking ──all ready──▶ Running ──all ranks ended──▶ Leaving ──all agents gone──▶ Over
//!     │                      │                                                       ▲
//!     └──────────────────────┴── a failure, a signal ──▶ Ending ──all agents gone────┤
//!                                                          └──half the bound: Kill; a little later: cut ──┘
//! ```

mod evidence;
mod rendezvous;
#[cfg(test)]
mod tests;

pub use evidence::Verdict;

use std::time::{Duration, Instant};

use fulmen::job::messages::{Complaint, Ending, How, News, Order, grace, silence};

use fulmen::fabric::shm::signal_name;

use self::evidence::{Evidence, Weight};
use self::rendezvous::Rendezvous;

/// When others have waited so long for a rank at the rendezvous, it is named.
const LATE: Duration = Duration::from_secs(5);

/// What the launcher does next.
#[derive(Clone, PartialEq, Debug)]
pub enum Act {
    /// Give this order to all agents that are there.
    TellAll(Order),
    /// End the connection to this agent by force: it does not answer.
    Cut(usize),
    /// Tell the user.
    Say(String),
}

/// What one host is to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostPlan {
    /// Its name.
    pub name: String,
    /// Its ranks.
    pub ranks: Vec<usize>,
    /// The host whose agent has started this one's, where it was not the launcher.
    pub above: Option<usize>,
}

/// Time limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Agents must be ready so long after the start.
    pub start: Duration,
    /// The ranks' rendezvous must be over so long after the first came.
    pub meet: Duration,
    /// A failed job must be over so long after the failure, its discovery included.
    pub bound: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Checking,
    Running,
    Leaving,
    Ending,
}

#[derive(Debug)]
struct Host {
    plan: HostPlan,
    ready: bool,
    /// It has said why it cannot take part.
    refused: bool,
    gone: bool,
    pid: Option<u32>,
}

#[derive(Debug, Default)]
struct Rank {
    host: usize,
    pid: Option<u32>,
    complaint: Option<Complaint>,
    ended: bool,
    /// It ended because it was asked to, or by itself after the failure.
    kept: Option<String>,
}

/// See the module.
#[derive(Debug)]
pub struct Conduct {
    limits: Limits,
    phase: Phase,
    began: Instant,
    hosts: Vec<Host>,
    ranks: Vec<Rank>,
    rendezvous: Rendezvous,
    evidence: Evidence,
    /// When the first failure was known.
    failed: Option<Instant>,
    /// What the ranks were told to end with.
    reason: Option<String>,
    killed: bool,
    signals: u32,
    ticked: Instant,
    /// It was said who is late at the rendezvous.
    told_late: bool,
    /// Nobody's silence counts from before: the launcher itself was stopped.
    awake: Instant,
}

impl Conduct {
    /// A job about to start.
    pub fn new(plans: Vec<HostPlan>, limits: Limits, now: Instant) -> Conduct {
        let size = plans.iter().map(|p| p.ranks.len()).sum();
        let mut ranks: Vec<Rank> = (0..size).map(|_| Rank::default()).collect();
        for (host, plan) in plans.iter().enumerate() {
            plan.ranks.iter().for_each(|&rank| ranks[rank].host = host);
        }
        let hosts = plans
            .into_iter()
            .map(|plan| Host { plan, ready: false, refused: false, gone: false, pid: None })
            .collect();
        Conduct {
            limits,
            phase: Phase::Checking,
            began: now,
            hosts,
            ranks,
            rendezvous: Rendezvous::new(size),
            evidence: Evidence::default(),
            failed: None,
            reason: None,
            killed: false,
            signals: 0,
            ticked: now,
            told_late: false,
            awake: now,
        }
    }

    /// Whether every agent is gone, and with it all it has started.
    pub fn is_over(&self) -> bool {
        self.hosts.iter().all(|h| h.gone)
    }

    /// Whether words are those that ranks were told to end with.
    fn is_echo(&self, words: &str) -> bool {
        self.reason.as_deref().and_then(|r| r.lines().next()).is_some_and(|line| words.contains(line))
    }

    /// Whether an agent is at work.
    fn is_there(&self, host: usize) -> bool {
        self.hosts[host].ready && !self.hosts[host].gone
    }

    fn name(&self, rank: usize) -> String {
        let r = &self.ranks[rank];
        let pid = r.pid.map_or(String::new(), |pid| format!(", pid {pid}"));
        format!("rank {rank} ({}{pid})", self.hosts[r.host].plan.name)
    }

    /// Some of these ranks, by name.
    fn names(&self, ranks: &[usize]) -> String {
        let who = ranks.iter().take(4).map(|&r| self.name(r)).collect::<Vec<_>>().join(", ");
        match ranks.len() {
            n if n > 4 => format!("{who} and {} more", n - 4),
            _ => who,
        }
    }

    fn fail(&mut self, weight: Weight, code: u8, words: String, now: Instant) -> Vec<Act> {
        let reason = words.clone();
        self.evidence.add(weight, code, words);
        if self.failed.is_some() {
            return vec![];
        }
        self.failed = Some(now);
        self.reason = Some(reason.clone());
        self.phase = Phase::Ending;
        let is_lost = |rank: &usize| weight == Weight::HostLost && self.hosts[self.ranks[*rank].host].gone;
        let lost = (0..self.ranks.len()).filter(is_lost).map(|rank| rank as u32).collect();
        vec![Act::TellAll(Order::End(Ending { code, reason, lost }))]
    }

    /// An agent said something. Output and the like never come here.
    pub fn hear(&mut self, host: usize, news: News, now: Instant) -> Vec<Act> {
        // An agent speaks for its own ranks only.
        let rank_of = |rank: u32| {
            let rank = rank as usize;
            self.ranks.get(rank).filter(|r| r.host == host).map(|_| rank)
        };
        match news {
            News::Ready { pid, notes } => {
                self.hosts[host].ready = true;
                self.hosts[host].pid = Some(pid);
                let name = &self.hosts[host].plan.name;
                let mut acts: Vec<Act> =
                    notes.into_iter().map(|n| Act::Say(format!("{name}: {n}"))).collect();
                if self.phase == Phase::Checking && self.hosts.iter().all(|h| h.ready) {
                    self.phase = Phase::Running;
                    acts.push(Act::TellAll(Order::Go));
                }
                acts
            }
            News::Refused(Ending { code, reason, .. }) => {
                self.hosts[host].refused = true;
                let words = format!("{}: {reason}", self.hosts[host].plan.name);
                self.fail(Weight::Cause, code.max(1), words, now)
            }
            News::Started { rank, pid } => {
                if let Some(rank) = rank_of(rank) {
                    self.ranks[rank].pid = Some(pid);
                }
                vec![]
            }
            News::Gather { rank, round, bytes } => match rank_of(rank) {
                Some(rank) => self.gather(rank, round, bytes, now),
                None => vec![],
            },
            News::Failed { rank, complaint } => match rank_of(rank) {
                Some(rank) if self.ranks[rank].complaint.is_none() => {
                    let weight = match (complaint.follows, complaint.heard) {
                        (false, _) => Weight::Cause,
                        (true, false) => Weight::Consequence,
                        (true, true) => Weight::Echo,
                    };
                    let words = match complaint.words.is_empty() {
                        true => format!("{} failed; it has said why above", self.name(rank)),
                        false => format!("{}: {}", self.name(rank), complaint.words),
                    };
                    let code = complaint.code.max(1);
                    // Who was told to end says what he was told.
                    if complaint.follows && !complaint.words.is_empty() && !self.is_echo(&complaint.words) {
                        self.evidence.noticed(&self.name(rank), &complaint.words);
                    }
                    self.ranks[rank].complaint = Some(complaint);
                    self.fail(weight, code, words, now)
                }
                _ => vec![],
            },
            News::Ended { rank, how, asked, held } => match rank_of(rank) {
                Some(rank) if !self.ranks[rank].ended => self.ended(rank, how, (asked, held), now),
                _ => vec![],
            },
            News::Kept { rank, why } => match rank_of(rank) {
                Some(rank) if self.ranks[rank].kept.is_none() => {
                    let words = format!(
                        "{} does not end, and must not be killed hard: {why}\n    end it by hand when it is done",
                        self.name(rank)
                    );
                    self.ranks[rank].kept = Some(why);
                    vec![Act::Say(words)]
                }
                _ => vec![],
            },
            News::Sees { rank, sight } => {
                if let Some(rank) = rank_of(rank) {
                    self.evidence.sees(&self.name(rank), sight);
                }
                vec![]
            }
            News::Lost { words, well } => self.lost(host, &words, well, now),
            News::Beat | News::Output { .. } | News::Taken(_) => vec![],
        }
    }

    fn gather(&mut self, rank: usize, round: u32, bytes: Vec<u8>, now: Instant) -> Vec<Act> {
        match self.rendezvous.word(rank, round, bytes, now) {
            Ok(Some(parts)) => vec![Act::TellAll(Order::Gathered { round, parts })],
            Ok(None) => vec![],
            Err(_) => {
                let words = format!("{} does not keep to the rendezvous (round {round})", self.name(rank));
                self.fail(Weight::Cause, 4, words, now)
            }
        }
    }

    /// `asked`: by its agent; `held`: it had RDMA devices in its hands.
    fn ended(&mut self, rank: usize, how: How, (asked, held): (bool, bool), now: Instant) -> Vec<Act> {
        self.ranks[rank].ended = true;
        let told = self.ranks[rank].complaint.is_some();
        let mut acts = match how {
            How::Code(0) => vec![],
            // It has had its say, or did as it was told.
            _ if told || (asked && self.failed.is_some()) => vec![],
            _ if asked => {
                let words = format!("{} was ended by its agent", self.name(rank));
                self.fail(Weight::Consequence, 4, words, now)
            }
            How::Code(code) => {
                // After a failure, others end with codes of their own; and 4 is a program's word for a lost peer, which may be
                // here before the loss itself.
                let follows = self.failed.is_some() || code == 4;
                let weight = if follows { Weight::Consequence } else { Weight::Cause };
                let words = format!(
                    "{} ended with exit code {code}\n    its own words, if any, are above (unless --output hides them), or in the files of --output-dir",
                    self.name(rank)
                );
                self.fail(weight, code, words, now)
            }
            How::Signal(signal) => {
                let why = match signal {
                    libc::SIGSEGV | libc::SIGBUS if held => {
                        "a driver of RDMA over Thunderbolt does that to a program whose cable is pulled out: see to the cables of \
                         this host, then `hpl-run doctor`"
                    }
                    libc::SIGKILL if held => {
                        "by hand, by a job scheduler, or by the system for lack of memory (see dmesg); its RDMA devices may be \
                         unusable until a restart: `hpl-run doctor`"
                    }
                    libc::SIGKILL => {
                        "by hand, by a job scheduler, or by the system for lack of memory (see dmesg)"
                    }
                    _ => "by hand, by a job scheduler, or by a fault of the program",
                };
                let words = format!("{} was killed by {}\n    {why}", self.name(rank), signal_name(signal));
                self.fail(Weight::Cause, 4, words, now)
            }
        };
        if self.phase == Phase::Running && self.ranks.iter().all(|r| r.ended) {
            self.phase = Phase::Leaving;
            acts.push(Act::TellAll(Order::End(Ending::new(0, ""))));
        }
        acts
    }

    /// The hosts between the launcher and this one, from below.
    fn between(&self, host: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(self.hosts[host].plan.above, |&h| self.hosts[h].plan.above)
    }

    /// The hosts that are reached through this one.
    fn below(&self, host: usize) -> Vec<usize> {
        (0..self.hosts.len()).filter(|&h| self.between(h).any(|above| above == host)).collect()
    }

    /// The connection to an agent has ended, and with it those to the agents below that one. `words`: what ssh said, and how it
    /// ended; `well`: in order, as agents do that were asked to.
    pub fn lost(&mut self, host: usize, words: &str, well: bool, now: Instant) -> Vec<Act> {
        self.without(host, "the connection to its agent ended", words, well, now)
    }

    /// [`Conduct::lost`], for this reason.
    fn without(&mut self, host: usize, why: &str, words: &str, well: bool, now: Instant) -> Vec<Act> {
        let known = self.hosts[host].gone;
        let mut gone: Vec<usize> = self.below(host).into_iter().filter(|&h| !self.hosts[h].gone).collect();
        let below = gone.len();
        gone.push(host);
        gone.iter().for_each(|&h| self.hosts[h].gone = true);
        let mine = |r: &Rank| gone.contains(&r.host) && !r.ended;
        let left: Vec<usize> = (0..self.ranks.len()).filter(|&r| mine(&self.ranks[r])).collect();
        left.iter().for_each(|&r| self.ranks[r].ended = true);
        if known {
            return vec![];
        }
        if !self.hosts[host].ready && (self.hosts[host].refused || well && self.phase == Phase::Ending) {
            return vec![];
        }
        let name = &self.hosts[host].plan.name;
        let mut words = words.replace('\n', "\n    ");
        if below > 0 {
            let s = if below == 1 { "" } else { "s" };
            words += &format!("\n    {below} further host{s} are reached through it (--fan-out)");
        }
        let (weight, words) = match self.phase {
            // All the agents that never came are named, not only the first.
            Phase::Checking | Phase::Ending if !self.hosts[host].ready => {
                (Weight::Cause, format!("{name}: no agent could be started\n    {words}"))
            }
            // Of a job that is ending too: an agent that leaves in order has told the end of its ranks.
            Phase::Checking | Phase::Running | Phase::Ending => {
                (Weight::HostLost, format!("{name}: {why}, and with it {}\n    {words}", ranks(&left)))
            }
            Phase::Leaving => return vec![],
        };
        if self.phase == Phase::Ending && (self.signals > 0 || (self.hosts[host].ready && left.is_empty())) {
            return vec![];
        }
        self.fail(weight, 4, words, now)
    }

    /// The user wants it to end, as `what` tells.
    pub fn signal(&mut self, what: &str, now: Instant) -> Vec<Act> {
        self.signals += 1;
        match self.signals {
            1 => self.fail(Weight::Wanted, 5, what.into(), now),
            _ => self.kill(),
        }
    }

    /// The job is to end for a reason that lies outside of it.
    pub fn give_up(&mut self, code: u8, words: String, now: Instant) -> Vec<Act> {
        self.fail(Weight::Wanted, code, words, now)
    }

    fn kill(&mut self) -> Vec<Act> {
        self.killed = true;
        vec![Act::TellAll(Order::Kill)]
    }

    /// Time passes. `heard` tells when each agent was last heard.
    pub fn tick(&mut self, now: Instant, heard: &[Instant]) -> Vec<Act> {
        let silence = silence(self.limits.bound);
        if now.saturating_duration_since(self.ticked) > silence / 2 {
            self.awake = now;
        }
        self.ticked = now;
        let mut acts = vec![];
        let awake = self.awake;
        let since = |host: usize| now.saturating_duration_since(heard[host].max(awake));
        let silent: Vec<usize> =
            (0..self.hosts.len()).filter(|&h| self.is_there(h) && since(h) > silence / 2).collect();
        for host in silent.iter().copied().filter(|&h| since(h) > silence) {
            // Of hosts that are reached through others, those are told.
            if self.hosts[host].gone || self.between(host).any(|above| silent.contains(&above)) {
                continue;
            }
            let others: Vec<&str> =
                silent.iter().filter(|&&h| h != host).map(|&h| self.hosts[h].plan.name.as_str()).collect();
            let too = match others.len() {
                0 => String::new(),
                1..=4 => format!(", nor of {}", others.join(", ")),
                n => format!(", nor of {n} others"),
            };
            let mut words = format!(
                "nothing was heard of it for {:.1} s{too}: the cable, the host or its network is gone, or the agent or its ssh \
                 was stopped",
                since(host).as_secs_f64()
            );
            if !others.is_empty() && others.len() + 2 >= self.hosts.len() {
                words += "\nof all other hosts nothing is heard: look at this host's own network first";
            }
            acts.push(Act::Cut(host));
            acts.extend(self.without(host, "its agent fell silent", &words, false, now));
        }
        if self.phase == Phase::Checking && now.saturating_duration_since(self.began) > self.limits.start {
            for host in 0..self.hosts.len() {
                let waits = |h: usize| !self.hosts[h].ready;
                if waits(host) && !self.hosts[host].gone && !self.between(host).any(waits) {
                    let words = format!(
                        "{}: no answer from its agent within {:.1} s\n    try `ssh -o BatchMode=yes {} true` (or what --ssh names); if it is only slow, raise --start-timeout",
                        self.hosts[host].plan.name,
                        self.limits.start.as_secs_f64(),
                        self.hosts[host].plan.name
                    );
                    self.hosts[host].gone = true;
                    self.below(host).into_iter().for_each(|h| self.hosts[h].gone = true);
                    acts.push(Act::Cut(host));
                    acts.extend(self.fail(Weight::Cause, 4, words, now));
                }
            }
        }
        if self.phase == Phase::Running
            && let Some(late) = self.rendezvous.late(self.limits.meet, now)
        {
            let words = format!(
                "{} did not come to the rendezvous within {:.0} s, which others wait at\n    \
                 see what it is doing; if it is only slow, raise --meet-timeout",
                self.names(&late),
                self.limits.meet.as_secs_f64()
            );
            acts.extend(self.fail(Weight::Cause, 4, words, now));
        } else if self.phase == Phase::Running
            && !self.told_late
            && let Some(late) = self.rendezvous.late(LATE, now)
        {
            self.told_late = true;
            let until = self.limits.meet.as_secs_f64();
            let who = self.names(&late);
            acts.push(Act::Say(format!("others wait for {who} at the rendezvous, for {until:.0} s at most")));
        }
        if let Some(failed) = self.failed {
            let since = now.saturating_duration_since(failed);
            // The agents need two graces; whoever has not done by then is told to be quick, then left alone.
            if since > grace(self.limits.bound) * 5 / 2 && !self.killed {
                acts.extend(self.kill());
            }
            let cut =
                if self.signals > 1 { Duration::from_secs(1) } else { grace(self.limits.bound) * 7 / 2 };
            if self.killed && since > cut {
                for host in 0..self.hosts.len() {
                    if self.hosts[host].gone {
                        continue;
                    }
                    self.hosts[host].gone = true;
                    acts.push(Act::Cut(host));
                    let kept = self.ranks.iter().any(|r| r.host == host && !r.ended && r.kept.is_some());
                    if self.hosts[host].ready && !kept {
                        acts.push(Act::Say(format!(
                            "{}: its agent has not confirmed that all is over there\n    look for what is left: ps, on that host",
                            self.hosts[host].plan.name
                        )));
                    }
                }
            }
        }
        acts
    }

    /// When the first failure was known.
    pub fn failed(&self) -> Option<Instant> {
        self.failed
    }

    /// The verdict, once it is over.
    pub fn verdict(&self) -> Verdict {
        self.evidence.verdict(self.ranks.iter().any(|r| r.pid.is_some()))
    }

    /// The host of a rank.
    pub fn host_of(&self, rank: usize) -> usize {
        self.ranks[rank].host
    }

    /// The pid of a host's agent, if it has told.
    pub fn agent_pid(&self, host: usize) -> Option<u32> {
        self.hosts[host].pid
    }
}

fn ranks(list: &[usize]) -> String {
    match list {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [first, .., last] if last - first + 1 == list.len() => format!("ranks {first} to {last}"),
        _ => format!("{} ranks", list.len()),
    }
}
