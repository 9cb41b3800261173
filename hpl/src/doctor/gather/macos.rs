//! macOS: what its own commands print.

use std::time::{SystemTime, UNIX_EPOCH};

use fulmen::fabric::tcp::is_tunnel;

use super::super::facts::{Answer, Device, Facts, Interface, Kind, Limits, Nic, Port};
use super::{Run, ask, load, read, value};

/// Programs that set the addresses of Thunderbolt interfaces, or hold RDMA devices, on their own account.
const MANAGERS: [&str; 2] = ["exo", "jaccl"];

pub(super) fn gather(run: &dyn Run, facts: &mut Facts) {
    let text = |command: &[&str]| ask(run, command).get().cloned().unwrap_or_default();
    let versions = text(&["sw_vers"]);
    let of = |text: &str, key: &str| value(text, key).unwrap_or_default().to_string();
    facts.system.version = of(&versions, "ProductVersion");
    facts.system.build = of(&versions, "BuildVersion");
    facts.system.model = text(&["sysctl", "-n", "hw.model"]).trim().into();
    facts.system.chip = text(&["sysctl", "-n", "machdep.cpu.brand_string"]).trim().into();
    facts.system.uptime = uptime(&text(&["sysctl", "-n", "kern.boottime"]));
    facts.memory.total = text(&["sysctl", "-n", "hw.memsize"]).trim().parse().ok();
    let power = text(&["pmset", "-g"]);
    let setting = |key: &str| value(&power, key)?.split_whitespace().next()?.parse::<u32>().ok();
    facts.cpu.low_power = setting("lowpowermode").map(|n| n != 0);
    facts.cpu.may_sleep = setting("sleep").map(|minutes| minutes != 0);
    facts.cpu.speed_limit =
        value(&text(&["pmset", "-g", "therm"]), "CPU_Speed_Limit").and_then(|n| n.parse().ok());

    load::macos(run, &mut facts.cpu);

    let rdma = &mut facts.rdma;
    rdma.enabled = read(ask(run, &["rdma_ctl", "status"]), enabled);
    rdma.nvram =
        ask(run, &["nvram", "rdma-enable"]).get().and_then(|t| t.split_whitespace().nth(1)).map(Into::into);
    let profile = text(&["system_profiler", "SPThunderboltDataType", "-json"]);
    let names = text(&["networksetup", "-listallhardwareports"]);
    rdma.thunderbolt = generation(&facts.system.chip).or_else(|| fastest(&profile));
    rdma.ports = ports(&profile, &names);
    let interfaces = text(&["ifconfig"]);
    rdma.bridge = bridge(&interfaces);
    facts.nics = nics(&interfaces, &names);
    let processes = text(&["ps", "-axco", "command"]);
    rdma.managers =
        MANAGERS.into_iter().filter(|m| processes.lines().any(|l| l.trim() == *m)).map(Into::into).collect();
    // The tool comes with the library, which itself is in no file.
    let listed = ask(run, &["ibv_devinfo", "-v"]);
    rdma.library = match &listed {
        Answer::Refused(words) if words.contains("No such file") => {
            Answer::Refused("there is no ibv_devinfo".into())
        }
        Answer::Refused(_) | Answer::Is(_) => Answer::Is("librdma.dylib".into()),
        _ => Answer::Unasked,
    };
    rdma.devices = match listed {
        // So it ends when there are none.
        Answer::Refused(_) if rdma.library.get().is_some() => Answer::Is(Vec::new()),
        other => read(other, |text| Some(devices(text))),
    };
    if let Answer::Is(devices) = &mut rdma.devices {
        for device in devices {
            let name = device.name.strip_prefix("rdma_").unwrap_or(&device.name).to_string();
            device.interface = Some(interface(&interfaces, name));
        }
    }
}

fn enabled(text: &str) -> Option<bool> {
    let words = text.to_lowercase();
    if words.contains("disabled") {
        return Some(false);
    }
    words.contains("enabled").then_some(true)
}

/// `{ sec = 1790000000, usec = 0 } Mon Sep …`
fn uptime(boottime: &str) -> Option<u64> {
    let (_, rest) = boottime.split_once("sec = ")?;
    let start: u64 = rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
    SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs().checked_sub(start)
}

/// Thunderbolt of the chips known by now: 5 from M3 Ultra, M4 Pro and M5 Pro on; the plain ones have 4 or less.
fn generation(chip: &str) -> Option<u32> {
    let (number, kind) = match chip.strip_prefix("Apple M")?.split_once(' ') {
        Some((number, kind)) => (number, kind),
        None => (chip.strip_prefix("Apple M")?, ""),
    };
    match (number.parse::<u32>().ok()?, kind) {
        (3, "Ultra") | (4 | 5, "Pro" | "Max" | "Ultra") => Some(5),
        (1..=5, _) => Some(4),
        _ => None,
    }
}

/// From the speed of the ports: 80 Gb/s and more is Thunderbolt 5. A port with a slow cable in it tells nothing.
fn fastest(profile: &str) -> Option<u32> {
    let profile: serde_json::Value = serde_json::from_str(profile).ok()?;
    let mut best: Option<u32> = None;
    for bus in profile["SPThunderboltDataType"].as_array()? {
        let speed = bus["receptacle_1_tag"]["current_speed_key"].as_str().unwrap_or_default();
        let gbits = speed.split_whitespace().find_map(|word| word.parse::<u32>().ok());
        let free = bus["_items"].as_array().is_none_or(Vec::is_empty);
        best = best.max(match gbits {
            Some(gbits) if gbits >= 80 => Some(5),
            Some(_) if free => Some(4),
            _ => None,
        });
    }
    best
}

/// What the system calls its ports, each with its network interface: `("Thunderbolt 1", "en5")`.
fn hardware_ports(names: &str) -> Vec<(&str, &str)> {
    let mut interfaces = Vec::new();
    let mut name = "";
    for line in names.lines() {
        if let Some(port) = line.strip_prefix("Hardware Port:") {
            name = port.trim();
        } else if let Some(device) = line.strip_prefix("Device:") {
            interfaces.push((name, device.trim()));
        }
    }
    interfaces
}

/// All interfaces of `ifconfig` but loopback, and what they are by the list of hardware ports.
fn nics(interfaces: &str, names: &str) -> Vec<Nic> {
    let ports = hardware_ports(names);
    let heads = interfaces.lines().filter(|l| !l.starts_with(char::is_whitespace));
    let nic = |head: &str| {
        let (name, rest) = head.split_once(": flags=")?;
        let words = |key: &str| rest.split_whitespace().skip_while(|w| *w != key).nth(1).map(str::to_string);
        let lines: Vec<&str> = block(interfaces, name).collect();
        let status = lines.iter().find_map(|l| l.trim().strip_prefix("status: "));
        let media = lines.iter().find_map(|l| l.trim().strip_prefix("media: ")).unwrap_or_default();
        let port = ports.iter().find(|(_, device)| *device == name).map_or("", |(port, _)| *port);
        let kind = if is_tunnel(name) {
            Kind::Tunnel
        } else if port == "Wi-Fi" {
            Kind::Wifi
        } else if port.starts_with("Thunderbolt") {
            Kind::Thunderbolt
        } else if port.contains("Ethernet") || port.contains("LAN") {
            Kind::Ethernet
        } else {
            Kind::Other
        };
        // `autoselect (1000baseT <full-duplex>)`, `autoselect (10Gbase-T <full-duplex>)`
        let speed = media.split(['(', ' ']).find_map(|word| word.split_once("base")).map(|(speed, _)| speed);
        let mbits = speed.and_then(|speed| match speed.strip_suffix('G') {
            Some(gbits) => gbits.parse::<f64>().ok().map(|g| (g * 1000.0) as u32),
            None => speed.parse().ok(),
        });
        let up = status == Some("active");
        Some(Nic { name: name.into(), kind, up, mtu: words("mtu").and_then(|m| m.parse().ok()), mbits })
    };
    heads.filter_map(nic).filter(|nic| !nic.name.starts_with("lo")).collect()
}

/// The ports, their network interfaces, and the ports at the other ends.
fn ports(profile: &str, names: &str) -> Vec<Port> {
    let Ok(profile) = serde_json::from_str::<serde_json::Value>(profile) else { return Vec::new() };
    let interfaces = hardware_ports(names);
    let port = |bus: &serde_json::Value| {
        let receptacle = bus["receptacle_1_tag"]["receptacle_id_key"].as_str()?;
        let wanted = format!("Thunderbolt {receptacle}");
        let (_, interface) = interfaces.iter().find(|(name, _)| *name == wanted)?;
        let items = bus["_items"].as_array().into_iter().flatten();
        Some(Port {
            interface: (*interface).into(),
            uuid: bus["domain_uuid_key"].as_str()?.into(),
            connected_to: items.filter_map(|item| item["domain_uuid_key"].as_str()).next().map(Into::into),
        })
    };
    let mut ports: Vec<Port> =
        profile["SPThunderboltDataType"].as_array().into_iter().flatten().filter_map(port).collect();
    ports.sort_by(|a, b| a.interface.cmp(&b.interface));
    ports
}

/// The lines of one interface in what `ifconfig` prints.
fn block<'a>(interfaces: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let head = format!("{name}: ");
    let mut lines = interfaces.lines().skip_while(move |l| !l.starts_with(&head));
    let first = lines.next();
    first.into_iter().chain(lines.take_while(|l| l.starts_with(char::is_whitespace)))
}

/// Members of bridge0, while it is up.
fn bridge(interfaces: &str) -> Vec<String> {
    let up = block(interfaces, "bridge0").next().is_some_and(|head| {
        let flags = head.split(['<', '>']).nth(1).unwrap_or_default();
        flags.split(',').any(|flag| flag == "UP")
    });
    let member =
        |line: &str| Some(line.trim().strip_prefix("member: ")?.split_whitespace().next()?.to_string());
    if up { block(interfaces, "bridge0").filter_map(member).collect() } else { Vec::new() }
}

fn interface(interfaces: &str, name: String) -> Interface {
    let address =
        |line: &str| Some(line.trim().strip_prefix("inet ")?.split_whitespace().next()?.to_string());
    let ipv4 = block(interfaces, &name).filter_map(address).collect();
    Interface { name, ipv4 }
}

/// What `ibv_devinfo -v` prints, of macOS and of rdma-core.
fn devices(text: &str) -> Vec<Device> {
    let device = |text: &str| {
        let number = |key: &str| value(text, key).and_then(|n| n.parse::<u32>().ok());
        let transport = value(text, "transport").and_then(|t| t.split_whitespace().next());
        Device {
            name: text.split_whitespace().next().unwrap_or_default().into(),
            transport: transport.unwrap_or_default().into(),
            active: value(text, "state").map(|state| state.starts_with("PORT_ACTIVE")),
            gids: text.lines().filter_map(gid).collect(),
            limits: number("max_qp").map(|queue_pairs| Limits {
                queue_pairs,
                domains: number("max_pd").unwrap_or_default(),
                regions: number("max_mr").unwrap_or_default(),
            }),
            ..Device::default()
        }
    };
    text.split("hca_id:").skip(1).map(device).collect()
}

/// `GID[  1]:  ::ffff:10.0.0.1, RoCE v2`
fn gid(line: &str) -> Option<(u32, String)> {
    let (index, rest) = line.trim().strip_prefix("GID[")?.split_once("]:")?;
    let address = rest.trim().split([',', ' ']).next()?;
    Some((index.trim().parse().ok()?, address.into()))
}

#[cfg(test)]
mod tests {
    use super::super::tests::Recorded;
    use super::*;

    /// In the form that these commands print; names and numbers are invented.
    fn mini() -> Recorded {
        let profile = r#"{"SPThunderboltDataType": [
            {"device_name_key": "mini", "domain_uuid_key": "U2",
             "receptacle_1_tag": {"receptacle_id_key": "2", "current_speed_key": "Up to 80 Gb/s"},
             "_items": [{"_name": "dock"}, {"domain_uuid_key": "PEER"}]},
            {"device_name_key": "mini", "domain_uuid_key": "U1",
             "receptacle_1_tag": {"receptacle_id_key": "1", "current_speed_key": "Up to 80 Gb/s"}},
            {"_name": "a bus without a port"}]}"#;
        let interfaces = "\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en2: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\tether 36:00:00:00:00:02
\tinet 169.254.7.9 netmask 0xffff0000 broadcast 169.254.255.255
\tstatus: active
en20: flags=8863<UP> mtu 1500
\tinet 10.9.9.9 netmask 0xff000000
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\tmember: en1 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 9 priority 0 path cost 0
\tmember: en2 flags=3<LEARNING,DISCOVER>
";
        let devices = "\
hca_id:\trdma_en2
\ttransport:\t\t\tThunderbolt (100)
\tmax_mr_size:\t\t\t0xfa0000
\tmax_qp:\t\t\t\t11
\tmax_qp_wr:\t\t\t4095
\tmax_mr:\t\t\t\t100
\tmax_pd:\t\t\t\t11
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tGID[  0]:\t\tfe80:0000:0000:0000:3400:00ff:fe00:0002
\t\t\tGID[  1]:\t\t::ffff:169.254.7.9

hca_id:\trdma_en1
\ttransport:\t\t\tThunderbolt (100)
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
";
        Recorded::default()
            .with("sw_vers", "ProductName:\t\tmacOS\nProductVersion:\t\t26.3\nBuildVersion:\t\t25D125\n")
            .with("sysctl -n hw.model", "Mac16,11\n")
            .with("sysctl -n machdep.cpu.brand_string", "Apple M4 Pro\n")
            .with("sysctl -n kern.boottime", "{ sec = 1600000000, usec = 1 } Sun Sep 13\n")
            .with("sysctl -n hw.memsize", "68719476736\n")
            .with("pmset -g", "System-wide power settings:\nCurrently in use:\n sleep                1 (sleep prevented by x)\n lowpowermode         0\n displaysleep         10\n")
            .with("pmset -g therm", "Note: No thermal warning level has been recorded\n")
            .with("rdma_ctl status", "enabled\n")
            .with("nvram rdma-enable", "rdma-enable\t1\n")
            .with("system_profiler SPThunderboltDataType -json", profile)
            .with("networksetup -listallhardwareports", "\nHardware Port: Thunderbolt 1\nDevice: en1\nEthernet Address: x\n\nHardware Port: Thunderbolt 2\nDevice: en2\n")
            .with("ifconfig", interfaces)
            .with("ps -axco command", "COMMAND\nlaunchd\nexo\nexoplanet\n")
            .with("ibv_devinfo -v", devices)
    }

    #[test]
    fn a_macs_commands_are_read() {
        let mut facts = Facts::default();
        gather(&mini(), &mut facts);
        let (system, rdma) = (&facts.system, &facts.rdma);
        assert_eq!((system.version.as_str(), system.build.as_str()), ("26.3", "25D125"));
        assert_eq!((system.model.as_str(), system.chip.as_str()), ("Mac16,11", "Apple M4 Pro"));
        assert!(system.uptime.unwrap() > 1_000_000 && facts.memory.total == Some(64 << 30));
        assert_eq!(
            (facts.cpu.low_power, facts.cpu.may_sleep, facts.cpu.speed_limit),
            (Some(false), Some(true), None)
        );
        assert_eq!(
            (&rdma.enabled, rdma.nvram.as_deref(), rdma.thunderbolt),
            (&Answer::Is(true), Some("1"), Some(5))
        );
        assert_eq!(rdma.bridge, ["en1", "en2"]);
        let nics: Vec<_> = facts.nics.iter().map(|n| (n.name.as_str(), n.kind, n.up, n.mtu)).collect();
        assert_eq!(nics[0], ("en2", Kind::Thunderbolt, true, Some(1500)));
        assert_eq!(
            nics[1..],
            [("en20", Kind::Other, false, Some(1500)), ("bridge0", Kind::Other, false, Some(1500))]
        );
        assert_eq!(rdma.managers, ["exo"]);
        let port = |at: usize| (rdma.ports[at].interface.as_str(), rdma.ports[at].connected_to.as_deref());
        assert_eq!((rdma.ports.len(), port(0), port(1)), (2, ("en1", None), ("en2", Some("PEER"))));
        let devices = rdma.devices.get().unwrap();
        let [one, two] = devices.as_slice() else { panic!("{devices:?}") };
        assert_eq!((one.name.as_str(), one.transport.as_str()), ("rdma_en2", "Thunderbolt"));
        assert_eq!((one.active, one.ipv4().map(|(index, _)| index)), (Some(true), Some(1)));
        assert_eq!(one.limits, Some(Limits { queue_pairs: 11, domains: 11, regions: 100 }));
        assert!(one.interface.as_ref().unwrap().is_self_assigned());
        assert_eq!((two.active, two.limits), (Some(false), None));
        assert!(two.interface.as_ref().unwrap().ipv4.is_empty());
    }

    #[test]
    fn interfaces_are_known_by_their_ports() {
        let interfaces = "\
en0: flags=8863<UP,RUNNING> mtu 9000
\tmedia: autoselect (10Gbase-T <full-duplex>)
\tstatus: active
en1: flags=8863<UP,RUNNING> mtu 1500
\tmedia: autoselect
\tstatus: active
en7: flags=8863<UP,RUNNING> mtu 1500
\tmedia: autoselect (100baseTX <full-duplex>)
\tstatus: inactive
utun0: flags=8051<UP,POINTOPOINT> mtu 1380
";
        let ports = "Hardware Port: Ethernet\nDevice: en0\n\nHardware Port: Wi-Fi\nDevice: en1\n\n\
                     Hardware Port: USB 10/100 LAN\nDevice: en7\n";
        let nic =
            |name: &str, kind, up, mtu, mbits| Nic { name: name.into(), kind, up, mtu: Some(mtu), mbits };
        assert_eq!(
            nics(interfaces, ports),
            [
                nic("en0", Kind::Ethernet, true, 9000, Some(10_000)),
                nic("en1", Kind::Wifi, true, 1500, None),
                nic("en7", Kind::Ethernet, false, 1500, Some(100)),
                nic("utun0", Kind::Tunnel, false, 1380, None)
            ]
        );
    }

    #[test]
    fn an_old_or_wedged_mac_is_told_apart() {
        let mut old = Facts::default();
        gather(&Recorded::default().with("sw_vers", "ProductVersion: 15.5\n"), &mut old);
        assert!(matches!(old.rdma.library, Answer::Refused(_)) && old.rdma.devices.get().is_none());

        let mut run = mini();
        run.0.insert("ibv_devinfo -v".into(), Answer::Hung(10));
        let mut wedged = Facts::default();
        gather(&run, &mut wedged);
        assert_eq!(wedged.rdma.devices, Answer::Hung(10));

        run.0.insert("ibv_devinfo -v".into(), Answer::Refused("No IB devices found".into()));
        let mut none = Facts::default();
        gather(&run, &mut none);
        assert_eq!(none.rdma.devices, Answer::Is(Vec::new()));
    }

    #[test]
    fn thunderbolt_is_known_by_chip_or_by_speed() {
        let known = [
            ("Apple M1 Max", 4),
            ("Apple M3 Ultra", 5),
            ("Apple M4", 4),
            ("Apple M4 Max", 5),
            ("Apple M5", 4),
        ];
        for (chip, want) in known {
            assert_eq!(generation(chip), Some(want), "{chip}");
        }
        assert_eq!(generation("Apple M9 Max"), None);
        assert_eq!(generation("Intel(R) Core(TM) i7"), None);
        let speed = |gbits: u32, items: &str| {
            fastest(&format!(
                r#"{{"SPThunderboltDataType": [{{"receptacle_1_tag": {{"current_speed_key": "Up to {gbits} Gb/s"}}, "_items": {items}}}]}}"#
            ))
        };
        assert_eq!((speed(120, "[]"), speed(40, "[]")), (Some(5), Some(4)));
        assert_eq!(speed(40, "[{}]"), None, "a slow cable in a fast port");
        assert_eq!(fastest(""), None);
        assert_eq!(enabled("RDMA is disabled"), Some(false));
    }
}
