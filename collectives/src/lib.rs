//! Groups of ranks and their collective operations: all-reduce, all-gather, reduce-scatter, all-to-all,
//! broadcast.
//!
//! A model has one [`ParallelGroup`] per parallel axis and calls it unconditionally: in a group of one rank,
//! every collective operation does nothing. The transport is a [`CollectiveBackend`], which is selected when
//! the group is created. CPU ranks use the shared memory of a [`SharedMemoryRendezvous`], and TCP between
//! hosts. GPUs use RCCL or NCCL, or peer memory. This crate does not interpret the data.

mod collective_call;
mod communicator;
mod communicator_bootstrap;
mod device_group;
mod error;
mod group;
mod group_rendezvous;
mod group_watchdog;
mod host_mesh;
mod mesh_endpoint;
mod peer_memory;
mod peer_memory_group;
mod peer_waiter;
mod rendezvous;
mod row_collectives;
mod row_counts;
mod shared_element;
mod shared_layout;
mod shared_memory_group;
mod tcp_mesh;

pub use collective_call::{CollectiveCall, CollectiveCallState, CollectiveOp};
pub use communicator::{CollectiveLibrary, CommunicatorId, GpuCommunicator};
pub use device_group::DeviceGroup;
pub use error::CollectiveError;
pub use group::{
    AllReduceNormArgs, AllReduceState, CollectiveBackend, CollectiveHostTime, ParallelGroup,
};
pub use group_rendezvous::{GroupRendezvous, HostGroup, form_host_group};
pub use group_watchdog::LaunchedCollectives;
pub use host_mesh::{GroupMembership, HostMesh};
pub use mesh_endpoint::{MESH_TOKEN_BYTES, MeshEndpoint, MeshListener};
pub use peer_memory::{PeerMemory, PeerMemoryHandle, PeerMemoryRank};
pub use rendezvous::SharedMemoryRendezvous;
pub use row_counts::AllToAllRowCounts;
pub use shared_layout::{CALL_HISTORY_LEN, SLOT_BYTES};
pub use shared_memory_group::SharedMemoryGroup;
