//! Groups of ranks and what they do together: small collectives, panel broadcasts, exchanges.
//!
//! Everything here is a program over the armed-slot contract of [`crate::fabric`]: both ends of each
//! put derive its place and order from the same call, so no message carries a tag.
//!
//! ```
//! use fulmen::{comm::Group, fabric::mem};
//!
//! let results = mem::run(3, mem::Options::default(), |fabric| {
//!     let group = Group::all(fabric)?;
//!     let mut sum = [0.1 * (1 + group.me()) as f64];
//!     group.all_sum(&mut sum)?; // in the order of the group: the same bits on every rank
//!     Ok(sum[0])
//! });
//! assert!(results.into_iter().all(|sum| sum.unwrap() == 0.1 + 0.2 + 0.1 * 3.0));
//! ```

mod bulk;
mod cables;
mod exchange;
mod group;
mod panel;
mod topology;

pub use bulk::Bulk;
pub use cables::Cables;
pub use exchange::{AllToAllSmall, Messages};
pub use group::Group;
pub use panel::{BcastLane, PanelBcast};
pub use topology::Topology;
