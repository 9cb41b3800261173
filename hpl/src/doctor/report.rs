//! What people read: a table of all that was looked at, a host after the other, and what to do next.

use std::fmt::Write;

use super::facts::{Answer, Device, Facts, Kind, Link, Nic, Probe, Writes};
use super::finding::{
    BRIDGE, CLOCK, CORES, DEVICES, Finding, LIBRARY, MANAGERS, MEMORY, NICS, PORTS, SWITCH, SYSTEM, Weight,
    link_check,
};
use super::network::{self, Network, rate};
use super::table::{Table, wrap};
use crate::units;

/// Columns of the text under the table.
const ROOM: usize = 100;

/// The whole text.
pub fn text(all: &[Facts], network: Option<&Network>, findings: &[Finding]) -> String {
    let mut text = String::new();
    for facts in all {
        let mine: Vec<&Finding> = findings.iter().filter(|f| f.host == facts.host).collect();
        let _ = writeln!(text, "{}   fulmen {}\n", facts.host, facts.fulmen);
        let _ = writeln!(text, "{}", table(checks(facts), &mine));
    }
    let common: Vec<&Finding> = findings.iter().filter(|f| f.host.is_empty()).collect();
    if all.len() > 1 {
        let _ = writeln!(text, "all hosts\n\n{}", table(Vec::new(), &common));
    }
    text + &network.map_or(String::new(), network::text) + &next_steps(findings)
}

/// What was looked at, with its findings in their places.
fn table(checks: Vec<(String, String)>, findings: &[&Finding]) -> Table {
    let mut table = Table::new(&["check", "result", "found"]);
    let mut rest: Vec<&Finding> = findings.to_vec();
    for (check, found) in checks {
        let (mine, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|f| f.check == check);
        rest = others;
        let worst = mine.iter().map(|f| f.weight).max();
        table.row([check, result(worst).to_string(), found]);
        for finding in mine {
            table.row(["", "", &told(finding)]);
        }
    }
    for finding in &rest {
        table.row([finding.check.as_str(), result(Some(finding.weight)), &told(finding)]);
    }
    if table.is_empty() {
        table.row(["all", "ok", "alike"]);
    }
    table
}

fn result(worst: Option<Weight>) -> &'static str {
    match worst {
        None => "ok",
        Some(Weight::Note) => "note",
        Some(Weight::Warning) => "warning",
        Some(Weight::Failure) => "FAILED",
    }
}

fn told(finding: &Finding) -> String {
    format!("{} [{}]", finding.seen, finding.id)
}

/// Failures first; each with its cause and its remedy.
fn next_steps(findings: &[Finding]) -> String {
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|f| std::cmp::Reverse(f.weight));
    if sorted.iter().all(|f| f.weight == Weight::Note) {
        let mut text = "Nothing to do.\n".to_string();
        sorted.iter().for_each(|f| text += &one(f, None));
        return text;
    }
    let mut text = "Next step for you\n".to_string();
    for (i, finding) in sorted.iter().enumerate() {
        text += &one(finding, Some(i + 1));
    }
    text
}

fn one(finding: &Finding, number: Option<usize>) -> String {
    let number = number.map_or("  -".into(), |n| format!("{n:3}."));
    let place = if finding.host.is_empty() { String::new() } else { format!(" on {}", finding.host) };
    let mut text = format!("{number} {}{place}: {} [{}]\n", finding.check, finding.seen, finding.id);
    let mut lines = |lead: &str, words: &str| {
        for (i, line) in wrap(words, ROOM).iter().enumerate() {
            let lead = if i == 0 { lead.to_string() } else { " ".repeat(lead.chars().count()) };
            let _ = writeln!(text, "     {lead}{line}");
        }
    };
    lines("", &finding.cause);
    finding.steps.iter().for_each(|step| lines("-> ", step));
    text
}

/// All that was looked at on one host: the check's name and what was found.
fn checks(facts: &Facts) -> Vec<(String, String)> {
    let (system, cpu, rdma) = (&facts.system, &facts.cpu, &facts.rdma);
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |check: &str, parts: Vec<String>| {
        let found = parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join(", ");
        if !found.is_empty() {
            rows.push((check.to_string(), found));
        }
    };
    let build = if system.build.is_empty() { String::new() } else { format!(" ({})", system.build) };
    let os = format!("{} {}{build}", system.os, system.version);
    row(SYSTEM, vec![os.trim().to_string(), system.model.clone(), system.chip.clone()]);
    let cores = if cpu.cores > 0 { units::count(cpu.cores, "core") } else { String::new() };
    let governors = if cpu.governors.is_empty() {
        String::new()
    } else {
        format!("governor {}", cpu.governors.join(", "))
    };
    let load = cpu.load.map_or(String::new(), |l| format!("load {:.1}", f64::from(l) / 100.0));
    row(CORES, vec![cores, governors, load]);
    let available =
        facts.memory.available.map_or(String::new(), |b| format!("{} available", units::bytes(b.into())));
    let total = facts.memory.total.map_or(String::new(), |b| format!("{} in all", units::bytes(b.into())));
    row(MEMORY, vec![available, total]);
    let clock = facts.clock_ahead_ms.map_or(String::new(), |ms| format!("{ms} ms ahead of the first host's"));
    row(CLOCK, vec![clock]);
    row(NICS, facts.nics.iter().filter(|n| n.up).map(nic).collect());
    row(LIBRARY, vec![answer(&rdma.library, Clone::clone)]);
    row(SWITCH, vec![answer(&rdma.enabled, |on| if *on { "enabled" } else { "disabled" }.into())]);
    row(PORTS, vec![ports(facts)]);
    row(BRIDGE, vec![rdma.bridge.join(", ")]);
    row(MANAGERS, vec![rdma.managers.join(", ")]);
    let names = |list: &Vec<Device>| match list.as_slice() {
        [] => "none".to_string(),
        list => list.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", "),
    };
    row(DEVICES, vec![answer(&rdma.devices, names)]);
    for device in rdma.devices.get().into_iter().flatten() {
        row(&device.name, vec![about(device)]);
    }
    for link in &rdma.links {
        row(&link_check(link), way(link));
    }
    rows
}

fn nic(nic: &Nic) -> String {
    let mtu = nic.mtu.map_or(String::new(), |mtu| format!(" MTU {mtu}"));
    let speed = nic.mbits.map_or(String::new(), |mbits| format!(" {mbits} Mbit/s"));
    let wifi = if nic.kind == Kind::Wifi { " Wi-Fi" } else { "" };
    format!("{}{wifi}{mtu}{speed}", nic.name)
}

fn answer<T>(answer: &Answer<T>, print: impl Fn(&T) -> String) -> String {
    match answer {
        Answer::Unasked => String::new(),
        Answer::Is(value) => print(value),
        Answer::Refused(words) => words.clone(),
        Answer::Hung(seconds) => format!("no answer within {seconds} s"),
        Answer::Died(signal) => format!("ended by signal {signal}"),
    }
}

fn ports(facts: &Facts) -> String {
    let generation = facts.rdma.thunderbolt.map_or(String::new(), |n| format!("Thunderbolt {n}"));
    let cabled = facts.rdma.ports.iter().filter(|p| p.connected_to.is_some()).count();
    match facts.rdma.ports.len() {
        0 => generation,
        all => format!("{generation}, {cabled} of {all} cabled").trim_start_matches(", ").to_string(),
    }
}

fn about(device: &Device) -> String {
    let state = match device.active {
        Some(true) => "active",
        Some(false) => "down",
        None => "state not told",
    };
    let gid = match device.ipv4() {
        Some((index, _)) => format!(", IPv4 address is GID {index}"),
        None if device.gids.is_empty() => String::new(),
        None => ", no IPv4 address (GID)".into(),
    };
    let limits = device.limits.map_or(String::new(), |l| {
        format!(", {} queue pairs, {} domains, {} memory regions", l.queue_pairs, l.domains, l.regions)
    });
    let transport =
        if device.transport.is_empty() { String::new() } else { format!("{}, ", device.transport) };
    let probe = device.probe.as_ref().map_or(String::new(), tried);
    format!("{transport}{state}{gid}{limits}{probe}")
}

fn tried(probe: &Probe) -> String {
    let deepest = probe.granted.iter().map(|g| g.send.min(g.receive)).max().unwrap_or(0);
    let kind = match (probe.reliable, probe.unreliable) {
        (true, true) => "RC and UC",
        (true, false) => "RC",
        (false, _) => "UC",
    };
    let when = if probe.remembered { " (tried before; --fresh tries anew)" } else { "" };
    format!(", {kind}, {deepest} deep, {} registered{when}", units::bytes(probe.registered.into()))
}

fn way(link: &Link) -> Vec<String> {
    let route = link.route.as_ref().map_or(String::new(), |route| format!(" by {route}"));
    let tcp = match link.tcp {
        Some(0) => ", TCP connected",
        Some(_) => ", no TCP",
        None => "",
    };
    let address = if link.address.is_empty() { &link.peer } else { &link.address };
    let far = if link.far.is_empty() { String::new() } else { format!("{} at ", link.far) };
    let mut parts = vec![format!("{far}{address}{route}{tcp}")];
    if let Some(t) = &link.together {
        parts.push(format!("{} messages of {} under way", t.window, units::bytes(t.slot.into())));
        parts.push(format!("{:.1} us there and back", t.round_trip_us));
        parts.push(format!("{} to here, {} while sending", rate(t.rate), rate(t.rate_both_ways)));
        let writes = match t.writes {
            Writes::NotAsked => "sends only",
            Writes::No => "writes are none",
            Writes::Reliable => "writes (RC)",
            Writes::Unreliable => "writes (UC)",
        };
        let when = if t.remembered { " (tried before; --fresh tries anew)" } else { "" };
        parts.push(format!("{writes}{when}"));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_in_order_is_nothing_to_do() {
        let facts = Facts { host: "a".into(), fulmen: "0.1.0".into(), ..Facts::default() };
        let text = text(&[facts], None, &[]);
        assert!(text.contains("a   fulmen 0.1.0") && text.ends_with("Nothing to do.\n"), "{text}");
    }

    #[test]
    fn failures_come_first_with_cause_and_steps() {
        let facts = Facts {
            host: "a".into(),
            cpu: super::super::facts::Cpu { cores: 2, ..Default::default() },
            ..Facts::default()
        };
        let on_a = |mut f: Finding| {
            f.host = "a".into();
            f
        };
        let findings = [
            on_a(Finding::warning("slow", CORES, "it is slow").because("old").then("`buy new`")),
            on_a(
                Finding::failure("broken", "rdma_en9", "it is broken")
                    .because("a hammer")
                    .then("glue")
                    .then("wait"),
            ),
        ];
        let text = text(&[facts], None, &findings);
        assert!(text.contains("cores     warning  2 cores"), "{text}");
        assert!(text.contains("rdma_en9  FAILED   it is broken [broken]"), "{text}");
        let (broken, slow) =
            (text.find("  1. rdma_en9 on a").unwrap(), text.find("  2. cores on a").unwrap());
        assert!(broken < slow);
        assert!(text.contains("     a hammer\n     -> glue\n     -> wait\n"), "{text}");
    }
}
