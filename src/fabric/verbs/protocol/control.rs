//! Numbers and window of the control queue pair.

use super::wire::{CABLES, Header};
use crate::fabric::Lane;

/// Slots that only a bare acknowledgement may use: two full windows can still acknowledge each other.
const RESERVE: u64 = 4;

pub struct Control {
    slots: u64,
    sent: u64,
    /// Of those, how many have left: the own device says so, or the peer has them.
    completed: u64,
    /// Of those, how many the peer has received and posted anew.
    acknowledged: u64,
    received: u64,
    /// How much of `received` the peer was told.
    told: u64,
}

impl Control {
    pub fn new(slots: u64) -> Self {
        assert!(slots > 2 * RESERVE, "{slots} control slots");
        Control { slots, sent: 0, completed: 0, acknowledged: 0, received: 0, told: 0 }
    }

    /// Whether a message may be sent; `bare`: one that tells only what was received.
    pub fn has_room(&self, bare: bool) -> bool {
        let window = if bare { self.slots } else { self.slots - RESERVE };
        self.sent - self.acknowledged < window && self.sent - self.completed < self.slots
    }

    /// The header of the next message.
    pub fn header(&mut self, taken: [u32; Lane::COUNT], there: [u32; CABLES]) -> Header {
        let number = self.sent;
        self.sent += 1;
        self.told = self.received;
        Header { number, received: self.received, taken, there }
    }

    /// A message was let go by the own device, and so were those before it.
    pub fn on_completed(&mut self, number: u64) {
        self.completed = self.completed.max(number + 1);
    }

    /// A message came.
    pub fn on_received(&mut self, header: &Header) -> Result<(), String> {
        if header.number != self.received {
            return Err(format!("control message {} where {} was due", header.number, self.received));
        }
        if header.received < self.acknowledged || header.received > self.sent {
            return Err(format!("{} control messages acknowledged of {}", header.received, self.sent));
        }
        self.received += 1;
        self.acknowledged = header.received;
        self.completed = self.completed.max(header.received);
        Ok(())
    }

    /// Whether the peer may run out of slots for want of an acknowledgement.
    pub fn owes(&self) -> bool {
        self.received - self.told >= self.slots / 4
    }

    /// Whether all that was sent has left.
    pub fn is_completed(&self) -> bool {
        self.completed == self.sent
    }

    /// Whether all that was sent has arrived, as far as is known.
    pub fn is_acknowledged(&self) -> bool {
        self.acknowledged == self.sent && self.is_completed()
    }
}
