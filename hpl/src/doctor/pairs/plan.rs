//! Which cables there are between the hosts of a job, and which of them are tried side by side. Pure.

use fulmen::fabric::verbs::Devices;
use fulmen::fabric::verbs::probe::{self, Port};
use serde::{Deserialize, Serialize};

use crate::doctor::facts::{Device, Facts, Outcome};

/// A rank that tries devices of its host.
pub struct Member {
    pub rank: usize,
    /// Index of its host.
    pub host: usize,
    pub ports: Vec<Port>,
}

/// One end of a cable.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct End {
    pub rank: usize,
    pub host: usize,
    pub device: String,
}

/// A cable, or two devices on one switch.
pub type Cable = [End; 2];

/// The ports of a host that can be tried: active ones, on which nothing has failed yet.
pub fn ports(facts: &Facts) -> Vec<Port> {
    let devices = facts.rdma.devices.get().into_iter().flatten();
    let is_well = |d: &Device| d.steps.iter().all(|step| step.outcome == Outcome::Done);
    let works = |d: &&Device| d.active == Some(true) && d.probe.is_some() && is_well(d);
    devices.filter(works).map(port).collect()
}

fn port(device: &Device) -> Port {
    let is_thunderbolt = device.transport == "Thunderbolt" || device.name.starts_with("rdma_en");
    Port::seen(&device.name, is_thunderbolt, device.ipv4().map(|(_, address)| address))
}

/// The Thunderbolt devices that work and have an address: index of the host, name.
pub fn thunderbolt(all: &[Facts]) -> Vec<(usize, String)> {
    let of = |(host, facts): (usize, &Facts)| {
        let ports = ports(facts).into_iter().filter(|p| p.is_thunderbolt && !p.gids.is_empty());
        ports.map(|p| (host, p.name)).collect::<Vec<_>>()
    };
    all.iter().enumerate().flat_map(of).collect()
}

/// All cables between the members, each once. `devices` are as the job's ranks are told, by rank.
pub fn cables(members: &[Member], devices: &Devices) -> Vec<Cable> {
    let devices = match devices {
        Devices::Matrix(rows) => {
            let cell = |a: &Member, b: &Member| rows.get(a.rank).and_then(|row| row.get(b.rank)).cloned();
            let row = |a| members.iter().map(|b| cell(a, b).unwrap_or_default()).collect();
            Devices::Matrix(members.iter().map(row).collect())
        }
        other => other.clone(),
    };
    let wanted = |port: &&Port| match &devices {
        Devices::Named(names) => names.contains(&port.name),
        _ => true,
    };
    let kept: Vec<Vec<Port>> =
        members.iter().map(|m| m.ports.iter().filter(wanted).cloned().collect()).collect();
    let ports: Vec<&[Port]> = kept.iter().map(Vec::as_slice).collect();
    let end = |m: usize, port: usize| End {
        rank: members[m].rank,
        host: members[m].host,
        device: ports[m][port].name.clone(),
    };
    let mut found: Vec<Cable> = Vec::new();
    for a in 0..members.len() {
        for b in a + 1..members.len() {
            for (x, y) in probe::cables(a, b, &ports, &devices) {
                let cable = [end(a, x), end(b, y)];
                let places = |cable: &Cable| {
                    let mut ends = cable.clone().map(|end| (end.host, end.device));
                    ends.sort();
                    ends
                };
                let [one, other] = places(&cable);
                // Ranks of one host share its devices: a device with itself is no cable, and each cable counts once.
                if one != other && found.iter().all(|f| places(f) != [one.clone(), other.clone()]) {
                    found.push(cable);
                }
            }
        }
    }
    found
}

/// The cables, by index, that are tried side by side: a host tries one at a time.
pub fn rounds(cables: &[Cable]) -> Vec<Vec<usize>> {
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (i, cable) in cables.iter().enumerate() {
        let is_free = |round: &&mut Vec<usize>| {
            let busy = |end: &End| {
                round.iter().flat_map(|j| &cables[*j]).any(|e| e.host == end.host || e.rank == end.rank)
            };
            !cable.iter().any(busy)
        };
        match rounds.iter_mut().find(is_free) {
            Some(round) => round.push(i),
            None => rounds.push(vec![i]),
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::doctor::facts::{Act, Answer, Probe, Step};

    fn member(rank: usize, host: usize, ports: &[(&str, [u8; 4])]) -> Member {
        let ports =
            ports.iter().map(|(name, v4)| Port::seen(name, true, Some(Ipv4Addr::from(*v4)))).collect();
        Member { rank, host, ports }
    }

    fn told(cables: &[Cable]) -> Vec<String> {
        let end = |e: &End| format!("{}:{}", e.rank, e.device);
        cables.iter().map(|[a, b]| format!("{} {}", end(a), end(b))).collect()
    }

    /// Three hosts with a cable between each two; rank 1 is the second of the first host.
    fn three() -> Vec<Member> {
        vec![
            member(0, 0, &[("rdma_en1", [10, 0, 1, 1]), ("rdma_en2", [10, 0, 2, 1])]),
            member(1, 0, &[("rdma_en1", [10, 0, 1, 1]), ("rdma_en2", [10, 0, 2, 1])]),
            member(2, 1, &[("rdma_en1", [10, 0, 1, 2]), ("rdma_en3", [10, 0, 3, 1])]),
            member(3, 2, &[("rdma_en2", [10, 0, 2, 2]), ("rdma_en3", [10, 0, 3, 2])]),
        ]
    }

    #[test]
    fn each_cable_is_tried_once_by_its_own_network() {
        let found = cables(&three(), &Devices::All);
        assert_eq!(told(&found), ["0:rdma_en1 2:rdma_en1", "0:rdma_en2 3:rdma_en2", "2:rdma_en3 3:rdma_en3"]);
        // In a triangle of cables no two are of four hosts.
        assert_eq!(rounds(&found), [[0], [1], [2]]);
        // A cable from a host to itself takes two of its ranks.
        let own = [("rdma_en1", [10, 0, 1, 1]), ("rdma_en2", [10, 0, 1, 2])];
        let both = [member(0, 0, &own), member(1, 0, &own)];
        assert_eq!(told(&cables(&both, &Devices::All)), ["0:rdma_en1 1:rdma_en2"]);
        assert_eq!(told(&cables(&both[..1], &Devices::All)), [""; 0]);
    }

    #[test]
    fn a_matrix_names_cables_by_the_jobs_ranks() {
        let name = |n: &str| if n.is_empty() { vec![] } else { vec![n.to_string()] };
        let rows = [["", "", "rdma_en2", ""], [""; 4], ["rdma_en3", "", "", ""], [""; 4]];
        let matrix = Devices::Matrix(rows.iter().map(|row| row.iter().map(|n| name(n)).collect()).collect());
        assert_eq!(told(&cables(&three(), &matrix)), ["0:rdma_en2 2:rdma_en3"], "as it says, right or wrong");
        let named = Devices::Named(vec!["rdma_en3".into()]);
        assert_eq!(told(&cables(&three(), &named)), ["2:rdma_en3 3:rdma_en3"]);
    }

    #[test]
    fn hosts_that_have_nothing_in_common_are_tried_side_by_side() {
        let end = |host: usize, device: &str| End { rank: host, host, device: device.into() };
        let ring: Vec<Cable> = (0..4).map(|i| [end(i, "a"), end((i + 1) % 4, "b")]).collect();
        assert_eq!(rounds(&ring), [[0, 2], [1, 3]]);
        assert!(rounds(&[]).is_empty());
    }

    #[test]
    fn only_what_works_alone_is_tried_with_others() {
        let device = |name: &str, active, probe| Device {
            name: name.into(),
            active,
            probe,
            gids: vec![(0, "fe80::1".into()), (1, "::ffff:10.0.0.1".into())],
            ..Device::default()
        };
        let mut facts = Facts::default();
        let fine = Some(Probe::default());
        facts.rdma.devices = Answer::Is(vec![
            device("rdma_en1", Some(true), fine.clone()),
            device("rdma_en2", Some(false), fine.clone()),
            device("rdma_en3", Some(true), None),
            device("mlx5_0", None, fine.clone()),
            // Known from an earlier run, and stuck in this one.
            Device {
                steps: vec![Step { act: Act::Open, outcome: Outcome::Hung(20) }],
                ..device("rdma_en4", Some(true), fine)
            },
        ]);
        let ports = ports(&facts);
        assert_eq!(ports.len(), 1);
        assert!(ports[0].is_thunderbolt && ports[0].gids[0].1[12..] == [10, 0, 0, 1]);
    }
}
