//! KV layout, weights and op arguments of multi-head latent attention (MLA): keys and values of all heads are
//! up-projected from one compressed KV row per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! Dimensions have the names of the model configuration: `kv_lora_rank` (width of the compressed KV),
//! `qk_rope_head_dim` (key channels with RoPE, shared by all heads), `qk_nope_head_dim` (further key channels
//! of each head), `v_head_dim`.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::{AttentionMetadata, PackedMatrixGroup, RopeCosSin};

/// Layout of the KV pool of MLA, `[layer][slot][kv_lora_rank + rope_dim]`: a row has the compressed KV after
/// its RMS norm, then the key channels after RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaKvLayout {
    /// Number of layers in the pool.
    pub layers: usize,
    /// Number of blocks in the pool.
    pub blocks: usize,
    /// Number of token positions per block.
    pub block_tokens: usize,
    /// Width of the compressed KV.
    pub kv_lora_rank: usize,
    /// Number of key channels with RoPE (`qk_rope_head_dim`); even.
    pub rope_dim: usize,
    /// Element type: f32, bf16 or f16; equal to the type of the activations.
    pub dtype: DType,
}

impl MlaKvLayout {
    /// Returns an error for layouts that no kernel supports.
    pub fn check(&self) -> Result<(), DeviceError> {
        if !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) {
            let (kernel, what) = ("mla kv layout", "dtype");
            return Err(DeviceError::Unsupported { kernel, what, dtype: self.dtype });
        }
        if !self.rope_dim.is_multiple_of(2) {
            let (what, got, expected) = ("rope channels", self.rope_dim, self.rope_dim + 1);
            let kernel = "mla kv layout";
            return Err(DeviceError::Shape { kernel, what, got, expected });
        }
        Ok(())
    }

    /// Number of elements of a KV row, `kv_lora_rank + rope_dim`.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.kv_lora_rank + self.rope_dim
    }

    /// Bytes of one KV block: the rows of all layers.
    #[must_use]
    pub const fn bytes_per_block(&self) -> usize {
        self.layers * self.block_tokens * self.width() * self.dtype.bytes()
    }

    /// Bytes of the pool.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.blocks * self.bytes_per_block()
    }

    /// Number of token slots in the pool (blocks times tokens per block).
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.blocks * self.block_tokens
    }

    /// Index in the pool of the first element of the KV row of `slot`.
    #[must_use]
    pub const fn row(&self, layer: usize, slot: usize) -> usize {
        (layer * self.slots() + slot) * self.width()
    }
}

/// Arguments of [`MlaPrologue`](crate::MlaPrologue).
#[derive(Debug, Clone, Copy)]
pub struct MlaPrologueArgs<'a> {
    /// Output of the KV down-projection, `[tokens, kv_lora_rank + qk_rope_head_dim]`: compressed KV before
    /// its norm and key channels before RoPE.
    pub kv: MatRef<'a>,
    /// Weight `[kv_lora_rank]` of the RMS norm of the compressed KV.
    pub norm: MatRef<'a>,
    /// Epsilon of the norm, added to the mean square.
    pub eps: f32,
    /// RoPE tables by position, interleaved pairing: channel `2 i` is rotated with channel `2 i + 1`; f32
    /// `[positions, qk_rope_head_dim / 2]`.
    pub rope: RopeCosSin<'a>,
    /// Position of each token; i32 `[tokens]`.
    pub positions: MatRef<'a>,
    /// KV slot of each token; i64 `[tokens]`. −1 = the KV row of the token is not stored.
    pub slots: MatRef<'a>,
    /// Number of query heads.
    pub heads: usize,
    /// Layer index in the KV pool.
    pub layer: usize,
}

impl MlaPrologueArgs<'_> {
    /// Checks that shapes and types agree; `q` is `[tokens, heads · (qk_nope_head_dim + qk_rope_head_dim)]`.
    pub(crate) fn check_shapes(
        &self,
        q: &MatMut<'_>,
        layout: &MlaKvLayout,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "mla_kv_write";
        layout.check()?;
        let size = |what, got, expected| check_size(KERNEL, what, got, expected);
        let (tokens, rotary, rope) = (self.kv.rows(), layout.rope_dim, &self.rope);
        size("columns of kv", self.kv.cols(), layout.width())?;
        size("norm weight", self.norm.cols(), layout.kv_lora_rank)?;
        size("rows of q", q.rows(), tokens)?;
        let head_dim = q.cols() / self.heads.max(1);
        size("columns of q", q.cols(), self.heads * head_dim)?;
        size("channels of a query head", head_dim.max(rotary), head_dim)?;
        size("positions", self.positions.cols(), tokens)?;
        size("slots", self.slots.cols(), tokens)?;
        size("columns of cos", rope.cos.cols(), rotary / 2)?;
        size("columns of sin", rope.sin.cols(), rotary / 2)?;
        size("rows of sin", rope.sin.rows(), rope.cos.rows())?;
        let operands =
            [("q", q.dtype()), ("kv", self.kv.dtype()), ("norm weight", self.norm.dtype())];
        for (what, got) in operands {
            check_dtype(KERNEL, what, got, layout.dtype)?;
        }
        check_dtype(KERNEL, "cos", rope.cos.dtype(), DType::F32)?;
        check_dtype(KERNEL, "sin", rope.sin.dtype(), DType::F32)
    }
}

impl MlaAttentionArgs<'_> {
    /// Checks that shapes and types agree; `o` is `[tokens, heads · v_head_dim]`.
    pub(crate) fn check_shapes(
        &self,
        o: &MatMut<'_>,
        layout: &MlaKvLayout,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "mla_attention";
        layout.check()?;
        let size = |what, got, expected| check_size(KERNEL, what, got, expected);
        let Self { q, rows, heads, .. } = self;
        let head_count = heads.w_uk.len();
        size("heads of w_uv", heads.w_uv.len(), head_count)?;
        size("inputs of w_uk", heads.w_uk.k(), layout.kv_lora_rank)?;
        size("inputs of w_uv", heads.w_uv.k(), layout.kv_lora_rank)?;
        if let Some(transposed) = heads.w_uk_t {
            size("heads of w_uk_t", transposed.len(), head_count)?;
            size("outputs of w_uk_t", transposed.n(), layout.kv_lora_rank)?;
            size("inputs of w_uk_t", transposed.k(), heads.w_uk.n())?;
        }
        size("columns of q", q.cols(), head_count * (heads.w_uk.n() + layout.rope_dim))?;
        size("rows of o", o.rows(), q.rows())?;
        size("columns of o", o.cols(), head_count * heads.w_uv.n())?;
        check_dtype(KERNEL, "q", q.dtype(), layout.dtype)?;
        check_dtype(KERNEL, "o", o.dtype(), layout.dtype)?;
        check_dtype(KERNEL, "cu_q", rows.cu_q.dtype(), DType::I32)?;
        check_dtype(KERNEL, "context_lens", rows.context_lens.dtype(), DType::I32)?;
        check_dtype(KERNEL, "block_tables", rows.block_tables.dtype(), DType::I32)
    }
}

/// Up-projections of MLA from compressed KV to the keys and values of each head.
#[derive(Debug, Clone, Copy)]
pub struct MlaUpProjections<'a> {
    /// W_UK `[qk_nope_head_dim, kv_lora_rank]` of each head: maps compressed KV to the key channels without
    /// RoPE.
    pub w_uk: &'a PackedMatrixGroup,
    /// W_UK transposed, `[kv_lora_rank, qk_nope_head_dim]`: maps queries to absorbed queries. `None` = MLA is
    /// always non-absorbed.
    pub w_uk_t: Option<&'a PackedMatrixGroup>,
    /// W_UV `[v_head_dim, kv_lora_rank]` of each head: maps compressed KV, or its attention-weighted mean, to
    /// values.
    pub w_uv: &'a PackedMatrixGroup,
}

/// Arguments of [`MlaAttention`](crate::MlaAttention).
#[derive(Debug, Clone, Copy)]
pub struct MlaAttentionArgs<'a> {
    /// Queries `[tokens, heads · (qk_nope_head_dim + qk_rope_head_dim)]`, with RoPE already applied to the
    /// last `qk_rope_head_dim` channels of each head.
    pub q: MatRef<'a>,
    /// Batch metadata: rows, context lengths and block tables.
    pub rows: AttentionMetadata<'a>,
    /// Up-projections of each head.
    pub heads: MlaUpProjections<'a>,
    /// Layer index in the KV pool.
    pub layer: usize,
    /// Factor of the attention scores.
    pub scale: f32,
    /// First position that attention reads; no query is at an earlier position.
    pub first_position: usize,
}
