//! Two systems at once on one MPI job: the ranks are split into two halves, and each half solves its own.
//!
//! `cargo build --release --features mpi --example 04_mpi_split`, then `mpirun -n 4 target/release/examples/04_mpi_split`

use fulmen::fabric::mpi::{self, rsmpi};
use fulmen::prelude::*;
use rsmpi::topology::Color;
use rsmpi::traits::*;

fn main() {
    // Dropped last: MPI ends when every world has been left.
    let Some((universe, _)) = rsmpi::initialize_with_threading(rsmpi::Threading::Funneled) else {
        eprintln!("MPI was initialised before");
        std::process::exit(3);
    };
    if let Err(error) = run(&universe.world()) {
        mpi::abort(&error);
    }
}

fn run(job: &impl Communicator) -> Result<()> {
    let half = job.rank() % 2;
    let Some(comm) = job.split_by_color(Color::with_value(half)) else {
        return Err(Error::Internal("this rank is in neither half".into()));
    };
    let world = World::mpi(&comm, &mpi::Options::default(), &Setup::default())?;
    let grid = Grid::squarest(world.fabric().clone())?;

    // Each half has its own A·x = b, with a solution that is known.
    let n = 300 + 100 * half as usize;
    let a =
        |i: usize, j: usize| if i == j { 10.0 } else { ((7919 * i + 104_729 * j) % 1009) as f64 / 1009.0 };
    let desc = Desc::square_blocks(n, n, 32);
    let mut x = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, 1, 32), |i, _| {
        (0..n).map(|j| a(i, j)).sum()
    })?;
    DistMatrix::<f64>::from_fn(&grid, desc, a)?.lu(&world)?.solve_in_place(&world, &mut x)?;
    if let Some(x) = x.gather(0)? {
        let worst = (0..n).map(|i| (x[(i, 0)] - 1.0).abs()).fold(0.0, f64::max);
        println!(
            "half {half}: n = {n} on {} x {} ranks, largest error {worst:.1e}",
            grid.nprow(),
            grid.npcol()
        );
        if worst.is_nan() || worst > 1e-10 {
            return Err(Error::Internal(format!("half {half} has a wrong solution")));
        }
    }
    Ok(())
}
