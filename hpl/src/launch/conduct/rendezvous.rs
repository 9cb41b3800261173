//! The ranks' rendezvous: in each round everyone says a word, and gets all of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fulmen::job::messages::LONGEST_WORD;

/// The words of one round, as far as they have come.
#[derive(Debug)]
struct Round {
    parts: Vec<Option<Vec<u8>>>,
    since: Instant,
}

/// All rounds under way.
#[derive(Debug)]
pub struct Rendezvous {
    size: usize,
    rounds: BTreeMap<u32, Round>,
}

/// A word that no rank of ours says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strange;

impl Rendezvous {
    /// Of so many ranks.
    pub fn new(size: usize) -> Rendezvous {
        Rendezvous { size, rounds: BTreeMap::new() }
    }

    /// A rank's word; all words of the round, by rank, when it was the last.
    ///
    /// # Errors
    /// [`Strange`] for a word that is too long, comes twice, or belongs to another time.
    pub fn word(
        &mut self,
        rank: usize,
        round: u32,
        bytes: Vec<u8>,
        now: Instant,
    ) -> Result<Option<Vec<Vec<u8>>>, Strange> {
        let next = self.rounds.keys().next().copied();
        // Ranks are at most one round apart.
        let far = next.is_some_and(|n| round.abs_diff(n) > 1);
        let size = self.size;
        let this = self.rounds.entry(round).or_insert_with(|| Round { parts: vec![None; size], since: now });
        if far || bytes.len() > LONGEST_WORD || this.parts[rank].is_some() {
            return Err(Strange);
        }
        this.parts[rank] = Some(bytes);
        if this.parts.iter().any(Option::is_none) {
            return Ok(None);
        }
        Ok(self.rounds.remove(&round).map(|r| r.parts.into_iter().flatten().collect()))
    }

    /// Who is missing in a round that has waited for longer than this.
    pub fn late(&self, patience: Duration, now: Instant) -> Option<Vec<usize>> {
        let round = self.rounds.values().find(|r| now.saturating_duration_since(r.since) > patience)?;
        Some((0..self.size).filter(|&r| round.parts[r].is_none()).collect())
    }
}
