//! Multi-head latent attention (MLA). Legend: T tokens, N heads, C `kv_lora_rank`, M `qk_nope_head_dim`, P
//! `qk_rope_head_dim`, V `v_head_dim`.

use device::{Buffer, MatMut};

use crate::{MlaAttentionArgs, MlaKvLayout, MlaKvWriteArgs};

/// MLA prologue: writes `norm(c)` and the rotated key channels of `args.kv [T, C + P]` to the KV pool by
/// slot, and rotates the last `P` channels of every head of `q` in place.
#[derive(Debug)]
pub struct MlaKvWrite<'a> {
    /// `[T, N (M + P)]`; the last `P` channels of each head are rotated in place.
    pub q: MatMut<'a>,
    /// KV pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a MlaKvLayout,
    /// Compressed KV, norm, RoPE tables and slots.
    pub args: &'a MlaKvWriteArgs<'a>,
}

/// `o = softmax(scale q kᵀ) v` over the tokens at or before each query; keys and values are up-projections of
/// the compressed KV in the pool (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug)]
pub struct MlaAttention<'a> {
    /// `[T, N V]`
    pub o: MatMut<'a>,
    /// KV pool.
    pub pool: &'a Buffer,
    /// Layout of `pool`.
    pub layout: &'a MlaKvLayout,
    /// Queries, up-projections, rows, tables and scale.
    pub args: &'a MlaAttentionArgs<'a>,
}
