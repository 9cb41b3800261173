//! The process that starts the ranks, watches them, and sees that none outlives the job.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::liveness::{Watch, grace, pause, tick};
use super::segment::Segment;
use super::{Plan, RANK, SHM, SIZE, control_area};
use crate::error::{Error, Result};
use crate::fabric::shared::area::{Area, Failure, Life};
use crate::fabric::{Bounds, host_name};

/// How a job ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// 0 when every rank ended with 0; otherwise the code of the first failure, as
    /// [`Error::exit_code`] counts: 4 for a rank that was lost, 5 for an interrupt.
    pub exit_code: u8,
    /// What failed first, in words that name the rank. `None` when nothing did, or when a rank left
    /// the job and then ended with a code: it has had its say.
    pub message: Option<String>,
    /// Ranks that ended without the supervisor's help.
    pub ended: usize,
    /// Ranks that the supervisor had to kill: stopped, or too slow to end.
    pub killed: usize,
}

/// A job of processes to be started.
pub struct Supervisor<F> {
    ranks: usize,
    command: F,
    segment_bytes: usize,
    bounds: Bounds,
    interrupts: Option<Interrupts>,
}

/// How often the user has asked for the end.
type Interrupts = Box<dyn Fn() -> i32 + Send>;

/// A rank that has not joined so long after its start never will.
const JOINING: Duration = Duration::from_secs(60);
/// How often the supervisor asks for ended processes.
const LOOK: Duration = Duration::from_millis(5);

impl<F: FnMut(usize) -> Command> Supervisor<F> {
    /// A job of `ranks` processes, each started by the command that `command` makes for it. Ranks inherit
    /// standard input, output and error unless the command says otherwise.
    pub fn new(ranks: usize, command: F) -> Self {
        Supervisor { ranks, command, segment_bytes: 1 << 30, bounds: Bounds::default(), interrupts: None }
    }

    /// Shared memory of each rank: the most that its [`crate::fabric::Fabric::alloc`] can give. Memory is
    /// taken from the system only when it is allocated. 1 GiB when not said.
    pub fn segment_bytes(mut self, bytes: usize) -> Self {
        self.segment_bytes = bytes;
        self
    }

    /// Deadlines, for the ranks and for the supervisor.
    pub fn bounds(mut self, bounds: Bounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// For a program that catches the signals which ask it to end: how many came so far. The supervisor then
    /// catches none itself.
    pub fn interrupts(mut self, count: impl Fn() -> i32 + Send + 'static) -> Self {
        self.interrupts = Some(Box::new(count));
        self
    }

    /// Starts the ranks and returns when all have ended.
    ///
    /// Meanwhile SIGINT, SIGTERM and SIGHUP to this process end the job in order (a second one at once), unless
    /// [`Supervisor::interrupts`] counts them.
    /// A failed job ends within the silence bound and a grace of at most 5 s more. If this process is
    /// killed, the ranks end too; on Linux that goes by the calling thread, which waits here.
    ///
    /// # Errors
    /// [`Error::Argument`] for no ranks at all; [`Error::Resources`] and [`Error::System`] when the ranks
    /// cannot be started: then none is left running. What becomes of started ranks is in the [`Outcome`].
    pub fn run(mut self) -> Result<Outcome> {
        if self.ranks == 0 {
            return Err(Error::argument("ranks", 0, "a job has at least one", "give at least 1"));
        }
        let control = Segment::new(Area::bytes(self.ranks))?;
        let area = control_area(&control, self.ranks)?;
        area.supervisor_beat().store(1, Ordering::Relaxed);
        let segments = (0..self.ranks)
            .map(|rank| {
                Segment::new(self.segment_bytes).map_err(|e| Error::Resources {
                    what: format!("no shared memory for rank {rank} of {}: {e}", self.ranks),
                    remedy: "use fewer ranks, or raise the limit of open files (ulimit -n)".into(),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let interrupts = self.interrupts.take().unwrap_or_else(|| {
            let signals = Signals::listen();
            Box::new(move || signals.count())
        });
        let mut plan = Plan {
            rank: 0,
            size: self.ranks,
            bounds: self.bounds,
            segment_bytes: self.segment_bytes,
            control: control.fd(),
            segments: segments.iter().map(Segment::fd).collect(),
        };
        hear_of_children();
        let mut job = Running::new(area, self.bounds);
        for rank in 0..self.ranks {
            plan.rank = rank;
            job.ranks.push(Process::new(start((self.command)(rank), &plan)?));
        }
        // The ranks have their own by now; ours would keep the memory of ranks that ended.
        drop((segments, control));
        Ok(job.watch(&interrupts))
    }
}

/// Where `SIGCHLD` is ignored (by a parent that is a daemon), the system forgets children that end, and a wait for them never does.
fn hear_of_children() {
    // SAFETY: plain data; an action without a handler, in place of one that was none.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGCHLD, std::ptr::null(), &raw mut now);
        if now.sa_sigaction == libc::SIG_IGN {
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        }
    }
}

/// Starts one rank.
fn start(mut command: Command, plan: &Plan) -> Result<Child> {
    command.env(RANK, plan.rank.to_string()).env(SIZE, plan.size.to_string()).env(SHM, plan.print());
    let mut inherit = plan.segments.clone();
    inherit.push(plan.control);
    // SAFETY: no arguments, always succeeds.
    let supervisor = unsafe { libc::getpid() };
    let before_exec = move || {
        for fd in &inherit {
            // SAFETY: lets the new program keep our own file.
            if unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        // A Ctrl-C, and a scheduler's SIGTERM, go to the whole group: the supervisor alone answers them.
        for signal in [
            libc::SIGINT,
            libc::SIGHUP,
            libc::SIGTERM,
            libc::SIGQUIT,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGALRM,
            libc::SIGVTALRM,
        ] {
            // SAFETY: ignoring a signal.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        #[cfg(target_os = "linux")]
        // SAFETY: only asks to be killed when the parent ends.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL)
        };
        // SAFETY: always succeeds.
        if unsafe { libc::getppid() } != supervisor {
            return Err(std::io::Error::other("the supervisor is gone"));
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only system calls and allocates nothing (a failure
    // allocates an error, in a child that then ends).
    unsafe { command.pre_exec(before_exec) };
    command.spawn().map_err(|e| Error::Resources {
        what: format!(
            "rank {} of {} could not be started ({}): {e}",
            plan.rank,
            plan.size,
            command.get_program().to_string_lossy()
        ),
        remedy: "see that the program exists, and use fewer ranks or raise the limits (ulimit -u, -n)".into(),
    })
}

/// One started rank.
struct Process {
    child: Child,
    started: Instant,
    status: Option<ExitStatus>,
    stopped_since: Option<Instant>,
    killed: bool,
}

/// What `waitpid` has to say.
enum News {
    Ended(ExitStatus),
    Stopped,
    Continued,
}

impl Process {
    fn new(child: Child) -> Self {
        Process { child, started: Instant::now(), status: None, stopped_since: None, killed: false }
    }

    fn pid(&self) -> libc::pid_t {
        self.child.id() as libc::pid_t
    }

    /// The next change, if any. Asked of our own child, which has not been reaped.
    fn news(&self) -> Option<News> {
        let mut status = 0;
        let flags = libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED;
        // SAFETY: writes a status.
        if unsafe { libc::waitpid(self.pid(), &raw mut status, flags) } != self.pid() {
            return None;
        }
        Some(if libc::WIFSTOPPED(status) {
            News::Stopped
        } else if libc::WIFCONTINUED(status) {
            News::Continued
        } else {
            News::Ended(ExitStatus::from_raw(status))
        })
    }

    /// SIGKILL, which ends stopped processes too. Until it is reaped, the pid is this child's alone.
    fn kill(&mut self) {
        if self.status.is_none() {
            self.killed = true;
            // SAFETY: a signal to our own child.
            unsafe { libc::kill(self.pid(), libc::SIGKILL) };
        }
    }
}

/// A started job.
struct Running {
    area: Arc<Area>,
    bounds: Bounds,
    ranks: Vec<Process>,
    watch: Watch,
    /// The first failure in the supervisor's eyes: exit code and words.
    verdict: Option<(u8, Option<String>)>,
    failed_at: Option<Instant>,
}

impl Running {
    fn new(area: Arc<Area>, bounds: Bounds) -> Self {
        let watch = Watch::new(area.ranks());
        Running { area, bounds, ranks: Vec::new(), watch, verdict: None, failed_at: None }
    }

    fn watch(mut self, interrupts: &Interrupts) -> Outcome {
        let mut ticked = Instant::now();
        while self.ranks.iter().any(|r| r.status.is_none()) {
            let now = Instant::now();
            if now - ticked >= tick(&self.bounds) {
                ticked = now;
                self.area.supervisor_beat().fetch_add(1, Ordering::Relaxed);
                let area = &self.area;
                self.watch
                    .look(now, pause(&self.bounds), |rank| area.rank(rank).beat.load(Ordering::Relaxed));
            }
            for rank in 0..self.ranks.len() {
                self.look_at(rank, now);
            }
            match interrupts() {
                0 => {}
                1 => self.fail(Failure::Interrupted, 5, "interrupted".into()),
                _ => self.kill_all(),
            }
            self.end_what_failed(now);
            std::thread::sleep(LOOK);
        }
        let (exit_code, message) = self.verdict.take().unwrap_or((0, None));
        let killed = self.ranks.iter().filter(|r| r.killed).count();
        Outcome { exit_code, message, ended: self.ranks.len() - killed, killed }
    }

    fn name(&self, rank: usize) -> String {
        format!("rank {rank} ({}, shm, pid {})", host_name(), self.ranks[rank].pid())
    }

    fn doing(&self, rank: usize) -> String {
        let activity = self.area.rank(rank).activity();
        if activity.is_empty() { activity } else { format!(" {activity}") }
    }

    fn look_at(&mut self, rank: usize, now: Instant) {
        while self.ranks[rank].status.is_none() {
            match self.ranks[rank].news() {
                None => break,
                Some(News::Stopped) => self.ranks[rank].stopped_since = Some(now),
                Some(News::Continued) => self.ranks[rank].stopped_since = None,
                Some(News::Ended(status)) => {
                    self.ranks[rank].status = Some(status);
                    self.ended(rank, status);
                }
            }
        }
        if self.ranks[rank].status.is_some() {
            return;
        }
        // Ranks that wait for a silent one name it; what nobody waits for is found here, a little later.
        let patience = self.bounds.silence + self.bounds.silence / 4 + 2 * tick(&self.bounds);
        let process = &self.ranks[rank];
        if let Some(since) = process.stopped_since
            && now - since > patience
        {
            let text = format!(
                "{} was stopped for {:.1} s{}\n    continue it in time (SIGCONT), or find out who stopped it",
                self.name(rank),
                (now - since).as_secs_f64(),
                self.doing(rank)
            );
            return self.fail(Failure::Gone { rank }, 4, text);
        }
        let running = self.area.rank(rank).life() == Life::Running;
        match self.watch.silent_for(rank) {
            Some(silence) if running && silence > patience => {
                let text = format!(
                    "{} was silent for {:.1} s{}\n    the process was stopped, or the host is overloaded",
                    self.name(rank),
                    silence.as_secs_f64(),
                    self.doing(rank)
                );
                self.fail(Failure::Gone { rank }, 4, text);
            }
            None if running && now - process.started > JOINING.max(patience) => {
                let text = format!(
                    "{} has not joined the job\n    is it a program that uses this library?",
                    self.name(rank)
                );
                self.fail(Failure::Gone { rank }, 4, text);
            }
            _ => {}
        }
    }

    fn ended(&mut self, rank: usize, status: ExitStatus) {
        let left = self.area.rank(rank).life() == Life::Left;
        let cell = self.area.rank(rank);
        match (status.code(), status.signal()) {
            (Some(0), _) => cell.set_life(Life::Left),
            // It left in order: its code is its own business, and what it had to say it has said.
            (Some(code), _) if left => {
                self.note_failure();
                let code = u8::try_from(code).unwrap_or(4);
                self.verdict.get_or_insert((code, None));
            }
            (Some(code), _) => {
                cell.set_life(Life::Dead);
                let text = format!(
                    "{} ended with exit code {code}{}\n    its own words, if any, are above",
                    self.name(rank),
                    self.doing(rank)
                );
                self.fail(Failure::Gone { rank }, u8::try_from(code).unwrap_or(4), text);
            }
            (None, signal) => {
                cell.set_life(Life::Dead);
                let signal = signal.unwrap_or(0);
                let text = format!(
                    "{} was killed by {}{}\n    {}",
                    self.name(rank),
                    super::signal_name(signal),
                    self.doing(rank),
                    if signal == libc::SIGKILL {
                        "by hand, by a job scheduler, or by the system for lack of memory (see dmesg)"
                    } else {
                        "by hand, by a job scheduler, or by a fault of the program"
                    }
                );
                self.fail(Failure::Gone { rank }, 4, text);
            }
        }
    }

    /// Ends the job, if it has not failed yet.
    fn fail(&mut self, failure: Failure, code: u8, message: String) {
        self.note_failure();
        if self.verdict.is_none() {
            self.verdict = Some((code, Some(message)));
            self.area.fail(&failure);
            self.area.ring_all();
        }
    }

    /// Takes over what a rank has recorded.
    fn note_failure(&mut self) {
        if self.verdict.is_some() {
            return;
        }
        self.verdict = match self.area.failure() {
            None => None,
            Some(Failure::Aborted { reason, code, .. }) => Some((code.max(1), Some(reason))),
            Some(Failure::Gone { rank }) => Some((4, Some(format!("{} is gone", self.name(rank))))),
            Some(Failure::Interrupted) => Some((5, Some("interrupted".into()))),
        };
    }

    /// After a failure: ranks end by themselves; those that cannot, or do not in time, are killed.
    fn end_what_failed(&mut self, now: Instant) {
        self.note_failure();
        let failed = self.area.failure().is_some();
        if !failed {
            return;
        }
        let since = *self.failed_at.get_or_insert(now);
        let late = now - since > grace(&self.bounds);
        for rank in 0..self.ranks.len() {
            // Stopped or silent: it will not end by itself, but may only just have been stopped.
            let silent = self.watch.silent_for(rank).is_some_and(|s| s > self.bounds.silence);
            if late || silent || self.ranks[rank].stopped_since.is_some() {
                self.ranks[rank].kill();
            }
        }
    }

    fn kill_all(&mut self) {
        self.fail(Failure::Interrupted, 5, "interrupted".into());
        for rank in &mut self.ranks {
            rank.kill();
        }
    }
}

impl Drop for Running {
    /// Also when the start failed half-way: no rank is left behind, nor a zombie.
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|r| r.status.is_none()) {
            rank.kill();
            // It is being killed: waiting for it ends.
            let _ = rank.child.wait();
        }
    }
}

/// Signals that ask this process to end, counted while a supervisor runs.
struct Signals {
    /// Count when this one began.
    before: i32,
}

static CAUGHT: AtomicI32 = AtomicI32::new(0);
/// Supervisors at work, and what was there before the first.
static LISTENING: Mutex<(usize, Vec<(i32, libc::sigaction)>)> = Mutex::new((0, Vec::new()));

extern "C" fn count_signal(_: libc::c_int) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
}

impl Signals {
    fn listen() -> Self {
        let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
        listening.0 += 1;
        if listening.0 == 1 {
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                // SAFETY: plain data, all zeros is valid.
                let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
                // SAFETY: as above.
                let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
                new.sa_sigaction = count_signal as extern "C" fn(libc::c_int) as usize;
                new.sa_flags = libc::SA_RESTART;
                // SAFETY: the handler only adds to an atomic.
                unsafe {
                    libc::sigaction(signal, std::ptr::null(), &raw mut old);
                    // Whoever has had it ignored (nohup) keeps that.
                    if old.sa_sigaction != libc::SIG_IGN {
                        libc::sigaction(signal, &raw const new, std::ptr::null_mut());
                        listening.1.push((signal, old));
                    }
                }
            }
        }
        Signals { before: CAUGHT.load(Ordering::Relaxed) }
    }

    fn count(&self) -> i32 {
        CAUGHT.load(Ordering::Relaxed).wrapping_sub(self.before)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
        listening.0 -= 1;
        if listening.0 == 0 {
            for (signal, old) in listening.1.drain(..) {
                // SAFETY: puts back what was there.
                unsafe { libc::sigaction(signal, &raw const old, std::ptr::null_mut()) };
            }
        }
    }
}
