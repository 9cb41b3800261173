//! Which devices a rank opens, and which of them are joined to which of another rank's.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Options;
use super::ffi::Library;
use super::links::COMPLETIONS;
use super::nic::{GidKind, Nic, list};
use super::protocol::wire::CABLES;
use super::trouble::{Refusal, Trouble};
use crate::error::{Error, Result};

/// Which devices join the ranks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Devices {
    /// All that are active. Thunderbolt devices are joined by their IPv4 networks: the two ends of a cable are alone in one
    /// /30 or /24. Others are taken to be on one switch, the first with the first, the second with the second.
    #[default]
    All,
    /// These, on every rank, as [`Devices::All`].
    Named(Vec<String>),
    /// For each rank and each of its peers, the names of its devices towards that peer; the cables of a pair are in the
    /// same order on both sides.
    Matrix(Vec<Vec<Vec<String>>>),
}

/// Opens the devices that `options` name for this rank, on a thread of its own: a driver may never come back. (Then the thread
/// stays with it, until the process ends.)
///
/// # Errors
/// [`Error::Resources`] when there is none, or one refuses or does not answer within the silence bound, [`Error::Argument`] when
/// one that is named is not there.
pub fn open(rank: usize, options: &Options) -> Result<Vec<Nic>> {
    let at = Arc::new(Mutex::new("loading the verbs library".to_owned()));
    let (within, theirs, mine) = (options.bounds.silence, Arc::clone(&at), options.clone());
    let opened = bounded(within, move || open_all(rank, &mine, &theirs)).map_err(|e| Error::Resources {
        what: format!("no thread that opens the devices of rank {rank}: {e}"),
        remedy: "use fewer ranks or threads, or raise the limit (ulimit -u)".into(),
    })?;
    let stuck = || {
        let at = at.lock().unwrap_or_else(PoisonError::into_inner);
        Error::Resources {
            what: format!("{at} does not come back for {:.0} s: its driver is stuck", within.as_secs_f64()),
            remedy: "restart this machine; until then use --fabric tcp".into(),
        }
    };
    opened.unwrap_or_else(|| Err(stuck()))
}

/// What a thread of its own brings, if it does within this time. What comes later is dropped there.
fn bounded<T: Send + 'static>(
    within: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<Option<T>> {
    let (answer, answered) = mpsc::channel();
    let run = move || drop(answer.send(work()));
    std::thread::Builder::new().name("verbs open".into()).spawn(run)?;
    Ok(answered.recv_timeout(within).ok())
}

/// `at`: what it is at.
fn open_all(rank: usize, options: &Options, at: &Mutex<String>) -> Result<Vec<Nic>> {
    let library = match &options.library {
        Some(path) => Library::open(path),
        None => Library::find(),
    };
    let library = library.map_err(|absent| Error::Resources {
        what: absent.to_string(),
        remedy: Trouble::NoLibrary.remedy().into(),
    })?;
    let is_at = |what: String| *at.lock().unwrap_or_else(PoisonError::into_inner) = what;
    is_at("listing the RDMA devices".into());
    let listed = list(library)?;
    let wanted: Option<Vec<String>> = match &options.devices {
        Devices::All => None,
        Devices::Named(names) => Some(names.clone()),
        Devices::Matrix(matrix) => Some(matrix.get(rank).into_iter().flatten().flatten().cloned().collect()),
    };
    let mut nics = Vec::new();
    let mut why: Option<Refusal> = None;
    for device in &listed {
        if wanted.as_ref().is_some_and(|names| !names.contains(&device.name)) {
            continue;
        }
        is_at(format!("opening {}", device.name));
        match Nic::open(library, &device.name, COMPLETIONS) {
            Ok(nic) => nics.push(nic),
            Err(refusal) if wanted.is_some() => return Err(refusal.into()),
            Err(refusal) => why = Some(refusal), // a port without a cable is no failure
        }
    }
    let missing = wanted.iter().flatten().find(|name| listed.iter().all(|d| d.name != **name));
    if let Some(name) = missing {
        let have: Vec<&str> = listed.iter().map(|d| d.name.as_str()).collect();
        return Err(Error::argument(
            "device",
            name,
            format!("rank {rank} has no such device; it has: {}", have.join(", ")),
            "see `hpl-run doctor`",
        ));
    }
    match (nics.is_empty(), why) {
        (false, _) => Ok(nics),
        (true, Some(refusal)) => Err(refusal.into()),
        (true, None) if wanted.is_some() => Err(Error::Resources {
            what: format!("no RDMA device is named for rank {rank}"),
            remedy: "name its devices (hostfile, FULMEN_DEVICES), or use --fabric tcp".into(),
        }),
        (true, None) => Err(Error::Resources {
            what: format!("{} lists no RDMA device for rank {rank}", library.name),
            remedy: Trouble::NotEnabled.remedy().into(),
        }),
    }
}

/// The devices of this machine by name; none where there is no library, or where listing them does not come back within the
/// silence bound.
pub fn names(options: &Options) -> Vec<String> {
    let mine = options.library.clone();
    let listed = bounded(options.bounds.silence, move || {
        let library = mine.as_ref().map_or_else(Library::find, |path| Library::open(path));
        library.map_or(Vec::new(), |library| list(library).unwrap_or_default())
    });
    listed.ok().flatten().unwrap_or_default().into_iter().map(|device| device.name).collect()
}

/// A device, as its rank tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Whether it is one of Apple's, at one end of a cable.
    pub is_thunderbolt: bool,
    /// Local identifier (InfiniBand), else 0.
    pub lid: u16,
    /// Largest packet, as verbs number it.
    pub mtu: u8,
    /// Its addresses: kind (as [`GidKind`] numbers them) and bytes, the preferred first.
    pub gids: Vec<(u8, [u8; 16])>,
}

impl Port {
    /// What is known of a port from outside, enough for [`cables`].
    pub fn seen(name: &str, is_thunderbolt: bool, ipv4: Option<std::net::Ipv4Addr>) -> Port {
        let gid = |v4: std::net::Ipv4Addr| (GidKind::Ipv4 as u8, v4.to_ipv6_mapped().octets());
        let gids = ipv4.map(gid).into_iter().collect();
        Port { name: name.to_owned(), is_thunderbolt, lid: 0, mtu: 0, gids }
    }

    /// What `nic` is to the others.
    pub fn of(nic: &Nic) -> Port {
        Port {
            name: nic.name().to_owned(),
            is_thunderbolt: nic.listed().is_thunderbolt(),
            lid: nic.port().lid,
            mtu: nic.port().mtu,
            gids: nic.gids().iter().map(|g| (g.kind as u8, g.raw)).collect(),
        }
    }

    fn ipv4(&self) -> Option<u32> {
        let (_, raw) = self.gids.iter().find(|(kind, _)| *kind == GidKind::Ipv4 as u8)?;
        Some(u32::from_be_bytes([raw[12], raw[13], raw[14], raw[15]]))
    }
}

/// Which port of rank `a` is joined to which of rank `b`, by index; `ports` are those of each rank.
pub fn cables(a: usize, b: usize, ports: &[&[Port]], devices: &Devices) -> Vec<(usize, usize)> {
    let (ours, theirs) = (ports[a], ports[b]);
    let find = |ports: &[Port], name: &str| ports.iter().position(|p| p.name == name);
    let mut found: Vec<(usize, usize)> = match devices {
        Devices::Matrix(matrix) => {
            let names = |x: usize, y: usize| matrix.get(x).and_then(|row| row.get(y)).into_iter().flatten();
            names(a, b)
                .zip(names(b, a))
                .filter_map(|(x, y)| Some((find(ours, x)?, find(theirs, y)?)))
                .collect()
        }
        _ if ours.iter().chain(theirs).any(|p| p.is_thunderbolt) => {
            let pairs = (0..ours.len()).flat_map(|i| (0..theirs.len()).map(move |j| (i, j)));
            pairs.filter(|(i, j)| are_alone(&ours[*i], &theirs[*j], ports)).collect()
        }
        _ => (0..ours.len().min(theirs.len())).map(|i| (i, i)).collect(),
    };
    found.truncate(CABLES);
    found
}

/// Why no port of rank `a` is joined to one of rank `b`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Apart {
    /// Whose fault it is, where it is one rank's.
    pub of: Option<usize>,
    /// What is missing.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

/// Why [`cables`] finds none.
pub fn apart(a: usize, b: usize, ports: &[&[Port]], devices: &Devices) -> Apart {
    if let Devices::Matrix(_) = devices {
        let what = format!("the device matrix names no cable between ranks {a} and {b}");
        return Apart {
            of: None,
            what,
            remedy: "name the devices of both ends in it, or use --fabric tcp".into(),
        };
    }
    let unaddressed = [a, b].into_iter().find_map(|rank| {
        let port = ports[rank].iter().find(|p| p.is_thunderbolt && p.ipv4().is_none())?;
        Some((rank, port.name.as_str()))
    });
    match unaddressed {
        Some((rank, device)) => {
            let interface = device.strip_prefix("rdma_").unwrap_or(device);
            Apart {
                of: Some(rank),
                what: format!("{device} has no IPv4 address, by which the other end of its cable is found"),
                remedy: format!(
                    "give its interface one (`ifconfig {interface} inet ADDRESS/30`), in the network of the other end; \
                     after a restart or a new cable the system assigns one within a minute"
                ),
            }
        }
        None => Apart {
            of: None,
            what: format!("no RDMA device of rank {a} is joined to one of rank {b}"),
            remedy: "see that a cable joins the two, and that its ends have IPv4 addresses in a network of their own \
                     (/30), or name the devices (a device matrix)"
                .into(),
        },
    }
}

/// Whether two ports have an IPv4 network to themselves, as the two ends of a cable do. Ranks of one host share its ports.
fn are_alone(x: &Port, y: &Port, ports: &[&[Port]]) -> bool {
    let (Some(x), Some(y)) = (x.ipv4(), y.ipv4()) else { return false };
    let share = |prefix: u32| {
        let net = |address: u32| address >> (32 - prefix);
        let mut inside = ports.iter().copied().flatten().filter_map(Port::ipv4).filter(|a| net(*a) == net(x));
        net(x) == net(y) && inside.all(|address| address == x || address == y)
    };
    x != y && (share(30) || share(24))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, address: [u8; 4]) -> Port {
        let mut raw = [0u8; 16];
        raw[10..12].copy_from_slice(&[0xFF, 0xFF]);
        raw[12..].copy_from_slice(&address);
        let gids = vec![(GidKind::Ipv4 as u8, raw)];
        Port { name: name.into(), is_thunderbolt: true, lid: 0, mtu: 5, gids }
    }

    fn joined(ports: &[Vec<Port>], a: usize, b: usize) -> Vec<(usize, usize)> {
        let ports: Vec<&[Port]> = ports.iter().map(Vec::as_slice).collect();
        cables(a, b, &ports, &Devices::All)
    }

    #[test]
    fn a_cable_is_a_network_of_its_own() {
        // As mlx.launch sets addresses: one /30 after the other. 0 and 1 have two cables; 2 has one to each.
        let all = [
            vec![
                port("rdma_en2", [192, 168, 0, 1]),
                port("rdma_en3", [192, 168, 0, 5]),
                port("rdma_en4", [192, 168, 0, 9]),
            ],
            vec![
                port("rdma_en2", [192, 168, 0, 6]),
                port("rdma_en3", [192, 168, 0, 2]),
                port("rdma_en5", [192, 168, 0, 13]),
            ],
            vec![port("rdma_en2", [192, 168, 0, 14]), port("rdma_en3", [192, 168, 0, 10])],
        ];
        assert_eq!(joined(&all, 0, 1), [(0, 1), (1, 0)]);
        assert_eq!(joined(&all, 0, 2), [(2, 1)]);
        assert_eq!(joined(&all, 1, 2), [(2, 0)]);
        // One /24 a cable, any addresses in it.
        let all =
            [vec![port("a", [10, 1, 1, 7])], vec![port("a", [10, 1, 1, 200]), port("b", [10, 1, 2, 1])]];
        assert_eq!(joined(&all, 0, 1), [(0, 0)]);
        // Three in one network are no cable; nor is a port with itself, on two ranks of one host.
        let all =
            [vec![port("a", [10, 1, 1, 1])], vec![port("a", [10, 1, 1, 2])], vec![port("a", [10, 1, 1, 3])]];
        assert_eq!(joined(&all, 0, 1), []);
        let all =
            [vec![port("a", [10, 1, 1, 1])], vec![port("a", [10, 1, 1, 1])], vec![port("a", [10, 1, 1, 2])]];
        assert_eq!(joined(&all, 0, 1), []);
        assert_eq!((joined(&all, 0, 2), joined(&all, 1, 2)), (vec![(0, 0)], vec![(0, 0)]));
    }

    #[test]
    fn whose_device_lacks_an_address_is_told() {
        let bare = |name: &str| Port { gids: vec![], ..port(name, [0; 4]) };
        let all =
            [vec![port("rdma_en2", [10, 1, 1, 1])], vec![bare("rdma_en10")], vec![port("x", [10, 1, 9, 1])]];
        let ports: Vec<&[Port]> = all.iter().map(Vec::as_slice).collect();
        assert!(cables(0, 1, &ports, &Devices::All).is_empty());
        for (a, b) in [(0, 1), (1, 2)] {
            let told = apart(a, b, &ports, &Devices::All);
            assert_eq!(told.of, Some(1));
            assert!(told.what.starts_with("rdma_en10 has no IPv4 address"), "{told:?}");
            assert!(told.remedy.contains("`ifconfig en10 inet"), "{told:?}");
        }
        assert_eq!(apart(0, 2, &ports, &Devices::All).of, None);
    }

    #[test]
    fn a_matrix_names_devices_by_pairs() {
        let all = [vec![port("a", [0; 4]), port("b", [0; 4])], vec![port("a", [0; 4])]];
        let ports: Vec<&[Port]> = all.iter().map(Vec::as_slice).collect();
        let matrix =
            |x: &str| Devices::Matrix(vec![vec![vec![], vec![x.into()]], vec![vec!["a".into()], vec![]]]);
        assert_eq!(cables(0, 1, &ports, &matrix("b")), [(1, 0)]);
        assert_eq!(cables(0, 1, &ports, &matrix("c")), []);
    }
}
