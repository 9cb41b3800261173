//! HPL's system on the grid: [A | b] generated where it lies, and the check of x against A generated anew.

use std::sync::Mutex;

use fulmen::dist::{Axis, Col, Row};
use fulmen::kernels::{SharedMut, Team};
use fulmen::{DistMatrix, Grid, Result};

use crate::generator::Generator;
use crate::report::Check;

/// Global runs of rows that one process row holds: (first local row, first global row, count).
fn runs(rows: Axis<Row>, p: usize) -> Vec<(usize, usize, usize)> {
    let mut runs = vec![];
    let mut local = 0;
    while local < rows.count(p) {
        let global = rows.global(local.into(), p);
        let count = rows.block_end(global).0 - global.0;
        runs.push((local, global.0, count));
        local += count;
    }
    runs
}

/// Fills [A | b] with the generator's numbers, every thread its columns: memory is then near the thread
/// that touched it first.
pub fn generate(generator: Generator, team: &Team, a: &mut DistMatrix<f64>) {
    let (rows, cols, grid) = (a.rows(), a.cols(), a.grid().clone());
    let runs = runs(rows, grid.myrow());
    let (nrows, ncols) = (a.local().nrows(), a.local().ncols());
    if nrows == 0 {
        return;
    }
    let local = SharedMut::new(a.local_mut());
    team.run(|me| {
        for j in me.share(ncols, 1) {
            // SAFETY: members take disjoint columns.
            let mut column = unsafe { local.part(0..nrows, j..j + 1) };
            let Some(column) = column.as_mut().col_mut(0).try_as_col_major_mut() else { continue };
            let column = column.as_slice_mut();
            let global = cols.global(j.into(), grid.mycol()).0;
            for &(at, row, count) in &runs {
                generator.fill(row, global, &mut column[at..at + count]);
            }
        }
    });
}

/// Sums that one thread, and then one rank, collects over its columns.
struct Sums {
    /// Σⱼ |aᵢⱼ|, by local row.
    abs: Vec<f64>,
    /// Σⱼ aᵢⱼ·xⱼ, by local row.
    ax: Vec<f64>,
}

/// Generates A again and measures x against it.
///
/// # Errors
/// When a rank is lost.
pub fn check(
    generator: Generator,
    team: &Team,
    grid: &Grid,
    rows: Axis<Row>,
    cols: Axis<Col>,
    x: &[f64],
) -> Result<Check> {
    let n = generator.n();
    let (p, q) = (grid.myrow(), grid.mycol());
    let runs = runs(rows, p);
    let nrows = rows.count(p);
    let mine = cols.count_before(n.into(), q);
    let collected: Vec<Mutex<Option<Sums>>> = (0..team.len()).map(|_| Mutex::default()).collect();
    let column_sums: Vec<Mutex<f64>> = (0..mine).map(|_| Mutex::default()).collect();
    let sum_columns = |range: std::ops::Range<usize>| {
        let mut sums = Sums { abs: vec![0.0; nrows], ax: vec![0.0; nrows] };
        let mut column = vec![0.0; nrows];
        for j in range {
            let global = cols.global(j.into(), q).0;
            for &(at, row, count) in &runs {
                generator.fill(row, global, &mut column[at..at + count]);
            }
            let mut total = 0.0;
            for ((a, abs), ax) in column.iter().zip(&mut sums.abs).zip(&mut sums.ax) {
                *abs += a.abs();
                *ax += a * x[global];
                total += a.abs();
            }
            *lock(&column_sums[j]) = total;
        }
        sums
    };
    team.run(|me| *lock(&collected[me.index()]) = Some(sum_columns(me.share(mine, 1))));

    let (mut abs, mut r) = (vec![0.0; nrows], vec![0.0; nrows]);
    for sums in &collected {
        let Some(sums) = lock(sums).take() else { continue };
        abs.iter_mut().zip(sums.abs).for_each(|(t, s)| *t += s);
        r.iter_mut().zip(sums.ax).for_each(|(t, s)| *t += s);
    }
    grid.row_group().all_sum(&mut abs)?;
    grid.row_group().all_sum(&mut r)?;
    let mut b_inf = 0.0f64;
    let mut b = vec![0.0; nrows];
    for &(at, row, count) in &runs {
        generator.fill(row, n, &mut b[at..at + count]);
    }
    for (r, b) in r.iter_mut().zip(&b) {
        *r -= b;
        b_inf = b_inf.max(b.abs());
    }
    let mut columns: Vec<f64> = column_sums.iter().map(|s| *lock(s)).collect();
    grid.col_group().all_sum(&mut columns)?;
    // A NaN must not get lost in a maximum.
    let max = |v: &[f64]| v.iter().fold(0.0f64, |m, x| if x.abs() > m || x.is_nan() { x.abs() } else { m });
    let mut maxima = [max(&abs), max(&columns), b_inf, max(&r)];
    grid.all().all_max(&mut maxima)?;
    let [a_inf, a_one, b_inf, r_inf] = maxima;
    let x_one = x.iter().map(|v| v.abs()).sum();
    Ok(Check { ax_b_inf: r_inf, a_inf, a_one, x_inf: max(x), x_one, b_inf })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
