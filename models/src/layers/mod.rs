//! Layers that models are composed of. A layer has its weights, its formula and its collectives; all other
//! inputs are in `&ForwardContext`, its first argument.
//!
//! Legend: T tokens, H hidden, D head size, N and K query and KV heads on this rank, I width of an MLP on
//! this rank, V vocabulary, E experts, n rows with requested logits.

mod decoder;
mod embedding;
mod expert_exchange;
mod feed_forward;
mod gqa_attention;
mod linear;
mod mla_attention;
mod mlp;
mod moe;
mod mtp;
mod norm;
mod residual;
mod rope;

pub(crate) use decoder::{DecoderLayer, DecoderModel};
pub(crate) use embedding::{LmHead, VocabParallelEmbedding};
pub(crate) use feed_forward::FeedForward;
pub(crate) use gqa_attention::{GqaAttention, GqaHeads, QKV_PROJECTIONS, QkNorm};
pub(crate) use linear::{ColumnParallelLinear, RowParallelLinear};
pub(crate) use mla_attention::MlaAttentionLayer;
pub(crate) use mlp::GatedMlp;
pub(crate) use moe::MoeMlp;
pub(crate) use mtp::MtpModule;
pub(crate) use norm::RmsNormLayer;
pub(crate) use residual::ResidualStream;
pub(crate) use rope::RotaryEmbedding;
