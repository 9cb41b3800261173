//! Queue pairs made, connected and proved in both directions, and made anew when they are dead.
//!
//! An attempt alternates with the rendezvous, so that a receive is always posted and told before its message is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::devices::Port;
use super::links::{Offer, SLOTS, gather};
use super::nic::{Completion, Gid, Granted, Nic, Operation, QpId, Remote, Service};
use super::patience::Wait;
use super::protocol::Mode;
use super::protocol::wire::SLOT;
use super::trouble::Refusal;
use crate::error::{Error, Result};
use crate::fabric::Memory;
use crate::fabric::rendezvous::Rendezvous;

/// What is asked for a control queue pair and for a data queue pair.
const CONTROL_DEPTH: Granted = Granted { send: 64, receive: 64 };
const DATA_DEPTH: Granted = Granted { send: 1023, receive: 1023 };
/// The completion of a message that proves a queue pair, and the bit of one's id that is a send's.
const PROOF: u64 = 15 << 60;
const PROOF_SENT: u64 = 1 << 24;
/// Length of the second, short proof on a control queue pair.
const SHORT: usize = 100;

/// Whether a completion is a proof's: that one's own proof has left may be told when the pair is in use already.
pub fn is_of_proof(id: u64) -> bool {
    id & PROOF == PROOF
}

/// One end of a queue pair; no number: it could not be made.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct End {
    qpn: u32,
    psn: u32,
    /// Where the other end may write its proof.
    address: u64,
    key: u32,
}

/// A way to join a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    pub service: Service,
    pub mode: Mode,
    /// Bytes in a chunk.
    pub chunk: usize,
}

/// A queue pair that is being proved.
pub struct Draft {
    pub nic: usize,
    /// Index of the device at the other end.
    pub far: usize,
    pub is_control: bool,
    pub qp: Option<(QpId, Granted)>,
    psn: u32,
    pub is_proved: bool,
    /// What its device last refused.
    pub refused: Option<Refusal>,
    /// Status of a completion of this attempt that did not end well; else 0.
    pub status: i32,
    /// Whether something has come in this attempt that nobody sent.
    pub is_spoilt: bool,
    /// Receives and sends of this attempt that were completed well.
    received: u32,
    sent: u32,
    /// Sends and receives of this attempt.
    expected: u32,
}

impl Draft {
    /// One from device `nic` to the peer's device `far`.
    pub fn new((nic, far): (usize, usize), is_control: bool) -> Self {
        let (psn, is_proved, received, sent, expected) = (0, false, 0, 0, 0);
        let (qp, refused, status, is_spoilt) = (None, None, 0, false);
        Draft {
            nic,
            far,
            is_control,
            qp,
            psn,
            is_proved,
            refused,
            status,
            is_spoilt,
            received,
            sent,
            expected,
        }
    }
}

/// A peer that is being connected.
pub struct Side {
    pub peer: usize,
    pub drafts: Vec<Draft>,
    /// What is tried, an attempt each.
    pub ways: Vec<Way>,
    /// The last attempt at which any of them was made: its way is that of all.
    pub made_at: usize,
    /// Bytes in a chunk, in that way.
    pub chunk: usize,
    pub slots: Arc<Memory>,
    /// For each draft a chunk to receive into, then one to send from.
    pub scratch: Arc<Memory>,
}

impl Side {
    pub fn is_proved(&self) -> bool {
        self.drafts.iter().all(|d| d.is_proved)
    }

    /// Whether this end has received all that the other one was to send in the last attempt.
    pub fn has_heard(&self) -> bool {
        self.drafts.iter().all(|d| d.expected > 0 && d.received == d.expected)
    }

    /// Addresses of what draft `i` receives into and sends from.
    fn scratch(&self, i: usize) -> (usize, usize) {
        let first = self.scratch.as_ptr() as usize + 2 * i * self.chunk;
        (first, first + self.chunk)
    }
}

/// An unpredictable first packet number: packets of an earlier connection are not taken for this one's.
fn first_number() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() as u32 & 0xFF_FFFF
}

/// What a proof from one rank to another holds.
fn pattern(from: usize, to: usize, which: usize, attempt: usize) -> impl Iterator<Item = u8> {
    noise((((from * 1031 + to) * 67 + which) * 17 + attempt) as u64)
}

/// Bytes that nothing sends by chance, drawn from a seed.
pub fn noise(seed: u64) -> impl Iterator<Item = u8> {
    let mut x = seed ^ 0x9E37_79B9_7F4A_7C15;
    std::iter::from_fn(move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((x >> 33) as u8)
    })
}

/// Bytes at an address of ours that nobody else touches now.
///
/// # Safety
/// `len` bytes at `at` must be mapped and untouched by others while the result is used.
unsafe fn bytes<'a>(at: usize, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) }
}

/// A common kind of address: ours and theirs.
fn addresses(nic: &Nic, far: &Port) -> (Option<Gid>, [u8; 16]) {
    let common = nic.gids().iter().find_map(|g| {
        far.gids.iter().find(|(kind, _)| *kind == g.kind as u8).map(|(_, raw)| (Some(*g), *raw))
    });
    common.unwrap_or((None, [0; 16]))
}

/// One attempt at everything that is not proved.
pub fn round(
    rendezvous: &mut dyn Rendezvous,
    nics: &mut [Nic],
    sides: &mut [Side],
    offers: &[Offer],
    attempt: usize,
    patience: Duration,
) -> Result<()> {
    let me = rendezvous.rank();
    let made = sides.iter_mut().try_for_each(|side| make(nics, side, attempt));
    let mine = made.map(|()| {
        let ends = |side: &Side| (0..side.drafts.len()).map(|i| end(nics, side, i)).collect::<Vec<_>>();
        sides.iter().map(|side| (side.peer, ends(side))).collect::<Vec<_>>()
    });
    let all = gather(rendezvous, mine)?;
    let told = |peer: usize| all[peer].iter().find(|(p, _)| *p == me).map(|(_, ends)| ends.as_slice());

    let joined = sides.iter_mut().try_for_each(|side| {
        let ends = told(side.peer).filter(|e| e.len() == side.drafts.len());
        let ends = ends.ok_or_else(|| Error::Internal(format!("rank {} counts other cables", side.peer)))?;
        join(nics, side, ends, &offers[side.peer], attempt)
    });
    gather(rendezvous, joined)?; // from here on every receive is posted
    let sent = sides.iter_mut().try_for_each(|side| match told(side.peer) {
        Some(ends) => prove(me, nics, side, ends, attempt),
        None => Ok(()),
    });
    let watched = sent.and_then(|()| watch(me, nics, sides, attempt, patience));
    let mine = watched.map(|()| {
        let good =
            |d: &Draft| d.is_proved || (d.expected > 0 && d.received == d.expected && d.sent == d.expected);
        sides.iter().map(|s| (s.peer, s.drafts.iter().map(good).collect::<Vec<_>>())).collect::<Vec<_>>()
    });
    let own = mine.as_ref().ok().cloned().unwrap_or_default();
    let all = gather(rendezvous, mine)?;
    for (side, (_, own)) in sides.iter_mut().zip(own) {
        let theirs = all[side.peer].iter().find(|(p, _)| *p == me).map(|(_, good)| good);
        for (i, draft) in side.drafts.iter_mut().enumerate() {
            draft.is_proved = own[i] && theirs.is_some_and(|good| good.get(i) == Some(&true));
        }
    }
    Ok(())
}

/// Makes what is not proved, anew; all of it when the way changes.
fn make(nics: &mut [Nic], side: &mut Side, attempt: usize) -> Result<()> {
    let Some(way) = side.ways.get(attempt).copied() else { return Ok(()) };
    if side.is_proved() {
        return Ok(());
    }
    let changes = side.ways[side.made_at] != way;
    (side.made_at, side.chunk) = (attempt, way.chunk);
    for draft in &mut side.drafts {
        if draft.is_proved && !changes {
            continue;
        }
        if let Some((qp, _)) = draft.qp.take() {
            nics[draft.nic].destroy_qp(qp);
        }
        (draft.is_proved, draft.received, draft.sent, draft.expected) = (false, 0, 0, 0);
        (draft.psn, draft.refused) = (first_number(), None);
        (draft.status, draft.is_spoilt) = (0, false);
        let depth = if draft.is_control { CONTROL_DEPTH } else { DATA_DEPTH };
        match nics[draft.nic].create_qp(way.service, depth) {
            Ok(made) => draft.qp = Some(made),
            Err(refusal) if refusal.is_no_such_kind() && side.ways.len() > attempt + 1 => {}
            Err(refusal) => return Err(keep(draft, refusal)),
        }
    }
    Ok(())
}

/// A refusal that ends all is kept too, for who wants to know its step and number.
fn keep(draft: &mut Draft, refusal: Refusal) -> Error {
    draft.refused = Some(refusal.clone());
    refusal.into()
}

fn end(nics: &[Nic], side: &Side, i: usize) -> End {
    let draft = &side.drafts[i];
    let Some((qp, _)) = draft.qp.filter(|_| !draft.is_proved) else { return End::default() };
    let nic = &nics[draft.nic];
    let (address, _) = side.scratch(i);
    let key = nic.keys(address, side.chunk).map_or(0, |(_, remote)| remote);
    End { qpn: nic.number_of(qp), psn: draft.psn, address: address as u64, key }
}

/// Connects and posts the receives of the proofs.
fn join(nics: &mut [Nic], side: &mut Side, ends: &[End], far: &Offer, attempt: usize) -> Result<()> {
    let Some(Way { mode, .. }) = side.ways.get(attempt).copied() else { return Ok(()) };
    for i in 0..side.drafts.len() {
        let (into, _) = side.scratch(i);
        let draft = &mut side.drafts[i];
        let Some((qp, _)) = draft.qp.filter(|_| !draft.is_proved && ends[i].qpn != 0) else { continue };
        let Some(port) = far.ports.get(draft.far) else { continue };
        let nic = &mut nics[draft.nic];
        let (gid, raw) = addresses(nic, port);
        let remote = Remote { qpn: ends[i].qpn, psn: ends[i].psn, lid: port.lid, gid: raw, mtu: port.mtu };
        match nic.connect(qp, gid, draft.psn, &remote) {
            Ok(()) => {}
            Err(refusal) => match refusal.trouble() {
                Some(trouble) if trouble.is_worth_another_try() => {
                    draft.refused = Some(refusal);
                    continue;
                }
                _ => return Err(keep(draft, refusal)),
            },
        }
        let id = PROOF | (attempt as u64) << 32 | (side.peer as u64) << 8 | i as u64;
        let lengths: &[usize] = match (draft.is_control, mode) {
            (true, _) => &[SLOT, SLOT],
            (false, Mode::Posted) => &[side.chunk],
            (false, Mode::Write) => &[0],
        };
        let mut at = if draft.is_control { side.slots.as_ptr() as usize } else { into };
        draft.expected = lengths.len() as u32;
        for len in lengths {
            // SAFETY: slots and scratch are the side's own and outlive the queue pair.
            unsafe { nic.post_receive(qp, id, at, *len) }.map_err(|refusal| keep(draft, refusal))?;
            at += len;
        }
        // SAFETY: as above; the write of a proof comes later, after the rendezvous.
        unsafe { bytes(into, side.chunk) }.fill(0);
    }
    Ok(())
}

fn prove(me: usize, nics: &mut [Nic], side: &mut Side, ends: &[End], attempt: usize) -> Result<()> {
    let Some(Way { mode, .. }) = side.ways.get(attempt).copied() else { return Ok(()) };
    for i in 0..side.drafts.len() {
        let (_, from) = side.scratch(i);
        let draft = &mut side.drafts[i];
        let Some((qp, _)) = draft.qp.filter(|_| !draft.is_proved && draft.expected > 0) else { continue };
        let nic = &mut nics[draft.nic];
        let id = PROOF | PROOF_SENT | (attempt as u64) << 32 | (side.peer as u64) << 8 | i as u64;
        let (at, lengths): (usize, &[usize]) = if draft.is_control {
            (side.slots.as_ptr() as usize + SLOTS as usize * SLOT, &[SLOT, SHORT])
        } else {
            (from, &[side.chunk])
        };
        // SAFETY: the side's own memory; nothing of it is under way.
        let buffer = unsafe { bytes(at, lengths[0]) };
        buffer.iter_mut().zip(pattern(me, side.peer, i, attempt)).for_each(|(to, b)| *to = b);
        let operation = if draft.is_control || mode == Mode::Posted {
            Operation::Send
        } else {
            Operation::WriteWithImmediate {
                address: ends[i].address,
                key: ends[i].key,
                immediate: attempt as u32,
            }
        };
        for len in lengths {
            // SAFETY: it is not written again before the queue pair is proved or destroyed; the address and key of a
            // write are the peer's own.
            unsafe { nic.post_send(qp, id, operation, at, *len) }.map_err(|refusal| keep(draft, refusal))?;
        }
    }
    Ok(())
}

/// Looks at completions until all proofs have come or time is up.
fn watch(me: usize, nics: &mut [Nic], sides: &mut [Side], attempt: usize, patience: Duration) -> Result<()> {
    let mut wait = Wait::begin(patience, Instant::now());
    let mut completions = [Completion::default(); 32];
    loop {
        let is_late = wait.is_over(Instant::now());
        for nic in nics.iter_mut() {
            let n = nic.poll(&mut completions)?;
            for c in &completions[..n] {
                let (peer, i) = ((c.id >> 8 & 0xFFFF) as usize, (c.id & 0xFF) as usize);
                let is_current = is_of_proof(c.id) && (c.id >> 32 & 0xFFF) as usize == attempt;
                let Some(side) = sides.iter_mut().find(|s| s.peer == peer).filter(|_| is_current) else {
                    continue;
                };
                let (into, _) = side.scratch(i);
                let Some(draft) = side.drafts.get_mut(i) else { continue };
                if c.status != 0 {
                    draft.status = c.status;
                    continue;
                }
                if c.id & PROOF_SENT != 0 {
                    draft.sent += 1;
                    continue;
                }
                let (at, len) = match (draft.is_control, draft.received) {
                    (true, 0) => (side.slots.as_ptr() as usize, SLOT),
                    (true, _) => (side.slots.as_ptr() as usize + SLOT, SHORT),
                    (false, _) => (into, side.chunk),
                };
                // SAFETY: the receive is complete: nothing writes there any more.
                let came = unsafe { bytes(at, len) };
                let is_right = came.iter().copied().eq(pattern(peer, me, i, attempt).take(len));
                let is_right = is_right && c.bytes as usize == len;
                draft.received += u32::from(is_right);
                draft.is_spoilt |= !is_right;
            }
        }
        // What has failed or brought something else will not end well any more.
        let is_over = |d: &Draft| d.status != 0 || d.is_spoilt;
        let is_there = |d: &Draft| {
            d.is_proved || d.expected == 0 || is_over(d) || (d.received, d.sent) == (d.expected, d.expected)
        };
        if sides.iter().flat_map(|s| &s.drafts).all(is_there) || is_late {
            return Ok(());
        }
        std::thread::yield_now();
    }
}
