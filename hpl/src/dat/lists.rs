//! The lines that hold lists, and the counts before them.

use std::fmt::Display;
use std::ops::Range;

use super::field::Field;
use super::lines::{self, Line, begins_like_number};
use super::reader::Reader;
use super::words::{LARGEST, Number};
use crate::params::DEEPEST;

/// The longest list that netlib takes.
const NETLIB_LIST: i64 = 20;

/// Values beyond the count that a warning names.
const UNUSED_SHOWN: usize = 6;

impl Reader<'_> {
    pub(super) fn grids(&mut self) -> Vec<(usize, usize)> {
        let count = self.count(Field::GridCount);
        let ps = self.values(Field::GridCount, count, Field::Ps);
        let qs = self.values(Field::GridCount, count, Field::Qs);
        let ps = self.at_least(Field::Ps, ps, 1);
        let qs = self.at_least(Field::Qs, qs, 1);
        ps.into_iter().zip(qs).collect()
    }

    pub(super) fn list(&mut self, count: Field, values: Field, least: i64) -> Vec<usize> {
        let wanted = self.count(count);
        let found = self.values(count, wanted, values);
        self.at_least(values, found, least)
    }

    /// Panels ahead, no more than are kept.
    pub(super) fn depths(&mut self) -> Vec<usize> {
        let wanted = self.count(Field::DepthCount);
        let found = self.values(Field::DepthCount, wanted, Field::Depths);
        let deepest = found.iter().filter(|v| v.1 > DEEPEST as i64 && v.1 <= LARGEST).max_by_key(|v| v.1);
        if let Some((span, deepest)) = deepest.cloned() {
            let message =
                format!("{deepest}: {DEEPEST} panels are kept ahead at most, and {DEEPEST} is taken");
            let remedy = "deeper look-ahead costs memory and gains nothing".to_string();
            self.push_warning(self.place(Field::Depths), "DEPTH", message, remedy, span);
        }
        let depths = self.at_least(Field::Depths, found, 0);
        depths.into_iter().map(|depth| depth.min(DEEPEST)).collect()
    }

    pub(super) fn choices<T: Copy + Display>(
        &mut self,
        count: Field,
        values: Field,
        table: &[T],
        otherwise: T,
    ) -> Vec<T> {
        let wanted = self.count(count);
        let found = self.values(count, wanted, values);
        let at = self.place(values);
        found.into_iter().map(|(span, value)| self.pick(values, at, span, value, table, otherwise)).collect()
    }

    pub(super) fn pick<T: Copy + Display>(
        &mut self,
        field: Field,
        at: usize,
        span: Range<usize>,
        value: i64,
        table: &[T],
        otherwise: T,
    ) -> T {
        if let Some(&choice) = usize::try_from(value).ok().and_then(|i| table.get(i)) {
            return choice;
        }
        let all: Vec<String> = table.iter().enumerate().map(|(i, c)| format!("{i} {c}")).collect();
        let message = format!("{value} is not one of them; {otherwise} is taken, as xhpl does");
        self.push_warning(at, field.name(), message, format!("write {}", all.join(", ")), span);
        otherwise
    }

    pub(super) fn at_least(
        &mut self,
        field: Field,
        values: Vec<(Range<usize>, i64)>,
        least: i64,
    ) -> Vec<usize> {
        let (at, name) = (self.place(field), field.name());
        let mut kept = vec![];
        for (span, value) in values {
            if value < least {
                self.push_error(
                    at,
                    name,
                    format!("{value}: {name} must be at least {least}"),
                    format!("write {least} or more"),
                    span,
                );
            } else if value > LARGEST {
                self.push_error(
                    at,
                    name,
                    format!("{value} is out of range"),
                    format!("write at most {LARGEST}"),
                    span,
                );
            } else {
                kept.push(value as usize);
            }
        }
        kept
    }

    /// The number of values that a count line asks for.
    pub(super) fn count(&mut self, field: Field) -> Option<i64> {
        let (at, span, count) = self.whole(field)?;
        if count < 1 {
            self.push_error(
                at,
                field.name(),
                format!("{count}: at least one value is needed"),
                "write how many values the next line has".into(),
                span,
            );
            return None;
        }
        if count > NETLIB_LIST {
            self.push_warning(
                at,
                field.name(),
                format!("{count} values: xhpl takes at most {NETLIB_LIST}"),
                "hpl-run takes them all".into(),
                span,
            );
        }
        Some(count)
    }

    /// The values of a list line: as many as `count` asks for, or (the count being unreadable) all
    /// that are there.
    pub(super) fn values(
        &mut self,
        count_field: Field,
        count: Option<i64>,
        field: Field,
    ) -> Vec<(Range<usize>, i64)> {
        let at = self.place(field);
        let Some((_, _)) = self.first(field) else { return vec![] };
        let line = self.lines[at].clone();
        let wanted = count.map_or(usize::MAX, |c| c as usize);
        let (mut found, mut broken) = (vec![], false);
        for (i, token) in line.tokens.iter().enumerate() {
            if i > 0 && !begins_like_number(&token.text) {
                break; // the label
            }
            match self.number(field, at, token, &line) {
                Number::Whole(value) => found.push((token.span.clone(), value)),
                // Past the values wanted, anything may stand.
                Number::Not(..) if i >= wanted => break,
                Number::Not(message, remedy) => {
                    self.push_error(at, field.name(), message, remedy, token.span.clone());
                    broken = true;
                    if i == 0 && !begins_like_number(&token.text) {
                        break;
                    }
                }
            }
        }
        if broken || count.is_none() {
            return if broken { vec![] } else { found };
        }
        if found.len() < wanted {
            let end = line.tokens.get(found.len()).map_or_else(|| end_of(&line), |t| t.span.clone());
            let count_line = self.lines[self.place(count_field)].number;
            let have = found.len();
            let limit = if wanted as i64 > NETLIB_LIST {
                format!(" (xhpl takes at most {NETLIB_LIST})")
            } else {
                String::new()
            };
            self.push_error(
                at,
                field.name(),
                format!(
                    "line {count_line} asks for {wanted} values{limit}, but there {} {have}",
                    if have == 1 { "is" } else { "are" }
                ),
                format!("write {have} on line {count_line}, or add {} here", wanted - have),
                end,
            );
            return vec![];
        }
        if let Some(whole) = grouped(&line, &found, wanted) {
            let span = found[wanted - 1].0.start..found[found.len() - 1].0.end;
            let shown: String = line.text.chars().skip(span.start).take(span.len()).collect();
            let message = format!("`{shown}` is {} to xhpl, for a blank ends a number", found[wanted - 1].1);
            self.push_error(at, field.name(), message, format!("write {whole}"), span);
            return vec![];
        }
        if found.len() > wanted {
            let span = found[wanted].0.start..found[found.len() - 1].0.end;
            let count_line = self.lines[self.place(count_field)].number;
            let mut unused: Vec<String> =
                found[wanted..].iter().take(UNUSED_SHOWN).map(|v| v.1.to_string()).collect();
            if found.len() - wanted > UNUSED_SHOWN {
                unused.push("…".to_string());
            }
            let message =
                format!("line {count_line} asks for {wanted} only: {} is not run", unused.join(" "));
            let remedy = format!("write {} on line {count_line} to run all", found.len());
            self.push_warning(at, field.name(), message, remedy, span);
            found.truncate(wanted);
        }
        let netlib = lines::netlib_list(&line.text, found.len());
        let ours: Vec<i64> = found.iter().map(|v| v.1).collect();
        if netlib != ours {
            let show = |v: &[i64]| v.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
            let message =
                format!("{} is run; xhpl, which counts blanks, would run {}", show(&ours), show(&netlib));
            let span = found[0].0.start..found[found.len() - 1].0.end;
            self.push_warning(at, field.name(), message, "put one blank between values".into(), span);
        }
        found
    }
}

/// The number that the last value wanted and what follows it seem to be, written with blanks between groups of three digits:
/// `1 000`. A group that begins with 0 gives it away: nobody writes a value of its own so. (`100 200` may be a list that was
/// made shorter by its count alone, as many files in the field are.)
fn grouped(line: &Line, found: &[(Range<usize>, i64)], wanted: usize) -> Option<String> {
    let text = |i: usize| line.tokens[i].text.as_str();
    let is_group = |i: usize| text(i).len() == 3 && text(i).bytes().all(|b| b.is_ascii_digit());
    let begins = wanted > 0 && wanted < found.len() && (1..=3).contains(&text(wanted - 1).len());
    let groups = wanted..found.len();
    let gives_away = groups.clone().any(|i| text(i).starts_with('0'));
    (begins && gives_away && groups.clone().all(is_group))
        .then(|| (wanted - 1..found.len()).map(text).collect::<String>())
}

fn end_of(line: &Line) -> Range<usize> {
    let end = line.text.trim_end().chars().count();
    end..end + 1
}
