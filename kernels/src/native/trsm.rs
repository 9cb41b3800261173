//! Triangular solves of any kind, by a team: recursion over the triangle, GEMM for what is off its
//! diagonal blocks, packed strips for the blocks themselves.
//!
//! Every kind is brought to L·Y = αB with L lower: a right-hand solve by transposing (the unknowns are
//! B's rows), an upper triangle by taking the unknowns in reverse order.

use super::cpu::Blocking;
use super::gemm;
use super::micro::{Lower, Micro};
use super::pack::{Source, pack, unpack};
use super::scratch::{Pool, with_own};
use super::simd::Arch;
use crate::{Diag, MatMut, MatRef, Op, Scalar, SharedMut, Side, Team, Uplo};

/// Order of the blocks that are solved directly.
const BLOCK: usize = 64;

/// See [`crate::Kernels::trsm`].
pub(super) fn team<T: Scalar, K: Micro<T>>(
    blocking: &Blocking,
    pool: &Pool<T>,
    team: &Team,
    side: Side,
    uplo: Uplo,
    op: Op,
    diag: Diag,
    alpha: T,
    a: MatRef<'_, T>,
    b: MatMut<'_, T>,
) {
    let n = if side == Side::Left { b.nrows() } else { b.ncols() };
    assert!(a.nrows() == n && a.ncols() == n, "A is {} by {}, of order {n} needed", a.nrows(), a.ncols());
    if b.nrows() == 0 || b.ncols() == 0 {
        return;
    }
    let solo = Team::solo();
    let team = if n * b.nrows() * b.ncols() < 1 << 18 { &solo } else { team };
    let b = SharedMut::new(b);
    gemm::scale(team, alpha, b);
    if alpha == T::zero() {
        return;
    }
    let transposed = (op != Op::NoTrans) != (side == Side::Right);
    let reversed = (uplo == Uplo::Lower) == transposed;
    let solve = Solve { blocking, pool, team, side, op, diag, transposed, reversed, a, b };
    solve.recurse::<K>(0, n);
}

struct Solve<'a, T: Scalar> {
    blocking: &'a Blocking,
    pool: &'a Pool<T>,
    team: &'a Team,
    side: Side,
    op: Op,
    diag: Diag,
    /// Whether L\[i,j\] is A\[j,i\].
    transposed: bool,
    /// Whether the last unknown is solved first.
    reversed: bool,
    a: MatRef<'a, T>,
    b: SharedMut<'a, T>,
}

impl<T: Scalar> Solve<'_, T> {
    /// Solves for the unknowns `start..start + len`, whose right-hand side is up to date.
    fn recurse<K: Micro<T>>(&self, start: usize, len: usize) {
        if len <= BLOCK {
            return self.direct::<K>(start, len);
        }
        let half = (len / 2).next_multiple_of(BLOCK);
        let (first, second) = if self.reversed {
            (start + len - half..start + len, start..start + len - half)
        } else {
            (start..start + half, start + half..start + len)
        };
        self.recurse::<K>(first.start, first.len());
        // The block of A that couples `second` to `first`, as stored.
        let (r, c) = if self.transposed { (&first, &second) } else { (&second, &first) };
        let off = (self.op, self.a.submatrix(r.start, c.start, r.len(), c.len()));
        // SAFETY: `first` and `second` are disjoint, and no other thread is at work on B now.
        unsafe {
            let (mine, minus) = (self.blocking, -T::one());
            if self.side == Side::Left {
                let all = 0..self.b.ncols();
                let x = (Op::NoTrans, self.b.part_ref(first, all.clone()));
                let rest = self.b.part(second.clone(), all);
                gemm::team::<T, K>(mine, self.pool, self.team, minus, off, x, T::one(), rest);
            } else {
                let all = 0..self.b.nrows();
                let x = (Op::NoTrans, self.b.part_ref(all.clone(), first));
                let rest = self.b.part(all, second.clone());
                gemm::team::<T, K>(mine, self.pool, self.team, minus, x, off, T::one(), rest);
            }
        }
        self.recurse::<K>(second.start, second.len());
    }

    /// Solves with one diagonal block.
    fn direct<K: Micro<T>>(&self, start: usize, k: usize) {
        let mut l = vec![T::zero(); k.next_multiple_of(K::LR) * k];
        let conj = self.op == Op::ConjTrans;
        let place = |i: usize| start + if self.reversed { k - 1 - i } else { i };
        for j in 0..k {
            let unit = self.diag == Diag::Unit;
            for i in j + usize::from(unit)..k {
                let (r, c) = if self.transposed { (place(j), place(i)) } else { (place(i), place(j)) };
                let x = self.a[(r, c)];
                l[i / K::LR * K::LR * k + i % K::LR + j * K::LR] = if conj { x.conjugate() } else { x };
            }
        }
        let left = self.side == Side::Left;
        let count = if left { self.b.ncols() } else { self.b.nrows() };
        self.team.run(|me| {
            let share = me.share(count, K::NR);
            let most = 12 * K::NR;
            with_own(most * k, |strips: *mut T| {
                for first in share.clone().step_by(most) {
                    let n = most.min(share.end - first);
                    let (unknowns, vectors) = (start..start + k, first..first + n);
                    let (r, c) = if left { (unknowns, vectors) } else { (vectors, unknowns) };
                    // SAFETY: members' vectors are disjoint.
                    let part = unsafe { self.b.part(r, c) };
                    let ld = self.b.lld() as isize;
                    let (across, along) = if left { (ld, 1) } else { (1, ld) };
                    let mut x = Source { ptr: part.as_ptr(), across, along, conj: false };
                    if self.reversed {
                        x = Source { ptr: x.at(0, k - 1), along: -along, ..x };
                    }
                    // SAFETY: `x` stays inside `part`, the strips inside this thread's own memory; the
                    // instruction set was checked when the back end was made.
                    unsafe {
                        K::Arch::enter(
                            #[inline(always)]
                            || {
                                pack::<T, K, false>(x, n, k, strips);
                                let unit = self.diag == Diag::Unit;
                                let l = Lower::packed(l.as_ptr(), k, K::LR);
                                K::solve(l, k, unit, strips, n.div_ceil(K::NR), |_, _| {});
                                unpack::<T, K>(strips, n, k, x);
                            },
                        );
                    }
                }
            });
        });
    }
}
