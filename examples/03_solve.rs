//! Solves your own system over a grid of ranks: A·x = b, in a text file, a row of A and its b to a line.
//!
//! `cargo run --release --example 03_solve -- [FILE [P Q]]`; without a file, a system of its own.

use fulmen::kernels::Mat;
use fulmen::prelude::*;

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(error.exit_code().into());
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let system = match args.first() {
        Some(path) => read(path)?,
        None => Mat::from_fn(200, 201, |i, j| ((7919 * i + 104_729 * j + 31 * i * j) % 1009) as f64 / 1009.0),
    };
    let size = |at: usize| match args.get(at) {
        None => Ok(2),
        Some(text) => {
            text.parse().map_err(|_| Error::argument("P, Q", text, "is not a number", "give two numbers"))
        }
    };
    let (p, q) = (size(1)?, size(2)?);
    let n = system.nrows();
    let nb = 32;

    let results = World::threads(p * q, &Setup::default(), |world| {
        let grid = world.grid(p, q)?;
        // Rank 0 has the system; each rank gets its blocks.
        let root = world.rank() == 0;
        let mut a = DistMatrix::<f64>::zeros(&grid, Desc::square_blocks(n, n, nb))?;
        let mut x = DistMatrix::<f64>::zeros(&grid, Desc::square_blocks(n, 1, nb))?;
        a.scatter(0, root.then(|| system.as_ref().subcols(0, n)))?;
        x.scatter(0, root.then(|| system.as_ref().subcols(n, 1)))?;
        a.lu(&world)?.solve_in_place(&world, &mut x)?;
        x.gather(0)
    })?;
    // Of ranks that failed, the one that was the cause.
    for x in fulmen::all_ok(results)?.into_iter().flatten() {
        let mut worst = 0.0f64;
        for i in 0..n {
            let ax: f64 = (0..n).map(|j| system[(i, j)] * x[(j, 0)]).sum();
            worst = worst.max((ax - system[(i, n)]).abs());
        }
        println!("n = {n} on {p} x {q}: x[0] = {}, largest residual {worst:.1e}", x[(0, 0)]);
    }
    Ok(())
}

fn read(path: &str) -> Result<Mat<f64>> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::argument("FILE", path, e.to_string(), "name a text file of numbers"))?;
    let mut rows: Vec<Vec<f64>> = vec![];
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row = line.split_whitespace().map(|word| {
            let place = format!("{path}:{}", number + 1);
            word.parse()
                .map_err(|_| Error::argument(place, word, "is not a number", "give numbers and blanks"))
        });
        rows.push(row.collect::<Result<_>>()?);
    }
    let n = rows.len();
    if n == 0 {
        return Err(Error::argument(
            "FILE",
            path,
            "holds no numbers",
            "give n rows of n + 1 numbers: A and b",
        ));
    }
    if let Some(bad) = rows.iter().position(|row| row.len() != n + 1) {
        let problem = format!("row {} has {} numbers, not {}", bad + 1, rows[bad].len(), n + 1);
        return Err(Error::argument("FILE", path, problem, "give n rows of n + 1 numbers: A and b"));
    }
    Ok(Mat::from_fn(n, n + 1, |i, j| rows[i][j]))
}
