//! What a distributed matrix looks like, less where it is.

use super::index::{Axis, Col, Row};
use crate::error::{Error, Result};

/// Shape and block-cyclic layout of a matrix: a ScaLAPACK descriptor less context and `LLD`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Desc {
    /// Global rows.
    pub m: usize,
    /// Global columns.
    pub n: usize,
    /// Rows of a block, at least 1.
    pub mb: usize,
    /// Columns of a block, at least 1.
    pub nb: usize,
    /// Process row that holds the first row.
    pub rsrc: usize,
    /// Process column that holds the first column.
    pub csrc: usize,
}

/// How a matrix is cut and dealt, whatever its shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blocks {
    /// Rows of a block, at least 1.
    pub mb: usize,
    /// Columns of a block, at least 1.
    pub nb: usize,
    /// Process row that holds the first row.
    pub rsrc: usize,
    /// Process column that holds the first column.
    pub csrc: usize,
}

impl Blocks {
    /// Square blocks of nb, the first on process (0, 0).
    pub const fn square(nb: usize) -> Self {
        Blocks { mb: nb, nb, rsrc: 0, csrc: 0 }
    }
}

impl Desc {
    /// An m × n matrix cut and dealt like this.
    pub const fn of(m: usize, n: usize, Blocks { mb, nb, rsrc, csrc }: Blocks) -> Self {
        Desc { m, n, mb, nb, rsrc, csrc }
    }

    /// An m × n matrix in mb × nb blocks, the first on process (0, 0).
    pub const fn new(m: usize, n: usize, mb: usize, nb: usize) -> Self {
        Desc { m, n, mb, nb, rsrc: 0, csrc: 0 }
    }

    /// An m × n matrix in square blocks of nb.
    pub const fn square_blocks(m: usize, n: usize, nb: usize) -> Self {
        Desc::new(m, n, nb, nb)
    }

    /// The same with the first block on process (`rsrc`, `csrc`).
    #[must_use]
    pub const fn with_source(self, rsrc: usize, csrc: usize) -> Self {
        Desc { rsrc, csrc, ..self }
    }

    /// Checks every entry for a grid of `nprow` × `npcol`; returns the axes of rows and columns.
    ///
    /// # Errors
    /// [`Error::Argument`] that names the entry as ScaLAPACK does (`MB`, `NB`, `RSRC`, `CSRC`, `M`, `N`).
    pub fn axes(&self, nprow: usize, npcol: usize) -> Result<(Axis<Row>, Axis<Col>)> {
        for (name, value) in [("MB", self.mb), ("NB", self.nb)] {
            if value == 0 {
                return Err(Error::argument(
                    name,
                    value,
                    "a block holds at least one row and one column",
                    "give a positive block size; 128 to 384 suit large matrices",
                ));
            }
        }
        for (name, value, count, of) in
            [("RSRC", self.rsrc, nprow, "rows"), ("CSRC", self.csrc, npcol, "columns")]
        {
            if value >= count {
                return Err(Error::argument(
                    name,
                    value,
                    format!("the grid has {count} process {of}, counted from 0"),
                    format!("give a source below {count}; 0 is usual"),
                ));
            }
        }
        // Sizes that no address space holds would make later arithmetic overflow.
        let rounded = |x: usize, b: usize, p: usize| {
            x.checked_next_multiple_of(b).and_then(|x| b.checked_mul(p).and_then(|bp| x.checked_add(bp)))
        };
        for (name, x, b, p) in [("M", self.m, self.mb, nprow), ("N", self.n, self.nb, npcol)] {
            if x > 0 && rounded(x, b.min(x), p).is_none_or(|x| x > isize::MAX as usize / 2) {
                return Err(Error::argument(name, x, "is beyond all memory", "give a smaller size"));
            }
        }
        Ok((Axis::new(self.m, self.mb, self.rsrc, nprow), Axis::new(self.n, self.nb, self.csrc, npcol)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(desc: Desc) -> String {
        match desc.axes(2, 3) {
            Err(e @ Error::Argument { .. }) => e.to_string(),
            other => panic!("{desc:?} gave {other:?}"),
        }
    }

    #[test]
    fn each_bad_entry_is_named_with_its_value() {
        let good = Desc::new(10, 20, 3, 4).with_source(1, 2);
        assert!(good.axes(2, 3).is_ok());
        assert!(refused(Desc { mb: 0, ..good }).starts_with("MB: 0: "));
        assert!(refused(Desc { nb: 0, ..good }).starts_with("NB: 0: "));
        let message = refused(Desc { rsrc: 2, ..good });
        assert!(message.starts_with("RSRC: 2: the grid has 2 process rows"), "{message}");
        assert!(refused(Desc { csrc: 3, ..good }).contains("3 process columns"));
        assert!(refused(Desc { m: usize::MAX, ..good }).starts_with("M: "));
        assert!(refused(Desc { n: usize::MAX / 2, ..good }).starts_with("N: "));
    }

    #[test]
    fn empty_matrices_and_huge_blocks_are_legal() {
        let (rows, cols) = Desc::new(0, 7, usize::MAX, 3).axes(2, 2).unwrap();
        assert_eq!((rows.count(0), rows.count(1)), (0, 0));
        assert_eq!((cols.count(0), cols.count(1)), (4, 3));
    }
}
