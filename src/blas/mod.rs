//! Distributed level 1 to 3 operations.

pub mod norm;
