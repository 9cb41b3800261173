//! What would run: how many runs, how much memory, how long, and what is doubtful about it.

use fulmen::Error;

use crate::footprint::{self, Needed, Shape};
use crate::machine::{Host, Lack};
use crate::params::{Input, Run, flops};
use crate::settings::Settings;
use crate::units;

/// The speed of a whole host, all cores busy with dgemm.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    gflops: f64,
    measured: bool,
}

impl Rate {
    /// What a start-up calibration gave for all cores of the host.
    pub fn measured(gflops: f64) -> Rate {
        Rate { gflops: gflops.max(1e-3), measured: true }
    }

    /// A guess for when nothing was measured: 30 Gflop/s a core, an ordinary core of 2020.
    pub fn assumed(cores: usize) -> Rate {
        Rate { gflops: 30.0 * cores as f64, measured: false }
    }

    /// `measured` or `assumed`.
    pub fn source(self) -> &'static str {
        if self.measured { "measured" } else { "assumed" }
    }

    /// The measured rate of the whole host, if there is one.
    pub fn gflops(self) -> Option<f64> {
        self.measured.then_some(self.gflops)
    }

    /// The rate with `busy` of the host's `cores` at work.
    pub fn of(self, busy: usize, cores: usize) -> f64 {
        self.gflops * busy.min(cores) as f64 / cores.max(1) as f64
    }
}

/// What a run takes however small it is: begin, meet, report.
const RUN: f64 = 0.01;

/// Seconds for one run of order `n` at `gflops` of dgemm with `busy` cores: the solve, and making and
/// checking the matrix, and what every run costs besides. A model, good to a third.
pub fn seconds(n: usize, gflops: f64, busy: usize) -> f64 {
    let order = n as f64;
    // Small systems never reach dgemm's speed: half of it at N = 600, 95 % at 11000.
    let efficiency = 0.95 * order / (order + 600.0);
    let solve = flops(n) / (gflops * 1e9 * efficiency.max(1e-3));
    // Generation twice and one matrix-vector product: about 3 ns an element.
    RUN + solve + 3e-9 * order * order / busy.max(1) as f64
}

/// The run of the lists that takes most memory, with N replaced by `n`, and what it needs; what any of the runs needs
/// more of counts.
pub fn demand(input: &Input, n: usize, shape: &Shape) -> (Run, Needed) {
    let depth = input.depths.iter().copied().max().unwrap_or(0);
    let runs = input
        .grids
        .iter()
        .flat_map(|&(p, q)| input.nbs.iter().map(move |&nb| Run { n, nb, p, q, depth, ..input.run(0) }));
    let mut all = runs.map(|run| (run, footprint::needed(&run, shape)));
    let first = all.next().expect("lists are never empty");
    all.fold(first, |(most, sum), (run, needed)| {
        (if needed.total > sum.total { run } else { most }, sum.or_more(&needed))
    })
}

/// Bytes of each rank's segment, where the ranks are processes of this machine.
pub fn segment(settings: &Settings) -> u64 {
    let n = settings.input.ns.iter().copied().max().unwrap_or(0);
    let (_, needed) = demand(&settings.input, n, &settings.shape());
    u64::try_from(needed.segment()).unwrap_or(u64::MAX)
}

/// Of what a host has, this share is to hold the size that is advised: what is free changes from call to call.
const ADVISED: f64 = 0.99;

/// The largest N, up to `n`, with which all the runs of the lists fit; `None` if none does.
pub fn largest_fitting(input: &Input, n: usize, shape: &Shape, host: &Host) -> Option<usize> {
    let fits = |n: usize| host.lacks(&demand(input, n, shape).1, ADVISED).is_none();
    // What is needed grows with N, but for steps of a few bytes where a block begins.
    let (mut fitting, mut beyond) = (0, n + 1);
    while beyond - fitting > 1 {
        let middle = fitting + (beyond - fitting) / 2;
        *(if fits(middle) { &mut fitting } else { &mut beyond }) = middle;
    }
    Some(fitting).filter(|&n| n > 0)
}

/// What would run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of runs.
    pub runs: usize,
    /// The one that needs most memory.
    pub largest: Run,
    /// Its memory.
    pub memory: Needed,
    /// All runs together, in seconds.
    pub seconds: f64,
    /// Bytes that the host has, and what bounds them.
    pub available: Option<(u64, String)>,
    /// What is doubtful: idle ranks, flat grids, too many threads.
    pub doubts: Vec<String>,
    rate: Rate,
    host: String,
    /// What there is too little of, and the largest N that fits.
    lack: Option<(Lack, Option<usize>)>,
}

impl Plan {
    /// Plans the runs of some settings on a host where all ranks live.
    pub fn new(settings: &Settings, host: &Host, rate: Rate) -> Plan {
        let input = &settings.input;
        let n = input.ns.iter().copied().max().unwrap_or(0);
        let shape = settings.shape();
        let (largest, memory) = demand(input, n, &shape);
        let lack = host.lacks(&memory, 1.0);
        // Runs of one grid and N take the same time in this model, so they are counted, not listed.
        let alike = (input.count() / input.grids.len() / input.ns.len()) as f64;
        let mut seconds = 0.0;
        for &(p, q) in &input.grids {
            let busy = (p * q * settings.threads).min(host.cores);
            let gflops = rate.of(busy, host.cores);
            seconds += input.ns.iter().map(|&n| alike * self::seconds(n, gflops, busy)).sum::<f64>();
        }
        Plan {
            runs: input.count(),
            largest,
            memory,
            seconds,
            available: host.available.map(|bytes| (bytes, host.bound.clone())),
            doubts: doubts(settings, host),
            rate,
            host: host.name.clone(),
            lack: lack.map(|lack| (lack, largest_fitting(input, n, &shape, host))),
        }
    }

    /// Refuses what does not fit, before anything is touched.
    ///
    /// # Errors
    /// [`Error::Resources`] with needed and available.
    pub fn must_fit(&self) -> Result<(), Error> {
        let Some((lack, fitting)) = &self.lack else { return Ok(()) };
        let Run { n, p, q, .. } = self.largest;
        Err(Error::Resources {
            what: format!(
                "memory: N {n} on {p}x{q} {}; {} a rank",
                lack.told(&self.host),
                units::bytes(self.memory.per_rank)
            ),
            remedy: match fitting {
                Some(fitting) => format!("nothing was run; N up to {fitting} fits"),
                None => format!(
                    "nothing was run; so many ranks and threads leave no room for a matrix: give fewer, or more memory ({})",
                    lack.bound
                ),
            },
        })
    }

    /// The lines of `--check`.
    pub fn lines(&self) -> Vec<String> {
        let Run { n, nb, p, q, .. } = self.largest;
        let ranks = self.largest.ranks() as u128;
        let mut lines = vec![
            units::count(self.runs, "run"),
            format!("largest   N {n}   NB {nb}   grid {p}x{q}   {:.3e} elements", n as f64 * n as f64),
            format!(
                "memory    {} for the matrix, {} a rank; {} with panels, U and the rest, {} a rank",
                units::bytes(self.memory.matrix),
                units::bytes(self.memory.matrix / ranks),
                units::bytes(self.memory.total),
                units::bytes(self.memory.per_rank),
            ),
        ];
        if let Some((bytes, bound)) = &self.available {
            lines.push(format!("available {} on {} ({bound})", units::bytes(u128::from(*bytes)), self.host));
        }
        lines.push(format!(
            "time      about {} for all runs, at the {} rate of dgemm",
            units::duration(self.seconds),
            self.rate.source()
        ));
        lines
    }
}

/// Blocks wider than this are no use.
const WIDE: usize = 1024;

/// What deserves a word though it can be run.
fn doubts(settings: &Settings, host: &Host) -> Vec<String> {
    let input = &settings.input;
    let mut doubts = vec![];
    let (n, smallest_nb) =
        (input.ns.iter().copied().min().unwrap_or(0), input.nbs.iter().copied().min().unwrap_or(1));
    for &(p, q) in &input.grids {
        // The widest block leaves the fewest owners.
        let (n, nb) = (n, input.nbs.iter().copied().max().unwrap_or(1));
        let blocks = n.div_ceil(nb);
        let busy = blocks.min(p) * blocks.min(q);
        if n > 0 && busy < p * q {
            doubts.push(format!(
                "grid {p}x{q}: N {n} with NB {nb} has {blocks}x{blocks} blocks: {} of {} ranks own nothing\n    \
                 a smaller NB or grid uses them all",
                p * q - busy,
                p * q
            ));
        } else if p > 2 * q {
            doubts.push(format!(
                "grid {p}x{q} is tall: each pivot is sought over {p} ranks\n    P <= Q is usually faster"
            ));
        } else if q > 8 * p {
            doubts.push(format!(
                "grid {p}x{q} is flat: each panel is factored by {}\n    a squarer grid is usually faster",
                units::count(p, "rank")
            ));
        }
    }
    let threads = settings.ranks * settings.threads;
    if threads > host.cores {
        doubts.push(format!(
            "{} x {} on {}: they take turns\n    fewer ranks or --threads would run faster",
            units::count(settings.ranks, "rank"),
            units::count(settings.threads, "thread"),
            units::count(host.cores, "core"),
        ));
    }
    let largest = input.ns.iter().copied().max().unwrap_or(0);
    if let Some(nb) = input.nbs.iter().copied().max().filter(|nb| *nb > WIDE && largest >= 2000) {
        doubts.push(format!(
            "NB {nb} is wide: panels of {} columns are factored before anything else goes on, slower than the time above\n    \
             128 to 512 is usually fastest",
            nb.min(largest)
        ));
    }
    if smallest_nb < 32 && n >= 2000 {
        doubts.push(format!("NB {smallest_nb} is too narrow for a fast update\n    128 to 384 is usual"));
    }
    doubts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::settings::request;
    use clap::Parser;
    use fulmen::dist::memory::OfProcess;
    use proptest::prelude::*;

    fn host(cores: usize, available: u64) -> Host {
        Host {
            name: "this machine".into(),
            cores,
            numa_nodes: 1,
            available: Some(available),
            bound: "free memory".into(),
            limits: OfProcess::UNLIMITED,
        }
    }

    fn plan(args: &str, host: &Host) -> Plan {
        let nowhere = tempfile::tempdir().unwrap();
        let cli = Cli::try_parse_from(std::iter::once("hpl-run").chain(args.split_whitespace())).unwrap();
        let rate = Rate::measured(75.0 * host.cores as f64);
        let settings = request(&cli, nowhere.path()).unwrap().settle(host, rate);
        Plan::new(&settings, host, rate)
    }

    /// The N that a refusal advises.
    fn advised(refusal: &str) -> Option<usize> {
        refusal.split("N up to ").nth(1)?.split(' ').next()?.parse().ok()
    }

    #[test]
    fn k5_04_the_largest_of_the_field() {
        let plan = plan("-N 5786112 --nb 384 -P 64 -Q 64", &host(2, 24 << 30));
        let lines = plan.lines().join("\n");
        assert!(lines.contains("243.6 TiB for the matrix, 60.9 GiB a rank"), "{lines}");
        assert!(lines.contains("3.348e13 elements"), "{lines}");
        let refusal = plan.must_fit().unwrap_err();
        assert_eq!(refusal.exit_code(), 3);
        assert!(refusal.to_string().contains("this machine has 24.0 GiB (free memory)"), "{refusal}");
    }

    #[test]
    fn k5_05_too_large_is_refused_with_both_numbers() {
        let plan = plan("-N 40000", &host(2, 2 << 30));
        let refusal = plan.must_fit().unwrap_err().to_string();
        assert!(refusal.contains("needs 12.2 GiB"), "{refusal}");
        assert!(refusal.contains("has 2.00 GiB"), "{refusal}");
        // What it advises does fit.
        let fitting = advised(&refusal).unwrap();
        super::tests::plan(&format!("-N {fitting}"), &host(2, 2 << 30)).must_fit().unwrap();
        assert!(fitting > 15000, "{fitting}");
    }

    /// The bound at N = 20000, and N = 40000 on 24 GiB.
    #[test]
    fn memory_stays_within_three_percent() {
        for args in ["-P 1 -Q 1", "-P 1 -Q 2", "-P 2 -Q 2"] {
            let plan = plan(&format!("-N 20000 --nb 256 {args}"), &host(4, 24 << 30));
            let bound = plan.memory.matrix * 103 / 100 + (64 << 20) * plan.largest.ranks() as u128;
            let resident = plan.memory.total - plan.memory.margin;
            assert!(resident <= bound, "{args}: {resident} > {bound}");
        }
        plan("-N 40000", &host(2, 22 << 30)).must_fit().unwrap();
    }

    #[test]
    fn k1_17_idle_ranks_are_told() {
        let doubts = plan("-N 512 --nb 128 -P 6 -Q 6", &host(36, 1 << 34)).doubts;
        assert!(doubts[0].contains("4x4 blocks: 20 of 36 ranks own nothing"), "{doubts:?}");
        let doubts = plan("-N 20 --nb 8192 -P 2 -Q 2", &host(4, 1 << 30)).doubts;
        assert!(doubts[0].contains("1x1 blocks: 3 of 4 ranks own nothing"), "{doubts:?}");
        assert_eq!(plan("-N 20000", &host(2, 1 << 34)).doubts, [""; 0]);
    }

    #[test]
    fn odd_grids_and_crowds_are_told() {
        let doubts = plan("-N 20000 -P 8 -Q 1 --nb 16", &host(2, 1 << 34)).doubts.join("\n");
        for words in ["grid 8x1 is tall", "8 ranks x 1 thread on 2 cores", "NB 16 is too narrow"] {
            assert!(doubts.contains(words), "{doubts}");
        }
        let wide = plan("-N 3000 --nb 256,100000", &host(2, 1 << 34)).doubts.join("\n");
        assert!(wide.contains("NB 100000 is wide: panels of 3000 columns"), "{wide}");
    }

    /// K1-16: memory follows N², not NB².
    #[test]
    fn wide_blocks_cost_nothing() {
        let plan = plan("-N 20 --nb 8192", &host(2, 1 << 30));
        assert!(plan.memory.total < super::tests::plan("-N 20 --nb 20", &host(2, 1 << 30)).memory.total + 1);
    }

    #[test]
    fn k1_20_a_long_sweep() {
        let args = "-N 5000,7500,10000,15000,20000,25000 --nb 32,64,96,128,192,256 -P 1,2,4,6,12,24 \
                    -Q 24,12,6,4,2,1 --pfact 0,1,2 --nbmin 2,4 --rfact 0,1,2 --depth 0 --bcast 0";
        let plan = plan(args, &host(24, 1 << 36));
        assert_eq!(plan.lines()[0], "3888 runs");
        let lines = plan.lines().join("\n");
        assert!(lines.contains("N 25000") && lines.contains("4.66 GiB for the matrix"), "{lines}");
        assert!(plan.seconds > 3888.0 / 6.0 * flops(25000) / 1.8e12);
    }

    proptest! {
        /// Whatever bounds the memory: the N that a refusal advises passes the very same check, and no larger one does.
        #[test]
        fn what_is_advised_fits(
            mib in 20u64..40_000,
            limits in (proptest::option::of(100u64..40_000), proptest::option::of(30u64..40_000)),
            grid in (1usize..5, 1usize..5),
            (nb, threads, cores) in (1usize..1200, 1usize..9, 1usize..17),
            shm: bool,
            blas: bool,
            spare in 0usize..3,
        ) {
            let bytes = |mib: Option<u64>| mib.map_or(u64::MAX, |mib| mib << 20);
            let limits = OfProcess { addresses: bytes(limits.0), data: bytes(limits.1) };
            let host = Host { limits, ..host(cores, mib << 20) };
            let (p, q) = grid;
            let rest = format!(
                "--nb {nb},64 -P {p},1 -Q {q},1 --ranks {} --threads {threads} --fabric {} --kernels {}",
                p * q + spare,
                if shm { "shm" } else { "mem" },
                if blas { "blas" } else { "native" },
            );
            let refused = |n: usize| plan(&format!("-N {n} {rest}"), &host).must_fit().err().map(|e| e.to_string());
            let refusal = refused(200_000).expect("298 GiB");
            prop_assert!(refused(0).is_some() || advised(&refusal).is_some() || refused(1).is_some());
            let Some(fitting) = advised(&refusal) else { return Ok(()) };
            prop_assert_eq!(refused(fitting), None);
            // A hundredth of the memory is left for what changes meanwhile.
            let less = |bytes: u64| if bytes == u64::MAX { bytes } else { (bytes as f64 * 0.99) as u64 };
            let limits = OfProcess { addresses: less(limits.addresses), data: less(limits.data) };
            let tight = Host { limits, available: host.available.map(less), ..host };
            let more = format!("-N {} {rest}", fitting + 1);
            prop_assert!(plan(&more, &tight).must_fit().is_err(), "{} fits as well", fitting + 1);
        }
    }
}
