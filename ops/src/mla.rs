//! MLA (multi-head latent attention): one compressed KV row per token, from which all heads compute their
//! keys and values. See `kernels/src/mla.rs`.

use device::DType;
use kernels::{
    HostMat, MlaAttention, MlaAttentionArgs, MlaPrologue, MlaPrologueArgs, MlaUpProjections,
    PackedMatrixGroup, RopeCosSin,
};

use crate::error::check_size;
use crate::kv_pool::MlaLayerPlace;
use crate::{AttentionLayerParams, DeviceBatchMetadata, KvPool, OpError, Ops, RopeTable, Tensor};

/// KV group of MLA layers: a model with MLA has one group.
const KV_GROUP: usize = 0;

/// W_UK and W_UV of each head, packed for the device. They compute keys and values from compressed KV.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "the names of the literature")]
pub struct PackedMlaUpProjections {
    w_uk: PackedMatrixGroup,
    w_uk_t: Option<PackedMatrixGroup>,
    w_uv: PackedMatrixGroup,
}

/// Weights and rotary table of an MLA layer.
#[derive(Debug, Clone, Copy)]
pub struct MlaWeights<'a> {
    /// Weight `[kv_lora_rank]` of the norm of compressed KV.
    pub norm: &'a Tensor,
    /// Epsilon of the norm, which is added to the mean square.
    pub eps: f32,
    /// Rotary cosines and sines by position.
    pub rope: &'a RopeTable,
    /// W_UK and W_UV of the heads on this rank, packed.
    pub heads: &'a PackedMlaUpProjections,
}

impl PackedMlaUpProjections {
    /// Number of heads on this rank.
    #[must_use]
    pub fn len(&self) -> usize {
        self.w_uk.len()
    }

    /// Whether this rank has no heads.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.w_uk.is_empty()
    }

    /// Returns the projections as kernel arguments.
    fn kernel_args(&self) -> MlaUpProjections<'_> {
        let Self { w_uk, w_uk_t, w_uv } = self;
        MlaUpProjections { w_uk, w_uk_t: w_uk_t.as_ref(), w_uv }
    }
}

impl Ops {
    /// Checks that the KV cache type `kv_dtype` is the activation type, which MLA requires.
    pub fn check_mla(&self, kv_dtype: DType) -> Result<(), OpError> {
        if kv_dtype != self.dtype() {
            let (op, what) = ("MLA", "KV cache");
            return Err(OpError::Dtype { op, what, dtype: kv_dtype });
        }
        Ok(())
    }

    /// Packs the weights `kv_b [heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank]`: for each head, the
    /// rows of its keys (W_UK), then the rows of its values (W_UV). In f32 (the reference type), absorbed
    /// attention uses W_UK itself. For other types, the transpose of W_UK is packed as well, and absorbed
    /// attention uses the transpose.
    pub fn pack_mla_heads(
        &self,
        kv_b: &HostMat<'_>,
        qk_nope_head_dim: usize,
        v_head_dim: usize,
    ) -> Result<PackedMlaUpProjections, OpError> {
        let head_rows = qk_nope_head_dim + v_head_dim;
        let heads = kv_b.rows() / head_rows.max(1);
        check_size("pack_mla_heads", "rows", kv_b.rows(), heads * head_rows)?;
        let rows = |from: usize, count: usize| {
            let of_head = |head| vec![kv_b.row_range(head * head_rows + from, count)];
            (0..heads).map(of_head).collect::<Vec<_>>()
        };
        let pack =
            |matrices: &[Vec<HostMat<'_>>]| self.device.pack_row_major(matrices, self.dtype());
        let key_rows = rows(0, qk_nope_head_dim);
        let w_uk_t = if self.dtype() == DType::F32 {
            None
        } else {
            let transposed: Vec<Vec<u8>> =
                key_rows.iter().map(|w_uk| transpose(&w_uk[0])).collect();
            let view = |bytes| HostMat::new(bytes, DType::F32, kv_b.cols(), qk_nope_head_dim);
            let views = transposed.iter().map(|bytes| Ok(vec![view(bytes)?]));
            Some(pack(&views.collect::<Result<Vec<_>, OpError>>()?)?)
        };
        let (w_uk, w_uv) = (pack(&key_rows)?, pack(&rows(qk_nope_head_dim, v_head_dim))?);
        Ok(PackedMlaUpProjections { w_uk, w_uk_t, w_uv })
    }

    /// MLA of the queries `q [tokens, heads · (qk_nope_head_dim + qk_rope_head_dim)]` over compressed KV. The
    /// step's own compressed KV, `kv [tokens, kv_lora_rank + qk_rope_head_dim]`, is written to the KV pool by
    /// slot (−1: not written), after RMS norm and RoPE. Returns `[tokens, heads · v_head_dim]`.
    pub fn mla_attention(
        &self,
        mut q: Tensor,
        kv: &Tensor,
        weights: &MlaWeights<'_>,
        shape: &AttentionLayerParams<'_>,
        pool: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        check_size("mla_attention", "windows", usize::from(shape.keys.window.is_some()), 0)?;
        check_size("mla_attention", "sinks", usize::from(shape.sinks.is_some()), 0)?;
        let place = pool.mla_place("mla_attention", shape.layer)?;
        let (layout, heads) = (&place.layout, weights.heads);
        let write = mla_kv_write_args(kv, weights, batch, shape.heads, place.layer)?;
        self.mla_kv_write(&mut q, pool, &place, &write)?;
        let s = &self.stream;
        let mut o = self.scratch(q.dtype(), &[q.rows(), shape.heads * heads.w_uv.n()])?;
        let args = MlaAttentionArgs {
            q: q.mat()?,
            rows: batch.attention_metadata(KV_GROUP)?,
            heads: heads.kernel_args(),
            layer: place.layer,
            scale: shape.scale,
            first_position: shape.keys.first_position,
        };
        let pool = &pool.read(place.memory);
        self.device.launch(s, MlaAttention { o: o.mat_mut()?, pool, layout, args: &args })?;
        Ok(o)
    }

    /// Writes the compressed KV and rotary keys `kv [tokens, kv_lora_rank + qk_rope_head_dim]` to layer
    /// `layer` of the KV pool, as [`Ops::mla_attention`] does, without computing attention.
    pub fn mla_write_kv_only(
        &self,
        kv: &Tensor,
        weights: &MlaWeights<'_>,
        layer: usize,
        pool: &KvPool,
        batch: &DeviceBatchMetadata,
    ) -> Result<(), OpError> {
        let place = pool.mla_place("mla_write_kv_only", layer)?;
        let rope_dim = place.layout.rope_dim;
        // The kernel applies RoPE to queries as well, so it gets one head of dummy queries.
        let mut scratch_q = self.scratch(kv.dtype(), &[kv.rows(), rope_dim])?;
        let write = mla_kv_write_args(kv, weights, batch, 1, place.layer)?;
        self.mla_kv_write(&mut scratch_q, pool, &place, &write)
    }

    /// Applies RoPE to the queries `q` in place, and writes compressed KV to a layer of the KV pool, after
    /// RMS norm and RoPE.
    fn mla_kv_write(
        &self,
        q: &mut Tensor,
        pool: &KvPool,
        place: &MlaLayerPlace,
        args: &MlaPrologueArgs<'_>,
    ) -> Result<(), OpError> {
        let (q, layout) = (q.mat_mut()?, &place.layout);
        let op = MlaPrologue { q, pool: &mut pool.write(place.memory), layout, args };
        Ok(self.device.launch(&self.stream, op)?)
    }
}

/// Returns the arguments of the kernel that writes the compressed KV of a batch to layer `layer` of the KV
/// pool. The queries of the batch have `heads` heads.
fn mla_kv_write_args<'a>(
    kv: &'a Tensor,
    weights: &MlaWeights<'a>,
    batch: &'a DeviceBatchMetadata,
    heads: usize,
    layer: usize,
) -> Result<MlaPrologueArgs<'a>, OpError> {
    let MlaWeights { norm, eps, rope, .. } = weights;
    Ok(MlaPrologueArgs {
        kv: kv.mat()?,
        norm: norm.mat()?,
        eps: *eps,
        rope: RopeCosSin { cos: rope.cos.mat()?, sin: rope.sin.mat()? },
        positions: batch.positions.mat()?,
        slots: batch.kv_slots(KV_GROUP)?,
        heads,
        layer,
    })
}

/// Transposes `x [n, k]`: returns `[k, n]` in f32, little-endian.
fn transpose(x: &HostMat<'_>) -> Vec<u8> {
    let (n, k) = (x.rows(), x.cols());
    let (mut row, mut bytes) = (vec![0f32; k], vec![0; n * k * 4]);
    for r in 0..n {
        x.read_row(r, &mut row);
        for (c, value) in row.iter().enumerate() {
            bytes[(c * n + r) * 4..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}
