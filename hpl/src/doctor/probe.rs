//! Tries the RDMA devices, in a process of its own that may get stuck or crash in a driver: it writes down each step before
//! and after it, and this process reads what it came to.
//!
//! What a device grants changes with the system's build alone, and trying costs Apple's driver resources, so what has been
//! found is kept in the user's cache, for this build and device, until `--fresh` asks anew. Failures are not kept.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::nic;
use fulmen::fabric::verbs::probe::{self, Local, Note, Outcome as How};
use fulmen::fabric::verbs::{LIBRARY_VARIABLE, Library, Step as At};
use serde::{Deserialize, Serialize};

use super::facts::{Act, Answer, Device, Facts, Granted, Limits, Outcome, Probe, Step, System, Wrong};
use super::gather::Run;
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
    Step(Note),
    Found(Box<Local>),
}

/// What a device is found to be, and where that holds.
#[derive(PartialEq, Serialize, Deserialize)]
struct Kept {
    fulmen: String,
    os: String,
    version: String,
    build: String,
    /// [`LIBRARY_VARIABLE`], if set.
    library: Option<String>,
    device: String,
}

/// The part of the process that tries: all devices but those of `skip`, into `notes`.
pub fn child(notes: &Path, skip: &[String]) -> Status {
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
    let cache = cache(&facts.system);
    let known: Vec<String> = facts.rdma.devices.get().into_iter().flatten().map(|d| d.name.clone()).collect();
    let mut skip = Vec::new();
    for name in known.iter().filter(|_| !fresh) {
        if let Some(found) = cache.as_deref().and_then(|folder| recall(folder, &key(&facts.system, name))) {
            add(facts, name, |device| device.probe = Some(told(&found, true)));
            skip.push(name.clone());
        }
    }
    let until = Instant::now() + ALTOGETHER;
    for _ in 0..SACRIFICES {
        let left = until.saturating_duration_since(Instant::now()).min(PATIENCE);
        if left.is_zero() {
            return; // devices that were not reached have no steps, which the table shows
        }
        let Some((all, ended)) = try_devices(run, &skip, left) else { return };
        let last = all.last().map(|tried| tried.name.clone());
        for tried in all {
            skip.push(tried.name.clone());
            if let (Some(found), Some(folder)) = (&tried.found, &cache) {
                keep(folder, key(&facts.system, &tried.name), found);
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
fn try_devices(run: &dyn Run, skip: &[String], patience: Duration) -> Option<(Vec<Tried>, Answer<String>)> {
    let program = std::env::current_exe().ok()?;
    let notes = std::env::temp_dir().join(format!("hpl-run-probe-{}-{}", std::process::id(), skip.len()));
    // Nobody else's file, and not what a link leads to.
    OpenOptions::new().write(true).create_new(true).open(&notes).ok()?;
    let (program, path) = (program.to_string_lossy(), notes.to_string_lossy());
    let mut command = vec![&*program, "doctor", "--probe", &*path];
    skip.iter().for_each(|name| command.extend(["--skip", name.as_str()]));
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
    for note in &tried.steps {
        if let (At::Port, Some(outcome)) = (note.step, note.outcome) {
            device.active = Some(outcome == How::Done);
        }
        if let (Some(act), Some(outcome)) = (act(note), note.outcome)
            && note.step != At::Port
        {
            device.steps.push(Step { act, outcome: told_of(outcome) });
        }
    }
    // The step that never ended.
    let begun = tried.steps.last().filter(|note| note.outcome.is_none()).and_then(act);
    if let Some(outcome) = end {
        device.steps.push(Step { act: begun.unwrap_or(Act::Open), outcome });
    }
    device.probe = tried.found.as_ref().map(|found| told(found, false));
    if let Some(found) = &tried.found {
        let l = &found.limits;
        let limits = Limits { queue_pairs: l.queue_pairs, domains: l.domains, regions: l.regions };
        device.limits.get_or_insert(limits);
    }
}

fn act(note: &Note) -> Option<Act> {
    Some(match note.step {
        At::Open => Act::Open,
        At::Port => Act::QueryPort,
        At::AllocPd => Act::AllocDomain,
        At::Register => Act::Register(u32::try_from(note.number).unwrap_or(u32::MAX)),
        At::CreateCq => Act::CreateQueue,
        At::CreateQp => Act::CreateUc,
        At::CreateRc => Act::CreateOther,
        At::Init => Act::Init,
        At::ReadyToReceive => Act::ReadyToReceive,
        At::ReadyToSend => Act::ReadyToSend,
        At::PostReceive => Act::PostReceive,
        At::PostSend => Act::PostSend,
        At::Completion | At::WarmUp | At::Poll => Act::Complete,
        At::Load | At::List | At::Address => return None,
    })
}

fn told_of(how: How) -> Outcome {
    match how {
        How::Done => Outcome::Done,
        How::Refused(number) => Outcome::Errno(number),
        How::Silent => Outcome::Null,
        How::Zeros => Outcome::Wrong(Wrong::Zeros),
        How::Garbage => Outcome::Wrong(Wrong::Garbage),
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

/// `~/Library/Caches/fulmen/probe` on a Mac, `~/.cache/fulmen/probe` elsewhere.
fn cache(system: &System) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let below = if system.is_macos() { "Library/Caches" } else { ".cache" };
    let folder = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(below)))?;
    folder.is_absolute().then(|| folder.join("fulmen/probe"))
}

fn key(system: &System, device: &str) -> Kept {
    Kept {
        fulmen: env!("CARGO_PKG_VERSION").into(),
        os: system.os.clone(),
        version: system.version.clone(),
        build: system.build.clone(),
        library: std::env::var(LIBRARY_VARIABLE).ok(),
        device: device.into(),
    }
}

/// One file a device; a name that is no file name is not kept.
fn file(folder: &Path, device: &str) -> Option<PathBuf> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (!device.is_empty() && device.chars().all(is_plain)).then(|| folder.join(format!("{device}.json")))
}

fn recall(folder: &Path, wanted: &Kept) -> Option<Local> {
    let text = std::fs::read_to_string(file(folder, &wanted.device)?).ok()?;
    let (kept, found): (Kept, Local) = serde_json::from_str(&text).ok()?;
    (kept == *wanted).then_some(found)
}

/// Whole or not at all: a half-written file is of no use, and is not read.
fn keep(folder: &Path, key: Kept, found: &Local) {
    let Some(path) = file(folder, &key.device) else { return };
    let Ok(text) = serde_json::to_string_pretty(&(key, found)) else { return };
    let part = path.with_extension(std::process::id().to_string());
    // Without a cache the devices are tried again next time.
    let _ = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&part, text))
        .and_then(|()| std::fs::rename(&part, &path));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local() -> Local {
        let text = r#"{"limits": {"queue_pairs": 11, "requests": 4095, "completion_queues": 11, "completions": 4096,
            "regions": 100, "domains": 11}, "port": {"number": 1, "lid": 0, "mtu": 5, "width": 4, "speed": 8,
            "largest_message": 16773120}, "registered": 1048576, "granted": [[256, {"send": 1023, "receive": 1023}]],
            "reliable": false}"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_is_kept_holds_for_its_build_alone() {
        let folder = tempfile::tempdir().unwrap();
        let system = System {
            os: "macos".into(),
            version: "26.3".into(),
            build: "25D125".into(),
            ..System::default()
        };
        let of = |system: &System| key(system, "rdma_en5");
        assert_eq!(recall(folder.path(), &of(&system)), None);
        keep(folder.path(), of(&system), &local());
        assert_eq!(recall(folder.path(), &of(&system)), Some(local()));
        let next = System { build: "25D200".into(), ..system.clone() };
        assert_eq!(recall(folder.path(), &of(&next)), None);
        keep(folder.path(), key(&system, "../x"), &local());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::write(folder.path().join("rdma_en5.json"), "{").unwrap();
        assert_eq!(recall(folder.path(), &of(&system)), None);
    }

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
