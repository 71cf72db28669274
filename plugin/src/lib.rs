//! C ABI through which foreign hosts (inference servers such as vLLM and SGLang) run Hadron's models.
//!
//! The host owns scheduling, KV blocks, sampling and captured graphs. A [`ForeignModel`] owns weights and scratch memory, and
//! computes hidden states and logits of a step in the memory of the host. The interface is `include/hadron.h`; `abi.rs` exports
//! it, and checks every address and size that it receives.
//!
//! No state outside of a model changes, except for the current GPU context of the calling thread; environment variables are not read.

#![allow(clippy::cast_ptr_alignment, reason = "addresses are checked before they are typed")]

pub mod abi;
mod call;
mod description;
mod error;
mod foreign_array;
mod foreign_model;
mod foreign_ranks;
mod open_device;
mod options;
mod rehearsal;

pub use call::ModelHandle;
pub use error::PluginError;
pub use foreign_array::ForeignArray;
pub use foreign_model::{ForeignModel, ForeignStep, ModelCounters};
pub use foreign_ranks::ForeignRanks;
pub use options::PluginOptions;
