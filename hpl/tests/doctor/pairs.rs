//! `hpl-run doctor` as the ranks of two hosts whose devices are emulated: each trouble that a cable can have is played, and
//! has to be found, named and answered by a real run.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fulmen_emu_verbs::{Call, Installed, Kind, Link, Profile, Trap, World};

/// No run takes longer: generous, for machines with many other things to do.
const HANG: Duration = Duration::from_secs(180);

/// Two hosts, `mac-a` and `mac-b`: this machine, behind a stub of ssh that gives each its own devices.
struct Cluster {
    world: Installed,
    folder: tempfile::TempDir,
    environment: Vec<(&'static str, &'static str)>,
}

/// What a run has said.
#[derive(Debug)]
struct Told {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Cluster {
    fn of(world: &World) -> Cluster {
        let folder = tempfile::tempdir().unwrap();
        let stub = folder.path().join("stub");
        let lines = "#!/bin/sh\nhost=$1; shift\ncase $host in mac-a) export FULMEN_EMU_HOST=h0;; *) export \
                     FULMEN_EMU_HOST=h1;; esac\nexec sh -c \"$*\"\n";
        std::fs::write(&stub, lines).unwrap();
        std::fs::set_permissions(&stub, std::fs::Permissions::from_mode(0o755)).unwrap();
        Cluster { world: world.install().unwrap(), folder, environment: Vec::new() }
    }

    fn doctor(&self, args: &[&str]) -> Told {
        let mut child = Command::new(env!("CARGO_BIN_EXE_fulmen-run"))
            .arg("--ssh")
            .arg(self.folder.path().join("stub"))
            .args(["--host", "mac-a,mac-b", "--fabric", "tcp", "--interfaces", "lo"])
            .args([env!("CARGO_BIN_EXE_hpl-run"), "doctor"])
            .args(args)
            .current_dir(self.folder.path())
            .env("FULMEN_VERBS_LIB", self.world.library())
            .env("XDG_CACHE_HOME", self.folder.path())
            .envs(self.environment.iter().copied())
            .env_remove("SLURM_JOB_NODELIST")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Few enough words for the pipes to hold them.
        let until = Instant::now() + HANG;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > until {
                child.kill().unwrap();
                panic!("hangs: {:?}", child.wait_with_output());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Told { code: status.code(), out: text(stdout), err: text(stderr) }
    }

    /// As [`Cluster::doctor`], again while it does not find what is so: its rates are those of a machine that plays devices beside
    /// other things, and a moment in which it does not halves or doubles one.
    fn measure(&self, is_so: impl Fn(&Told) -> bool) -> Told {
        let mut told = self.doctor(&["--json"]);
        for _ in 1..4 {
            if is_so(&told) {
                break;
            }
            println!("again: {told:?}");
            told = self.doctor(&["--json", "--fresh"]);
        }
        told
    }

    /// Nothing is left on the devices.
    fn check_nothing_is_left(&self) {
        let c = self.world.counters();
        assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{c:?}");
    }
}

impl Told {
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Host and name of each finding about a cable or its devices, with what is to be done.
    fn findings(&self) -> Vec<(String, String, String)> {
        let told = self.json();
        let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_string();
        let of_cables = told["findings"].as_array().unwrap().iter().filter(|f| {
            let check = text(&f["check"]);
            check.starts_with("rdma_en") || check.starts_with("nic")
        });
        let about = |f: &serde_json::Value| {
            (text(&f["host"]), text(&f["id"]), format!("{} {}", f["seen"], f["steps"]))
        };
        of_cables.map(about).collect()
    }

    /// Words of its own; that some ranks are late only says that the machine is busy.
    fn has_spoken(&self) -> bool {
        self.err.lines().any(|line| !line.contains("others wait for "))
    }

    fn link(&self, host: usize) -> serde_json::Value {
        self.json()["hosts"][host]["rdma"]["links"][0].clone()
    }
}

fn cable() -> World {
    // Slow enough for the machine that plays it to keep up.
    let link = Link { bytes_per_second: 64e6, latency_ns: 1e4, frame_ns: 0.0 };
    World::mesh(Profile::Apple, 2).link(link, 1.0)
}

#[test]
fn a_cable_in_order_is_described_and_remembered() {
    let cluster = Cluster::of(&cable());
    // The link's, or what a busy machine makes of it; the lower end tells units apart.
    let is_rate = |rate: f64| (64e4..64e6 * 1.25).contains(&rate);
    let rate = |told: &Told, host| told.link(host)["together"]["rate"].as_f64();
    let told = cluster.measure(|told| (0..2).all(|host| rate(told, host).is_some_and(is_rate)));
    assert!(told.findings().iter().all(|(_, id, _)| is_load(id)), "{told:?}");
    for (host, peer, device, far) in
        [(0, "mac-b", "rdma_en01", "rdma_en10"), (1, "mac-a", "rdma_en10", "rdma_en01")]
    {
        let link = told.link(host);
        assert_eq!(
            (&link["peer"], &link["device"], &link["far"]),
            (&peer.into(), &device.into(), &far.into())
        );
        assert_eq!(link["address"], ["169.254.0.2", "169.254.0.1"][host]);
        let together = &link["together"];
        // 512 KiB are 128 of Apple's frames, of which seven fit.
        assert_eq!((&together["slot"], &together["window"]), (&(512 << 10).into(), &4.into()), "{link}");
        assert_eq!((&together["writes"], &together["remembered"]), (&"not_asked".into(), &false.into()));
        let round_trip = together["round_trip_us"].as_f64().unwrap();
        assert!(is_rate(rate(&told, host).unwrap()) && round_trip > 20.0, "{link}");
        assert_eq!(link["steps"], serde_json::json!([]), "{link}");
    }
    let c = cluster.world.counters();
    assert_eq!((c.not_sends, c.recv_missing, c.over_posts), (0, 0, 0), "{c:?}");
    // People read it as a table; what a build does is known by now, and the cable is looked at all the same.
    let told = cluster.doctor(&[]);
    let flat = told.out.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        // In order, but for what a busy moment makes of its rates.
        "rdma_en01 to mac-b",
        "rdma_en10 at 169.254.0.2",
        "4 messages of 512.0 KiB under way",
        "us there and back",
        "sends only (tried before; --fresh tries anew)",
    ] {
        assert!(flat.contains(words), "no `{words}` in {}", told.out);
    }
    assert_eq!(cluster.doctor(&["--json", "--fresh"]).link(0)["together"]["remembered"], false);
    cluster.check_nothing_is_left();
}

/// A trap, and what each host must be told: host, name of the trouble, words of what was seen or of the remedy.
type Row = (&'static str, Vec<Trap>, &'static [(&'static str, &'static str, &'static str)]);

fn fail(call: Call, errno: i32) -> Trap {
    Trap::always(Kind::Fail { call, errno }).on("rdma_en01")
}

fn rows() -> Vec<Row> {
    let both = |kind| vec![Trap::always(kind)];
    const LARGE: u32 = 512 << 10;
    vec![
        // Numbers of the failure table in the left column.
        (
            "7: connecting is refused as invalid",
            vec![fail(Call::ToRtr, 22)],
            &[
                ("mac-a", "address-kind", "ifconfig"),
                ("mac-b", "peer-failed-first", "row of the other end, on mac-a"),
            ],
        ),
        (
            "9: the peer cannot be reached over this cable",
            vec![fail(Call::ToRtr, 60)],
            &[("mac-a", "peer-unreachable", "--matrix FILE"), ("mac-b", "peer-failed-first", "")],
        ),
        (
            "10: queues leaked",
            vec![fail(Call::ToRtr, 96)],
            &[("mac-a", "queues-leaked", "restart the machine"), ("mac-b", "peer-failed-first", "")],
        ),
        (
            "11: a stale queue",
            vec![fail(Call::ToRtr, 16)],
            &[("mac-a", "stale-queue", "try once more"), ("mac-b", "peer-failed-first", "")],
        ),
        (
            "12: mappings drained",
            vec![fail(Call::ToRtr, 14)],
            &[("mac-a", "mappings-drained", "register less"), ("mac-b", "peer-failed-first", "")],
        ),
        (
            "15: posting is refused below what was granted",
            both(Kind::Shallow { frames: 300 }),
            &[("mac-a", "frame-budget", "halve the depth"), ("mac-b", "frame-budget", "halve the depth")],
        ),
        (
            "15: more is taken than is held, silently",
            vec![Trap::always(Kind::Shallow { frames: 300 }), Trap::always(Kind::OverPostSilent)],
            &[("mac-a", "frame-budget", "stopped coming"), ("mac-b", "frame-budget", "stopped coming")],
        ),
        (
            "16: too much under way is a length error",
            vec![Trap::once_after(Kind::LengthError, 4).from_bytes(LARGE).on("rdma_en01")],
            &[("mac-b", "frame-mismatch", "at most two large messages")],
        ),
        (
            "26: what comes is not what was sent",
            vec![Trap::always(Kind::Foreign).from_bytes(LARGE).on("rdma_en01")],
            &[("mac-b", "corrupt", "checksums"), ("mac-a", "short-messages", "more than 64.0 KiB")],
        ),
        (
            "18: a direction is silent from the start, a new queue pair is not",
            vec![Trap::once_after(Kind::DeadPair { over: 0 }, 0).on("rdma_en01")],
            &[("mac-b", "pair-made-anew", "makes a dead one anew")],
        ),
        (
            "18: a direction stays silent",
            vec![Trap::always(Kind::DeadPair { over: 0 }).on("rdma_en01")],
            &[
                ("mac-a", "dead-pair", "nothing came to the peer"),
                ("mac-b", "dead-pair", "nothing came from the peer"),
            ],
        ),
        (
            "only frames pass",
            both(Kind::DeadPair { over: 4096 }),
            &[("mac-a", "frames-only", "another cable"), ("mac-b", "frames-only", "another cable")],
        ),
        (
            "4: the port goes down while it is tried",
            vec![Trap::once_after(Kind::PortDown, 6).on("rdma_en01")],
            &[("mac-a", "port-down", "reseat the cable"), ("mac-b", "port-down", "reseat the cable")],
        ),
        (
            "24: the cable is pulled, and the driver crashes",
            vec![Trap::once_after(Kind::PortDown, 6).on("rdma_en01"), {
                Trap::always(Kind::CrashOnUnplug).on("rdma_en01")
            }],
            &[("mac-a", "unplugged", "DiagnosticReports"), ("mac-b", "port-down", "reseat the cable")],
        ),
        (
            "26: a flipped bit",
            vec![Trap::always(Kind::FlippedBit).on("rdma_en01")],
            &[("mac-b", "corrupt", "another cable"), ("mac-a", "peer-failed-first", "")],
        ),
        (
            "a message of a stream is lost",
            vec![Trap::once_after(Kind::Lost, 40).on("rdma_en01")],
            &[("mac-b", "lost-message", "another cable")],
        ),
    ]
}

/// What a busy machine may add: its devices are programs, which may get no core for seconds.
fn is_load(id: &str) -> bool {
    ["slow-link", "asymmetric-link", "pair-made-anew"].contains(&id)
}

fn play((what, traps, wanted): &Row) {
    let world = traps.iter().cloned().fold(cable(), World::trap);
    let cluster = Cluster::of(&world);
    let start = Instant::now();
    let told = cluster.doctor(&["--json"]);
    let found = told.findings();
    println!("{what}: {:.1} s, {found:?}", start.elapsed().as_secs_f64());
    // As everywhere: 3 when something does not work, and then fulmen-run says whose code it is.
    let failed = told.json()["findings"].as_array().unwrap().iter().any(|f| f["weight"] == "failure");
    assert!(told.code == Some(if failed { 3 } else { 0 }) && told.has_spoken() == failed, "{told:?}");
    for (host, id, words) in *wanted {
        let is_it = |(h, i, w): &&(String, String, String)| h == host && i == id && w.contains(words);
        assert!(found.iter().any(|f| is_it(&f)), "{what}: no {id} with `{words}` on {host}: {told:?}");
    }
    let is_wanted = |id: &str| wanted.iter().any(|(_, wanted, _)| *wanted == id) || is_load(id);
    let others: Vec<_> = found.iter().filter(|(_, id, _)| !is_wanted(id)).collect();
    assert!(others.is_empty(), "{what}: {others:?} {told:?}");
    // A process that was ended by its driver gives nothing back.
    if !what.starts_with("24") && !what.starts_with("23") {
        cluster.check_nothing_is_left();
    }
}

/// They mostly wait for what does not come: some at a time.
#[test]
fn every_trap_of_a_cable_has_its_row_and_remedy() {
    let rows = rows();
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    play(row);
                }
            });
        }
    });
}

#[test]
fn a_direction_that_is_slow_is_named() {
    let mut world = cable();
    world.wires[0].back = Some(Link { bytes_per_second: 8e6, ..world.wires[0].link });
    let about = |told: &Told| -> Vec<(String, String)> {
        let rest = told.findings().into_iter().filter(|(_, id, _)| id != "pair-made-anew");
        rest.map(|(host, id, _)| (host, id)).collect()
    };
    let wanted = [("mac-a".to_string(), "asymmetric-link".to_string())];
    let told = Cluster::of(&world).measure(|told| about(told) == wanted);
    assert_eq!(about(&told), wanted, "{told:?}");
}

#[test]
fn a_cable_that_is_slower_than_the_others_is_named() {
    let mut world = World::cabled(Profile::Apple, 2, &[(0, 1), (0, 1)]);
    let link = |rate| Link { bytes_per_second: rate, latency_ns: 1e4, frame_ns: 0.0 };
    (world.wires[0].link, world.wires[1].link) = (link(64e6), link(8e6));
    let slow = |told: &Told| -> Vec<String> {
        let findings = told.json()["findings"].clone();
        let slow = findings.as_array().unwrap().iter().filter(|f| f["id"] == "slow-link");
        slow.map(|f| f["check"].as_str().unwrap().to_string()).collect()
    };
    let wanted = ["rdma_en01b to mac-b", "rdma_en10b to mac-a"];
    let told = Cluster::of(&world).measure(|told| slow(told) == wanted);
    assert_eq!(slow(&told), wanted, "{told:?}");
}

/// A device without an address is joined to nobody, and that has a reason.
#[test]
fn a_device_without_an_address_is_told() {
    let late = Trap::always(Kind::LateGid { ms: 10_000_000 });
    let told = Cluster::of(&cable().trap(late)).doctor(&["--json"]);
    let found = told.findings();
    // By the time since the machine's start it comes late, or is missing.
    let ids = found.iter().filter(|(_, id, words)| id.starts_with("address-") && words.contains("ifconfig"));
    assert!(ids.count() == 2 && found.len() == 2, "{told:?}");
    assert!(told.link(0).is_null());
}

/// The matrix is on rank 0's host alone, and may be a pipe; the environment makes sense or is complained of.
#[test]
fn a_matrix_is_read_once_by_rank_0() {
    let mut cluster = Cluster::of(&cable());
    let pipe = cluster.folder.path().join("matrix");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let text =
        r#"[{"ssh": "mac-b", "rdma": [null, "rdma_en10"]}, {"ssh": "mac-a", "rdma": ["rdma_en01", null]}]"#;
    let writer = std::thread::spawn(move || std::fs::write(pipe, text).unwrap());
    let told = cluster.doctor(&["--json", "--matrix", "matrix"]);
    writer.join().unwrap();
    assert!(told.findings().iter().all(|(_, id, _)| is_load(id)), "{told:?}");
    assert_eq!((&told.link(0)["device"], &told.link(0)["far"]), (&"rdma_en01".into(), &"rdma_en10".into()));

    // One of before the last restart: the devices that are there are in no place of it.
    let text =
        r#"[{"ssh": "mac-a", "rdma": [null, "rdma_en7"]}, {"ssh": "mac-b", "rdma": ["rdma_en8", null]}]"#;
    std::fs::write(cluster.folder.path().join("stale"), text).unwrap();
    let told = cluster.doctor(&["--json", "--matrix", "stale"]);
    let found = told.findings();
    assert!(found.len() == 2 && found.iter().all(|(_, id, _)| id == "not-in-matrix"), "{found:?}");
    assert_eq!(told.out.matches("\"matrix-device\"").count(), 2, "{told:?}");
    assert_eq!(told.code, Some(3));

    cluster.environment.push(("FULMEN_DEVICES", "a,b"));
    let told = cluster.doctor(&["--json"]);
    assert!(told.code == Some(2) && told.err.contains("FULMEN_DEVICES"), "{told:?}");
}

/// Where the cable's addresses are this machine's own, TCP is tried over them as well.
#[test]
fn tcp_over_the_cable_is_tried() {
    let mut world = cable();
    world.devices[0].address = Some([127, 0, 1, 1]);
    world.devices[1].address = Some([127, 0, 1, 2]);
    let told = Cluster::of(&world).doctor(&["--json"]);
    assert_eq!((&told.link(0)["tcp"], &told.link(1)["tcp"]), (&0.into(), &0.into()), "{told:?}");
    assert_eq!(told.link(0)["address"], "127.0.1.2");
}

/// Two ends in networks of their own are no cable, which is said of both.
#[test]
fn a_device_that_leads_nowhere_is_told() {
    let mut world = cable();
    world.devices[1].address = Some([10, 9, 8, 7]);
    let found = Cluster::of(&world).doctor(&["--json"]).findings();
    let about: Vec<_> = found.iter().map(|(host, id, _)| (host.as_str(), id.as_str())).collect();
    assert_eq!(about, [("mac-a", "leads-nowhere"), ("mac-b", "leads-nowhere")], "{found:?}");
}

#[test]
fn a_write_that_is_a_send_is_found_out() {
    let world = World { wires: cable().wires, ..World::mesh(Profile::Nic, 2) };
    let writes = |told: &Told| told.link(0)["together"]["writes"].clone();
    let about = |told: &Told| -> Vec<(String, String)> {
        let found = told.findings().into_iter().filter(|(_, id, _)| !is_load(id));
        found.map(|(host, id, _)| (host, id)).collect()
    };
    let told = Cluster::of(&world).doctor(&["--json"]);
    assert!(about(&told).is_empty() && writes(&told) == "reliable", "{told:?}");
    let told = Cluster::of(&world.trap(Trap::always(Kind::WriteIsSend))).doctor(&["--json"]);
    let both = ["mac-a", "mac-b"].map(|host| (host.to_string(), "write-is-send".to_string()));
    assert!(about(&told) == both && writes(&told) == "no", "{told:?}");
}

/// A driver that does not answer costs its process, and the other end is told.
#[test]
fn a_driver_that_is_stuck_is_told_at_both_ends() {
    let row: Row = (
        "23 and 19: a driver is stuck while it connects",
        vec![Trap::always(Kind::Stuck { call: Call::ToRtr }).on("rdma_en01")],
        &[("mac-a", "driver-wedged", "power the machine off"), ("mac-b", "peer-silent", "ssh mac-a ps ax")],
    );
    play(&row);
}
