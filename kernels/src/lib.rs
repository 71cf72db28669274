//! CPU and GPU kernels (ops), and the memory layouts of their operands. One of the crates with unsafe code.
//!
//! An op is a struct that contains the arguments of one computation (`src/op`); [`KernelBackend::launch`]
//! runs an op. The CPU backend is part of every build: it is the default of the embedded (in-process)
//! executor, and GPU results are compared with its results. The crate does not depend on requests, models or
//! other ranks.

#![allow(clippy::cast_ptr_alignment, reason = "buffers are 64-byte aligned and views typed")]
#![allow(
    clippy::inline_always,
    reason = "row kernels take the features of their caller by inlining"
)]
#![allow(clippy::unused_self, reason = "kernels are methods of their backend, threads or not")]

mod activation_scaling;
mod args;
mod backend;
mod batch_rows;
mod check;
mod content_digest;
pub mod cpu;
mod expert_load;
mod gate_activation;
pub mod gpu;
mod host_mat;
mod kv_layout;
mod mla;
mod op;
mod packed_group;
mod packed_matrix;
mod recurrent_state;
mod route_rule;
pub mod step;
mod vocab_shard;

pub use activation_scaling::ActivationScaling;
pub use args::{
    AllReduceShape, AttentionKeyRange, AttentionMetadata, BatchRowLengths, BatchUpperBounds,
    ExpertParallelLayout, ExpertWeights, KvCacheScales, LinearFusion, LinearPrologue,
    PagedAttentionArgs, PrefetchHint, QkChannelCounts, QkNormRopeArgs, RopeCosSin,
    SoftmaxRouterArgs, TopKRoutes,
};
pub use backend::KernelBackend;
pub use content_digest::{HashedMatrixPart, digest_bytes};
pub use expert_load::ExpertLoadArgs;
pub use gate_activation::GateActivation;
pub use host_mat::{HostMat, HostScales};
pub use kv_layout::{KvLayout, KvTileOrder};
pub use mla::{MlaAttentionArgs, MlaKvLayout, MlaPrologueArgs, MlaUpProjections};
pub use op::*;
pub use packed_group::PackedMatrixGroup;
pub use packed_matrix::{PANEL_COLUMNS, PackedMatrix, PackedScales};
pub use recurrent_state::{RecurrentStateLayout, StateSlotRows};
pub use route_rule::{ExpertGroups, GroupScoreFunction, RouterRuleArgs, RouterScoreFunction};
pub use vocab_shard::{AllGatherFn, VocabParallelSupport, VocabShard};
