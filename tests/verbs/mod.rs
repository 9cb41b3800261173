//! Jobs of threads over an emulated RDMA world.

use std::sync::Arc;
use std::time::Duration;

use fulmen::Result;
use fulmen::fabric::rendezvous::in_process;
use fulmen::fabric::verbs::{Devices, Options, Verbs};
use fulmen::fabric::{Bounds, Fabric, mem};
use fulmen_emu_verbs::{Installed, Profile, World};

/// `n` hosts, each joined to each other by `cables` cables, and the devices of each pair.
pub fn mesh(profile: Profile, n: usize, cables: usize) -> World {
    let pairs = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j)));
    let all: Vec<_> = pairs.flat_map(|pair| std::iter::repeat_n(pair, cables)).collect();
    World::cabled(profile, n, &all)
}

/// The devices of every pair of such a world.
fn matrix(profile: Profile, n: usize, cables: usize) -> Devices {
    let prefix = profile.prefix();
    let name = |i, j, c: usize| match c {
        0 => format!("{prefix}{i}{j}"),
        _ => format!("{prefix}{i}{j}{}", char::from(b'a' + c as u8)),
    };
    let towards = |i, j| if i == j { vec![] } else { (0..cables).map(|c| name(i, j, c)).collect() };
    Devices::Matrix((0..n).map(|i| (0..n).map(|j| towards(i, j)).collect()).collect())
}

/// Options for such a world: short deadlines.
pub fn options(world: &Installed, n: usize, cables: usize) -> Options {
    Options {
        library: Some(world.library().to_owned()),
        devices: matrix(world.profile(), n, cables),
        bounds: Bounds { silence: Duration::from_secs(10), patience: Duration::from_secs(60) },
        warm_up: Duration::from_secs(3),
        ..Options::default()
    }
}

/// Runs `work` on `n` ranks, threads of this process; a rank that fails ends the job.
pub fn run<R: Send>(
    n: usize,
    options: &Options,
    work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_verbs(n, options, |verbs, _| work(Arc::clone(verbs) as Arc<dyn Fabric>))
}

/// As [`run`], for what only this transport has; the second is the fabric that watches over it.
pub fn run_verbs<R: Send>(
    n: usize,
    options: &Options,
    work: impl Fn(&Arc<Verbs>, &Arc<dyn Fabric>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let controls = mem::Job::new(n, &mem::Options::default()).unwrap().build();
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = in_process(n)
            .into_iter()
            .zip(controls)
            .map(|(mut rendezvous, control)| {
                scope.spawn(move || {
                    let result =
                        Verbs::connect(&mut rendezvous, Arc::clone(&control), options).and_then(|verbs| {
                            let verbs = Arc::new(verbs);
                            let value = work(&verbs, &control).inspect_err(|e| verbs.fail(e))?;
                            verbs.leave().map(|()| value)
                        });
                    result.inspect_err(|e| control.fail(e))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
