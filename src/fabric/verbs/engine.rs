//! What moves: completions in, actions out. Devices, connected peers and their memory, in one hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arena::Arena;
use super::links::{Link, SLOTS};
use super::nic::{Completion, Nic, Operation};
use super::protocol::wire::{self, CABLES, SLOT};
use super::protocol::{Action, Fault, Mode, Pair, Settings};
use super::trouble::{Refusal, Step};
use crate::fabric::checksum;
use crate::fabric::{Lane, Memory};

// A request's id: what it is, whose, on which cable, and its number.
const CONTROL_CAME: u64 = 1;
const CONTROL_LEFT: u64 = 2;
const LANDED: u64 = 3;
const LEFT: u64 = 4;

fn id(kind: u64, peer: usize, cable: usize, number: u64) -> u64 {
    kind << 60 | (peer as u64) << 44 | (cable as u64) << 40 | (number & ((1 << 40) - 1))
}

/// The id of a receive for a control message.
pub fn control_came(peer: usize, slot: usize) -> u64 {
    id(CONTROL_CAME, peer, 0, slot as u64)
}

/// What ends the job, and which peer it is about.
pub enum Broken {
    /// The protocol's.
    Fault(usize, Fault),
    /// A device's.
    Refused(Option<usize>, Refusal),
}

/// A connected peer.
pub struct Peer {
    pub link: Link,
    pub pair: Pair,
    /// Memory of puts that may still be read, by lane.
    puts: [VecDeque<(u64, Arc<Memory>)>; Lane::COUNT],
    /// Memory of arms that were not waited for, by lane.
    arms: [VecDeque<Arc<Memory>>; Lane::COUNT],
    /// Messages whose receive could not be posted anew yet, with its slot: told to the protocol once it is.
    inbox: VecDeque<(u64, Vec<u8>)>,
    /// Messages, complete in their slots, that the device would not take yet: number and length.
    outbox: VecDeque<(u64, usize)>,
    /// When the last message came, and when the last was sent.
    pub heard: Instant,
    spoke: Instant,
}

impl Peer {
    pub fn new(link: Link, checksums: bool) -> Self {
        let windows = link.cables.iter().map(|c| c.window).collect();
        let settings = Settings { mode: link.mode, chunk: link.chunk, slots: SLOTS, checksums, windows };
        Peer {
            pair: Pair::new(&settings),
            link,
            puts: Default::default(),
            arms: Default::default(),
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            heard: Instant::now(),
            spoke: Instant::now(),
        }
    }

    /// Puts `len` bytes at `at` of `memory`.
    pub fn put(&mut self, lane: Lane, memory: &Arc<Memory>, at: usize, len: usize) -> u64 {
        self.release(lane);
        let put = self.pair.put(lane, memory.as_ptr() as usize + at, len);
        self.puts[lane.0 as usize].push_back((put, Arc::clone(memory)));
        put
    }

    /// Arms `len` bytes at `at` of `memory`.
    pub fn arm(&mut self, lane: Lane, memory: &Arc<Memory>, at: usize, len: usize) -> Result<u64, Fault> {
        let arm = self.pair.arm(lane, memory.as_ptr() as usize + at, len)?;
        self.arms[lane.0 as usize].push_back(Arc::clone(memory));
        Ok(arm)
    }

    /// The oldest arm of a lane was waited for.
    pub fn take(&mut self, lane: Lane) {
        self.pair.take(lane);
        self.arms[lane.0 as usize].pop_front();
    }

    /// Lets go of the memory of puts that have left.
    fn release(&mut self, lane: Lane) {
        let puts = &mut self.puts[lane.0 as usize];
        while puts.front().is_some_and(|(put, _)| self.pair.is_done(lane, *put)) {
            puts.pop_front();
        }
    }

    /// Posts receives of control slots anew, and tells the protocol what had come into them.
    fn hear(&mut self, nics: &mut [Nic]) -> Result<(), Broken> {
        let rank = self.link.peer;
        while let Some((slot, message)) = self.inbox.pop_front() {
            let nic = &mut nics[self.link.cables[0].nic];
            let request = control_came(rank, slot as usize);
            // SAFETY: the slots outlive the queue pair; nobody looks into this one until it is complete again.
            match unsafe { nic.post_receive(self.link.control, request, self.slot(slot), SLOT) } {
                Ok(()) => self.pair.on_control(&message).map_err(|fault| Broken::Fault(rank, fault))?,
                Err(refusal) if refusal.is_full() => {
                    self.inbox.push_front((slot, message));
                    return Ok(());
                }
                Err(refusal) => return Err(Broken::Refused(Some(rank), refusal)),
            }
        }
        Ok(())
    }

    /// Sends the messages that are complete in their slots. `false`: the device takes no more now.
    fn speak(&mut self, nics: &mut [Nic]) -> Result<bool, Broken> {
        let rank = self.link.peer;
        while let Some((number, len)) = self.outbox.pop_front() {
            let nic = &mut nics[self.link.cables[0].nic];
            let (at, request) = (self.slot(SLOTS + number % SLOTS), id(CONTROL_LEFT, rank, 0, number));
            // SAFETY: the slot is not written again before this send is complete.
            match unsafe { nic.post_send(self.link.control, request, Operation::Send, at, len) } {
                Ok(()) => {}
                Err(refusal) if refusal.is_full() => {
                    self.outbox.push_front((number, len));
                    return Ok(false);
                }
                Err(refusal) => return Err(Broken::Refused(Some(rank), refusal)),
            }
        }
        Ok(true)
    }

    /// Address of a slot: those to receive into come first.
    fn slot(&self, slot: u64) -> usize {
        self.link.slots.as_ptr() as usize + slot as usize * SLOT
    }
}

/// How bytes of puts have left or reached this rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// Copied by this rank's processor: those of small puts, once at either end.
    pub copied: u64,
    /// Taken by devices from where they were, and brought to where they belong.
    pub carried: u64,
}

impl Moved {
    /// The one place where bytes of a put are copied.
    ///
    /// # Safety
    /// As of [`std::ptr::copy_nonoverlapping`].
    unsafe fn copy(&mut self, from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        self.copied += len as u64;
    }
}

/// One rank's devices and peers. Fields are dropped in this order: queue pairs before the memory they fill.
pub struct Engine {
    pub nics: Vec<Nic>,
    /// By rank.
    pub peers: Vec<Option<Peer>>,
    pub arena: Arc<Arena>,
    /// After so long without a message to a peer, one is sent.
    pub beat: Duration,
    pub moved: Moved,
    /// When progress was last made, or tried.
    looked: Instant,
}

impl Engine {
    pub fn new(nics: Vec<Nic>, peers: Vec<Option<Peer>>, arena: Arc<Arena>, beat: Duration) -> Self {
        Engine { nics, peers, arena, beat, moved: Moved::default(), looked: Instant::now() }
    }

    /// For how long nobody has made progress.
    pub fn idle_for(&self) -> Duration {
        self.looked.elapsed()
    }

    /// Moves everything as far as it goes. `true`: something moved.
    pub fn progress(&mut self) -> Result<bool, Broken> {
        let now = Instant::now();
        if now - self.looked > 4 * self.beat {
            // This rank was away itself (stopped, or never polled): the others' silence counts from now.
            self.peers.iter_mut().flatten().for_each(|p| p.heard = now);
        }
        self.looked = now;
        let mut moved = false;
        let mut completions = [Completion::default(); 32];
        for nic in 0..self.nics.len() {
            for _ in 0..8 {
                let n = self.nics[nic].poll(&mut completions).map_err(|r| Broken::Refused(None, r))?;
                for completion in &completions[..n] {
                    self.complete(nic, completion, now)?;
                }
                moved |= n > 0;
                if n < completions.len() {
                    break;
                }
            }
        }
        for rank in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[rank] else { continue };
            if now - peer.spoke > self.beat {
                peer.pair.tick();
                peer.spoke = now;
            }
            moved |= act(peer, &mut self.nics, &mut self.moved, now)?;
        }
        Ok(moved)
    }

    fn complete(&mut self, nic: usize, c: &Completion, now: Instant) -> Result<(), Broken> {
        let kind = c.id >> 60;
        let (rank, cable) = ((c.id >> 44 & 0xFFFF) as usize, (c.id >> 40 & 0xF) as usize);
        let number = c.id & ((1 << 40) - 1);
        // What is left of proofs of dead queue pairs is nobody's.
        let Some(peer) =
            self.peers.get_mut(rank).and_then(Option::as_mut).filter(|_| (1..=4).contains(&kind))
        else {
            return Ok(());
        };
        let fault = |fault| Broken::Fault(rank, fault);
        if c.status != 0 {
            if !peer.pair.is_peer_gone() {
                let (device, step) = (self.nics[nic].name().to_owned(), Step::Completion);
                return Err(Broken::Refused(Some(rank), Refusal { device, step, number: c.status }));
            }
            // It has said that all it granted is there, and closed its end: of what was sent only the last answer of its
            // device is missing, and nothing came.
            if matches!(kind, CONTROL_CAME | LANDED) {
                return Ok(());
            }
        }
        match kind {
            CONTROL_CAME => {
                peer.heard = now;
                let at = peer.slot(number % SLOTS);
                let len = (c.bytes as usize).min(SLOT);
                // SAFETY: the receive into this slot is complete, and posted anew only by `hear`.
                let message = unsafe { std::slice::from_raw_parts(at as *const u8, len) }.to_vec();
                peer.inbox.push_back((number % SLOTS, message));
                peer.hear(&mut self.nics)
            }
            CONTROL_LEFT => {
                peer.pair.on_control_sent(number);
                Ok(())
            }
            LANDED => {
                self.moved.carried += u64::from(c.bytes);
                let (bytes, immediate) = (c.bytes as usize, c.immediate);
                peer.pair.on_landed(cable, number, bytes, immediate).map_err(fault)
            }
            _ => {
                peer.pair.on_completed(cable, number).map_err(fault)?;
                (0..Lane::COUNT as u8).for_each(|lane| peer.release(Lane(lane)));
                Ok(())
            }
        }
    }
}

/// Does what a pair wants done.
fn act(peer: &mut Peer, nics: &mut [Nic], bytes: &mut Moved, now: Instant) -> Result<bool, Broken> {
    let rank = peer.link.peer;
    let fault = |fault| Broken::Fault(rank, fault);
    let refused = |refusal| Broken::Refused(Some(rank), refusal);
    let mut out = [0u8; SLOT];
    let mut moved = false;
    peer.hear(nics)?;
    loop {
        if !peer.speak(nics)? {
            return Ok(moved); // again when something has moved
        }
        let cables = &peer.link.cables;
        let keys = |at: u64| {
            let mut keys = [0; CABLES];
            for (key, cable) in keys.iter_mut().zip(cables) {
                *key = nics[cable.nic].keys(at as usize, 1).map_or(0, |(_, remote)| remote);
            }
            keys
        };
        let Some(action) = peer.pair.next(&mut out, &keys) else { return Ok(moved) };
        moved = true;
        match action {
            Action::Place { at, data } => {
                // SAFETY: an armed range with room for the data, which the program may not touch before its wait, and
                // for which no receive is posted.
                unsafe { bytes.copy(data.as_ptr(), at as *mut u8, data.len()) };
            }
            Action::Verify { cable, chunk, sum } => {
                // SAFETY: a part of an armed range that has landed: the device writes there no more, the program waits.
                let came = unsafe { std::slice::from_raw_parts(chunk.at as *const u8, chunk.len) };
                let is_right = !peer.pair.checksums() || checksum::crc32c(came) == sum;
                peer.pair.on_verified(cable, is_right).map_err(fault)?;
            }
            Action::Receive { cable, chunk } => {
                let to = &peer.link.cables[cable];
                let request = id(LANDED, rank, cable, chunk.number);
                let len = if peer.link.mode == Mode::Posted { chunk.len } else { 0 };
                // SAFETY: a part of an armed range: kept by `arms` until it has been waited for, or until the queue
                // pairs are gone, and touched by nobody meanwhile.
                match unsafe { nics[to.nic].post_receive(to.qp, request, chunk.at, len) } {
                    Ok(()) => peer.pair.on_posted(cable, chunk),
                    Err(refusal) if refusal.is_full() => {
                        peer.pair.on_post_refused(cable).map_err(fault)?;
                        return Ok(moved);
                    }
                    Err(refusal) => return Err(refused(refusal)),
                }
            }
            Action::Send { cable, chunk } => {
                let to = &peer.link.cables[cable];
                let request = id(LEFT, rank, cable, chunk.number);
                let operation = match peer.link.mode {
                    Mode::Posted => Operation::Send,
                    Mode::Write => Operation::WriteWithImmediate {
                        address: chunk.address,
                        key: chunk.key,
                        immediate: chunk.number as u32,
                    },
                };
                // SAFETY: a part of a put: kept by `puts` and not written until it has left; address and key are of the
                // range that the peer granted for it.
                match unsafe { nics[to.nic].post_send(to.qp, request, operation, chunk.at, chunk.len) } {
                    Ok(()) => {
                        bytes.carried += chunk.len as u64;
                        // SAFETY: as above; reading while the device reads is fine.
                        let sent = unsafe { std::slice::from_raw_parts(chunk.at as *const u8, chunk.len) };
                        let sum = if peer.pair.checksums() { checksum::crc32c(sent) } else { 0 };
                        peer.pair.on_sent(cable, sum);
                    }
                    Err(refusal) if refusal.is_full() => {
                        peer.pair.on_send_refused(cable).map_err(fault)?;
                        return Ok(moved);
                    }
                    Err(refusal) => return Err(refused(refusal)),
                }
            }
            Action::Control { number, len, data } => {
                peer.spoke = now;
                let at = peer.slot(SLOTS + number % SLOTS);
                let total = len + data.map_or(0, |(_, len)| len);
                if let Some((from, small)) = data {
                    // SAFETY: a small put's bytes, which do not change before it is done, into the slot, which holds them:
                    // the message that was in it before has left.
                    unsafe { bytes.copy(from as *const u8, (at + len) as *mut u8, small) };
                }
                // SAFETY: as above.
                let slot = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, total) };
                slot[..len].copy_from_slice(&out[..len]);
                wire::seal(slot);
                peer.outbox.push_back((number, total));
            }
        }
    }
}
