//! Who keeps a job's failures, and knows who lives, when the ranks that share memory are only some of its ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::fabric::Fabric;
use crate::fabric::alarm::Alarm;

/// Another fabric of all ranks of the job.
pub struct Control {
    pub fabric: Arc<dyn Fabric>,
    /// Rings when `fabric` has failed.
    pub alarm: Arc<Alarm>,
}

/// The words of a rank that failed take no longer than this to come by the control fabric.
const WORDS: Duration = Duration::from_secs(1);

impl Control {
    /// Whether the job has failed. Costs a load when it has not.
    pub fn check(&self) -> Result<()> {
        if self.alarm.has_rung() { self.fabric.poll() } else { Ok(()) }
    }

    /// This error ends the job for all, unless another was first: that is returned.
    pub fn end(&self, error: Error) -> Error {
        self.fabric.fail(&error);
        self.fabric.poll().err().unwrap_or(error)
    }

    /// As [`Control::check`] of a rank that another has just left: had that failed, its words are under way.
    pub fn settle(&self) -> Result<()> {
        let until = Instant::now() + WORDS;
        while !self.alarm.has_rung() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.check()
    }
}
