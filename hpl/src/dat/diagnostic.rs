//! One problem at one place of a file, shown with the line and a caret.

use std::fmt;
use std::ops::Range;

/// Something wrong, or silently repaired by netlib, at one place of an `HPL.dat`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Diagnostic {
    /// The file as the user named it.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// The parameter that the line holds: `N`, `# of NBs`, …
    pub field: &'static str,
    /// What is wrong, or what is taken.
    pub message: String,
    /// What to do.
    pub remedy: String,
    /// The line's text.
    pub text: String,
    /// The place in it, in characters.
    pub span: Range<usize>,
}

/// Longest stretch of a line that is shown.
const SHOWN: usize = 96;

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diagnostic { file, line, field, message, remedy, .. } = self;
        // The caret must stay under its token: tabs are shown as one blank, a far token pulls the window.
        let skip = if self.span.start > SHOWN - 8 { self.span.start.saturating_sub(8) } else { 0 };
        let shown: String =
            self.text.chars().skip(skip).take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect();
        let begin = self.span.start - skip;
        let carets = "^".repeat(self.span.len().clamp(1, (SHOWN - begin.min(SHOWN - 1)).max(1)));
        let message: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        writeln!(f, "{file}:{line}: {field}: {message}")?;
        writeln!(f, "{line:5} | {}", shown.trim_end())?;
        write!(f, "      | {}{carets} {remedy}", " ".repeat(begin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caret_stands_under_the_token() {
        let d = Diagnostic {
            file: "HPL.dat".into(),
            line: 6,
            field: "N",
            message: "`1e2` is not a whole number".into(),
            remedy: "write 100".into(),
            text: "1e2   Ns".into(),
            span: 0..3,
        };
        assert_eq!(
            d.to_string(),
            "HPL.dat:6: N: `1e2` is not a whole number\n    6 | 1e2   Ns\n      | ^^^ write 100"
        );
        let tabs = Diagnostic { text: "1\t2x\tNs".into(), span: 2..4, ..d.clone() };
        assert!(tabs.to_string().ends_with("    6 | 1 2x Ns\n      |   ^^ write 100"));
        let far = Diagnostic { text: format!("{}oops", "7 ".repeat(200)), span: 400..404, ..d };
        assert!(far.to_string().ends_with("    6 | 7 7 7 7 oops\n      |         ^^^^ write 100"));
    }
}
