//! The slow, obvious back end: the oracle that others are tested against, and the filler of their holes.
//!
//! Every element is one loop written as in the textbook, one fused step at a time, in one order.
//! Its packed layout is the documented one with a tile small enough that every edge is met in tests.

use faer::prelude::Reborrow;

use crate::{Description, Diag, Kernels, MatMut, MatRef, Op, Scalar, SharedMut, Side, Team, Tile, Uplo};

const TILE: Tile = Tile { mr: 4, nr: 4, mc: 64, nc: usize::MAX };

/// See the module's text.
pub struct Reference {
    description: Description,
}

impl Default for Reference {
    fn default() -> Self {
        Reference::new()
    }
}

impl Reference {
    /// Ready to use on any machine.
    pub fn new() -> Self {
        Reference {
            description: Description {
                backend: "reference".into(),
                detail: "textbook loops".into(),
                packing: packing_name(TILE),
            },
        }
    }
}

/// The documented layout is fixed by its tile: so is its name.
pub(crate) fn packing_name(tile: Tile) -> String {
    format!("slivers {} x {}", tile.mr, tile.nr)
}

/// Rows and columns of op(A).
pub(crate) fn shape_of<T>(op: Op, a: MatRef<'_, T>) -> (usize, usize) {
    match op {
        Op::NoTrans => (a.nrows(), a.ncols()),
        Op::Trans | Op::ConjTrans => (a.ncols(), a.nrows()),
    }
}

/// Checks the shapes of C := op(A)·op(B) and returns (m, n, k).
pub(crate) fn gemm_shape<T>(
    a: (Op, MatRef<'_, T>),
    b: (Op, MatRef<'_, T>),
    c: &MatMut<'_, T>,
) -> (usize, usize, usize) {
    let ((am, ak), (bk, bn)) = (shape_of(a.0, a.1), shape_of(b.0, b.1));
    assert!(
        am == c.nrows() && bn == c.ncols() && ak == bk,
        "gemm: C is {} x {}, op(A) {am} x {ak}, op(B) {bk} x {bn}",
        c.nrows(),
        c.ncols()
    );
    (am, bn, ak)
}

/// Checks the shapes of a triangular solve.
pub(crate) fn trsm_shape<T>(side: Side, a: MatRef<'_, T>, b: &MatMut<'_, T>) {
    let order = if side == Side::Left { b.nrows() } else { b.ncols() };
    assert!(
        a.nrows() == order && a.ncols() == order,
        "trsm: A is {} x {}, but B asks for order {order}",
        a.nrows(),
        a.ncols()
    );
}

fn element<T: Scalar>(op: Op, a: MatRef<'_, T>, i: usize, j: usize) -> T {
    match op {
        Op::NoTrans => a[(i, j)],
        Op::Trans => a[(j, i)],
        Op::ConjTrans => a[(j, i)].conjugate(),
    }
}

/// β·c as BLAS means it: c is not looked at when β is 0, and left alone when β is 1.
pub(crate) fn scaled<T: Scalar>(beta: T, c: T) -> T {
    if beta == T::default() {
        beta
    } else if beta == T::one() {
        c
    } else {
        beta * c
    }
}

/// The columns of op(A).
fn columns<T: Scalar>(op: Op, a: MatRef<'_, T>) -> Vec<Vec<T>> {
    let (m, n) = shape_of(op, a);
    (0..n).map(|j| (0..m).map(|i| element(op, a, i, j)).collect()).collect()
}

/// c := c + b·a for a column a, one fused step an element.
///
/// Compiled twice, since a CPU with FMA does in one instruction what is a function call else: the same bits.
fn add_multiple<T: Scalar>(c: &mut [T], b: T, a: &[T]) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
        #[target_feature(enable = "avx2,fma")]
        fn with_fma<T: Scalar>(c: &mut [T], b: T, a: &[T]) {
            steps(c, b, a);
        }
        // SAFETY: the CPU has both.
        return unsafe { with_fma(c, b, a) };
    }
    steps(c, b, a);
}

#[inline(always)]
fn steps<T: Scalar>(c: &mut [T], b: T, a: &[T]) {
    for (c, a) in c.iter_mut().zip(a) {
        *c = a.fused_mul_add(b, *c);
    }
}

/// c := α·A·b + c, where the sum starts from zero and runs in ascending order.
fn add_product<T: Scalar>(alpha: T, a: &[Vec<T>], b: impl Fn(usize) -> T, c: &mut [T]) {
    let mut sum = vec![T::default(); c.len()];
    for (p, a) in a.iter().enumerate() {
        add_multiple(&mut sum, b(p), a);
    }
    add_multiple(c, alpha, &sum);
}

/// Solves T·x = x₀ in place, T given by its columns: each x found is taken out of the equations left.
fn substitute<T: Scalar>(lower: bool, unit: bool, t: &[Vec<T>], x: &mut [T]) {
    let n = x.len();
    for p in 0..n {
        let p = if lower { p } else { n - 1 - p };
        if !unit {
            x[p] /= t[p][p];
        }
        let rest = if lower { p + 1..n } else { 0..p };
        let found = -x[p];
        add_multiple(&mut x[rest.clone()], found, &t[p][rest]);
    }
}

/// Index of the largest, a NaN being larger than everything; the first of equals.
pub(crate) fn iamax<T: Scalar>(x: &[T]) -> Option<usize> {
    let mut best = None;
    for (i, e) in x.iter().enumerate() {
        let size = e.abs1();
        if num_traits::Float::is_nan(size) {
            return Some(i);
        }
        if best.is_none_or(|(_, largest)| size > largest) {
            best = Some((i, size));
        }
    }
    best.map(|(i, _)| i)
}

/// Packs A as [`Tile`] documents it, for any `mr`.
pub(crate) fn pack_a<T: Scalar>(mr: usize, a: MatRef<'_, T>, out: &mut [T]) {
    let (m, k) = (a.nrows(), a.ncols());
    assert_eq!(out.len(), m.next_multiple_of(mr) * k, "pack_a: length of `out` for {m} x {k}");
    if k == 0 {
        return;
    }
    for (sliver, out) in out.chunks_exact_mut(mr * k).enumerate() {
        let rows = mr.min(m - sliver * mr);
        for (p, out) in out.chunks_exact_mut(mr).enumerate() {
            for i in 0..rows {
                out[i] = a[(sliver * mr + i, p)];
            }
            out[rows..].fill(T::default());
        }
    }
}

/// Packs B as [`Tile`] documents it: Bᵀ, packed as A is.
pub(crate) fn pack_b<T: Scalar>(nr: usize, b: MatRef<'_, T>, out: &mut [T]) {
    pack_a(nr, b.transpose(), out);
}

/// Element (p, j) of a packed operand of depth k lies here (for A: column p, row j).
fn packed_index(width: usize, k: usize, p: usize, j: usize) -> usize {
    j / width * width * k + p * width + j % width
}

/// The inverse of [`pack_b`].
pub(crate) fn unpack_b<T: Scalar>(nr: usize, packed: &[T], mut b: MatMut<'_, T>) {
    let (k, n) = (b.nrows(), b.ncols());
    assert_eq!(packed.len(), n.next_multiple_of(nr) * k, "unpack_b: length of `packed` for {k} x {n}");
    for j in 0..n {
        for p in 0..k {
            b[(p, j)] = packed[packed_index(nr, k, p, j)];
        }
    }
}

impl<T: Scalar> Kernels<T> for Reference {
    fn description(&self) -> &Description {
        &self.description
    }

    fn bitwise_stable(&self) -> bool {
        true
    }

    fn gemm(
        &self,
        team: &Team,
        alpha: T,
        a: (Op, MatRef<'_, T>),
        b: (Op, MatRef<'_, T>),
        beta: T,
        c: MatMut<'_, T>,
    ) {
        let (m, n, k) = gemm_shape(a, b, &c);
        let k = if alpha == T::default() { 0 } else { k };
        let op_a = if k == 0 { Vec::new() } else { columns(a.0, a.1) };
        let shared = SharedMut::new(c);
        team.run(|me| {
            let mine = me.share(n, 1);
            // SAFETY: members' shares of the columns are disjoint.
            let mut c = unsafe { shared.part(0..m, mine.clone()) };
            for (jj, j) in mine.enumerate() {
                let mut column: Vec<T> = (0..m).map(|i| scaled(beta, c[(i, jj)])).collect();
                if k > 0 {
                    add_product(alpha, &op_a, |p| element(b.0, b.1, p, j), &mut column);
                }
                (0..m).for_each(|i| c[(i, jj)] = column[i]);
            }
        });
    }

    fn trsm(
        &self,
        team: &Team,
        side: Side,
        uplo: Uplo,
        op: Op,
        diag: Diag,
        alpha: T,
        a: MatRef<'_, T>,
        b: MatMut<'_, T>,
    ) {
        trsm_shape(side, a, &b);
        // X·op(A) = αB is op(A)ᵀ·Xᵀ = αBᵀ: a row of B is solved as a column is.
        let left = side == Side::Left;
        let lower = ((uplo == Uplo::Lower) == (op == Op::NoTrans)) == left;
        let t = match (left, op) {
            _ if alpha == T::default() => Vec::new(),
            (true, _) => columns(op, a),
            (false, Op::NoTrans) => columns(Op::Trans, a),
            (false, Op::Trans) => columns(Op::NoTrans, a),
            (false, Op::ConjTrans) => columns(Op::ConjTrans, a.transpose()),
        };
        let (order, count) = if left { (b.nrows(), b.ncols()) } else { (b.ncols(), b.nrows()) };
        let shared = SharedMut::new(b);
        team.run(|me| {
            let mut x = vec![T::default(); order];
            for line in me.share(count, 1) {
                let (rows, cols) = if left { (0..order, line..line + 1) } else { (line..line + 1, 0..order) };
                // SAFETY: members' shares of the lines are disjoint.
                let part = unsafe { shared.part(rows, cols) };
                let mut part = if left { part } else { part.transpose_mut() };
                if alpha != T::default() {
                    (0..order).for_each(|i| x[i] = alpha * part[(i, 0)]);
                    substitute(lower, diag == Diag::Unit, &t, &mut x);
                }
                (0..order).for_each(|i| part[(i, 0)] = x[i]);
            }
        });
    }

    fn tile(&self) -> Tile {
        TILE
    }

    fn pack_a(&self, a: MatRef<'_, T>, out: &mut [T]) {
        pack_a(TILE.mr, a, out);
    }

    fn pack_b(&self, b: MatRef<'_, T>, out: &mut [T]) {
        pack_b(TILE.nr, b, out);
    }

    fn unpack_b(&self, packed: &[T], b: MatMut<'_, T>) {
        unpack_b(TILE.nr, packed, b);
    }

    fn trsm_packed(&self, l: MatRef<'_, T>, b: &mut [T]) {
        let k = l.nrows();
        assert_eq!(k, l.ncols(), "trsm_packed: L is square");
        if k == 0 {
            return;
        }
        assert_eq!(b.len() % (k * TILE.nr), 0, "trsm_packed: whole strips");
        let (l, mut x) = (columns(Op::NoTrans, l), vec![T::default(); k]);
        for strip in b.chunks_exact_mut(k * TILE.nr) {
            for j in 0..TILE.nr {
                (0..k).for_each(|p| x[p] = strip[p * TILE.nr + j]);
                substitute(true, true, &l, &mut x);
                (0..k).for_each(|p| strip[p * TILE.nr + j] = x[p]);
            }
        }
    }

    fn gemm_packed(&self, alpha: T, a: &[T], b: &[T], k: usize, mut c: MatMut<'_, T>) {
        let (m, n) = (c.nrows(), c.ncols());
        assert_eq!(a.len(), m.next_multiple_of(TILE.mr) * k, "gemm_packed: length of A for {m} x {k}");
        assert_eq!(b.len(), n.next_multiple_of(TILE.nr) * k, "gemm_packed: length of B for {k} x {n}");
        if alpha == T::default() || k == 0 {
            return;
        }
        let unpacked = |p| (0..m).map(|i| a[packed_index(TILE.mr, k, p, i)]).collect();
        let a: Vec<Vec<T>> = (0..k).map(unpacked).collect();
        for j in 0..n {
            let mut column: Vec<T> = (0..m).map(|i| c[(i, j)]).collect();
            add_product(alpha, &a, |p| b[packed_index(TILE.nr, k, p, j)], &mut column);
            (0..m).for_each(|i| c[(i, j)] = column[i]);
        }
    }

    fn gemm_panel(&self, alpha: T, a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>) {
        self.gemm(&Team::solo(), alpha, (Op::NoTrans, a), (Op::NoTrans, b), T::one(), c);
    }

    fn iamax(&self, x: &[T]) -> Option<usize> {
        iamax(x)
    }

    fn panel_column(&self, mut cols: MatMut<'_, T>, scale: Option<T>, u: &[T]) -> Option<usize> {
        let (m, done) = (cols.nrows(), u.len());
        assert_eq!(cols.ncols(), done + 1, "panel_column: finished columns and the current one");
        if let (Some(scale), Some(last)) = (scale, done.checked_sub(1)) {
            (0..m).for_each(|i| cols[(i, last)] *= scale);
        }
        let mut columns = columns(Op::NoTrans, cols.rb());
        let mut current = columns.pop().unwrap_or_default();
        for (p, column) in columns.iter().enumerate() {
            add_multiple(&mut current, -u[p], column);
        }
        (0..m).for_each(|i| cols[(i, done)] = current[i]);
        iamax(&current)
    }
}
