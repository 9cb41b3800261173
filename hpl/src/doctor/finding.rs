//! What is wrong, what it comes from, and what a person can do about it.

use serde::Serialize;

use super::facts::Link;

/// How much it matters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// Nothing to do.
    Note,
    /// It works, but slower or less safely than it could.
    Warning,
    /// It does not work.
    Failure,
}

/// Checks of a host.
pub const SYSTEM: &str = "system";
/// See [`SYSTEM`].
pub const CORES: &str = "cores";
/// See [`SYSTEM`].
pub const MEMORY: &str = "memory";
/// See [`SYSTEM`].
pub const CLOCK: &str = "clock";
/// See [`SYSTEM`].
pub const NICS: &str = "interfaces";
/// See [`SYSTEM`].
pub const NETWORK: &str = "network";
/// See [`SYSTEM`].
pub const LIBRARY: &str = "verbs library";
/// See [`SYSTEM`].
pub const SWITCH: &str = "rdma_ctl";
/// See [`SYSTEM`].
pub const PORTS: &str = "ports";
/// See [`SYSTEM`].
pub const BRIDGE: &str = "bridge0";
/// See [`SYSTEM`].
pub const MANAGERS: &str = "other managers";
/// See [`SYSTEM`].
pub const DEVICES: &str = "devices";

/// What a link is called: `rdma_en5 to mac-b`.
pub fn link_check(link: &Link) -> String {
    let to = format!("to {}", link.peer);
    if link.device.is_empty() { to } else { format!("{} {to}", link.device) }
}

/// One thing that was recognised.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// A name that scripts may rely on.
    pub id: &'static str,
    /// How much it matters.
    pub weight: Weight,
    /// The host; empty for what concerns several.
    pub host: String,
    /// The check that it belongs to: one of the names below, a device's name, or a link as [`link_check`] calls it.
    pub check: String,
    /// What was seen.
    pub seen: String,
    /// What it comes from.
    pub cause: String,
    /// What to do, in order; commands stand in backquotes.
    pub steps: Vec<String>,
}

impl Finding {
    /// A failure; cause and steps are added with [`Finding::because`] and [`Finding::then`].
    pub fn failure(id: &'static str, check: impl Into<String>, seen: impl Into<String>) -> Self {
        Finding {
            id,
            weight: Weight::Failure,
            host: String::new(),
            check: check.into(),
            seen: seen.into(),
            cause: String::new(),
            steps: Vec::new(),
        }
    }

    /// A warning.
    pub fn warning(id: &'static str, check: impl Into<String>, seen: impl Into<String>) -> Self {
        Finding { weight: Weight::Warning, ..Finding::failure(id, check, seen) }
    }

    /// A note.
    pub fn note(id: &'static str, check: impl Into<String>, seen: impl Into<String>) -> Self {
        Finding { weight: Weight::Note, ..Finding::failure(id, check, seen) }
    }

    /// With what it comes from.
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = cause.into();
        self
    }

    /// With one more thing to do.
    pub fn then(mut self, step: impl Into<String>) -> Self {
        self.steps.push(step.into());
        self
    }
}
