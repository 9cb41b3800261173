//! `hpl-run`: the High-Performance Linpack benchmark on Fulmen.
//!
//! Pure modules: text in, values out.

pub mod dat;
pub mod generator;
pub mod hash;
pub mod params;
