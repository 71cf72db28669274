//! Pieces that models are composed of. A piece knows its weights, its formula and its reduction over
//! ranks; what it may see besides is in `&Forward`, its first argument.
//!
//! Legend: T tokens, H hidden, D head size, N and K query and KV heads on this rank, I width of an MLP
//! on this rank, V vocabulary, E experts, n rows asked for.

mod attention;
mod decoder;
mod draft;
mod embedding;
mod exchange;
mod feed_forward;
mod latent_attention;
mod linear;
mod mlp;
mod moe;
mod norm;
mod residual;
mod rope;

pub(crate) use attention::{Attention, Heads, PROJECTIONS, QkNorm};
pub(crate) use decoder::{Decoder, DecoderLayer};
pub(crate) use draft::DraftLayer;
pub(crate) use embedding::{LmHead, VocabParallelEmbedding};
pub(crate) use feed_forward::FeedForward;
pub(crate) use latent_attention::LatentAttention;
pub(crate) use linear::{ColumnParallelLinear, RowParallelLinear};
pub(crate) use mlp::GatedMlp;
pub(crate) use moe::MoeMlp;
pub(crate) use norm::RmsNorm;
pub(crate) use residual::Residual;
pub(crate) use rope::Rope;
