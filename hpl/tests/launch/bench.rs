//! A folder with stubs, and programs started in it.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No test waits longer: generous, for machines with many other things to do.
pub const HANG: Duration = Duration::from_secs(60);

/// A folder for what ranks leave, and for stubs.
pub struct Bench(pub tempfile::TempDir);

impl Bench {
    pub fn new() -> Bench {
        Bench(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A program of these lines.
    pub fn script(&self, name: &str, lines: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    }

    /// An ssh that runs the command on this machine, whatever the host.
    pub fn ssh(&self) -> String {
        self.script("stub", "host=$1; shift; exec sh -c \"$*\"")
    }

    /// The pids that ranks have left as `pid.NAME`, as many as `n` names say.
    pub fn pids(&self, n: usize) -> Vec<u32> {
        let until = Instant::now() + HANG;
        loop {
            let found: Vec<u32> = std::fs::read_dir(self.0.path())
                .unwrap()
                .filter_map(|e| {
                    let e = e.unwrap();
                    let name = e.file_name().into_string().unwrap();
                    name.starts_with("pid.").then(|| std::fs::read_to_string(e.path()).unwrap())
                })
                .filter_map(|text| text.trim().parse().ok())
                .collect();
            if found.len() >= n {
                return found;
            }
            assert!(Instant::now() < until, "only {found:?} of {n} came");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn run(&self, args: &[&str]) -> Ended {
        self.start(args).end()
    }

    pub fn start(&self, args: &[&str]) -> Started {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fulmen-run"));
        command.args(args).current_dir(self.0.path()).env("BENCH", self.0.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in ["SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
            command.env_remove(name);
        }
        // Whatever the shell of the tests ignores: a test begins with the defaults.
        let reset = || {
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                // SAFETY: no handler.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // SAFETY: only sets signals' actions.
        unsafe { command.pre_exec(reset) };
        Started(command.spawn().unwrap())
    }
}

pub struct Started(pub Child);

impl Started {
    pub fn signal(&self, signal: i32) {
        signal_to(self.0.id(), signal);
    }

    /// Waits, but not for ever.
    pub fn end(mut self) -> Ended {
        drop(self.0.stdin.take());
        let until = Instant::now() + HANG;
        // Short outputs: the pipes hold them.
        while self.0.try_wait().unwrap().is_none() {
            if Instant::now() > until {
                self.0.kill().unwrap();
                let Output { stdout, stderr, .. } = self.0.wait_with_output().unwrap();
                panic!("hangs: {}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Output { status, stdout, stderr } = self.0.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended { code: status.code(), out: text(stdout), err: text(stderr) }
    }
}

#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    pub fn expect(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no `{word}` in {self:?}");
        }
    }

    pub fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.out.lines().collect();
        lines.sort_unstable();
        lines
    }
}

pub fn signal_to(pid: u32, signal: i32) {
    // SAFETY: a signal to a process that this test has started.
    unsafe { libc::kill(pid as i32, signal) };
}

pub fn lives(pid: u32) -> bool {
    // Zombies that init has not looked at yet live no more.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|s| s.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z')))
}

pub fn all_gone(pids: &[u32]) {
    let until = Instant::now() + HANG;
    for pid in pids {
        while lives(*pid) {
            assert!(Instant::now() < until, "{pid} is left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The parent of a process.
pub fn parent(pid: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Goes on when so many ranks and children have left their pids.
pub fn when(n: usize) -> String {
    format!("while [ `ls $BENCH | grep -c '^pid'` -lt {n} ]; do sleep 0.05; done")
}

/// Writes its pid, then sleeps with a child that would outlive it.
pub const SLEEP: &str = "sleep 300 & echo $! >$BENCH/child.$FULMEN_RANK && mv $BENCH/child.$FULMEN_RANK $BENCH/pid.c$FULMEN_RANK; \
                     echo $$ >$BENCH/part.$FULMEN_RANK && mv $BENCH/part.$FULMEN_RANK $BENCH/pid.$FULMEN_RANK; wait";
