//! What a run takes of a machine's memory. One function, [`needed`], says it for the check, for the size that is chosen and
//! for the size that is advised.
//!
//! What it counts beside the matrix was measured as the peak of a control group (`ci/memory`, and the tests of
//! `tests/memory.rs`, which let each advised size run under the limit that it was advised for).

use crate::params::{Input, Run};

/// Who the ranks of a run are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    /// Threads of this process.
    Threads,
    /// Processes of this machine, each with the memory of all others mapped.
    Processes,
    /// Processes that a launcher has started, anywhere.
    Launched,
}

/// What shares the memory with the matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Ranks.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// Who they are.
    pub home: Home,
    /// Whether the arithmetic is a foreign library's.
    pub blas: bool,
    /// Cores of a host.
    pub cores: usize,
}

/// Bytes that a run needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needed {
    /// The matrix alone, 8·N², over all ranks.
    pub matrix: u128,
    /// All that the fullest rank takes.
    pub per_rank: u128,
    /// All that all ranks take, and the program itself, with a margin.
    pub total: u128,
    /// The margin.
    pub margin: u128,
    /// Memory that the fullest rank registers: what others may write to.
    pub registered: u128,
    /// Addresses of the process that takes most of them: what `ulimit -v` bounds.
    pub addresses: u128,
    /// Private memory of that process: what `ulimit -d` bounds.
    pub data: u128,
}

const MIB: u128 = 1 << 20;

/// The program in memory, its libraries, and its heap before the first run: 7.5 measured.
const PROGRAM: u128 = 8 * MIB;

/// What each rank takes: its kernels, queues, a few small buffers (0.5 measured); as a process the private part of the
/// program, and the tables of the memory that all share (1.7 measured).
const RANK: u128 = MIB;
const PROCESS: u128 = MIB;

/// What each two ranks share: a page for each stream of messages.
const PAIR: u128 = 24 << 10;

/// A thread's stack as far as it is used, and what its kernels pack into.
const THREAD: u128 = MIB;

/// A foreign library's code, and what each of its threads packs into.
const LIBRARY: u128 = 40 * MIB;
const LIBRARY_THREAD: u128 = 16 * MIB;

/// Addresses of a thread: a stack, and the heap that glibc's allocator sets aside for each that allocates (up to 8 a core).
const STACK: u128 = 2 * MIB;
const ARENA: u128 = 64 * MIB;

/// Threads beside the ranks' own: of the signals, the progress and the fabric.
const SERVANTS: u128 = 3;

/// The margin. One part in so many is for the tables of pages, where the system has no large ones (8 bytes for each 4 KiB).
const TABLES: u128 = 512;

/// The rest of it, for what is not counted: runs of all kinds that were measured took at least this much less than
/// [`Needed::total`].
const SPARE: u128 = 8 * MIB;

/// Local rows or columns of process `proc` of `procs`: ScaLAPACK's NUMROC with source 0.
fn numroc(n: usize, nb: usize, proc: usize, procs: usize) -> u128 {
    let (blocks, last) = (n / nb, n % nb);
    let rest = match (blocks % procs).cmp(&proc) {
        std::cmp::Ordering::Greater => nb,
        std::cmp::Ordering::Equal => last,
        std::cmp::Ordering::Less => 0,
    };
    (blocks / procs * nb + rest) as u128
}

/// The memory of a run. NB beyond N costs nothing: blocks are never wider than the matrix.
pub fn needed(run: &Run, shape: &Shape) -> Needed {
    let nb = run.nb.min(run.n.max(1));
    let (n, width) = (run.n as u128, nb as u128);
    let (ranks, threads) = (shape.ranks.max(run.ranks()) as u128, shape.threads as u128);
    let in_flight = (run.depth + 1).min(run.n.div_ceil(nb)) as u128;
    // U passes in chunks of up to 1024 columns, three at a time; with more process rows, each chunk is also
    // sent and received, with the rows that it displaces.
    let chunk = width * (run.n / run.q / 4).clamp(64, 1024).next_multiple_of(64) as u128;
    let exchanged = if run.p > 1 { 3 * 4 * chunk } else { 0 };
    // The triangle of the panel that is factored, and of each that updates.
    let triangles = (in_flight + 2) * width * width;
    // With look-ahead and one process row, U is also put together for two thirds of the columns.
    let early = |columns: u128| if run.p == 1 && in_flight > 1 { width * (columns - columns / 3) } else { 0 };
    // x and its like, whole on each rank; in the check three columns a thread, when the matrix is gone.
    let vectors = 8 * n;
    let panels = |rows: u128| (rows + width + 24) * width * in_flight;
    let registered = |rows: u128| 8 * (panels(rows) + exchanged + 2 * n);
    let every = 8 * (3 * chunk + triangles + vectors);
    // What rank (i, j) takes is linear in its columns, so a sum over the rows i is enough.
    let of = |rows: u128, columns: u128, ranks: u128| {
        let matrix = (rows.next_multiple_of(8) + 8) * columns;
        8 * (matrix + early(columns)) + (registered(rows) + every) * ranks
    };
    let columns = n + 1; // with the right-hand side
    let rows = numroc(run.n, nb, 0, run.p);
    let library = |programs: u128| {
        if shape.blas { programs * LIBRARY + ranks * threads * LIBRARY_THREAD } else { 0 }
    };
    // Of what processes of one program share, only the first pays.
    let pairs = if shape.home == Home::Launched { 0 } else { ranks * ranks * PAIR };
    let rank = if shape.home == Home::Threads { RANK } else { RANK + PROCESS };
    let around = |ranks: u128| ranks * (rank + threads * THREAD);
    let margin = |bytes: u128| bytes / TABLES + SPARE;
    let whole = |bytes: u128| bytes + margin(bytes);

    let fullest = of(rows, numroc(run.n + 1, nb, 0, run.q), 1) + around(1);
    let all = (0..run.p).map(|i| of(numroc(run.n, nb, i, run.p), columns, run.q as u128)).sum::<u128>();
    let programs = if shape.home == Home::Launched { ranks } else { 1 };
    let counted = all + around(ranks) + pairs + programs * PROGRAM + library(programs);

    // One process: all ranks as threads, or a single one of them.
    let (own, its_threads) = match shape.home {
        Home::Threads => (all + around(ranks), ranks * threads + SERVANTS),
        _ => (fullest, threads + SERVANTS),
    };
    let own = own + PROGRAM + if shape.blas { LIBRARY + its_threads * 2 * LIBRARY_THREAD } else { 0 };
    let arenas = its_threads.min(8 * shape.cores as u128);
    let control = 4 * pairs;
    let (private, mapped) = match shape.home {
        Home::Processes => (own - registered(rows), control + ranks * segment_for(registered(rows))),
        _ => (own + control, 0),
    };
    Needed {
        matrix: 8 * n * n,
        per_rank: fullest,
        total: whole(counted),
        margin: margin(counted),
        registered: registered(rows),
        addresses: whole(private) + mapped + its_threads * STACK + arenas * ARENA,
        data: whole(private) + its_threads * STACK,
    }
}

/// What the program takes before there is any run, with so many threads at work.
pub fn of_program(threads: usize, shape: &Shape) -> Needed {
    let nothing = Run { n: 0, nb: 1, p: 1, q: 1, depth: 0, ..Input::default().run(0) };
    needed(&nothing, &Shape { ranks: 1, threads, home: Home::Threads, ..*shape })
}

/// Addresses of so many threads.
pub fn addresses_of_threads(threads: usize) -> u64 {
    u64::try_from((threads as u128 + SERVANTS) * (STACK + ARENA)).unwrap_or(u64::MAX)
}

/// Bytes of the segment of a rank that registers so many: it is cut in pieces, and some runs grow one.
fn segment_for(registered: u128) -> u128 {
    registered + registered / 2 + 16 * MIB
}

impl Needed {
    /// Of each the larger.
    #[must_use]
    pub fn or_more(&self, other: &Needed) -> Needed {
        Needed {
            matrix: self.matrix.max(other.matrix),
            per_rank: self.per_rank.max(other.per_rank),
            total: self.total.max(other.total),
            margin: self.margin.max(other.margin),
            registered: self.registered.max(other.registered),
            addresses: self.addresses.max(other.addresses),
            data: self.data.max(other.data),
        }
    }

    /// Bytes of the segment that each rank needs where the ranks are processes.
    pub fn segment(&self) -> u128 {
        segment_for(self.registered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numroc_counts_the_owners_elements(n in 0usize..500, nb in 1usize..40, procs in 1usize..9) {
            for proc in 0..procs {
                let counted = (0..n).filter(|i| i / nb % procs == proc).count();
                prop_assert_eq!(numroc(n, nb, proc, procs), counted as u128);
            }
        }
    }
}
