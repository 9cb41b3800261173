//! Two [`Pair`]s over a simulated network card, thousands of seeds: order is kept within a queue pair and nowhere
//! else, everything happens at any time, and one thing may go wrong.

use std::collections::VecDeque;

use super::wire::{self, CABLES, SLOT};
use super::*;
use crate::fabric::Lane;
use crate::fabric::checksum;

/// A small generator: a seed is a run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(n);
        bytes
    }
}

/// What goes wrong with the n-th message or chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trap {
    None,
    LoseChunk,
    DoubleChunk,
    FlipInChunk,
    /// Two chunks of one queue pair change places.
    SwapChunks,
    LoseMessage,
    DoubleMessage,
    FlipInMessage,
    /// The device never says that a chunk, or a message, has left.
    LoseCompletion,
    /// Nor does it of any later one of this side.
    LoseCompletions,
}

const TRAPS: [Trap; 8] = [
    Trap::None,
    Trap::LoseChunk,
    Trap::DoubleChunk,
    Trap::FlipInChunk,
    Trap::SwapChunks,
    Trap::LoseMessage,
    Trap::DoubleMessage,
    Trap::FlipInMessage,
];

/// One rank: its protocol, memory and device.
struct Side {
    pair: Pair,
    base: usize,
    memory: Vec<u8>,
    /// Data in flight to this side, by cable, with the immediate data and the address of a write.
    chunks: Vec<VecDeque<(Vec<u8>, u32, usize)>>,
    /// Receives posted, by cable: number, address, length.
    posted: Vec<VecDeque<(u64, usize, usize)>>,
    messages: VecDeque<Vec<u8>>,
    /// Sends of this side that the device has not let go.
    sends: Vec<VecDeque<u64>>,
    control_sends: VecDeque<u64>,
    /// How many frames the device takes, which may be less than it said.
    room: Vec<u32>,
    ranges: Ranges,
}

/// What the program of a side does: puts and arms to come, per lane, and what was armed.
#[derive(Default)]
struct Ranges {
    puts: Vec<VecDeque<(usize, usize)>>,
    arms: Vec<VecDeque<(usize, usize, Vec<u8>)>>,
    armed: Vec<VecDeque<(usize, Vec<u8>)>>,
}

impl Side {
    fn at(&mut self, at: usize, len: usize) -> &mut [u8] {
        let base = self.base;
        &mut self.memory[at - base..at - base + len]
    }

    fn frames(&self, mode: Mode, cable: usize) -> u32 {
        self.posted[cable].iter().map(|p| cost(mode, p.2)).sum()
    }
}

struct Net {
    random: Random,
    settings: Settings,
    sides: [Side; 2],
    trap: Trap,
    /// The trap springs when this many chunks or messages have been sent.
    countdown: usize,
    sprung: bool,
    /// The side whose device completes nothing any more.
    mute: Option<usize>,
    /// A doubled chunk that found no receive: the card drops it, and nothing happened.
    harmless: bool,
}

enum End {
    Done,
    Fault(Fault),
    /// Nothing moves any more; a clock would tell.
    Stuck,
}

impl Net {
    fn new(seed: u64, trap: Trap) -> Net {
        let mut random = Random(seed);
        let mode = if random.below(2) == 0 { Mode::Posted } else { Mode::Write };
        let cables = 1 + random.below(3);
        let chunk = FRAME * [1, 2, 4][random.below(3)];
        let least = cost(mode, chunk);
        let window = |random: &mut Random| Window {
            send: least + random.below(40) as u32,
            receive: least + random.below(40) as u32,
        };
        let windows = |random: &mut Random| (0..cables).map(|_| window(random)).collect::<Vec<_>>();
        let slots = 16 + random.below(20) as u64;
        let settings: [Settings; 2] = std::array::from_fn(|_| Settings {
            mode,
            chunk,
            slots,
            checksums: true,
            windows: windows(&mut random),
        });
        let mut data: [Ranges; 2] = Default::default();
        let mut ends = [0usize; 2];
        let bases = [EXTENT * 5 - FRAME * random.below(30), EXTENT * 9 - 64 * random.below(3000)];
        let mut contents = [Vec::new(), Vec::new()];
        for side in 0..2 {
            data[side].puts.resize_with(Lane::COUNT, VecDeque::new);
            data[side].arms.resize_with(Lane::COUNT, VecDeque::new);
            data[side].armed.resize_with(Lane::COUNT, VecDeque::new);
        }
        for _ in 0..1 + random.below(60) {
            let (from, lane) = (random.below(2), random.below(3));
            let len = match random.below(4) {
                0 => random.below(200),
                1 => random.below(2 * wire::SMALL),
                2 => random.below(4 * chunk),
                _ => random.below(10 * chunk),
            };
            let room = len + if random.below(3) == 0 { random.below(5000) } else { 0 };
            let bytes = random.bytes(len);
            let source = ends[from];
            contents[from].extend_from_slice(&bytes);
            ends[from] += len;
            data[from].puts[lane].push_back((bases[from] + source, len));
            let to = 1 - from;
            let target = ends[to];
            contents[to].resize(target + room, 0xEE);
            ends[to] += room;
            data[to].arms[lane].push_back((bases[to] + target, room, bytes));
        }
        let mut data = data.into_iter();
        let mut contents = contents.into_iter();
        let sides = std::array::from_fn(|i| Side {
            pair: Pair::new(&settings[i]),
            base: bases[i],
            memory: contents.next().unwrap_or_default(),
            chunks: vec![VecDeque::new(); cables],
            posted: vec![VecDeque::new(); cables],
            messages: VecDeque::new(),
            sends: vec![VecDeque::new(); cables],
            control_sends: VecDeque::new(),
            room: settings[i]
                .windows
                .iter()
                .map(|w| if random.below(3) == 0 { least.max(w.receive / 2) } else { u32::MAX })
                .collect(),
            ranges: data.next().unwrap_or_default(),
        });
        let countdown =
            random.below(if matches!(trap, Trap::LoseMessage | Trap::DoubleMessage) { 20 } else { 40 });
        let [settings, _] = settings;
        Net { random, settings, sides, trap, countdown, sprung: false, mute: None, harmless: false }
    }

    /// Whether the trap springs now.
    fn springs(&mut self, traps: &[Trap]) -> bool {
        if self.sprung || !traps.contains(&self.trap) {
            return false;
        }
        self.sprung = self.countdown == 0;
        self.countdown = self.countdown.saturating_sub(1);
        self.sprung
    }

    /// Whether the completion of what side `s` sends now never comes.
    fn is_mute(&mut self, s: usize) -> bool {
        if self.springs(&[Trap::LoseCompletions]) {
            self.mute = Some(s);
        }
        self.mute == Some(s) || self.springs(&[Trap::LoseCompletion])
    }

    /// Everything that side `s` wants to do now.
    fn pump(&mut self, s: usize) -> Result<bool, Fault> {
        let mut did = false;
        let mut out = [0; SLOT];
        let mode = self.settings.mode;
        while let Some(action) =
            self.sides[s].pair.next(&mut out, &|at| [(at / EXTENT as u64) as u32 ^ 77; CABLES])
        {
            did = true;
            match action {
                Action::Place { at, data } => {
                    self.sides[s].at(at, data.len()).copy_from_slice(&data);
                }
                Action::Verify { cable, chunk, sum } => {
                    let right = checksum::crc32c(self.sides[s].at(chunk.at, chunk.len)) == sum;
                    self.sides[s].pair.on_verified(cable, right)?;
                }
                Action::Receive { cable, chunk } => {
                    let side = &mut self.sides[s];
                    if side.frames(mode, cable) + cost(mode, chunk.len) > side.room[cable] {
                        side.pair.on_post_refused(cable)?;
                        break; // come back later, as a real engine does
                    }
                    side.posted[cable].push_back((chunk.number, chunk.at, chunk.len));
                    side.pair.on_posted(cable, chunk);
                }
                Action::Send { cable, chunk } => self.send(s, cable, &chunk)?,
                Action::Control { number, len, data } => {
                    let mut message = out[..len].to_vec();
                    if let Some((at, len)) = data {
                        message.extend_from_slice(self.sides[s].at(at, len));
                    }
                    wire::seal(&mut message);
                    if !self.is_mute(s) {
                        self.sides[s].control_sends.push_back(number);
                    }
                    assert!(!self.sides[1 - s].pair.has_left(), "a message to queue pairs that may be gone");
                    let lost = self.springs(&[Trap::LoseMessage, Trap::DoubleMessage, Trap::FlipInMessage]);
                    if lost && self.trap == Trap::FlipInMessage {
                        let bit = self.random.below(8 * message.len());
                        message[bit / 8] ^= 1 << (bit % 8);
                    }
                    if lost && self.trap == Trap::DoubleMessage {
                        self.sides[1 - s].messages.push_back(message.clone());
                    }
                    if !(lost && self.trap == Trap::LoseMessage) {
                        self.sides[1 - s].messages.push_back(message);
                    }
                    let slots = self.settings.slots as usize;
                    assert!(
                        self.sprung || self.sides[1 - s].messages.len() <= slots,
                        "more messages than receives"
                    );
                }
            }
        }
        Ok(did)
    }

    fn send(&mut self, s: usize, cable: usize, chunk: &source::Chunk) -> Result<(), Fault> {
        let mode = self.settings.mode;
        if self.sides[s].sends[cable].len() as u32 > 50 || self.random.below(20) == 0 {
            return self.sides[s].pair.on_send_refused(cable);
        }
        let mut bytes = self.sides[s].at(chunk.at, chunk.len).to_vec();
        let sum = checksum::crc32c(&bytes);
        if mode == Mode::Write {
            assert_eq!(
                chunk.key,
                (chunk.address / EXTENT as u64) as u32 ^ 77,
                "key of the chunk's own extent"
            );
        }
        let sprung = self.springs(&[Trap::LoseChunk, Trap::DoubleChunk, Trap::FlipInChunk, Trap::SwapChunks]);
        if sprung && self.trap == Trap::FlipInChunk {
            let bit = self.random.below(8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let item = (bytes, chunk.number as u32, chunk.address as usize);
        let queue = &mut self.sides[1 - s].chunks[cable];
        if sprung && self.trap == Trap::DoubleChunk {
            queue.push_back(item.clone());
        }
        if !(sprung && self.trap == Trap::LoseChunk) {
            queue.push_back(item);
        }
        if sprung && self.trap == Trap::SwapChunks {
            let n = queue.len();
            if n >= 2 && queue[n - 2].0 != queue[n - 1].0 {
                queue.swap(n - 2, n - 1);
            } else {
                self.sprung = false; // nothing to swap with: later
            }
        }
        if !self.is_mute(s) {
            self.sides[s].sends[cable].push_back(chunk.number);
        }
        self.sides[s].pair.on_sent(cable, sum);
        Ok(())
    }

    /// Delivers a chunk to side `s`, if there is one.
    fn land(&mut self, s: usize, cable: usize) -> Result<bool, Fault> {
        let mode = self.settings.mode;
        let side = &mut self.sides[s];
        let Some((bytes, immediate, address)) = side.chunks[cable].pop_front() else { return Ok(false) };
        let Some((number, at, len)) = side.posted[cable].pop_front() else {
            assert!(self.sprung, "a chunk was sent for which no receive is posted");
            self.harmless = self.trap == Trap::DoubleChunk;
            return Ok(true); // lost, as over a real unreliable connection
        };
        if mode == Mode::Posted {
            if bytes.len().div_ceil(FRAME) != len.div_ceil(FRAME) {
                assert!(self.sprung, "frames do not match");
                return Err(Fault::Corrupt(Some(cable), "length error".into()));
            }
            let n = bytes.len().min(len);
            side.at(at, n).copy_from_slice(&bytes[..n]);
        } else {
            let n = bytes.len();
            side.at(address, n).copy_from_slice(&bytes);
        }
        side.pair.on_landed(cable, number, bytes.len(), immediate)?;
        Ok(true)
    }

    /// One thing happens. `false`: it could not.
    fn step(&mut self) -> Result<bool, Fault> {
        let s = self.random.below(2);
        let cable = self.random.below(self.settings.windows.len());
        match self.random.below(9) {
            0 | 1 => {
                let did = self.pump(s)?;
                Ok(self.wait(s) || did)
            }
            2 => {
                let Some(message) = self.sides[s].messages.pop_front() else { return Ok(false) };
                self.sides[s].pair.on_control(&message)?;
                Ok(true)
            }
            3 | 4 => self.land(s, cable),
            5 => {
                let Some(number) = self.sides[s].sends[cable].pop_front() else { return Ok(false) };
                self.sides[s].pair.on_completed(cable, number)?;
                Ok(true)
            }
            6 => {
                let Some(number) = self.sides[s].control_sends.pop_front() else { return Ok(false) };
                self.sides[s].pair.on_control_sent(number);
                Ok(true)
            }
            7 => {
                let lane = self.random.below(Lane::COUNT);
                let side = &mut self.sides[s];
                let Some((at, len)) = side.ranges.puts[lane].pop_front() else { return Ok(false) };
                side.pair.put(Lane(lane as u8), at, len);
                Ok(true)
            }
            _ => {
                let lane = self.random.below(Lane::COUNT);
                let side = &mut self.sides[s];
                let Some((at, room, bytes)) = side.ranges.arms[lane].pop_front() else { return Ok(false) };
                side.pair.arm(Lane(lane as u8), at, room)?;
                side.ranges.armed[lane].push_back((at, bytes));
                Ok(true)
            }
        }
    }

    /// Takes what has arrived at side `s`, which has nothing to do just now, and compares it.
    fn wait(&mut self, s: usize) -> bool {
        let mut took = false;
        let side = &mut self.sides[s];
        for lane in 0..Lane::COUNT {
            let (waited, _) = side.pair.arms(Lane(lane as u8));
            if let Some(len) = side.pair.filled(Lane(lane as u8), waited) {
                let (at, bytes) = side.ranges.armed[lane].pop_front().unwrap();
                assert_eq!(len, bytes.len(), "length of put {waited} on lane {lane}");
                assert!(side.at(at, len) == bytes.as_slice(), "put {waited} on lane {lane} has wrong bytes");
                side.pair.take(Lane(lane as u8));
                took = true;
            }
        }
        took
    }

    fn is_over(&self) -> bool {
        self.sides.iter().all(|s| {
            s.ranges.arms.iter().all(VecDeque::is_empty)
                && s.ranges.armed.iter().all(VecDeque::is_empty)
                && s.ranges.puts.iter().all(VecDeque::is_empty)
        })
    }

    /// Runs until the end: first the program, then leaving.
    fn run(&mut self) -> End {
        let (mut idle, mut ticks, mut is_leaving) = (0u32, 0, false);
        loop {
            let moved = match self.step() {
                Ok(moved) => moved,
                Err(fault) => return End::Fault(fault),
            };
            idle = if moved { 0 } else { idle + 1 };
            if self.is_over() && !is_leaving {
                is_leaving = true;
                for side in &mut self.sides {
                    side.pair.leave();
                }
            }
            if is_leaving && self.sides.iter().all(|s| s.pair.has_left()) {
                assert!(self.sides.iter().all(|s| s.pair.is_idle() && s.messages.is_empty()));
                return End::Done;
            }
            if idle > 2000 {
                if ticks == 3 {
                    return End::Stuck;
                }
                // A while has passed: signs of life.
                (idle, ticks) = (0, ticks + 1);
                for side in &mut self.sides {
                    side.pair.tick();
                }
            }
        }
    }
}

/// Without a trap every put arrives with its own bytes, whatever the order of events.
#[test]
fn every_order_of_events_ends_well() {
    for seed in 0..2000 {
        let mut net = Net::new(seed, Trap::None);
        match net.run() {
            End::Done => {}
            End::Fault(fault) => panic!("seed {seed}: {fault:?}"),
            End::Stuck => panic!("seed {seed}: stuck"),
        }
    }
}

/// With a trap: no wrong byte is ever seen (the waits compare), and what goes wrong is told, or seen as missing.
#[test]
fn every_trap_is_noticed() {
    let mut noticed = [0; TRAPS.len()];
    for seed in 0..3500 {
        let which = 1 + seed as usize % (TRAPS.len() - 1);
        let trap = TRAPS[which];
        let mut net = Net::new(seed, trap);
        let end = net.run();
        match end {
            End::Done => assert!(!net.sprung || net.harmless, "seed {seed}: {trap:?} was not noticed"),
            End::Fault(ref fault) => {
                assert!(net.sprung && matches!(fault, Fault::Corrupt(..)), "seed {seed}: {fault:?}");
                noticed[which] += 1;
            }
            End::Stuck => {
                assert!(net.sprung, "seed {seed}: stuck without a trap");
                let is_missing = net.sides.iter().any(|s| s.pair.missing().is_some());
                // A lost answer to a goodbye, when all is done, is nobody's loss: a clock ends the waiting for it.
                let is_goodbye = net.is_over() && net.sides.iter().any(|s| s.pair.has_said_goodbye());
                let is_told = match trap {
                    Trap::LoseChunk => is_missing,
                    Trap::LoseMessage => is_goodbye,
                    _ => false,
                };
                assert!(is_told, "seed {seed}: {trap:?} is not told");
                noticed[which] += 1;
            }
        }
    }
    println!("noticed, by trap: {noticed:?}");
    assert!(noticed[1..].iter().all(|n| *n > 50), "{noticed:?}");
}

/// A completion that never comes holds up nobody: the peer tells what it has. When none comes any more, puts go on until the
/// device is full, and then it is known what it owes.
#[test]
fn completions_that_never_come_are_lived_with_or_told() {
    let (mut well, mut told) = (0, 0);
    for seed in 0..2000 {
        let trap = [Trap::LoseCompletion, Trap::LoseCompletions][seed as usize % 2];
        let mut net = Net::new(seed, trap);
        match net.run() {
            End::Done => well += u32::from(net.sprung),
            End::Fault(fault) => panic!("seed {seed}: {fault:?}"),
            End::Stuck => {
                let is_owed = net.sides.iter().any(|s| s.pair.owed().is_some());
                // When only that of a goodbye is missing, a clock ends the waiting.
                let only_goodbyes = net.is_over()
                    && net
                        .sides
                        .iter()
                        .map(|s| &s.pair)
                        .all(|pair| pair.has_left() || pair.has_said_goodbye() || pair.is_peer_gone());
                assert!(is_owed || only_goodbyes, "seed {seed}: {trap:?} is not told");
                told += u32::from(is_owed);
            }
        }
    }
    println!("{well} well, {told} told");
    assert!(well > 500 && told > 50, "{well} well, {told} told");
}

/// A put that is longer than its range is found by the target, before a byte of it moves.
#[test]
fn too_long_puts_are_refused() {
    for len in [100, 100_000] {
        let mut net = Net::new(1, Trap::None);
        for side in &mut net.sides {
            side.ranges = Ranges {
                puts: vec![VecDeque::new(); Lane::COUNT],
                arms: vec![VecDeque::new(); Lane::COUNT],
                armed: vec![VecDeque::new(); Lane::COUNT],
            };
            side.memory = vec![0; 200_000];
        }
        net.sides[0].ranges.puts[2].push_back((net.sides[0].base, len));
        net.sides[1].ranges.arms[2].push_back((net.sides[1].base, len - 1, vec![1; len]));
        let End::Fault(fault) = net.run() else { panic!("{len} bytes into {}", len - 1) };
        assert_eq!(fault, Fault::TooLong { lane: Lane(2), put: 0, len: len as u64, room: len as u64 - 1 });
        assert!(net.sides[1].memory.iter().all(|b| *b == 0));
    }
}

/// Puts that nobody armed when their target left are told, and do not keep their source.
#[test]
fn puts_to_a_rank_that_left_are_forgotten() {
    for seed in 0..50 {
        let mut net = Net::new(seed, Trap::None);
        let puts: usize = net.sides[0].ranges.puts.iter().map(VecDeque::len).sum();
        for lane in 0..Lane::COUNT {
            net.sides[1].ranges.arms[lane].clear();
            net.sides[1].ranges.puts[lane].clear();
            net.sides[0].ranges.arms[lane].clear();
        }
        let made: Vec<u64> = net.sides[0].ranges.puts.iter().map(|q| q.len() as u64).collect();
        assert!(matches!(net.run(), End::Done), "seed {seed}, {puts} puts");
        let pair = &net.sides[0].pair;
        for (lane, made) in made.into_iter().enumerate() {
            assert!((0..made).all(|i| {
                let lane = Lane(lane as u8);
                pair.is_done(lane, i) != pair.is_forgotten(lane, i)
            }));
        }
    }
}
