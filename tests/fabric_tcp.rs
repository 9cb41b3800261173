//! The `tcp` fabric over loopback: ranks as threads, and as processes of this test program started again.

mod conformance;
mod ranks;
mod seeded;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::error::Loss;
use fulmen::fabric::rendezvous::{AtRankZero, Rendezvous, Secret, in_process};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane, tcp};
use fulmen::{Error, Result};
use ranks::{judge_ends, processes};
use seeded::Draw;

fn bounds(silence: u64) -> Bounds {
    Bounds { silence: Duration::from_secs(silence), patience: Duration::from_secs(60) }
}

/// Of jobs whose ranks all live: none is to be found silent, however busy the machine is.
fn options(connections: usize) -> tcp::Options {
    tcp::Options { bounds: bounds(20), connections, checksums: Some(true), ..tcp::Options::default() }
}

fn threads<R: Send>(
    n: usize,
    options: &tcp::Options,
    work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    ranks::threads(
        n,
        |rendezvous, secret| tcp::connect(rendezvous, secret, options),
        |fabric: Arc<dyn Fabric>| {
            assert_eq!((fabric.name(), fabric.size()), ("tcp", n));
            work(fabric)
        },
    )
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
fn on_one_host_without_checksums() {
    let options = tcp::Options { checksums: None, ..options(1) };
    let case = conformance::CASES.iter().find(|c| c.name == "puts_both_ways_at_once").unwrap();
    for (rank, result) in threads(2, &options, |fabric| case.run(&fabric)).iter().enumerate() {
        case.judge(rank, result);
    }
}

// ---- processes ----

/// The rank's side. Without a parent there is nothing to do.
#[test]
fn as_rank() {
    ranks::as_rank(|rendezvous, secret, program, _| {
        let size = rendezvous.size();
        let chain = || (0..size).map(|a| (0..a).map(|b| a - b == 1).collect()).collect();
        let reach = (program == "exchange_on_a_chain").then(chain);
        // Only the ranks of `faults` wait for one that is silent.
        let bounds = bounds(if program.starts_with("exchange") { 4 } else { 20 });
        tcp::connect(rendezvous, secret, &tcp::Options { reach, bounds, ..options(1) })
    });
}

#[test]
fn conformance_of_processes() {
    for case in conformance::CASES {
        judge_ends(case, &mut processes(case.ranks, case.name, "-"));
    }
}

/// Kills and stops ranks at random moments: every other rank ends within the bound, with exit code 4 and a
/// message that names the rank; also where only neighbours are connected. `FULMEN_FAULT_RUNS` says how often.
#[test]
fn faults() {
    const RANKS: usize = 4;
    let runs = std::env::var("FULMEN_FAULT_RUNS").map_or(8, |s| s.parse().unwrap());
    let mut draw = Draw::new(0x5EED);
    for run in 0..runs {
        let chained = run / 2 % 2 == 1;
        let mut ranks = processes(RANKS, if chained { "exchange_on_a_chain" } else { "exchange" }, "-");
        ranks.iter_mut().for_each(|rank| drop(rank.hear("READY")));
        std::thread::sleep(Duration::from_micros(draw.below(200_000)));
        let victim = draw.below(RANKS as u64) as usize;
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
            // The system resets the connections of who is killed with data unread.
            let told: &[&str] = match signal {
                libc::SIGKILL => &["is gone", "(connection reset)"],
                _ => &["was silent"],
            };
            assert!(told.iter().any(|words| said.contains(words)), "{context}");
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
    let bounds = Bounds { patience: Duration::from_millis(300), ..bounds(20) };
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
