//! What the device does: matches sends with receives, carries the bytes, completes both. Runs in whoever posts or polls,
//! under the wire's lock; memory of other processes is reached by the kernel, so no process waits for another's code.

use crate::abi::*;
use crate::memory;
use crate::shared::{Guard, QPS, RING, Recv, Send};
use crate::traps::hash;
use crate::world::{Kind, Profile};

pub const FRAME: u32 = 4096;

/// Frames that a message spans: what Apple's queues are counted in.
pub fn frames(len: u32) -> u32 {
    len.div_ceil(FRAME).max(1)
}

// What befalls a message, in `Send::fate`; its upper bits hold what details are drawn from.
const FATE_FOREIGN: u32 = 1;
const FATE_FLIP: u32 = 2;
const FATE_LENGTH: u32 = 3;

/// Unanswered, an RC sender gives up after this long, in nanoseconds (a NIC's default is some seconds).
const RC_PATIENCE: u64 = 1_000_000_000;

fn at<T>(ring: &[T], position: u64) -> &T {
    &ring[position as usize % RING]
}

fn at_mut<T>(ring: &mut [T], position: u64) -> &mut T {
    &mut ring[position as usize % RING]
}

/// Port and slot in a queue pair's number.
pub fn place(number: u32) -> (usize, usize) {
    (((number >> 16) as usize).wrapping_sub(1), number as usize % QPS)
}

impl Guard<'_> {
    fn apple(&self) -> bool {
        self.shared.world().profile == Profile::Apple
    }

    /// Whether a message of this kind fills a receive. Apple's provider does not look at the kind.
    fn wants_receive(&self, opcode: i32) -> bool {
        self.apple() || matches!(opcode, WR_SEND | WR_SEND_WITH_IMM | WR_RDMA_WRITE_WITH_IMM)
    }

    /// The other end of a queue pair, if it is there, connected to this one and able to receive.
    fn peer(&mut self, port: usize, q: usize) -> Option<(usize, usize)> {
        let mine = &self.port(port).qps[q];
        let (number, peer_number, peer) = (mine.number, mine.peer_number, mine.peer as usize);
        let (p, slot) = place(peer_number);
        if p != peer {
            return None;
        }
        let other = &self.port(p).qps[slot];
        let ready =
            other.used != 0 && other.number == peer_number && matches!(other.state, QPS_RTR | QPS_RTS);
        (ready && other.peer_number == number).then_some((p, slot))
    }

    /// Whether a key is that of a region of this domain that holds the range and grants `access`; and, for Apple, whether
    /// the range lies beyond a 4 GiB line in it.
    fn region(&mut self, port: usize, pd: u32, key: u32, addr: u64, len: u32, access: u32) -> Option<bool> {
        if len == 0 {
            return Some(false); // no bytes need no memory
        }
        let slot = (key >> 8) as usize;
        let mr = *self.port(port).mrs.get(slot.wrapping_sub(1))?;
        let end = addr.checked_add(len as u64)?;
        let fits = mr.used != 0 && mr.key == key && mr.pd == pd && addr >= mr.addr && end <= mr.addr + mr.len;
        // A transfer that touches what lies past the line of its region's first byte goes elsewhere.
        (fits && mr.access & access == access)
            .then(|| self.apple() && end.wrapping_sub(1) >> 32 != mr.addr >> 32)
    }

    /// Whether a posted range is not within a region of the queue pair's domain; counts it.
    pub fn key_is_wrong(&mut self, port: usize, pd: u32, sge: &Sge, access: u32) -> bool {
        let wrong = self.region(port, pd, sge.lkey, sge.addr, sge.length, access).is_none();
        self.port(port).counters.bad_keys += wrong as u64;
        wrong
    }

    /// Gives queued sends their receives and their times, as far as there are receives.
    fn match_sends(&mut self, port: usize, q: usize) {
        loop {
            let qp = &self.port(port).qps[q];
            if qp.send_matched == qp.send_tail || qp.state != QPS_RTS {
                return;
            }
            let (position, kind, pd, dead_over) = (qp.send_matched, qp.kind, qp.pd, qp.dead_over);
            let mut send = *at(&qp.sends, position);
            if send.status == WC_SUCCESS && send.vanishes == 0 {
                if self.is_down() && self.apple() {
                    return;
                }
                let peer = if self.is_down() { None } else { self.peer(port, q) };
                let waited = crate::shared::now().saturating_sub(send.posted) > RC_PATIENCE;
                let dead = dead_over != 0 && send.len as u64 >= dead_over;
                match peer {
                    // Credits of a peer that is gone never come.
                    None if self.apple() => return,
                    None if kind == QPT_UC => send.vanishes = 1,
                    None if waited => send.status = WC_RETRY_EXC_ERR,
                    None => return,
                    Some(_) if dead => send.vanishes = 1,
                    Some((pp, pq)) => {
                        let other = &self.port(pp).qps[pq];
                        let (pid, free) = (other.pid, other.recv_tail - other.recv_matched);
                        if self.wants_receive(send.opcode) {
                            if free == 0 {
                                let first = send.missing_counted == 0;
                                if first {
                                    self.port(port).counters.recv_missing += 1;
                                    at_mut(&mut self.port(port).qps[q].sends, position).missing_counted = 1;
                                }
                                if self.apple() {
                                    if !first || !self.plays(port, send.len, Kind::EarlySendKills) {
                                        return;
                                    }
                                    self.port(port).qps[q].dead_over = 1;
                                    send.vanishes = 1;
                                } else if kind == QPT_UC {
                                    send.vanishes = 1;
                                } else if waited && !memory::exists(pid) {
                                    send.status = WC_RETRY_EXC_ERR;
                                } else {
                                    return;
                                }
                            } else if self.plays(port, send.len, Kind::Lost) {
                                send.vanishes = 1;
                            } else {
                                self.take_receive(pp, pq, &mut send, |s, n| s.recv = n);
                                if free > 1 && self.plays(port, send.len, Kind::Duplicated) {
                                    self.take_receive(pp, pq, &mut send, |s, n| s.twin = n);
                                }
                            }
                        }
                        if let Some((fate, dice)) = self.draw(port, send.len, |k| match k {
                            Kind::Foreign => Some(FATE_FOREIGN),
                            Kind::FlippedBit => Some(FATE_FLIP),
                            Kind::LengthError => Some(FATE_LENGTH),
                            _ => None,
                        }) {
                            send.fate = fate | (dice as u32) << 2;
                        }
                        if self.apple()
                            && self.region(port, pd, send.lkey, send.addr, send.len, 0) == Some(true)
                        {
                            self.port(port).counters.aliased += 1;
                            send.fate = FATE_FOREIGN;
                        }
                    }
                }
                self.schedule(port, q, peer.map(|(p, _)| p), &mut send);
            }
            let qp = &mut self.port(port).qps[q];
            *at_mut(&mut qp.sends, position) = send;
            qp.send_matched += 1;
        }
    }

    /// The next posted receive of a queue pair is a message's.
    fn take_receive(&mut self, port: usize, q: usize, send: &mut Send, keep: impl Fn(&mut Send, u64)) {
        let qp = &mut self.port(port).qps[q];
        let posted = at(&qp.recvs, qp.recv_matched).posted;
        qp.recv_matched += 1;
        keep(send, qp.recv_matched);
        // Apple's senders wait for credits, and those travel too.
        let credit = if self.apple() { posted + self.link_from(port).1 } else { 0 };
        send.posted = send.posted.max(credit);
    }

    /// Carries and completes what is due of a queue pair's sends.
    pub fn advance(&mut self, port: usize, q: usize) {
        self.match_sends(port, q);
        let now = crate::shared::now();
        loop {
            let qp = &self.port(port).qps[q];
            let (position, send_cq) = (qp.send_sent, qp.send_cq);
            if position == qp.send_matched || at(&qp.sends, position).sent_at > now {
                break;
            }
            let mut send = *at(&qp.sends, position);
            // Read at the last moment that the contract allows: a source that changes too early is found out.
            self.carry(port, q, &mut send);
            let shown = send.status != WC_SUCCESS
                || self.apple()
                || self.port(port).qps[q].signal_all != 0
                || send.flags & SEND_SIGNALED != 0;
            let shown = shown && !self.plays(port, send.len, Kind::NoCompletion);
            send.hidden = if shown { self.completed(port, send_cq) } else { 1 };
            let qp = &mut self.port(port).qps[q];
            *at_mut(&mut qp.sends, position) = send;
            qp.send_sent += 1;
            if send.status != WC_SUCCESS && qp.kind == QPT_RC {
                qp.state = QPS_ERR;
                return self.flush(port, q);
            }
        }
        self.land(port, q, now);
    }

    /// Completes the receives of what has arrived by then. What has left arrives, whatever becomes of its sender.
    pub fn land(&mut self, port: usize, q: usize, by: u64) {
        loop {
            let qp = &self.port(port).qps[q];
            let (position, number) = (qp.send_arrived, qp.number);
            if position == qp.send_sent || at(&qp.sends, position).arrives_at > by {
                return;
            }
            let send = *at(&qp.sends, position);
            self.port(port).qps[q].send_arrived += 1;
            for recv in [send.recv, send.twin] {
                if recv != 0 {
                    self.arrive(port, q, number, &send, recv - 1);
                }
            }
        }
    }

    /// A completion is there: 1 when its queue has no room for it.
    fn completed(&mut self, port: usize, cq: u32) -> u32 {
        let queue = &mut self.port(port).cqs[cq as usize];
        let full = queue.waiting >= queue.size;
        if full {
            self.port(port).counters.overruns += 1;
        } else {
            self.port(port).cqs[cq as usize].waiting += 1;
            self.ring(port, cq);
        }
        full as u32
    }

    /// Moves a message's bytes into its receive (or, for a write, to its address).
    fn carry(&mut self, port: usize, q: usize, send: &mut Send) {
        if send.status != WC_SUCCESS || send.vanishes != 0 {
            return;
        }
        let qp = &self.port(port).qps[q];
        let (pid, pd, kind) = (qp.pid, qp.pd, qp.kind);
        if self.region(port, pd, send.lkey, send.addr, send.len, 0).is_none() {
            self.port(port).counters.bad_keys += 1;
            send.status = WC_LOC_PROT_ERR;
            return;
        }
        let Some((pp, pq)) = self.peer(port, q) else {
            send.vanishes = 1;
            send.status = if kind == QPT_RC { WC_RETRY_EXC_ERR } else { WC_SUCCESS };
            return;
        };
        let other = &self.port(pp).qps[pq];
        let (target_pid, target_pd, access) = (other.pid, other.pd, other.access);
        let mut targets = [None, None];
        if self.wants_receive(send.opcode) && (self.apple() || send.opcode != WR_RDMA_WRITE_WITH_IMM) {
            for (target, recv) in targets.iter_mut().zip([send.recv, send.twin]) {
                let fits = send.fate & 3 != FATE_LENGTH;
                *target =
                    if recv == 0 { None } else { self.receive_target(pp, pq, recv - 1, send.len, fits) };
            }
        } else {
            let wanted = ACCESS_REMOTE_WRITE as u32;
            let right = access & wanted != 0;
            match self.region(pp, target_pd, send.rkey, send.remote, send.len, wanted) {
                Some(_) if right => targets[0] = Some(send.remote),
                _ => {
                    self.port(port).counters.bad_remote_keys += 1;
                    send.status = if kind == QPT_RC { WC_REM_ACCESS_ERR } else { WC_SUCCESS };
                    send.vanishes = 1;
                    return;
                }
            }
        }
        let source = self.source(port, q, send);
        let past_protection = self.shared.world().past_protection;
        for target in targets.into_iter().flatten().filter(|_| send.len > 0) {
            // SAFETY: both ranges lie in regions that their programs registered and posted, which promises that they are
            // mapped and let be; regions of processes that ended are refused by the kernel.
            let moved = unsafe {
                let (from, to, len) = ((pid, source), (target_pid, target), send.len as usize);
                let carried = if past_protection {
                    memory::carry_past_protection(from, to, len)
                } else {
                    memory::carry(from, to, len)
                };
                carried.and_then(|()| {
                    if send.fate & 3 != FATE_FLIP {
                        return Ok(());
                    }
                    let dice = hash(&[(send.fate >> 2) as u64]);
                    memory::flip(target_pid, target + dice % send.len as u64, (dice >> 40) as u32 % 8)
                })
            };
            match moved {
                Ok(()) => self.port(port).counters.bytes += send.len as u64,
                // A process that ended: its side of the wire is silent.
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {
                    send.vanishes = 1;
                    send.status = if kind == QPT_RC { WC_RETRY_EXC_ERR } else { WC_SUCCESS };
                    return;
                }
                Err(e) => {
                    eprintln!(
                        "fulmen emulator: {} bytes between process {pid} and {target_pid}: {e}",
                        send.len
                    );
                    std::process::abort();
                }
            }
        }
        self.port(port).counters.messages += 1;
        let qp = &mut self.port(port).qps[q];
        (qp.last_addr, qp.last_len, qp.last_lkey) = (send.addr, send.len, send.lkey);
    }

    /// Where a message's bytes come from: from its range, unless foreign ones are to arrive.
    fn source(&mut self, port: usize, q: usize, send: &Send) -> u64 {
        if send.fate & 3 != FATE_FOREIGN || send.len == 0 {
            return send.addr;
        }
        let qp = &self.port(port).qps[q];
        let (addr, len, lkey, pd) = (qp.last_addr, qp.last_len, qp.last_lkey, qp.pd);
        let same = len >= send.len && addr != send.addr;
        if same && self.region(port, pd, lkey, addr, send.len, 0) == Some(false) {
            return addr;
        }
        // None sent yet: what lies elsewhere in the region.
        let mr = self.port(port).mrs[(send.lkey >> 8) as usize - 1];
        let end = mr.addr + mr.len - send.len as u64;
        if send.addr - mr.addr >= end - send.addr { mr.addr } else { end }
    }

    /// The address that a receive is filled at; sets its outcome. `None`: nothing lands.
    fn receive_target(&mut self, port: usize, q: usize, position: u64, len: u32, fits: bool) -> Option<u64> {
        let qp = &self.port(port).qps[q];
        let (recv, pd) = (*at(&qp.recvs, position), qp.pd);
        let region = self.region(port, pd, recv.lkey, recv.addr, recv.len, ACCESS_LOCAL_WRITE as u32);
        let frames_differ = self.apple() && frames(recv.len) != frames(len);
        let (status, lands) = match region {
            _ if frames_differ || len > recv.len || !fits => {
                self.port(port).counters.length_errors += 1;
                (WC_LOC_LEN_ERR, false)
            }
            None => {
                self.port(port).counters.bad_keys += 1;
                (WC_LOC_PROT_ERR, false)
            }
            Some(true) => {
                self.port(port).counters.aliased += 1;
                (WC_SUCCESS, false)
            }
            Some(false) => (WC_SUCCESS, true),
        };
        at_mut(&mut self.port(port).qps[q].recvs, position).status = status;
        lands.then_some(recv.addr)
    }

    /// Completes a receive.
    fn arrive(&mut self, port: usize, q: usize, number: u32, send: &Send, position: u64) {
        if send.vanishes != 0 || send.status != WC_SUCCESS {
            // Its receive was taken but nothing came: the sender died, or its key was wrong.
            return;
        }
        let Some((pp, pq)) = self.peer(port, q) else { return };
        let with_imm = !self.apple() && matches!(send.opcode, WR_SEND_WITH_IMM | WR_RDMA_WRITE_WITH_IMM);
        let written = !self.apple() && send.opcode == WR_RDMA_WRITE_WITH_IMM;
        let qp = &mut self.port(pp).qps[pq];
        debug_assert_eq!(qp.peer_number, number);
        let cq = qp.recv_cq;
        let failed = at(&qp.recvs, position).status != WC_SUCCESS;
        let hidden = self.completed(pp, cq);
        let qp = &mut self.port(pp).qps[pq];
        let recv: &mut Recv = at_mut(&mut qp.recvs, position);
        recv.opcode = if written { WC_OP_RECV_RDMA_WITH_IMM } else { WC_OP_RECV };
        recv.byte_len = if failed { 0 } else { send.len };
        (recv.imm, recv.flags) = if with_imm { (send.imm, WC_WITH_IMM) } else { (0, 0) };
        recv.hidden = hidden;
        recv.done = 1;
    }

    /// Hands out the completions of one queue pair that belong to this queue; sends and receives each in order.
    fn reap(&mut self, port: usize, q: usize, cq: u32, out: &mut [Wc]) -> usize {
        let qp = &mut self.port(port).qps[q];
        let (number, peer) = (qp.number, qp.peer_number);
        let (mut n, mut sends, mut recvs) = (0, 0, 0);
        while n < out.len() && qp.send_cq == cq && qp.send_polled < qp.send_sent {
            let send = *at(&qp.sends, qp.send_polled);
            qp.send_polled += 1;
            qp.send_frames -= send.frames;
            if send.hidden != 0 {
                continue;
            }
            let opcode = if matches!(send.opcode, WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM) {
                WC_OP_RDMA_WRITE
            } else {
                WC_OP_SEND
            };
            out[n] = completion(send.wr_id, send.status, opcode, send.len, number, peer);
            (n, sends) = (n + 1, sends + 1);
        }
        while n < out.len() && qp.recv_cq == cq && qp.recv_polled < qp.recv_matched {
            let recv = *at(&qp.recvs, qp.recv_polled);
            if recv.done == 0 {
                break;
            }
            qp.recv_polled += 1;
            qp.recv_frames -= recv.frames;
            if recv.hidden != 0 {
                continue;
            }
            out[n] = completion(recv.wr_id, recv.status, recv.opcode, recv.byte_len, number, peer);
            (out[n].imm_data, out[n].wc_flags) = (recv.imm, recv.flags);
            (n, recvs) = (n + 1, recvs + 1);
        }
        let apple = self.apple();
        let port = self.port(port);
        port.counters.send_completions += sends;
        port.counters.recv_completions += recvs;
        port.cqs[cq as usize].waiting -= n as u32;
        if apple {
            out[..n].iter_mut().filter(|w| w.opcode == WC_OP_RDMA_WRITE).for_each(|w| w.opcode = WC_OP_SEND);
        }
        n
    }

    /// Polls a completion queue.
    pub fn poll(&mut self, port: usize, cq: u32, out: &mut [Wc]) -> usize {
        let bell = self.shared.bell(port, cq as usize);
        bell.store(u64::MAX, std::sync::atomic::Ordering::Relaxed);
        let mut mine: Vec<usize> = Vec::with_capacity(QPS);
        for q in 0..QPS {
            let qp = &self.port(port).qps[q];
            if qp.used != 0 && (qp.send_cq == cq || qp.recv_cq == cq) {
                mine.push(q);
            }
        }
        for &q in &mine {
            self.advance(port, q);
            if let Some((pp, pq)) = self.peer(port, q) {
                self.advance(pp, pq);
            }
        }
        // Who is first changes from poll to poll, so that none starves.
        let turn = self.port(port).counters.send_completions + self.port(port).counters.recv_completions;
        if self.shared.traps_of(port).iter().any(|i| self.shared.world().traps[*i].kind == Kind::Reorder) {
            let seed = self.shared.world().seed;
            mine.sort_by_key(|q| hash(&[seed, turn, *q as u64]));
        } else if !mine.is_empty() {
            let by = turn as usize % mine.len();
            mine.rotate_left(by);
        }
        let mut n = 0;
        for &q in &mine {
            n += self.reap(port, q, cq, &mut out[n..]);
        }
        let look_at = if n == out.len() { 0 } else { self.next_due(port, &mine) };
        bell.store(look_at, std::sync::atomic::Ordering::Release);
        n
    }

    /// When something of these queue pairs will next happen by time alone.
    fn next_due(&mut self, port: usize, qps: &[usize]) -> u64 {
        let mut due = u64::MAX;
        for &q in qps {
            for (p, q) in [Some((port, q)), self.peer(port, q)].into_iter().flatten() {
                let qp = &self.port(p).qps[q];
                if qp.send_sent < qp.send_matched {
                    due = due.min(at(&qp.sends, qp.send_sent).sent_at);
                }
                if qp.send_arrived < qp.send_sent {
                    due = due.min(at(&qp.sends, qp.send_arrived).arrives_at);
                }
                if qp.kind == QPT_RC && qp.send_matched < qp.send_tail {
                    due = due.min(at(&qp.sends, qp.send_matched).posted + RC_PATIENCE);
                }
            }
        }
        due
    }

    /// After a post: carries what can be, and lets both ends' polls look.
    pub fn posted(&mut self, port: usize, q: usize) {
        self.advance(port, q);
        let qp = &self.port(port).qps[q];
        let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
        self.ring(port, send_cq);
        self.ring(port, recv_cq);
        if let Some((pp, pq)) = self.peer(port, q) {
            self.advance(pp, pq);
            let other = &self.port(pp).qps[pq];
            let (send_cq, recv_cq) = (other.send_cq, other.recv_cq);
            self.ring(pp, send_cq);
            self.ring(pp, recv_cq);
        }
    }

    /// Completes everything of a queue pair with WR_FLUSH_ERR (NIC: it was moved to ERR or failed).
    pub fn flush(&mut self, port: usize, q: usize) {
        self.land(port, q, u64::MAX);
        let qp = &mut self.port(port).qps[q];
        let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
        while self.port(port).qps[q].send_sent < self.port(port).qps[q].send_tail {
            let hidden = self.completed(port, send_cq);
            let qp = &mut self.port(port).qps[q];
            let send = at_mut(&mut qp.sends, qp.send_sent);
            (send.status, send.hidden) = (WC_WR_FLUSH_ERR, hidden);
            qp.send_sent += 1;
            qp.send_matched = qp.send_matched.max(qp.send_sent);
            qp.send_arrived = qp.send_arrived.max(qp.send_sent);
        }
        let qp = &self.port(port).qps[q];
        for position in qp.recv_polled..qp.recv_tail {
            if at(&self.port(port).qps[q].recvs, position).done == 0 {
                let hidden = self.completed(port, recv_cq);
                let recv = at_mut(&mut self.port(port).qps[q].recvs, position);
                (recv.status, recv.hidden, recv.done, recv.opcode) = (WC_WR_FLUSH_ERR, hidden, 1, WC_OP_RECV);
            }
        }
        let qp = &mut self.port(port).qps[q];
        qp.recv_matched = qp.recv_tail;
    }
}

fn completion(wr_id: u64, status: i32, opcode: i32, byte_len: u32, qp_num: u32, src_qp: u32) -> Wc {
    let (vendor_err, imm_data, wc_flags) = (0, 0, 0);
    Wc {
        wr_id,
        status,
        opcode,
        vendor_err,
        byte_len,
        imm_data,
        qp_num,
        src_qp,
        wc_flags,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}
