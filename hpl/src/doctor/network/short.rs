//! The short look before each run on several hosts: a fraction of a second, and a word only of what is far slower than the rest.

use fulmen::comm::Group;
use fulmen::{Error, Result};

use super::measure::{Effort, links, side_by_side};
use super::show::{name, rate};
use super::{Network, far_slower};

/// Some milliseconds a link.
const GLANCE: Effort = Effort { pings: 1, bytes: 128 << 10, puts: 5, times: 2 };
/// Chance is no finding: what looks slow is measured again, alone, and with more.
const AGAIN: Effort = Effort { pings: 1, bytes: 512 << 10, puts: 9, times: 3 };
/// So many links are looked at again; when there are more, the first are told.
const SUSPECTS: usize = 6;
/// With more hosts it would take seconds.
const MOST: usize = 64;

/// Words on each link between the `leaders`, a rank of each host of these `names`, that is far slower than others.
/// Collective; the words are rank 0's.
///
/// # Errors
/// When a rank is lost.
pub fn slow_links(group: &Group, leaders: &[usize], names: Vec<String>) -> Result<Vec<String>> {
    if !(2..=MOST).contains(&leaders.len()) {
        return Ok(vec![]);
    }
    let glance = links(group, leaders, &side_by_side(leaders.len()), &GLANCE)?;
    let mut network = Network { hosts: names, links: glance.unwrap_or_default() };
    let suspects = far_slower(&network);
    // Both ends of a pair must know: its hosts and one more, in a fixed number of numbers.
    let mut told = [u64::MAX; 2 * SUSPECTS];
    let mut pairs: Vec<(usize, usize)> = suspects
        .iter()
        .map(|&(i, _)| &network.links[i])
        .map(|l| (l.from.min(l.to), l.from.max(l.to)))
        .collect();
    pairs.sort_unstable();
    pairs.dedup();
    for (at, (a, b)) in pairs.into_iter().take(SUSPECTS).enumerate() {
        told[2 * at] = a as u64;
        told[2 * at + 1] = b as u64;
    }
    group.bcast(0, &mut told)?;
    let again: Vec<_> = told
        .chunks_exact(2)
        .filter(|pair| pair[0] != u64::MAX)
        .map(|pair| vec![(pair[0] as usize, pair[1] as usize)])
        .collect();
    if again.iter().flatten().any(|&(a, b)| a >= b || b >= leaders.len()) {
        return Err(Error::Internal("a pair of hosts that is none".into()));
    }
    if again.is_empty() {
        return Ok(vec![]);
    }
    for link in links(group, leaders, &again, &AGAIN)?.into_iter().flatten() {
        if let Some(known) = network.links.iter_mut().find(|l| (l.from, l.to) == (link.from, link.to)) {
            known.bytes_per_second = link.bytes_per_second.max(known.bytes_per_second);
        }
    }
    let still = far_slower(&network);
    let words = |(i, others): (usize, f64)| {
        let link = &network.links[i];
        let (what, speed) = (name(&network, link), rate(link.bytes_per_second));
        format!(
            "{what} has {speed} where other links have {} ({}); see `hpl-run doctor` on these hosts",
            rate(others),
            link.way
        )
    };
    Ok(still.into_iter().take(SUSPECTS).map(words).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmen::{Setup, World};

    #[test]
    fn it_is_collective_whatever_it_finds() {
        for hosts in 1..5 {
            let told = World::threads(5, &Setup { threads: 1, ..Setup::default() }, |world| {
                let group = Group::all(world.fabric().clone())?;
                let leaders: Vec<usize> = (0..hosts).collect();
                let names = leaders.iter().map(|l| format!("h{l}")).collect();
                let words = slow_links(&group, &leaders, names)?;
                group.barrier()?;
                Ok::<_, Error>(words)
            });
            for (rank, words) in told.unwrap().into_iter().enumerate() {
                assert!(rank == 0 || words.unwrap().is_empty());
            }
        }
    }
}
