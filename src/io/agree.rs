//! One verdict for all ranks: a file that one of them cannot use is of no use to the others.

use crate::comm::Group;
use crate::error::{Error, Result};

/// Separates the parts of what ranks tell each other; no message of ours has it.
const CUT: char = '\0';

/// What every rank has to say, by rank; or, on all of them, the first rank's error. Collective.
///
/// # Errors
/// The first that a rank gives, the same on all; when a rank is lost.
pub(super) fn agree(all: &Group, mine: Result<String>) -> Result<Vec<String>> {
    let told = match &mine {
        Ok(text) => format!("ok{CUT}{text}"),
        Err(error) => encode(error),
    };
    let everyones = all.all_gather_var(told.as_bytes())?;
    let mut texts = Vec::new();
    for (rank, bytes) in everyones.iter().enumerate() {
        let text = String::from_utf8_lossy(bytes);
        match text.strip_prefix("ok").and_then(|t| t.strip_prefix(CUT)) {
            Some(text) => texts.push(text.to_owned()),
            None => return Err(decode(&text, all, rank)),
        }
    }
    Ok(texts)
}

fn encode(error: &Error) -> String {
    let parts: &[&str] = match error {
        Error::Argument { name, value, problem, remedy } => &["argument", name, value, problem, remedy],
        Error::Resources { what, remedy } => &["resources", what, remedy],
        Error::System { what, os } => &["system", what, os],
        other => return format!("other{CUT}{other}"),
    };
    parts.join(&CUT.to_string())
}

/// The error of a rank, which it is said to be if there are others.
fn decode(text: &str, all: &Group, rank: usize) -> Error {
    let at = if all.len() > 1 {
        format!(" (rank {rank}, {})", all.fabric().host(all.ranks()[rank]))
    } else {
        String::new()
    };
    match text.split(CUT).collect::<Vec<_>>()[..] {
        ["argument", name, value, problem, remedy] => {
            Error::argument(name, value, format!("{problem}{at}"), remedy)
        }
        ["resources", what, remedy] => {
            Error::Resources { what: format!("{what}{at}"), remedy: remedy.into() }
        }
        ["system", what, os] => Error::System { what: what.into(), os: format!("{os}{at}") },
        _ => Error::Internal(format!("{}{at}", text.replace(CUT, " "))),
    }
}
