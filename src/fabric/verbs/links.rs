//! Connecting: who is joined to whom, in which ways that is tried, and what comes of it.
//!
//! Every rank takes the same steps, with a rendezvous between them; a rank that fails ends the others at once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Options;
use super::arena::Arena;
use super::devices::{self, Apart, Port};
use super::nic::{Nic, QpId, Service};
use super::proof::{self, Draft, Side, Way};
use super::protocol::wire::SLOT;
use super::protocol::{FRAME, Mode, Window};
use super::trouble::{Refusal, Step};
use crate::error::{Error, Result};
use crate::fabric::Memory;
use crate::fabric::rendezvous::Rendezvous;

/// Control slots of each side of a pair.
pub const SLOTS: u64 = 32;
/// Entries of a device's completion queue.
pub const COMPLETIONS: usize = 4096;
/// A chunk is at most so long: some way below what a queue pair is granted.
const LARGEST_CHUNK: usize = 1 << 20;

/// What a rank tells the others.
#[derive(Clone, Serialize, Deserialize)]
pub struct Offer {
    pub ports: Vec<Port>,
    chunk: u32,
    /// Service and mode that the user wants, as [`code_of`] writes them.
    wanted: Option<u8>,
    /// Peers that are reached otherwise.
    without: Vec<usize>,
    /// Why it has no device that works, if it has none.
    absent: Option<String>,
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

/// A rank that is not joined to this one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeftOut {
    /// The rank.
    pub rank: usize,
    /// The rank whose devices the reason is about, where it is about one's.
    pub of: Option<usize>,
    /// The reason, for a report.
    pub why: String,
}

/// A pair of which nothing was proved.
struct Dead {
    peer: usize,
    /// The end whose device has refused; this one when neither has.
    of: usize,
    refusal: Refusal,
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
pub fn gather<T: Serialize + for<'a> Deserialize<'a>>(
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

/// Connects this rank to the others over `nics`; those that it is not joined to come second. `absent`: why there are no
/// `nics`, where that is no error.
pub fn connect(
    rendezvous: &mut dyn Rendezvous,
    nics: Result<&mut Vec<Nic>>,
    absent: Option<String>,
    arena: &Arc<Arena>,
    options: &Options,
) -> Result<(Vec<Link>, Vec<LeftOut>)> {
    let (me, size) = (rendezvous.rank(), rendezvous.size());
    let (nics, offer) = match nics {
        Ok(nics) => {
            let (wanted, without) = (options.way.map(code_of), options.without.clone());
            let offer = Offer { wanted, without, absent, ..Offer::of(nics, options.chunk) };
            (Some(nics), Ok(offer))
        }
        Err(error) => (None, Err(error)),
    };
    let offers = gather(rendezvous, offer)?;
    let Some(nics) = nics else { return Err(Error::Internal("an error that was not told".into())) };
    let sides = plan(me, &offers, nics, arena, options);
    let mut sides = all_or_none(rendezvous, sides)?;
    let attempts = sides.iter().map(|s| s.ways.len()).max().unwrap_or(0);
    let attempts = gather(rendezvous, Ok(attempts))?.into_iter().max().unwrap_or(0);
    for attempt in 0..attempts {
        proof::round(rendezvous, nics, &mut sides, &offers, attempt, options.warm_up)?;
        if gather(rendezvous, Ok(sides.iter().all(Side::is_proved)))?.into_iter().all(|all| all) {
            break;
        }
    }
    let dead = dead(rendezvous, nics, &sides, &offers)?;
    let links = match dead.iter().find(|dead| dead.of == me) {
        Some(Dead { refusal, .. }) if options.all_pairs => Err(refusal.clone().into()),
        _ => finish(nics, sides, &offers, options),
    };
    let links = all_or_none(rendezvous, links)?;
    let ports: Vec<&[Port]> = offers.iter().map(|o| o.ports.as_slice()).collect();
    let left_out = |rank: usize| {
        let absent = || [me, rank].into_iter().find_map(|of| Some((of, offers[of].absent.as_ref()?)));
        let (of, why) = if let Some(dead) = dead.iter().find(|dead| dead.peer == rank) {
            (Some(dead.of), dead.refusal.to_string())
        } else if offers[me].without.contains(&rank) || offers[rank].without.contains(&me) {
            (None, "it is reached otherwise".into())
        } else if let Some((of, why)) = absent() {
            (Some(of), why.clone())
        } else {
            let apart = devices::apart(me.min(rank), me.max(rank), &ports, &options.devices);
            (apart.of, format!("{}\n    {}", apart.what, apart.remedy))
        };
        LeftOut { rank, of, why }
    };
    let unjoined = (0..size).filter(|rank| *rank != me && links.iter().all(|link| link.peer != *rank));
    let left_out = unjoined.map(left_out).collect();
    Ok((links, left_out))
}

/// The pairs of this rank of which nothing was proved. Where the device of one end has refused, that is why; the other end
/// has only waited for it.
fn dead(
    rendezvous: &mut dyn Rendezvous,
    nics: &[Nic],
    sides: &[Side],
    offers: &[Offer],
) -> Result<Vec<Dead>> {
    let me = rendezvous.rank();
    let unproved = || sides.iter().filter(|side| !side.is_proved());
    let named = |side: &Side, draft: &Draft| {
        let far = offers[side.peer].ports.get(draft.far).map_or("device", |port| &port.name);
        format!("{} (to rank {}'s {far})", nics[draft.nic].name(), side.peer)
    };
    let refused = |side: &Side| {
        let refused = |d: &Draft| Some(Refusal { device: named(side, d), ..d.refused.clone()? });
        side.drafts.iter().filter(|d| !d.is_proved).find_map(refused)
    };
    let mine: Vec<(usize, Refusal)> = unproved().filter_map(|s| Some((s.peer, refused(s)?))).collect();
    let all = gather(rendezvous, Ok(mine))?;
    let told = |of: usize, peer: usize| {
        let (_, refusal) = all[of].iter().find(|(towards, _)| *towards == peer)?;
        Some((of, refusal.clone()))
    };
    let dead = |side: &Side| {
        let silent = || {
            let device =
                side.drafts.iter().find(|d| !d.is_proved).map_or_else(String::new, |d| named(side, d));
            (me, Refusal { device, step: Step::WarmUp, number: 0 })
        };
        let peer = side.peer;
        let (of, refusal) = told(me, peer).or_else(|| told(peer, me)).unwrap_or_else(silent);
        Dead { peer, of, refusal }
    };
    Ok(unproved().map(dead).collect())
}

/// A step that every rank takes: fails everywhere when it fails anywhere.
fn all_or_none<T>(rendezvous: &mut dyn Rendezvous, mine: Result<T>) -> Result<T> {
    let (mine, told) = match mine {
        Ok(value) => (Some(value), Ok(())),
        Err(error) => (None, Err(error)),
    };
    gather(rendezvous, told)?;
    mine.ok_or_else(|| Error::Internal("a step without a result".into()))
}

impl Offer {
    /// What these devices offer for chunks of so many bytes.
    pub fn of(nics: &[Nic], chunk: usize) -> Self {
        let chunk = chunk.clamp(FRAME, LARGEST_CHUNK) / FRAME * FRAME;
        let ports = nics.iter().map(Port::of).collect();
        Offer { ports, chunk: chunk as u32, wanted: None, without: Vec::new(), absent: None }
    }
}

/// Who is to be joined by which cables, and in which ways that is tried.
fn plan(
    me: usize,
    offers: &[Offer],
    nics: &mut [Nic],
    arena: &Arc<Arena>,
    options: &Options,
) -> Result<Vec<Side>> {
    let chunk = offers.iter().map(|o| o.chunk as usize).min().unwrap_or(FRAME);
    let ports: Vec<&[Port]> = offers.iter().map(|o| o.ports.as_slice()).collect();
    let mut sides = Vec::new();
    for peer in (0..offers.len()).filter(|p| *p != me) {
        if offers[me].without.contains(&peer) || offers[peer].without.contains(&me) {
            continue;
        }
        // The lower rank's view counts, so that both see the same cables in the same order.
        let (low, high) = (me.min(peer), me.max(peer));
        let joined = devices::cables(low, high, &ports, &options.devices);
        if joined.is_empty() {
            let Apart { of, what, remedy } = devices::apart(low, high, &ports, &options.devices);
            // The rank whose fault it is tells.
            if !options.all_pairs || of.is_some_and(|rank| rank != me) {
                continue;
            }
            return Err(Error::Resources { what, remedy });
        }
        let mine = |(a, b): (usize, usize)| if me == low { (a, b) } else { (b, a) };
        let thunderbolt =
            joined.iter().any(|(a, b)| ports[low][*a].is_thunderbolt || ports[high][*b].is_thunderbolt);
        let mut drafts = vec![Draft::new(mine(joined[0]), true)];
        drafts.extend(joined.iter().map(|c| Draft::new(mine(*c), false)));
        let ways = ways(thunderbolt, offers[low].wanted.map(way_of), chunk);
        let mut take = |bytes| arena.grow_whole(bytes, |at, len| register(nics, at, len));
        let slots = take(2 * SLOTS as usize * SLOT)?;
        let scratch = take(2 * drafts.len() * chunk)?;
        sides.push(Side { peer, drafts, ways, made_at: 0, chunk, slots, scratch });
    }
    Ok(sides)
}

/// The ladder of a pair, the best first; the same one several times, for a new queue pair may do what a dead one did not.
fn ways(thunderbolt: bool, wanted: Option<(Service, Mode)>, chunk: usize) -> Vec<Way> {
    use {Mode::*, Service::*};
    let way = |(service, mode), chunk| Way { service, mode, chunk };
    let names = match wanted {
        // Never anything else on these: a WRITE would be taken for a SEND.
        _ if thunderbolt => vec![(Uc, Posted); 3],
        Some(wanted) => vec![wanted; 3],
        None => vec![(Rc, Write), (Rc, Write), (Uc, Write), (Uc, Posted), (Uc, Posted)],
    };
    let mut ways: Vec<Way> = names.into_iter().map(|name| way(name, chunk)).collect();
    if thunderbolt && chunk > FRAME {
        // The first builds of macOS deliver messages of one frame only.
        ways.push(way((Uc, Posted), FRAME));
    }
    ways
}

/// Memory of the arena, which grows when it has to. It may cross a line ([`Arena::take`]).
pub fn take(arena: &Arc<Arena>, nics: &mut [Nic], bytes: usize) -> Result<Arc<Memory>> {
    if let Some(memory) = arena.take(bytes) {
        return Ok(memory);
    }
    arena.grow(bytes, |at, len| register(nics, at, len))?;
    arena.take(bytes).ok_or_else(|| Error::Internal(format!("no {bytes} bytes after growing")))
}

/// Registers a piece of the arena's memory with all devices.
pub fn register(nics: &mut [Nic], at: *mut u8, len: usize) -> Result<()> {
    nics.iter_mut().try_for_each(|nic| {
        // SAFETY: the arena keeps it mapped and outlives the devices (`Engine` holds both, in this order).
        unsafe { nic.register(at, len) }.map_err(Error::from)
    })
}

/// Of the pairs that are proved: posts the control receives and works out the windows.
fn finish(nics: &mut [Nic], sides: Vec<Side>, offers: &[Offer], options: &Options) -> Result<Vec<Link>> {
    let mut pairs = vec![0usize; nics.len()];
    for draft in sides.iter().flat_map(|s| &s.drafts) {
        pairs[draft.nic] += 1;
    }
    let mut links = Vec::new();
    for side in sides {
        if !side.is_proved() {
            // Left out, by its peer too.
            side.drafts.iter().for_each(|d| d.qp.iter().for_each(|(qp, _)| nics[d.nic].destroy_qp(*qp)));
            continue;
        }
        let Way { service, mode, .. } = side.ways[side.made_at];
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
