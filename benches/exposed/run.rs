//! The factorisation, over slow and over free links.

use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use fulmen::comm::Topology;
use fulmen::fabric::rendezvous::in_process;
use fulmen::fabric::verbs::{Devices, Mode, Options, Service, Verbs};
use fulmen::fabric::{Fabric, Lane, SHORT, mem};
use fulmen::lapack::{LuOpts, Silent, getrf};
use fulmen::{Desc, DistMatrix, Result, Setup, World as Ranks};
use fulmen_emu_verbs::{Installed, Profile, World};

use crate::arithmetic::Played;
use crate::link::LinkFlags;
use crate::waits::Timed;

#[derive(Parser)]
#[command(about = "The exposed communication of an LU of four ranks over emulated links")]
struct Arguments {
    /// Order of the matrix.
    #[arg(short, long, default_value_t = 16384)]
    n: usize,
    /// Width of a panel.
    #[arg(long, default_value_t = 128)]
    nb: usize,
    /// Process grids, four ranks each.
    #[arg(long, value_delimiter = ',', default_value = "1x4,2x2")]
    grids: Vec<String>,
    /// Panels ahead.
    #[arg(long, default_value_t = 1)]
    lookahead: usize,
    /// Panel broadcast, by HPL's number or its name.
    #[arg(long, default_value = "1ringM")]
    bcast: Topology,
    /// Threads of a node: some factor the next panel while the others update. Its speed is theirs together.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Gigaflops of a node in products.
    #[arg(long, default_value_t = 700.0)]
    gemm: f64,
    /// Gigaflops of a node in its panel.
    #[arg(long, default_value_t = 70.0)]
    panel: f64,
    #[command(flatten)]
    cable: LinkFlags,
    /// Times are stretched by this.
    #[arg(long, default_value_t = 20.0)]
    stretch: f64,
    /// True one-sided writes (RC), in place of posted receives on Thunderbolt devices.
    #[arg(long)]
    write: bool,
}

/// What a run took: seconds of the model, of all and of each rank's waits.
struct Took {
    all: f64,
    panels: Vec<f64>,
    rows: Vec<f64>,
    pivots: Vec<f64>,
}

impl Arguments {
    fn world(&self, is_free: bool) -> Installed {
        let (profile, link) = (if self.write { Profile::Nic } else { Profile::Apple }, self.cable.link());
        let mesh = World::mesh(profile, 4);
        let world = if is_free { mesh } else { mesh.link(link, self.stretch) };
        world.install().expect("the emulator's library")
    }

    fn options(&self, world: &Installed) -> Options {
        let towards = |i: usize, j: usize| {
            if i == j { vec![] } else { vec![format!("{}{i}{j}", world.profile().prefix())] }
        };
        Options {
            library: Some(world.library().to_owned()),
            devices: Devices::Matrix((0..4).map(|i| (0..4).map(|j| towards(i, j)).collect()).collect()),
            way: self.write.then_some((Service::Rc, Mode::Write)),
            ..Options::default()
        }
    }

    /// One rank's factorisation: its seconds and its waits for panels, rows and pivots, of this clock.
    fn rank(&self, fabric: Arc<dyn Fabric>, grid: (usize, usize)) -> Result<[f64; 4]> {
        let timed = Arc::new(Timed::new(fabric));
        let world =
            Ranks::new(Arc::clone(&timed) as _, 4, &Setup { threads: self.threads, ..Setup::default() })?;
        let grid = world.grid(grid.0, grid.1)?;
        let entry = |i: usize, j: usize| {
            let x = (i as u64 ^ (j as u64) << 32).wrapping_add(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        };
        let mut a =
            DistMatrix::<f64>::from_fn(&grid, Desc::square_blocks(self.n, self.n + 1, self.nb), entry)?;
        let speed = |gigaflops: f64| gigaflops * 1e9 / self.stretch / self.threads as f64;
        let played = Played::new(world.kernels::<f64>(), speed(self.gemm), speed(self.panel));
        let opts =
            LuOpts { lookahead: self.lookahead, bcast: self.bcast, keep_l: false, ..LuOpts::default() };
        grid.all().barrier()?;
        let lanes = [Lane::PANEL, Lane::ROWS, Lane::PIVOT];
        timed.forget();
        let start = Instant::now();
        getrf(&played, world.team(), a.view_mut(), &opts, &mut Silent)?;
        let waits = lanes.map(|lane| timed.waited(lane));
        grid.all().barrier()?;
        Ok([start.elapsed().as_secs_f64(), waits[0], waits[1], waits[2]])
    }

    /// Seconds of the model that a rank waits for pivots, if each takes one way: what no schedule can hide from the thread that
    /// waits. Each process column factors its share of the columns; the longest message has a number and two rows of a panel.
    fn pivots(&self, grid: (usize, usize)) -> f64 {
        let columns = if grid.0 > 1 { self.n as f64 / grid.1 as f64 } else { 0.0 };
        let bytes = 8 * (1 + 2 * self.nb);
        let frames = bytes.div_ceil(SHORT) as f64;
        let way = self.cable.latency * 1e-6
            + bytes as f64 / (self.cable.rate * 1e9)
            + frames * self.cable.frame * 1e-9;
        columns * way
    }

    fn run(&self, grid: (usize, usize), is_free: bool) -> Took {
        let world = self.world(is_free);
        let options = self.options(&world);
        let controls = mem::Job::new(4, &mem::Options::default()).unwrap().build();
        let all: Vec<[f64; 4]> = std::thread::scope(|scope| {
            let threads: Vec<_> = in_process(4)
                .into_iter()
                .zip(controls)
                .map(|(mut rendezvous, control)| {
                    let options = &options;
                    scope.spawn(move || {
                        let verbs = Arc::new(Verbs::connect(&mut rendezvous, control, options)?);
                        let took = self.rank(Arc::clone(&verbs) as _, grid)?;
                        verbs.leave().map(|()| took)
                    })
                })
                .collect();
            let joined = threads.into_iter().map(|t| t.join().expect("a rank that panicked"));
            joined.map(|r: Result<_>| r.unwrap_or_else(|e| panic!("{e}"))).collect()
        });
        let of = |i: usize| all.iter().map(|took| took[i] / self.stretch).collect::<Vec<_>>();
        let slowest = of(0).into_iter().fold(0.0, f64::max);
        Took { all: slowest, panels: of(1), rows: of(2), pivots: of(3) }
    }
}

/// The program.
pub fn main() {
    let a = Arguments::parse();
    println!(
        "N {}  NB {}  look-ahead {}  nodes of {} threads, {} Gflop/s (panel {})  links {} GB/s, {} us, {} ns a frame  {}  times stretched by {}",
        a.n,
        a.nb,
        a.lookahead,
        a.threads,
        a.gemm,
        a.panel,
        a.cable.rate,
        a.cable.latency,
        a.cable.frame,
        if a.write { "rc write" } else { "posted receives" },
        a.stretch
    );
    for name in &a.grids {
        let (p, q) = name.split_once('x').expect("a grid such as 2x2");
        let grid: (usize, usize) = (p.parse().expect("rows"), q.parse().expect("columns"));
        assert_eq!(grid.0 * grid.1, 4, "four ranks");
        let (free, slow) = (a.run(grid, true), a.run(grid, false));
        let share = 100.0 * (slow.all - free.all) / slow.all;
        println!("\n{name}: {:.3} s, over free links {:.3} s: exposed {share:.1} %", slow.all, free.all);
        println!(
            "  the model's pivots: {:.1} % of the time, for one of {} threads",
            100.0 * a.pivots(grid) / slow.all,
            a.threads
        );
        println!("  waits in % of the time (over free links: for others that are behind)");
        for rank in 0..4 {
            let part = |waits: &[f64], of: f64| 100.0 * waits[rank] / of;
            println!(
                "  rank {rank}: panels {:.1} ({:.1})  rows {:.1} ({:.1})  pivots {:.1} ({:.1})",
                part(&slow.panels, slow.all),
                part(&free.panels, free.all),
                part(&slow.rows, slow.all),
                part(&free.rows, free.all),
                part(&slow.pivots, slow.all),
                part(&free.pivots, free.all),
            );
        }
    }
}
