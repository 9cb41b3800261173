//! What the Apple profile grants, refuses and does differently, through the C ABI.

#![cfg(target_os = "linux")]

mod client;

use client::*;
use fulmen_emu_verbs::abi::*;
use fulmen_emu_verbs::{Profile, World};

const MIB: usize = 1 << 20;

fn cable() -> fulmen_emu_verbs::Installed {
    World::mesh(Profile::Apple, 2).install().unwrap()
}

#[test]
fn messages_arrive_in_order_and_every_one_completes() {
    let world = cable();
    let verbs = load(&world);
    assert_eq!(verbs.names(), CABLE);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.fill(1);
    for i in 0..8 {
        b.recv(100 + i, i as usize * 65536, 65536).unwrap();
    }
    for i in 0..8 {
        a.send(i, (7 - i as usize) * 65536, 65536).unwrap();
    }
    let sent = a.completions(8);
    assert!(
        sent.iter()
            .enumerate()
            .all(|(i, w)| (w.wr_id, w.status, w.opcode) == (i as u64, WC_SUCCESS, WC_OP_SEND))
    );
    for (i, w) in b.completions(8).iter().enumerate() {
        assert_eq!(
            (w.wr_id, w.status, w.opcode, w.byte_len),
            (100 + i as u64, WC_SUCCESS, WC_OP_RECV, 65536)
        );
        assert_eq!(w.qp_num, b.number());
        assert_eq!(b.bytes()[i * 65536..][..65536], a.bytes()[(7 - i) * 65536..][..65536]);
    }
    let counters = world.counters();
    assert_eq!((counters.bytes, counters.messages, counters.recv_missing), (8 * 65536, 8, 0));
    assert_eq!((counters.send_completions, counters.recv_completions), (8, 8));
    a.close();
    b.close();
    let counters = world.counters();
    assert_eq!((counters.qps, counters.cqs, counters.mrs, counters.pds), (0, 0, 0, 0));
    assert_eq!((counters.qps_ever, counters.mrs_ever, counters.pds_ever), (2, 2, 2));
}

#[test]
fn a_send_waits_for_its_receive_and_nothing_moves_before() {
    let world = cable();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.fill(2);
    a.send(1, 0, 4096).unwrap();
    a.quiet();
    b.quiet();
    assert_eq!((world.counters().recv_missing, world.counters().bytes), (1, 0));
    b.recv(2, 8192, 4096).unwrap();
    assert_eq!(b.completions(1)[0].byte_len, 4096);
    assert_eq!(a.completions(1)[0].wr_id, 1);
    assert_eq!(b.bytes()[8192..12288], a.bytes()[..4096]);
}

#[test]
fn the_number_of_frames_must_match() {
    let world = cable();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.fill(3);
    // Two frames into three: refused, though there is room.
    b.recv(1, 0, 12288).unwrap();
    a.send(2, 0, 8192).unwrap();
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.status), (1, WC_LOC_LEN_ERR));
    assert_eq!(a.completions(1)[0].status, WC_SUCCESS, "a sender is told nothing");
    assert!(b.bytes()[..12288].iter().all(|x| *x == 0));
    // A short last frame is no matter.
    b.recv(3, 0, 8192).unwrap();
    a.send(4, 0, 4097).unwrap();
    let got = b.completions(1)[0];
    assert_eq!((got.status, got.byte_len), (WC_SUCCESS, 4097));
    // As many frames, but longer than the receive.
    b.recv(5, 0, 5000).unwrap();
    a.send(6, 0, 5001).unwrap();
    assert_eq!(b.completions(1)[0].status, WC_LOC_LEN_ERR);
    assert_eq!(world.counters().length_errors, 2);
}

#[test]
fn a_write_acts_as_a_send() {
    let world = cable();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 64, MIB);
    a.fill(4);
    b.recv(1, 0, 4096).unwrap();
    // SAFETY: a live region.
    let key = unsafe { (*b.mr).rkey };
    a.write(2, 0, 4096, (b.memory as u64 + 65536, key), None).unwrap();
    assert_eq!((a.completions(1)[0].opcode, b.completions(1)[0].opcode), (WC_OP_SEND, WC_OP_RECV));
    assert_eq!(b.bytes()[..4096], a.bytes()[..4096]);
    assert!(b.bytes()[65536..].iter().all(|x| *x == 0), "the remote address was obeyed");
    assert_eq!(world.counters().not_sends, 1);
}

#[test]
fn queue_depth_is_counted_in_frames_and_rounded_up() {
    let world = cable();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 256, MIB);
    assert_eq!(a.cap.max_send_wr, 1023);
    // 63 messages of 16 frames are 1008 of 1023; the next does not fit.
    for i in 0..63 {
        b.recv(i, 0, 65536).unwrap();
    }
    assert_eq!(b.recv(63, 0, 65536), Err((12, true)));
    // 15 single frames more do.
    for i in 64..79 {
        b.recv(i, 0, 4096).unwrap();
    }
    assert_eq!(b.recv(79, 0, 1), Err((12, true)));
    // Sends beyond what the peer has posted stay in the queue.
    for i in 0..64 {
        let sent = a.send(i, 0, 65536);
        let expected = if i < 63 { Ok(()) } else { Err((35, true)) };
        assert_eq!(sent, expected, "send {i}");
    }
    assert_eq!(a.completions(63).len(), 63);
    assert_eq!(world.counters().over_posts, 3);
    // Completed and polled, the frames are free again.
    a.send(64, 0, 4096).unwrap();
    b.completions(64);
    a.completions(1);
    let wish = a.open.qp(a.pd, a.cq, QPT_UC, 4095).unwrap();
    assert_eq!(wish.1.max_send_wr, 4095);
    assert_eq!(a.open.qp(a.pd, a.cq, QPT_UC, 4096).err(), Some(22));
}

#[test]
fn ten_queue_pairs_eleven_domains_a_hundred_regions() {
    let world = cable();
    let verbs = load(&world);
    let open = verbs.open(CABLE[0]).unwrap();
    let attr = open.attr();
    assert_eq!((attr.max_qp, attr.max_pd, attr.max_mr, attr.max_sge, attr.max_srq), (11, 11, 100, 1, 0));
    let domains: Vec<_> = (0..11).map(|_| open.pd().unwrap()).collect();
    assert_eq!(open.pd().err(), Some(12));
    let queues: Vec<_> = (0..11).map(|_| open.cq(64).unwrap()).collect();
    assert_eq!(open.cq(64).err(), Some(12));
    let pairs: Vec<_> = (0..10).map(|i| open.qp(domains[i], queues[i], QPT_UC, 32).unwrap().0).collect();
    assert_eq!(open.qp(domains[0], queues[0], QPT_UC, 32).err(), Some(12));
    let memory = pages(101 * 4096);
    // SAFETY: within the pages.
    let regions: Vec<_> = (0..100)
        .map(|i| open.register(domains[i % 11], unsafe { memory.add(i * 4096) }, 4096, ALL).unwrap())
        .collect();
    // SAFETY: as above.
    assert_eq!(open.register(domains[0], unsafe { memory.add(100 * 4096) }, 4096, ALL).err(), Some(12));
    // In the wrong order nothing goes; in the right one everything does.
    assert_eq!(open.free_pd(domains[0]), Err(16));
    assert_eq!(open.free_cq(queues[0]), Err(16));
    pairs.into_iter().for_each(|q| open.free_qp(q));
    regions.into_iter().for_each(|m| open.deregister(m).unwrap());
    queues.into_iter().for_each(|c| open.free_cq(c).unwrap());
    domains.into_iter().for_each(|d| open.free_pd(d).unwrap());
    open.close();
    let counters = world.counters();
    assert_eq!((counters.qps_peak, counters.mrs_peak, counters.pds_peak), (10, 100, 11));
    assert_eq!((counters.qps, counters.mrs, counters.pds), (0, 0, 0));
}

#[test]
fn only_unreliable_connections_aligned_memory_and_its_own_keys() {
    let world = cable();
    let verbs = load(&world);
    let [a, b] = pair(&verbs, CABLE, QPT_UC, 32, MIB);
    assert_eq!(a.open.qp(a.pd, a.cq, QPT_RC, 32).err(), Some(102));
    assert_eq!(a.open.qp(a.pd, a.cq, 4, 32).err(), Some(102));
    // SAFETY: within its memory.
    let odd = unsafe { a.memory.add(64) };
    assert_eq!(a.open.register(a.pd, odd, 4096, ALL).err(), Some(22));
    // Beyond the region's end.
    assert_eq!(b.recv(1, MIB - 4096, 8192), Err((22, true)));
    a.send(2, MIB - 4096, 8192).unwrap();
    assert_eq!(a.completions(1)[0].status, WC_LOC_PROT_ERR);
    assert_eq!(world.counters().bad_keys, 2);
    // After ERR the domain's regions stay mapped for good.
    let mut attr: QpAttr = unsafe_zeroed();
    attr.qp_state = QPS_ERR;
    a.modify(a.qp, &mut attr, QP_STATE).unwrap();
    a.quiet();
    a.open.free_qp(a.qp);
    assert_eq!(a.open.deregister(a.mr), Err(16));
}

fn unsafe_zeroed<T>() -> T {
    // SAFETY: used for the header's structures only.
    unsafe { std::mem::zeroed() }
}

#[test]
fn the_way_to_rts_wants_its_masks_gids_and_states() {
    let world = World::mesh(Profile::Apple, 3).install().unwrap();
    let verbs = load(&world);
    let (a, b) =
        (End::new(&verbs, "rdma_en01", QPT_UC, 32, MIB), End::new(&verbs, "rdma_en10", QPT_UC, 32, MIB));
    let c = End::new(&verbs, "rdma_en20", QPT_UC, 32, MIB);
    assert_eq!(a.gid_kinds(), "fe80 ipv4");
    assert_eq!(a.to_rts(a.qp), Err(22), "RTS before INIT");
    assert_eq!(a.recv(1, 0, 64), Err((22, true)), "a receive before RTS");
    a.to_init(a.qp).unwrap();
    assert_eq!(a.to_init(a.qp), Err(22), "INIT twice");
    let right = b.address();
    let local = b.open.gid(0).unwrap();
    assert_eq!(
        a.to_rtr(a.qp, &Address { gid: local, ..b.address() }),
        Err(22),
        "a link-local GID from a mapped one"
    );
    assert_eq!(a.to_rtr(a.qp, &Address { gid_index: 2, ..b.address() }), Err(22), "no such GID");
    assert_eq!(a.to_rtr(a.qp, &c.address()), Err(60), "the other end of another cable");
    assert_eq!(a.to_rtr(a.qp, &a.address()), Err(60), "itself");
    world.set_cable("rdma_en10", false);
    assert_eq!(
        (a.open.port().state, b.open.port().state, c.open.port().state),
        (PORT_DOWN, PORT_DOWN, PORT_ACTIVE)
    );
    assert_eq!(a.to_rtr(a.qp, &right), Err(60));
    assert!(a.open.pd().is_err(), "a domain on a port that is down");
    world.set_cable("rdma_en01", true);
    a.to_rtr(a.qp, &right).unwrap();
    a.to_rts(a.qp).unwrap();
    // Both by their link-local GIDs.
    b.to_init(b.qp).unwrap();
    b.to_rtr(b.qp, &Address { gid: a.open.gid(0).unwrap(), gid_index: 0, number: a.number() }).unwrap();
    b.to_rts(b.qp).unwrap();
    b.recv(1, 0, 64).unwrap();
    a.send(2, 0, 64).unwrap();
    b.completions(1);
}

impl End<'_> {
    fn gid_kinds(&self) -> String {
        let kind = |g: Gid| if g.0[..2] == [0xfe, 0x80] { "fe80" } else { "ipv4" };
        (0..9).map_while(|i| self.open.gid(i)).map(kind).collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn memory_beyond_a_4_gib_line_of_its_region_is_not_reached() {
    let world = cable();
    let verbs = load(&world);
    let line = (1u64 << 40) + (7 << 32);
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
    );
    // SAFETY: a fresh mapping, which fails where the place is taken.
    let at = unsafe { libc::mmap((line - 65536) as *mut libc::c_void, 131072, prot, flags, -1, 0) };
    assert_eq!(at as u64, line - 65536);
    let a = End::new(&verbs, CABLE[0], QPT_UC, 32, MIB);
    let b = End::over(&verbs, CABLE[1], QPT_UC, 32, at.cast(), 131072);
    a.connect(&b.address());
    b.connect(&a.address());
    a.fill(5);
    for (id, at) in [(0, 61440), (1, 65536), (2, 63488)] {
        b.recv(id, at, 4096).unwrap();
        a.send(id, 4096, 4096).unwrap();
        let got = b.completions(1)[0];
        assert_eq!((got.wr_id, got.status, got.byte_len), (id, WC_SUCCESS, 4096), "no error tells of it");
    }
    assert_eq!(b.bytes()[61440..63488], a.bytes()[4096..6144]);
    assert!(b.bytes()[65536..].iter().all(|x| *x == 0), "bytes landed beyond the line");
    assert_eq!(world.counters().aliased, 2);
    // Registered in two parts, both are reached.
    let upper = b.open.register(b.pd, line as *mut u8, 65536, ALL).unwrap();
    // SAFETY: a live region.
    let split =
        End { mr: upper, memory: line as *mut u8, bytes: 65536, open: verbs.open(CABLE[1]).unwrap(), ..b };
    split.recv(3, 0, 4096).unwrap();
    a.send(3, 4096, 4096).unwrap();
    split.completions(1);
    assert_eq!(split.bytes()[..4096], a.bytes()[4096..8192]);
}
