//! Tries the RDMA devices, in a process of its own that may get stuck or crash in a driver: it writes down each step before
//! and after it, and this process reads what it came to.
//!
//! What a device grants changes with the system's build alone, and trying costs Apple's driver resources, so what has been
//! found is kept in the user's cache, for this host, build and device, until `--fresh` asks anew. What was granted in part, or
//! not at all, is not kept.

use std::io;
use std::net::Ipv6Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::nic;
use fulmen::fabric::verbs::probe::{self, Local, Note, Outcome as How};
use fulmen::fabric::verbs::{LIBRARY_VARIABLE, Library, Step as At};
use serde::{Deserialize, Serialize};

use super::cache::{self, Key};
use super::facts::{Answer, Device, Facts, Granted, Limits, Outcome, Probe};
use super::gather::Run;
use super::notes::{self, Sheet};
use crate::exit::Status;
use crate::interrupt;

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
    /// There is no library, in these words.
    Absent(String),
    /// Of this device, and its transport's number, are the lines that follow.
    Device(String, i32),
    /// Whether its port is active, and the port's addresses.
    Seen(bool, Vec<(u32, String)>),
    Step(Note),
    Found(Box<Local>),
}

/// The part of the process that tries: all devices but those of `skip`, into `notes`; those of `known` are only opened.
/// Asked to end it does, after the step that it takes, and gives back what it holds.
pub fn child(notes: &Path, skip: &[String], known: &[String]) -> Status {
    let goes_on = || interrupt::count() == 0;
    let mut written = Ok(());
    let mut write = |line: &Line| {
        let result = notes::add(notes, line);
        written = std::mem::replace(&mut written, Ok(())).and(result);
    };
    match Library::find() {
        Err(absent) => write(&Line::Absent(absent.to_string())),
        Ok(library) => match nic::list(library) {
            Err(refusal) => {
                eprintln!("{refusal}");
                return Status::Resources;
            }
            Ok(devices) => {
                let wanted = devices.iter().filter(|device| !skip.contains(&device.name));
                for device in wanted.take_while(|_| goes_on()) {
                    try_one(library, device, known.contains(&device.name), &goes_on, &mut write);
                }
            }
        },
    }
    match written {
        Ok(()) => Status::Passed,
        Err(e) => {
            eprintln!("{}: {e}", notes.display());
            Status::Resources
        }
    }
}

fn try_one(
    library: &'static Library,
    device: &nic::Listed,
    is_known: bool,
    goes_on: &dyn Fn() -> bool,
    write: &mut dyn FnMut(&Line),
) {
    write(&Line::Device(device.name.clone(), device.transport));
    // A refusal is met again below.
    if let Ok((active, gids)) = nic::look(library, &device.name) {
        let gid = |g: &nic::Gid| (g.index.into(), Ipv6Addr::from(g.raw).to_string());
        write(&Line::Seen(active, gids.iter().map(gid).collect()));
    }
    let mut tell = |note| write(&Line::Step(note));
    if is_known {
        // Its domains may be used up since, which only who takes one finds out.
        let _told = probe::opens(library, &device.name, &mut tell);
        return;
    }
    let found = probe::local(library, &device.name, goes_on, &mut tell);
    if let Ok(found) = found {
        write(&Line::Found(Box::new(found)));
    }
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

/// What the process wrote: of each device, and why there is no library, if so.
fn read(text: &str) -> (Vec<Tried>, Option<String>) {
    let (mut all, mut absent): (Vec<Tried>, _) = (Vec::new(), None);
    for line in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match (line, all.last_mut()) {
            (Line::Absent(words), _) => absent = Some(words),
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
    (all, absent)
}

/// Tries all devices, or looks up what was found before, and adds it to the facts.
pub fn look(run: &dyn Run, fresh: bool, facts: &mut Facts) {
    facts.rdma.named_library =
        std::env::var_os(LIBRARY_VARIABLE).map(|name| name.to_string_lossy().into_owned());
    let is_named = facts.rdma.named_library.is_some();
    if is_named && facts.rdma.library.get().is_none() {
        // That the system has none does not matter.
        facts.rdma.library = Answer::Unasked;
    }
    let is_absent = matches!(facts.rdma.library, Answer::Refused(_)) && !is_named;
    if is_absent || matches!(facts.rdma.devices, Answer::Hung(_) | Answer::Died(_)) {
        return; // nothing to try, or a driver that is stuck already
    }
    let cache = cache::folder(&facts.system);
    let listed: Vec<String> =
        facts.rdma.devices.get().into_iter().flatten().map(|d| d.name.clone()).collect();
    let (mut skip, mut known) = (Vec::new(), Vec::new());
    for name in listed.iter().filter(|_| !fresh) {
        if let Some(found) = cache.as_deref().and_then(|folder| cache::recall(folder, &Key::of(facts, name)))
        {
            add(facts, name, |device| device.probe = Some(told(&found, true)));
            known.push(name.clone());
        }
    }
    let until = Instant::now() + ALTOGETHER;
    for _ in 0..SACRIFICES {
        let left = until.saturating_duration_since(Instant::now()).min(PATIENCE);
        if left.is_zero() {
            break;
        }
        let (text, ended) = match try_devices(run, &skip, &known, left) {
            Ok(done) => done,
            Err(e) => {
                facts.rdma.untried = Some(e.to_string());
                return;
            }
        };
        let (all, absent) = read(&text);
        let outcome = match &ended {
            Answer::Hung(seconds) => Some(Outcome::Hung(*seconds)),
            Answer::Died(signal) => Some(Outcome::Died(*signal)),
            Answer::Refused(words) => {
                facts.rdma.untried = Some(words.clone());
                None
            }
            Answer::Is(_) | Answer::Unasked => None,
        };
        match (absent, &facts.rdma.library) {
            // What the system has is not what is used.
            (Some(words), library) if is_named || *library == Answer::Unasked => {
                facts.rdma.library = Answer::Refused(words);
            }
            (Some(words), _) => facts.rdma.untried = Some(words),
            (None, Answer::Unasked) if is_named && !all.is_empty() => {
                facts.rdma.library = facts.rdma.named_library.clone().map_or(Answer::Unasked, Answer::Is);
            }
            (None, _) => {}
        }
        let last = all.len().checked_sub(1);
        if let (Some(_), None, true) = (&outcome, last, skip.is_empty()) {
            // Not even a list of them was had.
            facts.rdma.devices = match ended {
                Answer::Died(signal) => Answer::Died(signal),
                Answer::Hung(seconds) => Answer::Hung(seconds),
                _ => return,
            };
            return;
        }
        for (i, tried) in all.into_iter().enumerate() {
            skip.push(tried.name.clone());
            if let (Some(found), Some(folder)) = (tried.found.as_ref().filter(|f| f.is_whole()), &cache) {
                cache::keep(folder, &Key::of(facts, &tried.name), found);
            }
            let end = outcome.clone().filter(|_| last == Some(i));
            add(facts, &tried.name.clone(), |device| merge(device, tried, end));
        }
        if outcome.is_none() || last.is_none() {
            return;
        }
    }
    let left: Vec<&str> = listed.iter().filter(|name| !skip.contains(*name)).map(String::as_str).collect();
    if !left.is_empty() {
        facts.rdma.untried = Some(format!("others took all the time; {} had none", left.join(", ")));
    }
}

/// Runs the process; what it wrote and how it ended.
fn try_devices(
    run: &dyn Run,
    skip: &[String],
    known: &[String],
    patience: Duration,
) -> io::Result<(String, Answer<String>)> {
    let program = std::env::current_exe()?;
    let notes = Sheet::new("probe")?;
    let (program, path) = (program.to_string_lossy(), notes.path().to_string_lossy());
    let mut command = vec![&*program, "doctor", "--probe", &*path];
    skip.iter().for_each(|name| command.extend(["--skip", name.as_str()]));
    known.iter().for_each(|name| command.extend(["--known", name.as_str()]));
    let ended = run.run(&command, patience);
    Ok((notes.text(), ended))
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
        device.steps.extend(notes::step(note).filter(|_| note.step != At::Port));
    }
    device.steps.extend(end.map(|outcome| notes::last(&tried.steps, outcome)));
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
        refused: found.refused as u64,
        granted: granted.collect(),
        reliable: found.reliable,
        unreliable: found.unreliable,
        remembered,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::{Act, Step};

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

    fn looked(lines: &'static str, ended: Answer<String>, mut facts: Facts) -> Facts {
        look(&Wrote(lines, ended), true, &mut facts);
        facts
    }

    const OPENED: &str = r#"{"device": ["rdma_en4", 100]}
{"step": {"step": "open", "number": 1, "outcome": null}}
{"step": {"step": "open", "number": 1, "outcome": "Done"}}
{"step": {"step": "alloc_pd", "number": 1, "outcome": null}}
"#;

    #[test]
    fn the_step_in_which_a_process_ended_is_told() {
        for (ended, outcome) in [(Answer::Hung(20), Outcome::Hung(20)), (Answer::Died(11), Outcome::Died(11))]
        {
            let facts = looked(OPENED, ended, Facts::default());
            let device = &facts.rdma.devices.get().unwrap()[0];
            assert_eq!(device.steps.last(), Some(&Step { act: Act::AllocDomain, outcome }));
            assert_eq!((device.transport.as_str(), device.probe.is_none()), ("Thunderbolt", true));
        }
        // One that took the step after all, when it was asked to end.
        let after = concat!(
            r#"{"device": ["rdma_en4", 100]}"#,
            "\n",
            r#"{"step": {"step": "alloc_pd", "number": 1, "outcome": "Done"}}"#
        );
        let facts = looked(after, Answer::Hung(20), Facts::default());
        let hung = Step { act: Act::AllocDomain, outcome: Outcome::Hung(20) };
        assert_eq!(facts.rdma.devices.get().unwrap()[0].steps.last(), Some(&hung));
    }

    #[test]
    fn what_kept_devices_from_being_tried_is_told() {
        let listed = |names: &[&str]| {
            let device = |name: &&str| Device { name: (*name).into(), ..Device::default() };
            let mut facts = Facts::default();
            facts.rdma.devices = Answer::Is(names.iter().map(device).collect());
            facts
        };
        // It got stuck, or was ended, before there was a list.
        for (ended, devices) in [(Answer::Hung(20), Answer::Hung(20)), (Answer::Died(11), Answer::Died(11))] {
            assert_eq!(looked("", ended, listed(&["rdma_en4"])).rdma.devices, devices);
        }
        // It could not be started, or failed by itself.
        let facts = looked(OPENED, Answer::Refused("no room".into()), listed(&["rdma_en4"]));
        assert_eq!(facts.rdma.untried.as_deref(), Some("no room"));
        // There is no library, which the system did not know.
        let absent = r#"{"absent": "no such file"}"#;
        let facts = looked(absent, Answer::Is(String::new()), Facts::default());
        assert_eq!((facts.rdma.library, facts.rdma.untried), (Answer::Refused("no such file".into()), None));
        let mut facts = listed(&["mlx5_0"]);
        facts.rdma.library = Answer::Is("libibverbs.so.1".into());
        let facts = looked(absent, Answer::Is(String::new()), facts);
        assert_eq!(facts.rdma.untried.as_deref(), Some("no such file"));
        // All in order.
        let lines = r#"{"device": ["rdma_en4", 100]}"#;
        assert_eq!(looked(lines, Answer::Is(String::new()), listed(&["rdma_en4"])).rdma.untried, None);
    }
}
