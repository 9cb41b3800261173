//! Which device leads to which host, in the two forms that users of `mlx` have already: the device matrix
//! (`MLX_IBV_DEVICES`: an array of rows, `null` or a device or a list of devices for each host) and the hostfile of
//! `mlx.launch` (the same rows as `rdma` beside each host's `ssh` name and `ips`). Both are read unchanged, and written.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::facts::Facts;
use fulmen::{Error, Result};

/// Hosts and the devices between them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cables {
    /// A host a row. A bare matrix has no names: `host 0`, `host 1`, …
    pub hosts: Vec<Host>,
    /// What the hostfile says beside the hosts.
    pub backend: String,
    /// `NAME=VALUE` for each process.
    pub envs: Vec<String>,
    /// Whether it came as a bare matrix.
    bare: bool,
}

/// One host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Host {
    /// As `ssh` knows it.
    pub name: String,
    /// Its addresses.
    pub ips: Vec<String>,
    /// The devices that lead to each host, its own place empty.
    pub devices: Vec<Vec<String>>,
}

/// A place of the matrix.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a place is null, a device's name, or a list of names")]
enum Cell {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct Entry {
    ssh: String,
    #[serde(default)]
    ips: Vec<String>,
    #[serde(default)]
    rdma: Vec<Option<Cell>>,
}

#[derive(Deserialize)]
struct Object {
    hosts: Vec<Entry>,
    #[serde(default)]
    backend: String,
    #[serde(default)]
    envs: Vec<String>,
}

fn row(cells: Vec<Option<Cell>>) -> Vec<Vec<String>> {
    let devices = |cell| match cell {
        None => Vec::new(),
        Some(Cell::One(device)) => vec![device],
        Some(Cell::Many(devices)) => devices,
    };
    cells.into_iter().map(devices).collect()
}

/// What the cables make of the hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One host, or none.
    Alone,
    /// Each is joined to each.
    Mesh,
    /// One after the other, and the last to the first.
    Ring,
    /// One after the other.
    Chain,
    /// All can be reached, in another way.
    Irregular,
    /// Some cannot be reached from the others.
    Apart,
}

impl Cables {
    /// Reads any of the three forms, which their first signs tell apart; `file` is for messages.
    ///
    /// # Errors
    /// [`Error::Argument`] with the line and what is wrong: no JSON, another form, or rows that make no square.
    pub fn parse(text: &str, file: &str) -> Result<Cables> {
        let wrong = |place: String, problem: String| {
            let remedy = "give what `mlx.distributed_config` writes: [{\"ssh\": \"a\", \"ips\": [\"10.0.0.1\"], \"rdma\": \
                 [null, \"rdma_en5\"]}, ...], or a matrix like [[null, \"rdma_en5\"], [\"rdma_en4\", null]]";
            Error::argument(place, "JSON", problem, remedy)
        };
        let text = text.trim_start_matches('\u{feff}');
        let mut signs = text.chars().filter(|c| !c.is_whitespace());
        let named = |entry: Entry| Host { name: entry.ssh, ips: entry.ips, devices: row(entry.rdma) };
        let parsed = match (signs.next(), signs.next()) {
            (Some('['), Some('[')) => serde_json::from_str::<Vec<Vec<Option<Cell>>>>(text).map(|rows| {
                let rows = rows.into_iter().map(row).enumerate();
                let hosts =
                    rows.map(|(i, devices)| Host { name: format!("host {i}"), devices, ips: Vec::new() });
                Cables { hosts: hosts.collect(), bare: true, ..Cables::default() }
            }),
            (Some('['), _) => serde_json::from_str::<Vec<Entry>>(text)
                .map(|list| Cables { hosts: list.into_iter().map(named).collect(), ..Cables::default() }),
            _ => serde_json::from_str::<Object>(text).map(|Object { hosts, backend, envs }| Cables {
                hosts: hosts.into_iter().map(named).collect(),
                backend,
                envs,
                bare: false,
            }),
        };
        let cables = parsed.map_err(|e| {
            let kind = if e.is_data() { "" } else { "is not JSON: " };
            wrong(format!("{file}:{}", e.line()), format!("{kind}{e}"))
        })?;
        let n = cables.hosts.len();
        match cables.hosts.iter().find(|host| !host.devices.is_empty() && host.devices.len() != n) {
            Some(host) => {
                let places = host.devices.len();
                let problem = format!("has {places} places for {}, where there are {n} hosts", host.name);
                Err(wrong(file.into(), problem))
            }
            None => Ok(cables),
        }
    }

    /// Whether it came without names of hosts.
    pub fn is_bare(&self) -> bool {
        self.bare
    }

    /// Which host of these each of the hosts is that were looked at, by their names: the same name, else the same without its
    /// domain where that leaves one on both sides. Hosts without names are in the same order.
    pub fn places(&self, names: &[&str]) -> Vec<Option<usize>> {
        if self.bare {
            let is_all = names.len() == self.hosts.len();
            return (0..names.len()).map(|i| is_all.then_some(i)).collect();
        }
        let exact = |name: &str| self.hosts.iter().position(|host| host.name == name);
        let found: Vec<Option<usize>> = names.iter().map(|name| exact(name)).collect();
        // The numbers of an address are no domains.
        let short = |name: &str| match name.parse::<IpAddr>() {
            Ok(_) => None,
            Err(_) => name.split('.').next().map(str::to_owned),
        };
        let only =
            |mut all: Box<dyn Iterator<Item = usize> + '_>| all.next().filter(|_| all.next().is_none());
        let alike = |i: usize| {
            let mine = short(names[i])?;
            let is_mine = |name: &str| short(name).as_ref() == Some(&mine);
            let free = |row: &usize| !found.contains(&Some(*row));
            let rows = (0..self.hosts.len()).filter(free).filter(|row| is_mine(&self.hosts[*row].name));
            let others = (0..names.len()).filter(|j| found[*j].is_none() && is_mine(names[*j]));
            only(Box::new(others))?;
            only(Box::new(rows))
        };
        (0..names.len()).map(|i| found[i].or_else(|| alike(i))).collect()
    }

    /// From what each host knows of its Thunderbolt ports and their far ends.
    pub fn from_facts(all: &[Facts]) -> Cables {
        let end = |uuid: &str| all.iter().position(|f| f.rdma.ports.iter().any(|p| p.uuid == uuid));
        let host = |facts: &Facts| {
            let mut devices = vec![Vec::new(); all.len()];
            for port in &facts.rdma.ports {
                if let Some(there) = port.connected_to.as_deref().and_then(end)
                    && all[there].host != facts.host
                {
                    devices[there].push(format!("rdma_{}", port.interface));
                }
            }
            Host { name: facts.host.clone(), ips: Vec::new(), devices }
        };
        Cables { hosts: all.iter().map(host).collect(), backend: "jaccl".into(), ..Cables::default() }
    }

    /// The devices of host `i` that lead to host `j`.
    pub fn between(&self, i: usize, j: usize) -> &[String] {
        self.hosts[i].devices.get(j).map_or(&[], Vec::as_slice)
    }

    /// Whether the file names any device.
    pub fn is_empty(&self) -> bool {
        self.hosts.iter().all(|host| host.devices.iter().all(Vec::is_empty))
    }

    /// What cannot be right, a line each.
    pub fn problems(&self) -> Vec<String> {
        let (n, mut found) = (self.hosts.len(), Vec::new());
        let name = |i: usize| &self.hosts[i].name;
        for i in 0..n {
            if !self.between(i, i).is_empty() {
                found.push(format!("{} has a device to itself ({})", name(i), self.between(i, i).join(", ")));
            }
            for j in i + 1..n {
                let (there, back) = (self.between(i, j).len(), self.between(j, i).len());
                if there != back {
                    found.push(format!(
                        "{there} devices lead from {} to {}, but {back} back",
                        name(i),
                        name(j)
                    ));
                }
            }
            let mut all: Vec<&String> = self.hosts[i].devices.iter().flatten().collect();
            all.sort();
            if let Some(twice) = all.windows(2).find(|two| two[0] == two[1]) {
                found.push(format!("{} of {} leads to two places", twice[0], name(i)));
            }
        }
        found
    }

    /// What the cables make of the hosts.
    pub fn shape(&self) -> Shape {
        let n = self.hosts.len();
        let joined =
            |i: usize, j: usize| i != j && !self.between(i, j).is_empty() && !self.between(j, i).is_empty();
        if n <= 1 {
            return Shape::Alone;
        }
        let mut reached = vec![0];
        let mut next = 0;
        while let Some(&i) = reached.get(next) {
            let new: Vec<usize> = (0..n).filter(|&j| joined(i, j) && !reached.contains(&j)).collect();
            reached.extend(new);
            next += 1;
        }
        let degrees: Vec<usize> = (0..n).map(|i| (0..n).filter(|&j| joined(i, j)).count()).collect();
        let ends = degrees.iter().filter(|d| **d == 1).count();
        match (reached.len() == n, degrees.iter().copied().max()) {
            (false, _) => Shape::Apart,
            _ if degrees.iter().all(|d| *d == n - 1) => Shape::Mesh,
            (_, Some(2)) if ends == 0 => Shape::Ring,
            (_, Some(2)) if ends == 2 => Shape::Chain,
            _ => Shape::Irregular,
        }
    }

    fn cells(&self, i: usize) -> Vec<Option<Cell>> {
        let cell = |j| match self.between(i, j) {
            [] => None,
            [one] => Some(Cell::One(one.clone())),
            many => Some(Cell::Many(many.to_vec())),
        };
        (0..self.hosts.len()).map(cell).collect()
    }

    /// The bare matrix, a line a host.
    pub fn matrix(&self) -> String {
        let row = |i| serde_json::to_string(&self.cells(i)).unwrap_or_default();
        let rows: Vec<String> = (0..self.hosts.len()).map(row).collect();
        format!("[{}]\n", rows.join(",\n "))
    }

    /// The hostfile; for what came as a bare matrix, whose hosts have no names, the matrix.
    pub fn hostfile(&self) -> String {
        if self.bare {
            return self.matrix();
        }
        let host = |i: usize| {
            let Host { name, ips, .. } = &self.hosts[i];
            serde_json::json!({ "ssh": name, "ips": ips, "rdma": self.cells(i) })
        };
        let hosts: Vec<_> = (0..self.hosts.len()).map(host).collect();
        let file = serde_json::json!({ "backend": self.backend, "envs": self.envs, "hosts": hosts });
        format!("{file:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::{Port, Rdma};
    use super::*;

    /// Two cables between the first two of three hosts.
    const MATRIX: &str = r#"[[null, ["rdma_en5", "rdma_en4"], "rdma_en3"],
        [["rdma_en5", "rdma_en4"], null, null], ["rdma_en2", null, null]]"#;

    #[test]
    fn the_matrix_is_read_and_written() {
        let cables = Cables::parse(MATRIX, "m.json").unwrap();
        assert_eq!(cables.between(0, 1), ["rdma_en5", "rdma_en4"]);
        assert_eq!(cables.between(2, 0), ["rdma_en2"]);
        assert!(cables.between(1, 2).is_empty() && cables.problems().is_empty());
        assert_eq!(cables.shape(), Shape::Chain);
        assert_eq!(Cables::parse(&cables.matrix(), "again").unwrap(), cables);
        assert_eq!(cables.hostfile(), cables.matrix());
    }

    #[test]
    fn hostfiles_old_and_new_are_read_and_written() {
        let list = r#"[{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en2"]},
            {"ssh": "b", "ips": [], "rdma": ["rdma_en3", null], "later": 1}]"#;
        let old = Cables::parse(list, "h.json").unwrap();
        assert_eq!((old.hosts[0].name.as_str(), old.hosts[0].ips.len()), ("a", 1));
        assert_eq!(old.shape(), Shape::Mesh);
        let new = format!(r#"{{"backend": "jaccl", "envs": ["X=1"], "hosts": {list}}}"#);
        let new = Cables::parse(&new, "h.json").unwrap();
        assert_eq!((new.backend.as_str(), new.envs.as_slice()), ("jaccl", ["X=1".to_string()].as_slice()));
        assert_eq!(new.hosts, old.hosts);
        assert_eq!(Cables::parse(&new.hostfile(), "again").unwrap(), new);
        let plain = Cables::parse(r#"[{"ssh": "a", "ips": ["1.2.3.4"]}, {"ssh": "b"}]"#, "h.json").unwrap();
        assert!(plain.is_empty() && plain.hosts.len() == 2);
        assert_eq!(plain.shape(), Shape::Apart);
    }

    #[test]
    fn hosts_are_found_by_their_names() {
        let of = |hosts: &[&str]| {
            let rows: Vec<String> = hosts.iter().map(|name| format!(r#"{{"ssh": "{name}"}}"#)).collect();
            Cables::parse(&format!("[{}]", rows.join(",")), "h.json").unwrap()
        };
        let addresses = of(&["192.168.1.10", "192.168.1.11"]);
        assert_eq!(addresses.places(&["192.168.1.11", "192.168.1.10"]), [Some(1), Some(0)]);
        assert_eq!(addresses.places(&["192.168.1.12", "192"]), [None, None]);
        let named = of(&["mac-a", "mac-b.local"]);
        assert_eq!(named.places(&["mac-b", "mac-a.local", "mac-c"]), [Some(1), Some(0), None]);
        // The same in front of two domains: who is named whole is known, who is not is neither.
        let twins = of(&["n1.x.org", "n1.y.org", "n2.x.org"]);
        assert_eq!(twins.places(&["n1.y.org", "n2"]), [Some(1), Some(2)]);
        assert_eq!(twins.places(&["n1"]), [None]);
        assert_eq!(twins.places(&["n2.a", "n2.b"]), [None, None]);
        assert_eq!(twins.places(&["n1.x.org", "n1"]), [Some(0), Some(1)], "the one that is left");
        let bare = Cables::parse("[[null, \"x\"], [\"y\", null]]", "m.json").unwrap();
        assert_eq!((bare.places(&["p", "q"]), bare.places(&["p"])), (vec![Some(0), Some(1)], vec![None]));
    }

    #[test]
    fn what_is_wrong_is_told() {
        let told = |text: &str| Cables::parse(text, "m.json").unwrap_err().to_string();
        assert!(told("[[null,").contains("is not JSON") && told("[[null,").contains("line 1"));
        assert!(
            told("{\"a\": 1}").contains("m.json:1: JSON: missing field `hosts`"),
            "{}",
            told("{\"a\": 1}")
        );
        assert!(told("[\n{\"ips\": []}]").contains("m.json:2: JSON: missing field `ssh`"));
        assert!(
            told("[[null, 7]]")
                .contains("m.json:1: JSON: a place is null, a device's name, or a list of names"),
            "{}",
            told("[[null, 7]]")
        );
        assert!(told(r#"[[null, "x"], ["y"]]"#).contains("1 places for host 1, where there are 2 hosts"));
        let problems = |text: &str| Cables::parse(text, "m.json").unwrap().problems().join("\n");
        assert!(problems(r#"[["x", "y"], ["z", null]]"#).contains("host 0 has a device to itself (x)"));
        assert!(
            problems(r#"[[null, "y"], [null, null]]"#)
                .contains("1 devices lead from host 0 to host 1, but 0 back")
        );
        let twice = r#"[[null, "y", "y"], ["z", null, null], ["z", null, null]]"#;
        assert!(problems(twice).contains("y of host 0 leads to two places"));
    }

    #[test]
    fn shapes_have_names() {
        let shape = |pairs: &[(usize, usize)], n: usize| {
            let mut rows = vec![vec!["null".to_string(); n]; n];
            for (at, &(i, j)) in pairs.iter().enumerate() {
                rows[i][j] = format!("\"d{at}\"");
                rows[j][i] = format!("\"e{at}\"");
            }
            let rows: Vec<String> = rows.iter().map(|row| format!("[{}]", row.join(","))).collect();
            Cables::parse(&format!("[{}]", rows.join(",")), "x").unwrap().shape()
        };
        assert_eq!(shape(&[], 1), Shape::Alone);
        assert_eq!(shape(&[(0, 1), (1, 2), (2, 0)], 3), Shape::Mesh);
        assert_eq!(shape(&[(0, 2), (2, 1), (1, 3), (3, 0)], 4), Shape::Ring);
        assert_eq!(shape(&[(0, 2), (2, 1), (1, 3)], 4), Shape::Chain);
        assert_eq!(shape(&[(0, 1), (0, 2), (0, 3)], 4), Shape::Irregular);
        assert_eq!(shape(&[(0, 1), (2, 3)], 4), Shape::Apart);
        // Two rings are not one.
        assert_eq!(shape(&[(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)], 6), Shape::Apart);
    }

    #[test]
    fn the_matrix_is_made_from_the_ports() {
        let port = |interface: &str, uuid: &str, to: Option<&str>| Port {
            interface: interface.into(),
            uuid: uuid.into(),
            connected_to: to.map(Into::into),
        };
        let host = |name: &str, ports: Vec<Port>| Facts {
            host: name.into(),
            rdma: Rdma { ports, ..Rdma::default() },
            ..Facts::default()
        };
        let all = [
            host(
                "a",
                vec![
                    port("en4", "A4", Some("B3")),
                    port("en5", "A5", Some("elsewhere")),
                    port("en6", "A6", None),
                ],
            ),
            host("b", vec![port("en3", "B3", Some("A4"))]),
        ];
        let cables = Cables::from_facts(&all);
        assert_eq!(cables.between(0, 1), ["rdma_en4"]);
        assert_eq!(cables.between(1, 0), ["rdma_en3"]);
        assert!(cables.problems().is_empty());
        assert_eq!(cables.matrix(), "[[null,\"rdma_en4\"],\n [\"rdma_en3\",null]]\n");
        assert!(cables.hostfile().contains("\"ssh\": \"a\""));
    }
}
