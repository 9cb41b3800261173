//! The `mixed` fabric: ranks as threads, and as processes of this test program started again, on hosts that their names
//! make. Loopback, shared memory, and emulated RDMA devices.

mod conformance;
mod ranks;
mod seeded;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fulmen::fabric::mixed::{self, Choice, Connected, Options, Transport};
use fulmen::fabric::rendezvous::Rendezvous;
use fulmen::fabric::{Bounds, Buf, Fabric, Lane, mem, tcp};
use fulmen::lapack::LuOpts;
use fulmen::{Error, Result};
use ranks::{judge_ends, processes};
use seeded::{Draw, Solve};

/// Ranks whose hosts have these names reach each other over loopback. None is to be found silent, however busy the machine is.
fn options(host: &str) -> Options {
    let bounds = Bounds { silence: Duration::from_secs(20), patience: Duration::from_secs(60) };
    let on = vec!["127.0.0.1".parse().unwrap()];
    let tcp = tcp::Options { bounds, on, host: Some(host.into()), ..tcp::Options::default() };
    Options { tcp, ..Options::default() }
}

/// Ranks that are threads, each with its own options.
fn threads<R: Send>(options: &[Options], work: impl Fn(Connected) -> Result<R> + Sync) -> Vec<Result<R>> {
    let connect = |rendezvous: &mut dyn Rendezvous, secret| {
        let mine = &options[rendezvous.rank()];
        mixed::connect(rendezvous, &secret, mine)
    };
    ranks::threads(options.len(), connect, work)
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
}

/// The bits of the solution of one system.
fn solve(fabric: Arc<dyn Fabric>, grid: (usize, usize)) -> Result<Vec<u64>> {
    Solve { n: 203, nb: 24, grid, opts: LuOpts { lookahead: 1, ..LuOpts::default() } }.bits(fabric)
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
        assert!(why.starts_with("shm: rank 0 (a): ") && why.contains("rdma_en02"), "{why}");
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
        options.iter_mut().for_each(|o| o.verbs.warm_up = Duration::from_secs(1));
        let results = threads(&options, |connected| {
            conformance::barrier(&*connected.fabric, Lane::CONTROL)?;
            Ok(connected.steps)
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!((results[1][0].over, results[1][1].over), (Transport::Tcp, Transport::Verbs));
        let why = results[1][0].instead_of.concat();
        assert!(why.starts_with("rdma: rank 1 (b): rdma_en10 (to rank 0's rdma_en01): testing"), "{why}");
        nothing_is_left(&world.counters());
    }

    /// RDMA by name on two hosts: what each rank fails with.
    fn forced(world: Emulated, choice: Vec<String>, devices: Option<Devices>) -> Vec<Error> {
        let world = world.install().unwrap();
        let mut options = cabled(&world, &["a", "b"], &[(0, 1)]);
        for o in &mut options {
            (o.choice, o.verbs.warm_up) = (Choice::Verbs(choice.clone()), Duration::from_millis(300));
            o.verbs.devices = devices.clone().unwrap_or(o.verbs.devices.clone());
        }
        let results = threads(&options, |connected| Ok(connected.fabric.name()));
        nothing_is_left(&world.counters());
        results.into_iter().map(Result::unwrap_err).collect()
    }

    /// Devices and drivers that refuse are no fault of the command line (3, not 2); the rank whose device it is fails with
    /// it, and the other repeats its words.
    #[test]
    fn a_device_that_refuses_is_named_with_its_host() {
        let fail = |call, errno| Kind::Fail { call, errno };
        for (kind, what) in [
            (fail(Call::OpenDevice, 5), "rank 1 (b): rdma_en10: opening the device failed with error 5"),
            (
                fail(Call::AllocPd, 0),
                "rank 1 (b): rdma_en10: allocating a protection domain failed: the device has",
            ),
            (
                fail(Call::ToRtr, 96),
                "rank 1 (b): rdma_en10: connecting a queue pair (ready to receive) failed with error 96",
            ),
            // Tried again, and waited for by the other end.
            (
                fail(Call::ToRtr, 60),
                "rank 1 (b): rdma_en10 (to rank 0's rdma_en01): connecting a queue pair (ready to receive) failed with error 60",
            ),
        ] {
            let world = Emulated::cabled(Profile::Apple, 2, &[(0, 1)]);
            let errors = forced(world.trap(Trap::always(kind).on("rdma_en10")), vec![], None);
            assert!(matches!(errors[1], Error::Resources { .. }), "{kind:?}: {errors:?}");
            assert!(matches!(errors[0], Error::Ended { code: 3, .. }), "{kind:?}: {errors:?}");
            let text = errors[1].to_string();
            assert_eq!(text, errors[0].to_string());
            assert!(
                text.starts_with(&format!("fabric: verbs: does not join ranks 0 and 1: {what}")),
                "{text}"
            );
        }
    }

    #[test]
    fn only_a_device_that_no_rank_has_is_a_wrong_name() {
        let world = || Emulated::cabled(Profile::Apple, 2, &[(0, 1)]);
        for (choice, code) in [("no_such_device", 2), ("rdma_en01", 3)] {
            for e in forced(world(), vec![choice.into()], None) {
                assert_eq!(e.exit_code(), code, "{e}");
                assert!(e.to_string().starts_with(&format!("fabric: verbs:{choice}: does not join")), "{e}");
            }
        }
        let absent = |o: Options| {
            let library = Some("/no/such/library.so".into());
            Options {
                choice: Choice::Verbs(vec![]),
                verbs: verbs::Options { library, ..o.verbs.clone() },
                ..o
            }
        };
        let options: Vec<Options> = on(&["a", "b"]).into_iter().map(absent).collect();
        for e in threads(&options, |_| Ok(())).into_iter().map(Result::unwrap_err) {
            assert_eq!(e.exit_code(), 3, "{e}");
            assert!(e.to_string().contains("rank 0 (a): no verbs library"), "{e}");
        }
    }

    /// Ends of cables are found by their addresses: the device without one is told, with what its interface wants.
    #[test]
    fn a_device_without_an_address_is_named() {
        let late = Trap::always(Kind::LateGid { ms: 10_000_000 });
        let world = Emulated::cabled(Profile::Apple, 2, &[(0, 1)]).trap(late);
        let missing = "rank 0 (a): rdma_en01 has no IPv4 address";
        for e in forced(world.clone(), vec![], Some(Devices::All)) {
            let text = e.to_string();
            assert!(
                e.exit_code() == 3 && text.contains(missing) && text.contains("`ifconfig en01 inet"),
                "{text}"
            );
        }
        let world = world.install().unwrap();
        let mut options = cabled(&world, &["a", "b"], &[(0, 1)]);
        options.iter_mut().for_each(|o| o.verbs.devices = Devices::All);
        for result in threads(&options, |connected| Ok(connected.steps)) {
            let steps = result.unwrap();
            let why = steps[0].instead_of.concat();
            assert_eq!(steps[0].over, Transport::Tcp);
            assert!(why.starts_with(&format!("rdma: {missing}")), "{why}");
        }
    }
}

// ---- processes ----

/// The rank's side. Without a parent there is nothing to do.
#[test]
fn as_rank() {
    ranks::as_rank(|rendezvous, secret, program, hosts| {
        let mut options = options(hosts.split(',').nth(rendezvous.rank()).unwrap());
        if program == "exchange" {
            options.tcp.bounds.silence = Duration::from_secs(4); // `faults` waits for it
        }
        mixed::connect(rendezvous, &secret, &options)
    });
}

#[test]
fn conformance_of_processes() {
    for case in conformance::CASES.iter().filter(|case| case.ranks > 1) {
        let hosts: Vec<&str> = (0..case.ranks)
            .map(|rank| if rank < case.ranks.div_ceil(2).max(2) { "a" } else { "b" })
            .collect();
        judge_ends(case, &mut processes(case.ranks, case.name, &hosts.join(",")));
    }
}

/// Kills and stops ranks at random moments: every other rank, on the same host or not, ends within the bound, with exit
/// code 4 and a message that names the rank. `FULMEN_FAULT_RUNS` says how often.
#[test]
fn faults() {
    const HOSTS: &str = "a,a,b,b";
    let runs = std::env::var("FULMEN_FAULT_RUNS").map_or(8, |s| s.parse().unwrap());
    let mut draw = Draw::new(0x5EED);
    for run in 0..runs {
        let mut ranks = processes(4, "exchange", HOSTS);
        ranks.iter_mut().for_each(|rank| drop(rank.hear("READY")));
        std::thread::sleep(Duration::from_micros(draw.below(200_000)));
        let victim = draw.below(4) as usize;
        let signal = if run % 2 == 0 { libc::SIGKILL } else { libc::SIGSTOP };
        ranks[victim].signal(signal);
        for at in (0..ranks.len()).filter(|at| *at != victim) {
            let (code, said) = ranks[at].end();
            let context = format!("run {run}: signal {signal} to rank {victim}; rank {at}: {code}: {said}");
            assert_eq!(code, 4, "{context}");
            assert!(said.contains(&format!("rank {victim} (")), "{context}");
            // The system resets the connections of who is killed with data unread.
            let told: &[&str] = match signal {
                libc::SIGKILL => &["is gone", "(connection reset)"],
                _ => &["was silent"],
            };
            assert!(told.iter().any(|words| said.contains(words)), "{context}");
            // By the link that carried its data, though it was TCP that saw it go.
            if said.contains(") is gone") && at / 2 == victim / 2 {
                assert!(said.contains(", shm) is gone"), "{context}");
            }
        }
        if signal == libc::SIGSTOP {
            // It wakes into a job that has ended, and ends too.
            ranks[victim].signal(libc::SIGCONT);
            let (code, said) = ranks[victim].end();
            assert_eq!(code, 4, "run {run}: {said}");
        }
    }
}
