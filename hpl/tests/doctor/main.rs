//! What `hpl-run doctor` prints for each trouble that is known from the field: the whole text is made from facts, and
//! looked through for the trouble's name and its remedy, and for no other trouble.

#[cfg(target_os = "linux")]
mod devices;
#[cfg(target_os = "linux")]
mod pairs;
#[cfg(target_os = "linux")]
mod vm;

use std::process::Command;

use fulmen_hpl::doctor::facts::*;
use fulmen_hpl::doctor::{judge, report};

/// A Mac mini whose RDMA works: two cables, one peer.
fn mini() -> Facts {
    Facts {
        host: "mac-a".into(),
        fulmen: "0.1.0".into(),
        system: System {
            os: "macos".into(),
            version: "26.3".into(),
            build: "25D125".into(),
            model: "Mac16,11".into(),
            chip: "Apple M4 Pro".into(),
            uptime: Some(86_400),
        },
        cpu: Cpu { cores: 10, may_sleep: Some(false), low_power: Some(false), ..Cpu::default() },
        memory: Memory { available: Some(60 << 30), total: Some(64 << 30), ..Memory::default() },
        rdma: Rdma {
            library: Answer::Is("librdma.dylib".into()),
            enabled: Answer::Is(true),
            nvram: Some("1".into()),
            thunderbolt: Some(5),
            devices: Answer::Is(vec![device("rdma_en4"), device("rdma_en5")]),
            ..Rdma::default()
        },
        ..Facts::default()
    }
}

fn device(name: &str) -> Device {
    Device {
        name: name.into(),
        transport: "Thunderbolt".into(),
        active: Some(true),
        gids: vec![(0, "fe80::3400:ff:fe00:2".into()), (1, "::ffff:10.10.1.1".into())],
        limits: Some(Limits { queue_pairs: 11, domains: 11, regions: 100 }),
        interface: Some(Interface {
            name: name.trim_start_matches("rdma_").into(),
            ipv4: vec!["10.10.1.1".into()],
        }),
        ..Device::default()
    }
}

/// The second device, to be broken.
fn broken(change: impl FnOnce(&mut Device)) -> Facts {
    let mut facts = mini();
    if let Answer::Is(devices) = &mut facts.rdma.devices {
        change(&mut devices[1]);
    }
    facts
}

/// A step of the second device that did not go well.
fn step(act: Act, outcome: Outcome) -> Facts {
    broken(|device| {
        device.steps = vec![Step { act: Act::Open, outcome: Outcome::Done }, Step { act, outcome }];
    })
}

fn rdma(change: impl FnOnce(&mut Rdma)) -> Facts {
    let mut facts = mini();
    change(&mut facts.rdma);
    facts
}

/// A link to a peer over the second device.
fn link(change: impl FnOnce(&mut Link)) -> Facts {
    let mut link = Link {
        peer: "mac-b".into(),
        device: "rdma_en5".into(),
        address: "10.10.1.2".into(),
        tcp: Some(0),
        route: Some("en5".into()),
        delivered: Some((64, 64)),
        ..Link::default()
    };
    change(&mut link);
    rdma(|r| r.links = vec![link])
}

fn link_step(act: Act, outcome: Outcome) -> Facts {
    link(|l| l.steps = vec![Step { act, outcome }])
}

/// Names in square brackets, each once.
fn names(text: &str) -> Vec<&str> {
    let inner = text.split('[').skip(1).filter_map(|rest| rest.split(']').next());
    let mut names: Vec<&str> = inner
        .filter(|n| n.chars().all(|c| c.is_ascii_lowercase() || c == '-' || c.is_ascii_digit()))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn transcript(facts: &Facts) -> String {
    let all = [facts.clone()];
    report::text(&all, None, &judge(&all))
}

#[test]
fn a_machine_in_order_has_nothing_to_do() {
    for facts in [mini(), link(|_| {})] {
        let text = transcript(&facts);
        assert!(text.ends_with("Nothing to do.\n") && names(&text).is_empty(), "{text}");
        assert!(text.contains("rdma_en5") && text.contains("Apple M4 Pro"), "{text}");
    }
}

/// Number of the row in the table of failures, what was found, the trouble's name, words of the remedy.
type Row = (u32, Facts, &'static str, &'static [&'static str]);

fn rows() -> Vec<Row> {
    use Act::*;
    use Outcome::*;
    let old_macos = || {
        let mut facts = rdma(|r| {
            r.library = Answer::Refused("image not found".into());
            r.enabled = Answer::Unasked;
            r.devices = Answer::Unasked;
        });
        facts.system.version = "15.5".into();
        facts
    };
    let none = |enabled: bool, thunderbolt: u32| {
        rdma(|r| {
            r.enabled = Answer::Is(enabled);
            r.nvram = Some(u32::from(enabled).to_string());
            r.thunderbolt = Some(thunderbolt);
            r.devices = Answer::Is(Vec::new());
        })
    };
    let no_ipv4 = |device: &mut Device| {
        device.gids.truncate(1);
        device.interface.as_mut().unwrap().ipv4.clear();
    };
    let refused = |device: &mut Device| device.steps = vec![Step { act: ReadyToReceive, outcome: Errno(22) }];
    let just_started = || {
        let mut facts = broken(|d| {
            no_ipv4(d);
            refused(d);
        });
        facts.system.uptime = Some(90);
        facts
    };
    let renumbered = || {
        broken(|d| {
            d.interface.as_mut().unwrap().ipv4 = vec!["169.254.7.9".into()];
            d.gids[1].1 = "::ffff:169.254.7.9".into();
            refused(d);
        })
    };
    vec![
        (1, old_macos(), "no-library", &["update macOS", "`--fabric tcp`"]),
        (2, none(false, 5), "not-enabled", &["Recovery", "`rdma_ctl enable`", "restart"]),
        (3, none(true, 4), "thunderbolt-4", &["restart does not help", "`--fabric tcp`"]),
        (
            4,
            broken(|d| d.active = Some(false)),
            "port-down",
            &["reseat the cable", "Thunderbolt 5", "`rdma_ctl status`"],
        ),
        (5, step(AllocDomain, Null), "no-domain", &["restart the machine", "11 domains"]),
        (6, step(Register(1), Died(11)), "null-domain", &["`ibv_devinfo -v`", "PORT_ACTIVE"]),
        (
            7,
            broken(|d| {
                no_ipv4(d);
                refused(d)
            }),
            "address-kind",
            &["`sudo ifconfig bridge0 down`", "`sudo ifconfig en5 inet "],
        ),
        (7, broken(refused), "address-kind", &["`sudo ifconfig bridge0 down`", "number 1 of the table"]),
        (7, broken(no_ipv4), "address-kind", &["`sudo ifconfig en5 inet "]),
        (8, just_started(), "address-late", &["wait for some minutes", "netmask 255.255.255.252"]),
        (8, renumbered(), "address-late", &["`ifconfig en5`", "netmask 255.255.255.252"]),
        (
            9,
            step(ReadyToReceive, Errno(60)),
            "peer-unreachable",
            &["`ping6 -c 3 ff02::1%en5`", "`ndp -an`", "--matrix"],
        ),
        (10, step(ReadyToReceive, Errno(96)), "queues-leaked", &["do not try again", "restart the machine"]),
        (11, step(ReadyToReceive, Errno(16)), "stale-queue", &["try once more", "restart the machine"]),
        (12, step(ReadyToReceive, Errno(14)), "mappings-drained", &["register less", "restart the machine"]),
        (13, step(CreateOther, Errno(102)), "only-uc", &["unreliable connections (UC)", "`posted`"]),
        (14, step(Register(101), Null), "regions-exhausted", &["fewer and larger", "about 100"]),
        (14, step(Register(101), Errno(12)), "regions-exhausted", &["registration 101"]),
        (15, step(PostReceive, Errno(12)), "frame-budget", &["lowers its window", "`sw_vers`"]),
        (15, step(PostSend, Errno(35)), "frame-budget", &["frames of 4 KiB"]),
        (16, link_step(Complete, Status(1)), "frame-mismatch", &["same macOS build", "at most two"]),
        (
            17,
            link_step(Compare, Wrong(fulmen_hpl::doctor::facts::Wrong::Zeros)),
            "across-4-gib",
            &["multiples of 1 GiB"],
        ),
        (
            18,
            link(|l| l.delivered = Some((0, 64))),
            "dead-pair",
            &["nothing came from the peer", "makes a dead one anew"],
        ),
        (19, link(|l| l.silent = Some(10)), "peer-silent", &["`ssh mac-b ps ax`", "`--silence`"]),
        (
            20,
            link(|l| l.side_channel = Some(2)),
            "peer-failed-first",
            &["see the row of the other end, on mac-b"],
        ),
        (
            21,
            link(|l| {
                l.tcp = Some(65);
                l.others_reach = Some(true)
            }),
            "local-network",
            &["Privacy & Security, Local Network", "`codesign"],
        ),
        (21, link(|l| l.tcp = Some(61)), "refused", &["reached, but nobody listens"]),
        (22, link(|l| l.tcp = Some(49)), "address-not-yet", &["wait for a minute", "/30"]),
        (
            23,
            rdma(|r| r.devices = Answer::Hung(10)),
            "driver-wedged",
            &["`kill -9`", "power the machine off"],
        ),
        (23, step(AllocDomain, Hung(10)), "driver-wedged", &["holding its button"]),
        (24, step(PostReceive, Died(11)), "unplugged", &["start the job again", "DiagnosticReports"]),
        (
            25,
            rdma(|r| r.bridge = vec!["en4".into(), "en5".into()]),
            "bridge-loop",
            &["`sudo ifconfig bridge0 down` on every Mac"],
        ),
        (
            26,
            link_step(Compare, Wrong(fulmen_hpl::doctor::facts::Wrong::Garbage)),
            "corrupt",
            &["checksums on", "another cable"],
        ),
        (
            27,
            link(|l| l.route = Some("en0".into())),
            "wrong-route",
            &["`sudo route change 10.10.1.2 -interface en5`"],
        ),
        (
            28,
            rdma(|r| r.managers = vec!["exo".into()]),
            "other-manager",
            &["stop it", "grep -i exo", "fixed /30"],
        ),
    ]
}

#[test]
fn every_row_of_the_field_is_recognised_and_answered() {
    let rows = rows();
    for number in 1..=28 {
        assert!(rows.iter().any(|row| row.0 == number), "row {number} has no transcript");
    }
    for (number, facts, name, remedy) in rows {
        let text = transcript(&facts);
        assert_eq!(names(&text), [name], "row {number}:\n{text}");
        // Lines are wrapped: words are compared with single blanks.
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let next = flat.split("Next step for you").nth(1).unwrap_or_else(|| panic!("row {number}:\n{text}"));
        for words in remedy {
            assert!(next.contains(words), "row {number}: no `{words}` in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 125), "row {number}:\n{text}");
    }
}

/// What looks alike and is not.
#[test]
fn neighbours_in_the_table_are_told_apart() {
    use Act::*;
    let told = |facts: &Facts| names(&transcript(facts)).join(" ");
    // A port that is down explains what else fails there.
    let down = broken(|d| {
        d.active = Some(false);
        d.gids.clear();
        d.steps = vec![Step { act: AllocDomain, outcome: Outcome::Null }];
    });
    assert_eq!(told(&down), "port-down");
    // Off by default, on hardware that could not either: nobody is sent into Recovery in vain; nor is it told to be on.
    for (enabled, words) in [(Answer::Is(false), "rdma_ctl says disabled"), (Answer::Unasked, "no device [")]
    {
        let off = rdma(|r| {
            r.enabled = enabled;
            r.thunderbolt = Some(4);
            r.devices = Answer::Is(Vec::new());
        });
        let text = transcript(&off);
        assert!(names(&text) == ["thunderbolt-4"] && text.contains(words), "{text}");
        assert!(!text.contains("is enabled") && !text.contains("Recovery"), "{text}");
    }
    // Nothing known of switch and ports.
    let dark = rdma(|r| {
        r.enabled = Answer::Unasked;
        r.thunderbolt = None;
        r.devices = Answer::Is(Vec::new());
    });
    assert_eq!(told(&dark), "no-device");
    // Not reached by others either: no question of leave.
    assert_eq!(told(&link(|l| l.tcp = Some(65))), "unreachable");
    // A refused registration among the first is not the limit of their number.
    assert_eq!(told(&step(Register(2), Outcome::Errno(22))), "unknown-error");
    // Of Linux' memory that may be locked the first may be too much.
    let mut little = step(Register(1), Outcome::Errno(12));
    little.system.os = "linux".into();
    let text = transcript(&little);
    assert!(names(&text) == ["regions-exhausted"] && text.contains("`ulimit -l unlimited`"), "{text}");
    let mut less = broken(|d| {
        d.probe = Some(Probe { registered: 1 << 20, refused: 16 << 20, ..Probe::default() });
    });
    assert_eq!(told(&less), "locked-memory");
    less.system.os = "linux".into();
    let text = transcript(&less);
    assert!(names(&text) == ["locked-memory"] && text.contains("`ulimit -l unlimited`"), "{text}");
    // RC is refused by who has UC only, UC by who has RC only.
    assert_eq!(told(&step(CreateOther, Outcome::Errno(95))), "only-uc");
    assert_eq!(told(&step(CreateUc, Outcome::Errno(95))), "no-uc");
    // The act and the number that were seen are told, not those of another row.
    let text = transcript(&step(CreateUc, Outcome::Errno(12)));
    assert!(text.contains("creating a queue pair was refused (12)") && !text.contains("RTR"), "{text}");
    // One cable in the bridge is no loop; neither are two interfaces that are no cables.
    assert_eq!(told(&rdma(|r| r.bridge = vec!["en5".into(), "en0".into()])), "");
    // Two troubles are two.
    let both = link(|l| {
        l.route = Some("utun3".into());
        l.steps = vec![Step { act: ReadyToReceive, outcome: Outcome::Errno(60) }];
    });
    assert_eq!(told(&both), "peer-unreachable wrong-route");
    // A cable from a machine to itself is not routed over the cable, and need not be.
    assert_eq!(
        told(&link(|l| {
            l.peer = "mac-a".into();
            l.route = Some("lo0".into());
        })),
        ""
    );
    // Long messages that do not pass: by the driver where that is known of it, else by the cable.
    let short = |slot: u64, before, os: &str, version: &str| {
        let mut facts = link(|l| {
            l.together = Some(Together { slot, before, window: 4, rate: 5e9, ..Together::default() });
        });
        (facts.system.os, facts.system.version) = (os.into(), version.into());
        transcript(&facts)
    };
    let rows = [
        (short(4096, None, "macos", "26.2"), "frames-only", "macOS 26.3 or later"),
        (short(4096, None, "macos", "26.4"), "frames-only", "another cable"),
        (short(4096, None, "linux", "6.8.0"), "frames-only", "ethtool -S"),
        (short(64 << 10, None, "macos", "26.3"), "short-messages", "another cable"),
        (short(64 << 10, Some(512 << 10), "macos", "26.3"), "short-messages", "those of 512.0 KiB did"),
        (short(4096, Some(512 << 10), "macos", "26.2"), "frames-only", "another cable"),
    ];
    for (text, name, words) in rows {
        assert!(names(&text) == [name] && text.contains(words), "{words}: {text}");
        assert_eq!(text.contains("26.3 or later"), words.contains("26.3 or later"), "{text}");
    }
    assert_eq!(names(&short(512 << 10, None, "linux", "6.8.0")), [""; 0]);
    // What nobody knows is told in its own words, unless the other end has the cause.
    let gave = |l: &mut Link| {
        l.delivered = None;
        l.words = Some("something new\n    use something old".into());
    };
    assert_eq!(told(&link(gave)), "pair-failed");
    let follower = link(|l| {
        gave(l);
        l.side_channel = Some(0);
    });
    assert_eq!(told(&follower), "peer-failed-first");
    // A port that went down is why messages stopped coming; a crash comes after both.
    let step = |act, outcome| Step { act, outcome };
    let mut steps = vec![step(Several, Outcome::Silent), step(QueryPort, Outcome::Errno(0))];
    assert_eq!(told(&link(|l| l.steps = steps.clone())), "port-down");
    steps.push(step(WarmUp, Outcome::Died(11)));
    assert_eq!(told(&link(|l| l.steps = steps)), "unplugged");
    assert_eq!(told(&link_step(Stream, Outcome::Silent)), "lost-message");
    // A Linux host without RDMA is in order.
    let mut linux = Facts { host: "n1".into(), ..Facts::default() };
    linux.system.os = "linux".into();
    linux.rdma.library = Answer::Refused("the loader knows no libibverbs.so.1".into());
    linux.rdma.devices = Answer::Is(Vec::new());
    let text = transcript(&linux);
    assert!(names(&text) == ["no-library"] && text.contains("Nothing to do."), "{text}");
}

fn doctor(args: &[&str], folder: &std::path::Path) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_hpl-run"))
        .arg("doctor")
        .args(args)
        .current_dir(folder)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().expect("it ends by itself"), text(output.stdout), text(output.stderr))
}

#[test]
fn the_program_tells_people_and_programs() {
    let folder = tempfile::tempdir().unwrap();
    let (code, out, err) = doctor(&[], folder.path());
    assert!([0, 3].contains(&code) && err.is_empty(), "{code} {err}");
    assert!(out.contains("check") && out.contains("system"), "{out}");

    let (_, out, _) = doctor(&["--json"], folder.path());
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(told["schema"], "fulmen.doctor/1");
    assert_eq!(told["hosts"][0]["fulmen"], env!("CARGO_PKG_VERSION"));

    // What one host printed is compared on another: here a Mac that is off.
    let mut off = told.clone();
    let mac = rdma(|r| {
        r.enabled = Answer::Is(false);
        r.devices = Answer::Is(Vec::new());
    });
    off["hosts"] = serde_json::json!([mac]);
    std::fs::write(folder.path().join("mac-a.json"), off.to_string()).unwrap();
    let (code, out, _) = doctor(&["--with", "mac-a.json"], folder.path());
    assert_eq!(code, 3);
    assert!(out.contains("mac-a") && out.contains("[not-enabled]") && out.contains("all hosts"), "{out}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_report_that_cannot_be_written_and_a_library_that_is_not_there() {
    let ended = std::process::Command::new(env!("CARGO_BIN_EXE_hpl-run"))
        .arg("doctor")
        .env("FULMEN_VERBS_LIB", "/nonexistent/lib.so")
        .output()
        .unwrap();
    let out = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(3), "{out}");
    assert!(out.contains("[library-named]") && out.contains("unset FULMEN_VERBS_LIB"), "{out}");
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let ended = std::process::Command::new(env!("CARGO_BIN_EXE_hpl-run"))
        .arg("doctor")
        .stdout(full)
        .output()
        .unwrap();
    let err = String::from_utf8(ended.stderr).unwrap();
    assert!(ended.status.code() == Some(3) && err.contains("No space left on device"), "{err}");
}

#[test]
fn files_of_mlx_are_checked_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let with_port = |host: &str, uuid: &str, to: &str, interface: &str| {
        let mut facts = rdma(|r| {
            r.ports =
                vec![Port { interface: interface.into(), uuid: uuid.into(), connected_to: Some(to.into()) }];
        });
        facts.host = host.into();
        facts
    };
    let hosts = [with_port("mac-a", "A", "B", "en4"), with_port("mac-b", "B", "A", "en5")];
    put("hosts.json", &serde_json::json!({ "schema": "fulmen.doctor/1", "hosts": hosts }).to_string());

    // One that is there is replaced whole: its text stays what it was for who has it open.
    put("h.json", "old");
    std::fs::hard_link(folder.path().join("h.json"), folder.path().join("before.json")).unwrap();
    let (code, _, err) = doctor(&["--with", "hosts.json", "--write-hostfile", "h.json"], folder.path());
    assert!([0, 3].contains(&code), "{err}");
    assert_eq!(std::fs::read_to_string(folder.path().join("before.json")).unwrap(), "old");
    let written = std::fs::read_to_string(folder.path().join("h.json")).unwrap();
    assert!(written.contains("\"rdma_en4\"") && written.contains("\"ssh\": \"mac-b\""), "{written}");

    put(
        "matrix.json",
        r#"[{"ssh": "mac-a", "rdma": [null, "rdma_en9"]}, {"ssh": "mac-b", "rdma": ["rdma_en5", null]}]"#,
    );
    let (code, out, _) = doctor(&["--with", "hosts.json", "--matrix", "matrix.json"], folder.path());
    assert_eq!(code, 3);
    assert!(out.contains("the matrix names rdma_en9 [matrix-device]") && out.contains("on mac-a"), "{out}");

    put("matrix.json", "[[null");
    let (code, _, err) = doctor(&["--matrix", "matrix.json"], folder.path());
    assert!(code == 2 && err.contains("is not JSON"), "{code} {err}");
    // What was found is told all the same.
    let (code, out, err) = doctor(&["--write-hostfile", "h.json"], folder.path());
    assert!(code == 2 && err.contains("no cable between the hosts is known"), "{code} {err}");
    assert!(out.contains("cores "), "{out}");
    put(
        "later.json",
        &serde_json::json!({ "schema": "fulmen.doctor/2", "hosts": { "count": 2 } }).to_string(),
    );
    let (code, _, err) = doctor(&["--with", "later.json"], folder.path());
    assert!(code == 2 && err.contains("\"fulmen.doctor/2\""), "{code} {err}");
    let strange = with_port("mac\u{1b}[2J", "A", "B", "en4");
    put("strange.json", &serde_json::json!({ "schema": "fulmen.doctor/1", "hosts": [strange] }).to_string());
    let (_, out, _) = doctor(&["--with", "strange.json"], folder.path());
    assert!(out.contains("mac?[2J") && !out.contains('\u{1b}'), "{out}");
    for argument in ["--with", "--matrix", "--write-hostfile"] {
        let file = if argument == "--write-hostfile" { "nowhere/nowhere.json" } else { "nowhere.json" };
        let (code, _, err) = doctor(&[argument, file], folder.path());
        assert!(code == 2 && err.contains(argument) && err.contains("nowhere.json"), "{code} {err}");
    }
    // Of devices that are not here it is said, whatever the hosts are called.
    let (_, out, _) = doctor(&["--json"], folder.path());
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    let here = told["hosts"][0]["host"].as_str().unwrap();
    let named = format!(
        r#"[{{"ssh": "{here}", "rdma": [null, "rdma_en77"]}}, {{"ssh": "b", "rdma": ["rdma_en78", null]}}]"#
    );
    for (text, words) in [
        (named.as_str(), "the matrix names rdma_en77 [matrix-device]"),
        (
            r#"[[null, "rdma_en77"], ["rdma_en78", null]]"#,
            "each row of the matrix names devices that are not here",
        ),
        (
            r#"[{"ssh": "x", "rdma": [null, "d"]}, {"ssh": "y", "rdma": ["e", null]}]"#,
            "it is of x, y, this is ",
        ),
    ] {
        put("matrix.json", text);
        let (code, out, err) = doctor(&["--matrix", "matrix.json"], folder.path());
        let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(code == 3 && flat.contains(words) && flat.contains("-> "), "{code} {out} {err}");
    }
}
