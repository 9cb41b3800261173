//! One peer: whether it is reached, over which cable, and whether what it sends arrives.

use super::super::facts::{Act, Device, Facts, Link, Outcome, Step, Wrong};
use super::super::finding::{Finding, link_check};
use super::device;

pub(super) fn judge(facts: &Facts, link: &Link) -> Vec<Finding> {
    let subject = link_check(link);
    let mut found = Vec::new();
    found.extend(control(link, &subject));
    found.extend(route(link, &subject));
    let steps: Vec<_> = link.steps.iter().filter_map(|step| failed(facts, link, &subject, step)).collect();
    let silence = if steps.is_empty() { silence(link, &subject) } else { None };
    found.extend(steps);
    found.extend(silence);
    found
}

/// The TCP connection beside it.
fn control(link: &Link, subject: &str) -> Option<Finding> {
    let address = if link.address.is_empty() { &link.peer } else { &link.address };
    if let Some(number) = link.side_channel {
        return Some(
            Finding::failure(
                "peer-failed-first",
                subject,
                format!("the side channel ended (recv: {number})"),
            )
            .because("the peer ended first, and its number here means nothing")
            .then("look at the first rank that failed: its message tells why"),
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
fn route(link: &Link, subject: &str) -> Option<Finding> {
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
    let (Act::Compare, Outcome::Wrong(wrong)) = (step.act, &step.outcome) else {
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
