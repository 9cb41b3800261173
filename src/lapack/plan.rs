//! What a panel's pivots mean for the rows of every other column: which rows become U, and where the
//! displaced rows go.
//!
//! The `jb` interchanges of a panel are composed into one permutation, so that each row travels once,
//! straight to its final owner, instead of once an interchange (HPL's `SWAP` variants move them in
//! ⌈log₂ P⌉ or 2P steps through the process column).

use std::collections::HashMap;

use crate::dist::index::{Axis, Global, Row};
use fulmen_kernels::RowSource;

/// The composed permutation, in rows of the view (0 is its first row).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Permutation {
    /// Row that becomes row `first + i`.
    pub(crate) source: Vec<usize>,
    /// (where to, where from): rows of the top block that move below it.
    pub(crate) moves: Vec<(usize, usize)>,
}

impl Permutation {
    /// Every row stays: U is rows `rows` as they are.
    pub(crate) fn identity(rows: std::ops::Range<usize>) -> Self {
        Permutation { source: rows.collect(), moves: Vec::new() }
    }

    /// Composes the interchanges `first + i` ↔ `ipiv[i]`, i ascending.
    pub(crate) fn new(first: usize, ipiv: &[usize]) -> Self {
        let top = first..first + ipiv.len();
        let mut source: Vec<usize> = top.clone().collect();
        let mut below: HashMap<usize, usize> = HashMap::new();
        for (i, &row) in ipiv.iter().enumerate() {
            if top.contains(&row) {
                source.swap(i, row - first);
            } else {
                let held = below.entry(row).or_insert(row);
                std::mem::swap(&mut source[i], held);
            }
        }
        let mut moves: Vec<_> = below.into_iter().filter(|(to, from)| to != from).collect();
        moves.sort_unstable();
        Permutation { source, moves }
    }

    /// The permutation that undoes this one, whose top block begins at row `first`.
    pub(crate) fn inverse(&self, first: usize) -> Self {
        let top = first..first + self.source.len();
        let mut source: Vec<usize> = top.clone().collect();
        let mut moves = Vec::new();
        for (to, &from) in top.clone().zip(&self.source) {
            if top.contains(&from) {
                source[from - first] = to;
            } else {
                moves.push((from, to));
            }
        }
        for &(to, from) in &self.moves {
            source[from - first] = to;
        }
        moves.sort_unstable();
        Permutation { source, moves }
    }
}

/// What one rank of the process column does for a [`Permutation`], in local rows of the matrix.
///
/// The ranks of the column all derive the same messages from the same pivots. Rank p's message to all:
/// its rows of U, in order of U's rows; its message to q: its displaced rows that go to q, in order of
/// destination. A message is column-major, a column for each column of the chunk.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowPlan {
    /// Where row i of U is found.
    pub(crate) u: Vec<RowSource>,
    /// My rows of U that the others want: local rows, in order.
    pub(crate) send_u: Vec<usize>,
    /// For each rank of the column: my displaced rows that it gets.
    pub(crate) send_moves: Vec<Vec<usize>>,
    /// How many rows of U come from each rank (0 for myself).
    pub(crate) recv_u: Vec<usize>,
    /// How many displaced rows come from each rank.
    pub(crate) recv_moves: Vec<usize>,
    /// (local destination, source) of the displaced rows that end here. A `Received(p, i)` counts the rows
    /// of U from p first: i ≥ recv_u\[p\].
    pub(crate) moves: Vec<(usize, RowSource)>,
    /// My rows of the top block: (local row, row of U).
    pub(crate) top: Vec<(usize, usize)>,
}

impl RowPlan {
    /// The part of process row `me` in `permutation`. Row r of the view is row `offset + r` of `rows`.
    pub(crate) fn new(
        permutation: &Permutation,
        first: usize,
        rows: Axis<Row>,
        offset: usize,
        me: usize,
        nprow: usize,
    ) -> Self {
        let global = |row: usize| Global::<Row>::new(offset + row);
        let owner = |row: usize| rows.owner(global(row));
        let local = |row: usize| rows.local(global(row)).0;
        let mut plan = RowPlan {
            send_moves: vec![Vec::new(); nprow],
            recv_u: vec![0; nprow],
            recv_moves: vec![0; nprow],
            ..RowPlan::default()
        };
        for (i, &row) in permutation.source.iter().enumerate() {
            let p = owner(row);
            if p == me {
                plan.u.push(RowSource::Local(local(row)));
                plan.send_u.push(local(row));
            } else {
                plan.u.push(RowSource::Received(p, plan.recv_u[p]));
                plan.recv_u[p] += 1;
            }
            if owner(first + i) == me {
                plan.top.push((local(first + i), i));
            }
        }
        for &(to, from) in &permutation.moves {
            let (to_rank, from_rank) = (owner(to), owner(from));
            match (from_rank == me, to_rank == me) {
                (true, true) => plan.moves.push((local(to), RowSource::Local(local(from)))),
                (true, false) => plan.send_moves[to_rank].push(local(from)),
                (false, true) => {
                    let at = plan.recv_u[from_rank] + plan.recv_moves[from_rank];
                    plan.moves.push((local(to), RowSource::Received(from_rank, at)));
                    plan.recv_moves[from_rank] += 1;
                }
                (false, false) => {}
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Interchanging one after the other and moving by the composed permutation give the same rows.
        #[test]
        fn composed_as_one_by_one(first in 0usize..5, rest in prop::collection::vec(0usize..40, 1..12)) {
            let m = first + 60;
            let ipiv: Vec<usize> = rest.iter().enumerate().map(|(i, r)| first + i + r).collect();
            let mut one_by_one: Vec<usize> = (0..m).collect();
            for (i, &row) in ipiv.iter().enumerate() {
                one_by_one.swap(first + i, row);
            }
            let p = Permutation::new(first, &ipiv);
            let mut composed: Vec<usize> = (0..m).collect();
            for (i, &row) in p.source.iter().enumerate() {
                composed[first + i] = row;
            }
            for &(to, from) in &p.moves {
                prop_assert!(to >= first + ipiv.len() && (first..first + ipiv.len()).contains(&from));
                composed[to] = from;
            }
            prop_assert_eq!(&composed, &one_by_one);
            let back = p.inverse(first);
            let mut undone = composed.clone();
            for (i, &row) in back.source.iter().enumerate() {
                undone[first + i] = composed[row];
            }
            for &(to, from) in &back.moves {
                prop_assert!(to >= first + ipiv.len() && (first..first + ipiv.len()).contains(&from));
                undone[to] = composed[from];
            }
            prop_assert_eq!(undone, (0..m).collect::<Vec<_>>());
        }

        /// The plans of all ranks agree, and carrying them out moves every row to its place.
        #[test]
        fn plans_of_all_ranks_agree(
            nprow in 1usize..4, mb in 1usize..5, src in 0usize..3, offset in 0usize..4,
            rest in prop::collection::vec(0usize..20, 1..8),
        ) {
            let first = 2;
            let ipiv: Vec<usize> = rest.iter().enumerate().map(|(i, r)| first + i + r).collect();
            let m = 40;
            let rows = Axis::<Row>::new(offset + m, mb, src % nprow, nprow);
            let permutation = Permutation::new(first, &ipiv);
            let plans: Vec<_> =
                (0..nprow).map(|p| RowPlan::new(&permutation, first, rows, offset, p, nprow)).collect();
            let before = |p: usize, l: usize| rows.global(crate::dist::index::Local::new(l), p).0;
            let message = |p: usize, q: usize| -> Vec<usize> {
                plans[p].send_u.iter().chain(&plans[p].send_moves[q]).map(|&l| before(p, l)).collect()
            };
            let mut expect: Vec<usize> = (0..offset + m).collect();
            for (i, &row) in ipiv.iter().enumerate() {
                expect.swap(offset + first + i, offset + row);
            }
            for (me, plan) in plans.iter().enumerate() {
                let value = |s: RowSource| match s {
                    RowSource::Local(l) => before(me, l),
                    RowSource::Received(p, i) => message(p, me)[i],
                };
                for (i, &s) in plan.u.iter().enumerate() {
                    prop_assert_eq!(value(s), expect[offset + first + i]);
                }
                for &(to, s) in &plan.moves {
                    prop_assert_eq!(value(s), expect[before(me, to)]);
                }
                for p in (0..nprow).filter(|&p| p != me) {
                    prop_assert_eq!(message(p, me).len(), plan.recv_u[p] + plan.recv_moves[p]);
                }
                for &(l, i) in &plan.top {
                    prop_assert_eq!(before(me, l), offset + first + i);
                }
            }
        }
    }
}
