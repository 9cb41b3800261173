//! A device's port: its state, and its addresses.

use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use super::list::number;
use crate::fabric::verbs::ffi::Library;
use crate::fabric::verbs::ffi::abi::*;

/// An active port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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

/// The first active port; else the state of the last one (0: none answered).
pub fn active_port(
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
pub fn gids(library: &Library, context: NonNull<IbvContext>, port: u8, attr: &IbvPortAttr) -> Vec<Gid> {
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
}
