//! Which transport joins two ranks: shared memory on one host, RDMA where a device joins them, else TCP. Pure.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// A transport that joins two ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Transport {
    /// Shared memory.
    Shm,
    /// RDMA devices.
    Verbs,
    /// TCP.
    Tcp,
}

impl Transport {
    /// As users call it.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Verbs => "verbs",
            Transport::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What may join ranks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// For each pair the best that works.
    #[default]
    Auto,
    /// Shared memory, or an error.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA, or an error; these devices, if any are named.
    Verbs(Vec<String>),
}

impl FromStr for Choice {
    type Err = Error;

    /// `auto`, `shm`, `tcp`, `verbs`, `verbs:mlx5_0,mlx5_1`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |problem: &str| {
            Error::argument("fabric", text, problem, "give auto, shm, tcp, verbs or verbs:DEVICE,DEVICE")
        };
        match text.split_once(':') {
            None => match text {
                "auto" => Ok(Choice::Auto),
                "shm" => Ok(Choice::Shm),
                "tcp" => Ok(Choice::Tcp),
                "verbs" => Ok(Choice::Verbs(Vec::new())),
                _ => Err(wrong("is no transport between ranks that a launcher has started")),
            },
            Some(("verbs", devices)) => {
                let devices: Vec<String> = devices.split(',').map(|d| d.trim().to_owned()).collect();
                if devices.iter().any(String::is_empty) {
                    return Err(wrong("names a device without a name"));
                }
                Ok(Choice::Verbs(devices))
            }
            Some(_) => Err(wrong("names devices of a transport that has none")),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Auto => f.write_str("auto"),
            Choice::Shm => f.write_str("shm"),
            Choice::Tcp => f.write_str("tcp"),
            Choice::Verbs(devices) if devices.is_empty() => f.write_str("verbs"),
            Choice::Verbs(devices) => write!(f, "verbs:{}", devices.join(",")),
        }
    }
}

/// Why a transport does not join a pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Why {
    /// In one line.
    pub text: String,
    /// Whether the user might have expected it: then it is worth a line.
    pub is_expected: bool,
}

impl Why {
    /// What nobody would expect, or what somebody might; of several lines the first.
    pub fn new(text: impl AsRef<str>, is_expected: bool) -> Self {
        Why { text: text.as_ref().lines().next().unwrap_or_default().to_owned(), is_expected }
    }
}

/// What joins a pair, and what would have been better, with its reason.
pub type Rung = (Transport, Vec<String>);

/// Chooses for one pair; `shm` and `verbs` tell why they do not join it.
///
/// # Errors
/// The reason, when the choice cannot be had.
pub fn choose(choice: &Choice, shm: Result<(), Why>, verbs: Result<(), Why>) -> Result<Rung, String> {
    match choice {
        Choice::Tcp => Ok((Transport::Tcp, Vec::new())),
        Choice::Shm => shm.map(|()| (Transport::Shm, Vec::new())).map_err(|why| why.text),
        Choice::Verbs(_) => verbs.map(|()| (Transport::Verbs, Vec::new())).map_err(|why| why.text),
        Choice::Auto => {
            let mut better = Vec::new();
            for (transport, name, joins) in [(Transport::Shm, "shm", shm), (Transport::Verbs, "rdma", verbs)]
            {
                match joins {
                    Ok(()) => return Ok((transport, better)),
                    Err(why) if why.is_expected => better.push(format!("{name}: {}", why.text)),
                    Err(_) => {}
                }
            }
            Ok((Transport::Tcp, better))
        }
    }
}

/// For each rank, the ranks at the same place, itself included: these may share memory. `places`: host, kernel and network
/// of each.
pub fn hosts(places: &[(&str, &str, &str)]) -> Vec<Vec<usize>> {
    (0..places.len()).map(|a| (0..places.len()).filter(|b| places[a] == places[*b]).collect()).collect()
}

/// Why two ranks at these places cannot share memory at all; `None`: they are on one host.
pub fn apart(a: (&str, &str, &str), b: (&str, &str, &str)) -> Option<Why> {
    if a.0 != b.0 {
        return Some(Why::new("they are on different hosts", false));
    }
    let what = match (a.1 == b.1, a.2 == b.2) {
        (false, _) => "kernels",
        (true, false) => "network namespaces",
        (true, true) => return None,
    };
    Some(Why::new(format!("both are on {}, but in different {what}", a.0), true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_down_one_step_at_a_time_and_says_why() {
        let no = |text: &str, is_expected| Err(Why::new(text, is_expected));
        let auto = |shm, verbs| choose(&Choice::Auto, shm, verbs).unwrap();
        assert_eq!(auto(Ok(()), Ok(())), (Transport::Shm, vec![]));
        assert_eq!(auto(no("far", false), Ok(())), (Transport::Verbs, vec![]));
        assert_eq!(auto(no("far", false), no("none", false)), (Transport::Tcp, vec![]));
        assert_eq!(
            auto(no("another user's", true), no("not enabled on b\n    enable it", true)),
            (Transport::Tcp, vec!["shm: another user's".into(), "rdma: not enabled on b".into()])
        );
        assert_eq!(auto(no("x", true), Ok(())), (Transport::Verbs, vec!["shm: x".into()]));
    }

    #[test]
    fn what_is_forced_and_cannot_be_had_is_an_error() {
        let no = |text: &str| Err(Why::new(text, false));
        assert_eq!(choose(&Choice::Tcp, Ok(()), Ok(())), Ok((Transport::Tcp, vec![])));
        assert_eq!(choose(&Choice::Shm, no("far"), Ok(())), Err("far".into()));
        assert_eq!(choose(&Choice::Verbs(vec![]), Ok(()), no("none")), Err("none".into()));
        assert_eq!(choose(&Choice::Verbs(vec![]), Ok(()), Ok(())), Ok((Transport::Verbs, vec![])));
    }

    #[test]
    fn one_host_is_one_name_one_kernel_and_one_network() {
        let places =
            [("a", "k", "n"), ("b", "k", "n"), ("a", "k", "n"), ("a", "other", "n"), ("a", "k", "other")];
        assert_eq!(hosts(&places), [vec![0, 2], vec![1], vec![0, 2], vec![3], vec![4]]);
        assert_eq!(apart(places[0], places[2]), None);
        assert!(!apart(places[0], places[1]).unwrap().is_expected);
        for (rank, what) in [(3, "kernels"), (4, "network namespaces")] {
            let why = apart(places[0], places[rank]).unwrap();
            assert!(why.is_expected && why.text.contains(what), "{why:?}");
        }
    }

    #[test]
    fn what_users_write_is_read_back() {
        for text in ["auto", "shm", "tcp", "verbs", "verbs:mlx5_0", "verbs:rdma_en2,rdma_en3"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        for wrong in ["", "mem", "ib", "tcp:en5", "verbs:", "verbs:a,,b", "Shm"] {
            assert_eq!(wrong.parse::<Choice>().unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }
}
