//! Models: configurations, weight loading and forward passes. Each kind of decoder layer has one file, which combines
//! parallel layers; architectures are rows of `config/architecture_traits.rs`.
//!
//! A model only performs the computation; it is independent of requests, of KV block allocation and of GPU
//! vendors. [`ModelConfig`] defines the computation, [`load_model`] loads the weights, and [`Model`] runs
//! forward passes.
#![forbid(unsafe_code)]

pub mod config;
mod deepseek;
mod eagle3;
mod error;
mod expert_load;
mod expert_placement;
mod foreign_formats;
mod gemma4;
mod kv_grouping;
mod layers;
mod llama;
mod load;
mod manifest;
mod model;
mod output_memory;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
pub mod sharding;
pub mod support;
pub mod synth;
pub mod weight_table;
mod weights;

pub use config::{ModelArchitecture, ModelConfig, ModelConfigError};
pub use eagle3::{AuxHiddenStateCollector, DraftPassOutput, Eagle3Model};
pub use error::{ForwardError, ModelLoadError, StoredTensorError, WeightFileError};
pub use expert_load::ExpertLoadStats;
pub use expert_placement::{ExpertPlacementError, check_placement};
pub use foreign_formats::format_hint;
pub use kv_grouping::{GroupLayersPerSlot, KvGrouping, KvLayerIndex};
pub use load::{LoadFormat, ModelLoadOptions, load_eagle3, load_model};
pub use manifest::manifest;
pub use model::{
    ExpertExchangeMethod, ForwardContext, ForwardObserver, LoadedModel, Model, MtpModel, kv_layout,
    kv_spec, state_layout,
};
pub use output_memory::OutputMemory;
pub use weights::{LoadProgressCallback, Weights, check_split, tensor_locations};
