//! Fulmen: distributed dense linear algebra.

pub mod blas;
pub mod comm;
pub mod compute;
pub mod dist;
pub mod error;
pub mod fabric;
pub mod grid;
pub mod lapack;
pub mod world;

pub use dist::{Desc, DistMatrix};
pub use error::{Error, Result};
pub use grid::{Grid, Order};
pub use world::{Setup, World};
