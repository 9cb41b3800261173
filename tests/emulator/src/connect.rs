//! `ibv_modify_qp`: the steps from RESET to RTS, and what each wants.

use crate::abi::*;
use crate::nic;
use crate::objects::Errno;
use crate::shared::Guard;
use crate::world::{Kind, Profile, World};

/// The GIDs of a device: the link-local one, and, if its interface has an IPv4 address, the mapped one.
pub fn gids(world: &World, device: usize, age_ns: u64) -> Vec<Gid> {
    let mut local = [0u8; 16];
    local[..2].copy_from_slice(&[0xfe, 0x80]);
    local[8..].copy_from_slice(&[0x02, 0, 0, 0xff, 0xfe, 0, 0, device as u8 + 1]);
    let late = world.traps.iter().any(|t| {
        let here = t.device.as_ref().is_none_or(|name| *name == world.devices[device].name);
        here && matches!(t.kind, Kind::LateGid { ms } if age_ns < ms * 1_000_000)
    });
    let mapped = world.devices[device].address.filter(|_| !late).map(|v4| {
        let mut gid = [0u8; 16];
        gid[10..12].copy_from_slice(&[0xff, 0xff]);
        gid[12..].copy_from_slice(&v4);
        Gid(gid)
    });
    [Some(Gid(local)), mapped].into_iter().flatten().collect()
}

const LINK_LOCAL: [u8; 2] = [0xfe, 0x80];

impl Guard<'_> {
    /// Moves a queue pair on. The error is the provider's number, positive.
    pub fn modify(&mut self, port: usize, slot: usize, attr: &QpAttr, mask: i32) -> Result<(), i32> {
        if mask & QP_STATE == 0 {
            return Err(Errno::INVALID);
        }
        let (from, kind) = (self.port(port).qps[slot].state, self.port(port).qps[slot].kind);
        match (from, attr.qp_state) {
            (_, QPS_RESET) => {
                self.empty_queues(port, slot);
                self.port(port).qps[slot].state = QPS_RESET;
            }
            (_, QPS_ERR) => self.step_error(port, slot),
            (QPS_RESET, QPS_INIT) => self.step_init(port, slot, attr, mask)?,
            (QPS_INIT, QPS_RTR) => self.step_rtr(port, slot, attr, mask, kind)?,
            (QPS_RTR, QPS_RTS) => self.step_rts(port, slot, mask, kind)?,
            _ => return Err(Errno::INVALID),
        }
        Ok(())
    }

    fn step_error(&mut self, port: usize, slot: usize) {
        let pd = self.port(port).qps[slot].pd as usize;
        self.port(port).qps[slot].state = QPS_ERR;
        if self.shared.world().profile == Profile::Apple {
            // Nothing is flushed; the domain's regions cannot be unmapped any more.
            self.port(port).pds[pd].erred = 1;
        } else {
            self.flush(port, slot);
        }
    }

    fn step_init(&mut self, port: usize, slot: usize, attr: &QpAttr, mask: i32) -> Result<(), i32> {
        if mask != QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS
            || attr.port_num != 1
            || attr.pkey_index != 0
        {
            return Err(Errno::INVALID);
        }
        let qp = &mut self.port(port).qps[slot];
        (qp.access, qp.state) = (attr.qp_access_flags, QPS_INIT);
        Ok(())
    }

    fn step_rtr(&mut self, port: usize, slot: usize, attr: &QpAttr, mask: i32, kind: i32) -> Result<(), i32> {
        let mut wanted = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
        if kind == QPT_RC {
            wanted |= QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
        }
        let route = &attr.ah_attr;
        if mask != wanted
            || !(1..=MTU_4096).contains(&attr.path_mtu)
            || route.is_global != 1
            || route.port_num != 1
        {
            return Err(Errno::INVALID);
        }
        let (world, age) = (self.shared.world(), self.shared.age());
        let own = gids(world, port, age);
        let from = own.get(route.grh.sgid_index as usize).ok_or(Errno::INVALID)?;
        // Addresses of one kind only: a mapped GID does not reach a link-local one.
        if (from.0[..2] == LINK_LOCAL) != (route.grh.dgid.0[..2] == LINK_LOCAL) {
            return Err(Errno::INVALID);
        }
        let (unreachable, apple) = match world.profile {
            Profile::Apple => (Errno::APPLE_TIMED_OUT, true),
            Profile::Nic => (libc::EHOSTUNREACH, false),
        };
        if self.is_down() {
            return Err(if apple { unreachable } else { libc::ENETUNREACH });
        }
        let wire = world.wires.iter().find(|w| w.devices.contains(&port)).ok_or(unreachable)?;
        let there = |d: &&usize| (**d != port || !apple) && gids(world, **d, age).contains(&route.grh.dgid);
        let peer = *wire.devices.iter().find(there).ok_or(unreachable)?;
        if nic::place(attr.dest_qp_num).0 != peer && apple {
            return Err(Errno::INVALID);
        }
        let qp = &mut self.port(port).qps[slot];
        (qp.peer, qp.peer_number, qp.state) = (peer as u32, attr.dest_qp_num, QPS_RTR);
        self.posted(port, slot);
        Ok(())
    }

    fn step_rts(&mut self, port: usize, slot: usize, mask: i32, kind: i32) -> Result<(), i32> {
        let mut wanted = QP_STATE | QP_SQ_PSN;
        if kind == QPT_RC {
            wanted |= QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC;
        }
        if mask != wanted {
            return Err(Errno::INVALID);
        }
        let dead = self.draw(port, u32::MAX, |k| match k {
            Kind::DeadPair { over } => Some(over as u64 + 1),
            _ => None,
        });
        let qp = &mut self.port(port).qps[slot];
        qp.state = QPS_RTS;
        qp.dead_over = dead.map_or(0, |(over, _)| over);
        self.posted(port, slot);
        Ok(())
    }
}
