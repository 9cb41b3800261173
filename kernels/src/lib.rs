//! One rank's dense arithmetic for Fulmen. Knows no rank, no socket and no file.
//!
//! Everything a distributed algorithm computes locally goes through one seam, the object-safe trait
//! [`Kernels`]; the distributed code above never names an instruction set or a vendor library. A back
//! end is chosen at run time and tests itself before it is believed.
//!
//! Matrices are column-major and are passed as `faer`'s views ([`MatRef`], [`MatMut`]) with unit row
//! stride; the column stride is BLAS's `lld`.

mod affinity;
mod blas;
#[cfg(target_arch = "x86_64")]
mod cpuid;
mod kernels;
mod native;
mod panel;
mod reference;
mod rows;
mod scalar;
mod select;
mod selftest;
mod shared;
#[cfg(target_os = "macos")]
pub mod sysctl;
mod team;

pub use affinity::{allowed_cores, cores};
pub use faer::{Mat, MatMut, MatRef};
pub use kernels::{Description, Diag, Kernels, Op, Side, Tile, Uplo};
pub use native::{HasNative, Isa, native};
pub use num_complex::Complex;
pub use panel::{
    Candidate, LocalExchange, PanelJob, PanelShape, PivotExchange, Variant, compare_pivots, getrf,
    getrf_panel,
};
pub use reference::Reference;
pub use rows::{RowSource, ScatteredRows, exchange_rows, gather_strip, move_rows};
pub use scalar::{Real, Scalar, c32, c64};
pub use select::{Choice, Element, KernelSet};
pub use selftest::{SelfTest, dgemm_gflops, self_test};
pub use shared::SharedMut;
pub use team::{Member, Patience, SubTeam, Team};
