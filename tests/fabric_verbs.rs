//! `fabric::verbs` over emulated devices: Apple's limits, and a card with one-sided writes.
#![cfg(target_os = "linux")]

mod conformance;
mod seeded;
#[path = "verbs/traps.rs"]
mod traps;
mod verbs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use conformance::CASES;
use fulmen::Result;
use fulmen::comm::{AllToAllSmall, Group};
use fulmen::fabric::verbs::{Devices, Mode, Options, Service};
use fulmen::fabric::{Bounds, Fabric, Lane};
use fulmen_emu_verbs::{Counters, Profile};
use seeded::mix;
use traps::{is_named, is_silence, seeds, traps};

/// Nothing that a provider would punish, and nothing left.
fn check_clean(c: &Counters) {
    let never = [
        ("messages without a receive", c.recv_missing),
        ("length errors", c.length_errors),
        ("posts beyond the grant", c.over_posts),
        ("transfers past a 4 GiB line", c.aliased),
        ("wrong keys", c.bad_keys + c.bad_remote_keys),
        ("completions lost", c.overruns),
        ("left: queue pairs", c.qps),
        ("left: completion queues", c.cqs),
        ("left: regions", c.mrs),
        ("left: domains", c.pds),
    ];
    for (what, n) in never {
        assert_eq!(n, 0, "{what}: {c:?}");
    }
}

fn conformance(profile: Profile, way: Option<(Service, Mode)>, cables: usize) {
    for case in CASES {
        let world = verbs::mesh(profile, case.ranks, cables).install().unwrap();
        let options = Options { way, ..verbs::options(&world, case.ranks, cables) };
        let words = match way {
            None => "uc posted".into(),
            Some((service, mode)) => format!("{service:?} {mode:?}").to_lowercase(),
        };
        let results = verbs::run_verbs(case.ranks, &options, |verbs, _| {
            let joined = verbs.describe();
            assert!(joined.iter().all(|(_, how)| how.starts_with(&words)), "{words}: {joined:?}");
            case.run(&(Arc::clone(verbs) as Arc<dyn Fabric>))
        });
        for (rank, result) in results.iter().enumerate() {
            case.judge(rank, result);
        }
        if case.ends_well() {
            check_clean(&world.counters());
        }
        if profile == Profile::Apple {
            assert_eq!(world.counters().not_sends, 0, "{}: only SENDs on Apple's devices", case.name);
        }
    }
}

#[test]
fn conformance_posted_on_apples_devices() {
    conformance(Profile::Apple, None, 1);
}

#[test]
fn conformance_posted_on_two_cables() {
    conformance(Profile::Apple, None, 2);
}

#[test]
fn conformance_write_on_a_card() {
    conformance(Profile::Nic, Some((Service::Rc, Mode::Write)), 1);
}

#[test]
fn conformance_every_other_way_on_a_card() {
    for way in [(Service::Uc, Mode::Write), (Service::Rc, Mode::Posted), (Service::Uc, Mode::Posted)] {
        conformance(Profile::Nic, Some(way), 2);
    }
}

/// A program of the suite for each seed, under the seed's traps: it ends as it must (each compares the bytes that it gets), or
/// every rank that fails has an error with a name, in bounded time. `FULMEN_SEEDS=2000` runs more than the few of every day.
#[test]
fn conformance_or_a_named_error_under_every_trap() {
    let seeds = seeds(48);
    let (mut right, mut named, mut slowest) = (0, 0, Duration::ZERO);
    for seed in seeds.clone() {
        let case = &CASES[(mix(seed, 21) % CASES.len() as u64) as usize];
        let (traps, must_end_well) = traps(seed);
        let cables = 1 + (mix(seed, 22) % 2) as usize;
        let world = verbs::mesh(Profile::Apple, case.ranks, cables).seed(seed);
        let world = traps.iter().cloned().fold(world, |world, trap| world.trap(trap));
        let mut run = |silence: u64| {
            let world = world.install().unwrap();
            let options = Options {
                bounds: Bounds { silence: Duration::from_secs(silence), patience: Duration::from_secs(60) },
                progress_thread: mix(seed, 23).is_multiple_of(2),
                chunk: 4096 << (mix(seed, 24) % 5),
                ..verbs::options(&world, case.ranks, cables)
            };
            let start = Instant::now();
            let shown =
                std::panic::catch_unwind(|| verbs::run(case.ranks, &options, |fabric| case.run(&fabric)));
            let results = shown
                .unwrap_or_else(|_| panic!("seed {seed}, {}: a rank panicked, under {traps:?}", case.name));
            slowest = slowest.max(start.elapsed());
            let c = world.counters();
            assert_eq!(
                (c.qps, c.cqs, c.mrs, c.pds),
                (0, 0, 0, 0),
                "seed {seed}, {}: something is left",
                case.name
            );
            assert_eq!(c.not_sends + c.bad_keys + c.aliased, 0, "seed {seed}, {}: {c:?}", case.name);
            (results, c)
        };
        // A loss and a dead link are found out after the silence; that of a job that must end well is for a busy machine.
        let (mut results, mut c) = run(if must_end_well { 20 } else { 2 });
        if c.traps == 0 && !must_end_well && is_silence(&results) {
            (results, c) = run(20);
        }
        if results.iter().enumerate().all(|(rank, result)| case.is_right(rank, result)) {
            right += 1;
            continue;
        }
        named += 1;
        assert!(!must_end_well && c.traps > 0, "seed {seed}, {}: {results:?}", case.name);
        for (rank, result) in results.iter().enumerate() {
            let ends =
                case.is_right(rank, result) || result.as_ref().map_or_else(|e| is_named(rank, e), |()| true);
            assert!(ends, "seed {seed}, {}: rank {rank}: {result:?}", case.name);
        }
    }
    println!("seeds {seeds:?}: {right} right, {named} with a named error, slowest {slowest:?}");
    let n = seeds.end - seeds.start;
    assert!(right >= n / 3, "{right} right, {named} named of {seeds:?}");
}

/// The search for a pivot waits one way for each column, not three: the candidate's row and the top's travel unasked, in one
/// message or two, whatever else is to be acknowledged.
#[test]
fn a_pivot_is_one_way() {
    const ROUNDS: u64 = 400;
    let messages = |columns: usize, rounds: u64| {
        let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
        let results = verbs::run(2, &verbs::options(&world, 2, 1), |fabric| {
            let rows = vec![1.0; 1 + 2 * columns];
            let mut exchange = AllToAllSmall::<f64>::new(&Group::all(fabric)?, Lane::PIVOT, rows.len())?;
            for _ in 0..rounds {
                exchange.post(&rows)?;
                assert!(exchange.collect()?.iter().all(|message| message == rows));
            }
            exchange.finish()
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        world.counters().messages
    };
    for (columns, pieces) in [(128, 1), (256, 2)] {
        let (many, one) = (messages(columns, ROUNDS), messages(columns, 1));
        let rows = 2 * pieces * (ROUNDS - 1);
        // Three ways would be four messages a row: an announcement, a grant, the row, its checksum. What the two runs send to open,
        // close and show that they live differs by a few messages with the machine's load.
        assert!(
            (rows - 100..rows * 3 / 2 + 100).contains(&(many - one)),
            "{columns}: {many} - {one} of {rows}"
        );
    }
}

/// On the machine's own devices: `FULMEN_VERBS_DEVICES=rxe0` names what every rank uses, `FULMEN_VERBS_WAYS` (a list like
/// `any,rc-write,uc-posted`) in which ways, `FULMEN_VERBS_SKIP` cases to be left out.
#[test]
fn conformance_on_this_machines_devices() {
    let Ok(names) = std::env::var("FULMEN_VERBS_DEVICES") else {
        return println!("skipped: FULMEN_VERBS_DEVICES names no device");
    };
    let devices = Devices::Named(names.split(',').map(str::to_owned).collect());
    let ways =
        std::env::var("FULMEN_VERBS_WAYS").unwrap_or("any,rc-write,uc-write,rc-posted,uc-posted".into());
    let skipped = std::env::var("FULMEN_VERBS_SKIP").unwrap_or_default();
    for name in ways.split(',') {
        let service = if name.starts_with("rc") { Service::Rc } else { Service::Uc };
        let mode = if name.ends_with("write") { Mode::Write } else { Mode::Posted };
        let way = (name != "any").then_some((service, mode));
        let mut ran = 0;
        for case in CASES.iter().filter(|case| !skipped.split(',').any(|name| name == case.name)) {
            let start = Instant::now();
            let bounds = Bounds { silence: Duration::from_secs(60), patience: Duration::from_secs(300) };
            let options = Options { devices: devices.clone(), way, bounds, ..Options::default() };
            let results = verbs::run(case.ranks, &options, |fabric| case.run(&fabric));
            for (rank, result) in results.iter().enumerate() {
                case.judge(rank, result);
            }
            println!("{name}: {}: {:.2} s", case.name, start.elapsed().as_secs_f64());
            ran += 1;
        }
        println!("{name}: {ran} cases");
    }
}
