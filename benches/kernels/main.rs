//! The native kernels beside the vendors', in one run: GEMM, triangular solve into packed form, panel LU.
//!
//! Each repetition runs the witnesses (`fma`: multiply-adds on registers; `l2`: a packed product that
//! lives in L2) and then every side once, so that all meet the machine in the same mood. Printed are
//! medians of Gflop/s; a ratio is the median of the ratios within a repetition. Ratios of different
//! runs do not compare. Peers are found by `FULMEN_PEER_<NAME>=/path/to/library` (`ci/peers kernels` sets them).

mod memory;
mod peers;
mod pin;
mod sides;
mod witness;

use clap::Parser;
use fulmen_kernels::{Isa, KernelSet};

/// Native kernels against vendors' libraries.
#[derive(Parser)]
struct Args {
    /// Threads, one table each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Repetitions of each case
    #[arg(long, default_value_t = 5)]
    reps: usize,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// Our kernels, by name
    #[arg(long, default_value = "native")]
    kernels: String,
    /// m and n of the rank-k updates, and rows of the solves and panels' neighbours
    #[arg(long, default_value_t = 8000)]
    n: usize,
    /// Milliseconds to wait before each side, for the peers' idle threads to stop spinning
    #[arg(long, default_value_t = 30)]
    pause: u64,
}

fn main() {
    let args = Args::parse();
    let set = args.kernels.parse().and_then(|choice| KernelSet::select(&choice)).unwrap_or_else(|e| {
        eprintln!("kernels-vs-peers: {e}");
        std::process::exit(2);
    });
    let peers = peers::found();
    let d = set.of::<f64>().description();
    println!("kernels {} {}; instruction sets {:?}", d.backend, d.detail, Isa::available());
    for peer in &peers {
        println!("peer {}: {}", peer.name, peer.path);
    }
    for &threads in &args.threads {
        sides::table(&set, &peers, threads, args.reps, args.n, &args.only, args.pause);
    }
}
