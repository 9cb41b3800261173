//! The driver for one machine: ranks are threads of this process, or processes that it starts.

use std::io::PipeReader;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use fulmen::dist::memory;
use fulmen::fabric::shm::{self, Supervisor};
use fulmen::fabric::{Bounds, mem};
use fulmen::kernels::{Choice, KernelSet, Team, dgemm_gflops};
use fulmen::{Error, Result, Setup, World};

use crate::cli::Fabric;
use crate::driver::Driver;
use crate::interrupt;
use crate::machine;
use crate::params::Run;
use crate::plan;
use crate::progress::Progress;
use crate::rank;
use crate::report::{Job, Outcome};
use crate::settings::Settings;
use crate::worker::{self, Assignment, Note};

/// See the module.
#[derive(Default)]
pub struct Local {
    ranks: Ranks,
    /// Kernels and threads that [`Driver::calibrate`] measured, in the user's words: made anew when they are asked again,
    /// for what they have packed into is large.
    measured: Option<(String, usize)>,
}

#[derive(Default)]
enum Ranks {
    #[default]
    NotStarted,
    /// Threads, started anew for every run: they cost a millisecond and leave no state behind.
    Threads { count: usize, setup: Setup, bounds: Bounds },
    /// Processes, which live as long as the job.
    Processes { supervisor: Option<JoinHandle<Result<shm::Outcome>>>, notes: PipeReader },
}

fn choice(kernels: &str) -> Result<Choice> {
    let remedy = "give native, native:avx512, reference, blas, blas:NAME or blas:/path/to/library";
    kernels.parse().map_err(|problem| Error::argument("--kernels", kernels, problem, remedy))
}

impl Driver for Local {
    fn calibrate(&mut self, kernels: &str, ranks: usize, threads: usize) -> Result<Job> {
        let set = KernelSet::select(&choice(kernels)?).map_err(|problem| {
            Error::argument("--kernels", kernels, problem, "use `native`, which is always there")
        })?;
        // More threads than cores would measure nothing but their switching.
        let threads_at_once = (ranks * threads).min(fulmen::kernels::cores());
        let team = Team::new(threads_at_once).map_err(|what| Error::Resources {
            what,
            remedy: "ask for fewer ranks or threads, or raise the limit (ulimit -u)".into(),
        })?;
        let room = machine::room_to_measure(threads_at_once);
        let test = fulmen::kernels::self_test(&set, &team, room);
        if !test.passed {
            return Err(Error::argument(
                "--kernels",
                kernels,
                format!("fails its self-test:\n    {}", test.failures.join("\n    ")),
                "use another library, or `native`",
            ));
        }
        let about = set.of::<f64>().description();
        self.measured = Some((kernels.to_string(), threads_at_once));
        let kernels = format!("{}/{}", about.backend, about.detail);
        drop((set, team));
        machine::give_back_free_memory();
        Ok(Job {
            ranks,
            threads,
            fabric: String::new(),
            kernels,
            self_test: "ok".to_string(),
            gemm_gflops: Some(test.gflops),
            crowded: false,
            places: vec![],
            cables: None,
            links: vec![],
        })
    }

    fn measure_again(&mut self) -> Option<f64> {
        let (kernels, threads) = self.measured.as_ref()?;
        let (set, team) = (KernelSet::select(&choice(kernels).ok()?).ok()?, Team::new(*threads).ok()?);
        let room = machine::room_to_measure(*threads);
        Some(dgemm_gflops(&set, &team, room, Duration::from_millis(500)))
    }

    fn start(&mut self, settings: &Settings) -> Result<()> {
        let bounds = Bounds { silence: settings.silence, patience: settings.timeout };
        let setup = Setup { kernels: choice(&settings.kernels)?, threads: settings.threads, bind: true };
        self.ranks = match settings.fabric {
            Fabric::Mem => Ranks::Threads { count: settings.ranks, setup, bounds },
            Fabric::Shm => start_processes(settings, bounds)?,
        };
        Ok(())
    }

    fn solve(&mut self, run: &Run, progress: &Progress) -> Result<Outcome> {
        match &mut self.ranks {
            Ranks::NotStarted => Err(Error::Internal("a run before the ranks were started".into())),
            Ranks::Threads { count, setup, bounds } => {
                solve_on_threads(*count, setup, *bounds, run, progress)
            }
            Ranks::Processes { supervisor, notes } => match hear(notes, progress) {
                Some(outcome) => Ok(outcome),
                None => Err(why_ended(supervisor.take())),
            },
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // Processes end by themselves after the last run; none is left when the program ends.
        if let Ranks::Processes { supervisor, .. } = &mut self.ranks
            && let Some(thread) = supervisor.take()
        {
            let _ = thread.join();
        }
    }
}

fn solve_on_threads(
    count: usize,
    setup: &Setup,
    bounds: Bounds,
    run: &Run,
    progress: &Progress,
) -> Result<Outcome> {
    let job = mem::Job::new(count, &mem::Options { bounds, ..mem::Options::default() })?;
    let results = job.run(|fabric| {
        let world = World::new(fabric, count, setup)?;
        let first = world.rank() == 0;
        rank::solve(&world, run, &mut |done, total| {
            if first {
                progress.work(done, total);
            }
        })
    });
    let mut outcome = None;
    let mut failure: Option<Error> = None;
    for result in results {
        match result {
            Ok(told) => outcome = outcome.or(told),
            // What a rank suffered itself says more than that another ended the job.
            Err(e) if failure.as_ref().is_none_or(|f| matches!(f, Error::Aborted { .. })) => {
                failure = Some(e)
            }
            Err(_) => {}
        }
    }
    match (failure, outcome) {
        (Some(e), _) => Err(e),
        (None, Some(outcome)) => Ok(outcome),
        (None, None) => Err(Error::Internal("no rank had an outcome".into())),
    }
}

/// Starts this program again, once a rank, as [`worker`]s.
fn start_processes(settings: &Settings, bounds: Bounds) -> Result<Ranks> {
    let system = |what: &str, e: std::io::Error| Error::System { what: what.into(), os: e.to_string() };
    let program = std::env::current_exe().map_err(|e| system("cannot find this program's own file", e))?;
    let (notes, writer) = std::io::pipe().map_err(|e| system("cannot make a pipe to rank 0", e))?;
    let assignment = Assignment {
        input: settings.input.clone(),
        kernels: settings.kernels.clone(),
        threads: settings.threads,
    };
    let mut writer = Some(writer);
    let command = move |rank: usize| {
        let mut command = Command::new(&program);
        assignment.hand_to(&mut command);
        command.stdin(Stdio::null());
        match writer.take_if(|_| rank == 0) {
            Some(writer) => command.stdout(writer),
            None => command.stdout(Stdio::null()),
        };
        command
    };
    // Sparse: memory is taken when it is allocated. But all of it counts where addresses are limited.
    let most = memory::of_host().0;
    let segment = match memory::of_process().addresses {
        u64::MAX => most,
        _ => plan::segment(settings).min(most),
    };
    let segment = usize::try_from(segment).unwrap_or(usize::MAX >> 1);
    let supervisor = Supervisor::new(settings.ranks, command)
        .segment_bytes(segment)
        .bounds(bounds)
        .interrupts(interrupt::count);
    let supervisor = std::thread::Builder::new()
        .name("supervisor".into())
        .spawn(move || supervisor.run())
        .map_err(|e| Error::Resources {
            what: format!("no thread to watch the ranks: {e}"),
            remedy: "ask for fewer ranks or threads, or raise the limit (ulimit -u)".into(),
        })?;
    Ok(Ranks::Processes { supervisor: Some(supervisor), notes })
}

/// Listens to rank 0 until it tells an outcome; `None` when it ended instead.
fn hear(notes: &mut PipeReader, progress: &Progress) -> Option<Outcome> {
    loop {
        match worker::read(notes)? {
            Note::Progress(done, total) => progress.work(done, total),
            Note::Outcome(outcome) => return Some(*outcome),
        }
    }
}

fn why_ended(supervisor: Option<JoinHandle<Result<shm::Outcome>>>) -> Error {
    let Some(supervisor) = supervisor else { return Error::Internal("the ranks have ended".into()) };
    match supervisor.join() {
        Ok(Ok(shm::Outcome { exit_code: 5, message, .. })) if interrupt::count() > 0 || message.is_none() => {
            Error::Interrupted
        }
        Ok(Ok(shm::Outcome { exit_code: 0, .. })) => {
            Error::Internal("rank 0 ended without an outcome".into())
        }
        Ok(Ok(shm::Outcome { exit_code, message, .. })) => {
            let message = message.unwrap_or_else(|| "a rank ended; it has said why above".into());
            Error::Ended { message, code: exit_code }
        }
        Ok(Err(e)) => e,
        Err(_) => Error::Internal("the supervisor panicked".into()),
    }
}
