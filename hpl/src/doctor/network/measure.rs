//! Measures links with puts over the job's fabric: what is measured is what the job will use.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use fulmen::comm::Group;
use fulmen::fabric::{Buf, Fabric, Lane};
use fulmen::{Error, Result};

use super::Link;

/// The group's own collectives run on another lane.
const LANE: Lane = Lane::BULK;

/// How much is sent to know a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Round trips of 8 bytes.
    pub pings: usize,
    /// Bytes of a put, a multiple of 8.
    pub bytes: usize,
    /// Puts in a row.
    pub puts: usize,
    /// How often all of that; the best counts.
    pub times: usize,
}

/// Tenths of a second on a link of 1 Gbit/s.
pub const LONG: Effort = Effort { pings: 100, bytes: 1 << 20, puts: 9, times: 2 };

/// Pairs of hosts that are measured at the same time, and then others.
pub type Rounds = Vec<Vec<(usize, usize)>>;

/// All pairs of `n`, each alone in the network.
pub fn one_by_one(n: usize) -> Rounds {
    (0..n).flat_map(|a| (a + 1..n).map(move |b| vec![(a, b)])).collect()
}

/// All pairs of `n` in as few rounds as there can be, no host twice in one: a tournament.
pub fn side_by_side(n: usize) -> Rounds {
    let even = n + n % 2;
    let round = |r: usize| {
        // The last one stays in its place, the others go round by one.
        let at = |place: usize| if place + 1 == even { place } else { (place + r) % (even - 1) };
        (0..even / 2)
            .map(|i| (at(i), at(even - 1 - i)))
            .map(|(a, b)| (a.min(b), a.max(b)))
            .filter(|&(_, b)| b < n)
            .collect()
    };
    (0..even.saturating_sub(1)).map(round).collect()
}

/// What a leader tells: what it measured, and how it reaches the others over how many cables; both by leader.
type Told = (Vec<[f64; 3]>, Vec<(String, usize)>);

/// Measures the links between `leaders`, a rank of each host, in these rounds. Collective over the whole group; its
/// member 0 gets the links, the others `None`.
///
/// # Errors
/// When a rank is lost.
pub fn links(
    group: &Group,
    leaders: &[usize],
    rounds: &Rounds,
    effort: &Effort,
) -> Result<Option<Vec<Link>>> {
    let fabric = group.fabric();
    let n = leaders.len();
    let me = leaders.iter().position(|&rank| rank == fabric.rank());
    let mut mine = vec![[0.0; 3]; n];
    let mut ways = vec![(String::new(), 0); n];
    if let Some(me) = me {
        fabric.set_activity("while measuring the links between the hosts");
        let between = Group::new(Arc::clone(fabric), leaders.to_vec())?;
        let mut ends = Ends::new(&**fabric, *effort)?;
        for round in rounds {
            between.barrier()?;
            for &(a, b) in round {
                if a == me {
                    mine[b] = ends.pair(leaders[b], true)?;
                } else if b == me {
                    mine[a] = ends.pair(leaders[a], false)?;
                }
            }
        }
        between.barrier()?;
        ways = leaders.iter().map(|&rank| (fabric.link(rank), fabric.hops(rank))).collect();
    }
    let told = postcard::to_allocvec(&(mine, ways)).map_err(|e| Error::Internal(e.to_string()))?;
    let told = group.all_gather_var(&told)?;
    if group.me() != 0 {
        return Ok(None);
    }
    let read = |&rank: &usize| {
        let member = group.ranks().iter().position(|&r| r == rank).unwrap_or(0);
        postcard::from_bytes(&told[member])
            .map_err(|e| Error::Internal(format!("what rank {rank} measured: {e}")))
    };
    let told: Vec<Told> = leaders.iter().map(read).collect::<Result<_>>()?;
    let measured = |&(a, b): &(usize, usize)| {
        let latency_us = told[a].0[b][0];
        let one = |from: usize, to: usize, ahead: f64| Link {
            from,
            to,
            way: told[from].1[to].0.clone(),
            cables: told[from].1[to].1,
            latency_us,
            bytes_per_second: told[to].0[from][1],
            clock_ahead_ms: ahead.round() as i64,
        };
        [one(a, b, told[a].0[b][2]), one(b, a, -told[a].0[b][2])]
    };
    Ok(Some(rounds.iter().flatten().flat_map(measured).collect()))
}

/// One rank's end of every link.
struct Ends<'a> {
    fabric: &'a dyn Fabric,
    effort: Effort,
    /// A word to send, and one that is received.
    words: Buf<u64>,
    data: Buf<u64>,
}

impl<'a> Ends<'a> {
    fn new(fabric: &'a dyn Fabric, effort: Effort) -> Result<Self> {
        let data = Buf::zeros(fabric, effort.bytes / 8 * effort.puts)?;
        Ok(Ends { fabric, effort, words: Buf::zeros(fabric, 2)?, data })
    }

    /// Both directions with `peer`: microseconds of half a round trip, bytes a second that came from it, and milliseconds
    /// that its clock is ahead. Only the `first` of the two knows latency and clocks.
    fn pair(&mut self, peer: usize, first: bool) -> Result<[f64; 3]> {
        let mut best = [f64::INFINITY, 0.0, 0.0];
        for _ in 0..self.effort.times {
            for _ in 0..self.effort.pings {
                if first {
                    let (start, began) = (Instant::now(), wall());
                    self.say(peer)?;
                    let theirs = self.hear(peer)?;
                    let half = start.elapsed().as_secs_f64() / 2.0;
                    if half * 1e6 < best[0] {
                        best[0] = half * 1e6;
                        best[2] = (theirs as f64 - began as f64) / 1e3 - half * 1e3;
                    }
                } else {
                    self.hear(peer)?;
                    self.say(peer)?;
                }
            }
            if first {
                self.send(peer)?;
                best[1] = self.receive(peer)?.max(best[1]);
            } else {
                best[1] = self.receive(peer)?.max(best[1]);
                self.send(peer)?;
            }
        }
        if !first {
            best[0] = 0.0;
        }
        Ok(best)
    }

    /// Tells this host's clock, in microseconds.
    fn say(&mut self, peer: usize) -> Result<()> {
        self.words.write(0..1)[0] = wall();
        self.words.put(self.fabric, LANE, peer, 0..1)?;
        self.words.flush(self.fabric)
    }

    fn hear(&mut self, peer: usize) -> Result<u64> {
        self.words.arm(self.fabric, LANE, peer, 1..2)?;
        let got = self.words.wait(self.fabric, LANE, peer)?;
        Ok(self.words.read(got)[0])
    }

    fn send(&mut self, peer: usize) -> Result<()> {
        self.hear(peer)?; // all is armed there
        let len = self.effort.bytes / 8;
        for i in 0..self.effort.puts {
            self.data.put(self.fabric, LANE, peer, i * len..(i + 1) * len)?;
        }
        self.data.flush(self.fabric)
    }

    /// Bytes a second.
    fn receive(&mut self, peer: usize) -> Result<f64> {
        let len = self.effort.bytes / 8;
        for i in 0..self.effort.puts {
            self.data.arm(self.fabric, LANE, peer, i * len..(i + 1) * len)?;
        }
        // From before the first byte can leave to after the last has come: whatever else this machine does meanwhile, a link
        // is never taken for faster than it is.
        let start = Instant::now();
        self.say(peer)?;
        for _ in 0..self.effort.puts {
            self.data.wait(self.fabric, LANE, peer)?;
        }
        let seconds = start.elapsed().as_secs_f64().max(1e-9);
        Ok((self.effort.bytes * self.effort.puts) as f64 / seconds)
    }
}

/// Microseconds since 1970.
fn wall() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmen::{Setup, World};

    #[test]
    fn every_pair_meets_once_and_nobody_is_in_two_places() {
        for n in 0..20 {
            for (rounds, most) in [(one_by_one(n), n * n), (side_by_side(n), n + n % 2)] {
                let mut pairs: Vec<(usize, usize)> = rounds.iter().flatten().copied().collect();
                for round in &rounds {
                    let mut hosts: Vec<usize> = round.iter().flat_map(|&(a, b)| [a, b]).collect();
                    hosts.sort_unstable();
                    assert!(hosts.windows(2).all(|w| w[0] != w[1]), "{n}: {round:?}");
                }
                assert!(rounds.len() <= most);
                pairs.sort_unstable();
                let all: Vec<_> = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))).collect();
                assert_eq!(pairs, all, "{n}");
            }
        }
    }

    #[test]
    fn links_are_measured_both_ways_by_one_rank_of_each_host() {
        // Ranks 1 and 4 are on hosts that others speak for.
        let leaders = [0, 2, 3];
        let effort = Effort { pings: 3, bytes: 4096, puts: 3, times: 2 };
        for rounds in [one_by_one(3), side_by_side(3)] {
            let measured = World::threads(5, &Setup { threads: 1, ..Setup::default() }, |world| {
                links(&Group::all(world.fabric().clone())?, &leaders, &rounds, &effort)
            });
            let mut measured: Vec<_> = measured.unwrap().into_iter().map(Result::unwrap).collect();
            assert!(measured[1..].iter().all(Option::is_none));
            let links = measured.swap_remove(0).unwrap();
            let mut ends: Vec<_> = links.iter().map(|l| (l.from, l.to)).collect();
            ends.sort_unstable();
            assert_eq!(ends, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]);
            for link in &links {
                assert!(
                    link.bytes_per_second > 0.0 && link.latency_us > 0.0 && link.latency_us.is_finite(),
                    "{link:?}"
                );
                assert!(link.clock_ahead_ms.abs() < 60_000, "one clock: {link:?}");
                assert_eq!(link.way, "mem");
            }
        }
    }
}
