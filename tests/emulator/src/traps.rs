//! When a trap is played: drawn from the seed, the trap, the device and the number of the event, never from time.

use crate::shared::{Guard, Shared};
use crate::world::{Call, Kind};

/// A well mixed 64-bit hash (splitmix64's finaliser over a running sum).
pub fn hash(parts: &[u64]) -> u64 {
    let mut h = 0x9e37_79b9_7f4a_7c15u64;
    for &part in parts {
        h = h.wrapping_add(part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h = (h ^ (h >> 30)).wrapping_mul(0x94d0_49bb_1331_11eb);
        h = (h ^ (h >> 27)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    }
    h ^ (h >> 31)
}

impl Guard<'_> {
    /// An event on a device for which a trap may be played: the first that is, with what to draw its details from.
    /// `bytes` is the message's length (`u32::MAX` where there is none).
    pub fn draw<T>(&mut self, port: usize, bytes: u32, what: impl Fn(Kind) -> Option<T>) -> Option<(T, u64)> {
        let shared: &Shared = self.shared;
        for &i in shared.traps_of(port) {
            let trap = &shared.world().traps[i];
            let Some(found) = what(trap.kind) else { continue };
            if bytes < trap.min_bytes {
                continue;
            }
            let draw = &mut self.port(port).draws[i];
            draw.seen += 1;
            let dice = hash(&[shared.world().seed, i as u64, port as u64, draw.seen]);
            // 53 bits, as a fraction of one.
            let hit = ((dice >> 11) as f64) < trap.chance * (1u64 << 53) as f64;
            if draw.seen > trap.after && draw.played < trap.times && hit {
                draw.played += 1;
                self.port(port).counters.traps += 1;
                return Some((found, hash(&[dice])));
            }
        }
        None
    }

    /// What a device grants a queue pair at most.
    pub fn grants(&mut self, port: usize) -> u32 {
        let of_grant = |k| match k {
            Kind::Grants { frames } => Some(frames),
            _ => None,
        };
        self.draw(port, u32::MAX, of_grant).map_or(u32::MAX, |(frames, _)| frames)
    }

    /// Whether a trap without details is played.
    pub fn plays(&mut self, port: usize, bytes: u32, kind: Kind) -> bool {
        self.draw(port, bytes, |k| (k == kind).then_some(())).is_some()
    }

    /// What a queue that was granted so much really holds.
    pub fn holds(&self, port: usize, granted: u32) -> u32 {
        let traps = &self.shared.world().traps;
        let shallow = self.shared.traps_of(port).iter().filter_map(|i| match traps[*i].kind {
            Kind::Shallow { frames } => Some(frames),
            _ => None,
        });
        shallow.min().map_or(granted, |least| least.min(granted))
    }

    /// The errno with which a call of so many bytes is to fail.
    pub fn fails(&mut self, port: usize, call: Call, bytes: u32) -> Option<i32> {
        let of_call = |k| match k {
            Kind::Fail { call: c, errno } if c == call => Some(errno),
            _ => None,
        };
        self.draw(port, bytes, of_call).map(|(errno, _)| errno)
    }
}
