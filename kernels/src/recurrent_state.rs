//! Memory layout of the recurrent state of gated delta nets in the state pool.
//!
//! The pool is `[layer][state slot][delta state | convolution state]`. The delta state of a layer is f32 `[value heads,
//! key_dim, value_dim]`; the convolution state has the last `conv_width - 1` inputs of each channel, f32 `[conv_width - 1,
//! channels]`, oldest first. f32 represents the inputs exactly, whatever the type of the activations.

use device::{DType, DeviceError, MatRef, check_at_least, check_dtype, check_size};

/// Sizes of a state pool, and offsets of the states in it. All sizes are those of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentStateLayout {
    /// Number of layers in the pool.
    pub layers: usize,
    /// Number of state slots in the pool.
    pub slots: usize,
    /// Number of key heads, which are also the query heads.
    pub key_heads: usize,
    /// Number of value heads; a multiple of `key_heads`. Successive value heads share a key head.
    pub value_heads: usize,
    /// Channels per query or key head.
    pub key_dim: usize,
    /// Channels per value head.
    pub value_dim: usize,
    /// Number of tokens that the causal convolution reads, the current token included; at least 2.
    pub conv_width: usize,
}

/// State slots that the rows of a step read and write. Values are slot indices plus 1.
#[derive(Debug, Clone, Copy)]
pub struct StateSlotRows<'a> {
    /// Prefix sums of the row lengths: row `r` has tokens `[cu_q[r], cu_q[r + 1])`; i32 `[rows + 1]`. Tokens from
    /// `cu_q[rows]` on are padding.
    pub cu_q: MatRef<'a>,
    /// Slot with the state before each row, plus 1; 0 = the row starts with the zero state; i32 `[rows]`.
    pub read: MatRef<'a>,
    /// Slot to which the state after each row is written, plus 1; 0 = the state is not stored; i32 `[rows]`. A slot
    /// that a row writes is read or written by no other row.
    pub write: MatRef<'a>,
    /// Maximum number of tokens per row.
    pub max_row_len: usize,
    /// Upper bound of the number of rows of more than
    /// [`GatedDeltaRule::RECURRENT_TOKENS`](crate::GatedDeltaRule::RECURRENT_TOKENS) tokens.
    pub chunked_rows: usize,
}

impl RecurrentStateLayout {
    /// Alignment of the states in the pool, in bytes.
    const ALIGNMENT: usize = 64;

    /// Returns an error for layouts that no kernel supports.
    pub fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "state layout";
        for (what, size) in [
            ("key heads", self.key_heads),
            ("key channels", self.key_dim),
            ("value channels", self.value_dim),
        ] {
            check_at_least(KERNEL, what, size, 1)?;
        }
        check_at_least(KERNEL, "convolution width", self.conv_width, 2)?;
        check_at_least(KERNEL, "value heads", self.value_heads, self.key_heads)?;
        check_size(KERNEL, "value heads per key head", self.value_heads % self.key_heads, 0)
    }

    /// Number of channels of the queries and of the keys.
    #[must_use]
    pub const fn key_channels(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Number of channels of the values.
    #[must_use]
    pub const fn value_channels(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Number of channels of the causal convolution: queries, keys and values.
    #[must_use]
    pub const fn conv_channels(&self) -> usize {
        2 * self.key_channels() + self.value_channels()
    }

    /// Number of f32 elements of the delta state of a layer.
    #[must_use]
    pub const fn delta_elements(&self) -> usize {
        self.value_channels() * self.key_dim
    }

    /// Number of f32 elements of the convolution state of a layer.
    #[must_use]
    pub const fn conv_elements(&self) -> usize {
        (self.conv_width - 1) * self.conv_channels()
    }

    /// Offset of the convolution state within the state of a layer, in bytes.
    #[must_use]
    pub const fn conv_offset(&self) -> usize {
        (self.delta_elements() * size_of::<f32>()).next_multiple_of(Self::ALIGNMENT)
    }

    /// Bytes of the state of one layer.
    #[must_use]
    pub const fn bytes_per_layer(&self) -> usize {
        let conv = self.conv_elements() * size_of::<f32>();
        self.conv_offset() + conv.next_multiple_of(Self::ALIGNMENT)
    }

    /// Bytes of one state slot: the states of all layers.
    #[must_use]
    pub const fn bytes_per_slot(&self) -> usize {
        self.layers * self.bytes_per_layer()
    }

    /// Bytes of the pool.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.slots * self.bytes_per_slot()
    }

    /// Offset of the state of layer `layer` in state slot `slot`, in bytes.
    #[must_use]
    pub const fn state_offset(&self, layer: usize, slot: usize) -> usize {
        (layer * self.slots + slot) * self.bytes_per_layer()
    }
}

impl StateSlotRows<'_> {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.read.cols()
    }

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self, kernel: &'static str) -> Result<(), DeviceError> {
        check_size(kernel, "written slots", self.write.cols(), self.rows())?;
        check_size(kernel, "cu_q", self.cu_q.cols(), self.rows() + 1)?;
        check_dtype(kernel, "cu_q", self.cu_q.dtype(), DType::I32)?;
        check_dtype(kernel, "read slots", self.read.dtype(), DType::I32)?;
        check_dtype(kernel, "written slots", self.write.dtype(), DType::I32)
    }
}
