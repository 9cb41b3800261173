//! A rank that is a process: the program started again by itself, told what to do by its environment.
//!
//! Rank 0's standard output is a pipe to the program that the user started, which alone talks to the user.

use std::io::{Read, Write};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmen::fabric::shm;
use fulmen::{Error, Result, Setup, World};
use serde::{Deserialize, Serialize};

use crate::interrupt;
use crate::params::Input;
use crate::rank;
use crate::report::Outcome;

/// The environment variable that holds an [`Assignment`].
const ASSIGNMENT: &str = "HPL_RUN_ASSIGNMENT";

/// Rank 0 tells of progress this often at most.
const EVERY: Duration = Duration::from_millis(200);

/// What a worker is to do: all runs of the input, in order.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// The runs.
    pub input: Input,
    /// Kernels, in the user's words.
    pub kernels: String,
    /// Threads of each rank.
    pub threads: usize,
}

impl Assignment {
    /// Puts it into the environment of a command.
    pub fn hand_to(&self, command: &mut Command) {
        // Numbers, strings and finite floats: this cannot fail, and an empty text is refused by the worker.
        command.env(ASSIGNMENT, serde_json::to_string(self).unwrap_or_default());
    }
}

/// What rank 0 tells.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Note {
    /// Operations done, of all.
    Progress(f64, f64),
    /// A run is over.
    Outcome(Box<Outcome>),
}

/// Writes one note: its length, then its bytes.
fn write(to: &mut impl Write, note: &Note) -> std::io::Result<()> {
    let bytes = postcard::to_allocvec(note).map_err(std::io::Error::other)?;
    to.write_all(&(bytes.len() as u32).to_le_bytes())?;
    to.write_all(&bytes)?;
    to.flush()
}

/// Reads one note; `None` at the end of the stream, or when what comes is no note.
pub fn read(from: &mut impl Read) -> Option<Note> {
    let mut len = [0; 4];
    from.read_exact(&mut len).ok()?;
    let mut bytes = vec![];
    let len = u64::from(u32::from_le_bytes(len));
    from.take(len).read_to_end(&mut bytes).ok()?;
    postcard::from_bytes(&bytes).ok()
}

/// If this process was started as a rank: does its work, and how it ended.
pub fn run_if_asked() -> Option<ExitCode> {
    let assignment = std::env::var(ASSIGNMENT).ok()?;
    interrupt::goes_to_starter();
    let fabric = match shm::connect_from_env() {
        Ok(Some(fabric)) => fabric,
        Ok(None) => return None, // the variable alone means nothing
        Err(e) => return Some(fail(&e)),
    };
    let result = serde_json::from_str(&assignment)
        .map_err(|e| Error::argument(ASSIGNMENT, assignment, e.to_string(), "unset it"))
        .and_then(|assignment: Assignment| {
            let setup = Setup {
                kernels: assignment.kernels.parse().map_err(Error::Internal)?,
                threads: assignment.threads,
                bind: true,
            };
            let (rank, ends) = (fabric.rank(), Arc::downgrade(&fabric));
            interrupt::at_limit_of_cpu_time(move || {
                let message = format!("rank {rank} was {}", interrupt::words());
                if let Some(fabric) = ends.upgrade() {
                    fabric.fail(&Error::Ended { message, code: 5 });
                }
            });
            let world = World::new(fabric.clone(), fabric.size(), &setup)?;
            work(&world, &assignment.input)
        });
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            fabric.fail(&e);
            ExitCode::from(e.exit_code())
        }
    })
}

fn fail(e: &Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "hpl-run: {e}");
    ExitCode::from(e.exit_code())
}

fn work(world: &World, input: &Input) -> Result<()> {
    let tell = |note: &Note| {
        write(&mut std::io::stdout(), note)
            .map_err(|e| Error::System { what: "rank 0 cannot tell its outcome".into(), os: e.to_string() })
    };
    let mut told = Instant::now();
    for run in input.runs() {
        let outcome = rank::solve(world, &run, &mut |done, total| {
            if world.rank() == 0 && (done == 0.0 || told.elapsed() >= EVERY) {
                told = Instant::now();
                let _ = tell(&Note::Progress(done, total)); // a lost one does not matter
            }
        })?;
        if let Some(outcome) = outcome {
            tell(&Note::Outcome(Box::new(outcome)))?;
        }
    }
    Ok(())
}
