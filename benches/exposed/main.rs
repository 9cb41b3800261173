//! How much of an LU's communication is exposed: not hidden behind arithmetic, over links with a known model.
//!
//! Four ranks (threads of this process) factor a matrix with look-ahead over emulated Thunderbolt devices. The library is
//! the real one, from the LU's schedule down to the verbs calls; two things are played: the links (rate, latency, cost of a
//! frame) and the arithmetic, which takes the time that it would take on a node of a given speed and does not compute.
//! Both times are stretched, so that two cores can play four nodes. The same factorisation runs once more over links that
//! cost nothing: what it takes less is what communication adds, and that share of the time is *exposed*.
//!
//! Our own processor time (checksums, posting, polling, naps) runs unstretched: its share is divided by the stretch.

#[cfg(target_os = "linux")]
mod arithmetic;
#[cfg(target_os = "linux")]
#[path = "../link.rs"]
mod link;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod waits;

fn main() {
    #[cfg(target_os = "linux")]
    run::main();
    #[cfg(not(target_os = "linux"))]
    eprintln!("exposed: the emulated devices are for Linux");
}
