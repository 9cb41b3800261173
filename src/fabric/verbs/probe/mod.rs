//! What a device really does, found by trying: what it says and what it does differ, and both change with the system's
//! builds.
//!
//! Each step is told before it is taken and after, so that whoever watches the process knows in which a driver got stuck or
//! crashed. [`local`] asks this host alone; [`pair`] two of them, at both ends of a cable.

mod pair;
mod stream;

pub use super::devices::{Port, cables};
pub use pair::{Known, LARGEST, Pair, Writes, pair};

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
    /// With this error number, where that is an answer and no failure: less was granted before or is asked next, or there
    /// is no such thing.
    Answered(i32),
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
    /// Bytes of a larger piece that was refused; 0: none was.
    pub refused: usize,
    /// Requests (or frames) asked of a queue pair, and what it was granted.
    pub granted: Vec<(u32, Granted)>,
    /// Whether it has reliable connections.
    pub reliable: bool,
    /// Whether it has unreliable ones; without, `granted` is of reliable ones.
    pub unreliable: bool,
}

impl Local {
    /// Whether it has granted all that it was asked for, so that it will grant no more another day.
    pub fn is_whole(&self) -> bool {
        self.refused == 0
            && self.registered >= PIECES[PIECES.len() - 1] / 2
            && self.granted.len() == asked(self.limits.requests).len()
    }
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
    attempt(tell, step, number, |_| false, take)
}

/// As [`step`]; a refusal of which `is_answer` says so is no failure.
fn attempt<T>(
    tell: &mut Tell<'_>,
    step: Step,
    number: u64,
    is_answer: impl FnOnce(&Refusal) -> bool,
    take: impl FnOnce() -> Result<T, Refusal>,
) -> Result<T, Refusal> {
    tell(Note { step, number, outcome: None });
    let result = take();
    let (step, outcome) = match &result {
        Ok(_) => (step, Outcome::Done),
        Err(refusal) if is_answer(refusal) => (step, Outcome::Answered(refusal.number)),
        // A step may consist of several: the refused one counts.
        Err(refusal) => (refusal.step, Outcome::Refused(refusal.number)),
    };
    tell(Note { step, number, outcome: Some(outcome) });
    result
}

/// Depths that are asked for of a device that says it holds so many.
fn asked(most: u32) -> Vec<u32> {
    let depths: Vec<u32> = DEPTHS.into_iter().filter(|depth| *depth <= most).collect();
    if depths.is_empty() { vec![most.max(1)] } else { depths }
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

/// Opens a device and closes it again: what costs little, and shows whether it still has what every program needs.
///
/// # Errors
/// What was refused; it has been told too.
pub fn opens(library: &'static Library, device: &str, tell: &mut Tell<'_>) -> Result<(), Refusal> {
    open(library, device, tell).map(drop)
}

/// What a device is and grants. What it holds is given back before this returns, which is at the end of a step once
/// `goes_on` says no.
///
/// # Errors
/// The first refusal that leaves nothing to try; it has been told too. `EINTR` is of a step that was not taken any more.
pub fn local(
    library: &'static Library,
    device: &str,
    goes_on: &dyn Fn() -> bool,
    tell: &mut Tell<'_>,
) -> Result<Local, Refusal> {
    let refuse = |step, number| Refusal { device: device.to_owned(), step, number };
    let may = |step| if goes_on() { Ok(()) } else { Err(refuse(step, libc::EINTR)) };
    // What is registered stays mapped until the device is closed: declared first, it goes last, on every path.
    let mut kept = Vec::new();
    let mut nic = open(library, device, tell)?;
    let (mut registered, mut refused) = (0, 0);
    for (number, bytes) in PIECES.into_iter().enumerate() {
        may(Step::Register)?;
        let Ok(pages) = Pages::new(bytes) else { break };
        let at = pages.as_ptr();
        kept.push(pages);
        // A piece crosses no 1 GiB line: the larger part before or behind one.
        let before = bytes.min(super::nic::EXTENT - at as usize % super::nic::EXTENT);
        let (skip, len) = if 2 * before >= bytes { (0, before) } else { (before, bytes - before) };
        let at = at.wrapping_add(skip);
        let is_answer = |_: &Refusal| registered > 0;
        let done = attempt(tell, Step::Register, number as u64 + 1, is_answer, || {
            // SAFETY: mapped until `kept` goes, which was declared before the device and so goes after it.
            unsafe { nic.register(at, len) }
        });
        match done {
            Ok(()) => registered = registered.max(len),
            Err(refusal) if registered == 0 => return Err(refusal),
            Err(_) => {
                refused = len;
                break;
            }
        }
    }
    let mut granted = depths(&mut nic, Service::Uc, &may, tell)?;
    let unreliable = !granted.is_empty();
    let mut reliable = false;
    // Apple's devices are not asked for what they are known not to have: each refusal may cost a domain.
    if !nic.listed().is_thunderbolt() {
        if unreliable {
            may(Step::CreateRc)?;
            let asked = Granted { send: 64, receive: 64 };
            let made = attempt(tell, Step::CreateRc, 64, |_| true, || nic.create_qp(Service::Rc, asked));
            reliable = made.map(|(qp, _)| nic.destroy_qp(qp)).is_ok();
        } else {
            granted = depths(&mut nic, Service::Rc, &may, tell)?;
            reliable = !granted.is_empty();
        }
    }
    if granted.is_empty() {
        let neither = refuse(Step::CreateQp, libc::EOPNOTSUPP);
        return step(tell, Step::CreateQp, 0, || Err(neither));
    }
    Ok(Local { limits: nic.limits(), port: nic.port(), registered, refused, granted, reliable, unreliable })
}

/// What queue pairs of a kind are granted, for each depth that they are; nothing: the device has none of this kind.
fn depths(
    nic: &mut Nic,
    service: Service,
    may: &dyn Fn(Step) -> Result<(), Refusal>,
    tell: &mut Tell<'_>,
) -> Result<Vec<(u32, Granted)>, Refusal> {
    let is_thunderbolt = nic.listed().is_thunderbolt();
    let all = asked(nic.limits().requests);
    let mut granted = Vec::new();
    for (i, &depth) in all.iter().enumerate() {
        may(service.step())?;
        let wish = Granted { send: depth, receive: depth };
        let is_last = i + 1 == all.len() && granted.is_empty();
        let ends_all = |refusal: &Refusal| match is_thunderbolt {
            // What is known is no matter of the depth, and asking again may cost a queue each time.
            true => is_last || refusal.trouble().is_some(),
            false => is_last && !refusal.is_no_such_kind(),
        };
        let is_answer = |refusal: &Refusal| !ends_all(refusal);
        let made = attempt(tell, service.step(), depth.into(), is_answer, || nic.create_qp(service, wish));
        match made {
            Ok((qp, got)) => {
                granted.push((depth, got));
                nic.destroy_qp(qp);
            }
            Err(refusal) if ends_all(&refusal) => return Err(refusal),
            Err(refusal) if refusal.is_no_such_kind() => return Ok(Vec::new()),
            Err(_) => {}
        }
    }
    Ok(granted)
}
