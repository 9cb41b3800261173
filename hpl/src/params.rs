//! What HPL lets its user choose: the lists of `HPL.dat`, the runs that they span, and the T/V code.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the ranks are laid over the grid: HPL's PMAP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Pmap {
    /// Rank r sits at row r / Q, column r mod Q.
    #[default]
    Row,
    /// Rank r sits at row r mod P, column r / P.
    Column,
}

/// A variant of the panel factorisation: HPL's PFACT and RFACT.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Fact {
    /// Left-looking (0).
    Left,
    /// Crout (1).
    Crout,
    /// Right-looking (2).
    Right,
}

/// How a factored panel travels along its process row: HPL's BCAST.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Bcast {
    /// Increasing ring (0).
    Ring1,
    /// Increasing ring, the next panel's owner served first (1).
    Ring1M,
    /// Two increasing rings (2).
    Ring2,
    /// Two increasing rings, the next panel's owner served first (3).
    Ring2M,
    /// Long: scatter and roll (4).
    Long,
    /// Long, the next panel's owner served first (5).
    LongM,
    /// Along the cables, where ranks reach each other only through others. HPL has no number for it; it is
    /// chosen, never read.
    Cables,
}

/// How rows are exchanged in the update: HPL's SWAP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Swap {
    /// Binary exchange (0).
    BinaryExchange,
    /// Spread and roll (1).
    SpreadRoll,
    /// Binary exchange up to the threshold's number of columns, spread-roll above (2).
    Mix,
}

impl Fact {
    /// All three, in the order of their numbers in `HPL.dat`.
    pub const ALL: [Fact; 3] = [Fact::Left, Fact::Crout, Fact::Right];

    /// The letter of the T/V code.
    pub fn letter(self) -> char {
        match self {
            Fact::Left => 'L',
            Fact::Crout => 'C',
            Fact::Right => 'R',
        }
    }
}

impl Bcast {
    /// All six, in the order of their numbers in `HPL.dat`.
    pub const ALL: [Bcast; 6] =
        [Bcast::Ring1, Bcast::Ring1M, Bcast::Ring2, Bcast::Ring2M, Bcast::Long, Bcast::LongM];

    /// Its number in `HPL.dat`, which is also its digit in the T/V code; of [`Bcast::Cables`], that of what it
    /// is where there are no cables to follow.
    pub fn digit(self) -> usize {
        if self == Bcast::Cables { Bcast::Ring1M as usize } else { self as usize }
    }
}

impl Swap {
    /// All three, in the order of their numbers in `HPL.dat`.
    pub const ALL: [Swap; 3] = [Swap::BinaryExchange, Swap::SpreadRoll, Swap::Mix];
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Fact::Left => "Left",
            Fact::Crout => "Crout",
            Fact::Right => "Right",
        })
    }
}

impl fmt::Display for Bcast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(["1ring", "1ringM", "2ring", "2ringM", "Blong", "BlongM", "cables"][*self as usize])
    }
}

impl fmt::Display for Swap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Swap::BinaryExchange => "Binary-exchange",
            Swap::SpreadRoll => "Spread-roll (long)",
            Swap::Mix => "Mix",
        })
    }
}

impl fmt::Display for Pmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Pmap::Row => "Row-major",
            Pmap::Column => "Column-major",
        })
    }
}

/// Where the `HPL.out` report goes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Sink {
    /// Standard output (device 6).
    #[default]
    Stdout,
    /// Standard error (device 7).
    Stderr,
    /// A file.
    File(std::path::PathBuf),
}

/// Everything that `HPL.dat` says: one value or list per line.
///
/// The grids are pairs, as Ps and Qs pair up; every other list is crossed with all others.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Input {
    /// Where the report goes.
    pub sink: Sink,
    /// Orders of the matrix (≥ 0).
    pub ns: Vec<usize>,
    /// Blocking factors (≥ 1).
    pub nbs: Vec<usize>,
    /// Rank order on the grid.
    pub pmap: Pmap,
    /// Process grids: rows P and columns Q (≥ 1).
    pub grids: Vec<(usize, usize)>,
    /// Limit of the scaled residual; at 0 or below nothing is checked and nothing is called passed.
    pub threshold: f64,
    /// Panel factorisations.
    pub pfacts: Vec<Fact>,
    /// Columns at which the recursion stops (≥ 1).
    pub nbmins: Vec<usize>,
    /// Parts per recursion step (≥ 2).
    pub ndivs: Vec<usize>,
    /// Recursive factorisations.
    pub rfacts: Vec<Fact>,
    /// Panel broadcasts.
    pub bcasts: Vec<Bcast>,
    /// Look-ahead depths (≥ 0).
    pub depths: Vec<usize>,
    /// Row exchange.
    pub swap: Swap,
    /// Columns up to which [`Swap::Mix`] uses the binary exchange.
    pub swap_threshold: usize,
    /// L1 is kept transposed (echoed in the report; the layout is the kernels' own).
    pub l1_transposed: bool,
    /// U is kept transposed (echoed in the report; the layout is the kernels' own).
    pub u_transposed: bool,
    /// Equilibration of the row exchange (echoed in the report).
    pub equil: bool,
    /// Alignment in doubles (echoed in the report; memory is aligned to pages).
    pub align: usize,
    /// Seed of the matrix generator.
    pub seed: u64,
}

impl Default for Input {
    /// One run of the parameters that suit most machines; N, NB and the grid are the smallest.
    fn default() -> Self {
        Input {
            sink: Sink::Stdout,
            ns: vec![1000],
            nbs: vec![256],
            pmap: Pmap::Row,
            grids: vec![(1, 1)],
            threshold: 16.0,
            pfacts: vec![Fact::Left],
            nbmins: vec![8],
            ndivs: vec![2],
            rfacts: vec![Fact::Right],
            bcasts: vec![Bcast::Ring1M],
            depths: vec![1],
            swap: Swap::Mix,
            swap_threshold: 64,
            l1_transposed: true,
            u_transposed: true,
            equil: true,
            align: 8,
            seed: crate::generator::DEFAULT_SEED,
        }
    }
}

/// Panels kept ahead at most; deeper look-ahead needs more panel buffers and gains nothing (HPL's TUNING).
pub const DEEPEST: usize = 2;

/// One point of the sweep: what a single solve is told.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Order of the matrix.
    pub n: usize,
    /// Blocking factor. It may exceed `n`: allocate by min(nb, n).
    pub nb: usize,
    /// Rank order on the grid.
    pub pmap: Pmap,
    /// Process rows.
    pub p: usize,
    /// Process columns.
    pub q: usize,
    /// Look-ahead depth.
    pub depth: usize,
    /// Panel broadcast.
    pub bcast: Bcast,
    /// Recursive factorisation.
    pub rfact: Fact,
    /// Panel factorisation.
    pub pfact: Fact,
    /// Columns at which the recursion stops.
    pub nbmin: usize,
    /// Parts per recursion step.
    pub ndiv: usize,
    /// Row exchange.
    pub swap: Swap,
    /// Threshold of [`Swap::Mix`] in columns.
    pub swap_threshold: usize,
    /// Limit of the scaled residual; at 0 or below the run is not checked.
    pub threshold: f64,
    /// Seed of the matrix generator.
    pub seed: u64,
}

impl Run {
    /// HPL's encoded variant: `W`, the map, depth, broadcast, RFACT, NDIV, PFACT, NBMIN: `WR11R2L8`.
    pub fn tv(&self) -> String {
        format!(
            "W{}{}{}{}{}{}{}",
            if self.pmap == Pmap::Row { 'R' } else { 'C' },
            self.depth,
            self.bcast.digit(),
            self.rfact.letter(),
            self.ndiv,
            self.pfact.letter(),
            self.nbmin
        )
    }

    /// Operations that HPL credits: 2/3 N³ + 3/2 N².
    pub fn flops(&self) -> f64 {
        flops(self.n)
    }

    /// Ranks that take part.
    pub fn ranks(&self) -> usize {
        self.p * self.q
    }

    /// Whether the answer is checked.
    pub fn checked(&self) -> bool {
        self.threshold > 0.0
    }
}

/// Operations that HPL credits for order `n`: 2/3 n³ + 3/2 n² (LU with partial pivoting, and two
/// triangular solves).
pub fn flops(n: usize) -> f64 {
    let n = n as f64;
    n * n * (2.0 / 3.0 * n + 1.5)
}

impl Input {
    /// How many runs the lists span, counted without making them.
    pub fn count(&self) -> usize {
        self.radices().iter().product()
    }

    /// The runs in netlib's order: the grid varies slowest, then N, NB, DEPTH, BCAST, RFACT, PFACT,
    /// NBMIN, and NDIV fastest.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        (0..self.count()).map(|i| self.run(i))
    }

    /// Run number `index` of netlib's order, from 0.
    ///
    /// # Panics
    /// If `index` is not below [`Input::count`].
    pub fn run(&self, index: usize) -> Run {
        assert!(index < self.count(), "run {index} of {}", self.count());
        // The index in mixed radix, the fastest digit last.
        let mut digits = [0; 9];
        let mut rest = index;
        for (digit, radix) in digits.iter_mut().zip(self.radices()).rev() {
            (rest, *digit) = (rest / radix, rest % radix);
        }
        let [grid, n, nb, depth, bcast, rfact, pfact, nbmin, ndiv] = digits;
        let (p, q) = self.grids[grid];
        Run {
            n: self.ns[n],
            nb: self.nbs[nb],
            pmap: self.pmap,
            p,
            q,
            depth: self.depths[depth],
            bcast: self.bcasts[bcast],
            rfact: self.rfacts[rfact],
            pfact: self.pfacts[pfact],
            nbmin: self.nbmins[nbmin],
            ndiv: self.ndivs[ndiv],
            swap: self.swap,
            swap_threshold: self.swap_threshold,
            threshold: self.threshold,
            seed: self.seed,
        }
    }

    /// Ranks that the largest grid needs.
    pub fn ranks_needed(&self) -> usize {
        self.grids.iter().map(|(p, q)| p * q).max().unwrap_or(0)
    }

    fn radices(&self) -> [usize; 9] {
        [
            self.grids.len(),
            self.ns.len(),
            self.nbs.len(),
            self.depths.len(),
            self.bcasts.len(),
            self.rfacts.len(),
            self.pfacts.len(),
            self.nbmins.len(),
            self.ndivs.len(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep() -> Input {
        Input {
            ns: vec![29, 30],
            nbs: vec![1, 2],
            grids: vec![(2, 2), (1, 4)],
            pfacts: vec![Fact::Left, Fact::Crout],
            nbmins: vec![2, 4],
            ndivs: vec![2, 3],
            rfacts: Fact::ALL.to_vec(),
            bcasts: vec![Bcast::Ring1, Bcast::LongM],
            depths: vec![0, 1],
            ..Input::default()
        }
    }

    #[test]
    fn runs_come_in_netlibs_order() {
        let input = sweep();
        let mut expected = vec![];
        for &(p, q) in &input.grids {
            for &n in &input.ns {
                for &nb in &input.nbs {
                    for &depth in &input.depths {
                        for &bcast in &input.bcasts {
                            for &rfact in &input.rfacts {
                                for &pfact in &input.pfacts {
                                    for &nbmin in &input.nbmins {
                                        for &ndiv in &input.ndivs {
                                            expected.push((
                                                (p, q, n, nb, depth),
                                                (bcast, rfact, pfact, nbmin, ndiv),
                                            ));
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        let got: Vec<_> = input
            .runs()
            .map(|r| ((r.p, r.q, r.n, r.nb, r.depth), (r.bcast, r.rfact, r.pfact, r.nbmin, r.ndiv)))
            .collect();
        assert_eq!(got, expected);
        assert_eq!(input.count(), expected.len());
    }

    #[test]
    fn code_is_hpls() {
        let run = Run { pmap: Pmap::Column, depth: 1, nbmin: 16, pfact: Fact::Crout, ..sweep().run(0) };
        assert_eq!(run.tv(), "WC10L2C16");
    }

    #[test]
    fn flops_are_hpls() {
        // 20000 in 39.58 s is the 1.348e+02 Gflop/s of a netlib report.
        assert_eq!(format!("{:.3e}", flops(20000) / 39.58 / 1e9), "1.348e2");
        assert_eq!(flops(0), 0.0);
    }
}
