//! Hosts, and programs on the first of them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// No test waits longer for anything: a guard against hangs, not a measure.
pub const HANG: Duration = Duration::from_secs(90);

/// One set of hosts at a time: they share the machine's cores.
static ONE: Mutex<()> = Mutex::new(());

/// Hosts `h1`, `h2`, ... with cables as wanted. Gone when dropped, and when this process dies.
pub struct Lab {
    /// `ci/hosts`, which holds them until its input ends.
    holder: Child,
    at: PathBuf,
    /// Where programs are started: seen by all hosts.
    work: tempfile::TempDir,
    n: usize,
    _one: MutexGuard<'static, ()>,
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/hosts")
}

impl Lab {
    /// Hosts; `None` where they cannot be had: then the reason has been said.
    pub fn up(n: usize, shape: &str) -> Option<Lab> {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let work = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = work.path().join("hosts");
        let mut holder = Command::new(script())
            .arg("up")
            .args([at.as_os_str(), n.to_string().as_ref(), shape.as_ref()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut said).unwrap();
        if said != "ready\n" {
            let mut why = String::new();
            holder.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            let status = holder.wait().unwrap();
            assert_eq!(status.code(), Some(77), "ci/hosts: {said}{why}");
            eprintln!("skipped: {}", why.trim());
            return None;
        }
        std::fs::create_dir(work.path().join("run")).unwrap();
        Some(Lab { holder, at, work, n, _one: one })
    }

    /// The folder that programs are started in.
    pub fn folder(&self) -> PathBuf {
        self.work.path().join("run")
    }

    /// Where host `i` keeps its /etc/ssh, `ssh`, and its temporary files, `tmp`.
    pub fn etc(&self, i: usize) -> PathBuf {
        self.at.join(format!("etc.{i}"))
    }

    pub fn hosts(&self) -> std::ops::RangeInclusive<usize> {
        1..=self.n
    }

    /// A command on a host.
    pub fn on(&self, i: usize, command: &[&str]) -> Command {
        let mut on = Command::new(script());
        on.arg("exec").args([self.at.as_os_str(), i.to_string().as_ref()]).args(command);
        on.current_dir(self.folder()).stdin(Stdio::null());
        on
    }

    /// What a command on a host prints.
    pub fn says(&self, i: usize, command: &[&str]) -> String {
        let output = self.on(i, command).output().unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).trim().to_string()
    }

    /// Pulls a cable (`down`), or drops what comes `in` or goes `out` of an interface.
    pub fn cut(&self, i: usize, interface: &str, how: &str) {
        self.script(&["cut", &self.dir(), &i.to_string(), interface, how]);
    }

    pub fn heal(&self, i: usize, interface: &str) {
        self.script(&["heal", &self.dir(), &i.to_string(), interface]);
    }

    fn dir(&self) -> String {
        self.at.display().to_string()
    }

    fn script(&self, args: &[&str]) {
        let output = Command::new(script()).args(args).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
    }

    /// Starts `fulmen-run` on the first host; a start takes long where the machine is busy and hosts are reached one through
    /// the other.
    pub fn start(&self, args: &[&str]) -> Job {
        let mut command = self.on(1, &[env!("CARGO_BIN_EXE_fulmen-run")]);
        if !args.contains(&"--start-timeout") {
            command.args(["--start-timeout", "60"]);
        }
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in ["SLURM_JOB_NODELIST", "SLURM_NODELIST", "SSH_AUTH_SOCK"] {
            command.env_remove(name);
        }
        let began = Instant::now();
        let mut child = command.spawn().unwrap();
        let out = Text::of(child.stdout.take().unwrap());
        let err = Text::of(child.stderr.take().unwrap());
        Job { child, out, err, began }
    }

    pub fn run(&self, args: &[&str]) -> Ended {
        self.start(args).end()
    }

    /// Processes on a host, but for what makes the host: its first and sshd's.
    pub fn processes(&self, i: usize) -> Vec<Process> {
        let first: u32 =
            std::fs::read_to_string(self.at.join(format!("pid.{i}"))).unwrap().trim().parse().unwrap();
        let space = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = space(&first.to_string());
        let of_all = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let pid: u32 = name.parse().ok().filter(|&pid| pid != first)?;
            if space(&name) != own {
                return None;
            }
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (head, rest) = stat.rsplit_once(')')?;
            // Who has ended and not been looked at yet lives no more.
            if rest.trim_start().starts_with('Z') || head.contains("(sshd") {
                return None;
            }
            let file = |file: &str| {
                let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let words = file("cmdline").split_terminator('\0').map(String::from).collect();
            let rank = file("environ").split('\0').find_map(|v| v.strip_prefix("FULMEN_RANK=")?.parse().ok());
            Some(Process { pid, words, rank })
        });
        of_all.collect()
    }

    /// What is left on the hosts: processes, memory that has a name, temporary files. Waits for it to go, up to `patience`.
    pub fn left_over(&self, patience: Duration) -> Vec<String> {
        let until = Instant::now() + patience;
        loop {
            let mut left = vec![];
            for i in self.hosts() {
                left.extend(
                    self.processes(i).into_iter().map(|p| format!("h{i}: process {} {:?}", p.pid, p.words)),
                );
                let first = std::fs::read_to_string(self.at.join(format!("pid.{i}"))).unwrap();
                let memory = PathBuf::from(format!("/proc/{}/root/dev/shm", first.trim()));
                for folder in [memory, self.etc(i).join("tmp")] {
                    let names = std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.file_name());
                    left.extend(names.map(|name| format!("h{i}: {}/{}", folder.display(), name.display())));
                }
            }
            if left.is_empty() || Instant::now() > until {
                return left;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        // It ends by itself now; whatever it is stuck in, nothing of it outlives it.
        let until = Instant::now() + Duration::from_secs(20);
        while matches!(self.holder.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A process on a host; its pid is this process's view.
#[derive(Clone, Debug)]
pub struct Process {
    pub pid: u32,
    pub words: Vec<String>,
    pub rank: Option<usize>,
}

impl Process {
    pub fn is(&self, program: &str, word: &str) -> bool {
        let name = self.words.first().and_then(|w| Path::new(w).file_name()).unwrap_or_default();
        name == program && self.words.iter().any(|w| w == word)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a process of a host that this test has made.
        unsafe { libc::kill(self.pid as i32, signal) };
    }
}

/// What a stream has brought so far.
struct Text {
    text: std::sync::Arc<Mutex<String>>,
    reader: std::thread::JoinHandle<()>,
}

impl Text {
    fn of(from: impl Read + Send + 'static) -> Text {
        let text = std::sync::Arc::<Mutex<String>>::default();
        let mine = std::sync::Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
                let mut text = mine.lock().unwrap();
                text.push_str(&String::from_utf8_lossy(&line));
                text.push('\n');
            }
        });
        Text { text, reader }
    }

    fn so_far(&self) -> String {
        self.text.lock().unwrap().clone()
    }
}

/// A job under way.
pub struct Job {
    child: Child,
    out: Text,
    err: Text,
    pub began: Instant,
}

impl Job {
    /// What it has said on stdout and stderr so far.
    pub fn so_far(&self) -> String {
        self.out.so_far() + &self.err.so_far()
    }

    pub fn is_over(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it has said this; `false` when it ends without.
    pub fn until(&mut self, words: &str) -> bool {
        self.until_times(words, 1)
    }

    pub fn until_times(&mut self, words: &str, times: usize) -> bool {
        let until = Instant::now() + HANG;
        while times > 0 && self.so_far().matches(words).count() < times {
            if self.is_over() {
                std::thread::sleep(Duration::from_millis(100)); // for what is still in the pipes
                return self.so_far().matches(words).count() >= times;
            }
            assert!(Instant::now() < until, "no `{words}` in {}", self.so_far());
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Waits for its end, but not for ever.
    pub fn end(mut self) -> Ended {
        let until = Instant::now() + HANG;
        while !self.is_over() {
            if Instant::now() > until {
                let _ = self.child.kill();
                panic!("hangs: {}", self.so_far());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let took = self.began.elapsed();
        let code = self.child.wait().unwrap().code();
        // What is left of the streams is in the pipes, unless someone holds them: that is a process left over.
        let until = Instant::now() + Duration::from_secs(5);
        while !(self.out.reader.is_finished() && self.err.reader.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        Ended { code, out: self.out.so_far(), err: self.err.so_far(), took }
    }
}

#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
    pub took: Duration,
}

impl Ended {
    pub fn expect(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no `{word}` in {self:?}");
        }
    }

    /// The hash of the solution's bits.
    pub fn hash(&self) -> String {
        hash(&self.err).unwrap_or_else(|| panic!("no hash in {self:?}"))
    }
}

pub fn hash(text: &str) -> Option<String> {
    text.lines().find_map(|l| l.split("   x ").nth(1).map(str::to_string))
}

/// A run that takes a moment, and what is to be said of it.
pub const HPL: &str = env!("CARGO_BIN_EXE_hpl-run");

/// The hash of a run by one process.
pub fn alone(args: &[&str]) -> String {
    let output = Command::new(HPL)
        .args(args)
        .args(["-P", "1", "-Q", "1", "--threads", "1", "--hash", "--output", "/dev/null"])
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    hash(&err).unwrap_or_else(|| panic!("no hash in {err}"))
}
