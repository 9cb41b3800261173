//! One open device with everything made on it, owned in the order in which it must be given back.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

use super::ffi::Library;
use super::ffi::abi::*;
use super::trouble::{Refusal, Step};

/// Memory is registered in pieces that cross no multiple of this address: Apple's provider encodes 32 bits of
/// an address, so a region across a 4 GiB line would be filled 4 GiB off.
pub const EXTENT: usize = 1 << 30;

/// What kind of connection a queue pair is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// Reliable: the device repeats what was lost and reports what cannot be delivered.
    Rc,
    /// Unreliable: what is lost is lost without a word.
    Uc,
}

/// A device that the library lists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name: `mlx5_0`, `rdma_en3`.
    pub name: String,
    /// Its transport's number: 0 InfiniBand and RoCE, 1 iWARP, 100 Thunderbolt.
    pub transport: i32,
}

impl Listed {
    /// Whether it is one of Apple's Thunderbolt devices, which only send into posted receives and must not be
    /// asked for anything else: a WRITE is taken for a SEND there.
    pub fn is_thunderbolt(&self) -> bool {
        self.transport == TRANSPORT_THUNDERBOLT || self.name.starts_with("rdma_en")
    }
}

/// The devices of this machine.
///
/// # Errors
/// When the library cannot say.
pub fn list(library: &'static Library) -> Result<Vec<Listed>, Refusal> {
    DeviceList::get(library).map(|list| list.devices().map(|d| list.describe(d)).collect())
}

struct DeviceList {
    library: &'static Library,
    first: NonNull<*mut IbvDevice>,
    count: usize,
}

impl DeviceList {
    fn get(library: &'static Library) -> Result<Self, Refusal> {
        let mut count: c_int = 0;
        // SAFETY: writes the count; the result is checked.
        let first = unsafe { (library.get_device_list)(&mut count) };
        let Some(first) = NonNull::new(first) else {
            return Err(Refusal { device: library.name.clone(), step: Step::List, number: last_errno() });
        };
        Ok(DeviceList { library, first, count: count.max(0) as usize })
    }

    fn devices(&self) -> impl Iterator<Item = *mut IbvDevice> {
        // SAFETY: the library returned an array of `count` pointers that lives until it is freed.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }.iter().copied()
    }

    fn describe(&self, device: *mut IbvDevice) -> Listed {
        // SAFETY: a device of the list; its name is a C string that lives as long.
        unsafe {
            let name = (self.library.get_device_name)(device);
            let name = if name.is_null() {
                String::new()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            };
            Listed { name, transport: (*device).transport_type }
        }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: from `get_device_list`, freed once. Open contexts do not need it.
        unsafe { (self.library.free_device_list)(self.first.as_ptr()) };
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The error number of a verb's result: some providers return it, some negate it, some set errno.
fn number(rc: c_int) -> i32 {
    if rc == -1 { last_errno() } else { rc.abs() }
}

/// Which of a port's addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum GidKind {
    /// `::ffff:a.b.c.d`: the interface's IPv4 address.
    Ipv4,
    /// `fe80::…`.
    LinkLocal,
    /// Anything else.
    Other,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid {
    /// What kind of address.
    pub kind: GidKind,
    /// Its place in the port's table.
    pub index: u8,
    /// The address.
    pub raw: [u8; 16],
}

fn kind_of(raw: [u8; 16]) -> Option<GidKind> {
    match raw {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, a, b, c, d] => {
            ([a, b, c, d] != [0; 4]).then_some(GidKind::Ipv4)
        }
        _ if raw == [0; 16] => None,
        [0xFE, 0x80, ..] => Some(GidKind::LinkLocal),
        _ => Some(GidKind::Other),
    }
}

/// What the other end of a queue pair is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Queue pair number.
    pub qpn: u32,
    /// Packet sequence number that it starts with.
    pub psn: u32,
    /// Local identifier of its port (InfiniBand).
    pub lid: u16,
    /// Address of its port.
    pub gid: [u8; 16],
    /// The largest packet of its port, as verbs number it.
    pub mtu: u8,
}

/// How many of each thing a device says it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

/// An active port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// Local identifier (InfiniBand), else 0.
    pub lid: u16,
    /// Largest packet, as verbs number it: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Lanes, as verbs number them.
    pub width: u8,
    /// Speed of a lane, as verbs number it.
    pub speed: u8,
    /// Largest message in bytes.
    pub largest_message: u32,
}

/// A queue pair of a [`Nic`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpId(usize);

/// What the device granted a queue pair: work requests, or 4 KiB frames on devices that count those.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    /// Sends under way.
    pub send: u32,
    /// Receives posted.
    pub receive: u32,
}

/// What came out of the completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Completion {
    /// As posted.
    pub id: u64,
    /// 0: done.
    pub status: i32,
    /// Bytes received.
    pub bytes: u32,
    /// Immediate data of a write.
    pub immediate: u32,
}

/// What a send does at the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Fills the receive posted for it.
    Send,
    /// Fills memory at an address, and completes a receive with the immediate data.
    WriteWithImmediate {
        /// Where.
        address: u64,
        /// The key of that memory.
        key: u32,
        /// What the receive's completion tells.
        immediate: u32,
    },
}

struct Qp {
    raw: NonNull<IbvQp>,
    service: Service,
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

impl Nic {
    /// Opens the device called `name` and makes a completion queue of `entries` on it.
    ///
    /// The port's state is looked at first: on a port that is down Apple's driver opens but fails later without
    /// a reason.
    pub fn open(library: &'static Library, name: &str, entries: usize) -> Result<Nic, Refusal> {
        let refuse = |step, number| Refusal { device: name.to_owned(), step, number };
        let list = DeviceList::get(library)?;
        let found = list.devices().find(|d| list.describe(*d).name == name);
        let device = found.ok_or_else(|| refuse(Step::Open, libc::ENODEV))?;
        let listed = list.describe(device);
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
        let (port, port_attr) =
            active_port(library, context, &device_attr).map_err(|state| refuse(Step::Port, state))?;
        let gids = gids(library, context, port, &port_attr);
        if gids.is_empty() && port_attr.lid == 0 {
            return Err(refuse(Step::Address, 0));
        }
        // SAFETY: an open context.
        let pd = NonNull::new(unsafe { (library.alloc_pd)(context.as_ptr()) });
        let pd = pd.ok_or_else(|| refuse(Step::AllocPd, last_errno()))?;
        opening.pd = Some(pd);
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX).min(device_attr.max_cqe.max(1));
        let none = std::ptr::null_mut();
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

    /// A queue pair for so many sends and receives, in state INIT, and what it was granted.
    pub fn create_qp(&mut self, service: Service, depth: Granted) -> Result<(QpId, Granted), Refusal> {
        let mut init = IbvQpInitAttr::zeroed();
        init.send_cq = self.cq.as_ptr();
        init.recv_cq = self.cq.as_ptr();
        init.qp_type = if service == Service::Rc { QPT_RC } else { QPT_UC };
        init.sq_sig_all = 1;
        init.cap.max_send_wr = depth.send;
        init.cap.max_recv_wr = depth.receive;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        // SAFETY: our domain and completion queue; the struct is whole.
        let raw = NonNull::new(unsafe { (self.library.create_qp)(self.pd.as_ptr(), &mut init) });
        let raw = raw.ok_or_else(|| self.refuse(Step::CreateQp, last_errno()))?;
        let id = QpId(self.qps.iter().position(Option::is_none).unwrap_or(self.qps.len()));
        if id.0 == self.qps.len() {
            self.qps.push(None);
        }
        self.qps[id.0] = Some(Qp { raw, service });

        let mut attr = IbvQpAttr::zeroed();
        attr.qp_state = QPS_INIT;
        attr.port_num = self.port;
        attr.qp_access_flags = (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ) as u32;
        let mask = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
        if let Err(refusal) = self.modify(id, attr, mask, Step::Init) {
            self.destroy_qp(id);
            return Err(refusal);
        }
        Ok((id, self.granted(id).unwrap_or(depth)))
    }

    /// What the device says that it granted; `None` when it does not say.
    fn granted(&self, id: QpId) -> Option<Granted> {
        let (mut attr, mut init) = (IbvQpAttr::zeroed(), IbvQpInitAttr::zeroed());
        let raw = self.qp(id)?.raw.as_ptr();
        // SAFETY: our queue pair, and room for the answers.
        let rc = unsafe { (self.library.query_qp)(raw, &mut attr, QP_CAP, &mut init) };
        let granted = Granted { send: attr.cap.max_send_wr, receive: attr.cap.max_recv_wr };
        (rc == 0 && granted.send > 0 && granted.receive > 0).then_some(granted)
    }

    fn qp(&self, id: QpId) -> Option<&Qp> {
        self.qps.get(id.0)?.as_ref()
    }

    /// A queue pair's number.
    pub fn number_of(&self, id: QpId) -> u32 {
        // SAFETY: made by the library, not yet destroyed.
        self.qp(id).map_or(0, |qp| unsafe { qp.raw.as_ref() }.qp_num)
    }

    /// Connects a queue pair to its other end; `gid` is this end's address, `psn` this end's first number.
    pub fn connect(&mut self, id: QpId, gid: Option<Gid>, psn: u32, remote: &Remote) -> Result<(), Refusal> {
        let Some(service) = self.qp(id).map(|qp| qp.service) else {
            return Err(self.refuse(Step::ReadyToReceive, libc::EINVAL));
        };
        let mut attr = IbvQpAttr::zeroed();
        attr.qp_state = QPS_RTR;
        attr.path_mtu = self.port_attr.active_mtu.min(remote.mtu.into()).clamp(1, 5);
        attr.dest_qp_num = remote.qpn;
        attr.rq_psn = remote.psn;
        attr.ah_attr.dlid = remote.lid;
        attr.ah_attr.port_num = self.port;
        if let Some(gid) = gid {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.dgid = IbvGid { raw: remote.gid };
            attr.ah_attr.sgid_index = gid.index;
            // Behind an Ethernet switch a packet may be routed; a cable needs one hop.
            attr.ah_attr.hop_limit = if self.listed.is_thunderbolt() { 1 } else { 64 };
        }
        let mut mask = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
        if service == Service::Rc {
            attr.max_dest_rd_atomic = 1;
            attr.min_rnr_timer = 12; // 0.64 ms
            mask |= QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
        }
        self.modify(id, attr, mask, Step::ReadyToReceive)?;

        let mut attr = IbvQpAttr::zeroed();
        attr.qp_state = QPS_RTS;
        attr.sq_psn = psn;
        let mut mask = QP_STATE | QP_SQ_PSN;
        if service == Service::Rc {
            attr.timeout = 14; // 67 ms, seven times: a lost peer is told in about half a second
            attr.retry_cnt = 7;
            attr.rnr_retry = 7; // without end: a receive is always posted before its send
            attr.max_rd_atomic = 1;
            mask |= QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC;
        }
        self.modify(id, attr, mask, Step::ReadyToSend)
    }

    fn modify(&mut self, id: QpId, mut attr: IbvQpAttr, mask: c_int, step: Step) -> Result<(), Refusal> {
        let Some(qp) = self.qp(id) else { return Err(self.refuse(step, libc::EINVAL)) };
        // SAFETY: our queue pair; the struct is whole.
        let rc = unsafe { (self.library.modify_qp)(qp.raw.as_ptr(), &mut attr, mask) };
        if rc == 0 { Ok(()) } else { Err(self.refuse(step, number(rc))) }
    }

    /// Destroys a queue pair, with what is posted on it.
    pub fn destroy_qp(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id.0).and_then(Option::take) {
            // SAFETY: ours, and nobody knows it any more.
            unsafe { (self.library.destroy_qp)(qp.raw.as_ptr()) };
        }
    }

    /// How many queue pairs there are.
    pub fn qps(&self) -> usize {
        self.qps.iter().flatten().count()
    }

    /// How many completions may be outstanding.
    pub fn completions(&self) -> usize {
        self.entries
    }

    /// How many pieces of memory are registered.
    pub fn regions(&self) -> usize {
        self.mrs.len()
    }

    /// Posts a receive into `len` registered bytes at `at`; none: for a write with immediate data.
    ///
    /// # Safety
    /// Until the completion, or until the queue pair is destroyed, the bytes must stay mapped and nobody may
    /// touch them.
    pub unsafe fn post_receive(
        &mut self,
        id: QpId,
        wr_id: u64,
        at: usize,
        len: usize,
    ) -> Result<(), Refusal> {
        let refused = |number| Refusal { device: self.listed.name.clone(), step: Step::PostReceive, number };
        let qp = self.qp(id).ok_or_else(|| refused(libc::EINVAL))?;
        let mut sge = self.sge(at, len).ok_or_else(|| refused(libc::EFAULT))?;
        let mut wr = IbvRecvWr::zeroed();
        wr.wr_id = wr_id;
        if len > 0 {
            wr.sg_list = &mut sge;
            wr.num_sge = 1;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the context's table holds the provider's functions; request and list live over the call,
        // which copies them; the memory is promised by the caller.
        let rc = unsafe {
            match self.context.as_ref().ops.post_recv {
                Some(post) => post(qp.raw.as_ptr(), &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        };
        if rc == 0 { Ok(()) } else { Err(refused(number(rc))) }
    }

    /// Posts a send of `len` registered bytes at `at`.
    ///
    /// # Safety
    /// Until the completion, or until the queue pair is destroyed, the bytes must stay mapped and nobody may
    /// write them; of a write, the address and key must be what the peer gave for it.
    pub unsafe fn post_send(
        &mut self,
        id: QpId,
        wr_id: u64,
        operation: Operation,
        at: usize,
        len: usize,
    ) -> Result<(), Refusal> {
        let refused = |number| Refusal { device: self.listed.name.clone(), step: Step::PostSend, number };
        let qp = self.qp(id).ok_or_else(|| refused(libc::EINVAL))?;
        let mut sge = self.sge(at, len).ok_or_else(|| refused(libc::EFAULT))?;
        let mut wr = IbvSendWr::zeroed();
        wr.wr_id = wr_id;
        wr.sg_list = &mut sge;
        wr.num_sge = 1;
        wr.send_flags = SEND_SIGNALED;
        match operation {
            Operation::Send => wr.opcode = WR_SEND,
            Operation::WriteWithImmediate { address, key, immediate } => {
                wr.opcode = WR_RDMA_WRITE_WITH_IMM;
                wr.imm_data = immediate.to_be();
                wr.remote_addr = address;
                wr.rkey = key;
            }
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_receive`.
        let rc = unsafe {
            match self.context.as_ref().ops.post_send {
                Some(post) => post(qp.raw.as_ptr(), &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        };
        if rc == 0 { Ok(()) } else { Err(refused(number(rc))) }
    }

    fn sge(&self, at: usize, len: usize) -> Option<IbvSge> {
        if len == 0 {
            return Some(IbvSge { addr: 0, length: 0, lkey: 0 });
        }
        let (lkey, _) = self.keys(at, len)?;
        Some(IbvSge { addr: at as u64, length: u32::try_from(len).ok()?, lkey })
    }

    /// Takes completions out of the queue; returns how many.
    pub fn poll(&mut self, into: &mut [Completion; 32]) -> Result<usize, Refusal> {
        let mut wcs = [IbvWc::zeroed(); 32];
        // SAFETY: our completion queue, and room for 32.
        let n = unsafe {
            match self.context.as_ref().ops.poll_cq {
                Some(poll) => poll(self.cq.as_ptr(), 32, wcs.as_mut_ptr()),
                None => -libc::ENOSYS,
            }
        };
        let Ok(n) = usize::try_from(n) else { return Err(self.refuse(Step::Poll, number(n))) };
        let n = n.min(32);
        for (to, wc) in into.iter_mut().zip(&wcs[..n]) {
            *to = Completion {
                id: wc.wr_id,
                status: wc.status,
                bytes: wc.byte_len,
                immediate: u32::from_be(wc.imm_data),
            };
        }
        Ok(n)
    }

    /// Whether the port is still active.
    pub fn is_port_active(&self) -> bool {
        let mut attr = IbvPortAttr::zeroed();
        // SAFETY: our context and room for the answer.
        let rc = unsafe { (self.library.query_port)(self.context.as_ptr(), self.port, &mut attr) };
        rc == 0 && attr.state == PORT_ACTIVE
    }
}

/// The first active port; else the state of the last one (0: none answered).
fn active_port(
    library: &Library,
    context: NonNull<IbvContext>,
    device: &IbvDeviceAttr,
) -> Result<(u8, IbvPortAttr), i32> {
    let mut state = 0;
    for port in 1..=device.phys_port_cnt.max(1) {
        let mut attr = IbvPortAttr::zeroed();
        // SAFETY: an open context and room for the answer.
        let rc = unsafe { (library.query_port)(context.as_ptr(), port, &mut attr) };
        if rc == 0 && attr.state == PORT_ACTIVE {
            return Ok((port, attr));
        }
        state = if rc == 0 { attr.state } else { number(rc) };
    }
    Err(state)
}

/// A port's addresses: IPv4 before link-local before others. Of one address the later entry wins (on Ethernet
/// the later one is the routable version 2).
fn gids(library: &Library, context: NonNull<IbvContext>, port: u8, attr: &IbvPortAttr) -> Vec<Gid> {
    let mut found: Vec<Gid> = Vec::new();
    for index in 0..attr.gid_tbl_len.clamp(0, 255) {
        let mut gid = IbvGid::zeroed();
        // SAFETY: an open context and room for the answer.
        let rc = unsafe { (library.query_gid)(context.as_ptr(), port, index, &mut gid) };
        let Some(kind) = kind_of(gid.raw).filter(|_| rc == 0) else { continue };
        found.retain(|g| g.raw != gid.raw);
        found.push(Gid { kind, index: index as u8, raw: gid.raw });
    }
    found.sort_by_key(|g| g.kind);
    found
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_by_kind() {
        let v4 = |d| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, d];
        assert_eq!(kind_of(v4(1)), Some(GidKind::Ipv4));
        assert_eq!(kind_of([0; 16]), None);
        assert_eq!(kind_of([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0, 0, 0, 0]), None);
        let mut raw = [0u8; 16];
        raw[..2].copy_from_slice(&[0xFE, 0x80]);
        raw[15] = 1;
        assert_eq!(kind_of(raw), Some(GidKind::LinkLocal));
        assert!(GidKind::Ipv4 < GidKind::LinkLocal && GidKind::LinkLocal < GidKind::Other);
    }

    #[test]
    fn error_numbers_are_positive() {
        assert_eq!((number(12), number(-12)), (12, 12));
    }

    #[test]
    fn apples_devices_by_name_or_transport() {
        let listed = |name: &str, transport| Listed { name: name.into(), transport };
        assert!(listed("rdma_en5", 0).is_thunderbolt() && listed("x", 100).is_thunderbolt());
        assert!(!listed("mlx5_0", 0).is_thunderbolt());
    }
}
