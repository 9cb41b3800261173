//! How much of an LU's communication is exposed: not hidden behind arithmetic, over links with a known model.
//!
//! Four ranks (threads of this process) factor a matrix with look-ahead over emulated Thunderbolt devices. The library is
//! the real one, from the LU's schedule down to the verbs calls; two things are played: the links (rate, latency, cost of a
//! frame) and the arithmetic, which takes the time that it would take on a node of a given speed and does not compute.
//! Both times are stretched, so that two cores can play four nodes. The same factorisation runs once more over links that
//! cost nothing: what it takes less is what communication adds, and that share of the time is *exposed*.
//!
//! Our own processor time (checksums, posting, polling, naps) runs unstretched: its share is divided by the stretch.
//!
//! **On paper**, P > 1. A process column factors N/Q columns, and each waits one way for its pivot: the latency and two rows of a
//! panel, 5.3 us at NB 128 (it was three ways, while such a row did not fit into a control slot). The first chunk of each row
//! exchange waits three ways and its own bytes, 33 us at an eighth of the widest chunk (150 us while it was whole). On 2 x 2 nodes of
//! 700 Gflop/s and one thread that is 43 + 6 ms of 1.16 s at N 16384, and 33 + 5 ms of 0.53 s at N 12288: 4.2 and 7 %. It falls
//! as 1/N², and as 1/threads, for the other threads of a node update meanwhile: at N 100000 it is 0.1 %.
//!
//! Measured on two cores that many others used (load 15, which adds to both times): 62 ms at N 16384 (3.8 % of what it took), 60 ms
//! at 12288 (7.6 %), 42 ms at 8192 (15.7 %). Before, on the same cores idle: 12.9 % and 20.9 % at 16384 and 12288.

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
