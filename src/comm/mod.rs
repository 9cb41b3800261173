//! Groups of ranks and what they do together: small collectives, panel broadcasts, exchanges.
//!
//! Everything here is a program over the armed-slot contract of [`crate::fabric`]: both ends of each
//! put derive its place and order from the same call, so no message carries a tag.

mod bulk;
mod exchange;
mod group;
mod panel;
mod topology;

pub use bulk::Bulk;
pub use exchange::{AllToAllSmall, Messages};
pub use group::Group;
pub use panel::{BcastLane, PanelBcast};
pub use topology::Topology;
