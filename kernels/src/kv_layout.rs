//! Memory layout of keys and values in the KV pool.
//!
//! The pool is `[layer][block][kv head][K tile | V tile]`. A tile has the keys or values of one block and KV
//! head: `B` tokens and `D` channels; `t` is the index of a token and `d` that of a channel. On CPUs bf16
//! keys are `[D / 2][B][d % 2]` and values `[B / 2][D][t % 2]`: scores and outputs are then computed by
//! paired bf16 dot products over contiguous cache lines without shuffles. The SIMD lanes are tokens for the
//! scores, and channels for the outputs. On CPUs f32 and f16 keys are `[D][B]` and values `[B][D]`. On GPUs
//! keys and values are `[B][D]`. fp8 keys and values are `[B][D]` on all devices; the value of an element is
//! the stored element times the scale of the layer.

use device::{DType, DeviceError};

/// Order of the elements within a key or value tile of the KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvTileOrder {
    /// Layout of the CPU, for dot products along SIMD lanes; see the documentation of the module.
    LaneInterleaved,
    /// `[block_tokens][head_dim]` for keys and values, for wide vector loads on GPUs.
    RowMajor,
}

/// Sizes and element type of a KV pool of grouped-query attention, and index functions into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Number of layers in the pool.
    pub layers: usize,
    /// Number of blocks in the pool.
    pub blocks: usize,
    /// Token positions per block; even.
    pub block_tokens: usize,
    /// Number of KV heads on this rank; at least 1.
    pub kv_heads: usize,
    /// Channels per head (head size); a multiple of 16.
    pub head_dim: usize,
    /// Element type: f32, bf16 or f16 (then equal to the type of the activations), or fp8.
    pub dtype: DType,
    /// Element order within a tile, fixed by the device.
    pub order: KvTileOrder,
}

impl KvLayout {
    /// Returns an error for layouts that no kernel supports.
    pub fn check(&self) -> Result<(), DeviceError> {
        if !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3) {
            let (kernel, what) = ("kv layout", "dtype");
            return Err(DeviceError::Unsupported { kernel, what, dtype: self.dtype });
        }
        let multiple = |what, got: usize, unit: usize| {
            if got != 0 && got.is_multiple_of(unit) {
                return Ok(());
            }
            let expected = got.max(1).next_multiple_of(unit);
            Err(DeviceError::Shape { kernel: "kv layout", what, got, expected })
        };
        multiple("kv_heads", self.kv_heads, 1)?;
        multiple("block_tokens", self.block_tokens, 2)?;
        multiple("head_dim", self.head_dim, 16)
    }

    /// Returns an error for activation types that kernels do not support together with this pool.
    pub(crate) fn check_activations(
        &self,
        kernel: &'static str,
        what: &'static str,
        dtype: DType,
    ) -> Result<(), DeviceError> {
        let fits = match self.dtype {
            DType::F8E4M3 => matches!(dtype, DType::F32 | DType::BF16 | DType::F16),
            pool => dtype == pool,
        };
        if fits { Ok(()) } else { Err(DeviceError::Unsupported { kernel, what, dtype }) }
    }

    /// Number of elements of one key or value tile.
    #[must_use]
    pub const fn tile(&self) -> usize {
        self.block_tokens * self.head_dim
    }

    /// Bytes of one KV block: keys and values of all layers and heads.
    #[must_use]
    pub const fn bytes_per_block(&self) -> usize {
        self.layers * self.kv_heads * 2 * self.tile() * self.dtype.bytes()
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

    /// Index in the pool of the first element of a key tile; the value tile of the same block and head
    /// follows it.
    #[must_use]
    pub const fn key_tile(&self, layer: usize, block: usize, head: usize) -> usize {
        ((layer * self.blocks + block) * self.kv_heads + head) * 2 * self.tile()
    }

    /// Index in the pool of the first element of a value tile.
    #[must_use]
    pub const fn value_tile(&self, layer: usize, block: usize, head: usize) -> usize {
        self.key_tile(layer, block, head) + self.tile()
    }

    /// Index in a key tile of the element of token `t` and channel `d`.
    #[must_use]
    pub const fn key(&self, t: usize, d: usize) -> usize {
        match (self.order, self.dtype) {
            (KvTileOrder::RowMajor, _) | (_, DType::F8E4M3) => t * self.head_dim + d,
            (KvTileOrder::LaneInterleaved, DType::BF16) => {
                (d / 2 * self.block_tokens + t) * 2 + d % 2
            }
            (KvTileOrder::LaneInterleaved, _) => d * self.block_tokens + t,
        }
    }

    /// Index in a value tile of the element of token `t` and channel `d`.
    #[must_use]
    pub const fn value(&self, t: usize, d: usize) -> usize {
        match (self.order, self.dtype) {
            (KvTileOrder::LaneInterleaved, DType::BF16) => (t / 2 * self.head_dim + d) * 2 + t % 2,
            _ => t * self.head_dim + d,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_without_kv_heads_is_rejected() {
        let layout = KvLayout {
            layers: 1,
            blocks: 1,
            block_tokens: 16,
            kv_heads: 1,
            head_dim: 16,
            dtype: DType::F32,
            order: KvTileOrder::RowMajor,
        };
        assert_eq!(layout.check(), Ok(()));
        let (kernel, what) = ("kv layout", "kv_heads");
        let error = DeviceError::Shape { kernel, what, got: 0, expected: 1 };
        assert_eq!(KvLayout { kv_heads: 0, ..layout }.check(), Err(error));
    }
}
