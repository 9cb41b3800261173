//! The ranks of a test of a transport: as threads that meet in this process, and as processes of the test program
//! started again, which can be killed.
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::Result;
use fulmen::fabric::rendezvous::{AtRankZero, Rendezvous, Secret, in_process};
use fulmen::fabric::{Buf, Fabric, Lane};

use crate::conformance;

/// Runs `work` on `n` ranks that are threads, with what each has `connect`ed; a rank that fails ends the others.
pub fn threads<C: AsFabric, R: Send>(
    n: usize,
    connect: impl Fn(&mut dyn Rendezvous, Secret) -> Result<C> + Sync,
    work: impl Fn(C) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let (secret, connect, work) = (Secret::random().unwrap(), &connect, &work);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = in_process(n)
            .into_iter()
            .map(|mut rendezvous| {
                let secret = secret.clone();
                scope.spawn(move || {
                    let connected = connect(&mut rendezvous, secret)?;
                    let fabric = Arc::clone(connected.fabric());
                    work(connected).inspect_err(|e| fabric.fail(e))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What a transport's `connect` gives.
pub trait AsFabric {
    /// The fabric in it.
    fn fabric(&self) -> &Arc<dyn Fabric>;
}

impl AsFabric for Arc<dyn Fabric> {
    fn fabric(&self) -> &Arc<dyn Fabric> {
        self
    }
}

impl AsFabric for fulmen::fabric::mixed::Connected {
    fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.fabric
    }
}

/// What a process that is a rank is told: size, rank, program, a word of the test's own, and where rank 0 is met.
const PLAN: &str = "FULMEN_TEST_RANK";

/// A rank's process. Killed when dropped.
pub struct Rank {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It has ended, or it is to.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    /// Its process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a process that this test has started and not waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// The rest of the line that starts with `word`.
    pub fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended without saying `{word}`");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Its exit code and its last words, within the bound.
    pub fn end(&mut self) -> (i32, String) {
        let start = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code().unwrap_or(-1);
            }
            assert!(start.elapsed() < Duration::from_secs(60), "rank {} hangs", self.pid());
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        let said = rest.split("SAID ").nth(1).unwrap_or("").split("DIAS").next().unwrap_or("");
        (code, said.to_owned())
    }
}

/// Starts a job of processes, each of which runs the test `as_rank` of this program; the secret goes over stdin. `program`:
/// the name of a case, or another that [`exchange`] stands for. `more` is handed through, and must have no blanks.
pub fn processes(ranks: usize, program: &str, more: &str) -> Vec<Rank> {
    let secret = Secret::random().unwrap();
    let start = |rank, met: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "as_rank", "--nocapture", "--test-threads=1"])
            .env(PLAN, format!("{ranks} {rank} {program} {more} {met}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(secret.expose()).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Rank { child, lines }
    };
    // A port that nobody else of this machine can have taken meanwhile: the first rank says which it has.
    let mut first = start(0, "here");
    let met = first.hear("MEET ");
    std::iter::once(first).chain((1..ranks).map(|rank| start(rank, &met))).collect()
}

/// The rank's side of [`processes`]; returns at once where there is no parent. `connect` is given program and `more`.
pub fn as_rank<C: AsFabric>(connect: impl FnOnce(&mut dyn Rendezvous, Secret, &str, &str) -> Result<C>) {
    let Ok(plan) = std::env::var(PLAN) else { return };
    let words: Vec<&str> = plan.split(' ').collect();
    let [size, rank, program, more, met] = words[..] else { panic!("{plan}") };
    let (size, rank): (usize, usize) = (size.parse().unwrap(), rank.parse().unwrap());
    let mut bytes = [0; 32];
    std::io::stdin().read_exact(&mut bytes).unwrap();
    let (secret, limit) = (Secret::from_bytes(bytes), Duration::from_secs(60));
    let meet = || -> Result<C> {
        let mut rendezvous = if rank == 0 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            println!("\nMEET {}", listener.local_addr().unwrap());
            AtRankZero::host(listener, size, &secret, limit)?
        } else {
            AtRankZero::join(&[met.parse().unwrap()], rank, size, &secret, limit)?
        };
        connect(&mut rendezvous, secret.clone(), program, more)
    };
    let mut fabric = None;
    let result = meet().and_then(|connected| {
        let fabric = fabric.insert(Arc::clone(connected.fabric()));
        drop(connected);
        println!("\nREADY");
        match conformance::CASES.iter().find(|c| c.name == program) {
            Some(case) => {
                let result = case.run(fabric);
                case.judge(rank, &result);
                result
            }
            None => exchange(&**fabric),
        }
    });
    if let (Err(e), Some(fabric)) = (&result, &fabric) {
        fabric.fail(e);
    }
    drop(fabric);
    println!("\nSAID {}DIAS", result.as_ref().map_or_else(|e| e.to_string(), |()| "well".into()));
    std::process::exit(result.map_or_else(|e| e.exit_code().into(), |()| 0));
}

/// How the ranks of [`processes`] that ran a case must have ended.
pub fn judge_ends(case: &conformance::Case, ranks: &mut [Rank]) {
    let ends: Vec<(i32, String)> = ranks.iter_mut().map(Rank::end).collect();
    // A rank that judged its end wrong has panicked: 101.
    assert!(ends.iter().all(|(code, _)| *code != 101 && *code != -1), "{}: {ends:?}", case.name);
    assert_eq!(ends.iter().all(|(code, _)| *code == 0), case.ends_well(), "{}: {ends:?}", case.name);
}

/// Exchanges small and long puts (which no transport sends without the other side) and checks, for as long as it is let.
pub fn exchange(fabric: &dyn Fabric) -> Result<()> {
    const MOST: usize = 60_000;
    let (n, me) = (fabric.size(), fabric.rank());
    let mut out = Buf::<u64>::zeros(fabric, MOST)?;
    let mut inn = Buf::<u64>::zeros(fabric, MOST * n)?;
    let others = || (0..n).filter(|p| *p != me);
    for step in 0u64.. {
        let len = if step % 20 == 0 { MOST } else { 100 };
        fabric.set_activity(&format!("in step {step}"));
        for peer in others() {
            inn.arm(fabric, Lane::ROWS, peer, MOST * peer..MOST * peer + len)?;
        }
        out.flush(fabric)?;
        out.write(0..len).fill(step << 8 | me as u64);
        for peer in others() {
            out.put(fabric, Lane::ROWS, peer, 0..len)?;
        }
        for peer in others() {
            let got = inn.wait(fabric, Lane::ROWS, peer)?;
            assert!(inn.read(got).iter().all(|w| *w == step << 8 | peer as u64));
        }
    }
    Ok(())
}
