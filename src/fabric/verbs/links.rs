//! Connecting: which devices join which ranks, queue pairs made and proved in both directions, made anew when dead.
//!
//! Every rank takes the same steps, with a rendezvous between them, so that a receive is always posted and told
//! before its message is sent, and a rank that fails ends the others at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::arena::Arena;
use super::nic::{Completion, Gid, Granted, Nic, Operation, QpId, Remote, Service};
use super::protocol::wire::{CABLES, SLOT};
use super::protocol::{FRAME, Mode, Window};
use super::trouble::{Refusal, Step, Trouble};
use super::{Devices, Options};
use crate::error::{Error, Result};
use crate::fabric::Memory;
use crate::fabric::rendezvous::Rendezvous;

/// Control slots of each side of a pair.
pub const SLOTS: u64 = 32;
/// What is asked for a control queue pair and for a data queue pair.
const CONTROL_DEPTH: Granted = Granted { send: 64, receive: 64 };
const DATA_DEPTH: Granted = Granted { send: 1023, receive: 1023 };
/// Entries of a device's completion queue.
pub const COMPLETIONS: usize = 4096;
/// A chunk is at most so long: some way below what a queue pair is granted.
const LARGEST_CHUNK: usize = 1 << 20;
/// The completion of a message that proves a queue pair.
pub const PROOF: u64 = 15 << 60;
/// Length of the second, short proof on a control queue pair.
const SHORT: usize = 100;

/// A device, as its rank tells the others.
#[derive(Clone, Serialize, Deserialize)]
struct Port {
    name: String,
    is_thunderbolt: bool,
    lid: u16,
    mtu: u8,
    gids: Vec<(u8, [u8; 16])>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Offer {
    ports: Vec<Port>,
    chunk: u32,
    /// Service and mode that the user wants, as [`code_of`] writes them.
    wanted: Option<u8>,
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

/// A data queue pair.
pub struct Cable {
    /// Index of the device.
    pub nic: usize,
    pub qp: QpId,
    /// Name of the device at the other end.
    pub far: String,
    pub window: Window,
}

/// A connected peer.
pub struct Link {
    pub peer: usize,
    pub service: Service,
    pub mode: Mode,
    pub chunk: usize,
    /// On the first cable's device.
    pub control: QpId,
    pub cables: Vec<Cable>,
    /// [`SLOTS`] slots to receive into, then as many to send from.
    pub slots: Arc<Memory>,
}

fn code_of(way: (Service, Mode)) -> u8 {
    u8::from(way.0 == Service::Uc) + 2 * u8::from(way.1 == Mode::Posted)
}

fn way_of(code: u8) -> (Service, Mode) {
    (
        if code & 1 == 0 { Service::Rc } else { Service::Uc },
        if code & 2 == 0 { Mode::Write } else { Mode::Posted },
    )
}

/// Everyone's value; a rank whose own is an error ends all.
fn gather<T: Serialize + for<'a> Deserialize<'a>>(
    rendezvous: &mut dyn Rendezvous,
    mine: Result<T>,
) -> Result<Vec<T>> {
    let (value, error) = match mine {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(error)),
    };
    let words = error.as_ref().map(ToString::to_string);
    let bytes = postcard::to_stdvec(&(value, words))
        .map_err(|e| Error::Internal(format!("a message of the rendezvous: {e}")))?;
    let all = rendezvous.all_gather(&bytes)?;
    if let Some(error) = error {
        return Err(error);
    }
    let mut values = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        match postcard::from_bytes::<(Option<T>, Option<String>)>(bytes) {
            Ok((Some(value), None)) => values.push(value),
            Ok((_, Some(reason))) => return Err(Error::Aborted { by: rank, reason }),
            _ => return Err(Error::Aborted { by: rank, reason: "it speaks another version".into() }),
        }
    }
    Ok(values)
}

/// A queue pair that is being proved.
struct Draft {
    nic: usize,
    /// Index of the device at the other end.
    far: usize,
    is_control: bool,
    qp: Option<(QpId, Granted)>,
    psn: u32,
    is_proved: bool,
    /// Receives and sends of this attempt that were completed well.
    received: u32,
    sent: u32,
    /// Sends and receives of this attempt.
    expected: u32,
}

/// A peer that is being connected.
struct Side {
    peer: usize,
    drafts: Vec<Draft>,
    ways: Vec<(Service, Mode)>,
    /// The last attempt at which any of them was made: its way is that of all.
    made_at: usize,
    chunk: usize,
    slots: Arc<Memory>,
    /// For each draft a chunk to receive into, then one to send from.
    scratch: Arc<Memory>,
}

impl Side {
    fn is_proved(&self) -> bool {
        self.drafts.iter().all(|d| d.is_proved)
    }

    /// Addresses of what draft `i` receives into and sends from.
    fn scratch(&self, i: usize) -> (usize, usize) {
        let first = self.scratch.as_ptr() as usize + 2 * i * self.chunk;
        (first, first + self.chunk)
    }
}

/// Connects this rank to all others over `nics`.
pub fn connect(
    rendezvous: &mut dyn Rendezvous,
    nics: Result<&mut Vec<Nic>>,
    arena: &Arc<Arena>,
    options: &Options,
) -> Result<Vec<Link>> {
    let me = rendezvous.rank();
    let (nics, offer) = match nics {
        Ok(nics) => {
            let offer = offer(nics, options);
            (Some(nics), Ok(offer))
        }
        Err(error) => (None, Err(error)),
    };
    let offers = gather(rendezvous, offer)?;
    let Some(nics) = nics else { return Ok(Vec::new()) };
    let mut sides = Err(Error::Internal("no device".into()));
    if let Some(chunk) = offers.iter().map(|o| o.chunk as usize).min() {
        sides = plan(me, &offers, nics, arena, chunk, options);
    }
    let mut sides = sides_or_end(rendezvous, sides)?;
    let attempts = sides.iter().map(|s| s.ways.len()).max().unwrap_or(0);
    let attempts = gather(rendezvous, Ok(attempts))?.into_iter().max().unwrap_or(0);
    for attempt in 0..attempts {
        round(rendezvous, nics, &mut sides, &offers, attempt, options.warm_up)?;
        if gather(rendezvous, Ok(sides.iter().all(Side::is_proved)))?.into_iter().all(|all| all) {
            break;
        }
    }
    let links = finish(nics, sides, &offers, options);
    sides_or_end(rendezvous, links)
}

/// A step that every rank takes: fails everywhere when it fails anywhere.
fn sides_or_end<T>(rendezvous: &mut dyn Rendezvous, mine: Result<T>) -> Result<T> {
    let (mine, told) = match mine {
        Ok(value) => (Some(value), Ok(())),
        Err(error) => (None, Err(error)),
    };
    gather(rendezvous, told)?;
    mine.ok_or_else(|| Error::Internal("a step without a result".into()))
}

fn offer(nics: &[Nic], options: &Options) -> Offer {
    let ports = nics
        .iter()
        .map(|nic| Port {
            name: nic.name().to_owned(),
            is_thunderbolt: nic.listed().is_thunderbolt(),
            lid: nic.port().lid,
            mtu: nic.port().mtu,
            gids: nic.gids().iter().map(|g| (g.kind as u8, g.raw)).collect(),
        })
        .collect();
    let chunk = options.chunk.clamp(FRAME, LARGEST_CHUNK) / FRAME * FRAME;
    Offer { ports, chunk: chunk as u32, wanted: options.way.map(code_of) }
}

/// Which device of rank `a` is joined to which of rank `b`, by index.
fn cables(a: usize, b: usize, offers: &[Offer], devices: &Devices) -> Vec<(usize, usize)> {
    let (ours, theirs) = (&offers[a].ports, &offers[b].ports);
    let find = |ports: &[Port], name: &str| ports.iter().position(|p| p.name == name);
    let mut found: Vec<(usize, usize)> = match devices {
        Devices::Matrix(matrix) => {
            let names = |x: usize, y: usize| matrix.get(x).and_then(|row| row.get(y)).into_iter().flatten();
            names(a, b)
                .zip(names(b, a))
                .filter_map(|(x, y)| Some((find(ours, x)?, find(theirs, y)?)))
                .collect()
        }
        _ if ours.iter().chain(theirs).any(|p| p.is_thunderbolt) => {
            // A cable is a network of its own: its two ends have neighbouring IPv4 addresses.
            let net = |p: &Port| {
                p.gids.iter().find(|(kind, _)| *kind == 0).map(|(_, raw)| [raw[12], raw[13], raw[14]])
            };
            let joined = |x: &Port, y: &Port| net(x).is_some() && net(x) == net(y);
            let pairs = ours.iter().enumerate().flat_map(|(i, x)| {
                theirs.iter().enumerate().filter(move |(_, y)| joined(x, y)).map(move |(j, _)| (i, j))
            });
            pairs.collect()
        }
        _ => (0..ours.len().min(theirs.len())).map(|i| (i, i)).collect(),
    };
    found.truncate(CABLES);
    found
}

fn plan(
    me: usize,
    offers: &[Offer],
    nics: &mut [Nic],
    arena: &Arc<Arena>,
    chunk: usize,
    options: &Options,
) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    for peer in (0..offers.len()).filter(|p| *p != me) {
        // The lower rank's view counts, so that both see the same cables in the same order.
        let (low, high) = (me.min(peer), me.max(peer));
        let joined = cables(low, high, offers, &options.devices);
        if joined.is_empty() {
            return Err(Error::argument(
                "devices",
                format!("rank {me} to rank {peer}"),
                "no RDMA device of the one is joined to one of the other",
                "name the devices (a device matrix), or use --fabric tcp",
            ));
        }
        let mine = |(a, b): (usize, usize)| if me == low { (a, b) } else { (b, a) };
        let thunderbolt = joined
            .iter()
            .any(|(a, b)| offers[low].ports[*a].is_thunderbolt || offers[high].ports[*b].is_thunderbolt);
        let first = mine(joined[0]);
        let draft = |(nic, far): (usize, usize), is_control| Draft {
            nic,
            far,
            is_control,
            qp: None,
            psn: 0,
            is_proved: false,
            received: 0,
            sent: 0,
            expected: 0,
        };
        let mut drafts = vec![draft(first, true)];
        drafts.extend(joined.iter().map(|c| draft(mine(*c), false)));
        use {Mode::*, Service::*};
        let ways = match offers[low].wanted.map(way_of) {
            // Never anything else on these: a WRITE would be taken for a SEND.
            _ if thunderbolt => vec![(Uc, Posted); 3],
            Some(way) => vec![way; 3],
            None => vec![(Rc, Write), (Rc, Write), (Uc, Write), (Uc, Posted), (Uc, Posted)],
        };
        let slots = take(arena, nics, 2 * SLOTS as usize * SLOT)?;
        let scratch = take(arena, nics, 2 * drafts.len() * chunk)?;
        sides.push(Side { peer, drafts, ways, made_at: 0, chunk, slots, scratch });
    }
    Ok(sides)
}

/// Memory of the arena, which grows when it has to.
pub fn take(arena: &Arc<Arena>, nics: &mut [Nic], bytes: usize) -> Result<Arc<Memory>> {
    if let Some(memory) = arena.take(bytes) {
        return Ok(memory);
    }
    arena.grow(bytes, |at, len| {
        nics.iter_mut().try_for_each(|nic| {
            // SAFETY: a mapping of the arena, which outlives the devices (`Engine` holds both, in this order).
            unsafe { nic.register(at, len) }.map_err(Error::from)
        })
    })?;
    arena.take(bytes).ok_or_else(|| Error::Internal(format!("no {bytes} bytes after growing")))
}

/// An unpredictable first packet number: packets of an earlier connection are not taken for this one's.
fn first_number() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() as u32 & 0xFF_FFFF
}

/// What a proof from one rank to another holds.
fn pattern(from: usize, to: usize, which: usize, attempt: usize) -> impl Iterator<Item = u8> {
    let mut x = (((from * 1031 + to) * 67 + which) * 17 + attempt) as u64 ^ 0x9E37_79B9_7F4A_7C15;
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
fn round(
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
    side.made_at = attempt;
    for draft in &mut side.drafts {
        if draft.is_proved && !changes {
            continue;
        }
        if let Some((qp, _)) = draft.qp.take() {
            nics[draft.nic].destroy_qp(qp);
        }
        (draft.is_proved, draft.received, draft.sent, draft.expected) = (false, 0, 0, 0);
        draft.psn = first_number();
        let depth = if draft.is_control { CONTROL_DEPTH } else { DATA_DEPTH };
        match nics[draft.nic].create_qp(way.0, depth) {
            Ok(made) => draft.qp = Some(made),
            Err(refusal)
                if refusal.trouble() == Some(Trouble::UnreliableOnly) && side.ways.len() > attempt + 1 => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
    Ok(())
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
    let Some((_, mode)) = side.ways.get(attempt).copied() else { return Ok(()) };
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
                Some(trouble) if trouble.is_worth_another_try() && attempt + 1 < side.ways.len() => continue,
                _ => return Err(refusal.into()),
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
            unsafe { nic.post_receive(qp, id, at, *len) }?;
            at += len;
        }
        // SAFETY: as above; the write of a proof comes later, after the rendezvous.
        unsafe { bytes(into, side.chunk) }.fill(0);
    }
    Ok(())
}

/// Bit of a proof's id: it is a send's.
const PROOF_SENT: u64 = 1 << 24;

fn prove(me: usize, nics: &mut [Nic], side: &mut Side, ends: &[End], attempt: usize) -> Result<()> {
    let Some((_, mode)) = side.ways.get(attempt).copied() else { return Ok(()) };
    for i in 0..side.drafts.len() {
        let (_, from) = side.scratch(i);
        let draft = &side.drafts[i];
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
            unsafe { nic.post_send(qp, id, operation, at, *len) }?;
        }
    }
    Ok(())
}

/// Looks at completions until all proofs have come or time is up.
fn watch(me: usize, nics: &mut [Nic], sides: &mut [Side], attempt: usize, patience: Duration) -> Result<()> {
    let start = Instant::now();
    let mut completions = [Completion::default(); 32];
    loop {
        for nic in nics.iter_mut() {
            let n = nic.poll(&mut completions)?;
            for c in &completions[..n] {
                let (peer, i) = ((c.id >> 8 & 0xFFFF) as usize, (c.id & 0xFF) as usize);
                let is_current =
                    c.id >> 60 == 15 && (c.id >> 32 & 0xFFF) as usize == attempt && c.status == 0;
                let Some(side) = sides.iter_mut().find(|s| s.peer == peer).filter(|_| is_current) else {
                    continue;
                };
                let (into, _) = side.scratch(i);
                let Some(draft) = side.drafts.get_mut(i) else { continue };
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
                draft.received += u32::from(is_right && c.bytes as usize == len);
            }
        }
        let is_there =
            |d: &Draft| d.is_proved || d.expected == 0 || (d.received, d.sent) == (d.expected, d.expected);
        if sides.iter().flat_map(|s| &s.drafts).all(is_there) || start.elapsed() > patience {
            return Ok(());
        }
        std::thread::yield_now();
    }
}

/// Posts the control receives and works out the windows.
fn finish(nics: &mut [Nic], sides: Vec<Side>, offers: &[Offer], options: &Options) -> Result<Vec<Link>> {
    let mut pairs = vec![0usize; nics.len()];
    for draft in sides.iter().flat_map(|s| &s.drafts) {
        pairs[draft.nic] += 1;
    }
    let mut links = Vec::new();
    for side in sides {
        if let Some(draft) = side.drafts.iter().find(|d| !d.is_proved) {
            let device = format!("{} (to rank {})", nics[draft.nic].name(), side.peer);
            return Err(Refusal { device, step: Step::WarmUp, number: 0 }.into());
        }
        let (service, mode) = side.ways[side.made_at];
        let mut cables = Vec::new();
        let mut control = None;
        for draft in &side.drafts {
            let Some((qp, granted)) = draft.qp else { continue };
            if draft.is_control {
                control = Some(qp);
                let first = side.slots.as_ptr() as usize;
                for slot in 0..SLOTS as usize {
                    let id = super::engine::control_came(side.peer, slot);
                    // SAFETY: slots live as long as the queue pair, and are touched only when it says so.
                    unsafe { nics[draft.nic].post_receive(qp, id, first + slot * SLOT, SLOT) }?;
                }
                continue;
            }
            // Under 95 % of what was granted, and so many that completions always fit their queue.
            let unit = if mode == Mode::Posted { side.chunk / FRAME } else { 1 };
            let fits = (nics[draft.nic].completions() / pairs[draft.nic]).saturating_sub(2 * SLOTS as usize)
                / 2
                * unit;
            let wish = options.window.max(side.chunk) / if mode == Mode::Posted { FRAME } else { side.chunk };
            let of = |granted: u32| (granted as usize * 95 / 100).min(fits).min(wish).max(unit) as u32;
            cables.push(Cable {
                nic: draft.nic,
                qp,
                far: offers[side.peer].ports.get(draft.far).map(|p| p.name.clone()).unwrap_or_default(),
                window: Window { send: of(granted.send), receive: of(granted.receive) },
            });
        }
        let control = control.ok_or_else(|| Error::Internal("no control queue pair".into()))?;
        let Side { peer, chunk, slots, .. } = side;
        links.push(Link { peer, service, mode, chunk, control, cables, slots });
    }
    Ok(links)
}
