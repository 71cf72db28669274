//! Activation functions of gated MLPs, and the preprocessor defines that select them in GPU kernels.

use device::gpu::KernelDefine;

/// Function that computes the inner activation of a gated MLP from the outputs `gate` and `up` of its first
/// projections. Computed in f32 and rounded once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GateActivation {
    /// `silu(gate) · up` with `silu(x) = x · sigmoid(x)` (SwiGLU, arXiv 2002.05202).
    Silu,
    /// `gelu(gate) · up` with the tanh approximation `gelu(x) = x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`
    /// (arXiv 1606.08415, section 2; `gelu_pytorch_tanh` in transformers).
    GeluTanh,
    /// `(up + 1) · gate · sigmoid(alpha · gate)`, where `gate` is first bounded above by `limit`, and `up` is
    /// bounded to `[−limit, limit]` (transformers `modeling_gpt_oss.py`).
    ClampedSilu {
        /// Factor of the gate in the sigmoid.
        alpha: f32,
        /// Upper bound of the gate, and bound of the absolute value of `up`; positive.
        limit: f32,
    },
}

/// Returns the defines of kernels that compute a matrix product, followed by the activation of its gate and
/// up columns unless `gate` is `None`.
pub(crate) fn gated_product_defines(gate: Option<GateActivation>) -> [KernelDefine; 4] {
    let [function, alpha, limit] = gate.unwrap_or(GateActivation::Silu).defines();
    [("GATED", u32::from(gate.is_some())), function, alpha, limit]
}

impl GateActivation {
    /// Returns the defines of dev/gate.h: the function, and the bits of its f32 parameters (0 if unused).
    pub(crate) fn defines(self) -> [KernelDefine; 3] {
        let (function, alpha, limit) = match self {
            Self::Silu => (0, 0.0, 0.0),
            Self::GeluTanh => (1, 0.0, 0.0),
            Self::ClampedSilu { alpha, limit } => (2, alpha, limit),
        };
        [("GATE", function), ("GATE_ALPHA", f32::to_bits(alpha)), ("GATE_LIMIT", limit.to_bits())]
    }
}
