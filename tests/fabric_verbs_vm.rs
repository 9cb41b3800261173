//! `fabric::verbs` on a kernel's real RDMA stack (soft RoCE) in a VM: the conformance suite over RC and UC, with one-sided writes
//! and with posted receives; and solves of two and four hosts with a cable between each two, by the library and by `hpl-run`,
//! one of them killed, and over cables that lose packets. Skipped with a printed reason where such a VM cannot be had.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The program of this name, or the newest test program, which cargo has built along with this one.
fn program(name: &str) -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.to_owned();
    if let Some(program) = folder.parent().map(|folder| folder.join(name)).filter(|path| path.is_file()) {
        return Some(program);
    }
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
            eprintln!("skipped: the program {name} is not built: cargo test --workspace builds it");
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

/// What is asked of `hpl-run` here: two and four ranks, with kernels that are the same on every processor. (One job: its start
/// is what takes long in a VM.)
const HPL: &str = "hpl-run -N 300 --nb 32 -P 1,2 -Q 2,2 --threads 1 --kernels native:portable --hash";

/// The hashes of the bits of x of the runs that have passed.
fn hashes(said: &str) -> Vec<&str> {
    let passed = said.lines().filter(|line| line.starts_with("PASSED"));
    passed.filter_map(|line| line.split("   x ").nth(1)).collect()
}

/// `fulmen-run` with `hpl-run` on so many hosts: behind an `ssh` that goes nowhere, each with its own devices, as a hostfile of
/// mlx.launch tells.
fn hpl_on_cables(hosts: usize) -> String {
    let device = |i, j| if i == j { "null".into() } else { format!(r#""rx{i}{j}""#) };
    let host = |i: usize| {
        let devices: Vec<String> = (0..hosts).map(|j| device(i, j)).collect();
        format!(r#"{{"ssh": "host{i}", "ips": [], "rdma": [{}]}}"#, devices.join(", "))
    };
    let hosts = (0..hosts).map(host).collect::<Vec<_>>().join(", ");
    format!(
        "echo '[{hosts}]' >hosts.json && fulmen-run --ssh /job/stub --hostfile hosts.json --start-timeout 120 --silence 60 \
         {HPL} --fabric verbs --verbose 2>&1"
    )
}

#[test]
fn solves_on_soft_roce() {
    let suite = "verbs_ranks --exact on_this_machines_devices --nocapture";
    let probe = "FULMEN_VERBS_PAIR=rx01,rx10 verbs_probe --exact on_this_machines_devices --nocapture";
    let lose = "for i in 0 1 2 3; do for j in 0 1 2 3; do [ $i = $j ] || tc qdisc add dev v$i$j root netem loss 2% || exit 9; done; done";
    let stub = r#"printf '#!/usr/bin/bash\nshift; exec bash -c "$*"\n' >stub && chmod +x stub"#;
    let command = format!(
        "export FULMEN_VERBS_NAMES='rx{{i}}{{j}}'; {probe} && {suite} && {stub} && {} && {lose} && FULMEN_VERBS_LOSSY=1 {suite}",
        hpl_on_cables(4),
    );
    let programs = ["verbs_ranks", "verbs_probe", "hpl-run", "fulmen-run"];
    let Some(text) = vm("mesh4", &programs, &command) else { return };
    assert_eq!(text.matches("\nprobed ").count(), 2, "both ends of a cable: {text}");
    // Two and four ranks, over RC and UC, over cables that lose nothing and that lose packets; and a rank killed.
    assert_eq!((text.matches("solved by ").count(), text.matches("\nkilled").count()), (8, 1), "{text}");
    // The same bits as those of threads of one process on this machine.
    let program = program("hpl-run").unwrap();
    let words: Vec<&str> = HPL.split(' ').skip(1).collect();
    let alone = Command::new(program).args(words).args(["--fabric", "mem"]).output().unwrap();
    let alone = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert!(hashes(&alone).len() == 2 && hashes(&text) == hashes(&alone), "{alone}{text}");
    // As one does by itself; a machine that is too busy for the proof of a reliable pair in time takes an unreliable one.
    let over = |way: &str| text.matches(&format!(": verbs, {way}")).count();
    assert!(over("") == 6 && over("rc write over rx") > 0, "{text}");
}
