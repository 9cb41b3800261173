//! The comparison.

use crate::link::LinkFlags;
use crate::{copying, puts};
use clap::Parser;
use fulmen_emu_verbs::{Installed, Profile, World};

#[derive(Parser)]
#[command(about = "Puts over an emulated link, against its model and against two staged slots")]
struct Arguments {
    /// Message sizes in bytes.
    #[arg(long, value_delimiter = ',', default_value = "4096,65536,262144,1048576,4194304")]
    bytes: Vec<usize>,
    #[command(flatten)]
    cable: LinkFlags,
    /// Times are stretched by this.
    #[arg(long, default_value_t = 100.0)]
    stretch: f64,
    /// Seconds on each line, about.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Gigabytes per second of the baseline's copies; without it: this machine's best.
    #[arg(long)]
    copies: Option<f64>,
    /// Only the baseline and the model.
    #[arg(long)]
    baseline: bool,
}

impl Arguments {
    fn world(&self) -> Installed {
        World::mesh(Profile::Apple, 2)
            .link(self.cable.link(), self.stretch)
            .install()
            .expect("the emulator's library")
    }

    /// Seconds that a message occupies the link.
    fn occupies(&self, bytes: usize) -> f64 {
        let frames = bytes.div_ceil(4096).max(1) as f64;
        bytes as f64 / (self.cable.rate * 1e9) + frames * self.cable.frame * 1e-9
    }

    /// How many messages of this size fill the time of a line.
    fn count(&self, bytes: usize) -> usize {
        let one = (self.occupies(bytes) + self.cable.latency * 1e-6) * self.stretch;
        (self.seconds / one).ceil().max(8.0) as usize
    }
}

/// The program.
pub fn main() {
    let a = Arguments::parse();
    println!(
        "link: {} GB/s, {} us, {} ns a frame; times stretched by {}",
        a.cable.rate, a.cable.latency, a.cable.frame, a.stretch
    );
    let copies = a.copies.map_or_else(copying::copy_rate, |gigabytes| gigabytes * 1e9);
    println!("two slots: copies in and out at {:.1} GB/s", copies / 1e9);
    if !a.baseline {
        let small = puts::latency(&a.world(), 64, 200) / a.stretch;
        let model = a.occupies(64) + a.cable.latency * 1e-6;
        println!("put of 64 B: {:.2} us, model {:.2} us: {:.2} x", small * 1e6, model * 1e6, small / model);
    }
    println!(
        "{:>9}  {:>10}  {:>10}  {:>8}  {:>14}  {:>7}  {:>16}  {:>7}",
        "bytes",
        "model GB/s",
        "puts GB/s",
        "of model",
        "two slots GB/s",
        "puts x",
        "of 4 KiB, GB/s",
        "puts x"
    );
    for &bytes in &a.bytes {
        let rate = |seconds: f64| bytes as f64 / 1e9 / (seconds / a.stretch);
        let model = bytes as f64 / 1e9 / a.occupies(bytes);
        let slots = |largest| {
            let (world, n) = (a.world(), a.count(bytes));
            rate(copying::seconds_per_message(&world, bytes, n, copies / a.stretch, largest))
        };
        let (slots, small) = (slots(copying::LARGEST), slots(copying::SMALLEST));
        let ours = if a.baseline {
            f64::NAN
        } else {
            rate(puts::seconds_per_put(&a.world(), bytes, a.count(bytes)))
        };
        println!(
            "{bytes:>9}  {model:>10.2}  {ours:>10.2}  {:>6.1} %  {slots:>14.2}  {:>7.2}  {small:>16.2}  {:>7.2}",
            100.0 * ours / model,
            ours / slots,
            ours / small
        );
    }
}
