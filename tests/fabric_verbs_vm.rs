//! The conformance suite of `fabric::verbs` on a kernel's real RDMA stack (soft RoCE) in a VM, over RC and UC, with one-sided
//! writes and with posted receives. Skipped with a printed reason where such a VM cannot be had.
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

#[test]
fn conformance_on_soft_roce() {
    let Some(suite) = program("fabric_verbs") else {
        return eprintln!(
            "skipped: the test program fabric_verbs is not built: cargo test --workspace builds it"
        );
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/rdma-vm");
    let command = "FULMEN_VERBS_DEVICES=rxe0 suite --exact conformance_on_this_machines_devices --nocapture";
    let out = Command::new(script)
        .args(["--net", "one", "--seconds", "900", "--file"])
        .arg(format!("{}:/usr/bin/suite", suite.display()))
        .args(["--", command])
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if out.status.code() == Some(77) {
        return eprintln!("{errors}");
    }
    println!("{text}");
    assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status.code());
    // Five ways through the whole suite, none of them skipped.
    assert_eq!(text.matches(" cases\n").count(), 5, "{text}\n{errors}");
}
