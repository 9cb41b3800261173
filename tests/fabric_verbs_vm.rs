//! `fabric::verbs` on a kernel's real RDMA stack (soft RoCE) in a VM: the conformance suite over RC and UC, with one-sided writes
//! and with posted receives; and solves of two and four hosts with a cable between each two, one of them killed, and over
//! cables that lose packets. Skipped with a printed reason where such a VM cannot be had.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest test program of this name beside this one, which cargo has built along with it.
fn program(name: &str) -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.to_owned();
    let built = std::fs::read_dir(folder).ok()?.filter_map(|entry| {
        let path = entry.ok()?.path();
        let hash = path.file_name()?.to_str()?.strip_prefix(name)?.strip_prefix('-')?;
        let is_it = hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit());
        let time = path.metadata().ok()?.modified().ok()?;
        is_it.then_some((time, path))
    });
    built.max().map(|(_, path)| path)
}

/// Runs a command in a VM with this program as `suite`; `None`: skipped, and it was said why.
fn vm(net: &str, name: &str, command: &str) -> Option<String> {
    let Some(suite) = program(name) else {
        eprintln!("skipped: the test program {name} is not built: cargo test --workspace builds it");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/rdma-vm");
    let out = Command::new(script)
        .args(["--net", net, "--seconds", "900", "--file"])
        .arg(format!("{}:/usr/bin/suite", suite.display()))
        .args(["--", command])
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if out.status.code() == Some(77) {
        eprintln!("{errors}");
        return None;
    }
    println!("{text}");
    assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status.code());
    Some(text.into_owned())
}

#[test]
fn conformance_on_soft_roce() {
    let command = "FULMEN_VERBS_DEVICES=rxe0 suite --exact conformance_on_this_machines_devices --nocapture";
    let Some(text) = vm("one", "fabric_verbs", command) else { return };
    // Five ways through the whole suite, none of them skipped.
    assert_eq!(text.matches(" cases\n").count(), 5, "{text}");
}

#[test]
fn solves_on_soft_roce() {
    let suite = "suite --exact on_this_machines_devices --nocapture";
    let lose = "for i in 0 1 2 3; do for j in 0 1 2 3; do [ $i = $j ] || tc qdisc add dev v$i$j root netem loss 2% || exit 9; done; done";
    let command = format!(
        "export FULMEN_VERBS_NAMES='rx{{i}}{{j}}'; ip link set lo up; {suite} && {lose} && FULMEN_VERBS_LOSSY=1 {suite}"
    );
    let Some(text) = vm("mesh4", "verbs_ranks", &command) else { return };
    // Two and four ranks, over RC and UC, over cables that lose nothing and that lose packets; and a rank killed.
    assert_eq!((text.matches("solved by ").count(), text.matches("\nkilled").count()), (8, 1), "{text}");
}
