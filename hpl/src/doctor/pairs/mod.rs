//! The cables between the hosts of a job, each tried from both of its ends: whether it connects, what passes, how fast.
//!
//! Each end is a process of its own (`child`), for a driver may get stuck or crash; its parent, a rank of the job,
//! watches it (`watched`) and passes its words on to the other end through the job's rendezvous. So a cable is described
//! whatever else joins the hosts, and an end that is lost is told to the other, which ends as well.

mod child;
mod plan;
mod tcp;
mod watched;

pub use child::run as child;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use fulmen::fabric::verbs::Devices;
use fulmen::fabric::verbs::Service;
use fulmen::fabric::verbs::Step as At;
use fulmen::fabric::verbs::probe::{self, Known, Note, Outcome as How, Pair};
use fulmen::job::env::Starter;
use fulmen::{Error, Job, Result};
use serde::{Deserialize, Serialize};

use self::child::Order;
use self::plan::{Cable, End, Member};
use self::tcp::Door;
use self::watched::{Ending, Notes, Watched, Word};
use super::cache::{self, Key};
use super::facts::{Act, Facts, Link, Outcome, Step, Together, Writes};
use super::gather;
use super::job::all_gather;
use super::notes;

/// How long cables are tried; a launcher of ours waits as long as people do, others' ranks have a minute in all.
pub const ALTOGETHER: Duration = Duration::from_secs(300);
const WITHOUT_OURS: Duration = Duration::from_secs(20);

/// How long that is for the ranks of a job.
pub fn patience(job: &Job) -> Duration {
    match job.starter() {
        Starter::FulmenRun { .. } => ALTOGETHER,
        _ => WITHOUT_OURS,
    }
}

/// What came of the cables.
#[derive(Default)]
pub struct Tried {
    /// Each link with the index of its host.
    pub links: Vec<(usize, Link)>,
    /// Cables for which no time was left.
    pub left: usize,
    /// Thunderbolt devices that work and lead to no other host of the job: index of the host, name.
    pub unjoined: Vec<(usize, String)>,
}

/// Tries all cables between the hosts of a job; collective. `ranks`: the ranks of each host; `all`: the hosts' facts;
/// `devices`: as rank 0 knows them.
///
/// # Errors
/// When a rank is lost.
pub fn look(job: &Job, ranks: &[Vec<usize>], all: &[Facts], devices: &Devices, fresh: bool) -> Result<Tried> {
    let cables = tell_all(job, &if job.rank() == 0 { planned(ranks, all, devices) } else { Vec::new() })?;
    let cables: Vec<Cable> = cables.into_iter().next().unwrap_or_default();
    let start = Instant::now();
    let patience = patience(job);
    let mut mine: Vec<(usize, Link)> = Vec::new();
    let mut done = 0;
    for round in plan::rounds(&cables) {
        // Rank 0's clock counts.
        if tell_all(job, &(start.elapsed() > patience))?.first() == Some(&true) {
            break;
        }
        let of_mine = |end: &End| end.rank == job.rank();
        let cable = round.iter().map(|&i| &cables[i]).find(|cable| cable.iter().any(of_mine));
        let tried = cable.map(|cable| {
            let end = usize::from(of_mine(&cable[1]));
            (&cable[end], &cable[1 - end], end)
        });
        match tried {
            Some((near, far, end)) => mine.push((near.host, one(job, all, near, far, end, fresh)?)),
            None => while tell_all(job, &Word::None)?.iter().any(|word| matches!(word, Word::Is(_))) {},
        }
        done += round.len();
    }
    let links = tell_all(job, &mine)?.into_iter().flatten().collect();
    let is_joined = |host: usize, device: &str| {
        cables.iter().flatten().any(|end| (end.host, end.device.as_str()) == (host, device))
    };
    let unjoined = plan::thunderbolt(all).into_iter().filter(|(host, device)| !is_joined(*host, device));
    let unjoined = if all.len() > 1 { unjoined.collect() } else { Vec::new() };
    Ok(Tried { links: both_ends(all, links), left: cables.len() - done, unjoined })
}

/// The first two ranks of each host try its devices: two where a cable leads from a host to itself.
fn planned(ranks: &[Vec<usize>], all: &[Facts], devices: &Devices) -> Vec<Cable> {
    let mut members = Vec::new();
    for (host, (ranks, facts)) in ranks.iter().zip(all).enumerate() {
        let ports = plan::ports(facts);
        members.extend(ranks.iter().take(2).map(|&rank| Member { rank, host, ports: ports.clone() }));
    }
    plan::cables(&members, devices)
}

/// Tries a cable from this rank's end, while another rank does from its.
fn one(job: &Job, all: &[Facts], near: &End, far: &End, end: usize, fresh: bool) -> Result<Link> {
    let (here, there) = (&all[near.host], &all[far.host]);
    let key = Key::of_pair((here, &near.device), (there, &far.device));
    let folder = cache::folder(&here.system);
    let known = folder.as_deref().filter(|_| !fresh).and_then(|folder| cache::recall(folder, &key));
    let (own, address) = (ipv4(here, &near.device), ipv4(there, &far.device));
    let mut link = Link {
        peer: there.host.clone(),
        device: near.device.clone(),
        far: far.device.clone(),
        address: address.map_or(String::new(), |a| a.to_string()),
        ..Link::default()
    };
    // TCP first: what keeps it from the peer may explain the rest.
    let door = Door::open(own);
    let said = tell_all(job, &Word::Is(door.word()))?;
    if let Some(Word::Is(theirs)) = said.get(far.rank) {
        door.knock(&gather::Child, here, address, theirs, &mut link);
    }
    let mut watched = Watched::start(&Order { device: near.device.clone(), end, known });
    let mut other = None;
    loop {
        let word = watched.next();
        let all = tell_all(job, &word)?;
        match all.get(far.rank) {
            Some(Word::Is(theirs)) if matches!(word, Word::Is(_)) => watched.hear(theirs),
            Some(Word::Over(ending)) => {
                other = Some(*ending);
                watched.hang_up();
            }
            _ => {}
        }
        if !all.iter().any(|word| matches!(word, Word::Is(_))) {
            break;
        }
    }
    drop(door);
    let (ending, notes) = watched.end();
    if let (Some(folder), Some(found)) = (folder, worth_keeping(&notes)) {
        cache::keep(&folder, &key, &found);
    }
    Ok(told(link, &notes, known, ending, other))
}

/// What the builds alone decide: that all passes. What does not may be the cable's fault or a moment's, and is tried again.
fn worth_keeping(notes: &Notes) -> Option<Known> {
    let found = notes.found.as_ref().filter(|pair| pair.known.slot == probe::LARGEST)?;
    let is_well = |note: &Note| match note.outcome {
        None | Some(How::Done) => true,
        // There is no such kind of connection. Little memory is another matter.
        Some(How::Answered(_)) => note.step == At::CreateQp,
        // A new queue pair carries nothing, now and then.
        Some(_) => note.step == At::WarmUp,
    };
    notes.steps.iter().all(is_well).then_some(found.known)
}

/// The IPv4 address that a device stands for.
fn ipv4(facts: &Facts, device: &str) -> Option<Ipv4Addr> {
    let device = facts.rdma.devices.get()?.iter().find(|d| d.name == device)?;
    device.ipv4().map(|(_, address)| address)
}

/// What became of a link, from one end's notes and from how the processes at this end and at the other ended.
fn told(mut link: Link, notes: &Notes, known: Option<Known>, ending: Ending, other: Option<Ending>) -> Link {
    let (mut heard, mut unheard_since, mut tried_size) = (0, 0, 0);
    for note in &notes.steps {
        let Some(step) = notes::step(note) else { continue };
        let is_silent_start = step == Step { act: Act::WarmUp, outcome: Outcome::Silent };
        if step.act == Act::WarmUp {
            // Several attempts of one size: queue pairs made anew.
            if note.number != tried_size {
                (tried_size, unheard_since) = (note.number, 0);
            }
            if step.outcome == Outcome::Done {
                heard += 1;
                link.remade += unheard_since;
                unheard_since = 0;
            }
            unheard_since += u32::from(is_silent_start);
        }
        if step.outcome != Outcome::Done && !is_silent_start && step.act != Act::Write {
            link.steps.push(step);
        }
    }
    let outcome = match ending {
        Ending::Hung(seconds) => Some(Outcome::Hung(seconds)),
        Ending::Died(signal) => Some(Outcome::Died(signal)),
        Ending::Done | Ending::Failed => None,
    };
    link.steps.extend(outcome.map(|outcome| notes::last(&notes.steps, outcome)));
    // The other end's part is added by `both_ends`.
    link.delivered = (heard > 0 || unheard_since > 0).then_some((heard, 0));
    let before = known.map(|known| known.slot as u64);
    link.together = notes.found.as_ref().map(|pair| together(pair, before, &notes.steps));
    link.words = match ending {
        Ending::Failed => Some(format!(
            "the process that tries the device could not be started, or could not write into {}",
            std::env::temp_dir().display()
        )),
        _ => notes.gave.clone(),
    };
    if link.together.is_none() && link.steps.is_empty() {
        match other {
            Some(Ending::Hung(seconds)) => link.silent = Some(seconds),
            Some(Ending::Died(_) | Ending::Failed) => link.side_channel = Some(0),
            Some(Ending::Done) | None => {}
        }
        // It told why it gave up.
        if notes.steps.iter().any(|note| note.outcome == Some(How::Left)) && link.silent.is_none() {
            link.side_channel = Some(0);
        }
    }
    link
}

fn together(pair: &Pair, before: Option<u64>, steps: &[Note]) -> Together {
    let Known { slot, window, writes } = pair.known;
    Together {
        slot: slot as u64,
        before: before.filter(|before| *before > slot as u64),
        window: window as u64,
        round_trip_us: pair.round_trip * 1e6,
        rate: pair.rate,
        rate_both_ways: pair.rate_both_ways,
        writes: match writes {
            probe::Writes::NotAsked => Writes::NotAsked,
            probe::Writes::No => Writes::No,
            probe::Writes::Over(Service::Rc) => Writes::Reliable,
            probe::Writes::Over(Service::Uc) => Writes::Unreliable,
        },
        remembered: steps.iter().all(|note| note.step != At::Several),
    }
}

/// To what each end knows, what the other one heard; and who only failed because the other did says so.
fn both_ends(all: &[Facts], links: Vec<(usize, Link)>) -> Vec<(usize, Link)> {
    let far_end = |link: &Link| {
        let is_it = |(host, far): &&(usize, Link)| {
            all[*host].host == link.peer && (&far.device, &far.far) == (&link.far, &link.device)
        };
        links.iter().find(is_it).map(|(_, far)| far)
    };
    let completed = |link: &Link| {
        let mut link = link.clone();
        let Some(far) = far_end(&link) else { return link };
        if let (Some((here, _)), Some((there, _))) = (link.delivered, far.delivered) {
            link.delivered = Some((here, there));
        }
        let is_follower = link.together.is_none() && link.steps.is_empty() && !far.steps.is_empty();
        if is_follower && link.silent.is_none() {
            (link.delivered, link.side_channel) = (None, Some(0));
        }
        link
    };
    links.iter().map(|(host, link)| (*host, completed(link))).collect()
}

/// Everyone's value; collective.
fn tell_all<T: Serialize + for<'a> Deserialize<'a>>(job: &Job, mine: &T) -> Result<Vec<T>> {
    let garbled = |e: &dyn std::fmt::Display| Error::Internal(format!("a word of the doctor: {e}"));
    let bytes = postcard::to_stdvec(mine).map_err(|e| garbled(&e))?;
    all_gather(job, &bytes)?.iter().map(|b| postcard::from_bytes(b).map_err(|e| garbled(&e))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(slot: usize, steps: &[(At, u64, How)]) -> Notes {
        let known = Known { slot, window: 4, writes: probe::Writes::NotAsked };
        let found = Pair { far: "rdma_en4".into(), known, round_trip: 1e-5, rate: 5e9, rate_both_ways: 4e9 };
        let note =
            |(step, number, how): &(At, u64, How)| Note { step: *step, number: *number, outcome: Some(*how) };
        Notes { steps: steps.iter().map(note).collect(), found: Some(found), gave: None }
    }

    #[test]
    fn only_what_the_builds_decide_is_kept() {
        let all = probe::LARGEST;
        let fine = (At::Several, 4, How::Done);
        let kept = |slot, step| worth_keeping(&notes(slot, &[fine, step])).is_some();
        assert!(kept(all, fine));
        assert!(kept(all, (At::WarmUp, 4096, How::Silent)), "a new queue pair did");
        assert!(kept(all, (At::CreateQp, 64, How::Answered(95))), "there are no unreliable ones");
        // Long messages, or many, are lost by a bad cable; a write too; and memory is a setting.
        assert!(!kept(64 << 10, (At::WarmUp, all as u64, How::Silent)));
        assert!(!kept(4096, fine));
        assert!(!kept(all, (At::Several, 8, How::Silent)));
        assert!(!kept(all, (At::Write, 4096, How::Silent)));
        assert!(!kept(all, (At::Register, 2, How::Answered(12))));
        assert!(!kept(all, (At::Several, 8, How::Left)), "the other end has seen something");
    }

    #[test]
    fn messages_that_passed_before_are_missed() {
        let of = |slot, known: Option<usize>| {
            let known = known.map(|slot| Known { slot, window: 4, writes: probe::Writes::NotAsked });
            told(Link::default(), &notes(slot, &[]), known, Ending::Done, None).together.unwrap().before
        };
        assert_eq!(of(64 << 10, Some(probe::LARGEST)), Some(512 << 10));
        assert_eq!((of(probe::LARGEST, Some(probe::LARGEST)), of(4096, None)), (None, None));
    }
}
