//! The `mpi` fabric under `mpirun`: a program for its ranks. `ci/mpi` starts it, with both MPIs of Debian.
//!
//!   fabric_mpi list                          conformance cases that end in failure, and their ranks; needs no mpirun
//!   fabric_mpi messages|window good          every conformance case that ends well, on split communicators
//!   fabric_mpi messages|window CASE          one that does not; each rank that saw the right end says so
//!   fabric_mpi messages|window lu            distributed LU on all ranks: the bits of x as with `mem`
//!   fabric_mpi messages|window speed         one way of a ping-pong of two ranks, in µs: for people, asserts nothing
//!   fabric_mpi messages|window work FOLDER   exchanges until a fault ends it; pids go to FOLDER
//!
//! Without arguments, as `cargo test --features mpi` calls it, it runs what one rank can.

mod conformance;
mod ranks;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use conformance::CASES;
use fulmen::fabric::mpi::{self, Options, Transfer, rsmpi};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane};
use fulmen::prelude::*;
use rsmpi::topology::Color;
use rsmpi::traits::*;

/// The largest conformance case has a buffer of 64 MiB.
const WINDOW: usize = 96 << 20;

fn options(transfer: &str) -> Options {
    Options {
        bounds: Bounds { silence: Duration::from_secs(2), patience: Duration::from_secs(60) },
        transfer: match transfer {
            "messages" => Transfer::Messages,
            "window" => Transfer::Window { bytes: WINDOW },
            other => panic!("no transfer {other}"),
        },
        ..Options::default()
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    if args == ["list"] {
        for case in CASES.iter().filter(|case| !case.ends_well()) {
            println!("{} {}", case.name, case.ranks);
        }
        return;
    }
    let (universe, _) =
        rsmpi::initialize_with_threading(rsmpi::Threading::Funneled).expect("MPI is up already");
    let world = universe.world();
    match args.as_slice() {
        [] => {
            assert_eq!(world.size(), 1, "say what the ranks are to do");
            good(&world, &options("messages"));
            println!("ci/mpi runs the cases of more than one rank");
        }
        [transfer, "good"] => good(&world, &options(transfer)),
        [transfer, "lu"] => lu(&world, &options(transfer)),
        [transfer, "speed"] => speed(&world, &options(transfer)),
        [transfer, "work", folder] => work(&world, &options(transfer), Path::new(folder)),
        [transfer, case] => bad(&world, &options(transfer), case),
        other => panic!("no such task: {other:?}"),
    }
}

fn good(world: &impl Communicator, options: &Options) {
    let size = world.size() as usize;
    let mut ran = 0;
    for case in CASES.iter().filter(|case| case.ends_well() && case.ranks <= size) {
        let part = (world.rank() as usize) < case.ranks;
        let color = if part { Color::with_value(0) } else { Color::undefined() };
        if let Some(comm) = world.split_by_color(color) {
            let rank = mpi::connect(&comm, options).unwrap();
            let result = case.run(&(Arc::clone(&rank) as Arc<dyn Fabric>)).and_then(|()| rank.leave());
            case.judge(rank.rank(), &result);
        }
        ran += 1;
    }
    world.barrier();
    if world.rank() == 0 {
        println!("{ran} cases passed");
    }
}

/// The case's end is the job's: the drop of the fabric ends all processes.
fn bad(world: &impl Communicator, options: &Options, name: &str) {
    let case = CASES.iter().find(|case| case.name == name).expect("no such case");
    let rank = mpi::connect(world, options).unwrap();
    let result = case.run(&(Arc::clone(&rank) as Arc<dyn Fabric>));
    if let Err(e) = &result {
        rank.fail(e);
    }
    // A rank that has done its part learns of the failure when it leaves.
    let result = result.and_then(|()| rank.leave());
    case.judge(rank.rank(), &result);
    println!("right {}", rank.rank());
}

/// A system of its own, on `nprow` x `npcol` of the ranks: the bits of x, on rank 0.
fn solve(world: &World, nprow: usize, npcol: usize) -> Result<Option<Vec<u64>>> {
    let (n, nb) = (500, 32);
    let grid = world.grid(nprow, npcol)?;
    let element =
        |i: usize, j: usize| ((7919 * i + 104_729 * j + 31 * i * j) % 10_007) as f64 / 10_007.0 - 0.5;
    let a = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, n, nb), element)?;
    let mut x = DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(n, 1, nb), |i, _| element(i, n))?;
    a.lu(world)?.solve_in_place(world, &mut x)?;
    Ok(x.gather(0)?.map(|x| (0..n).map(|i| x[(i, 0)].to_bits()).collect()))
}

fn lu(comm: &impl Communicator, options: &Options) {
    let setup = Setup { threads: 1, ..Setup::default() };
    let expected =
        World::threads(1, &setup, |world| solve(&world, 1, 1)).unwrap().remove(0).unwrap().unwrap();
    assert!(expected.iter().any(|bits| *bits != 0));
    for (nprow, npcol) in [(2, 2), (1, 4), (4, 1)] {
        let world = World::mpi(comm, options, &setup).unwrap();
        assert_eq!(world.size(), 4, "for four ranks");
        if let Some(x) = solve(&world, nprow, npcol).unwrap() {
            assert_eq!(x, expected, "{nprow} x {npcol}: other bits than with `mem`");
            println!("the bits of `mem` on {nprow} x {npcol}");
        }
    }
}

/// Medians of batches, with all arms made ahead.
fn speed(comm: &impl Communicator, options: &Options) {
    let fabric = mpi::connect(comm, options).unwrap();
    let (me, other) = (fabric.rank(), 1 - fabric.rank());
    for (bytes, trips) in [(8, 500), (4096, 500), (65_536, 100), (1 << 20, 10), (16 << 20, 2)] {
        let mut out = Buf::<u8>::zeros(&*fabric, bytes).unwrap();
        let mut inn = Buf::<u8>::zeros(&*fabric, bytes).unwrap();
        let mut times = vec![];
        for _ in 0..15 {
            conformance::barrier(&*fabric, Lane::CONTROL).unwrap();
            inn.arm(&*fabric, Lane::BULK, other, 0..bytes).unwrap();
            let begin = std::time::Instant::now();
            for trip in 1..=trips {
                if me == 0 {
                    out.put(&*fabric, Lane::BULK, other, 0..bytes).unwrap();
                }
                inn.wait(&*fabric, Lane::BULK, other).unwrap();
                if trip < trips {
                    inn.arm(&*fabric, Lane::BULK, other, 0..bytes).unwrap();
                }
                if me == 1 {
                    out.put(&*fabric, Lane::BULK, other, 0..bytes).unwrap();
                }
                out.flush(&*fabric).unwrap();
            }
            times.push(begin.elapsed().as_secs_f64() / f64::from(2 * trips));
        }
        times.sort_by(f64::total_cmp);
        if me == 0 {
            println!("{bytes} bytes: {:.2} µs", times[times.len() / 2] * 1e6);
        }
    }
    fabric.leave().unwrap();
}

fn work(comm: &impl Communicator, options: &Options, notes: &Path) {
    let fabric = mpi::connect(comm, options).unwrap();
    let me = fabric.rank();
    std::fs::write(notes.join(format!("part.{me}")), std::process::id().to_string()).unwrap();
    std::fs::rename(notes.join(format!("part.{me}")), notes.join(format!("pid.{me}"))).unwrap();
    if let Err(e) = ranks::exchange(&*fabric) {
        fabric.fail(&e);
    }
}
