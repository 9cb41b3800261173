//! One open device with everything made on it, owned in the order in which it must be given back.

mod list;
mod port;
mod queue;

pub use list::{Listed, list};
pub use port::{Gid, GidKind, Port};
pub use queue::{Completion, Granted, Operation, QpId, Remote, Service};

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use self::list::{DeviceList, last_errno, number};
use self::port::{active_port, gids};
use self::queue::Qp;
use super::ffi::Library;
use super::ffi::abi::*;
use super::trouble::{Refusal, Step};

/// Memory is registered in pieces that cross no multiple of this address: Apple's provider encodes 32 bits of
/// an address, so a region across a 4 GiB line would be filled 4 GiB off.
pub const EXTENT: usize = 1 << 30;

/// How many of each thing a device says it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Requests in one queue.
    pub requests: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Entries of one completion queue.
    pub completions: u32,
    /// Registered pieces of memory.
    pub regions: u32,
    /// Protection domains.
    pub domains: u32,
}

struct Mr {
    raw: NonNull<IbvMr>,
    len: usize,
}

/// An open device: its protection domain, completion queue, queue pairs and registered memory.
///
/// Whatever happens, its fields are given back as `Drop` says: queue pairs (never moved to an error state
/// first: then memory could not be unmapped), memory, completion queue, domain, device.
pub struct Nic {
    library: &'static Library,
    listed: Listed,
    port: u8,
    port_attr: IbvPortAttr,
    device_attr: IbvDeviceAttr,
    gids: Vec<Gid>,
    context: NonNull<IbvContext>,
    pd: NonNull<IbvPd>,
    cq: NonNull<IbvCq>,
    /// Completions that the queue holds.
    entries: usize,
    qps: Vec<Option<Qp>>,
    /// By first address.
    mrs: BTreeMap<usize, Mr>,
}

// SAFETY: verbs objects may be used from any thread; `&mut self` keeps it to one at a time.
unsafe impl Send for Nic {}

/// A context that closes itself while the rest is being made.
struct Opening {
    library: &'static Library,
    context: NonNull<IbvContext>,
    pd: Option<NonNull<IbvPd>>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        // SAFETY: made here and handed on to nobody.
        unsafe {
            if let Some(pd) = self.pd {
                (self.library.dealloc_pd)(pd.as_ptr());
            }
            (self.library.close_device)(self.context.as_ptr());
        }
    }
}

/// Whether the port of the device called `name` is active, and its addresses, the preferred first. Costs nothing that a
/// device has few of.
///
/// # Errors
/// When there is no such device, or it cannot be opened.
pub fn look(library: &'static Library, name: &str) -> Result<(bool, Vec<Gid>), Refusal> {
    let refuse = |number| Refusal { device: name.to_owned(), step: Step::Open, number };
    let list = DeviceList::get(library)?;
    let found = list.devices().find(|d| list.describe(*d).name == name);
    let device = found.ok_or_else(|| refuse(libc::ENODEV))?;
    // SAFETY: a device of the list.
    let context = NonNull::new(unsafe { (library.open_device)(device) });
    let context = context.ok_or_else(|| refuse(last_errno()))?;
    let opened = Opening { library, context, pd: None };
    let mut attr = IbvDeviceAttr::zeroed();
    // SAFETY: an open context and room for the answer.
    let rc = unsafe { (library.query_device)(opened.context.as_ptr(), &mut attr) };
    if rc != 0 {
        return Err(refuse(number(rc)));
    }
    Ok(match active_port(library, opened.context, &attr) {
        Ok((port, port_attr)) => (true, gids(library, opened.context, port, &port_attr)),
        Err(_) => (false, Vec::new()),
    })
}

impl Nic {
    /// Opens the device called `name` and makes a completion queue of `entries` on it.
    ///
    /// The port's state is looked at first: on a port that is down Apple's driver opens but fails later without
    /// a reason.
    pub fn open(library: &'static Library, name: &str, entries: usize) -> Result<Nic, Refusal> {
        Nic::open_watched(library, name, entries, &mut |_| {})
    }

    /// As [`Nic::open`]; `watch` is told of each step before it is taken.
    pub fn open_watched(
        library: &'static Library,
        name: &str,
        entries: usize,
        watch: &mut dyn FnMut(Step),
    ) -> Result<Nic, Refusal> {
        let refuse = |step, number| Refusal { device: name.to_owned(), step, number };
        let list = DeviceList::get(library)?;
        let found = list.devices().find(|d| list.describe(*d).name == name);
        let device = found.ok_or_else(|| refuse(Step::Open, libc::ENODEV))?;
        let listed = list.describe(device);
        watch(Step::Open);
        // SAFETY: a device of the list.
        let context = NonNull::new(unsafe { (library.open_device)(device) });
        let context = context.ok_or_else(|| refuse(Step::Open, last_errno()))?;
        let mut opening = Opening { library, context, pd: None };

        let mut device_attr = IbvDeviceAttr::zeroed();
        // SAFETY: an open context and room for the answer.
        let rc = unsafe { (library.query_device)(context.as_ptr(), &mut device_attr) };
        if rc != 0 {
            return Err(refuse(Step::Open, number(rc)));
        }
        watch(Step::Port);
        let (port, port_attr) =
            active_port(library, context, &device_attr).map_err(|state| refuse(Step::Port, state))?;
        let gids = gids(library, context, port, &port_attr);
        if gids.is_empty() && port_attr.lid == 0 {
            return Err(refuse(Step::Address, 0));
        }
        watch(Step::AllocPd);
        // SAFETY: an open context.
        let pd = NonNull::new(unsafe { (library.alloc_pd)(context.as_ptr()) });
        let pd = pd.ok_or_else(|| refuse(Step::AllocPd, last_errno()))?;
        opening.pd = Some(pd);
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX).min(device_attr.max_cqe.max(1));
        let none = std::ptr::null_mut();
        watch(Step::CreateCq);
        // SAFETY: an open context; no channel, no cookie.
        let cq = NonNull::new(unsafe { (library.create_cq)(context.as_ptr(), entries, none, none, 0) });
        let cq = cq.ok_or_else(|| refuse(Step::CreateCq, last_errno()))?;
        std::mem::forget(opening); // complete
        Ok(Nic {
            library,
            listed,
            port,
            port_attr,
            device_attr,
            gids,
            context,
            pd,
            cq,
            entries: entries as usize,
            qps: Vec::new(),
            mrs: BTreeMap::new(),
        })
    }

    /// The device.
    pub fn listed(&self) -> &Listed {
        &self.listed
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.listed.name
    }

    /// How many of each thing it says it has.
    pub fn limits(&self) -> Limits {
        let of = |n: c_int| u32::try_from(n).unwrap_or(0);
        let a = &self.device_attr;
        Limits {
            queue_pairs: of(a.max_qp),
            requests: of(a.max_qp_wr),
            completion_queues: of(a.max_cq),
            completions: of(a.max_cqe),
            regions: of(a.max_mr),
            domains: of(a.max_pd),
        }
    }

    /// Its port.
    pub fn port(&self) -> Port {
        let a = &self.port_attr;
        Port {
            number: self.port,
            lid: a.lid,
            mtu: a.active_mtu.clamp(0, 5) as u8,
            width: a.active_width,
            speed: a.active_speed,
            largest_message: a.max_msg_sz,
        }
    }

    /// Addresses of its port, the preferred first.
    pub fn gids(&self) -> &[Gid] {
        &self.gids
    }

    fn refuse(&self, step: Step, number: i32) -> Refusal {
        Refusal { device: self.listed.name.clone(), step, number }
    }

    /// Registers `len` bytes at `at`, in one piece that crosses no [`EXTENT`] line.
    ///
    /// # Safety
    /// They must stay mapped as long as this device is open.
    pub unsafe fn register(&mut self, at: *mut u8, len: usize) -> Result<(), Refusal> {
        let first = at as usize;
        assert!(
            len > 0 && first / EXTENT == (first + len - 1) / EXTENT,
            "{len} bytes at {first:#x} cross a line"
        );
        // With remote access first, for some builds reject local access alone; others reject remote access.
        let all = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
        for access in [all, ACCESS_LOCAL_WRITE] {
            // SAFETY: mapped memory, by the caller's promise; the domain is ours.
            let raw = unsafe { (self.library.reg_mr)(self.pd.as_ptr(), at.cast(), len, access) };
            if let Some(raw) = NonNull::new(raw) {
                self.mrs.insert(first, Mr { raw, len });
                return Ok(());
            }
        }
        Err(self.refuse(Step::Register, last_errno()))
    }

    /// Local and remote key of a range that lies in one registered piece.
    pub fn keys(&self, at: usize, len: usize) -> Option<(u32, u32)> {
        let (first, mr) = self.mrs.range(..=at).next_back()?;
        if at + len > first + mr.len {
            return None;
        }
        // SAFETY: registered and not given back.
        let raw = unsafe { mr.raw.as_ref() };
        Some((raw.lkey, raw.rkey))
    }

    /// How many pieces of memory are registered.
    pub fn regions(&self) -> usize {
        self.mrs.len()
    }

    /// Whether the port is still active.
    pub fn is_port_active(&self) -> bool {
        let mut attr = IbvPortAttr::zeroed();
        // SAFETY: our context and room for the answer.
        let rc = unsafe { (self.library.query_port)(self.context.as_ptr(), self.port, &mut attr) };
        rc == 0 && attr.state == PORT_ACTIVE
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        for i in 0..self.qps.len() {
            self.destroy_qp(QpId(i));
        }
        // SAFETY: all of it is ours, and given back in the one order in which drivers take it.
        unsafe {
            while let Some((_, mr)) = self.mrs.pop_first() {
                (self.library.dereg_mr)(mr.raw.as_ptr());
            }
            (self.library.destroy_cq)(self.cq.as_ptr());
            (self.library.dealloc_pd)(self.pd.as_ptr());
            (self.library.close_device)(self.context.as_ptr());
        }
    }
}
