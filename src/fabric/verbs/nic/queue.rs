//! Queue pairs of a device: made, connected, posted to, and what comes out of their completion queue.

use std::ffi::c_int;
use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use super::Nic;
use super::list::{last_errno, number};
use super::port::Gid;
use crate::fabric::verbs::ffi::abi::*;
use crate::fabric::verbs::trouble::{Refusal, Step};

/// What kind of connection a queue pair is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Service {
    /// Reliable: the device repeats what was lost and reports what cannot be delivered.
    Rc,
    /// Unreliable: what is lost is lost without a word.
    Uc,
}

impl Service {
    /// The step that makes a queue pair of this kind.
    pub fn step(self) -> Step {
        match self {
            Service::Rc => Step::CreateRc,
            Service::Uc => Step::CreateQp,
        }
    }
}

/// A queue pair of a [`Nic`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpId(pub(super) usize);

/// What the device granted a queue pair: work requests, or 4 KiB frames on devices that count those.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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

pub struct Qp {
    raw: NonNull<IbvQp>,
    service: Service,
}

impl Nic {
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
        let raw = raw.ok_or_else(|| self.refuse(service.step(), last_errno()))?;
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
}
