//! RDMA, from the library to the last byte: what each symptom stands for. Most rules come from reports about Macs on
//! Thunderbolt cables, where a driver's number tells nothing and the remedy is a cable, a setting or a restart.

mod device;
mod link;
mod setup;
mod speed;

use super::facts::{Act, Facts, Outcome, Step};
use super::finding::Finding;

pub use speed::judge as compare;

/// Signal of a fault in memory, the same number everywhere.
const SIGSEGV: i32 = 11;

/// All that is recognised in one host's facts.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut found = setup::judge(facts);
    for device in facts.rdma.devices.get().into_iter().flatten() {
        found.extend(device::judge(facts, device));
    }
    for link in &facts.rdma.links {
        found.extend(link::judge(facts, link));
    }
    found
}

/// The driver does not answer: the same whichever act it is.
fn wedged(subject: &str, what: &str, seconds: u64) -> Finding {
    Finding::failure("driver-wedged", subject, format!("{what} did not answer within {seconds} s"))
        .because("the driver is stuck; a process that waits in it (state U of `ps`) cannot be ended any more")
        .then("do not try `kill -9`: it makes things worse")
        .then("power the machine off by holding its button, and on again; a restart by the menu may hang too")
}

/// What an act is called.
fn name(act: Act) -> &'static str {
    match act {
        Act::Open => "opening the device",
        Act::QueryPort => "asking for the port's state",
        Act::AllocDomain => "allocating a protection domain",
        Act::Register(_) => "registering memory",
        Act::CreateQueue => "creating a completion queue",
        Act::CreateUc | Act::CreateOther => "creating a queue pair",
        Act::Init => "initialising a queue pair",
        Act::ReadyToReceive => "connecting (RTR)",
        Act::ReadyToSend => "connecting (RTS)",
        Act::PostReceive => "posting a receive",
        Act::PostSend => "posting a send",
        Act::Complete => "waiting for a completion",
        Act::Compare => "comparing what arrived",
        Act::WarmUp => "connecting and testing a new queue pair",
        Act::Several => "moving several messages at once",
        Act::RoundTrip => "moving a message there and back",
        Act::Stream => "moving a stream of messages",
        Act::Write => "testing whether a write writes",
        Act::Gone => "waiting for a peer that has gone",
    }
}

/// What no rule knows.
fn unknown(facts: &Facts, subject: &str, step: &Step) -> Option<Finding> {
    let how = match step.outcome {
        Outcome::Done => return None,
        Outcome::Errno(number) => format!("failed with error {number}"),
        Outcome::Null => "failed without saying why".into(),
        Outcome::Status(status) => format!("ended with status {status}"),
        Outcome::Hung(seconds) => return Some(wedged(subject, name(step.act), seconds)),
        Outcome::Died(signal) => format!("ended the process by signal {signal}"),
        Outcome::Wrong(_) => "brought something else".into(),
        Outcome::Silent => "brought nothing".into(),
    };
    let system = format!("{} {} ({})", facts.system.os, facts.system.version, facts.system.build);
    Some(
        Finding::failure("unknown-error", subject, format!("{} {how}", name(step.act)))
            .because("not known to this program")
            .then("use TCP for now: `--fabric tcp`")
            .then(format!(
                "please report it with the device and the system: {system} {}",
                facts.system.model
            )),
    )
}
