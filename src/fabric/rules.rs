//! What every transport asks of its caller, in the same words. A rule that is broken is a fault of the program and ends
//! the job; how, is the transport's business.

use std::ops::Range;

use super::{Lane, Memory, Ticket};

/// A rule that was broken.
pub type Broken = String;

/// A peer is another rank, and a lane one of those that there are.
pub fn peer(rank: usize, size: usize, peer: usize, lane: Lane) -> Result<(), Broken> {
    if peer < size && peer != rank && usize::from(lane.0) < Lane::COUNT {
        return Ok(());
    }
    Err(format!("rank {rank} of {size} names rank {peer} on lane {} as its peer", lane.0))
}

/// What is armed or put is a part of memory that the fabric gave (`is_own`).
pub fn range(is_own: bool, memory: &Memory, range: &Range<usize>) -> Result<(), Broken> {
    if !is_own {
        return Err("memory of another fabric was armed or put".into());
    }
    if range.start > range.end || range.end > memory.len() {
        return Err(format!("bytes {range:?} of {} were armed or put", memory.len()));
    }
    Ok(())
}

/// Arms are waited for in their order, each once. `armed` and `waited`: how many have been, for this source and lane.
pub fn wait(
    rank: usize,
    (lane, from, arm): (Lane, usize, u64),
    waited: u64,
    armed: u64,
) -> Result<(), Broken> {
    if arm == waited && arm < armed {
        return Ok(());
    }
    Err(format!(
        "rank {rank} waits for arm {arm} of rank {from} on the {lane} lane, but {armed} were armed and {waited} \
         waited for"
    ))
}

/// Only a put that was made can be done.
pub fn ticket(ticket: Ticket, is_made: bool) -> Result<(), Broken> {
    if is_made {
        return Ok(());
    }
    Err(format!("put {} to rank {} has not been made", ticket.seq, ticket.to))
}
