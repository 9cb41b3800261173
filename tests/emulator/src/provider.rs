//! The exported functions: libibverbs' names and signatures.
//!
//! Handles are boxes of the header's structures; `handle` is the object's index in its device's table. Programs keep the
//! contract of libibverbs: handles are live, and every pointer leads to what the header says.

use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::abi::*;
use crate::connect::gids;
use crate::counters::Counters;
use crate::data::{poll_cq, post_recv, post_send, req_notify_cq};
use crate::objects::{Errno, QpWish, max_cqe};
use crate::shared::{Guard, RING, Shared};
use crate::world::{Call, Kind, Profile};

struct Library {
    shared: Shared,
    devices: Vec<DeviceEntry>,
}

/// Lives for ever: programs keep pointers to it.
struct DeviceEntry(*mut Device);

// SAFETY: written before it is shared, never afterwards.
unsafe impl std::marker::Send for DeviceEntry {}
// SAFETY: as above.
unsafe impl Sync for DeviceEntry {}

static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();

fn library() -> Option<&'static Library> {
    let made = LIBRARY.get_or_init(|| {
        let folder = std::env::var_os("FULMEN_EMU").map(PathBuf::from).or_else(own_folder);
        let opened = folder.as_ref().map(|f| Shared::open(f));
        let shared = match opened {
            Some(Ok(shared)) => shared,
            Some(Err(e)) => {
                eprintln!("fulmen emulator: no world in {}: {e}", folder.unwrap_or_default().display());
                return None;
            }
            None => {
                eprintln!("fulmen emulator: set FULMEN_EMU to a world's folder");
                return None;
            }
        };
        crate::memory::open_to_neighbours();
        let devices = (0..shared.world().devices.len()).map(|d| DeviceEntry(device(&shared, d))).collect();
        Some(Library { shared, devices })
    });
    made.as_ref()
}

/// The folder that this library was loaded from.
fn own_folder() -> Option<PathBuf> {
    // SAFETY: asks the loader for the file that holds this function; the name it gives lives as long as the library.
    let name = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own_folder as *const c_void, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        std::ffi::CStr::from_ptr(info.dli_fname).to_bytes().to_vec()
    };
    PathBuf::from(OsString::from_vec(name)).parent().map(PathBuf::from)
}

fn fill(field: &mut [c_char], text: &str) {
    let text = CString::new(text).unwrap_or_default();
    for (to, from) in field.iter_mut().zip(text.as_bytes_with_nul()) {
        *to = *from as c_char;
    }
}

fn device(shared: &Shared, index: usize) -> *mut Device {
    // SAFETY: numbers, arrays of them and pointers: zeros are valid.
    let mut device: Device = unsafe { std::mem::zeroed() };
    device.node_type = NODE_CA;
    device.transport_type = match shared.world().profile {
        Profile::Apple => TRANSPORT_THUNDERBOLT,
        Profile::Nic => TRANSPORT_IB,
    };
    fill(&mut device.name, &shared.world().devices[index].name);
    fill(&mut device.dev_name, &format!("uverbs{index}"));
    Box::into_raw(Box::new(device))
}

pub fn set_errno(number: i32) {
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = number };
}

/// A NULL with its errno.
fn null<T>(number: i32) -> *mut T {
    set_errno(number);
    std::ptr::null_mut()
}

/// Holds the device's wire, whatever it takes: for calls off the data path.
fn hold(shared: &'static Shared, port: usize) -> Guard<'static> {
    loop {
        if let Some(guard) = shared.lock(port, Duration::from_secs(1)) {
            return guard;
        }
    }
}

/// Plays what is to befall a call of so many bytes (`u32::MAX` where there are none): never returns, is slow, or fails.
fn befalls(shared: &'static Shared, port: usize, call: Call, bytes: u32) -> Option<i32> {
    let mut wire = hold(shared, port);
    let stuck = wire.draw(port, bytes, |k| matches!(k, Kind::Stuck { call: c } if c == call).then_some(()));
    if stuck.is_some() {
        drop(wire);
        // SAFETY: asks for a number.
        let parent = || unsafe { libc::getppid() };
        let first = parent();
        while parent() == first {
            std::thread::sleep(Duration::from_millis(100));
        }
        // Unlike a real driver's it ends, with the test that started the process.
        std::process::exit(1);
    }
    let slow = wire.draw(port, bytes, |k| match k {
        Kind::Slow { call: c, ms } if c == call => Some(ms),
        _ => None,
    });
    if let Some((ms, _)) = slow {
        drop(wire);
        std::thread::sleep(Duration::from_millis(ms));
        wire = hold(shared, port);
    }
    wire.fails(port, call, bytes)
}

/// An error as a returned number.
pub fn code(wire: &mut Guard<'_>, port: usize, result: Result<(), i32>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(number) => {
            set_errno(number);
            if wire.plays(port, u32::MAX, Kind::NegativeErrno) { -number } else { number }
        }
    }
}

/// The library, its state and the device's index, of a context.
pub unsafe fn of_context(context: *mut Context) -> (&'static Shared, usize) {
    let library = library().expect("a context without a library");
    // SAFETY: a live context, by the caller's contract.
    let device = unsafe { (*context).device };
    let port = library.devices.iter().position(|d| d.0 == device).expect("a device of this library");
    (&library.shared, port)
}

/// `ibv_get_device_list`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut Device {
    let host = std::env::var("FULMEN_EMU_HOST").ok();
    let mut found: Vec<*mut Device> = Vec::new();
    if let Some(library) = library() {
        if let Err(e) = library.shared.refresh() {
            eprintln!("fulmen emulator: the world's new description: {e}");
        }
        for (i, entry) in library.devices.iter().enumerate() {
            if host.as_ref().is_some_and(|h| *h != library.shared.world().devices[i].host) {
                continue;
            }
            if let Some(number) = befalls(&library.shared, i, Call::GetDeviceList, u32::MAX) {
                return null(number);
            }
            if !hold(&library.shared, i).plays(i, u32::MAX, Kind::NoDevices) {
                found.push(entry.0);
            }
        }
    }
    if !count.is_null() {
        // SAFETY: the program's variable.
        unsafe { *count = found.len() as c_int };
    }
    found.push(std::ptr::null_mut());
    // The list's length is found again by its last, null entry.
    Box::into_raw(found.into_boxed_slice()).cast()
}

/// `ibv_free_device_list`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut Device) {
    if list.is_null() {
        return;
    }
    // SAFETY: made by `ibv_get_device_list`, which ended it with a null.
    unsafe {
        let n = (0..).take_while(|i| !(*list.add(*i)).is_null()).count();
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, n + 1)));
    }
}

/// `ibv_get_device_name`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut Device) -> *const c_char {
    // SAFETY: a device of the list; its name ends with a zero.
    unsafe { (&raw const (*device).name).cast() }
}

/// `ibv_open_device`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut Device) -> *mut Context {
    let Some(library) = library() else { return null(libc::ENODEV) };
    let Some(port) = library.devices.iter().position(|d| d.0 == device) else { return null(Errno::INVALID) };
    if let Some(number) = befalls(&library.shared, port, Call::OpenDevice, u32::MAX) {
        return null(number);
    }
    // SAFETY: numbers, pointers and a mutex: zeros are valid.
    let mut context: Context = unsafe { std::mem::zeroed() };
    context.device = device;
    context.ops.poll_cq = Some(poll_cq);
    context.ops.req_notify_cq = Some(req_notify_cq);
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    (context.cmd_fd, context.async_fd, context.num_comp_vectors) = (-1, -1, 1);
    Box::into_raw(Box::new(context))
}

/// `ibv_close_device`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut Context) -> c_int {
    // SAFETY: made by `ibv_open_device`, closed once.
    drop(unsafe { Box::from_raw(context) });
    0
}

/// `ibv_query_device`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(context: *mut Context, attr: *mut DeviceAttr) -> c_int {
    // SAFETY: a live context and the program's structure, which zeros fill validly.
    let ((shared, port), attr) = unsafe {
        attr.write_bytes(0, 1);
        (of_context(context), &mut *attr)
    };
    let (world, apple) = (shared.world(), shared.world().profile == Profile::Apple);
    fill(&mut attr.fw_ver, "fulmen emulator");
    attr.node_guid = port as u64 + 1;
    // What Apple's provider says, and does not enforce.
    attr.max_mr_size = if apple { 0xfa_0000 } else { u64::MAX };
    attr.page_size_cap = 4096;
    attr.max_qp = world.limits.qps as c_int + apple as c_int;
    attr.max_qp_wr = RING as c_int - 1;
    attr.max_sge = 1;
    attr.max_cq = world.limits.cqs as c_int;
    attr.max_cqe = max_cqe(apple);
    attr.max_mr = world.limits.mrs as c_int;
    attr.max_pd = world.limits.pds as c_int;
    attr.max_pkeys = 1;
    attr.phys_port_cnt = 1;
    0
}

/// `ibv_query_port`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(context: *mut Context, number: u8, attr: *mut PortAttr) -> c_int {
    if number != 1 {
        return Errno::INVALID;
    }
    // SAFETY: a live context; numbers only, zeros are valid.
    let ((shared, port), mut filled) = unsafe { (of_context(context), std::mem::zeroed::<PortAttr>()) };
    let down = hold(shared, port).is_down();
    filled.state = if down { PORT_DOWN } else { PORT_ACTIVE };
    (filled.max_mtu, filled.active_mtu) = (MTU_4096, MTU_4096);
    filled.gid_tbl_len = gids(shared.world(), port, shared.age()).len() as c_int;
    filled.max_msg_sz = shared.world().limits.message as u32;
    filled.pkey_tbl_len = 1;
    // 8 lanes of 10 Gb/s, as the verbs encode it.
    (filled.active_width, filled.active_speed) = (4, 8);
    filled.phys_state = if down { 3 } else { 5 };
    filled.link_layer = 2;
    // The function's old structure ends before this field; newer headers zero the rest themselves.
    let bytes = std::mem::offset_of!(PortAttr, port_cap_flags2);
    // SAFETY: the program's structure is at least that long.
    unsafe { std::ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), attr.cast::<u8>(), bytes) };
    0
}

/// `ibv_query_gid`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut Context,
    number: u8,
    index: c_int,
    gid: *mut Gid,
) -> c_int {
    // SAFETY: a live context.
    let (shared, port) = unsafe { of_context(context) };
    match gids(shared.world(), port, shared.age()).get(index as usize) {
        Some(found) if number == 1 => {
            // SAFETY: the program's variable.
            unsafe { *gid = *found };
            0
        }
        _ => {
            set_errno(Errno::INVALID);
            -1
        }
    }
}

/// `ibv_alloc_pd`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut Context) -> *mut Pd {
    // SAFETY: a live context.
    let (shared, port) = unsafe { of_context(context) };
    if let Some(number) = befalls(shared, port, Call::AllocPd, u32::MAX) {
        return null(number);
    }
    match hold(shared, port).alloc_pd(port) {
        Ok(handle) => Box::into_raw(Box::new(Pd { context, handle })),
        Err(number) => null(number),
    }
}

/// `ibv_dealloc_pd`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: a live domain.
    let ((shared, port), handle) = unsafe { (of_context((*pd).context), (*pd).handle) };
    let mut wire = hold(shared, port);
    let result = wire.dealloc_pd(port, handle);
    if result.is_ok() {
        // SAFETY: made by `ibv_alloc_pd`, given back once.
        drop(unsafe { Box::from_raw(pd) });
    }
    code(&mut wire, port, result)
}

/// `ibv_reg_mr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    // SAFETY: a live domain (as with Apple's, a null one crashes).
    let ((shared, port), domain, context) =
        unsafe { (of_context((*pd).context), (*pd).handle, (*pd).context) };
    if let Some(number) = befalls(shared, port, Call::RegMr, u32::try_from(length).unwrap_or(u32::MAX)) {
        return null(number);
    }
    match hold(shared, port).register(port, domain, addr as u64, length as u64, access) {
        Ok((handle, key)) => {
            Box::into_raw(Box::new(Mr { context, pd, addr, length, handle, lkey: key, rkey: key }))
        }
        Err(number) => null(number),
    }
}

/// `ibv_dereg_mr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: a live region.
    let ((shared, port), handle) = unsafe { (of_context((*mr).context), (*mr).handle) };
    let mut wire = hold(shared, port);
    let result = wire.deregister_for(port, handle);
    if result.is_ok() {
        // SAFETY: made by `ibv_reg_mr`, given back once.
        drop(unsafe { Box::from_raw(mr) });
    }
    code(&mut wire, port, result)
}

/// `ibv_create_cq`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut Context,
    size: c_int,
    cq_context: *mut c_void,
    channel: *mut c_void,
    _vector: c_int,
) -> *mut Cq {
    // SAFETY: a live context.
    let (shared, port) = unsafe { of_context(context) };
    if let Some(number) = befalls(shared, port, Call::CreateCq, u32::MAX) {
        return null(number);
    }
    match hold(shared, port).create_cq(port, size) {
        Ok(handle) => {
            // SAFETY: numbers, pointers, a mutex and a condition: zeros are valid.
            let mut cq: Cq = unsafe { std::mem::zeroed() };
            (cq.context, cq.cq_context, cq.channel, cq.handle, cq.cqe) =
                (context, cq_context, channel, handle, size);
            Box::into_raw(Box::new(cq))
        }
        Err(number) => null(number),
    }
}

/// `ibv_destroy_cq`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: a live queue.
    let ((shared, port), handle) = unsafe { (of_context((*cq).context), (*cq).handle) };
    let mut wire = hold(shared, port);
    let result = wire.destroy_cq(port, handle);
    if result.is_ok() {
        // SAFETY: made by `ibv_create_cq`, given back once.
        drop(unsafe { Box::from_raw(cq) });
    }
    code(&mut wire, port, result)
}

/// `ibv_create_qp`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut Pd, init: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: a live domain, and the program's structure with live completion queues.
    let ((shared, port), context, domain, init) =
        unsafe { (of_context((*pd).context), (*pd).context, (*pd).handle, &mut *init) };
    if let Some(number) = befalls(shared, port, Call::CreateQp, u32::MAX) {
        return null(number);
    }
    if init.send_cq.is_null() || init.recv_cq.is_null() || !init.srq.is_null() {
        return null(Errno::INVALID);
    }
    // SAFETY: live completion queues.
    let (send_cq, recv_cq) = unsafe { ((*init.send_cq).handle, (*init.recv_cq).handle) };
    let wish = QpWish {
        kind: init.qp_type,
        pd: domain,
        send_cq,
        recv_cq,
        signal_all: init.sq_sig_all != 0,
        cap: init.cap,
    };
    match hold(shared, port).create_qp(port, &wish) {
        Ok((slot, number, granted)) => {
            init.cap = granted;
            // SAFETY: numbers, pointers, a mutex and a condition: zeros are valid.
            let mut qp: Qp = unsafe { std::mem::zeroed() };
            (qp.context, qp.qp_context, qp.pd) = (context, init.qp_context, pd);
            (qp.send_cq, qp.recv_cq, qp.qp_type) = (init.send_cq, init.recv_cq, init.qp_type);
            (qp.handle, qp.qp_num, qp.state) = (slot as u32, number, QPS_RESET);
            Box::into_raw(Box::new(qp))
        }
        Err(number) => null(number),
    }
}

/// `ibv_destroy_qp`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: a live queue pair, made by `ibv_create_qp` and given back once.
    let ((shared, port), slot) = unsafe { (of_context((*qp).context), (*qp).handle) };
    hold(shared, port).destroy_qp(port, slot as usize);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(qp) });
    0
}

/// `ibv_modify_qp`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int {
    // SAFETY: a live queue pair and the program's structure.
    let ((shared, port), qp, attr) = unsafe { (of_context((*qp).context), &mut *qp, &*attr) };
    let call = match attr.qp_state {
        QPS_INIT => Some(Call::ToInit),
        QPS_RTR => Some(Call::ToRtr),
        QPS_RTS => Some(Call::ToRts),
        _ => None,
    };
    let trap = call.and_then(|c| befalls(shared, port, c, u32::MAX));
    let mut wire = hold(shared, port);
    let result = trap.map_or_else(|| wire.modify(port, qp.handle as usize, attr, mask), Err);
    if result.is_ok() {
        qp.state = attr.qp_state;
    }
    code(&mut wire, port, result)
}

/// `ibv_query_qp`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut Qp,
    attr: *mut QpAttr,
    _mask: c_int,
    init: *mut QpInitAttr,
) -> c_int {
    // SAFETY: a live queue pair and the program's structures, which zeros fill validly.
    let ((shared, port), qp, attr, init) = unsafe {
        attr.write_bytes(0, 1);
        init.write_bytes(0, 1);
        (of_context((*qp).context), &*qp, &mut *attr, &mut *init)
    };
    let mut wire = hold(shared, port);
    let state = &wire.port(port).qps[qp.handle as usize];
    let cap = QpCap {
        max_send_wr: state.send_grant,
        max_recv_wr: state.recv_grant,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    (attr.qp_state, attr.cur_qp_state, attr.cap) = (state.state, state.state, cap);
    (attr.dest_qp_num, attr.port_num, attr.path_mtu) = (state.peer_number, 1, MTU_4096);
    (init.send_cq, init.recv_cq, init.qp_type, init.cap) = (qp.send_cq, qp.recv_cq, qp.qp_type, cap);
    init.sq_sig_all = state.signal_all as c_int;
    0
}

/// What tests ask for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fulmen_emu_counters(out: *mut Counters) -> c_int {
    let Some(library) = library() else { return -1 };
    // SAFETY: the program's structure.
    unsafe { *out = library.shared.counters() };
    0
}

/// Pulls (`up` = 0) or plugs in the cable of a context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fulmen_emu_cable(context: *mut Context, up: c_int) -> c_int {
    // SAFETY: a live context.
    let (shared, port) = unsafe { of_context(context) };
    let Some(wire) = shared.world().wire_of(port) else { return -1 };
    shared.set_cable(wire, up != 0);
    0
}
