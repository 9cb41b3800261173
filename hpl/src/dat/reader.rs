//! From lines to [`Input`].

use std::ops::Range;

use super::dialect::{self, Dialect};
use super::field::Field;
use super::lines::{self, Line, begins_like_number};
use super::write::sample;
use super::{Diagnostic, Parsed};
use crate::params::{Bcast, Fact, Input, Swap};

pub(super) struct Reader<'a> {
    pub(super) file: &'a str,
    pub(super) lines: Vec<Line>,
    pub(super) fields: Vec<Field>,
    pub(super) dialect: Dialect,
    pub(super) errors: Vec<Diagnostic>,
    pub(super) warnings: Vec<Diagnostic>,
    pub(super) notes: Vec<String>,
    pub(super) device: Option<String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, bytes: &[u8]) -> Self {
        let lines = lines::split(bytes);
        let dialect = Dialect::of(&lines);
        let fields = dialect.fields();
        Reader { file, lines, fields, dialect, errors: vec![], warnings: vec![], notes: vec![], device: None }
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
            Ok(Parsed { input, warnings: self.warnings, notes: self.notes, device: self.device })
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
        let depths = self.depths();
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

    fn refuse_mixed_precision(&mut self) -> bool {
        if self.dialect != Dialect::Mxp {
            return false;
        }
        let value = |i: usize| {
            self.lines.get(i).and_then(|l| l.tokens.first()).map_or("?".to_string(), |t| t.text.clone())
        };
        // Its versions differ in the lines between.
        let line_of = |field: Field, otherwise: usize| {
            self.lines.iter().position(|l| l.meant() == [field]).unwrap_or(otherwise)
        };
        let list_of = |count: Field, otherwise: usize| {
            self.lines.iter().rposition(|l| l.meant().contains(&count)).unwrap_or(otherwise)
        };
        let (n, nb) = (list_of(Field::Ns, 5), list_of(Field::Nbs, 7));
        let (p, q) = (line_of(Field::Ps, 9), line_of(Field::Qs, 10));
        let flags = format!("-N {} --nb {} -P {} -Q {}", value(n), value(nb), value(p), value(q));
        let at = p.min(self.lines.len().saturating_sub(1));
        let span = self.lines.get(at).map_or(0..1, whole_line);
        let count = self.lines.len();
        self.push_error(
            at,
            "layout",
            format!(
                "this is the {count}-line input of HPL-MxP (single P and Q, no PFACT): a mixed-precision run"
            ),
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
        let end = self.lines[at - 1].text.chars().count();
        self.push_error(
            at - 1,
            "layout",
            format!("the file ends here: line {}, {}, is missing", at + 1, self.fields[at].name()),
            format!(
                "add the lines up to {}, of which the first may be `{}`",
                needed,
                sample(self.fields[at])
            ),
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
                format!("a line is missing above; {expected} belongs here, as in `{}`", sample(self.fields[shift.at]))
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
                "{}: line {} and below are not HPL's (HPCC has its PTRANS part there): ignored",
                self.file, line.number
            ));
        }
    }
}

fn whole_line(line: &Line) -> Range<usize> {
    match (line.tokens.first(), line.tokens.last()) {
        (Some(first), Some(last)) => first.span.start..last.span.end,
        _ => 0..1,
    }
}

fn label_span(line: &Line) -> Range<usize> {
    let begin = line.tokens.iter().skip(1).find(|t| !begins_like_number(&t.text));
    begin.map_or_else(|| whole_line(line), |t| t.span.start..whole_line(line).end)
}
