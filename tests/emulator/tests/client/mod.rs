//! A small program over the C ABI: what the tests need of libibverbs, loaded from a world's library.
#![allow(dead_code)] // each test uses a part

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

use fulmen_emu_verbs::Installed;
use fulmen_emu_verbs::abi::*;

type Symbol<T> = libloading::os::unix::Symbol<T>;

/// The functions, by name.
pub struct Verbs {
    _library: libloading::os::unix::Library,
    list: Symbol<unsafe extern "C" fn(*mut c_int) -> *mut *mut Device>,
    free: Symbol<unsafe extern "C" fn(*mut *mut Device)>,
    name: Symbol<unsafe extern "C" fn(*mut Device) -> *const c_char>,
    open: Symbol<unsafe extern "C" fn(*mut Device) -> *mut Context>,
    close: Symbol<unsafe extern "C" fn(*mut Context) -> c_int>,
    query_device: Symbol<unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int>,
    query_port: Symbol<unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int>,
    query_gid: Symbol<unsafe extern "C" fn(*mut Context, u8, c_int, *mut Gid) -> c_int>,
    alloc_pd: Symbol<unsafe extern "C" fn(*mut Context) -> *mut Pd>,
    dealloc_pd: Symbol<unsafe extern "C" fn(*mut Pd) -> c_int>,
    reg_mr: Symbol<unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr>,
    dereg_mr: Symbol<unsafe extern "C" fn(*mut Mr) -> c_int>,
    create_cq: Symbol<unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq>,
    destroy_cq: Symbol<unsafe extern "C" fn(*mut Cq) -> c_int>,
    create_qp: Symbol<unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp>,
    destroy_qp: Symbol<unsafe extern "C" fn(*mut Qp) -> c_int>,
    modify_qp: Symbol<unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int>,
    query_qp: Symbol<unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int>,
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

/// A pointer, or the errno that came with a null.
fn made<T>(pointer: *mut T) -> Result<*mut T, i32> {
    if pointer.is_null() { Err(errno()) } else { Ok(pointer) }
}

fn done(code: c_int) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn zeroed<T>() -> T {
    // SAFETY: used for the header's structures of numbers and pointers only.
    unsafe { std::mem::zeroed() }
}

impl Verbs {
    pub fn load(path: &std::path::Path) -> Verbs {
        // SAFETY: the library under test; the signatures are the header's.
        unsafe {
            let library = libloading::os::unix::Library::new(path).unwrap();
            macro_rules! get {
                ($name:literal) => {
                    library.get($name).unwrap()
                };
            }
            Verbs {
                list: get!("ibv_get_device_list"),
                free: get!("ibv_free_device_list"),
                name: get!("ibv_get_device_name"),
                open: get!("ibv_open_device"),
                close: get!("ibv_close_device"),
                query_device: get!("ibv_query_device"),
                query_port: get!("ibv_query_port"),
                query_gid: get!("ibv_query_gid"),
                alloc_pd: get!("ibv_alloc_pd"),
                dealloc_pd: get!("ibv_dealloc_pd"),
                reg_mr: get!("ibv_reg_mr"),
                dereg_mr: get!("ibv_dereg_mr"),
                create_cq: get!("ibv_create_cq"),
                destroy_cq: get!("ibv_destroy_cq"),
                create_qp: get!("ibv_create_qp"),
                destroy_qp: get!("ibv_destroy_qp"),
                modify_qp: get!("ibv_modify_qp"),
                query_qp: get!("ibv_query_qp"),
                _library: library,
            }
        }
    }

    pub fn names(&self) -> Vec<String> {
        let mut n = 0;
        // SAFETY: libibverbs' contract, as in everything below.
        unsafe {
            let list = (self.list)(&mut n);
            let name = |i| CStr::from_ptr((self.name)(*list.add(i))).to_str().unwrap().to_owned();
            let names = (0..n as usize).map(name).collect();
            (self.free)(list);
            names
        }
    }

    /// Opens the device of this name.
    pub fn open(&self, wanted: &str) -> Result<Opened<'_>, i32> {
        let mut n = 0;
        // SAFETY: as above.
        unsafe {
            let list = (self.list)(&mut n);
            let device = (0..n as usize)
                .map(|i| *list.add(i))
                .find(|d| CStr::from_ptr((self.name)(*d)).to_str() == Ok(wanted))
                .unwrap_or_else(|| panic!("no device {wanted}"));
            let context = made((self.open)(device));
            (self.free)(list);
            Ok(Opened { verbs: self, context: context? })
        }
    }
}

/// An open device.
pub struct Opened<'a> {
    pub verbs: &'a Verbs,
    pub context: *mut Context,
}

impl<'a> Opened<'a> {
    pub fn attr(&self) -> DeviceAttr {
        let mut attr = zeroed();
        // SAFETY: as above.
        assert_eq!(unsafe { (self.verbs.query_device)(self.context, &mut attr) }, 0);
        attr
    }

    pub fn port(&self) -> PortAttr {
        let mut attr = zeroed();
        // SAFETY: as above.
        assert_eq!(unsafe { (self.verbs.query_port)(self.context, 1, &mut attr) }, 0);
        attr
    }

    pub fn gid(&self, index: i32) -> Option<Gid> {
        let mut gid = Gid([0; 16]);
        // SAFETY: as above.
        (unsafe { (self.verbs.query_gid)(self.context, 1, index, &mut gid) } == 0).then_some(gid)
    }

    pub fn pd(&self) -> Result<*mut Pd, i32> {
        // SAFETY: as above.
        made(unsafe { (self.verbs.alloc_pd)(self.context) })
    }

    pub fn cq(&self, size: i32) -> Result<*mut Cq, i32> {
        let null = std::ptr::null_mut();
        // SAFETY: as above.
        made(unsafe { (self.verbs.create_cq)(self.context, size, null, null, 0) })
    }

    pub fn register(&self, pd: *mut Pd, addr: *mut u8, len: usize, access: i32) -> Result<*mut Mr, i32> {
        // SAFETY: as above.
        made(unsafe { (self.verbs.reg_mr)(pd, addr.cast(), len, access) })
    }

    pub fn deregister(&self, mr: *mut Mr) -> Result<(), i32> {
        // SAFETY: as above.
        done(unsafe { (self.verbs.dereg_mr)(mr) })
    }

    pub fn free_pd(&self, pd: *mut Pd) -> Result<(), i32> {
        // SAFETY: as above.
        done(unsafe { (self.verbs.dealloc_pd)(pd) })
    }

    pub fn free_cq(&self, cq: *mut Cq) -> Result<(), i32> {
        // SAFETY: as above.
        done(unsafe { (self.verbs.destroy_cq)(cq) })
    }

    pub fn free_qp(&self, qp: *mut Qp) {
        // SAFETY: as above.
        assert_eq!(unsafe { (self.verbs.destroy_qp)(qp) }, 0);
    }

    /// A queue pair and what was granted.
    pub fn qp(&self, pd: *mut Pd, cq: *mut Cq, kind: i32, depth: u32) -> Result<(*mut Qp, QpCap), i32> {
        let mut init: QpInitAttr = zeroed();
        (init.send_cq, init.recv_cq, init.qp_type, init.sq_sig_all) = (cq, cq, kind, 1);
        init.cap = QpCap {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        // SAFETY: as above.
        let qp = made(unsafe { (self.verbs.create_qp)(pd, &mut init) })?;
        let (mut attr, mut again): (QpAttr, QpInitAttr) = (zeroed(), zeroed());
        // SAFETY: as above.
        assert_eq!(unsafe { (self.verbs.query_qp)(qp, &mut attr, 1 << 19, &mut again) }, 0);
        assert_eq!(attr.cap.max_send_wr, init.cap.max_send_wr);
        Ok((qp, init.cap))
    }

    pub fn close(self) {
        // SAFETY: as above.
        assert_eq!(unsafe { (self.verbs.close)(self.context) }, 0);
    }
}

/// Page-aligned memory of its own, never given back: a peer's device may write there.
pub fn pages(bytes: usize) -> *mut u8 {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

pub const ALL: i32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;

/// One end: a device with a domain, a queue, a queue pair and registered memory.
pub struct End<'a> {
    pub open: Opened<'a>,
    pub pd: *mut Pd,
    pub cq: *mut Cq,
    pub qp: *mut Qp,
    pub cap: QpCap,
    pub mr: *mut Mr,
    pub memory: *mut u8,
    pub bytes: usize,
}

pub struct Address {
    pub number: u32,
    pub gid: Gid,
    pub gid_index: u8,
}

impl<'a> End<'a> {
    pub fn new(verbs: &'a Verbs, device: &str, kind: i32, depth: u32, bytes: usize) -> End<'a> {
        End::over(verbs, device, kind, depth, pages(bytes), bytes)
    }

    pub fn over(
        verbs: &'a Verbs,
        device: &str,
        kind: i32,
        depth: u32,
        memory: *mut u8,
        bytes: usize,
    ) -> End<'a> {
        let open = verbs.open(device).unwrap();
        let pd = open.pd().unwrap();
        let cq = open.cq(4096).unwrap();
        let mr = open.register(pd, memory, bytes, ALL).unwrap();
        let (qp, cap) = open.qp(pd, cq, kind, depth).unwrap();
        End { open, pd, cq, qp, cap, mr, memory, bytes }
    }

    /// Another queue pair on the same completion queue.
    pub fn second(&self, kind: i32) -> *mut Qp {
        self.open.qp(self.pd, self.cq, kind, 64).unwrap().0
    }

    /// A reliable queue pair that completes only what asks for it.
    pub fn unsignalled(&self) -> *mut Qp {
        let mut init: QpInitAttr = zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (self.cq, self.cq, QPT_RC);
        init.cap =
            QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        // SAFETY: as above.
        made(unsafe { (self.open.verbs.create_qp)(self.pd, &mut init) }).unwrap()
    }

    pub fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { (*self.qp).qp_num }
    }

    pub fn address(&self) -> Address {
        Address { number: self.number(), gid: self.open.gid(1).expect("a mapped GID"), gid_index: 1 }
    }

    pub fn modify(&self, qp: *mut Qp, attr: &mut QpAttr, mask: i32) -> Result<(), i32> {
        // SAFETY: as above.
        done(unsafe { (self.open.verbs.modify_qp)(qp, attr, mask) })
    }

    pub fn to_init(&self, qp: *mut Qp) -> Result<(), i32> {
        let mut attr: QpAttr = zeroed();
        (attr.qp_state, attr.port_num, attr.qp_access_flags) = (QPS_INIT, 1, ALL as u32);
        self.modify(qp, &mut attr, QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS)
    }

    pub fn to_rtr(&self, qp: *mut Qp, peer: &Address) -> Result<(), i32> {
        let mut attr: QpAttr = zeroed();
        (attr.qp_state, attr.path_mtu, attr.dest_qp_num, attr.rq_psn) =
            (QPS_RTR, self.open.port().active_mtu, peer.number, 7);
        (attr.min_rnr_timer, attr.max_dest_rd_atomic) = (12, 1);
        (attr.ah_attr.is_global, attr.ah_attr.port_num) = (1, 1);
        (attr.ah_attr.grh.dgid, attr.ah_attr.grh.sgid_index, attr.ah_attr.grh.hop_limit) =
            (peer.gid, peer.gid_index, 1);
        let mut mask = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
        // SAFETY: a live queue pair.
        if unsafe { (*qp).qp_type } == QPT_RC {
            mask |= QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
        }
        self.modify(qp, &mut attr, mask)
    }

    pub fn to_rts(&self, qp: *mut Qp) -> Result<(), i32> {
        let mut attr: QpAttr = zeroed();
        (attr.qp_state, attr.sq_psn) = (QPS_RTS, 7);
        (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic) = (14, 7, 7, 1);
        let mut mask = QP_STATE | QP_SQ_PSN;
        // SAFETY: a live queue pair.
        if unsafe { (*qp).qp_type } == QPT_RC {
            mask |= QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC;
        }
        self.modify(qp, &mut attr, mask)
    }

    pub fn connect(&self, peer: &Address) {
        self.to_init(self.qp).unwrap();
        self.to_rtr(self.qp, peer).unwrap();
        self.to_rts(self.qp).unwrap();
    }

    fn sge(&self, at: usize, len: u32) -> Sge {
        // SAFETY: a live region.
        Sge { addr: self.memory as u64 + at as u64, length: len, lkey: unsafe { (*self.mr).lkey } }
    }

    /// Posts a receive; `Err` holds the number, and whether `bad_wr` was set.
    pub fn recv_on(&self, qp: *mut Qp, id: u64, at: usize, len: u32) -> Result<(), (i32, bool)> {
        let mut sge = self.sge(at, len);
        let mut wr = RecvWr { wr_id: id, next: std::ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = std::ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe { (*self.open.context).ops.post_recv.unwrap()(qp, &mut wr, &mut bad) };
        if code == 0 { Ok(()) } else { Err((code, !bad.is_null())) }
    }

    pub fn recv(&self, id: u64, at: usize, len: u32) -> Result<(), (i32, bool)> {
        self.recv_on(self.qp, id, at, len)
    }

    pub fn post_on(&self, qp: *mut Qp, wr: &mut SendWr) -> Result<(), (i32, bool)> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe { (*self.open.context).ops.post_send.unwrap()(qp, wr, &mut bad) };
        if code == 0 { Ok(()) } else { Err((code, !bad.is_null())) }
    }

    pub fn send_on(&self, qp: *mut Qp, id: u64, at: usize, len: u32) -> Result<(), (i32, bool)> {
        let mut sge = self.sge(at, len);
        let mut wr: SendWr = zeroed();
        (wr.wr_id, wr.sg_list, wr.num_sge, wr.opcode, wr.send_flags) =
            (id, &mut sge, 1, WR_SEND, SEND_SIGNALED);
        self.post_on(qp, &mut wr)
    }

    /// A send of 64 bytes with these flags.
    pub fn send_flagged(&self, qp: *mut Qp, id: u64, flags: u32) -> Result<(), (i32, bool)> {
        let mut sge = self.sge(0, 64);
        let mut wr: SendWr = zeroed();
        (wr.wr_id, wr.sg_list, wr.num_sge, wr.opcode, wr.send_flags) = (id, &mut sge, 1, WR_SEND, flags);
        self.post_on(qp, &mut wr)
    }

    pub fn send(&self, id: u64, at: usize, len: u32) -> Result<(), (i32, bool)> {
        self.send_on(self.qp, id, at, len)
    }

    /// Posts an RDMA write (with immediate data, if given).
    pub fn write(
        &self,
        id: u64,
        at: usize,
        len: u32,
        remote: (u64, u32),
        imm: Option<u32>,
    ) -> Result<(), (i32, bool)> {
        let mut sge = self.sge(at, len);
        let mut wr: SendWr = zeroed();
        (wr.wr_id, wr.sg_list, wr.num_sge, wr.send_flags) = (id, &mut sge, 1, SEND_SIGNALED);
        wr.opcode = if imm.is_some() { WR_RDMA_WRITE_WITH_IMM } else { WR_RDMA_WRITE };
        (wr.remote_addr, wr.rkey, wr.imm_data) = (remote.0, remote.1, imm.unwrap_or(0));
        self.post_on(self.qp, &mut wr)
    }

    pub fn poll(&self) -> Vec<Wc> {
        let mut wc = [zeroed::<Wc>(); 16];
        // SAFETY: as above.
        let n = unsafe { (*self.open.context).ops.poll_cq.unwrap()(self.cq, 16, wc.as_mut_ptr()) };
        assert!(n >= 0);
        wc[..n as usize].to_vec()
    }

    /// Polls until so many completions are there; panics when they do not come (a bound of hangs, not a measure).
    pub fn completions(&self, n: usize) -> Vec<Wc> {
        let (mut found, start) = (Vec::new(), Instant::now());
        while found.len() < n {
            found.extend(self.poll());
            assert!(start.elapsed() < Duration::from_secs(30), "{} of {n} completions came", found.len());
            std::thread::yield_now();
        }
        assert_eq!(found.len(), n);
        found
    }

    /// Nothing comes.
    pub fn quiet(&self) {
        for _ in 0..50 {
            let found = self.poll();
            assert!(found.is_empty(), "a completion of {} came", found[0].wr_id);
            std::thread::yield_now();
        }
    }

    /// The bytes of its memory; nobody writes there meanwhile.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: its own pages, and the tests look only at what is complete.
        unsafe { std::slice::from_raw_parts(self.memory, self.bytes) }
    }

    pub fn fill(&self, seed: u8) {
        for i in 0..self.bytes {
            // SAFETY: its own pages.
            unsafe {
                *self.memory.add(i) =
                    (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8 ^ (i >> 16) as u8) ^ seed
            };
        }
    }

    /// Gives everything back, in the order that works.
    pub fn close(self) {
        self.open.free_qp(self.qp);
        self.open.deregister(self.mr).unwrap();
        self.open.free_cq(self.cq).unwrap();
        self.open.free_pd(self.pd).unwrap();
        self.open.close();
    }
}

/// Two connected ends of a world's first cable.
pub fn pair<'a>(verbs: &'a Verbs, names: [&str; 2], kind: i32, depth: u32, bytes: usize) -> [End<'a>; 2] {
    let ends = names.map(|name| End::new(verbs, name, kind, depth, bytes));
    ends[0].connect(&ends[1].address());
    ends[1].connect(&ends[0].address());
    ends
}

pub const CABLE: [&str; 2] = ["rdma_en01", "rdma_en10"];

pub fn load(world: &Installed) -> Verbs {
    Verbs::load(world.library())
}
