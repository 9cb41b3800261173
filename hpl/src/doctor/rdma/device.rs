//! One device: its port, its addresses, and each step of the way to a queue pair.

use fulmen::fabric::verbs::{Step as At, Trouble};

use super::super::facts::{Act, Device, Facts, Outcome, Step};
use super::super::finding::Finding;
use super::{SIGSEGV, name, unknown};
use crate::units;

/// From so many registrations on, a refusal means that there are no more; before, this number does.
const MANY_REGIONS: u32 = 90;
const NO_MEMORY: i32 = libc::ENOMEM;

pub(super) fn judge(facts: &Facts, device: &Device) -> Vec<Finding> {
    let subject = device.name.clone();
    if device.active == Some(false) {
        // What else fails on a port that is down fails because of that.
        return vec![port_down(facts, &subject)];
    }
    let mut found: Vec<Finding> =
        device.steps.iter().filter_map(|step| failed(facts, device, &subject, step)).collect();
    let is_thunderbolt = facts.system.is_macos() || device.transport == "Thunderbolt";
    if found.is_empty() && is_thunderbolt && device.active == Some(true) && device.ipv4().is_none() {
        found.push(no_address(facts, device, &subject, "the port is active and has no IPv4 address (GID)"));
    }
    found.extend(little_memory(facts, device, &subject));
    found
}

/// Fulmen registers memory in pieces of many megabytes: one that is refused ends the job.
fn little_memory(facts: &Facts, device: &Device, subject: &str) -> Option<Finding> {
    let probe = device.probe.as_ref().filter(|probe| probe.refused > 0)?;
    let seen = format!(
        "{} of memory were registered; {} in one piece were refused",
        units::bytes(probe.registered.into()),
        units::bytes(probe.refused.into())
    );
    let finding = Finding::failure("locked-memory", subject, seen);
    Some(if facts.system.is_macos() {
        finding
            .because(
                "the driver of this build takes small pieces only, or other programs hold what it can map",
            )
            .then("end other programs that use RDMA; when it stays, restart the machine")
            .then("please report it with the build: `sw_vers`; until then `--fabric tcp`")
    } else {
        finding
            .because("a program of this user may lock too little memory (`ulimit -l`)")
            .then(UNLIMITED)
            .then("until then `--fabric tcp`")
    })
}

fn port_down(facts: &Facts, subject: &str) -> Finding {
    let finding = Finding::failure("port-down", subject, "the port is down (PORT_DOWN)");
    if !facts.system.is_macos() {
        return finding
            .because("no cable, or the other end is off")
            .then("reseat the cable; `rdma link show` and `ip link` tell the state");
    }
    let finding = finding
        .because("no cable, a cable that is not Thunderbolt 5, a peer without RDMA, or a machine asleep")
        .then("reseat the cable, or take another that is marked Thunderbolt 5 (80 or 120 Gb/s)")
        .then("on the peer: `rdma_ctl status` must say enabled");
    let finding = match facts.system.model.as_str() {
        "" | "Mac15,14" | "Mac16,9" => {
            finding.then("of a Mac Studio use another port than the one beside Ethernet: it has no RDMA")
        }
        _ => finding,
    };
    match facts.cpu.may_sleep {
        Some(false) => finding,
        _ => finding.then("keep both awake: `sudo pmset -a sleep 0`"),
    }
}

/// A fixed address for the device's interface, as a command.
fn fixed_address(device: &Device) -> String {
    let interface = interface(device);
    format!(
        "`sudo ifconfig {interface} inet 10.10.1.1 netmask 255.255.255.252` here, 10.10.1.2 on the peer; another /30 for each cable"
    )
}

pub(super) fn interface(device: &Device) -> &str {
    let paired = device.name.strip_prefix("rdma_").unwrap_or(&device.name);
    device.interface.as_ref().map_or(paired, |i| i.name.as_str())
}

fn no_address(facts: &Facts, device: &Device, subject: &str, seen: &str) -> Finding {
    let soon = facts.system.uptime.is_some_and(|s| s < 600);
    let self_assigned = device.interface.as_ref().is_some_and(|i| i.is_self_assigned());
    if soon || self_assigned {
        return Finding::failure("address-late", subject, seen)
            .because("the system gives itself an address late after a start or a new cable, and changes it when the link is renewed")
            .then(format!("wait for some minutes; `ifconfig {}` shows when it is there", interface(device)))
            .then(format!("or give it a fixed one: {}", fixed_address(device)));
    }
    Finding::failure("address-kind", subject, seen)
        .because("an address of the port needs an IPv4 address on this very interface, not on bridge0; both ends need the same kind")
        .then("`sudo ifconfig bridge0 down`")
        .then(fixed_address(device))
}

/// What a step that did not go well stands for. Numbers are known to [`Trouble`] alone; here is what a person does who has
/// this machine's facts in view.
pub(super) fn failed(facts: &Facts, device: &Device, subject: &str, step: &Step) -> Option<Finding> {
    use Outcome::*;
    if let (Act::Register(_), Died(SIGSEGV)) = (step.act, &step.outcome) {
        return Some(
            Finding::failure("null-domain", subject, "registering memory ended by a memory fault (SIGSEGV)")
                .because("a protection domain was refused before, and the driver does not check for that")
                .then("see to the port first (`ibv_devinfo -v`): it has to be PORT_ACTIVE")
                .then(format!("with an active port the domains are used up: {RESTART}")),
        );
    }
    let posts = matches!(
        step.act,
        Act::PostReceive | Act::PostSend | Act::WarmUp | Act::Several | Act::RoundTrip | Act::Stream
    );
    if posts && step.outcome == Died(SIGSEGV) {
        return Some(
            Finding::failure("unplugged", subject, "posting ended by a memory fault (SIGSEGV)")
                .because(
                    "the cable was pulled, or the driver lost its doorbell: nothing that a program can catch",
                )
                .then("reseat the cable, start the job again")
                .then("keep the crash report: `ls ~/Library/Logs/DiagnosticReports`"),
        );
    }
    let number = match step.outcome {
        Errno(number) | Status(number) => number,
        Null => 0,
        _ => return unknown(facts, subject, step),
    };
    match (Trouble::of(at(step.act), number), step.act) {
        (Some(Trouble::RegionsExhausted), Act::Register(n)) if n < MANY_REGIONS && number != NO_MEMORY => {
            unknown(facts, subject, step)
        }
        (Some(trouble), act) => {
            met(facts, device, subject, trouble, (act, number)).or_else(|| unknown(facts, subject, step))
        }
        (None, _) => unknown(facts, subject, step),
    }
}

const RESTART: &str = "restart the machine";
const UNLIMITED: &str = "for this shell, as root: `ulimit -l unlimited`; for good: `* - memlock unlimited` in \
                         /etc/security/limits.conf, then log in anew";

/// The library's name of a step.
fn at(act: Act) -> At {
    match act {
        Act::Open => At::Open,
        Act::QueryPort => At::Port,
        Act::AllocDomain => At::AllocPd,
        Act::Register(_) => At::Register,
        Act::CreateQueue => At::CreateCq,
        Act::CreateUc => At::CreateQp,
        Act::CreateOther => At::CreateRc,
        Act::Init => At::Init,
        Act::ReadyToReceive => At::ReadyToReceive,
        Act::ReadyToSend => At::ReadyToSend,
        Act::PostReceive => At::PostReceive,
        Act::PostSend => At::PostSend,
        Act::Complete | Act::Compare | Act::Write | Act::Gone => At::Completion,
        Act::WarmUp => At::WarmUp,
        Act::Several => At::Several,
        Act::RoundTrip => At::RoundTrip,
        Act::Stream => At::Stream,
    }
}

/// A trouble that a device has met in an act, and its number.
fn met(
    facts: &Facts,
    device: &Device,
    subject: &str,
    trouble: Trouble,
    (act, number): (Act, i32),
) -> Option<Finding> {
    let refused = format!("{} was refused ({number})", name(act));
    let failure = |id, seen: &str| Finding::failure(id, subject, seen).because(trouble.cause());
    Some(match trouble {
        Trouble::PortDown => port_down(facts, subject),
        Trouble::DomainsExhausted => failure("no-domain", "no protection domain on an active port")
            .because(format!(
                "the device's {} are used up: each program that was killed, or failed while it started, keeps one until a restart",
                device.limits.map_or("domains".into(), |l| format!("{} domains", l.domains))
            ))
            .then("end other programs that use RDMA, in order (no `kill -9`)")
            .then(RESTART),
        Trouble::RegionsExhausted => {
            let n = if let Act::Register(n) = act { n } else { 0 };
            let finding = failure("regions-exhausted", &format!("registration {n} of memory was refused"));
            if !facts.system.is_macos() {
                return Some(finding.then(UNLIMITED).then("end other programs that use RDMA"));
            }
            finding
                .then("use fewer and larger pieces: fewer ranks on this host, or the default segment size")
                .then("end other programs that use RDMA")
        }
        Trouble::ReliableOnly => failure("no-uc", &format!("a queue pair of kind UC was refused ({number})"))
            .then("where both ends have reliable connections (RC), Fulmen writes over these; else `--fabric tcp`"),
        Trouble::UnreliableOnly => failure("only-uc", &format!("a queue pair of kind RC or UD was refused ({number})"))
            .then("leave the mode to Fulmen: it takes `posted` (UC, send into posted receives)"),
        Trouble::AddressKind => {
            let seen = format!("{} was refused as invalid ({number})", name(act));
            let found = no_address(facts, device, subject, &seen);
            match device.ipv4() {
                Some((index, _)) if !device.interface.as_ref().is_some_and(|i| i.is_self_assigned()) => found.then(
                    format!("the IPv4 address is number {index} of the table: other programs must use that one"),
                ),
                _ => found,
            }
        }
        Trouble::PeerUnreachable => failure("peer-unreachable", &format!("the peer did not answer: {refused}"))
            .then(format!("`ping6 -c 3 ff02::1%{}` wakes the neighbour; `ndp -an` and `arp -an` must show it there", interface(device)))
            .then("compare the device matrix with the cables: `hpl-run doctor --matrix FILE`"),
        Trouble::QueuesExhausted => failure("queues-leaked", &refused)
            .then("do not try again: each attempt costs one more")
            .then(RESTART),
        Trouble::StaleQueue => failure("stale-queue", &refused)
            .then("try once more: the queue pair is made anew")
            .then(format!("when it stays: {RESTART}")),
        Trouble::MappingsDrained => failure("mappings-drained", &refused)
            .then("register less: a smaller N, or more hosts")
            .then(RESTART),
        Trouble::QueueFull => {
            failure("frame-budget", "the device took fewer frames than it had promised")
                .because("queues are counted in frames of 4 KiB, and some builds hold fewer than they say")
                .then("Fulmen lowers its window by itself; for other programs halve the depth")
                .then("tell the build with a report: `sw_vers`")
        }
        Trouble::FrameMismatch => failure("frame-mismatch", "a receive ended with a length error (LOC_LEN_ERR)")
            .then("the same Fulmen and the same macOS build on both ends: `sw_vers`")
            .then("then at most two large messages under way, or messages of 4 KiB"),
        _ => return None,
    })
}
