//! How long something is waited for on a machine that may give this process no core.

use std::time::{Duration, Instant};

/// A wait that counts what it could have seen. Who got no core for seconds has not looked, and the other end, or what plays the
/// device, may be of the same machine: of the time between two looks no more than a quarter of the patience counts.
pub struct Wait {
    patience: Duration,
    waited: Duration,
    looked: Instant,
}

impl Wait {
    /// One that begins now.
    pub fn begin(patience: Duration, now: Instant) -> Self {
        Wait { patience, waited: Duration::ZERO, looked: now }
    }

    /// Something has come: it begins anew.
    pub fn again(&mut self, now: Instant) {
        *self = Wait::begin(self.patience, now);
    }

    /// Whether patience is over, but for a last look. To be asked before each look.
    pub fn is_over(&mut self, now: Instant) -> bool {
        self.waited += (now - self.looked).min(self.patience / 4);
        self.looked = now;
        self.waited >= self.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(2);

    /// How long it takes until it is over, if between the looks so many milliseconds go by in turn.
    fn over_after(gaps: &[u64]) -> Duration {
        let begun = Instant::now();
        let (mut wait, mut now) = (Wait::begin(PATIENCE, begun), begun);
        for gap in gaps.iter().cycle() {
            now += Duration::from_millis(*gap);
            if wait.is_over(now) {
                break;
            }
        }
        now - begun
    }

    #[test]
    fn time_without_a_look_counts_little() {
        assert_eq!(over_after(&[1]), PATIENCE);
        assert_eq!(over_after(&[499, 1]), PATIENCE);
        // Once three seconds long, then short.
        let mut gaps = vec![1; 1 << 12];
        gaps[100] = 3000;
        assert_eq!(over_after(&gaps), PATIENCE + Duration::from_millis(3000 - 500));
        // It ends, however slow the looks are.
        assert_eq!(over_after(&[10_000]), Duration::from_secs(40));
    }

    #[test]
    fn what_comes_begins_it_anew() {
        let begun = Instant::now();
        let mut wait = Wait::begin(PATIENCE, begun);
        let at = |ms: u64| begun + Duration::from_millis(ms);
        assert!((1..8).all(|i| !wait.is_over(at(i * 250))));
        wait.again(at(1900));
        assert!(
            (8..15).all(|i| !wait.is_over(at(i * 250))) && !wait.is_over(at(3899)) && wait.is_over(at(3900))
        );
    }
}
