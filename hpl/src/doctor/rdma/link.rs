//! One peer: whether it is reached, over which cable, and whether what it sends arrives.

use fulmen::fabric::verbs::probe::LARGEST;

use super::super::facts::{Act, Device, Facts, Link, Outcome, Step, Together, Writes, Wrong};
use super::super::finding::{Finding, Weight, link_check};
use super::device;
use crate::units;

/// Bytes of the unit that Apple's devices count in.
const FRAME: u64 = 4096;

pub(super) fn judge(facts: &Facts, link: &Link) -> Vec<Finding> {
    let subject = link_check(link);
    let mut found = Vec::new();
    found.extend(control(link, &subject));
    found.extend(route(facts, link, &subject));
    // What ends the process comes last; what else fails on a port that goes down fails because of that.
    let is_crash = |s: &&Step| matches!(s.outcome, Outcome::Died(_));
    let is_port = |s: &&Step| s.act == Act::QueryPort && s.outcome != Outcome::Done;
    let mut steps = link.steps.iter();
    if let Some(step) = steps.clone().find(is_crash).or_else(|| steps.find(is_port)) {
        found.extend(failed(facts, link, &subject, step));
        return found;
    }
    let mut steps: Vec<Finding> = Vec::new();
    for step in &link.steps {
        // Attempts fail alike: each trouble once.
        steps.extend(failed(facts, link, &subject, step).filter(|f| steps.iter().all(|s| s.id != f.id)));
    }
    let rest =
        if steps.is_empty() { silence(link, &subject).or_else(|| without(link, &subject)) } else { None };
    if link.together.is_some() {
        // It works, with less under way at once.
        let is_depth = |f: &&mut Finding| ["frame-budget", "frame-mismatch"].contains(&f.id);
        steps.iter_mut().filter(is_depth).for_each(|f| f.weight = Weight::Warning);
    }
    found.extend(steps);
    found.extend(rest);
    found.extend(together(facts, link, &subject));
    found
}

/// It ended, and no step tells why.
fn without(link: &Link, subject: &str) -> Option<Finding> {
    if link.together.is_some() || link.side_channel.is_some() {
        return None;
    }
    let words = link.words.as_ref()?.split_whitespace().collect::<Vec<_>>().join(" ");
    let finding = Finding::failure("pair-failed", subject, words);
    Some(finding.because("not known to this program").then("use TCP for now: `--fabric tcp`"))
}

/// What works, and not as it should.
fn together(facts: &Facts, link: &Link, subject: &str) -> Vec<Finding> {
    let Some(together) = &link.together else { return Vec::new() };
    let mut found = Vec::new();
    if link.remade > 0 {
        let seen = format!(
            "{} carried nothing, a new one did",
            units::count(link.remade as usize, "new queue pair")
        );
        found.push(
            Finding::note("pair-made-anew", subject, seen)
                .because("a queue pair is sometimes dead from the start")
                .then("nothing: Fulmen tests each one, and makes a dead one anew"),
        );
    }
    found.extend(short(facts, together, subject));
    if together.writes == Writes::No {
        found.push(
            Finding::warning("write-is-send", subject, "a write did not write: it was taken for a send, or lost")
                .because("the device accepts writes into a peer's memory and does something else")
                .then("Fulmen finds that out at connect and sends into posted receives; nothing is to be done for it")
                .then("other programs must not write over this device"),
        );
    }
    found
}

/// Long messages do not pass.
fn short(facts: &Facts, together: &Together, subject: &str) -> Option<Finding> {
    if together.slot >= LARGEST as u64 {
        return None;
    }
    let id = if together.slot == FRAME { "frames-only" } else { "short-messages" };
    let seen = format!("messages of more than {} do not pass", units::bytes(together.slot.into()));
    let finding = Finding::warning(id, subject, seen);
    let cable = "another cable, another port; then run this again: do long ones pass there?";
    let finding = if let Some(before) = together.before {
        let cause = format!(
            "those of {} did in an earlier run, on the same builds: the cable or a connector loses them",
            units::bytes(before.into())
        );
        finding.because(cause).then(cable)
    } else if facts.system.is_macos() && facts.system.is_at_least(26, 3) != Some(true) {
        finding
            .because("the driver of this build delivers one frame at a time (macOS before 26.3), or the cable loses long ones")
            .then("update both machines to the same build, macOS 26.3 or later: `sw_vers`")
    } else if facts.system.is_macos() {
        finding
            .because("the cable or a connector loses long ones, or the driver of one of the builds does")
            .then(cable)
            .then("where it stays on each cable: the same build on both ends, the newest: `sw_vers`")
    } else {
        finding
            .because("the cable, a connector or a switch loses packets, of which long messages have many")
            .then(cable)
            .then("`rdma statistic show` and `ethtool -S` count what is lost; a switch has to hold packets back (PFC), not drop them")
    };
    Some(finding.then("until then Fulmen sends short ones, more slowly"))
}

/// The TCP connection beside it.
fn control(link: &Link, subject: &str) -> Option<Finding> {
    let address = if link.address.is_empty() { &link.peer } else { &link.address };
    if let Some(number) = link.side_channel {
        return Some(
            Finding::warning(
                "peer-failed-first",
                subject,
                match number {
                    0 => "the other end gave up first".into(),
                    _ => format!("the side channel ended (recv: {number})"),
                },
            )
            .because("the peer ended first, and its number here means nothing")
            .then(format!("see the row of the other end, on {}: it tells why", link.peer)),
        );
    }
    Some(match link.tcp? {
        0 => return None,
        65 | 113 if link.others_reach == Some(true) => Finding::failure(
            "local-network",
            subject,
            format!("no route to {address} (65), but other programs reach it"),
        )
        .because(
            "macOS asks for leave before a program may talk to the local network; over ssh nobody is asked",
        )
        .then("Settings, Privacy & Security, Local Network: switch this program (or its terminal) on")
        .then("a program that is moved or built anew is asked about again; sign it: `codesign -s - hpl-run`"),
        65 | 113 => Finding::failure("unreachable", subject, format!("no route to {address} (65)"))
            .because("no interface leads there")
            .then(format!("`ping -c 3 {address}`, and see that the cable's interface has an address")),
        49 | 99 => {
            Finding::failure("address-not-yet", subject, "the link's own address is not there yet (49)")
                .because("after a start or a new cable the interface gets its address late")
                .then("wait for a minute and try again, or set a fixed address, one /30 a cable")
        }
        61 | 111 => {
            Finding::failure("refused", subject, format!("{address} is reached, but nobody listens (61)"))
                .because("the peer's rank has not started, or has ended")
                .then("start it, or look at its message")
        }
        number => {
            Finding::failure("unreachable", subject, format!("{address} was not reached (error {number})"))
                .because("the network said so")
                .then(format!("`ping -c 3 {address}`"))
        }
    })
}

/// Where the system sends what goes to the peer's address.
fn route(facts: &Facts, link: &Link, subject: &str) -> Option<Finding> {
    // To its own addresses a host takes the short way.
    if link.peer == facts.host {
        return None;
    }
    let wanted = link.device.strip_prefix("rdma_")?;
    let route = link.route.as_deref().filter(|route| *route != wanted)?;
    Some(
        Finding::failure(
            "wrong-route",
            subject,
            format!("traffic to {} goes over {route}, not over {wanted}", link.address),
        )
        .because(
            "another network (LAN, VPN, bridge) has the same addresses or a better route: it works, slowly",
        )
        .then(format!("`sudo route change {} -interface {wanted}`", link.address))
        .then("and addresses for the cables from a network that nothing else uses"),
    )
}

fn failed(facts: &Facts, link: &Link, subject: &str, step: &Step) -> Option<Finding> {
    if step.outcome == Outcome::Silent {
        return lost(subject, step.act);
    }
    let Outcome::Wrong(wrong) = &step.outcome else {
        let known = facts.rdma.devices.get().into_iter().flatten().find(|d| d.name == link.device);
        let unknown = Device { name: link.device.clone(), ..Device::default() };
        return device::failed(facts, known.unwrap_or(&unknown), subject, step);
    };
    Some(match wrong {
        Wrong::Zeros => Finding::failure(
            "across-4-gib",
            subject,
            "a receive succeeded and its buffer is still zero",
        )
        .because("the registered memory crosses a multiple of 4 GiB: the driver writes 4 GiB beside it")
        .then(
            "Fulmen's memory never does; other programs must register pieces that end at multiples of 1 GiB",
        ),
        Wrong::Garbage => Finding::failure(
            "corrupt",
            subject,
            "bytes have arrived that nobody sent, without an error",
        )
        .because("a status that the other program never read, or a fault of driver, cable or memory")
        .then(
            "leave Fulmen's checksums on (they are by default), and never compute on this link without them",
        )
        .then("try another cable and port; then the same macOS build on both ends: `sw_vers`"),
    })
}

/// Messages that should have come.
fn lost(subject: &str, act: Act) -> Option<Finding> {
    match act {
        Act::Several => Some(
            Finding::failure(
                "frame-budget",
                subject,
                "with several messages under way they stopped coming, without an error",
            )
            .because("the device took more frames than it holds (queues are counted in frames of 4 KiB), or lost one")
            .then("Fulmen lowers its window by itself; for other programs halve the depth")
            .then("tell the build with a report: `sw_vers`"),
        ),
        Act::RoundTrip | Act::Stream | Act::Complete => Some(
            Finding::failure("lost-message", subject, "a message vanished, without an error")
                .because("these connections repeat nothing: a bad cable or connector, or a fault of the driver")
                .then("another cable, another port; then measure again")
                .then("Fulmen notices a lost message by its number and ends the job; over TCP nothing is lost: `--fabric tcp`"),
        ),
        _ => None,
    }
}

/// Nothing failed, and yet nothing comes.
fn silence(link: &Link, subject: &str) -> Option<Finding> {
    if let Some(seconds) = link.silent {
        return Some(
            Finding::failure(
                "peer-silent",
                subject,
                format!("no sign of life for {seconds} s, and no error from the device"),
            )
            .because("the peer's process has ended or was stopped: these devices do not tell of that")
            .then(format!("`ssh {} ps ax` shows whether it runs; start the job again", link.peer))
            .then("Fulmen watches peers over TCP and gives up after `--silence` seconds"),
        );
    }
    let (here, there) = link.delivered?;
    let what = match (here, there) {
        (0, 0) => "nothing came through in either direction",
        (0, _) => "nothing came from the peer",
        (_, 0) => "nothing came to the peer",
        _ => return None,
    };
    Some(
        Finding::failure("dead-pair", subject, format!("a new connection: {what}"))
            .because("a queue pair is sometimes dead from the start")
            .then("Fulmen warms each pair up and makes a dead one anew: start again")
            .then("when it stays: reseat the cable, then restart both machines"),
    )
}
