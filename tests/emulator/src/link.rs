//! The links' speeds: when a message's frames leave and arrive.

use crate::abi::QPT_RC;
use crate::nic::{FRAME, frames};
use crate::shared::{Guard, Send};
use crate::world::Link;

impl Guard<'_> {
    /// The link that a device sends by, and its latency in nanoseconds of this clock.
    pub fn link_from(&self, port: usize) -> (Link, u64) {
        let world = self.shared.world();
        let wire = world.wires.iter().find(|w| w.devices.contains(&port));
        let link = wire.map_or(Link::default(), |w| {
            if w.devices[0] == port { w.link } else { w.back.unwrap_or(w.link) }
        });
        (link, (link.latency_ns * world.time_scale) as u64)
    }

    /// When the last frame leaves and arrives: one message after the other on each device's wire, but queue pairs take
    /// turns by frames, so a message of one frame need not wait for another pair's long ones.
    pub fn schedule(&mut self, port: usize, q: usize, peer: Option<usize>, send: &mut Send) {
        let (link, latency) = self.link_from(port);
        let scale = self.shared.world().time_scale;
        let takes = |bytes: u32| {
            let data =
                if link.bytes_per_second > 0.0 { bytes as f64 / link.bytes_per_second * 1e9 } else { 0.0 };
            ((data + frames(bytes) as f64 * link.frame_ns) * scale) as u64
        };
        let own = takes(send.len);
        if own + latency == 0 {
            return;
        }
        let into = peer.map_or(0, |p| self.port(p).receiving_until);
        let free = self.port(port).sending_until.max(into);
        let ready = send.posted.max(self.port(port).qps[q].sending_until);
        let passes = frames(send.len) == 1 && free > ready;
        let start = if passes { free.min(ready + takes(FRAME)) } else { free.max(ready) };
        send.sent_at = start + own;
        send.arrives_at = send.sent_at + latency;
        let until = if passes { free + own } else { send.sent_at };
        self.port(port).sending_until = until;
        self.port(port).qps[q].sending_until = send.sent_at;
        if let Some(p) = peer {
            self.port(p).receiving_until = until;
        }
        // A reliable sender is told when the message is there, not when it has left.
        if self.port(port).qps[q].kind == QPT_RC {
            send.sent_at = send.arrives_at;
        }
    }
}
