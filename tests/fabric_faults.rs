//! Thousands of seeded schedules with losses over the `mem` fabric: no hang, no wrong bytes accepted,
//! each loss named.

use fulmen::error::Loss;
use fulmen::fabric::mem::{self, Faults, Kill};
use fulmen::fabric::{Buf, Fabric, Lane};
use fulmen::{Error, Result};

/// xorshift64*: a program that all ranks can derive from the seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
    }
}

/// One put of the program.
struct Message {
    from: usize,
    to: usize,
    lane: Lane,
    len: usize,
}

const MOST: usize = 24;

fn word(round: usize, m: usize, i: usize) -> u64 {
    ((round as u64) << 40 | (m as u64) << 20 | i as u64) ^ 0xABCD_EF01_2345_6789
}

/// Rounds of random exchanges; every word that arrives is checked.
fn program(fabric: &dyn Fabric, seed: u64) -> Result<u64> {
    let (n, me) = (fabric.size(), fabric.rank());
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut checked = 0;
    let mut out = Buf::<u64>::zeros(fabric, 16 * MOST)?;
    let mut inn = Buf::<u64>::zeros(fabric, 16 * MOST)?;
    for round in 0..6 {
        fabric.set_activity(&format!("in round {round}"));
        let messages: Vec<Message> = (0..1 + random.below(15))
            .map(|_| {
                let from = random.below(n);
                let to = (from + 1 + random.below(n - 1)) % n;
                Message { from, to, lane: Lane(random.below(4) as u8), len: random.below(MOST) }
            })
            .collect();
        let (late, poll) = (random.below(2) == 1, random.below(3) == 0);
        let arm = |inn: &mut Buf<u64>| -> Result<()> {
            for (m, msg) in messages.iter().enumerate().filter(|(_, msg)| msg.to == me) {
                inn.arm(fabric, msg.lane, msg.from, m * MOST..(m + 1) * MOST)?;
            }
            Ok(())
        };
        if !late {
            arm(&mut inn)?;
        }
        for (m, msg) in messages.iter().enumerate().filter(|(_, msg)| msg.from == me) {
            let range = m * MOST..m * MOST + msg.len;
            for (i, w) in out.write(range.clone()).iter_mut().enumerate() {
                *w = word(round, m, i);
            }
            out.put(fabric, msg.lane, msg.to, range)?;
        }
        if late {
            arm(&mut inn)?;
        }
        for (m, msg) in messages.iter().enumerate().filter(|(_, msg)| msg.to == me) {
            let got = if poll {
                loop {
                    if let Some(got) = inn.try_wait(fabric, msg.lane, msg.from)? {
                        break got;
                    }
                }
            } else {
                inn.wait(fabric, msg.lane, msg.from)?
            };
            assert_eq!(got, m * MOST..m * MOST + msg.len, "seed {seed}, round {round}, message {m}");
            for (i, w) in inn.read(got).iter().enumerate() {
                assert_eq!(*w, word(round, m, i), "seed {seed}, round {round}, message {m}, word {i}");
                checked += 1;
            }
        }
        out.flush(fabric)?;
    }
    Ok(checked)
}

fn run(n: usize, seed: u64, faults: Faults) -> Vec<Result<u64>> {
    let options = mem::Options { faults: Some(faults), ..Default::default() };
    mem::run(n, options, |fabric| program(&*fabric, seed))
}

fn plan(seed: u64) -> (usize, Faults) {
    let n = 2 + (seed % 5) as usize;
    let mut faults = Faults {
        seed,
        delay: (seed % 4) as u32 * 15,
        reorder: !seed.is_multiple_of(3),
        duplicate: 0.05,
        ..Faults::default()
    };
    match seed / 5 % 5 {
        0 => {}
        1 => faults.drop = 0.02,
        2 => faults.corrupt = 0.02,
        3 => faults.kill = Some(Kill { rank: (seed / 25) as usize % n, at: seed / 25 % 40 }),
        _ => {
            faults.drop = 0.01;
            faults.corrupt = 0.01;
            faults.kill = Some(Kill { rank: (seed / 25) as usize % n, at: seed / 25 % 80 });
        }
    }
    (n, faults)
}

/// That what the ranks say names the loss.
fn judge(seed: u64, n: usize, faults: &Faults, results: &[Result<u64>]) {
    let errors: Vec<(usize, &Error)> =
        results.iter().enumerate().filter_map(|(rank, r)| r.as_ref().err().map(|e| (rank, e))).collect();
    let said = format!("seed {seed}, {n} ranks, {faults:?}: {results:?}");
    let harmful = faults.drop > 0.0 || faults.corrupt > 0.0 || faults.kill.is_some();
    assert!(errors.is_empty() || harmful, "{said}");

    let killed = |e: &Error| matches!(e, Error::Aborted { reason, .. } if reason.contains("as planned"));
    let victim = errors.iter().find(|(_, e)| killed(e)).map(|(rank, _)| *rank);
    if let Some(victim) = victim {
        assert_eq!(Some(victim), faults.kill.map(|k| k.rank), "{said}");
    }
    // Whoever found the loss says so in full; the others point to it.
    let finder = errors.iter().find(|(_, e)| match e {
        Error::Corrupt { .. } => true,
        Error::PeerLost { loss, .. } => *loss != Loss::Gone || victim.is_none(),
        _ => false,
    });
    for (rank, e) in &errors {
        let text = e.to_string();
        match e {
            _ if killed(e) => {}
            Error::PeerLost { rank: lost, by, loss: Loss::Gone, waiting_for, .. }
                if victim == Some(*lost) =>
            {
                assert_eq!(by, rank, "{said}");
                assert!(waiting_for.is_empty() || waiting_for.starts_with("in round"), "{said}");
            }
            Error::PeerLost { rank: owing, by, waiting_for, .. } => {
                assert!(by == rank && owing != rank, "{said}");
                assert!(waiting_for.starts_with("in round"), "{said}");
                assert!(waiting_for.contains("put ") && waiting_for.contains(" lane"), "{said}");
            }
            Error::Corrupt { what, rank: from, by, .. } => {
                assert!(by == rank && from != rank, "{said}");
                assert!(what.contains("put ") && what.contains(" lane"), "{said}");
            }
            Error::Aborted { by, reason } => {
                let (finder, error) = finder.unwrap_or_else(|| panic!("nobody found it: {said}"));
                assert!(by == finder && *reason == error.to_string(), "{said}");
            }
            _ => panic!("rank {rank}: {text}: {said}"),
        }
    }
}

#[test]
fn two_thousand_schedules_with_losses() {
    let mut ends = [0; 2];
    for seed in 0..2000 {
        let (n, faults) = plan(seed);
        let results = run(n, seed, faults);
        judge(seed, n, &faults, &results);
        ends[usize::from(results.iter().all(Result::is_ok))] += 1;
    }
    // The test must have tested something: both good ends and bad ones.
    assert!(ends[0] > 500 && ends[1] > 500, "{ends:?}");
}

#[test]
fn a_seed_meets_the_same_faults_again() {
    for seed in 0..150 {
        let (n, faults) = plan(seed);
        let (once, again) = (run(n, seed, faults), run(n, seed, faults));
        assert_eq!(format!("{once:?}"), format!("{again:?}"), "seed {seed}");
    }
}

#[test]
fn a_certain_loss_is_always_found() {
    for seed in 0..60 {
        for faults in [
            Faults { seed, drop: 1.0, ..Faults::default() },
            Faults { seed, corrupt: 1.0, ..Faults::default() },
            Faults { seed, kill: Some(Kill { rank: 1, at: 1 }), ..Faults::default() },
        ] {
            let results = run(3, seed, faults);
            judge(seed, 3, &faults, &results);
            assert!(results.iter().any(Result::is_err), "seed {seed}, {faults:?}");
        }
    }
}

/// A program that waits for what nobody puts is told so, on the spot.
#[test]
fn a_deadlock_is_a_loss_too() {
    let options = mem::Options { faults: Some(Faults::harmless(1)), ..Default::default() };
    let results = mem::run(3, options, |fabric| {
        let next = (fabric.rank() + 1) % 3;
        let mut buf = Buf::<u8>::zeros(&*fabric, 1)?;
        fabric.set_activity("at the ring");
        buf.arm(&*fabric, Lane::ROWS, next, 0..1)?;
        buf.wait(&*fabric, Lane::ROWS, next)
    });
    assert!(
        matches!(&results[0], Err(Error::PeerLost { rank: 1, by: 0, loss: Loss::Slow, waiting_for, .. })
            if waiting_for == "at the ring, put 0 on the rows lane"),
        "{results:?}"
    );
    for rank in [1, 2] {
        assert!(matches!(&results[rank], Err(Error::Aborted { by: 0, .. })), "{results:?}");
    }
}
