//! What was found on one host, with nothing judged: plain data, filled by [`super::gather`], read by the rules.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// What became of a question.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    /// Nobody asked.
    #[default]
    Unasked,
    /// The answer.
    Is(T),
    /// The system refused: its words.
    Refused(String),
    /// No answer within so many seconds; the process that asked was given up, never killed hard.
    Hung(u64),
    /// The process that asked was ended by this signal.
    Died(i32),
}

impl<T> Answer<T> {
    /// The answer, if there is one.
    pub fn get(&self) -> Option<&T> {
        match self {
            Answer::Is(value) => Some(value),
            _ => None,
        }
    }
}

/// Everything about one host.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// Its name.
    pub host: String,
    /// Operating system and hardware.
    pub system: System,
    /// This program's version.
    pub fulmen: String,
    /// How fast its cores may run.
    pub cpu: Cpu,
    /// Its memory.
    pub memory: Memory,
    /// Milliseconds that its clock is ahead of the first host's; `None`: not measured.
    pub clock_ahead_ms: Option<i64>,
    /// Its network interfaces, loopback left out.
    pub nics: Vec<Nic>,
    /// RDMA.
    pub rdma: Rdma,
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Nic {
    /// `en5`, `eth0`.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Whether there is something at its other end.
    pub up: bool,
    /// Bytes of its longest packet.
    pub mtu: Option<u32>,
    /// Millions of bits a second, as both ends have agreed.
    pub mbits: Option<u32>,
}

/// Kinds of network interfaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Not told, or none of the others.
    #[default]
    Other,
    /// A cable of Ethernet, or a virtual machine's.
    Ethernet,
    /// IP over a Thunderbolt cable.
    Thunderbolt,
    /// Wireless.
    Wifi,
    /// A VPN, or a network of containers or virtual machines.
    Tunnel,
}

/// Operating system and hardware.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct System {
    /// `macos`, `linux`.
    pub os: String,
    /// `26.2`; of Linux the kernel's release.
    pub version: String,
    /// `25C56`; of Linux the distribution.
    pub build: String,
    /// `Mac16,11`.
    pub model: String,
    /// `Apple M4 Pro`.
    pub chip: String,
    /// Seconds since the start.
    pub uptime: Option<u64>,
}

impl System {
    /// Whether it is a Mac.
    pub fn is_macos(&self) -> bool {
        self.os == "macos"
    }

    /// Whether its version is at least `major.minor`; `None` when that cannot be told.
    pub fn is_at_least(&self, major: u32, minor: u32) -> Option<bool> {
        let mut numbers = self.version.split(['.', '-']).map(str::parse::<u32>);
        let found = (numbers.next()?.ok()?, numbers.next().unwrap_or(Ok(0)).ok()?);
        Some(found >= (major, minor))
    }
}

/// How fast the cores may run.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// Cores that deserve a thread.
    pub cores: usize,
    /// Linux's frequency governors, each once.
    pub governors: Vec<String>,
    /// macOS's low-power mode.
    pub low_power: Option<bool>,
    /// Speed limit in percent that macOS has set for heat; 100 is none.
    pub speed_limit: Option<u32>,
    /// Whether the system may fall asleep while a job runs.
    pub may_sleep: Option<bool>,
    /// Load of the last minute, in percent of a core.
    pub load: Option<u32>,
    /// Other programs that take the cores, the busiest first; asked only where there is load.
    pub busy: Vec<Busy>,
}

/// A program at work.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Busy {
    /// Its name.
    pub name: String,
    /// Of a core; more than 100 is more than one.
    pub percent: u32,
}

/// Memory in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// That can be had without swapping or hitting a limit.
    pub available: Option<u64>,
    /// What bounds it.
    pub bound: String,
    /// All that is built in.
    pub total: Option<u64>,
}

/// The RDMA stack, its devices, and what was tried with peers.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Rdma {
    /// The verbs library: its file.
    pub library: Answer<String>,
    /// The one that FULMEN_VERBS_LIB names, if it does: no other is used then.
    pub named_library: Option<String>,
    /// What `rdma_ctl status` says: enabled or not.
    pub enabled: Answer<bool>,
    /// What `nvram rdma-enable` says.
    pub nvram: Option<String>,
    /// The newest Thunderbolt of this machine's ports: 3, 4, 5.
    pub thunderbolt: Option<u32>,
    /// Its Thunderbolt ports, and what hangs on them.
    pub ports: Vec<Port>,
    /// Members of `bridge0`, while it is up.
    pub bridge: Vec<String>,
    /// Programs at work that configure these interfaces too, or hold the devices.
    pub managers: Vec<String>,
    /// The devices.
    pub devices: Answer<Vec<Device>>,
    /// Why devices were not tried, where they could have been.
    pub untried: Option<String>,
    /// What was tried with peers, a link each.
    pub links: Vec<Link>,
}

/// A Thunderbolt port with a network interface.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Port {
    /// `en5`.
    pub interface: String,
    /// The port's own identifier.
    pub uuid: String,
    /// That of the port at the other end of the cable.
    pub connected_to: Option<String>,
}

/// One RDMA device. Each has one port.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// `rdma_en5`, `mlx5_0`.
    pub name: String,
    /// `Thunderbolt`, `InfiniBand`, `Ethernet`.
    pub transport: String,
    /// Whether the port is active; `None`: not told.
    pub active: Option<bool>,
    /// The table of addresses, by index, empty ones left out.
    pub gids: Vec<(u32, String)>,
    /// Queue pairs, protection domains and memory regions that it offers.
    pub limits: Option<Limits>,
    /// The network interface on the same cable.
    pub interface: Option<Interface>,
    /// What was tried, in order; the last may be unfinished.
    pub steps: Vec<Step>,
    /// What it was found to be and to grant, when all of that went well.
    pub probe: Option<Probe>,
}

/// What a device is found to be and to grant, by trying.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Probe {
    /// Bytes of memory registered in one piece, at most 128 MiB.
    pub registered: u64,
    /// Bytes of a larger piece that was refused; 0: none was.
    pub refused: u64,
    /// Depths that queue pairs were asked for and granted.
    pub granted: Vec<Granted>,
    /// Whether it has reliable connections (not asked of Thunderbolt devices).
    pub reliable: bool,
    /// Whether it has unreliable ones.
    pub unreliable: bool,
    /// It was found by an earlier run, on the same build of the system.
    pub remembered: bool,
}

/// What the two devices of a link do together.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Together {
    /// The largest message that passes clean, in bytes.
    pub slot: u64,
    /// The largest that passed in an earlier run on the same builds, where that was more.
    pub before: Option<u64>,
    /// So many of them may be under way at once.
    pub window: u64,
    /// Microseconds there and back of 4 KiB.
    pub round_trip_us: f64,
    /// Bytes a second that come here, by this end's clock: while this end only receives, and while it sends as much.
    pub rate: f64,
    /// See `rate`.
    pub rate_both_ways: f64,
    /// Whether a write is one.
    pub writes: Writes,
    /// Messages and writes were tried by an earlier run, on the same builds of both systems.
    pub remembered: bool,
}

/// Whether a device writes into a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Writes {
    /// Not asked: it is known to send only, and would take a write for a send.
    #[default]
    NotAsked,
    /// It says so, and nothing is written.
    No,
    /// Yes, over reliable connections.
    Reliable,
    /// Yes, over unreliable ones.
    Unreliable,
}

/// Depth of a queue pair: work requests, or frames of 4 KiB on devices that count those.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Granted {
    /// What was asked for, of both.
    pub asked: u32,
    /// Sends.
    pub send: u32,
    /// Receives.
    pub receive: u32,
}

impl Device {
    /// The first address that is an IPv4 one, with its index; in either notation: `::ffff:10.0.0.1`,
    /// `0000:0000:0000:0000:0000:ffff:0a00:0001`.
    pub fn ipv4(&self) -> Option<(u32, Ipv4Addr)> {
        let mapped = |gid: &str| gid.parse::<Ipv6Addr>().ok()?.to_ipv4_mapped();
        self.gids
            .iter()
            .find_map(|(index, gid)| Some((*index, mapped(gid).filter(|address| !address.is_unspecified())?)))
    }
}

/// What a device offers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Protection domains.
    pub domains: u32,
    /// Memory regions.
    pub regions: u32,
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// `en5`.
    pub name: String,
    /// Its IPv4 addresses.
    pub ipv4: Vec<String>,
}

impl Interface {
    /// Whether the system has given the address to itself for want of a server (169.254/16).
    pub fn is_self_assigned(&self) -> bool {
        self.ipv4.iter().any(|a| a.starts_with("169.254."))
    }
}

/// What is asked of a device, in the order of a connection's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// Opening it.
    Open,
    /// Asking for the state of its port.
    QueryPort,
    /// A protection domain.
    AllocDomain,
    /// The n-th registration of memory, from 1.
    Register(u32),
    /// A completion queue.
    CreateQueue,
    /// A queue pair, unreliable connected (UC).
    CreateUc,
    /// A queue pair, reliable connected (RC) or datagram.
    CreateOther,
    /// A queue pair to state INIT.
    Init,
    /// A queue pair to state RTR: this names the peer's address.
    ReadyToReceive,
    /// A queue pair to state RTS.
    ReadyToSend,
    /// Posting a receive.
    PostReceive,
    /// Posting a send.
    PostSend,
    /// Waiting for a completion.
    Complete,
    /// Comparing what has arrived with what was sent.
    Compare,
    /// Connecting a new queue pair, and sending the first messages both ways.
    WarmUp,
    /// Several messages at once, both ways.
    Several,
    /// A message there and back, again and again.
    RoundTrip,
    /// A stream of messages.
    Stream,
    /// A write into the peer's memory, to see whether it is one.
    Write,
    /// Waiting for a peer that has gone.
    Gone,
}

/// One thing that was tried.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Step {
    /// What.
    pub act: Act,
    /// With what outcome.
    pub outcome: Outcome,
}

/// How an act ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Well.
    Done,
    /// With this error number, of whatever sign the driver gave it (positive here).
    Errno(i32),
    /// With nothing: a null pointer and no number.
    Null,
    /// A completion with this status.
    Status(i32),
    /// Not at all, within so many seconds.
    Hung(u64),
    /// The process was ended by this signal.
    Died(i32),
    /// Something else has arrived.
    Wrong(Wrong),
    /// Nothing came, and no error.
    Silent,
}

/// What is wrong with bytes that arrived without an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wrong {
    /// Still zeros: the bytes are somewhere else.
    Zeros,
    /// Other bytes.
    Garbage,
}

/// What was tried with one peer.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// The peer's host.
    pub peer: String,
    /// The device here.
    pub device: String,
    /// The device there.
    pub far: String,
    /// The peer's address that was used.
    pub address: String,
    /// TCP to the peer: `Some(0)` is connected, otherwise the error number.
    pub tcp: Option<i32>,
    /// Whether another program (curl, nc) reaches the peer.
    pub others_reach: Option<bool>,
    /// The interface that the system routes the address through.
    pub route: Option<String>,
    /// What was tried over verbs, in order.
    pub steps: Vec<Step>,
    /// First messages of new queue pairs that came in each direction: here, there.
    pub delivered: Option<(u64, u64)>,
    /// Queue pairs that were dead from the start, before one of the same kind carried both ways.
    pub remade: u32,
    /// What the two devices do together, when all of it was found.
    pub together: Option<Together>,
    /// What the attempt ended with, where no step tells.
    pub words: Option<String>,
    /// The peer's side channel ended while this side waited; its error number.
    pub side_channel: Option<i32>,
    /// The peer gave no sign of life for so many seconds while its device reported nothing.
    pub silent: Option<u64>,
}
