//! Devices, buffers and kernels; the home of unsafe code.
//!
//! [`Driver`] moves bytes, [`Kernels`] computes on them; both are object safe, because a launch costs
//! microseconds and a virtual call nanoseconds. [`cpu::CpuDevice`] is always built: embedded default
//! and oracle for every other backend. Nothing here knows a request, a model or a peer.

#![allow(clippy::cast_ptr_alignment, reason = "buffers are 64-byte aligned and views typed")]
#![allow(
    clippy::inline_always,
    reason = "row kernels take the features of their caller by inlining"
)]
#![allow(clippy::unused_self, reason = "kernels are methods of their device, threads or not")]

mod args;
mod batch_rows;
mod buffer;
mod check;
mod content_digest;
pub mod cpu;
mod driver;
mod dtype;
mod e4m3;
mod error;
mod expert_count;
pub mod hip;
mod host_mat;
mod kv_layout;
mod latent;
mod mapped;
mod marks;
mod mat;
mod packed;
mod packed_group;
mod pinned;
mod route_rule;
mod shared_memory;
pub mod step;
mod vocab_part;

pub use args::{
    Ahead, Around, Attention, BatchRows, Before, Experts, QkRope, Rope, Routes, RowBounds, Scores,
    Spread,
};
pub use buffer::{Buffer, Release};
pub use content_digest::{MatrixWindow, digest_bytes};
pub use driver::{Driver, Graph, Kernels, MemInfo, Replay, Stream};
pub use dtype::{DType, Element, bf16, f16};
pub use e4m3::E4m3;
pub use error::DeviceError;
pub use expert_count::ExpertCount;
pub use host_mat::{HostMat, HostScales};
pub use kv_layout::{KvLayout, KvOrder};
pub use latent::{LatentAttention, LatentHeads, LatentLayout, LatentWrite};
pub use mapped::MappedFile;
pub use marks::Marks;
pub use mat::{Mat, MatMut};
pub use packed::{PANEL_COLUMNS, Packed, Scales};
pub use packed_group::PackedGroup;
pub use pinned::{Fence, InFlight, Pinned};
pub use route_rule::{ExpertGroups, GroupScore, RouteRule, RouterScore};
pub use shared_memory::SharedMemory;
pub use vocab_part::{Gather, InParts, VocabPart};
