//! The `tcp` fabric over loopback: ranks as threads, and as processes of this test program started again.

mod conformance;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::error::Loss;
use fulmen::fabric::rendezvous::{AtRankZero, Rendezvous, Secret, in_process};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane, tcp};
use fulmen::{Error, Result};

fn short_bounds() -> Bounds {
    Bounds { silence: Duration::from_secs(3), patience: Duration::from_secs(60) }
}

fn options(connections: usize) -> tcp::Options {
    tcp::Options { bounds: short_bounds(), connections, ..tcp::Options::default() }
}

/// Runs `work` on ranks that are threads; a rank that fails ends the others.
fn threads<R: Send>(
    n: usize,
    options: &tcp::Options,
    work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let (secret, work) = (Secret::random().unwrap(), &work);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = in_process(n)
            .into_iter()
            .map(|mut rendezvous| {
                let secret = secret.clone();
                scope.spawn(move || {
                    let fabric = tcp::connect(&mut rendezvous, secret, options)?;
                    assert_eq!((fabric.name(), fabric.size()), ("tcp", n));
                    let result = work(Arc::clone(&fabric));
                    if let Err(e) = &result {
                        fabric.fail(e);
                    }
                    result
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn conformance_of_threads() {
    for connections in [1, 3] {
        for case in conformance::CASES {
            let results = threads(case.ranks, &options(connections), |fabric| case.run(&fabric));
            for (rank, result) in results.iter().enumerate() {
                case.judge(rank, result);
            }
            assert_eq!(results.iter().all(|r| r.is_ok()), case.ends_well(), "{}", case.name);
        }
    }
}

/// Twelve ranks on whatever cores there are: no rank may starve the one it waits for.
#[test]
fn more_ranks_than_cores() {
    let sums = threads(12, &options(1), |fabric| {
        for _ in 0..100 {
            conformance::barrier(&*fabric, Lane::CONTROL)?;
        }
        Ok(fabric.rank())
    });
    assert_eq!(sums.into_iter().map(|r| r.unwrap()).sum::<usize>(), 66);
}

#[test]
fn a_panic_of_one_rank_ends_the_others() {
    let results = threads(3, &options(1), |fabric| {
        let work = std::panic::AssertUnwindSafe(|| {
            let fabric = Arc::clone(&fabric);
            assert!(fabric.rank() != 1, "rank one has a bug");
            conformance::barrier(&*fabric, Lane::CONTROL)
        });
        std::panic::catch_unwind(work).unwrap_or_else(|_| Err(Error::Internal("rank 1 panicked".into())))
    });
    for rank in [0, 2] {
        assert!(
            matches!(&results[rank], Err(Error::Aborted { by: 1, reason }) if reason.contains("panicked"))
        );
    }
}

/// A rank computes (calls nothing) while megabytes go through it both ways.
#[test]
fn bytes_move_while_ranks_compute() {
    const LEN: usize = 4 << 20;
    let results = threads(2, &options(1), |fabric| {
        let other = 1 - fabric.rank();
        let mut out = Buf::<u64>::zeros(&*fabric, LEN)?;
        let mut inn = Buf::<u64>::zeros(&*fabric, LEN)?;
        inn.arm(&*fabric, Lane::PANEL, other, 0..LEN)?;
        out.write(0..LEN).fill(7 + fabric.rank() as u64);
        out.put(&*fabric, Lane::PANEL, other, 0..LEN)?;
        let start = Instant::now();
        let mut looked = 0;
        while start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(50)); // "computes"
            looked += 1;
            if inn.try_wait(&*fabric, Lane::PANEL, other)?.is_some() {
                break;
            }
        }
        assert!(inn.read(0..LEN).iter().all(|w| *w == 7 + other as u64));
        out.flush(&*fabric)?;
        Ok(looked)
    });
    for looked in results {
        // By its own calls alone, a megabyte each, it would have taken more.
        let looked = looked.unwrap();
        assert!(looked < 200, "{looked}");
    }
}

/// Ranks that cannot reach each other are named, with their addresses, on every rank.
#[test]
fn pairs_that_do_not_reach_each_other_are_named() {
    let on = |rank: usize| match rank {
        1 => vec!["127.0.0.1".parse::<tcp::On>().unwrap()],
        _ => vec!["::1".parse::<tcp::On>().unwrap()],
    };
    let has_v6 = TcpListener::bind("[::1]:0").is_ok();
    if !has_v6 {
        println!("skipped: this machine has no IPv6");
        return;
    }
    let secret = Secret::random().unwrap();
    std::thread::scope(|scope| {
        for mut rendezvous in in_process(3) {
            let secret = secret.clone();
            scope.spawn(move || {
                let on = on(rendezvous.rank());
                let options = tcp::Options { on, ..options(1) };
                let e = tcp::connect(&mut rendezvous, secret, &options).err().expect("no network in common");
                let text = e.to_string();
                assert_eq!(e.exit_code(), 4, "{text}");
                // Ranks 0 and 2 share a network.
                let pairs: Vec<&str> = text.lines().filter(|line| line.starts_with("rank ")).collect();
                assert_eq!(pairs.len(), 2, "{text}");
                for (pair, (a, b)) in pairs.iter().zip([(1, 0), (2, 1)]) {
                    assert!(pair.starts_with(&format!("rank {a} (")), "{text}");
                    assert!(pair.contains(&format!("and rank {b} (")), "{text}");
                }
            });
        }
    });
}

#[test]
fn ipv6_and_named_interfaces() {
    if TcpListener::bind("[::1]:0").is_err() {
        println!("skipped: this machine has no IPv6");
        return;
    }
    let options = tcp::Options { on: vec!["::1/128".parse().unwrap()], ..options(1) };
    let links = threads(2, &options, |fabric| {
        conformance::barrier(&*fabric, Lane::CONTROL)?;
        Ok(fabric.link(1 - fabric.rank()))
    });
    for link in links {
        let link = link.unwrap();
        assert!(link.contains("(::1 to ::1)"), "{link}");
    }
    let options = tcp::Options { on: vec!["no_such_interface".parse().unwrap()], ..options };
    for result in threads(2, &options, |_| Ok(())) {
        let e = result.unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("no_such_interface"), "{e}");
    }
}

#[test]
fn without_checksums_too() {
    let options = tcp::Options { checksums: false, ..options(1) };
    let case = conformance::CASES.iter().find(|c| c.name == "puts_both_ways_at_once").unwrap();
    for (rank, result) in threads(2, &options, |fabric| case.run(&fabric)).iter().enumerate() {
        case.judge(rank, result);
    }
}

// ---- processes ----

/// `ranks rank address program`
const RANK: &str = "FULMEN_TEST_TCP";

/// A rank's process. Killed when dropped.
struct Rank {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It has ended, or it is to.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a process that this test has started and not waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// The rest of the line that starts with `word`.
    fn hear(&mut self, word: &str) -> String {
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
    fn end(&mut self) -> (i32, String) {
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

/// Starts a job of processes; the secret goes over stdin.
fn processes(ranks: usize, program: &str) -> Vec<Rank> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener); // rank 0 binds it again
    let secret = Secret::random().unwrap();
    (0..ranks)
        .map(|rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "as_rank", "--nocapture", "--test-threads=1"])
                .env(RANK, format!("{ranks} {rank} {address} {program}"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(secret.expose()).unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap());
            Rank { child, lines }
        })
        .collect()
}

/// The rank's side. Without a parent there is nothing to do.
#[test]
fn as_rank() {
    let Ok(plan) = std::env::var(RANK) else { return };
    let mut words = plan.split(' ');
    let mut word = || words.next().unwrap();
    let (size, rank): (usize, usize) = (word().parse().unwrap(), word().parse().unwrap());
    let (address, program): (SocketAddr, &str) = (word().parse().unwrap(), word());
    let mut bytes = [0; 32];
    std::io::stdin().read_exact(&mut bytes).unwrap();
    let (secret, limit) = (Secret::from_bytes(bytes), Duration::from_secs(60));
    let connect = || -> Result<Arc<dyn Fabric>> {
        let mut rendezvous = if rank == 0 {
            AtRankZero::host(TcpListener::bind(address).unwrap(), size, &secret, limit)?
        } else {
            AtRankZero::join(&[address], rank, size, &secret, limit)?
        };
        let chain = || (0..size).map(|a| (0..a).map(|b| a - b == 1).collect()).collect();
        let reach = (program == "work_on_a_chain").then(chain);
        tcp::connect(&mut rendezvous, secret.clone(), &tcp::Options { reach, ..options(1) })
    };
    let mut fabric = None;
    let result = connect().and_then(|connected| {
        let fabric = fabric.insert(connected);
        println!("\nREADY");
        match conformance::CASES.iter().find(|c| c.name == program) {
            Some(case) => {
                let result = case.run(fabric);
                case.judge(rank, &result);
                result
            }
            None => work(&**fabric),
        }
    });
    if let (Err(e), Some(fabric)) = (&result, &fabric) {
        fabric.fail(e);
    }
    drop(fabric);
    println!("\nSAID {}DIAS", result.as_ref().map_or_else(|e| e.to_string(), |()| "well".into()));
    std::process::exit(result.map_or_else(|e| e.exit_code().into(), |()| 0));
}

/// Exchanges small and long puts and checks, for as long as it is let.
fn work(fabric: &dyn Fabric) -> Result<()> {
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

#[test]
fn conformance_of_processes() {
    for case in conformance::CASES {
        let mut ranks = processes(case.ranks, case.name);
        let ends: Vec<(i32, String)> = ranks.iter_mut().map(Rank::end).collect();
        // A rank that judged its end wrong has panicked: 101.
        assert!(ends.iter().all(|(code, _)| *code != 101 && *code != -1), "{}: {ends:?}", case.name);
        assert_eq!(ends.iter().all(|(code, _)| *code == 0), case.ends_well(), "{}: {ends:?}", case.name);
    }
}

/// Kills and stops ranks at random moments: every other rank ends within the bound, with exit code 4 and a
/// message that names the rank; also where only neighbours are connected. `FULMEN_FAULT_RUNS` says how often.
#[test]
fn faults() {
    const RANKS: usize = 4;
    let runs = std::env::var("FULMEN_FAULT_RUNS").map_or(8, |s| s.parse().unwrap());
    let mut random = 0x5EED_u64;
    let mut below = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % n
    };
    for run in 0..runs {
        let chained = run / 2 % 2 == 1;
        let mut ranks = processes(RANKS, if chained { "work_on_a_chain" } else { "work" });
        ranks.iter_mut().for_each(|rank| drop(rank.hear("READY")));
        std::thread::sleep(Duration::from_micros(below(200_000)));
        let victim = below(RANKS as u64) as usize;
        let signal = if run % 2 == 0 { libc::SIGKILL } else { libc::SIGSTOP };
        ranks[victim].signal(signal);
        let mut named = 0;
        for at in (0..RANKS).filter(|at| *at != victim) {
            let (code, said) = ranks[at].end();
            let context = format!(
                "run {run}, chain: {chained}: signal {signal} to rank {victim}; rank {at}: {code}: {said}"
            );
            assert_eq!(code, 4, "{context}");
            assert!(said.contains(&format!("rank {victim} (")), "{context}");
            assert!(
                said.contains(if signal == libc::SIGKILL { "is gone" } else { "was silent" }),
                "{context}"
            );
            named += usize::from(said.contains("in step") && said.contains("tcp over lo"));
        }
        assert!(named > 0, "run {run}: nobody says what it did");
        if signal == libc::SIGSTOP {
            // It wakes into a job that has ended, and ends too.
            ranks[victim].signal(libc::SIGCONT);
            let (code, said) = ranks[victim].end();
            assert_eq!(code, 4, "run {run}: {said}");
        }
    }
}

/// Strangers at the doors of a job that is being made, and of one that runs: nothing changes.
#[test]
fn strangers_change_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let secret = Secret::random().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let before = |stop: &std::sync::atomic::AtomicBool| stop.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let stop = &stop;
        // Bounded in number: they end with the test.
        let strangers = scope.spawn(move || {
            let mut open = Vec::new();
            for i in 0..10_000u32 {
                let Ok(mut stream) = TcpStream::connect(address) else { break };
                match i % 3 {
                    0 => drop(stream.write_all(&[0xFF; 500])),
                    1 => drop(stream.write_all(b"fulmen\0\x01 half of a hello")),
                    _ => {}
                }
                if open.len() < 200 {
                    open.push(stream);
                }
                if before(stop) {
                    break;
                }
            }
        });
        let mut listener = Some(listener);
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let (secret, listener) = (secret.clone(), if rank == 0 { listener.take() } else { None });
                scope.spawn(move || {
                    let limit = Duration::from_secs(60);
                    let mut rendezvous = match listener {
                        Some(listener) => AtRankZero::host(listener, 3, &secret, limit)?,
                        None => AtRankZero::join(&[address], rank, 3, &secret, limit)?,
                    };
                    let fabric = tcp::connect(&mut rendezvous, secret, &options(1))?;
                    for _ in 0..200 {
                        conformance::barrier(&*fabric, Lane::CONTROL)?;
                    }
                    Ok::<(), Error>(())
                })
            })
            .collect();
        for rank in ranks {
            rank.join().unwrap().unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        strangers.join().unwrap();
    });
}

/// A rank that lives but never puts is slow, not silent; the waiter says so after its patience.
#[test]
fn a_slow_rank_is_told_from_a_silent_one() {
    let bounds = Bounds { silence: Duration::from_secs(2), patience: Duration::from_millis(300) };
    let options = tcp::Options { bounds, ..options(1) };
    let results = threads(2, &options, |fabric| {
        if fabric.rank() == 1 {
            // Alive, for its progress thread is; it hears of the end of the job when it looks.
            let start = Instant::now();
            loop {
                fabric.poll()?;
                assert!(start.elapsed() < Duration::from_secs(60), "nobody complained");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let mut buf = Buf::<u64>::zeros(&*fabric, 1)?;
        buf.arm(&*fabric, Lane::BULK, 1, 0..1)?;
        buf.wait(&*fabric, Lane::BULK, 1).map(|_| ())
    });
    assert!(
        matches!(&results[0], Err(Error::PeerLost { rank: 1, by: 0, loss: Loss::Slow, .. })),
        "{results:?}"
    );
    assert!(matches!(&results[1], Err(Error::Aborted { by: 0, .. })), "{results:?}");
}
