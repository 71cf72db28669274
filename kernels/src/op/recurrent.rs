//! Ops of layers with recurrent state: gated delta net (Yang et al., 2024, arXiv 2412.06464), as in transformers
//! `modeling_qwen3_next.py`, and the output gate of the attention layers between them.

use device::{Buffer, DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::{RecurrentStateLayout, StateSlotRows};

/// Causal depthwise convolution, then SiLU: `y[t, c] = silu(Σ_j w[j, c] · x[t − (width − 1) + j, c])` over the tokens of
/// each row. Inputs before the first token of a row are those of its convolution state. The last `width − 1` inputs are
/// written to the state. Outputs of padding tokens are 0.
#[derive(Debug)]
pub struct CausalConvolution<'a> {
    /// Output `[tokens, channels]`.
    pub y: MatMut<'a>,
    /// Input, of which the first `channels` columns are read; `[tokens, at least channels]`.
    pub x: MatRef<'a>,
    /// Weights, f32 `[width, channels]`, that of the oldest input first.
    pub weight: MatRef<'a>,
    /// State pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a RecurrentStateLayout,
    /// Layer of the pool.
    pub layer: usize,
    /// Rows of the step and their state slots.
    pub rows: StateSlotRows<'a>,
}

/// Gated delta rule, for each token of a row and each value head with state `S` `[key_dim, value_dim]`:
/// `S = exp(g) S`, `δ = sigmoid(b) (v − Sᵀ k)`, `S = S + k δᵀ`, `o = Sᵀ q`, with `g = −exp(a_log) softplus(a + dt_bias)`.
/// `q` and `k` are `x / sqrt(Σ x² + 1e-6)` of their channels, and `q` is multiplied by `key_dim^-½`. All arithmetic is
/// f32, but GPUs multiply 16-bit operands for rows of many tokens in 16-bit types. The state after the row is written to
/// its slot. Outputs of padding tokens are 0.
#[derive(Debug)]
pub struct GatedDeltaRule<'a> {
    /// Output `[tokens, value_heads · value_dim]`.
    pub o: MatMut<'a>,
    /// Queries, keys and values after the convolution, `[tokens, channels of the convolution]`.
    pub qkv: MatRef<'a>,
    /// Inputs `b` of the write strength of each value head, in the type of `qkv`; `[tokens, value_heads]`.
    pub beta: MatRef<'a>,
    /// Inputs `a` of the decay of each value head, in the type of `qkv`; `[tokens, value_heads]`.
    pub decay: MatRef<'a>,
    /// Logarithm of the decay rate of each value head; f32 `[value_heads]`.
    pub a_log: MatRef<'a>,
    /// Bias of the decay input of each value head; f32 `[value_heads]`.
    pub dt_bias: MatRef<'a>,
    /// State pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a RecurrentStateLayout,
    /// Layer of the pool.
    pub layer: usize,
    /// Rows of the step and their state slots.
    pub rows: StateSlotRows<'a>,
}

/// RMS norm of each head, multiplied by an activated gate: `y = w · cast(x / sqrt(mean(x²) + eps)) · silu(z)`.
#[derive(Debug)]
pub struct GatedRmsNorm<'a> {
    /// Output `[tokens, heads · head_dim]`.
    pub y: MatMut<'a>,
    /// Input `[tokens, heads · head_dim]`.
    pub x: MatRef<'a>,
    /// Gate `[tokens, heads · head_dim]`.
    pub z: MatRef<'a>,
    /// Weight, f32 `[head_dim]`, which all heads share.
    pub weight: MatRef<'a>,
    /// Epsilon, added to the mean square.
    pub eps: f32,
}

/// Output gate of attention, `x = x · sigmoid(gate)` in place.
#[derive(Debug)]
pub struct SigmoidGating<'a> {
    /// Attention output `[tokens, columns]`, replaced in place.
    pub x: MatMut<'a>,
    /// Gate `[tokens, columns]`.
    pub gate: MatRef<'a>,
}

impl CausalConvolution<'_> {
    pub(crate) const KERNEL: &'static str = "gdn_conv";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, channels) = (Self::KERNEL, self.layout.conv_channels());
        check_state_layer(kernel, self.pool, self.layout, self.layer)?;
        self.rows.check(kernel)?;
        check_size(kernel, "columns of y", self.y.cols(), channels)?;
        check_size(kernel, "columns of x", self.x.cols().min(channels), channels)?;
        check_size(kernel, "rows of x", self.x.rows(), self.y.rows())?;
        check_size(kernel, "rows of the weight", self.weight.rows(), self.layout.conv_width)?;
        check_size(kernel, "columns of the weight", self.weight.cols(), channels)?;
        check_dtype(kernel, "weight", self.weight.dtype(), DType::F32)?;
        check_dtype(kernel, "y", self.y.dtype(), self.x.dtype())
    }
}

impl GatedDeltaRule<'_> {
    pub(crate) const KERNEL: &'static str = "gdn_delta_rule";
    /// Number of tokens of the longest row that is always computed token by token; `RECURRENT_TOKENS` of gdn_chunk/chunk.h. Rows
    /// with draft tokens are not longer, so that [`StateReplay`](crate::StateReplay) gives the bits of rows without them.
    pub const RECURRENT_TOKENS: usize = 17;
    /// Added to the sum of squares of a query or key.
    pub(crate) const NORM_EPS: f32 = 1e-6;

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, layout) = (Self::KERNEL, self.layout);
        let (tokens, heads) = (self.o.rows(), layout.value_heads);
        check_state_layer(kernel, self.pool, layout, self.layer)?;
        self.rows.check(kernel)?;
        check_size(kernel, "columns of o", self.o.cols(), layout.value_channels())?;
        check_size(kernel, "columns of qkv", self.qkv.cols(), layout.conv_channels())?;
        check_size(kernel, "rows of qkv", self.qkv.rows(), tokens)?;
        check_dtype(kernel, "o", self.o.dtype(), self.qkv.dtype())?;
        for (what, input) in [("beta", self.beta), ("decay", self.decay)] {
            check_size(kernel, what, input.rows(), tokens)?;
            check_size(kernel, what, input.cols(), heads)?;
            check_dtype(kernel, what, input.dtype(), self.qkv.dtype())?;
        }
        for (what, head) in [("a_log", self.a_log), ("dt_bias", self.dt_bias)] {
            check_size(kernel, what, head.cols(), heads)?;
            check_dtype(kernel, what, head.dtype(), DType::F32)?;
        }
        Ok(())
    }
}

impl GatedRmsNorm<'_> {
    pub(crate) const KERNEL: &'static str = "rms_norm_gated";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, y) = (Self::KERNEL, &self.y);
        for (what, input) in [("x", self.x), ("z", self.z)] {
            check_size(kernel, what, input.rows(), y.rows())?;
            check_size(kernel, what, input.cols(), y.cols())?;
            check_dtype(kernel, what, input.dtype(), y.dtype())?;
        }
        let head_dim = self.weight.cols().max(1);
        check_size(kernel, "columns of y", y.cols() % head_dim, 0)?;
        check_dtype(kernel, "weight", self.weight.dtype(), DType::F32)
    }
}

impl SigmoidGating<'_> {
    pub(crate) const KERNEL: &'static str = "elementwise_output_gate";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let kernel = Self::KERNEL;
        check_size(kernel, "rows of the gate", self.gate.rows(), self.x.rows())?;
        check_size(kernel, "columns of the gate", self.gate.cols(), self.x.cols())?;
        check_dtype(kernel, "gate", self.gate.dtype(), self.x.dtype())
    }
}

/// Checks that the layer is inside the state pool and that `pool` is as large as its layout.
fn check_state_layer(
    kernel: &'static str,
    pool: &Buffer,
    layout: &RecurrentStateLayout,
    layer: usize,
) -> Result<(), DeviceError> {
    layout.check()?;
    check_size(kernel, "pool bytes", pool.bytes().min(layout.bytes()), layout.bytes())?;
    if layer >= layout.layers {
        let (what, index, limit) = ("layer", layer as i64, layout.layers);
        return Err(DeviceError::Index { kernel, what, index, limit });
    }
    Ok(())
}
