//! What is known of a failure, and which part of it the user is told.

use fulmen::job::messages::Sight;

/// Of failures of the same weight so many are told at most.
const MOST: usize = 16;

/// How it ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The exit code.
    pub code: u8,
    /// What failed first, in words that name rank and host; nothing when nothing did.
    pub words: Option<String>,
}

/// How much a failure explains: of several, the one that explains most is told, then the first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Weight {
    /// The user wanted it.
    Wanted,
    /// A rank was killed, failed by itself, or a host cannot take part.
    Cause,
    /// A host is out of reach.
    HostLost,
    /// A rank suffered from the failure of another.
    Consequence,
    /// A rank was told of such a failure by another rank.
    Echo,
}

/// All that was heard of failures, in order.
#[derive(Debug, Default)]
pub struct Evidence {
    failures: Vec<(Weight, u8, String)>,
    /// A rank that waited for the one that failed, and its words.
    noticed: Option<(String, String)>,
    /// What a rank sees of ranks that are lost.
    seen: Option<(String, Sight)>,
}

impl Evidence {
    /// One more failure: how much it explains, its exit code, its words.
    pub fn add(&mut self, weight: Weight, code: u8, words: String) {
        self.failures.push((weight, code, words));
    }

    /// A rank has noticed the failure of another, before it was told of it: over which link, and what it waited for.
    pub fn noticed(&mut self, who: &str, words: &str) {
        let first = || words.lines().next().unwrap_or_default().to_string();
        self.noticed.get_or_insert_with(|| (who.to_string(), first()));
    }

    /// What a rank sees of lost ranks. Who waits for one of them says more.
    pub fn sees(&mut self, who: &str, sight: Sight) {
        if self.seen.as_ref().is_none_or(|(_, seen)| sight.waits && !seen.waits) {
            self.seen = Some((who.to_string(), sight));
        }
    }

    /// The verdict. `started`: whether any rank was; before that all hosts that cannot take part are told.
    pub fn verdict(&self, started: bool) -> Verdict {
        let Some(best) = self.failures.iter().map(|(weight, ..)| *weight).min() else {
            return Verdict { code: 0, words: None };
        };
        let mut told = self.failures.iter().filter(|(weight, ..)| *weight == best);
        let (code, mut words) =
            told.next().map_or((0, String::new()), |(_, code, words)| (*code, words.clone()));
        if !started {
            let more: Vec<&str> = told.map(|(.., more)| more.as_str()).collect();
            let (some, rest) = more.split_at(more.len().min(MOST - 1));
            some.iter().for_each(|more| words = format!("{words}\n{more}"));
            if !rest.is_empty() {
                words += &format!("\nand {} more such", rest.len());
            }
        }
        // Who only repeats the cause has noticed nothing.
        if let Some((who, noticed)) = &self.noticed
            && matches!(best, Weight::Cause | Weight::HostLost)
            && !words.contains(noticed)
        {
            words = format!("{words}\n    noticed by {who}: {noticed}");
        } else if let Some((who, sight)) = &self.seen
            && best == Weight::HostLost
        {
            words = format!("{words}\n    of {who}: {}", sight.words);
        }
        Verdict { code, words: Some(words) }
    }
}
