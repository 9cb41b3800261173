//! Vendors' libraries, called by their Fortran names.

use std::ffi::{c_char, c_int, c_void};

use fulmen_kernels::Real;
use libloading::Library;

/// A library with BLAS, and LAPACK if it has it.
pub struct Peer {
    pub name: String,
    pub path: String,
    library: &'static Library,
}

/// The libraries that the environment names.
pub fn found() -> Vec<Peer> {
    let mut peers = Vec::new();
    for (key, path) in std::env::vars() {
        let Some(name) = key.strip_prefix("FULMEN_PEER_") else { continue };
        // SAFETY: loading a library that the user named.
        match unsafe { Library::new(&path) } {
            Ok(library) => {
                let library = Box::leak(Box::new(library));
                peers.push(Peer { name: name.to_lowercase(), path, library });
            }
            Err(e) => eprintln!("kernels-vs-peers: {key}: {e}"),
        }
    }
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    peers
}

type Gemm = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_void,
    *const c_void,
    *const c_int,
    *const c_void,
    *const c_int,
    *const c_void,
    *mut c_void,
    *const c_int,
);
type Trsm = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const c_char,
    *const c_char,
    *const c_int,
    *const c_int,
    *const c_void,
    *const c_void,
    *const c_int,
    *mut c_void,
    *const c_int,
);
type Getrf =
    unsafe extern "C" fn(*const c_int, *const c_int, *mut c_void, *const c_int, *mut c_int, *mut c_int);

impl Peer {
    fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        ["", "scipy_"].iter().find_map(|prefix| {
            // SAFETY: the callers give the type that the BLAS standard gives this name.
            unsafe { self.library.get::<F>(format!("{prefix}{name}").as_bytes()).ok().map(|f| *f) }
        })
    }

    /// Sets the number of threads.
    pub fn threads(&self, n: usize) {
        for name in ["MKL_Set_Num_Threads", "openblas_set_num_threads"] {
            if let Some(set) = self.symbol::<unsafe extern "C" fn(c_int)>(name) {
                // SAFETY: the library's own setter.
                unsafe { set(n as c_int) };
            }
        }
        if let Some(set) = self.symbol::<unsafe extern "C" fn(i64)>("bli_thread_set_num_threads") {
            // SAFETY: the library's own setter.
            unsafe { set(n as i64) };
        }
    }

    /// C -= A·B
    pub fn gemm<T: Real>(
        &self,
        m: usize,
        n: usize,
        k: usize,
        a: &[T],
        lda: usize,
        b: &[T],
        ldb: usize,
        c: &mut [T],
        ldc: usize,
    ) -> bool {
        let Some(gemm) = self.symbol::<Gemm>(&format!("{}gemm_", T::LETTER)) else { return false };
        let [m, n, k, lda, ldb, ldc] = [m, n, k, lda, ldb, ldc].map(|x| x as c_int);
        let (alpha, beta) = (T::from_f64(-1.0), T::from_f64(1.0));
        // SAFETY: the extents are those of the slices.
        unsafe {
            gemm(
                c"N".as_ptr(),
                c"N".as_ptr(),
                &m,
                &n,
                &k,
                (&raw const alpha).cast(),
                a.as_ptr().cast(),
                &lda,
                b.as_ptr().cast(),
                &ldb,
                (&raw const beta).cast(),
                c.as_mut_ptr().cast(),
                &ldc,
            );
        }
        true
    }

    /// B := L⁻¹·B, unit lower
    pub fn trsm<T: Real>(&self, k: usize, n: usize, l: &[T], ldl: usize, b: &mut [T], ldb: usize) -> bool {
        let Some(trsm) = self.symbol::<Trsm>(&format!("{}trsm_", T::LETTER)) else { return false };
        let [k, n, ldl, ldb] = [k, n, ldl, ldb].map(|x| x as c_int);
        let one = T::from_f64(1.0);
        // SAFETY: the extents are those of the slices.
        unsafe {
            trsm(
                c"L".as_ptr(),
                c"L".as_ptr(),
                c"N".as_ptr(),
                c"U".as_ptr(),
                &k,
                &n,
                (&raw const one).cast(),
                l.as_ptr().cast(),
                &ldl,
                b.as_mut_ptr().cast(),
                &ldb,
            );
        }
        true
    }

    /// LU of m × n
    pub fn getrf<T: Real>(&self, m: usize, n: usize, a: &mut [T], lda: usize) -> bool {
        let Some(getrf) = self.symbol::<Getrf>(&format!("{}getrf_", T::LETTER)) else { return false };
        let [m, n, lda] = [m, n, lda].map(|x| x as c_int);
        let (mut ipiv, mut info) = (vec![0; m.min(n) as usize], 0);
        // SAFETY: the extents are those of the slices.
        unsafe { getrf(&m, &n, a.as_mut_ptr().cast(), &lda, ipiv.as_mut_ptr(), &mut info) };
        info == 0
    }
}
