//! Puts over an emulated Thunderbolt link, against the link's model and against what a discipline of two staged slots
//! reaches: the one of JACCL (MLX), which copies in and out of registered slots and keeps two of them under way.
//!
//! The link's times are stretched, so that a slow machine can play a fast link; so are the baseline's copies. What is
//! compared is thus how the disciplines use the link; the cost of our own code is in it, divided by the stretch.
//!
//! Two columns are of it: with slots of up to 512 KiB, and with those of 4 KiB that it has before macOS 26.3. A message of one slot
//! costs two copies, the link and its latency, a put at best the link: so at 64 KiB the first ratio is 1.6 + 2 copies / 8.5 us,
//! which is 3 where copies go at 9 GB/s (`--copies 9`), less where they are faster.

#[cfg(target_os = "linux")]
#[path = "../../tests/emulator/tests/client/mod.rs"]
mod client;
#[cfg(target_os = "linux")]
mod copying;
#[cfg(target_os = "linux")]
#[path = "../link.rs"]
mod link;
#[cfg(target_os = "linux")]
mod model;
#[cfg(target_os = "linux")]
mod puts;

fn main() {
    #[cfg(target_os = "linux")]
    model::main();
    #[cfg(not(target_os = "linux"))]
    eprintln!("puts-vs-model: the emulated devices are for Linux");
}
