//! The links between the hosts of a job: measured over the job's own fabric, judged by comparing them with each other.

mod judge;
mod measure;
mod short;
mod show;

pub(super) use judge::{SLOW, UNLIKE, usual};
pub use judge::{far_slower, judge};
pub use measure::{Effort, LONG, links, one_by_one, side_by_side};
pub use short::slow_links;
pub(super) use show::rate;
pub use show::{name, text};

use serde::{Deserialize, Serialize};

/// All links of a job's hosts.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// The hosts, in the order of their first ranks.
    pub hosts: Vec<String>,
    /// What was measured, a direction each.
    pub links: Vec<Link>,
}

impl Network {
    /// The other direction of a link.
    pub fn back(&self, link: &Link) -> Option<&Link> {
        self.links.iter().find(|l| (l.from, l.to) == (link.to, link.from))
    }
}

/// One direction between two hosts.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// Index of the sending host.
    pub from: usize,
    /// Index of the receiving host.
    pub to: usize,
    /// How the sender reaches the receiver: `tcp over en5 (10.0.0.1 to 10.0.0.2)`.
    pub way: String,
    /// Cables between the two: more than one where hosts in between pass on what is sent.
    pub cables: usize,
    /// Half a round trip of 8 bytes, in microseconds: the best of several.
    pub latency_us: f64,
    /// Bytes that came in a second, by the receiver's clock: the best of several.
    pub bytes_per_second: f64,
    /// Milliseconds that the receiver's clock is ahead of the sender's.
    pub clock_ahead_ms: i64,
}

impl Link {
    /// The sender's interface, if the way names one.
    pub fn interface(&self) -> Option<&str> {
        self.way.split_once(" over ").and_then(|(_, rest)| rest.split_whitespace().next())
    }
}
