//! The connection to one agent: a child process (ssh, or the agent itself) with threads that read and write. The launcher has
//! some, and so has an agent with others below it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fulmen::job::messages::{self, Frames, Up};

use super::agent::expect_greeting;
use super::outbox::Outbox;

/// Of what ssh says the last lines are kept.
const LINES: usize = 40;
/// After the end of its stream a child has so long to end by itself.
pub const LINGER: Duration = Duration::from_secs(1);

/// Who hears an agent.
pub trait Hear: Send + 'static {
    /// It, or one below it, says something. `false`: that nobody wants to hear.
    fn take(&mut self, up: Up) -> bool;
    /// The connection has ended: what the child said last, and how it ended.
    fn gone(self, said: Vec<String>, status: String);
}

/// See the module.
pub struct Link {
    /// Orders to the agent.
    pub outbox: Outbox,
    child: Arc<Mutex<Child>>,
    base: Instant,
    /// Milliseconds after `base`.
    heard: Arc<AtomicU64>,
    /// The reader waits for our own output: the agent's silence is our doing.
    busy: Arc<AtomicBool>,
}

impl Link {
    /// Starts `command`, which is or leads to an agent. `first` is written before anything else, without the greeting: an
    /// agent that is to be copied.
    ///
    /// # Errors
    /// The system's.
    pub fn start(
        mut command: Command,
        first: Option<Arc<Vec<u8>>>,
        hear: impl Hear,
    ) -> std::io::Result<Link> {
        // A group of its own: the terminal's Ctrl-C is for the launcher alone.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let (stdin, stdout, stderr) = match (child.stdin.take(), child.stdout.take(), child.stderr.take()) {
            (Some(i), Some(o), Some(e)) => (i, o, e),
            _ => return Err(std::io::Error::other("a child without its streams")),
        };
        let child = Arc::new(Mutex::new(child));
        let base = Instant::now();
        let (heard, busy) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let greeted = Arc::new(AtomicBool::new(false));
        let said = Arc::new(Mutex::new(VecDeque::new()));
        let errors = thread::Builder::new().name("ssh's words".into()).spawn({
            let said = Arc::clone(&said);
            move || collect(stderr, &said)
        })?;
        let mut reader = Reader {
            base,
            heard: Arc::clone(&heard),
            busy: Arc::clone(&busy),
            greeted: Arc::clone(&greeted),
            hear,
        };
        let outbox = Outbox::start("to agent", Patient { to: stdin, first, greeted })?;
        thread::Builder::new().name("from agent".into()).spawn({
            let (child, outbox) = (Arc::clone(&child), outbox.clone());
            move || {
                let strange = reader.read(stdout).err();
                outbox.close();
                let status = end(&child);
                // It is gone: its words are all there, unless a child of its own keeps the stream.
                let until = Instant::now() + LINGER;
                while !errors.is_finished() && Instant::now() < until {
                    thread::sleep(Duration::from_millis(5));
                }
                let mut words: Vec<String> = lock(&said).iter().cloned().collect();
                words.extend(strange.map(|e| e.to_string()));
                reader.hear.gone(words, status);
            }
        })?;
        Ok(Link { outbox, child, base, heard, busy })
    }

    /// The child's process, and its group.
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// When the agent, or one below it, was last heard.
    pub fn heard(&self) -> Instant {
        match self.is_busy() {
            true => Instant::now(),
            false => self.base + Duration::from_millis(self.heard.load(Ordering::Relaxed)),
        }
    }

    /// Whether whoever hears the agent takes his time with what it said.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// Whether the child has ended. Its stream may still be held by what it has started.
    pub fn is_dead(&self) -> bool {
        matches!(lock(&self.child).try_wait(), Ok(Some(_)))
    }

    /// Ends the child, and what it has started in its group, by force.
    pub fn cut(&self) {
        kill(&mut lock(&self.child));
    }
}

fn kill(child: &mut Child) {
    if let Ok(None) = child.try_wait() {
        // SAFETY: a signal to the group of our own child, which has not been reaped.
        unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
    }
}

/// Waits for a child whose stream has ended, in words; one that lingers is killed.
fn end(child: &Mutex<Child>) -> String {
    let until = Instant::now() + LINGER;
    loop {
        let mut child = lock(child);
        match child.try_wait() {
            Ok(Some(status)) => {
                return status.code().map_or_else(|| status.to_string(), |c| format!("exit status {c}"));
            }
            Ok(None) if Instant::now() < until => {}
            Ok(None) => kill(&mut child),
            Err(e) => return e.to_string(),
        }
        drop(child);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Keeps the last lines of a stream.
fn collect(from: impl Read, said: &Mutex<VecDeque<String>>) {
    let mut from = BufReader::new(from);
    let mut line = vec![];
    loop {
        line.clear();
        // A line without an end is cut: nothing is kept without bound.
        match from.by_ref().take(4096).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let mut said = lock(said);
                said.push_back(String::from_utf8_lossy(&line).trim_end().to_string());
                if said.len() > LINES {
                    said.pop_front();
                }
            }
        }
    }
}

struct Reader<H> {
    base: Instant,
    heard: Arc<AtomicU64>,
    busy: Arc<AtomicBool>,
    greeted: Arc<AtomicBool>,
    hear: H,
}

impl<H: Hear> Reader<H> {
    fn note(&self) {
        self.heard.store(self.base.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn read(&mut self, mut from: ChildStdout) -> std::io::Result<()> {
        let mut frames = Frames::default();
        match expect_greeting(&mut from, &mut frames) {
            // ssh's own words say why.
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        self.greeted.store(true, Ordering::Release);
        self.note();
        while let Some(up) = messages::read(&mut from, &mut frames)? {
            self.busy.store(true, Ordering::Relaxed);
            let wanted = self.hear.take(up);
            self.note();
            self.busy.store(false, Ordering::Relaxed);
            if !wanted {
                break;
            }
        }
        Ok(())
    }
}

/// Writes what comes first at once, and the rest when the agent has greeted: what starts a copied agent may read
/// more than its share.
struct Patient<W> {
    to: W,
    first: Option<Arc<Vec<u8>>>,
    greeted: Arc<AtomicBool>,
}

impl<W: Write> Write for Patient<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Some(first) = self.first.take() {
            self.to.write_all(&first)?;
            self.to.flush()?;
            // An agent that never greets has its connection cut, and this thread is nobody's loss.
            while !self.greeted.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(2));
                if Arc::strong_count(&self.greeted) == 1 {
                    return Err(std::io::Error::other("no agent"));
                }
            }
        }
        self.to.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
