//! Each pair of ranks by the best transport it has: shared memory within a host, RDMA where a device joins the two, else
//! TCP.
//!
//! Every pair has a TCP connection. It carries data where there is nothing better, and for all it tells who lives and
//! how the job ends: a failure that any transport finds is TCP's from then on, so that every rank hears one cause.
//! Memory is allocated once and usable by all: TCP takes any, shared memory's segment is where it lies if there is one,
//! and RDMA devices register parts of that segment. Data of TCP and RDMA is moved by their threads while the rank
//! computes or waits elsewhere; shared memory's needs that only beyond 64 puts to a rank, and then the wait sees to it.

mod endpoint;
mod ladder;

pub use ladder::{Choice, Transport};

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::endpoint::Mixed;
use self::ladder::{Rung, Why};
use super::alarm::Alarm;
use super::rendezvous::{Rendezvous, Secret, gather};
use super::shared::control::Control;
use super::shm::meeting::{Met, Shm, meet};
use super::verbs::{self, Devices, LeftOut, Source, Verbs};
use super::{Fabric, tcp};
use crate::error::{Error, Result};

/// How ranks are joined.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What may join them; on all ranks the same.
    pub choice: Choice,
    /// Deadlines, interfaces, and the name of this rank's host: ranks with the same name may share memory.
    pub tcp: tcp::Options,
    /// Devices and ways of RDMA. Its deadlines and its pairs are set here, and its devices where the choice names some.
    pub verbs: verbs::Options,
}

/// What joins this rank to another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// The other rank.
    pub peer: usize,
    /// By what.
    pub over: Transport,
    /// In detail: `tcp over en5 (10.0.0.1 to 10.0.0.2)`.
    pub link: String,
    /// What would have been better and might have been expected, with the reason, each in one line.
    pub instead_of: Vec<String>,
}

/// A rank that is connected.
pub struct Connected {
    /// Its fabric.
    pub fabric: Arc<dyn Fabric>,
    /// What joins it to each other rank.
    pub steps: Vec<Step>,
    alarm: Arc<Alarm>,
}

impl Connected {
    /// Calls `bell` once, from whichever thread finds it, when the job has failed; at once if it has. It must neither wait nor
    /// call the fabric, with which it is dropped.
    pub(crate) fn at_failure(&self, bell: impl Fn() + Send + 'static) {
        self.alarm.add(bell);
    }
}

/// Connects this rank with all others. Collective.
///
/// # Errors
/// As [`tcp::connect`]; when what the choice names cannot be had, on every rank and with the reason: [`Error::Resources`] on the
/// rank whose devices refuse, [`Error::Argument`] when no rank has a device of that name or the ranks are no such ranks
/// (of one host, for `shm`), and [`Error::Ended`], with the same words and exit code, on the others.
pub fn connect(rendezvous: &mut dyn Rendezvous, secret: &Secret, options: &Options) -> Result<Connected> {
    let (tcp, places) = tcp::endpoint(rendezvous, secret, &options.tcp)?;
    let tcp = Arc::new(tcp);
    join(rendezvous, secret, options, &tcp, places).inspect_err(|e| tcp.fail(e))
}

fn join(
    rendezvous: &mut dyn Rendezvous,
    secret: &Secret,
    options: &Options,
    tcp: &Arc<tcp::Endpoint>,
    places: Vec<tcp::Place>,
) -> Result<Connected> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let bounds = options.tcp.bounds;
    let mut hosts = Hosts::meet(rendezvous, secret, options, places)?;
    let control = Control { fabric: Arc::clone(tcp) as Arc<dyn Fabric>, alarm: tcp.alarm() };
    let mut shm = match hosts.met.as_mut() {
        Some(met) => met.connect(control, bounds)?,
        None => None,
    };
    let rdma = match options.choice {
        Choice::Auto | Choice::Verbs(_) => Rdma::connect(rendezvous, tcp, options, &mut hosts, &mut shm)?,
        Choice::Shm | Choice::Tcp => Rdma::default(),
    };

    // Each rank chooses for its pairs by what all know, and all see that both ends of each chose alike.
    let choose = |peer| match peer == rank {
        true => Ok((Transport::Tcp, Vec::new())),
        false => ladder::choose(&options.choice, hosts.share(rank, peer), rdma.joins(rank, peer, &hosts)),
    };
    let rungs: Vec<std::result::Result<Rung, String>> = (0..size).map(choose).collect();
    let refused = rungs.iter().enumerate().find_map(|(peer, rung)| {
        rung.as_ref().err().map(|why| format!("does not join ranks {rank} and {peer}: {why}"))
    });
    let mine: std::result::Result<Vec<u8>, String> = match refused {
        Some(why) => Err(why),
        None => Ok(rungs.iter().flatten().map(|(over, _)| *over as u8).collect()),
    };
    let all = gather(rendezvous, &mine)?;
    if let Some((first, why)) = all.iter().enumerate().find_map(|(r, told)| Some((r, told.as_ref().err()?))) {
        return Err(refusal(&options.choice, rank, (first, why), rdma.why.as_ref()));
    }
    for (peer, theirs) in all.iter().enumerate() {
        let (theirs, ours) = (theirs.as_ref().map(|t| t.get(rank)), mine.as_ref().map(|m| m.get(peer)));
        if theirs != ours {
            return Err(Error::Internal(format!("ranks {rank} and {peer} chose {ours:?} and {theirs:?}")));
        }
    }
    let (overs, mut better): (Vec<Transport>, Vec<Vec<String>>) = rungs.into_iter().flatten().unzip();
    for peer in (0..size).filter(|peer| overs[*peer] == Transport::Tcp) {
        better[peer].extend(tcp.shut_off(peer).map(|why| {
            let links = tcp.hops(peer);
            format!(
                "{why} (a firewall? it must let through all ports), so that each byte crosses {links} links"
            )
        }));
    }
    let fabric = Mixed::build(Arc::clone(tcp), shm, rdma.verbs, overs.clone(), bounds);
    for peer in (0..size).filter(|peer| *peer != rank && overs[*peer] != Transport::Tcp) {
        tcp.carries_no_data(peer, fabric.link(peer));
    }
    let steps = better.into_iter().enumerate().filter(|(peer, _)| *peer != rank);
    let steps =
        steps.map(|(peer, instead_of)| Step { peer, over: overs[peer], link: fabric.link(peer), instead_of });
    Ok(Connected { steps: steps.collect(), fabric, alarm: tcp.alarm() })
}

/// What was asked for by name and cannot be had, on every rank in the same words; the rank whose fault it is has failed, and
/// the others only pass on what it says. `first`: the first rank that it does not join to another, and why.
fn refusal(choice: &Choice, me: usize, (first, why): (usize, &str), rdma: Option<&Cause>) -> Error {
    let leave = "see `hpl-run doctor`, or leave the choice open (auto)";
    let (of, error) = match rdma {
        Some(cause) if !cause.is_misnamed => {
            let what = format!("fabric: {choice}: {why}");
            (cause.rank, Error::Resources { what, remedy: format!("{}\n    {leave}", cause.remedy) })
        }
        _ => (rdma.map_or(first, |cause| cause.rank), Error::argument("fabric", choice, why, leave)),
    };
    match of == me {
        true => error,
        false => Error::Ended { code: error.exit_code(), message: error.to_string() },
    }
}

/// Who is on which host, and shares memory there.
struct Hosts {
    places: Vec<tcp::Place>,
    /// `None`: nobody may.
    met: Option<Met>,
    /// Ranks whose memory cannot be shared after all, and why.
    given_up: Vec<Option<String>>,
}

impl Hosts {
    fn meet(
        rendezvous: &mut dyn Rendezvous,
        secret: &Secret,
        options: &Options,
        places: Vec<tcp::Place>,
    ) -> Result<Self> {
        let (rank, size) = (rendezvous.rank(), rendezvous.size());
        let groups = ladder::hosts(&places.iter().map(key).collect::<Vec<_>>());
        let may = matches!(options.choice, Choice::Auto | Choice::Shm) && groups.iter().any(|g| g.len() > 1);
        let met = if may { Some(meet(rendezvous, secret, &groups[rank])?) } else { None };
        Ok(Hosts { places, met, given_up: vec![None; size] })
    }

    /// `rank 1 (mac-b)`.
    fn name(&self, rank: usize) -> String {
        format!("rank {rank} ({})", self.places[rank].host)
    }

    fn share(&self, a: usize, b: usize) -> std::result::Result<(), Why> {
        if let Some(why) = ladder::apart(key(&self.places[a]), key(&self.places[b])) {
            return Err(why);
        }
        if let Some(why) = self.given_up[a].as_ref().or(self.given_up[b].as_ref()) {
            return Err(Why::new(why, true));
        }
        match &self.met {
            Some(met) => met.shares(a, b).map_err(|why| Why::new(why, true)),
            None => Err(Why::new("it was not tried", false)),
        }
    }
}

fn key(place: &tcp::Place) -> (&str, &str, &str) {
    (&place.host, &place.kernel, &place.network)
}

/// What RDMA joins.
#[derive(Default)]
struct Rdma {
    verbs: Option<Verbs>,
    /// Which ranks have a device.
    equipped: Vec<bool>,
    /// Whether the user has named devices.
    are_named: bool,
    /// Why it joins nobody.
    why: Option<Cause>,
}

/// What a rank failed with when RDMA was to join it.
#[derive(Clone)]
struct Cause {
    /// The rank.
    rank: usize,
    /// In one line, with the rank's name and its host's.
    text: String,
    /// What to do.
    remedy: String,
    /// Whether the user has named a device that no rank has.
    is_misnamed: bool,
}

/// What a rank tells of its failure.
#[derive(Serialize, Deserialize)]
struct Failed {
    what: String,
    remedy: String,
    /// Whether another rank's is the cause.
    follows: bool,
    /// The device that was named and is not there.
    missing: Option<String>,
}

impl Failed {
    fn of(error: &Error) -> Failed {
        let missing = match error {
            Error::Argument { value, .. } => Some(value.clone()),
            _ => None,
        };
        let text = error.to_string();
        let (what, remedy) = text.split_once('\n').unwrap_or((&text, "run again"));
        let (what, remedy) = (what.to_owned(), remedy.trim_start().to_owned());
        Failed { what, remedy, follows: error.is_consequence(), missing }
    }
}

impl Rdma {
    /// Joins ranks that share no memory. Devices that do not take shared memory win over it: it is given up then.
    fn connect(
        rendezvous: &mut dyn Rendezvous,
        tcp: &Arc<tcp::Endpoint>,
        options: &Options,
        hosts: &mut Hosts,
        shm: &mut Option<Shm>,
    ) -> Result<Rdma> {
        let (rank, size) = (rendezvous.rank(), rendezvous.size());
        let neighbours = |a: usize| (0..size).filter(move |b| *b != a);
        let shares = |a: usize| neighbours(a).filter(|b| hosts.share(a, *b).is_ok()).collect::<Vec<_>>();
        let (without, anyone_shares) = (shares(rank), (0..size).any(|a| !shares(a).is_empty()));
        let devices = match &options.choice {
            Choice::Verbs(names) if !names.is_empty() => Devices::Named(names.clone()),
            _ => options.verbs.devices.clone(),
        };
        let all_pairs = matches!(options.choice, Choice::Verbs(_));
        let bounds = options.tcp.bounds;
        let options = verbs::Options { devices, all_pairs, without, bounds, ..options.verbs.clone() };
        let source = shm.as_ref().map(|shm| {
            let store = Arc::clone(shm.space().store());
            Box::new(move |bytes| store.alloc(bytes)) as Source
        });
        let first = Rdma::attempt(rendezvous, tcp, &options, source, hosts)?;
        let Some(why) = first.why.clone().filter(|_| anyone_shares) else { return Ok(first) };
        let second = Rdma::attempt(rendezvous, tcp, &options, None, hosts)?;
        if second.why.is_some() {
            return Ok(first);
        }
        let is_joined = second.verbs.as_ref().is_some_and(|v| neighbours(rank).any(|peer| v.joins(peer)));
        for (rank, is_joined) in gather(rendezvous, &is_joined)?.into_iter().enumerate() {
            hosts.given_up[rank] = is_joined.then(|| why.text.clone());
        }
        if is_joined {
            *shm = None;
        }
        Ok(second)
    }

    /// One attempt: all ranks succeed, or all hear why not.
    fn attempt(
        rendezvous: &mut dyn Rendezvous,
        tcp: &Arc<tcp::Endpoint>,
        options: &verbs::Options,
        source: Option<Source>,
        hosts: &Hosts,
    ) -> Result<Rdma> {
        let control = Arc::clone(tcp) as Arc<dyn Fabric>;
        let made = Verbs::connect_over(rendezvous, control, options, source);
        let told = made.as_ref().map(|verbs| !verbs.usage().1.is_empty()).map_err(Failed::of);
        let all = gather(rendezvous, &told)?;
        let failed = || all.iter().enumerate().filter_map(|(rank, told)| Some((rank, told.as_ref().err()?)));
        if let Some((rank, failed)) = failed().find(|(_, f)| !f.follows).or_else(|| failed().next()) {
            let is_misnamed = match &failed.missing {
                Some(name) => !gather(rendezvous, &verbs::names(options).contains(name))?.contains(&true),
                None => false,
            };
            let text = format!("{}: {}", hosts.name(rank), failed.what);
            let why = Some(Cause { rank, text, remedy: failed.remedy.clone(), is_misnamed });
            return Ok(Rdma { why, ..Rdma::default() });
        }
        let equipped = all.iter().map(|told| matches!(told, Ok(true))).collect();
        Ok(Rdma { verbs: Some(made?), equipped, are_named: options.devices != Devices::All, why: None })
    }

    fn joins(&self, rank: usize, peer: usize, hosts: &Hosts) -> std::result::Result<(), Why> {
        if let Some(why) = &self.why {
            return Err(Why::new(&why.text, true));
        }
        let Some(verbs) = &self.verbs else { return Err(Why::new("it was not tried", false)) };
        if verbs.joins(peer) {
            return Ok(());
        }
        let is_expected = self.are_named || self.equipped[rank] || self.equipped[peer];
        let why = match verbs.left_out().iter().find(|left| left.rank == peer) {
            Some(LeftOut { of: Some(of), why, .. }) => format!("{}: {why}", hosts.name(*of)),
            Some(LeftOut { why, .. }) => why.clone(),
            None => "it does not join them".into(),
        };
        Err(Why::new(why, is_expected))
    }
}
