//! One per device: weights, KV bytes, and the forward pass a batch asks for.
//!
//! [`run`] speaks to a scheduler over a link, [`Executor`] is the same without one. An executor does
//! what a batch says: it knows no policy, no refcount, no hash, no model by name and no text.

#![forbid(unsafe_code)]

mod bitmasks;
mod clock;
mod command_inbox;
mod config;
mod draft_proposer;
mod draft_state_tracker;
mod error;
mod executor;
mod expert_load_report;
mod inputs;
mod kv_sizing;
mod model_context;
mod ngram_matcher;
mod ngram_proposer;
mod op_bench;
mod open_device;
mod pending_step;
mod precompile;
mod rank_calls;
mod ranks;
mod run;
mod sampler;
mod sequence_slots;
mod speculation;
mod step;
mod step_graphs;
mod step_launch;
mod trace;
mod warm_up;

pub use bitmasks::{NoTokenBitmasks, TokenBitmaskSource};
pub use collectives::{CallState, CollectiveCall, CollectiveError};
pub use config::{ExecutorConfig, GPU_LOGPROBS_MAX, KvCacheDtype, KvCacheSize, ModelDtype, source};
pub use device::physical_cores;
pub use error::{BatchError, ExecutorError, TokenBitmaskError};
pub use executor::{Executor, PhaseProgress, SubmittedStep, TraceHandle};
pub use op_bench::{BENCH_OP_NAMES, OpBench, OpBenchConfig, OpTiming};
pub use rank_calls::RankCalls;
pub use ranks::{RankRendezvous, WorldError, check_draft_world, check_world};
pub use run::run;
pub use speculation::{MODEL_DRAFTS_MAX, MTP_DRAFTS_MAX, SpeculationError, check_speculation};
