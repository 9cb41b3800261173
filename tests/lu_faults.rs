//! A whole solve under thousands of seeded schedules: right bits, or an error that names the loss; never a
//! hang, never a wrong answer.

mod seeded;

use fulmen::comm::Topology;
use fulmen::error::Loss;
use fulmen::fabric::mem::{self, Faults, Kill};
use fulmen::lapack::LuOpts;
use fulmen::{Error, Result};
use seeded::{Solve, mix};

const SEEDS: u64 = 2000;

fn job(seed: u64) -> Solve {
    let grids = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3)];
    Solve {
        n: 20 + (mix(seed, 1) % 21) as usize,
        nb: 4 + (mix(seed, 2) % 5) as usize,
        grid: grids[(mix(seed, 3) % 6) as usize],
        opts: LuOpts {
            lookahead: (mix(seed, 4) % 3) as usize,
            bcast: Topology::ALL[(mix(seed, 5) % 7) as usize],
            keep_l: mix(seed, 6).is_multiple_of(2),
            ..LuOpts::default()
        },
    }
}

/// The bits of x, as every rank sees them.
fn run(job: &Solve, faults: Option<Faults>) -> Vec<Result<Vec<u64>>> {
    let options = mem::Options { faults, ..mem::Options::default() };
    mem::run(job.ranks(), options, |fabric| {
        fabric.set_activity("at the start");
        job.bits(fabric)
    })
}

#[derive(Default, Debug)]
struct Tally {
    right: usize,
    gone: usize,
    silent: usize,
    corrupt: usize,
}

#[test]
fn two_thousand_schedules() {
    let mut tally = Tally::default();
    for seed in 0..SEEDS {
        let job = job(seed);
        let expected = run(&job, None).swap_remove(0).unwrap();
        let mut faults = Faults::harmless(seed);
        let kind = seed % 4;
        match kind {
            1 => faults.drop = 0.005,
            2 => faults.corrupt = 0.005,
            3 => {
                let rank = (mix(seed, 8) % job.ranks() as u64) as usize;
                faults.kill = Some(Kill { rank, at: mix(seed, 9) % 400 });
            }
            _ => {}
        }
        let results = run(&job, Some(faults));
        let mut named = None;
        for (rank, result) in results.iter().enumerate() {
            match result {
                Ok(bits) => assert!(bits == &expected, "seed {seed}: rank {rank} accepted a wrong answer"),
                Err(Error::Aborted { .. }) => {}
                Err(e) => named = named.or(Some(e)),
            }
        }
        match named {
            None => {
                // A rank killed in its last steps is missed by nobody.
                let killed = |rank| faults.kill.is_some_and(|kill| kill.rank == rank);
                assert!(
                    results.iter().enumerate().all(|(rank, result)| result.is_ok() || killed(rank)),
                    "seed {seed}: an error that nobody names"
                );
                tally.right += 1;
            }
            Some(_) if kind == 0 => panic!("seed {seed}: failed without a loss: {named:?}"),
            Some(e @ Error::PeerLost { rank, loss, waiting_for, .. }) => {
                assert!(*rank < job.ranks() && !waiting_for.is_empty(), "seed {seed}: {e}");
                match loss {
                    Loss::Gone => tally.gone += 1,
                    Loss::Silent | Loss::Slow => tally.silent += 1,
                    Loss::Broken(_) => panic!("seed {seed}: no connection here can break: {e}"),
                }
                assert_eq!(e.exit_code(), 4);
            }
            Some(e @ Error::Corrupt { .. }) => {
                assert!(kind == 1 || kind == 2, "seed {seed}: {e}"); // a gap in the numbers tells of a loss
                tally.corrupt += 1;
            }
            // The killed rank itself.
            Some(e) => panic!("seed {seed}: {e:?}"),
        }
    }
    println!("{tally:?}");
    assert!(tally.right > 500 && tally.gone > 100 && tally.silent > 20 && tally.corrupt > 100, "{tally:?}");
}
