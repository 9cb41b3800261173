//! `hpl-run doctor` as ranks on several hosts.

use crate::lab::{HPL, Lab};

#[test]
fn the_network_is_measured_and_what_is_wrong_with_it_named() {
    let Some(lab) = Lab::up(3, "switch") else { return };
    let doctor = |more: &[&str]| lab.run(&[&["--host", "h1,h2:2,h3", HPL, "doctor"], more].concat());
    let ended = doctor(&["--json"]);
    let told: serde_json::Value =
        serde_json::from_str(&ended.out).unwrap_or_else(|e| panic!("{e}: {ended:?}"));
    assert_eq!(told["network"]["hosts"], serde_json::json!(["h1", "h2", "h3"]));
    let links = told["network"]["links"].as_array().unwrap();
    assert_eq!(links.len(), 6, "{links:?}");
    assert!(
        links.iter().all(|l| l["way"].as_str().unwrap().starts_with("tcp over en0 (192.168.77.")),
        "{links:?}"
    );
    assert_eq!(told["hosts"][1]["host"], "h2");
    // One host's port is slow, and has another MTU.
    lab.says(3, &["ip", "link", "set", "en0", "mtu", "1400"]);
    lab.says(
        3,
        &[
            "tc", "qdisc", "add", "dev", "en0", "root", "tbf", "rate", "50mbit", "burst", "16kb", "latency",
            "50ms",
        ],
    );
    let ended = doctor(&[]);
    for words in [
        "h3 to h1",
        "h3 to h2",
        "[asymmetric-link]",
        "[mtu-differs]",
        "us, half a round trip",
        "Next step for you",
    ] {
        assert!(ended.out.contains(words), "no `{words}` in {}", ended.out);
    }
    // Before a run the same in short.
    let ended = lab.run(&["--host", "h1,h2,h3", HPL, "--check"]);
    ended.expect(0, &["hpl-run: warning: h3 to h1 has ", "hpl-run doctor"]);
    // Of a host that only ssh reaches all but its links is told.
    let wall = "table inet wall { chain i { type filter hook input priority 0; tcp dport != 22 drop; }; }";
    lab.says(3, &["nft", wall]);
    let ended = doctor(&[]);
    for words in ["[unreachable]", "rank 3 (h3)", "rank 1 (h2)", "h3   fulmen "] {
        assert!(ended.out.contains(words), "no `{words}` in {ended:?}");
    }
    ended.expect(3, &[]);
}
