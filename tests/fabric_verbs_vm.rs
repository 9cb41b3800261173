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

/// Runs a command in a VM with these test programs; `None`: skipped, and it was said why.
fn vm(net: &str, names: &[&str], command: &str) -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/rdma-vm");
    let mut vm = Command::new(script);
    vm.args(["--net", net, "--seconds", "900"]);
    for name in names {
        let Some(suite) = program(name) else {
            eprintln!("skipped: the test program {name} is not built: cargo test --workspace builds it");
            return None;
        };
        vm.arg("--file").arg(format!("{}:/usr/bin/{name}", suite.display()));
    }
    let out = vm.args(["--", command]).output().unwrap();
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
    let command =
        "FULMEN_VERBS_DEVICES=rxe0 fabric_verbs --exact conformance_on_this_machines_devices --nocapture";
    let Some(text) = vm("one", &["fabric_verbs"], command) else { return };
    // Five ways through the whole suite, none of them skipped.
    assert_eq!(text.matches(" cases\n").count(), 5, "{text}");
}

#[test]
fn solves_on_soft_roce() {
    let suite = "verbs_ranks --exact on_this_machines_devices --nocapture";
    let probe = "FULMEN_VERBS_PAIR=rx01,rx10 verbs_probe --exact on_this_machines_devices --nocapture";
    let lose = "for i in 0 1 2 3; do for j in 0 1 2 3; do [ $i = $j ] || tc qdisc add dev v$i$j root netem loss 2% || exit 9; done; done";
    let command = format!(
        "export FULMEN_VERBS_NAMES='rx{{i}}{{j}}'; ip link set lo up; {probe} && {suite} && {lose} && FULMEN_VERBS_LOSSY=1 {suite}"
    );
    let Some(text) = vm("mesh4", &["verbs_ranks", "verbs_probe"], &command) else { return };
    assert_eq!(text.matches("\nprobed ").count(), 2, "both ends of a cable: {text}");
    // Two and four ranks, over RC and UC, over cables that lose nothing and that lose packets; and a rank killed.
    assert_eq!((text.matches("solved by ").count(), text.matches("\nkilled").count()), (8, 1), "{text}");
}
