//! `fabric::verbs` against everything that Apple's provider is known to do: right bytes, or a named error in bounded
//! time, and within the provider's limits.
#![cfg(target_os = "linux")]

mod verbs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::Options;
use fulmen::fabric::{Bounds, Buf, Fabric, Lane};
use fulmen::{Error, Result};
use fulmen_emu_verbs::{Call, Counters, Installed, Kind, Profile, Trap};

/// Word `i` of message `m` from `rank`.
fn word(rank: usize, m: usize, i: usize) -> u64 {
    ((rank as u64) << 48 ^ (m as u64) << 32 ^ i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Every rank sends every other `rounds` messages on three lanes, small and large, armed early and late; each word that
/// arrives is compared. A wrong word panics.
fn traffic(fabric: &Arc<dyn Fabric>, rounds: usize) -> Result<()> {
    const LEN: usize = 40_000;
    let (me, n) = (fabric.rank(), fabric.size());
    let others: Vec<usize> = (0..n).filter(|p| *p != me).collect();
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
            for from in &others {
                arm(&mut into, *from)?;
            }
        }
        for lane in 0..3 {
            let first = lane * LEN;
            let words = out.write(first..first + len(lane));
            words.iter_mut().enumerate().for_each(|(i, w)| *w = word(me, 3 * round + lane, i));
        }
        for to in &others {
            for lane in 0..3 {
                let first = lane * LEN;
                out.put(&**fabric, Lane(lane as u8 + 1), *to, first..first + len(lane))?;
            }
        }
        if (round + me) % 2 != 0 {
            for from in &others {
                arm(&mut into, *from)?;
            }
        }
        for from in &others {
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

/// Opening and closing leaks nothing.
#[test]
fn opened_and_closed_again_and_again() {
    let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
    let options = options(&world, 2, 1);
    for round in 0..30 {
        let results = verbs::run(2, &options, |fabric| traffic(&fabric, 1));
        assert!(results.iter().all(Result::is_ok), "{round}: {results:?}");
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "round {round}: {c:?}");
    }
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

/// A cable that is pulled is named within the silence bound, although no device says a word.
#[test]
fn a_pulled_cable_is_named() {
    let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
    let mut options = options(&world, 2, 1);
    options.bounds.silence = Duration::from_secs(3);
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

/// Of what was put, the CPU copied only small puts: the "card" moved every byte of the large ones.
#[test]
fn large_puts_are_not_copied() {
    let world = verbs::mesh(Profile::Apple, 2, 1).install().unwrap();
    const BYTES: usize = 8 << 20;
    let before = world.counters().bytes;
    let results = verbs::run(2, &options(&world, 2, 1), |fabric| {
        let mut buf = Buf::<u8>::zeros(&*fabric, BYTES)?;
        if fabric.rank() == 0 {
            buf.write(0..BYTES).fill(7);
            buf.put(&*fabric, Lane::PANEL, 1, 0..BYTES)?;
            buf.flush(&*fabric)
        } else {
            buf.arm(&*fabric, Lane::PANEL, 0, 0..BYTES)?;
            buf.wait(&*fabric, Lane::PANEL, 0)?;
            assert!(buf.read(0..BYTES).iter().all(|b| *b == 7));
            Ok(())
        }
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let carried = (world.counters().bytes - before) as usize;
    // Proofs (a chunk and two messages each way) and control messages beside the data.
    assert!((BYTES..BYTES + (1 << 20)).contains(&carried), "{carried} bytes carried for {BYTES}");
}
