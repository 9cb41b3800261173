//! A whole solve under thousands of seeded schedules: right bits, or an error that names the loss; never a
//! hang, never a wrong answer.

use fulmen::comm::Topology;
use fulmen::error::Loss;
use fulmen::fabric::mem::{self, Faults, Kill};
use fulmen::lapack::{LuOpts, Silent, back_substitute, getrf};
use fulmen::{Desc, DistMatrix, Error, Result, Setup, World};

const SEEDS: u64 = 2000;

fn mix(seed: u64, salt: u64) -> u64 {
    let mut x = seed.wrapping_add(salt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for _ in 0..2 {
        x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    x ^ (x >> 29)
}

struct Job {
    n: usize,
    nb: usize,
    grid: (usize, usize),
    opts: LuOpts,
}

impl Job {
    fn of(seed: u64) -> Job {
        let grids = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3)];
        Job {
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

    fn ranks(&self) -> usize {
        self.grid.0 * self.grid.1
    }

    /// The bits of x, as every rank sees them.
    fn run(&self, faults: Option<Faults>) -> Vec<Result<Vec<u64>>> {
        let setup = Setup { threads: 1, ..Setup::default() };
        let (n, nb) = (self.n, self.nb);
        let entry =
            |i: usize, j: usize| (mix(i as u64 + 7, j as u64) >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        let options = mem::Options { faults, ..mem::Options::default() };
        mem::run(self.ranks(), options, |fabric| {
            fabric.set_activity("at the start");
            let world = World::new(fabric, self.ranks(), &setup)?;
            let grid = world.grid(self.grid.0, self.grid.1)?;
            let mut a = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, n + 1, nb), entry)?;
            getrf(world.kernels::<f64>(), world.team(), a.view_mut(), &self.opts, &mut Silent)?;
            let x = back_substitute(world.team(), &a.view())?;
            Ok(x.into_iter().map(f64::to_bits).collect())
        })
    }
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
        let job = Job::of(seed);
        let expected = job.run(None).swap_remove(0).unwrap();
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
        let results = job.run(Some(faults));
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
