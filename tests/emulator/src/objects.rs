//! Domains, regions and queues of a device: what is granted, refused, and lost with a process that died.

use crate::abi::*;
use crate::memory;
use crate::shared::{CQS, Guard, MRS, PDS, QPS, RING};
use crate::world::{Kind, Limits, Profile};

/// Error numbers as the provider has them: Apple's are macOS's.
pub struct Errno;

impl Errno {
    pub const NOMEM: i32 = 12;
    pub const BUSY: i32 = 16;
    pub const INVALID: i32 = 22;
    pub const APPLE_AGAIN: i32 = 35;
    pub const APPLE_TIMED_OUT: i32 = 60;
    pub const APPLE_NOT_SUPPORTED: i32 = 102;
    pub const LINUX_NOT_SUPPORTED: i32 = 95;
}

/// What is asked of a queue pair that is to be made.
pub struct QpWish {
    pub kind: i32,
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub signal_all: bool,
    pub cap: QpCap,
}

impl Guard<'_> {
    fn limits(&self) -> Limits {
        self.shared.world().limits
    }

    fn is_apple(&self) -> bool {
        self.shared.world().profile == Profile::Apple
    }

    /// Takes back what processes that are gone had on this device.
    fn reclaim(&mut self, port: usize) {
        let mut gone: Vec<i32> = Vec::new();
        let p = self.port(port);
        let owners = (p.pds.iter().filter(|x| x.used != 0 && x.lost == 0).map(|x| x.pid))
            .chain(p.mrs.iter().filter(|x| x.used != 0).map(|x| x.pid))
            .chain(p.cqs.iter().filter(|x| x.used != 0).map(|x| x.pid))
            .chain(p.qps.iter().filter(|x| x.used != 0).map(|x| x.pid));
        for pid in owners {
            if !gone.contains(&pid) && !memory::exists(pid) {
                gone.push(pid);
            }
        }
        for pid in gone {
            for q in 0..QPS {
                if self.port(port).qps[q].used != 0 && self.port(port).qps[q].pid == pid {
                    self.destroy_qp(port, q);
                }
            }
            for m in 0..MRS {
                if self.port(port).mrs[m].used != 0 && self.port(port).mrs[m].pid == pid {
                    self.deregister(port, m);
                }
            }
            for c in 0..CQS {
                let cq = &mut self.port(port).cqs[c];
                if cq.used != 0 && cq.pid == pid {
                    cq.used = 0;
                    self.port(port).counters.cqs -= 1;
                }
            }
            for d in 0..PDS {
                let pd = &self.port(port).pds[d];
                if pd.used != 0 && pd.pid == pid && pd.lost == 0 {
                    if self.plays(port, u32::MAX, Kind::PdLost) {
                        self.port(port).pds[d].lost = 1;
                        self.port(port).counters.pds_lost += 1;
                    } else {
                        self.free_pd(port, d);
                    }
                }
            }
        }
    }

    fn free_pd(&mut self, port: usize, d: usize) {
        self.port(port).pds[d].used = 0;
        self.port(port).counters.pds -= 1;
    }

    pub fn alloc_pd(&mut self, port: usize) -> Result<u32, i32> {
        self.reclaim(port);
        let most = self.limits().pds.min(PDS);
        if self.is_apple() && self.is_down() {
            return Err(Errno::INVALID);
        }
        let p = self.port(port);
        let free = p.pds[..most].iter().position(|pd| pd.used == 0).ok_or(Errno::NOMEM)?;
        p.pds[free] = crate::shared::Pd { used: 1, pid: std::process::id() as i32, lost: 0, erred: 0 };
        p.counters.pds += 1;
        p.counters.pds_ever += 1;
        p.counters.pds_peak = p.counters.pds_peak.max(p.counters.pds);
        Ok(free as u32)
    }

    pub fn dealloc_pd(&mut self, port: usize, pd: u32) -> Result<(), i32> {
        let p = self.port(port);
        if p.mrs.iter().any(|m| m.used != 0 && m.pd == pd) || p.qps.iter().any(|q| q.used != 0 && q.pd == pd)
        {
            return Err(Errno::BUSY);
        }
        self.free_pd(port, pd as usize);
        Ok(())
    }

    pub fn register(
        &mut self,
        port: usize,
        pd: u32,
        addr: u64,
        len: u64,
        access: i32,
    ) -> Result<(u32, u32), i32> {
        self.reclaim(port);
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        if self.is_apple() {
            let all = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
            let allowed = if self.plays(port, u32::MAX, Kind::LocalWriteOnly) {
                access == ACCESS_LOCAL_WRITE
            } else if self.plays(port, u32::MAX, Kind::RemoteFlagsNeeded) {
                access == all
            } else {
                access & !all == 0 && access & ACCESS_LOCAL_WRITE != 0
            };
            if !addr.is_multiple_of(page) || !allowed {
                return Err(Errno::INVALID);
            }
        } else if access & ACCESS_REMOTE_WRITE != 0 && access & ACCESS_LOCAL_WRITE == 0 {
            return Err(Errno::INVALID);
        }
        if len == 0 || addr == 0 || addr.checked_add(len).is_none() {
            return Err(Errno::INVALID);
        }
        let most = self.limits().mrs.min(MRS);
        let p = self.port(port);
        let free = p.mrs[..most].iter().position(|m| m.used == 0).ok_or(Errno::NOMEM)?;
        let mr = &mut p.mrs[free];
        let generation = mr.generation.wrapping_add(1);
        // A key is never of two regions in a row.
        let key = (free as u32 + 1) << 8 | generation & 0xff;
        *mr = crate::shared::Mr {
            used: 1,
            pid: std::process::id() as i32,
            key,
            pd,
            access: access as u32,
            generation,
            addr,
            len,
        };
        p.counters.mrs += 1;
        p.counters.mrs_ever += 1;
        p.counters.mrs_peak = p.counters.mrs_peak.max(p.counters.mrs);
        Ok((free as u32, key))
    }

    pub fn deregister(&mut self, port: usize, mr: usize) {
        self.port(port).mrs[mr].used = 0;
        self.port(port).counters.mrs -= 1;
    }

    /// As a program asks for it: refused after a queue pair of its domain went to ERR (Apple).
    pub fn deregister_for(&mut self, port: usize, mr: u32) -> Result<(), i32> {
        let pd = self.port(port).mrs[mr as usize].pd as usize;
        if self.port(port).pds[pd].erred != 0 {
            return Err(Errno::BUSY);
        }
        self.deregister(port, mr as usize);
        Ok(())
    }

    pub fn create_cq(&mut self, port: usize, size: i32) -> Result<u32, i32> {
        self.reclaim(port);
        if !(1..=max_cqe(self.is_apple())).contains(&size) {
            return Err(Errno::INVALID);
        }
        let most = self.limits().cqs.min(CQS);
        let p = self.port(port);
        let free = p.cqs[..most].iter().position(|c| c.used == 0).ok_or(Errno::NOMEM)?;
        p.cqs[free] =
            crate::shared::Cq { used: 1, pid: std::process::id() as i32, size: size as u32, waiting: 0 };
        p.counters.cqs += 1;
        self.ring(port, free as u32);
        Ok(free as u32)
    }

    pub fn destroy_cq(&mut self, port: usize, cq: u32) -> Result<(), i32> {
        let p = self.port(port);
        if p.qps.iter().any(|q| q.used != 0 && (q.send_cq == cq || q.recv_cq == cq)) {
            return Err(Errno::BUSY);
        }
        p.cqs[cq as usize].used = 0;
        p.counters.cqs -= 1;
        Ok(())
    }

    /// Makes a queue pair: its slot, number and granted depths.
    pub fn create_qp(&mut self, port: usize, wish: &QpWish) -> Result<(usize, u32, QpCap), i32> {
        self.reclaim(port);
        let apple = self.is_apple();
        match wish.kind {
            QPT_UC if !apple && self.plays(port, u32::MAX, Kind::ReliableOnly) => {
                return Err(Errno::LINUX_NOT_SUPPORTED);
            }
            QPT_UC => {}
            QPT_RC if !apple => {}
            _ if apple => return Err(Errno::APPLE_NOT_SUPPORTED),
            _ => return Err(Errno::LINUX_NOT_SUPPORTED),
        }
        let cap = wish.cap;
        let most_wr = RING as u32 - 1;
        if cap.max_send_wr > most_wr || cap.max_recv_wr > most_wr || cap.max_inline_data > 0 {
            return Err(Errno::INVALID);
        }
        if cap.max_send_sge > 1 || cap.max_recv_sge > 1 {
            return Err(Errno::INVALID);
        }
        // Small wishes are rounded up, as Apple's provider does; a NIC grants powers of two.
        let grant = |asked: u32| match apple {
            true if asked <= 1023 => 1023,
            true => most_wr,
            false => asked.max(1).next_power_of_two().min(most_wr),
        };
        let most = self.limits().qps.min(QPS);
        let grants = self.grants(port);
        let p = self.port(port);
        let slot = p.qps[..most].iter().position(|q| q.used == 0).ok_or(Errno::NOMEM)?;
        p.qps_made += 1;
        // Numbers are not used again for long: 2048 queue pairs of a device in one slot.
        let number = (port as u32 + 1) << 16 | (p.qps_made as u32 & 0x7ff) << 5 | slot as u32;
        let qp = &mut p.qps[slot];
        qp.used = 1;
        qp.state = QPS_RESET;
        (qp.kind, qp.number, qp.pid, qp.pd) = (wish.kind, number, std::process::id() as i32, wish.pd);
        (qp.send_cq, qp.recv_cq, qp.signal_all) = (wish.send_cq, wish.recv_cq, wish.signal_all as u32);
        (qp.access, qp.peer, qp.peer_number) = (0, 0, 0);
        qp.send_grant = grant(cap.max_send_wr).min(grants);
        qp.recv_grant = grant(cap.max_recv_wr).min(grants);
        let granted = QpCap {
            max_send_wr: qp.send_grant,
            max_recv_wr: qp.recv_grant,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        self.empty_queues(port, slot);
        let p = self.port(port);
        p.counters.qps += 1;
        p.counters.qps_ever += 1;
        p.counters.qps_peak = p.counters.qps_peak.max(p.counters.qps);
        Ok((slot, number, granted))
    }

    /// Takes a queue pair's work away, with its completions that nobody has polled.
    pub fn empty_queues(&mut self, port: usize, slot: usize) {
        self.land(port, slot, u64::MAX);
        let qp = &mut self.port(port).qps[slot];
        let at = |position: u64| position as usize % RING;
        let sends = (qp.send_polled..qp.send_sent).filter(|i| qp.sends[at(*i)].hidden == 0).count() as u32;
        let done = |i: &u64| qp.recvs[at(*i)].done != 0 && qp.recvs[at(*i)].hidden == 0;
        let recvs = (qp.recv_polled..qp.recv_matched).filter(done).count() as u32;
        let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
        (qp.send_frames, qp.recv_frames, qp.dead_over, qp.last_len, qp.sending_until) = (0, 0, 0, 0, 0);
        (qp.send_tail, qp.send_matched, qp.send_sent, qp.send_arrived, qp.send_polled) = (0, 0, 0, 0, 0);
        (qp.recv_tail, qp.recv_matched, qp.recv_polled) = (0, 0, 0);
        for (cq, n) in [(send_cq, sends), (recv_cq, recvs)] {
            let queue = &mut self.port(port).cqs[cq as usize];
            queue.waiting = queue.waiting.saturating_sub(n);
        }
    }

    pub fn destroy_qp(&mut self, port: usize, slot: usize) {
        self.empty_queues(port, slot);
        self.port(port).qps[slot].used = 0;
        self.port(port).counters.qps -= 1;
    }
}

/// The longest completion queue.
pub fn max_cqe(apple: bool) -> i32 {
    if apple { 16383 } else { 65535 }
}
