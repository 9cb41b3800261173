//! Before there is a device: library, switch, hardware, and what else works on the interfaces.

use super::super::facts::{Answer, Facts};
use super::super::finding::{BRIDGE, DEVICES, Finding, LIBRARY, MANAGERS};
use super::wedged;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(library(facts));
    found.extend(devices(facts));
    found.extend(untried(facts));
    found.extend(bridge(facts));
    found.extend(managers(facts));
    found
}

fn library(facts: &Facts) -> Option<Finding> {
    let system = &facts.system;
    match (&facts.rdma.library, &facts.rdma.named_library) {
        (Answer::Refused(words), Some(named)) => Some(
            Finding::failure("library-named", LIBRARY, format!("FULMEN_VERBS_LIB is {named}: {words}"))
                .because(
                    "the library that the environment names is the only one that is used, and there is none",
                )
                .then("`unset FULMEN_VERBS_LIB` for the system's library, or name the file of one"),
        ),
        (Answer::Refused(words), None) => Some(if !system.is_macos() {
            Finding::note("no-library", LIBRARY, format!("no verbs library: {words}"))
                .because("rdma-core is not installed; without an RDMA device it is not needed")
                .then("with a device: `apt install libibverbs1 ibverbs-providers`; otherwise TCP is used")
        } else if system.is_at_least(26, 2) == Some(false) {
            Finding::warning(
                "no-library",
                LIBRARY,
                format!("no librdma on macOS {}: {words}", system.version),
            )
            .because("RDMA over Thunderbolt came with macOS 26.2")
            .then("update macOS (`softwareupdate --list`); all Macs of a cluster to the same build")
            .then("until then TCP is used: `--fabric tcp`")
        } else {
            Finding::failure("no-library", LIBRARY, format!("no librdma: {words}"))
                .because("macOS 26.2 and later have it, so this system is damaged or not macOS")
                .then("update macOS (`softwareupdate --list`); until then `--fabric tcp`")
        }),
        (Answer::Hung(seconds), _) => Some(wedged(LIBRARY, "loading the verbs library", *seconds)),
        _ => None,
    }
}

fn devices(facts: &Facts) -> Option<Finding> {
    let rdma = &facts.rdma;
    let list = match &rdma.devices {
        Answer::Is(list) => list,
        Answer::Hung(seconds) => return Some(wedged(DEVICES, "listing RDMA devices", *seconds)),
        Answer::Died(signal) => {
            return Some(
                Finding::failure(
                    "driver-wedged",
                    DEVICES,
                    format!("listing RDMA devices ended by signal {signal}"),
                )
                .because("the driver is in disorder")
                .then("restart the machine; when that hangs, hold its button"),
            );
        }
        Answer::Refused(_) | Answer::Unasked => return None,
    };
    if !list.is_empty() || !facts.system.is_macos() {
        return None;
    }
    // On such hardware it is off by default, and turning it on helps nobody.
    if let Some(generation) = rdma.thunderbolt.filter(|generation| *generation < 5) {
        let switch = match rdma.enabled {
            Answer::Is(true) => "RDMA is enabled, and there is no device",
            Answer::Is(false) => "no device (rdma_ctl says disabled)",
            _ => "no device",
        };
        return Some(
            Finding::warning("thunderbolt-4", DEVICES, switch)
                .because(format!(
                    "the ports of this machine ({}) are Thunderbolt {generation}; RDMA needs Thunderbolt 5",
                    facts.system.model
                ))
                .then("the hardware cannot do it: a restart does not help")
                .then("use TCP over the same cable: `--fabric tcp`"),
        );
    }
    if rdma.enabled == Answer::Is(false) {
        let nvram = rdma.nvram.as_deref().map_or(String::new(), |v| format!(" (nvram rdma-enable: {v})"));
        return Some(
            Finding::failure("not-enabled", DEVICES, format!("no device; rdma_ctl says disabled{nvram}"))
                .because("RDMA over Thunderbolt is off until somebody at the machine turns it on")
                .then("shut down, hold the power button until the options appear, start Recovery")
                .then("in its Terminal: `rdma_ctl enable`, then restart")
                .then("newer systems have a switch in Settings instead: Enable RDMA over Thunderbolt; restart as well")
                .then("neither can be done over ssh; do it on every Mac of the cluster"),
        );
    }
    Some(
        Finding::failure("no-device", DEVICES, "no device, though RDMA is not known to be off")
            .because("no Thunderbolt 5 port, or a driver that did not start")
            .then("`system_profiler SPThunderboltDataType` tells the ports' speed: 80 Gb/s or more is Thunderbolt 5")
            .then("with such a port restart the machine; without one use `--fabric tcp`"),
    )
}

fn untried(facts: &Facts) -> Option<Finding> {
    let words = facts.rdma.untried.as_ref()?;
    Some(
        Finding::warning("devices-not-tried", DEVICES, format!("not all devices were tried: {words}"))
            .because("what they grant, and whether their driver answers, is not known; nor is any cable of theirs tried")
            .then("see to that, then run this again; where a file cannot be written: `export TMPDIR=FOLDER`"),
    )
}

/// Two cables in one bridge are a loop as soon as the machines form a ring or a mesh.
fn bridge(facts: &Facts) -> Option<Finding> {
    let is_rdma = |member: &&String| {
        facts
            .rdma
            .devices
            .get()
            .into_iter()
            .flatten()
            .any(|d| d.name.strip_prefix("rdma_") == Some(member.as_str()))
    };
    let cables: Vec<_> = facts.rdma.bridge.iter().filter(is_rdma).cloned().collect();
    (cables.len() >= 2).then(|| {
        Finding::failure("bridge-loop", BRIDGE, format!("bridge0 is up and joins {}", cables.join(", ")))
            .because("in a ring or mesh of Macs packets go round for ever: a storm, all cores busy")
            .then("`sudo ifconfig bridge0 down` on every Mac (again after each restart)")
            .then("for good: Settings, Network, Manage Virtual Interfaces, remove the Thunderbolt Bridge")
    })
}

fn managers(facts: &Facts) -> Option<Finding> {
    let managers = &facts.rdma.managers;
    (!managers.is_empty()).then(|| {
        Finding::warning("other-manager", MANAGERS, format!("at work here: {}", managers.join(", ")))
            .because("it sets the addresses of the Thunderbolt interfaces too (they go back to DHCP), or holds devices")
            .then(format!("stop it while a job runs (`ps ax | grep -i {}`)", managers[0]))
            .then("then set the addresses again, one fixed /30 a cable")
    })
}
