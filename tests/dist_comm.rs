//! Collectives, panel broadcasts and exchanges over the `mem` fabric.

use std::sync::Arc;

use fulmen::Result;
use fulmen::comm::{AllToAllSmall, BcastLane, Group, PanelBcast, Topology};
use fulmen::fabric::{Fabric, Lane, mem};

/// Runs `work` on `n` ranks and expects all to succeed.
fn on<R: Send>(n: usize, work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync) -> Vec<R> {
    mem::run(n, mem::Options::default(), work).into_iter().map(|r| r.unwrap()).collect()
}

/// A number that only this (rank, index) has.
fn mark(rank: usize, i: usize) -> u64 {
    (rank * 1_000_003 + i) as u64
}

#[test]
fn gathers_bring_every_part_to_its_place() {
    for n in 1..=6 {
        on(n, |fabric| {
            let group = Group::all(fabric)?;
            let me = group.me();
            for len in [0, 1, 7, 3000] {
                let mine: Vec<u64> = (0..len).map(|i| mark(me, i)).collect();
                let expected: Vec<u64> = (0..n).flat_map(|r| (0..len).map(move |i| mark(r, i))).collect();
                let mut all = vec![0; n * len];
                group.all_gather(&mine, &mut all)?;
                assert_eq!(all, expected);
                for root in 0..n {
                    let gathered = group.gather(root, &mine)?;
                    assert_eq!(gathered, (me == root).then(|| expected.clone()));
                    let mut data = if me == root { mine.clone() } else { vec![0; len] };
                    group.bcast(root, &mut data)?;
                    assert_eq!(data, (0..len).map(|i| mark(root, i)).collect::<Vec<_>>());
                }
            }
            // Parts of all lengths, some empty.
            let mine: Vec<u64> = (0..me * me % 5 * 10).map(|i| mark(me, i)).collect();
            for (r, part) in group.all_gather_var(&mine)?.into_iter().enumerate() {
                assert_eq!(part, (0..r * r % 5 * 10).map(|i| mark(r, i)).collect::<Vec<_>>());
            }
            Ok(())
        });
    }
}

#[test]
fn sums_are_taken_in_rank_order_and_are_the_same_bits_everywhere() {
    let value =
        |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1009) as f64 / 1009.0 + 1e-9 * rank as f64;
    for n in 1..=7 {
        for len in [0, 1, 5, 3000, 20_000] {
            let expected: Vec<f64> =
                (0..len).map(|i| (1..n).fold(value(0, i), |sum, rank| sum + value(rank, i))).collect();
            let results = on(n, |fabric| {
                let group = Group::all(fabric)?;
                let mut data: Vec<f64> = (0..len).map(|i| value(group.me(), i)).collect();
                group.all_sum(&mut data)?;
                let mut largest: Vec<f64> = (0..len).map(|i| value(group.me(), i)).collect();
                group.all_max(&mut largest)?;
                assert!((0..len).all(|i| largest[i] == (0..n).map(|r| value(r, i)).fold(0.0, f64::max)));
                Ok(data)
            });
            for data in results {
                assert!(
                    data.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{n} ranks, {len}"
                );
            }
        }
    }
}

#[test]
fn a_nan_on_one_rank_is_everyones_maximum() {
    on(3, |fabric| {
        let group = Group::all(fabric)?;
        let mut x = [if group.me() == 1 { f64::NAN } else { 5.0 }];
        group.all_max(&mut x)?;
        assert!(x[0].is_nan());
        Ok(())
    });
}

#[test]
fn nobody_leaves_a_barrier_before_the_last_has_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for n in 1..=7 {
        let arrived = AtomicUsize::new(0);
        on(n, |fabric| {
            let group = Group::all(fabric)?;
            for round in 1..=30 {
                if (group.me() + round) % 3 == 0 {
                    std::thread::yield_now();
                }
                arrived.fetch_add(1, Ordering::SeqCst);
                group.barrier()?;
                assert!(arrived.load(Ordering::SeqCst) >= n * round);
            }
            Ok(())
        });
    }
}

#[test]
fn a_group_is_an_ordered_subset() {
    on(5, |fabric| {
        let me = fabric.rank();
        if me % 2 == 1 {
            assert!(Group::new(fabric, vec![0, 2, 4]).unwrap_err().to_string().contains("not in it"));
            return Ok(());
        }
        let named = |ranks: Vec<usize>| Group::new(Arc::clone(&fabric), ranks).unwrap_err().to_string();
        assert!(named(vec![me, me]).starts_with(&format!("group: {me}: is named twice")));
        assert!(named(vec![me, 9]).starts_with("group: 9: is not a rank"));
        let group = Group::new(Arc::clone(&fabric), vec![4, 0, 2])?;
        assert_eq!(group.ranks()[group.me()], me);
        let mut all = vec![0; 3];
        group.all_gather(&[me as u64], &mut all)?;
        assert_eq!(all, [4, 0, 2]);
        Ok(())
    });
}

#[test]
fn one_broadcast_delivers_for_every_shape_size_and_root() {
    const CHUNK: usize = 64; // bytes: 8 elements
    for topology in Topology::ALL {
        for n in 1..=7 {
            on(n, |fabric| {
                let group = Group::all(fabric)?;
                let lane = BcastLane::new(&group);
                let mut panel = PanelBcast::<u64>::new(&lane, topology, CHUNK, 100)?;
                for root in 0..n {
                    for len in [0, 1, 5, 8, 9, 63, 97] {
                        let range = 3..3 + len;
                        panel.start(root, range.clone())?;
                        if group.me() == root {
                            for (i, x) in panel.data_mut(range.clone()).iter_mut().enumerate() {
                                *x = mark(root, i + len);
                            }
                            panel.send()?;
                        }
                        panel.finish()?;
                        assert!(
                            panel.data(range).iter().enumerate().all(|(i, &x)| x == mark(root, i + len)),
                            "{topology} from {root} of {n}, {len} elements"
                        );
                    }
                }
                panel.flush()
            });
        }
    }
}

/// The LU driver's pattern: panels k+1 … k+depth are under way while panel k is in use, each root
/// sends only when it has the panel before, and everyone polls at odd moments.
#[test]
fn broadcasts_overlap_in_program_order() {
    for topology in Topology::ALL {
        for n in [2, 3, 4, 5] {
            for depth in 0..=2 {
                on(n, |fabric| {
                    let group = Group::all(fabric)?;
                    let lane = BcastLane::new(&group);
                    let mut ring = (0..=depth)
                        .map(|_| PanelBcast::<u64>::new(&lane, topology, 256, 300))
                        .collect::<Result<Vec<_>>>()?;
                    let steps = 14;
                    let len = |k: usize| 300 - 21 * k;
                    let start = |panel: &mut PanelBcast<u64>, k: usize| -> Result<()> {
                        panel.start(k % n, 0..len(k))?;
                        if group.me() == k % n {
                            let data = panel.data_mut(0..len(k));
                            data.iter_mut().enumerate().for_each(|(i, x)| *x = mark(k, i));
                            panel.send()?;
                        }
                        Ok(())
                    };
                    for k in 0..depth {
                        start(&mut ring[k % (depth + 1)], k)?;
                    }
                    for k in 0..steps {
                        if k + depth < steps {
                            start(&mut ring[(k + depth) % (depth + 1)], k + depth)?;
                        }
                        for turn in 0..(group.me() + k) % 4 {
                            ring[(k + turn) % (depth + 1)].poll()?;
                        }
                        let panel = &mut ring[k % (depth + 1)];
                        panel.finish()?;
                        assert!(panel.data(0..len(k)).iter().enumerate().all(|(i, &x)| x == mark(k, i)));
                    }
                    ring.iter_mut().try_for_each(|panel| panel.flush())
                });
            }
        }
    }
}

#[test]
fn misuse_of_a_broadcast_is_an_error_and_not_a_hang() {
    on(2, |fabric| {
        let group = Group::all(fabric)?;
        let lane = BcastLane::new(&group);
        let mut first = PanelBcast::<f64>::new(&lane, Topology::Ring, 64, 10)?;
        let mut second = PanelBcast::<f64>::new(&lane, Topology::Ring, 64, 10)?;
        first.start(0, 0..10)?;
        second.start(0, 0..10)?;
        if group.me() == 0 {
            assert!(first.finish().unwrap_err().to_string().contains("without sending"));
            second.send()?;
            assert!(second.finish().unwrap_err().to_string().contains("order started"));
            first.send()?;
        } else {
            assert!(first.send().unwrap_err().to_string().contains("not the root"));
            assert!(second.finish().unwrap_err().to_string().contains("order started"));
            assert!(first.start(0, 0..10).unwrap_err().to_string().contains("before its last"));
        }
        first.finish()?;
        second.finish()?;
        first.flush()?;
        second.flush()
    });
}

#[test]
fn every_member_hears_every_message_of_every_round() {
    for n in 1..=7 {
        for rounds in [0, 1, 2, 3, 40] {
            on(n, |fabric| {
                let group = Group::all(fabric)?;
                // Twice on one lane: the first must leave nothing armed.
                for pass in 0..2 {
                    let mut exchange = AllToAllSmall::<u64>::new(&group, Lane::PIVOT, 9)?;
                    for round in 0..rounds {
                        let len = |member: usize| (member + round) % 10;
                        let message: Vec<u64> =
                            (0..len(group.me())).map(|i| mark(group.me(), 100 * round + i + pass)).collect();
                        exchange.post(&message)?;
                        let messages = exchange.collect()?;
                        assert_eq!(messages.iter().count(), n);
                        for member in 0..n {
                            let expected = (0..len(member)).map(|i| mark(member, 100 * round + i + pass));
                            assert!(messages.from(member).iter().copied().eq(expected));
                        }
                        if (round + group.me()) % 5 == 0 {
                            std::thread::yield_now();
                        }
                    }
                    exchange.finish()?;
                }
                Ok(())
            });
        }
    }
}

/// Messages longer than a short put, as a panel's rows are, come whole.
#[test]
fn long_messages_travel_in_pieces() {
    const LEN: usize = 1400;
    on(3, |fabric| {
        let group = Group::all(fabric)?;
        let mut exchange = AllToAllSmall::<u64>::new(&group, Lane::PIVOT, LEN)?;
        for round in 0..20 {
            let len = |member: usize| [0, 1, 499, 500, 501, 1000, 1001, LEN][(3 * member + round) % 8];
            let message = |member: usize| (0..len(member)).map(move |i| mark(member, 2000 * round + i));
            exchange.post(&message(group.me()).collect::<Vec<_>>())?;
            let messages = exchange.collect()?;
            assert!((0..3).all(|member| messages.from(member).iter().copied().eq(message(member))));
        }
        exchange.finish()
    });
}

#[test]
fn groups_that_share_ranks_keep_their_messages_apart() {
    on(6, |fabric| {
        let me = fabric.rank();
        let (p, q) = (me / 3, me % 3);
        let all = Group::all(Arc::clone(&fabric))?;
        let row = Group::new(Arc::clone(&fabric), (0..3).map(|q| p * 3 + q).collect())?;
        let col = Group::new(Arc::clone(&fabric), (0..2).map(|p| p * 3 + q).collect())?;
        for round in 0..20 {
            let mut x = [me as u64 + round];
            row.all_sum(&mut x)?;
            assert_eq!(x[0], (3 * p as u64 * 3 + 3) + 3 * round);
            col.all_sum(&mut x)?;
            assert_eq!(x[0], 15 + 6 * round);
            all.barrier()?;
        }
        Ok(())
    });
}

/// All ranks of a job, to be driven by one thread: then every interleaving can be chosen.
fn by_hand(n: usize) -> Vec<Group> {
    let job = mem::Job::new(n, &mem::Options::default()).unwrap();
    job.build().into_iter().map(|fabric| Group::all(fabric).unwrap()).collect()
}

#[test]
fn the_middle_of_a_chain_passes_on_what_it_has() {
    // More chunks than a stream holds: the last cannot arrive before the root polls again.
    let (chunks, len) = (100, 8 * 100);
    let mut panels: Vec<_> = by_hand(3)
        .iter()
        .map(|group| PanelBcast::<u64>::new(&BcastLane::new(group), Topology::Ring, 64, len).unwrap())
        .collect();
    panels.iter_mut().for_each(|panel| panel.start(0, 0..len).unwrap());
    panels[0].data_mut(0..len).iter_mut().enumerate().for_each(|(i, x)| *x = mark(0, i));
    panels[0].send().unwrap();
    assert!(!panels[1].poll().unwrap(), "all {chunks} chunks came at once: the test shows nothing");
    assert!(!panels[2].poll().unwrap());
    // The end of the chain has its first chunk while the middle lacks its last.
    assert_eq!(panels[2].data(0..8), (0..8).map(|i| mark(0, i)).collect::<Vec<_>>());
    while !panels.iter_mut().fold(true, |all, panel| panel.poll().unwrap() & all) {}
    for mut panel in panels {
        panel.finish().unwrap();
        assert!(panel.data(0..len).iter().enumerate().all(|(i, &x)| x == mark(0, i)));
    }
}

mod schedules {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Ranks advance in any order, each polling any of its panels at any moment: with nobody ever
        /// waiting, every broadcast is delivered whole, and in few enough steps.
        #[test]
        fn any_interleaving_of_ranks_and_panels_delivers(
            n in 1usize..7,
            topology in 0usize..7,
            depth in 0usize..3,
            lens in prop::collection::vec(0usize..60, 1..9),
            roots in prop::collection::vec(0usize..7, 9),
            seed in any::<u64>(),
        ) {
            let topology = Topology::ALL[topology];
            let slots = depth + 1;
            struct Rank {
                me: usize,
                panels: Vec<PanelBcast<u64>>,
                started: usize,
                sent: Vec<bool>,
                done: usize,
            }
            let mut ranks: Vec<Rank> = by_hand(n)
                .iter()
                .map(|group| {
                    let lane = BcastLane::new(group);
                    let panel = || PanelBcast::new(&lane, topology, 64, 64).unwrap();
                    let panels = (0..slots).map(|_| panel()).collect();
                    Rank { me: group.me(), panels, started: 0, sent: vec![false; lens.len()], done: 0 }
                })
                .collect();
            let root = |k: usize| roots[k] % n;
            let mut state = seed | 1;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below
            };
            let mut steps = 0;
            while ranks.iter().any(|r| r.done < lens.len()) {
                steps += 1;
                prop_assert!(steps < 20_000, "{topology}: no end");
                let r = &mut ranks[random(n)];
                match random(4) {
                    0 if r.started < lens.len() && r.started < r.done + slots => {
                        let k = r.started;
                        // `start` waits for what its buffer sent before: here nobody may wait.
                        if k < slots || r.panels[k % slots].is_flushed().unwrap() {
                            r.panels[k % slots].start(root(k), 0..lens[k]).unwrap();
                            r.started += 1;
                        }
                    }
                    1 => {
                        // The root sends any started panel of its own, in whatever order.
                        let open: Vec<_> =
                            (r.done..r.started).filter(|&k| root(k) == r.me && !r.sent[k]).collect();
                        if !open.is_empty() {
                            let k = open[random(open.len())];
                            let panel = &mut r.panels[k % slots];
                            panel.data_mut(0..lens[k]).iter_mut().enumerate().for_each(|(i, x)| *x = mark(k, i));
                            panel.send().unwrap();
                            r.sent[k] = true;
                        }
                    }
                    2 if r.started > r.done => {
                        let k = r.done + random(r.started - r.done);
                        r.panels[k % slots].poll().unwrap();
                    }
                    _ if r.started > r.done => {
                        let k = r.done;
                        if r.panels[k % slots].poll().unwrap() {
                            r.panels[k % slots].finish().unwrap();
                            let data = r.panels[k % slots].data(0..lens[k]);
                            prop_assert!(data.iter().enumerate().all(|(i, &x)| x == mark(k, i)));
                            r.done += 1;
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

/// A rank fails in the middle: the others learn of it wherever they are, and nobody hangs or panics, not even
/// when they try again.
#[test]
fn a_lost_rank_ends_every_collective_of_the_others() {
    type Step = fn(&Group) -> Result<()>;
    let steps: [Step; 7] = [
        |group| group.barrier(),
        |group| group.all_gather(&[1u8], &mut vec![0; group.len()]),
        |group| group.all_sum(&mut vec![1.0; 10_000]),
        |group| group.bcast(2, &mut [1u32; 5]),
        |group| group.gather(0, &[1u64; 5]).map(drop).and_then(|()| group.barrier()),
        |group| {
            let mut exchange = AllToAllSmall::<f64>::new(group, Lane::PIVOT, 3)?;
            loop {
                exchange.post(&[1.0])?;
                if exchange.collect().is_err() {
                    exchange.post(&[1.0])?;
                }
            }
        },
        |group| {
            let mut panel = PanelBcast::<f64>::new(&BcastLane::new(group), Topology::Long, 64, 99)?;
            panel.start(2, 0..99)?;
            if panel.finish().is_err() {
                panel.start(2, 0..99)?;
            }
            Ok(())
        },
    ];
    for step in steps {
        let results = mem::run(3, mem::Options::default(), |fabric| {
            let group = Group::all(fabric)?;
            group.barrier()?;
            if group.me() == 2 {
                return Err(fulmen::Error::argument("A", "x", "is bad", "give a good one"));
            }
            step(&group).and_then(|()| step(&group))
        });
        for rank in 0..2 {
            let text = results[rank].as_ref().unwrap_err().to_string();
            let told = text.contains("rank 2 ended the job") && text.contains("A: x: is bad");
            assert!(told || text.contains("before its last was finished"), "{text}");
        }
    }
}
