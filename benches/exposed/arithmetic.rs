//! Arithmetic that takes time and computes nothing: a node of a given speed.

use std::cell::Cell;
use std::time::{Duration, Instant};

use fulmen_kernels::{Description, Diag, Kernels, MatMut, MatRef, Op, Side, Team, Tile, Uplo};

/// Sleeps shorter than this are saved up: they would not be kept.
const SHORT: Duration = Duration::from_micros(200);

thread_local! {
    /// Until when the core that this thread plays is busy.
    static BUSY: Cell<Instant> = Cell::new(Instant::now());
}

/// One rank's arithmetic. What moves or looks at elements is done; what multiplies takes its time.
pub struct Played<'a> {
    real: &'a dyn Kernels<f64>,
    /// Operations per second of this clock that a core does: in products, and in the panel.
    rate: f64,
    panel: f64,
}

impl<'a> Played<'a> {
    /// With the tiles and the packing of `real`.
    pub fn new(real: &'a dyn Kernels<f64>, rate: f64, panel: f64) -> Self {
        Played { real, rate, panel }
    }

    fn take(&self, operations: f64, rate: f64) {
        let now = Instant::now();
        let until = BUSY.get().max(now) + Duration::from_secs_f64(operations / rate);
        BUSY.set(until);
        let rest = until.saturating_duration_since(now);
        if rest > SHORT {
            std::thread::sleep(rest);
        }
    }
}

fn product(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

impl Kernels<f64> for Played<'_> {
    fn description(&self) -> &Description {
        self.real.description()
    }

    fn bitwise_stable(&self) -> bool {
        true
    }

    fn gemm(
        &self,
        _: &Team,
        _: f64,
        (op, a): (Op, MatRef<'_, f64>),
        _: (Op, MatRef<'_, f64>),
        _: f64,
        c: MatMut<'_, f64>,
    ) {
        let k = if op == Op::NoTrans { a.ncols() } else { a.nrows() };
        self.take(product(c.nrows(), c.ncols(), k), self.rate);
    }

    fn trsm(
        &self,
        _: &Team,
        side: Side,
        _: Uplo,
        _: Op,
        _: Diag,
        _: f64,
        a: MatRef<'_, f64>,
        b: MatMut<'_, f64>,
    ) {
        let others = if side == Side::Left { b.ncols() } else { b.nrows() };
        self.take(product(a.nrows(), a.nrows(), others) / 2.0, self.rate);
    }

    fn tile(&self) -> Tile {
        self.real.tile()
    }

    fn pack_a(&self, a: MatRef<'_, f64>, out: &mut [f64]) {
        self.real.pack_a(a, out);
    }

    fn pack_b(&self, b: MatRef<'_, f64>, out: &mut [f64]) {
        self.real.pack_b(b, out);
    }

    fn unpack_b(&self, packed: &[f64], b: MatMut<'_, f64>) {
        self.real.unpack_b(packed, b);
    }

    fn trsm_packed(&self, l: MatRef<'_, f64>, b: &mut [f64]) {
        self.take(l.nrows() as f64 * b.len() as f64, self.rate);
    }

    fn gemm_packed(&self, _: f64, _: &[f64], _: &[f64], k: usize, c: MatMut<'_, f64>) {
        self.take(product(c.nrows(), c.ncols(), k), self.rate);
    }

    fn gemm_panel(&self, _: f64, a: MatRef<'_, f64>, b: MatRef<'_, f64>, _: MatMut<'_, f64>) {
        self.take(product(a.nrows(), b.ncols(), a.ncols()), self.panel);
    }

    fn iamax(&self, x: &[f64]) -> Option<usize> {
        self.real.iamax(x)
    }

    fn panel_column(&self, cols: MatMut<'_, f64>, _: Option<f64>, u: &[f64]) -> Option<usize> {
        self.take(product(cols.nrows(), 1, u.len()), self.panel);
        let last = cols.as_ref().col(cols.ncols() - 1).try_as_col_major()?;
        self.real.iamax(last.as_slice())
    }

    fn scal(&self, _: f64, _: &mut [f64]) {}
}
