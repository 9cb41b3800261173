//! The cable that the benches on emulated devices have, as flags.

use clap::Args;
use fulmen_emu_verbs::Link;

/// A cable's model.
#[derive(Args, Clone, Debug)]
pub struct LinkFlags {
    /// Gigabytes per second of a cable, each way.
    #[arg(long, default_value_t = 8.0)]
    pub rate: f64,
    /// Latency of a cable in microseconds.
    #[arg(long, default_value_t = 5.0)]
    pub latency: f64,
    /// Cost of a 4 KiB frame in nanoseconds.
    #[arg(long, default_value_t = 20.0)]
    pub frame: f64,
}

impl LinkFlags {
    /// The model.
    pub fn link(&self) -> Link {
        Link { bytes_per_second: self.rate * 1e9, latency_ns: self.latency * 1e3, frame_ns: self.frame }
    }
}
