//! The lines that hold one value.

use std::fmt::Display;

use super::dialect::Dialect;
use super::field::Field;
use super::lines::begins_like_number;
use super::reader::Reader;
use crate::params::{Pmap, Sink};

impl Reader<'_> {
    pub(super) fn sink(&mut self) -> Sink {
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
        let mut name = name;
        let quoted = |c: char| matches!(c, '"' | '\'');
        if name.text == "-" {
            let message = "`-` would be a file of that name".to_string();
            let remedy = "write 6 as device out for stdout, or another name".to_string();
            self.push_error(name_at, "output file", message, remedy, name.span.clone());
        } else if name.text.starts_with(quoted) && name.text.len() > 2 && name.text.ends_with(quoted) {
            let plain = name.text.trim_matches(quoted).to_string();
            let message = format!("{plain} is taken; to xhpl the quotes are part of the name");
            self.push_warning(name_at, "output file", message, format!("write {plain}"), name.span.clone());
            name.text = plain;
        } else if name.text.starts_with(quoted) {
            let message = "a name ends at its first blank, quotes or not".to_string();
            let remedy = "write a name without blanks and quotes".to_string();
            self.push_error(name_at, "output file", message, remedy, name.span.clone());
        }
        if name.text.contains('/') && name.text.ends_with('/') {
            let message = format!("`{}` names a folder", name.text);
            self.push_error(name_at, "output file", message, "write a file's name".into(), name.span);
        }
        self.device =
            Some(format!("{}: device {}: the report goes to {}", self.file, device.text, name.text));
        Sink::File(name.text.into())
    }

    pub(super) fn pmap(&mut self) -> Pmap {
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

    pub(super) fn threshold(&mut self) -> f64 {
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

    pub(super) fn swap_threshold(&mut self) -> usize {
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
    pub(super) fn flag(&mut self, field: Field, taken: &str, otherwise: bool, absent: bool) -> bool {
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

    pub(super) fn align(&mut self) -> usize {
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

    pub(super) fn seed(&mut self) -> u64 {
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
    pub(super) fn choice<T: Copy + Display>(
        &mut self,
        field: Field,
        table: &[T],
        otherwise: T,
        absent: T,
    ) -> T {
        if !self.fields.contains(&field) {
            return absent;
        }
        match self.whole(field) {
            Some((at, span, value)) => self.pick(field, at, span, value, table, otherwise),
            None => absent,
        }
    }
}
