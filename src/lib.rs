//! Fulmen: distributed dense linear algebra.

pub mod blas;
pub mod comm;
pub mod dist;
pub mod error;
pub mod fabric;
pub mod grid;

pub use dist::{Desc, DistMatrix};
pub use error::{Error, Result};
pub use grid::{Grid, Order};
