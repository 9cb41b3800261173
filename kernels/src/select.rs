//! Which back end serves: from a name to ready kernels for the four types.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::blas::{Blas, Wanted, known_names};
use crate::reference::Reference;
use crate::{Isa, Kernels, Scalar, c32, c64, native};

/// What can be written where kernels are chosen.
const CHOICES: &str =
    "native, native:avx512, native:avx2, native:portable, reference, blas, blas:NAME, blas:/path/to/library";

/// A back end by name; `native`, with the best instruction set of this CPU, by default.
///
/// Parsed from, and printed as, `native`, `native:avx512`, `native:avx2`, `native:portable`, `reference`,
/// `blas` (the first library found), `blas:openblas` (or `mkl`, `blis`, …) and `blas:/path/to/library.so`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Hash)]
pub struct Choice(Kind);

#[derive(Clone, PartialEq, Eq, Debug, Hash)]
enum Kind {
    /// With this instruction set, or the best there is.
    Native(Option<Isa>),
    Reference,
    Blas(Wanted),
}

impl Default for Kind {
    fn default() -> Self {
        Kind::Native(None)
    }
}

impl Choice {
    /// The textbook loops.
    pub fn reference() -> Self {
        Choice(Kind::Reference)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Native(None) => f.write_str("native"),
            Kind::Native(Some(isa)) => write!(f, "native:{}", isa.name()),
            Kind::Reference => f.write_str("reference"),
            Kind::Blas(Wanted::Any) => f.write_str("blas"),
            Kind::Blas(Wanted::Known(name)) => write!(f, "blas:{name}"),
            Kind::Blas(Wanted::File(path)) => write!(f, "blas:{}", path.display()),
        }
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "native" => Ok(Choice(Kind::Native(None))),
            _ if text.starts_with("native:") => text[7..]
                .parse()
                .map(|isa| Choice(Kind::Native(Some(isa))))
                .map_err(|e: String| format!("`{text}`: {e}")),
            "reference" => Ok(Choice(Kind::Reference)),
            "blas" => Ok(Choice(Kind::Blas(Wanted::Any))),
            _ if text.starts_with("blas:") => blas(&text[5..]).map(|wanted| Choice(Kind::Blas(wanted))),
            _ => Err(format!("`{text}` is no kernels; choose among {CHOICES}")),
        }
    }
}

fn blas(which: &str) -> Result<Wanted, String> {
    if let Some(name) = known_names().find(|name| *name == which) {
        return Ok(Wanted::Known(name));
    }
    // What is no name is a file if it looks like one.
    if which.contains(['/', '.']) {
        return Ok(Wanted::File(which.into()));
    }
    let names = known_names().collect::<Vec<_>>().join(", ");
    Err(format!("`blas:{which}` names no BLAS; the names are {names}, or give a file: blas:/path/to/library"))
}

/// One back end, ready for all four types.
#[derive(Clone)]
pub struct KernelSet {
    s: Arc<dyn Kernels<f32>>,
    d: Arc<dyn Kernels<f64>>,
    c: Arc<dyn Kernels<c32>>,
    z: Arc<dyn Kernels<c64>>,
    warnings: Vec<String>,
}

impl KernelSet {
    /// One back end for all four types.
    pub fn new<K>(kernels: K) -> Self
    where
        K: Kernels<f32> + Kernels<f64> + Kernels<c32> + Kernels<c64> + 'static,
    {
        let all = Arc::new(kernels);
        KernelSet { s: all.clone(), d: all.clone(), c: all.clone(), z: all, warnings: Vec::new() }
    }

    fn native(isa: Isa) -> Self {
        KernelSet {
            s: native(isa).into(),
            d: native(isa).into(),
            c: native(isa).into(),
            z: native(isa).into(),
            warnings: Vec::new(),
        }
    }

    /// Finds the chosen back end and makes it ready.
    ///
    /// # Errors
    /// When this machine does not have it: what was tried, and the remedy.
    pub fn select(choice: &Choice) -> Result<KernelSet, String> {
        match &choice.0 {
            Kind::Native(isa) => Ok(KernelSet::native(isa.unwrap_or_else(Isa::detect))),
            Kind::Reference => Ok(KernelSet::new(Reference::new())),
            Kind::Blas(wanted) => {
                let blas = Blas::find(wanted, KernelSet::select(&Choice::default())?)?;
                let warnings = blas.warning().into_iter().collect();
                Ok(KernelSet { warnings, ..KernelSet::new(blas) })
            }
        }
    }

    /// The kernels for elements of type `T`.
    pub fn of<T: Element>(&self) -> &Arc<dyn Kernels<T>> {
        T::of(self)
    }

    /// What a user should know about this back end on this machine, a line each; mostly nothing.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// A type that a [`KernelSet`] serves: the four of BLAS.
pub trait Element: Scalar {
    /// Its kernels.
    fn of(set: &KernelSet) -> &Arc<dyn Kernels<Self>>;
}

macro_rules! element {
    ($($t:ty: $field:ident),*) => {$(
        impl Element for $t {
            fn of(set: &KernelSet) -> &Arc<dyn Kernels<Self>> {
                &set.$field
            }
        }
    )*};
}
element!(f32: s, f64: d, c32: c, c64: z);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_printed_as_it_is_written() {
        let names =
            ["native", "native:portable", "reference", "blas", "blas:openblas", "blas:mkl", "blas:blis"];
        for text in names.into_iter().chain(["blas:/opt/x/libmine.so", "blas:libmine.so"]) {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        assert_eq!(Choice::default().to_string(), "native");
    }

    #[test]
    fn a_wrong_choice_is_told_what_there_is() {
        let cases = [
            ("natve", "`natve` is no kernels; choose among native, "),
            ("", "reference, blas, blas:NAME, blas:/path/to/library"),
            ("native:sse9", "portable"),
            ("blas:openblass", "the names are accelerate, openblas, mkl, blis"),
            ("blas:", "or give a file: blas:/path/to/library"),
        ];
        for (text, words) in cases {
            let error = text.parse::<Choice>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn portable_kernels_and_the_reference_are_everywhere() {
        for text in ["native", "native:portable", "reference"] {
            let set = KernelSet::select(&text.parse().unwrap()).unwrap();
            let backend = text.split(':').next().unwrap();
            assert_eq!(set.of::<f32>().description().backend, backend);
            assert_eq!(set.of::<c64>().description().backend, backend);
            assert!(set.warnings().is_empty());
        }
    }
}
