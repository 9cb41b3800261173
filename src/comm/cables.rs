//! How the ranks of a group are cabled, and trees along the cables. Pure but for [`Cables::gather`].

use super::group::Group;
use super::topology::Topology;
use crate::error::{Error, Result};

/// How many cables lie between each two members of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cables {
    size: usize,
    /// From member, to member; 0 from one to itself.
    hops: Vec<usize>,
}

impl Cables {
    /// What [`crate::fabric::Fabric::hops`] says on each member. Every member calls it.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn gather(group: &Group) -> Result<Self> {
        let to =
            |rank: &usize| if *rank == group.ranks()[group.me()] { 0 } else { group.fabric().hops(*rank) };
        let mine: Vec<u64> = group.ranks().iter().map(|rank| to(rank) as u64).collect();
        let mut all = vec![0; mine.len() * mine.len()];
        group.all_gather(&mine, &mut all)?;
        let hops: Option<Vec<usize>> = all.into_iter().map(|hops| usize::try_from(hops).ok()).collect();
        let hops = hops.ok_or_else(|| Error::Internal("a distance between ranks that cannot be".into()))?;
        Ok(Cables { size: mine.len(), hops })
    }

    /// Of `size` members with `hops(a, b)` cables between each two.
    pub fn new(size: usize, hops: impl Fn(usize, usize) -> usize) -> Self {
        let at = |i: usize| if i / size == i % size { 0 } else { hops(i / size, i % size) };
        Cables { size, hops: (0..size * size).map(at).collect() }
    }

    /// `n` members one after the other.
    pub fn chain(n: usize) -> Self {
        Cables::new(n, usize::abs_diff)
    }

    /// `n` members in a circle.
    pub fn ring(n: usize) -> Self {
        Cables::new(n, |a, b| a.abs_diff(b).min(n - a.abs_diff(b)))
    }

    /// Number of members.
    #[allow(clippy::len_without_is_empty, reason = "a group has at least the rank that made it")]
    pub fn len(&self) -> usize {
        self.size
    }

    /// How many lie between `a` and `b`.
    pub fn between(&self, a: usize, b: usize) -> usize {
        self.hops[a * self.size + b]
    }

    /// Whether all members are joined directly.
    pub fn is_direct(&self) -> bool {
        self.hops.iter().all(|hops| *hops <= 1)
    }

    /// A tree that crosses as few cables as can be: the parent of each member, for `root` itself. Of several,
    /// one in which members pass on to few others, so that a message in many pieces flows through it as
    /// through a chain.
    pub fn tree(&self, root: usize) -> Vec<usize> {
        let n = self.size;
        let mut parent = vec![usize::MAX; n];
        let mut children = vec![0; n];
        parent[root] = root;
        // Prim's way, with (cables, children, place) as the order.
        for _ in 1..n {
            let joined = (0..n).filter(|p| parent[*p] != usize::MAX);
            let next = joined
                .flat_map(|p| (0..n).map(move |m| (p, m)))
                .filter(|(_, m)| parent[*m] == usize::MAX)
                .min_by_key(|&(p, m)| (self.between(p, m), children[p], (m + n - root) % n, p));
            if let Some((p, m)) = next {
                parent[m] = p;
                children[p] += 1;
            }
        }
        parent
    }

    /// How many cables a message from `root` to all others crosses, its parts counted as such.
    pub fn crossings(&self, shape: Topology, root: usize) -> f64 {
        let n = self.size;
        if shape == Topology::Cables && !self.is_direct() {
            let tree = self.tree(root);
            return (0..n).map(|member| self.between(tree[member], member)).sum::<usize>() as f64;
        }
        let pieces = shape.pieces(n);
        let member = |relative: usize| (relative + root) % n;
        let crossed = |relative: usize, piece: usize| {
            shape.parent(n, relative, piece).map_or(0, |p| self.between(member(p), member(relative)))
        };
        let all: usize = (0..n).map(|m| (0..pieces).map(|piece| crossed(m, piece)).sum::<usize>()).sum();
        all as f64 / pieces as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn trees_follow_the_cables() {
        assert_eq!(Cables::chain(4).tree(0), [0, 0, 1, 2]);
        assert_eq!(Cables::chain(4).tree(2), [1, 2, 2, 2]);
        assert_eq!(Cables::ring(4).tree(3), [3, 0, 1, 3]);
        // A hub in the middle; a root at its rim.
        let star = Cables::new(5, |a, b| if a.min(b) == 0 { 1 } else { 2 });
        assert_eq!(star.tree(3), [3, 0, 0, 3, 0]);
        // Everyone is joined: a chain, and so it is round one pair that is not.
        assert_eq!(Cables::new(4, |_, _| 1).tree(1), [3, 1, 1, 2]);
        let but_one = Cables::new(4, |a, b| if a + b == 3 && a.abs_diff(b) == 1 { 2 } else { 1 });
        let tree = but_one.tree(0);
        assert!((0..4).all(|m| but_one.between(tree[m], m) <= 1), "{tree:?}");
        assert!((0..4).all(|p| (0..4).filter(|m| *m != p && tree[*m] == p).count() <= 1), "{tree:?}");
    }

    #[test]
    fn what_shapes_cost() {
        assert_eq!(Cables::chain(4).crossings(Topology::Cables, 2), 3.0);
        assert_eq!(Cables::chain(4).crossings(Topology::Ring, 0), 3.0);
        // 2 to 3 to 0 to 1: one, three, one.
        assert_eq!(Cables::chain(4).crossings(Topology::Ring, 2), 5.0);
        let direct = Cables::new(4, |_, _| 1);
        assert!(direct.is_direct() && !Cables::chain(3).is_direct());
        for shape in [Topology::Ring, Topology::RingM, Topology::TwoRing, Topology::Tree, Topology::Cables] {
            assert_eq!(direct.crossings(shape, 1), 3.0, "{shape}");
        }
        // Each piece but the root's own goes to its member and then round the rest.
        assert!(direct.crossings(Topology::Long, 0) >= 3.0);
    }

    proptest! {
        /// On any distances: every member is reached from the root, and no tree has fewer crossings than one
        /// with a cable each.
        #[test]
        fn trees_reach_everyone(n in 1usize..9, hops in proptest::collection::vec(1usize..5, 81), root in 0usize..9) {
            let (cables, root) = (Cables::new(n, |a, b| hops[a.min(b) * 9 + a.max(b)]), root % n);
            let tree = cables.tree(root);
            for member in 0..n {
                let (mut at, mut steps) = (member, 0);
                while at != root {
                    at = tree[at];
                    steps += 1;
                    prop_assert!(steps < n);
                }
            }
            prop_assert!(cables.crossings(Topology::Cables, root) >= (n - 1) as f64);
            let star: usize = (0..n).map(|m| cables.between(root, m)).sum();
            prop_assert!(cables.crossings(Topology::Cables, root) <= star as f64 || cables.is_direct());
        }
    }
}
