//! Which way a panel goes through a process row: pure schedules, no communication.
//!
//! Members are counted from the root: the root is 0, its right neighbour 1, and so on round the row. A
//! message is cut into pieces, and each piece has a tree of its own; where the trees are chains the
//! members in the middle pass a piece on while the next is under way.

use std::fmt;
use std::str::FromStr;

use super::group::tree_parent;
use crate::error::{Error, Result};

/// The shape of a panel broadcast: HPL's six, a tree, and one that follows the cables.
///
/// In the modified (`M`) forms the root's right neighbour, which will factor the next panel, is served
/// first and passes nothing on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Topology {
    /// `0`, `1ring`: one chain through all.
    Ring,
    /// `1`, `1ringM`: the neighbour, then one chain through the rest.
    #[default]
    RingM,
    /// `2`, `2ring`: two chains, each through half.
    TwoRing,
    /// `3`, `2ringM`: the neighbour, then two chains through the rest.
    TwoRingM,
    /// `4`, `long`: a piece to each, then the pieces roll round the ring. Twice the messages of a
    /// chain, but no link carries the message more than once and all links are busy.
    Long,
    /// `5`, `longM`: the neighbour, then `long` among the rest.
    LongM,
    /// `tree`: binomial, ⌈log₂ n⌉ hops.
    Tree,
    /// `cables`: where ranks reach each other only through others, a tree along the cables
    /// ([`super::Cables::tree`]); elsewhere `1ringM`.
    Cables,
}

impl Topology {
    /// All of them, in the order of HPL's digits.
    pub const ALL: [Topology; 8] = [
        Topology::Ring,
        Topology::RingM,
        Topology::TwoRing,
        Topology::TwoRingM,
        Topology::Long,
        Topology::LongM,
        Topology::Tree,
        Topology::Cables,
    ];

    /// HPL's digit in `HPL.dat` and `HPL.out`, 0 to 5; 6 for the tree and 7 for the cables, which HPL has not.
    pub fn digit(self) -> u8 {
        self as u8
    }

    /// The topology of a digit.
    pub fn from_digit(digit: u8) -> Option<Self> {
        Topology::ALL.get(usize::from(digit)).copied()
    }

    /// The name that [`Topology::from_str`] reads.
    pub fn name(self) -> &'static str {
        ["1ring", "1ringM", "2ring", "2ringM", "long", "longM", "tree", "cables"][self as usize]
    }

    fn serves_neighbour_first(self) -> bool {
        matches!(self, Topology::RingM | Topology::TwoRingM | Topology::LongM | Topology::Cables)
    }

    /// How many pieces a message to `n` members is cut into.
    pub(super) fn pieces(self, n: usize) -> usize {
        match self {
            Topology::Long => n,
            Topology::LongM => (n - 1).max(1),
            _ => 1,
        }
    }

    /// Who passes `piece` on to `member` of `n`; `None` for the root.
    pub(super) fn parent(self, n: usize, member: usize, piece: usize) -> Option<usize> {
        let chains = |first: usize, starts: [usize; 2]| {
            if member == first || starts.contains(&member) { 0 } else { member - 1 }
        };
        let halves = |first: usize| first + (n - first).div_ceil(2);
        if member == 0 {
            return None;
        }
        if member == 1 && self.serves_neighbour_first() {
            return Some(0);
        }
        Some(match self {
            Topology::Ring => member - 1,
            Topology::RingM | Topology::Cables => chains(1, [2, 2]),
            Topology::TwoRing => chains(1, [1, halves(1)]),
            Topology::TwoRingM => chains(1, [2, halves(2)]),
            Topology::Long => {
                if piece == member {
                    0
                } else {
                    member - 1
                }
            }
            // Position in the ring that leaves the neighbour out: the root 0, member 2 next to it.
            Topology::LongM => match member - 1 {
                at if piece == at || at == 1 => 0,
                at => at,
            },
            Topology::Tree => tree_parent(member)?,
        })
    }

    /// When `piece` is passed to `member`: puts are issued, and arrive, in ascending order of this (and
    /// within it from the piece's start to its end).
    pub(super) fn step(self, n: usize, member: usize, piece: usize) -> (bool, usize) {
        let neighbour = member == 1 && self.serves_neighbour_first();
        let step = match self {
            _ if neighbour => piece,
            Topology::Long => (member + n - piece) % n,
            Topology::LongM => {
                let ring = n - 1;
                (member - 1 + ring - piece) % ring
            }
            _ => 0,
        };
        (!neighbour, step)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Topology {
    type Err = Error;

    /// A digit 0 to 7, or a name (`1ring`, `1rg`, `1rinM`, `blong`, … as HPL's files have them, in any case).
    fn from_str(text: &str) -> Result<Self> {
        let word = text.trim().to_ascii_lowercase();
        Ok(match word.as_str() {
            "0" | "1ring" | "1rg" => Topology::Ring,
            "1" | "1ringm" | "1rinm" | "1rm" => Topology::RingM,
            "2" | "2ring" | "2rg" => Topology::TwoRing,
            "3" | "2ringm" | "2rinm" | "2rm" => Topology::TwoRingM,
            "4" | "long" | "blong" | "lng" => Topology::Long,
            "5" | "longm" | "blonm" | "lnm" => Topology::LongM,
            "6" | "tree" => Topology::Tree,
            "7" | "cables" => Topology::Cables,
            _ => {
                return Err(Error::argument(
                    "BCAST",
                    text,
                    "is not a broadcast",
                    "write 0 (1ring), 1 (1ringM), 2 (2ring), 3 (2ringM), 4 (long), 5 (longM), 6 (tree) or 7 \
                     (cables)",
                ));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_reaches_every_member_from_one_that_has_it_before() {
        for topology in Topology::ALL {
            for n in 1..=17 {
                for piece in 0..topology.pieces(n) {
                    assert_eq!(topology.parent(n, 0, piece), None);
                    for member in 1..n {
                        let parent = topology.parent(n, member, piece).unwrap();
                        // Parents before children: no cycle, and waiting in order cannot deadlock.
                        assert!(parent < member, "{topology} of {n}: {parent} to {member}");
                        let key = |m| topology.step(n, m, piece);
                        if matches!(topology, Topology::Long | Topology::LongM) && parent > 0 {
                            assert!(
                                key(parent) < key(member),
                                "{topology} of {n}: piece {piece} to {member}"
                            );
                        }
                    }
                }
            }
        }
    }

    fn children(topology: Topology, n: usize, of: usize) -> Vec<usize> {
        (1..n).filter(|&m| (0..topology.pieces(n)).any(|p| topology.parent(n, m, p) == Some(of))).collect()
    }

    #[test]
    fn shapes_are_those_of_hpl() {
        assert_eq!(children(Topology::Ring, 6, 0), [1]);
        assert_eq!(children(Topology::Ring, 6, 5), [] as [usize; 0]);
        assert_eq!(children(Topology::RingM, 6, 0), [1, 2]);
        assert_eq!(children(Topology::RingM, 6, 1), [] as [usize; 0]);
        assert_eq!(children(Topology::RingM, 6, 2), [3]);
        assert_eq!(children(Topology::TwoRing, 7, 0), [1, 4]);
        assert_eq!(children(Topology::TwoRing, 7, 1), [2]);
        assert_eq!(children(Topology::TwoRing, 7, 3), [] as [usize; 0]);
        assert_eq!(children(Topology::TwoRingM, 8, 0), [1, 2, 5]);
        assert_eq!(children(Topology::TwoRingM, 8, 1), [] as [usize; 0]);
        assert_eq!(children(Topology::Long, 4, 0), [1, 2, 3]); // the spread
        assert_eq!(children(Topology::Long, 4, 2), [3]); // the roll
        assert_eq!(children(Topology::LongM, 5, 1), [] as [usize; 0]);
        assert_eq!(children(Topology::Tree, 8, 0), [1, 2, 4]);
    }

    /// What makes `long` long: nobody but the root's sends more than the message once.
    #[test]
    fn the_roll_uses_each_link_for_less_than_the_message() {
        for n in 2..12 {
            for member in 1..n {
                let sent = (0..n).filter(|&p| Topology::Long.parent(n, (member + 1) % n, p) == Some(member));
                assert!(sent.count() < n);
            }
            let spread =
                (2..n).map(|m| (0..n).filter(|&p| Topology::Long.parent(n, m, p) == Some(0)).count());
            assert!(spread.eq((2..n).map(|_| 1)));
        }
    }

    #[test]
    fn names_and_digits_are_read_back() {
        for topology in Topology::ALL {
            assert_eq!(topology.name().parse::<Topology>().unwrap(), topology);
            assert_eq!(topology.digit().to_string().parse::<Topology>().unwrap(), topology);
            assert_eq!(Topology::from_digit(topology.digit()), Some(topology));
        }
        assert_eq!("1rinM".parse::<Topology>().unwrap(), Topology::RingM);
        let message = "8".parse::<Topology>().unwrap_err().to_string();
        assert!(message.starts_with("BCAST: 8: "), "{message}");
    }
}
