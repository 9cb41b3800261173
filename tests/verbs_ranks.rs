//! Solves over `fabric::verbs` whose ranks are processes, as in a real job: on emulated hosts with a cable between each two,
//! and on the devices of this machine (`tests/fabric_verbs_vm.rs` runs that in a VM).
#![cfg(target_os = "linux")]

mod seeded;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::Result;
use fulmen::fabric::rendezvous::{AtRankZero, Secret};
use fulmen::fabric::verbs::{Devices, Mode, Options, Service, Verbs};
use fulmen::fabric::{Bounds, Fabric, mem, tcp};
use fulmen::lapack::LuOpts;
use fulmen_emu_verbs::{Installed, Kind, Profile, Trap, World};
use seeded::Solve;

/// What a process that is a rank is told: size, rank, way, seconds of silence, whether it solves for ever, and where rank 0 is
/// met.
const RANK: &str = "FULMEN_TEST_RANK";
/// The device of rank i to rank j: `rx{i}{j}`. Not set: they find each other by their addresses.
const NAMES: &str = "FULMEN_VERBS_NAMES";

/// A hash of the bits of x, as this rank sees them.
fn solve(fabric: &Arc<dyn Fabric>) -> Result<u64> {
    let grid = if fabric.size() == 4 { (2, 2) } else { (1, fabric.size()) };
    let system = Solve { n: 150, nb: 24, grid, opts: LuOpts::default() };
    let bits = system.bits(Arc::clone(fabric))?;
    Ok(bits.into_iter().fold(0, |hash: u64, x| (hash ^ x).wrapping_mul(0x0000_0100_0000_01b3)))
}

fn expected(ranks: usize) -> u64 {
    mem::run(ranks, mem::Options::default(), |fabric| solve(&fabric)).swap_remove(0).unwrap()
}

/// The rank's side. Without a parent there is nothing to do.
#[test]
fn as_rank() {
    let Ok(told) = std::env::var(RANK) else { return };
    let words: Vec<&str> = told.split(' ').collect();
    let [size, rank, way, silence, for_ever, met] = words[..] else { panic!("{told}") };
    let (size, rank): (usize, usize) = (size.parse().unwrap(), rank.parse().unwrap());
    let mut bytes = [0; 32];
    std::io::stdin().read_exact(&mut bytes).unwrap();
    let secret = Secret::from_bytes(bytes);
    let limit = Duration::from_secs(100);
    let silence = Duration::from_secs(silence.parse().unwrap());
    let bounds = Bounds { silence, patience: Duration::from_secs(100) };
    let devices = match std::env::var(NAMES) {
        Ok(names) => {
            let name =
                |i: usize, j: usize| names.replace("{i}", &i.to_string()).replace("{j}", &j.to_string());
            let towards = |i, j| if i == j { vec![] } else { vec![name(i, j)] };
            Devices::Matrix((0..size).map(|i| (0..size).map(|j| towards(i, j)).collect()).collect())
        }
        Err(_) => Devices::All,
    };
    let way = match way {
        "rc-write" => Some((Service::Rc, Mode::Write)),
        "uc-posted" => Some((Service::Uc, Mode::Posted)),
        _ => None,
    };
    let options = Options { devices, way, bounds, ..Options::default() };
    let work = || -> Result<u64> {
        let mut rendezvous = if rank == 0 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            println!("\nMEET {}", listener.local_addr().unwrap());
            AtRankZero::host(listener, size, &secret, limit)?
        } else {
            AtRankZero::join(&[met.parse().unwrap()], rank, size, &secret, limit)?
        };
        let control =
            tcp::connect(&mut rendezvous, secret.clone(), &tcp::Options { bounds, ..Default::default() })?;
        let verbs = Verbs::connect(&mut rendezvous, Arc::clone(&control), &options)
            .inspect_err(|e| control.fail(e))?;
        let verbs = Arc::new(verbs);
        let fabric: Arc<dyn Fabric> = Arc::clone(&verbs) as _;
        println!("\nREADY {:?}", verbs.describe());
        let solved = loop {
            match solve(&fabric) {
                Ok(_) if for_ever == "true" => {}
                solved => break solved,
            }
        };
        let hash = solved.inspect_err(|e| verbs.fail(e))?;
        verbs.leave().map(|()| hash)
    };
    let result = work();
    println!(
        "\nSAID {}",
        result.as_ref().map_or_else(|e| e.to_string().replace('\n', " "), |x| format!("{x:016x}"))
    );
    std::process::exit(result.map_or_else(|e| e.exit_code().into(), |_| 0));
}

struct Rank {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Rank {
    /// What follows the line's first word, once there is such a line.
    fn line(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        String::new()
    }

    /// Exit code and last words.
    fn end(mut self) -> (Option<i32>, String) {
        let said = self.line("SAID ");
        (self.child.wait().unwrap().code(), said)
    }
}

/// Starts the ranks; each is on a host of its own, if `world` is emulated.
fn start(size: usize, world: Option<&Installed>, way: &str, silence: u64, for_ever: bool) -> Vec<Rank> {
    let secret = Secret::random().unwrap();
    let rank = |rank: usize, met: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "as_rank", "--nocapture"]);
        command.env(RANK, format!("{size} {rank} {way} {silence} {for_ever} {met}"));
        if let Some(world) = world {
            command.env("FULMEN_VERBS_LIB", world.library()).env("FULMEN_EMU", world.folder());
            command.env("FULMEN_EMU_HOST", format!("h{rank}"));
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(secret.expose()).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Rank { child, lines }
    };
    // A port that nobody else of this machine can have taken meanwhile: the first rank says which it has.
    let mut first = rank(0, "here");
    let met = first.line("MEET ");
    std::iter::once(first).chain((1..size).map(|i| rank(i, &met))).collect()
}

fn ends(ranks: Vec<Rank>) -> Vec<(Option<i32>, String)> {
    ranks.into_iter().map(Rank::end).collect()
}

fn all_right(size: usize, ends: &[(Option<i32>, String)]) {
    let hash = format!("{:016x}", expected(size));
    assert!(ends.iter().all(|(code, said)| *code == Some(0) && *said == hash), "{hash}: {ends:?}");
}

/// A rank is killed while all solve: the others end in bounded time, and name it.
fn a_killed_rank_is_named(size: usize, world: Option<&Installed>, way: &str) {
    let mut ranks = start(size, world, way, 10, true);
    for rank in &mut ranks {
        assert!(!rank.line("READY ").is_empty());
    }
    let start = Instant::now();
    let mut killed = ranks.remove(1);
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    for (code, said) in ends(ranks) {
        assert!(code == Some(4) && said.contains("rank 1"), "{code:?} {said}");
    }
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn hosts_find_their_cables_and_solve() {
    for size in [2, 4] {
        let world = World::mesh(Profile::Apple, size).install().unwrap();
        all_right(size, &ends(start(size, Some(&world), "any", 20, false)));
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds, c.recv_missing), (0, 0, 0, 0, 0), "{c:?}");
    }
}

#[test]
fn a_rank_of_an_emulated_host_is_killed() {
    let world = World::mesh(Profile::Apple, 4).install().unwrap();
    a_killed_rank_is_named(4, Some(&world), "any");
}

/// Apple's driver ends a process that posts after its cable was pulled: the rest of the job ends well. A rank that only waits
/// at that moment posts no more, and is ended by the silence: then it is tried again.
#[test]
fn a_driver_that_crashes_takes_no_other_rank_with_it() {
    for _ in 0..40 {
        let world = World::mesh(Profile::Apple, 3)
            .trap(Trap::always(Kind::CrashOnUnplug).on("rdma_en10"))
            .install()
            .unwrap();
        let mut ranks = start(3, Some(&world), "any", 4, true);
        for rank in &mut ranks {
            assert!(!rank.line("READY ").is_empty());
        }
        let start = Instant::now();
        world.set_cable("rdma_en10", false);
        let ends = ends(ranks);
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
        let crashed = ends[1].0.is_none(); // by a signal
        for (code, said) in [&ends[0], &ends[2]] {
            let named = said.contains("rank 1") || !crashed && said.contains("rank 0");
            assert!(*code == Some(4) && named, "{ends:?}");
        }
        if crashed {
            return;
        }
        assert_eq!(ends[1].0, Some(4), "{ends:?}");
    }
    panic!("rank 1 has never posted after its cable was pulled");
}

/// On the machine's own devices, if [`NAMES`] says which; `FULMEN_VERBS_LOSSY`: their links lose packets.
#[test]
fn on_this_machines_devices() {
    if std::env::var(NAMES).is_err() {
        return println!("skipped: {NAMES} names no devices");
    }
    let lossy = std::env::var("FULMEN_VERBS_LOSSY").is_ok();
    let mut noticed = 0;
    for (size, way) in [(2, "rc-write"), (4, "rc-write"), (2, "uc-posted"), (4, "uc-posted")] {
        let began = Instant::now();
        let ends = ends(start(size, None, way, 8, false));
        if lossy && way == "uc-posted" {
            // No answer is wrong, and who fails says what was lost, or dead, and to whom.
            let hash = format!("{:016x}", expected(size));
            assert!(ends.iter().all(|(code, said)| *code != Some(0) || *said == hash), "{hash}: {ends:?}");
            noticed += ends.iter().filter(|(code, _)| *code != Some(0)).count();
            let named = |said: &String| said.contains("rank ") || said.contains("rx");
            assert!(ends.iter().all(|(code, said)| *code == Some(0) || named(said)), "{ends:?}");
        } else {
            all_right(size, &ends);
        }
        println!("solved by {size} ranks over {way}: {:.1} s {:?}", began.elapsed().as_secs_f64(), ends[0]);
    }
    assert_eq!(noticed > 0, lossy, "ranks that missed something: {noticed}");
    if !lossy {
        a_killed_rank_is_named(4, None, "rc-write");
        println!("killed");
    }
}
