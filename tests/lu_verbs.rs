//! A whole solve over emulated RDMA devices under seeded traps: right bits, or an error with a name; never a hang, never a
//! wrong answer. `FULMEN_SEEDS=2000` runs more than the few of every day.
#![cfg(target_os = "linux")]

#[path = "verbs/traps.rs"]
mod traps;
mod verbs;

use std::time::{Duration, Instant};

use fulmen::comm::Topology;
use fulmen::fabric::{Bounds, Fabric, mem};
use fulmen::lapack::{LuOpts, Silent, back_substitute, getrf};
use fulmen::{Desc, DistMatrix, Result, Setup, World as Ranks};
use fulmen_emu_verbs::Profile;
use traps::{is_named, mix, seeds, traps};

struct Job {
    n: usize,
    nb: usize,
    grid: (usize, usize),
    opts: LuOpts,
}

impl Job {
    fn of(seed: u64) -> Job {
        Job {
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

    fn ranks(&self) -> usize {
        self.grid.0 * self.grid.1
    }

    /// The bits of x, as this rank sees them.
    fn solve(&self, fabric: std::sync::Arc<dyn Fabric>) -> Result<Vec<u64>> {
        let setup = Setup { threads: 1, ..Setup::default() };
        let (n, nb) = (self.n, self.nb);
        let entry =
            |i: usize, j: usize| (mix(i as u64 + 7, j as u64) >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        let world = Ranks::new(fabric, self.ranks(), &setup)?;
        let grid = world.grid(self.grid.0, self.grid.1)?;
        let mut a = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, n + 1, nb), entry)?;
        getrf(world.kernels::<f64>(), world.team(), a.view_mut(), &self.opts, &mut Silent)?;
        let x = back_substitute(world.team(), &a.view())?;
        Ok(x.into_iter().map(f64::to_bits).collect())
    }
}

#[test]
fn right_bits_or_a_named_error_under_every_trap() {
    let seeds = seeds(48);
    let worlds = [2, 4].map(|ranks| (ranks, verbs::mesh(Profile::Apple, ranks, 1).install().unwrap()));
    let (mut right, mut named, mut played, mut slowest) = (0, 0, 0, Duration::ZERO);
    for seed in seeds.clone() {
        let job = Job::of(seed);
        let n = job.ranks();
        let world = &worlds.iter().find(|(ranks, _)| *ranks == n).unwrap().1;
        let (traps, must_end_well) = traps(seed);
        let description = verbs::mesh(Profile::Apple, n, 1).seed(seed);
        world.change(&traps.iter().cloned().fold(description, |w, t| w.trap(t))).unwrap();
        let expected =
            mem::run(n, mem::Options::default(), |fabric| job.solve(fabric)).swap_remove(0).unwrap();

        // A loss and a dead link are found out after the silence; that of a job that must end well is for a busy machine.
        let (silence, patience) = if must_end_well { (20, 60) } else { (2, 60) };
        let mut options = verbs::options(world, n, 1);
        options.bounds =
            Bounds { silence: Duration::from_secs(silence), patience: Duration::from_secs(patience) };
        options.progress_thread = mix(seed, 9).is_multiple_of(2);
        options.chunk = 4096 << (mix(seed, 10) % 3);
        let start = Instant::now();
        let results = verbs::run(n, &options, |fabric| job.solve(fabric));
        slowest = slowest.max(start.elapsed());

        let counters = world.counters();
        played += (counters.traps > 0) as u64;
        let left = (counters.qps, counters.cqs, counters.mrs, counters.pds);
        assert_eq!(left, (0, 0, 0, 0), "seed {seed}: queue pairs, queues, regions, domains are left");
        assert_eq!(counters.not_sends + counters.bad_keys + counters.aliased, 0, "seed {seed}: {counters:?}");
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
