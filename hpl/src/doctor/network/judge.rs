//! What is wrong with a link, found by comparing it with the others, with its way back, and with its interfaces.

use super::super::facts::{Facts, Kind, Nic};
use super::super::finding::Finding;
use super::show::{name, rate};
use super::{Link, Network};

/// A link that has less than this part of what the others have is slow.
pub const SLOW: f64 = 0.5;
/// One that has less than this is named before each run.
const FAR_SLOWER: f64 = 0.25;
/// Two directions that differ by more than this are not alike.
pub const UNLIKE: f64 = 2.0;
/// A link that answers so many times later than the others...
const LATE: f64 = 4.0;
/// ...and so many microseconds, is late.
const LATE_US: f64 = 200.0;
/// What an interface may cost of its own speed.
const OF_ITS_SPEED: f64 = 0.5;

/// What a good link has, whichever way is up: of a host with a bad port up to two thirds of the links are bad.
pub fn usual(values: impl Iterator<Item = f64>, more_is_better: bool) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|v| v.is_finite() && *v > 0.0).collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some(values[if more_is_better { (3 * last).div_ceil(4) } else { last / 4 }])
}

/// What good links of as many cables as this one have.
fn others(network: &Network, like: &Link, value: impl Fn(&Link) -> f64, more_is_better: bool) -> Option<f64> {
    usual(network.links.iter().filter(|l| l.cables == like.cables).map(value), more_is_better)
}

/// Links, by index, that are far slower than others of as many cables, and what these have, in bytes a second.
pub fn far_slower(network: &Network) -> Vec<(usize, f64)> {
    slower(network, FAR_SLOWER)
}

fn slower(network: &Network, part: f64) -> Vec<(usize, f64)> {
    let rates = network.links.iter().map(|link| others(network, link, |l| l.bytes_per_second, true));
    let slow = |(i, others): (usize, Option<f64>)| Some((i, others?));
    let all = rates.enumerate().filter_map(slow);
    all.filter(|&(i, others)| network.links[i].bytes_per_second < part * others).collect()
}

/// All that is recognised; `facts` of the hosts as far as they are known.
pub fn judge(network: &Network, facts: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    let slow = slower(network, SLOW);
    for (i, link) in network.links.iter().enumerate() {
        let speed = link.bytes_per_second;
        if let Some(back) = network.back(link).filter(|back| speed * UNLIKE < back.bytes_per_second) {
            let seen = format!("{} there, {} back: {}", rate(speed), rate(back.bytes_per_second), link.way);
            found.push(
                Finding::warning("asymmetric-link", name(network, link), seen)
                    .because(
                        "one direction loses packets or waits: half duplex, a bad cable, or a busy receiver",
                    )
                    .then("count errors and drops at both ends: `ip -s link` (Linux), `netstat -i` (macOS)"),
            );
        } else if let Some((_, others)) = slow.iter().find(|(slow, _)| *slow == i) {
            let seen = format!("{} where others have {}: {}", rate(speed), rate(*others), link.way);
            found.push(
                Finding::warning("slow-link", name(network, link), seen)
                    .because(
                        "the whole job waits for its slowest link: a cable, port or switch that runs at a lower \
                         speed, or other traffic",
                    )
                    .then("see what both ends have agreed on: `ethtool INTERFACE` (Linux), `ifconfig INTERFACE` (macOS)")
                    .then("another cable, another port; then measure again"),
            );
        }
    }
    for link in network.links.iter().filter(|l| l.from < l.to) {
        let Some(usual) = others(network, link, |l| l.latency_us, false) else { continue };
        if link.latency_us > LATE * usual && link.latency_us > usual + LATE_US {
            let seen =
                format!("answers after {:.0} us, others after {usual:.0} us: {}", link.latency_us, link.way);
            found.push(
                Finding::warning("late-link", name(network, link), seen)
                    .because("it takes a way round (Wi-Fi, a VPN, another site), or a core at that end sleeps deeply")
                    .then("name the interface or subnet that connects the hosts directly"),
            );
        }
    }
    found.extend(network.links.iter().flat_map(|link| by_interfaces(network, link, facts)));
    found
}

fn by_interfaces(network: &Network, link: &Link, facts: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    let facts_of = |host: usize| facts.iter().find(|f| f.host == network.hosts[host]);
    let nic = |host: usize, link: &Link| -> Option<&Nic> {
        let name = link.interface()?;
        facts_of(host)?.nics.iter().find(|n| n.name == name)
    };
    let Some(mine) = nic(link.from, link) else { return found };
    let cabled = |host: usize| {
        let wired = |n: &&Nic| matches!(n.kind, Kind::Ethernet | Kind::Thunderbolt) && n.up;
        facts_of(host).and_then(|f| f.nics.iter().find(wired))
    };
    match (mine.kind, cabled(link.from), cabled(link.to)) {
        (Kind::Tunnel, ..) => found.push(
            Finding::warning("interface-tunnel", name(network, link), format!("goes through {}", mine.name))
                .because("a VPN or virtual network costs more than the cable under it")
                .then("name the interface or subnet of the cable"),
        ),
        (Kind::Wifi, Some(here), Some(there)) => found.push(
            Finding::warning(
                "interface-wifi",
                name(network, link),
                format!("goes over Wi-Fi ({})", mine.name),
            )
            .because(format!("both hosts have a cable: {} here, {} there", here.name, there.name))
            .then("name the interface or subnet of the cable, or switch Wi-Fi off"),
        ),
        _ => {}
    }
    if let Some(theirs) = network.back(link).and_then(|back| nic(link.to, back))
        && let (Some(a), Some(b)) = (mine.mtu, theirs.mtu)
        && a != b
        && link.from < link.to
    {
        let seen = format!("{} has an MTU of {a}, {} of {b}", mine.name, theirs.name);
        found.push(
            Finding::warning("mtu-differs", name(network, link), seen)
                .because("packets that one end may send are too long for the other: they are lost or cut")
                .then("the same at both ends, and in the switch between: `ip link set INTERFACE mtu N`, `ifconfig INTERFACE mtu N`"),
        );
    }
    if let Some(mbits) = mine.mbits.filter(|m| *m > 0) {
        let most = mbits as f64 * 1e6 / 8.0;
        if link.bytes_per_second < OF_ITS_SPEED * most {
            let seen = format!(
                "{} over {}, which could carry {}",
                rate(link.bytes_per_second),
                mine.name,
                rate(most)
            );
            found.push(
                Finding::note("below-its-speed", name(network, link), seen)
                    .because("more than half of the interface is not used: the other end or a switch is slower, or one connection cannot fill it")
                    .then("compare with `iperf3` between the two hosts"),
            );
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three hosts on cables of 1 GB/s and 30 us.
    fn network() -> Network {
        let mut links = vec![];
        for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
            let way = format!("tcp over en{from} (10.0.0.{from} to 10.0.0.{to})");
            links.push(Link {
                from,
                to,
                way,
                cables: 1,
                latency_us: 30.0,
                bytes_per_second: 1e9,
                clock_ahead_ms: 0,
            });
        }
        Network { hosts: ["a", "b", "c"].map(String::from).to_vec(), links }
    }

    fn facts() -> Vec<Facts> {
        ["a", "b", "c"]
            .iter()
            .enumerate()
            .map(|(i, host)| Facts {
                host: (*host).into(),
                nics: vec![Nic {
                    name: format!("en{i}"),
                    kind: Kind::Ethernet,
                    up: true,
                    mtu: Some(1500),
                    mbits: Some(10_000),
                }],
                ..Facts::default()
            })
            .collect()
    }

    fn told(change: impl FnOnce(&mut Network, &mut Vec<Facts>)) -> Vec<(&'static str, String)> {
        let (mut network, mut facts) = (network(), facts());
        change(&mut network, &mut facts);
        judge(&network, &facts).into_iter().map(|f| (f.id, f.check)).collect()
    }

    fn one(id: &'static str, check: &str) -> Vec<(&'static str, String)> {
        vec![(id, check.to_string())]
    }

    #[test]
    fn links_that_are_alike_are_not_blamed() {
        assert_eq!(told(|_, _| {}), []);
        assert_eq!(told(|n, _| n.links.clear()), []);
        assert_eq!(told(|_, f| f.clear()), [], "what is not known is not blamed");
        // Two hosts that are slow in both directions have nothing to be compared with.
        let two = told(|n, f| {
            n.links.truncate(2);
            f.clear();
            n.links[0].bytes_per_second = 1e6;
            n.links[1].bytes_per_second = 1.5e6;
        });
        assert_eq!(two, []);
    }

    #[test]
    fn a_slow_link_is_named_in_its_direction() {
        let both = |n: &mut Network, part: f64| {
            for link in &mut n.links[2..4] {
                link.bytes_per_second *= part;
            }
        };
        let found = told(|n, _| both(n, 0.4));
        assert!(
            found.contains(&("slow-link", "a to c".into()))
                && found.contains(&("slow-link", "c to a".into()))
        );
        let mut slow = network();
        both(&mut slow, 0.4);
        assert_eq!(far_slower(&slow), []);
        both(&mut slow, 0.5);
        assert_eq!(far_slower(&slow), [(2, 1e9), (3, 1e9)]);
        // Who is reached through another host is not compared with who has a cable.
        slow.links[2..4].iter_mut().for_each(|l| l.cables = 2);
        assert_eq!(far_slower(&slow), []);
        // One direction of it.
        let one_way = told(|n, f| {
            f.clear();
            n.links[3].bytes_per_second = 0.3e9;
        });
        assert_eq!(one_way, one("asymmetric-link", "c to a"));
    }

    /// Of three hosts one has a bad port: two thirds of the links are slow, and these are blamed.
    #[test]
    fn a_bad_port() {
        let found = told(|n, f| {
            f.clear();
            n.links.iter_mut().filter(|l| l.from == 2 || l.to == 2).for_each(|l| {
                l.bytes_per_second /= 10.0;
                l.latency_us *= 50.0;
            });
        });
        let slow = found.iter().filter(|(id, check)| *id == "slow-link" && check.contains('c')).count();
        let late = found.iter().filter(|(id, check)| *id == "late-link" && check.ends_with('c')).count();
        assert_eq!((slow, late, found.len()), (4, 2, 6), "{found:?}");
    }

    #[test]
    fn the_two_directions_of_two_hosts() {
        let found = told(|n, f| {
            n.links.truncate(2);
            f.clear();
            n.links[0].bytes_per_second = 3e9;
            n.links[1].bytes_per_second = 1e9;
        });
        assert_eq!(found, one("asymmetric-link", "b to a"));
    }

    #[test]
    fn a_late_answer() {
        let late = |us: f64| told(move |n, _| n.links[4..].iter_mut().for_each(|l| l.latency_us = us));
        assert_eq!(late(2000.0), one("late-link", "b to c"));
        assert_eq!(late(150.0), [], "what matters to nobody");
    }

    #[test]
    fn interfaces_that_are_not_the_cable() {
        let wifi = told(|n, f| {
            let air = Nic { name: "wlan0".into(), kind: Kind::Wifi, up: true, ..Nic::default() };
            f[0].nics.push(air);
            n.links[0].way = "tcp over wlan0 (10.1.0.1 to 10.1.0.2)".into();
        });
        assert_eq!(wifi, one("interface-wifi", "a to b"));
        let tunnel = told(|n, f| {
            f[1].nics.push(Nic { name: "utun3".into(), kind: Kind::Tunnel, up: true, ..Nic::default() });
            n.links[1].way = "tcp over utun3 (10.1.0.1 to 10.1.0.2)".into();
        });
        assert_eq!(tunnel, one("interface-tunnel", "b to a"));
        assert_eq!(told(|_, f| f[2].nics[0].mtu = Some(9000)).len(), 2, "of c to a and to b");
        let fast = told(|_, f| f[0].nics[0].mbits = Some(100_000));
        assert_eq!(fast.len(), 2);
        assert!(
            fast.iter().all(|(id, check)| *id == "below-its-speed" && check.starts_with("a to ")),
            "{fast:?}"
        );
    }
}
