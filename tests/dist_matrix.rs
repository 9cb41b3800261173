//! Grids, distributed matrices, views, gather and scatter over the `mem` fabric.

use std::sync::Arc;

use fulmen::dist::{Desc, DistMatrix, Global};
use fulmen::fabric::{Fabric, mem};
use fulmen::{Error, Grid, Order, Result, Setup, World};
use fulmen_kernels::{Mat, Scalar, c32, c64};
use proptest::prelude::*;

fn on<R: Send>(n: usize, work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync) -> Vec<R> {
    mem::run(n, mem::Options::default(), work).into_iter().map(|r| r.unwrap()).collect()
}

const GRIDS: [(usize, usize); 8] = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 2), (2, 3), (3, 3)];

fn entry<T: Scalar>(i: usize, j: usize) -> T {
    let real = |x: usize| <<T as Scalar>::Real as fulmen_kernels::Real>::from_f64(x as f64);
    T::from_parts(real(1 + i * 37 % 1009), real(j * 53 % 997))
}

#[test]
fn a_grid_gives_each_rank_its_place_and_leaves_the_rest_out() {
    for (order, expected) in [(Order::RowMajor, [0, 1, 2, 3, 4, 5]), (Order::ColMajor, [0, 2, 4, 1, 3, 5])] {
        on(8, |fabric| {
            let me = fabric.rank();
            let grid = Grid::new(fabric, 2, 3, order)?;
            assert_eq!((grid.nprow(), grid.npcol(), grid.order()), (2, 3, order));
            let ranks: Vec<_> = (0..6).map(|at| grid.rank_at(at / 3, at % 3)).collect();
            assert_eq!(ranks, expected);
            let Some((p, q)) = grid.coords() else {
                assert!(me >= 6);
                let refused = DistMatrix::<f64>::zeros(&grid, Desc::square_blocks(4, 4, 2)).unwrap_err();
                assert!(refused.to_string().contains(&format!("rank {me} is not in it")));
                return Ok(());
            };
            assert_eq!((grid.rank_at(p, q), grid.coords_of(me)), (me, (p, q)));
            assert_eq!((grid.myrow(), grid.mycol()), (p, q));
            assert_eq!((grid.row_group().me(), grid.col_group().me(), grid.all().me()), (q, p, me));
            assert_eq!((grid.row_group().len(), grid.col_group().len(), grid.all().len()), (3, 2, 6));
            assert!((0..3).all(|q| grid.row_group().ranks()[q] == grid.rank_at(p, q)));
            assert!((0..2).all(|p| grid.col_group().ranks()[p] == grid.rank_at(p, q)));
            // The groups work, though they share ranks.
            let mut coordinates = [p as u64, q as u64];
            grid.row_group().all_sum(&mut coordinates)?;
            grid.col_group().all_sum(&mut coordinates)?;
            assert_eq!(coordinates, [3, 6]);
            Ok(())
        });
    }
}

#[test]
fn impossible_grids_are_refused_by_name() {
    on(2, |fabric| {
        let refused = |p, q| match Grid::new(Arc::clone(&fabric), p, q, Order::RowMajor) {
            Err(e @ Error::Argument { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(refused(2, 2).starts_with("P x Q: 2 x 2: needs 4 ranks, but there are 2"));
        assert!(refused(0, 1).starts_with("P: 0: "));
        assert!(refused(1, 0).starts_with("Q: 0: "));
        assert!(refused(usize::MAX, 2).starts_with("P x Q: "));
        let squarest = Grid::squarest(Arc::clone(&fabric))?;
        assert_eq!((squarest.nprow(), squarest.npcol()), (1, 2));
        Ok(())
    });
}

/// Every entry is where the axes say, gathers to its place, and comes back by scatter.
fn there_and_back<T: Scalar>(grid: (usize, usize), order: Order, desc: Desc, idle: usize) {
    let (nprow, npcol) = grid;
    on(nprow * npcol + idle, |fabric| {
        let grid = Grid::new(fabric, nprow, npcol, order)?;
        let Some((p, q)) = grid.coords() else { return Ok(()) };
        let a = DistMatrix::<T>::from_fn(&grid, desc, entry)?;
        let (rows, cols) = (a.rows(), a.cols());
        assert_eq!((a.local().nrows(), a.local().ncols()), (rows.count(p), cols.count(q)));
        assert!(a.lld() >= a.local().nrows().max(1));
        assert!(
            a.local().nrows() == 0 || a.local().ncols() < 2 || a.local().col_stride() == a.lld() as isize
        );
        for i in 0..desc.m {
            for j in 0..desc.n {
                let (gi, gj) = (Global::new(i), Global::new(j));
                let mine = rows.owner(gi) == p && cols.owner(gj) == q;
                assert_eq!(a.get(i, j), mine.then(|| entry(i, j)));
                if mine {
                    assert_eq!(a.local()[(rows.local(gi).0, cols.local(gj).0)], entry(i, j));
                }
            }
        }
        let expected = Mat::<T>::from_fn(desc.m, desc.n, entry);
        for root in [0, nprow * npcol - 1] {
            let gathered = a.gather(root)?;
            assert_eq!(gathered.is_some(), grid.all().me() == root);
            assert!(gathered.is_none_or(|whole| whole == expected));
            let mut back = DistMatrix::<T>::zeros(&grid, desc)?;
            let whole = (grid.all().me() == root).then_some(expected.as_ref());
            back.scatter(root, whole)?;
            assert_eq!(back.local(), a.local());
        }
        Ok(())
    });
}

#[test]
fn matrices_are_dealt_gathered_and_scattered_on_every_grid() {
    for (nprow, npcol) in GRIDS {
        for order in [Order::RowMajor, Order::ColMajor] {
            let desc = Desc::new(23, 17, 4, 3).with_source(nprow - 1, npcol / 2);
            there_and_back::<f64>((nprow, npcol), order, desc, 1);
        }
        for (m, n) in [(0, 0), (0, 5), (5, 0), (1, 1), (2, 9), (40, 1)] {
            there_and_back::<f64>((nprow, npcol), Order::RowMajor, Desc::new(m, n, 3, 2), 0);
        }
    }
    let desc = Desc::new(19, 21, 2, 5).with_source(1, 0);
    there_and_back::<f32>((2, 2), Order::RowMajor, desc, 0);
    there_and_back::<c32>((2, 2), Order::ColMajor, desc, 2);
    there_and_back::<c64>((3, 2), Order::RowMajor, desc, 0);
    // Case K4-08: smaller than a block on a larger grid: most ranks hold nothing, and take part quietly.
    there_and_back::<f64>((3, 3), Order::RowMajor, Desc::square_blocks(10, 10, 32), 0);
}

/// More than two chunks from each rank.
#[test]
fn large_matrices_travel_in_chunks() {
    let desc = Desc::new(1100, 900, 64, 32).with_source(1, 0);
    on(2, |fabric| {
        let grid = Grid::new(fabric, 2, 1, Order::RowMajor)?;
        let a = DistMatrix::<f64>::from_fn(&grid, desc, entry)?;
        let whole = a.gather(1)?;
        assert!(whole.as_ref().is_none_or(|whole| *whole == Mat::from_fn(1100, 900, entry)));
        let mut back = DistMatrix::<f64>::zeros(&grid, desc)?;
        back.scatter(1, whole.as_ref().map(|whole| whole.as_ref()))?;
        assert_eq!(back.local(), a.local());
        Ok(())
    });
}

#[test]
fn bad_descriptors_and_shapes_are_everyones_error() {
    on(4, |fabric| {
        let grid = Grid::squarest(fabric)?;
        let desc = Desc::square_blocks(6, 6, 2);
        let refused = |desc| DistMatrix::<f64>::zeros(&grid, desc).unwrap_err().to_string();
        assert!(refused(Desc { mb: 0, ..desc }).starts_with("MB: 0: "));
        assert!(refused(desc.with_source(0, 2)).starts_with("CSRC: 2: "));
        // Case K5-05: what no host has is refused before anything is touched, on all ranks alike.
        match DistMatrix::<f64>::zeros(&grid, Desc::square_blocks(1 << 24, 1 << 24, 256)) {
            Err(e @ Error::Resources { .. }) => {
                let text = e.to_string();
                assert!(text.contains("needs 2.0 PiB on ") && text.contains("are available"), "{text}");
            }
            other => panic!("{other:?}"),
        }
        let mut a = DistMatrix::<f64>::zeros(&grid, desc)?;
        let wrong = Mat::<f64>::zeros(6, 5);
        let whole = (grid.all().me() == 2).then_some(wrong.as_ref());
        let text = a.scatter(2, whole).unwrap_err().to_string();
        assert!(text.starts_with("matrix to scatter: 6 x 5: the view is 6 x 6"), "{text}");
        assert!(a.scatter(0, None).unwrap_err().to_string().contains("none"));
        assert!(a.gather(4).unwrap_err().to_string().starts_with("root: 4: "));
        grid.all().barrier() // nobody is stuck
    });
}

#[test]
fn a_local_block_of_many_pages_starts_as_zeros() {
    on(1, |fabric| {
        let grid = Grid::squarest(fabric)?;
        let mut a = DistMatrix::<f64>::zeros(&grid, Desc::square_blocks(1024, 1024, 64))?;
        assert!(a.lld() > 1024 && a.lld() * 8 % 4096 != 0);
        assert!((0..1024).all(|j| a.local().col(j).iter().all(|&x| x == 0.0)));
        a.local_mut().fill(2.0);
        assert_eq!(a.get(1023, 1023), Some(2.0));
        Ok(())
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// A view of a view at any offset: its local part, its ranges, gather and scatter.
    #[test]
    fn views_cover_exactly_their_part(
        (nprow, npcol) in (1usize..4, 1usize..4),
        (m, n) in (0usize..40, 0usize..40),
        (mb, nb) in (1usize..8, 1usize..8),
        source in (0usize..3, 0usize..3),
        cuts in prop::array::uniform8(0usize..40),
    ) {
        let desc = Desc::new(m, n, mb, nb).with_source(source.0 % nprow, source.1 % npcol);
        let range = |a: usize, b: usize, n: usize| {
            let (a, b) = (a % (n + 1), b % (n + 1));
            a.min(b)..a.max(b)
        };
        let (r1, c1) = (range(cuts[0], cuts[1], m), range(cuts[2], cuts[3], n));
        let (r2, c2) = (range(cuts[4], cuts[5], r1.len()), range(cuts[6], cuts[7], c1.len()));
        let (ia, ja) = (r1.start + r2.start, c1.start + c2.start);
        on(nprow * npcol, |fabric| {
            let grid = Grid::new(fabric, nprow, npcol, Order::ColMajor)?;
            let mut a = DistMatrix::<f64>::from_fn(&grid, desc, entry)?;
            let view = a.view().sub(r1.clone(), c1.clone()).sub(r2.clone(), c2.clone());
            assert_eq!((view.nrows(), view.ncols()), (r2.len(), c2.len()));
            assert_eq!((view.row_range().start, view.col_range().start), (ia, ja));
            let mine: Vec<f64> = (ja..ja + c2.len())
                .flat_map(|j| (ia..ia + r2.len()).map(move |i| (i, j)))
                .filter_map(|(i, j)| a.get(i, j))
                .collect();
            let local = view.local();
            let seen: Vec<f64> = (0..local.ncols()).flat_map(|j| local.col(j).iter().copied()).collect();
            assert_eq!(seen, mine);
            let (rows, cols) = (view.local_rows(0..r2.len()), view.local_cols(0..c2.len()));
            assert_eq!(local, view.block().submatrix(rows.start, cols.start, rows.len(), cols.len()));

            let expected = Mat::from_fn(r2.len(), c2.len(), |i, j| entry::<f64>(ia + i, ja + j));
            assert!(view.gather(0)?.is_none_or(|part| part == expected));

            // Scatter something else into the view: it alone changes.
            let other = Mat::from_fn(r2.len(), c2.len(), |i, j| -1.0 - (i + 100 * j) as f64);
            let mut target = a.view_mut().sub(r1.clone(), c1.clone()).sub(r2.clone(), c2.clone());
            target.rb_mut().scatter(0, (grid.all().me() == 0).then_some(other.as_ref()))?;
            assert_eq!(target.local_mut().nrows(), rows.len());
            let parts = target.into_parts();
            assert_eq!((parts.row_range.start, parts.col_range.start), (ia, ja));
            assert_eq!(parts.block.nrows(), parts.rows.count(grid.myrow()));
            let inside = |i: usize, j: usize| {
                (ia..ia + r2.len()).contains(&i) && (ja..ja + c2.len()).contains(&j)
            };
            for i in 0..m {
                for j in 0..n {
                    if let Some(x) = a.get(i, j) {
                        let new = if inside(i, j) { other[(i - ia, j - ja)] } else { entry(i, j) };
                        assert_eq!(x, new);
                    }
                }
            }
            Ok(())
        });
    }
}

/// The LU driver moves matrices between threads' hands: this must compile.
#[test]
fn ranks_may_own_their_matrices_on_any_thread() {
    fn sendable<T: Send>() {}
    sendable::<DistMatrix<f64>>();
    sendable::<Arc<Grid>>();
    sendable::<fulmen::dist::DistMut<'static, f64>>();
    sendable::<fulmen::comm::PanelBcast<f64>>();
    sendable::<fulmen::comm::AllToAllSmall<f64>>();
}

/// Ranks that mean different matrices are told so, all of them, before anything is done with one.
#[test]
fn ranks_that_disagree_are_refused() {
    for (at, name) in ["M", "N", "MB", "NB", "RSRC", "CSRC"].into_iter().enumerate() {
        let results = World::threads(4, &Setup { threads: 1, ..Setup::default() }, |world| {
            let grid = world.grid(2, 2)?;
            let mut x = [40, 30, 8, 4, 0, 0];
            x[at] += usize::from(world.rank() == 2);
            let desc = Desc::new(x[0], x[1], x[2], x[3]).with_source(x[4], x[5]);
            DistMatrix::<f32>::zeros(&grid, desc).map(|_| ())
        });
        // A rank may hear of another's error before it finds its own.
        let said = fulmen::all_ok(results.unwrap()).unwrap_err().to_string();
        assert!(said.starts_with(&format!("{name}: ")) && said.contains("do not agree"), "{said}");
    }
    assert_eq!(World::threads(0, &Setup::default(), |_| Ok(())).unwrap_err().exit_code(), 2);
}
