//! Tries the RDMA devices, in a process of its own that may get stuck or crash in a driver: it writes down each step before
//! and after it, and this process reads what it came to.
//!
//! What a device grants changes with the system's build alone, and trying costs Apple's driver resources, so what has been
//! found is kept in the user's cache, for this build and device, until `--fresh` asks anew. Failures are not kept.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::Ipv6Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::nic;
use fulmen::fabric::verbs::probe::{self, Local, Note, Outcome as How};
use fulmen::fabric::verbs::{LIBRARY_VARIABLE, Library, Step as At};
use serde::{Deserialize, Serialize};

use super::cache::{self, Key};
use super::facts::{Act, Answer, Device, Facts, Granted, Limits, Outcome, Probe, Step};
use super::gather::Run;
use super::notes;
use crate::exit::Status;

/// How long a process may take; one that gets stuck in a device costs this.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long all of them together: other ranks of a job wait for this one at their rendezvous, for a minute.
const ALTOGETHER: Duration = Duration::from_secs(35);
/// Processes that are sacrificed to stuck devices at most.
const SACRIFICES: usize = 8;

/// A line that the process writes.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// Of this device, and its transport's number, are the lines that follow.
    Device(String, i32),
    /// Whether its port is active, and the port's addresses.
    Seen(bool, Vec<(u32, String)>),
    Step(Note),
    Found(Box<Local>),
}

/// The part of the process that tries: all devices but those of `skip`, into `notes`; those of `known` are only looked at.
pub fn child(notes: &Path, skip: &[String], known: &[String]) -> Status {
    let Ok(mut file) = OpenOptions::new().append(true).open(notes) else { return Status::Resources };
    // A line that cannot be written is missed by the reader, who tells.
    let mut write = |line: &Line| {
        let text = serde_json::to_string(line).unwrap_or_default() + "\n";
        let _ = file.write_all(text.as_bytes());
    };
    let Ok(library) = Library::find() else { return Status::Passed };
    let Ok(devices) = nic::list(library) else { return Status::Resources };
    for device in devices.iter().filter(|d| !skip.contains(&d.name)) {
        write(&Line::Device(device.name.clone(), device.transport));
        let is_known = known.contains(&device.name);
        match nic::look(library, &device.name) {
            Ok((active, gids)) => {
                let gid = |g: &nic::Gid| (g.index.into(), Ipv6Addr::from(g.raw).to_string());
                write(&Line::Seen(active, gids.iter().map(gid).collect()));
            }
            Err(refusal) if is_known => {
                let outcome = Some(How::Refused(refusal.number));
                write(&Line::Step(Note { step: refusal.step, number: 1, outcome }));
            }
            Err(_) => {} // met again below
        }
        if is_known {
            continue;
        }
        let found = probe::local(library, &device.name, &mut |note| write(&Line::Step(note)));
        if let Ok(found) = found {
            write(&Line::Found(Box::new(found)));
        }
    }
    Status::Passed
}

/// What has become of a device.
#[derive(Default)]
struct Tried {
    name: String,
    is_thunderbolt: bool,
    seen: Option<(bool, Vec<(u32, String)>)>,
    steps: Vec<Note>,
    found: Option<Local>,
}

fn read(text: &str) -> Vec<Tried> {
    let mut all: Vec<Tried> = Vec::new();
    for line in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match (line, all.last_mut()) {
            (Line::Device(name, transport), _) => {
                let is_thunderbolt = nic::Listed { name: name.clone(), transport }.is_thunderbolt();
                all.push(Tried { name, is_thunderbolt, ..Tried::default() });
            }
            (Line::Seen(active, gids), Some(tried)) => tried.seen = Some((active, gids)),
            (Line::Step(note), Some(tried)) => tried.steps.push(note),
            (Line::Found(found), Some(tried)) => tried.found = Some(*found),
            (_, None) => {}
        }
    }
    all
}

/// Tries all devices, or looks up what was found before, and adds it to the facts.
pub fn look(run: &dyn Run, fresh: bool, facts: &mut Facts) {
    let is_absent =
        matches!(facts.rdma.library, Answer::Refused(_)) && std::env::var_os(LIBRARY_VARIABLE).is_none();
    if is_absent || matches!(facts.rdma.devices, Answer::Hung(_) | Answer::Died(_)) {
        return; // nothing to try, or a driver that is stuck already
    }
    let cache = cache::folder(&facts.system);
    let listed: Vec<String> =
        facts.rdma.devices.get().into_iter().flatten().map(|d| d.name.clone()).collect();
    let (mut skip, mut known) = (Vec::new(), Vec::new());
    for name in listed.iter().filter(|_| !fresh) {
        if let Some(found) =
            cache.as_deref().and_then(|folder| cache::recall(folder, &Key::of(&facts.system, name)))
        {
            add(facts, name, |device| device.probe = Some(told(&found, true)));
            known.push(name.clone());
        }
    }
    let until = Instant::now() + ALTOGETHER;
    for _ in 0..SACRIFICES {
        let left = until.saturating_duration_since(Instant::now()).min(PATIENCE);
        if left.is_zero() {
            return; // devices that were not reached have no steps, which the table shows
        }
        let Some((all, ended)) = try_devices(run, &skip, &known, left) else { return };
        let last = all.last().map(|tried| tried.name.clone());
        for tried in all {
            skip.push(tried.name.clone());
            if let (Some(found), Some(folder)) = (&tried.found, &cache) {
                cache::keep(folder, &Key::of(&facts.system, &tried.name), found);
            }
            let end = match &ended {
                Answer::Hung(seconds) if last.as_ref() == Some(&tried.name) => Some(Outcome::Hung(*seconds)),
                Answer::Died(signal) if last.as_ref() == Some(&tried.name) => Some(Outcome::Died(*signal)),
                _ => None,
            };
            add(facts, &tried.name.clone(), |device| merge(device, tried, end));
        }
        if !matches!((&ended, last), (Answer::Hung(_) | Answer::Died(_), Some(_))) {
            return;
        }
    }
}

/// Runs the process; what it wrote and how it ended.
fn try_devices(
    run: &dyn Run,
    skip: &[String],
    known: &[String],
    patience: Duration,
) -> Option<(Vec<Tried>, Answer<String>)> {
    let program = std::env::current_exe().ok()?;
    let notes = std::env::temp_dir().join(format!("hpl-run-probe-{}-{}", std::process::id(), skip.len()));
    // Nobody else's file, and not what a link leads to.
    OpenOptions::new().write(true).create_new(true).open(&notes).ok()?;
    let (program, path) = (program.to_string_lossy(), notes.to_string_lossy());
    let mut command = vec![&*program, "doctor", "--probe", &*path];
    skip.iter().for_each(|name| command.extend(["--skip", name.as_str()]));
    known.iter().for_each(|name| command.extend(["--known", name.as_str()]));
    let ended = run.run(&command, patience);
    let text = std::fs::read_to_string(&notes).unwrap_or_default();
    let _ = std::fs::remove_file(&notes); // else it is in a folder that the system empties
    Some((read(&text), ended))
}

/// Changes the device of this name, which is added if the system did not list it.
fn add(facts: &mut Facts, name: &str, change: impl FnOnce(&mut Device)) {
    if facts.rdma.devices.get().is_none() {
        facts.rdma.devices = Answer::Is(Vec::new());
    }
    let Answer::Is(devices) = &mut facts.rdma.devices else { return };
    let at = devices.iter().position(|d| d.name == name).unwrap_or_else(|| {
        devices.push(Device { name: name.into(), ..Device::default() });
        devices.len() - 1
    });
    change(&mut devices[at]);
}

/// What was tried of a device, and how the process ended in it, if it did.
fn merge(device: &mut Device, tried: Tried, end: Option<Outcome>) {
    if device.transport.is_empty() && tried.is_thunderbolt {
        device.transport = "Thunderbolt".into();
    }
    if let Some((active, gids)) = tried.seen {
        device.active = Some(active);
        // The system's own list has more.
        if device.gids.is_empty() {
            device.gids = gids;
        }
    }
    for note in &tried.steps {
        if let (At::Port, Some(outcome)) = (note.step, note.outcome) {
            device.active = Some(outcome == How::Done);
        }
        if let (Some(act), Some(outcome)) = (notes::act(note), note.outcome)
            && let Some(outcome) = notes::told_of(note, outcome)
            && note.step != At::Port
        {
            device.steps.push(Step { act, outcome });
        }
    }
    // The step that never ended.
    let begun = tried.steps.last().filter(|note| note.outcome.is_none()).and_then(notes::act);
    if let Some(outcome) = end {
        device.steps.push(Step { act: begun.unwrap_or(Act::Open), outcome });
    }
    if let Some(found) = &tried.found {
        device.probe = Some(told(found, false));
        let l = &found.limits;
        let limits = Limits { queue_pairs: l.queue_pairs, domains: l.domains, regions: l.regions };
        device.limits.get_or_insert(limits);
    }
}

fn told(found: &Local, remembered: bool) -> Probe {
    let granted = found.granted.iter().map(|(asked, got)| Granted {
        asked: *asked,
        send: got.send,
        receive: got.receive,
    });
    Probe {
        registered: found.registered as u64,
        granted: granted.collect(),
        reliable: found.reliable,
        remembered,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that wrote this, and ended so.
    struct Wrote(&'static str, Answer<String>);

    impl Run for Wrote {
        fn run(&self, command: &[&str], _: Duration) -> Answer<String> {
            if command.contains(&"--skip") {
                return Answer::Is(String::new()); // the one after it: nothing is left
            }
            std::fs::write(command[3], self.0).unwrap();
            self.1.clone()
        }
    }

    #[test]
    fn the_step_in_which_a_process_ended_is_told() {
        let lines = r#"{"device": ["rdma_en4", 100]}
{"step": {"step": "open", "number": 1, "outcome": null}}
{"step": {"step": "open", "number": 1, "outcome": "Done"}}
{"step": {"step": "alloc_pd", "number": 1, "outcome": null}}
"#;
        for (ended, outcome) in [(Answer::Hung(20), Outcome::Hung(20)), (Answer::Died(11), Outcome::Died(11))]
        {
            let mut facts = Facts::default();
            look(&Wrote(lines, ended), true, &mut facts);
            let device = &facts.rdma.devices.get().unwrap()[0];
            assert_eq!(device.steps.last(), Some(&Step { act: Act::AllocDomain, outcome }));
            assert_eq!((device.transport.as_str(), device.probe.is_none()), ("Thunderbolt", true));
        }
    }
}
