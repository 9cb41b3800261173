//! What would run: how many runs, how much memory, how long, and what is doubtful about it.

use fulmen::Error;

use crate::machine::Host;
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

/// Bytes of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// The matrix alone, 8·N², over all ranks.
    pub matrix: u128,
    /// All that the fullest rank takes: its part of the matrix with padding, panels, U, a fixed part.
    pub per_rank: u128,
    /// All that all ranks take.
    pub total: u128,
}

/// What every rank takes besides the matrix: code, stacks, the fabric's queues, kernels' workspaces.
const FIXED: u128 = 10 << 20;

/// Local rows or columns of process `proc` of `procs`: ScaLAPACK's NUMROC with source 0.
fn numroc(n: usize, nb: usize, proc: usize, procs: usize) -> u128 {
    let (blocks, last) = (n / nb, n % nb);
    let rest = match (blocks % procs).cmp(&proc) {
        std::cmp::Ordering::Greater => nb,
        std::cmp::Ordering::Equal => last,
        std::cmp::Ordering::Less => 0,
    };
    (blocks / procs * nb + rest) as u128
}

/// The memory of a run. NB beyond N costs nothing: blocks are never wider than the matrix.
pub fn memory(run: &Run) -> Memory {
    let nb = run.nb.min(run.n.max(1));
    let width = nb as u128;
    let in_flight = (run.depth + 1).min(run.n.div_ceil(nb)) as u128;
    // U passes in chunks of up to 1024 columns, three at a time; with more process rows, each chunk is also
    // sent and received, with the rows that it displaces.
    let copies = if run.p > 1 { 3 * 5 } else { 3 };
    let chunks = copies * width * (run.n / run.q / 4).clamp(64, 1024) as u128;
    // What rank (i, j) takes is linear in its columns, so a sum over the rows i is enough.
    let of = |rows: u128, columns: u128, ranks: u128| {
        let lld = rows.next_multiple_of(8) + 8;
        let panels = (rows + width + 24) * width * in_flight;
        // With look-ahead and one process row, U is also put together for two thirds of the columns.
        let early = if run.p == 1 && in_flight > 1 { width * (columns - columns / 3) } else { 0 };
        8 * (lld * columns + early + (panels + chunks) * ranks) + FIXED * ranks
    };
    let columns = run.n as u128 + 1; // with the right-hand side
    let q = run.q as u128;
    Memory {
        matrix: 8 * run.n as u128 * run.n as u128,
        per_rank: of(numroc(run.n, nb, 0, run.p), numroc(run.n + 1, nb, 0, run.q), 1),
        total: (0..run.p).map(|i| of(numroc(run.n, nb, i, run.p), columns, q)).sum(),
    }
}

/// The most demanding run of the lists, with N replaced by `n`.
pub fn largest_of(input: &Input, n: usize) -> Run {
    let candidates = input.grids.iter().flat_map(|&(p, q)| {
        input.nbs.iter().map(move |&nb| Run {
            n,
            nb,
            p,
            q,
            depth: input.depths.iter().copied().max().unwrap_or(0),
            ..input.run(0)
        })
    });
    candidates.max_by_key(|run| memory(run).total).expect("lists are never empty")
}

/// What would run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of runs.
    pub runs: usize,
    /// The one that needs most memory.
    pub largest: Run,
    /// Its memory.
    pub memory: Memory,
    /// All runs together, in seconds.
    pub seconds: f64,
    /// Bytes that the host has, and what bounds them.
    pub available: Option<(u64, String)>,
    /// What is doubtful: idle ranks, flat grids, too many threads.
    pub doubts: Vec<String>,
    rate: Rate,
    host: String,
}

impl Plan {
    /// Plans the runs of some settings on a host where all ranks live.
    pub fn new(settings: &Settings, host: &Host, rate: Rate) -> Plan {
        let input = &settings.input;
        let n = input.ns.iter().copied().max().unwrap_or(0);
        let largest = largest_of(input, n);
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
            memory: memory(&largest),
            seconds,
            available: host.available.map(|bytes| (bytes, host.bound.clone())),
            doubts: doubts(settings, host),
            rate,
            host: host.name.clone(),
        }
    }

    /// Refuses what does not fit, before anything is touched.
    ///
    /// # Errors
    /// [`Error::Resources`] with needed and available.
    pub fn must_fit(&self) -> Result<(), Error> {
        let Some((available, bound)) = &self.available else { return Ok(()) };
        if self.memory.total <= u128::from(*available) {
            return Ok(());
        }
        let Run { n, p, q, .. } = self.largest;
        let fitting = (n as f64 * (*available as f64 / self.memory.total as f64).sqrt() * 0.97) as usize;
        Err(Error::Resources {
            what: format!(
                "memory: N {n} on {p}x{q} needs {} ({} a rank), {} has {} ({bound})",
                units::bytes(self.memory.total),
                units::bytes(self.memory.per_rank),
                self.host,
                units::bytes(u128::from(*available)),
            ),
            remedy: match fitting / 64 * 64 {
                0 => format!("nothing was run; only more of it helps ({bound})"),
                fitting => format!("nothing was run; N up to about {fitting} fits"),
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
    use proptest::prelude::*;

    fn host(cores: usize, available: u64) -> Host {
        Host {
            name: "this machine".into(),
            cores,
            numa_nodes: 1,
            available: Some(available),
            bound: "free memory".into(),
        }
    }

    fn plan(args: &str, host: &Host) -> Plan {
        let nowhere = tempfile::tempdir().unwrap();
        let cli = Cli::try_parse_from(std::iter::once("hpl-run").chain(args.split_whitespace())).unwrap();
        let rate = Rate::measured(75.0 * host.cores as f64);
        let settings = request(&cli, nowhere.path()).unwrap().settle(host, rate);
        Plan::new(&settings, host, rate)
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
        assert!(refusal.contains("needs 12.1 GiB"), "{refusal}");
        assert!(refusal.contains("has 2.00 GiB"), "{refusal}");
        // What it advises does fit.
        let fitting: usize =
            refusal.split("about ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        super::tests::plan(&format!("-N {fitting}"), &host(2, 2 << 30)).must_fit().unwrap();
        assert!(fitting > 15000, "{fitting}");
    }

    /// The bound at N = 20000, and N = 40000 on 24 GiB.
    #[test]
    fn memory_stays_within_three_percent() {
        for args in ["-P 1 -Q 1", "-P 1 -Q 2", "-P 2 -Q 2"] {
            let plan = plan(&format!("-N 20000 --nb 256 {args}"), &host(4, 24 << 30));
            let bound = plan.memory.matrix * 103 / 100 + (64 << 20) * plan.largest.ranks() as u128;
            assert!(plan.memory.total <= bound, "{args}: {} > {bound}", plan.memory.total);
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
    }

    /// K1-16: memory follows N², not NB².
    #[test]
    fn wide_blocks_cost_nothing() {
        let plan = plan("-N 20 --nb 8192", &host(2, 1 << 30));
        assert!(plan.memory.total < FIXED + (1 << 20));
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
        #[test]
        fn numroc_counts_the_owners_elements(n in 0usize..500, nb in 1usize..40, procs in 1usize..9) {
            for proc in 0..procs {
                let counted = (0..n).filter(|i| i / nb % procs == proc).count();
                prop_assert_eq!(numroc(n, nb, proc, procs), counted as u128);
            }
        }
    }
}
