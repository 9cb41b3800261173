//! The probe of devices on emulated ones: what it finds is what was set up, and each step that fails is told.
#![cfg(target_os = "linux")]

use fulmen::fabric::rendezvous::in_process;
use fulmen::fabric::verbs::probe::{self, Known, Local, Note, Outcome, Pair, Writes};
use fulmen::fabric::verbs::{Library, Refusal, Service, Step};
use fulmen::{Error, Result};
use fulmen_emu_verbs::{Call, Installed, Kind, Link, Profile, Trap, World};

fn library(world: &Installed) -> &'static Library {
    Library::open(world.library()).unwrap()
}

fn local(world: &Installed, device: &str, notes: &mut Vec<Note>) -> std::result::Result<Local, Refusal> {
    probe::local(library(world), device, &|| true, &mut |note| notes.push(note))
}

fn pair(world: &Installed) -> (Vec<Result<Pair>>, Vec<Note>) {
    let names = ["01", "10"].map(|ends| format!("{}{ends}", world.profile().prefix()));
    pair_of(library(world), &[&names[0], &names[1]], None)
}

fn pair_of(
    library: &'static Library,
    names: &[&str; 2],
    known: Option<Known>,
) -> (Vec<Result<Pair>>, Vec<Note>) {
    let mut all: Vec<(Result<Pair>, Vec<Note>)> = std::thread::scope(|scope| {
        let ends = in_process(2).into_iter().zip(names);
        let threads: Vec<_> = ends
            .map(|(mut rendezvous, name)| {
                scope.spawn(move || {
                    let mut notes = Vec::new();
                    let found =
                        probe::pair(&mut rendezvous, library, name, known, &mut |note| notes.push(note));
                    (found, notes)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let notes = std::mem::take(&mut all[0].1);
    (all.into_iter().map(|(found, _)| found).collect(), notes)
}

/// Steps that ended otherwise than well.
fn failures(notes: &[Note]) -> Vec<(Step, u64, Outcome)> {
    let over = notes.iter().filter_map(|n| Some((n.step, n.number, n.outcome?)));
    over.filter(|(_, _, outcome)| *outcome != Outcome::Done).collect()
}

fn check_nothing_is_left(world: &Installed) {
    let c = world.counters();
    assert_eq!((c.qps, c.mrs, c.cqs, c.pds), (0, 0, 0, 0), "{c:?}");
}

#[test]
fn a_device_tells_what_it_grants() {
    for (profile, reliable, first) in [(Profile::Apple, false, 4095), (Profile::Nic, true, 4095)] {
        let world = World::mesh(profile, 2).install().unwrap();
        let device = format!("{}01", profile.prefix());
        let mut notes = Vec::new();
        let found = local(&world, &device, &mut notes).unwrap();
        assert_eq!((found.reliable, found.unreliable, found.granted[0].0), (reliable, true, first));
        assert!((64 << 20..=128 << 20).contains(&found.registered) && found.is_whole(), "{found:?}");
        assert!(
            found.granted.iter().all(|(asked, got)| got.send >= *asked && got.receive >= *asked),
            "{found:?}"
        );
        assert!(failures(&notes).is_empty(), "{notes:?}");
        // Every step that began is over: what a watcher of a stuck driver relies on.
        let begun: Vec<Step> = notes.iter().filter(|n| n.outcome.is_none()).map(|n| n.step).collect();
        let over: Vec<Step> = notes.iter().filter(|n| n.outcome.is_some()).map(|n| n.step).collect();
        assert_eq!(begun, over);
        assert_eq!(begun[..4], [Step::Open, Step::Port, Step::AllocPd, Step::CreateCq]);
        assert_eq!(world.counters().not_sends, 0);
        check_nothing_is_left(&world);
    }
}

#[test]
fn refusals_are_told_by_step_and_number() {
    let rows = [
        (Kind::Fail { call: Call::AllocPd, errno: 12 }, Step::AllocPd),
        (Kind::Fail { call: Call::RegMr, errno: 12 }, Step::Register),
        (Kind::Fail { call: Call::CreateQp, errno: 12 }, Step::CreateQp),
        (Kind::Fail { call: Call::ToInit, errno: 22 }, Step::Init),
    ];
    for (kind, step) in rows {
        let world = World::mesh(Profile::Apple, 2).trap(Trap::always(kind)).install().unwrap();
        let mut notes = Vec::new();
        let refusal = local(&world, "rdma_en01", &mut notes).unwrap_err();
        assert_eq!(refusal.step, step, "{kind:?}");
        let told =
            failures(&notes).into_iter().any(|(at, _, how)| at == step && matches!(how, Outcome::Refused(_)));
        assert!(told, "{kind:?}: {notes:?}");
        check_nothing_is_left(&world);
    }
}

#[test]
fn two_devices_tell_what_passes() {
    for (profile, writes) in [(Profile::Apple, Writes::NotAsked), (Profile::Nic, Writes::Over(Service::Rc))] {
        let world = World::mesh(profile, 2).install().unwrap();
        let (found, notes) = pair(&world);
        assert!(failures(&notes).is_empty(), "{:?}", failures(&notes));
        for (rank, found) in found.into_iter().enumerate() {
            let found = found.unwrap();
            assert_eq!(found.far, format!("{}{}", profile.prefix(), ["10", "01"][rank]));
            // 512 KiB are 128 frames; Apple's 1023 frames hold seven of them, so four were tried.
            let window = if profile == Profile::Apple { 4 } else { 32 };
            assert_eq!(found.known, Known { slot: 512 << 10, window, writes }, "{found:?}");
            assert!(found.round_trip > 0.0 && found.rate > 0.0 && found.rate_both_ways > 0.0, "{found:?}");
        }
        let c = world.counters();
        assert_eq!((c.recv_missing, c.length_errors, c.over_posts, c.bad_keys), (0, 0, 0, 0), "{c:?}");
        if profile == Profile::Apple {
            assert_eq!(c.not_sends, 0, "a Thunderbolt device is never asked for a write");
        }
        check_nothing_is_left(&world);
    }
}

/// A link of known rate and latency is not measured as a faster one. (What came while a rank got no core is there all at once,
/// which is fast: then it is measured again.)
#[test]
fn a_link_is_measured() {
    let link = Link { bytes_per_second: 8e9, latency_ns: 5e3, frame_ns: 0.0 };
    let world = World::mesh(Profile::Apple, 2).link(link, 100.0).install().unwrap();
    let is_right = (0..4).any(|_| {
        let found = pair(&world).0.swap_remove(0).unwrap();
        println!("{found:?}");
        found.rate < 8e7 * 1.25 && found.round_trip > 2.0 * 5e-6 * 100.0
    });
    assert!(is_right, "faster than the link, four times");
}

#[test]
fn what_does_not_pass_is_found() {
    // Only frames pass: what first builds of macOS do.
    let world =
        World::mesh(Profile::Apple, 2).trap(Trap::always(Kind::DeadPair { over: 4096 })).install().unwrap();
    let (found, notes) = pair(&world);
    let found: Vec<Pair> = found.into_iter().map(Result::unwrap).collect();
    assert!(found.iter().all(|f| (f.known.slot, f.known.window) == (4096, 32)), "{found:?}");
    assert!(failures(&notes).iter().all(|f| *f == (Step::WarmUp, 64 << 10, Outcome::Silent)), "{notes:?}");
    check_nothing_is_left(&world);

    // Nothing passes.
    let world =
        World::mesh(Profile::Apple, 2).trap(Trap::always(Kind::DeadPair { over: 0 })).install().unwrap();
    let (found, _) = pair(&world);
    assert!(
        found.iter().all(|f| matches!(f, Err(Error::Resources { remedy, .. }) if remedy.contains("reseat")))
    );
    check_nothing_is_left(&world);

    // Connecting is refused.
    let refused = Kind::Fail { call: Call::ToRtr, errno: 60 };
    let world = World::mesh(Profile::Apple, 2).trap(Trap::always(refused)).install().unwrap();
    let (found, notes) = pair(&world);
    assert!(found.iter().all(Result::is_err));
    assert!(failures(&notes).contains(&(Step::ReadyToReceive, 4096, Outcome::Refused(60))), "{notes:?}");
    check_nothing_is_left(&world);
}

/// What is refused after as much was granted, or before less is asked, is an answer.
#[test]
fn a_device_that_grants_less_has_not_failed() {
    let refused = |call| Trap::always(Kind::Fail { call, errno: 12 });
    // Little memory may be locked.
    let little = World::mesh(Profile::Nic, 2).trap(refused(Call::RegMr).from_bytes(8 << 20));
    let world = little.install().unwrap();
    let mut notes = Vec::new();
    let found = local(&world, "nic01", &mut notes).unwrap();
    assert!(found.registered <= 1 << 20 && found.refused >= 8 << 20 && !found.is_whole(), "{found:?}");
    assert_eq!(failures(&notes), [(Step::Register, 2, Outcome::Answered(12))]);
    check_nothing_is_left(&world);
    // Two devices make do with the memory that they have.
    let (found, notes) = pair(&world);
    for found in found {
        let known = found.unwrap_or_else(|e| panic!("{e}: {notes:?}")).known;
        assert!(known.slot == probe::LARGEST && (1..32).contains(&known.window), "{known:?}");
    }
    let only_memory = |f: &(Step, u64, Outcome)| (f.0, f.2) == (Step::Register, Outcome::Answered(12));
    assert!(failures(&notes).iter().all(only_memory) && !failures(&notes).is_empty(), "{notes:?}");
    check_nothing_is_left(&world);
    // The deepest queue pair is refused, others are not; a NIC's number means nothing more.
    let world = World::mesh(Profile::Nic, 2).trap(Trap { times: 1, ..refused(Call::CreateQp) });
    let world = world.install().unwrap();
    let mut notes = Vec::new();
    let found = local(&world, "nic01", &mut notes).unwrap();
    let depths: Vec<u32> = found.granted.iter().map(|(depth, _)| *depth).collect();
    assert_eq!((depths, found.is_whole()), (vec![1023, 256], false));
    assert_eq!(failures(&notes), [(Step::CreateQp, 4095, Outcome::Answered(12))]);
}

/// iWARP: no unreliable connections, which is told and gets along.
#[test]
fn reliable_connections_do_where_there_are_no_others() {
    let world = World::mesh(Profile::Nic, 2).trap(Trap::always(Kind::ReliableOnly).on("nic01"));
    let world = world.install().unwrap();
    let mut notes = Vec::new();
    let found = local(&world, "nic01", &mut notes).unwrap();
    assert_eq!((found.reliable, found.unreliable, found.granted.len()), (true, false, 3));
    assert_eq!(failures(&notes), [(Step::CreateQp, 4095, Outcome::Answered(95))]);
    let (found, notes) = pair(&world);
    for found in found {
        let known = found.unwrap_or_else(|e| panic!("{e}: {notes:?}")).known;
        assert_eq!(known, Known { slot: probe::LARGEST, window: 32, writes: Writes::Over(Service::Rc) });
    }
    check_nothing_is_left(&world);
}

/// Who is asked to end does, after the step that is being taken, and gives back what he has.
#[test]
fn a_probe_ends_between_two_steps() {
    for step in [Step::Register, Step::CreateQp] {
        let world = World::mesh(Profile::Nic, 2).install().unwrap();
        let (asked, mut notes) = (std::cell::Cell::new(false), Vec::new());
        let refusal = probe::local(library(&world), "nic01", &|| !asked.get(), &mut |note| {
            asked.set(note.step == step);
            notes.push(note);
        })
        .unwrap_err();
        assert_eq!(refusal.number, 4, "interrupted");
        assert!(notes.last().unwrap().outcome == Some(Outcome::Done), "{notes:?}");
        check_nothing_is_left(&world);
    }
}

/// Both ends try as much at once as the one that was granted less.
#[test]
fn ends_that_are_granted_different_depths_keep_in_step() {
    // Of 512 KiB, which are 128 frames, 300 hold two and 1023 seven.
    let world =
        World::mesh(Profile::Apple, 2).trap(Trap::always(Kind::Grants { frames: 300 }).on("rdma_en01"));
    let world = world.install().unwrap();
    let (found, notes) = pair(&world);
    assert!(failures(&notes).is_empty(), "{notes:?}");
    for found in found {
        let known = found.unwrap_or_else(|e| panic!("{e}")).known;
        assert_eq!((known.slot, known.window), (probe::LARGEST, 2));
    }
    check_nothing_is_left(&world);
}

/// What the device says while a stream runs is told as that, and not as a message lost.
#[test]
fn a_refused_post_is_no_lost_message() {
    let refused = Kind::Fail { call: Call::PostSend, errno: 35 };
    // After the warm-ups (9, or 3 more for each pair made anew), the first few at once (7), and round trips (100).
    for (after, step) in [(60, Step::RoundTrip), (130, Step::Stream)] {
        let trap = Trap { after, ..Trap::always(refused) }.on("rdma_en01");
        let world = World::mesh(Profile::Apple, 2).trap(trap).install().unwrap();
        let (found, notes) = pair(&world);
        assert!(found.iter().all(Result::is_err));
        let begun = notes.iter().rev().find(|n| n.outcome.is_none()).unwrap();
        let mut told = failures(&notes);
        told.retain(|(step, _, how)| (*step, *how) != (Step::WarmUp, Outcome::Silent));
        assert!(
            begun.step == step
                && told.len() == 1
                && (told[0].0, told[0].2) == (Step::PostSend, Outcome::Refused(35)),
            "{told:?}"
        );
        check_nothing_is_left(&world);
    }
}

/// What both ends know is not found out again; what one of them knows otherwise is.
#[test]
fn what_is_known_is_not_tried_again() {
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let names = ["rdma_en01", "rdma_en10"];
    let known = Known { slot: 64 << 10, window: 2, writes: Writes::NotAsked };
    let (found, notes) = pair_of(library(&world), &[names[0], names[1]], Some(known));
    assert!(found.iter().all(|f| f.as_ref().unwrap().known == known), "{found:?}");
    assert!(notes.iter().all(|n| n.step != Step::Several), "{notes:?}");
    check_nothing_is_left(&world);
    // Where it does not hold any more, all is found anew.
    let world =
        World::mesh(Profile::Apple, 2).trap(Trap::always(Kind::DeadPair { over: 4096 })).install().unwrap();
    let (found, _) = pair_of(library(&world), &[names[0], names[1]], Some(known));
    assert!(found.iter().all(|f| f.as_ref().unwrap().known.slot == 4096), "{found:?}");
}

/// On the machine's own devices: `FULMEN_VERBS_PAIR=rx01,rx10` names the ends of a cable.
#[test]
fn on_this_machines_devices() {
    let Ok(names) = std::env::var("FULMEN_VERBS_PAIR") else {
        return println!("skipped: FULMEN_VERBS_PAIR names no devices");
    };
    let library = Library::find().unwrap();
    let names: Vec<&str> = names.split(',').collect();
    let local = probe::local(library, names[0], &|| true, &mut |_| {}).unwrap();
    assert!(local.reliable && local.registered > 0 && !local.granted.is_empty(), "{local:?}");
    let (found, notes) = pair_of(library, &[names[0], names[1]], None);
    for (rank, found) in found.into_iter().enumerate() {
        let found = found.unwrap_or_else(|e| panic!("{e}: {notes:?}"));
        assert_eq!(
            (found.far.as_str(), found.known.writes),
            (names[1 - rank], Writes::Over(Service::Rc)),
            "{found:?}"
        );
        println!("\nprobed {found:?}");
    }
}
