//! Recursive LU of a tall panel with partial pivoting, by a team of threads on one rank's rows.
//!
//! The rows may be only a part of the panel: what concerns other ranks is behind [`PivotExchange`].
//! (Interface; the factorisation follows.)

use crate::{MatMut, Scalar};

/// HPL's PFACT and RFACT: in which order columns and updates are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Variant {
    /// Left-looking: a column is brought up to date just before it is factored.
    Left,
    /// Crout: row and column of U and L are brought up to date together.
    Crout,
    /// Right-looking: a factored column updates all that is right of it.
    Right,
}

/// How a panel is cut: HPL's RFACT, PFACT, NBMIN and NDIV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PanelShape {
    /// Variant of the recursion.
    pub rfact: Variant,
    /// Variant of the base case.
    pub pfact: Variant,
    /// Widest base case (at least 1).
    pub nbmin: usize,
    /// Parts that a recursion step cuts its columns into (at least 2).
    pub ndiv: usize,
}

/// The best pivot that this rank found in one column.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate<T> {
    /// Local row in the panel.
    pub row: usize,
    /// The element there.
    pub value: T,
}

/// What the panel's factorisation needs from the other ranks of the process column.
///
/// A panel of jb columns has a top: the jb rows of the matrix that become rows of L11 and U11. The k-th
/// of them may lie on any rank. `top` (jb × jb, column-major) is the replicated triangle: when
/// column j is done, its row j holds the pivot row on every rank.
pub trait PivotExchange<T: Scalar> {
    /// Why the other ranks could not be reached.
    type Error: Send;

    /// First local row of the panel that column j may still pivot on: the number of local rows
    /// among the first j rows of the top.
    fn first_active(&self, j: usize) -> usize;

    /// Settles the pivot of column j among the ranks and moves the rows.
    ///
    /// `best` is this rank's candidate, `None` when it has no active row. Of equal sizes
    /// ([`Scalar::abs1`]) the lowest global row wins. On return row j of `top` holds the pivot row's
    /// jb elements, and the pivot row's place in `panel` (on the rank that owned it) holds what was
    /// row j of the top. Returns the global row that was chosen.
    ///
    /// # Errors
    /// When a rank is lost.
    fn exchange(
        &mut self,
        j: usize,
        best: Option<Candidate<T>>,
        panel: MatMut<'_, T>,
        top: MatMut<'_, T>,
    ) -> Result<usize, Self::Error>;
}
