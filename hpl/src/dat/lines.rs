//! A file as lines and tokens that know their place.

use std::ops::Range;

use super::field::Field;

/// A word and its place in the line, in characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Token {
    /// The word.
    pub text: String,
    /// Its place.
    pub span: Range<usize>,
}

/// One line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line {
    /// From 1.
    pub number: usize,
    /// Without its end.
    pub text: String,
    /// Its words.
    pub tokens: Vec<Token>,
}

/// Splits a file: LF, CRLF or CR ends, an optional UTF-8 byte-order mark; bytes that are not UTF-8
/// are shown as `�`. Blank lines at the end are dropped.
pub fn split(bytes: &[u8]) -> Vec<Line> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text).replace("\r\n", "\n").replace('\r', "\n");
    let mut lines: Vec<Line> = text
        .split('\n')
        .enumerate()
        .map(|(i, text)| Line { number: i + 1, text: text.to_string(), tokens: tokens(text) })
        .collect();
    while lines.last().is_some_and(Line::is_blank) {
        lines.pop();
    }
    lines
}

/// Why the bytes are no text, if they are none. (A few NULs are: some editors leave them.)
pub fn no_text(bytes: &[u8]) -> Option<&'static str> {
    /// More control characters than this are no slip of an editor.
    const SLIPS: usize = 8;
    let control = |b: &&u8| b.is_ascii_control() && !b.is_ascii_whitespace() && !matches!(b, 0 | 0x0b | 0x1a);
    match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("the file is UTF-16"),
        _ if bytes.iter().filter(control).count() > SLIPS => Some("the file is no text"),
        [_, ..] if bytes.contains(&0) && bytes.iter().all(|b| *b == 0 || b.is_ascii_whitespace()) => {
            Some("the file holds nothing but NUL bytes (a disk that was full, or a crash, leaves such files)")
        }
        _ => None,
    }
}

fn tokens(text: &str) -> Vec<Token> {
    let mut tokens: Vec<Token> = vec![];
    let mut inside = false;
    for (at, c) in text.chars().enumerate() {
        if c.is_whitespace() || c == '\0' {
            inside = false;
        } else if inside {
            let last = tokens.last_mut().expect("a token was begun");
            last.text.push(c);
            last.span.end = at + 1;
        } else {
            inside = true;
            tokens.push(Token { text: c.to_string(), span: at..at + 1 });
        }
    }
    tokens
}

impl Line {
    /// Digits that follow a token behind NUL bytes: the number is torn, and what stands before them is another one.
    pub fn torn_off(&self, token: &Token) -> Option<String> {
        let rest: String = self.text.chars().skip(token.span.end).collect();
        let after = rest.trim_start_matches('\0');
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        (after.len() < rest.len() && !digits.is_empty()).then_some(digits)
    }

    /// Whether nothing is written on it.
    pub fn is_blank(&self) -> bool {
        self.tokens.is_empty()
    }

    /// What follows the values: from the first token after the first that does not begin like a number.
    pub fn label(&self) -> String {
        let begin = self.tokens.iter().skip(1).find(|t| !begins_like_number(&t.text));
        begin.map_or(String::new(), |t| self.text.chars().skip(t.span.start).collect())
    }

    /// The fields that its label may mean.
    pub fn meant(&self) -> &'static [Field] {
        Field::meant_by(&self.label())
    }
}

/// Whether a token starts as a number does: a digit, or a sign or point and a digit.
pub fn begins_like_number(text: &str) -> bool {
    text.trim_start_matches(['+', '-', '.']).starts_with(|c: char| c.is_ascii_digit())
}

/// The values that netlib's reader takes from a list line. It steps over one blank a value, so that
/// further blanks turn into repeats and zeros.
pub fn netlib_list(text: &str, count: usize) -> Vec<i64> {
    let bytes: Vec<u8> = text.bytes().collect();
    let (mut at, mut token) = (0, String::new());
    let mut values = vec![];
    for _ in 0..count {
        let rest = bytes.get(at..).unwrap_or_default();
        let word: Vec<u8> = rest
            .iter()
            .copied()
            .skip_while(u8::is_ascii_whitespace)
            .take_while(|b| !b.is_ascii_whitespace())
            .collect();
        if !word.is_empty() {
            token = String::from_utf8_lossy(&word).into_owned();
        }
        at += token.len() + 1;
        let digits = token.trim_start_matches(['+', '-']);
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let size = digits[..end].parse::<i64>().unwrap_or(0);
        values.push(if token.starts_with('-') { -size } else { size });
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_end_is_one() {
        for text in ["a 1\nb\n", "a 1\r\nb\r\n", "a 1\rb", "\u{feff}a 1\nb\n\n\n"] {
            let lines = split(text.as_bytes());
            let words: Vec<Vec<&str>> =
                lines.iter().map(|l| l.tokens.iter().map(|t| t.text.as_str()).collect()).collect();
            assert_eq!(words, [vec!["a", "1"], vec!["b"]], "{text:?}");
        }
        assert_eq!(split(b"\xff 1")[0].tokens.len(), 2);
    }

    #[test]
    fn what_is_no_text() {
        let utf16: Vec<u8> = "HPL\n6 \n".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(no_text(&[&[0xff, 0xfe], &utf16[..]].concat()), Some("the file is UTF-16"));
        assert_eq!(no_text(&[1, 2, 3, 27, 5, 6, 7, 127, 14, 15]), Some("the file is no text"));
        for text in ["", "a\t1\r\n\x0c\x1a", "\u{feff}caf\u{e9}", "a\0\0\0\0\0\0\0\0\0\0 1"] {
            assert_eq!(no_text(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn netlibs_reader_counts_blanks() {
        assert_eq!(netlib_list("29   30   34 Ns", 3), [29, 30, 0]);
        assert_eq!(netlib_list("29 30 34 Ns", 3), [29, 30, 34]);
        assert_eq!(netlib_list("1e2", 1), [1]);
        assert_eq!(netlib_list("1,000", 1), [1]);
    }
}
