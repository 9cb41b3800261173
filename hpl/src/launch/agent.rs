//! The agent: `fulmen-run` on each host. It talks to the launcher over its standard input and output (ssh's, or a
//! pipe), starts this host's ranks, passes on what they say, and ends them, whatever happens to the launcher.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fulmen::job::env::{CONTROL, LOCAL_RANK, LOCAL_SIZE, RANK, SIZE};
use fulmen::job::messages::{
    self, Complaint, Ending, Fingerprint, Frames, FromRank, GREETING, How, News, Order, Program, Start,
    Stream, ToRank, Up, beat, grace, silence,
};

use super::children::{self, Change};
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
    /// A stream of a rank has ended.
    Drained,
}

/// A folder that is removed when the agent ends.
struct Copied(Option<PathBuf>);

impl Copied {
    fn program(&self) -> PathBuf {
        self.0.as_deref().unwrap_or(Path::new("/nonexistent")).join("program")
    }

    fn shown(&self) -> String {
        self.program().display().to_string()
    }

    /// Adds to the program's file, which is made by the first part.
    fn append(&self, file: &mut Option<File>, bytes: &[u8]) -> io::Result<()> {
        let file = match file {
            Some(file) => file,
            None => {
                let made = File::options().write(true).create_new(true).mode(0o700).open(self.program())?;
                file.insert(made)
            }
        };
        file.write_all(bytes)
    }

    fn remove(&mut self) {
        if let Some(folder) = self.0.take() {
            // Nothing can be done about what cannot be removed.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        self.remove();
    }
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

/// How far the end of the ranks has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Push {
    Asked,
    Terminated,
    Killed,
}

/// A rank in the agent's eyes.
struct Child {
    rank: u32,
    process: children::Rank,
    words: Sender<ToRank>,
    /// It uses the library.
    joined: bool,
    keep: Option<String>,
    stopped: Option<Instant>,
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
        self.out.say(&Up { host: self.start.host, news });
    }

    fn work(&mut self, copied: &mut Copied) {
        match self.check() {
            Ok(notes) => self.tell(News::Ready { pid: std::process::id(), notes }),
            Err(ending) => self.tell(News::Refused(ending)),
        }
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
                self.ranks.iter().filter(|r| r.joined && !r.process.ended()).for_each(|r| {
                    let _ = r.words.send(ToRank::Beat);
                });
            }
            self.watch(now);
            let asked = signals::count();
            if asked > self.signals {
                self.signals = asked;
                let reason = "its agent was asked to end by a signal".to_string();
                self.tell(News::Refused(Ending { code: 5, reason: reason.clone() }));
                self.end(Ending { code: 5, reason });
                if asked > 1 {
                    self.push(Push::Killed);
                }
            }
            self.end_in_order(now);
            if self.ending.is_some() && self.ranks.iter().all(|r| r.process.ended()) {
                let since = *over.get_or_insert(now);
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

    fn ended_well(&self) -> bool {
        self.ending.as_ref().is_some_and(|(_, e)| e.code == 0)
    }

    /// Whether the task can be done here.
    fn check(&self) -> Result<Vec<String>, Ending> {
        let refuse = |code, reason: String| Err(Ending { code, reason });
        let mut notes = vec![];
        let Program { path, fingerprint, .. } = &self.start.program;
        let path = path_of(path);
        let shown = path.display();
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) => {
                let remedy = "put the program there, or let it be copied with --copy";
                return refuse(2, format!("{shown}: {e}\n    {remedy}"));
            }
        };
        match file.metadata() {
            Ok(about) if about.is_file() && about.permissions().mode() & 0o111 != 0 => {}
            Ok(_) => return refuse(2, format!("{shown} is no program that may be executed")),
            Err(e) => return refuse(2, format!("{shown}: {e}")),
        }
        if let Some(wanted) = fingerprint {
            match Fingerprint::of(&mut file) {
                Ok(print) if print == *wanted => {}
                Ok(print) => {
                    let what =
                        format!("{shown} is of another build here: {print}, the launcher's is {wanted}");
                    return refuse(
                        2,
                        format!("{what}\n    put the same there, use --copy, or allow it with --any-build"),
                    );
                }
                Err(e) => return refuse(2, format!("{shown}: {e}")),
            }
        }
        let folder = path_of(&self.start.folder);
        if !folder.is_dir() {
            if !self.start.any_folder {
                return refuse(2, format!("--wdir: {}: there is no such folder", folder.display()));
            }
            notes
                .push(format!("there is no folder {}; the ranks start in the home folder", folder.display()));
        }
        Ok(notes)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Order(order) => {
                self.heard = Instant::now();
                self.obey(order);
            }
            Event::LauncherGone(why) => {
                self.launcher_gone = true;
                self.end(Ending { code: 4, reason: format!("the launcher is gone: {why}") });
            }
            Event::Drained => self.open -= 1,
            Event::Rank(i, word) => {
                let rank = self.ranks[i].rank;
                match word {
                    FromRank::Hello { .. } => self.ranks[i].joined = true,
                    FromRank::Gather { round, bytes } => self.tell(News::Gather { rank, round, bytes }),
                    FromRank::Failed(complaint) => self.tell(News::Failed { rank, complaint }),
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
                self.end(Ending { code: 5, reason: "interrupted".into() });
                self.push(Push::Killed);
            }
            Order::Start(_) | Order::Part(_) | Order::Go => {
                self.end(Ending { code: 4, reason: "the launcher gave an order out of order".into() });
            }
        }
    }

    fn start_all(&mut self) -> Result<(), Ending> {
        for i in 0..self.start.ranks.len() {
            let rank = self.start.ranks[i].rank;
            let pid = self.start_one(i).map_err(|(code, e)| {
                let program = path_of(&self.start.program.path);
                Ending {
                    code,
                    reason: format!("rank {rank} could not be started ({}): {e}", program.display()),
                }
            })?;
            self.tell(News::Started { rank, pid });
        }
        Ok(())
    }

    fn start_one(&mut self, i: usize) -> Result<u32, (u8, String)> {
        let start = &self.start;
        let rank = &start.ranks[i];
        let system = |e: io::Error| (3, e.to_string());
        let (ours, theirs) = UnixStream::pair().map_err(system)?;
        let folder = path_of(&start.folder);
        let home = || std::env::home_dir().filter(|h| h.is_dir()).unwrap_or_else(|| PathBuf::from("/"));
        let mut command = Command::new(path_of(&start.program.path));
        command
            .args(start.program.args.iter().map(|a| std::ffi::OsString::from_vec(a.clone())))
            .current_dir(if folder.is_dir() { folder } else { home() })
            .envs(start.vars.iter().map(|(k, v)| {
                (std::ffi::OsString::from_vec(k.clone()), std::ffi::OsString::from_vec(v.clone()))
            }))
            .env(CONTROL, theirs.as_raw_fd().to_string())
            .env(RANK, rank.rank.to_string())
            .env(SIZE, start.welcome.hosts.len().to_string())
            .env(LOCAL_RANK, rank.local.to_string())
            .env(LOCAL_SIZE, start.ranks.len().to_string())
            .stdin(if rank.rank == 0 { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = children::start(command, &theirs).map_err(|e| {
            (
                if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENOEXEC) {
                    2
                } else {
                    3
                },
                e.to_string(),
            )
        })?;
        drop(theirs);
        let pid = process.pid();
        if let Some(guard) = &mut self.guard {
            guard.watch(pid);
        }
        let child = process.child();
        let (input, streams) = (child.stdin.take(), (child.stdout.take(), child.stderr.take()));
        let (words, to_write) = mpsc::channel();
        let number = rank.rank;
        self.ranks.push(Child {
            rank: number,
            process,
            words,
            joined: false,
            keep: None,
            stopped: None,
            told: false,
        });
        // From here on a failure leaves no process behind: it is among `ranks`.
        let thread = |e: String| (3, e);
        if let (Some(out), Some(err)) = streams {
            self.forward(number, Stream::Out, out).map_err(thread)?;
            self.forward(number, Stream::Err, err).map_err(thread)?;
        }
        if let Some(input) = input {
            let (to, chunks) = mpsc::channel();
            self.input = Input::Open(to);
            let (out, host) = (self.out.clone(), self.start.host);
            spawn("input", move || feed(input, &chunks, &out, host)).map_err(thread)?;
        }
        let index = self.ranks.len() - 1;
        let reader = ours.try_clone().map_err(system)?;
        let events = self.events.clone();
        spawn("from rank", move || hear_rank(index, reader, &events)).map_err(thread)?;
        let welcome = ToRank::Welcome(self.start.welcome.clone());
        spawn("to rank", move || tell_rank(ours, &welcome, &to_write)).map_err(thread)?;
        Ok(pid)
    }

    /// Passes on what a rank writes.
    fn forward(
        &mut self,
        rank: u32,
        stream: Stream,
        mut from: impl Read + Send + 'static,
    ) -> Result<(), String> {
        let (out, events, host) = (self.out.clone(), self.events.clone(), self.start.host);
        spawn("output", move || {
            let mut chunk = vec![0; 1 << 15];
            // After the launcher's end it is read all the same: nobody's write must fail for that.
            loop {
                match from.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(n) => {
                        let news = News::Output { rank, stream, bytes: chunk[..n].to_vec() };
                        out.send(&Up { host, news });
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            let _ = events.send(Event::Drained);
        })?;
        self.open += 1;
        Ok(())
    }

    /// Looks at every process, and at the launcher.
    fn watch(&mut self, now: Instant) {
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
                        // What it ended with before it knew of anything is its own.
                        let asked = asked
                            && !matches!(how, How::Signal(s) if s == libc::SIGSEGV || s == libc::SIGBUS);
                        news.push(News::Ended { rank: rank.rank, how, asked });
                    }
                }
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
                    complaint: Complaint { code: 4, follows: false, words },
                });
            }
        }
        news.into_iter().for_each(|n| self.tell(n));
        if !self.launcher_gone && now - self.heard.max(self.awake) > patience {
            self.launcher_gone = true;
            let reason = format!("the launcher was silent for {:.1} s", (now - self.heard).as_secs_f64());
            let ending = Ending { code: 4, reason };
            // It may only have been stopped, and hear this later.
            self.tell(News::Refused(ending.clone()));
            self.end(ending);
        }
    }

    fn end(&mut self, ending: Ending) {
        self.input = Input::None;
        if self.ending.is_none() {
            self.ending = Some((Instant::now(), ending));
        }
    }

    /// Asks, then SIGTERM, then SIGKILL, with a grace between.
    fn end_in_order(&mut self, now: Instant) {
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

    fn push(&mut self, how: Push) {
        self.push = Some(self.push.map_or(how, |p| p.max(how)));
        let mut kept = vec![];
        for rank in self.ranks.iter().filter(|r| !r.process.ended()) {
            match (how, &rank.keep) {
                // Who cannot be asked is told.
                (Push::Asked, None) if rank.stopped.is_some() => rank.process.signal(libc::SIGKILL),
                (Push::Asked, _) if rank.joined && rank.stopped.is_none() => {}
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

fn feed(mut to: ChildStdin, chunks: &Receiver<Vec<u8>>, out: &Outbox, host: u32) {
    let mut open = true;
    for chunk in chunks {
        open = open && to.write_all(&chunk).is_ok();
        out.say(&Up { host, news: News::Taken(chunk.len() as u32) });
    }
}

fn hear_rank(index: usize, mut from: UnixStream, events: &Sender<Event>) {
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
        let complaint = Complaint { code: 2, follows: false, words };
        let _ = events.send(Event::Rank(index, FromRank::Failed(complaint)));
    }
}

fn tell_rank(mut to: UnixStream, welcome: &ToRank, words: &Receiver<ToRank>) {
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

fn path_of(bytes: &[u8]) -> PathBuf {
    Path::new(&std::ffi::OsString::from_vec(bytes.to_vec())).to_path_buf()
}
