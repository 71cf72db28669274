//! Ops of multi-head latent attention (MLA). Dimensions have the names of the model configuration
//! (`kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`).

use device::{Buffer, MatMut};

use crate::{MlaAttentionArgs, MlaKvLayout, MlaPrologueArgs};

/// MLA prologue: writes each row of `args.kv` to the KV pool at the slot of its token, after the RMS norm of
/// the compressed KV and RoPE of the last `qk_rope_head_dim` channels. Applies RoPE to the last
/// `qk_rope_head_dim` channels of every head of `q`.
#[derive(Debug)]
pub struct MlaPrologue<'a> {
    /// Queries `[tokens, heads · (qk_nope_head_dim + qk_rope_head_dim)]`, changed in place.
    pub q: MatMut<'a>,
    /// KV pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a MlaKvLayout,
    /// Compressed KV, norm weight, RoPE tables and KV slots.
    pub args: &'a MlaPrologueArgs<'a>,
}

/// `o = softmax(scale q kᵀ) v` over the tokens at or before each query; keys and values are up-projections of
/// the compressed KV in the pool (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug)]
pub struct MlaAttention<'a> {
    /// Attention output, `[tokens, heads · v_head_dim]`.
    pub o: MatMut<'a>,
    /// KV pool.
    pub pool: &'a Buffer,
    /// Layout of `pool`.
    pub layout: &'a MlaKvLayout,
    /// Queries, up-projections, batch metadata and scale.
    pub args: &'a MlaAttentionArgs<'a>,
}
