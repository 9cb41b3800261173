//! How a process finds out that it is a rank of a job, finds the other ranks, and talks to who has started it.
//!
//! [`Job::from_env`] reads the environment ([`mod@env`]): `fulmen-run`'s ranks have a socket to their agent, through which
//! they meet and hear of the job's end; ranks that others have started (`torchrun`, `srun`, `mpirun`) meet by
//! themselves. The messages between launcher, agents and ranks are in [`messages`].

mod control;
mod direct;
pub mod env;
mod links;
pub mod messages;
mod overdue;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use self::control::Control;
use self::direct::Patience;
use self::env::{Place, Starter, Variables};
use self::messages::Complaint;
use self::overdue::LastWords;
use crate::error::{Error, Result};
use crate::fabric::rendezvous::{AtRankZero, Rendezvous, Secret};
use crate::fabric::{Bounds, Fabric, host_name, mem, mixed, verbs};

/// Ranks that no launcher of ours has started must meet within this time.
const MEETING: Duration = Duration::from_secs(60);

/// A job of processes, as one of its ranks sees it.
pub struct Job {
    place: Place,
    /// Name of each rank's host.
    hosts: Vec<String>,
    secret: Secret,
    way: Way,
    /// What joins this rank to the others, once it does.
    steps: OnceLock<Vec<mixed::Step>>,
    last_words: Arc<Mutex<Option<LastWords>>>,
    /// Whether this rank has been told to end.
    interrupted: fn() -> bool,
}

/// How this rank meets the others.
enum Way {
    /// Through `fulmen-run`.
    Launched(Mutex<Control>),
    /// By themselves.
    Direct(Mutex<AtRankZero>),
    /// There are no others.
    Alone,
}

/// This process's environment; a name that is no text is none that a launcher sets.
pub fn variables() -> Variables {
    let text = |s: std::ffi::OsString| s.into_string().ok();
    std::env::vars_os().filter_map(|(k, v)| Some((text(k)?, text(v)?))).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// The job of which this process is a rank; `None` when it was started by itself. Ranks that `fulmen-run` has
    /// not started meet here: all must call it. Can be called once. A process that is alone within a Slurm allocation for several
    /// tasks says so in a line on standard error.
    ///
    /// # Errors
    /// [`Error::Argument`] when the environment tells of a job but not enough to find it: then this is no job
    /// of one. [`Error::Unreachable`] when the ranks do not find each other.
    pub fn from_env() -> Result<Option<Job>> {
        Job::from_env_unless(|| false)
    }

    /// [`Job::from_env`], [`Job::connect`] and all that ranks do with a job's [`Rendezvous`] end with [`Error::Interrupted`] soon after
    /// `asks` says so: for who catches signals meanwhile.
    ///
    /// # Errors
    /// As [`Job::from_env`].
    pub fn from_env_unless(asks: fn() -> bool) -> Result<Option<Job>> {
        let vars = variables();
        match env::find(&vars)? {
            None => {
                if let Some(note) = env::alone_in_allocation(&vars) {
                    eprintln!("fulmen: {note}");
                }
                Ok(None)
            }
            Some(place) => Job::at(place, vars.get(env::SECRET_FILE).map(String::as_str), asks).map(Some),
        }
    }

    fn at(place: Place, secret_file: Option<&str>, interrupted: fn() -> bool) -> Result<Job> {
        if let Starter::FulmenRun { control } = place.starter {
            // SAFETY: the agent has left this file to this process for this purpose; a second caller finds that it
            // does not greet any more, or is another's, and says so.
            let control = unsafe { Control::take(control)? };
            let hosts = control.welcome.hosts.clone();
            if hosts.len() != place.size {
                let problem = format!("the agent knows of {} ranks", hosts.len());
                return Err(Error::argument(
                    env::SIZE,
                    place.size,
                    problem,
                    "leave the variables as fulmen-run sets them",
                ));
            }
            let secret = Secret::from_bytes(control.welcome.secret.0);
            return Ok(Job::new(place, hosts, secret, Way::Launched(Mutex::new(control)), interrupted));
        }
        if place.size == 1 {
            return Ok(Job::new(place, vec![host_name()], Secret::random()?, Way::Alone, interrupted));
        }
        let patience = Patience { limit: MEETING, interrupted };
        let (mut met, secret) = direct::meet(&place, secret_file, patience)?;
        let hosts = met.all_gather_unless(host_name().as_bytes(), &interrupted)?;
        let hosts = hosts.iter().map(|h| String::from_utf8_lossy(h).into_owned()).collect();
        Ok(Job::new(place, hosts, secret, Way::Direct(Mutex::new(met)), interrupted))
    }

    fn new(place: Place, hosts: Vec<String>, secret: Secret, way: Way, interrupted: fn() -> bool) -> Job {
        Job { place, hosts, secret, way, steps: OnceLock::new(), last_words: Arc::default(), interrupted }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.place.size
    }

    /// Who has started the ranks.
    pub fn starter(&self) -> Starter {
        self.place.starter
    }

    /// Name of a rank's host, as the user calls it where a launcher of ours knows that.
    pub fn host(&self, rank: usize) -> &str {
        &self.hosts[rank]
    }

    /// This rank among those of its host, and how many these are.
    pub fn local(&self) -> (usize, usize) {
        let mine = &self.hosts[self.rank()];
        let here = |ranks: &[String]| ranks.iter().filter(|h| *h == mine).count();
        self.place.local.unwrap_or_else(|| (here(&self.hosts[..self.rank()]), here(&self.hosts)))
    }

    /// Whether all ranks are on one host.
    pub fn on_one_host(&self) -> bool {
        self.local().1 == self.size()
    }

    /// Deadlines with which a job that loses a rank is over in time: when `fulmen-run` was told (`--silence`), else in 10 s.
    pub fn bounds(&self) -> Bounds {
        match &self.way {
            Way::Launched(control) => {
                Bounds::over_within(Duration::from_millis(lock(control).welcome.bound_ms))
            }
            _ => Bounds::over_within(Bounds::default().silence),
        }
    }

    /// What the environment wants of the links between ranks (FULMEN_FABRIC, FULMEN_INTERFACES, FULMEN_DEVICES).
    ///
    /// # Errors
    /// [`Error::Argument`] for a variable that makes no sense.
    pub fn options(&self, bounds: Bounds) -> Result<mixed::Options> {
        let mut options = links::options(&variables(), self.size())?;
        options.tcp.bounds = bounds;
        Ok(options)
    }

    /// Whether [`Job::connect`] with these options may open RDMA devices, of which this machine has some. A process that ends with
    /// them in its hands may leave them unusable until a restart: until then it should not die of a signal
    /// ([`Job::from_env_unless`]).
    pub fn may_hold_devices(&self, options: &mixed::Options) -> bool {
        let may = matches!(options.choice, mixed::Choice::Auto | mixed::Choice::Verbs(_));
        may && self.size() > 1 && !verbs::names(&options.verbs).is_empty()
    }

    /// Connects this rank with all others, each pair by the best that joins it, and breaks that when the launcher ends
    /// the job. Collective. `options`: [`Job::options`], or others; the hosts' names are the job's.
    ///
    /// When the job fails, a rank that still has its fabric a quarter of the silence bound later ends: `fulmen-run` sees to that,
    /// or, where others have started the ranks, the rank itself, after its [`Job::last_words`].
    ///
    /// # Errors
    /// As [`mixed::connect`].
    pub fn connect(&self, options: &mixed::Options) -> Result<Arc<dyn Fabric>> {
        let mut meeting = self;
        let fabric = match self.size() {
            1 => {
                let options = mem::Options { bounds: options.tcp.bounds, ..mem::Options::default() };
                mem::Job::new(1, &options)?.build().remove(0)
            }
            _ => {
                let mut options = options.clone();
                options.tcp.host = Some(self.host(self.rank()).to_owned());
                // From before the first is opened: who is killed while the ranks connect has them too.
                let may_hold = self.may_hold_devices(&options);
                if may_hold {
                    self.keep(Some("it holds RDMA devices"));
                }
                let connected = mixed::connect(&mut meeting, &self.secret, &options).inspect_err(|_| {
                    if may_hold {
                        self.keep(None);
                    }
                })?;
                if may_hold && !connected.steps.iter().any(|step| step.over == mixed::Transport::Verbs) {
                    self.keep(None);
                }
                if let Way::Direct(_) = &self.way {
                    let me = format!("rank {} ({})", self.rank(), self.host(self.rank()));
                    let silence = options.tcp.bounds.silence;
                    overdue::watch(&connected, silence, Arc::clone(&self.last_words), me)?;
                }
                // The first connection's count: there is one.
                let _ = self.steps.set(connected.steps);
                connected.fabric
            }
        };
        if let Way::Launched(control) = &self.way {
            lock(control).watch_over(&fabric);
        }
        Ok(fabric)
    }

    /// What joins this rank to the others, and what would have been better; empty before [`Job::connect`].
    pub fn steps(&self) -> &[mixed::Step] {
        self.steps.get().map_or(&[], Vec::as_slice)
    }

    /// What only this job's processes know.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Why the launcher has ended the job, if it has.
    pub fn ending(&self) -> Option<Error> {
        match &self.way {
            Way::Launched(control) => lock(control).ending(),
            _ => None,
        }
    }

    /// Tells the launcher what this rank fails with, so that it can name the cause. `said`: the user has read it.
    pub fn fail(&self, error: &Error, said: bool) {
        if let Way::Launched(control) = &self.way {
            let follows =
                matches!(error, Error::Aborted { .. } | Error::PeerLost { .. } | Error::Ended { .. });
            let words = if said { String::new() } else { error.to_string() };
            let heard = matches!(error, Error::Aborted { .. } | Error::Ended { .. });
            lock(control).fail(Complaint { code: error.exit_code(), follows, heard, words });
        }
    }

    /// What is left to do before this process ends with the job because it has not heard of the job's failure in time.
    /// It runs on a thread of its own, while the rank computes, and takes a moment at most.
    pub fn last_words(&self, words: impl FnOnce(&Error) + Send + 'static) {
        *lock(&self.last_words) = Some(Box::new(words));
    }

    /// Tells the launcher whether this rank must never be killed hard, and why: it holds what a killed process
    /// does not give back.
    pub fn keep(&self, why: Option<&str>) {
        if let Way::Launched(control) = &self.way {
            lock(control).keep(why);
        }
    }
}

/// The ranks of a job meet through it.
impl Rendezvous for &Job {
    fn rank(&self) -> usize {
        self.place.rank
    }

    fn size(&self) -> usize {
        self.place.size
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        if (self.interrupted)() {
            return Err(Error::Interrupted);
        }
        match &self.way {
            Way::Launched(control) => lock(control).all_gather(mine, self.interrupted),
            Way::Direct(met) => lock(met).all_gather_unless(mine, &self.interrupted),
            Way::Alone => Ok(vec![mine.to_vec()]),
        }
    }
}
