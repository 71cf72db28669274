//! Attention over the paged KV cache, and the norms, RoPE and KV write before it.
//!
//! Legend: T tokens, N query heads, K KV heads, D head size, P positions.

use device::DType;
use kernels::{
    PagedAttention, PagedAttentionArgs, QkNormRopeArgs, QkNormRopeKvWrite, RopeAttention,
    RopeCosSin,
};

use crate::error::check_size;
use crate::launch_plan::fuses_rope_attention;
use crate::{BatchView, KvPool, OpError, Ops, Tensor};

/// RoPE cosines and sines by position, f32 `[P, rotary / 2]`, made by the model from its RoPE rule.
#[derive(Debug)]
pub struct RopeTable {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

/// Arguments of the query/key norms, RoPE and the KV write besides the batch.
#[derive(Debug, Clone, Copy)]
pub struct QkRopeWeights<'a> {
    /// Weight `[D]` of the per-head query norm, if the model has one.
    pub q_norm: Option<&'a Tensor>,
    /// Weight `[D]` of the per-head key norm, if the model has one.
    pub k_norm: Option<&'a Tensor>,
    /// Added to the mean square of both norms.
    pub eps: f32,
    /// RoPE cosines and sines by position.
    pub rope: &'a RopeTable,
    /// Divisors of keys and values before an fp8 cache stores them.
    pub kv_scales: [f32; 2],
}

/// Heads and layer of one attention op.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads on this rank; KV heads and head size are in the pool's layout.
    pub heads: usize,
    /// Layer of the pool.
    pub layer: usize,
    /// Softmax scale of the scores, usually `D^-½`.
    pub scale: f32,
    /// Positions before it are masked and must have no queries; 0 = none.
    pub first_position: usize,
}

impl Ops {
    /// Uploads a RoPE table: `cos` and `sin` hold `positions` rows of `half` = rotary size / 2 values.
    pub fn rope_table(&self, cos: &[f32], sin: &[f32], half: usize) -> Result<RopeTable, OpError> {
        check_size("rope_table", "sines", sin.len(), cos.len())?;
        let positions = cos.len() / half.max(1);
        check_size("rope_table", "cosines", cos.len(), positions * half)?;
        let upload = |values: &[f32]| {
            let mut table = self.zeros(DType::F32, &[positions, half])?;
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            self.device.upload(table.buffer_mut()?, 0, &bytes)?;
            Ok::<_, OpError>(table)
        };
        Ok(RopeTable { cos: upload(cos)?, sin: upload(sin)? })
    }

    /// Attention from the projections `qkv [T, (N + 2 K) D]`: query, key, value heads in this order. Queries
    /// and keys are normed and rotated, keys and values are written to the pool by slot (−1: not written);
    /// returns `softmax(scale q kᵀ) v [T, N D]`. Runs as one launch where the device has a fused kernel, with
    /// the same results.
    pub fn rope_attention(
        &self,
        qkv: &Tensor,
        weights: &QkRopeWeights<'_>,
        shape: &AttentionShape,
        kv: &KvPool,
        batch: &BatchView,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let args = qk_rope(qkv, weights, shape, batch)?;
        let (rows, layout) = (batch.attention_metadata()?, kv.head_layout("rope_attention")?);
        let fused = fuses_rope_attention(&self.device, &args, &rows, layout);
        if shape.first_position > 0 || !fused {
            let q = self.qk_norm_rope_kv_write(qkv, weights, shape, kv, batch)?;
            return self.paged_attention(&q, shape, kv, batch);
        }
        let mut o = self.scratch(qkv.dtype(), &[qkv.rows(), shape.heads * layout.head_dim])?;
        let (s, out) = (&self.stream, o.mat_mut()?);
        self.device.launch(
            s,
            RopeAttention {
                o: out,
                pool: &mut kv.write(),
                layout,
                qk: &args,
                rows: &rows,
                scale: shape.scale,
            },
        )?;
        Ok(o)
    }

    /// `q = rope(norm(q))`; `rope(norm(k))` and `v` are written to the pool by slot (−1: not written).
    ///
    /// `qkv [T, (N + 2 K) D]` holds query, key, value heads in this order; returns `q [T, N D]`.
    pub fn qk_norm_rope_kv_write(
        &self,
        qkv: &Tensor,
        weights: &QkRopeWeights<'_>,
        shape: &AttentionShape,
        kv: &KvPool,
        batch: &BatchView,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let layout = kv.head_layout("qk_norm_rope_kv_write")?;
        let mut q = self.scratch(qkv.dtype(), &[qkv.rows(), shape.heads * layout.head_dim])?;
        let args = qk_rope(qkv, weights, shape, batch)?;
        let (s, out) = (&self.stream, q.mat_mut()?);
        self.device
            .launch(s, QkNormRopeKvWrite { q: out, pool: &mut kv.write(), layout, args: &args })?;
        Ok(q)
    }

    /// `o = softmax(scale q kᵀ) v` over the keys at or before each query: `q`, `o [T, N D]`. Query head `h`
    /// reads KV head `h K / N` (GQA). Keys are read from the pool, the step's own included.
    pub fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionShape,
        kv: &KvPool,
        batch: &BatchView,
    ) -> Result<Tensor, OpError> {
        let mut o = self.scratch(q.dtype(), q.shape())?;
        let args = PagedAttentionArgs {
            q: q.mat()?,
            rows: batch.attention_metadata()?,
            heads: shape.heads,
            layer: shape.layer,
            scale: shape.scale,
            first_position: shape.first_position,
        };
        let (s, out, layout) = (&self.stream, o.mat_mut()?, kv.head_layout("paged_attention")?);
        self.device.launch(s, PagedAttention { o: out, pool: &kv.read(), layout, args: &args })?;
        Ok(o)
    }
}

fn qk_rope<'a>(
    qkv: &'a Tensor,
    weights: &QkRopeWeights<'a>,
    shape: &AttentionShape,
    batch: &'a BatchView,
) -> Result<QkNormRopeArgs<'a>, OpError> {
    Ok(QkNormRopeArgs {
        qkv: qkv.mat()?,
        q_norm: weights.q_norm.map(Tensor::mat).transpose()?,
        k_norm: weights.k_norm.map(Tensor::mat).transpose()?,
        eps: weights.eps,
        rope: RopeCosSin { cos: weights.rope.cos.mat()?, sin: weights.rope.sin.mat()? },
        positions: batch.positions.mat()?,
        slots: batch.slots.mat()?,
        heads: shape.heads,
        layer: shape.layer,
        kv_scales: weights.kv_scales,
    })
}
