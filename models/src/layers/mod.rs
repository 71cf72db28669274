//! Layers that models consist of. A layer contains its weights, its computation and its collective
//! operations; all other inputs are passed in `&ForwardContext`, the first argument of its functions.
//!
//! All shapes are shapes on one rank: with tensor parallelism, a rank has a part of the attention heads and
//! of the intermediate channels of an MLP.

mod decoder;
mod embedding;
mod expert_exchange;
mod feed_forward;
mod full_qk_norm;
mod gated_delta_net;
mod gqa_attention;
mod kv_cache_scales;
mod linear;
mod mla_attention;
mod mlp;
mod moe;
mod mtp;
mod norm;
mod parallel_experts;
mod per_layer_input;
mod residual;
mod rope;

pub(crate) use decoder::{DecoderLayer, DecoderModel};
pub(crate) use embedding::{LmHead, VocabParallelEmbedding};
pub(crate) use feed_forward::FeedForward;
pub(crate) use full_qk_norm::FullQkNorm;
pub(crate) use gated_delta_net::GatedDeltaNet;
pub(crate) use gqa_attention::{GqaAttention, GqaAttentionCore};
pub(crate) use kv_cache_scales::LayerKvScales;
pub(crate) use linear::{ColumnParallelLinear, RowParallelLinear};
pub(crate) use mla_attention::MlaAttentionLayer;
pub(crate) use mlp::GatedMlp;
pub(crate) use moe::MoeMlp;
pub(crate) use mtp::MtpModule;
pub(crate) use norm::{RmsNormLayer, SublayerNormRefs, SublayerNorms};
pub(crate) use parallel_experts::ParallelExperts;
pub(crate) use per_layer_input::{LayerInputMlp, PerLayerInputs};
pub(crate) use residual::ResidualStream;
pub(crate) use rope::RotaryEmbedding;
