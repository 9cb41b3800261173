//! A table for a terminal: columns as wide as their widest cell, the last one wrapped.

use std::fmt;

/// Columns that stand in a line.
const WIDTH: usize = 110;
/// A last column is not squeezed below this.
const LEAST: usize = 30;
/// Between two columns.
const GAP: &str = "  ";

/// Rows of text under a head.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Table {
    head: Vec<String>,
    to_the_right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Without rows; a name that starts with `>` is that of a column of numbers, which are set to the right.
    pub fn new(head: &[&str]) -> Self {
        Table {
            to_the_right: head.iter().map(|name| name.starts_with('>')).collect(),
            head: head.iter().map(|name| name.trim_start_matches('>').to_string()).collect(),
            rows: Vec::new(),
        }
    }

    /// One more row; cells that are missing are empty, those that are too many are left out.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn widths(&self) -> Vec<usize> {
        (0..self.head.len())
            .map(|c| self.rows.iter().chain([&self.head]).map(|row| width(&row[c])).max().unwrap_or(0))
            .collect()
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// Cuts at blanks, so that each piece has at most `room` characters unless a word has more.
pub fn wrap(text: &str, room: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let at = lines.len() - 1;
        if lines[at].is_empty() {
            lines[at] += word;
        } else if width(&lines[at]) + 1 + width(word) <= room {
            lines[at] += " ";
            lines[at] += word;
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths = self.widths();
        let Some(last) = widths.len().checked_sub(1) else { return Ok(()) };
        let before: usize = widths[..last].iter().map(|w| w + GAP.len()).sum();
        widths[last] = widths[last].min(WIDTH.saturating_sub(before).max(LEAST));
        let rule: Vec<String> = widths.iter().map(|w| "-".repeat(*w)).collect();
        for row in [&self.head, &rule].into_iter().chain(&self.rows) {
            let wrapped = if self.to_the_right[last] {
                vec![row[last].clone()]
            } else {
                wrap(&row[last], widths[last])
            };
            for (i, piece) in wrapped.iter().enumerate() {
                let mut line = String::new();
                for c in 0..=last {
                    let cell = match (c == last, i) {
                        (true, _) => piece.as_str(),
                        (false, 0) => row[c].as_str(),
                        _ => "",
                    };
                    let pad = " ".repeat(widths[c].saturating_sub(width(cell)));
                    let gap = if c < last { GAP } else { "" };
                    line += &if self.to_the_right[c] {
                        format!("{pad}{cell}{gap}")
                    } else {
                        format!("{cell}{pad}{gap}")
                    };
                }
                writeln!(f, "{}", line.trim_end())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_numbers_to_the_right() {
        let mut table = Table::new(&["link", ">GB/s", "remark"]);
        table.row(["a to b", "9.1", "fast"]);
        table.row(["mac-a to mac-b", "10.25"]);
        let want = "\
link             GB/s  remark
--------------  -----  ------
a to b            9.1  fast
mac-a to mac-b  10.25
";
        assert_eq!(table.to_string(), want);
        assert_eq!(Table::new(&[]).to_string(), "");
    }

    #[test]
    fn the_last_column_is_wrapped_at_blanks() {
        let mut table = Table::new(&["check", "found"]);
        table.row(["x", "word "].map(|cell| cell.repeat(60)));
        let text = table.to_string();
        assert!(text.lines().all(|l| l.len() <= WIDTH), "{text}");
        assert_eq!(text.matches("word").count(), 60);
        table.row(["y", "0123456789"].map(|cell| cell.repeat(20)));
        assert!(table.to_string().contains(&"0123456789".repeat(20)), "a long word stays whole");
        assert_eq!(wrap("", 5), [""]);
    }

    #[test]
    fn letters_are_counted_not_bytes() {
        let mut table = Table::new(&["a", "b"]);
        table.row(["µµµ", "x"]);
        assert!(table.to_string().ends_with("µµµ  x\n"));
        assert!(table.to_string().starts_with("a    b\n"));
    }
}
