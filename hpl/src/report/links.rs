//! What joins the ranks of a job that a launcher has started.

use fulmen::fabric::mixed::Step;
use serde::{Deserialize, Serialize};

use super::{Job, RankPlace};
use crate::units;

/// Of larger jobs the links are not told one by one.
pub const MOST_RANKS: usize = 64;

/// What joins two ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankLink {
    /// The two, the lower first.
    pub ranks: [usize; 2],
    /// `shm`, `verbs` or `tcp`.
    pub transport: String,
    /// In detail: interface and addresses, or devices.
    pub link: String,
    /// What would have been better and might have been expected, each with its reason.
    pub instead_of: Vec<String>,
}

impl RankLink {
    /// Those of a rank to higher ones; the lower rank of a pair tells for both.
    pub fn of(rank: usize, steps: &[Step]) -> Vec<RankLink> {
        let higher = steps.iter().filter(|step| step.peer > rank);
        let link = |step: &Step| RankLink {
            ranks: [rank, step.peer],
            transport: step.over.name().into(),
            link: step.link.clone(),
            instead_of: step.instead_of.clone(),
        };
        higher.map(link).collect()
    }
}

/// Pairs for which the best was not to be had, a line for each reason.
pub fn steps_down(job: &Job) -> Vec<String> {
    let mut seen: Vec<(&[String], Vec<&RankLink>)> = vec![];
    for link in job.links.iter().filter(|link| !link.instead_of.is_empty()) {
        match seen.iter_mut().find(|(why, _)| *why == link.instead_of.as_slice()) {
            Some((_, links)) => links.push(link),
            None => seen.push((&link.instead_of, vec![link])),
        }
    }
    let line = |(why, links): (&[String], Vec<&RankLink>)| {
        let more = match links.len() {
            1 => String::new(),
            n => format!(" (and {} like them)", units::count(n - 1, "pair")),
        };
        // What others pass on takes its time on their links too.
        let warning = if links[0].link.starts_with("tcp through") { "warning: " } else { "" };
        format!("{warning}{}{more}: {}; using {}", pair(job, links[0]), why.join("; "), links[0].link)
    };
    seen.into_iter().map(line).collect()
}

/// Which ranks share a host, and what joins each two.
pub fn all(job: &Job) -> Vec<String> {
    let mut hosts: Vec<(&str, Vec<String>)> = vec![];
    for RankPlace { rank, host, .. } in &job.places {
        match hosts.iter_mut().find(|(name, _)| name == host) {
            Some((_, ranks)) => ranks.push(rank.to_string()),
            None => hosts.push((host, vec![rank.to_string()])),
        }
    }
    let host = |(host, ranks): (&str, Vec<String>)| {
        format!("  {host}: rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(" "))
    };
    let link = |link: &RankLink| format!("  {}: {}", pair(job, link), link.link);
    hosts.into_iter().map(host).chain(job.links.iter().map(link)).collect()
}

fn pair(job: &Job, link: &RankLink) -> String {
    let host = |rank: usize| job.places.iter().find(|p| p.rank == rank).map_or("?", |p| p.host.as_str());
    let [a, b] = link.ranks;
    format!("rank {a} ({}) and rank {b} ({})", host(a), host(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        let link = |a, b, transport: &str, link: &str, why: &[&str]| RankLink {
            ranks: [a, b],
            transport: transport.into(),
            link: link.into(),
            instead_of: why.iter().map(|w| (*w).into()).collect(),
        };
        let place = |(rank, host): (usize, &str)| RankPlace { rank, host: host.into(), threads: 1 };
        Job {
            places: ["a", "a", "b"].into_iter().enumerate().map(place).collect(),
            links: vec![
                link(0, 1, "shm", "shm", &[]),
                link(0, 2, "tcp", "tcp over en5 (x to y)", &["rdma: not enabled on b"]),
                link(1, 2, "tcp", "tcp over en5 (x to y)", &["rdma: not enabled on b"]),
            ],
            ..Job::default()
        }
    }

    #[test]
    fn a_reason_is_told_once() {
        let lines = steps_down(&job());
        let line = "rank 0 (a) and rank 2 (b) (and 1 pair like them): rdma: not enabled on b; using tcp over en5 (x to y)";
        assert_eq!(lines, [line]);
    }

    #[test]
    fn all_links_and_who_shares_a_host() {
        assert_eq!(
            all(&job()),
            [
                "  a: ranks 0 1",
                "  b: rank 2",
                "  rank 0 (a) and rank 1 (a): shm",
                "  rank 0 (a) and rank 2 (b): tcp over en5 (x to y)",
                "  rank 1 (a) and rank 2 (b): tcp over en5 (x to y)",
            ]
        );
    }
}
