//! A rank's end of the socket to its agent.

use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::lock;
use super::messages::{
    self, Complaint, Ending, Frames, FromRank, GREETING, LONGEST_WORD, Sight, ToRank, Welcome, grace, silence,
};
use crate::error::{Error, Result};
use crate::fabric::Fabric;

/// The agent greets before it starts the program.
const GREETED: Duration = Duration::from_secs(10);
/// The launcher knows who is missing, and says so before this rank gives up by itself.
const LATER: Duration = Duration::from_secs(5);

/// What the listening thread and the rank both know.
#[derive(Default)]
struct State {
    ending: Option<Ending>,
    fabric: Option<Weak<dyn Fabric>>,
    keep: bool,
}

/// See the module.
pub struct Control {
    to: Arc<Mutex<UnixStream>>,
    gathered: Receiver<(u32, Vec<Vec<u8>>)>,
    round: u32,
    state: Arc<Mutex<State>>,
    /// The job, as the agent told it.
    pub welcome: Welcome,
}

fn broken(e: impl ToString) -> Error {
    Error::System { what: "this rank cannot talk to its agent (fulmen-run)".into(), os: e.to_string() }
}

impl Control {
    /// Takes the socket that the agent has left at `fd`, greets, and listens from now on.
    ///
    /// # Errors
    /// [`Error::System`] when there is no agent at its other end.
    ///
    /// # Safety
    /// `fd` is this process's, from whoever started it, and nobody else uses it.
    pub unsafe fn take(fd: i32) -> Result<Control> {
        // SAFETY: asks about a number, whatever it is.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            let what = "the socket is not there: a program between fulmen-run and this one has closed it";
            return Err(broken(what));
        }
        // SAFETY: it is open, and by the caller's word ours alone.
        let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: a flag of our own file: what this rank starts is no rank.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        Control::over(stream)
    }

    fn over(mut stream: UnixStream) -> Result<Control> {
        stream.set_read_timeout(Some(GREETED)).map_err(broken)?;
        let mut frames = Frames::default();
        greeting(&mut stream, &mut frames).map_err(broken)?;
        let welcome = match messages::read(&mut stream, &mut frames).map_err(broken)? {
            Some(ToRank::Welcome(welcome)) => welcome,
            other => return Err(broken(format!("it began with {other:?}"))),
        };
        stream.write_all(GREETING.as_bytes()).map_err(broken)?;
        messages::write(&mut stream, &FromRank::Hello { version: env!("CARGO_PKG_VERSION").into() })
            .map_err(broken)?;
        let bound = Duration::from_millis(welcome.bound_ms);
        // Often enough to find silence in time.
        stream.set_read_timeout(Some((silence(bound) / 8).max(Duration::from_millis(1)))).map_err(broken)?;
        let (words, gathered) = mpsc::channel();
        let state = Arc::<Mutex<State>>::default();
        let to = Arc::new(Mutex::new(stream.try_clone().map_err(broken)?));
        let listener =
            Listener { from: stream, frames, words, to: Arc::clone(&to), state: Arc::clone(&state), bound };
        let thread = std::thread::Builder::new().name("fulmen-control".into());
        thread.spawn(move || listener.run()).map_err(broken)?;
        Ok(Control { to, gathered, round: 0, state, welcome })
    }

    fn say(&self, word: &FromRank) -> Result<()> {
        messages::write(&mut *lock(&self.to), word).map_err(broken)
    }

    /// Everyone's bytes, by rank.
    ///
    /// # Errors
    /// When the job ends, or someone does not come, or this rank is interrupted.
    pub fn all_gather(&mut self, mine: &[u8], interrupted: impl Fn() -> bool) -> Result<Vec<Vec<u8>>> {
        if mine.len() > LONGEST_WORD {
            return Err(Error::Internal(format!("a word of {} bytes at the rendezvous", mine.len())));
        }
        let round = self.round;
        self.round += 1;
        self.say(&FromRank::Gather { round, bytes: mine.to_vec() })?;
        let until = Instant::now() + Duration::from_millis(self.welcome.start_ms) + LATER;
        loop {
            // Asked first: what came before the job's end counts, for it may say whose fault the end is.
            let ending = self.ending();
            let patience = if ending.is_some() { Duration::ZERO } else { Duration::from_millis(20) };
            match self.gathered.recv_timeout(patience) {
                Ok((of, parts)) if of == round && parts.len() == self.welcome.hosts.len() => {
                    return Ok(parts);
                }
                Ok((of, _)) => return Err(broken(format!("it answers round {of} in round {round}"))),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = ending {
                        return Err(error);
                    }
                    if interrupted() {
                        return Err(Error::Interrupted);
                    }
                    if Instant::now() >= until {
                        return Err(broken("the rendezvous of the ranks was not over in time"));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.ending().unwrap_or_else(|| broken("it is gone")));
                }
            }
        }
    }

    /// Whether the launcher has ended the job, as an error that says why.
    pub fn ending(&self) -> Option<Error> {
        lock(&self.state).ending.as_ref().map(as_error)
    }

    /// From now on an end of the job breaks this fabric.
    pub fn watch_over(&self, fabric: &Arc<dyn Fabric>) {
        let mut state = lock(&self.state);
        state.fabric = Some(Arc::downgrade(fabric));
        if let Some(ending) = &state.ending {
            fabric.fail(&as_error(ending));
        }
    }

    /// Tells the launcher what this rank fails with. Empty words: it has said them itself.
    pub fn fail(&self, complaint: Complaint) {
        // An agent that is gone is found by the listener.
        let _ = self.say(&FromRank::Failed(complaint));
    }

    /// Whether this rank must never be killed hard, and why.
    pub fn keep(&self, why: Option<&str>) {
        lock(&self.state).keep = why.is_some();
        #[cfg(target_os = "linux")]
        // SAFETY: which signal this process gets when its parent ends: none, or as the agent set it.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, if why.is_some() { 0 } else { libc::SIGKILL })
        };
        let _ = self.say(&FromRank::Keep(why.map(str::to_string)));
    }
}

fn as_error(ending: &Ending) -> Error {
    match ending.code {
        5 => Error::Interrupted,
        code => Error::Ended { message: ending.reason.clone(), code },
    }
}

fn greeting(from: &mut impl io::Read, frames: &mut Frames) -> io::Result<()> {
    let (mut seen, mut chunk) = (vec![], [0; 1 << 12]);
    loop {
        match messages::greeted(&seen).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))? {
            Some(at) => {
                frames.push(&seen[at..]);
                return Ok(());
            }
            None => match from.read(&mut chunk)? {
                0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is gone")),
                n => seen.extend_from_slice(&chunk[..n]),
            },
        }
    }
}

/// The thread that hears the agent.
struct Listener {
    from: UnixStream,
    to: Arc<Mutex<UnixStream>>,
    frames: Frames,
    words: Sender<(u32, Vec<Vec<u8>>)>,
    state: Arc<Mutex<State>>,
    bound: Duration,
}

impl Listener {
    fn run(mut self) {
        let (mut heard, mut looked) = (Instant::now(), Instant::now());
        let why = loop {
            let read = messages::read(&mut self.from, &mut self.frames);
            let now = Instant::now();
            // Who was stopped himself blames nobody.
            if now - looked > silence(self.bound) / 2 {
                heard = now;
            }
            looked = now;
            match read {
                Ok(Some(word)) => {
                    heard = now;
                    match word {
                        ToRank::Gathered { round, parts } => drop(self.words.send((round, parts))),
                        ToRank::End(ending) => self.end(ending),
                        ToRank::Beat | ToRank::Welcome(_) => {}
                    }
                }
                Ok(None) => break "is gone".to_string(),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if now - heard > silence(self.bound) {
                        break format!("was silent for {:.1} s", (now - heard).as_secs_f64());
                    }
                }
                Err(e) => break format!("cannot be heard: {e}"),
            }
        };
        self.end(Ending::new(4, format!("this rank's agent (fulmen-run) {why}")));
        // Nobody is left who would end this process if it does not end by itself.
        std::thread::sleep(2 * grace(self.bound));
        if !lock(&self.state).keep {
            let _ = writeln!(io::stderr(), "fulmen: this rank's agent (fulmen-run) {why}");
            // SAFETY: ends the process, whatever its other threads are stuck in.
            unsafe { libc::_exit(4) };
        }
    }

    fn end(&self, ending: Ending) {
        let fabric = {
            let mut state = lock(&self.state);
            if state.ending.is_some() {
                return;
            }
            state.ending = Some(ending.clone());
            state.fabric.as_ref().and_then(Weak::upgrade)
        };
        if let Some(fabric) = fabric {
            // The rank may be writing, and its agent not reading: who listens waits for neither.
            if let (Some(sight), Ok(mut to)) = (sight(&*fabric, &ending.lost), self.to.try_lock()) {
                let _ = messages::write(&mut *to, &FromRank::Sees(sight));
            }
            fabric.fail(&as_error(&ending));
        }
    }
}

/// What this rank sees of the lost ones, if it is none of them.
fn sight(fabric: &dyn Fabric, lost: &[u32]) -> Option<Sight> {
    let is_lost = |rank: usize| lost.iter().any(|lost| *lost as usize == rank);
    let first = lost.iter().map(|rank| *rank as usize).find(|rank| *rank < fabric.size())?;
    if is_lost(fabric.rank()) {
        return None;
    }
    let doing = fabric.doing();
    let waits_for = doing.waits_for.as_ref().filter(|(rank, _)| is_lost(*rank));
    let of = waits_for.map_or(first, |(rank, _)| *rank);
    let mut words = format!("its link to rank {of} is {}", fabric.link(of));
    if !doing.activity.is_empty() {
        words += &format!("; {}", doing.activity);
    }
    if let Some((rank, put)) = &doing.waits_for {
        words += &format!(", waiting for {put} from rank {rank}");
    }
    Some(Sight { waits: waits_for.is_some(), words })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::messages::Hidden;

    fn welcome(bound_ms: u64) -> ToRank {
        ToRank::Welcome(Welcome {
            hosts: vec!["a".into(), "b".into()],
            secret: Hidden([7; 32]),
            bound_ms,
            start_ms: 60_000,
        })
    }

    /// An agent and a rank in one process.
    fn pair(bound_ms: u64) -> (UnixStream, Frames, Control) {
        let (mut agent, rank) = UnixStream::pair().unwrap();
        agent.write_all(GREETING.as_bytes()).unwrap();
        messages::write(&mut agent, &welcome(bound_ms)).unwrap();
        let control = Control::over(rank).unwrap();
        let mut frames = Frames::default();
        greeting(&mut agent, &mut frames).unwrap();
        let hello = messages::read::<FromRank>(&mut agent, &mut frames).unwrap();
        assert!(matches!(hello, Some(FromRank::Hello { .. })));
        (agent, frames, control)
    }

    #[test]
    fn words_go_up_and_come_down() {
        let (mut agent, mut frames, mut control) = pair(600_000);
        let rank = std::thread::spawn(move || {
            let first = control.all_gather(b"x", || false);
            (first, control.all_gather(b"y", || false), control)
        });
        for round in 0..2 {
            let word = messages::read::<FromRank>(&mut agent, &mut frames).unwrap().unwrap();
            let bytes = vec![b'x' + round as u8];
            assert_eq!(word, FromRank::Gather { round, bytes: bytes.clone() });
            messages::write(&mut agent, &ToRank::Beat).unwrap();
            messages::write(&mut agent, &ToRank::Gathered { round, parts: vec![bytes, vec![]] }).unwrap();
        }
        let (first, second, mut control) = rank.join().unwrap();
        assert_eq!((first.unwrap()[0][0], second.unwrap()[0][0]), (b'x', b'y'));
        assert!(control.all_gather(&vec![0; LONGEST_WORD + 1], || false).is_err());
    }

    /// Else a rank whose fault it is would tell, in its own place, only that the job has ended.
    #[test]
    fn what_was_gathered_before_the_end_is_heard() {
        let (mut agent, _, mut control) = pair(600_000);
        messages::write(&mut agent, &ToRank::Gathered { round: 0, parts: vec![vec![1], vec![2]] }).unwrap();
        messages::write(&mut agent, &ToRank::End(Ending::new(3, "rank 0 (a) failed"))).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while control.ending().is_none() {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        assert_eq!(control.all_gather(b"", || false).unwrap(), [[1], [2]]);
        assert_eq!(control.all_gather(b"", || false).unwrap_err().exit_code(), 3);
    }

    #[test]
    fn the_end_breaks_the_fabric_and_every_wait() {
        let (mut agent, _, mut control) = pair(600_000);
        let fabric = crate::fabric::mem::Job::new(1, &Default::default()).unwrap().build().remove(0);
        control.watch_over(&fabric);
        assert!(control.ending().is_none() && fabric.poll().is_ok());
        assert!(matches!(control.all_gather(b"", || true), Err(Error::Interrupted)));
        let end = ToRank::End(Ending::new(4, "rank 3 (c) was killed"));
        messages::write(&mut agent, &end).unwrap();
        let error = control.all_gather(b"", || false).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string()), (4, "rank 3 (c) was killed".into()));
        // The fabric hears of it from the same thread, a moment later.
        let until = Instant::now() + Duration::from_secs(10);
        while fabric.poll().is_ok() {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        assert!(fabric.poll().unwrap_err().to_string().contains("rank 3 (c) was killed"));
    }

    /// A rank tells what it sees of lost ranks before it ends.
    #[test]
    fn the_end_of_others_is_seen() {
        let mut fabrics = crate::fabric::mem::Job::new(3, &Default::default()).unwrap().build();
        let fabric = fabrics.remove(0);
        let (mut agent, mut frames, control) = pair(600_000);
        control.watch_over(&fabric);
        let end = Ending { lost: vec![2], ..Ending::new(4, "c is silent") };
        messages::write(&mut agent, &ToRank::End(end)).unwrap();
        let said = messages::read::<FromRank>(&mut agent, &mut frames).unwrap();
        let words = "its link to rank 2 is mem".to_string();
        assert_eq!(said, Some(FromRank::Sees(Sight { waits: false, words })));
        // Nothing to say: no such rank, or itself.
        assert_eq!(sight(&*fabric, &[7]), None);
        assert_eq!(sight(&*fabric, &[0, 1]), None);
        assert_eq!(sight(&*fabric, &[]), None);
    }

    #[test]
    fn an_agent_that_speaks_nonsense_is_refused() {
        for said in [&b"fulmen job 0\n"[..], &b"x\n"[..], &[GREETING.as_bytes(), &[9, 0, 0, 0, 9]].concat()] {
            let (mut agent, rank) = UnixStream::pair().unwrap();
            agent.write_all(said).unwrap();
            agent.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(matches!(Control::over(rank), Err(Error::System { .. })));
        }
        // SAFETY: no such file: nobody's.
        assert!(unsafe { Control::take(1_000_000) }.is_err());
    }
}
