//! One run on one rank: generate, factor, solve, check.

use std::time::{Instant, SystemTime};

use fulmen::comm::Topology;
use fulmen::kernels::{PanelShape, Variant};
use fulmen::lapack::{LuOpts, Observer, Phase, PhaseTimes, back_substitute, getrf};
use fulmen::{Desc, DistMatrix, Grid, Order, Result, World};

use crate::generator::Generator;
use crate::hash::Hash;
use crate::params::{Bcast, Fact, Pmap, Run};
use crate::report::{Outcome, Phases};
use crate::system;

impl From<Fact> for Variant {
    fn from(fact: Fact) -> Self {
        match fact {
            Fact::Left => Variant::Left,
            Fact::Crout => Variant::Crout,
            Fact::Right => Variant::Right,
        }
    }
}

impl From<Bcast> for Topology {
    fn from(bcast: Bcast) -> Self {
        match bcast {
            Bcast::Ring1 => Topology::Ring,
            Bcast::Ring1M => Topology::RingM,
            Bcast::Ring2 => Topology::TwoRing,
            Bcast::Ring2M => Topology::TwoRingM,
            Bcast::Long => Topology::Long,
            Bcast::LongM => Topology::LongM,
            Bcast::Cables => Topology::Cables,
        }
    }
}

impl From<Pmap> for Order {
    fn from(pmap: Pmap) -> Self {
        match pmap {
            Pmap::Row => Order::RowMajor,
            Pmap::Column => Order::ColMajor,
        }
    }
}

fn options(run: &Run) -> LuOpts {
    LuOpts {
        lookahead: run.depth,
        bcast: run.bcast.into(),
        panel: PanelShape {
            rfact: run.rfact.into(),
            pfact: run.pfact.into(),
            nbmin: run.nbmin,
            ndiv: run.ndiv,
        },
        keep_l: false,
    }
}

/// Hears the factorisation's progress on rank 0.
struct Hear<'a>(&'a mut (dyn FnMut(f64, f64) + Send));

impl Observer for Hear<'_> {
    fn progress(&mut self, done: f64, total: f64) {
        (self.0)(done, total);
    }
}

/// Solves one system. Every rank calls it; the first rank gets the outcome, the others `None`.
///
/// # Errors
/// When a rank is lost or memory is short.
pub fn solve(
    world: &World,
    run: &Run,
    progress: &mut (dyn FnMut(f64, f64) + Send),
) -> Result<Option<Outcome>> {
    let grid = Grid::new(world.fabric().clone(), run.p, run.q, run.pmap.into())?;
    if grid.coords().is_none() {
        return Ok(None); // more ranks than P·Q: this one has nothing to do
    }
    world.fabric().set_activity(&format!("while generating N = {}", run.n));
    let n = run.n;
    let nb = run.nb.min(n + 1); // a larger block would only be room for nothing
    let desc = Desc { m: n, n: n + 1, mb: nb, nb, rsrc: 0, csrc: 0 };
    let generator = Generator::new(n, run.seed);
    let mut a = DistMatrix::<f64>::zeros(&grid, desc)?;
    system::generate(generator, world.team(), &mut a);

    grid.all().barrier()?;
    let (started, clock) = (SystemTime::now(), Instant::now());
    let factors =
        getrf(world.kernels::<f64>(), world.team(), a.view_mut(), &options(run), &mut Hear(progress))?;
    let factored = clock.elapsed().as_secs_f64();
    let x = back_substitute(world.team(), &a.view())?;
    let mut seconds = [clock.elapsed().as_secs_f64()];
    let solve = seconds[0] - factored;
    grid.all().all_max(&mut seconds)?;
    let ended = SystemTime::now();

    let (rows, cols) = (a.rows(), a.cols());
    drop(a);
    world.fabric().set_activity("while checking the solution");
    let check = match run.checked() {
        true => Some(system::check(generator, world.team(), &grid, rows, cols, &x)?),
        false => None,
    };
    let mine = [Phase::Panel, Phase::BcastWait, Phase::RowExchange, Phase::Update]
        .map(|phase| PhaseTimes::get(&factors.times, phase));
    let mine = [mine[0], mine[1], mine[2], mine[3], solve, grid.myrow() as f64, grid.mycol() as f64];
    let Some(all) = grid.all().gather(0, &mine)? else { return Ok(None) };
    let phases = all
        .chunks_exact(mine.len())
        .enumerate()
        .map(|(rank, t)| Phases {
            rank,
            row: t[5] as usize,
            col: t[6] as usize,
            panel: t[0],
            bcast_wait: t[1],
            row_exchange: t[2],
            update: t[3],
            solve: t[4],
        })
        .collect();
    Ok(Some(Outcome {
        run: *run,
        seconds: seconds[0],
        started,
        ended,
        info: factors.info.map_or(0, |j| j + 1),
        check,
        x_hash: Hash::of(&x),
        phases,
    }))
}
