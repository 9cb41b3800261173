//! Block-cyclically distributed matrices.
//!
//! ```
//! use fulmen::dist::{Desc, DistMatrix};
//! use fulmen::{Grid, fabric::mem};
//!
//! // Six ranks as threads; elsewhere they are processes, and the program is the same.
//! let sums = mem::run(6, mem::Options::default(), |fabric| {
//!     let grid = Grid::squarest(fabric)?; // 2 x 3
//!     let desc = Desc::square_blocks(1000, 1000, 64);
//!     let a = DistMatrix::<f64>::from_fn(&grid, desc, |i, j| if i == j { 2.0 } else { 0.0 })?;
//!     assert_eq!(a.local().nrows(), a.rows().count(grid.myrow())); // this rank's part
//!     fulmen::blas::norm::one(&a.view()) // collective
//! });
//! assert!(sums.into_iter().all(|norm| norm.unwrap() == 2.0));
//! ```

mod desc;
pub mod index;
mod matrix;
pub mod memory;
mod transfer;
mod view;

pub use desc::{Blocks, Desc};
pub use index::{Axis, Col, Global, Local, Row};
pub use matrix::DistMatrix;
pub use view::{DistMut, DistRef, Parts};
