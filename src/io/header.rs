//! The head of a `.npy` file: magic, version, and a Python dictionary of three fields (NumPy's NEP 1).

use crate::error::{Error, Result};

/// Where the bytes of a version's header length end.
const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// Longer headers describe no plain array.
const LONGEST: usize = 1 << 16;

/// What the head says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// NumPy's name of the element type, such as `<f8`.
    pub(super) descr: String,
    /// Whether columns are contiguous.
    pub(super) fortran_order: bool,
    /// Rows and columns; a vector is one column.
    pub(super) shape: (usize, usize),
    /// Bytes before the first element.
    pub(super) data: u64,
}

impl Header {
    /// Reads the head at the beginning of a file, of which `read(at, bytes)` gives a part.
    ///
    /// # Errors
    /// [`Error::Argument`] that names the file, the field and the remedy.
    pub(super) fn read(
        path: &str,
        mut read: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    ) -> Result<Self> {
        let mut part = |at: u64, bytes: &mut [u8]| {
            read(at, bytes).map_err(|e| {
                let remedy = "give a file that numpy.save has written, and written to its end";
                Error::argument(path, "its head", format!("cannot be read: {e}"), remedy)
            })
        };
        let mut magic = [0; 8];
        part(0, &mut magic)?;
        if magic[..6] != *MAGIC {
            let remedy =
                "save the array with numpy.save (savez writes a ZIP file: take the .npy file out of it)";
            return Err(Error::argument(path, format!("{:02x?}", &magic[..6]), "is no .npy file", remedy));
        }
        let (len, start) = match magic[6] {
            1 => {
                let mut len = [0; 2];
                part(8, &mut len)?;
                (usize::from(u16::from_le_bytes(len)), 10)
            }
            2 | 3 => {
                let mut len = [0; 4];
                part(8, &mut len)?;
                (u32::from_le_bytes(len) as usize, 12)
            }
            other => {
                let remedy = "versions 1 to 3 are known: save it with today's numpy.save";
                return Err(Error::argument(field(path, "version"), other, "is unknown", remedy));
            }
        };
        if len > LONGEST {
            let problem = "is too long for a plain array";
            return Err(Error::argument(field(path, "header length"), len, problem, "save a plain array"));
        }
        let mut text = vec![0; len];
        part(start, &mut text)?;
        Header::parse(path, &String::from_utf8_lossy(&text), start + len as u64)
    }

    /// The dictionary, whose data begin at byte `data` of the file.
    fn parse(path: &str, text: &str, data: u64) -> Result<Self> {
        let value = |name: &str| {
            lookup(text, name).ok_or_else(|| {
                Error::argument(
                    field(path, name),
                    text.trim(),
                    "is missing",
                    "save the array with numpy.save",
                )
            })
        };
        let descr = value("descr")?;
        let Some(name) = unquoted(descr) else {
            let remedy = "save one field of it: numpy.save(file, array['name'])";
            return Err(Error::argument(field(path, "descr"), descr, "is a structured type", remedy));
        };
        let fortran_order = match value("fortran_order")? {
            "True" => true,
            "False" => false,
            other => {
                let remedy = "save the array with numpy.save";
                return Err(Error::argument(
                    field(path, "fortran_order"),
                    other,
                    "is not True or False",
                    remedy,
                ));
            }
        };
        let shape = value("shape")?;
        let bad = |problem: &str| {
            let remedy = "give one or two dimensions: array.reshape(rows, columns)";
            Error::argument(field(path, "shape"), shape, problem, remedy)
        };
        let inner = shape.strip_prefix('(').and_then(|s| s.strip_suffix(')'));
        let inner = inner.ok_or_else(|| bad("is no tuple"))?;
        // A long integer of Python 2 ends with an L.
        let number = |s: &str| s.trim().trim_end_matches('L').parse::<usize>();
        let sizes = inner.split(',').filter(|s| !s.trim().is_empty()).map(number);
        let sizes: Vec<usize> =
            sizes.collect::<std::result::Result<_, _>>().map_err(|_| bad("is not made of sizes"))?;
        let shape = match sizes[..] {
            [m] => (m, 1),
            [m, n] => (m, n),
            _ => return Err(bad("is no matrix and no vector")),
        };
        Ok(Header { descr: name.to_owned(), fortran_order, shape, data })
    }

    /// The head of a matrix, as `numpy.save` writes it: the data begin at a multiple of 64.
    pub(super) fn print(descr: &str, fortran_order: bool, (m, n): (usize, usize)) -> Vec<u8> {
        let order = if fortran_order { "True" } else { "False" };
        let mut text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({m}, {n}), }}");
        let total = (10 + text.len() + 1).next_multiple_of(64);
        text.extend(std::iter::repeat_n(' ', total - 10 - text.len() - 1));
        text.push('\n');
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend((text.len() as u16).to_le_bytes()); // two sizes of 20 digits at most: below 200
        bytes.extend(text.bytes());
        bytes
    }
}

/// A field of a file, for messages.
pub(super) fn field(path: &str, name: &str) -> String {
    format!("{path}: {name}")
}

/// The text of a string literal.
fn unquoted(text: &str) -> Option<&str> {
    ['\'', '"'].iter().find_map(|&quote| text.strip_prefix(quote)?.strip_suffix(quote))
}

/// The value of a key of a dictionary literal, as it is written.
fn lookup<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = text.trim().strip_prefix('{')?.strip_suffix('}')?;
    while !rest.trim().is_empty() {
        let (entry, after) = split(rest, ',');
        rest = after;
        let (key, value) = split(entry, ':');
        if unquoted(key.trim()) == Some(name) {
            return Some(value.trim());
        }
    }
    None
}

/// Cuts at the first `at` outside of brackets and quotes; what follows it is empty if there is none.
fn split(text: &str, at: char) -> (&str, &str) {
    let (mut depth, mut quote) = (0i32, None);
    for (i, c) in text.char_indices() {
        match (quote, c) {
            (Some(q), _) => quote = quote.filter(|_| c != q),
            (None, '\'' | '"') => quote = Some(c),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') => depth -= 1,
            (None, c) if c == at && depth == 0 => return (&text[..i], &text[i + c.len_utf8()..]),
            _ => {}
        }
    }
    (text, "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(bytes: &[u8]) -> Result<Header> {
        Header::read("a.npy", |at, out| {
            let from = bytes.get(at as usize..at as usize + out.len());
            let from = from.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::UnexpectedEof))?;
            out.copy_from_slice(from);
            Ok(())
        })
    }

    fn with(dictionary: &str) -> Result<Header> {
        Header::parse("a.npy", dictionary, 128)
    }

    /// `numpy.save` of numpy 2 with `numpy.zeros((2, 3), order='F')`, to the byte.
    #[test]
    fn as_numpy_writes_it() {
        let mut bytes =
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': True, 'shape': (2, 3), }".to_vec();
        bytes.resize(127, b' ');
        bytes.push(b'\n');
        let header = Header { descr: "<f8".into(), fortran_order: true, shape: (2, 3), data: 128 };
        assert_eq!(of(&bytes).unwrap(), header);
        assert_eq!(Header::print("<f8", true, (2, 3)), bytes);
    }

    #[test]
    fn other_writers_and_versions() {
        let header = with("{\"shape\":(7,),\"fortran_order\":False,\"descr\":\"<c16\"}  \n").unwrap();
        assert_eq!((header.descr.as_str(), header.shape), ("<c16", (7, 1)));
        let header = with("{'descr': '<f4', 'fortran_order': True, 'shape': (3L, 0L)}").unwrap();
        assert_eq!((header.shape, header.fortran_order), ((3, 0), true));
        let text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (5, 6), }\n";
        for version in [2, 3] {
            let mut bytes = [&b"\x93NUMPY"[..], &[version, 0], &(text.len() as u32).to_le_bytes()].concat();
            bytes.extend(text);
            let header = of(&bytes).unwrap();
            assert_eq!((header.shape, header.data), ((5, 6), 12 + text.len() as u64));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let told = |result: Result<Header>| result.unwrap_err().to_string();
        for (text, words) in [
            ("{'fortran_order': True, 'shape': (1, 2)}", "a.npy: descr: {'fortran_order'"),
            (
                "{'descr': [('x', '<f8'), ('y', '<f8')], 'fortran_order': True, 'shape': (1,)}",
                "is a structured type",
            ),
            (
                "{'descr': '<f8', 'fortran_order': 1, 'shape': (1,)}",
                "a.npy: fortran_order: 1: is not True or False",
            ),
            (
                "{'descr': '<f8', 'fortran_order': True, 'shape': ()}",
                "a.npy: shape: (): is no matrix and no vector",
            ),
            ("{'descr': '<f8', 'fortran_order': True, 'shape': (1, 2, 3)}", "array.reshape(rows, columns)"),
            ("{'descr': '<f8', 'fortran_order': True, 'shape': (-1, 2)}", "is not made of sizes"),
            ("{'descr': '<f8', 'fortran_order': True, 'shape': 3}", "is no tuple"),
            ("not a dictionary", "is missing"),
        ] {
            let message = told(with(text));
            assert!(message.contains(words), "{message}");
        }
        assert!(told(of(b"PK\x03\x04ziparchive")).contains("savez writes a ZIP file"));
        assert!(told(of(b"\x93NUMPY")).contains("written to its end"));
        assert!(told(of(b"\x93NUMPY\x09\x00......")).contains("a.npy: version: 9: is unknown"));
        assert!(told(of(b"\x93NUMPY\x02\x00\xff\xff\xff\xff")).contains("too long"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), text in ".{0,80}") {
            let _ = of(&bytes);
            let _ = of(&[&b"\x93NUMPY\x01\x00\x40\x00"[..], &bytes].concat());
            let _ = with(&format!("{{'shape': {text}}}"));
            let _ = with(&text);
        }

        #[test]
        fn what_is_printed_is_read(m in 0usize..usize::MAX, n in 0usize..usize::MAX, fortran_order: bool) {
            let bytes = Header::print("<c8", fortran_order, (m, n));
            prop_assert_eq!(bytes.len() % 64, 0);
            let header = Header { descr: "<c8".into(), fortran_order, shape: (m, n), data: bytes.len() as u64 };
            prop_assert_eq!(of(&bytes).unwrap(), header);
        }
    }
}
