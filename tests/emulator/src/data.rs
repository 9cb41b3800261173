//! The data path: what programs call through the context's ops table. They keep the contract of libibverbs: handles are
//! live, and every pointer leads to what the header says.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::abi::*;
use crate::nic::frames;
use crate::objects::Errno;
use crate::provider::{code, of_context, set_errno};
use crate::shared::{Guard, RING, Recv, Send, now};
use crate::world::{Call, Kind, Profile};

/// A post waits for the wire while another process has it; one that was stopped there may have it for long.
const POST_PATIENCE: Duration = Duration::from_secs(2);
const POLL_PATIENCE: Duration = Duration::from_millis(2);

pub unsafe extern "C" fn poll_cq(cq: *mut Cq, count: c_int, wc: *mut Wc) -> c_int {
    // SAFETY: a live queue.
    let ((shared, port), handle) = unsafe { (of_context((*cq).context), (*cq).handle) };
    if count <= 0 || shared.bell(port, handle as usize).load(Ordering::Acquire) > now() {
        return 0;
    }
    let Some(mut wire) = shared.lock(port, POLL_PATIENCE) else { return 0 };
    let n = (count as usize).min(64);
    // SAFETY: the program's array has room for `count`; completions are numbers, zeros are valid.
    let out = unsafe {
        wc.write_bytes(0, n);
        std::slice::from_raw_parts_mut(wc, n)
    };
    wire.poll(port, handle, out) as c_int
}

pub unsafe extern "C" fn req_notify_cq(_cq: *mut Cq, _solicited_only: c_int) -> c_int {
    // Nobody has seen Apple's completion channels work; programs poll.
    libc::ENOSYS
}

/// Posts one of a chain after the other; the first refused is `bad`.
unsafe fn post<W>(
    qp: *mut Qp,
    mut wr: *mut W,
    bad: *mut *mut W,
    call: Call,
    next: impl Fn(&W) -> *mut W,
    one: impl Fn(&mut Guard<'_>, usize, usize, &W) -> Result<(), i32>,
) -> c_int {
    // SAFETY: a live queue pair.
    let ((shared, port), slot) = unsafe { (of_context((*qp).context), (*qp).handle as usize) };
    let again = if shared.world().profile == Profile::Apple { Errno::APPLE_AGAIN } else { Errno::NOMEM };
    let Some(mut wire) = shared.lock(port, POST_PATIENCE) else {
        set_errno(again);
        return again;
    };
    while !wr.is_null() {
        // SAFETY: the program's chain of work requests.
        let request = unsafe { &*wr };
        let trap = wire.fails(port, call, u32::MAX);
        let result = trap.map_or_else(|| one(&mut wire, port, slot, request), Err);
        if result.is_err() {
            if !bad.is_null() && !wire.plays(port, u32::MAX, Kind::BadWrUnset) {
                // SAFETY: the program's variable.
                unsafe { *bad = wr };
            }
            return code(&mut wire, port, result);
        }
        wire.posted(port, slot);
        wr = next(request);
    }
    0
}

pub unsafe extern "C" fn post_send(qp: *mut Qp, wr: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    // SAFETY: handed through: the caller's contract is that of libibverbs.
    unsafe { post(qp, wr, bad, Call::PostSend, |w| w.next, send) }
}

pub unsafe extern "C" fn post_recv(qp: *mut Qp, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> c_int {
    // SAFETY: handed through: the caller's contract is that of libibverbs.
    unsafe { post(qp, wr, bad, Call::PostRecv, |w| w.next, recv) }
}

/// The one range of a work request; none is a message of no bytes.
fn range(list: *const Sge, n: c_int) -> Result<Sge, i32> {
    match n {
        0 => Ok(Sge { addr: 0, length: 0, lkey: 0 }),
        // SAFETY: the program's array of one.
        1 => Ok(unsafe { *list }),
        _ => Err(Errno::INVALID),
    }
}

fn send(wire: &mut Guard<'_>, port: usize, slot: usize, wr: &SendWr) -> Result<(), i32> {
    let sge = range(wr.sg_list, wr.num_sge)?;
    let apple = wire.shared.world().profile == Profile::Apple;
    let message = wire.shared.world().limits.message;
    let qp = &wire.port(port).qps[slot];
    if qp.state != QPS_RTS && qp.state != QPS_ERR
        || wr.send_flags & SEND_INLINE != 0
        || sge.length as usize > message
    {
        return Err(Errno::INVALID);
    }
    let mut status = if matches!(wr.opcode, WR_RDMA_WRITE..=WR_SEND_WITH_IMM) || apple {
        WC_SUCCESS
    } else {
        WC_LOC_QP_OP_ERR
    };
    let (pd, erred) = (qp.pd, qp.state == QPS_ERR);
    let frames = if apple { frames(sge.length) } else { 1 };
    let (after, granted) = (qp.send_frames + frames, qp.send_grant);
    let full = qp.send_tail - qp.send_polled >= RING as u64 - 1;
    let beyond = after > wire.holds(port, granted);
    let mut vanishes = 0;
    if beyond || full {
        wire.port(port).counters.over_posts += 1;
        if full || !apple || !wire.plays(port, sge.length, Kind::OverPostSilent) {
            return Err(if apple { Errno::APPLE_AGAIN } else { Errno::NOMEM });
        }
        // Swallowed: it never leaves, and no completion tells.
        return Ok(());
    }
    if apple && wr.opcode != WR_SEND {
        wire.port(port).counters.not_sends += 1;
    }
    let writes = matches!(wr.opcode, WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM);
    let opcode = if writes && wire.plays(port, sge.length, Kind::WriteIsSend) { WR_SEND } else { wr.opcode };
    if wire.key_is_wrong(port, pd, &sge, 0) {
        (status, vanishes) = (WC_LOC_PROT_ERR, 1);
    }
    let qp = &mut wire.port(port).qps[slot];
    let position = qp.send_tail as usize % RING;
    qp.sends[position] = Send {
        wr_id: wr.wr_id,
        addr: sge.addr,
        len: sge.length,
        lkey: sge.lkey,
        opcode,
        flags: wr.send_flags,
        imm: wr.imm_data,
        rkey: wr.rkey,
        remote: wr.remote_addr,
        posted: now(),
        status,
        vanishes,
        frames,
        recv: 0,
        twin: 0,
        sent_at: 0,
        arrives_at: 0,
        fate: 0,
        hidden: 0,
        missing_counted: 0,
    };
    qp.send_tail += 1;
    qp.send_frames += frames;
    if erred {
        wire.flush(port, slot);
    }
    if wire.plays(port, sge.length, Kind::PortDown) {
        wire.set_down(true);
    }
    Ok(())
}

fn recv(wire: &mut Guard<'_>, port: usize, slot: usize, wr: &RecvWr) -> Result<(), i32> {
    let sge = range(wr.sg_list, wr.num_sge)?;
    let apple = wire.shared.world().profile == Profile::Apple;
    if apple && wire.is_down() && wire.plays(port, u32::MAX, Kind::CrashOnUnplug) {
        crash();
    }
    let qp = &wire.port(port).qps[slot];
    let ready = match qp.state {
        QPS_RTS => true,
        // Apple's provider wants RTS first.
        QPS_INIT | QPS_RTR | QPS_ERR => !apple,
        _ => false,
    };
    if !ready {
        return Err(Errno::INVALID);
    }
    let (pd, erred) = (qp.pd, qp.state == QPS_ERR);
    let frames = if apple { frames(sge.length) } else { 1 };
    let (after, granted) = (qp.recv_frames + frames, qp.recv_grant);
    let full = qp.recv_tail - qp.recv_polled >= RING as u64 - 1;
    let beyond = after > wire.holds(port, granted);
    if beyond || full {
        wire.port(port).counters.over_posts += 1;
        if full || !apple || !wire.plays(port, sge.length, Kind::OverPostSilent) {
            return Err(Errno::NOMEM);
        }
        return Ok(());
    }
    if wire.key_is_wrong(port, pd, &sge, ACCESS_LOCAL_WRITE as u32) {
        return Err(Errno::INVALID);
    }
    let qp = &mut wire.port(port).qps[slot];
    let position = qp.recv_tail as usize % RING;
    qp.recvs[position] = Recv {
        wr_id: wr.wr_id,
        addr: sge.addr,
        len: sge.length,
        lkey: sge.lkey,
        posted: now(),
        frames,
        done: 0,
        hidden: 0,
        status: WC_SUCCESS,
        opcode: WC_OP_RECV,
        byte_len: 0,
        imm: 0,
        flags: 0,
    };
    qp.recv_tail += 1;
    qp.recv_frames += frames;
    if erred {
        wire.flush(port, slot);
    }
    Ok(())
}

/// A fault on purpose: Apple's driver stores into a doorbell that is not mapped any more.
fn crash() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh page that nobody may touch; the store ends the process, as is wanted.
    unsafe {
        let doorbell = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0);
        doorbell.cast::<u32>().write_volatile(1);
    }
}
