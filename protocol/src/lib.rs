//! Types that cross a process boundary: ids, batches, step outputs, KV layout and KV events.
//!
//! The crate contains only data types. A type belongs here if it is serialised between the scheduler and an
//! executor, or between the scheduler and a KV-event subscriber. This crate has no policy and no device
//! access.

#![forbid(unsafe_code)]

mod batch;
pub mod codec;
mod executor;
pub mod frame;
mod ids;
mod kv_event;
mod kv_spec;
pub mod link;
mod node;
mod output;
mod packed_list;
mod pooling;
mod sampling;
mod settings;
mod tokens;

pub use batch::{
    Batch, BatchRow, BlockIds, BlockTableUpdate, RowInput, SequenceInit, StateSlotAccess,
    StepLaunchMode,
};
pub use executor::{
    BitmaskMessage, BitmaskRow, ExecutorCommand, ExecutorEvent, ExecutorHello, ExecutorReady,
    PROTOCOL_VERSION, ProfilerStatus, RankEndpoint, RowDrafts, StartupPhase, StepCost, StepDrafts,
    TokenBitmask, WarmUpReport, WeightsDigest,
};
pub use ids::{BlockId, Epoch, Rank, Replica, RequestId, SequenceSlot, StateSlot, StepId, Token};
pub use kv_event::{BlockHash, ExtraKey, KvEvent};
pub use kv_spec::{KvGroup, KvKind, KvSpec};
pub use node::{
    ExecutorLinkRequest, HandshakeNonce, HandshakeProof, HostSettings, NodeCommand, NodeEvent,
    NodeHandshake, NodeInfo,
};
pub use output::{
    CollectiveTiming, ExpertTokenCount, PromptResults, RowError, RowOutput, StepOutput, StepTiming,
    TokenLogprobs,
};
pub use pooling::PoolingMethod;
pub use sampling::SamplingParams;
pub use settings::{
    DeviceKind, DeviceLibraries, DraftAcceptanceRule, ExecutorSettings, ExpertPlacement,
    GraphCaptureConfig, KvCacheDtype, KvCacheSize, ModelDtype, ParallelConfig, SpeculativeConfig,
    SpeculativeMethod,
};
pub use thin_vec::ThinVec;
pub use tokens::{TokenVec, TokenVecIter};
