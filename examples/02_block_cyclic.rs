//! How a matrix is cut over a grid: blocks are dealt like cards, in both directions.
//!
//! `cargo run --release --example 02_block_cyclic`

use fulmen::prelude::*;

fn main() -> Result<()> {
    // 7 x 9 in blocks of 2 x 3 on a 2 x 2 grid. Each rank notes itself in the elements that it holds.
    let results = World::threads(4, &Setup::default(), |world| {
        let grid = world.grid(2, 2)?;
        let rank = world.rank() as f64;
        let owners = DistMatrix::<f64>::from_fn(&grid, Desc::new(7, 9, 2, 3), |_, _| rank)?;
        let mine = format!("rank {rank} holds {} x {}", owners.local().nrows(), owners.local().ncols());
        Ok((mine, owners.gather(0)?)) // the whole matrix, on rank 0
    })?;
    for result in results {
        let (mine, whole) = result?;
        println!("{mine}");
        let Some(whole) = whole else { continue };
        println!("which rank holds element (i, j):");
        for i in 0..whole.nrows() {
            let row: Vec<String> = (0..whole.ncols()).map(|j| whole[(i, j)].to_string()).collect();
            println!("    {}", row.join(" "));
        }
    }
    Ok(())
}
