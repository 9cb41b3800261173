//! How whoever waits elsewhere hears that a job has ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

type Bell = Box<dyn Fn() + Send>;

/// Rings once, from whichever thread finds the failure.
#[derive(Default)]
pub struct Alarm {
    rung: AtomicBool,
    bells: Mutex<Vec<Bell>>,
}

impl Alarm {
    /// Whether it has rung. Costs a load.
    pub fn has_rung(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }

    /// The job has ended.
    pub fn ring(&self) {
        // Under the lock: a bell that comes late finds `rung` set.
        let bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.rung.swap(true, Ordering::AcqRel) {
            bells.iter().for_each(|bell| bell());
        }
    }

    /// Rings `bell` too: at once, if the others have rung. It must neither wait nor call the fabric.
    pub fn add(&self, bell: impl Fn() + Send + 'static) {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_rung() {
            bell();
        }
        bells.push(Box::new(bell));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_bell_rings_once() {
        let (alarm, rings) = (Alarm::default(), Arc::new(AtomicUsize::new(0)));
        let add = || {
            let rings = Arc::clone(&rings);
            alarm.add(move || {
                rings.fetch_add(1, Ordering::Relaxed);
            });
        };
        add();
        assert!(!alarm.has_rung());
        alarm.ring();
        alarm.ring();
        assert!(alarm.has_rung());
        assert_eq!(rings.load(Ordering::Relaxed), 1);
        add();
        assert_eq!(rings.load(Ordering::Relaxed), 2);
    }
}
