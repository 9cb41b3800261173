//! Which way frames go between ranks that do not reach each other. Pure, and the same on every rank.

use std::collections::HashMap;

/// Routes between all pairs of ranks: shortest ones, the same there and back.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    /// Who lies between `a` and `b`, in order from `a`, for the pairs a < b that do not reach each other.
    between: HashMap<(usize, usize), Vec<usize>>,
}

/// A pair, one way round, that a rank passes frames on for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Passing {
    pub from: usize,
    pub to: usize,
    /// Who hands its frames over.
    pub prev: usize,
    /// Who gets them.
    pub next: usize,
}

impl Routes {
    /// Routes among `size` ranks, of which `a` and `b` < `a` are connected if `reach(a, b)`. Where several
    /// routes are equally short, the pairs are spread over them.
    ///
    /// # Errors
    /// The islands, if there are several: ranks that reach each other, if only through others.
    pub fn new(size: usize, reach: impl Fn(usize, usize) -> bool) -> Result<Self, Vec<Vec<usize>>> {
        let mut near = vec![Vec::new(); size];
        for a in 0..size {
            for b in (0..a).filter(|b| reach(a, *b)) {
                near[a].push(b);
                near[b].push(a);
            }
        }
        let islands = islands(&near);
        if islands.len() > 1 {
            return Err(islands);
        }
        // The shorter, the fewer ways there are: those that have a choice come last.
        let from = (0..size).filter(|from| near[*from].len() + 1 < size);
        let seen: HashMap<usize, _> = from.map(|from| (from, distances(&near, from))).collect();
        let mut pairs: Vec<(usize, usize, usize)> = Vec::new();
        for (&from, (_, far)) in &seen {
            pairs.extend((from + 1..size).filter(|to| far[*to] > 1).map(|to| (far[to], from, to)));
        }
        pairs.sort_unstable();
        let mut between = HashMap::new();
        let mut load = Load::new();
        for (_, from, to) in pairs {
            let (order, far) = &seen[&from];
            let path = lightest(&near, order, far, &load, to);
            let middle = path[1..path.len() - 1].to_vec();
            let hops = path.windows(2).map(|hop| edge(hop[0], hop[1]));
            for at in hops.chain(middle.iter().map(|rank| edge(*rank, *rank))) {
                *load.entry(at).or_default() += 1;
            }
            between.insert((from, to), middle);
        }
        Ok(Routes { between })
    }

    /// Whether every rank reaches every other directly.
    pub fn is_direct(&self) -> bool {
        self.between.is_empty()
    }

    /// Who lies between two ranks, in order.
    pub fn between(&self, from: usize, to: usize) -> Vec<usize> {
        let mut path = self.between.get(&edge(from, to)).cloned().unwrap_or_default();
        if from > to {
            path.reverse();
        }
        path
    }

    /// For whom `rank` passes frames on.
    pub fn through(&self, rank: usize) -> Vec<Passing> {
        let mut found = Vec::new();
        for (&(from, to), path) in &self.between {
            if let Some(at) = path.iter().position(|r| *r == rank) {
                let prev = if at == 0 { from } else { path[at - 1] };
                let next = path.get(at + 1).copied().unwrap_or(to);
                found.push(Passing { from, to, prev, next });
                found.push(Passing { from: to, to: from, prev: next, next: prev });
            }
        }
        found
    }
}

/// How many routes between others go over each connection, and (a pair of itself) through each rank.
type Load = HashMap<(usize, usize), usize>;

fn edge(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

/// Ranks by distance from `from`, nearest first, and each one's distance.
fn distances(near: &[Vec<usize>], from: usize) -> (Vec<usize>, Vec<usize>) {
    let (mut order, mut far) = (vec![from], vec![usize::MAX; near.len()]);
    far[from] = 0;
    let mut at = 0;
    while let Some(&rank) = order.get(at) {
        at += 1;
        for &next in &near[rank] {
            if far[next] == usize::MAX {
                far[next] = far[rank] + 1;
                order.push(next);
            }
        }
    }
    (order, far)
}

fn islands(near: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let (mut found, mut seen) = (Vec::new(), vec![false; near.len()]);
    for first in 0..near.len() {
        if !seen[first] {
            let (mut island, _) = distances(near, first);
            island.iter().for_each(|rank| seen[*rank] = true);
            island.sort_unstable();
            found.push(island);
        }
    }
    found
}

/// Of the shortest ways from `order[0]` to `to`, the one whose connections and ranks carry the fewest routes; of
/// those, the one over the lowest ranks.
fn lightest(near: &[Vec<usize>], order: &[usize], far: &[usize], load: &Load, to: usize) -> Vec<usize> {
    let mut best = vec![(usize::MAX, usize::MAX); near.len()];
    best[order[0]] = (0, order[0]);
    for &rank in order.iter().skip(1).take_while(|rank| far[**rank] <= far[to]) {
        let before = near[rank].iter().filter(|prev| far[**prev] + 1 == far[rank]);
        let way = |prev: &usize| {
            let carried = |at| load.get(&at).copied().unwrap_or(0);
            let through = if *prev == order[0] { 0 } else { carried((*prev, *prev)) };
            (best[*prev].0 + carried(edge(*prev, rank)) + through, *prev)
        };
        if let Some(least) = before.map(way).min() {
            best[rank] = least;
        }
    }
    let mut path = vec![to];
    while let Some(&rank) = path.last()
        && rank != order[0]
    {
        path.push(best[rank].1);
    }
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn routes(size: usize, edges: &[(usize, usize)]) -> Result<Routes, Vec<Vec<usize>>> {
        Routes::new(size, |a, b| edges.contains(&(a, b)) || edges.contains(&(b, a)))
    }

    #[test]
    fn a_chain_a_ring_and_islands() {
        let chain = routes(4, &[(0, 1), (1, 2), (2, 3)]).unwrap();
        assert_eq!(chain.between(0, 3), [1, 2]);
        assert_eq!(chain.between(3, 0), [2, 1]);
        assert_eq!(chain.between(1, 2), [] as [usize; 0]);
        assert_eq!(chain.through(0), []);
        assert_eq!(chain.through(1).len(), 4);
        assert!(chain.through(1).contains(&Passing { from: 3, to: 0, prev: 2, next: 0 }));
        assert!(!chain.is_direct() && routes(3, &[(0, 1), (1, 2), (0, 2)]).unwrap().is_direct());
        assert_eq!(routes(5, &[(3, 1), (0, 4)]).unwrap_err(), [vec![0, 4], vec![1, 3], vec![2]]);
        assert!(routes(1, &[]).unwrap().is_direct());
    }

    /// Two ways round between opposite ranks: no rank of a ring carries much more than another.
    #[test]
    fn equal_routes_are_shared_out() {
        for size in [4, 6, 8, 16] {
            let ring = Routes::new(size, |a, b| a - b == 1 || a - b == size - 1).unwrap();
            let carried: Vec<usize> = (0..size).map(|rank| ring.through(rank).len()).collect();
            let (least, most) = (carried.iter().min().unwrap(), carried.iter().max().unwrap());
            assert!(most - least <= 4, "{carried:?}");
        }
        // Two hubs, and ten ranks that reach both and nothing else.
        let hubs = Routes::new(12, |a, b| a >= 2 && b < 2).unwrap();
        let (first, second) = (hubs.through(0).len(), hubs.through(1).len());
        assert!(first.abs_diff(second) <= 4, "{first} and {second}");
    }

    proptest! {
        /// On any connected graph: every route goes over connections, is as short as can be, the same back,
        /// and each rank on it knows where it comes from and goes to.
        #[test]
        fn routes_lead_there(
            size in 1usize..12,
            parents in proptest::collection::vec(any::<prop::sample::Index>(), 12),
            more in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..12),
        ) {
            let mut linked = vec![vec![false; size]; size];
            let tree = (1..size).map(|a| (a, parents[a].index(a)));
            for (a, b) in tree.chain(more.iter().map(|(a, b)| (a.index(size), b.index(size)))) {
                (linked[a][b], linked[b][a]) = (a != b, a != b);
            }
            let routes = Routes::new(size, |a, b| linked[a][b]).unwrap();
            // Floyd and Warshall's way to the same distances.
            let mut far: Vec<Vec<usize>> = (0..size)
                .map(|a| (0..size).map(|b| if a == b { 0 } else if linked[a][b] { 1 } else { 99 }).collect())
                .collect();
            for k in 0..size { for a in 0..size { for b in 0..size {
                far[a][b] = far[a][b].min(far[a][k] + far[k][b]);
            } } }
            for a in 0..size {
                for b in (0..size).filter(|b| *b != a) {
                    let between = routes.between(a, b);
                    prop_assert_eq!(between.len() + 1, far[a][b]);
                    let path: Vec<usize> = [a].into_iter().chain(between.clone()).chain([b]).collect();
                    for hop in path.windows(2) {
                        prop_assert!(linked[hop[0]][hop[1]]);
                    }
                    for at in path.windows(3) {
                        let passing = Passing { from: a, to: b, prev: at[0], next: at[2] };
                        prop_assert!(routes.through(at[1]).contains(&passing));
                    }
                    let mut back = routes.between(b, a);
                    back.reverse();
                    prop_assert_eq!(back, between);
                }
                prop_assert_eq!(
                    routes.through(a).len(),
                    (0..size * size).filter(|i| routes.between(i / size, i % size).contains(&a)).count()
                );
            }
        }

        #[test]
        fn islands_hold_every_rank_once(size in 1usize..10, seed: u64) {
            let linked = |a: usize, b: usize| (seed.rotate_left((a * 7 + b * 13) as u32) & 7) == 0;
            if let Err(islands) = Routes::new(size, linked) {
                let mut all: Vec<usize> = islands.concat();
                all.sort_unstable();
                prop_assert!(all.into_iter().eq(0..size));
                let of = |rank| islands.iter().position(|island| island.contains(&rank));
                for a in 0..size { for b in 0..a {
                    prop_assert!(!linked(a, b) || of(a) == of(b));
                } }
            }
        }
    }
}
