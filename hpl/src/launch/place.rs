//! Which rank runs where.

use fulmen::{Error, Result};

use super::hosts::Host;

/// The order in which ranks are dealt out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum MapBy {
    /// A host's slots are filled before the next host's
    #[default]
    Slot,
    /// One to each host in turn
    Node,
}

/// A rank is a process with threads and open files on its host, and has a connection to each other one.
const MOST_ON_HOST: usize = 1024;
/// The words of so many fit into one message of their rendezvous.
const MOST_RANKS: usize = 1 << 16;

/// Ranks on their hosts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// For each rank the number of its host in the list.
    pub hosts: Vec<usize>,
    /// Hosts that have more ranks than slots: number, ranks, slots.
    pub crowded: Vec<(usize, usize, usize)>,
}

/// Deals `n` ranks out to the hosts; without `n` there is one for each slot. When the slots do not suffice the hosts are
/// filled again from the first, up to what they may take at most.
///
/// # Errors
/// [`Error::Argument`] for no rank at all, or more than all hosts together may take.
pub fn place(hosts: &[Host], n: Option<usize>, by: MapBy) -> Result<Placement> {
    let told: usize = hosts.iter().filter_map(|h| h.slots).sum();
    let untold = hosts.iter().filter(|h| h.slots.is_none()).count();
    let n = n.unwrap_or(told + untold);
    let most: Option<usize> = hosts.iter().map(|h| h.most).sum();
    if n == 0 || hosts.is_empty() {
        return Err(Error::argument("-n", n, "a job has at least one rank", "give at least 1"));
    }
    if let Some(most) = most.filter(|&most| n > most) {
        let problem = format!("the hosts may take {most} at most (max_slots)");
        return Err(Error::argument("-n", n, problem, "ask for fewer, name more hosts, or raise max_slots"));
    }
    if n > MOST_RANKS {
        return Err(Error::argument("-n", n, format!("a job has {MOST_RANKS} ranks at most"), "give fewer"));
    }
    // Hosts without a number share evenly what the others leave.
    let share = n.saturating_sub(told).div_ceil(untold.max(1)).max(1);
    let capacity: Vec<usize> =
        hosts.iter().map(|h| h.slots.unwrap_or(share).min(h.most.unwrap_or(usize::MAX))).collect();
    let mut taken = vec![0; hosts.len()];
    let mut order = Vec::with_capacity(n);
    let mut round = 1;
    while order.len() < n {
        let room = |taken: &[usize], i: usize| {
            let most = hosts[i].most.unwrap_or(usize::MAX);
            capacity[i].saturating_mul(round).min(most).saturating_sub(taken[i])
        };
        loop {
            let before = order.len();
            for i in 0..hosts.len() {
                let some = match by {
                    MapBy::Slot => room(&taken, i),
                    MapBy::Node => room(&taken, i).min(1),
                };
                let some = some.min(n - order.len());
                taken[i] += some;
                order.extend(std::iter::repeat_n(i, some));
            }
            if order.len() == n || order.len() == before {
                break;
            }
        }
        round += 1;
    }
    if let Some(at) = taken.iter().position(|&ranks| ranks > MOST_ON_HOST) {
        let problem = format!(
            "puts {} ranks on {}, and a host takes {MOST_ON_HOST} at most",
            taken[at], hosts[at].name
        );
        return Err(Error::argument(
            "-n",
            n,
            problem,
            "give fewer, or more hosts: a rank is for several cores",
        ));
    }
    let crowded = (0..hosts.len())
        .filter_map(|i| hosts[i].slots.filter(|&s| taken[i] > s).map(|s| (i, taken[i], s)))
        .collect();
    Ok(Placement { hosts: order, crowded })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::hosts::from_list;
    use proptest::prelude::*;

    fn placed(list: &str, n: Option<usize>, by: MapBy) -> Vec<usize> {
        place(&from_list(list).unwrap(), n, by).unwrap().hosts
    }

    #[test]
    fn by_slot_and_by_node() {
        assert_eq!(placed("a:2,b:1,c:2", None, MapBy::Slot), [0, 0, 1, 2, 2]);
        assert_eq!(placed("a:2,b:1,c:2", None, MapBy::Node), [0, 1, 2, 0, 2]);
        assert_eq!(placed("a:2,b:2", Some(3), MapBy::Slot), [0, 0, 1]);
        assert_eq!(placed("a,b,c", None, MapBy::Slot), [0, 1, 2]);
    }

    /// What `mpirun -host localhost -n 4` refuses.
    #[test]
    fn hosts_without_a_number_take_what_is_needed() {
        assert_eq!(placed("localhost", Some(4), MapBy::Slot), [0; 4]);
        assert_eq!(placed("a,b", Some(5), MapBy::Slot), [0, 0, 0, 1, 1]);
        assert_eq!(placed("a,b", Some(5), MapBy::Node), [0, 1, 0, 1, 0]);
        assert_eq!(placed("a:1,b,c", Some(5), MapBy::Slot), [0, 1, 1, 2, 2]);
    }

    #[test]
    fn more_ranks_than_slots_is_told_and_more_than_most_refused() {
        let hosts = from_list("a:1,b:2").unwrap();
        let placement = place(&hosts, Some(5), MapBy::Slot).unwrap();
        assert_eq!(placement.hosts, [0, 1, 1, 0, 1]);
        assert_eq!(placement.crowded, [(0, 2, 1), (1, 3, 2)]);
        let mut hosts = hosts;
        hosts.iter_mut().for_each(|h| h.most = Some(2));
        let error = place(&hosts, Some(5), MapBy::Slot).unwrap_err().to_string();
        assert!(error.contains("-n: 5: the hosts may take 4 at most"), "{error}");
        assert!(place(&hosts, Some(0), MapBy::Slot).is_err());
        // More than is sane.
        let one = from_list("a").unwrap();
        assert!(place(&one, Some(1024), MapBy::Slot).is_ok());
        for (n, words) in
            [(1025, "puts 1025 ranks on a, and a host takes 1024"), (100_000, "65536 ranks at most")]
        {
            let error = place(&one, Some(n), MapBy::Slot).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_rank_has_a_host_that_may_take_it(
            slots in proptest::collection::vec((proptest::option::of(1usize..5), proptest::option::of(1usize..7)), 1..6),
            n in 1usize..40,
            node in any::<bool>(),
        ) {
            let hosts: Vec<Host> = slots.iter()
                .map(|&(slots, most)| Host { name: "x".into(), slots, most, ..Host::default() })
                .collect();
            match place(&hosts, Some(n), if node { MapBy::Node } else { MapBy::Slot }) {
                Err(_) => prop_assert!(hosts.iter().map(|h| h.most).sum::<Option<usize>>().is_some_and(|most| n > most)),
                Ok(p) => {
                    prop_assert_eq!(p.hosts.len(), n);
                    for (i, host) in hosts.iter().enumerate() {
                        let here = p.hosts.iter().filter(|&&h| h == i).count();
                        prop_assert!(host.most.is_none_or(|most| here <= most));
                    }
                }
            }
        }
    }
}
