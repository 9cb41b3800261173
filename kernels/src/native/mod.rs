//! Our own kernels: packed GEMM and what is built on it, for AVX-512, AVX2, NEON and everything else.
//!
//! `simd` names the instructions, `real` and `split` are the register kernels in terms of them, `micro`
//! is what the loops in `gemm` and `trsm` see of those, `cpu` sets the block sizes. README.md tells
//! what was measured.

mod column;
mod cpu;
mod gemm;
#[cfg(test)]
mod keep_tests;
mod micro;
mod pack;
mod real;
mod scratch;
mod simd;
mod solve;
mod split;
mod trsm;

use std::marker::PhantomData;
use std::str::FromStr;

use cpu::{Blocking, Cpu, Keep};
use micro::{Lower, Micro};
use pack::{Source, pack, unpack};
use real::RealTile;
use scratch::Pool;
use simd::Arch;
use simd::portable::{Array, Portable};
use split::SplitTile;

use faer::prelude::Reborrow;

use crate::rows::ScatteredRows;
use crate::{Description, Diag, Kernels, MatMut, MatRef, Op, Scalar, Side, Team, Tile, Uplo, c32, c64};

/// Instruction sets that there are kernels for, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// aarch64.
    Neon,
    /// Any CPU.
    Portable,
}

impl Isa {
    /// Every one, best first.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// Those that this CPU has, best first; the last is [`Isa::Portable`].
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The best that this CPU has.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            Isa::Portable => true,
            _ => false,
        }
    }

    /// Its name: `avx512`, `avx2`, `neon`, `portable`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }
}

impl FromStr for Isa {
    type Err = String;

    /// From its name; an error lists the names that this CPU can run.
    fn from_str(name: &str) -> Result<Self, String> {
        Isa::available().into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
            let why = if Isa::ALL.iter().any(|isa| isa.name() == name) {
                "is not an instruction set of this CPU"
            } else {
                "is not the name of an instruction set"
            };
            format!("`{name}` {why}; it has {}", names.join(", "))
        })
    }
}

/// The native back end for `isa`.
///
/// # Panics
/// When this CPU lacks `isa`.
pub fn native<T: Scalar>(isa: Isa) -> Box<dyn Kernels<T>> {
    assert!(isa.is_available(), "this CPU has no {}", isa.name());
    T::native(isa)
}

/// Element types that have native kernels; implemented by the four of [`Scalar`].
pub trait HasNative: Sized {
    #[doc(hidden)]
    fn native(isa: Isa) -> Box<dyn Kernels<Self>>;
}

macro_rules! has_native {
    ($t:ty, $tile:ident, $avx512:ty, $avx2:ty, $neon:ty, $portable:ty) => {
        impl HasNative for $t {
            fn native(isa: Isa) -> Box<dyn Kernels<Self>> {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => {
                        use simd::x86::*;
                        Box::new(Native::<Self, $avx512>::new(isa))
                    }
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => {
                        use simd::x86::*;
                        Box::new(Native::<Self, $avx2>::new(isa))
                    }
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => {
                        use simd::neon::*;
                        Box::new(Native::<Self, $neon>::new(isa))
                    }
                    _ => Box::new(Native::<Self, $portable>::new(Isa::Portable)),
                }
            }
        }
    };
}

// Vector, vector of the strips, vectors by columns of a tile, rows of a solve. The accumulators leave
// room in 32 registers (16 on AVX2) for one step's A and a few broadcasts of B.
has_native!(
    f64,
    RealTile,
    RealTile<Avx512, Zmm, Zmm, 3, 8, 8>,
    RealTile<Avx2, Ymm, Ymm, 3, 4, 4>,
    RealTile<Neon, Neon, Neon, 3, 8, 8>,
    RealTile<Portable, Array<4>, Array<4>, 1, 4, 2>
);
has_native!(
    f32,
    RealTile,
    RealTile<Avx512, Zmm, Ymm, 3, 8, 8>,
    RealTile<Avx2, Ymm, Xmm, 3, 4, 4>,
    RealTile<Neon, Neon, Neon, 3, 8, 8>,
    RealTile<Portable, Array<8>, Array<4>, 1, 4, 2>
);
has_native!(
    c64,
    SplitTile,
    SplitTile<Avx512, Zmm, Ymm, 3, 4, 8>,
    SplitTile<Avx2, Ymm, Ymm, 1, 4, 4>,
    SplitTile<Neon, Neon, Neon, 2, 4, 8>,
    SplitTile<Portable, Array<2>, Array<4>, 1, 4, 1>
);
has_native!(
    c32,
    SplitTile,
    SplitTile<Avx512, Zmm, Xmm, 3, 4, 8>,
    SplitTile<Avx2, Ymm, Xmm, 1, 4, 4>,
    SplitTile<Neon, Neon, Neon, 2, 4, 8>,
    SplitTile<Portable, Array<4>, Array<4>, 1, 4, 1>
);

/// The back end of one element type on one instruction set.
struct Native<T: Scalar, K> {
    description: Description,
    blocking: Blocking,
    pool: Pool<T>,
    _micro: PhantomData<fn(K)>,
}

/// The k that [`Tile::mc`] and [`Tile::nc`] are told for.
const NEAR: usize = 256;

impl<T: Scalar, K: Micro<T>> Native<T, K> {
    /// `l` is of order `k` and points into memory that is borrowed meanwhile.
    fn solve(&self, l: Lower<T>, k: usize, b: &mut [T]) {
        if k == 0 {
            return;
        }
        assert_eq!(b.len() % (K::NR * k), 0, "packed B of {k} rows has {} elements", b.len());
        let strips = b.len() / (K::NR * k);
        // SAFETY: lengths checked, here and where `l` was made; the instruction set was checked when the back end
        // was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || K::solve(l, k, true, b.as_mut_ptr(), strips, |_, _| {}),
            );
        }
    }

    fn new(isa: Isa) -> Self {
        let cpu = Cpu::detect();
        let name = match T::LETTER {
            's' => "f32",
            'd' => "f64",
            'c' => "c32",
            _ => "c64",
        };
        Native {
            blocking: Blocking::of(&cpu, isa),
            description: Description {
                backend: "native".into(),
                detail: format!("{} ({})", isa.name(), cpu.name),
                packing: format!("native-{name}-{}x{}", K::MR, K::NR),
            },
            pool: Pool::new(),
            _micro: PhantomData,
        }
    }
}

/// Views are column-major with unit row stride.
fn check<T>(what: &str, a: MatRef<'_, T>) {
    assert!(a.row_stride() == 1 || a.nrows() <= 1, "{what} has row stride {}, not 1", a.row_stride());
    assert!(
        a.col_stride() >= a.nrows() as isize || a.ncols() <= 1,
        "{what} has column stride {} under its {} rows",
        a.col_stride(),
        a.nrows()
    );
}

impl<T: Scalar, K: Micro<T>> Kernels<T> for Native<T, K> {
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
        check("A", a.1);
        check("B", b.1);
        check("C", c.rb());
        let shape = |(op, x): (Op, MatRef<'_, T>)| {
            if op == Op::NoTrans { (x.nrows(), x.ncols()) } else { (x.ncols(), x.nrows()) }
        };
        let ((am, ak), (bk, bn)) = (shape(a), shape(b));
        assert!(
            am == c.nrows() && ak == bk && bn == c.ncols(),
            "op(A) is {am} by {ak}, op(B) {bk} by {bn}, C {} by {}",
            c.nrows(),
            c.ncols()
        );
        gemm::team::<T, K>(&self.blocking, &self.pool, team, alpha, a, b, beta, c);
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
        check("A", a);
        check("B", b.rb());
        trsm::team::<T, K>(&self.blocking, &self.pool, team, side, uplo, op, diag, alpha, a, b);
    }

    fn tile(&self) -> Tile {
        let block = |unit| self.blocking.block(NEAR, unit, size_of::<T>());
        let nc = match self.blocking.keep {
            Keep::A => usize::MAX,
            Keep::B => block(K::NR),
        };
        Tile { mr: K::MR, nr: K::NR, mc: block(K::MR), nc }
    }

    fn pack_a(&self, a: MatRef<'_, T>, out: &mut [T]) {
        check("A", a);
        let (m, k) = (a.nrows(), a.ncols());
        assert_eq!(out.len(), self.tile().packed_a_len(m, k), "packed A of {m} by {k}");
        // SAFETY: lengths checked; the instruction set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || pack::<T, K, true>(gemm::rows_of((Op::NoTrans, a)), m, k, out.as_mut_ptr()),
            );
        }
    }

    fn pack_b(&self, b: MatRef<'_, T>, out: &mut [T]) {
        check("B", b);
        let (k, n) = (b.nrows(), b.ncols());
        assert_eq!(out.len(), self.tile().packed_b_len(k, n), "packed B of {k} by {n}");
        // SAFETY: lengths checked; the instruction set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || pack::<T, K, false>(gemm::columns_of((Op::NoTrans, b)), n, k, out.as_mut_ptr()),
            );
        }
    }

    fn unpack_b(&self, packed: &[T], b: MatMut<'_, T>) {
        check("B", b.rb());
        let (k, n) = (b.nrows(), b.ncols());
        assert_eq!(packed.len(), self.tile().packed_b_len(k, n), "packed B of {k} by {n}");
        let to = Source { ptr: b.as_ptr(), across: b.col_stride(), along: 1, conj: false };
        // SAFETY: lengths checked, `b` is ours to write; the instruction set was checked when the back
        // end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || unpack::<T, K>(packed.as_ptr(), n, k, to),
            );
        }
    }

    fn trsm_packed(&self, l: MatRef<'_, T>, b: &mut [T]) {
        check("L", l);
        assert_eq!(l.ncols(), l.nrows(), "L is square");
        self.solve(Lower::stored(l.as_ptr(), l.col_stride() as usize, K::LR), l.nrows(), b);
    }

    fn pack_l(&self, l: MatRef<'_, T>) -> Vec<T> {
        let k = l.nrows();
        let mut packed = vec![T::zero(); k.next_multiple_of(K::LR) * k];
        for (p, column) in l.col_iter().enumerate() {
            for i in p..k {
                packed[i / K::LR * K::LR * k + p * K::LR + i % K::LR] = column[i];
            }
        }
        packed
    }

    fn trsm_with(&self, l: &[T], k: usize, b: &mut [T]) {
        assert!(l.len() >= k.next_multiple_of(K::LR) * k, "packed L of order {k} has {} elements", l.len());
        self.solve(Lower::packed(l.as_ptr(), k, K::LR), k, b);
    }

    fn trsm_into(&self, l: &[T], b: MatRef<'_, T>, out: &mut [T]) {
        check("B", b);
        let (k, n) = (b.nrows(), b.ncols());
        assert!(l.len() >= k.next_multiple_of(K::LR) * k, "packed L of order {k} has {} elements", l.len());
        assert_eq!(out.len(), self.tile().packed_b_len(k, n), "packed B of {k} by {n}");
        let (l, b) = (Lower::packed(l.as_ptr(), k, K::LR), gemm::columns_of((Op::NoTrans, b)));
        // SAFETY: lengths checked; the instruction set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || solve::into::<T, K>(l, b, n, k, out.as_mut_ptr()),
            );
        }
    }

    fn gemm_packed(&self, alpha: T, a: &[T], b: &[T], k: usize, c: MatMut<'_, T>) {
        check("C", c.rb());
        gemm::packed::<T, K>(&self.blocking, alpha, a, b, k, c, None);
    }

    fn gemm_packed_before(
        &self,
        alpha: T,
        a: &[T],
        b: &[T],
        k: usize,
        c: MatMut<'_, T>,
        soon: ScatteredRows<'_, T>,
    ) {
        check("C", c.rb());
        gemm::packed::<T, K>(&self.blocking, alpha, a, b, k, c, Some(soon));
    }

    fn gemm_panel(&self, alpha: T, a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>) {
        check("A", a);
        check("B", b);
        check("C", c.rb());
        assert!(
            a.nrows() == c.nrows() && a.ncols() == b.nrows() && b.ncols() == c.ncols(),
            "A is {} by {}, B {} by {}, C {} by {}",
            a.nrows(),
            a.ncols(),
            b.nrows(),
            b.ncols(),
            c.nrows(),
            c.ncols()
        );
        let b = gemm::columns_of((Op::NoTrans, b));
        gemm::panel::<T, K>(&self.blocking, alpha, a, b, a.ncols(), c);
    }

    fn iamax(&self, x: &[T]) -> Option<usize> {
        // SAFETY: no column is finished, so the one column is only read; the instruction set was checked
        // when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || K::column(x.as_ptr().cast_mut(), x.len(), x.len(), None, [].as_ptr(), 0),
            )
        }
    }

    fn panel_column(&self, cols: MatMut<'_, T>, scale: Option<T>, u: &[T]) -> Option<usize> {
        check("the panel", cols.rb());
        assert_eq!(cols.ncols(), u.len() + 1, "finished columns and one more");
        let (m, lld) = (cols.nrows(), cols.col_stride() as usize);
        // SAFETY: shapes checked; the instruction set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || K::column(cols.as_ptr_mut(), lld, m, scale, u.as_ptr(), u.len()),
            )
        }
    }

    fn scal(&self, alpha: T, x: &mut [T]) {
        // SAFETY: the slice is ours; the instruction set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || K::scal(alpha, x.as_mut_ptr(), x.len()),
            );
        }
    }
}
