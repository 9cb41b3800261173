//! Back ends with one fault each, of kinds that were met in real libraries.

use fulmen_kernels::{
    Description, Diag, Element, KernelSet, Kernels, MatMut, MatRef, Op, Real, Scalar, Side, Team, Tile, Uplo,
};

use crate::sample::nan;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A NaN stands in column 510 of a row vector with β = 0 (ml-explore/mlx#3563).
    RowVectorLeavesNan,
    /// β = 0 multiplies C instead of ignoring it.
    BetaZeroReads,
    /// One element of gemm is a little wrong when there are more columns than 100 (flame/blis#930).
    OneElementOff,
    /// gemm with several threads forgets the last column (plasma#50).
    Threads,
    /// Double precision is computed in single.
    LowPrecision,
    /// One row too many is written.
    WritesOutside,
    /// The last row of a triangular solve is left.
    Trsm,
    /// gemm on packed operands forgets what lies beyond the first tile of columns.
    PackedEdge,
    /// Solving packed operands stops a row early.
    TrsmPacked,
    /// The last of equals is found.
    IamaxTies,
    /// A NaN is passed over.
    IamaxNan,
    /// The scaling of the finished column is forgotten.
    PanelScale,
    /// The panel's gemm panics.
    PanelPanics,
}

pub const ALL: [(Fault, &str); 13] = [
    (Fault::RowVectorLeavesNan, "element (0, 510) is NaN"),
    (Fault::BetaZeroReads, "(C held NaNs)"),
    (Fault::OneElementOff, "dgemm"),
    (Fault::Threads, "threads"),
    (Fault::LowPrecision, "dgemm"),
    (Fault::WritesOutside, "wrote outside"),
    (Fault::Trsm, "dtrsm"),
    (Fault::PackedEdge, "dgemm on packed operands"),
    (Fault::TrsmPacked, "dtrsm on packed operands"),
    (Fault::IamaxTies, "with ties"),
    (Fault::IamaxNan, "with NaNs"),
    (Fault::PanelScale, "panel column"),
    (Fault::PanelPanics, "panicked"),
];

pub struct Broken {
    pub right: KernelSet,
    pub fault: Fault,
}

impl Broken {
    fn right<T: Element>(&self) -> &dyn Kernels<T> {
        &**self.right.of::<T>()
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }
}

impl<T: Element> Kernels<T> for Broken {
    fn description(&self) -> &Description {
        self.right::<T>().description()
    }

    fn bitwise_stable(&self) -> bool {
        false
    }

    fn gemm(
        &self,
        team: &Team,
        alpha: T,
        a: (Op, MatRef<'_, T>),
        b: (Op, MatRef<'_, T>),
        beta: T,
        mut c: MatMut<'_, T>,
    ) {
        let (m, n) = (c.nrows(), c.ncols());
        let forgotten = (m > 0 && n > 0).then(|| c[(m - 1, n - 1)]);
        let beta_reads = self.has(Fault::BetaZeroReads) && beta == T::default() && m > 0 && n > 0;
        self.right::<T>().gemm(team, alpha, a, b, beta, c.as_mut());
        if beta_reads {
            c[(m - 1, n - 1)] += forgotten.unwrap_or_default() * beta;
        }
        if self.has(Fault::RowVectorLeavesNan) && m == 1 && n > 510 && beta == T::default() {
            c[(0, 510)] = nan();
        }
        if self.has(Fault::OneElementOff) && n > 100 {
            let off = T::from_real(<T as Scalar>::Real::from_f64(1e-3));
            c[(m / 2, 100)] += off;
        }
        if self.has(Fault::Threads) && team.len() > 1 {
            c[(m - 1, n - 1)] = forgotten.unwrap_or_default();
        }
        if self.has(Fault::LowPrecision) {
            for j in 0..n {
                for i in 0..m {
                    let narrow = |x: f64| <T as Scalar>::Real::from_f64(f64::from(x as f32));
                    c[(i, j)] =
                        T::from_parts(narrow(c[(i, j)].re().to_f64()), narrow(c[(i, j)].im().to_f64()));
                }
            }
        }
        if self.has(Fault::WritesOutside) && m > 0 && n > 0 {
            // SAFETY: the self-test leaves room below its matrices, to find out just this.
            unsafe { *c.as_ptr_mut().add(m) = T::default() };
        }
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
        mut b: MatMut<'_, T>,
    ) {
        let last = b.nrows() - 1;
        let before = b[(last, 0)];
        self.right::<T>().trsm(team, side, uplo, op, diag, alpha, a, b.as_mut());
        if self.has(Fault::Trsm) {
            b[(last, 0)] = before;
        }
    }

    fn tile(&self) -> Tile {
        self.right::<T>().tile()
    }

    fn pack_a(&self, a: MatRef<'_, T>, out: &mut [T]) {
        self.right::<T>().pack_a(a, out);
    }

    fn pack_b(&self, b: MatRef<'_, T>, out: &mut [T]) {
        self.right::<T>().pack_b(b, out);
    }

    fn unpack_b(&self, packed: &[T], b: MatMut<'_, T>) {
        self.right::<T>().unpack_b(packed, b);
    }

    fn trsm_packed(&self, l: MatRef<'_, T>, b: &mut [T]) {
        let nr = self.right::<T>().tile().nr;
        let at = l.nrows() * nr - nr;
        let before = b[at];
        self.right::<T>().trsm_packed(l, b);
        if self.has(Fault::TrsmPacked) {
            b[at] = before;
        }
    }

    fn gemm_packed(&self, alpha: T, a: &[T], b: &[T], k: usize, c: MatMut<'_, T>) {
        let nr = self.right::<T>().tile().nr;
        if self.has(Fault::PackedEdge) && c.ncols() > nr {
            self.right::<T>().gemm_packed(alpha, a, &b[..nr * k], k, c.subcols_mut(0, nr));
        } else {
            self.right::<T>().gemm_packed(alpha, a, b, k, c);
        }
    }

    fn gemm_panel(&self, alpha: T, a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>) {
        assert!(!self.has(Fault::PanelPanics), "a fault on purpose");
        self.right::<T>().gemm_panel(alpha, a, b, c);
    }

    fn iamax(&self, x: &[T]) -> Option<usize> {
        let size = |i: usize| x[i].abs1().to_f64();
        match self.fault {
            Fault::IamaxTies => (0..x.len()).max_by(|&i, &j| size(i).total_cmp(&size(j))),
            Fault::IamaxNan => {
                let numbers = (0..x.len()).filter(|&i| !size(i).is_nan()).rev();
                numbers.max_by(|&i, &j| size(i).total_cmp(&size(j)))
            }
            _ => self.right::<T>().iamax(x),
        }
    }

    fn panel_column(&self, cols: MatMut<'_, T>, scale: Option<T>, u: &[T]) -> Option<usize> {
        let scale = if self.has(Fault::PanelScale) { None } else { scale };
        self.right::<T>().panel_column(cols, scale, u)
    }
}
