//! Ranks, a grid of them, and who is where.
//!
//! `cargo run --release --example 01_grid`

use fulmen::prelude::*;

fn main() -> Result<()> {
    // Six ranks as threads of this process. The closure is the program that every rank runs.
    let told = World::threads(6, &Setup::default(), |world| {
        let grid = world.grid(2, 3)?;
        // A collective of one process row: the sum of its ranks, in the order of its columns.
        let mut sum = [world.rank()];
        grid.row_group().all_sum(&mut sum)?;
        Ok(format!(
            "rank {} is at ({}, {}) of {} x {}; the ranks of its row sum to {}",
            world.rank(),
            grid.myrow(),
            grid.mycol(),
            grid.nprow(),
            grid.npcol(),
            sum[0]
        ))
    })?;
    for line in told {
        println!("{}", line?);
    }
    Ok(())
}
