//! Our puts: the verbs fabric, two ranks as threads.

use std::sync::Arc;
use std::time::Instant;

use fulmen::fabric::rendezvous::in_process;
use fulmen::fabric::verbs::{Devices, Options, connect};
use fulmen::fabric::{Fabric, Lane, mem};
use fulmen_emu_verbs::Installed;

use crate::client::CABLE;

/// Slots that the target keeps armed.
const AHEAD: usize = 8;

/// Runs both ranks; the result is the second's.
fn ranks<R: Send>(world: &Installed, work: impl Fn(&dyn Fabric) -> fulmen::Result<R> + Sync) -> R {
    let [a, b] = CABLE.map(|name| vec![name.to_owned()]);
    let options = Options {
        library: Some(world.library().to_owned()),
        devices: Devices::Matrix(vec![vec![vec![], a], vec![b, vec![]]]),
        progress_thread: false,
        ..Options::default()
    };
    let controls = mem::Job::new(2, &mem::Options::default()).unwrap().build();
    std::thread::scope(|scope| {
        let threads: Vec<_> = in_process(2)
            .into_iter()
            .zip(controls)
            .map(|(mut rendezvous, control)| {
                let (options, work) = (&options, &work);
                scope.spawn(move || {
                    let fabric: Arc<dyn Fabric> = connect(&mut rendezvous, control, options)?;
                    work(&*fabric)
                })
            })
            .collect();
        let mut results: Vec<_> =
            threads.into_iter().map(|t| t.join().unwrap().unwrap_or_else(|e| panic!("{e}"))).collect();
        results.pop().unwrap()
    })
}

/// Seconds per put of a stream, by the target's clock.
pub fn seconds_per_put(world: &Installed, bytes: usize, count: usize) -> f64 {
    let slot = |i: usize| i % AHEAD * bytes..(i % AHEAD + 1) * bytes;
    ranks(world, |fabric| {
        let memory = fabric.alloc(AHEAD * bytes)?;
        let mut under_way = std::collections::VecDeque::new();
        if fabric.rank() == 0 {
            for i in 0..count {
                under_way.push_back(fabric.put(Lane::PANEL, 1, &memory, slot(i))?);
                if under_way.len() == AHEAD {
                    fabric.flush(under_way.pop_front().unwrap())?;
                }
            }
            for ticket in under_way {
                fabric.flush(ticket)?;
            }
            return Ok(0.0);
        }
        let mut arms = std::collections::VecDeque::new();
        for i in 0..count.min(AHEAD) {
            arms.push_back(fabric.arm(Lane::PANEL, 0, &memory, slot(i))?);
        }
        let mut start = Instant::now();
        for i in 0..count {
            let arm = arms.pop_front().unwrap();
            assert_eq!(fabric.wait(Lane::PANEL, 0, arm)?, bytes);
            if i == 0 {
                start = Instant::now();
            }
            if i + AHEAD < count {
                arms.push_back(fabric.arm(Lane::PANEL, 0, &memory, slot(i))?);
            }
        }
        Ok(start.elapsed().as_secs_f64() / (count - 1) as f64)
    })
}

/// Seconds of a put from call to arrival: half of there and back, armed ahead.
pub fn latency(world: &Installed, bytes: usize, count: usize) -> f64 {
    ranks(world, |fabric| {
        let memory = fabric.alloc(3 * bytes)?;
        let other = 1 - fabric.rank();
        let slot = |i: usize| (1 + i % 2) * bytes..(2 + i % 2) * bytes;
        let mut arms = std::collections::VecDeque::new();
        for i in 0..2 {
            arms.push_back(fabric.arm(Lane::CONTROL, other, &memory, slot(i))?);
        }
        let mut start = Instant::now();
        for i in 0..count {
            if i == count / 10 {
                start = Instant::now();
            }
            if fabric.rank() == 0 {
                fabric.put(Lane::CONTROL, other, &memory, 0..bytes)?;
            }
            fabric.wait(Lane::CONTROL, other, arms.pop_front().unwrap())?;
            if i + 2 < count {
                arms.push_back(fabric.arm(Lane::CONTROL, other, &memory, slot(i))?);
            }
            if fabric.rank() == 1 {
                fabric.put(Lane::CONTROL, other, &memory, 0..bytes)?;
            }
        }
        let rounds = count - count / 10;
        let took = start.elapsed().as_secs_f64() / rounds as f64 / 2.0;
        if fabric.rank() == 1 {
            // Its last put may still be under way.
            fabric.flush(fulmen::fabric::Ticket { to: 0, lane: Lane::CONTROL, seq: count as u64 - 1 })?;
        }
        Ok(took)
    })
}
