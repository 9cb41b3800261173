//! The protocol without sockets: two ranks' state machines, and a byte stream cut anywhere.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::frame::{CHUNK, EAGER, HEADER, Header, Kind};
use super::job::Job;
use super::peer::End;
use super::region::Region;
use super::routes::Routes;
use super::rx::Rx;
use super::tx::Tx;
use super::{Options, endpoint};
use crate::error::{Error, Loss};
use crate::fabric::mem::pages::Pages;
use crate::fabric::rendezvous::{Secret, in_process};
use crate::fabric::{Bounds, Buf, Fabric, Lane, Memory};

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Of bytes that a system call moves: few or many.
    pub fn amount(&mut self) -> usize {
        let most = [3, 100, 400_000][self.below(3)];
        1 + self.below(most)
    }
}

pub fn memory(len: usize) -> Arc<Memory> {
    let pages = Pages::new(len).unwrap();
    // SAFETY: zeroed pages of that length, kept by the owner and known only here.
    Arc::new(unsafe { Memory::new(pages.as_ptr(), len, Box::new(pages)) })
}

pub fn bytes(memory: &Memory) -> &[u8] {
    // SAFETY: as long as the memory; the tests do not write while they look.
    unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) }
}

pub fn message(seed: u64, len: usize) -> Arc<Memory> {
    let memory = memory(len);
    let mut random = Random(seed << 8 | 0x55);
    let mut words: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    words.truncate(len);
    Region::new(&memory, &(0..len)).unwrap().fill(&words);
    memory
}

/// The next `most` bytes that a rank would write on a connection.
pub fn write(job: &mut Job, tx: &mut Tx, (peer, connection): (usize, usize), most: usize) -> Vec<u8> {
    while tx.has_room()
        && let Some(frame) = job.next(peer, connection)
    {
        tx.push(frame);
    }
    let mut vecs = Tx::no_bytes();
    let n = tx.bytes(&mut vecs);
    let mut out = Vec::new();
    for v in &vecs[..n] {
        let take = v.iov_len.min(most - out.len());
        // SAFETY: what `Tx` gives is valid for reads.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(v.iov_base.cast::<u8>(), take) });
    }
    tx.wrote(out.len(), |to, lane, number| job.written(to, lane, number));
    out
}

/// A rank receives what fits of `incoming`, which is all that the state machine takes at a time.
pub fn read(job: &mut Job, rx: &mut Rx, peer: usize, incoming: &[u8]) -> Result<usize, super::Wrong> {
    let mut used = 0;
    for v in rx.room() {
        let take = v.iov_len.min(incoming.len() - used);
        // SAFETY: what `Rx` gives is valid for writes of its length.
        unsafe { std::ptr::copy_nonoverlapping(incoming[used..].as_ptr(), v.iov_base.cast(), take) };
        used += take;
    }
    rx.received(used, &mut job.arrivals(peer))?;
    Ok(used)
}

/// One rank of two, and its connections to the other.
struct Side {
    job: Job,
    rx: Vec<Rx>,
    tx: Vec<Tx>,
    /// Bytes on their way here.
    wire: Vec<VecDeque<u8>>,
}

impl Side {
    fn new(me: usize, connections: usize) -> Self {
        let end = End { host: "here".into(), link: "wire".into(), data: None, shut_off: None, connections };
        Side {
            job: Job::new(me, vec![end; 2], &Routes::default(), true),
            rx: (0..connections).map(|_| Rx::new()).collect(),
            tx: (0..connections).map(|_| Tx::default()).collect(),
            wire: vec![VecDeque::new(); connections],
        }
    }

    /// The next `most` bytes that this side would write.
    fn write(&mut self, peer: usize, connection: usize, most: usize) -> Vec<u8> {
        write(&mut self.job, &mut self.tx[connection], (peer, connection), most)
    }

    fn read(&mut self, peer: usize, connection: usize, incoming: &[u8]) -> Result<usize, super::Wrong> {
        read(&mut self.job, &mut self.rx[connection], peer, incoming)
    }

    fn read_all(&mut self, peer: usize, connection: usize, mut incoming: &[u8]) -> Result<(), super::Wrong> {
        while !incoming.is_empty() {
            let used = self.read(peer, connection, incoming)?;
            incoming = &incoming[used..];
        }
        Ok(())
    }
}

fn length(random: &mut Random) -> usize {
    match random.below(24) {
        0 => 0,
        1..6 => random.below(EAGER + 2),
        6 => CHUNK - 1 + random.below(3),
        7 => random.below(3 * CHUNK),
        _ => random.below(500),
    }
}

/// Random puts and arms both ways, on several lanes and connections, through wires that deliver any number
/// of bytes: everything arrives where it must, in order, and the memory of every put is given back.
#[test]
fn any_program_over_any_cut_of_the_stream() {
    for seed in 1..=50u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let connections = 1 + random.below(3);
        let mut sides = [Side::new(0, connections), Side::new(1, connections)];
        // For each direction and lane, the messages in order.
        let lanes = 3;
        let plan: Vec<Vec<Vec<usize>>> = (0..2)
            .map(|_| {
                (0..lanes).map(|_| (0..random.below(80)).map(|_| length(&mut random)).collect()).collect()
            })
            .collect();
        let mut put = [[0; 3]; 2];
        let mut armed: [[Vec<Arc<Memory>>; 3]; 2] = Default::default();
        let mut waited = [[0; 3]; 2];
        for step in 0.. {
            assert!(step < 200_000, "seed {seed}: no end");
            let (me, lane) = (random.below(2), random.below(lanes));
            let (you, at) = (1 - me, Lane(lane as u8));
            match random.below(4) {
                0 if put[me][lane] < plan[me][lane].len() => {
                    let len = plan[me][lane][put[me][lane]];
                    let source = message((me * 1000 + lane * 100 + put[me][lane]) as u64, len);
                    let region = Region::new(&source, &(0..len)).unwrap();
                    assert_eq!(sides[me].job.put(at, you, region), put[me][lane] as u64);
                    put[me][lane] += 1;
                }
                1 if armed[me][lane].len() < plan[you][lane].len() => {
                    let number = armed[me][lane].len();
                    let room = plan[you][lane][number] + random.below(2) * 100;
                    let target = memory(room);
                    let region = Region::new(&target, &(0..room)).unwrap();
                    assert_eq!(sides[me].job.arm(at, you, region).unwrap(), number as u64);
                    armed[me][lane].push(target);
                }
                2 => {
                    if let Some(len) = sides[me].job.filled(at, you) {
                        let number = waited[me][lane];
                        assert_eq!(len, plan[you][lane][number], "seed {seed}");
                        let sent = message((you * 1000 + lane * 100 + number) as u64, len);
                        let got = bytes(&armed[me][lane][number]);
                        assert!(got[..len] == *bytes(&sent), "seed {seed}: {me} {lane} {number}");
                        assert!(got[len..].iter().all(|b| *b == 0), "seed {seed}: beyond the put");
                        sides[me].job.take(at, you);
                        waited[me][lane] += 1;
                    }
                }
                _ => {
                    let connection = random.below(connections);
                    let most = random.amount();
                    let sent = sides[me].write(you, connection, most);
                    sides[you].wire[connection].extend(sent);
                    let wire = &mut sides[you].wire[connection];
                    let some = random.amount().min(wire.len());
                    let some: Vec<u8> = wire.drain(..some).collect();
                    sides[you].read_all(me, connection, &some).unwrap();
                }
            }
            let done = (0..2).all(|me| {
                (0..lanes).all(|lane| {
                    waited[me][lane] == plan[1 - me][lane].len() && put[me][lane] == plan[me][lane].len()
                })
            });
            if done {
                break;
            }
        }
        for (me, side) in sides.iter_mut().enumerate() {
            for lane in 0..lanes {
                for number in 0..plan[me][lane].len() as u64 {
                    assert_eq!(side.job.is_done(Lane(lane as u8), 1 - me, number), Some(true));
                }
            }
            assert!(side.job.ended().is_none());
        }
    }
}

/// A valid stream from rank 0 to rank 1: arms, small and long puts, a beat and a farewell.
fn stream(puts: &[usize]) -> Vec<u8> {
    let mut side = Side::new(0, 1);
    for (i, len) in puts.iter().enumerate() {
        let source = message(i as u64, *len);
        side.job.put(Lane::BULK, 1, Region::new(&source, &(0..*len)).unwrap());
        let header = Header {
            lane: Lane::BULK,
            number: i as u64,
            total: *len as u64,
            ..Header::empty(Kind::Credit, 1, 0)
        };
        side.read_all(1, 0, &header.encode()).unwrap();
    }
    side.job.beat(1, 0);
    let mut out = Vec::new();
    loop {
        let more = side.write(1, 0, usize::MAX);
        if more.is_empty() {
            break;
        }
        out.extend(more);
    }
    side.job.leave();
    out.extend(side.write(1, 0, usize::MAX));
    out
}

fn receiver(puts: &[usize]) -> (Side, Vec<Arc<Memory>>) {
    let mut side = Side::new(1, 1);
    let targets: Vec<Arc<Memory>> = puts.iter().map(|len| memory(*len)).collect();
    for target in &targets {
        side.job.arm(Lane::BULK, 0, Region::new(target, &(0..target.len())).unwrap()).unwrap();
    }
    (side, targets)
}

#[test]
fn a_stream_cut_at_every_byte() {
    let puts = [0, 1, 77, EAGER, 300];
    let whole = stream(&puts);
    for cut in 0..=whole.len() {
        let (mut side, targets) = receiver(&puts);
        side.read_all(0, 0, &whole[..cut]).unwrap();
        assert_eq!(side.job.is_left(0), cut == whole.len(), "cut at {cut}");
        side.read_all(0, 0, &whole[cut..]).unwrap();
        for (i, len) in puts.iter().enumerate() {
            assert_eq!(side.job.filled(Lane::BULK, 0), Some(*len), "cut at {cut}");
            assert!(bytes(&targets[i]) == bytes(&message(i as u64, *len)), "cut at {cut}: put {i}");
            side.job.take(Lane::BULK, 0);
        }
        assert!(side.job.is_left(0));
    }
}

/// Whatever one changes in a stream, nothing wrong is ever taken for right: it is found, or what has
/// arrived by then is what was sent.
#[test]
fn streams_that_were_tampered_with() {
    let puts = [0, 1, 77, EAGER, 300, EAGER + 1, 9000];
    let whole = stream(&puts);
    let mut found = 0;
    const CASES: u64 = 4000;
    for seed in 1..=CASES {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut bad = whole.clone();
        let at = random.below(bad.len());
        match random.below(6) {
            0 => bad[at] ^= 1 << random.below(8),
            1 => drop(bad.remove(at)),
            2 => bad.insert(at, random.next() as u8),
            3 => {
                let len = random.below(200).min(bad.len() - at);
                bad[at..at + len].iter_mut().for_each(|b| *b = random.next() as u8);
            }
            4 => {
                // Some of it again: a replay within the connection.
                let len = random.below(9000).min(bad.len() - at);
                let again = bad[at..at + len].to_vec();
                let to = random.below(bad.len());
                bad.splice(to..to, again);
            }
            _ => {
                let len = random.below(9000).min(bad.len() - at);
                bad.drain(at..at + len);
            }
        }
        let (mut side, targets) = receiver(&puts);
        let mut rest = &bad[..];
        while !rest.is_empty() {
            let piece = (1 + random.below(5000)).min(rest.len());
            if side.read_all(0, 0, &rest[..piece]).is_err() {
                found += 1;
                break;
            }
            rest = &rest[piece..];
        }
        for (i, len) in puts.iter().enumerate() {
            let Some(got) = side.job.filled(Lane::BULK, 0) else { break };
            assert_eq!(got, *len, "seed {seed}");
            assert!(bytes(&targets[i]) == bytes(&message(i as u64, *len)), "seed {seed}: put {i}");
            side.job.take(Lane::BULK, 0);
        }
    }
    assert!(found > CASES / 2, "{found}");
}

#[test]
fn random_bytes_and_headers() {
    let mut kinds = [0; 2];
    for seed in 1..=6000u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (mut side, targets) = receiver(&[100, 5000]);
        let mut input = Vec::new();
        if seed % 2 == 0 {
            input.extend((0..random.below(300)).map(|_| random.next() as u8));
        } else {
            // Headers with a right checksum and any fields, most of them plausible.
            for _ in 0..1 + random.below(4) {
                use Kind::{Beat, Credit, Failed, Farewell, Left, Put, Room};
                let kinds = [Put, Credit, Beat, Left, Farewell, Failed, Room];
                let odd = |random: &mut Random| match random.below(4) {
                    0 => random.next(),
                    1 => CHUNK as u64 * random.below(3) as u64,
                    _ => random.below(200) as u64,
                };
                let header = Header {
                    kind: kinds[random.below(7)],
                    lane: Lane(random.below(Lane::COUNT) as u8),
                    from: u32::from(random.below(8) == 0),
                    to: u32::from(random.below(8) != 0),
                    number: odd(&mut random),
                    offset: if random.below(2) == 0 { 0 } else { odd(&mut random) },
                    total: odd(&mut random),
                    len: odd(&mut random) as u32,
                    crc: None,
                };
                input.extend(header.encode());
                let len = (header.len as usize).min(6000);
                input.extend(std::iter::repeat_n(0xAB, len));
            }
        }
        let end = side.read_all(0, 0, &input);
        kinds[usize::from(end.is_err())] += 1;
        if let Err(wrong) = end {
            let error = side.job.wrong(0, wrong);
            assert!(matches!(error, Error::Corrupt { rank: 0, by: 1, .. } | Error::Internal(_)), "{error}");
        }
        // Random bytes never get into memory; crafted frames only where a range was armed for them.
        if seed % 2 == 0 {
            assert!(targets.iter().all(|t| bytes(t).iter().all(|b| *b == 0)), "seed {seed}");
        }
    }
    assert!(kinds[0] > 100 && kinds[1] > 1000, "{kinds:?}");
}

#[test]
fn small_puts_go_before_the_end_of_a_long_one() {
    let mut side = Side::new(0, 1);
    let long = message(1, 64 * CHUNK);
    side.job.put(Lane::PANEL, 1, Region::new(&long, &(0..long.len())).unwrap());
    let credit = Header { lane: Lane::PANEL, total: long.len() as u64, ..Header::empty(Kind::Credit, 1, 0) };
    side.read_all(1, 0, &credit.encode()).unwrap();
    let before = side.write(1, 0, 1000).len();
    let small = message(2, 8);
    side.job.put(Lane::CONTROL, 1, Region::new(&small, &(0..8)).unwrap());
    let mut sent = before;
    while side.job.is_done(Lane::CONTROL, 1, 0) == Some(false) {
        sent += side.write(1, 0, 10_000).len();
    }
    assert!(sent < 5 * CHUNK, "{sent} bytes went before it");
}

#[test]
fn nothing_beyond_the_window_goes_unasked() {
    let mut side = Side::new(0, 1);
    for i in 0..200 {
        let small = message(i, 8);
        side.job.put(Lane::ROWS, 1, Region::new(&small, &(0..8)).unwrap());
    }
    let long = message(1, EAGER + 1);
    side.job.put(Lane::BULK, 1, Region::new(&long, &(0..long.len())).unwrap());
    let mut sent = Vec::new();
    loop {
        let more = side.write(1, 0, usize::MAX);
        if more.is_empty() {
            break;
        }
        sent.extend(more);
    }
    assert_eq!(sent.len(), super::frame::WINDOW as usize * (HEADER + 8));
    // The target, which has armed nothing, takes them all, and not one more.
    let (mut target, _) = receiver(&[]);
    target.read_all(0, 0, &sent).unwrap();
    let one_more = Header {
        lane: Lane::ROWS,
        number: super::frame::WINDOW,
        total: 8,
        len: 8,
        ..Header::empty(Kind::Put, 0, 1)
    };
    assert!(target.read_all(0, 0, &one_more.encode()).is_err());
}

/// Two ranks over loopback; rank 0 puts 64 MiB, and something happens to its connection meanwhile.
fn mid_put(happens: impl Fn(&super::endpoint::Endpoint) + Sync) -> Vec<Error> {
    const LEN: usize = 64 << 20;
    let bounds = Bounds { silence: Duration::from_secs(5), patience: Duration::from_secs(60) };
    let (secret, options) =
        (Secret::random().unwrap(), Options { bounds, checksums: Some(true), ..Options::default() });
    let rank = |mut rendezvous| {
        let (fabric, _) = endpoint(&mut rendezvous, &secret, &options).unwrap();
        fabric.set_activity("in the middle");
        let mut buf = Buf::<u8>::zeros(&fabric, LEN).unwrap();
        let mut talk = || {
            if fabric.rank() == 0 {
                buf.put(&fabric, Lane::PANEL, 1, 0..LEN)?;
                std::thread::sleep(Duration::from_millis(1));
                happens(&fabric);
                buf.flush(&fabric)?;
            } else {
                buf.arm(&fabric, Lane::PANEL, 0, 0..LEN)?;
                buf.wait(&fabric, Lane::PANEL, 0)?;
            }
            // All of it had gone: the loss is found by the next wait.
            let other = 1 - fabric.rank();
            buf.arm(&fabric, Lane::PANEL, other, 0..1)?;
            buf.wait(&fabric, Lane::PANEL, other)
        };
        let end = talk();
        end.unwrap_err()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = in_process(2).into_iter().map(|r| scope.spawn(|| rank(r))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_connection_that_breaks_in_the_middle_of_a_put() {
    for _ in 0..5 {
        for (rank, e) in mid_put(|fabric| fabric.engine().cut(1)).iter().enumerate() {
            assert!(
                matches!(e, Error::PeerLost { rank: lost, by, loss: Loss::Gone, link, waiting_for, .. }
                    if *lost == 1 - rank && *by == rank && link.contains("127.0.0.1")
                        && waiting_for.starts_with("in the middle")),
                "{e:?}"
            );
        }
    }
}

/// Whatever is under way when it comes, reading or writing: it is told as what it is, by who has seen it.
#[test]
fn a_connection_that_is_reset() {
    let reset = |fabric: &super::endpoint::Endpoint| {
        // The other end is connected, and has asked for the put.
        while fabric.engine().written(1)[0] < 10_000 {
            std::thread::yield_now();
        }
        fabric.engine().reset(1);
    };
    let mut seen = 0;
    for _ in 0..5 {
        for (rank, e) in mid_put(reset).iter().enumerate() {
            let text = e.to_string();
            match e {
                Error::PeerLost { rank: lost, by, loss: Loss::Broken(_), waiting_for, .. } => {
                    assert!(
                        *lost == 1 - rank && *by == rank && waiting_for.starts_with("in the middle"),
                        "{text}"
                    );
                    assert!(text.contains("127.0.0.1") && text.contains("connection reset"), "{text}");
                    seen += usize::from(rank == 1);
                }
                // The end that was taken from the first rank tells it nothing.
                _ => assert_eq!(rank, 0, "{text}"),
            }
            assert!(rank == 0 || !text.contains("is gone"), "{text}");
        }
    }
    assert_eq!(seen, 5);
}

#[test]
fn garbage_in_the_middle_of_a_put() {
    let ends = mid_put(|fabric| fabric.engine().scribble(1));
    assert!(matches!(&ends[1], Error::Corrupt { rank: 0, by: 1, .. }), "{ends:?}");
    assert!(
        matches!(&ends[0], Error::Aborted { by: 1, reason } if reason.contains("from rank 0")),
        "{ends:?}"
    );
}

/// Two ranks with two cables between them, as loopback has addresses enough: both carry a long put.
#[test]
fn two_cables_share_the_work() {
    use super::interfaces::Interface;
    if !cfg!(target_os = "linux") {
        println!("skipped: loopback has one address here");
        return;
    }
    const LEN: usize = 16 << 20;
    let secret = Secret::random().unwrap();
    let rank = |mut rendezvous| {
        use crate::fabric::rendezvous::Rendezvous;
        let rank = Rendezvous::rank(&rendezvous);
        let cable = |number: u8| Interface {
            name: format!("cable{number}"),
            address: std::net::Ipv4Addr::new(127, 0, number, 1 + rank as u8).into(),
            prefix: 96 + 30,
            scope: 0,
            loopback: true,
        };
        let options = Options::default();
        let all = Ok(vec![cable(1), cable(2)]);
        let connected = super::setup::connect_on(&mut rendezvous, &secret, &options, all).unwrap();
        let end = &connected.ends[1 - rank];
        assert_eq!(end.connections, 2);
        assert!(end.link.contains("cable1 (") && end.link.contains(" and cable2 ("), "{}", end.link);
        let fabric = super::start(rank, connected, &options).unwrap();
        let mut buf = Buf::<u8>::zeros(&fabric, LEN).unwrap();
        if rank == 0 {
            buf.write(0..LEN).fill(7);
            buf.put(&fabric, Lane::PANEL, 1, 0..LEN).unwrap();
            buf.flush(&fabric).unwrap();
        } else {
            buf.arm(&fabric, Lane::PANEL, 0, 0..LEN).unwrap();
            buf.wait(&fabric, Lane::PANEL, 0).unwrap();
            assert!(buf.read(0..LEN).iter().all(|b| *b == 7));
        }
        fabric.engine().written(1 - rank)
    };
    let written: Vec<Vec<usize>> = std::thread::scope(|scope| {
        let threads: Vec<_> = in_process(2).into_iter().map(|r| scope.spawn(|| rank(r))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(written[0].iter().all(|bytes| *bytes > LEN / 8), "{written:?}");
}
