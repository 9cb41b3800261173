//! Distributed LAPACK: factorisations and solves.

mod early;
mod factor;
mod local;
mod panel;
mod pivot;
mod plan;
mod tasks;
mod timing;
mod update;

mod lu;
mod solve;
mod transposed;

mod condition;
mod getrs;

pub use condition::{Norm, gecon};
pub use getrs::getrs;
pub use lu::{LuFactors, LuOpts, Observer, Silent, getrf};
pub use solve::back_substitute;
pub use timing::{Phase, PhaseTimes};
