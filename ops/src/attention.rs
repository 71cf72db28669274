//! Attention over the paged KV cache, and the norms, RoPE and KV write before it.

use device::DType;
use kernels::{
    AttentionKeyRange, KvCacheScales, PagedAttention, PagedAttentionArgs, QkChannelCounts,
    QkFullNorm, QkNormRopeArgs, QkNormRopeKvWrite, QkSquareSums, QueryTemperatureScaling,
    RopeAttention, RopeCosSin, ValueHeadNorm,
};

use crate::error::check_size;
use crate::kv_pool::KvLayerPlace;
use crate::launch_plan::fuses_rope_attention;
use crate::{DeviceBatchMetadata, KvPool, OpError, Ops, Tensor};

/// Tables of the RoPE cosines and of the RoPE sines on the device, each f32 `[positions, rotary_dim / 2]`.
/// The model computes them from its RoPE parameters.
#[derive(Debug)]
pub struct RopeTable {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

/// Weights and settings of the ops between the QKV projection and attention: query and key norms, RoPE, KV
/// write.
#[derive(Debug, Clone, Copy)]
pub struct QkNormRopeParams<'a> {
    /// Weight `[head_dim]` of the per-head query norm, in the activation type or in f32 (see [`Ops::rms_norm`]);
    /// `None` = the model has no such norm.
    pub q_norm: Option<&'a Tensor>,
    /// Weight `[head_dim]` of the per-head key norm, in the type of `q_norm`; `None` = the model has no such norm.
    pub k_norm: Option<&'a Tensor>,
    /// Epsilon of the query norm and of the key norm, which is added to the mean square.
    pub eps: f32,
    /// RoPE cosines and sines by position.
    pub rope: &'a RopeTable,
    /// Scales of keys and of values in an fp8 KV cache.
    pub kv_scales: KvCacheScaling<'a>,
}

/// Scales of the keys and values in an fp8 KV cache, which stores them divided by their scale.
#[derive(Debug, Clone, Copy)]
pub enum KvCacheScaling<'a> {
    /// One scale for all keys and one for all values of the layer. KV caches of other types ignore them.
    Layer {
        /// Scale of the keys.
        key: f32,
        /// Scale of the values.
        value: f32,
    },
    /// Factor of each head of this rank, f32 `[query heads + 2 · KV heads]`: queries, keys, values. See
    /// [`kernels::KvCacheScales::Heads`].
    Heads(&'a Tensor),
}

impl KvCacheScaling<'_> {
    /// Keys and values are stored as they are.
    pub const UNIT: Self = Self::Layer { key: 1.0, value: 1.0 };
}

/// Weights of the RMS norm over all query heads together and over all key heads together.
#[derive(Debug, Clone, Copy)]
pub struct QkFullNormWeights<'a> {
    /// Weights `[query + key channels]` of this rank's queries, then of its keys.
    pub weight: &'a Tensor,
    /// Number of query and key channels of this rank.
    pub channels: QkChannelCounts,
    /// Number of tensor-parallel ranks; all ranks have the same number of channels.
    pub ranks: usize,
    /// Epsilon of the norm, which is added to the mean square.
    pub eps: f32,
}

/// Parameters of one attention layer, in addition to those in the layout of the KV pool.
#[derive(Debug, Clone, Copy)]
pub struct AttentionLayerParams<'a> {
    /// Number of query heads on this rank. The number of KV heads and the head size are in the layout of the
    /// KV pool.
    pub heads: usize,
    /// KV group of the layer, which has the block tables and KV slots of the layer.
    pub group: usize,
    /// Index of the layer in the KV pool.
    pub layer: usize,
    /// Softmax scale of the scores, usually `head_dim^-½`.
    pub scale: f32,
    /// Keys that the queries attend to.
    pub keys: AttentionKeyRange,
    /// Attention sinks: one score per query head of this rank, f32 `[heads]`, which joins the denominator of
    /// the softmax. `None` = no sinks.
    pub sinks: Option<&'a Tensor>,
}

impl Ops {
    /// Uploads a RoPE table. `cos` and `sin` have one row per position, with `half` = rotary dimension / 2
    /// values.
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

    /// Uploads the attention temperature: one factor per position, by which queries are multiplied.
    pub fn temperature_table(&self, factors: &[f32]) -> Result<Tensor, OpError> {
        let mut table = self.zeros(DType::F32, &[factors.len()])?;
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        self.device.upload(table.buffer_mut()?, 0, &bytes)?;
        Ok(table)
    }

    /// Returns the sums of squares of this rank's query channels and of its key channels, f32 `[tokens, 2]`.
    /// `qkv [tokens, channels]` has the query channels, then the key channels, then the value channels.
    pub fn qk_square_sums(
        &self,
        qkv: &Tensor,
        channels: QkChannelCounts,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut sums = self.scratch(DType::F32, &[qkv.rows(), 2])?;
        let op = QkSquareSums { sums: sums.mat_mut()?, qkv: qkv.mat()?, channels };
        self.device.launch(&self.stream, op)?;
        Ok(sums)
    }

    /// Applies the RMS norm over all query heads together and over all key heads together to `qkv [tokens,
    /// channels]`, in place. `sums`, f32 `[tokens, 2]`, are the results of [`Ops::qk_square_sums`], summed over the
    /// tensor-parallel ranks.
    pub fn qk_full_norm(
        &self,
        qkv: &mut Tensor,
        sums: &Tensor,
        norm: &QkFullNormWeights<'_>,
    ) -> Result<(), OpError> {
        self.launch_order.interrupt();
        let QkFullNormWeights { weight, channels, ranks, eps } = *norm;
        let (sums, weight) = (sums.mat()?, weight.mat()?);
        let op = QkFullNorm { qkv: qkv.mat_mut()?, sums, weight, channels, ranks, eps };
        Ok(self.device.launch(&self.stream, op)?)
    }

    /// Multiplies the first `query` channels of `qkv [tokens, channels]` by the factor of the position of each
    /// token, in place; `factors` is a table of [`Ops::temperature_table`].
    pub fn attention_temperature(
        &self,
        qkv: &mut Tensor,
        factors: &Tensor,
        query: usize,
        batch: &DeviceBatchMetadata,
    ) -> Result<(), OpError> {
        self.launch_order.interrupt();
        let (factors, positions) = (factors.mat()?, batch.positions.mat()?);
        let op = QueryTemperatureScaling { qkv: qkv.mat_mut()?, factors, positions, query };
        Ok(self.device.launch(&self.stream, op)?)
    }

    /// Attention from the QKV projection. `qkv [tokens, at least (heads + 2 · kv_heads) · head_dim]` has the query,
    /// key and value heads, in this order; further columns are not read. RMS norm and RoPE are applied to queries and
    /// keys; keys and values are written to the KV pool by slot (−1: not written). Returns `softmax(scale q kᵀ) v`,
    /// `[tokens, heads · head_dim]`. Runs as one launch where the device has a fused kernel, with the same results.
    pub fn rope_attention(
        &self,
        qkv: &Tensor,
        weights: &QkNormRopeParams<'_>,
        shape: &AttentionLayerParams<'_>,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let place = kv.place("rope_attention", shape.group, shape.layer)?;
        let layout = &place.layout;
        let args = qk_rope(qkv, weights, shape, &place, batch)?;
        let rows = batch.attention_metadata(shape.group)?;
        let fused = fuses_rope_attention(&self.device, &args, &rows, layout);
        // The fused kernel has no masked first positions.
        if shape.keys.first_position > 0 || !fused {
            let q = self.qk_norm_rope_kv_write(qkv, weights, shape, kv, batch)?;
            return self.paged_attention(&q, shape, kv, batch);
        }
        let mut o = self.scratch(qkv.dtype(), &[qkv.rows(), shape.heads * layout.head_dim])?;
        let mut pool = kv.write(place.memory);
        let mut pool = pool.part_mut(place.bytes.clone())?;
        let op = RopeAttention {
            o: o.mat_mut()?,
            pool: &mut pool,
            layout,
            qk: &args,
            rows: &rows,
            scale: shape.scale,
            keys: shape.keys,
            sinks: shape.sinks.map(Tensor::mat).transpose()?,
        };
        self.device.launch(&self.stream, op)?;
        Ok(o)
    }

    /// Returns the queries `q = rope(norm(q))`, `[tokens, heads · head_dim]`; writes the keys `rope(norm(k))`
    /// and the values `v` to the KV pool by slot (−1: not written).
    ///
    /// `qkv [tokens, (heads + 2 · kv_heads) · head_dim]` has the query, key and value heads, in this order.
    pub fn qk_norm_rope_kv_write(
        &self,
        qkv: &Tensor,
        weights: &QkNormRopeParams<'_>,
        shape: &AttentionLayerParams<'_>,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let place = kv.place("qk_norm_rope_kv_write", shape.group, shape.layer)?;
        self.qk_norm_rope(qkv, weights, shape, &place, kv, batch)
    }

    /// Returns the queries `q = rope(norm(q))`, `[tokens, heads · head_dim]`, of a layer that reads the keys and values
    /// of another layer. `q` has the query heads; nothing is written to the KV pool.
    pub fn q_norm_rope(
        &self,
        q: &Tensor,
        weights: &QkNormRopeParams<'_>,
        shape: &AttentionLayerParams<'_>,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut place = kv.place("q_norm_rope", shape.group, shape.layer)?;
        place.layout.kv_heads = 0;
        self.qk_norm_rope(q, weights, shape, &place, kv, batch)
    }

    fn qk_norm_rope(
        &self,
        qkv: &Tensor,
        weights: &QkNormRopeParams<'_>,
        shape: &AttentionLayerParams<'_>,
        place: &KvLayerPlace,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        let layout = &place.layout;
        let mut q = self.scratch(qkv.dtype(), &[qkv.rows(), shape.heads * layout.head_dim])?;
        let args = &qk_rope(qkv, weights, shape, place, batch)?;
        let (s, out) = (&self.stream, q.mat_mut()?);
        let mut pool = kv.write(place.memory);
        let mut pool = pool.part_mut(place.bytes.clone())?;
        self.device.launch(s, QkNormRopeKvWrite { q: out, pool: &mut pool, layout, args })?;
        Ok(q)
    }

    /// Applies the RMS norm without weights to each value head of `qkv [tokens, channels]`, in place. The values are the
    /// `heads · head_dim` channels from `first` on.
    pub fn value_head_norm(
        &self,
        qkv: &mut Tensor,
        first: usize,
        [heads, head_dim]: [usize; 2],
        eps: f32,
    ) -> Result<(), OpError> {
        self.launch_order.interrupt();
        let op = ValueHeadNorm { qkv: qkv.mat_mut()?, first, heads, head_dim, eps };
        Ok(self.device.launch(&self.stream, op)?)
    }

    /// Returns `softmax(scale q kᵀ) v` over the keys at or before each query. `q` and the result are
    /// `[tokens, heads · head_dim]`. Query head `h` reads KV head `h · kv_heads / heads` (GQA). All keys are
    /// read from the KV pool, including those of this step.
    pub fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionLayerParams<'_>,
        kv: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        let mut o = self.scratch(q.dtype(), q.shape())?;
        let place = kv.place("paged_attention", shape.group, shape.layer)?;
        let args = PagedAttentionArgs {
            q: q.mat()?,
            rows: batch.attention_metadata(shape.group)?,
            heads: shape.heads,
            layer: place.layer,
            scale: shape.scale,
            keys: shape.keys,
            sinks: shape.sinks.map(Tensor::mat).transpose()?,
        };
        let (s, out, layout) = (&self.stream, o.mat_mut()?, &place.layout);
        let pool = kv.read(place.memory);
        let pool = &pool.part(place.bytes.clone())?;
        self.device.launch(s, PagedAttention { o: out, pool, layout, args: &args })?;
        Ok(o)
    }
}

fn qk_rope<'a>(
    qkv: &'a Tensor,
    weights: &QkNormRopeParams<'a>,
    shape: &AttentionLayerParams<'_>,
    place: &KvLayerPlace,
    batch: &'a DeviceBatchMetadata,
) -> Result<QkNormRopeArgs<'a>, OpError> {
    let layout = &place.layout;
    let width = (shape.heads + 2 * layout.kv_heads) * layout.head_dim;
    Ok(QkNormRopeArgs {
        // Further columns are gates of the attention output.
        qkv: qkv.mat()?.columns(0, width.min(qkv.cols())),
        q_norm: weights.q_norm.map(Tensor::mat).transpose()?,
        k_norm: weights.k_norm.map(Tensor::mat).transpose()?,
        eps: weights.eps,
        rope: RopeCosSin { cos: weights.rope.cos.mat()?, sin: weights.rope.sin.mat()? },
        positions: batch.positions.mat()?,
        slots: batch.kv_slots(shape.group)?,
        heads: shape.heads,
        layer: place.layer,
        kv_scales: match weights.kv_scales {
            KvCacheScaling::Layer { key, value } => KvCacheScales::Layer { key, value },
            KvCacheScaling::Heads(factors) => {
                let heads = shape.heads + 2 * layout.kv_heads;
                KvCacheScales::Heads(factors.mat()?.columns(0, heads.min(factors.cols())))
            }
        },
    })
}
