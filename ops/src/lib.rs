//! Tensors and shape-checked ops on one device; chooses kernels and fusions.
//!
//! [`Ops`] is the only interface that layers call. Results are allocated from an arena that returns the same
//! memory in the same order, so that a step allocates nothing and can be captured as a graph. This crate does
//! not depend on other ranks or on requests.

#![forbid(unsafe_code)]

mod arena;
mod attention;
mod batch;
mod dense;
mod draft_buffers;
mod error;
mod expert_load;
mod expert_packing;
mod foreign_step;
mod fused_linear;
mod kv_pool;
mod launch_plan;
mod mla;
mod moe;
mod moe_dispatch;
mod pooled_sums;
mod prefetch;
mod prompt_batches;
mod recurrent;
mod replay_buffers;
mod secondary_stream;
mod sequence_slots;
mod shared_experts;
mod step_buffers;
mod step_ids;
mod tensor;
mod tensor_download;
mod weights;

pub use attention::{
    AttentionLayerParams, KvCacheScaling, QkFullNormWeights, QkNormRopeParams, RopeTable,
};
pub use batch::{DeviceBatchMetadata, HostBatchMetadata, HostGroupTables, HostStateSlots};
pub use dense::Ops;
pub use device::{
    CapturedGraph, CopyInFlight, DType, DeviceStream, Fp8E4m3, MappedFile, MatMut, MatRef,
    PinnedBuffer, bf16, f16,
};
pub use draft_buffers::{DraftBufferLimits, DraftBuffers};
pub use error::OpError;
pub use expert_load::{
    ExpertLoadCounters, ExpertLoadEntry, ExpertLoadStatsDownload, LayerExpertLoadCounter,
};
pub use expert_packing::{ExpertMatrices, SharedExpertMatrices};
pub use foreign_step::{ForeignStepBatch, ForeignStepBuffers};
pub use fused_linear::{DownProjectionInput, GatedMlpWeights, RmsNormParams};
pub use kernels::step::{
    DraftVerification, RULE_HISTORY, RULE_MASKED, ReplayShape, RowMetadataField, SAMPLE_ALL_MASKED,
    SAMPLE_DRAFT_ACCEPTED, SAMPLE_NON_FINITE, SAMPLE_OK, SampledToken, SequenceSamplingParams,
    StagedDraftRow, StagedLogitEdit, StagedLogitsRow, StagedSequenceInit, StagedStepRow,
    StagedTableChange, StagingBuffer, StagingHeader,
};
pub use kernels::{
    ActivationScaling, AllGatherFn, AttentionKeyRange, BatchRowLengths, BatchUpperBounds,
    ExpertGroups, ExpertParallelLayout, ForeignStepArrays, GateActivation, GroupScoreFunction,
    HashedMatrixPart, HostMat, KvLayout, KvTileOrder, MlaKvLayout, QkChannelCounts,
    RecurrentStateLayout, RouterScoreFunction, VocabParallelSupport, VocabShard, digest_bytes,
};
pub use kv_pool::{GroupKvLayout, GroupedKvLayouts, KvPool, KvPoolLayout};
pub use mla::{MlaWeights, PackedMlaUpProjections};
pub use moe::{ExpertBiases, ExpertRouting, ExpertsPerToken, PackedExperts, RouterRule};
pub use moe_dispatch::MoeDispatchPlan;
pub use pooled_sums::MeanPoolingSums;
pub use prompt_batches::prompt_batches;
pub use recurrent::DeltaRuleParams;
pub use replay_buffers::ReplayBufferLimits;
pub use sequence_slots::{DeviceSequenceSlots, SequenceSlotLimits};
pub use shared_experts::{SharedExpertMlp, SharedExperts};
pub use step_buffers::{
    SamplerOutputHostBuffers, SamplerOutputs, SamplerOutputsInFlight, StepBufferLimits,
    StepBuffers, StepShape,
};
pub use step_ids::TokenIdDownload;
pub use tensor::Tensor;
pub use tensor_download::{DownloadedTensor, TensorDownload};
pub use weights::{EmbeddingTable, PackedLinear};
