//! Ops between the QKV projection and RoPE: QK norm over all heads, and attention temperature.
//!
//! `RopeAttention` and `QkNormRopeKvWrite` apply a QK norm per head. A norm over all heads needs the sum of squares
//! of all tensor-parallel ranks, so it consists of two ops with an all-reduce between them.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::QkChannelCounts;

/// Sums of squares of a rank's queries and keys: `sums[t] = [Σ q[t]², Σ k[t]²]`.
#[derive(Debug)]
pub struct QkSquareSums<'a> {
    /// Sums, f32 `[tokens, 2]`, dense: queries, then keys.
    pub sums: MatMut<'a>,
    /// QKV projection, `[tokens, at least query + key channels]`.
    pub qkv: MatRef<'a>,
    /// Number of query and key channels.
    pub channels: QkChannelCounts,
}

/// RMS norm over all query heads together and over all key heads together, in place (OLMo 2, arXiv 2501.00656,
/// section 3.2): `q = weight · q / √(Σ q² / count + eps)`, computed in f32 and rounded once.
#[derive(Debug)]
pub struct QkFullNorm<'a> {
    /// QKV projection, `[tokens, at least query + key channels]`, updated in place.
    pub qkv: MatMut<'a>,
    /// Sums of squares over all tensor-parallel ranks, f32 `[tokens, 2]`, dense: queries, then keys.
    pub sums: MatRef<'a>,
    /// Weights `[1, query + key channels]` of this rank's queries, then of its keys.
    pub weight: MatRef<'a>,
    /// Number of query and key channels of this rank.
    pub channels: QkChannelCounts,
    /// Number of ranks whose squares `sums` contains; all ranks have equally many channels.
    pub ranks: usize,
    /// Epsilon of the norm, added to the mean square.
    pub eps: f32,
}

/// Attention temperature: multiplies the queries of each token by the factor of its position, in place (Llama 4;
/// transformers `get_llama_4_attn_scale` in `modeling_ministral3.py`).
#[derive(Debug)]
pub struct QueryTemperatureScaling<'a> {
    /// QKV projection, `[tokens, at least query channels]`, updated in place.
    pub qkv: MatMut<'a>,
    /// Factor of each position, f32 `[1, positions]`.
    pub factors: MatRef<'a>,
    /// Position of each token, i32 `[1, tokens]`; below the number of factors.
    pub positions: MatRef<'a>,
    /// Number of query channels, which are the first columns.
    pub query: usize,
}

impl QkSquareSums<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "qk_square_sums";
        check_channels(KERNEL, self.qkv.cols(), self.channels)?;
        check_sums(KERNEL, self.sums.as_ref(), self.qkv.rows())
    }
}

impl QkFullNorm<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "qk_full_norm";
        check_channels(KERNEL, self.qkv.cols(), self.channels)?;
        check_sums(KERNEL, self.sums, self.qkv.rows())?;
        let QkChannelCounts { query, key } = self.channels;
        check_size(KERNEL, "weights", self.weight.cols(), query + key)?;
        check_dtype(KERNEL, "weight", self.weight.dtype(), self.qkv.dtype())?;
        check_size(KERNEL, "ranks", self.ranks, self.ranks.max(1))
    }
}

impl QueryTemperatureScaling<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "attention_temperature";
        check_channels(KERNEL, self.qkv.cols(), QkChannelCounts { query: self.query, key: 0 })?;
        check_size(KERNEL, "positions", self.positions.cols(), self.qkv.rows())?;
        check_dtype(KERNEL, "positions", self.positions.dtype(), DType::I32)?;
        check_dtype(KERNEL, "factors", self.factors.dtype(), DType::F32)
    }
}

/// Checks that a QKV projection of `cols` columns has the query and key channels.
fn check_channels(
    kernel: &'static str,
    cols: usize,
    channels: QkChannelCounts,
) -> Result<(), DeviceError> {
    let needed = channels.query + channels.key;
    check_size(kernel, "columns of qkv", cols, cols.max(needed))
}

fn check_sums(kernel: &'static str, sums: MatRef<'_>, tokens: usize) -> Result<(), DeviceError> {
    check_size(kernel, "rows of the sums", sums.rows(), tokens)?;
    check_size(kernel, "columns of the sums", sums.cols(), 2)?;
    check_size(kernel, "row stride of the sums", sums.stride(), 2)?;
    check_dtype(kernel, "sums", sums.dtype(), DType::F32)
}
