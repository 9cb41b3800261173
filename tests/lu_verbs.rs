//! A whole solve over emulated RDMA devices under seeded traps: right bits, or an error with a name; never a hang, never a
//! wrong answer. `FULMEN_SEEDS=2000` runs more than the few of every day.
#![cfg(target_os = "linux")]

mod seeded;
#[path = "verbs/traps.rs"]
mod traps;
mod verbs;

use std::time::{Duration, Instant};

use fulmen::comm::Topology;
use fulmen::fabric::{Bounds, mem};
use fulmen::lapack::LuOpts;
use fulmen_emu_verbs::Profile;
use seeded::{Solve, mix};
use traps::{is_named, is_silence, seeds, traps};

fn job(seed: u64) -> Solve {
    Solve {
        n: 60 + (mix(seed, 1) % 100) as usize,
        nb: 8 + (mix(seed, 2) % 24) as usize,
        grid: [(1, 2), (2, 2), (1, 4)][(mix(seed, 3) % 3) as usize],
        opts: LuOpts {
            lookahead: (mix(seed, 4) % 3) as usize,
            bcast: Topology::ALL[(mix(seed, 5) % 7) as usize],
            ..LuOpts::default()
        },
    }
}

#[test]
fn right_bits_or_a_named_error_under_every_trap() {
    let seeds = seeds(48);
    let worlds = [2, 4].map(|ranks| (ranks, verbs::mesh(Profile::Apple, ranks, 1).install().unwrap()));
    let (mut right, mut named, mut played, mut slowest) = (0, 0, 0, Duration::ZERO);
    for seed in seeds.clone() {
        let job = job(seed);
        let n = job.ranks();
        let world = &worlds.iter().find(|(ranks, _)| *ranks == n).unwrap().1;
        let (traps, must_end_well) = traps(seed);
        let description = verbs::mesh(Profile::Apple, n, 1).seed(seed);
        let description = traps.iter().cloned().fold(description, |w, t| w.trap(t));
        let expected =
            mem::run(n, mem::Options::default(), |fabric| job.bits(fabric)).swap_remove(0).unwrap();

        let mut run = |silence: u64| {
            world.change(&description).unwrap();
            let mut options = verbs::options(world, n, 1);
            options.bounds =
                Bounds { silence: Duration::from_secs(silence), patience: Duration::from_secs(60) };
            options.progress_thread = mix(seed, 9).is_multiple_of(2);
            options.chunk = 4096 << (mix(seed, 10) % 3);
            let start = Instant::now();
            let results = verbs::run(n, &options, |fabric| job.bits(fabric));
            slowest = slowest.max(start.elapsed());
            let c = world.counters();
            let left = (c.qps, c.cqs, c.mrs, c.pds);
            assert_eq!(left, (0, 0, 0, 0), "seed {seed}: queue pairs, queues, regions, domains are left");
            assert_eq!(c.not_sends + c.bad_keys + c.aliased, 0, "seed {seed}: {c:?}");
            (results, c)
        };
        // A loss and a dead link are found out after the silence; that of a job that must end well is for a busy machine.
        let (mut results, mut counters) = run(if must_end_well { 20 } else { 2 });
        if counters.traps == 0 && !must_end_well && is_silence(&results) {
            (results, counters) = run(20);
        }
        played += (counters.traps > 0) as u64;
        for (rank, result) in results.iter().enumerate() {
            match result {
                Ok(bits) => assert!(bits == &expected, "seed {seed}: rank {rank} accepted a wrong answer"),
                Err(e) => assert!(is_named(rank, e), "seed {seed}: rank {rank}: {e:?}"),
            }
        }
        if results.iter().all(Result::is_ok) {
            right += 1;
            continue;
        }
        named += 1;
        // The finder's words; of those that were told, each has them.
        let words: Vec<String> =
            results.iter().filter_map(|r| r.as_ref().err()).map(ToString::to_string).collect();
        assert!(!must_end_well, "seed {seed}: {words:?}");
        let says = |w: &String| w.contains("rank ") && (w.contains("rdma_en") || w.contains("device"));
        assert!(words.iter().any(says), "seed {seed}: no rank and no link are named: {words:?}");
        assert!(counters.traps > 0, "seed {seed}: an error without a trap: {words:?}");
    }
    println!(
        "seeds {seeds:?}: {right} right, {named} with a named error, traps played in {played}, slowest {slowest:?}"
    );
    let n = seeds.end - seeds.start;
    assert!(right >= n / 3 && named >= n / 10, "{right} right, {named} named of {seeds:?}");
}
