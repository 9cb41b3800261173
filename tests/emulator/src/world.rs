//! What is emulated: hosts with devices, the wires between them, the provider's kind, and the traps to be played.
//!
//! A test describes a [`World`] and [installs](World::install) it: a folder with the description, a copy of the library and
//! the state that all processes share. A program finds the world by `FULMEN_EMU` (the folder), or, if that is not set, by
//! the place of the library that it loaded. `FULMEN_EMU_HOST` names the host that a process runs on; without it the
//! process sees the devices of all hosts (ranks as threads).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::shared::Shared;

/// Which provider is played.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Profile {
    /// Thunderbolt on macOS: UC only, SEND and RECV only, budgets in 4 KiB frames, no event when a peer dies.
    Apple,
    /// A NIC with RC and UC, SEND, RECV, RDMA WRITE and WRITE with immediate data.
    Nic,
}

impl Profile {
    /// How the names of its devices begin.
    pub fn prefix(self) -> &'static str {
        match self {
            Profile::Apple => "rdma_en",
            Profile::Nic => "nic",
        }
    }
}

/// A device, with its one port.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Name of its host.
    pub host: String,
    /// Name of the device; unique in the world.
    pub name: String,
    /// IPv4 address of its interface; `None`: it has none, and no mapped GID either.
    pub address: Option<[u8; 4]>,
}

/// How fast a wire is. All zero: everything arrives at once.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Link {
    /// Bytes per second; 0: unlimited.
    pub bytes_per_second: f64,
    /// From the last bit's leaving to its arrival, in nanoseconds.
    pub latency_ns: f64,
    /// Cost of each 4 KiB frame, in nanoseconds.
    pub frame_ns: f64,
}

/// A cable (two devices) or a switch (more).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wire {
    /// Indices of the devices.
    pub devices: Vec<usize>,
    /// Speed of what the first device sends, and of all others unless `back` says otherwise.
    pub link: Link,
    /// Speed of what the others send.
    pub back: Option<Link>,
}

/// What a provider grants, for each device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Queue pairs that can be used.
    pub qps: usize,
    /// Completion queues.
    pub cqs: usize,
    /// Protection domains.
    pub pds: usize,
    /// Memory regions.
    pub mrs: usize,
    /// Longest message in bytes.
    pub message: usize,
}

impl Limits {
    /// The limits of a profile.
    pub fn of(profile: Profile) -> Limits {
        match profile {
            Profile::Apple => Limits { qps: 10, cqs: 11, pds: 11, mrs: 100, message: 16_773_120 },
            Profile::Nic => Limits { qps: 32, cqs: 32, pds: 32, mrs: 400, message: 1 << 30 },
        }
    }
}

/// A call that can be made to fail or to hang.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Call {
    /// `ibv_get_device_list`
    GetDeviceList,
    /// `ibv_open_device`
    OpenDevice,
    /// `ibv_alloc_pd`
    AllocPd,
    /// `ibv_reg_mr`
    RegMr,
    /// `ibv_create_cq`
    CreateCq,
    /// `ibv_create_qp`
    CreateQp,
    /// `ibv_modify_qp` to INIT
    ToInit,
    /// `ibv_modify_qp` to RTR
    ToRtr,
    /// `ibv_modify_qp` to RTS
    ToRts,
    /// `ibv_post_send`
    PostSend,
    /// `ibv_post_recv`
    PostRecv,
}

/// What a trap does.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Kind {
    /// A queue pair that becomes ready to send never delivers a message longer than `over` bytes (0: none); a new one may.
    DeadPair {
        /// Longest message that still passes.
        over: u32,
    },
    /// A message vanishes; its sender sees success.
    Lost,
    /// A message fills two receives, if two are posted.
    Duplicated,
    /// A message arrives with the bytes of an earlier one (or of none).
    Foreign,
    /// One bit arrives flipped.
    FlippedBit,
    /// A call fails with this errno (the provider's own number).
    Fail {
        /// The call.
        call: Call,
        /// Its errno.
        errno: i32,
    },
    /// A call never returns.
    Stuck {
        /// The call.
        call: Call,
    },
    /// A call takes so long.
    Slow {
        /// The call.
        call: Call,
        /// Milliseconds.
        ms: u64,
    },
    /// Errors are returned as negative numbers.
    NegativeErrno,
    /// A refused post leaves `bad_wr` alone.
    BadWrUnset,
    /// Posts beyond the budget are accepted; sends of them never complete, receives of them are never filled.
    OverPostSilent,
    /// A queue pair is granted no more than this, whatever is asked for: frames (Apple) or requests.
    Grants {
        /// How many.
        frames: u32,
    },
    /// A queue holds no more than this, whatever was granted: frames (Apple) or requests.
    Shallow {
        /// How many.
        frames: u32,
    },
    /// A message's receive ends with a length error, as when too many messages of several frames are under way.
    LengthError,
    /// A write is carried as a send (Apple's provider always does that).
    WriteIsSend,
    /// A message that finds no receive is lost and ends its direction for good. Else it waits (Apple).
    EarlySendKills,
    /// The wire of the device goes down when it is to carry this message. No event, no error.
    PortDown,
    /// On a wire that is down, `post_recv` kills the process by SIGSEGV.
    CrashOnUnplug,
    /// A protection domain of a process that died without giving it back is lost for good.
    PdLost,
    /// Completions of different queue pairs come in another order.
    Reorder,
    /// A send is done, and its completion never comes.
    NoCompletion,
    /// Queue pairs are reliable ones only, as those of iWARP are: others are refused with 95 (`Nic`).
    ReliableOnly,
    /// No device is listed.
    NoDevices,
    /// Memory is registered for LOCAL_WRITE alone only; more is refused with 22.
    LocalWriteOnly,
    /// Memory is registered with all three access flags only; LOCAL_WRITE alone is refused with 22.
    RemoteFlagsNeeded,
    /// The IPv4-mapped GIDs appear this long after the world's creation.
    LateGid {
        /// Milliseconds.
        ms: u64,
    },
}

/// A trap and when it is played. Which of the eligible events it hits is drawn from the world's seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Trap {
    /// What happens.
    pub kind: Kind,
    /// Probability for each eligible event.
    pub chance: f64,
    /// The first events that are spared, counted for each device.
    pub after: u64,
    /// How often it is played at most, for each device.
    pub times: u64,
    /// Only on this device (the sending one).
    pub device: Option<String>,
    /// Only for messages, and registrations, of at least this many bytes.
    pub min_bytes: u32,
}

impl Trap {
    /// At each eligible event.
    pub fn always(kind: Kind) -> Trap {
        Trap { kind, chance: 1.0, after: 0, times: u64::MAX, device: None, min_bytes: 0 }
    }

    /// Once for each device, after so many eligible events.
    pub fn once_after(kind: Kind, after: u64) -> Trap {
        Trap { after, times: 1, ..Trap::always(kind) }
    }

    /// At each eligible event with this probability.
    pub fn with_chance(kind: Kind, chance: f64) -> Trap {
        Trap { chance, ..Trap::always(kind) }
    }

    /// Only on one device.
    pub fn on(self, device: &str) -> Trap {
        Trap { device: Some(device.into()), ..self }
    }

    /// Only for messages, and registrations, of at least so many bytes.
    pub fn from_bytes(self, min_bytes: u32) -> Trap {
        Trap { min_bytes, ..self }
    }
}

/// The whole description.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct World {
    /// Which provider.
    pub profile: Profile,
    /// What is drawn is drawn from this.
    pub seed: u64,
    /// All devices of all hosts.
    pub devices: Vec<Device>,
    /// Each device is on one wire at most; without one its port is down.
    pub wires: Vec<Wire>,
    /// What is granted.
    pub limits: Limits,
    /// The links' times are multiplied by this, so that a slow machine can play a fast link.
    pub time_scale: f64,
    /// What goes wrong.
    pub traps: Vec<Trap>,
    /// Whether devices move bytes whatever the protection of the pages, as real ones do (slowly, through /proc).
    pub past_protection: bool,
}

/// Upper bounds of the shared state.
pub(crate) const MAX_TRAPS: usize = 16;

impl World {
    /// Hosts `h0`, `h1`, … joined by cables. The device of host i on its first cable to host j is `rdma_en<i><j>`, on
    /// further cables between the same hosts `rdma_en<i><j>b`, `c`, …; those of NICs begin with `nic` instead, for programs
    /// may know Apple's devices by their names.
    pub fn cabled(profile: Profile, hosts: usize, cables: &[(usize, usize)]) -> World {
        let (mut devices, mut wires) = (Vec::new(), Vec::new());
        for (n, &(a, b)) in cables.iter().enumerate() {
            assert!(a < hosts && b < hosts && a != b, "cable {a}-{b} among {hosts} hosts");
            let same = cables[..n].iter().filter(|&&(c, d)| (c, d) == (a, b) || (d, c) == (a, b)).count();
            let suffix = if same == 0 { String::new() } else { char::from(b'a' + same as u8).to_string() };
            wires.push(Wire {
                devices: vec![devices.len(), devices.len() + 1],
                link: Link::default(),
                back: None,
            });
            for (end, (i, j)) in [(a, b), (b, a)].into_iter().enumerate() {
                let address = Some([169, 254, n as u8, 1 + end as u8]);
                devices.push(Device {
                    host: format!("h{i}"),
                    name: format!("{}{i}{j}{suffix}", profile.prefix()),
                    address,
                });
            }
        }
        World {
            profile,
            seed: 1,
            devices,
            wires,
            limits: Limits::of(profile),
            time_scale: 1.0,
            traps: Vec::new(),
            past_protection: false,
        }
    }

    /// A cable between each two hosts.
    pub fn mesh(profile: Profile, hosts: usize) -> World {
        let cables: Vec<_> = (0..hosts).flat_map(|i| (i + 1..hosts).map(move |j| (i, j))).collect();
        World::cabled(profile, hosts, &cables)
    }

    /// Hosts with one device each, `emu<i>`, on one switch.
    pub fn switch(profile: Profile, hosts: usize) -> World {
        let devices = (0..hosts)
            .map(|i| Device {
                host: format!("h{i}"),
                name: format!("emu{i}"),
                address: Some([10, 0, 0, 1 + i as u8]),
            })
            .collect();
        let wire = Wire { devices: (0..hosts).collect(), link: Link::default(), back: None };
        World {
            profile,
            seed: 1,
            devices,
            wires: vec![wire],
            limits: Limits::of(profile),
            time_scale: 1.0,
            traps: Vec::new(),
            past_protection: false,
        }
    }

    /// With this seed.
    pub fn seed(self, seed: u64) -> World {
        World { seed, ..self }
    }

    /// With one more trap.
    pub fn trap(mut self, trap: Trap) -> World {
        assert!(self.traps.len() < MAX_TRAPS, "at most {MAX_TRAPS} traps");
        self.traps.push(trap);
        self
    }

    /// Whose devices move bytes whatever the protection of the pages.
    pub fn past_protection(self) -> World {
        World { past_protection: true, ..self }
    }

    /// With this speed on every wire, its times multiplied by `scale`.
    pub fn link(mut self, link: Link, scale: f64) -> World {
        for wire in &mut self.wires {
            wire.link = link;
        }
        World { time_scale: scale, ..self }
    }

    /// The wire of a device.
    pub(crate) fn wire_of(&self, device: usize) -> Option<usize> {
        self.wires.iter().position(|w| w.devices.contains(&device))
    }

    /// Writes the description and a copy of the library into a folder of its own, which goes when the result is dropped.
    ///
    /// # Errors
    /// When the library has not been built, or the folder cannot be written.
    pub fn install(&self) -> std::io::Result<Installed> {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }?;
        std::fs::write(dir.path().join(DESCRIPTION), serde_json::to_vec_pretty(self)?)?;
        let library = dir.path().join(LIBRARY);
        std::fs::copy(built_library()?, &library)?;
        Ok(Installed { shared: Shared::open(dir.path())?, dir, library })
    }
}

pub(crate) const DESCRIPTION: &str = "world.json";
const LIBRARY: &str = "libfulmen_emu_verbs.so";

/// Where cargo has put the library: beside the running test program, or one folder up.
fn built_library() -> std::io::Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let mut folders = exe.ancestors().skip(1).take(2);
    folders
        .find_map(|f| [f.join(LIBRARY), f.join("deps").join(LIBRARY)].into_iter().find(|p| p.is_file()))
        .ok_or_else(|| {
            let place = exe.parent().unwrap_or(&exe).display();
            std::io::Error::new(
                std::io::ErrorKind::NotFound,
                format!("no {LIBRARY} at {place}: cargo build -p fulmen-verbs-emulator"),
            )
        })
}

/// A world that programs can load.
pub struct Installed {
    shared: Shared,
    library: PathBuf,
    dir: tempfile::TempDir,
}

impl Installed {
    /// The library to be loaded in place of libibverbs (`FULMEN_VERBS_LIB`). Each world has a copy of its own, so that one
    /// process can load several.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The world's folder (`FULMEN_EMU`).
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// Which provider it plays.
    pub fn profile(&self) -> Profile {
        self.shared.world().profile
    }

    /// What has happened so far, over all processes.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// Describes the world anew, with the same devices and wires: other seed, traps or speed. Its state is as at the start;
    /// programs take notice when they list the devices. A thousand runs then need one library.
    ///
    /// # Errors
    /// When devices or wires differ, or a process holds a wire for long.
    pub fn change(&self, world: &World) -> std::io::Result<()> {
        self.shared.change(world)
    }

    /// Pulls (or plugs in again) the cable of a device.
    ///
    /// # Panics
    /// When there is no such device, or it has no cable.
    pub fn set_cable(&self, device: &str, up: bool) {
        let world = self.shared.world();
        let port = world.devices.iter().position(|d| d.name == device).expect("a device of this world");
        self.shared.set_cable(world.wire_of(port).expect("a device with a cable"), up);
    }
}
