//! Hosts without a switch: only neighbours have a cable.

use std::time::Duration;

use crate::lab::{HPL, Lab, alone};

const RUN: [&str; 8] = ["-N", "300", "--nb", "24", "--threads", "1", "--output", "/dev/null"];

/// Ranks that have no cable to each other are joined by those in between; ssh jumps along the cables (ProxyJump), or has a
/// network of its own.
fn grids(shape: &str) {
    let Some(lab) = Lab::up(4, shape) else { return };
    let ended = lab.run(&["--host", "h1,h2,h3,h4", "--tag-output", "hostname"]);
    ended.expect(0, &[]);
    let mut lines: Vec<&str> = ended.out.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] h1", "[1] h2", "[2] h3", "[3] h4"]);
    let wanted = alone(&RUN[..4]);
    for (p, q) in [("2", "2"), ("1", "4")] {
        let args = [&["--host", "h1,h2,h3,h4", HPL], &RUN[..], &["--hash", "-P", p, "-Q", q]].concat();
        let ended = lab.run(&args);
        ended.expect(0, &["PASSED"]);
        assert_eq!(ended.hash(), wanted, "{p} x {q}: {ended:?}");
    }
    assert_eq!(lab.left_over(Duration::from_secs(10)), Vec::<String>::new());
}

#[test]
fn a_chain() {
    grids("chain");
}

#[test]
fn a_ring() {
    grids("ring");
}

#[test]
fn a_ring_beside_a_network() {
    grids("ring+lan");
}

/// Between hosts of several networks, mlx.launch's hostfile says where data goes.
#[test]
fn addresses_of_a_hostfile() {
    let Some(lab) = Lab::up(2, "chain+lan") else { return };
    for (ips, way) in [
        (["10.1.2.1", "10.1.2.2"], "tcp over cable2 (10.1.2.1 to 10.1.2.2)"),
        (["192.168.77.1", "192.168.77.2"], "tcp over en0 (192.168.77.1 to 192.168.77.2)"),
        (["192.168.77.1", "192.0.2.2"], "tcp over "),
    ] {
        let hosts: Vec<_> = ips
            .iter()
            .zip(["h1", "h2"])
            .map(|(ip, name)| serde_json::json!({ "ssh": name, "ips": [ip] }))
            .collect();
        let file = serde_json::json!({ "backend": "ring", "hosts": hosts }).to_string();
        std::fs::write(lab.folder().join("hosts.json"), file).unwrap();
        let ended = lab.run(&[&["--hostfile", "hosts.json", HPL], &RUN[..], &["--verbose"]].concat());
        ended.expect(0, &[way]);
        let note = "h2: the hostfile gives it the address 192.0.2.2, which it does not have: not used";
        assert_eq!(ended.err.contains(note), ips[1] == "192.0.2.2", "{ended:?}");
    }
}
