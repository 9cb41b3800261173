//! From matrices of any size to calls that the library can count: blocks where a size does not fit its
//! integers, copies where a leading dimension does not.

use std::ops::Range;

use faer::prelude::{Reborrow, ReborrowMut};

use super::library::Library;
use super::sub;
use crate::{Diag, Element, MatMut, MatRef, Op, Side, Uplo};

/// Blocks that have to be copied are cut to this.
const COPIED: usize = 1024;

fn letter(op: Op) -> u8 {
    match op {
        Op::NoTrans => b'N',
        Op::Trans => b'T',
        Op::ConjTrans => b'C',
    }
}

/// Leading dimension as BLAS wants it, which has its own wishes where there is nothing to lead.
fn lld<T>(a: MatRef<'_, T>) -> usize {
    assert!(a.row_stride() == 1 || a.nrows() <= 1, "matrices are column-major with unit row stride");
    if a.ncols() <= 1 {
        return a.nrows().max(1);
    }
    let lld = usize::try_from(a.col_stride()).unwrap_or(0);
    assert!(lld >= a.nrows().max(1), "lld is {}, but there are {} rows", a.col_stride(), a.nrows());
    lld
}

fn blocks(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(step).map(move |start| start..n.min(start + step))
}

/// A matrix whose leading dimension the library can count: itself, or a copy.
struct Counted<'a, T> {
    original: MatRef<'a, T>,
    copy: Option<Vec<T>>,
}

impl<'a, T: Element> Counted<'a, T> {
    fn new(original: MatRef<'a, T>, limit: usize) -> Self {
        let copy = (lld(original) > limit).then(|| {
            let columns =
                (0..original.ncols()).flat_map(|j| (0..original.nrows()).map(move |i| original[(i, j)]));
            columns.collect()
        });
        Counted { original, copy }
    }

    fn get(&self) -> (*const T, usize) {
        match &self.copy {
            Some(copy) => (copy.as_ptr(), self.original.nrows()),
            None => (self.original.as_ptr(), lld(self.original)),
        }
    }
}

/// Runs `call` on C, or on a copy of it that is then written back.
fn with_counted<T: Element>(mut c: MatMut<'_, T>, limit: usize, call: impl FnOnce(*mut T, usize)) {
    let counted = Counted::new(c.rb(), limit);
    let Some(mut copy) = counted.copy else {
        let lld = lld(c.rb());
        return call(c.as_ptr_mut(), lld);
    };
    let rows = c.nrows();
    call(copy.as_mut_ptr(), rows);
    for j in 0..c.ncols() {
        for i in 0..rows {
            c[(i, j)] = copy[i + j * rows];
        }
    }
}

/// C += α·op(A)·op(B); the shapes match, α and k are not 0.
pub(super) fn gemm<T: Element>(
    library: &Library,
    limit: usize,
    alpha: T,
    (op_a, a): (Op, MatRef<'_, T>),
    (op_b, b): (Op, MatRef<'_, T>),
    mut c: MatMut<'_, T>,
) {
    let (m, n, k) = (c.nrows(), c.ncols(), if op_a == Op::NoTrans { a.ncols() } else { a.nrows() });
    let copied = [lld(a), lld(b), lld(c.rb())].iter().any(|lld| *lld > limit);
    let step = if copied { limit.min(COPIED) } else { limit };
    for p in blocks(k, step) {
        for j in blocks(n, step) {
            let b = Counted::new(sub(op_b, b, p.clone(), j.clone()), limit);
            for i in blocks(m, step) {
                let a = Counted::new(sub(op_a, a, i.clone(), p.clone()), limit);
                let c = c.rb_mut().submatrix_mut(i.start, j.start, i.len(), j.len());
                let size = [i.len(), j.len(), p.len()];
                let ((a, lda), (b, ldb)) = (a.get(), b.get());
                with_counted(c, limit, |c, ldc| {
                    // SAFETY: pointers, sizes and leading dimensions of the views above; C is borrowed mutably.
                    unsafe {
                        library.gemm(
                            letter(op_a),
                            letter(op_b),
                            size,
                            alpha,
                            a,
                            lda,
                            b,
                            ldb,
                            T::one(),
                            c,
                            ldc,
                        )
                    };
                });
            }
        }
    }
}

/// Solves in place of B; the shapes match, α is not 0.
pub(super) fn trsm<T: Element>(
    library: &Library,
    limit: usize,
    (side, uplo, op, diag): (Side, Uplo, Op, Diag),
    alpha: T,
    a: MatRef<'_, T>,
    mut b: MatMut<'_, T>,
) {
    if a.nrows() == 0 {
        return;
    }
    assert!(a.nrows() <= limit, "trsm: order {} is more than this BLAS can count", a.nrows());
    let flags = [
        if side == Side::Left { b'L' } else { b'R' },
        if uplo == Uplo::Lower { b'L' } else { b'U' },
        letter(op),
        if diag == Diag::Unit { b'U' } else { b'N' },
    ];
    let (m, n) = (b.nrows(), b.ncols());
    let step = if lld(b.rb()) > limit { limit.min(COPIED) } else { limit };
    let a = Counted::new(a, limit);
    let (a, lda) = a.get();
    // Only the free dimension may need cutting.
    for free in blocks(if side == Side::Left { n } else { m }, step) {
        let b = match side {
            Side::Left => b.rb_mut().subcols_mut(free.start, free.len()),
            Side::Right => b.rb_mut().subrows_mut(free.start, free.len()),
        };
        let (m, n) = (b.nrows(), b.ncols());
        with_counted(b, limit, |b, ldb| {
            // SAFETY: as in `gemm`.
            unsafe { library.trsm(flags, m, n, alpha, a, lda, b, ldb) };
        });
    }
}
