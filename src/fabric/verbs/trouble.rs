//! What goes wrong with RDMA devices, by symptom, and what a person can do about it.
//!
//! The rows come from reports of the field, most of them about Macs joined by Thunderbolt cables: there a
//! driver's number (`errno 96`) tells nothing, and the remedy is often a cable, a setting or a reboot.

use serde::{Deserialize, Serialize};

use super::ffi::abi::{WC_LOC_LEN_ERR, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR};

/// What was being done when it went wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Loading the library.
    Load,
    /// Listing devices.
    List,
    /// Opening a device.
    Open,
    /// Asking for the port's state.
    Port,
    /// Looking for an address of the port.
    Address,
    /// Allocating a protection domain.
    AllocPd,
    /// Registering memory.
    Register,
    /// Creating a completion queue.
    CreateCq,
    /// Creating an unreliable queue pair.
    CreateQp,
    /// Creating a reliable queue pair.
    CreateRc,
    /// Making a queue pair ready to be connected.
    Init,
    /// Connecting: ready to receive.
    ReadyToReceive,
    /// Connecting: ready to send.
    ReadyToSend,
    /// Proving that both directions carry data.
    WarmUp,
    /// Posting a receive.
    PostReceive,
    /// Posting a send.
    PostSend,
    /// Polling for completions.
    Poll,
    /// A completion, whose status is the number.
    Completion,
    /// Moving several messages at once; a number is a completion's status, as in the two that follow.
    Several,
    /// Moving a message there and back.
    RoundTrip,
    /// Moving a stream of messages.
    Stream,
    /// Testing whether a write writes.
    Write,
    /// Waiting for a peer that has gone.
    Gone,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Step::Load => "loading the verbs library",
            Step::List => "listing RDMA devices",
            Step::Open => "opening the device",
            Step::Port => "asking for the port's state",
            Step::Address => "looking for the port's address",
            Step::AllocPd => "allocating a protection domain",
            Step::Register => "registering memory",
            Step::CreateCq => "creating a completion queue",
            Step::CreateQp => "creating a queue pair",
            Step::CreateRc => "creating a reliable queue pair",
            Step::Init => "initialising a queue pair",
            Step::ReadyToReceive => "connecting a queue pair (ready to receive)",
            Step::ReadyToSend => "connecting a queue pair (ready to send)",
            Step::WarmUp => "testing a new connection in both directions",
            Step::PostReceive => "posting a receive",
            Step::PostSend => "posting a send",
            Step::Poll => "polling for completions",
            Step::Completion => "moving data",
            Step::Several => "moving several messages at once",
            Step::RoundTrip => "moving a message there and back",
            Step::Stream => "moving a stream of messages",
            Step::Write => "testing whether a write writes",
            Step::Gone => "waiting for a peer that has gone",
        })
    }
}

macro_rules! troubles {
    ($($(#[$doc:meta])* $name:ident: $cause:literal => $remedy:literal;)*) => {
        /// A known trouble.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Trouble {
            $($(#[$doc])* $name,)*
        }

        impl Trouble {
            /// All of them.
            pub const ALL: &[Trouble] = &[$(Trouble::$name,)*];

            /// What causes it.
            pub fn cause(self) -> &'static str {
                match self {
                    $(Trouble::$name => $cause,)*
                }
            }

            /// What to do about it.
            pub fn remedy(self) -> &'static str {
                match self {
                    $(Trouble::$name => $remedy,)*
                }
            }
        }
    };
}

troubles! {
    /// The library cannot be loaded.
    NoLibrary: "this system has no verbs library (macOS before 26.2, or Linux without rdma-core)"
        => "upgrade macOS to 26.2 or later, or install rdma-core (Debian: libibverbs1, ibverbs-providers); until then use --fabric tcp";
    /// There are no devices because RDMA is switched off.
    NotEnabled: "RDMA is not enabled on this Mac"
        => "start into Recovery, run `rdma_ctl enable` in its Terminal and restart (newer systems: the switch in Settings), then restart";
    /// There are no devices although RDMA is on.
    NoHardware: "RDMA is enabled but there is no device: this machine's ports are Thunderbolt 4 or older"
        => "this hardware cannot do it, restarting does not help: use --fabric tcp";
    /// The port is not active.
    PortDown: "the port is down: no cable, a cable that is not Thunderbolt 5, a peer without RDMA, the port beside Ethernet of a Mac Studio, or a machine asleep"
        => "reseat the cable or take a Thunderbolt 5 one, use another port, enable RDMA on the peer, switch off sleep";
    /// No protection domain on an active port.
    DomainsExhausted: "the device has no protection domain left: earlier programs were killed or failed while they started"
        => "end other programs that use RDMA; when it stays, restart this machine";
    /// Connecting is refused as invalid.
    AddressKind: "the port's address is not what the peer expects: no IPv4 on this very interface, a bridge over it, or mixed kinds of addresses"
        => "give the interface of the cable an IPv4 address on both ends (`ifconfig enN inet 10.0.0.1/30`), and take it out of bridge0";
    /// There is no usable address yet.
    NoAddress: "the port has no address yet: after a restart or a new cable the system assigns one late"
        => "wait a minute and try again, or give the interface a fixed IPv4 address (/30 for each cable)";
    /// Connecting times out.
    PeerUnreachable: "the peer's address cannot be reached over this cable: crossed cables, or a cold neighbour cache"
        => "check which port each cable joins (`hpl-run doctor`), then `ping` the peer's address of this cable once";
    /// Connecting fails: resources are gone.
    QueuesExhausted: "the device has no queues left: earlier programs were killed or failed while they started"
        => "do not try again: restart this machine";
    /// Connecting fails: a queue of before is still there.
    StaleQueue: "the system still holds a receive queue of an earlier connection"
        => "it was tried once more; restart this machine";
    /// Connecting fails: no mapping.
    MappingsDrained: "the system's pool for mapping memory to the device is used up since its start"
        => "use less memory for each rank, or restart this machine";
    /// The kind of connection is not offered.
    UnreliableOnly: "the device offers unreliable connections (UC) only"
        => "let Fulmen choose the mode (it takes posted receives over UC)";
    /// This kind of connection is not offered.
    ReliableOnly: "the device offers no unreliable connections (UC)"
        => "let Fulmen choose the mode (it writes over RC where both devices have that), or use --fabric tcp";
    /// Registering memory is refused.
    RegionsExhausted: "the device has no memory region left (about 100 on a Mac), or too little memory may be locked"
        => "use a smaller problem or more hosts; on Linux raise the limit of locked memory (`ulimit -l unlimited`)";
    /// Posting is refused.
    QueueFull: "the device took fewer frames than it had promised"
        => "the window was lowered as far as it goes; report the device and the system's build";
    /// A send is never completed, and the queue is full.
    Stuck: "the device does not complete a send that has arrived, and takes no more"
        => "run again; when it stays, restart this machine, or use --fabric tcp";
    /// A length error.
    FrameMismatch: "the device saw lengths that do not match, or too many messages of several frames under way"
        => "update both machines to the same system build and run again; when it stays, use --fabric tcp, and test the cable with `hpl-run doctor`";
    /// A direction carries nothing.
    DeadDirection: "the new connection carries nothing in one direction"
        => "it was made anew several times: reseat the cable, then restart both machines";
    /// The peer does not answer at the lowest level.
    Unanswered: "the peer's device does not answer"
        => "the cable or the host is gone, or the process ended: look at its log";
    /// The peer was not ready.
    ReceiverNotReady: "a message came before its receive was posted"
        => "this is a fault in the program; please report it";
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.cause())
    }
}

/// An error number by its name; Apple's numbers and this system's are both known, for an emulator speaks Apple's.
fn is(errno: i32, apple: i32, here: i32) -> bool {
    errno == apple || errno == here
}

impl Trouble {
    /// The trouble that a number stands for at a step, where it is known.
    pub fn of(step: Step, number: i32) -> Option<Trouble> {
        let invalid = is(number, 22, libc::EINVAL);
        let unsupported = is(number, 102, libc::EOPNOTSUPP);
        let full = is(number, 12, libc::ENOMEM) || is(number, 35, libc::EAGAIN);
        match step {
            Step::Load => Some(Trouble::NoLibrary),
            Step::Port => Some(Trouble::PortDown),
            Step::Address => Some(Trouble::NoAddress),
            Step::AllocPd => Some(Trouble::DomainsExhausted),
            Step::Register => Some(Trouble::RegionsExhausted),
            Step::CreateQp if unsupported => Some(Trouble::ReliableOnly),
            Step::CreateRc if unsupported => Some(Trouble::UnreliableOnly),
            Step::CreateQp | Step::CreateRc if full || is(number, 96, libc::ENODATA) => {
                Some(Trouble::QueuesExhausted)
            }
            Step::ReadyToReceive | Step::ReadyToSend | Step::Init => match number {
                _ if invalid => Some(Trouble::AddressKind),
                _ if unsupported => Some(Trouble::UnreliableOnly),
                _ if is(number, 60, libc::ETIMEDOUT) => Some(Trouble::PeerUnreachable),
                _ if is(number, 96, libc::ENODATA) => Some(Trouble::QueuesExhausted),
                _ if is(number, 16, libc::EBUSY) => Some(Trouble::StaleQueue),
                _ if is(number, 14, libc::EFAULT) => Some(Trouble::MappingsDrained),
                _ => None,
            },
            Step::WarmUp => Some(Trouble::DeadDirection),
            Step::PostReceive | Step::PostSend if full => Some(Trouble::QueueFull),
            Step::Completion | Step::Several | Step::RoundTrip | Step::Stream => match number {
                WC_LOC_LEN_ERR => Some(Trouble::FrameMismatch),
                WC_RETRY_EXC_ERR => Some(Trouble::Unanswered),
                WC_RNR_RETRY_EXC_ERR => Some(Trouble::ReceiverNotReady),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether a queue pair that met this while connecting is worth one more try.
    pub fn is_worth_another_try(self) -> bool {
        matches!(self, Trouble::StaleQueue | Trouble::DeadDirection | Trouble::PeerUnreachable)
    }
}

/// A device's refusal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// The device.
    pub device: String,
    /// What was asked of it.
    pub step: Step,
    /// The number it answered with: an errno, or a completion's status; positive.
    pub number: i32,
}

impl Refusal {
    /// What it is known to stand for.
    pub fn trouble(&self) -> Option<Trouble> {
        Trouble::of(self.step, self.number)
    }

    /// Whether a queue pair was refused because the device has none of its kind.
    pub fn is_no_such_kind(&self) -> bool {
        matches!(self.trouble(), Some(Trouble::UnreliableOnly | Trouble::ReliableOnly))
    }

    /// Whether it says that a queue is full for now.
    pub fn is_full(&self) -> bool {
        self.trouble() == Some(Trouble::QueueFull)
    }
}

impl Refusal {
    /// What was refused and, where it is known, why.
    pub fn what(&self) -> String {
        let Refusal { device, step, number } = self;
        let number = match step {
            // A port's state, or nothing: no error number.
            _ if *number == 0 => String::new(),
            Step::WarmUp | Step::Address | Step::Port => String::new(),
            Step::Completion | Step::Several | Step::RoundTrip | Step::Stream => {
                format!(" with status {number}")
            }
            _ => format!(" with error {number}"),
        };
        let cause = self.trouble().map_or(String::new(), |trouble| format!(": {trouble}"));
        format!("{device}: {step} failed{number}{cause}")
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        self.trouble().map_or("see `hpl-run doctor`, or use --fabric tcp", Trouble::remedy)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what())?;
        match self.trouble() {
            Some(trouble) => write!(f, "\n    {}", trouble.remedy()),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for crate::Error {
    fn from(refusal: Refusal) -> Self {
        crate::Error::Resources { what: refusal.what(), remedy: refusal.remedy().into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The failure table: symptom and what it means.
    #[test]
    fn numbers_of_the_field_are_known() {
        use Step::*;
        let rows = [
            (Load, 0, Trouble::NoLibrary),
            (Port, 1, Trouble::PortDown),
            (AllocPd, 0, Trouble::DomainsExhausted),
            (ReadyToReceive, 22, Trouble::AddressKind),
            (ReadyToReceive, 60, Trouble::PeerUnreachable),
            (ReadyToReceive, 96, Trouble::QueuesExhausted),
            (ReadyToReceive, 16, Trouble::StaleQueue),
            (ReadyToReceive, 14, Trouble::MappingsDrained),
            (CreateRc, 102, Trouble::UnreliableOnly),
            (CreateQp, 95, Trouble::ReliableOnly),
            (Register, 12, Trouble::RegionsExhausted),
            (PostReceive, 12, Trouble::QueueFull),
            (PostSend, 35, Trouble::QueueFull),
            (Completion, 1, Trouble::FrameMismatch),
            (Completion, 12, Trouble::Unanswered),
        ];
        for (step, number, trouble) in rows {
            assert_eq!(Trouble::of(step, number), Some(trouble), "{step} {number}");
        }
        assert_eq!(Trouble::of(PostSend, 22), None);
    }

    #[test]
    fn every_trouble_has_a_cause_and_a_remedy() {
        for trouble in Trouble::ALL {
            assert!(trouble.cause().len() > 20 && trouble.remedy().len() > 20, "{trouble:?}");
        }
        let refusal = Refusal { device: "rdma_en3".into(), step: Step::ReadyToReceive, number: 96 };
        let text = refusal.to_string();
        assert!(
            text.starts_with("rdma_en3: connecting a queue pair") && text.ends_with("restart this machine"),
            "{text}"
        );
    }

    #[test]
    fn what_is_no_error_number_is_not_told_as_one() {
        let what = |step, number| Refusal { device: "rdma_en5".into(), step, number }.what();
        assert!(
            what(Step::AllocPd, 0)
                .starts_with("rdma_en5: allocating a protection domain failed: the device has")
        );
        assert!(
            what(Step::Port, 1).starts_with("rdma_en5: asking for the port's state failed: the port is down")
        );
        assert!(
            what(Step::Completion, 1).contains("moving data failed with status 1: the device saw lengths")
        );
        assert_eq!(what(Step::PostSend, 22), "rdma_en5: posting a send failed with error 22");
    }
}
