//! The verbs C ABI: structs, constants, and the library that implements it.

pub mod abi;
#[cfg(test)]
mod layout;
mod library;

pub use library::{Absent, LIBRARY_VARIABLE, Library};
