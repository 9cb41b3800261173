//! A whole call of `hpl-run`: read, choose, plan, refuse or run, report, end.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fulmen::Error;

use crate::apart;
use crate::cli::{Cli, Fabric};
use crate::driver::Driver;
use crate::exit::{Failure, Status};
use crate::footprint::Home;
use crate::interrupt;
use crate::machine::Host;
use crate::params::Sink;
use crate::plan::{Plan, Rate};
use crate::progress::{self, Progress};
use crate::report::bundle::{self, Bundle};
use crate::report::file::Target;
use crate::report::{Job, Outcome, Tally, Verdict, calibration, human, json, links, out};
use crate::settings::{self, Settings};
use crate::stdout;

/// Sweeps longer than this tell people only of the failures and the best run.
const TOLD_ONE_BY_ONE: usize = 4;

/// What names the file of the HPL.out report: a flag, or `HPL.dat`.
const OUTPUT: &str = "output file";

/// Whoever kills the program takes at most the last runs of this much time from the JSON report.
const SAVED_EVERY: Duration = Duration::from_secs(1);

/// Processes have this long to end in order after a signal.
const IN_ORDER: Duration = Duration::from_secs(15);

/// Runs what the command line asks for, from `folder`. All that is said goes to stderr, the `HPL.out`
/// report to where it was sent.
pub fn run(cli: &Cli, folder: &Path, host: &Host, driver: &mut dyn Driver) -> Status {
    match attempt(cli, folder, host, driver) {
        Ok(status) => status,
        Err(failure) => {
            let error = match &failure {
                Failure::Error(error) => Some(error),
                Failure::Input(_) => None,
            };
            error.iter().for_each(|error| interrupt::is_over(error));
            if !error.is_some_and(|error| driver.is_told(error)) {
                say(&failure);
            }
            failure.status()
        }
    }
}

fn attempt(cli: &Cli, folder: &Path, host: &Host, driver: &mut dyn Driver) -> Result<Status, Failure> {
    let open = Open::watched();
    let at_failure = open.clone();
    driver.at_failure(Box::new(move |e| {
        let failure = Failure::Error(e.clone());
        at_failure.break_off(failure.status(), &failure.to_string());
    }));
    let mut request = settings::request(cli, folder)?;
    if !cli.check {
        request.must_be_startable(host)?;
    }
    let (ranks, threads) = request.shape(host);
    host.must_hold_threads(&request.crowd(host))?;
    let mut job = driver.calibrate(request.kernels(), ranks, threads)?;
    job.crowded = ranks * threads > host.cores;
    let rate = match job.gemm_gflops {
        // Of the whole host, also if this job leaves cores idle.
        Some(gflops) => {
            let busy = (ranks * threads).min(host.cores).max(1);
            Rate::measured(gflops * host.cores as f64 / busy as f64)
        }
        None => Rate::assumed(host.cores),
    };
    request.cables = job.cables.clone();
    // Ranks that a launcher has started are connected already.
    if !job.fabric.is_empty() {
        request.home = Home::Launched;
    }
    let settings = request.settle(host, rate);
    if job.fabric.is_empty() {
        job.fabric = settings.fabric.name().to_string();
    }
    let plan = Plan::new(&settings, host, rate);
    settings.warnings.iter().for_each(|w| say(format!("hpl-run: warning: {w}")));
    if settings.check {
        show(&settings, &plan)?;
        plan.must_fit()?;
        Reports::try_out(&settings)?;
        return Ok(Status::Passed);
    }
    plan.doubts.iter().for_each(|d| say(format!("hpl-run: warning: {d}")));
    if !settings.quiet {
        settings.notes.iter().for_each(|n| say(format!("hpl-run: {n}")));
    }
    plan.must_fit()?;
    open.put(Reports::open(&settings, &job, host)?, settings.fabric);
    if !settings.quiet {
        say(human::head(&job, &plan));
        links::steps_down(&job).iter().for_each(|line| say(format!("hpl-run: {line}")));
        if settings.verbose {
            links::all(&job).iter().for_each(say);
        }
        settings.choices.iter().for_each(|c| say(format!("  {} {}: {}", c.what, c.value, c.why)));
    }
    if let Err(error) = driver.start(&settings) {
        drop(open.take()?); // nothing was begun, and nothing is kept
        return Err(error.into());
    }
    let result = solve_all(&settings, &plan, &open, driver).map_err(by_its_signal);
    // The watcher may have taken the reports; then it ends the program with 5.
    let reports = open.take()?;
    match result {
        Ok(()) => reports.complete(&settings).map_err(Failure::from),
        Err(error) => {
            let failure = Failure::Error(error);
            reports.break_off(failure.status(), &failure.to_string());
            Err(failure)
        }
    }
}

/// An interrupt with its signal's name.
fn by_its_signal(error: Error) -> Error {
    match error {
        Error::Interrupted => Error::Ended { message: interrupt::words(), code: Status::Interrupted as u8 },
        other => other,
    }
}

/// The reports while they grow, shared with whoever catches signals.
#[derive(Clone, Default)]
struct Open {
    reports: Arc<Mutex<Option<Reports>>>,
    /// Whether the ranks are processes.
    processes: Arc<AtomicBool>,
}

impl Open {
    /// None yet. From now on a signal ends the program, after what there is has been kept.
    fn watched() -> Open {
        let open = Open::default();
        let at_signal = open.clone();
        interrupt::watch(move |before| {
            // Of a job that has failed whoever started it says why.
            if let Some(error) = before {
                let failure = Failure::Error(error.clone());
                return at_signal.break_off(failure.status(), &failure.to_string());
            }
            // Processes are ended in order by their supervisor, and then the program ends by itself.
            if at_signal.processes.load(Ordering::Relaxed) {
                std::thread::sleep(IN_ORDER);
            }
            progress::clear();
            let words = interrupt::words();
            say(format!("hpl-run: {words}"));
            at_signal.break_off(Status::Interrupted, &words);
        });
        open
    }

    /// Keeps what there is, on a thread of its own; the program ends then.
    fn break_off(&self, status: Status, reason: &str) {
        // Whoever writes to a pipe that nobody reads has the lock and does not come back.
        for _ in 0..20 {
            if let Ok(mut reports) = self.reports.try_lock() {
                if let Some(reports) = reports.take() {
                    reports.break_off(status, reason);
                }
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn put(&self, reports: Reports, fabric: Fabric) {
        self.processes.store(fabric == Fabric::Shm, Ordering::Relaxed);
        *lock(&self.reports) = Some(reports);
    }

    fn with<R>(&self, f: impl FnOnce(&mut Reports) -> Result<R, Error>) -> Result<R, Error> {
        lock(&self.reports).as_mut().map_or(Err(Error::Interrupted), f)
    }

    fn take(&self) -> Result<Reports, Error> {
        lock(&self.reports).take().ok_or(Error::Interrupted)
    }
}

/// What `--check` prints, on stdout.
fn show(settings: &Settings, plan: &Plan) -> Result<(), Failure> {
    stdout::must_be_open("the plan")?;
    let mut text = plan.lines().join("\n") + "\n";
    text += &format!("ranks     {} x {} threads\n", settings.ranks, settings.threads);
    for choice in &settings.choices {
        text += &format!("chosen    {} {}: {}\n", choice.what, choice.value, choice.why);
    }
    for note in settings.notes.iter().chain(&plan.doubts) {
        text += &format!("note      {note}\n");
    }
    match std::io::stdout().write_all(text.as_bytes()) {
        // Who reads no further has read enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|e| Failure::Error(system("stdout", &e))),
    }
}

fn solve_all(settings: &Settings, plan: &Plan, open: &Open, driver: &mut dyn Driver) -> Result<(), Error> {
    let told = !settings.quiet;
    let mut warned = false;
    open.with(|r| r.begin(settings))?;
    for (i, run) in settings.input.runs().enumerate() {
        let progress = Progress::begin(settings.quiet);
        let solved = driver.solve(&run, &progress);
        drop(progress);
        let outcome = solved?;
        // Processes go on to the next run at once, and must not be disturbed.
        let idle = settings.fabric == Fabric::Mem || i + 1 == plan.runs;
        let doubtful = open.with(|r| Ok(calibration::doubtful(&outcome, &r.job)))?;
        let now = if idle && doubtful { driver.measure_again() } else { None };
        open.with(|r| {
            r.job.gemm_gflops = r.job.gemm_gflops.map(|then| now.map_or(then, |now| now.max(then)));
            let warning = calibration::warning(&outcome, &r.job, now).filter(|_| !warned);
            r.add(outcome.clone())?;
            if told && (plan.runs <= TOLD_ONE_BY_ONE || outcome.verdict() == Verdict::Failed) {
                say(human::verdict(&outcome, &r.job, settings.hash));
                let breakdown = human::breakdown(&outcome, &r.job);
                if !breakdown.is_empty() {
                    say(breakdown);
                }
            }
            if !told && settings.hash {
                say(human::hash_of(&outcome));
            }
            if let Some(warning) = warning {
                warned = true; // of the first run that deserves it
                say(format!("hpl-run: warning: {warning}"));
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The reports of a job, as far as they have grown.
struct Reports {
    /// Until it is complete.
    out: Option<Target>,
    /// What went to `out`.
    text: Vec<u8>,
    /// Until it is complete.
    json: Option<Target>,
    bundle: Vec<Target>,
    /// When the JSON report so far was last written.
    saved: Option<Instant>,
    job: Job,
    host: Host,
    outcomes: Vec<Outcome>,
    checked: bool,
}

impl Reports {
    /// Opens the files: what cannot be written is found before any work.
    fn open(settings: &Settings, job: &Job, host: &Host) -> Result<Reports, Error> {
        let bundle = match settings.bundle.as_deref() {
            None => vec![],
            Some(folder) => {
                bundle::prepare(folder)?;
                apart::bundle(settings, folder)?;
                bundle::open(&settings.input, folder)?
            }
        };
        Ok(Reports {
            text: vec![],
            bundle,
            out: Some(Target::open(&settings.input.sink, OUTPUT)?),
            json: settings.json.as_ref().map(|sink| Target::open(sink, "--json")).transpose()?,
            saved: None,
            job: job.clone(),
            host: host.clone(),
            outcomes: vec![],
            checked: settings.input.threshold > 0.0,
        })
    }

    /// Finds what [`Reports::open`] would not open.
    fn try_out(settings: &Settings) -> Result<(), Error> {
        Target::try_out(&settings.input.sink, OUTPUT)?;
        settings.json.as_ref().map_or(Ok(()), |sink| Target::try_out(sink, "--json"))
    }

    fn begin(&mut self, settings: &Settings) -> Result<(), Error> {
        self.write(|text| out::head(text, &settings.input))
    }

    fn add(&mut self, outcome: Outcome) -> Result<(), Error> {
        let first = self.outcomes.is_empty();
        let written = self.write(|text| out::run(text, &outcome, first));
        self.outcomes.push(outcome);
        // No reason to end: it may succeed the next time, and if it does not that is told at the end.
        let _ = self.save();
        written
    }

    /// What there is of the JSON report, for the case that the program is killed: that writes no more.
    fn save(&mut self) -> std::io::Result<()> {
        let Some(json) = &mut self.json else { return Ok(()) };
        if self.saved.is_some_and(|then| then.elapsed() < SAVED_EVERY) {
            return Ok(());
        }
        let runs = crate::units::count(self.outcomes.len(), "run");
        let reason = format!("ended without a word, after {runs} or more");
        let mut text = vec![];
        json::Report::new(&self.job, &self.host, &self.outcomes, Status::Interrupted, &reason)
            .write(&mut text)?;
        json.rewrite(&text)?;
        self.saved = Some(Instant::now());
        Ok(())
    }

    /// Adds to the HPL.out report, at once.
    fn write(&mut self, part: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<(), Error> {
        let begin = self.text.len();
        let Some(out) = &mut self.out else { return Ok(()) };
        let written =
            part(&mut self.text).and_then(|()| out.write_all(&self.text[begin..])).and_then(|()| out.flush());
        written.map_err(|e| system("the HPL.out report", &e))
    }

    fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        self.outcomes.iter().for_each(|o| tally.count(o.verdict()));
        tally
    }

    /// All runs are done: the files take their places. What cannot is kept beside them, and the others with it.
    fn complete(mut self, settings: &Settings) -> Result<Status, Error> {
        match self.settle(settings) {
            Ok(status) => {
                self.last_words(settings, status);
                Ok(status)
            }
            Err(e) => {
                let failure = Failure::Error(e.clone());
                self.break_off(failure.status(), &failure.to_string());
                Err(e)
            }
        }
    }

    fn settle(&mut self, settings: &Settings) -> Result<Status, Error> {
        let tally = self.tally();
        let status = if tally.failed > 0 { Status::Failed } else { Status::Passed };
        let checked = self.checked;
        self.write(|text| out::tail(text, &tally, checked))?;
        let former = self.out.take().map(Target::complete).transpose();
        tell_of_former(former.map_err(|e| system("the HPL.out report", &e))?.flatten());
        if let Some(folder) = &settings.bundle {
            let command =
                bundle::quoted(std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()));
            let bundle = Bundle {
                input: &settings.input,
                text: &self.text,
                outcomes: &self.outcomes,
                job: &self.job,
                host: &self.host,
                command: &command,
                folder,
            };
            let written = bundle.write(std::mem::take(&mut self.bundle));
            let written = written.map_err(|e| system("the bundle", &e))?;
            if !settings.quiet {
                say(format!("hpl-run: {written} files are in {}", folder.display()));
            }
        }
        if let Some(target) = self.json.take() {
            let report = json::Report::new(&self.job, &self.host, &self.outcomes, status, &sentence(&tally));
            let written = end_json(&report, target, Target::complete);
            tell_of_former(written.map_err(|e| system("the JSON report", &e))?);
        }
        Ok(status)
    }

    /// What people are told at the end.
    fn last_words(&self, settings: &Settings, status: Status) {
        let reason = sentence(&self.tally());
        if !settings.quiet {
            if self.outcomes.len() > TOLD_ONE_BY_ONE {
                let best = self.outcomes.iter().max_by(|a, b| a.gflops().total_cmp(&b.gflops()));
                if let Some(best) = best {
                    let r = &best.run;
                    say(format!("best: {}   N {}   NB {}   grid {}x{}", r.tv(), r.n, r.nb, r.p, r.q));
                    say(human::verdict(best, &self.job, settings.hash));
                }
            }
            if let Sink::File(path) = &settings.input.sink {
                say(format!("hpl-run: the report is in {}", path.display()));
            }
        }
        if status != Status::Passed {
            say(format!("hpl-run: exit {}: {reason}", status as u8));
        } else if !settings.quiet && self.outcomes.len() > 1 {
            say(format!("hpl-run: {reason}"));
        }
    }

    /// The job ended early: what was reported so far is kept beside the files, which stay as they were.
    fn break_off(mut self, status: Status, reason: &str) {
        let n = self.outcomes.len();
        let mut kept = vec![];
        // The first failure was told; that its report cannot be kept either is told briefly.
        if let Some(target) = self.out.take().filter(|_| n > 0) {
            match target.keep_partial() {
                Ok(paths) => kept.extend(paths),
                Err(e) => say(format!("hpl-run: the report so far is not complete: {e}")),
            }
        }
        if let Some(target) = self.json.take() {
            let report = json::Report::new(&self.job, &self.host, &self.outcomes, status, reason);
            match end_json(&report, target, Target::keep_partial) {
                Ok(paths) => kept.extend(paths),
                Err(e) => say(format!("hpl-run: the JSON report so far is not complete: {e}")),
            }
        }
        for (path, former) in kept {
            say(format!("hpl-run: the report so far is kept in {}", path.display()));
            tell_of_former(former);
        }
    }
}

/// Writes the report over what was saved on the way, and ends it so; what cannot be written whole is kept as far as it is.
fn end_json<T>(
    report: &json::Report,
    mut target: Target,
    end: fn(Target) -> std::io::Result<T>,
) -> std::io::Result<T> {
    match target.restart().and_then(|_| report.write(&mut target)) {
        Ok(()) => end(target),
        Err(e) => Err(target.keep_partial().err().unwrap_or(e)),
    }
}

/// What an earlier job has kept had to make room.
fn tell_of_former(path: Option<PathBuf>) {
    if let Some(path) = path {
        say(format!("hpl-run: warning: what an earlier job had kept is now in {}", path.display()));
    }
}

fn sentence(tally: &Tally) -> String {
    let runs = |n: usize| crate::units::count(n, "run");
    match *tally {
        Tally { failed: 0, unchecked: 0, passed } => format!("{} passed", runs(passed)),
        Tally { failed: 0, unchecked, .. } => format!("{} unchecked", runs(unchecked)),
        Tally { failed, .. } => format!("{failed} of {} failed the residual check", runs(tally.total())),
    }
}

fn system(what: &str, error: &std::io::Error) -> Error {
    Error::System { what: format!("{what} cannot be written"), os: error.to_string() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// A line for people. A closed stderr must not stop the job.
fn say(text: impl std::fmt::Display) {
    let _ = std::io::stdout().flush();
    let _ = writeln!(std::io::stderr(), "{text}");
}
