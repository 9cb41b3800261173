//! Every back end that this machine has.

use std::io::Write;
use std::sync::OnceLock;

use fulmen_kernels::{Choice, KernelSet};

pub struct Backend {
    pub name: String,
    pub set: KernelSet,
}

/// Those that can be selected here; the others are named with the reason.
/// More BLAS libraries may be given in `FULMEN_TEST_BLAS`, separated as in `PATH`.
pub fn all() -> &'static [Backend] {
    static ALL: OnceLock<Vec<Backend>> = OnceLock::new();
    ALL.get_or_init(|| {
        let fixed = ["reference", "native", "native:avx512", "native:avx2", "native:neon", "native:portable"];
        let libraries = ["blas:openblas", "blas:mkl", "blas:blis", "blas:system"];
        let more = std::env::var_os("FULMEN_TEST_BLAS").unwrap_or_default();
        let more = std::env::split_paths(&more).filter(|path| !path.as_os_str().is_empty());
        let names = fixed.iter().chain(&libraries).map(|name| name.to_string());
        let names = names.chain(more.map(|path| format!("blas:{}", path.display())));
        names.filter_map(open).collect()
    })
}

fn open(name: String) -> Option<Backend> {
    let set = name.parse::<Choice>().and_then(|choice| KernelSet::select(&choice));
    // Straight to the stream: the test harness swallows what is printed by a passing test.
    let mut stderr = std::io::stderr();
    match set {
        Ok(set) => {
            let is = set.of::<f64>().description();
            let _ = writeln!(stderr, "testing {name}: {} {}", is.backend, is.detail);
            set.warnings().iter().for_each(|w| drop(writeln!(stderr, "    {w}")));
            Some(Backend { name, set })
        }
        Err(why) => {
            let _ = writeln!(stderr, "skipping {name}: {}", why.lines().next().unwrap_or_default());
            None
        }
    }
}
