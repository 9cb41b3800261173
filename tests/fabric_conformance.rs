//! The conformance suite of `fabric` over the transports that need nothing but this machine.

mod conformance;

use conformance::CASES;
use fulmen::fabric::mem;

#[test]
fn mem() {
    for case in CASES {
        let results = mem::run(case.ranks, mem::Options::default(), |fabric| case.run(&fabric));
        for (rank, result) in results.iter().enumerate() {
            case.judge(rank, result);
        }
        assert_eq!(results.iter().all(|r| r.is_ok()), case.ends_well(), "{}", case.name);
    }
}

/// Delays, reordering across lanes and duplicates must not be noticed.
#[test]
fn mem_over_a_rough_but_lossless_network() {
    for case in CASES {
        for seed in 0..if case.ranks > 2 { 2 } else { 4 } {
            let options = mem::Options { faults: Some(mem::Faults::harmless(seed)), ..Default::default() };
            let results = mem::run(case.ranks, options, |fabric| case.run(&fabric));
            for (rank, result) in results.iter().enumerate() {
                case.judge(rank, result);
            }
        }
    }
}

#[test]
fn a_panic_of_one_rank_ends_the_others() {
    let results = mem::run(3, mem::Options::default(), |fabric| {
        assert!(fabric.rank() != 1, "rank one has a bug");
        conformance::barrier(&*fabric, fulmen::fabric::Lane::CONTROL)
    });
    assert!(matches!(&results[1], Err(fulmen::Error::Internal(text)) if text.contains("rank one has a bug")));
    for rank in [0, 2] {
        assert!(
            matches!(&results[rank], Err(fulmen::Error::Aborted { by: 1, reason }) if reason.contains("has a bug")),
            "{:?}",
            results[rank]
        );
    }
}

/// Twelve ranks on whatever cores there are: no rank may starve the one it waits for.
#[test]
fn more_ranks_than_cores() {
    let sums = mem::run(12, mem::Options::default(), |fabric| {
        for _ in 0..200 {
            conformance::barrier(&*fabric, fulmen::fabric::Lane::CONTROL)?;
        }
        Ok(fabric.rank())
    });
    assert_eq!(sums.into_iter().map(|r| r.unwrap()).sum::<usize>(), 66);
}
