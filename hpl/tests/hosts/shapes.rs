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
