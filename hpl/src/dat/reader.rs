//! From lines to [`Input`].

use std::fmt::Display;
use std::ops::Range;

use super::dialect::{self, Dialect};
use super::field::Field;
use super::lines::{self, Line, Token, begins_like_number};
use super::{Diagnostic, Parsed};
use crate::params::{Bcast, Fact, Input, Pmap, Sink, Swap};

/// The longest list that netlib takes.
const NETLIB_LIST: i64 = 20;

/// netlib's integers have 32 bits; larger values are slips of the hand.
const LARGEST: i64 = i32::MAX as i64;

pub(super) struct Reader<'a> {
    file: &'a str,
    lines: Vec<Line>,
    fields: Vec<Field>,
    dialect: Dialect,
    errors: Vec<Diagnostic>,
    warnings: Vec<Diagnostic>,
    notes: Vec<String>,
}

/// A word taken as a number.
enum Number {
    Whole(i64),
    /// Not one; the message and the remedy.
    Not(String, String),
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, bytes: &[u8]) -> Self {
        let lines = lines::split(bytes);
        let dialect = Dialect::of(&lines);
        let fields = dialect.fields();
        Reader { file, lines, fields, dialect, errors: vec![], warnings: vec![], notes: vec![] }
    }

    pub(super) fn read(mut self) -> Result<Parsed, Vec<Diagnostic>> {
        if self.refuse_mixed_precision() || self.refuse_short() || self.refuse_shifted() {
            return Err(self.errors);
        }
        self.note_odd_labels();
        self.note_dialect();
        let input = self.input();
        self.warnings.sort_by_key(|d| d.line);
        if self.errors.is_empty() {
            Ok(Parsed { input, warnings: self.warnings, notes: self.notes })
        } else {
            self.errors.sort_by_key(|d| d.line);
            Err(self.errors)
        }
    }

    fn input(&mut self) -> Input {
        let ns = self.list(Field::NCount, Field::Ns, 0);
        let nbs = self.list(Field::NbCount, Field::Nbs, 1);
        let pmap = self.pmap();
        let grids = self.grids();
        let threshold = self.threshold();
        let pfacts = self.choices(Field::PfactCount, Field::Pfacts, &Fact::ALL, Fact::Right);
        let nbmins = self.list(Field::NbminCount, Field::Nbmins, 1);
        let ndivs = self.list(Field::NdivCount, Field::Ndivs, 2);
        let rfacts = self.choices(Field::RfactCount, Field::Rfacts, &Fact::ALL, Fact::Right);
        let bcasts = self.choices(Field::BcastCount, Field::Bcasts, &Bcast::ALL, Bcast::Ring1M);
        let depths = self.list(Field::DepthCount, Field::Depths, 0);
        let swap = self.choice(Field::Swap, &Swap::ALL, Swap::SpreadRoll, Swap::Mix);
        let swap_threshold = self.swap_threshold();
        let l1 = self.flag(Field::L1, "0 (transposed)", false, false);
        let u = self.flag(Field::U, "0 (transposed)", false, false);
        let equil = self.flag(Field::Equil, "1 (yes)", true, true);
        let align = self.align();
        let seed = self.seed();
        let sink = self.sink();
        Input {
            sink,
            ns,
            nbs,
            pmap,
            grids,
            threshold,
            pfacts,
            nbmins,
            ndivs,
            rfacts,
            bcasts,
            depths,
            swap,
            swap_threshold,
            l1_transposed: !l1,
            u_transposed: !u,
            equil,
            align,
            seed,
        }
    }

    // ---- the whole file ------------------------------------------------------------------------

    fn refuse_mixed_precision(&mut self) -> bool {
        if self.dialect != Dialect::Mxp {
            return false;
        }
        let value = |i: usize| {
            self.lines.get(i).and_then(|l| l.tokens.first()).map_or("?".to_string(), |t| t.text.clone())
        };
        let flags = format!("-N {} --nb {} -P {} -Q {}", value(5), value(7), value(9), value(10));
        let span = self.lines.get(9).map_or(0..1, whole_line);
        self.push_error(
            9.min(self.lines.len().saturating_sub(1)),
            "layout",
            "this is the 14-line input of HPL-MxP (single P and Q, no PFACT): a mixed-precision run"
                .to_string(),
            format!("hpl-run solves in 64 bits: for the same system run `hpl-run {flags}`"),
            span,
        );
        true
    }

    fn refuse_short(&mut self) -> bool {
        // Only the alignment may be absent.
        let needed = self.fields.len() - usize::from(self.fields.last() == Some(&Field::Align));
        if self.lines.len() >= needed {
            return false;
        }
        let at = self.lines.len();
        if at == 0 {
            let empty = "the file is empty".to_string();
            self.push_error(0, "layout", empty, "write the 31 lines of an HPL.dat".into(), 0..1);
            return true;
        }
        if self.refuse_shifted() {
            return true;
        }
        let missing = self.fields[at].name();
        let end = self.lines[at - 1].text.chars().count();
        self.push_error(
            at - 1,
            "layout",
            format!("the file ends here: line {}, {missing}, is missing", at + 1),
            format!("HPL.dat has {} lines; add the rest", self.fields.len()),
            end..end + 1,
        );
        true
    }

    fn refuse_shifted(&mut self) -> bool {
        let Some(shift) = dialect::shift(&self.lines, &self.fields) else { return false };
        let expected = self.fields[shift.at].name();
        let line = &self.lines[shift.at];
        let number = line.number;
        let span = label_span(line);
        self.push_error(
            shift.at,
            expected,
            format!(
                "line {number} must be {expected}, but its label says {}, and those below are shifted as well",
                shift.looks_like.name()
            ),
            if shift.missing {
                format!("a line is missing above: {expected} belongs here")
            } else {
                "there is a line too many above".to_string()
            },
            span,
        );
        true
    }

    fn note_odd_labels(&mut self) {
        for at in 2..self.lines.len().min(self.fields.len()) {
            let (line, field) = (&self.lines[at], self.fields[at]);
            let meant = line.meant();
            if meant.is_empty() || meant.contains(&field) {
                continue;
            }
            let message = format!("the label says {}; the line is read as {}", meant[0].name(), field.name());
            let span = label_span(line);
            self.push_warning(
                at,
                field.name(),
                message,
                "labels are not read: the line's place counts".into(),
                span,
            );
        }
    }

    fn note_dialect(&mut self) {
        match self.dialect {
            Dialect::HplGpu => self.notes.push(format!(
                "{}: HPL-GPU's 27 lines: no SWAP, L1, U and equilibration lines (mix, 64 columns, is taken)",
                self.file
            )),
            Dialect::Hpl10 => self.notes.push(format!(
                "{}: no PMAP line, as in HPL 1.0: column-major, which was its order",
                self.file
            )),
            Dialect::Netlib | Dialect::Mxp => {}
        }
        if let Some(line) = self.lines.iter().skip(self.fields.len()).find(|l| !l.is_blank()) {
            self.notes.push(format!(
                "{}: line {} and below (HPCC's PTRANS part) are not HPL's: ignored",
                self.file, line.number
            ));
        }
    }

    // ---- single values -------------------------------------------------------------------------

    fn sink(&mut self) -> Sink {
        let (Some((device_at, device)), Some((name_at, name))) =
            (self.first(Field::Device), self.first(Field::Output))
        else {
            return Sink::Stdout;
        };
        match (device.text.parse::<i64>(), device.text.as_str()) {
            (Ok(6), _) => return Sink::Stdout,
            (Ok(7), _) => return Sink::Stderr,
            (Ok(_), _) | (_, "file") => {}
            (Err(_), other) if begins_like_number(other) => {
                let message = format!("`{other}` is not a device");
                self.push_error(
                    device_at,
                    "device out",
                    message,
                    "write 6 (stdout), 7 (stderr) or 8 (file)".into(),
                    device.span,
                );
                return Sink::Stdout;
            }
            (Err(_), other) => {
                let message = format!("`{other}` is no number; a file is taken, as xhpl does");
                self.push_warning(
                    device_at,
                    "device out",
                    message,
                    "write 6 (stdout), 7 (stderr) or 8 (file)".into(),
                    device.span.clone(),
                );
            }
        }
        if name.text.contains('/') && name.text.ends_with('/') {
            let message = format!("`{}` names a folder", name.text);
            self.push_error(name_at, "output file", message, "write a file's name".into(), name.span);
        }
        self.notes.push(format!("{}: device {}: the report goes to {}", self.file, device.text, name.text));
        Sink::File(name.text.into())
    }

    fn pmap(&mut self) -> Pmap {
        if self.dialect == Dialect::Hpl10 {
            return Pmap::Column;
        }
        match self.whole(Field::Pmap) {
            Some((_, _, 1)) => Pmap::Column,
            Some((at, span, value)) => {
                if value != 0 {
                    let message =
                        format!("{value} is no process mapping; 0 (row-major) is taken, as xhpl does");
                    self.push_warning(
                        at,
                        "PMAP",
                        message,
                        "write 0 (row-major) or 1 (column-major)".into(),
                        span,
                    );
                }
                Pmap::Row
            }
            None => Pmap::Row,
        }
    }

    fn threshold(&mut self) -> f64 {
        let Some((at, token)) = self.first(Field::Threshold) else { return 16.0 };
        let glued = token.text.trim_end_matches(|c: char| c.is_alphabetic() || c == '#');
        let value = match token.text.parse::<f64>() {
            Ok(value) if value.is_finite() => value,
            // `16.0threshold`; but not `nan`, `inf` or `1e`.
            _ if token.text.to_lowercase().ends_with("threshold") && glued.parse::<f64>().is_ok() => {
                let message = format!("the label is glued to the value; {glued} is taken");
                self.push_warning(
                    at,
                    "threshold",
                    message,
                    "put a blank between them".into(),
                    token.span.clone(),
                );
                glued.parse().expect("it was parsed just now")
            }
            _ => {
                let message = format!("`{}` is not a number", token.text);
                self.push_error(
                    at,
                    "threshold",
                    message,
                    "write the limit of the residual, such as 16.0".into(),
                    token.span,
                );
                return 16.0;
            }
        };
        if value <= 0.0 {
            let message = format!(
                "{value} means that no answer is checked: the runs are reported as unchecked, never as passed"
            );
            self.push_warning(at, "threshold", message, "write 16.0 to check them".into(), token.span);
        }
        value
    }

    fn swap_threshold(&mut self) -> usize {
        if self.dialect == Dialect::HplGpu {
            return 64;
        }
        match self.whole(Field::SwapThreshold) {
            Some((at, span, value)) if value < 0 => {
                let message = format!("{value} is below 0; 0 is taken, as xhpl does");
                self.push_warning(
                    at,
                    "swapping threshold",
                    message,
                    "write a number of columns".into(),
                    span,
                );
                0
            }
            Some((_, _, value)) => value as usize,
            None => 64,
        }
    }

    /// A line of 0 or 1; anything else is `otherwise`, called `taken`.
    fn flag(&mut self, field: Field, taken: &str, otherwise: bool, absent: bool) -> bool {
        if self.dialect == Dialect::HplGpu {
            return absent;
        }
        match self.whole(field) {
            Some((_, _, value @ (0 | 1))) => value == 1,
            Some((at, span, value)) => {
                let message = format!("{value} is neither 0 nor 1; {taken} is taken, as xhpl does");
                self.push_warning(at, field.name(), message, "write 0 or 1".into(), span);
                otherwise
            }
            None => absent,
        }
    }

    fn align(&mut self) -> usize {
        let at = self.place(Field::Align);
        match self.lines.get(at) {
            None => {
                let last = self.lines.len() - 1;
                let end = self.lines[last].text.chars().count();
                let message = format!("line {}, alignment, is missing; 8 is taken", at + 1);
                self.push_warning(
                    last,
                    "alignment",
                    message,
                    "add `8   memory alignment in double (> 0)`".into(),
                    end..end + 1,
                );
                return 8;
            }
            Some(line) if line.is_blank() => {
                let message = "the line is blank; 8 is taken (xhpl takes the number of the line above)";
                self.push_warning(at, "alignment", message.into(), "write 8".into(), 0..1);
                return 8;
            }
            Some(_) => {}
        }
        match self.whole(Field::Align) {
            Some((at, span, value)) if value <= 0 => {
                let message = format!("{value} is not above 0; 4 is taken, as xhpl does");
                self.push_warning(at, "alignment", message, "write 8".into(), span);
                4
            }
            Some((_, _, value)) => value as usize,
            None => 8,
        }
    }

    fn seed(&mut self) -> u64 {
        if !self.fields.contains(&Field::Seed) {
            return crate::generator::DEFAULT_SEED;
        }
        match self.whole(Field::Seed) {
            Some((at, span, value)) if value < 0 => {
                let message = format!("{value} is below 0");
                self.push_error(at, "seed", message, "write 100, netlib's seed".into(), span);
                0
            }
            Some((_, _, value)) => value as u64,
            None => 0,
        }
    }

    /// A line with one number out of a table.
    fn choice<T: Copy + Display>(&mut self, field: Field, table: &[T], otherwise: T, absent: T) -> T {
        if !self.fields.contains(&field) {
            return absent;
        }
        match self.whole(field) {
            Some((at, span, value)) => self.pick(field, at, span, value, table, otherwise),
            None => absent,
        }
    }

    // ---- lists ---------------------------------------------------------------------------------

    fn grids(&mut self) -> Vec<(usize, usize)> {
        let count = self.count(Field::GridCount);
        let ps = self.values(Field::GridCount, count, Field::Ps);
        let qs = self.values(Field::GridCount, count, Field::Qs);
        let ps = self.at_least(Field::Ps, ps, 1);
        let qs = self.at_least(Field::Qs, qs, 1);
        ps.into_iter().zip(qs).collect()
    }

    fn list(&mut self, count: Field, values: Field, least: i64) -> Vec<usize> {
        let wanted = self.count(count);
        let found = self.values(count, wanted, values);
        self.at_least(values, found, least)
    }

    fn choices<T: Copy + Display>(
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

    fn pick<T: Copy + Display>(
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

    fn at_least(&mut self, field: Field, values: Vec<(Range<usize>, i64)>, least: i64) -> Vec<usize> {
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
    fn count(&mut self, field: Field) -> Option<i64> {
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
    fn values(&mut self, count_field: Field, count: Option<i64>, field: Field) -> Vec<(Range<usize>, i64)> {
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
        if found.len() > wanted {
            let span = found[wanted].0.start..found[found.len() - 1].0.end;
            let count_line = self.lines[self.place(count_field)].number;
            let unused: Vec<String> = found[wanted..].iter().map(|v| v.1.to_string()).collect();
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

    // ---- words ---------------------------------------------------------------------------------

    /// The first word of a field's line, as a whole number within range.
    fn whole(&mut self, field: Field) -> Option<(usize, Range<usize>, i64)> {
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

    fn first(&mut self, field: Field) -> Option<(usize, Token)> {
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
    fn number(&mut self, field: Field, at: usize, token: &Token, line: &Line) -> Number {
        let text = token.text.as_str();
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
                format!("write {}", value as i64)
            }
            _ => "write a whole number, in digits".to_string(),
        };
        Number::Not(format!("`{text}` is not a whole number"), remedy)
    }

    /// Index of a field's line.
    fn place(&self, field: Field) -> usize {
        self.fields.iter().position(|f| *f == field).expect("asked only for fields of the dialect")
    }

    fn push_error(
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

    fn push_warning(
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

    fn diagnostic(
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

fn whole_line(line: &Line) -> Range<usize> {
    match (line.tokens.first(), line.tokens.last()) {
        (Some(first), Some(last)) => first.span.start..last.span.end,
        _ => 0..1,
    }
}

fn end_of(line: &Line) -> Range<usize> {
    let end = line.text.trim_end().chars().count();
    end..end + 1
}

fn label_span(line: &Line) -> Range<usize> {
    let begin = line.tokens.iter().skip(1).find(|t| !begins_like_number(&t.text));
    begin.map_or_else(|| whole_line(line), |t| t.span.start..whole_line(line).end)
}
