//! The launcher's decisions, without I/O and without a clock: what agents say and time go in, orders and a verdict
//! come out.
//!
//! ```text
//! Checking ──all ready──▶ Running ──all ranks ended──▶ Leaving ──all agents gone──▶ Over
//!     │                      │                                                       ▲
//!     └──────────────────────┴── a failure, a signal ──▶ Ending ──all agents gone────┤
//!                                                          └──half the bound: Kill; a little later: cut ──┘
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fulmen::job::messages::{Complaint, Ending, How, LONGEST_WORD, News, Order, grace, silence};

/// What the launcher does next.
#[derive(Clone, PartialEq, Debug)]
pub enum Act {
    /// Give this order to one agent.
    Tell(usize, Order),
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
}

/// How it ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The exit code.
    pub code: u8,
    /// What failed first, in words that name rank and host; nothing when nothing did.
    pub words: Option<String>,
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

/// How much a failure explains: of several, the one that explains most is told, then the first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Weight {
    /// The user wanted it.
    Wanted,
    /// A rank was killed, failed by itself, or a host cannot take part.
    Cause,
    /// A host is out of reach.
    HostLost,
    /// A rank suffered from the failure of another.
    Consequence,
}

#[derive(Debug)]
struct Evidence {
    weight: Weight,
    code: u8,
    words: String,
}

/// The words of one round of the rendezvous, as far as they have come.
#[derive(Debug)]
struct Round {
    parts: Vec<Option<Vec<u8>>>,
    since: Instant,
}

/// See the module.
#[derive(Debug)]
pub struct Conduct {
    limits: Limits,
    phase: Phase,
    began: Instant,
    hosts: Vec<Host>,
    ranks: Vec<Rank>,
    rounds: BTreeMap<u32, Round>,
    evidence: Vec<Evidence>,
    /// When the first failure was known.
    failed: Option<Instant>,
    killed: bool,
    signals: u32,
    ticked: Instant,
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
        let hosts =
            plans.into_iter().map(|plan| Host { plan, ready: false, gone: false, pid: None }).collect();
        Conduct {
            limits,
            phase: Phase::Checking,
            began: now,
            hosts,
            ranks,
            rounds: BTreeMap::new(),
            evidence: vec![],
            failed: None,
            killed: false,
            signals: 0,
            ticked: now,
            awake: now,
        }
    }

    /// Whether every agent is gone, and with it all it has started.
    pub fn is_over(&self) -> bool {
        self.hosts.iter().all(|h| h.gone)
    }

    fn name(&self, rank: usize) -> String {
        let r = &self.ranks[rank];
        let pid = r.pid.map_or(String::new(), |pid| format!(", pid {pid}"));
        format!("rank {rank} ({}{pid})", self.hosts[r.host].plan.name)
    }

    fn fail(&mut self, weight: Weight, code: u8, words: String, now: Instant) -> Vec<Act> {
        let reason = words.clone();
        self.evidence.push(Evidence { weight, code, words });
        if self.failed.is_some() {
            return vec![];
        }
        self.failed = Some(now);
        self.phase = Phase::Ending;
        vec![Act::TellAll(Order::End(Ending { code, reason }))]
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
            News::Refused(Ending { code, reason }) => {
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
                    let weight = if complaint.follows { Weight::Consequence } else { Weight::Cause };
                    let words = match complaint.words.is_empty() {
                        true => format!("{} failed; it has said why above", self.name(rank)),
                        false => format!("{}: {}", self.name(rank), complaint.words),
                    };
                    let code = complaint.code.max(1);
                    self.ranks[rank].complaint = Some(complaint);
                    self.fail(weight, code, words, now)
                }
                _ => vec![],
            },
            News::Ended { rank, how, asked } => match rank_of(rank) {
                Some(rank) if !self.ranks[rank].ended => self.ended(rank, how, asked, now),
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
            News::Beat | News::Output { .. } | News::Taken(_) => vec![],
        }
    }

    fn gather(&mut self, rank: usize, round: u32, bytes: Vec<u8>, now: Instant) -> Vec<Act> {
        let size = self.ranks.len();
        let next = self.rounds.keys().next().copied();
        // Ranks are at most one round apart: a word for another one is no rendezvous of ours.
        let far = next.is_some_and(|n| round.abs_diff(n) > 1);
        let round_ =
            self.rounds.entry(round).or_insert_with(|| Round { parts: vec![None; size], since: now });
        if far || bytes.len() > LONGEST_WORD || round_.parts[rank].is_some() {
            let words = format!("{} does not keep to the rendezvous (round {round})", self.name(rank));
            return self.fail(Weight::Cause, 4, words, now);
        }
        round_.parts[rank] = Some(bytes);
        if round_.parts.iter().any(Option::is_none) {
            return vec![];
        }
        let parts = self.rounds.remove(&round).map_or(vec![], |r| r.parts.into_iter().flatten().collect());
        vec![Act::TellAll(Order::Gathered { round, parts })]
    }

    fn ended(&mut self, rank: usize, how: How, asked: bool, now: Instant) -> Vec<Act> {
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
                // After a failure, others end with codes of their own.
                let weight = if self.failed.is_some() { Weight::Consequence } else { Weight::Cause };
                let words = format!(
                    "{} ended with exit code {code}\n    its own words, if any, are above",
                    self.name(rank)
                );
                self.fail(weight, code, words, now)
            }
            How::Signal(signal) => {
                let why = match signal {
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
            acts.push(Act::TellAll(Order::End(Ending { code: 0, reason: String::new() })));
        }
        acts
    }

    /// The connection to an agent has ended. `words`: what ssh said, and how it ended.
    pub fn lost(&mut self, host: usize, words: &str, now: Instant) -> Vec<Act> {
        if self.hosts[host].gone {
            return vec![];
        }
        self.hosts[host].gone = true;
        let mine = |r: &Rank| r.host == host && !r.ended;
        let left: Vec<usize> = (0..self.ranks.len()).filter(|&r| mine(&self.ranks[r])).collect();
        left.iter().for_each(|&r| self.ranks[r].ended = true);
        let name = &self.hosts[host].plan.name;
        match self.phase {
            Phase::Checking => {
                let words =
                    format!("{name}: no agent could be started\n    {}", words.replace('\n', "\n    "));
                self.fail(Weight::Cause, 4, words, now)
            }
            Phase::Running => {
                let words = format!(
                    "{name}: the connection to its agent ended, and with it {}\n    {}",
                    ranks(&left),
                    words.replace('\n', "\n    ")
                );
                self.fail(Weight::HostLost, 4, words, now)
            }
            Phase::Leaving => vec![],
            // All the agents that never came are named, not only the first.
            Phase::Ending if !self.hosts[host].ready && self.signals == 0 => {
                let words =
                    format!("{name}: no agent could be started\n    {}", words.replace('\n', "\n    "));
                self.fail(Weight::Cause, 4, words, now)
            }
            Phase::Ending => vec![],
        }
    }

    /// The user wants it to end.
    pub fn signal(&mut self, now: Instant) -> Vec<Act> {
        self.signals += 1;
        match self.signals {
            1 => self.fail(Weight::Wanted, 5, "interrupted".into(), now),
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
        for host in 0..self.hosts.len() {
            let h = &self.hosts[host];
            let since = now.saturating_duration_since(heard[host].max(self.awake));
            if h.gone || !h.ready || since <= silence {
                continue;
            }
            let what = format!("was silent for {:.1} s", since.as_secs_f64());
            acts.push(Act::Cut(host));
            acts.extend(self.lost(
                host,
                &format!("it {what}: the cable, the host or its network is gone, or the agent was stopped"),
                now,
            ));
        }
        if self.phase == Phase::Checking && now.saturating_duration_since(self.began) > self.limits.start {
            for host in 0..self.hosts.len() {
                if !self.hosts[host].ready && !self.hosts[host].gone {
                    let words = format!(
                        "{}: no answer from its agent within {:.1} s\n    try `ssh -o BatchMode=yes {} true`; if it is only slow, raise --start-timeout",
                        self.hosts[host].plan.name,
                        self.limits.start.as_secs_f64(),
                        self.hosts[host].plan.name
                    );
                    self.hosts[host].gone = true;
                    acts.push(Act::Cut(host));
                    acts.extend(self.fail(Weight::Cause, 4, words, now));
                }
            }
        }
        if self.phase == Phase::Running
            && let Some(round) =
                self.rounds.values().find(|r| now.saturating_duration_since(r.since) > self.limits.meet)
        {
            let late: Vec<usize> = (0..self.ranks.len()).filter(|&r| round.parts[r].is_none()).collect();
            let who = late.iter().take(4).map(|&r| self.name(r)).collect::<Vec<_>>().join(", ");
            let words = format!(
                "{who}{} did not come to the rendezvous within {:.0} s, which others wait at\n    \
                 see what it is doing; if it is only slow, raise --meet-timeout",
                if late.len() > 4 { format!(" and {} more", late.len() - 4) } else { String::new() },
                self.limits.meet.as_secs_f64()
            );
            acts.extend(self.fail(Weight::Cause, 4, words, now));
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

    /// The verdict, once it is over.
    pub fn verdict(&self) -> Verdict {
        let Some(best) = self.evidence.iter().map(|e| e.weight).min() else {
            return Verdict { code: 0, words: None };
        };
        let told: Vec<&Evidence> = self.evidence.iter().filter(|e| e.weight == best).collect();
        let mut words = told[0].words.clone();
        // Several hosts that could not take part: all of them help.
        if self.ranks.iter().all(|r| r.pid.is_none()) {
            told[1..].iter().for_each(|e| words = format!("{words}\n{}", e.words));
        }
        Verdict { code: told[0].code, words: Some(words) }
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

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        libc::SIGHUP => "SIGHUP",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGBUS => "SIGBUS",
        libc::SIGABRT => "SIGABRT",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        libc::SIGPIPE => "SIGPIPE",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        start: Duration::from_secs(9),
        meet: Duration::from_secs(60),
        bound: Duration::from_secs(10),
    };

    /// Ranks 0, 1 on a, rank 2 on b, rank 3 on c.
    fn job(now: Instant) -> Conduct {
        let plan = |name: &str, ranks: &[usize]| HostPlan { name: name.into(), ranks: ranks.to_vec() };
        Conduct::new(vec![plan("a", &[0, 1]), plan("b", &[2]), plan("c", &[3])], LIMITS, now)
    }

    fn running(now: Instant) -> Conduct {
        let mut job = job(now);
        for host in 0..3 {
            let acts = job.hear(host, News::Ready { pid: 1, notes: vec![] }, now);
            assert_eq!(acts, if host == 2 { vec![Act::TellAll(Order::Go)] } else { vec![] });
        }
        for (rank, host) in [0, 0, 1, 2].into_iter().enumerate() {
            job.hear(host, News::Started { rank: rank as u32, pid: 100 + rank as u32 }, now);
        }
        job
    }

    fn ended(rank: u32, how: How, asked: bool) -> News {
        News::Ended { rank, how, asked }
    }

    fn failed(rank: u32, code: u8, follows: bool, words: &str) -> News {
        News::Failed { rank, complaint: Complaint { code, follows, words: words.into() } }
    }

    fn ends(acts: &[Act]) -> bool {
        matches!(acts, [Act::TellAll(Order::End(Ending { code, .. }))] if *code > 0)
    }

    #[test]
    fn all_goes_well() {
        let now = Instant::now();
        let mut job = running(now);
        for (rank, host) in [(0, 0), (1, 0), (2, 1)] {
            assert_eq!(job.hear(host, ended(rank, How::Code(0), false), now), []);
        }
        let last = job.hear(2, ended(3, How::Code(0), false), now);
        assert!(matches!(&last[..], [Act::TellAll(Order::End(Ending { code: 0, .. }))]));
        for host in 0..3 {
            assert!(!job.is_over());
            assert_eq!(job.lost(host, "", now), []);
        }
        assert!(job.is_over());
        assert_eq!(job.verdict(), Verdict { code: 0, words: None });
    }

    #[test]
    fn nothing_starts_unless_every_host_can() {
        let now = Instant::now();
        let mut job = job(now);
        job.hear(0, News::Ready { pid: 1, notes: vec![] }, now);
        assert!(ends(&job.lost(1, "ssh: Could not resolve hostname b\nexit status 255", now)));
        assert_eq!(job.lost(2, "Permission denied (publickey).\nexit status 255", now), []);
        assert_eq!(job.lost(0, "", now), []);
        let verdict = job.verdict();
        assert_eq!(verdict.code, 4);
        let words = verdict.words.unwrap();
        assert!(
            words.contains("b: no agent could be started\n    ssh: Could not resolve hostname b"),
            "{words}"
        );
        assert!(words.contains("c: no agent could be started\n    Permission denied"), "{words}");
    }

    #[test]
    fn an_agent_that_does_not_answer_in_time() {
        let now = Instant::now();
        let mut job = job(now);
        for host in [0, 2] {
            job.hear(host, News::Ready { pid: 1, notes: vec![] }, now);
        }
        let later = |s: u64| now + Duration::from_secs(s);
        let mut all = vec![];
        for s in 1..=10 {
            all.extend(job.tick(later(s), &[later(s); 3]));
        }
        assert!(
            all.contains(&Act::Cut(1)) && all.iter().any(|a| matches!(a, Act::TellAll(Order::End(_)))),
            "{all:?}"
        );
        assert!(job.verdict().words.unwrap().contains("b: no answer from its agent within 9.0 s"));
    }

    /// The peer's complaint comes before the news of the kill: the kill is told.
    #[test]
    fn the_cause_is_told_and_not_what_follows_from_it() {
        let now = Instant::now();
        let mut job = running(now);
        assert!(ends(&job.hear(0, failed(1, 4, true, "rank 3 is gone"), now)));
        assert_eq!(job.hear(0, ended(1, How::Code(4), false), now), []);
        assert_eq!(job.hear(0, ended(0, How::Code(4), false), now), []);
        assert_eq!(job.hear(2, ended(3, How::Signal(9), false), now), []);
        assert_eq!(job.hear(1, ended(2, How::Signal(15), true), now), []);
        let verdict = job.verdict();
        assert_eq!(verdict.code, 4);
        assert!(verdict.words.unwrap().starts_with("rank 3 (c, pid 103) was killed by signal 9 (SIGKILL)"));
    }

    #[test]
    fn the_exit_code_is_the_failing_ranks() {
        let now = Instant::now();
        let mut job = running(now);
        assert!(ends(&job.hear(1, ended(2, How::Code(7), false), now)));
        job.hear(0, ended(0, How::Code(3), false), now);
        let verdict = job.verdict();
        assert_eq!(verdict.code, 7);
        assert!(verdict.words.unwrap().starts_with("rank 2 (b, pid 102) ended with exit code 7"));
        let mut job = running(now);
        assert!(ends(&job.hear(1, failed(2, 3, false, "no memory"), now)));
        job.hear(1, ended(2, How::Code(3), false), now);
        assert_eq!(job.verdict(), Verdict { code: 3, words: Some("rank 2 (b, pid 102): no memory".into()) });
    }

    #[test]
    fn a_silent_host_is_cut_and_named_with_its_ranks() {
        let now = Instant::now();
        let mut job = running(now);
        let at = |ms: u64| now + Duration::from_millis(ms);
        let mut ms = 0;
        let acts = loop {
            ms += 500;
            let acts = job.tick(at(ms), &[at(ms), at(ms), now]);
            if !acts.is_empty() {
                break acts;
            }
            assert!(ms < 6000);
        };
        assert_eq!(acts[0], Act::Cut(2));
        assert!(ends(&acts[1..]));
        let words = job.verdict().words.unwrap();
        assert!(
            words.starts_with(
                "c: the connection to its agent ended, and with it rank 3\n    it was silent for 5."
            ),
            "{words}"
        );
    }

    #[test]
    fn a_launcher_that_was_stopped_does_not_blame_others() {
        let now = Instant::now();
        let mut job = running(now);
        assert_eq!(job.tick(now + Duration::from_millis(500), &[now; 3]), []);
        assert_eq!(job.tick(now + Duration::from_secs(3600), &[now; 3]), []);
        assert_eq!(job.tick(now + Duration::from_secs(3601), &[now; 3]), []);
    }

    #[test]
    fn a_rank_that_does_not_come_to_the_rendezvous() {
        let now = Instant::now();
        let mut job = running(now);
        for (rank, host) in [(0, 0), (1, 0), (3, 2)] {
            job.hear(host, News::Gather { rank, round: 0, bytes: vec![rank as u8] }, now);
        }
        let mut at = now;
        let acts = loop {
            at += Duration::from_secs(2);
            let acts = job.tick(at, &[at; 3]);
            if !acts.is_empty() {
                break acts;
            }
        };
        assert!(ends(&acts));
        let words = job.verdict().words.unwrap();
        assert!(
            words.starts_with("rank 2 (b, pid 102) did not come to the rendezvous within 60 s"),
            "{words}"
        );
    }

    #[test]
    fn words_are_gathered_by_rank_and_lies_end_the_job() {
        let now = Instant::now();
        let mut job = running(now);
        for (rank, host) in [(3, 2), (1, 0), (0, 0)] {
            assert_eq!(job.hear(host, News::Gather { rank, round: 0, bytes: vec![rank as u8] }, now), []);
        }
        // Of a rank that is not this agent's.
        assert_eq!(job.hear(0, News::Gather { rank: 2, round: 0, bytes: vec![9] }, now), []);
        let acts = job.hear(1, News::Gather { rank: 2, round: 0, bytes: vec![2] }, now);
        let parts = vec![vec![0], vec![1], vec![2], vec![3]];
        assert_eq!(acts, [Act::TellAll(Order::Gathered { round: 0, parts })]);
        assert_eq!(job.hear(0, News::Gather { rank: 0, round: 1, bytes: vec![0] }, now), []);
        assert!(
            ends(&job.hear(0, News::Gather { rank: 0, round: 1, bytes: vec![0] }, now)),
            "twice in one round"
        );
        for (round, len) in [(9, 0), (1, LONGEST_WORD + 1)] {
            let mut job = running(now);
            job.hear(0, News::Gather { rank: 1, round: 1, bytes: vec![] }, now);
            assert!(ends(&job.hear(0, News::Gather { rank: 0, round, bytes: vec![0; len] }, now)));
        }
    }

    #[test]
    fn signals() {
        let now = Instant::now();
        let mut job = running(now);
        assert!(ends(&job.signal(now)));
        job.hear(2, ended(3, How::Signal(9), false), now);
        assert_eq!(job.signal(now), [Act::TellAll(Order::Kill)]);
        let acts = job.tick(now + Duration::from_millis(1500), &[now; 3]);
        assert_eq!(acts.iter().filter(|a| matches!(a, Act::Cut(_))).count(), 3);
        assert!(job.is_over());
        assert_eq!(job.verdict(), Verdict { code: 5, words: Some("interrupted".into()) });
    }

    #[test]
    fn what_does_not_end_is_killed_then_left_within_the_bound() {
        let now = Instant::now();
        let mut job = running(now);
        job.signal(now);
        let (mut at, mut killed) = (now, None);
        while !job.is_over() {
            at += Duration::from_millis(100);
            for act in job.tick(at, &[at; 3]) {
                if act == Act::TellAll(Order::Kill) {
                    killed = Some(at - now);
                }
            }
            assert!(at - now < LIMITS.bound / 2, "with the silence before it, all must fit into the bound");
        }
        assert!(killed.is_some_and(|t| t >= 2 * grace(LIMITS.bound)));
    }
}
