//! Groups of ranks and their collectives.
//!
//! A model sees one [`ParallelGroup`] per parallel axis and calls it unconditionally: in a group of one
//! everything is a no-op. How bytes travel between ranks is a [`CollectiveBackend`], chosen when the group is
//! made: on CPUs of one host through the memory of a [`SharedMemoryRendezvous`], on GPUs through their library, or through memory that they reach in each other.
//! Nothing here knows what the numbers mean.

mod collective_call;
mod communicator;
mod device_group;
mod error;
mod group;
mod group_watchdog;
mod peer_memory;
mod peer_waiter;
mod rendezvous;
mod row_collectives;
mod row_counts;
mod shared_element;
mod shared_layout;
mod shared_memory_group;

pub use collective_call::{CallState, CollectiveCall, CollectiveOp};
pub use communicator::{CollectiveLibrary, CommunicatorId, GpuCommunicator};
pub use device_group::DeviceGroup;
pub use error::CollectiveError;
pub use group::{CollectiveBackend, CollectiveTime, ParallelGroup};
pub use group_watchdog::LaunchCheckpoint;
pub use peer_memory::{PeerMemory, PeerMemoryHandle, PeerRankId};
pub use rendezvous::SharedMemoryRendezvous;
pub use row_counts::RowCounts;
pub use shared_layout::{CALL_HISTORY_LEN, SLOT_BYTES};
pub use shared_memory_group::SharedMemoryGroup;
