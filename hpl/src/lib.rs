//! `hpl-run`: the High-Performance Linpack benchmark on Fulmen.
//!
//! A call goes down this list: [`cli`] and [`dat`] say what the user wants, [`settings`] puts them
//! together, [`auto`] and [`cabling`] choose the rest, [`plan`] counts runs, memory and time and refuses what does not
//! fit, a [`driver::Driver`] solves, [`report`] tells, [`exit`] ends; [`session`] is the thread through
//! them. All but driver, session, interrupt and progress are pure: text in, values out.

pub mod apart;
pub mod auto;
pub mod cabling;
pub mod cli;
pub mod dat;
pub mod doctor;
pub mod driver;
pub mod exit;
pub mod footprint;
pub mod generator;
pub mod hash;
pub mod interrupt;
pub mod job;
pub mod launch;
pub mod limits;
pub mod local;
pub mod machine;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod params;
pub mod plan;
pub mod progress;
pub mod rank;
pub mod report;
pub mod session;
pub mod settings;
pub mod stdout;
pub mod system;
pub mod units;
pub mod worker;
