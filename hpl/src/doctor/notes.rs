//! What a process that tries devices tells of its steps, as facts.

use fulmen::fabric::verbs::Step as At;
use fulmen::fabric::verbs::probe::{Note, Outcome as How};

use super::facts::{Act, Outcome, Wrong};

/// What was tried; `None` for what is no step with a device.
pub fn act(note: &Note) -> Option<Act> {
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
        At::Completion | At::Poll => Act::Complete,
        At::WarmUp => Act::WarmUp,
        At::Several => Act::Several,
        At::RoundTrip => Act::RoundTrip,
        At::Stream => Act::Stream,
        At::Write => Act::Write,
        At::Gone => Act::Gone,
        At::Load | At::List | At::Address => return None,
    })
}

/// How it ended; `None` where that is the other end's affair.
pub fn told_of(note: &Note, how: How) -> Option<Outcome> {
    let is_status = matches!(note.step, At::Completion | At::Several | At::RoundTrip | At::Stream);
    Some(match how {
        How::Done => Outcome::Done,
        How::Refused(status) if is_status => Outcome::Status(status),
        How::Refused(number) => Outcome::Errno(number),
        How::Silent => Outcome::Silent,
        How::Zeros => Outcome::Wrong(Wrong::Zeros),
        How::Garbage => Outcome::Wrong(Wrong::Garbage),
        How::Left => return None,
    })
}
