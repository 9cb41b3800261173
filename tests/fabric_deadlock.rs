//! Ranks that wait for each other are named within seconds; ranks that only wait long are left in peace.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::comm::Group;
use fulmen::fabric::{Buf, Fabric, Lane, mem};
use fulmen::{Error, Result};

/// What the rank that found it says; every other rank is told the same.
fn verdict(n: usize, program: impl Fn(Arc<dyn Fabric>) -> Result<()> + Sync) -> String {
    let begun = Instant::now();
    let results = mem::run(n, mem::Options::default(), program);
    assert!(begun.elapsed() < Duration::from_secs(120), "patience was waited for");
    let found: Vec<&String> = results
        .iter()
        .filter_map(|r| if let Err(Error::Internal(text)) = r { Some(text) } else { None })
        .collect();
    assert_eq!(found.len(), 1, "{results:?}");
    for result in &results {
        let told = match result {
            Err(Error::Aborted { reason, .. }) => reason.contains(found[0].as_str()),
            other => matches!(other, Err(Error::Internal(_))),
        };
        assert!(told, "{result:?}");
    }
    found[0].clone()
}

fn wait_for(fabric: &dyn Fabric, lane: Lane, peer: usize) -> Result<()> {
    let mut buf = Buf::<u64>::zeros(fabric, 1)?;
    buf.arm(fabric, lane, peer, 0..1)?;
    buf.wait(fabric, lane, peer).map(drop)
}

#[test]
fn two_that_wait_for_each_others_put() {
    let text = verdict(2, |fabric| {
        fabric.set_activity(&format!("in step {}", fabric.rank() + 1));
        wait_for(&*fabric, Lane::BULK, 1 - fabric.rank())
    });
    let words = "ranks wait for each other, and none can go on: rank 0 in step 1 waits for put 0 of rank 1 on the bulk \
                 lane; rank 1 in step 2 waits for put 0 of rank 0 on the bulk lane";
    assert!(text.contains(words), "{text}");
}

/// Rank 3 waits for a rank of the circle, and is not part of it.
#[test]
fn a_circle_of_three_and_one_beside_it() {
    let text = verdict(4, |fabric| match fabric.rank() {
        0 => wait_for(&*fabric, Lane::ROWS, 1),
        1 => {
            // Never taken: rank 2 does not arm for it.
            let mut buf = Buf::<u64>::zeros(&*fabric, 1)?;
            buf.put(&*fabric, Lane::PANEL, 2, 0..1)?;
            buf.flush(&*fabric)
        }
        2 => wait_for(&*fabric, Lane::CONTROL, 0),
        _ => wait_for(&*fabric, Lane::CONTROL, 0),
    });
    let words = "rank 0 waits for put 0 of rank 1 on the rows lane; rank 1 waits until rank 2 takes put 0 on the panel \
                 lane; rank 2 waits for put 0 of rank 0 on the control lane\n";
    assert!(text.contains(words), "{text}");
}

/// The mistake that people make: not the same collectives in the same order.
#[test]
fn different_collectives() {
    let text = verdict(2, |fabric| {
        let all = Group::all(Arc::clone(&fabric))?;
        let mut value = [1u64];
        // Each expects the other to begin.
        all.bcast(1 - fabric.rank(), &mut value)
    });
    assert!(text.contains("ranks called different collectives"), "{text}");
}

/// Ranks that wait in a row for one that takes its time are no circle; nor is a peer that answers late.
#[test]
fn long_waits_are_none() {
    let results = mem::run(3, mem::Options::default(), |fabric| {
        let all = Group::all(Arc::clone(&fabric))?;
        if fabric.rank() == 1 {
            std::thread::sleep(Duration::from_secs(4));
        }
        all.barrier()?;
        if fabric.rank() == 2 {
            std::thread::sleep(Duration::from_secs(3));
        }
        all.barrier()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}
