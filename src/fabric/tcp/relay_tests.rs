//! Ranks that reach each other only through others, without sockets: state machines, and byte streams that hold
//! few bytes and are cut anywhere.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::frame::{CHUNK, EAGER, Header, Kind};
use super::job::Job;
use super::peer::End;
use super::region::Region;
use super::routes::Routes;
use super::rx::Rx;
use super::tests::{Random, bytes, memory, message, read, write};
use super::tx::Tx;
use super::window::ROOM;
use crate::error::{Error, Loss};
use crate::fabric::{Lane, Memory};

/// What is on its way in one direction of a connection, between its sender's state and its receiver's.
#[derive(Default)]
struct Wire {
    tx: Tx,
    rx: Option<Rx>,
    bytes: VecDeque<u8>,
}

struct Net {
    jobs: Vec<Job>,
    /// From, to, connection.
    wires: HashMap<(usize, usize, usize), Wire>,
    keys: Vec<(usize, usize, usize)>,
    /// Bytes that a wire holds.
    room: usize,
}

impl Net {
    /// Ranks `a` and `b` have `connections(a, b)`, for `a` > `b`.
    fn new(size: usize, room: usize, connections: impl Fn(usize, usize) -> usize) -> Self {
        let count = |a: usize, b: usize| if a == b { 0 } else { connections(a.max(b), a.min(b)) };
        let routes = Routes::new(size, |a, b| count(a, b) > 0).unwrap();
        let end = |me: usize, rank: usize| End {
            host: format!("host{rank}"),
            link: format!("link to {rank} past {:?}", routes.between(me, rank)),
            data: None,
            shut_off: None,
            connections: count(me, rank),
        };
        let job = |me| Job::new(me, (0..size).map(|rank| end(me, rank)).collect(), &routes, true);
        let jobs = (0..size).map(job).collect();
        let mut keys = Vec::new();
        for a in 0..size {
            for b in 0..size {
                keys.extend((0..count(a, b)).map(|connection| (a, b, connection)));
            }
        }
        let wire = |key: &(usize, usize, usize)| (*key, Wire { rx: Some(Rx::new()), ..Wire::default() });
        Net { jobs, wires: keys.iter().map(wire).collect(), keys, room }
    }

    fn chain(size: usize, room: usize) -> Self {
        Net::new(size, room, |a, b| usize::from(a - b == 1))
    }

    fn ring(size: usize, room: usize) -> Self {
        Net::new(size, room, |a, b| usize::from(a - b == 1 || a - b == size - 1))
    }

    /// Moves at most so many bytes into a wire and out of it. Returns how many were moved.
    fn step(&mut self, key: (usize, usize, usize), into: usize, out_of: usize) -> usize {
        let (from, to, connection) = key;
        let wire = self.wires.get_mut(&key).unwrap();
        let sent = write(
            &mut self.jobs[from],
            &mut wire.tx,
            (to, connection),
            into.min(self.room - wire.bytes.len()),
        );
        wire.bytes.extend(&sent);
        let out_of = out_of.min(wire.bytes.len());
        let some: Vec<u8> = wire.bytes.drain(..out_of).collect();
        let mut rest = &some[..];
        while !rest.is_empty() {
            let used = read(&mut self.jobs[to], wire.rx.as_mut().unwrap(), from, rest).unwrap();
            rest = &rest[used..];
        }
        // Nobody waits for these here.
        while self.jobs[to].touched().is_some() {}
        sent.len() + some.len()
    }

    fn random_step(&mut self, random: &mut Random) {
        let key = self.keys[random.below(self.keys.len())];
        self.step(key, random.amount(), random.amount());
        let held = self.jobs.iter().map(|job| job.held()).max();
        assert!(held.unwrap_or(0) <= ROOM + 1000, "{held:?}");
    }

    /// Until nothing moves any more.
    fn settle(&mut self) {
        let keys = self.keys.clone();
        while keys.iter().map(|key| self.step(*key, usize::MAX, usize::MAX)).sum::<usize>() > 0 {}
    }

    fn put(&mut self, from: usize, to: usize, lane: Lane, source: &Arc<Memory>) {
        let region = Region::new(source, &(0..source.len())).unwrap();
        self.jobs[from].put(lane, to, region);
    }

    fn arm(&mut self, to: usize, from: usize, lane: Lane, target: &Arc<Memory>) {
        let region = Region::new(target, &(0..target.len())).unwrap();
        self.jobs[to].arm(lane, from, region).unwrap();
    }
}

/// Everybody sends everybody long puts at once round a ring of connections that hold less than one piece: no
/// circle of full buffers closes, and nobody holds more than the windows.
#[test]
fn no_deadlock_on_rings() {
    const LANES: usize = 2;
    for (seed, size) in [(1, 4), (2, 5), (3, 6), (4, 4)] {
        let len = ROOM as usize / 2 + 3 * CHUNK / 2 + seed;
        let mut random = Random((seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut net = Net::ring(size, [1000, 60_000][seed % 2]);
        let pairs: Vec<(usize, usize, Lane)> = (0..size * size * LANES)
            .map(|i| (i / LANES / size, i / LANES % size, Lane((i % LANES) as u8)))
            .filter(|(a, b, _)| a != b)
            .collect();
        let name = |from: usize, to: usize, lane: Lane| (from * 100 + to * 10 + lane.0 as usize) as u64;
        let mut targets = Vec::new();
        for &(from, to, lane) in &pairs {
            net.put(from, to, lane, &message(name(from, to, lane), len));
            targets.push(memory(len));
            net.arm(to, from, lane, targets.last().unwrap());
        }
        for _ in 0..20_000 {
            net.random_step(&mut random);
        }
        net.settle();
        for (&(from, to, lane), target) in pairs.iter().zip(&targets) {
            assert_eq!(net.jobs[to].filled(lane, from), Some(len), "seed {seed}: {from} to {to}");
            assert!(
                bytes(target) == bytes(&message(name(from, to, lane), len)),
                "seed {seed}: {from} to {to}"
            );
            assert_eq!(net.jobs[from].is_done(lane, to, 0), Some(true));
        }
    }
}

/// Any program on any connected graph, with one or two connections a pair: everything arrives in order, then
/// all leave, and only when all have is it over for anyone.
#[test]
fn any_program_on_any_cabling() {
    let mut relayed = 0;
    for seed in 1..=60u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let size = 3 + random.below(4);
        let mut count = vec![vec![0; size]; size];
        for a in 1..size {
            let parent = random.below(a);
            count[a][parent] = 1 + random.below(2);
            if random.below(3) == 0 {
                count[a][random.below(a)] = 1;
            }
        }
        let mut net = Net::new(size, 5000 + random.amount(), |a, b| count[a][b]);
        relayed += usize::from(net.jobs[0].is_relayed());
        let length = |random: &mut Random| match random.below(20) {
            0 => random.below(3 * CHUNK),
            1..5 => random.below(EAGER + 2),
            _ => random.below(500),
        };
        // From, to, lane: lengths of the puts; how many were put, armed (to where) and waited for.
        let mut streams = Vec::new();
        for (from, to) in (0..size * size).map(|i| (i / size, i % size)).filter(|(from, to)| from != to) {
            for lane in 0..2 {
                let plan: Vec<usize> = (0..random.below(30)).map(|_| length(&mut random)).collect();
                streams.push((from, to, Lane(lane), plan, 0, Vec::<Arc<Memory>>::new(), 0));
            }
        }
        let name = |from: usize, to: usize, number: usize| (from * 10_000 + to * 1000 + number) as u64;
        for step in 0.. {
            assert!(step < 500_000, "seed {seed}: no end");
            let at = random.below(streams.len());
            let (from, to, lane, plan, put, armed, waited) = &mut streams[at];
            let (from, to, lane) = (*from, *to, *lane);
            match random.below(4) {
                0 if *put < plan.len() => {
                    let source = message(name(from, to, *put), plan[*put]);
                    *put += 1;
                    net.put(from, to, lane, &source);
                }
                1 if armed.len() < plan.len() => {
                    armed.push(memory(plan[armed.len()] + 10));
                    net.arm(to, from, lane, &armed[armed.len() - 1]);
                }
                2 => {
                    if let Some(len) = net.jobs[to].filled(lane, from) {
                        assert_eq!(len, plan[*waited], "seed {seed}");
                        let sent = message(name(from, to, *waited), len);
                        assert!(
                            bytes(&armed[*waited])[..len] == *bytes(&sent),
                            "seed {seed}: {from} to {to}"
                        );
                        net.jobs[to].take(lane, from);
                        *waited += 1;
                    }
                }
                _ => (0..size).for_each(|_| net.random_step(&mut random)),
            }
            if step % 64 == 0 && streams.iter().all(|(_, _, _, plan, _, _, waited)| *waited == plan.len()) {
                break;
            }
        }
        for leaver in 0..size {
            assert!(net.jobs.iter_mut().all(|job| job.is_drained()), "seed {seed}");
            if net.jobs[leaver].is_relayed() {
                assert!(net.jobs.iter().all(|job| !job.is_over()), "seed {seed}: {leaver}");
            }
            net.jobs[leaver].leave();
            (0..random.below(300)).for_each(|_| net.random_step(&mut random));
            if leaver % 2 == 0 {
                net.settle();
            }
        }
        net.settle();
        for (me, job) in net.jobs.iter().enumerate() {
            assert!(job.is_over() && job.ended().is_none(), "seed {seed}: rank {me}");
            for (_, neighbour, _) in net.keys.iter().filter(|(from, ..)| *from == me) {
                assert!(job.may_go(*neighbour), "seed {seed}: {me} and {neighbour}");
            }
        }
    }
    assert!(relayed > 40, "{relayed}");
}

/// Small puts do not wait until a long put to someone behind the same relay has gone, nor for its window.
#[test]
fn small_puts_overtake_long_ones_at_a_relay() {
    let mut net = Net::chain(3, CHUNK);
    let long = message(1, 64 * CHUNK);
    let (target, small) = (memory(long.len()), message(2, 8));
    net.arm(2, 0, Lane::PANEL, &target);
    net.put(0, 2, Lane::PANEL, &long);
    let keys = net.keys.clone();
    // The last hop stalls until the window is used up.
    for _ in 0..100 {
        for key in keys.iter().filter(|key| **key != (1, 2, 0)) {
            net.step(*key, usize::MAX, usize::MAX);
        }
    }
    let held = net.jobs[1].held();
    assert!(held > ROOM / 2 && held <= ROOM, "{held}");
    net.arm(2, 0, Lane::CONTROL, &memory(8));
    net.put(0, 2, Lane::CONTROL, &small);
    let mut moved = 0;
    while net.jobs[2].filled(Lane::CONTROL, 0).is_none() {
        keys.iter().for_each(|key| moved += net.step(*key, 1000, 1000));
        assert!(moved < 8 * CHUNK * 4, "{moved} bytes went before it");
    }
}

/// Rank 1 of a chain of three, and what comes to it from rank 0.
fn middle() -> (Job, Rx) {
    (Net::chain(3, 1).jobs.remove(1), Rx::new())
}

#[test]
fn what_has_no_business_at_a_relay_is_refused() {
    let empty = |kind, from, to| Header::empty(kind, from, to);
    let refused = |header: Header| {
        let (mut job, mut rx) = middle();
        read(&mut job, &mut rx, 0, &header.encode()).is_err()
    };
    for kind in [Kind::Credit, Kind::Room, Kind::Left, Kind::Farewell] {
        assert!(!refused(empty(kind, 0, 2)), "{kind:?}");
        assert!(refused(empty(kind, 2, 0)), "{kind:?} comes from where it goes to");
        assert!(refused(empty(kind, 0, 7)) && refused(empty(kind, 0, 0)) && refused(empty(kind, 1, 2)));
        assert!(refused(empty(kind, 1, 1)));
    }
    assert!(refused(empty(Kind::Room, 0, 1)), "nobody stands between");
    assert!(refused(empty(Kind::Beat, 0, 2)) && refused(empty(Kind::Failed, 0, 2)), "for neighbours only");
    assert!(!refused(empty(Kind::Beat, 0, 1)));

    // Nothing after the end of a pair.
    let (mut job, mut rx) = middle();
    read(&mut job, &mut rx, 0, &empty(Kind::Farewell, 0, 2).encode()).unwrap();
    read(&mut job, &mut rx, 0, &empty(Kind::Left, 0, 2).encode()).unwrap();
    assert!(read(&mut job, &mut rx, 0, &empty(Kind::Credit, 0, 2).encode()).is_err());
}

#[test]
fn a_source_that_does_not_keep_to_its_window_is_refused() {
    let (mut job, mut rx) = middle();
    let mut accepted = 0;
    for piece in 0u64.. {
        let header = Header {
            lane: Lane::BULK,
            offset: piece * CHUNK as u64,
            total: 1 << 40,
            len: CHUNK as u32,
            ..Header::empty(Kind::Put, 0, 2)
        };
        let frame = [&header.encode()[..], &[0; CHUNK]].concat();
        let (mut rest, mut wrong) = (&frame[..], None);
        while !rest.is_empty() && wrong.is_none() {
            match read(&mut job, &mut rx, 0, rest) {
                Ok(used) => rest = &rest[used..],
                Err(e) => wrong = Some(e),
            }
        }
        if let Some(wrong) = wrong {
            let error = job.wrong(0, wrong).to_string();
            assert!(error.contains("more bytes of rank 0 for rank 2"), "{error}");
            break;
        }
        accepted += CHUNK;
        assert!(accepted < 2 * ROOM as usize);
    }
    assert!(accepted as u64 > ROOM - 2 * CHUNK as u64);
}

/// A failure at one end of a chain reaches the other; a relay that is lost is named, and what went through it.
#[test]
fn failures_go_from_neighbour_to_neighbour() {
    let mut net = Net::chain(5, 100);
    net.jobs[4].fail(Error::Internal("no more".into()));
    net.settle();
    for rank in 0..4 {
        let end = net.jobs[rank].ended();
        assert!(
            matches!(end, Some(Error::Aborted { by: 4, reason }) if reason.contains("no more")),
            "{end:?}"
        );
    }

    let mut net = Net::chain(4, 100);
    net.jobs[0].set_waiting(Some((3, Lane::ROWS, 7)));
    net.jobs[3].set_activity("in panel 4");
    net.jobs[0].gone(1);
    net.jobs[2].gone(1);
    net.settle();
    let words = |rank: usize| {
        let Some(e @ Error::PeerLost { rank: 1, by, loss: Loss::Gone, .. }) = net.jobs[rank].ended() else {
            panic!("{:?}", net.jobs[rank].ended());
        };
        assert_eq!(*by, rank);
        e.to_string()
    };
    let first = words(0);
    assert!(
        first.contains("put 7 on the rows lane between this rank and rank 3 (host3), which goes through it"),
        "{first}"
    );
    let last = words(3);
    assert!(last.contains("rank 1 (host1, link to 1 past [2]) is gone in panel 4"), "{last}");

    // A connection that broke says nothing of who is at its other end, and nothing of other connections.
    let mut net = Net::chain(4, 100);
    net.jobs[1].set_activity("in panel 4");
    net.jobs[1].lose(2, Loss::Broken(std::io::ErrorKind::ConnectionReset), Duration::ZERO);
    net.settle();
    let seen = "rank 2 (host2, link to 2 past []) is out of reach: the connection to it broke (connection reset) in panel 4, \
                noticed by rank 1 (host1)";
    assert!(net.jobs[1].ended().is_some_and(|e| e.to_string().contains(seen)));
    for rank in [0, 2, 3] {
        let end = net.jobs[rank].ended();
        let heard = matches!(end, Some(Error::Aborted { by: 1, reason }) if reason.contains(seen));
        assert!(heard, "{end:?}");
    }

    // Slow is who owes the put, wherever it is.
    let mut net = Net::chain(3, 100);
    let e = net.jobs[0].lose(2, Loss::Slow, Duration::from_secs(1)).to_string();
    assert!(e.contains("rank 2 (host2, link to 2 past [1]) lives but sent nothing"), "{e}");
}
