//! Which of this host's addresses carry the job's data.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::fabric::rendezvous::door::refused;

/// Interfaces that lead out of the cluster, or nowhere, though they look like a network: VPNs, containers,
/// virtual machines, phones.
const TUNNELS: [&str; 24] = [
    "utun",
    "tun",
    "tap",
    "ipsec",
    "ppp",
    "wg",
    "tailscale",
    "zt",
    "gif",
    "stf",
    "docker",
    "podman",
    "virbr",
    "vmnet",
    "vboxnet",
    "lxc",
    "lxd",
    "br-",
    "cni",
    "flannel",
    "cali",
    "awdl",
    "llw",
    "anpi",
];

/// Whether an interface of this name leads out of the cluster, or nowhere: a VPN's, containers', virtual machines'.
pub fn is_tunnel(name: &str) -> bool {
    TUNNELS.iter().any(|prefix| name.starts_with(prefix))
}

/// An interface that may carry data: by name (`en5`), address (`10.0.0.7`) or subnet (`10.0.0.0/24`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum On {
    /// By name.
    Name(String),
    /// By the first bits of its address.
    Subnet(IpAddr, u8),
}

impl std::fmt::Display for On {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            On::Name(name) => f.write_str(name),
            On::Subnet(address, bits) => write!(f, "{address}/{bits}"),
        }
    }
}

impl FromStr for On {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |problem: &str| {
            Error::argument("interface", text, problem, "give a name (en5) or a subnet (10.0.0.0/24)")
        };
        let (address, bits) = match text.split_once('/') {
            None => match text.parse::<IpAddr>() {
                Ok(address) => return Ok(On::Subnet(address, if address.is_ipv4() { 32 } else { 128 })),
                Err(_) if text.is_empty() => return Err(wrong("is empty")),
                Err(_) => return Ok(On::Name(text.into())),
            },
            Some(parts) => parts,
        };
        let address: IpAddr = address.parse().map_err(|_| wrong("is not an address before the `/`"))?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.parse().ok().filter(|bits| *bits <= most);
        Ok(On::Subnet(address, bits.ok_or_else(|| wrong("has no number of bits after the `/`"))?))
    }
}

impl On {
    fn matches(&self, interface: &Interface) -> bool {
        match self {
            On::Name(name) => *name == interface.name,
            On::Subnet(address, bits) => {
                let bits = if address.is_ipv4() { 96 + bits } else { *bits };
                address.is_ipv4() == interface.address.is_ipv4()
                    && common_bits(*address, interface.address) >= bits
            }
        }
    }
}

/// How many first bits two addresses have in common, of the 128 that an IPv4 address has as IPv6.
fn common_bits(a: IpAddr, b: IpAddr) -> u8 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => 96 + (a.to_bits() ^ b.to_bits()).leading_zeros() as u8,
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() as u8,
        _ => 0,
    }
}

/// One address of an interface of this host that is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    pub name: String,
    pub address: IpAddr,
    /// How many first bits its subnet has in common, counted as in an IPv6 address; 128: this address only.
    pub prefix: u8,
    /// Number of the interface: part of a link-local address, on this host only.
    pub scope: u32,
    pub loopback: bool,
}

pub fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

impl Interface {
    /// A place of this host; `port` 0: any that is free.
    pub fn socket(&self, port: u16) -> SocketAddr {
        place(self.address, port, self.scope)
    }

    fn is_tunnel(&self) -> bool {
        is_tunnel(&self.name)
    }

    /// Whether an address is in its subnet.
    pub fn shares(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4() && common_bits(self.address, address) >= self.prefix
    }
}

fn place(address: IpAddr, port: u16, scope: u32) -> SocketAddr {
    match address {
        IpAddr::V4(v4) => SocketAddr::V4(SocketAddrV4::new(v4, port)),
        IpAddr::V6(v6) => {
            let scope = if is_link_local(address) { scope } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(v6, port, 0, scope))
        }
    }
}

/// The addresses of this host's interfaces that are up.
///
/// # Errors
/// [`Error::System`].
pub fn all() -> Result<Vec<Interface>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: writes a pointer to a list that is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(refused("the list of network interfaces", &std::io::Error::last_os_error()));
    }
    let (mut found, mut at) = (Vec::new(), list);
    // SAFETY: the list's entries are valid until it is freed.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
        // SAFETY: as above; null or a socket address of the family it names.
        if let Some(address) = unsafe { address_of(entry.ifa_addr) }.filter(|_| up) {
            // SAFETY: as above; a string with an end.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            // SAFETY: as above.
            let scope = unsafe { libc::if_nametoindex(entry.ifa_name) };
            let loopback = entry.ifa_flags & libc::IFF_LOOPBACK as libc::c_uint != 0;
            // SAFETY: as above.
            let mask = unsafe { address_of(entry.ifa_netmask) };
            let prefix = mask.map_or(128, |mask| prefix_of(address, mask));
            let name = name.to_string_lossy().into_owned();
            found.push(Interface { name, address, prefix, scope, loopback });
        }
    }
    // SAFETY: from `getifaddrs`, and not used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// Bits of a subnet.
fn prefix_of(address: IpAddr, mask: IpAddr) -> u8 {
    match (address, mask) {
        (IpAddr::V4(_), IpAddr::V4(mask)) => 96 + mask.to_bits().leading_ones() as u8,
        (IpAddr::V6(_), IpAddr::V6(mask)) => mask.to_bits().leading_ones() as u8,
        _ => 128,
    }
}

/// # Safety
/// `address` is null, or points to a socket address of the family that it names.
unsafe fn address_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise.
    let head = unsafe { address.as_ref() }?;
    // There, a mask may lack its end.
    #[cfg(target_vendor = "apple")]
    if usize::from(head.sa_len) < if head.sa_family == libc::AF_INET6 as u8 { 28 } else { 16 } {
        return None;
    }
    match head.sa_family.into() {
        libc::AF_INET => {
            // SAFETY: of this family; maybe not aligned.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            let mut octets = v6.sin6_addr.s6_addr;
            if octets[..2] == [0xFE, 0x80] {
                // macOS may hold the interface's number in there, which is no part of the address.
                octets[2..4].fill(0);
            }
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

/// Those of these addresses that no interface of this host has that is up.
///
/// # Errors
/// [`Error::System`].
pub fn not_here(addresses: &[IpAddr]) -> Result<Vec<IpAddr>> {
    let all = all()?;
    let is_here = |address: &IpAddr| all.iter().any(|i| i.address == *address);
    Ok(addresses.iter().copied().filter(|address| !is_here(address)).collect())
}

/// Those of `all` that carry data. `on`: only these; empty: every network that is not a tunnel, or loopback
/// when all ranks are on `one_host`. `named`: addresses of which the user has said that they are in use.
///
/// # Errors
/// [`Error::Argument`] with what there is, when nothing is left.
pub fn choose(all: &[Interface], on: &[On], named: &[IpAddr], one_host: bool) -> Result<Vec<Interface>> {
    let wanted = |i: &&Interface| match on {
        [] if one_host => i.loopback,
        [] => !i.loopback && (!i.is_tunnel() || named.contains(&i.address)),
        on => on.iter().any(|on| on.matches(i)),
    };
    let mut chosen: Vec<Interface> = all.iter().filter(wanted).cloned().collect();
    // Interfaces that have a real address do not need their link-local one.
    let real: Vec<String> =
        chosen.iter().filter(|i| !is_link_local(i.address)).map(|i| i.name.clone()).collect();
    if on.is_empty() {
        chosen.retain(|i| !is_link_local(i.address) || !real.contains(&i.name) || named.contains(&i.address));
    }
    if chosen.is_empty() {
        let host = crate::fabric::host_name();
        if all.is_empty() {
            let problem = format!("no interface of {host} is up, not even loopback");
            let remedy = "ranks of one host need that too: `ip link set lo up` (a container without a network has it down)";
            return Err(Error::argument("interfaces for data", "any", problem, remedy));
        }
        let there: Vec<String> = all.iter().map(|i| format!("{} {}", i.name, i.address)).collect();
        let on: Vec<String> = on.iter().map(On::to_string).collect();
        return Err(Error::argument(
            "interfaces for data",
            if on.is_empty() { "any".into() } else { on.join(", ") },
            format!("{host} has none such, only: {}", there.join(", ")),
            "name the interface or subnet that connects the hosts",
        ));
    }
    Ok(chosen)
}

/// Where to try to reach a peer that listens at `theirs`, best first: those in a subnet of ours, as far as
/// their first bits tell. With each, the interface of ours that is nearest.
pub fn candidates(ours: &[Interface], theirs: &[(IpAddr, u16)]) -> Vec<(SocketAddr, String)> {
    let mut found = Vec::new();
    for (address, port) in theirs {
        if is_link_local(*address) {
            // Which of our interfaces leads there its address does not say.
            for i in ours.iter().filter(|i| is_link_local(i.address)) {
                found.push((0, place(*address, *port, i.scope), i.name.clone()));
            }
            continue;
        }
        let same_kind = ours.iter().filter(|i| i.address.is_ipv4() == address.is_ipv4());
        if let Some(i) = same_kind.max_by_key(|i| common_bits(i.address, *address)) {
            found.push((1 + common_bits(i.address, *address), place(*address, *port, 0), i.name.clone()));
        }
    }
    found.sort_by_key(|(bits, ..)| std::cmp::Reverse(*bits));
    found.into_iter().map(|(_, place, name)| (place, name)).collect()
}

/// A subnet that this host has in common with a peer that listens at `theirs`: our interface, and the peer's address there. (An
/// address that both have, as those of virtual machines, leads nowhere; link-local ones are the same on every cable.)
pub fn neighbourhood<'a>(ours: &'a [Interface], theirs: &[(IpAddr, u16)]) -> Option<(&'a Interface, IpAddr)> {
    let is_own = |address: IpAddr| ours.iter().any(|i| i.address == address);
    let there = theirs.iter().map(|(address, _)| *address).filter(|a| !is_link_local(*a) && !is_own(*a));
    there.filter_map(|address| ours.iter().find(|i| i.shares(address)).map(|i| (i, address))).next()
}

/// A subnet of two hosts is a cable.
const CABLE: u8 = 126;

/// The cables to a peer that listens at `theirs`, if there are several: subnets that both ends have, which are
/// cables by their size, or were `named` by the user. (Of others it is not known whether they are equally fast,
/// and a put is as slow as its slowest part.) Where to reach the peer over each, and our interface.
pub fn cables(ours: &[Interface], theirs: &[(IpAddr, u16)], named: bool) -> Vec<(SocketAddr, String)> {
    let mut found: Vec<(SocketAddr, String)> = Vec::new();
    for i in ours.iter().filter(|i| (named || i.prefix >= CABLE) && !is_link_local(i.address)) {
        let there = |(address, port): &(IpAddr, u16)| {
            let place = place(*address, *port, 0);
            (i.shares(*address) && found.iter().all(|(taken, name)| *taken != place && *name != i.name))
                .then_some(place)
        };
        if let Some(place) = theirs.iter().find_map(there) {
            found.push((place, i.name.clone()));
        }
    }
    if found.len() > 1 { found } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, address: &str, scope: u32) -> Interface {
        let address: IpAddr = address.parse().unwrap();
        let prefix = if address.is_ipv4() { 96 + 24 } else { 64 };
        Interface { name: name.into(), address, prefix, scope, loopback: name == "lo" }
    }

    #[test]
    fn a_subnet_in_common() {
        let ours = [
            interface("en0", "192.168.1.20", 1),
            interface("en1", "10.0.2.15", 2),
            interface("en2", "fe80::1", 3),
        ];
        let found = |theirs: &[&str]| {
            let theirs: Vec<(IpAddr, u16)> = theirs.iter().map(|a| (a.parse().unwrap(), 7)).collect();
            neighbourhood(&ours, &theirs).map(|(i, address)| (i.name.clone(), address.to_string()))
        };
        let en0 = Some(("en0".to_string(), "192.168.1.21".to_string()));
        assert_eq!(found(&["10.0.2.15", "fe80::2", "192.168.2.1", "192.168.1.21"]), en0);
        assert_eq!(found(&["10.0.2.15", "fe80::2", "192.168.2.1"]), None);
    }

    #[test]
    fn two_cables_are_found_and_other_subnets_only_if_named() {
        let cable = |name, address| Interface { prefix: 126, ..interface(name, address, 1) };
        let ours = [
            interface("en0", "192.168.1.20", 1),
            interface("en0", "fd00::20", 1),
            cable("en5", "10.0.0.1"),
            cable("en6", "10.0.0.5"),
            cable("en7", "10.0.0.9"),
        ];
        let theirs: Vec<(IpAddr, u16)> = ["10.0.0.6", "192.168.1.21", "fd00::21", "10.0.0.2"]
            .iter()
            .map(|address| (address.parse().unwrap(), 7))
            .collect();
        let found = |named, theirs: &[(IpAddr, u16)]| -> Vec<String> {
            cables(&ours, theirs, named).into_iter().map(|(place, name)| format!("{place} {name}")).collect()
        };
        assert_eq!(found(false, &theirs), ["10.0.0.2:7 en5", "10.0.0.6:7 en6"]);
        assert_eq!(found(true, &theirs), ["192.168.1.21:7 en0", "10.0.0.2:7 en5", "10.0.0.6:7 en6"]);
        assert_eq!(found(true, &theirs[..1]), [""; 0], "one is nothing to share out over");
        let prefix = |address: &str, mask: &str| prefix_of(address.parse().unwrap(), mask.parse().unwrap());
        assert_eq!(prefix("10.0.0.1", "255.255.255.252"), CABLE);
        assert_eq!(prefix("fe80::1", "ffff:ffff:ffff:ffff::"), 64);
    }

    #[test]
    fn the_loopbacks_subnet_is_known() {
        let all = all().unwrap();
        let lo = all.iter().find(|i| i.address == IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(lo.map(|i| i.prefix), Some(96 + 8), "{all:?}");
    }

    /// K7-05 of the field's cases: a tunnel comes first in the list.
    fn laptop() -> Vec<Interface> {
        vec![
            interface("utun3", "10.8.0.2", 1),
            interface("lo", "127.0.0.1", 2),
            interface("docker0", "172.17.0.1", 3),
            interface("en0", "192.168.1.20", 4),
            interface("en0", "fe80::1", 4),
            interface("en5", "fe80::5", 5),
            interface("virbr0", "192.168.122.1", 6),
        ]
    }

    fn names(chosen: &[Interface]) -> Vec<String> {
        chosen.iter().map(|i| format!("{} {}", i.name, i.address)).collect()
    }

    #[test]
    fn tunnels_are_not_taken_unless_asked_for() {
        let chosen = |on: &[&str], one_host| {
            let on: Vec<On> = on.iter().map(|text| text.parse().unwrap()).collect();
            choose(&laptop(), &on, &[], one_host).map(|chosen| names(&chosen))
        };
        assert_eq!(chosen(&[], false).unwrap(), ["en0 192.168.1.20", "en5 fe80::5"]);
        assert_eq!(chosen(&[], true).unwrap(), ["lo 127.0.0.1"]);
        let named = ["10.8.0.2", "fe80::1", "10.9.9.9"].map(|address| address.parse().unwrap());
        let with_named = choose(&laptop(), &[], &named, false).map(|chosen| names(&chosen)).unwrap();
        assert_eq!(with_named, ["utun3 10.8.0.2", "en0 192.168.1.20", "en0 fe80::1", "en5 fe80::5"]);
        assert_eq!(chosen(&["utun3"], false).unwrap(), ["utun3 10.8.0.2"]);
        assert_eq!(chosen(&["en0"], true).unwrap(), ["en0 192.168.1.20", "en0 fe80::1"]);
        assert_eq!(chosen(&["172.16.0.0/12", "en5"], false).unwrap(), ["docker0 172.17.0.1", "en5 fe80::5"]);
        let e = chosen(&["ib0"], false).unwrap_err();
        assert_eq!(e.exit_code(), 2);
        assert!(e.to_string().contains("ib0") && e.to_string().contains("utun3 10.8.0.2"), "{e}");
    }

    #[test]
    fn what_an_interface_may_be_called() {
        assert_eq!("en5".parse::<On>().unwrap(), On::Name("en5".into()));
        assert_eq!("10.1.2.0/24".parse::<On>().unwrap(), On::Subnet("10.1.2.0".parse().unwrap(), 24));
        assert_eq!("fe80::/10".parse::<On>().unwrap(), On::Subnet("fe80::".parse().unwrap(), 10));
        assert_eq!("::1".parse::<On>().unwrap(), On::Subnet("::1".parse().unwrap(), 128));
        for wrong in ["", "10.0.0.0/33", "10.0.0.0/", "en5/24", "fe80::/129"] {
            assert_eq!(wrong.parse::<On>().unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }

    #[test]
    fn near_addresses_are_tried_first_and_link_local_ones_on_every_interface() {
        let theirs = [
            ("fe80::9".parse().unwrap(), 1),
            ("10.8.0.9".parse().unwrap(), 2),
            ("192.168.1.9".parse().unwrap(), 3),
        ];
        let found: Vec<String> = candidates(&laptop(), &theirs)
            .into_iter()
            .map(|(place, name)| format!("{place} {name}"))
            .collect();
        let expected = ["10.8.0.9:2 utun3", "192.168.1.9:3 en0", "[fe80::9%4]:1 en0", "[fe80::9%5]:1 en5"];
        assert_eq!(found, expected);
    }

    #[test]
    fn this_host_has_a_loopback() {
        let all = all().unwrap();
        let lo = choose(&all, &[], &[], true).unwrap();
        assert!(lo.iter().any(|i| i.address == IpAddr::V4(Ipv4Addr::LOCALHOST)), "{all:?}");
        let strange = "192.0.2.1".parse().unwrap();
        assert_eq!(not_here(&[IpAddr::V4(Ipv4Addr::LOCALHOST), strange]).unwrap(), [strange]);
    }
}
