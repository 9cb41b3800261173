//! The agents below this process. Up to a number of hosts are reached directly; where there are more, each of these reaches
//! some of the others, and so on, so that no host has more connections than that.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use fulmen::job::messages::{Below, Order, Place, Start};
use fulmen::{Error, Result};

use super::link::{Hear, LINGER, Link};
use super::ssh::{self, Reach};

/// An agent directly below, and those below it.
pub struct Branch {
    /// Its host's name.
    pub name: String,
    /// Its number, and those of the agents below it.
    pub hosts: Vec<u32>,
    /// The connection to it.
    pub link: Link,
    /// Since when the connection's process is gone.
    dead: Option<Instant>,
}

/// Deals hosts out, in order: those that are reached directly, each with those that it reaches.
pub fn deal(hosts: &[Place], fan_out: usize) -> Vec<(Place, Vec<Place>)> {
    let groups = fan_out.clamp(1, hosts.len().max(1));
    (0..groups)
        .filter_map(|i| hosts[i * hosts.len() / groups..(i + 1) * hosts.len() / groups].split_first())
        .map(|(head, rest)| (head.clone(), rest.to_vec()))
        .collect()
}

/// For each of these hosts that another of them reaches, that one.
pub fn above(hosts: &[Place], fan_out: usize) -> HashMap<u32, u32> {
    let mut all = HashMap::new();
    for (head, rest) in deal(hosts, fan_out) {
        let below = above(&rest, fan_out);
        let by = |host: u32| (host, below.get(&host).copied().unwrap_or(head.host));
        all.extend(rest.iter().map(|place| by(place.host)));
    }
    all
}

/// Starts the agents of all hosts below, as their task is, but for what is of each host's own. `hear`: who hears an agent
/// directly below and the numbers of those that speak through it.
///
/// # Errors
/// When a connection cannot be begun. Those that were are dropped.
pub fn grow<H: Hear>(start: &Start, mut hear: impl FnMut(&[u32]) -> H) -> Result<Vec<Branch>> {
    let below = &start.below;
    let Some(reach) = Reach::from_words(&below.ssh) else { return Ok(vec![]) };
    let copied = match &below.agent {
        Some(_) => None,
        None => {
            let bytes = std::env::current_exe().and_then(std::fs::read);
            let bytes = bytes.map_err(|e| Error::System { what: "--copy".into(), os: e.to_string() })?;
            Some(Arc::new(bytes))
        }
    };
    let mut branches = vec![];
    for (place, hosts) in deal(&below.hosts, below.fan_out as usize) {
        let command = match (&below.agent, &copied) {
            (Some(path), _) => ssh::agent(&String::from_utf8_lossy(path)),
            (None, first) => ssh::copied_agent(first.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        };
        let command = reach.command(&place.name, &command);
        let start = Start { place, below: Below { hosts, ..below.clone() }, ..start.clone() };
        branches.push(Branch::start(command, copied.clone(), start, &mut hear)?);
    }
    Ok(branches)
}

impl Branch {
    /// Starts an agent by `command`, with its task. `first`: an agent that is copied, and so is the program then.
    ///
    /// # Errors
    /// When the connection cannot be begun.
    pub fn start<H: Hear>(
        command: Command,
        first: Option<Arc<Vec<u8>>>,
        start: Start,
        hear: &mut impl FnMut(&[u32]) -> H,
    ) -> Result<Branch> {
        let name = start.place.name.clone();
        let hosts: Vec<u32> =
            std::iter::once(&start.place).chain(&start.below.hosts).map(|place| place.host).collect();
        let shown = command.get_program().to_string_lossy().into_owned();
        let program = first.is_some().then(|| path_of(&start.program.path));
        let link = Link::start(command, first, hear(&hosts)).map_err(|e| Error::Resources {
            what: format!("{name}: {shown} could not be started: {e}"),
            remedy: "see that it exists (--ssh), and raise the limits (ulimit -u, -n)".into(),
        })?;
        let outbox = link.outbox.clone();
        // Long programs wait for room, each for its own.
        let sent = thread::Builder::new().name("task".into()).spawn(move || {
            let part = |bytes: &[u8]| outbox.send(&Order::Part(bytes.to_vec()));
            if let Some(program) = program
                && let Err(e) = in_parts(&program, part)
            {
                // Without it the agent finds no program, and says so.
                eprintln!("fulmen-run: {}: {e}", program.display());
            }
            outbox.send(&Order::Start(Box::new(start)));
        });
        sent.map_err(|e| Error::Resources {
            what: format!("no thread: {e}"),
            remedy: "see ulimit -u".into(),
        })?;
        Ok(Branch { name, hosts, link, dead: None })
    }

    /// The number of the agent directly below.
    pub fn head(&self) -> u32 {
        self.hosts[0]
    }

    /// Whether the connection's process has been gone for a while, though its stream is held open by what it has started.
    pub fn is_abandoned(&mut self, now: Instant) -> bool {
        self.link.is_dead() && now - *self.dead.get_or_insert(now) > 2 * LINGER
    }
}

impl Drop for Branch {
    /// No connection is left.
    fn drop(&mut self) {
        self.link.outbox.close();
        self.link.cut();
    }
}

/// A path that has travelled as bytes.
pub fn path_of(bytes: &[u8]) -> PathBuf {
    Path::new(&std::ffi::OsString::from_vec(bytes.to_vec())).to_path_buf()
}

fn in_parts(path: &Path, part: impl Fn(&[u8]) -> bool) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut chunk = vec![0; 1 << 18];
    loop {
        let n = file.read(&mut chunk)?;
        if n == 0 || !part(&chunk[..n]) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(n: u32) -> Vec<Place> {
        (0..n).map(|host| Place { host, name: format!("h{host}"), ranks: vec![], vars: vec![] }).collect()
    }

    /// The most connections of any host, how many lie between the last host and the first process, and who was reached.
    fn reached(hosts: &[Place], fan_out: usize, seen: &mut Vec<u32>) -> (usize, usize) {
        let groups = deal(hosts, fan_out);
        let mut most = (groups.len(), 0);
        for (head, rest) in groups {
            seen.push(head.host);
            let (wide, deep) = reached(&rest, fan_out, seen);
            most = (most.0.max(wide), most.1.max(deep + 1));
        }
        most
    }

    #[test]
    fn everyone_is_reached_once_by_few_connections_each() {
        for (n, fan_out, deep) in [
            (0, 64, 0),
            (1, 64, 1),
            (64, 64, 1),
            (65, 64, 2),
            (4160, 64, 2),
            (4161, 64, 3),
            (7, 1, 7),
            (14, 2, 3),
        ] {
            let mut seen = vec![];
            let (wide, depth) = reached(&places(n), fan_out, &mut seen);
            assert!(wide <= fan_out && depth == deep, "{n} hosts by {fan_out}: {wide} wide, {depth} deep");
            assert_eq!(seen, (0..n).collect::<Vec<_>>(), "in order");
            // By the map too.
            let above = above(&places(n), fan_out);
            let calls = |by: Option<u32>| (0..n).filter(|host| above.get(host).copied() == by).count();
            assert!(calls(None) <= fan_out && (0..n.min(70)).all(|by| calls(Some(by)) <= fan_out));
        }
    }
}
