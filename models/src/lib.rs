//! One file per architecture, composed of parallel-aware layers; plus the files they are read from.
//!
//! A model knows formulas. It never knows a request, who owns a block, or a vendor's device.
//! [`Config`] says what is computed, [`load_model`] fetches the weights, [`Model`] computes.
#![forbid(unsafe_code)]

pub mod config;
mod deepseek;
mod eagle3;
mod error;
mod expert_load;
mod layers;
mod llama;
mod load;
mod manifest;
mod mistral;
mod model;
mod placement;
mod qwen2;
mod qwen3;
mod qwen3_moe;
pub mod sharding;
pub mod synth;
pub mod table;
mod weights;

pub use config::{Architecture, Config, ConfigError};
pub use eagle3::{Drafted, Eagle3, Taps};
pub use error::{FileFault, LoadError, TensorFault};
pub use expert_load::ExpertLoad;
pub use load::{LoadFormat, LoadOptions, load_eagle3, load_model};
pub use manifest::manifest;
pub use model::{Exchange, Forward, ForwardError, Model, Probe, kv_layout, kv_spec};
pub use placement::{PlacementError, check_placement};
pub use weights::{Progress, Weights, check_split, tensor_places};
