//! Who made the library, how its threads are turned off, and which CPU it takes this one for.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use super::library::Symbols;

/// What a library says about itself.
pub(crate) struct Identity {
    /// `OpenBLAS`, `MKL`, `BLIS`, `Accelerate`, or `BLAS` for a stranger.
    pub(crate) vendor: &'static str,
    /// Its version and build, as short as it can be.
    pub(crate) version: String,
    /// The CPU or instruction set whose kernels it runs.
    pub(crate) core: Option<String>,
    /// Sets the number of threads for the calls of the calling thread only.
    threads_here: Option<SetThreads>,
}

/// A library's ways, found once.
pub(crate) struct Setup {
    pub(crate) identity: Identity,
    /// Two threads must not be inside at once.
    pub(crate) serial: bool,
}

/// What Accelerate reads before its first call.
const VECLIB: &str = "VECLIB_MAXIMUM_THREADS";

/// A setter that takes C's `int`, or `dim_t`: a small number fits the same register.
#[derive(Clone, Copy)]
enum SetThreads {
    Int(unsafe extern "C" fn(c_int)),
    Wide(unsafe extern "C" fn(i64)),
}

impl SetThreads {
    fn one(self) {
        // SAFETY: these setters take the number by value, and 1 is legal.
        unsafe {
            match self {
                SetThreads::Int(set) => set(1),
                SetThreads::Wide(set) => set(1),
            }
        }
    }
}

thread_local! {
    /// Libraries (by the address of their setter) that this thread has been announced to.
    static PREPARED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Identity {
    /// Turns the library's own threads off for calls from this thread, where that is a thread's property.
    pub(crate) fn prepare_thread(&self) {
        let Some(set) = self.threads_here else { return };
        let id = match set {
            SetThreads::Int(f) => f as usize,
            SetThreads::Wide(f) => f as usize,
        };
        PREPARED.with_borrow_mut(|prepared| {
            if !prepared.contains(&id) {
                set.one();
                prepared.push(id);
            }
        });
    }

    /// Fills in what shows only after the first call.
    pub(crate) fn finish(&mut self) {
        if self.vendor == "MKL" {
            self.core = mkl_kernels();
        }
    }

    /// For reports: `OpenBLAS 0.3.34 SkylakeX`.
    pub(crate) fn detail(&self) -> String {
        let parts = [self.vendor, &self.version, self.core.as_deref().unwrap_or("")];
        parts.iter().filter(|p| !p.is_empty()).copied().collect::<Vec<_>>().join(" ")
    }

    /// A line for the user when the library took this CPU for a lesser one.
    pub(crate) fn warning(&self) -> Option<String> {
        if self.vendor == "Accelerate" && self.threads_here.is_none() && std::env::var_os(VECLIB).is_none() {
            return Some(format!(
                "Accelerate {} starts threads of its own beside ours: set {VECLIB}=1, or upgrade to macOS 15",
                self.version
            ));
        }
        let (core, cpu) = (self.core.as_deref()?, Level::of_this_cpu()?);
        mismatch(self.vendor, &self.version, core, cpu)
    }
}

/// The warning about kernels named `core` on a CPU that is at its best with `cpu`.
fn mismatch(vendor: &str, version: &str, core: &str, cpu: Level) -> Option<String> {
    let picked = Level::of_core(core)?;
    if picked >= cpu {
        return None;
    }
    let (openblas, blis, mkl) = match cpu {
        Level::Avx512 => ("SKYLAKEX", "skx", "AVX512"),
        _ => ("HASWELL", "haswell", "AVX2"),
    };
    let remedy = match vendor {
        "OpenBLAS" => format!("set OPENBLAS_CORETYPE={openblas}, or install a newer OpenBLAS"),
        "BLIS" => format!("set BLIS_ARCH_TYPE={blis}, or install a newer BLIS"),
        "MKL" => format!("set MKL_ENABLE_INSTRUCTIONS={mkl}, or use another library"),
        _ => "use another library".into(),
    };
    Some(format!(
        "{vendor} {version} runs its {core} kernels ({picked}) on a CPU with {cpu}, at a fraction of its speed: {remedy}"
    ))
}

/// Finds out whose library it is and sets it to one thread.
pub(crate) fn set_up(symbols: &Symbols, path: &Path) -> Setup {
    let known = || openblas(symbols).or_else(|| mkl(symbols, path)).or_else(|| blis(symbols));
    known().or_else(|| accelerate(symbols, path)).unwrap_or_else(|| Setup {
        identity: Identity {
            vendor: "BLAS",
            version: path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            core: None,
            threads_here: omp_setter(symbols),
        },
        serial: false,
    })
}

type Text = unsafe extern "C" fn() -> *const c_char;
type Number = unsafe extern "C" fn() -> c_int;

/// Calls a function that returns a string that lives on.
fn text(f: Text) -> String {
    // SAFETY: such functions return a NUL-terminated constant, or null.
    unsafe {
        let s = f();
        if s.is_null() { String::new() } else { CStr::from_ptr(s).to_string_lossy().trim().to_string() }
    }
}

/// `omp_set_num_threads` of the runtime that the library depends on. It holds for the calling thread only.
fn omp_setter(symbols: &Symbols) -> Option<SetThreads> {
    // SAFETY: OpenMP's signature; the runtime stays loaded with the library.
    unsafe { symbols.function("omp_set_num_threads") }.map(SetThreads::Int)
}

fn openblas(symbols: &Symbols) -> Option<Setup> {
    // 64-bit builds add a suffix to these names too, PyPI's its prefix.
    let (prefix, suffix) = [("", ""), ("", "64_"), ("scipy_", ""), ("scipy_", "64_")].into_iter().find(
        // SAFETY: only its presence is asked for.
        |(prefix, suffix)| unsafe {
            symbols.function::<Text>(&format!("{prefix}openblas_get_config{suffix}")).is_some()
        },
    )?;
    let name = |function: &str| format!("{prefix}openblas_{function}{suffix}");
    // SAFETY: signatures of openblas_config.h / cblas.h, the same in all versions.
    let (config, core, parallel, set_threads) = unsafe {
        (
            symbols.function::<Text>(&name("get_config")).map(text)?,
            symbols.function::<Text>(&name("get_corename")).map(text),
            symbols.function::<Number>(&name("get_parallel")).map_or(1, |parallel| parallel()),
            symbols.function::<unsafe extern "C" fn(c_int)>(&name("set_num_threads")).map(SetThreads::Int),
        )
    };
    if let Some(set) = set_threads {
        set.one();
    }
    Some(Setup {
        identity: Identity {
            vendor: "OpenBLAS",
            version: config.split_whitespace().nth(1).unwrap_or_default().to_string(),
            core,
            // An OpenMP build (2) follows the calling thread's OpenMP setting and ignores its own.
            threads_here: if parallel == 2 { omp_setter(symbols).or(set_threads) } else { None },
        },
        // A build without threads has no locks around its work buffers, unless it was asked for them.
        serial: parallel == 0 && !config.contains("USE_LOCKING"),
    })
}

fn mkl(symbols: &Symbols, path: &Path) -> Option<Setup> {
    type Version = unsafe extern "C" fn(*mut c_char, c_int);
    type SetLayer = unsafe extern "C" fn(c_int) -> c_int;
    const LP64: c_int = 0;
    const SEQUENTIAL: c_int = 1;
    // SAFETY: signatures and codes of mkl_service.h; the capitalised names take their arguments by value.
    // The layers must be chosen before anything else is called.
    unsafe {
        let version = symbols.function::<Version>("MKL_Get_Version_String")?;
        if let Some(set) = symbols.function::<SetLayer>("MKL_Set_Interface_Layer") {
            set(LP64);
        }
        // MKL ends the process when it can't load the layer: look first.
        if let Some(set) = symbols.function::<SetLayer>("MKL_Set_Threading_Layer")
            && has_beside(path, "libmkl_sequential")
        {
            set(SEQUENTIAL);
        }
        if let Some(set) = symbols.function::<unsafe extern "C" fn(c_int)>("MKL_Set_Num_Threads") {
            set(1);
        }
        let mut buffer = [0 as c_char; 256];
        version(buffer.as_mut_ptr(), buffer.len() as c_int);
        buffer[255] = 0;
        let words = CStr::from_ptr(buffer.as_ptr()).to_string_lossy().into_owned();
        let version = words.split_once("Version ").map_or(&*words, |(_, rest)| rest);
        Some(Setup {
            identity: Identity {
                vendor: "MKL",
                version: version.split([' ', '-']).next().unwrap_or_default().to_string(),
                core: None,
                threads_here: None,
            },
            serial: false,
        })
    }
}

fn has_beside(path: &Path, stem: &str) -> bool {
    let Some(folder) = path.canonicalize().ok().and_then(|p| p.parent().map(Path::to_path_buf)) else {
        return false;
    };
    let Ok(entries) = folder.read_dir() else { return false };
    entries.flatten().any(|e| e.file_name().to_string_lossy().starts_with(stem))
}

/// MKL loads the kernels it has chosen as a library of their own, `libmkl_avx512.so` and the like.
fn mkl_kernels() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let names = maps.lines().filter_map(|line| line.rsplit_once("/libmkl_").map(|(_, name)| name));
    let kernels = names.filter_map(|name| name.split('.').next());
    let best =
        kernels.filter(|name| Level::of_core(name).is_some()).max_by_key(|name| Level::of_core(name))?;
    // On AMD's CPUs `def` holds kernels of their own, with AVX2.
    Some(if best == "def" && is_amd() { "def for AMD".into() } else { best.to_string() })
}

fn blis(symbols: &Symbols) -> Option<Setup> {
    type ArchName = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: BLIS's exported interface; `arch_t` is an int, `dim_t` 64 bits on all of our machines.
    unsafe {
        let version = symbols.function::<Text>("bli_info_get_version_str").map(text)?;
        let arch = symbols.function::<Number>("bli_arch_query_id").map(|id| id());
        let core = symbols.function::<ArchName>("bli_arch_string").zip(arch).map(|(name, id)| name(id));
        let core = core.filter(|s| !s.is_null()).map(|s| CStr::from_ptr(s).to_string_lossy().into_owned());
        let set = symbols.function("bli_thread_set_num_threads").map(SetThreads::Wide);
        if let Some(set) = set {
            set.one();
        }
        Some(Setup {
            // From 1.0 on, and in AMD's versions, the setting belongs to the calling thread.
            identity: Identity { vendor: "BLIS", version, core, threads_here: set },
            serial: false,
        })
    }
}

/// Part of macOS, and of its version. Before macOS 15 its threads obey only VECLIB_MAXIMUM_THREADS, which it reads once.
fn accelerate(symbols: &Symbols, path: &Path) -> Option<Setup> {
    let at = path.to_string_lossy();
    if !at.contains("/Accelerate.framework/") && !at.contains("/vecLib.framework/") {
        return None;
    }
    // SAFETY: signature of vecLib/thread_api.h; 1 is BLAS_THREADING_SINGLE_THREADED, and holds for the calling thread.
    let set = unsafe { symbols.function("BLASSetThreading") }.map(SetThreads::Int);
    if let Some(set) = set {
        set.one();
    }
    #[cfg(target_os = "macos")]
    let version =
        crate::sysctl::text(c"kern.osproductversion").map_or_else(String::new, |v| format!("of macOS {v}"));
    #[cfg(not(target_os = "macos"))]
    let version = String::new();
    Some(Setup {
        identity: Identity { vendor: "Accelerate", version, core: None, threads_here: set },
        serial: false,
    })
}

/// Vector instructions that set the pace on x86-64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Level {
    Sse,
    Avx,
    Avx2,
    Avx512,
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Level::Sse => "SSE",
            Level::Avx => "AVX",
            Level::Avx2 => "AVX2 and FMA",
            Level::Avx512 => "AVX-512",
        })
    }
}

impl Level {
    /// What this CPU is at its best with; `None` where we can't tell.
    fn of_this_cpu() -> Option<Level> {
        #[cfg(target_arch = "x86_64")]
        {
            let cpu = crate::cpuid::Signature::here();
            // Zen 4 (the only ones of family 19h that have it) runs AVX-512 in two halves: its AVX2 kernels are as fast.
            let halved = cpu.is_amd() && cpu.family == 0x19;
            if std::is_x86_feature_detected!("avx512f") && !halved {
                return Some(Level::Avx512);
            }
            if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
                return Some(Level::Avx2);
            }
            Some(if std::is_x86_feature_detected!("avx") { Level::Avx } else { Level::Sse })
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// What the kernels called so by OpenBLAS, BLIS and MKL use; `None` for a name not known here.
    fn of_core(core: &str) -> Option<Level> {
        Some(match core.to_ascii_lowercase().as_str() {
            "skylakex" | "cooperlake" | "sapphirerapids" | "skx" | "knl" | "zen4" | "zen5" | "avx512"
            | "avx10" => Level::Avx512,
            "haswell" | "zen" | "zen2" | "zen3" | "excavator" | "avx2" => Level::Avx2,
            "sandybridge" | "bulldozer" | "piledriver" | "steamroller" | "avx" => Level::Avx,
            "prescott" | "core2" | "penryn" | "dunnington" | "nehalem" | "atom" | "athlon" | "opteron"
            | "opteron_sse3" | "barcelona" | "bobcat" | "nano" | "katmai" | "coppermine" | "northwood"
            | "banias" | "def" | "mc3" | "generic" => Level::Sse,
            _ => return None,
        })
    }
}

fn is_amd() -> bool {
    #[cfg(target_arch = "x86_64")]
    return crate::cpuid::Signature::here().is_amd();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Debian's libraries were seen to pick on a Sapphire Rapids (OpenBLAS 0.3.21, BLIS 0.9.0).
    #[test]
    fn lesser_kernels_are_named_with_the_remedy() {
        let warn = |vendor, core, cpu| mismatch(vendor, "1", core, cpu);
        let text = warn("OpenBLAS", "Prescott", Level::Avx512).unwrap();
        assert!(
            text.contains("Prescott kernels (SSE)") && text.contains("OPENBLAS_CORETYPE=SKYLAKEX"),
            "{text}"
        );
        let text = warn("BLIS", "haswell", Level::Avx512).unwrap();
        assert!(text.contains("BLIS_ARCH_TYPE=skx"), "{text}");
        assert!(warn("OpenBLAS", "Prescott", Level::Avx2).unwrap().contains("OPENBLAS_CORETYPE=HASWELL"));
        assert_eq!(warn("OpenBLAS", "SkylakeX", Level::Avx512), None);
        assert_eq!(warn("BLIS", "zen3", Level::Avx2), None);
        assert_eq!(warn("OpenBLAS", "a core of the future", Level::Avx512), None);
    }
}
