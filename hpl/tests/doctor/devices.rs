//! `hpl-run doctor` on one host whose devices are emulated: each is tried, or only opened, in a process of its own.

use std::process::Command;

use fulmen_emu_verbs::{Call, Installed, Kind, Profile, Trap, World};

/// The devices of an emulated host are tried in a process of its own, and what they grant is remembered.
#[test]
fn emulated_devices_are_tried_and_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let look = |world: &Installed, args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_hpl-run"))
            .args(["doctor", "--json"])
            .args(args)
            .env("FULMEN_VERBS_LIB", world.library())
            .env("FULMEN_EMU_HOST", "h0")
            .env("XDG_CACHE_HOME", folder.path())
            .output()
            .unwrap();
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let device = told["hosts"][0]["rdma"]["devices"]["is"].as_array().unwrap().iter();
        let device = device.clone().find(|d| d["name"] == "rdma_en01").unwrap().clone();
        let findings = told["findings"].as_array().unwrap().iter();
        let ids: Vec<String> = findings
            .filter(|f| f["check"] == "rdma_en01")
            .map(|f| f["id"].as_str().unwrap().into())
            .collect();
        (device, ids)
    };
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let (device, ids) = look(&world, &[]);
    assert!(ids.is_empty() && device["active"] == true, "{ids:?} {device}");
    assert_eq!(device["limits"]["domains"], 11);
    assert_eq!(device["probe"]["reliable"], false);
    assert_eq!(
        device["probe"]["granted"][0],
        serde_json::json!({"asked": 4095, "send": 4095, "receive": 4095})
    );
    let c = world.counters();
    assert_eq!((c.qps, c.mrs, c.cqs, c.pds, c.pds_lost), (0, 0, 0, 0, 0), "{c:?}");

    // A driver's refusal, a stuck one and one that crashes are each told with their name; nothing of it is remembered.
    let rows = [
        (Kind::Fail { call: Call::AllocPd, errno: 12 }, "no-domain"),
        (Kind::Fail { call: Call::CreateQp, errno: 96 }, "queues-leaked"),
        (Kind::Fail { call: Call::ToInit, errno: 22 }, "address-kind"),
        (Kind::Fail { call: Call::OpenDevice, errno: 5 }, "unknown-error"),
    ];
    for (kind, id) in rows {
        let world =
            World::mesh(Profile::Apple, 2).trap(Trap::always(kind).on("rdma_en01")).install().unwrap();
        let (device, ids) = look(&world, &["--fresh"]);
        assert_eq!(ids, [id], "{kind:?}: {device}");
        assert!(device["probe"].is_null(), "{device}");
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{kind:?}: {c:?}");
    }
    // Little memory may be locked: told as that, and not remembered, for it is a setting.
    let cache = folder.path().join("fulmen/probe");
    let kept = || -> Vec<String> {
        let files = std::fs::read_dir(&cache).unwrap().map(|file| file.unwrap().path());
        let mut texts: Vec<String> = files.map(|file| std::fs::read_to_string(file).unwrap()).collect();
        texts.sort();
        texts
    };
    let before = kept();
    assert!(!before.is_empty());
    let little = Trap::always(Kind::Fail { call: Call::RegMr, errno: 12 }).from_bytes(8 << 20);
    let world = World::mesh(Profile::Apple, 2).trap(little.on("rdma_en01")).install().unwrap();
    let (device, ids) = look(&world, &["--fresh"]);
    assert!(ids == ["locked-memory"] && device["probe"]["refused"].as_u64() > Some(0), "{ids:?} {device}");
    assert_eq!(kept(), before);
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    world.set_cable("rdma_en01", false);
    let (device, ids) = look(&world, &[]);
    assert!(ids == ["port-down"] && device["active"] == false, "{ids:?} {device}");
}

/// A program of the emulated host `h0`.
fn on_h0(world: &Installed, folder: &std::path::Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpl-run"));
    command
        .arg("doctor")
        .env("FULMEN_VERBS_LIB", world.library())
        .env("FULMEN_EMU_HOST", "h0")
        .env("XDG_CACHE_HOME", folder)
        .env("TMPDIR", folder);
    command
}

/// A device of which all is known is opened all the same: what it has may be used up since.
#[test]
fn a_known_device_is_asked_for_a_domain() {
    let folder = tempfile::tempdir().unwrap();
    for (errno, told) in [(0, "Done"), (12, "Refused")] {
        let used_up = Trap::always(Kind::Fail { call: Call::AllocPd, errno });
        let world = World::mesh(Profile::Apple, 2);
        let world = if errno == 0 { world } else { world.trap(used_up) }.install().unwrap();
        let notes = folder.path().join(format!("notes-{errno}"));
        std::fs::write(&notes, "").unwrap();
        let mut child = on_h0(&world, folder.path());
        let status = child.arg("--probe").arg(&notes).args(["--known", "rdma_en01"]).status().unwrap();
        assert!(status.success());
        let text = std::fs::read_to_string(&notes).unwrap();
        let last = text.lines().rfind(|line| line.contains("alloc_pd")).unwrap_or_default();
        assert!(last.contains(told), "{text}");
        assert!(!text.contains("register") && !text.contains("create_qp"), "{text}");
        let c = world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{c:?}");
    }
}

#[test]
fn devices_that_could_not_be_tried_are_not_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let output = on_h0(&world, folder.path()).env("TMPDIR", folder.path().join("nowhere")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("[devices-not-tried]") && flat.contains("`export TMPDIR=FOLDER`"), "{text}");
    assert!(!text.contains("Nothing to do"), "{text}");
}

/// A driver that never comes back from listing its devices is told as that.
#[test]
fn a_driver_that_is_stuck_in_listing() {
    let folder = tempfile::tempdir().unwrap();
    let stuck = Trap::always(Kind::Stuck { call: Call::GetDeviceList });
    let world = World::mesh(Profile::Apple, 2).trap(stuck).install().unwrap();
    let output = on_h0(&world, folder.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("[driver-wedged]") && text.contains("listing RDMA devices did not answer"),
        "{text}"
    );
    assert!(!output.status.success(), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{text}");
}

/// Who asks it to end gets that at once, though its child is stuck in a driver, and no file of it stays.
#[test]
fn an_interrupted_doctor_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let stuck = Trap::always(Kind::Stuck { call: Call::AllocPd });
    let world = World::mesh(Profile::Apple, 2).trap(stuck).install().unwrap();
    let mut child = on_h0(&world, folder.path()).stdout(std::process::Stdio::null()).spawn().unwrap();
    let notes = || {
        let mut files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
        files.find(|path| path.file_name().unwrap().to_string_lossy().starts_with("hpl-run-probe"))
    };
    let start = std::time::Instant::now();
    let is_stuck = |path| std::fs::read_to_string(path).unwrap_or_default().contains("alloc_pd");
    while !notes().is_some_and(is_stuck) {
        assert!(start.elapsed().as_secs() < 60 && child.try_wait().unwrap().is_none(), "it does not begin");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(notes().is_none(), "{:?}", notes());
}

/// The process that tries devices, asked to end in the middle of a step, takes it and no other, and gives back what it holds.
#[test]
fn a_process_that_is_asked_to_end_gives_all_back() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Trap::always(Kind::Slow { call: Call::RegMr, ms: 500 });
    let world = World::mesh(Profile::Apple, 2).trap(slow).install().unwrap();
    let notes = folder.path().join("notes");
    std::fs::write(&notes, "").unwrap();
    let mut child = on_h0(&world, folder.path()).arg("--probe").arg(&notes).spawn().unwrap();
    let start = std::time::Instant::now();
    while !std::fs::read_to_string(&notes).unwrap().contains("register") {
        assert!(start.elapsed().as_secs() < 60, "it does not begin");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
    let text = std::fs::read_to_string(&notes).unwrap();
    let steps = |words: &str| text.lines().filter(|line| line.contains(words)).count();
    assert_eq!((steps("register"), steps("create_qp")), (2, 0), "begun and done: {text}");
    let c = world.counters();
    assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{c:?}");
}
