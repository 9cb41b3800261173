//! hpl-run
fn main() {}
