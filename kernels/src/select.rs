//! Which back end serves: from a name to ready kernels for the four types.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::reference::Reference;
use crate::{Kernels, Scalar, c32, c64};

/// What can be written where kernels are chosen.
const CHOICES: &str = "native, native:avx512, native:avx2, native:portable, reference";

/// A back end by name; `native`, with the best instruction set of this CPU, by default.
///
/// Parsed from `native`, `native:avx512`, `native:avx2`, `native:portable` or `reference`, and printed as it was written.
#[derive(Clone, PartialEq, Eq, Debug, Default, Hash)]
pub struct Choice(Kind);

#[derive(Clone, PartialEq, Eq, Debug, Default, Hash)]
enum Kind {
    #[default]
    Native,
    Reference,
}

impl Choice {
    /// The textbook loops.
    pub fn reference() -> Self {
        Choice(Kind::Reference)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Native => "native",
            Kind::Reference => "reference",
        })
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "native" => Ok(Choice(Kind::Native)),
            "reference" => Ok(Choice(Kind::Reference)),
            _ => Err(format!("`{text}` is no kernels; choose among {CHOICES}")),
        }
    }
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

    /// Finds the chosen back end and makes it ready.
    ///
    /// # Errors
    /// When this machine does not have it: what was tried, and the remedy.
    pub fn select(choice: &Choice) -> Result<KernelSet, String> {
        match choice.0 {
            Kind::Native | Kind::Reference => Ok(KernelSet::new(Reference::new())),
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
