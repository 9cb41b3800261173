//! The agent: `fulmen-run` on each host. It talks to the launcher over its standard input and output (ssh's, or a
//! pipe), starts this host's ranks, passes on what they say, and ends them, whatever happens to the launcher. Where hosts are
//! many it does the same with the agents of some.

mod below;
mod copied;
mod ending;
mod start;
mod streams;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fulmen::job::messages::{
    self, Ending, Frames, FromRank, How, News, Order, Start, ToRank, Up, beat, silence,
};

use self::copied::Copied;
use self::ending::Push;
use super::branch::Branch;
use super::children;
use super::guard::Guard;
use super::outbox::Outbox;
use super::signals;

/// The argument that makes this program an agent. One that was copied here is told its folder, to remove it.
pub const ARGUMENT: &str = "--agent";

/// How often processes are looked at.
const LOOK: Duration = Duration::from_millis(10);
/// The launcher gives the task within this time of the start, or is gone.
const TASK: Duration = Duration::from_secs(60);
/// What ranks have written is passed on so long after their end.
const DRAIN: Duration = Duration::from_secs(1);

enum Event {
    Order(Order),
    LauncherGone(String),
    Rank(usize, FromRank),
    /// A rank says nothing more: all its words are before this.
    Silent(usize),
    /// A stream of a rank has ended.
    Drained,
    /// The connection to an agent below has ended: its number, ssh's words, and how it ended.
    BranchGone(u32, Vec<String>, String),
}

/// What `fulmen-run --agent` does.
pub fn run(copied: Option<PathBuf>) -> u8 {
    let mut copied = Copied(copied);
    signals::listen();
    match attempt(&mut copied) {
        Ok(()) => 0,
        Err(words) => {
            // Into ssh's own words.
            let _ = writeln!(io::stderr(), "fulmen-run's agent: {words}");
            4
        }
    }
}

fn attempt(copied: &mut Copied) -> Result<(), String> {
    let out = Outbox::start("to launcher", io::stdout()).map_err(|e| format!("no thread: {e}"))?;
    // Without a guard all else still works.
    let mut guard = Guard::start().ok();
    if let (Some(guard), Some(folder)) = (&mut guard, &copied.0) {
        guard.watch_folder(folder);
    }
    let (events, inbox) = mpsc::channel();
    spawn("from launcher", {
        let events = events.clone();
        move || {
            let why = read_orders(&events).unwrap_or_else(|e| e.to_string());
            let _ = events.send(Event::LauncherGone(why));
        }
    })?;
    let mut program: Option<File> = None;
    let mut start = loop {
        match inbox.recv_timeout(TASK) {
            Ok(Event::Order(Order::Start(start))) => break *start,
            Ok(Event::Order(Order::Beat)) => {}
            // The job is over before it began.
            Ok(Event::Order(Order::End(_) | Order::Kill)) => return Ok(()),
            Ok(Event::Order(Order::Part(bytes))) => {
                let written = copied.append(&mut program, &bytes);
                written.map_err(|e| format!("the program cannot be copied to {}: {e}", copied.shown()))?;
            }
            Ok(Event::Order(other)) => return Err(format!("the launcher began with {other:?}")),
            Ok(Event::LauncherGone(why)) => return Err(format!("the launcher is gone: {why}")),
            Ok(_) => return Err("events of ranks that are not started".into()),
            Err(_) => return Err(format!("the launcher gave no task within {} s", TASK.as_secs())),
        }
    };
    if program.take().is_some() {
        // Closed by now: a file that is open for writing cannot be executed.
        start.program.path = copied.program().into_os_string().into_vec();
    }
    children::adopt_orphans();
    let mut agent = Agent::new(start, out, events, inbox);
    agent.guard = guard;
    agent.work(copied);
    Ok(())
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let thread = thread::Builder::new().name(name.into()).spawn(work);
    thread.map(drop).map_err(|e| format!("no thread: {e} (see ulimit -u)"))
}

/// Reads the launcher's stream to its end.
fn read_orders(events: &Sender<Event>) -> io::Result<String> {
    let mut from = io::stdin().lock();
    let mut frames = Frames::default();
    expect_greeting(&mut from, &mut frames)?;
    while let Some(order) = messages::read(&mut from, &mut frames)? {
        if events.send(Event::Order(order)).is_err() {
            break;
        }
    }
    Ok("its connection has ended".into())
}

/// Reads up to the greeting; what follows it stays in `frames`.
pub fn expect_greeting(from: &mut impl Read, frames: &mut Frames) -> io::Result<()> {
    let (mut seen, mut chunk) = (vec![], [0; 4096]);
    loop {
        let greeted = messages::greeted(&seen).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        if let Some(at) = greeted {
            frames.push(&seen[at..]);
            return Ok(());
        }
        match from.read(&mut chunk) {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before its greeting"));
            }
            Ok(n) => seen.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A rank in the agent's eyes.
struct Child {
    rank: u32,
    process: children::Rank,
    words: Sender<ToRank>,
    /// It uses the library.
    joined: bool,
    /// All its words have been heard.
    silent: bool,
    /// It has ended, which is told after its words: when it was seen, how, and whether it was asked to.
    untold: Option<(Instant, How, bool)>,
    keep: Option<String>,
    stopped: Option<Instant>,
    /// The agent has sent it a signal to end.
    signalled: bool,
    /// Complained of for being stopped.
    told: bool,
}

/// The input of rank 0.
enum Input {
    /// Not this host's business, or over.
    None,
    Open(Sender<Vec<u8>>),
}

struct Agent {
    start: Start,
    out: Outbox,
    events: Sender<Event>,
    inbox: Receiver<Event>,
    ranks: Vec<Child>,
    /// Agents below that are not gone.
    branches: Vec<Branch>,
    input: Input,
    /// Streams of ranks that are still open.
    open: usize,
    guard: Option<Guard>,
    /// The end was ordered, or the launcher is gone.
    ending: Option<(Instant, Ending)>,
    push: Option<Push>,
    heard: Instant,
    awake: Instant,
    launcher_gone: bool,
    signals: u32,
}

impl Agent {
    fn new(start: Start, out: Outbox, events: Sender<Event>, inbox: Receiver<Event>) -> Agent {
        let now = Instant::now();
        Agent {
            start,
            out,
            events,
            inbox,
            ranks: vec![],
            branches: vec![],
            input: Input::None,
            open: 0,
            guard: None,
            ending: None,
            push: None,
            heard: now,
            awake: now,
            launcher_gone: false,
            signals: 0,
        }
    }

    fn bound(&self) -> Duration {
        Duration::from_millis(self.start.welcome.bound_ms)
    }

    fn tell(&self, news: News) {
        self.out.say(&Up { host: self.start.place.host, news });
    }

    /// Shows the guard that this agent lives.
    fn reassure(&mut self) {
        let bound = self.bound();
        if let Some(guard) = &mut self.guard {
            guard.beat(bound);
        }
    }

    fn work(&mut self, copied: &mut Copied) {
        match self.grow().and_then(|()| self.check()) {
            Ok(notes) => self.tell(News::Ready { pid: std::process::id(), notes }),
            Err(ending) => self.tell(News::Refused(ending)),
        }
        self.reassure();
        let (mut beaten, mut looked) = (Instant::now(), Instant::now());
        let mut over: Option<Instant> = None;
        loop {
            match self.inbox.recv_timeout(LOOK) {
                Ok(event) => self.handle(event),
                // `events` is ours as well: it cannot be cut.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            let now = Instant::now();
            if now - looked > silence(self.bound()) / 2 {
                self.awake = now;
            }
            looked = now;
            if now - beaten >= beat(self.bound()) {
                beaten = now;
                self.tell(News::Beat);
                self.reassure();
                self.ranks.iter().filter(|r| r.joined && !r.process.ended()).for_each(|r| {
                    let _ = r.words.send(ToRank::Beat);
                });
            }
            self.watch(now);
            self.watch_branches(now);
            let asked = signals::count();
            if asked > self.signals {
                self.signals = asked;
                let reason = format!("its agent was {}", signals::words());
                self.tell(News::Refused(Ending::new(5, reason.clone())));
                self.end(Ending::new(5, reason));
                if asked > 1 {
                    self.push(Push::Killed);
                }
            }
            self.end_in_order(now);
            let alone = self.branches.is_empty();
            let ended = self.ranks.iter().all(|r| r.process.ended() && r.untold.is_none());
            if self.ending.is_some() && alone && ended {
                let since = *over.get_or_insert(now);
                self.kill_orphans();
                let stuck = self.ended_well() && !self.launcher_gone && !self.out.is_empty();
                if self.open == 0 || (now - since > DRAIN && !stuck) {
                    break;
                }
            }
        }
        copied.remove();
        if let Some(guard) = self.guard.take() {
            guard.dismiss();
        }
        // Who ends well has all of its output shown, however long the user's terminal takes.
        while !self.out.finish(DRAIN) && self.ended_well() && !self.launcher_gone {
            while let Ok(event) = self.inbox.try_recv() {
                match event {
                    Event::LauncherGone(_) => self.launcher_gone = true,
                    _ => self.heard = Instant::now(),
                }
            }
            self.launcher_gone |= self.heard.elapsed() > silence(self.bound());
        }
    }

    /// Ends what ranks have left running. Whoever was not to be killed hard may have others at work for him.
    fn kill_orphans(&self) {
        if self.ranks.iter().all(|rank| rank.keep.is_none()) {
            let own: Vec<u32> = self.guard.iter().map(Guard::pid).collect();
            children::kill_orphans(&own);
        }
    }

    fn ended_well(&self) -> bool {
        self.ending.as_ref().is_some_and(|(_, e)| e.code == 0)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Order(order) => {
                self.heard = Instant::now();
                self.obey(order);
            }
            Event::LauncherGone(why) => {
                self.launcher_gone = true;
                self.end(Ending::new(4, format!("the launcher is gone: {why}")));
            }
            Event::Silent(i) => self.ranks[i].silent = true,
            Event::Drained => self.open -= 1,
            Event::BranchGone(head, said, status) => self.branch_gone(head, &said, &status),
            Event::Rank(i, word) => {
                let rank = self.ranks[i].rank;
                match word {
                    FromRank::Hello { .. } => self.ranks[i].joined = true,
                    FromRank::Gather { round, bytes } => self.tell(News::Gather { rank, round, bytes }),
                    FromRank::Failed(complaint) => self.tell(News::Failed { rank, complaint }),
                    FromRank::Sees(sight) => self.tell(News::Sees { rank, sight }),
                    FromRank::Keep(why) => {
                        if let Some(guard) = &mut self.guard {
                            match &why {
                                Some(_) => guard.leave(self.ranks[i].process.pid()),
                                None => guard.watch(self.ranks[i].process.pid()),
                            }
                        }
                        self.ranks[i].keep = why;
                    }
                }
            }
        }
    }

    fn obey(&mut self, order: Order) {
        if matches!(order, Order::Beat | Order::Go | Order::Gathered { .. } | Order::End(_) | Order::Kill) {
            self.pass_down(&order);
        }
        match order {
            Order::Beat => {}
            Order::Go if self.ranks.is_empty() && self.ending.is_none() => {
                if let Err(ending) = self.start_all() {
                    self.tell(News::Refused(ending.clone()));
                    self.end(ending);
                }
            }
            Order::Gathered { round, parts } => {
                for rank in &self.ranks {
                    let _ = rank.words.send(ToRank::Gathered { round, parts: parts.clone() });
                }
            }
            Order::Input(bytes) => {
                let taken = bytes.len() as u32;
                match &self.input {
                    Input::Open(to) if to.send(bytes).is_ok() => {}
                    _ => self.tell(News::Taken(taken)),
                }
            }
            Order::InputEnd => self.input = Input::None,
            Order::End(ending) => self.end(ending),
            Order::Kill => {
                self.end(Ending::new(5, "interrupted"));
                self.push(Push::Killed);
            }
            Order::Start(_) | Order::Part(_) | Order::Go => {
                self.end(Ending::new(4, "the launcher gave an order out of order"));
            }
        }
    }
}
