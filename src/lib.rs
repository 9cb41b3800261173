//! Fulmen: distributed dense linear algebra.

pub mod error;
pub mod fabric;

pub use error::{Error, Result};
