//! Linux: files under /sys and /proc.

use std::path::Path;

use fulmen::fabric::tcp::is_tunnel;

use super::super::facts::{Answer, Device, Facts, Interface, Kind, Nic};
use super::{Run, ask, load};

/// `root` is `/`, or a test's copy of it.
pub(super) fn gather(run: &dyn Run, root: &Path, facts: &mut Facts) {
    let file = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default().trim().to_string();
    let meminfo = file("proc/meminfo");
    let total = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    facts.memory.total = total.and_then(|kib| kib.trim().parse::<u64>().ok()).map(|kib| kib * 1024);
    facts.system.version = file("proc/sys/kernel/osrelease");
    facts.system.build = file("etc/os-release")
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME="))
        .map_or(String::new(), |name| name.trim_matches('"').to_string());
    facts.system.model = file("sys/class/dmi/id/product_name");
    facts.system.uptime = file("proc/uptime").split('.').next().and_then(|s| s.parse().ok());
    facts.cpu.governors = governors(root);
    load::linux(root, &mut facts.cpu);
    facts.nics = nics(&root.join("sys/class/net"));
    facts.rdma.library = match ask(run, &["ldconfig", "-p"]) {
        Answer::Is(list) => library(&list),
        _ => Answer::Unasked,
    };
    facts.rdma.devices = Answer::Is(devices(root));
}

/// Each once.
fn governors(root: &Path) -> Vec<String> {
    let policies = std::fs::read_dir(root.join("sys/devices/system/cpu/cpufreq"));
    let read = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("scaling_governor")).ok();
    let mut all: Vec<String> =
        policies.into_iter().flatten().flatten().filter_map(read).map(|g| g.trim().to_string()).collect();
    all.sort();
    all.dedup();
    all
}

/// ARPHRD_ETHER, as `type` has it.
const ETHER: &str = "1";

fn nics(folder: &Path) -> Vec<Nic> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut nics: Vec<Nic> = entries
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let at = entry.path();
            let file = |path: &str| std::fs::read_to_string(at.join(path)).ok().map(|t| t.trim().to_string());
            let is_there = |path: &str| at.join(path).exists();
            let kind = if is_there("wireless") || is_there("phy80211") {
                Kind::Wifi
            } else if is_there("tun_flags") || is_there("bridge") || is_tunnel(&name) {
                Kind::Tunnel
            } else if name.starts_with("thunderbolt") {
                Kind::Thunderbolt
            } else if file("type").as_deref() == Some(ETHER) {
                Kind::Ethernet
            } else {
                Kind::Other
            };
            // What is down has no speed, and reading it fails.
            let mbits = file("speed").and_then(|text| text.parse::<i64>().ok()).filter(|&m| m > 0);
            Some(Nic {
                up: file("operstate")? == "up",
                mtu: file("mtu").and_then(|text| text.parse().ok()),
                mbits: mbits.and_then(|m| u32::try_from(m).ok()),
                kind,
                name,
            })
        })
        .filter(|nic| nic.name != "lo")
        .collect();
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    nics
}

/// From the loader's list.
fn library(list: &str) -> Answer<String> {
    let line = list.lines().find(|line| line.trim_start().starts_with("libibverbs.so.1"));
    match line.and_then(|line| line.split_once("=> ")) {
        Some((_, path)) => Answer::Is(path.trim().into()),
        None => Answer::Refused("the loader knows no libibverbs.so.1".into()),
    }
}

fn devices(root: &Path) -> Vec<Device> {
    let folder = root.join("sys/class/infiniband");
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names.into_iter().map(|name| device(&folder.join(&name).join("ports/1"), name)).collect()
}

fn device(port: &Path, name: String) -> Device {
    let file = |path: &str| std::fs::read_to_string(port.join(path)).ok().map(|text| text.trim().to_string());
    let number = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().parse::<u32>().ok();
    let mut indices: Vec<u32> =
        std::fs::read_dir(port.join("gids")).into_iter().flatten().flatten().filter_map(number).collect();
    indices.sort_unstable();
    let gids = indices.into_iter().filter_map(|i| Some((i, file(&format!("gids/{i}"))?)));
    let interface = file("gid_attrs/ndevs/0").map(|name| Interface { name, ..Interface::default() });
    Device {
        name,
        transport: file("link_layer").unwrap_or_default(),
        active: file("state").map(|state| state.starts_with('4')),
        gids: gids.filter(|(_, gid)| gid.chars().any(|c| !matches!(c, '0' | ':'))).collect(),
        interface,
        ..Device::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Recorded;
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal:       2048 kB\nMemFree: 1 kB\n");
        write("proc/uptime", "350.11 600.00\n");
        write("proc/sys/kernel/osrelease", "6.12.1-amd64\n");
        write("etc/os-release", "ID=debian\nPRETTY_NAME=\"Debian 13\"\n");
        for (cpu, governor) in [(0, "powersave"), (1, "performance"), (2, "powersave")] {
            write(&format!("sys/devices/system/cpu/cpufreq/policy{cpu}/scaling_governor"), governor);
        }
        write("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
        write("sys/class/infiniband/rxe0/ports/1/link_layer", "Ethernet\n");
        write("sys/class/infiniband/rxe0/ports/1/gids/0", "fe80:0000:0000:0000:0200:00ff:fe00:0001\n");
        write("sys/class/infiniband/rxe0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
        write("sys/class/infiniband/rxe0/ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        write("sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0", "eth1\n");
        write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
        for (name, state, kind) in [
            ("eth1", "up", "1"),
            ("wlan0", "down", "1"),
            ("tun3", "unknown", "65534"),
            ("br-0", "up", "1"),
            ("ib0", "up", "32"),
            ("lo", "unknown", "772"),
        ] {
            write(&format!("sys/class/net/{name}/operstate"), state);
            write(&format!("sys/class/net/{name}/type"), kind);
            write(&format!("sys/class/net/{name}/mtu"), "1500\n");
            write(&format!("sys/class/net/{name}/speed"), if name == "eth1" { "10000\n" } else { "-1\n" });
        }
        write("sys/class/net/wlan0/phy80211/name", "phy0");
        let run = Recorded::default()
            .with("ldconfig -p", "\tlibibverbs.so.1 (libc6,x86-64) => /lib/libibverbs.so.1\n");
        let mut facts = Facts::default();
        gather(&run, root.path(), &mut facts);
        assert_eq!(facts.memory.total, Some(2 << 20));
        assert_eq!(
            (facts.system.version.as_str(), facts.system.build.as_str()),
            ("6.12.1-amd64", "Debian 13")
        );
        assert_eq!(facts.system.uptime, Some(350));
        assert_eq!(facts.cpu.governors, ["performance", "powersave"]);
        assert_eq!(facts.rdma.library, Answer::Is("/lib/libibverbs.so.1".into()));
        let devices = facts.rdma.devices.get().unwrap();
        assert_eq!((devices[0].name.as_str(), devices[0].active), ("mlx5_0", Some(false)));
        assert_eq!(
            (devices[1].active, devices[1].gids.len(), devices[1].ipv4().map(|(index, _)| index)),
            (Some(true), 2, Some(1))
        );
        assert_eq!(devices[1].interface.as_ref().unwrap().name, "eth1");
        let nics: Vec<_> = facts.nics.iter().map(|n| (n.name.as_str(), n.kind, n.up, n.mbits)).collect();
        assert_eq!(
            nics,
            [
                ("br-0", Kind::Tunnel, true, None),
                ("eth1", Kind::Ethernet, true, Some(10_000)),
                ("ib0", Kind::Other, true, None),
                ("tun3", Kind::Tunnel, false, None),
                ("wlan0", Kind::Wifi, false, None)
            ]
        );
        assert_eq!(facts.nics[1].mtu, Some(1500));
    }

    #[test]
    fn what_is_not_there_is_not_known() {
        let root = tempfile::tempdir().unwrap();
        let mut facts = Facts::default();
        gather(&Recorded::default().with("ldconfig -p", "1 libs found\n"), root.path(), &mut facts);
        assert_eq!(facts.memory.total, None);
        assert!(facts.cpu.governors.is_empty() && facts.rdma.devices.get().unwrap().is_empty());
        assert!(matches!(facts.rdma.library, Answer::Refused(_)));
        let mut facts = Facts::default();
        gather(&Recorded::default(), root.path(), &mut facts);
        assert_eq!(facts.rdma.library, Answer::Unasked, "without ldconfig nothing is known");
    }
}
