//! One file per architecture, composed of parallel-aware layers; plus the files they are read from.
//!
//! A model knows formulas. It never knows a request, who owns a block, or a vendor's device.
#![forbid(unsafe_code)]

pub mod config;
pub mod sharding;
pub mod synth;
pub mod table;

pub use config::{Architecture, Config, ConfigError};
