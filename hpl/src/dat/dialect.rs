//! Which of the known layouts a file has, told by its labels.

use super::field::{Field, NETLIB, hpl_1_0, hpl_gpu};
use super::lines::Line;

/// A layout of `HPL.dat`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dialect {
    /// netlib's 31 lines.
    Netlib,
    /// netlib's, without PMAP: HPL 1.0.
    Hpl10,
    /// HPL-GPU's 27 lines.
    HplGpu,
    /// rocHPL-MxP's 14 lines for a mixed-precision run.
    Mxp,
}

impl Dialect {
    /// Recognises the layout. A file without labels is netlib's, unless its length gives it away.
    pub fn of(lines: &[Line]) -> Dialect {
        let means = |number: usize, field: Field| {
            lines.get(number - 1).is_some_and(|line| line.meant().contains(&field))
        };
        if is_mixed(lines) {
            Dialect::Mxp
        } else if means(26, Field::Align) && means(27, Field::Seed) {
            Dialect::HplGpu
        } else if means(9, Field::GridCount)
            && means(10, Field::Ps)
            && means(11, Field::Qs)
            // One that has lost another line has this one.
            && !lines.iter().any(|line| line.meant().contains(&Field::Pmap))
        {
            Dialect::Hpl10
        } else {
            Dialect::Netlib
        }
    }

    /// What each line holds.
    pub fn fields(self) -> Vec<Field> {
        match self {
            Dialect::Netlib | Dialect::Mxp => NETLIB.to_vec(),
            Dialect::Hpl10 => hpl_1_0(),
            Dialect::HplGpu => hpl_gpu(),
        }
    }
}

/// Whether the file is of a mixed-precision benchmark: P and Q by themselves, and no panel factorisation. Told by the order of
/// the labels, by the length of a file without labels, or by the name in its first lines.
fn is_mixed(lines: &[Line]) -> bool {
    let means = |line: &Line, field: Field| line.meant().contains(&field);
    if lines.iter().any(|line| means(line, Field::Pfacts)) {
        return false;
    }
    let adjacent =
        lines.windows(2).any(|w| means(&w[0], Field::Threshold) && means(&w[1], Field::BcastCount));
    let bare = lines.len() == 14 && lines.iter().skip(2).all(|line| line.label().is_empty());
    let named = lines.iter().take(3).any(|line| {
        let text = line.text.to_lowercase();
        ["mxp", "hpl-ai", "hplai", "mixed"].iter().any(|name| text.contains(name))
    });
    adjacent || bare || named && lines.len() < NETLIB.len() - 4
}

/// Where the labels leave the layout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shift {
    /// First line (index) whose label contradicts the layout.
    pub at: usize,
    /// What it seems to be.
    pub looks_like: Field,
    /// A line is missing above (or else there is one too many).
    pub missing: bool,
}

/// A lost or doubled line, if the labels show one: from some line on more labels contradict the layout
/// than agree with it. A single odd label is a label, not a shift.
pub fn shift(lines: &[Line], fields: &[Field]) -> Option<Shift> {
    let verdict = |i: usize| -> Option<bool> {
        let meant = lines[i].meant();
        (!meant.is_empty()).then(|| meant.contains(&fields[i]))
    };
    let end = lines.len().min(fields.len());
    let at = (2..end).find(|&i| verdict(i) == Some(false))?;
    let agree = (at..end).filter(|&i| verdict(i) == Some(true)).count();
    let contradict = (at..end).filter(|&i| verdict(i) == Some(false)).count();
    if contradict < 2 || contradict <= agree {
        return None;
    }
    let meant = lines[at].meant();
    let missing = fields[at..].iter().any(|f| meant.contains(f));
    Some(Shift { at, looks_like: meant[0], missing })
}
