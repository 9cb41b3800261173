//! Fills the facts: every question to the system is a command in a child of its own, with a watchdog, because a driver
//! in disorder does not answer and never will. What commands print is read by pure functions.

mod child;
mod linux;
mod load;
mod macos;

pub use child::Child;

use std::time::Duration;

use super::facts::{Answer, Cpu, Facts, Memory};
use crate::machine;

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who runs commands: [`Child`], or a test with what they printed elsewhere.
pub trait Run {
    /// What `command` (program and arguments) printed, within `patience`. A command that ends with a failure is
    /// [`Answer::Refused`] with what it said.
    fn run(&self, command: &[&str], patience: Duration) -> Answer<String>;
}

/// Everything about this host.
pub fn gather(run: &dyn Run) -> Facts {
    let host = machine::Host::detect();
    let mut facts = Facts {
        host: fulmen::fabric::host_name(),
        fulmen: env!("CARGO_PKG_VERSION").into(),
        cpu: Cpu { cores: host.cores, ..Cpu::default() },
        memory: Memory { available: host.available, bound: host.bound, total: None },
        ..Facts::default()
    };
    facts.system.os = std::env::consts::OS.into();
    match facts.system.os.as_str() {
        "macos" => macos::gather(run, &mut facts),
        "linux" => linux::gather(run, std::path::Path::new("/"), &mut facts),
        _ => {}
    }
    facts
}

fn ask(run: &dyn Run, command: &[&str]) -> Answer<String> {
    run.run(command, PATIENCE)
}

/// What an answer says when it is read so; a reader that finds nothing leaves the question open.
fn read<T>(answer: Answer<String>, reader: impl FnOnce(&str) -> Option<T>) -> Answer<T> {
    match answer {
        Answer::Is(text) => reader(&text).map_or(Answer::Unasked, Answer::Is),
        Answer::Unasked => Answer::Unasked,
        Answer::Refused(words) => Answer::Refused(words),
        Answer::Hung(seconds) => Answer::Hung(seconds),
        Answer::Died(signal) => Answer::Died(signal),
    }
}

/// The value after a key at the start of a line: `key: value`, `key value`, `key = value`.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix(key)?;
        let value = rest.trim_start_matches([':', '=', ' ', '\t']);
        // `max_qp` is not `max_qp_wr`.
        (rest.len() != value.len()).then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Commands that print what they printed elsewhere.
    #[derive(Default)]
    pub(super) struct Recorded(pub HashMap<String, Answer<String>>);

    impl Recorded {
        pub(super) fn with(mut self, command: &str, prints: &str) -> Self {
            self.0.insert(command.into(), Answer::Is(prints.into()));
            self
        }
    }

    impl Run for Recorded {
        fn run(&self, command: &[&str], _: Duration) -> Answer<String> {
            let none = || Answer::Refused("No such file or directory".into());
            self.0.get(&command.join(" ")).cloned().unwrap_or_else(none)
        }
    }

    #[test]
    fn this_host_is_described() {
        let facts = gather(&Child);
        assert!(!facts.host.is_empty() && facts.cpu.cores >= 1);
        assert_eq!(facts.system.os, std::env::consts::OS);
        assert!(!facts.system.version.is_empty() || !matches!(std::env::consts::OS, "linux" | "macos"));
    }

    #[test]
    fn a_key_is_a_whole_word() {
        let text = "\tmax_qp_wr:\t\t4095\n\tmax_qp:\t\t11\nCPU_Speed_Limit = 70\n sleep  0\n";
        assert_eq!(value(text, "max_qp"), Some("11"));
        assert_eq!(value(text, "CPU_Speed_Limit"), Some("70"));
        assert_eq!(value(text, "sleep"), Some("0"));
        assert_eq!(value(text, "max"), None);
    }
}
