//! Each trap, played through the C ABI and seen; and none where none was set.

#![cfg(target_os = "linux")]

mod client;

use client::*;
use fulmen_emu_verbs::abi::*;
use fulmen_emu_verbs::{Call, Installed, Kind, Link, Profile, Trap, World};

const MIB: usize = 1 << 20;
const KIB64: u32 = 65536;

fn trapped(trap: Trap) -> Installed {
    World::mesh(Profile::Apple, 2).trap(trap).install().unwrap()
}

/// Sends `n` messages of 64 KiB, each other bytes, to one receive more than that.
fn burst<'a>(verbs: &'a Verbs, n: u64) -> [End<'a>; 2] {
    let [a, b] = pair(verbs, CABLE, QPT_UC, 1000, MIB);
    a.fill(11);
    for i in 0..=n {
        b.recv(i, i as usize * KIB64 as usize, KIB64).unwrap();
    }
    for i in 0..n {
        a.send(i, i as usize * KIB64 as usize, KIB64).unwrap();
    }
    assert!(a.completions(n as usize).iter().all(|w| w.status == WC_SUCCESS), "a sender is told nothing");
    [a, b]
}

/// Which slot of the source each filled receive holds; `None`: of no one.
fn origins(a: &End<'_>, b: &End<'_>, n: usize) -> Vec<Option<usize>> {
    let slot = |e: &End<'_>, i: usize| e.bytes()[i * KIB64 as usize..][..KIB64 as usize].to_vec();
    let (from, to): (Vec<_>, Vec<_>) =
        ((0..16).map(|i| slot(a, i)).collect(), (0..n).map(|i| slot(b, i)).collect());
    to.iter().map(|t| from.iter().position(|f| f == t)).collect()
}

#[test]
fn without_traps_nothing_is_played() {
    let world = World::mesh(Profile::Apple, 2).install().unwrap();
    let verbs = load(&world);
    let [a, b] = burst(&verbs, 10);
    assert_eq!(b.completions(10).len(), 10);
    assert_eq!(origins(&a, &b, 10), (0..10).map(Some).collect::<Vec<_>>());
    assert_eq!(world.counters().traps, 0);
}

#[test]
fn a_send_without_a_completion_arrives_all_the_same() {
    let world = trapped(Trap::once_after(Kind::NoCompletion, 3));
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 1000, MIB);
    for i in 0..8 {
        b.recv(i, i as usize * KIB64 as usize, KIB64).unwrap();
        a.send(i, i as usize * KIB64 as usize, KIB64).unwrap();
    }
    let ids = |ends: Vec<Wc>| ends.iter().map(|w| w.wr_id).collect::<Vec<_>>();
    assert_eq!(ids(b.completions(8)), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(ids(a.completions(7)), [0, 1, 2, 4, 5, 6, 7]);
    a.quiet();
    assert_eq!(world.counters().traps, 1);
}

#[test]
fn a_lost_message_shifts_all_later_ones() {
    let world = trapped(Trap::once_after(Kind::Lost, 3));
    let verbs = load(&world);
    let [a, b] = burst(&verbs, 8);
    assert_eq!(b.completions(7).len(), 7);
    b.quiet();
    assert_eq!(origins(&a, &b, 7), [0, 1, 2, 4, 5, 6, 7].map(Some));
    assert_eq!(world.counters().traps, 1);
}

#[test]
fn a_doubled_message_fills_two_receives() {
    let world = trapped(Trap::once_after(Kind::Duplicated, 2));
    let verbs = load(&world);
    let [a, b] = burst(&verbs, 6);
    assert_eq!(b.completions(7).len(), 7);
    assert_eq!(origins(&a, &b, 7), [0, 1, 2, 2, 3, 4, 5].map(Some));
    assert_eq!(world.counters().traps, 1);
}

#[test]
fn a_foreign_message_has_anothers_bytes() {
    let world = trapped(Trap::once_after(Kind::Foreign, 4));
    let verbs = load(&world);
    let [a, b] = burst(&verbs, 6);
    assert!(b.completions(6).iter().all(|w| w.byte_len == KIB64));
    assert_eq!(origins(&a, &b, 6), [0, 1, 2, 3, 3, 5].map(Some));
    // The very first one has none before it.
    let world = trapped(Trap::once_after(Kind::Foreign, 0));
    let verbs = load(&world);
    let [a, b] = burst(&verbs, 1);
    b.completions(1);
    assert_ne!(origins(&a, &b, 1)[0], Some(0));
}

#[test]
fn one_bit_flips_by_the_seed() {
    let mut places = Vec::new();
    let described =
        |seed| World::mesh(Profile::Apple, 2).seed(seed).trap(Trap::once_after(Kind::FlippedBit, 1));
    let world = described(0).install().unwrap();
    let verbs = load(&world);
    for seed in 0..4 {
        world.change(&described(seed)).unwrap();
        assert_eq!(verbs.names().len(), 2);
        let [a, b] = burst(&verbs, 3);
        assert_eq!(b.completions(3).len(), 3);
        let n = 3 * KIB64 as usize;
        let wrong: Vec<_> = (0..n).filter(|i| a.bytes()[*i] != b.bytes()[*i]).collect();
        assert_eq!(wrong.len(), 1);
        assert_eq!((a.bytes()[wrong[0]] ^ b.bytes()[wrong[0]]).count_ones(), 1);
        assert_eq!(wrong[0] / KIB64 as usize, 1);
        places.push(wrong[0]);
    }
    assert!(world.change(&World::mesh(Profile::Apple, 3)).is_err());
    places.dedup();
    assert!(places.len() > 1, "every seed hit {places:?}");
}

#[test]
fn chances_follow_the_seed_and_only_it() {
    let lost = |seed| {
        let world = World::mesh(Profile::Apple, 2)
            .seed(seed)
            .trap(Trap::with_chance(Kind::Lost, 0.3))
            .install()
            .unwrap();
        let verbs = load(&world);
        let [a, b] = pair(&verbs, CABLE, QPT_UC, 1000, MIB);
        (0..200).for_each(|i| b.recv(i, 0, 64).unwrap());
        let mut came = Vec::new();
        for i in 0..200 {
            a.send(i, 0, 64).unwrap();
            came.push(!b.poll().is_empty());
        }
        assert_eq!(world.counters().traps, came.iter().filter(|c| !**c).count() as u64);
        came
    };
    let (one, again, other) = (lost(1), lost(1), lost(2));
    assert_eq!(one, again);
    assert_ne!(one, other);
    let n = one.iter().filter(|c| !**c).count();
    assert!((30..90).contains(&n), "{n} of 200 lost at 0.3");
}

#[test]
fn traps_spare_small_messages_and_other_devices() {
    let world = trapped(Trap::always(Kind::Lost).from_bytes(5000).on(CABLE[0]));
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    for (from, to, len, comes) in [(&a, &b, 4096, true), (&b, &a, 8192, true), (&a, &b, 8192, false)] {
        to.recv(1, 0, len).unwrap();
        from.send(2, 0, len).unwrap();
        from.completions(1);
        if comes { assert_eq!(to.completions(1).len(), 1) } else { to.quiet() }
    }
}

#[test]
fn a_pair_dead_on_arrival_stays_dead_until_it_is_made_anew() {
    let world = trapped(Trap::once_after(Kind::DeadPair { over: 4096 }, 0).on(CABLE[0]));
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    b.recv(1, 0, 4096).unwrap();
    a.send(2, 0, 4096).unwrap();
    assert_eq!((a.completions(1).len(), b.completions(1).len()), (1, 1), "a small probe passes");
    b.recv(3, 0, KIB64).unwrap();
    a.send(4, 0, KIB64).unwrap();
    assert_eq!(a.completions(1)[0].status, WC_SUCCESS);
    b.quiet();
    // The other direction is alive.
    a.recv(5, 0, KIB64).unwrap();
    b.send(6, 0, KIB64).unwrap();
    a.completions(1);
    b.completions(1);
    let (new_a, new_b) = (a.second(QPT_UC), b.second(QPT_UC));
    for (me, peer, qp, other) in [(&a, &b, new_a, new_b), (&b, &a, new_b, new_a)] {
        me.to_init(qp).unwrap();
        // SAFETY: a live queue pair.
        me.to_rtr(qp, &Address { number: unsafe { (*other).qp_num }, ..peer.address() }).unwrap();
        me.to_rts(qp).unwrap();
    }
    b.recv_on(new_b, 7, 0, KIB64).unwrap();
    a.send_on(new_a, 8, 0, KIB64).unwrap();
    assert_eq!(b.completions(1)[0].wr_id, 7);
}

#[test]
fn an_early_send_can_kill_its_direction() {
    let world = trapped(Trap::once_after(Kind::EarlySendKills, 0));
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.send(1, 0, 64).unwrap();
    assert_eq!(a.completions(1)[0].status, WC_SUCCESS);
    b.recv(2, 0, 64).unwrap();
    a.send(3, 0, 64).unwrap();
    a.completions(1);
    b.quiet();
}

#[test]
fn posts_beyond_the_budget_can_vanish() {
    let world = trapped(Trap::always(Kind::OverPostSilent));
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 256, MIB);
    for i in 0..70 {
        b.recv(i, 0, KIB64).unwrap();
    }
    for i in 0..70 {
        a.send(i, 0, KIB64).unwrap();
    }
    assert_eq!((a.completions(63).len(), b.completions(63).len()), (63, 63));
    a.quiet();
    b.quiet();
    assert_eq!(world.counters().over_posts, 14);
}

#[test]
fn a_queue_can_hold_less_than_was_granted() {
    let world = trapped(Trap::always(Kind::Shallow { frames: 40 }).on(CABLE[1]));
    let verbs = load(&world);
    let [_, b] = pair(&verbs, CABLE, QPT_UC, 256, MIB);
    // 64 KiB are 16 frames.
    let posted: Vec<bool> = (0..4).map(|i| b.recv(i, 0, KIB64).is_ok()).collect();
    assert_eq!(posted, [true, true, false, false]);
    assert_eq!(world.counters().over_posts, 2);
}

#[test]
fn a_receive_can_end_with_a_length_error() {
    let world = trapped(Trap::once_after(Kind::LengthError, 2));
    let verbs = load(&world);
    let [a, b] = burst(&verbs, 4);
    let statuses: Vec<i32> = b.completions(4).iter().map(|w| w.status).collect();
    assert_eq!(statuses, [WC_SUCCESS, WC_SUCCESS, WC_LOC_LEN_ERR, WC_SUCCESS]);
    assert_eq!(origins(&a, &b, 4)[2], None, "nothing has landed");
}

#[test]
fn a_nics_write_can_be_a_send() {
    let world = World::switch(Profile::Nic, 2).trap(Trap::always(Kind::WriteIsSend)).install().unwrap();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, ["emu0", "emu1"], QPT_UC, 64, MIB);
    a.fill(5);
    b.recv(1, 0, KIB64).unwrap();
    // SAFETY: a live region.
    let key = unsafe { (*b.mr).rkey };
    a.write(2, 0, 4096, (b.memory as u64 + MIB as u64 / 2, key), Some(9)).unwrap();
    let got = b.completions(1)[0];
    assert_eq!((got.opcode, got.byte_len, got.wc_flags & WC_WITH_IMM), (WC_OP_RECV, 4096, 0));
    assert!(a.bytes()[..4096] == b.bytes()[..4096], "in the receive");
    assert!(b.bytes()[MIB / 2..][..4096].iter().all(|byte| *byte == 0), "not where it was to be written");
}

#[test]
fn errors_can_be_negative_and_bad_wr_unset() {
    let world = World::mesh(Profile::Apple, 2)
        .trap(Trap::always(Kind::NegativeErrno).on(CABLE[0]))
        .trap(Trap::always(Kind::BadWrUnset).on(CABLE[1]))
        .install()
        .unwrap();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    assert_eq!(a.recv(1, 0, 2 * MIB as u32), Err((-22, true)));
    assert_eq!(b.recv(1, 0, 2 * MIB as u32), Err((22, false)));
    assert_eq!(a.to_init(a.qp), Err(-22));
}

#[test]
fn any_call_can_fail_with_any_number() {
    type Calls = [(Call, fn(&End<'_>) -> Option<i32>); 6];
    let calls: Calls = [
        (Call::AllocPd, |e| e.open.pd().err()),
        (Call::RegMr, |e| e.open.register(e.pd, pages(4096), 4096, ALL).err()),
        (Call::CreateCq, |e| e.open.cq(16).err()),
        (Call::CreateQp, |e| e.open.qp(e.pd, e.cq, QPT_UC, 16).err()),
        (Call::PostSend, |e| e.send(1, 0, 64).err().map(|x| x.0)),
        (Call::PostRecv, |e| e.recv(1, 0, 64).err().map(|x| x.0)),
    ];
    for (call, does) in calls {
        // The first is spared: it makes the end.
        let world = trapped(Trap::once_after(
            Kind::Fail { call, errno: 96 },
            matches!(call, Call::PostSend | Call::PostRecv) as u64 ^ 1,
        ));
        let verbs = load(&world);
        let [a, _b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
        assert_eq!(does(&a), Some(96), "{call:?}");
        assert_eq!(does(&a), None, "{call:?} a second time");
    }
    for (call, errno) in [(Call::ToInit, 5), (Call::ToRtr, 16), (Call::ToRts, 14)] {
        let world = trapped(Trap::once_after(Kind::Fail { call, errno }, 0).on(CABLE[0]));
        let verbs = load(&world);
        let (a, b) =
            (End::new(&verbs, CABLE[0], QPT_UC, 16, MIB), End::new(&verbs, CABLE[1], QPT_UC, 16, MIB));
        let steps: [&dyn Fn() -> Result<(), i32>; 3] =
            [&|| a.to_init(a.qp), &|| a.to_rtr(a.qp, &b.address()), &|| a.to_rts(a.qp)];
        for (i, step) in steps.iter().enumerate() {
            if [Call::ToInit, Call::ToRtr, Call::ToRts][i] == call {
                assert_eq!(step(), Err(errno));
            }
            step().unwrap();
        }
    }
    let world = trapped(Trap::once_after(Kind::Fail { call: Call::OpenDevice, errno: 13 }, 0));
    assert_eq!(load(&world).open(CABLE[0]).err(), Some(13));
}

#[test]
fn devices_gids_and_access_flags_can_be_missing() {
    assert!(load(&trapped(Trap::always(Kind::NoDevices))).names().is_empty());

    let world = trapped(Trap::always(Kind::LateGid { ms: 3_600_000 }));
    let verbs = load(&world);
    let open = verbs.open(CABLE[0]).unwrap();
    assert!(open.gid(0).is_some() && open.gid(1).is_none());
    let world = trapped(Trap::always(Kind::LateGid { ms: 1 }));
    let verbs = load(&world);
    std::thread::sleep(std::time::Duration::from_millis(5));
    assert!(verbs.open(CABLE[0]).unwrap().gid(1).is_some());

    for (kind, local, all) in
        [(Kind::LocalWriteOnly, Ok(()), Err(22)), (Kind::RemoteFlagsNeeded, Err(22), Ok(()))]
    {
        let world = trapped(Trap::always(kind));
        let verbs = load(&world);
        let open = verbs.open(CABLE[0]).unwrap();
        let pd = open.pd().unwrap();
        let register = |access| open.register(pd, pages(4096), 4096, access).map(|_| ());
        assert_eq!((register(ACCESS_LOCAL_WRITE), register(ALL)), (local, all));
    }
}

#[test]
fn a_port_goes_down_without_a_word() {
    let world = trapped(Trap::once_after(Kind::PortDown, 2));
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    (0..5).for_each(|i| b.recv(i, 0, 64).unwrap());
    (0..5).for_each(|i| a.send(i, 0, 64).unwrap());
    assert!(b.completions(2).iter().all(|w| w.status == WC_SUCCESS));
    a.completions(2);
    a.quiet();
    b.quiet();
    assert_eq!(a.open.port().state, PORT_DOWN);
}

#[test]
fn completions_of_different_pairs_change_places_but_not_within_a_pair() {
    let world = World::mesh(Profile::Apple, 2).seed(3).trap(Trap::always(Kind::Reorder)).install().unwrap();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    let mut pairs = vec![(a.qp, b.qp)];
    for _ in 0..3 {
        let (x, y) = (a.second(QPT_UC), b.second(QPT_UC));
        for (me, peer, qp, other) in [(&a, &b, x, y), (&b, &a, y, x)] {
            me.to_init(qp).unwrap();
            // SAFETY: a live queue pair.
            me.to_rtr(qp, &Address { number: unsafe { (*other).qp_num }, ..peer.address() }).unwrap();
            me.to_rts(qp).unwrap();
        }
        pairs.push((x, y));
    }
    let (mut seen, mut in_order) = (Vec::new(), true);
    for round in 0..20 {
        for (i, (x, y)) in pairs.iter().enumerate() {
            let id = round * 4 + i as u64;
            b.recv_on(*y, id, 0, 64).unwrap();
            a.send_on(*x, id, 0, 64).unwrap();
        }
        let ids: Vec<_> = b.completions(4).iter().map(|w| w.wr_id).collect();
        a.completions(4);
        in_order &= ids.is_sorted();
        seen.extend(ids);
    }
    assert!(!in_order, "never another order");
    for i in 0..4 {
        let own: Vec<_> = seen.iter().filter(|id| *id % 4 == i).collect();
        assert!(own.len() == 20 && own.is_sorted());
    }
}

#[test]
fn a_link_has_its_speed_and_directions_differ() {
    let fast = Link { bytes_per_second: 8e9, latency_ns: 5e3, frame_ns: 0.0 };
    let mut world = World::mesh(Profile::Apple, 2).link(fast, 1000.0);
    // 64 KiB take 8.2 ms here, and ten times that on the way back.
    world.wires[0].back = Some(Link { bytes_per_second: 8e8, ..fast });
    let world = world.install().unwrap();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    let time = |from: &End<'_>, to: &End<'_>| {
        let start = std::time::Instant::now();
        (0..4).for_each(|i| to.recv(i, 0, KIB64).unwrap());
        (0..4).for_each(|i| from.send(i, 0, KIB64).unwrap());
        from.completions(4);
        to.completions(4);
        start.elapsed().as_secs_f64()
    };
    let (there, back) = (time(&a, &b), time(&b, &a));
    // Never faster than the model; how much slower is the machine's affair.
    assert!(
        there >= 4.0 * 65536.0 / 8e9 * 1000.0 && back >= 4.0 * 65536.0 / 8e8 * 1000.0,
        "{there} s and {back} s"
    );
}

#[test]
fn a_source_is_read_until_its_completion() {
    let slow = Link { bytes_per_second: 1e6, latency_ns: 0.0, frame_ns: 0.0 };
    let world = World::mesh(Profile::Apple, 2).link(slow, 1.0).install().unwrap();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.fill(1);
    b.recv(1, 0, KIB64).unwrap();
    a.send(2, 0, KIB64).unwrap();
    a.fill(2); // too early
    b.completions(1);
    assert_eq!(b.bytes()[..65536], a.bytes()[..65536], "a program that breaks the contract is found out");
}

#[test]
fn what_has_left_arrives_though_its_sender_goes() {
    let far = Link { bytes_per_second: 0.0, latency_ns: 2e8, frame_ns: 0.0 };
    let world = World::mesh(Profile::Apple, 2).link(far, 1.0).install().unwrap();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.fill(3);
    b.recv(1, 0, KIB64).unwrap();
    a.send(2, 0, KIB64).unwrap();
    a.completions(1);
    let sent = a.bytes()[..KIB64 as usize].to_vec();
    a.close();
    assert_eq!((b.completions(1)[0].byte_len, &b.bytes()[..KIB64 as usize]), (KIB64, &sent[..]));
}
