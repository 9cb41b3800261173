//! Block-cyclically distributed matrices.

mod desc;
pub mod index;
mod matrix;
pub mod memory;
mod transfer;
mod view;

pub use desc::Desc;
pub use index::{Axis, Col, Global, Local, Row};
pub use matrix::DistMatrix;
pub use view::{DistMut, DistRef, Parts};
