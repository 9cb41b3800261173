//! What every transport must do, as SPMD programs over [`Fabric`].
//!
//! A transport's test runs each of [`CASES`] on its own ranks (threads, processes, hosts) and asks
//! [`Case::judge`] about the result of every rank.

use std::sync::Arc;

use fulmen::error::Loss;
use fulmen::fabric::{Buf, Fabric, Lane};
use fulmen::{Error, Result};

/// One program and what must come of it.
pub struct Case {
    /// Its name, to be found by a process that is to run it.
    pub name: &'static str,
    /// On how many ranks.
    pub ranks: usize,
    run: fn(&dyn Fabric) -> Result<()>,
    /// `None`: every rank succeeds. Otherwise what must come of each rank.
    ends: Option<fn(usize, &Result<()>) -> bool>,
}

impl Case {
    /// Runs this rank's part.
    pub fn run(&self, fabric: &Arc<dyn Fabric>) -> Result<()> {
        assert_eq!(fabric.size(), self.ranks);
        (self.run)(&**fabric)
    }

    /// Whether every rank is to succeed.
    pub fn ends_well(&self) -> bool {
        self.ends.is_none()
    }

    /// Whether `result` is what it must be on `rank`.
    pub fn is_right(&self, rank: usize, result: &Result<()>) -> bool {
        self.ends.map_or(result.is_ok(), |right| right(rank, result))
    }

    /// Panics when `result` is not what it must be on `rank`.
    pub fn judge(&self, rank: usize, result: &Result<()>) {
        assert!(self.is_right(rank, result), "{}: rank {rank}: wrong end: {result:?}", self.name);
    }
}

const fn good(name: &'static str, ranks: usize, run: fn(&dyn Fabric) -> Result<()>) -> Case {
    Case { name, ranks, run, ends: None }
}

const fn bad(
    name: &'static str,
    ranks: usize,
    run: fn(&dyn Fabric) -> Result<()>,
    right: fn(usize, &Result<()>) -> bool,
) -> Case {
    Case { name, ranks, run, ends: Some(right) }
}

/// The suite.
pub const CASES: &[Case] = &[
    good("alone", 1, alone),
    good("memory", 2, memory),
    good("one_put", 2, one_put),
    good("order_on_a_lane", 2, order_on_a_lane),
    good("lanes_are_independent", 2, lanes_are_independent),
    good("put_before_arm", 2, put_before_arm),
    good("arm_before_put", 2, arm_before_put),
    good("shorter_and_empty_puts", 2, shorter_and_empty_puts),
    good("more_arms_than_slots", 2, more_arms_than_slots),
    good("more_puts_than_slots", 2, more_puts_than_slots),
    good("puts_both_ways_at_once", 2, puts_both_ways_at_once),
    good("source_is_free_after_flush", 2, source_is_free_after_flush),
    good("puts_outlive_their_rank", 2, puts_outlive_their_rank),
    good("big", 2, big),
    good("everybody_to_everybody", 6, everybody_to_everybody),
    good("a_message_per_column", 3, a_message_per_column),
    good("poll_and_try_wait", 2, poll_and_try_wait),
    good("waits_in_order_of_arms", 2, waits_in_order_of_arms),
    bad("too_long_for_the_armed_range", 2, too_long, |_, e| names_too_long(e)),
    bad("too_long_for_the_arming", 2, too_long_armed_late, |_, e| names_too_long(e)),
    bad("put_to_itself", 2, put_to_itself, |rank, e| own_fault(0, rank, e)),
    bad("arm_for_itself", 2, arm_for_itself, |rank, e| own_fault(0, rank, e)),
    bad("no_such_rank", 2, no_such_rank, |rank, e| own_fault(0, rank, e)),
    bad("wait_for_nothing", 2, wait_for_nothing, |rank, e| own_fault(0, rank, e)),
    bad("wait_out_of_order", 2, wait_out_of_order, |rank, e| own_fault(0, rank, e)),
    // The rank that ended the job sees its end like the others.
    bad(
        "abort_reaches_all",
        4,
        abort_reaches_all,
        |_, e| matches!(e, Err(Error::Aborted { by: 2, reason }) if reason == "I have had enough"),
    ),
    bad("a_rank_that_left_owes", 2, left_owing, |rank, e| match e {
        Err(Error::PeerLost { rank: 1, by: 0, loss: Loss::Gone, waiting_for, .. }) => {
            rank == 0 && waiting_for == "in step 7 of 9, put 0 on the bulk lane"
        }
        _ => rank == 1,
    }),
];

fn own_fault(culprit: usize, rank: usize, end: &Result<()>) -> bool {
    match end {
        Err(Error::Internal(_)) => rank == culprit,
        Err(Error::Aborted { by, .. }) => *by == culprit,
        _ => false,
    }
}

fn names_too_long(end: &Result<()>) -> bool {
    let Err(e @ (Error::Internal(_) | Error::Aborted { .. })) = end else { return false };
    // Not every MPI tells how long a message was that it cut.
    ["24", "more than 16"].iter().any(|len| {
        let words = format!("put 0 of rank 0 to rank 1 on the bulk lane has {len} bytes, but 16 were armed");
        e.to_string().contains(&words)
    })
}

/// Element `i` of message `m` from `rank`: unlike any other.
fn word(rank: usize, m: usize, i: usize) -> u64 {
    (rank as u64) << 56 ^ (m as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ i as u64
}

fn write_message(buf: &mut Buf<u64>, at: std::ops::Range<usize>, rank: usize, m: usize) {
    for (i, w) in buf.write(at).iter_mut().enumerate() {
        *w = word(rank, m, i);
    }
}

fn check_message(words: &[u64], rank: usize, m: usize) {
    for (i, w) in words.iter().enumerate() {
        assert_eq!(*w, word(rank, m, i), "word {i} of message {m} of rank {rank}");
    }
}

/// A barrier made of puts; the lane must be otherwise quiet.
pub fn barrier(fabric: &dyn Fabric, lane: Lane) -> Result<()> {
    let (n, me) = (fabric.size(), fabric.rank());
    let mut inbox = Buf::<u64>::zeros(fabric, n)?;
    let outbox = Buf::<u64>::zeros(fabric, 1)?;
    for peer in (0..n).filter(|p| *p != me) {
        inbox.arm(fabric, lane, peer, peer..peer + 1)?;
        outbox.put(fabric, lane, peer, 0..1)?;
    }
    for peer in (0..n).filter(|p| *p != me) {
        inbox.wait(fabric, lane, peer)?;
    }
    Ok(())
}

fn alone(fabric: &dyn Fabric) -> Result<()> {
    assert_eq!((fabric.rank(), fabric.size()), (0, 1));
    let mut buf = Buf::<f64>::zeros(fabric, 10)?;
    buf.write(0..10)[3] = 1.0;
    assert_eq!(buf.read(3..4), [1.0]);
    fabric.poll()
}

fn memory(fabric: &dyn Fabric) -> Result<()> {
    assert!(!fabric.host(1 - fabric.rank()).is_empty() && !fabric.name().is_empty());
    for len in [0usize, 1, 4096, 100_000, 5 << 20] {
        let memory = fabric.alloc(len)?;
        assert_eq!(memory.len(), len);
        assert_eq!(memory.as_ptr() as usize % 4096, 0, "page-aligned");
        let buf = Buf::<u8>::zeros(fabric, len)?;
        assert!(buf.read(0..len).iter().all(|b| *b == 0), "zeroed");
    }
    // What is given back may be given out again, zeroed again.
    for _ in 0..50 {
        let mut buf = Buf::<u8>::zeros(fabric, 1 << 20)?;
        assert!(buf.read(0..1 << 20).iter().all(|b| *b == 0), "zeroed again");
        buf.write(0..1 << 20).fill(1);
    }
    Ok(())
}

fn one_put(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 100)?;
    if fabric.rank() == 0 {
        write_message(&mut buf, 10..60, 0, 0);
        let ticket = buf.put(fabric, Lane::PANEL, 1, 10..60)?;
        assert_eq!((ticket.to, ticket.lane, ticket.seq), (1, Lane::PANEL, 0));
        buf.flush(fabric)?;
        assert!(fabric.is_done(ticket)?);
    } else {
        buf.arm(fabric, Lane::PANEL, 0, 20..70)?;
        assert_eq!(buf.wait(fabric, Lane::PANEL, 0)?, 20..70);
        check_message(buf.read(20..70), 0, 0);
        assert!(buf.read(0..20).iter().chain(buf.read(70..100)).all(|w| *w == 0), "nothing beside it");
    }
    Ok(())
}

fn order_on_a_lane(fabric: &dyn Fabric) -> Result<()> {
    const PUTS: usize = 1000;
    let mut buf = Buf::<u64>::zeros(fabric, 16)?;
    for m in 0..PUTS {
        let len = m % 16;
        if fabric.rank() == 0 {
            write_message(&mut buf, 0..len, 0, m);
            buf.put(fabric, Lane::BULK, 1, 0..len)?;
            buf.flush(fabric)?;
        } else {
            buf.arm(fabric, Lane::BULK, 0, 0..len)?;
            assert_eq!(buf.wait(fabric, Lane::BULK, 0)?, 0..len);
            check_message(buf.read(0..len), 0, m);
        }
    }
    Ok(())
}

fn lanes_are_independent(fabric: &dyn Fabric) -> Result<()> {
    let lanes = (0..Lane::COUNT as u8).map(Lane);
    let mut buf = Buf::<u64>::zeros(fabric, Lane::COUNT)?;
    if fabric.rank() == 0 {
        for lane in lanes {
            let at = lane.0 as usize;
            write_message(&mut buf, at..at + 1, 0, at);
            buf.put(fabric, lane, 1, at..at + 1)?;
        }
        buf.flush(fabric)?;
    } else {
        // Armed and waited for in the other order: a lane that waits for another would hang.
        for lane in lanes.rev() {
            let at = lane.0 as usize;
            buf.arm(fabric, lane, 0, at..at + 1)?;
            assert_eq!(buf.wait(fabric, lane, 0)?, at..at + 1);
            check_message(buf.read(at..at + 1), 0, at);
        }
    }
    Ok(())
}

fn put_before_arm(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 1000)?;
    if fabric.rank() == 0 {
        write_message(&mut buf, 0..1000, 0, 5);
        buf.put(fabric, Lane::ROWS, 1, 0..1000)?;
        barrier(fabric, Lane::CONTROL)?;
        buf.flush(fabric)
    } else {
        barrier(fabric, Lane::CONTROL)?;
        buf.arm(fabric, Lane::ROWS, 0, 0..1000)?;
        buf.wait(fabric, Lane::ROWS, 0)?;
        check_message(buf.read(0..1000), 0, 5);
        Ok(())
    }
}

fn arm_before_put(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 1000)?;
    if fabric.rank() == 0 {
        barrier(fabric, Lane::CONTROL)?;
        write_message(&mut buf, 0..1000, 0, 6);
        buf.put(fabric, Lane::ROWS, 1, 0..1000)?;
        buf.flush(fabric)
    } else {
        buf.arm(fabric, Lane::ROWS, 0, 0..1000)?;
        barrier(fabric, Lane::CONTROL)?;
        buf.wait(fabric, Lane::ROWS, 0)?;
        check_message(buf.read(0..1000), 0, 6);
        Ok(())
    }
}

fn shorter_and_empty_puts(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 40)?;
    let lens = [3, 0, 10, 0, 7];
    if fabric.rank() == 0 {
        for (m, len) in lens.into_iter().enumerate() {
            write_message(&mut buf, 0..len, 0, m);
            buf.put(fabric, Lane::PIVOT, 1, 0..len)?;
            buf.flush(fabric)?;
        }
    } else {
        for (m, len) in lens.into_iter().enumerate() {
            buf.write(0..40).fill(77);
            buf.arm(fabric, Lane::PIVOT, 0, 20..30)?;
            assert_eq!(buf.wait(fabric, Lane::PIVOT, 0)?, 20..20 + len);
            check_message(buf.read(20..20 + len), 0, m);
            assert!(buf.read(20 + len..40).iter().all(|w| *w == 77), "no more than what was put");
        }
    }
    Ok(())
}

fn more_arms_than_slots(fabric: &dyn Fabric) -> Result<()> {
    const N: usize = 1000;
    let mut buf = Buf::<u64>::zeros(fabric, 2 * N)?;
    if fabric.rank() == 0 {
        barrier(fabric, Lane::CONTROL)?;
        for m in 0..N {
            write_message(&mut buf, 2 * m..2 * m + 2, 0, m);
            buf.put(fabric, Lane::ROWS, 1, 2 * m..2 * m + 2)?;
        }
        buf.flush(fabric)
    } else {
        for m in 0..N {
            buf.arm(fabric, Lane::ROWS, 0, 2 * m..2 * m + 2)?;
        }
        barrier(fabric, Lane::CONTROL)?;
        for m in 0..N {
            assert_eq!(buf.wait(fabric, Lane::ROWS, 0)?, 2 * m..2 * m + 2);
            check_message(buf.read(2 * m..2 * m + 2), 0, m);
        }
        Ok(())
    }
}

fn more_puts_than_slots(fabric: &dyn Fabric) -> Result<()> {
    const N: usize = 1000;
    let mut buf = Buf::<u64>::zeros(fabric, 2 * N)?;
    if fabric.rank() == 0 {
        for m in 0..N {
            write_message(&mut buf, 2 * m..2 * m + 2, 0, m);
            buf.put(fabric, Lane::ROWS, 1, 2 * m..2 * m + 2)?;
        }
        barrier(fabric, Lane::CONTROL)?;
        buf.flush(fabric)
    } else {
        barrier(fabric, Lane::CONTROL)?;
        for m in 0..N {
            buf.arm(fabric, Lane::ROWS, 0, 2 * m..2 * m + 2)?;
        }
        for m in 0..N {
            assert_eq!(buf.wait(fabric, Lane::ROWS, 0)?, 2 * m..2 * m + 2);
            check_message(buf.read(2 * m..2 * m + 2), 0, m);
        }
        Ok(())
    }
}

fn puts_both_ways_at_once(fabric: &dyn Fabric) -> Result<()> {
    let (me, other) = (fabric.rank(), 1 - fabric.rank());
    const LEN: usize = 1 << 16;
    let mut out = Buf::<u64>::zeros(fabric, LEN)?;
    let mut inn = Buf::<u64>::zeros(fabric, LEN)?;
    for m in 0..20 {
        inn.arm(fabric, Lane::ROWS, other, 0..LEN)?;
        write_message(&mut out, 0..LEN, me, m);
        out.put(fabric, Lane::ROWS, other, 0..LEN)?;
        inn.wait(fabric, Lane::ROWS, other)?;
        check_message(inn.read(0..LEN), other, m);
        out.flush(fabric)?;
    }
    Ok(())
}

fn source_is_free_after_flush(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 64)?;
    if fabric.rank() == 0 {
        write_message(&mut buf, 0..64, 0, 1);
        buf.put(fabric, Lane::BULK, 1, 0..64)?;
        // The ledger refuses to write what may still be read.
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            buf.write(10..11);
        }));
        assert!(refused.is_err(), "a range being put was given out to write");
        buf.flush(fabric)?;
        buf.write(0..64).fill(0);
        barrier(fabric, Lane::CONTROL)
    } else {
        buf.arm(fabric, Lane::BULK, 0, 0..64)?;
        for touch in [true, false] {
            let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                if touch {
                    buf.write(63..64);
                } else {
                    buf.read(0..1);
                }
            }));
            assert!(refused.is_err(), "an armed range was given out");
        }
        buf.wait(fabric, Lane::BULK, 0)?;
        barrier(fabric, Lane::CONTROL)?;
        check_message(buf.read(0..64), 0, 1);
        Ok(())
    }
}

fn puts_outlive_their_rank(fabric: &dyn Fabric) -> Result<()> {
    const N: usize = 200;
    if fabric.rank() == 0 {
        for m in 0..N {
            let mut buf = Buf::<u64>::zeros(fabric, 8)?;
            write_message(&mut buf, 0..8, 0, m);
            buf.put(fabric, Lane::BULK, 1, 0..8)?;
        }
        return Ok(()); // neither flushed nor kept
    }
    let mut buf = Buf::<u64>::zeros(fabric, 8)?;
    for m in 0..N {
        buf.arm(fabric, Lane::BULK, 0, 0..8)?;
        buf.wait(fabric, Lane::BULK, 0)?;
        check_message(buf.read(0..8), 0, m);
    }
    Ok(())
}

fn big(fabric: &dyn Fabric) -> Result<()> {
    const LEN: usize = (64 << 20) / 8;
    let mut buf = Buf::<u64>::zeros(fabric, LEN)?;
    if fabric.rank() == 0 {
        write_message(&mut buf, 0..LEN, 0, 9);
        for _ in 0..2 {
            buf.put(fabric, Lane::BULK, 1, 0..LEN)?;
        }
        buf.flush(fabric)
    } else {
        for _ in 0..2 {
            buf.write(0..LEN).fill(1);
            buf.arm(fabric, Lane::BULK, 0, 0..LEN)?;
            assert_eq!(buf.wait(fabric, Lane::BULK, 0)?, 0..LEN);
            check_message(buf.read(0..LEN), 0, 9);
        }
        Ok(())
    }
}

fn everybody_to_everybody(fabric: &dyn Fabric) -> Result<()> {
    let (n, me) = (fabric.size(), fabric.rank());
    let mut out = Buf::<u64>::zeros(fabric, 32)?;
    let mut inn = Buf::<u64>::zeros(fabric, 32 * n)?;
    let others = || (0..n).filter(|p| *p != me);
    for m in 0..100 {
        for peer in others() {
            inn.arm(fabric, Lane::ROWS, peer, 32 * peer..32 * peer + 32)?;
        }
        write_message(&mut out, 0..32, me, m);
        for peer in others() {
            out.put(fabric, Lane::ROWS, peer, 0..32)?;
        }
        for peer in others() {
            let got = inn.wait(fabric, Lane::ROWS, peer)?;
            check_message(inn.read(got), peer, m);
        }
        out.flush(fabric)?;
    }
    barrier(fabric, Lane::CONTROL)
}

/// As the pivot search of a panel: a tiny exchange for each column.
fn a_message_per_column(fabric: &dyn Fabric) -> Result<()> {
    let (n, me) = (fabric.size(), fabric.rank());
    let mut out = Buf::<u64>::zeros(fabric, 2)?;
    let mut inn = Buf::<u64>::zeros(fabric, 2 * n)?;
    let others = || (0..n).filter(|p| *p != me);
    for m in 0..2000 {
        for peer in others() {
            inn.arm(fabric, Lane::PIVOT, peer, 2 * peer..2 * peer + 2)?;
        }
        out.flush(fabric)?;
        write_message(&mut out, 0..2, me, m);
        for peer in others() {
            out.put(fabric, Lane::PIVOT, peer, 0..2)?;
        }
        for peer in others() {
            let got = inn.wait(fabric, Lane::PIVOT, peer)?;
            check_message(inn.read(got), peer, m);
        }
    }
    Ok(())
}

fn poll_and_try_wait(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 4)?;
    if fabric.rank() == 0 {
        barrier(fabric, Lane::CONTROL)?;
        write_message(&mut buf, 0..4, 0, 3);
        let ticket = buf.put(fabric, Lane::BULK, 1, 0..4)?;
        while !fabric.is_done(ticket)? {
            std::thread::yield_now();
        }
    } else {
        buf.arm(fabric, Lane::BULK, 0, 0..4)?;
        assert_eq!(buf.try_wait(fabric, Lane::BULK, 0)?, None, "nothing was put");
        barrier(fabric, Lane::CONTROL)?;
        let got = loop {
            fabric.poll()?;
            if let Some(got) = buf.try_wait(fabric, Lane::BULK, 0)? {
                break got;
            }
            std::thread::yield_now();
        };
        check_message(buf.read(got), 0, 3);
    }
    Ok(())
}

/// Two buffers share a lane: each gets its own put.
fn waits_in_order_of_arms(fabric: &dyn Fabric) -> Result<()> {
    let mut a = Buf::<u64>::zeros(fabric, 4)?;
    let mut b = Buf::<u64>::zeros(fabric, 4)?;
    if fabric.rank() == 0 {
        write_message(&mut a, 0..4, 0, 1);
        write_message(&mut b, 0..4, 0, 2);
        a.put(fabric, Lane::BULK, 1, 0..4)?;
        b.put(fabric, Lane::BULK, 1, 0..4)?;
        a.flush(fabric)?;
        b.flush(fabric)?;
    } else {
        a.arm(fabric, Lane::BULK, 0, 0..4)?;
        b.arm(fabric, Lane::BULK, 0, 0..4)?;
        a.wait(fabric, Lane::BULK, 0)?;
        b.wait(fabric, Lane::BULK, 0)?;
        check_message(a.read(0..4), 0, 1);
        check_message(b.read(0..4), 0, 2);
    }
    Ok(())
}

fn too_long(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 4)?;
    if fabric.rank() == 1 {
        buf.arm(fabric, Lane::BULK, 0, 0..2)?;
        barrier(fabric, Lane::CONTROL)?;
        buf.wait(fabric, Lane::BULK, 0)?;
    } else {
        barrier(fabric, Lane::CONTROL)?;
        buf.put(fabric, Lane::BULK, 1, 0..3)?;
        buf.flush(fabric)?;
        barrier(fabric, Lane::CONTROL)?; // a source may be free before the target looks
    }
    Ok(())
}

fn too_long_armed_late(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 4)?;
    if fabric.rank() == 1 {
        barrier(fabric, Lane::CONTROL)?;
        buf.arm(fabric, Lane::BULK, 0, 0..2)?;
        buf.wait(fabric, Lane::BULK, 0)?;
    } else {
        buf.put(fabric, Lane::BULK, 1, 0..3)?;
        barrier(fabric, Lane::CONTROL)?;
        buf.flush(fabric)?;
        barrier(fabric, Lane::CONTROL)?;
    }
    Ok(())
}

/// Rank 0 breaks a rule; rank 1 waits for something that never comes.
fn rule_broken_by_0(fabric: &dyn Fabric, breaks: impl Fn(&mut Buf<u64>) -> Result<()>) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 4)?;
    if fabric.rank() == 0 {
        return breaks(&mut buf);
    }
    buf.arm(fabric, Lane::BULK, 0, 0..1)?;
    buf.wait(fabric, Lane::BULK, 0).map(|_| ())
}

fn put_to_itself(fabric: &dyn Fabric) -> Result<()> {
    rule_broken_by_0(fabric, |buf| buf.put(fabric, Lane::BULK, 0, 0..1).map(|_| ()))
}

fn arm_for_itself(fabric: &dyn Fabric) -> Result<()> {
    rule_broken_by_0(fabric, |buf| buf.arm(fabric, Lane::BULK, 0, 0..1))
}

fn no_such_rank(fabric: &dyn Fabric) -> Result<()> {
    rule_broken_by_0(fabric, |buf| buf.put(fabric, Lane::BULK, 2, 0..1).map(|_| ()))
}

fn wait_for_nothing(fabric: &dyn Fabric) -> Result<()> {
    rule_broken_by_0(fabric, |_| fabric.wait(Lane::BULK, 1, 0).map(|_| ()))
}

fn wait_out_of_order(fabric: &dyn Fabric) -> Result<()> {
    rule_broken_by_0(fabric, |a| {
        let mut b = Buf::<u64>::zeros(fabric, 4)?;
        a.arm(fabric, Lane::BULK, 1, 0..1)?;
        b.arm(fabric, Lane::BULK, 1, 0..1)?;
        b.wait(fabric, Lane::BULK, 1).map(|_| ())
    })
}

fn abort_reaches_all(fabric: &dyn Fabric) -> Result<()> {
    barrier(fabric, Lane::CONTROL)?;
    if fabric.rank() == 2 {
        fabric.abort("I have had enough");
    }
    barrier(fabric, Lane::CONTROL)
}

fn left_owing(fabric: &dyn Fabric) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 4)?;
    if fabric.rank() == 1 {
        return Ok(());
    }
    fabric.set_activity("in step 7 of 9");
    buf.arm(fabric, Lane::BULK, 1, 0..1)?;
    buf.wait(fabric, Lane::BULK, 1).map(|_| ())
}
