//! What slows a job down or spoils it without any network: memory, clocks, sleep, and hosts that are not alike.

use super::facts::Facts;
use super::finding::{CLOCK, CORES, Finding, MEMORY, SYSTEM};
use crate::units;

/// Clocks further apart make time stamps of different hosts useless.
const APART_MS: i64 = 1000;

/// Other programs that take less than this of a core, in percent, are let be.
const BUSY: u32 = 50;
/// The same for a load that is nobody's, in percent of all cores.
const LOADED: u32 = 50;

/// What one host's facts tell.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let (cpu, memory) = (&facts.cpu, &facts.memory);
    if let (Some(available), Some(total)) = (memory.available, memory.total)
        && available < total / 2
    {
        let seen = format!("{} of {} available", units::bytes(available.into()), units::bytes(total.into()));
        found.push(
            Finding::warning("little-memory", MEMORY, seen)
                .because(format!("other programs hold the rest, or a limit does ({})", memory.bound))
                .then("end what is not needed: the problem is sized by the host with the least")
                .then("`top -o mem` (macOS) or `top -o %MEM` shows who has it"),
        );
    }
    found.extend(busy(facts));
    if cpu.governors.iter().any(|g| g == "powersave") {
        found.push(
            Finding::warning(
                "cpu-governor",
                CORES,
                format!("frequency governor {}", cpu.governors.join(", ")),
            )
            .because("cores that save power take long to reach their full clock, or never do")
            .then("`sudo cpupower frequency-set -g performance`"),
        );
    }
    if cpu.low_power == Some(true) {
        found.push(
            Finding::warning("low-power-mode", CORES, "low power mode is on")
                .because("the system holds the clocks down")
                .then("`sudo pmset -a lowpowermode 0`, or Settings, Battery (Energy)"),
        );
    }
    if let Some(limit) = cpu.speed_limit.filter(|limit| *limit < 100) {
        found.push(
            Finding::warning("throttled", CORES, format!("the system limits the speed to {limit} %"))
                .because("the machine is too hot")
                .then("let it cool, give it air; `pmset -g therm` shows the limit"),
        );
    }
    if facts.system.is_macos() && cpu.may_sleep == Some(true) {
        found.push(
            Finding::warning("may-sleep", CORES, "the machine may fall asleep during a job")
                .because("a machine asleep is a rank that is silent, and its cables are down")
                .then("`sudo pmset -a sleep 0`, or start the job with `caffeinate -i`"),
        );
    }
    found
}

/// Other programs on the cores: those that were seen at work, else a load that is nobody's, as in a container.
fn busy(facts: &Facts) -> Option<Finding> {
    let cpu = &facts.cpu;
    let cores = |percent: u32| format!("{:.1}", f64::from(percent) / 100.0);
    let taken: u32 = cpu.busy.iter().map(|b| b.percent).sum();
    let seen = if taken >= BUSY {
        let told = cpu.busy.iter().map(|b| format!("{} ({})", b.name, cores(b.percent)));
        format!(
            "other programs take {} of {} cores: {}",
            cores(taken),
            cpu.cores,
            told.collect::<Vec<_>>().join(", ")
        )
    } else {
        let load = cpu.load.filter(|load| *load >= BUSY.max(cpu.cores as u32 * LOADED))?;
        format!("a load of {} on {} cores", cores(load), cpu.cores)
    };
    Some(
        Finding::warning("busy-host", CORES, seen)
            .because("work is shared out evenly: where another program takes a core, its rank is late, and all wait for it")
            .then("end what is not needed, or wait until it is done")
            .then("`top -o cpu` (macOS) or `top` shows who it is"),
    )
}

/// What several hosts' facts tell together: `host` of these findings is empty where all are meant.
pub fn compare(all: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(seen) = differ(all.iter().map(|f| (&f.host, f.fulmen.clone()))) {
        found.push(
            Finding::failure("fulmen-versions", SYSTEM, seen)
                .because("ranks of different versions do not understand each other")
                .then("copy one build to every host: `scp $(which hpl-run) HOST:`"),
        );
    }
    if let Some(at) = (0..all.len()).find(|at| all[..*at].iter().any(|before| before.host == all[*at].host)) {
        found.push(
            Finding::warning("same-name", SYSTEM, format!("several hosts are called {}", all[at].host))
                .because("what is found on one of them cannot be told from what is found on another")
                .then("a file of --with is of another host than this one: leave out this one's own")
                .then("give machines that were cloned names of their own: `hostnamectl set-hostname NAME`, `scutil --set HostName NAME`"),
        );
    }
    let macs = all.iter().filter(|f| f.system.is_macos());
    if let Some(seen) = differ(macs.map(|f| (&f.host, format!("{} ({})", f.system.version, f.system.build))))
    {
        found.push(
            Finding::failure("os-builds", SYSTEM, seen)
                .because("the RDMA driver changes from build to build, and two builds may not work together")
                .then("bring all Macs to the newest of them: `softwareupdate --list`"),
        );
    }
    for facts in all {
        if let Some(ahead) = facts.clock_ahead_ms.filter(|ms| ms.abs() > APART_MS) {
            let seconds = units::duration(ahead.unsigned_abs() as f64 / 1000.0);
            let seen = format!("{seconds} {}", if ahead > 0 { "ahead" } else { "behind" });
            let mut finding = Finding::warning("clock-offset", CLOCK, seen)
                .because("nobody sets this clock; time stamps of reports and logs do not fit together")
                .then(if facts.system.is_macos() {
                    "`sudo sntp -sS time.apple.com`"
                } else {
                    "`sudo chronyc makestep`, or `timedatectl set-ntp true`"
                });
            finding.host.clone_from(&facts.host);
            found.push(finding);
        }
    }
    if let Some(seen) = differ(all.iter().map(|f| (&f.host, f.cpu.cores.to_string()))) {
        found.push(
            Finding::note("uneven-cores", CORES, seen)
                .because("the matrix is shared out evenly: a job is as fast as its slowest rank")
                .then("use hosts that are alike, or more ranks on the larger ones"),
        );
    }
    found
}

/// `a: 1; b, c: 2` when there is more than one value.
fn differ<'a>(values: impl Iterator<Item = (&'a String, String)>) -> Option<String> {
    let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
    for (host, value) in values {
        match groups.iter_mut().find(|(known, _)| *known == value) {
            Some((_, hosts)) => hosts.push(host),
            None => groups.push((value, vec![host.as_str()])),
        }
    }
    let told = groups.iter().map(|(value, hosts)| format!("{}: {value}", hosts.join(", ")));
    (groups.len() > 1).then(|| told.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::super::facts::{Busy, Cpu, Memory, System};
    use super::*;

    fn mac(host: &str) -> Facts {
        Facts {
            host: host.into(),
            fulmen: "0.1.0".into(),
            system: System {
                os: "macos".into(),
                version: "26.3".into(),
                build: "25D1".into(),
                ..System::default()
            },
            cpu: Cpu { cores: 10, may_sleep: Some(false), ..Cpu::default() },
            memory: Memory { available: Some(60 << 30), total: Some(64 << 30), ..Memory::default() },
            ..Facts::default()
        }
    }

    fn ids(found: &[Finding]) -> Vec<&str> {
        found.iter().map(|f| f.id).collect()
    }

    #[test]
    fn a_host_in_order_has_nothing() {
        assert!(judge(&mac("a")).is_empty());
        assert!(judge(&Facts::default()).is_empty(), "what is not known is not blamed");
        assert!(compare(&[mac("a"), mac("b")]).is_empty());
        assert!(compare(&[]).is_empty());
        assert_eq!(ids(&compare(&[mac("a"), mac("b"), mac("a")])), ["same-name"]);
    }

    #[test]
    fn each_thing_that_slows_is_named() {
        let mut slow = mac("a");
        slow.memory.available = Some(20 << 30);
        slow.cpu = Cpu {
            cores: 10,
            governors: vec!["powersave".into()],
            low_power: Some(true),
            speed_limit: Some(70),
            may_sleep: Some(true),
            ..Cpu::default()
        };
        let found = judge(&slow);
        assert_eq!(
            ids(&found),
            ["little-memory", "cpu-governor", "low-power-mode", "throttled", "may-sleep"]
        );
        assert!(found[0].seen.contains("20.0 GiB of 64.0 GiB"));
        assert!(found.iter().all(|f| !f.cause.is_empty() && f.steps.iter().any(|s| !s.is_empty())));
    }

    #[test]
    fn other_programs_on_the_cores_are_named() {
        let told = |load: u32, busy: &[(&str, u32)]| {
            let mut facts = mac("a");
            facts.cpu.load = Some(load);
            facts.cpu.busy =
                busy.iter().map(|(name, p)| Busy { name: (*name).into(), percent: *p }).collect();
            judge(&facts)
        };
        let found = told(180, &[("cc1plus", 150), ("mds", 30)]);
        assert_eq!(ids(&found), ["busy-host"]);
        assert_eq!(found[0].seen, "other programs take 1.8 of 10 cores: cc1plus (1.5), mds (0.3)");
        assert!(found[0].steps[0].contains("end what is not needed"));
        assert_eq!(ids(&told(40, &[("mds", 25)])), [""; 0], "a little is nobody's trouble");
        assert_eq!(ids(&told(300, &[])), [""; 0], "ended a moment ago, or waits for a disk");
        let found = told(700, &[]);
        assert_eq!((ids(&found), found[0].seen.as_str()), (vec!["busy-host"], "a load of 7.0 on 10 cores"));
    }

    #[test]
    fn hosts_that_differ_are_told_apart() {
        let (mut b, mut c) = (mac("b"), mac("c"));
        b.fulmen = "0.2.0".into();
        b.clock_ahead_ms = Some(-90_000);
        c.system.build = "25D2".into();
        c.cpu.cores = 4;
        c.clock_ahead_ms = Some(400);
        let found = compare(&[mac("a"), b, c]);
        assert_eq!(ids(&found), ["fulmen-versions", "os-builds", "clock-offset", "uneven-cores"]);
        assert_eq!(found[0].seen, "a, c: 0.1.0; b: 0.2.0");
        assert_eq!((found[2].host.as_str(), found[2].seen.as_str()), ("b", "90 s behind"));
        assert!(found[2].steps[0].contains("sntp"));
        let mut linux = mac("d");
        linux.system.os = "linux".into();
        assert!(compare(&[mac("a"), linux]).is_empty(), "builds of different systems differ by nature");
    }
}
