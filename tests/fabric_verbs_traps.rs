//! `fabric::verbs` against everything that Apple's provider is known to do: right bytes, or a named error in bounded
//! time, and within the provider's limits.
#![cfg(target_os = "linux")]

mod verbs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::{Devices, Options};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane};
use fulmen::{Error, Result};
use fulmen_emu_verbs::{Call, Counters, Installed, Kind, Profile, Trap, World};

/// Word `i` of message `m` from `rank`.
fn word(rank: usize, m: usize, i: usize) -> u64 {
    ((rank as u64) << 48 ^ (m as u64) << 32 ^ i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Every rank sends every other `rounds` messages on three lanes, small and large, armed early and late; each word that
/// arrives is compared. A wrong word panics.
fn traffic(fabric: &Arc<dyn Fabric>, rounds: usize) -> Result<()> {
    let others: Vec<usize> = (0..fabric.size()).filter(|p| *p != fabric.rank()).collect();
    traffic_with(fabric, &others, rounds)
}

/// As [`traffic`], with some of the others.
fn traffic_with(fabric: &Arc<dyn Fabric>, others: &[usize], rounds: usize) -> Result<()> {
    const LEN: usize = 40_000;
    let (me, n) = (fabric.rank(), fabric.size());
    let lens = [1, 200, 9_000, LEN, 300, 25_000];
    let mut out = Buf::<u64>::zeros(&**fabric, 3 * LEN)?;
    let mut into: Vec<Buf<u64>> = (0..n).map(|_| Buf::zeros(&**fabric, 3 * LEN)).collect::<Result<_>>()?;
    for round in 0..rounds {
        let len = |lane: usize| lens[(round + 2 * lane) % lens.len()];
        let arm = |into: &mut Vec<Buf<u64>>, from: usize| -> Result<()> {
            for lane in 0..3 {
                let first = lane * LEN;
                into[from].arm(&**fabric, Lane(lane as u8 + 1), from, first..first + len(lane))?;
            }
            Ok(())
        };
        if (round + me) % 2 == 0 {
            for from in others {
                arm(&mut into, *from)?;
            }
        }
        for lane in 0..3 {
            let first = lane * LEN;
            let words = out.write(first..first + len(lane));
            words.iter_mut().enumerate().for_each(|(i, w)| *w = word(me, 3 * round + lane, i));
        }
        for to in others {
            for lane in 0..3 {
                let first = lane * LEN;
                out.put(&**fabric, Lane(lane as u8 + 1), *to, first..first + len(lane))?;
            }
        }
        if (round + me) % 2 != 0 {
            for from in others {
                arm(&mut into, *from)?;
            }
        }
        for from in others {
            for lane in (0..3).rev() {
                let first = lane * LEN;
                let range = into[*from].wait(&**fabric, Lane(lane as u8 + 1), *from)?;
                assert_eq!(range, first..first + len(lane));
                for (i, w) in into[*from].read(range).iter().enumerate() {
                    assert_eq!(
                        *w,
                        word(*from, 3 * round + lane, i),
                        "word {i} of lane {lane}, round {round}"
                    );
                }
            }
        }
        out.flush(&**fabric)?;
    }
    Ok(())
}

fn options(world: &Installed, n: usize, cables: usize) -> Options {
    Options {
        bounds: Bounds { silence: Duration::from_secs(8), patience: Duration::from_secs(60) },
        warm_up: Duration::from_secs(2),
        window: 256 << 10,
        ..verbs::options(world, n, cables)
    }
}

fn run(n: usize, cables: usize, seed: u64, rounds: usize, traps: &[Trap]) -> (Vec<Result<()>>, Counters) {
    let mut world = verbs::mesh(Profile::Apple, n, cables).seed(seed);
    for trap in traps {
        world = world.trap(trap.clone());
    }
    let world = world.install().unwrap();
    let results = verbs::run(n, &options(&world, n, cables), |fabric| traffic(&fabric, rounds));
    (results, world.counters())
}

/// What the discipline has to live with: no trap of this kind may be noticed.
#[test]
fn harmless_traps_are_lived_with() {
    let quirks = [
        Trap::always(Kind::NegativeErrno),
        Trap::always(Kind::BadWrUnset),
        Trap::with_chance(Kind::Reorder, 0.3),
        Trap::always(Kind::OverPostSilent),
        Trap::always(Kind::EarlySendKills),
    ];
    let sets: &[(&str, Vec<Trap>)] = &[
        ("quirks", quirks.to_vec()),
        ("memory for local writes only", vec![Trap::always(Kind::LocalWriteOnly)]),
        ("memory with all flags only", vec![Trap::always(Kind::RemoteFlagsNeeded)]),
        ("a dead pair", vec![Trap::once_after(Kind::DeadPair { over: 0 }, 0)]),
        ("a pair that drops large messages", vec![Trap::once_after(Kind::DeadPair { over: 100 }, 1)]),
        (
            "posts refused below the grant",
            vec![
                Trap { after: 40, ..Trap::with_chance(Kind::Fail { call: Call::PostRecv, errno: 12 }, 0.05) }
                    .from_bytes(0),
                Trap { after: 10, ..Trap::with_chance(Kind::Fail { call: Call::PostSend, errno: 35 }, 0.05) },
            ],
        ),
        ("a stale queue, once", vec![Trap::once_after(Kind::Fail { call: Call::ToRtr, errno: 16 }, 0)]),
    ];
    for (name, traps) in sets {
        for seed in 0..2 {
            let (results, c) = run(2, 1 + seed as usize, seed, 12, traps);
            assert!(results.iter().all(Result::is_ok), "{name}, seed {seed}: {results:?}");
            assert_eq!(
                (c.recv_missing, c.length_errors, c.over_posts, c.bad_keys),
                (0, 0, 0, 0),
                "{name}: {c:?}"
            );
            assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{name}: {c:?}");
        }
    }
}

/// What must be noticed: the words are compared by `traffic`, so a wrong byte fails this test; what is left is that the
/// job ends well or with a named error, in bounded time.
#[test]
fn harmful_traps_end_well_or_by_name() {
    let kinds = [Kind::Lost, Kind::Duplicated, Kind::Foreign, Kind::FlippedBit];
    let (mut noticed, mut well) = (0, 0);
    for seed in 0..24 {
        let kind = kinds[seed % kinds.len()];
        // The proofs of connecting are spared.
        let trap = Trap { after: 8, ..Trap::with_chance(kind, 0.02) };
        let start = Instant::now();
        let (results, c) = run(2, 1, seed as u64, 8, &[trap]);
        assert!(start.elapsed() < Duration::from_secs(100), "{kind:?}: {:?}", start.elapsed());
        if results.iter().all(Result::is_ok) {
            well += 1;
            continue;
        }
        assert!(c.traps > 0, "{kind:?}, seed {seed}: an error without a trap: {results:?}");
        noticed += 1;
        for result in &results {
            let named = matches!(
                result,
                Ok(())
                    | Err(Error::Corrupt { .. }
                        | Error::PeerLost { .. }
                        | Error::Aborted { .. }
                        | Error::Resources { .. })
            );
            assert!(named, "{kind:?}, seed {seed}: {result:?}");
        }
    }
    println!("{noticed} noticed, {well} without a hit");
    assert!(noticed >= 8, "{noticed} noticed, {well} well");
}

/// A device that keeps completions of sends to itself, as soft RoCE does now and then under loss, holds up nobody: the target
/// tells what it has. When none comes any more and the device is full, it is named.
#[test]
fn completions_that_never_come() {
    for profile in [Profile::Apple, Profile::Nic] {
        let solve = |trap: Trap, rounds| {
            let world = verbs::mesh(profile, 2, 1).trap(trap).install().unwrap();
            let results = verbs::run(2, &options(&world, 2, 1), |fabric| traffic(&fabric, rounds));
            assert!(world.counters().traps > 0);
            results
        };
        // Seldom enough that it never happens to all that are under way at once: then the device is full.
        let some = solve(Trap { after: 8, ..Trap::with_chance(Kind::NoCompletion, 0.04) }, 40);
        assert!(some.iter().all(Result::is_ok), "{profile:?}: {some:?}");
        let none = solve(Trap { after: 60, ..Trap::always(Kind::NoCompletion) }, 40);
        let errors: Vec<_> = none.iter().filter_map(|r| r.as_ref().err()).map(ToString::to_string).collect();
        let is_named = |e: &String| e.contains("does not complete") && e.contains("towards rank ");
        assert!(errors.iter().any(is_named), "{profile:?}: {none:?}");
    }
}

/// Eight ranks stay within what a device has.
#[test]
fn eight_ranks_within_the_limits() {
    let (results, c) = run(8, 1, 1, 2, &[]);
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    assert!(c.qps_peak <= 10 && c.mrs_peak <= 100 && c.pds_peak <= 11, "{c:?}");
    assert_eq!(
        (c.recv_missing, c.length_errors, c.over_posts, c.overruns, c.qps, c.mrs, c.pds),
        (0, 0, 0, 0, 0, 0, 0)
    );
    println!("peaks: {} queue pairs, {} regions, {} domains a device", c.qps_peak, c.mrs_peak, c.pds_peak);
}

/// Opening and closing leaks nothing, and never takes more than a device has: 500 times eight ranks.
#[test]
fn opened_and_closed_again_and_again() {
    let world = verbs::mesh(Profile::Apple, 8, 1).install().unwrap();
    // No pair is to be made anew, however long the machine is busy.
    let warm_up = Duration::from_secs(60);
    let options = Options { chunk: 4096, warm_up, ..options(&world, 8, 1) };
    for round in 0..500 {
        let results = verbs::run(8, &options, |fabric| meet(&fabric));
        assert!(results.iter().all(Result::is_ok), "{round}: {results:?}");
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds, c.pds_lost), (0, 0, 0, 0, 0), "round {round}: {c:?}");
    }
    let c = world.counters();
    assert!(c.qps_peak <= 10 && c.mrs_peak <= 100 && c.pds_peak <= 11, "{c:?}");
    // A control and a data queue pair for each of the 56 ends, 500 times: none was made twice.
    assert_eq!((c.qps_ever, c.recv_missing, c.length_errors, c.over_posts), (500 * 56 * 2, 0, 0, 0), "{c:?}");
}

/// A short message from everyone to everyone.
fn meet(fabric: &Arc<dyn Fabric>) -> Result<()> {
    let (me, n) = (fabric.rank(), fabric.size());
    let mut all = Buf::<u64>::zeros(&**fabric, n)?;
    let others = || (0..n).filter(|other| *other != me);
    others().try_for_each(|from| all.arm(&**fabric, Lane::CONTROL, from, from..from + 1))?;
    all.write(me..me + 1)[0] = word(me, 0, 0);
    others().try_for_each(|to| all.put(&**fabric, Lane::CONTROL, to, me..me + 1).map(drop))?;
    for from in others() {
        let range = all.wait(&**fabric, Lane::CONTROL, from)?;
        assert_eq!(all.read(range)[0], word(from, 0, 0));
    }
    all.flush(&**fabric)
}

/// A device's refusals come with their remedy, on the rank that met them; the other is told.
#[test]
fn refusals_say_what_to_do() {
    let rows = [
        (Kind::Fail { call: Call::ToRtr, errno: 96 }, "restart this machine"),
        (Kind::Fail { call: Call::ToRtr, errno: 22 }, "give the interface of the cable an IPv4 address"),
        (Kind::Fail { call: Call::ToRtr, errno: 14 }, "use less memory"),
        (Kind::Fail { call: Call::AllocPd, errno: 12 }, "restart this machine"),
        (Kind::Fail { call: Call::RegMr, errno: 12 }, "smaller problem or more hosts"),
        (Kind::DeadPair { over: 0 }, "reseat the cable"),
    ];
    for (kind, remedy) in rows {
        let world = verbs::mesh(Profile::Apple, 2, 1).trap(Trap::always(kind)).install().unwrap();
        let options = Options { warm_up: Duration::from_millis(300), ..options(&world, 2, 1) };
        let results = verbs::run(2, &options, |_| Ok(()));
        let said = results.iter().filter_map(|r| r.as_ref().err()).map(ToString::to_string);
        assert!(said.clone().any(|text| text.contains(remedy)), "{kind:?}: {:?}", said.collect::<Vec<_>>());
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{kind:?}: {c:?}");
    }
}

/// A cable that is pulled is named within the silence bound, although no device says a word, with and without a thread that
/// moves puts.
#[test]
fn a_pulled_cable_is_named() {
    for progress_thread in [true, false] {
        let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
        let mut options = options(&world, 2, 1);
        options.bounds = Bounds { silence: Duration::from_secs(3), patience: Duration::from_secs(600) };
        options.progress_thread = progress_thread;
        let start = Instant::now();
        let results = verbs::run(2, &options, |fabric| {
            traffic(&fabric, 3)?;
            if fabric.rank() == 0 {
                world.set_cable("rdma_en01", false);
            }
            traffic(&fabric, 1000)
        });
        let lost = results.iter().filter(|r| {
            matches!(r, Err(Error::PeerLost { link, .. } | Error::Corrupt { link, .. }) if link.contains("rdma_en"))
        });
        assert!(lost.count() >= 1 && results.iter().all(Result::is_err), "{results:?}");
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    }
}

/// What arrived wrong left the peer's device, and that is the one to be tested; a status is told as one, with rank and host.
#[test]
fn the_device_at_fault_is_named_with_its_end() {
    for (kind, said) in [
        (Kind::FlippedBit, ["from rank 0 (", "verbs rdma_en01 to rdma_en10) to rank 1"]),
        (Kind::LengthError, ["rank 1's device rdma_en10 (", ": moving data failed with status 1: "]),
    ] {
        let trap = Trap { after: 8, ..Trap::always(kind) }.on("rdma_en01");
        let world = verbs::mesh(Profile::Apple, 2, 1).trap(trap).install().unwrap();
        let results = verbs::run(2, &options(&world, 2, 1), |fabric| traffic(&fabric, 8));
        for result in &results {
            let words = result.as_ref().unwrap_err().to_string();
            assert!(said.iter().all(|part| words.contains(part)), "{kind:?}: {results:?}");
        }
    }
}

/// A cable that is pulled when all that is left is to say goodbye: nobody waits for the patience.
#[test]
fn a_cable_pulled_at_the_end_is_named() {
    let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
    let mut options = options(&world, 2, 1);
    options.bounds = Bounds { silence: Duration::from_secs(2), patience: Duration::from_secs(600) };
    let start = Instant::now();
    let results = verbs::run(2, &options, |fabric| {
        traffic(&fabric, 2)?;
        world.set_cable("rdma_en01", false);
        Ok(())
    });
    let lost = |r: &Result<()>| matches!(r, Err(Error::PeerLost { link, .. }) if link.contains("rdma_en"));
    assert!(results.iter().any(lost), "{results:?}");
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

/// A rank that computes for longer than the silence bound, without a call of its fabric, is not taken for a dead link.
#[test]
fn a_rank_that_computes_is_not_silent() {
    let compute = |progress_thread| {
        let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
        let mut options = options(&world, 2, 1);
        options.bounds.silence = Duration::from_secs(4);
        options.progress_thread = progress_thread;
        let results = verbs::run(2, &options, |fabric| {
            traffic(&fabric, 2)?;
            if fabric.rank() == 0 {
                std::thread::sleep(Duration::from_secs(9));
            }
            traffic(&fabric, 2)
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| compute(true));
        compute(false);
    });
}

/// A caller that drops an error on its way is told again at its next call: never that it has ended the job itself.
#[test]
fn a_dropped_error_comes_again() {
    let trap = Trap { after: 8, ..Trap::always(Kind::FlippedBit) };
    let world = verbs::mesh(Profile::Apple, 2, 1).trap(trap).install().unwrap();
    let results = verbs::run(2, &options(&world, 2, 1), |fabric| {
        let first = traffic(&fabric, 8).expect_err("a flipped bit in every message");
        for again in [fabric.poll(), traffic(&fabric, 1), fabric.poll()] {
            assert_eq!(again.expect_err("the job has ended").to_string(), first.to_string());
        }
        let is_own = |e: &Error| matches!(e, Error::Aborted { by, .. } if *by == fabric.rank());
        assert!(!is_own(&first), "rank {}: {first}", fabric.rank());
        Err::<(), _>(first)
    });
    let finders = results.iter().filter(|r| matches!(r, Err(Error::Corrupt { .. })));
    assert!(finders.count() >= 1, "{results:?}");
}

/// Without `all_pairs`, pairs without a cable, or with a dead one, are left out and told; the others work.
#[test]
fn pairs_without_a_cable_are_left_out() {
    let world = verbs::mesh(Profile::Apple, 3, 1);
    let dead = Trap::always(Kind::DeadPair { over: 0 }).on("rdma_en02");
    for (trap, cut, why) in [(None, true, "names no cable"), (Some(dead), false, "carries nothing")] {
        let world = trap.into_iter().fold(world.clone(), World::trap).install().unwrap();
        let mut options =
            Options { all_pairs: false, warm_up: Duration::from_secs(1), ..options(&world, 3, 1) };
        if let (Devices::Matrix(matrix), true) = (&mut options.devices, cut) {
            (matrix[0][2], matrix[2][0]) = (vec![], vec![]);
        }
        let results = verbs::run_verbs(3, &options, |verbs, _| {
            let me = verbs.rank();
            let others: Vec<usize> = (0..3).filter(|other| *other != me && verbs.joins(*other)).collect();
            let fabric = Arc::clone(verbs) as Arc<dyn Fabric>;
            traffic_with(&fabric, &others, 4)?;
            let said: Vec<_> =
                verbs.left_out().iter().map(|left| (left.rank, left.why.contains(why))).collect();
            assert!(
                others.iter().all(|other| fabric.link(*other).contains("rdma_en")),
                "{}",
                fabric.link(others[0])
            );
            Ok((others, said))
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        let expected = [(vec![1], vec![(2, true)]), (vec![0, 2], vec![]), (vec![1], vec![(0, true)])];
        assert_eq!(results, expected);
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{c:?}");
        // The same is an error where every pair must be joined.
        let options = Options { all_pairs: true, ..options };
        let results = verbs::run(3, &options, |fabric| traffic(&fabric, 1));
        assert!(results.iter().all(Result::is_err), "{results:?}");
    }
}

/// Where nothing larger than a frame passes (the first builds of macOS), frames carry the puts.
#[test]
fn chunks_shrink_to_frames_where_larger_ones_are_dropped() {
    let world = verbs::mesh(Profile::Apple, 2, 1)
        .trap(Trap::always(Kind::DeadPair { over: 4096 }))
        .install()
        .unwrap();
    let options = Options { warm_up: Duration::from_secs(1), ..options(&world, 2, 1) };
    let results = verbs::run(2, &options, |fabric| traffic(&fabric, 4));
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}
