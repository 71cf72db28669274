//! One per device: weights, KV bytes, and the forward pass a batch asks for.
//!
//! [`run`] speaks to a scheduler over a link, [`Executor`] is the same without one. An executor does
//! what a batch says: it knows no policy, no refcount, no hash, no model by name and no text.

#![forbid(unsafe_code)]

mod clock;
mod config;
mod device;
mod draft_passes;
mod drafter;
mod engine;
mod error;
mod executor;
mod expert_reports;
mod graph;
mod inputs;
mod kv_pool;
mod launch;
mod layer_drafts;
mod masks;
mod ngram;
mod op_bench;
mod orders;
mod pending;
mod rank_calls;
mod ranks;
mod rehearsal;
mod run;
mod sampler;
mod seats;
mod speculation;
mod step;
mod trace;
mod warm_up;

pub use collectives::{Call, CallState, CollectiveError};
pub use config::{Dtype, ExecutorConfig, GPU_LOGPROBS_MAX, KvDtype, KvSize, source};
pub use error::{BatchError, ExecutorError, MaskError};
pub use executor::{Executor, Progress, Submitted, Trace};
pub use kernels::cpu::physical_cores;
pub use masks::{Masks, NoMasks};
pub use op_bench::{BENCH_OP_NAMES, OpBench, OpBenchConfig, OpTiming};
pub use rank_calls::RankCalls;
pub use ranks::{Meeting, WorldError, check_draft_world, check_world};
pub use run::run;
pub use speculation::{LAYER_DRAFTS_MAX, MODEL_DRAFTS_MAX, SpeculationError, check_speculation};
