//! Distributed dense linear algebra.
//!
//! A matrix is cut block-cyclically over a grid of ranks, as ScaLAPACK does it: one rank a node, or a few. Every
//! rank runs the same program and calls the same functions in the same order. What a rank computes goes
//! through [`kernels`]; what travels is *put* straight into memory that the target exposed ([`fabric`]).
//!
//! ```
//! use fulmen::prelude::*;
//!
//! // Four ranks as threads of this process; on a cluster each would be a process.
//! let results = World::threads(4, &Setup::default(), |world| {
//!     let grid = world.grid(2, 2)?;
//!     let n = 100;
//!     let a = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, n, 16), |i, j| {
//!         if i == j { 4.0 } else { 1.0 / (1.0 + i as f64 + j as f64) }
//!     })?;
//!     let mut x = DistMatrix::from_fn(&grid, Desc::square_blocks(n, 1, 16), |i, _| i as f64)?;
//!     let lu = a.lu(&world)?;
//!     lu.solve_in_place(&world, &mut x)?;
//!     x.gather(0)
//! })?;
//! assert_eq!(results.len(), 4);
//! for result in results {
//!     result?;
//! }
//! # Ok::<(), fulmen::Error>(())
//! ```
//!
//! # The floors
//!
//! A module uses lower floors only (`ci/check-floors` sees to it).
//!
//! | floor | module | what |
//! |---|---|---|
//! | 0 | [`kernels`], [`compute`], [`error`], [`fabric`] | one rank's arithmetic; puts into exposed memory |
//! | 1 | [`comm`], [`dist::index`] | groups, collectives, broadcasts; block-cyclic arithmetic |
//! | 2 | [`grid`], [`dist`] | process grids; matrices, views, gather and scatter |
//! | 3 | [`blas`] | norms |
//! | 4 | [`lapack`] | LU, solves, condition |
//! | 5 | [`job`], [`world`], [`solver`], [`io`] | a program's place in a job; what most users call; matrices in files |

pub mod blas;
pub mod comm;
pub mod compute;
pub mod dist;
pub mod error;
pub mod fabric;
pub mod grid;
pub mod io;
pub mod job;
pub mod lapack;
pub mod solver;
pub mod world;

pub use dist::{Blocks, Desc, DistMatrix};
pub use error::{Error, Result, all_ok};
pub use fulmen_kernels as kernels;
pub use grid::{Grid, Order};
pub use job::Job;
pub use solver::Lu;
pub use world::{Setup, World};

/// What most programs need.
pub mod prelude {
    pub use crate::kernels::{c32, c64};
    pub use crate::{Blocks, Desc, DistMatrix, Error, Grid, Lu, Order, Result, Setup, World};
}

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
