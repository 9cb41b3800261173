//! The `mixed` fabric: ranks as threads, and as processes of this test program started again, on hosts that their names
//! make. Loopback, shared memory, and emulated RDMA devices.

mod conformance;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::fabric::mixed::{self, Choice, Connected, Options, Transport};
use fulmen::fabric::rendezvous::{AtRankZero, Rendezvous, Secret, in_process};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane, mem, tcp};
use fulmen::lapack::{LuOpts, Silent, back_substitute, getrf};
use fulmen::{Desc, DistMatrix, Result, Setup, World};

/// Ranks whose hosts have these names reach each other over loopback.
fn options(host: &str) -> Options {
    let bounds = Bounds { silence: Duration::from_secs(3), patience: Duration::from_secs(60) };
    let on = vec!["127.0.0.1".parse().unwrap()];
    let tcp = tcp::Options { bounds, on, host: Some(host.into()), ..tcp::Options::default() };
    Options { tcp, ..Options::default() }
}

/// Runs `work` on ranks that are threads, each with its own options; a rank that fails ends the others.
fn threads<R: Send>(options: &[Options], work: impl Fn(Connected) -> Result<R> + Sync) -> Vec<Result<R>> {
    let (secret, work) = (Secret::random().unwrap(), &work);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = in_process(options.len())
            .into_iter()
            .zip(options)
            .map(|(mut rendezvous, options)| {
                let secret = secret.clone();
                scope.spawn(move || {
                    let connected = mixed::connect(&mut rendezvous, &secret, options)?;
                    let fabric = Arc::clone(&connected.fabric);
                    work(connected).inspect_err(|e| fabric.fail(e))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn on(hosts: &[&str]) -> Vec<Options> {
    hosts.iter().map(|host| options(host)).collect()
}

/// Every case on ranks spread over so many hosts, in turn or in blocks.
fn conformance(hosts: usize, in_turn: bool) {
    let names = ["a", "b", "c"];
    for case in conformance::CASES.iter().filter(|case| case.ranks > 1) {
        let host = |rank| if in_turn { rank % hosts } else { rank * hosts / case.ranks };
        let placed: Vec<&str> = (0..case.ranks).map(|rank| names[host(rank)]).collect();
        let results = threads(&on(&placed), |connected| {
            let used: BTreeSet<Transport> = connected.steps.iter().map(|s| s.over).collect();
            let one = used.len() == 1;
            let name = if one { used.first().unwrap().name() } else { "mixed" };
            assert_eq!(connected.fabric.name(), name);
            for step in &connected.steps {
                let here = placed[connected.fabric.rank()] == placed[step.peer];
                assert_eq!(step.over, if here { Transport::Shm } else { Transport::Tcp });
                assert!(step.link.starts_with(step.over.name()), "{step:?}");
                assert_eq!(connected.fabric.host(step.peer), placed[step.peer]);
            }
            case.run(&connected.fabric)
        });
        for (rank, result) in results.iter().enumerate() {
            case.judge(rank, result);
        }
        assert_eq!(results.iter().all(|r| r.is_ok()), case.ends_well(), "{}", case.name);
    }
}

#[test]
fn conformance_on_one_host() {
    conformance(1, false);
}

#[test]
fn conformance_on_two_hosts() {
    conformance(2, false);
}

#[test]
fn conformance_on_three_hosts_in_turn() {
    conformance(3, true);
}

/// Shared memory takes 64 puts ahead; the rest of them move when their rank calls. Rank 0 waits for rank 2, over TCP, and
/// rank 2 for what rank 1 says when it has all of rank 0's puts.
#[test]
fn a_wait_on_one_transport_moves_what_is_queued_on_another() {
    const PUTS: usize = 300;
    let flushed = |fabric: &dyn Fabric| -> Result<()> {
        let mut buf = Buf::<u64>::zeros(fabric, PUTS)?;
        let mut word = Buf::<u64>::zeros(fabric, 1)?;
        match fabric.rank() {
            0 => {
                word.arm(fabric, Lane::CONTROL, 2, 0..1)?;
                for i in 0..PUTS {
                    buf.put(fabric, Lane::ROWS, 1, i..i + 1)?;
                }
                word.wait(fabric, Lane::CONTROL, 2)?;
                // The same for a flush: rank 2 takes this only then.
                for i in 0..PUTS {
                    buf.put(fabric, Lane::ROWS, 1, i..i + 1)?;
                }
                let ticket = fabric.put(Lane::BULK, 2, &fabric.alloc(1 << 20)?, 0..1 << 20)?;
                fabric.flush(ticket)?;
                buf.flush(fabric)
            }
            1 => {
                for _ in 0..2 {
                    for i in 0..PUTS {
                        buf.arm(fabric, Lane::ROWS, 0, i..i + 1)?;
                    }
                    for _ in 0..PUTS {
                        buf.wait(fabric, Lane::ROWS, 0)?;
                    }
                    word.put(fabric, Lane::CONTROL, 2, 0..1)?;
                    word.flush(fabric)?;
                }
                Ok(())
            }
            _ => {
                word.arm(fabric, Lane::CONTROL, 1, 0..1)?;
                word.wait(fabric, Lane::CONTROL, 1)?;
                word.put(fabric, Lane::CONTROL, 0, 0..1)?;
                word.flush(fabric)?;
                word.arm(fabric, Lane::CONTROL, 1, 0..1)?;
                word.wait(fabric, Lane::CONTROL, 1)?;
                let mut much = Buf::<u8>::zeros(fabric, 1 << 20)?;
                much.arm(fabric, Lane::BULK, 0, 0..1 << 20)?;
                much.wait(fabric, Lane::BULK, 0).map(|_| ())
            }
        }
    };
    for result in threads(&on(&["a", "a", "b"]), |connected| flushed(&*connected.fabric)) {
        result.unwrap();
    }
}

#[test]
fn what_is_forced_is_taken_or_refused_with_its_reason() {
    let forced = |hosts: &[&str], choice: Choice| {
        let options: Vec<Options> =
            on(hosts).into_iter().map(|o| Options { choice: choice.clone(), ..o }).collect();
        threads(&options, |connected| {
            conformance::barrier(&*connected.fabric, Lane::CONTROL)?;
            Ok(connected.fabric.name())
        })
    };
    for result in forced(&["a", "a", "b"], Choice::Tcp) {
        assert_eq!(result.unwrap(), "tcp");
    }
    for result in forced(&["a", "a", "a"], Choice::Shm) {
        assert_eq!(result.unwrap(), "shm");
    }
    for result in forced(&["a", "a", "b"], Choice::Shm) {
        let e = result.unwrap_err();
        assert_eq!(e.exit_code(), 2, "{e}");
        assert!(e.to_string().contains("they are on different hosts"), "{e}");
    }
    for result in forced(&["a", "b"], Choice::Verbs(vec!["no_such_device".into()])) {
        let e = result.unwrap_err();
        assert_eq!(e.exit_code(), 2, "{e}");
        assert!(e.to_string().starts_with("fabric: verbs:no_such_device: does not join ranks"), "{e}");
    }
}

/// The bits of the solution of one system.
fn solve(fabric: Arc<dyn Fabric>, grid: (usize, usize)) -> Result<Vec<u64>> {
    let (n, nb) = (203, 24);
    let entry = |i: usize, j: usize| {
        let mut x = (i as u64) << 32 ^ j as u64 ^ 0x5EED;
        for _ in 0..3 {
            x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
        }
        (x >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    let world = World::new(fabric, grid.0 * grid.1, &Setup { threads: 1, ..Setup::default() })?;
    let grid = world.grid(grid.0, grid.1)?;
    let mut a = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, n + 1, nb), entry)?;
    let opts = LuOpts { lookahead: 1, ..LuOpts::default() };
    getrf(world.kernels::<f64>(), world.team(), a.view_mut(), &opts, &mut Silent)?;
    Ok(back_substitute(world.team(), &a.view())?.into_iter().map(f64::to_bits).collect())
}

fn expected_bits(grid: (usize, usize)) -> Vec<u64> {
    mem::run(grid.0 * grid.1, mem::Options::default(), |fabric| solve(fabric, grid)).swap_remove(0).unwrap()
}

#[test]
fn lu_has_the_bits_of_mem() {
    for (grid, hosts) in [
        ((1, 2), &["a", "a"][..]),
        ((2, 2), &["a", "a", "b", "b"]),
        ((2, 2), &["a", "b", "b", "a"]),
        ((2, 3), &["a", "b", "a", "b", "c", "b"]),
    ] {
        let expected = expected_bits(grid);
        for result in threads(&on(hosts), |connected| solve(connected.fabric, grid)) {
            assert!(result.unwrap() == expected, "{grid:?} on {hosts:?}");
        }
    }
}

// ---- with emulated RDMA devices ----

#[cfg(target_os = "linux")]
mod rdma {
    use super::*;
    use fulmen::fabric::verbs::{self, Devices};
    use fulmen_emu_verbs::{Call, Counters, Installed, Kind, Profile, Trap, World as Emulated};

    /// Options of ranks on these hosts, with a cable between each of these pairs.
    fn cabled(world: &Installed, hosts: &[&str], cables: &[(usize, usize)]) -> Vec<Options> {
        let n = hosts.len();
        let joined = |a: usize, b: usize| cables.contains(&(a.min(b), a.max(b))) && a != b;
        let towards = |a, b| if joined(a, b) { vec![format!("rdma_en{a}{b}")] } else { vec![] };
        let matrix = (0..n).map(|a| (0..n).map(|b| towards(a, b)).collect()).collect();
        let verbs = verbs::Options {
            library: Some(world.library().to_owned()),
            devices: Devices::Matrix(matrix),
            ..verbs::Options::default()
        };
        on(hosts).into_iter().map(|options| Options { verbs: verbs.clone(), ..options }).collect()
    }

    fn nothing_is_left(c: &Counters) {
        assert_eq!((c.qps, c.cqs, c.mrs, c.pds), (0, 0, 0, 0), "{c:?}");
    }

    /// Two hosts of three ranks; a cable between the first, and one between the second ranks of each.
    #[test]
    fn conformance_over_three_transports() {
        for case in conformance::CASES.iter().filter(|case| case.ranks > 2) {
            let n = case.ranks;
            let hosts: Vec<&str> = (0..n).map(|rank| if rank < n.div_ceil(2) { "a" } else { "b" }).collect();
            let cables = if n == 3 { vec![(0, 2)] } else { vec![(0, n / 2), (1, n / 2 + 1)] };
            let world = Emulated::cabled(Profile::Apple, n, &cables).install().unwrap();
            let results = threads(&cabled(&world, &hosts, &cables), |connected| {
                let rank = connected.fabric.rank();
                for step in &connected.steps {
                    let pair = (rank.min(step.peer), rank.max(step.peer));
                    let (over, says) = match () {
                        () if hosts[rank] == hosts[step.peer] => (Transport::Shm, false),
                        () if cables.contains(&pair) => (Transport::Verbs, false),
                        () => (Transport::Tcp, true),
                    };
                    assert_eq!((step.over, !step.instead_of.is_empty()), (over, says), "{step:?}");
                }
                assert_eq!(connected.fabric.name(), "mixed");
                case.run(&connected.fabric)
            });
            for (rank, result) in results.iter().enumerate() {
                case.judge(rank, result);
            }
            if case.ends_well() {
                nothing_is_left(&world.counters());
            }
        }
    }

    #[test]
    fn lu_over_three_transports_has_the_bits_of_mem() {
        let (hosts, cables) = (["a", "a", "b", "b"], [(0, 2), (1, 3)]);
        let world = Emulated::cabled(Profile::Apple, 4, &cables).install().unwrap();
        let expected = expected_bits((2, 2));
        let results = threads(&cabled(&world, &hosts, &cables), |connected| {
            let used: BTreeSet<Transport> = connected.steps.iter().map(|s| s.over).collect();
            assert_eq!(used.len(), 3);
            solve(connected.fabric, (2, 2))
        });
        for result in results {
            assert!(result.unwrap() == expected);
        }
        nothing_is_left(&world.counters());
        assert!(world.counters().messages > 0, "{:?}", world.counters());
    }

    /// Devices that do not take shared memory are used all the same; it is given up, with the reason.
    #[test]
    fn memory_that_a_device_refuses_is_given_up() {
        let (hosts, cables) = (["a", "a", "b"], [(0, 2)]);
        // Twice: with and without remote access.
        let refused = Kind::Fail { call: Call::RegMr, errno: 22 };
        let refused = Trap { times: 2, ..Trap::always(refused).on("rdma_en02") };
        let world = Emulated::cabled(Profile::Apple, 3, &cables).trap(refused).install().unwrap();
        let results = threads(&cabled(&world, &hosts, &cables), |connected| {
            conformance::barrier(&*connected.fabric, Lane::CONTROL)?;
            Ok(connected.steps)
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!((results[0][0].over, results[0][1].over), (Transport::Tcp, Transport::Verbs));
        let why = results[0][0].instead_of.concat();
        assert!(why.starts_with("shm: rank 0: ") && why.contains("rdma_en02"), "{why}");
        assert_eq!((results[1][0].over, results[1][1].over), (Transport::Tcp, Transport::Tcp));
        nothing_is_left(&world.counters());
    }

    /// A cable whose proof fails leaves its pair to TCP, and the other pairs alone.
    #[test]
    fn a_dead_cable_leaves_its_pair_to_tcp() {
        let (hosts, cables) = (["a", "b", "c"], [(0, 1), (1, 2)]);
        let dead = Trap::always(Kind::DeadPair { over: 0 }).on("rdma_en01");
        let world = Emulated::cabled(Profile::Apple, 3, &cables).trap(dead).install().unwrap();
        let mut options = cabled(&world, &hosts, &cables);
        options.iter_mut().for_each(|o| o.verbs.warm_up = Duration::from_millis(300));
        let results = threads(&options, |connected| {
            conformance::barrier(&*connected.fabric, Lane::CONTROL)?;
            Ok(connected.steps)
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!((results[1][0].over, results[1][1].over), (Transport::Tcp, Transport::Verbs));
        let why = results[1][0].instead_of.concat();
        assert!(why.starts_with("rdma: "), "{why}");
        nothing_is_left(&world.counters());
    }
}

// ---- processes ----

/// `hosts rank address program`, hosts with commas between them.
const RANK: &str = "FULMEN_TEST_MIXED";

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
    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a process that this test has started and not waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended without saying `{word}`");
        }
    }

    /// Its exit code and its last words, within the bound.
    fn end(&mut self) -> (i32, String) {
        let start = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code().unwrap_or(-1);
            }
            assert!(start.elapsed() < Duration::from_secs(60), "rank {} hangs", self.child.id());
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        let said = rest.split("SAID ").nth(1).unwrap_or("").split("DIAS").next().unwrap_or("");
        (code, said.to_owned())
    }
}

/// Starts a job of processes; the secret goes over stdin.
fn processes(hosts: &str, program: &str) -> Vec<Rank> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener); // rank 0 binds it again
    let secret = Secret::random().unwrap();
    let ranks = hosts.split(',').count();
    let start = |rank| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "as_rank", "--nocapture", "--test-threads=1"])
            .env(RANK, format!("{hosts} {rank} {address} {program}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(secret.expose()).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Rank { child, lines }
    };
    (0..ranks).map(start).collect()
}

/// The rank's side. Without a parent there is nothing to do.
#[test]
fn as_rank() {
    let Ok(plan) = std::env::var(RANK) else { return };
    let mut words = plan.split(' ');
    let mut word = || words.next().unwrap();
    let (hosts, rank): (Vec<&str>, usize) = (word().split(',').collect(), word().parse().unwrap());
    let (address, program): (SocketAddr, &str) = (word().parse().unwrap(), word());
    let mut bytes = [0; 32];
    std::io::stdin().read_exact(&mut bytes).unwrap();
    let (secret, limit) = (Secret::from_bytes(bytes), Duration::from_secs(60));
    let connect = || -> Result<Connected> {
        let mut rendezvous = if rank == 0 {
            AtRankZero::host(TcpListener::bind(address).unwrap(), hosts.len(), &secret, limit)?
        } else {
            AtRankZero::join(&[address], rank, hosts.len(), &secret, limit)?
        };
        assert_eq!(rendezvous.rank(), rank);
        mixed::connect(&mut rendezvous, &secret, &options(hosts[rank]))
    };
    let mut fabric = None;
    let result = connect().and_then(|connected| {
        let fabric = fabric.insert(connected.fabric);
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
    for case in conformance::CASES.iter().filter(|case| case.ranks > 1) {
        let hosts: Vec<&str> = (0..case.ranks)
            .map(|rank| if rank < case.ranks.div_ceil(2).max(2) { "a" } else { "b" })
            .collect();
        let mut ranks = processes(&hosts.join(","), case.name);
        let ends: Vec<(i32, String)> = ranks.iter_mut().map(Rank::end).collect();
        // A rank that judged its end wrong has panicked: 101.
        assert!(ends.iter().all(|(code, _)| *code != 101 && *code != -1), "{}: {ends:?}", case.name);
        assert_eq!(ends.iter().all(|(code, _)| *code == 0), case.ends_well(), "{}: {ends:?}", case.name);
    }
}

/// Kills and stops ranks at random moments: every other rank, on the same host or not, ends within the bound, with exit
/// code 4 and a message that names the rank. `FULMEN_FAULT_RUNS` says how often.
#[test]
fn faults() {
    const HOSTS: &str = "a,a,b,b";
    let runs = std::env::var("FULMEN_FAULT_RUNS").map_or(8, |s| s.parse().unwrap());
    let mut random = 0x5EED_u64;
    let mut below = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % n
    };
    for run in 0..runs {
        let mut ranks = processes(HOSTS, "work");
        ranks.iter_mut().for_each(|rank| rank.hear("READY"));
        std::thread::sleep(Duration::from_micros(below(200_000)));
        let victim = below(4) as usize;
        let signal = if run % 2 == 0 { libc::SIGKILL } else { libc::SIGSTOP };
        ranks[victim].signal(signal);
        for at in (0..ranks.len()).filter(|at| *at != victim) {
            let (code, said) = ranks[at].end();
            let context = format!("run {run}: signal {signal} to rank {victim}; rank {at}: {code}: {said}");
            assert_eq!(code, 4, "{context}");
            assert!(said.contains(&format!("rank {victim} (")), "{context}");
            let lost = if signal == libc::SIGKILL { "is gone" } else { "was silent" };
            assert!(said.contains(lost), "{context}");
        }
        if signal == libc::SIGSTOP {
            // It wakes into a job that has ended, and ends too.
            ranks[victim].signal(libc::SIGCONT);
            let (code, said) = ranks[victim].end();
            assert_eq!(code, 4, "run {run}: {said}");
        }
    }
}
