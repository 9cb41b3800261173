//! What `mem` and `shm` have in common: ranks that can reach each other's memory.
//!
//! * [`slot`]: the protocol of one stream of puts, as a state machine over atomics; no I/O, no clock.
//! * [`area`]: how its state lies in the memory that all ranks see.
//! * [`bell`]: how a rank sleeps until another has something for it.
//! * [`control`]: another fabric that keeps the failures, where there is one.
//! * [`deadlock`]: ranks that wait for each other.
//! * [`endpoint`]: one rank's [`super::Fabric`] made of these.
//!
//! The README beside this folder has the state diagram and the proof sketch.

pub(super) mod area;
pub(super) mod bell;
pub(super) mod control;
pub(super) mod deadlock;
pub(super) mod endpoint;
pub(super) mod slot;
