//! Reads `HPL.dat` in every dialect found in the field, and says what it takes.
//!
//! netlib's reader takes what `atoi` makes of each word and repairs in silence: `1e2` is 1, a missing
//! line shifts all that follow, two blanks in a list make a 0. Here whatever would run another
//! experiment than the file seems to ask for is an error, and what netlib repairs harmlessly is a
//! warning that says what was taken. All errors of a file are collected.

mod diagnostic;
mod dialect;
mod field;
mod lines;
mod lists;
mod reader;
mod values;
mod words;
mod write;

pub use diagnostic::Diagnostic;
pub use write::write;

use crate::params::Input;

/// A file that can be run.
#[derive(Clone, PartialEq, Debug)]
pub struct Parsed {
    /// What it asks for.
    pub input: Input,
    /// What was repaired, as netlib does in silence.
    pub warnings: Vec<Diagnostic>,
    /// What else the user should know, such as the dialect.
    pub notes: Vec<String>,
    /// Where its device sends the report, if that is no standard one: ready to print, unless a flag says otherwise.
    pub device: Option<String>,
}

/// Reads the bytes of `file` (a name, for messages).
///
/// # Errors
/// Everything that is wrong with it, in the order of the lines.
pub fn read(file: &str, bytes: &[u8]) -> Result<Parsed, Vec<Diagnostic>> {
    if let Some(message) = lines::no_text(bytes) {
        return Err(vec![Diagnostic {
            file: file.to_string(),
            line: 1,
            field: "layout",
            message: message.to_string(),
            remedy: "save it as plain text (ASCII or UTF-8)".to_string(),
            text: String::new(),
            span: 0..1,
        }]);
    }
    reader::Reader::new(file, bytes).read()
}

#[cfg(test)]
mod tests;
