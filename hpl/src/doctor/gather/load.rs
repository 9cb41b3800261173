//! What else works on this host: a glance at its load, and, only where there is some, at whose it is.

use std::path::Path;
use std::time::{Duration, Instant};

use super::super::facts::{Busy, Cpu};
use super::{Run, ask};

/// Less load than this (in percent of a core) is nobody's.
const QUIET: u32 = 30;
/// Programs that take less than this are not told.
const LITTLE: u32 = 20;
/// How long Linux's processes are watched; macOS keeps an average of its own.
const GLANCE: Duration = Duration::from_millis(200);
/// Ticks a second in /proc, on every Linux.
const TICKS: f64 = 100.0;

/// A process: its own number, its parent's, its name, and what it has used.
#[derive(Clone, PartialEq, Debug)]
struct Process<T> {
    id: u32,
    parent: u32,
    name: String,
    used: T,
}

/// `root` is `/`, or a test's copy of it.
pub(super) fn linux(root: &Path, cpu: &mut Cpu) {
    let text = std::fs::read_to_string(root.join("proc/loadavg")).unwrap_or_default();
    cpu.load = percent(text.split_whitespace().next());
    if cpu.load.is_some_and(|load| load >= QUIET) {
        let (start, before) = (Instant::now(), processes(root));
        std::thread::sleep(GLANCE);
        cpu.busy = busiest(between(&before, processes(root), start.elapsed()), own());
    }
}

pub(super) fn macos(run: &dyn Run, cpu: &mut Cpu) {
    // { 1.50 1.40 1.30 }
    let text = ask(run, &["sysctl", "-n", "vm.loadavg"]).get().cloned().unwrap_or_default();
    cpu.load = percent(text.trim_start_matches('{').split_whitespace().next());
    if cpu.load.is_some_and(|load| load >= QUIET) {
        let listed = ask(run, &["ps", "-Aceo", "pid=,ppid=,pcpu=,comm="]);
        cpu.busy = busiest(listed.get().map_or(Vec::new(), |text| averages(text)), own());
    }
}

fn percent(text: Option<&str>) -> Option<u32> {
    let load: f64 = text?.parse().ok()?;
    (load >= 0.0).then_some((load * 100.0) as u32)
}

/// This process and its parent.
fn own() -> [u32; 2] {
    [std::process::id(), std::os::unix::process::parent_id()]
}

/// All of /proc, with what each has used since its start, in ticks.
fn processes(root: &Path) -> Vec<Process<u64>> {
    let entries = std::fs::read_dir(root.join("proc")).into_iter().flatten().flatten();
    let numbered = entries.filter(|e| e.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()));
    numbered.filter_map(|e| stat(&std::fs::read_to_string(e.path().join("stat")).ok()?)).collect()
}

/// `17 (a name) S 1 …`: number, name, state, parent; the 14th and 15th are the time in the program and in the kernel.
fn stat(text: &str) -> Option<Process<u64>> {
    let (head, rest) = text.rsplit_once(')')?;
    let (id, name) = head.split_once(" (")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |i: usize| fields.get(i)?.parse::<u64>().ok();
    Some(Process {
        id: id.trim().parse().ok()?,
        parent: number(1)? as u32,
        name: name.into(),
        used: number(11)? + number(12)?,
    })
}

/// What each has used meanwhile, in percent of a core.
fn between(before: &[Process<u64>], after: Vec<Process<u64>>, time: Duration) -> Vec<Process<u32>> {
    let used = |p: &Process<u64>| {
        let first = before.iter().find(|b| b.id == p.id).map_or(p.used, |b| b.used);
        (p.used.saturating_sub(first) as f64 / TICKS / time.as_secs_f64().max(1e-3) * 100.0) as u32
    };
    after.into_iter().map(|p| Process { used: used(&p), id: p.id, parent: p.parent, name: p.name }).collect()
}

/// Lines of `ps`: number, parent, percent of a core, name.
fn averages(text: &str) -> Vec<Process<u32>> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        Some(Process {
            id: words.next()?.parse().ok()?,
            parent: words.next()?.parse().ok()?,
            used: words.next()?.replace(',', ".").parse::<f64>().ok()? as u32,
            name: words.collect::<Vec<_>>().join(" "),
        })
    };
    text.lines().filter_map(line).collect()
}

/// The programs that take most, each once, without this process, its parent, and what these have started: ranks of its job.
fn busiest(all: Vec<Process<u32>>, own: [u32; 2]) -> Vec<Busy> {
    let mut found: Vec<Busy> = Vec::new();
    let others = all.into_iter().filter(|p| !own.contains(&p.id) && !own.contains(&p.parent));
    for Process { name, used, .. } in others {
        match found.iter_mut().find(|busy| busy.name == name) {
            Some(busy) => busy.percent += used,
            None => found.push(Busy { name, percent: used }),
        }
    }
    found.retain(|busy| busy.percent >= LITTLE);
    found.sort_by_key(|busy| std::cmp::Reverse(busy.percent));
    found.truncate(4);
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::Recorded;
    use super::*;

    fn busy(name: &str, percent: u32) -> Busy {
        Busy { name: name.into(), percent }
    }

    #[test]
    fn whose_load_it_is_on_linux() {
        let line = |id: u32, name: &str, parent: u32, program: u64, kernel: u64| {
            format!("{id} ({name}) R {parent} 1 1 0 -1 4194304 9 0 0 0 {program} {kernel} 0 0 20 0 1 0")
        };
        let read = |lines: &[String]| lines.iter().map(|l| stat(l).unwrap()).collect::<Vec<_>>();
        let (before, after) = (
            read(&[line(7, "cc1 (x)", 1, 100, 5), line(8, "idle", 1, 9, 9), line(9, "hpl-run", 50, 0, 0)]),
            read(&[
                line(7, "cc1 (x)", 1, 117, 7),
                line(8, "idle", 1, 9, 9),
                line(9, "hpl-run", 50, 20, 0),
                line(11, "born", 1, 500, 0),
            ]),
        );
        let used = between(&before, after, Duration::from_millis(200));
        assert_eq!(busiest(used.clone(), [51, 50]), [busy("cc1 (x)", 95)], "9 is of this job");
        assert_eq!(busiest(used, [51, 52]), [busy("hpl-run", 100), busy("cc1 (x)", 95)], "and now it is not");
        assert_eq!(stat("x"), None);
    }

    #[test]
    fn whose_load_it_is_on_a_mac() {
        let listed =
            "  101     1  150.2 Xcode Helper\n  102   1 30,5 mds\n  103  1 30.0 mds\n 104 1 3.0 sh\n junk\n";
        let run = Recorded::default()
            .with("sysctl -n vm.loadavg", "{ 2.10 1.40 1.30 }\n")
            .with("ps -Aceo pid=,ppid=,pcpu=,comm=", listed);
        let mut cpu = Cpu::default();
        macos(&run, &mut cpu);
        assert_eq!((cpu.load, cpu.busy), (Some(210), vec![busy("Xcode Helper", 150), busy("mds", 60)]));
        // Nobody is asked for on a host that is quiet.
        let mut cpu = Cpu::default();
        macos(&Recorded::default().with("sysctl -n vm.loadavg", "{ 0.10 1.40 1.30 }\n"), &mut cpu);
        assert_eq!((cpu.load, cpu.busy), (Some(10), vec![]));
    }

    #[test]
    fn a_quiet_linux_is_not_watched() {
        let root = tempfile::tempdir().unwrap();
        let mut cpu = Cpu::default();
        linux(root.path(), &mut cpu);
        assert_eq!((cpu.load, &cpu.busy), (None, &vec![]));
        std::fs::create_dir(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/loadavg"), "0.07 0.5 0.5 1/300 99\n").unwrap();
        linux(root.path(), &mut cpu);
        assert_eq!((cpu.load, &cpu.busy), (Some(7), &vec![]));
    }
}
