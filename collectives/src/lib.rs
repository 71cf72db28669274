//! Groups of ranks and their collectives.
//!
//! A model sees one [`Group`] per parallel axis and calls it unconditionally: in a group of one
//! everything is a no-op, so no layer ever branches on its size. How bytes travel between ranks is a
//! [`Collective`], chosen when the group is made. Nothing here knows what the numbers mean.

#![forbid(unsafe_code)]

mod error;
mod group;

pub use error::CollectiveError;
pub use group::{Collective, Group};
