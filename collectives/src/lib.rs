//! Groups of ranks and their collectives.
//!
//! A model sees one [`Group`] per parallel axis and calls it unconditionally: in a group of one
//! everything is a no-op. How bytes travel between ranks is a [`Collective`], chosen when the group is
//! made: on CPUs of one host through the memory of a [`Meeting`], on GPUs through their library, or through memory that they reach in each other.
//! Nothing here knows what the numbers mean.

#![forbid(unsafe_code)]

mod call;
mod counts;
mod device_group;
mod error;
mod group;
mod lane;
mod layout;
mod meeting;
mod rows;
mod shared_group;
mod waiting;
mod watch;

pub use call::{Call, CallState, Operation};
pub use counts::RowCounts;
pub use device_group::DeviceGroup;
pub use error::CollectiveError;
pub use group::{Collective, Group, Spent};
pub use layout::{CALLS, SLOT_BYTES};
pub use meeting::Meeting;
pub use shared_group::SharedGroup;
pub use watch::Launched;
