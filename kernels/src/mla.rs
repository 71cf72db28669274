//! Latent attention: keys and values of all heads from one row per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! `T` tokens, `R` rows, `N` query heads, `C` channels of a latent, `P` channels of a key that turn with the position and are the
//! same in all heads, `M` further channels of a head's key, `V` channels of a head's value.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::{AttentionMetadata, PackedGroup, RopeCosSin};

/// Shape of a pool of latent rows, `[layer][slot][C + P]`: the normed latent, then the turned key channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaKvLayout {
    /// Layers in the pool.
    pub layers: usize,
    /// Blocks in the pool.
    pub blocks: usize,
    /// Token positions per block.
    pub block_tokens: usize,
    /// `C`
    pub kv_lora_rank: usize,
    /// `P`, even.
    pub rope_dim: usize,
    /// f32, bf16 or f16, as the activations.
    pub dtype: DType,
}

impl MlaKvLayout {
    /// Checks that kernels exist for this layout.
    pub fn check(&self) -> Result<(), DeviceError> {
        if !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) {
            let (kernel, what) = ("latent layout", "dtype");
            return Err(DeviceError::Unsupported { kernel, what, dtype: self.dtype });
        }
        if !self.rope_dim.is_multiple_of(2) {
            let (what, got, expected) = ("turned channels", self.rope_dim, self.rope_dim + 1);
            let kernel = "latent layout";
            return Err(DeviceError::Shape { kernel, what, got, expected });
        }
        Ok(())
    }

    /// Elements of a row, `C + P`.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.kv_lora_rank + self.rope_dim
    }

    /// Bytes of one block over all layers.
    #[must_use]
    pub const fn bytes_per_block(&self) -> usize {
        self.layers * self.block_tokens * self.width() * self.dtype.bytes()
    }

    /// Bytes of the pool.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.blocks * self.bytes_per_block()
    }

    /// Slots of the pool.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.blocks * self.block_tokens
    }

    /// First element of a slot's row.
    #[must_use]
    pub const fn row(&self, layer: usize, slot: usize) -> usize {
        (layer * self.slots() + slot) * self.width()
    }
}

/// Arguments of `mla_kv_write`.
#[derive(Debug, Clone, Copy)]
pub struct MlaKvWriteArgs<'a> {
    /// Latents and key channels before norm and rotation, `[T, C + P]`.
    pub kv: MatRef<'a>,
    /// Weight `[C]` of the latents' norm.
    pub norm: MatRef<'a>,
    /// Added to the mean square of that norm.
    pub eps: f32,
    /// Rotation by position of channels `2 i` and `2 i + 1`: f32 `[positions, P / 2]`.
    pub rope: RopeCosSin<'a>,
    /// Position of each token; i32 `[T]`.
    pub positions: MatRef<'a>,
    /// Slot of each token, −1 stores nothing; i64 `[T]`.
    pub slots: MatRef<'a>,
    /// Query heads.
    pub heads: usize,
    /// Layer of the pool.
    pub layer: usize,
}

impl MlaKvWriteArgs<'_> {
    /// Refuses what does not fit together: `q [T, N (M + P)]`.
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
        let query = q.cols() / self.heads.max(1);
        size("columns of q", q.cols(), self.heads * query)?;
        size("channels of a query", query.max(rotary), query)?;
        size("positions", self.positions.cols(), tokens)?;
        size("slots", self.slots.cols(), tokens)?;
        size("columns of cos", rope.cos.cols(), rotary / 2)?;
        size("columns of sin", rope.sin.cols(), rotary / 2)?;
        size("rows of sin", rope.sin.rows(), rope.cos.rows())?;
        let own = [("q", q.dtype()), ("kv", self.kv.dtype()), ("norm weight", self.norm.dtype())];
        for (what, got) in own {
            check_dtype(KERNEL, what, got, layout.dtype)?;
        }
        check_dtype(KERNEL, "cos", rope.cos.dtype(), DType::F32)?;
        check_dtype(KERNEL, "sin", rope.sin.dtype(), DType::F32)
    }
}

impl MlaAttentionArgs<'_> {
    /// Refuses what does not fit together: `o [T, N V]`.
    pub(crate) fn check_shapes(
        &self,
        o: &MatMut<'_>,
        layout: &MlaKvLayout,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "mla_attention";
        layout.check()?;
        let size = |what, got, expected| check_size(KERNEL, what, got, expected);
        let Self { q, rows, heads, .. } = self;
        let count = heads.w_uk.len();
        size("heads of value", heads.w_uv.len(), count)?;
        size("inputs of key", heads.w_uk.k(), layout.kv_lora_rank)?;
        size("inputs of value", heads.w_uv.k(), layout.kv_lora_rank)?;
        if let Some(transposed) = heads.w_uk_t {
            size("heads of key_transposed", transposed.len(), count)?;
            size("outputs of key_transposed", transposed.n(), layout.kv_lora_rank)?;
            size("inputs of key_transposed", transposed.k(), heads.w_uk.n())?;
        }
        size("columns of q", q.cols(), count * (heads.w_uk.n() + layout.rope_dim))?;
        size("rows of o", o.rows(), q.rows())?;
        size("columns of o", o.cols(), count * heads.w_uv.n())?;
        check_dtype(KERNEL, "q", q.dtype(), layout.dtype)?;
        check_dtype(KERNEL, "o", o.dtype(), layout.dtype)?;
        check_dtype(KERNEL, "cu_q", rows.cu_q.dtype(), DType::I32)?;
        check_dtype(KERNEL, "context_lens", rows.context_lens.dtype(), DType::I32)?;
        check_dtype(KERNEL, "block_tables", rows.block_tables.dtype(), DType::I32)
    }
}

/// What makes keys and values of a head out of a latent.
#[derive(Debug, Clone, Copy)]
pub struct MlaHeadWeights<'a> {
    /// Of each head `[M, C]`: a latent to the key's unturned channels.
    pub w_uk: &'a PackedGroup,
    /// The same transposed, `[C, M]`: a query to what meets latents themselves. Absent where all keys are made.
    pub w_uk_t: Option<&'a PackedGroup>,
    /// Of each head `[V, C]`: a latent, or a mean of latents, to a value.
    pub w_uv: &'a PackedGroup,
}

/// Arguments of `mla_attention`.
#[derive(Debug, Clone, Copy)]
pub struct MlaAttentionArgs<'a> {
    /// Queries `[T, N (M + P)]`, their last `P` channels turned.
    pub q: MatRef<'a>,
    /// Rows, lengths, tables.
    pub rows: AttentionMetadata<'a>,
    /// Of `N` heads.
    pub heads: MlaHeadWeights<'a>,
    /// Layer of the pool.
    pub layer: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// First position that is seen; who asks stands behind those that are not.
    pub first_position: usize,
}
