//! A test double of an RDMA provider, with libibverbs' C ABI (rdma-core 44): programs load it in place of the real library
//! and reach other threads and processes of this host through it.
//!
//! It plays Apple's provider (Thunderbolt on macOS) with its limits and traps, or a NIC with true one-sided writes. See
//! [`World`] for what can be described, and `README.md` for what is enforced.

#![cfg(target_os = "linux")]

pub mod abi;
mod connect;
mod counters;
mod data;
mod link;
mod memory;
mod nic;
mod objects;
mod provider;
mod shared;
mod traps;
mod world;

pub use counters::Counters;
pub use world::{Call, Device, Installed, Kind, Limits, Link, Profile, Trap, Wire, World};
