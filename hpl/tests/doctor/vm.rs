//! `hpl-run doctor` in a VM whose kernel has a real RDMA stack: two hosts with a cable of soft RoCE between them.

use std::path::Path;
use std::process::Command;

/// Both hosts are the VM; the hostfile names the ends of the cable. An unreliable stream may lose what a busy VM has no room for:
/// then little is found out, and it is tried again.
const DOCTOR: &str = r#"
mkdir -p /tmp && cd /tmp && ip link set lo up
printf '#!/usr/bin/bash\nshift\nexec /usr/bin/bash -c "$*"\n' > stub && chmod +x stub
echo '[{"ssh": "h0", "rdma": [null, "rx01"]}, {"ssh": "h1", "rdma": ["rx10", null]}]' > hosts.json
export HOME=/tmp; run='fulmen-run --ssh /tmp/stub --hostfile hosts.json --start-timeout 120 --silence 60'
for i in 1 2 3; do $run --fabric tcp --interfaces lo hpl-run doctor --json --fresh >o; [ $(grep -c '"together": {' o) = 2 ] && break; done
cat o
"#;

#[test]
fn a_cable_of_soft_roce_is_described() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/rdma-vm");
    let file = |program: &str, name: &str| format!("{program}:/usr/bin/{name}");
    let out = Command::new(script)
        .args(["--net", "mesh2", "--seconds", "600"])
        .args(["--file", &file(env!("CARGO_BIN_EXE_hpl-run"), "hpl-run")])
        .args(["--file", &file(env!("CARGO_BIN_EXE_fulmen-run"), "fulmen-run")])
        .args(["--", &DOCTOR.trim().replace('\n', "; ")])
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if out.status.code() == Some(77) {
        return eprintln!("{errors}");
    }
    let told: serde_json::Value =
        serde_json::from_str(text.trim()).unwrap_or_else(|e| panic!("{e}: {text}\n{errors}"));
    for (host, device, far) in [(0, "rx01", "rx10"), (1, "rx10", "rx01")] {
        let link = &told["hosts"][host]["rdma"]["links"][0];
        assert_eq!((&link["device"], &link["far"]), (&device.into(), &far.into()), "{told}");
        let together = &link["together"];
        // Its slow streams may lose what a busy machine has no room for: then less is under way.
        assert!(together["slot"].as_u64() >= Some(4096) && together["window"].as_u64() >= Some(1), "{link}");
        assert_eq!((&together["writes"], &link["tcp"]), (&"reliable".into(), &0.into()), "{link}");
    }
}
