//! Numbers drawn from a seed, and a whole solve whose result is bits that can be compared.
#![allow(dead_code, reason = "each test program uses a part")]

use std::sync::Arc;

use fulmen::fabric::Fabric;
use fulmen::lapack::{LuOpts, Silent, back_substitute, getrf};
use fulmen::{Desc, DistMatrix, Result, Setup, World};

/// A number drawn from a seed; another salt, another number.
pub fn mix(seed: u64, salt: u64) -> u64 {
    let mut x = seed.wrapping_add(salt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for _ in 0..2 {
        x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    x ^ (x >> 29)
}

/// Numbers below a bound, one after the other.
pub struct Draw {
    seed: u64,
    drawn: u64,
}

impl Draw {
    /// From this seed.
    pub fn new(seed: u64) -> Self {
        Draw { seed, drawn: 0 }
    }

    /// The next, below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.drawn += 1;
        mix(self.seed, self.drawn) % n
    }
}

/// A system and how it is solved.
pub struct Solve {
    /// Order.
    pub n: usize,
    /// Block size.
    pub nb: usize,
    /// Process rows and columns.
    pub grid: (usize, usize),
    /// Options of the factorisation.
    pub opts: LuOpts,
}

impl Solve {
    /// Ranks of the grid.
    pub fn ranks(&self) -> usize {
        self.grid.0 * self.grid.1
    }

    /// The bits of x, as this rank sees them.
    pub fn bits(&self, fabric: Arc<dyn Fabric>) -> Result<Vec<u64>> {
        let (n, nb) = (self.n, self.nb);
        let entry =
            |i: usize, j: usize| (mix(i as u64 + 7, j as u64) >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        let world = World::new(fabric, self.ranks(), &Setup { threads: 1, ..Setup::default() })?;
        let grid = world.grid(self.grid.0, self.grid.1)?;
        let mut a = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, n + 1, nb), entry)?;
        getrf(world.kernels::<f64>(), world.team(), a.view_mut(), &self.opts, &mut Silent)?;
        let x = back_substitute(world.team(), &a.view())?;
        Ok(x.into_iter().map(f64::to_bits).collect())
    }
}
