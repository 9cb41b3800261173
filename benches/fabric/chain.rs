//! A panel broadcast from one end of a chain of cables to all others, and a put to its other end, against the time of
//! its first cable alone.

use std::sync::Arc;
use std::time::Instant;

use fulmen::Result;
use fulmen::comm::{BcastLane, Group, PanelBcast, Topology};
use fulmen::fabric::{Buf, Fabric, Lane};
use serde_json::{Value, json};

use super::median;

/// Medians over batches, in which one of each follows the other. Figures are rank 0's.
pub fn measure(fabric: &Arc<dyn Fabric>, bytes: usize, batches: usize) -> Result<Value> {
    let group = Group::all(Arc::clone(fabric))?;
    let (me, n) = (group.me(), group.len());
    let lane = BcastLane::along_cables(&group)?;
    let mut panel = PanelBcast::<u8>::new(&lane, Topology::Cables, PanelBcast::<u8>::CHUNK_BYTES, bytes)?;
    let mut whole = Buf::<u8>::zeros(&**fabric, bytes)?;
    let (mut one, mut far, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for batch in 0..batches + 1 {
        for (to, times) in [(1, &mut one), (n - 1, &mut far)] {
            group.barrier()?;
            let start = Instant::now();
            if me == 0 {
                whole.write(0..bytes).fill(batch as u8);
                whole.put(&**fabric, Lane::BULK, to, 0..bytes)?;
            } else if me == to {
                whole.arm(&**fabric, Lane::BULK, 0, 0..bytes)?;
                whole.wait(&**fabric, Lane::BULK, 0)?;
            }
            if me == 0 || me == to {
                // That all of it has arrived is heard, not guessed.
                Group::new(Arc::clone(fabric), vec![0, to])?.barrier()?;
                whole.flush(&**fabric)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        group.barrier()?;
        let start = Instant::now();
        panel.start(0, 0..bytes)?;
        if me == 0 {
            panel.data_mut(0..bytes).fill(batch as u8);
            panel.send()?;
        }
        panel.finish()?;
        group.gather(0, &[me as u64])?;
        all.push(start.elapsed().as_secs_f64());
        panel.flush()?;
        assert!(panel.data(0..bytes).iter().all(|b| *b == batch as u8), "what came is not what was sent");
    }
    let after_warming =
        |times: Vec<f64>| if times.is_empty() { f64::NAN } else { median(times[1..].to_vec()) };
    let (one, far, all) = (after_warming(one), after_warming(far), after_warming(all));
    let links: Vec<String> = (0..n).filter(|r| *r != me).map(|r| fabric.link(r)).collect();
    Ok(json!({
        "ranks": n, "bytes": bytes, "links": links, "one_link_ms": 1e3 * one, "far_ms": 1e3 * far,
        "broadcast_ms": 1e3 * all, "ratio": all / one,
    }))
}
