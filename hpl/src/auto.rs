//! Chooses what the user left open, and says why.

use std::cmp::Ordering;

use crate::footprint::Shape;
use crate::machine::Host;
use crate::params::Input;
use crate::plan::{self, Rate};
use crate::settings::Given;
use crate::units;

/// One choice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// What: `N`, `NB`, `grid`, `threads`.
    pub what: &'static str,
    /// The value, as shown.
    pub value: String,
    /// Why.
    pub why: String,
}

/// Seconds that a run of our own choice aims at. Generation, check and start-up come on top; the
/// whole must stay well under a minute and a half on the smallest machine.
const AIM: f64 = 30.0;

/// The share of the available memory that is used at most: the rest is for the system.
const SHARE: f64 = 0.8;

/// Ranks for a machine of our own: one a memory domain, so that each works on memory of its own.
pub fn ranks(host: &Host) -> usize {
    if host.cores.is_multiple_of(host.numa_nodes) { host.numa_nodes } else { 1 }
}

/// The grid of `ranks` that is nearest to a square, P ≤ Q.
pub fn squarest(ranks: usize) -> (usize, usize) {
    let p =
        (1..=ranks).take_while(|p| p * p <= ranks).filter(|p| ranks.is_multiple_of(*p)).last().unwrap_or(1);
    (p, ranks / p)
}

/// A block size for order `n`: wide enough for a fast update, narrow enough for many panels.
fn block(n: usize) -> usize {
    match n {
        0..1024 => 64,
        1024..6144 => 128,
        _ => 256,
    }
}

/// Sets the grid, NB and N where they were not given.
pub fn fill(input: &mut Input, given: Given, shape: &Shape, host: &Host, rate: Rate) -> Vec<Choice> {
    let Shape { ranks, threads, .. } = *shape;
    let mut choices = vec![];
    if !given.grid {
        let (p, q) = squarest(ranks);
        input.grids = vec![(p, q)];
        let why = match ranks {
            1 => "one rank: nothing has to be exchanged".to_string(),
            _ if ranks == host.numa_nodes => {
                format!("{ranks} ranks, one a memory domain; as square as they go")
            }
            _ => format!("{ranks} ranks, as square as they go; P <= Q"),
        };
        choices.push(Choice { what: "grid", value: format!("{p}x{q}"), why });
        let cores = units::count(host.cores, "core");
        let why = match (ranks * threads).cmp(&host.cores) {
            Ordering::Less => format!("{} of {cores}", ranks * threads),
            Ordering::Equal => format!("all {cores}"),
            Ordering::Greater => format!("{} take turns on {cores}", ranks * threads),
        };
        choices.push(Choice { what: "threads", value: format!("{threads} a rank"), why });
    }
    let n =
        if given.n { input.ns.iter().copied().max().unwrap_or(0) } else { order(input, shape, host, rate).0 };
    if !given.nb {
        let nb = block(n);
        input.nbs = vec![nb];
        let why = match nb {
            256 => "the update runs at full speed from here on, and the panel stays cheap",
            _ => "a small system: narrower blocks give more panels to overlap",
        };
        choices.push(Choice { what: "NB", value: nb.to_string(), why: why.to_string() });
    }
    if !given.n {
        let (n, why) = order(input, shape, host, rate);
        let nb = input.nbs.iter().copied().max().unwrap_or(1);
        let n = if n > nb { n / nb * nb } else { n };
        input.ns = vec![n];
        choices.push(Choice { what: "N", value: n.to_string(), why });
    }
    choices
}

/// An order that takes about [`AIM`] seconds and fits, and which of the two bound it.
fn order(input: &Input, shape: &Shape, host: &Host, rate: Rate) -> (usize, String) {
    let busy = shape.ranks * shape.threads;
    let speed = rate.of(busy, host.cores);
    let mut n = 256;
    // Seconds and bytes grow with N: the largest multiple of 64 under both bounds.
    let lack = |n: usize| host.lacks(&plan::demand(input, n, shape).1, SHARE);
    let quick = |n: usize| plan::seconds(n, speed, busy) <= AIM;
    while quick(n + 64) && lack(n + 64).is_none() {
        n += 64;
    }
    let why = match lack(n + 64) {
        None => format!("about {AIM:.0} s at {} of {} dgemm", units::rate(speed), rate.source()),
        Some(lack) => format!("{:.0} % of the memory that is available ({})", SHARE * 100.0, lack.bound),
    };
    (n, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::footprint::{self, Home};
    use fulmen::dist::memory::OfProcess;

    fn host(cores: usize, numa_nodes: usize, gib: u64) -> Host {
        Host {
            name: "x".into(),
            cores,
            numa_nodes,
            available: Some(gib << 30),
            bound: "free memory".into(),
            limits: OfProcess::UNLIMITED,
        }
    }

    fn shape(host: &Host) -> Shape {
        let (ranks, cores) = (ranks(host), host.cores);
        Shape { ranks, threads: cores / ranks, home: Home::Threads, blas: false, cores }
    }

    fn auto(host: &Host, rate: Rate, given: Given, mut input: Input) -> (Input, Vec<Choice>) {
        let choices = fill(&mut input, given, &shape(host), host, rate);
        (input, choices)
    }

    #[test]
    fn grids_are_as_square_as_they_go() {
        for (ranks, grid) in [(1, (1, 1)), (2, (1, 2)), (6, (2, 3)), (7, (1, 7)), (16, (4, 4)), (24, (4, 6))]
        {
            assert_eq!(squarest(ranks), grid);
        }
    }

    /// Two cores of 75 Gflop/s: half a minute, well inside of memory, N a multiple of NB.
    #[test]
    fn a_small_machine_takes_half_a_minute() {
        let (input, choices) =
            auto(&host(2, 1, 22), Rate::measured(150.0), Given::default(), Input::default());
        let run = input.run(0);
        assert_eq!((run.p, run.q, run.nb), (1, 1, 256));
        assert!(run.n % 256 == 0 && (16_000..20_000).contains(&run.n), "{}", run.n);
        let seconds = plan::seconds(run.n, 150.0, 2);
        assert!((25.0..=30.0).contains(&seconds), "{seconds}");
        let n = choices.iter().find(|c| c.what == "N").unwrap();
        assert!(n.why.contains("about 30 s at 150 Gflop/s of measured dgemm"), "{}", n.why);
    }

    #[test]
    fn little_memory_bounds_the_order() {
        let (input, choices) =
            auto(&host(64, 2, 1), Rate::measured(3000.0), Given::default(), Input::default());
        let run = input.run(0);
        assert_eq!((run.p, run.q), (1, 2));
        let host = host(64, 2, 1);
        assert!(footprint::needed(&run, &shape(&host)).total <= (1 << 30) * 8 / 10);
        assert!(run.n > 8000, "{}", run.n);
        assert!(choices.iter().any(|c| c.what == "N" && c.why.contains("80 % of the memory")));
    }

    #[test]
    fn what_is_given_stays() {
        let given = Given { n: true, grid: true, ..Given::default() };
        let input = Input { ns: vec![500], grids: vec![(2, 1)], ..Input::default() };
        let (input, choices) = auto(&host(2, 1, 8), Rate::measured(100.0), given, input);
        assert_eq!((input.ns, input.nbs, input.grids), (vec![500], vec![64], vec![(2, 1)]));
        assert_eq!(choices.len(), 1);
    }
}
