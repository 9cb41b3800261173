//! The cases, and the table of who did what.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fulmen_kernels::{
    Element, KernelSet, Kernels, MatMut, MatRef, Op, PanelShape, Real, SharedMut, Team, Variant, getrf,
};

use crate::memory::huge;
use crate::peers::Peer;
use crate::{pin, witness};

/// Gflop/s of each side in each repetition; the first side is the one that ratios are taken of.
struct Case {
    name: String,
    sides: Vec<String>,
    rates: Vec<Vec<f64>>,
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x.get(x.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Case {
    fn print(&self) {
        let of = |s: usize| self.rates.iter().map(move |rep| rep[s]).filter(|r| r.is_finite());
        print!("{:<26}", self.name);
        for (s, side) in self.sides.iter().enumerate() {
            let (mid, max) = (median(of(s).collect()), of(s).fold(0.0, f64::max));
            print!("  {side} {mid:.1} (max {max:.1}");
            if s > 2 {
                let ratio = self.rates.iter().map(|rep| rep[2] / rep[s]).filter(|r| r.is_finite());
                print!("; x{:.3}", median(ratio.collect()));
            } else if s == 2 {
                let ratio = self.rates.iter().map(|rep| rep[2] / rep[0]);
                print!("; {:.3} of fma", median(ratio.collect()));
            }
            print!(")");
        }
        println!();
    }
}

/// How a solve into packed form is made.
enum Solve {
    /// Strip by strip, with what comes next fetched meanwhile.
    Into,
    /// Pack all, then solve.
    PackFirst,
    /// What is packed before.
    Only,
}

/// What all cases of a table share.
struct Bench<'a> {
    set: &'a KernelSet,
    peers: &'a [Peer],
    team: Team,
    reps: usize,
    only: &'a str,
    pause: Duration,
}

type Run<'a> = Box<dyn FnMut() -> Option<Duration> + 'a>;

impl Bench<'_> {
    fn wants(&self, name: &str) -> bool {
        name.contains(self.only)
    }

    /// Runs all sides in turn, `reps` times after one that does not count.
    fn case(&self, name: &str, flops: f64, mut sides: Vec<(String, Run<'_>)>) {
        let mut names = vec!["fma".to_string(), "l2".to_string()];
        names.extend(sides.iter().map(|(name, _)| name.clone()));
        let mut rates = Vec::new();
        for rep in 0..=self.reps {
            pin::bind(&self.team);
            let mut rate = vec![witness::fma(&self.team), witness::l2(&**self.set.of::<f64>(), &self.team)];
            for (name, side) in &mut sides {
                std::thread::sleep(self.pause);
                if self.peers.iter().any(|peer| peer.name == *name) {
                    pin::release();
                } else {
                    pin::bind(&self.team);
                }
                rate.push(side().map_or(f64::NAN, |took| flops / took.as_secs_f64() / 1e9));
            }
            if rep > 0 {
                rates.push(rate);
            }
        }
        Case { name: name.into(), sides: names, rates }.print();
    }

    fn gemm<T: Element + Real>(&self, m: usize, n: usize, k: usize) {
        let name = format!("{}gemm {m}x{n}x{k}", T::LETTER);
        if !self.wants(&name) {
            return;
        }
        let (ld, ldk) = (m + 8, k + 8);
        let a = &*filled::<T>(ld * k);
        let b = &*filled::<T>(ldk * n);
        let c = std::cell::RefCell::new(filled::<T>(ld * n));
        let kernels = self.set.of::<T>();
        let tile = kernels.tile();
        let av = view(a, m, k, ld);
        let bv = view(b, k, n, ldk);
        let (pa, pb) = (huge::<T>(tile.packed_a_len(m, k)), huge::<T>(tile.packed_b_len(k, n)));
        kernels.pack_a(av, pa);
        kernels.pack_b(bv, pb);
        let minus = T::from_f64(-1.0);
        let mut sides: Vec<(String, Run<'_>)> = vec![(
            "native".into(),
            Box::new(|| {
                let mut c = c.borrow_mut();
                let start = Instant::now();
                let c = view_mut(&mut c, m, n, ld);
                kernels.gemm(&self.team, minus, (Op::NoTrans, av), (Op::NoTrans, bv), T::from_f64(1.0), c);
                Some(start.elapsed())
            }),
        )];
        for peer in self.peers {
            let c = &c;
            sides.push((
                peer.name.clone(),
                Box::new(move || {
                    let mut c = c.borrow_mut();
                    let start = Instant::now();
                    peer.gemm(m, n, k, a, ld, b, ldk, &mut c, ld).then(|| start.elapsed())
                }),
            ));
        }
        let (pa, pb) = (&*pa, &*pb);
        sides.push((
            "packed".into(),
            Box::new(|| {
                let mut c = c.borrow_mut();
                let start = Instant::now();
                packed(&**kernels, &self.team, pa, pb, k, view_mut(&mut c, m, n, ld));
                Some(start.elapsed())
            }),
        ));
        self.case(&name, 2.0 * m as f64 * n as f64 * k as f64, sides);
    }

    fn trsm<T: Element + Real>(&self, k: usize, n: usize) {
        let name = format!("{}trsm {k}x{n}", T::LETTER);
        if !self.wants(&name) {
            return;
        }
        let ld = k + 8;
        let l: Vec<T> = filled::<T>(ld * k).iter().map(|&x| x * T::from_f64(1.0 / k as f64)).collect();
        let b = std::cell::RefCell::new(filled::<T>(ld * n));
        let kernels = self.set.of::<T>();
        let nr = kernels.tile().nr;
        let strips = std::cell::RefCell::new(huge::<T>(kernels.tile().packed_b_len(k, n)));
        let lv = view(&l, k, k, ld);
        let solve = |how: Solve| {
            let (b, mut strips) = (b.borrow(), strips.borrow_mut());
            let b = &**b;
            let count = strips.len() / (nr * k);
            let shared = SharedMut::new(MatMut::from_column_major_slice_mut(&mut strips, nr * k, count));
            let start = Instant::now();
            // Long enough that what is fetched ahead counts.
            const AT_ONCE: usize = 48;
            let l = kernels.pack_l(lv);
            let next = AtomicUsize::new(0);
            self.team.run(|_| {
                loop {
                    let first = next.fetch_add(AT_ONCE, Ordering::Relaxed);
                    if first >= count {
                        break;
                    }
                    let mine = first..(first + AT_ONCE).min(count);
                    // SAFETY: strips are taken from the counter by one member.
                    let part = unsafe { shared.part(0..nr * k, mine.clone()) };
                    // SAFETY: strips follow each other.
                    let part =
                        unsafe { std::slice::from_raw_parts_mut(part.as_ptr_mut(), nr * k * mine.len()) };
                    let cols = (n - first * nr).min(nr * mine.len());
                    match how {
                        Solve::Into => kernels.trsm_into(&l, view(&b[first * nr * ld..], k, cols, ld), part),
                        Solve::PackFirst => {
                            kernels.pack_b(view(&b[first * nr * ld..], k, cols, ld), part);
                            kernels.trsm_with(&l, k, part);
                        }
                        Solve::Only => kernels.trsm_with(&l, k, part),
                    }
                }
            });
            Some(start.elapsed())
        };
        let mut sides: Vec<(String, Run<'_>)> = vec![("native".into(), Box::new(|| solve(Solve::Into)))];
        for peer in self.peers {
            let (b, l) = (&b, &l);
            sides.push((
                peer.name.clone(),
                Box::new(move || {
                    let mut b = b.borrow_mut();
                    let start = Instant::now();
                    peer.trsm(k, n, l, ld, &mut b, ld).then(|| start.elapsed())
                }),
            ));
        }
        sides.push(("pack, then solve".into(), Box::new(|| solve(Solve::PackFirst))));
        sides.push(("solve only".into(), Box::new(|| solve(Solve::Only))));
        self.case(&name, k as f64 * k as f64 * n as f64, sides);
    }

    fn panel(&self, m: usize, n: usize) {
        let name = format!("dgetrf {m}x{n}");
        if !self.wants(&name) {
            return;
        }
        let ld = m + 8;
        let original = &*filled::<f64>(ld * n);
        let a = std::cell::RefCell::new(huge::<f64>(ld * n));
        let kernels = self.set.of::<f64>();
        let mut sides: Vec<(String, Run<'_>)> = Vec::new();
        let shape = PanelShape { rfact: Variant::Right, pfact: Variant::Crout, nbmin: 8, ndiv: 2 };
        sides.push((
            "native".into(),
            Box::new(|| {
                let mut a = a.borrow_mut();
                a.copy_from_slice(original);
                let mut ipiv = vec![0; m.min(n)];
                let start = Instant::now();
                getrf(&**kernels, &self.team, shape, view_mut(&mut a, m, n, ld), &mut ipiv);
                Some(start.elapsed())
            }),
        ));
        for peer in self.peers {
            let a = &a;
            sides.push((
                peer.name.clone(),
                Box::new(move || {
                    let mut a = a.borrow_mut();
                    a.copy_from_slice(original);
                    let start = Instant::now();
                    peer.getrf(m, n, &mut a, ld).then(|| start.elapsed())
                }),
            ));
        }
        let (m, n) = (m as f64, n as f64);
        self.case(&name, m * n * n - n * n * n / 3.0, sides);
    }
}

fn filled<T: Real>(len: usize) -> &'static mut [T] {
    let x = huge::<T>(len);
    let mut state = 88_172_645_463_325_252u64;
    for x in x.iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *x = T::from_f64((state >> 11) as f64 / (1u64 << 53) as f64 - 0.5);
    }
    x
}

fn view<T>(x: &[T], m: usize, n: usize, ld: usize) -> MatRef<'_, T> {
    assert!(n == 0 || x.len() >= (n - 1) * ld + m);
    // SAFETY: inside the slice.
    unsafe { MatRef::from_raw_parts(x.as_ptr(), m, n, 1, ld as isize) }
}

fn view_mut<T>(x: &mut [T], m: usize, n: usize, ld: usize) -> MatMut<'_, T> {
    assert!(n == 0 || x.len() >= (n - 1) * ld + m);
    // SAFETY: inside the slice, which is borrowed.
    unsafe { MatMut::from_raw_parts_mut(x.as_mut_ptr(), m, n, 1, ld as isize) }
}

/// The update as the distributed LU runs it: operands packed before, blocks of rows from a counter.
fn packed<T: Element>(kernels: &dyn Kernels<T>, team: &Team, a: &[T], b: &[T], k: usize, c: MatMut<'_, T>) {
    let (m, n, tile) = (c.nrows(), c.ncols(), kernels.tile());
    let blocks = m.div_ceil(tile.mc);
    let c = SharedMut::new(c);
    let next = AtomicUsize::new(0);
    team.run(|_| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            let (i, j) = (task % blocks * tile.mc, (task / blocks).saturating_mul(tile.nc));
            if j >= n {
                break;
            }
            let (rows, cols) = (i..(i + tile.mc).min(m), j..j.saturating_add(tile.nc).min(n));
            let a = &a[i * k..tile.packed_a_len(rows.end, k)];
            let b = &b[j * k..tile.packed_b_len(k, cols.end)];
            // SAFETY: each block is taken by one member.
            kernels.gemm_packed(-T::one(), a, b, k, unsafe { c.part(rows, cols) });
        }
    });
}

/// Prints the table for `threads` threads.
pub fn table(set: &KernelSet, peers: &[Peer], threads: usize, reps: usize, n: usize, only: &str, pause: u64) {
    println!("{threads} thread(s): Gflop/s, median (max); x is native over the peer");
    let team = match Team::new(threads) {
        Ok(team) => team,
        Err(e) => return eprintln!("kernels-vs-peers: {e}"),
    };
    peers.iter().for_each(|peer| peer.threads(threads));
    let bench = Bench { set, peers, team, reps, only, pause: Duration::from_millis(pause) };
    for k in [128, 192, 256, 384] {
        bench.gemm::<f64>(n, n, k);
    }
    bench.gemm::<f64>(2048, 2048, 2048);
    bench.gemm::<f64>(4096, 4096, 4096);
    bench.gemm::<f32>(n, n, 256);
    bench.gemm::<f32>(4096, 4096, 4096);
    bench.trsm::<f64>(256, n);
    bench.panel(8192, 256);
}
