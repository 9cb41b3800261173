//! Processes that share a world: bytes between their memories, and what is left by one that dies, stops or crashes.

#![cfg(target_os = "linux")]

mod client;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use client::*;
use fulmen_emu_verbs::abi::*;
use fulmen_emu_verbs::{Installed, Kind, Profile, Trap, World};

const MIB: usize = 1 << 20;
const PART: &str = "FULMEN_TEST_PART";

/// This test program again, as another process on host h1 that does `part`.
fn process(world: &Installed, part: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_other_process", "--nocapture"])
        .env(PART, part)
        .env("FULMEN_EMU", world.folder())
        .env("FULMEN_EMU_HOST", "h1")
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for a note in the world's folder: a bound of hangs.
fn note(folder: &Path, name: &str) -> String {
    let start = Instant::now();
    loop {
        match std::fs::read_to_string(folder.join(name)) {
            Ok(text) if text.ends_with('\n') => return text.trim_end().to_owned(),
            _ => assert!(start.elapsed() < Duration::from_secs(60), "no {name} came"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn leave(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), format!("{text}\n")).unwrap();
}

/// Connects to the other process by way of notes.
fn meet(end: &End<'_>, folder: &Path, mine: &str, theirs: &str) {
    let gid = end.address().gid.0.map(|b| b.to_string()).join(",");
    leave(folder, mine, &format!("{} {gid}", end.number()));
    let peer = note(folder, theirs);
    let (number, gid) = peer.split_once(' ').unwrap();
    let gid: Vec<u8> = gid.split(',').map(|b| b.parse().unwrap()).collect();
    end.connect(&Address {
        number: number.parse().unwrap(),
        gid: Gid(gid.try_into().unwrap()),
        gid_index: 1,
    });
}

/// The other process. Without a part there is nothing to do.
#[test]
fn as_other_process() {
    let Ok(part) = std::env::var(PART) else { return };
    let folder = std::path::PathBuf::from(std::env::var("FULMEN_EMU").unwrap());
    let verbs = Verbs::load(&folder.join("libfulmen_emu_verbs.so"));
    let name = verbs.names()[0].clone();
    let kind = if part == "reliable" { QPT_RC } else { QPT_UC };
    assert_eq!(verbs.names().len(), 1, "a process sees its host's devices");
    let end = End::new(&verbs, &name, kind, 64, MIB);
    meet(&end, &folder, "other", "this");
    (0..8).for_each(|i| end.recv(i, i as usize * 65536, 65536).unwrap());
    leave(&folder, "posted", "");
    match part.as_str() {
        "echo" => {
            end.completions(8);
            (0..8).for_each(|i| end.send(i, i as usize * 65536, 65536).unwrap());
            end.completions(8);
            end.close();
        }
        "crash" => {
            note(&folder, "pulled");
            let _ = end.recv(9, 0, 4096);
            leave(&folder, "survived", "");
        }
        _ => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
    }
}

/// Ends with the test.
struct Other(Child);

impl Other {
    fn signal(&self, signal: i32) {
        // SAFETY: our own child, not waited for yet.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_other<'a>(world: &Installed, verbs: &'a Verbs, part: &str, kind: i32) -> (End<'a>, Other) {
    let other = Other(process(world, part));
    let device = world_device(world);
    let end = End::new(verbs, device, kind, 64, MIB);
    meet(&end, world.folder(), "this", "other");
    note(world.folder(), "posted");
    end.fill(1);
    (end, other)
}

fn world_device(world: &Installed) -> &'static str {
    if std::fs::read_to_string(world.folder().join("world.json")).unwrap().contains("emu0") {
        "emu0"
    } else {
        CABLE[0]
    }
}

#[test]
fn bytes_move_between_processes() {
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let verbs = load(&world);
    let (a, mut other) = with_other(&world, &verbs, "echo", QPT_UC);
    for i in 0..8 {
        a.recv(i, MIB / 2 + i as usize * 65536, 65536).unwrap();
        a.send(10 + i, i as usize * 65536, 65536).unwrap();
    }
    assert!(a.completions(16).iter().all(|w| w.status == WC_SUCCESS));
    assert!(a.bytes()[..MIB / 2] == a.bytes()[MIB / 2..]);
    assert!(other.0.wait().unwrap().success());
    assert_eq!(world.counters().bytes, 16 * 65536);
    a.close();
    assert_eq!((world.counters().qps, world.counters().pds), (0, 0));
}

#[test]
fn a_dead_peer_is_silence() {
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let verbs = load(&world);
    let (a, mut other) = with_other(&world, &verbs, "wait", QPT_UC);
    a.send(1, 0, 65536).unwrap();
    a.completions(1);
    other.signal(libc::SIGKILL);
    other.0.wait().unwrap();
    // Its receives are still posted: senders see success. Afterwards credits are missing, for ever.
    (0..8).for_each(|i| a.send(2 + i, 0, 65536).unwrap());
    assert_eq!(a.completions(7).len(), 7);
    a.quiet();
    assert_eq!(world.counters().bytes, 65536);
}

#[test]
fn a_stopped_peer_receives_all_the_same() {
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let verbs = load(&world);
    let (a, other) = with_other(&world, &verbs, "wait", QPT_UC);
    other.signal(libc::SIGSTOP);
    (0..8).for_each(|i| a.send(i, 0, 65536).unwrap());
    a.completions(8);
    assert_eq!(world.counters().bytes, 8 * 65536, "no code of the target moves the bytes");
}

#[test]
fn a_nic_tells_of_a_dead_peer() {
    let world = World::switch(Profile::Nic, 2).install().unwrap();
    let verbs = load(&world);
    let (a, mut other) = with_other(&world, &verbs, "reliable", QPT_RC);
    other.signal(libc::SIGKILL);
    other.0.wait().unwrap();
    a.send(1, 0, 4096).unwrap();
    assert_eq!(a.completions(1)[0].status, WC_RETRY_EXC_ERR);
}

#[test]
fn what_a_dead_process_held_comes_back_but_a_domain_may_not() {
    for (lost, trap) in [(0, Kind::Lost), (1, Kind::PdLost)] {
        let world =
            World::mesh(Profile::Apple, 2).trap(Trap::always(trap).from_bytes(u32::MAX)).install().unwrap();
        let verbs = load(&world);
        let (_a, mut other) = with_other(&world, &verbs, "wait", QPT_UC);
        other.signal(libc::SIGKILL);
        other.0.wait().unwrap();
        let open = verbs.open(CABLE[1]).unwrap();
        let domains: Vec<_> = std::iter::from_fn(|| open.pd().ok()).collect();
        assert_eq!(domains.len(), 11 - lost);
        let queue = open.cq(16).unwrap();
        let pairs = std::iter::from_fn(|| open.qp(domains[0], queue, QPT_UC, 16).ok()).count();
        assert_eq!(pairs, 10);
        assert_eq!(world.counters().pds_lost, lost as u64);
    }
}

#[test]
fn a_pulled_cable_can_kill_who_posts() {
    let world = World::mesh(Profile::Apple, 2).trap(Trap::always(Kind::CrashOnUnplug)).install().unwrap();
    let verbs = load(&world);
    let (a, mut other) = with_other(&world, &verbs, "crash", QPT_UC);
    world.set_cable(CABLE[0], false);
    leave(world.folder(), "pulled", "");
    assert_eq!(other.0.wait().unwrap().signal(), Some(libc::SIGSEGV));
    assert!(!world.folder().join("survived").exists());
    // Who posts nothing lives.
    a.quiet();
}

/// Killed at any moment, also within the provider: the others can go on.
#[test]
fn processes_killed_while_they_work_leave_a_usable_world() {
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let verbs = load(&world);
    for round in 0..10 {
        for name in ["this", "other", "posted"] {
            let _ = std::fs::remove_file(world.folder().join(name));
        }
        let (a, mut other) = with_other(&world, &verbs, "echo", QPT_UC);
        (0..8).for_each(|i| a.recv(i, 0, 65536).unwrap());
        (0..8).for_each(|i| a.send(i, 0, 65536).unwrap());
        for _ in 0..round * 40 {
            a.poll();
        }
        other.signal(libc::SIGKILL);
        other.0.wait().unwrap();
        a.close();
    }
    let open = verbs.open(CABLE[1]).unwrap();
    open.pd().unwrap();
    let counters = world.counters();
    assert_eq!((counters.qps, counters.mrs, counters.pds), (0, 0, 1));
}
