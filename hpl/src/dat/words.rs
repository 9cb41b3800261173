//! Words as numbers, and what to say of those that are none.

use std::ops::Range;

use super::Diagnostic;
use super::field::Field;
use super::lines::{Line, Token, begins_like_number};
use super::reader::Reader;

/// netlib's integers have 32 bits; larger values are slips of the hand.
pub(super) const LARGEST: i64 = i32::MAX as i64;

/// A word taken as a number.
pub(super) enum Number {
    Whole(i64),
    /// Not one; the message and the remedy.
    Not(String, String),
}

impl Reader<'_> {
    /// The first word of a field's line, as a whole number within range.
    pub(super) fn whole(&mut self, field: Field) -> Option<(usize, Range<usize>, i64)> {
        let (at, token) = self.first(field)?;
        let line = self.lines[at].clone();
        match self.number(field, at, &token, &line) {
            Number::Whole(value) if value.abs() <= LARGEST => Some((at, token.span, value)),
            Number::Whole(value) => {
                self.push_error(
                    at,
                    field.name(),
                    format!("{value} is out of range"),
                    format!("write at most {LARGEST}"),
                    token.span,
                );
                None
            }
            Number::Not(message, remedy) => {
                self.push_error(at, field.name(), message, remedy, token.span);
                None
            }
        }
    }

    pub(super) fn first(&mut self, field: Field) -> Option<(usize, Token)> {
        let at = self.place(field);
        match self.lines[at].tokens.first() {
            Some(token) => Some((at, token.clone())),
            None => {
                // Reported once, though both its count and its list may ask.
                if !self.errors.iter().any(|d| d.line == self.lines[at].number) {
                    self.push_error(
                        at,
                        field.name(),
                        "the line is blank".into(),
                        format!("write the value of {}", field.name()),
                        0..1,
                    );
                }
                None
            }
        }
    }

    /// A word as a whole number; a label glued to it is cut off with a warning.
    pub(super) fn number(&mut self, field: Field, at: usize, token: &Token, line: &Line) -> Number {
        let text = token.text.as_str();
        if let Some(digits) = line.torn_off(token) {
            let message = format!("a NUL byte stands between `{text}` and `{digits}`");
            return Number::Not(message, format!("remove it: write {text}{digits}, or a blank in its place"));
        }
        if let Ok(value) = text.parse::<i64>() {
            return Number::Whole(value);
        }
        let digits = text.trim_start_matches(['+', '-']);
        let end =
            text.len() - digits.len() + digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let (head, tail) = text.split_at(end);
        if let (Ok(value), Some(next)) = (head.parse::<i64>(), tail.chars().next()) {
            let rest: String = line.text.chars().skip(token.span.start + end).collect();
            if next == '#' || next.is_alphabetic() && Field::meant_by(&rest).contains(&field) {
                let message = format!("the label is glued to the value; {value} is taken");
                self.push_warning(
                    at,
                    field.name(),
                    message,
                    "put a blank between them".into(),
                    token.span.clone(),
                );
                return Number::Whole(value);
            }
        }
        if !begins_like_number(text) {
            return Number::Not(
                format!("`{text}` is not a number"),
                "write a whole number (is it a placeholder that was never filled in?)".into(),
            );
        }
        if digits.len() > 18 && digits.bytes().all(|b| b.is_ascii_digit()) {
            return Number::Not(format!("`{text}` is out of range"), format!("write at most {LARGEST}"));
        }
        let plain: String = text.chars().filter(|c| !matches!(c, ',' | '_' | '\'')).collect();
        let remedy = match plain.parse::<f64>() {
            Ok(value) if value.fract() == 0.0 && value.abs() <= LARGEST as f64 => {
                // Groups of three digits are thousands; others are a list.
                let list = text.split(',').skip(1).any(|group| group.len() != 3);
                let blanks = text.replace(',', " ");
                match text.contains(',') {
                    _ if list => format!("write {blanks}"),
                    true => format!("write {} for one value, {blanks} for a list", value as i64),
                    false => format!("write {}", value as i64),
                }
            }
            _ => "write a whole number, in digits".to_string(),
        };
        Number::Not(format!("`{text}` is not a whole number"), remedy)
    }

    /// Index of a field's line.
    pub(super) fn place(&self, field: Field) -> usize {
        self.fields.iter().position(|f| *f == field).expect("asked only for fields of the dialect")
    }

    pub(super) fn push_error(
        &mut self,
        at: usize,
        field: &'static str,
        message: String,
        remedy: String,
        span: Range<usize>,
    ) {
        let diagnostic = self.diagnostic(at, field, message, remedy, span);
        self.errors.push(diagnostic);
    }

    pub(super) fn push_warning(
        &mut self,
        at: usize,
        field: &'static str,
        message: String,
        remedy: String,
        span: Range<usize>,
    ) {
        let diagnostic = self.diagnostic(at, field, message, remedy, span);
        self.warnings.push(diagnostic);
    }

    pub(super) fn diagnostic(
        &self,
        at: usize,
        field: &'static str,
        message: String,
        remedy: String,
        span: Range<usize>,
    ) -> Diagnostic {
        let (line, text) = self.lines.get(at).map_or((at + 1, String::new()), |l| (l.number, l.text.clone()));
        Diagnostic { file: self.file.to_string(), line, field, message, remedy, text, span }
    }
}
