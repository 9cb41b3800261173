//! The links as people read them: two matrices, or, of many hosts, their best, usual and worst.

use std::fmt::Write;

use super::super::table::Table;
use super::{Link, Network};

/// A matrix of more hosts is too wide to be read.
const WIDEST: usize = 12;

/// What a link is called: `a to b`.
pub fn name(network: &Network, link: &Link) -> String {
    let host = |i: usize| network.hosts.get(i).map_or("?", String::as_str);
    format!("{} to {}", host(link.from), host(link.to))
}

/// `1.18 GB/s`, `940 kB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    match bytes_per_second {
        r if r >= 1e8 => format!("{:.2} GB/s", r / 1e9),
        r if r >= 1e5 => format!("{:.1} MB/s", r / 1e6),
        r => format!("{:.1} kB/s", r / 1e3),
    }
}

/// All of it, after the hosts' own tables. Nothing for a single host.
pub fn text(network: &Network) -> String {
    let mut text = String::new();
    if network.links.is_empty() {
        return text;
    }
    let _ = writeln!(text, "network\n");
    if network.hosts.len() > WIDEST {
        let _ = writeln!(text, "{}", summary(network));
        return text;
    }
    let _ = writeln!(text, "GB/s that the column's host receives from the row's, by its own clock");
    let _ = writeln!(text, "{}", matrix(network, |l| format!("{:.3}", l.bytes_per_second / 1e9)));
    let _ = writeln!(text, "us, half a round trip of 8 bytes");
    let _ = writeln!(text, "{}", matrix(network, |l| format!("{:.1}", l.latency_us)));
    let mut ways = Table::new(&["link", ">cables", "way"]);
    for link in &network.links {
        ways.row([name(network, link), link.cables.to_string(), link.way.clone()]);
    }
    let _ = writeln!(text, "{ways}");
    text
}

fn matrix(network: &Network, cell: impl Fn(&Link) -> String) -> Table {
    let hosts = &network.hosts;
    let heads: Vec<String> =
        std::iter::once(String::new()).chain(hosts.iter().map(|h| format!(">{h}"))).collect();
    let mut table = Table::new(&heads.iter().map(String::as_str).collect::<Vec<_>>());
    for (from, host) in hosts.iter().enumerate() {
        let of = |to| network.links.iter().find(|l| (l.from, l.to) == (from, to)).map_or("-".into(), &cell);
        table.row(std::iter::once(host.clone()).chain((0..hosts.len()).map(of)));
    }
    table
}

fn summary(network: &Network) -> Table {
    let mut table = Table::new(&["", ">rate", ">half a round trip", "link"]);
    let mut links: Vec<&Link> = network.links.iter().collect();
    links.sort_by(|a, b| b.bytes_per_second.total_cmp(&a.bytes_per_second));
    let last = links.len() - 1;
    for (what, link) in [("best", links[0]), ("median", links[last / 2]), ("worst", links[last])] {
        let late = format!("{:.1} us", link.latency_us);
        table.row([what.to_string(), rate(link.bytes_per_second), late, name(network, link)]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(n: usize) -> Network {
        let hosts = (0..n).map(|i| format!("host{i}")).collect();
        let pairs = (0..n).flat_map(|a| (0..n).filter(move |&b| a != b).map(move |b| (a, b)));
        let links = pairs
            .map(|(from, to)| Link {
                from,
                to,
                way: format!("tcp over en{to}"),
                latency_us: 20.0 + from as f64,
                bytes_per_second: 1e9 + 1e6 * to as f64,
                ..Link::default()
            })
            .collect();
        Network { hosts, links }
    }

    #[test]
    fn few_hosts_have_matrices_and_many_a_summary() {
        let few = text(&network(3));
        assert!(
            few.contains("host0      -  1.001  1.002\n") && few.contains("host2   22.0   22.0      -\n"),
            "{few}"
        );
        assert!(few.contains("host1 to host2       0  tcp over en2\n"), "{few}");
        let many = text(&network(40));
        assert!(
            many.contains("worst") && many.contains("host39 to host0") && many.lines().count() < 10,
            "{many}"
        );
        assert_eq!(text(&network(1)), "");
    }

    #[test]
    fn rates_have_the_unit_that_suits_them() {
        assert_eq!(
            [2.5e9, 118e6, 11.8e6, 940.0].map(rate),
            ["2.50 GB/s", "0.12 GB/s", "11.8 MB/s", "0.9 kB/s"]
        );
    }

    #[test]
    fn a_way_names_its_interface() {
        let link = |way: &str| Link { way: way.into(), ..Link::default() };
        assert_eq!(link("tcp over en5 (10.0.0.1 to 10.0.0.2)").interface(), Some("en5"));
        assert_eq!(link("mem").interface(), None);
    }
}
