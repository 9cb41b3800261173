//! GEMM: packed operands by one thread, any operands by a team.
//!
//! The loops are Goto's (Goto and van de Geijn 2008; BLIS): passes over k, a block of A in L2, a strip
//! of B in L1, a tile of C in registers.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use faer::prelude::ReborrowMut;

use super::cpu::{Blocking, Keep};
use super::micro::{Block, Micro};
use super::pack::{Source, pack};
use super::scratch::{Pool, with_own};
use super::simd::{Arch, prefetch_l2};
use crate::rows::ScatteredRows;
use crate::{MatMut, MatRef, Op, Scalar, SharedMut, Team};

/// op(A) as [`pack`] sees it: across its rows.
pub(super) fn rows_of<T: Scalar>((op, a): (Op, MatRef<'_, T>)) -> Source<T> {
    let ld = a.col_stride();
    let (across, along) = if op == Op::NoTrans { (1, ld) } else { (ld, 1) };
    Source { ptr: a.as_ptr(), across, along, conj: T::IS_COMPLEX && op == Op::ConjTrans }
}

/// op(B) as [`pack`] sees it: across its columns.
pub(super) fn columns_of<T: Scalar>((op, b): (Op, MatRef<'_, T>)) -> Source<T> {
    let rows = rows_of((op, b));
    Source { across: rows.along, along: rows.across, ..rows }
}

thread_local! {
    /// Where the packed B is that this thread multiplied with last. For speed only.
    static LAST_B: Cell<usize> = const { Cell::new(0) };
}

/// C += α·A·B of packed operands; asks for `soon` on the way.
pub(super) fn packed<T: Scalar, K: Micro<T>>(
    blocking: &Blocking,
    alpha: T,
    a: &[T],
    b: &[T],
    k: usize,
    c: MatMut<'_, T>,
    soon: Option<ScatteredRows<'_, T>>,
) {
    let (m, n) = (c.nrows(), c.ncols());
    assert!(a.len() >= m.next_multiple_of(K::MR) * k, "packed A has {} elements", a.len());
    assert!(b.len() >= n.next_multiple_of(K::NR) * k, "packed B has {} elements", b.len());
    if m == 0 || n == 0 || alpha == T::zero() {
        return;
    }
    let (c, ldc) = (c.as_ptr_mut(), c.col_stride() as usize);
    let Some((_, kc)) = blocking.passes(k).next() else { return };
    let size = size_of::<T>();
    let (mc, nc) = match blocking.keep {
        // B in L3 holds still for a while.
        Keep::A => (blocking.block(kc, K::MR, size), (blocking.b_bytes / (kc * size * K::NR)).max(1) * K::NR),
        Keep::B => (m.next_multiple_of(K::MR), blocking.block(kc, K::NR, size)),
    };
    // The next rows of the same B find it in L2.
    let fresh = LAST_B.replace(b.as_ptr().addr()) != b.as_ptr().addr() || n > nc;
    // In the second half, so many with each tile: what is fetched earlier is thrown out again by what passes through L2.
    let tiles = m.div_ceil(K::MR) * n.div_ceil(K::NR) * blocking.passes(k).count();
    let share = soon.map_or(0, |soon| (2 * soon.len()).div_ceil(tiles));
    let mut soon = soon.into_iter().flat_map(ScatteredRows::addresses);
    let mut tile = 0;
    let mut ask = || {
        tile += 1;
        if 2 * tile > tiles {
            soon.by_ref().take(share).for_each(prefetch_l2);
        }
    };
    // SAFETY: the instruction set was checked when the back end was made; all tiles lie inside the
    // operands, whose lengths were checked.
    unsafe {
        K::Arch::enter(
            #[inline(always)]
            || {
                for j in (0..n).step_by(nc) {
                    for i in (0..m).step_by(mc) {
                        for (p, kc) in blocking.passes(k) {
                            Block {
                                m: mc.min(m - i),
                                n: nc.min(n - j),
                                k: kc,
                                alpha,
                                a: a.as_ptr().wrapping_add(i * k + p * K::MR),
                                a_sliver: K::MR * k,
                                a_step: K::MR,
                                b: b.as_ptr().wrapping_add(j * k + p * K::NR),
                                b_strip: K::NR * k,
                                c: c.wrapping_add(i + j * ldc),
                                ldc,
                                add: true,
                                fresh: i == 0 && fresh,
                            }
                            .run::<K>(blocking.keep, &mut ask);
                        }
                    }
                }
            },
        );
    }
}

/// Below this k, packing A costs more than reading it where it lies.
const PACK_A_FROM: usize = 72;

/// C += α·A·B by one thread: A is m × k as stored, B small.
pub(super) fn panel<T: Scalar, K: Micro<T>>(
    blocking: &Blocking,
    alpha: T,
    a: MatRef<'_, T>,
    b: Source<T>,
    k: usize,
    c: MatMut<'_, T>,
) {
    let (m, n) = (c.nrows(), c.ncols());
    if m == 0 || n == 0 || k == 0 || alpha == T::zero() {
        return;
    }
    let lda = a.col_stride() as usize;
    let (c, ldc) = (c.as_ptr_mut(), c.col_stride() as usize);
    let direct = K::READS_COLUMNS && (k < PACK_A_FROM || n <= 2 * K::NR);
    let kc = blocking.passes(k).next().map_or(0, |(_, kc)| kc);
    let mc = blocking.block(kc, K::MR, size_of::<T>());
    let b_len = n.next_multiple_of(K::NR) * kc;
    let a_len = (if direct { K::MR } else { mc.min(m.next_multiple_of(K::MR)) }) * kc;
    with_own(a_len + b_len, |own: *mut T| {
        let (pa, pb) = (own, own.wrapping_add(a_len));
        // SAFETY: the instruction set was checked when the back end was made; tiles lie inside C, and
        // the packed parts in this thread's own memory.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || {
                    for (p, kc) in blocking.passes(k) {
                        pack::<T, K, false>(b.from(0, p), n, kc, pb);
                        let from = Source {
                            ptr: a.as_ptr().wrapping_add(p * lda),
                            across: 1,
                            along: lda as isize,
                            conj: false,
                        };
                        let block = Block {
                            m: 0,
                            n,
                            k: kc,
                            alpha,
                            a: pa.cast_const(),
                            a_sliver: K::MR * kc,
                            a_step: K::MR,
                            b: pb.cast_const(),
                            b_strip: K::NR * kc,
                            c,
                            ldc,
                            add: true,
                            fresh: false,
                        };
                        if blocking.keep == Keep::B {
                            by_sliver::<T, K>(block, from, m, lda, direct, pa);
                            continue;
                        }
                        let mut i = 0;
                        while i < m {
                            let whole = (m - i).min(mc) / K::MR * K::MR;
                            let c = c.wrapping_add(i);
                            if direct && whole > 0 {
                                let a = from.at(i, 0);
                                let block = Block { m: whole, a, a_sliver: K::MR, a_step: lda, c, ..block };
                                block.run::<K>(Keep::A, || {});
                                i += whole;
                            } else {
                                let rows = (m - i).min(if direct { K::MR } else { mc });
                                pack::<T, K, true>(from.from(i, 0), rows, kc, pa);
                                Block { m: rows, c, ..block }.run::<K>(Keep::A, || {});
                                i += rows;
                            }
                        }
                    }
                },
            );
        }
    });
}

/// The product of a panel sliver by sliver: `block` but for A and the rows, which are `m` rows of `from`; `pa` has room for
/// a sliver, if A is not read where it lies (`direct`). While a sliver is multiplied, the next one is asked for: each of
/// its columns begins on a page that no prefetcher of the hardware's will open.
///
/// # Safety
/// As for [`Micro`].
#[inline(always)]
unsafe fn by_sliver<T: Scalar, K: Micro<T>>(
    block: Block<T>,
    from: Source<T>,
    m: usize,
    lda: usize,
    direct: bool,
    pa: *mut T,
) {
    let strips = block.n.div_ceil(K::NR);
    let share = block.k.div_ceil(strips);
    let mut strip = 0;
    // With each tile some columns. Returns whether it was the sliver's last tile.
    let mut ask = |next: usize| {
        for p in strip * share..((strip + 1) * share).min(block.k) {
            for line in 0..=K::MR * size_of::<T>() / 64 {
                prefetch_l2(from.at(next, p).wrapping_byte_add(64 * line));
            }
        }
        strip = (strip + 1) % strips;
        strip == 0
    };
    let mut i = 0;
    while i < m {
        let c = block.c.wrapping_add(i);
        let mut next = i + K::MR;
        if direct && m - i >= K::MR {
            let rows = (m - i) / K::MR * K::MR;
            let a = from.at(i, 0);
            // SAFETY: the caller's promise.
            unsafe {
                Block { m: rows, a, a_sliver: K::MR, a_step: lda, c, ..block }.run::<K>(Keep::B, || {
                    if ask(next) {
                        next += K::MR;
                    }
                });
            }
            i += rows;
        } else {
            let rows = (m - i).min(K::MR);
            // SAFETY: the caller's promise.
            unsafe {
                pack::<T, K, true>(from.from(i, 0), rows, block.k, pa);
                Block { m: rows, a_sliver: 0, c, ..block }.run::<K>(Keep::B, || {
                    ask(next);
                });
            }
            i += rows;
        }
    }
}

/// Multiply-adds below which one thread is quicker than a team.
const SOLO_BELOW: usize = 1 << 20;

/// C := α·op(A)·op(B) + β·C by the team.
pub(super) fn team<T: Scalar, K: Micro<T>>(
    blocking: &Blocking,
    pool: &Pool<T>,
    team: &Team,
    alpha: T,
    a: (Op, MatRef<'_, T>),
    b: (Op, MatRef<'_, T>),
    beta: T,
    c: MatMut<'_, T>,
) {
    let (m, n) = (c.nrows(), c.ncols());
    let k = if a.0 == Op::NoTrans { a.1.ncols() } else { a.1.nrows() };
    if m == 0 || n == 0 {
        return;
    }
    let solo = Team::solo();
    let team = if m * n * k.max(1) < SOLO_BELOW { &solo } else { team };
    let c = SharedMut::new(c);
    if k == 0 || alpha == T::zero() {
        return scale::<T>(team, beta, c);
    }
    if K::READS_COLUMNS && a.0 == Op::NoTrans && n <= 2 * K::NR {
        let b = Shared(columns_of(b));
        team.run(|me| {
            let rows = me.share(m, K::MR);
            // SAFETY: members' rows are disjoint.
            let (mut c, b) = (unsafe { c.part(rows.clone(), 0..n) }, &b);
            scale_part(beta, c.rb_mut());
            panel::<T, K>(blocking, alpha, a.1.subrows(rows.start, rows.len()), b.0, k, c);
        });
        return;
    }
    Product { blocking, alpha, a: rows_of(a), b: columns_of(b), beta, c, k }.run::<K>(pool, team);
}

/// Bytes of A that are packed at a time, by all members.
const A_BYTES: usize = 8 << 20;

/// A [`Source`] that members of a team read.
struct Shared<T>(Source<T>);
// SAFETY: only read, while the matrix that it points into is borrowed.
unsafe impl<T: Sync> Sync for Shared<T> {}

/// C := β·C
pub(super) fn scale<T: Scalar>(team: &Team, beta: T, c: SharedMut<'_, T>) {
    if beta == T::one() {
        return;
    }
    team.run(|me| {
        // SAFETY: members' columns are disjoint.
        scale_part(beta, unsafe { c.part(0..c.nrows(), me.share(c.ncols(), 1)) });
    });
}

fn scale_part<T: Scalar>(beta: T, mut c: MatMut<'_, T>) {
    if beta == T::one() {
        return;
    }
    for j in 0..c.ncols() {
        for i in 0..c.nrows() {
            c[(i, j)] = if beta == T::zero() { T::zero() } else { beta * c[(i, j)] };
        }
    }
}

struct Product<'a, T> {
    blocking: &'a Blocking,
    alpha: T,
    a: Source<T>,
    b: Source<T>,
    beta: T,
    c: SharedMut<'a, T>,
    k: usize,
}

// SAFETY: A and B are only read, while their matrices are borrowed; C is written in disjoint parts.
unsafe impl<T: Scalar> Sync for Product<'_, T> {}

/// `n` cut into nearly equal parts of at most `most`, multiples of `unit`: their length.
fn even(n: usize, most: usize, unit: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).next_multiple_of(unit)
}

impl<T: Scalar> Product<'_, T> {
    /// All members pack A and B together, then take blocks from a counter, so that a slow core does
    /// not hold up the others.
    fn run<K: Micro<T>>(&self, pool: &Pool<T>, team: &Team) {
        let (m, n, size) = (self.c.nrows(), self.c.ncols(), size_of::<T>());
        let kc = self.blocking.passes(self.k).next().map_or(1, |(_, kc)| kc);
        let nb = even(n, self.blocking.b_bytes / (kc * size), K::NR);
        let mb = even(m, A_BYTES / (kc * size), K::MR);
        let keep = self.blocking.keep;
        // What is cut into blocks for L2: rows of A or columns of B.
        let (all, unit) = if keep == Keep::A { (mb.min(m), K::MR) } else { (nb.min(n), K::NR) };
        let mut block = self.blocking.block(kc, unit, size);
        if all.div_ceil(block) < 2 * team.len() {
            block = even(all, all.div_ceil(2 * team.len()), unit).min(block);
        }
        let block = even(all, block, unit);
        let counter = AtomicUsize::new(0);
        pool.with((mb + nb) * kc, |buffer| {
            let pa = Place(buffer.as_mut_ptr());
            let pb = Place(pa.0.wrapping_add(mb * kc));
            team.run(|me| {
                let mut taken = 0;
                let (pa, pb) = (&pa, &pb);
                for j in (0..n).step_by(nb) {
                    let nb = nb.min(n - j);
                    for (p, kc) in self.blocking.passes(self.k) {
                        let strips = me.share(nb.div_ceil(K::NR), 1);
                        self.pack_part::<K, false>(self.b.from(j, p), nb, kc, strips, pb.0);
                        for i in (0..m).step_by(mb) {
                            let mb = mb.min(m - i);
                            let slivers = me.share(mb.div_ceil(K::MR), 1);
                            self.pack_part::<K, true>(self.a.from(i, p), mb, kc, slivers, pa.0);
                            me.barrier();
                            let items = match keep {
                                Keep::A => Items::new(mb, block, nb, K::NR, me.len()),
                                Keep::B => Items::new(nb, block, mb, K::MR, me.len()),
                            };
                            loop {
                                let item = counter.fetch_add(1, Ordering::Relaxed) - taken;
                                let Some((kept, passing)) = items.get(item) else { break };
                                let (rows, cols) =
                                    if keep == Keep::A { (kept, passing) } else { (passing, kept) };
                                self.block::<K>((i, j, p, kc), rows, cols, pa.0, pb.0);
                            }
                            // Every member has overshot once.
                            taken += items.len() + me.len();
                            me.barrier();
                        }
                    }
                }
            });
        });
    }

    /// Packs some of the slivers (strips) of `n × k` elements.
    fn pack_part<K: Micro<T>, const A: bool>(
        &self,
        from: Source<T>,
        n: usize,
        k: usize,
        slivers: std::ops::Range<usize>,
        out: *mut T,
    ) {
        let w = if A { K::MR } else { K::NR };
        let (start, end) = (slivers.start * w, (slivers.end * w).min(n));
        if start >= end {
            return;
        }
        // SAFETY: members pack disjoint slivers of the shared buffer; the source is inside its matrix;
        // the instruction set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || {
                    let (from, out) = (from.from(start, 0), out.wrapping_add(start * k));
                    pack::<T, K, A>(from, end - start, k, out);
                },
            );
        }
    }

    fn block<K: Micro<T>>(
        &self,
        (i, j, p, kc): (usize, usize, usize, usize),
        rows: std::ops::Range<usize>,
        cols: std::ops::Range<usize>,
        pa: *const T,
        pb: *const T,
    ) {
        let c = (i + rows.start..i + rows.end, j + cols.start..j + cols.end);
        // SAFETY: each block of C is taken from the counter by one member.
        let mut c = unsafe { self.c.part(c.0, c.1) };
        if p == 0 && self.beta != T::zero() {
            scale_part(self.beta, c.rb_mut());
        }
        // SAFETY: the parts are packed (a barrier lies between) and inside the buffer; the instruction
        // set was checked when the back end was made.
        unsafe {
            K::Arch::enter(
                #[inline(always)]
                || {
                    Block {
                        m: rows.len(),
                        n: cols.len(),
                        k: kc,
                        alpha: self.alpha,
                        a: pa.wrapping_add(rows.start * kc),
                        a_sliver: K::MR * kc,
                        a_step: K::MR,
                        b: pb.wrapping_add(cols.start * kc),
                        b_strip: K::NR * kc,
                        c: c.as_ptr_mut(),
                        ldc: self.c.lld(),
                        add: p > 0 || self.beta != T::zero(),
                        fresh: true,
                    }
                    .run::<K>(self.blocking.keep, || {});
                },
            );
        }
    }
}

/// A pointer into the buffer that a team shares.
struct Place<T>(*mut T);
// SAFETY: members write disjoint parts and read after a barrier.
unsafe impl<T: Send> Sync for Place<T> {}

/// Blocks of C that members take one by one: all that belongs to a block in L2 first, at the end smaller
/// ones, so that all finish nearly together.
struct Items {
    /// Rows (columns) that are cut into blocks for L2, and the length of such a block.
    kept: usize,
    block: usize,
    /// Columns (rows) that pass by, and the parts that those of the last blocks are cut into.
    passing: usize,
    part: usize,
    parts: usize,
    /// Blocks that are handed out whole, of all.
    whole: usize,
    blocks: usize,
}

impl Items {
    fn new(kept: usize, block: usize, passing: usize, unit: usize, members: usize) -> Self {
        let blocks = kept.div_ceil(block);
        let most = if members == 1 { 1 } else { 4 };
        let part = even(passing, passing.div_ceil(most).max(8 * unit), unit);
        let whole = if members == 1 { blocks } else { blocks.saturating_sub(2 * members) };
        Items { kept, block, passing, part, parts: passing.div_ceil(part), whole, blocks }
    }

    fn len(&self) -> usize {
        self.whole + (self.blocks - self.whole) * self.parts
    }

    /// Of what is kept, and of what passes by.
    fn get(&self, item: usize) -> Option<(std::ops::Range<usize>, std::ops::Range<usize>)> {
        let (block, passing) = if item < self.whole {
            (item, 0..self.passing)
        } else {
            let (block, part) = ((item - self.whole) / self.parts, (item - self.whole) % self.parts);
            (self.whole + block, part * self.part..((part + 1) * self.part).min(self.passing))
        };
        let start = block * self.block;
        (block < self.blocks).then(|| (start..(start + self.block).min(self.kept), passing))
    }
}
