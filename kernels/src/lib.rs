//! Devices, buffers and kernels; the home of unsafe code.
//!
//! [`DeviceDriver`] moves bytes, [`Kernels`] computes on them; both are object safe, because a launch costs
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
mod device_driver;
mod dtype;
mod error;
mod expert_load;
mod fp8_e4m3;
pub mod gpu;
mod host_mat;
mod kv_layout;
mod mapped_file;
mod mat;
mod mla;
mod packed_group;
mod packed_matrix;
mod pinned_memory;
mod route_rule;
mod shared_memory;
pub mod step;
mod timestamps;
mod vocab_shard;

pub use args::{
    AttentionMetadata, ExpertParallelLayout, ExpertWeights, LinearFusion, LinearPrologue,
    PagedAttentionArgs, PrefetchHint, QkNormRopeArgs, RopeCosSin, RouterLogits, RowBounds,
    TopKRoutes,
};
pub use buffer::{Buffer, BufferDeallocator};
pub use content_digest::{MatrixWindow, digest_bytes};
pub use device_driver::{CapturedGraph, DeviceDriver, DeviceStream, GraphReplay, Kernels, MemInfo};
pub use dtype::{DType, DeviceElement, bf16, f16};
pub use error::DeviceError;
pub use expert_load::ExpertLoadArgs;
pub use fp8_e4m3::Fp8E4m3;
pub use host_mat::{HostMat, HostScales};
pub use kv_layout::{KvLayout, KvOrder};
pub use mapped_file::MappedFile;
pub use mat::{MatMut, MatRef};
pub use mla::{MlaAttentionArgs, MlaHeadWeights, MlaKvLayout, MlaKvWriteArgs};
pub use packed_group::PackedGroup;
pub use packed_matrix::{PANEL_COLUMNS, PackedMatrix, PackedScales};
pub use pinned_memory::{CopyFence, CopyInFlight, PinnedBuffer};
pub use route_rule::{ExpertGroups, GroupScore, RouterRuleArgs, RouterScore};
pub use shared_memory::SharedMemory;
pub use timestamps::EventTimestamps;
pub use vocab_shard::{GatherFn, VocabParallelSupport, VocabShard};
