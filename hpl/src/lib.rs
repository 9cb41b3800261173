//! `hpl-run`: the High-Performance Linpack benchmark on Fulmen.
//!
//! Pure modules: text in, values out.

pub mod auto;
pub mod cli;
pub mod dat;
pub mod driver;
pub mod exit;
pub mod generator;
pub mod hash;
pub mod interrupt;
pub mod machine;
pub mod params;
pub mod plan;
pub mod progress;
pub mod report;
pub mod session;
pub mod settings;
pub mod units;
