//! Executor of one device: stores weights and KV cache, and runs the forward pass and sampling of batches.
//!
//! [`run`] receives batches from a scheduler over a link; [`Executor`] runs batches without a link. An
//! executor only executes batches: it has no scheduling policy, reference counts, prefix hashes, model names
//! or text.

#![forbid(unsafe_code)]

mod clock;
mod command_inbox;
mod config;
#[cfg(test)]
#[path = "../../tests/support/deadlines.rs"]
mod deadlines;
mod device_environment;
mod error;
mod executor;
mod expert_load_report;
mod kv_sizing;
mod link_exchange;
mod model_context;
mod op_bench;
mod open_device;
mod precompile;
mod rank_calls;
mod ranks;
mod run;
mod sampler_limits;
mod sequence_slots;
mod spec_decode;
mod step;
mod trace;
mod warm_up;

pub use collectives::{CollectiveCall, CollectiveCallState, CollectiveError};
pub use config::{ExecutorConfig, GPU_LOGPROBS_MAX, KvCacheDtype, KvCacheSize, ModelDtype, source};
pub use device::gpu::{
    GpuInventory, LibraryRole, LibrarySearchResult, ListedGpu, PeerLink, PeerLinkKind,
};
pub use device::physical_cores;
pub use device_environment::DeviceEnvironment;
pub use error::{BatchError, ExecutorError, TokenBitmaskError};
pub use executor::{Executor, StartupPhaseProgress, SubmittedStep, TraceHandle};
pub use op_bench::{BENCH_OP_NAMES, OpBench, OpBenchConfig, OpTiming};
pub use open_device::survey_gpus;
pub use rank_calls::CollectiveHistory;
pub use ranks::{
    EndpointExchange, ParallelConfigError, RankRendezvous, check_draft_world, check_world,
};
pub use run::run;
pub use sampler_limits::{VocabularyLimitError, check_sampler};
pub use spec_decode::{MODEL_DRAFTS_MAX, MTP_DRAFTS_MAX, SpeculationError, check_speculation};
pub use step::{TokenBitmaskSource, UnconstrainedBitmaskSource};
