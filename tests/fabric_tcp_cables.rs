//! The `tcp` fabric where only some ranks are connected, as hosts without a switch are: chains and rings.

mod conformance;
mod ranks;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fulmen::comm::{BcastLane, Group, PanelBcast, Topology};
use fulmen::fabric::rendezvous::{Rendezvous, Secret, in_process};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane, Memory, Ticket, tcp};
use fulmen::{Error, Result};

/// Ranks are cabled in this order, and the last to the first if it is a ring.
#[derive(Clone, Copy, Debug)]
struct Cabling {
    order: &'static [usize],
    ring: bool,
}

impl Cabling {
    fn reach(self) -> Vec<Vec<bool>> {
        let n = self.order.len();
        let mut reach = vec![vec![false; n]; n];
        let ends = (0..n - 1).map(|i| (i, i + 1)).chain(self.ring.then_some((n - 1, 0)));
        for (a, b) in ends.map(|(a, b)| (self.order[a], self.order[b])) {
            reach[a.max(b)][a.min(b)] = true;
        }
        reach
    }
}

/// Nobody is to be found silent, however busy the machine is.
fn bounds() -> Bounds {
    Bounds { silence: Duration::from_secs(20), patience: Duration::from_secs(60) }
}

fn threads<R: Send>(
    cabling: Cabling,
    connections: usize,
    work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let reach = Some(cabling.reach());
    let options = tcp::Options { bounds: bounds(), connections, reach, ..tcp::Options::default() };
    ranks::threads(cabling.order.len(), |rendezvous, secret| tcp::connect(rendezvous, secret, &options), work)
}

/// The first ranks of a fabric, for programs of fewer ranks: the others only pass on.
struct First(Arc<dyn Fabric>, usize);

impl Fabric for First {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.1
    }
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn host(&self, rank: usize) -> String {
        self.0.host(rank)
    }
    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        self.0.alloc(bytes)
    }
    fn arm(&self, lane: Lane, from: usize, mem: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        self.0.arm(lane, from, mem, range)
    }
    fn put(&self, lane: Lane, to: usize, mem: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        self.0.put(lane, to, mem, range)
    }
    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        self.0.try_wait(lane, from, arm)
    }
    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        self.0.wait(lane, from, arm)
    }
    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        self.0.is_done(ticket)
    }
    fn flush(&self, ticket: Ticket) -> Result<()> {
        self.0.flush(ticket)
    }
    fn poll(&self) -> Result<()> {
        self.0.poll()
    }
    fn set_activity(&self, what: &str) {
        self.0.set_activity(what);
    }
    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
    fn fail(&self, error: &Error) {
        self.0.fail(error);
    }
}

/// Every case: those of two ranks with one or two others in between, which compute (call nothing) meanwhile.
#[test]
fn conformance_over_chains_and_rings() {
    let mut relayed = 0;
    for case in conformance::CASES {
        let cablings: &[(&[usize], bool)] = match case.ranks {
            // Whom that case means by a rank that there is not would be there.
            2 if case.name == "no_such_rank" => continue,
            2 => &[(&[0, 2, 3, 1], false), (&[0, 2, 1, 3], true), (&[0, 2, 1], false)],
            3 => &[(&[1, 0, 2], false)],
            4 => &[(&[2, 0, 3, 1], false), (&[0, 1, 2, 3], true)],
            6 => &[(&[0, 1, 2, 3, 4, 5], false), (&[0, 3, 1, 5, 2, 4], true)],
            _ => continue,
        };
        for &(order, ring) in cablings {
            let cabling = Cabling { order, ring };
            let results = threads(cabling, 1 + relayed % 2, |fabric| {
                if fabric.rank() >= case.ranks {
                    return Ok(()); // and leaves: it still passes on
                }
                assert!(case.ranks > 2 || fabric.hops(1 - fabric.rank()) > 1);
                let fabric: Arc<dyn Fabric> = Arc::new(First(fabric, case.ranks));
                case.run(&fabric)
            });
            for (rank, result) in results.iter().enumerate().take(case.ranks) {
                case.judge(rank, result);
            }
            // Who only passes on ends as the job does.
            let ends_well = results.iter().all(Result::is_ok);
            assert!(ends_well || !case.ends_well(), "{}: {results:?}", case.name);
            relayed += 1;
        }
    }
    assert!(relayed > 60, "{relayed}");
}

const CHAIN: Cabling = Cabling { order: &[0, 1, 2, 3], ring: false };

/// How far everyone is, and which way is taken, is the same on all ranks and told.
#[test]
fn hops_and_links_are_told() {
    let ring = Cabling { order: &[0, 1, 2, 3, 4], ring: true };
    for (cabling, expected) in
        [(CHAIN, vec![[0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1], [3, 2, 1, 0]]), (ring, vec![])]
    {
        let told = threads(cabling, 1, |fabric| {
            let me = fabric.rank();
            let others = (0..fabric.size()).map(|r| if r == me { 0 } else { fabric.hops(r) });
            Ok((others.collect::<Vec<_>>(), (0..fabric.size()).map(|r| fabric.link(r)).collect::<Vec<_>>()))
        });
        let (hops, links): (Vec<_>, Vec<_>) = told.into_iter().map(Result::unwrap).unzip();
        for a in 0..hops.len() {
            for b in 0..hops.len() {
                assert_eq!(hops[a][b], hops[b][a]);
                if cabling.ring {
                    assert_eq!(hops[a][b], a.abs_diff(b).min(5 - a.abs_diff(b)));
                } else {
                    assert_eq!(hops[a][b], expected[a][b]);
                }
            }
        }
        if !cabling.ring {
            assert!(
                links[0][3].starts_with("tcp through rank 1 (") && links[0][3].contains(") and rank 2 ("),
                "{links:?}"
            );
            assert!(links[0][1].contains("tcp over lo"), "{links:?}");
        }
    }
}

/// Long puts from one end of a chain to the other while those in between compute without a call.
#[test]
fn relays_that_compute_pass_on() {
    const LEN: usize = 3 << 20;
    let (over, start) = (AtomicUsize::new(0), Instant::now());
    let results = threads(CHAIN, 1, |fabric| {
        let me = fabric.rank();
        if me == 1 || me == 2 {
            while over.load(Ordering::Relaxed) < 2 {
                assert!(start.elapsed() < Duration::from_secs(120), "nothing goes through rank {me}");
                std::thread::sleep(Duration::from_millis(10)); // "computes"
            }
            return Ok(());
        }
        let mut buf = Buf::<u64>::zeros(&*fabric, 2 * LEN)?;
        let other = 3 - me;
        for step in 0..3 {
            buf.arm(&*fabric, Lane::PANEL, other, LEN..2 * LEN)?;
            buf.write(0..LEN).fill(step << 8 | me as u64);
            buf.put(&*fabric, Lane::PANEL, other, 0..LEN)?;
            buf.wait(&*fabric, Lane::PANEL, other)?;
            buf.flush(&*fabric)?;
            assert!(buf.read(LEN..2 * LEN).iter().all(|w| *w == step << 8 | other as u64));
        }
        over.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

/// A rank that has left stays for as long as others work, in its sight or not, and gives up one that neither works nor leaves.
#[test]
fn who_neither_works_nor_leaves_is_named() {
    // All pauses together are longer than the patience, each much shorter: a busy machine may add some seconds.
    const PATIENCE: Duration = Duration::from_secs(4);
    const PAUSE: Duration = Duration::from_millis(400);
    let rank = |fabric: Arc<dyn Fabric>| {
        let me = fabric.rank();
        if me == 0 {
            return Ok(()); // it passes on, or has nothing more to do with the others
        }
        let mut buf = Buf::<u64>::zeros(&*fabric, 2)?;
        for _ in 0..12 {
            let other = 3 - me;
            buf.arm(&*fabric, Lane::PANEL, other, 1..2)?;
            buf.put(&*fabric, Lane::PANEL, other, 0..1)?;
            buf.wait(&*fabric, Lane::PANEL, other)?;
            buf.flush(&*fabric)?;
            std::thread::sleep(PAUSE);
        }
        if me == 1 {
            // Stuck. A call is work: after one that came too early the others are patient anew.
            let given_up = (0..5).find_map(|_| {
                std::thread::sleep(PATIENCE + Duration::from_secs(1));
                fabric.poll().err()
            });
            let error = given_up.expect("nobody gives up rank 1").to_string();
            let loss = "lives but sent nothing for ";
            assert!(error.contains("rank 1 (") && error.contains(loss), "{error}");
            assert!(error.contains("while leaving the job"), "{error}");
        }
        Ok(())
    };
    let job = |order: &'static [usize]| {
        let reach = Some(Cabling { order, ring: false }.reach());
        let bounds = Bounds { patience: PATIENCE, ..bounds() };
        let options = tcp::Options { bounds, reach, ..tcp::Options::default() };
        let connect =
            |rendezvous: &mut dyn Rendezvous, secret: Secret| tcp::connect(rendezvous, secret, &options);
        ranks::threads(3, connect, rank).into_iter().for_each(Result::unwrap);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| job(&[1, 0, 2]));
        job(&[0, 1, 2]);
    });
}

/// Panels from every root in turn, several under way, along the cables: everyone gets each, and a root is not
/// the only one to send.
#[test]
fn panels_follow_the_cables() {
    const LEN: usize = 100_000;
    let ring = Cabling { order: &[0, 2, 1, 3, 4], ring: true };
    for cabling in [CHAIN, ring] {
        let results = threads(cabling, 1, |fabric| {
            let group = Group::all(Arc::clone(&fabric))?;
            let lane = BcastLane::along_cables(&group)?;
            let panel = || PanelBcast::<u64>::new(&lane, Topology::Cables, 64 << 10, LEN);
            let mut panels = [panel()?, panel()?];
            let word = |k: usize, i: usize| (k as u64) << 32 | i as u64;
            for k in 0..12 {
                let (root, panel) = (k * 3 % group.len(), &mut panels[k % 2]);
                panel.start(root, 0..LEN)?;
                if group.me() == root {
                    for (i, w) in panel.data_mut(0..LEN).iter_mut().enumerate() {
                        *w = word(k, i);
                    }
                    panel.send()?;
                }
                if let Some(last) = k.checked_sub(1) {
                    panels[last % 2].finish()?;
                    let got = panels[last % 2].data(0..LEN);
                    assert!(got.iter().enumerate().all(|(i, w)| *w == word(last, i)), "panel {last}");
                }
            }
            panels[1].finish()?;
            panels.iter_mut().try_for_each(PanelBcast::flush)
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

/// The graph is not connected: every rank is told of all islands before work starts.
#[test]
fn islands_are_named() {
    let mut reach = CHAIN.reach();
    reach[2][1] = false;
    let secret = Secret::random().unwrap();
    std::thread::scope(|scope| {
        for mut rendezvous in in_process(4) {
            let (secret, reach) = (secret.clone(), Some(reach.clone()));
            scope.spawn(move || {
                let options = tcp::Options { bounds: bounds(), reach, ..tcp::Options::default() };
                let e = tcp::connect(&mut rendezvous, secret, &options).err().expect("two islands");
                let text = e.to_string();
                assert_eq!(e.exit_code(), 4, "{text}");
                let islands: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
                assert!(islands[0].contains("0 (") && islands[0].contains(", 1 ("), "{text}");
                assert!(islands[1].contains("2 (") && islands[1].contains(", 3 ("), "{text}");
                assert_eq!(text.lines().filter(|line| line.starts_with("rank ")).count(), 4, "{text}");
            });
        }
    });
}

/// What a rank in between fails with reaches those on both sides.
#[test]
fn a_failure_in_the_middle_reaches_both_ends() {
    let results = threads(CHAIN, 1, |fabric| {
        let me = fabric.rank();
        if me == 1 {
            return Err(Error::Internal("rank 1 has had enough".into()));
        }
        let mut buf = Buf::<u64>::zeros(&*fabric, 1)?;
        let from = if me == 0 { 3 } else { 0 };
        buf.arm(&*fabric, Lane::BULK, from, 0..1)?;
        buf.wait(&*fabric, Lane::BULK, from).map(|_| ())
    });
    for rank in [0, 2, 3] {
        let end = &results[rank];
        assert!(
            matches!(end, Err(Error::Aborted { by: 1, reason }) if reason.contains("had enough")),
            "{end:?}"
        );
    }
}
