//! The P × Q grid of ranks that matrices are dealt over.

use std::sync::Arc;

use crate::comm::Group;
use crate::error::{Error, Result};
use crate::fabric::Fabric;

/// How ranks are laid out over the grid: HPL's `PMAP`, BLACS's `order`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// `R`: rank 1 is right of rank 0.
    #[default]
    RowMajor,
    /// `C`: rank 1 is below rank 0.
    ColMajor,
}

/// A grid of `nprow` × `npcol` ranks, the first `nprow · npcol` of a fabric. Further ranks have no part
/// in it: for them [`Grid::coords`] is `None`, and only the sizes may be asked for.
pub struct Grid {
    nprow: usize,
    npcol: usize,
    order: Order,
    fabric: Arc<dyn Fabric>,
    place: Option<Place>,
}

struct Place {
    myrow: usize,
    mycol: usize,
    all: Group,
    row: Group,
    col: Group,
}

impl Grid {
    /// Lays the first `nprow · npcol` ranks out as a grid. Every rank of the fabric may call it; none is
    /// waited for.
    ///
    /// # Errors
    /// [`Error::Argument`] when a dimension is 0 or there are too few ranks.
    pub fn new(fabric: Arc<dyn Fabric>, nprow: usize, npcol: usize, order: Order) -> Result<Arc<Self>> {
        for (name, value) in [("P", nprow), ("Q", npcol)] {
            if value == 0 {
                return Err(Error::argument(
                    name,
                    value,
                    "a grid has at least one rank",
                    "give a positive number",
                ));
            }
        }
        let size = fabric.size();
        if nprow.checked_mul(npcol).is_none_or(|all| all > size) {
            return Err(Error::argument(
                "P x Q",
                format!("{nprow} x {npcol}"),
                format!("needs {} ranks, but there are {size}", nprow as u128 * npcol as u128),
                format!("start more ranks, or choose P and Q with P x Q <= {size}"),
            ));
        }
        let rank_at = |p, q| rank_at(nprow, npcol, order, p, q);
        let me = fabric.rank();
        let place = (me < nprow * npcol)
            .then(|| {
                let (myrow, mycol) = coords_of(nprow, npcol, order, me);
                let group = |ranks: Vec<usize>| Group::new(Arc::clone(&fabric), ranks);
                Ok::<_, Error>(Place {
                    myrow,
                    mycol,
                    all: group((0..nprow * npcol).collect())?,
                    row: group((0..npcol).map(|q| rank_at(myrow, q)).collect())?,
                    col: group((0..nprow).map(|p| rank_at(p, mycol)).collect())?,
                })
            })
            .transpose()?;
        Ok(Arc::new(Grid { nprow, npcol, order, fabric, place }))
    }

    /// The grid of all ranks that is nearest to a square, with no more rows than columns.
    ///
    /// # Errors
    /// As [`Grid::new`].
    pub fn squarest(fabric: Arc<dyn Fabric>) -> Result<Arc<Self>> {
        let (nprow, npcol) = Grid::squarest_shape(fabric.size());
        Grid::new(fabric, nprow, npcol, Order::RowMajor)
    }

    /// `size` as P × Q with P ≤ Q and P as large as possible.
    pub fn squarest_shape(size: usize) -> (usize, usize) {
        let nprow = (1..=size.isqrt().max(1)).rev().find(|p| size.is_multiple_of(*p)).unwrap_or(1);
        (nprow, size / nprow)
    }

    /// Process rows (P).
    pub fn nprow(&self) -> usize {
        self.nprow
    }

    /// Process columns (Q).
    pub fn npcol(&self) -> usize {
        self.npcol
    }

    /// How ranks are laid out.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The fabric.
    pub fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.fabric
    }

    /// This rank's process row and column; `None` when it is not in the grid.
    pub fn coords(&self) -> Option<(usize, usize)> {
        self.place.as_ref().map(|p| (p.myrow, p.mycol))
    }

    /// [`Grid::coords`] for what only members may do.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank that is not in the grid.
    pub fn require_member(&self) -> Result<(usize, usize)> {
        self.coords().ok_or_else(|| {
            Error::argument(
                "grid",
                format!("{} x {}", self.nprow, self.npcol),
                format!("rank {} is not in it", self.fabric.rank()),
                "let ranks for which Grid::coords() is None skip what the grid's members do",
            )
        })
    }

    #[allow(clippy::expect_used, reason = "documented panic")]
    fn place(&self) -> &Place {
        self.place.as_ref().expect("a rank outside the grid has no place in it: ask coords() first")
    }

    /// This rank's process row.
    ///
    /// # Panics
    /// On a rank that is not in the grid.
    pub fn myrow(&self) -> usize {
        self.place().myrow
    }

    /// This rank's process column.
    ///
    /// # Panics
    /// On a rank that is not in the grid.
    pub fn mycol(&self) -> usize {
        self.place().mycol
    }

    /// The fabric's rank at process row `p`, process column `q`.
    ///
    /// # Panics
    /// When `p` or `q` is not in the grid.
    pub fn rank_at(&self, p: usize, q: usize) -> usize {
        assert!(p < self.nprow && q < self.npcol, "({p}, {q}) in a {} x {} grid", self.nprow, self.npcol);
        rank_at(self.nprow, self.npcol, self.order, p, q)
    }

    /// Process row and column of a rank of the grid.
    ///
    /// # Panics
    /// When `rank` is not in the grid.
    pub fn coords_of(&self, rank: usize) -> (usize, usize) {
        assert!(rank < self.nprow * self.npcol, "rank {rank} in a {} x {} grid", self.nprow, self.npcol);
        coords_of(self.nprow, self.npcol, self.order, rank)
    }

    /// All ranks of the grid; index in the group = rank of the fabric.
    ///
    /// # Panics
    /// On a rank that is not in the grid.
    pub fn all(&self) -> &Group {
        &self.place().all
    }

    /// My process row; index in the group = process column.
    ///
    /// # Panics
    /// On a rank that is not in the grid.
    pub fn row_group(&self) -> &Group {
        &self.place().row
    }

    /// My process column; index in the group = process row.
    ///
    /// # Panics
    /// On a rank that is not in the grid.
    pub fn col_group(&self) -> &Group {
        &self.place().col
    }
}

fn rank_at(nprow: usize, npcol: usize, order: Order, p: usize, q: usize) -> usize {
    match order {
        Order::RowMajor => p * npcol + q,
        Order::ColMajor => q * nprow + p,
    }
}

fn coords_of(nprow: usize, npcol: usize, order: Order, rank: usize) -> (usize, usize) {
    match order {
        Order::RowMajor => (rank / npcol, rank % npcol),
        Order::ColMajor => (rank % nprow, rank / nprow),
    }
}

impl std::fmt::Debug for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {} {:?}, here {:?}", self.nprow, self.npcol, self.order, self.coords())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squarest_shapes_use_every_rank() {
        for (size, shape) in [
            (1, (1, 1)),
            (2, (1, 2)),
            (3, (1, 3)),
            (4, (2, 2)),
            (6, (2, 3)),
            (7, (1, 7)),
            (12, (3, 4)),
            (36, (6, 6)),
        ] {
            assert_eq!(Grid::squarest_shape(size), shape);
        }
    }
}
