//! NumPy's files in and out: A and B from `a.npy` and `b.npy`, the solution of A·X = B to `x.npy`, and how much of it
//! can be trusted. Every rank reads and writes its own blocks.
//!
//! `cargo run --release --example 05_npy -- [a.npy b.npy x.npy]`; without files, a system of its own in a folder that
//! is removed again.

use std::path::PathBuf;

use fulmen::lapack::Norm;
use fulmen::prelude::*;

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(error.exit_code().into());
    }
}

fn run() -> Result<()> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    match &args[..] {
        [a, b, x] => solve(a, b, x, false),
        [] => {
            let folder = std::env::temp_dir().join(format!("fulmen-npy-{}", std::process::id()));
            std::fs::create_dir(&folder)
                .map_err(|e| Error::System { what: folder.display().to_string(), os: e.to_string() })?;
            let [a, b, x] = ["a.npy", "b.npy", "x.npy"].map(|name| folder.join(name));
            let result = solve(&a, &b, &x, true);
            let _ = std::fs::remove_dir_all(&folder);
            result
        }
        _ => Err(Error::argument("files", args.len(), "are not three", "give a.npy b.npy x.npy, or nothing")),
    }
}

fn solve(a: &PathBuf, b: &PathBuf, x: &PathBuf, make: bool) -> Result<()> {
    let results = World::threads(4, &Setup::default(), |world| {
        let grid = world.grid(2, 2)?;
        let blocks = Blocks::square(64);
        if make {
            let entry = |i: usize, j: usize| ((7919 * i + 104_729 * j + 31 * i * j) % 1009) as f64 / 1009.0;
            DistMatrix::from_fn(&grid, Desc::of(300, 300, blocks), entry)?.to_npy(a)?;
            DistMatrix::from_fn(&grid, Desc::of(300, 2, blocks), entry)?.to_npy(b)?;
        }
        let a = DistMatrix::<f64>::from_npy(&grid, a, blocks)?;
        let mut b = DistMatrix::<f64>::from_npy(&grid, b, blocks)?;
        let lu = a.lu(&world)?;
        lu.solve_in_place(&world, &mut b)?;
        b.to_npy(x)?;
        Ok((lu.rcond(&world, Norm::One)?, lu.ill_conditioned(&world)?))
    })?;
    for (rank, result) in results.into_iter().enumerate() {
        let (rcond, ill_conditioned) = result?;
        if rank == 0 {
            let doubt = if ill_conditioned { ": no digit of x is certain" } else { "" };
            println!("{}: rcond {rcond:.1e}{doubt}", x.display());
        }
    }
    Ok(())
}
