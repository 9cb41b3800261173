//! What a device really does, found by trying: what it says and what it does differ, and both change with the system's
//! builds.
//!
//! Each step is told before it is taken and after, so that whoever watches the process knows in which a driver got stuck or
//! crashed. [`local`] asks this host alone; [`pair`] two of them, at both ends of a cable.

mod pair;
mod stream;

pub use super::devices::{Port, cables};
pub use pair::{Known, Pair, Writes, pair};

use serde::{Deserialize, Serialize};

use super::ffi::Library;
use super::nic::{self, Granted, Limits, Nic, Service};
use super::trouble::{Refusal, Step};
use crate::fabric::mem::pages::Pages;

/// One step: told when it begins (`outcome` is `None`), and again when it is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Note {
    /// What is asked.
    pub step: Step,
    /// Which one of its kind: a number of requests, of bytes, of messages.
    pub number: u64,
    /// How it ended.
    pub outcome: Option<Outcome>,
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Outcome {
    /// Well.
    Done,
    /// With this number: an error's, a port's state, a completion's status.
    Refused(i32),
    /// With nothing: what was to come did not.
    Silent,
    /// What came is still zeros.
    Zeros,
    /// Something else came.
    Garbage,
    /// Not at all, for the other end has given up or is gone.
    Left,
}

/// Who is told.
pub type Tell<'a> = dyn FnMut(Note) + 'a;

/// What a device is and grants.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Local {
    /// How many of each thing it says it has.
    pub limits: Limits,
    /// Its port.
    pub port: nic::Port,
    /// Bytes registered in one piece.
    pub registered: usize,
    /// Requests (or frames) asked of a queue pair, and what it was granted.
    pub granted: Vec<(u32, Granted)>,
    /// Whether it has reliable connections.
    pub reliable: bool,
}

/// Depths that are asked for.
const DEPTHS: [u32; 3] = [4095, 1023, 256];
/// Memory is registered in pieces of these sizes, the last that is granted counts.
const PIECES: [usize; 3] = [1 << 20, 16 << 20, 128 << 20];
/// Entries of the completion queue.
const ENTRIES: usize = 4096;

/// Takes a step, and tells of it.
fn step<T>(
    tell: &mut Tell<'_>,
    step: Step,
    number: u64,
    take: impl FnOnce() -> Result<T, Refusal>,
) -> Result<T, Refusal> {
    tell(Note { step, number, outcome: None });
    let result = take();
    let note = match &result {
        Ok(_) => Note { step, number, outcome: Some(Outcome::Done) },
        // A step may consist of several: the refused one counts.
        Err(refusal) => Note { step: refusal.step, number, outcome: Some(Outcome::Refused(refusal.number)) },
    };
    tell(note);
    result
}

/// Opens a device, step by step.
fn open(library: &'static Library, device: &str, tell: &mut Tell<'_>) -> Result<Nic, Refusal> {
    let mut last = None;
    let opened = Nic::open_watched(library, device, ENTRIES, &mut |step| {
        if let Some(step) = last.replace(step) {
            tell(Note { step, number: 1, outcome: Some(Outcome::Done) });
        }
        tell(Note { step, number: 1, outcome: None });
    });
    let outcome = match &opened {
        Ok(_) => Outcome::Done,
        Err(refusal) => Outcome::Refused(refusal.number),
    };
    let step = opened.as_ref().err().map(|refusal| refusal.step).or(last);
    tell(Note { step: step.unwrap_or(Step::Open), number: 1, outcome: Some(outcome) });
    opened
}

/// What a device is and grants. What it holds is given back before this returns.
///
/// # Errors
/// The first refusal that leaves nothing to try; it has been told too.
pub fn local(library: &'static Library, device: &str, tell: &mut Tell<'_>) -> Result<Local, Refusal> {
    // What is registered stays mapped until the device is closed: declared first, it goes last, on every path.
    let mut kept = Vec::new();
    let mut nic = open(library, device, tell)?;
    let mut registered = 0;
    for (number, bytes) in PIECES.into_iter().enumerate() {
        let Ok(pages) = Pages::new(bytes) else { break };
        let at = pages.as_ptr();
        kept.push(pages);
        // A piece crosses no 1 GiB line: the larger part before or behind one.
        let before = bytes.min(super::nic::EXTENT - at as usize % super::nic::EXTENT);
        let (skip, len) = if 2 * before >= bytes { (0, before) } else { (before, bytes - before) };
        let at = at.wrapping_add(skip);
        // SAFETY: mapped until `kept` goes, which was declared before the device and so goes after it.
        let done = step(tell, Step::Register, number as u64 + 1, || unsafe { nic.register(at, len) });
        match done {
            Ok(()) => registered = registered.max(len),
            Err(refusal) if registered == 0 => return Err(refusal),
            Err(_) => break,
        }
    }
    let mut granted = Vec::new();
    let mut refused = None;
    let most = nic.limits().requests;
    for depth in DEPTHS.into_iter().filter(|depth| *depth <= most) {
        let asked = Granted { send: depth, receive: depth };
        let made = step(tell, Step::CreateQp, depth.into(), || nic.create_qp(Service::Uc, asked));
        match made {
            Ok((qp, got)) => {
                granted.push((depth, got));
                nic.destroy_qp(qp);
            }
            // What is known is no matter of the depth, and asking again may cost a queue each time.
            Err(refusal) if refusal.trouble().is_some() => return Err(refusal),
            Err(refusal) => refused = Some(refusal),
        }
    }
    if let (true, Some(refusal)) = (granted.is_empty(), refused) {
        return Err(refusal);
    }
    // Apple's devices are not asked for what they are known not to have: each refusal may cost a domain.
    let mut reliable = false;
    if !nic.listed().is_thunderbolt() {
        let asked = Granted { send: 64, receive: 64 };
        let made = step(tell, Step::CreateRc, 64, || nic.create_qp(Service::Rc, asked));
        reliable = made.map(|(qp, _)| nic.destroy_qp(qp)).is_ok();
    }
    Ok(Local { limits: nic.limits(), port: nic.port(), registered, granted, reliable })
}
