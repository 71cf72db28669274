//! Linear layers with packed weights, without and with fused ops.

use device::{MatMut, MatRef};

use crate::{LinearFusion, LinearPrologue, PackedMatrix};

/// Linear layer, `y = x Wᵀ + bias`.
#[derive(Debug)]
pub struct Linear<'a> {
    /// Output `[tokens, outputs]`, in f32 or the type of `x`.
    pub y: MatMut<'a>,
    /// Input, `[tokens, inputs]`.
    pub x: MatRef<'a>,
    /// Weights, `[outputs, inputs]`.
    pub weight: &'a PackedMatrix,
    /// Bias, f32 `[outputs]`.
    pub bias: Option<MatRef<'a>>,
}

/// [`Linear`] fused with the ops before and after it. GPU only; [`FusedLinear::supports`] gives the supported
/// shapes.
#[derive(Debug)]
pub struct FusedLinear<'a> {
    /// Output `[tokens, outputs]`, or `[tokens, outputs / 2]` with a fused gate activation.
    pub y: MatMut<'a>,
    /// Input, `[tokens, inputs]`.
    pub x: MatRef<'a>,
    /// Weights, `[outputs, inputs]`.
    pub weight: &'a PackedMatrix,
    /// Ops that are fused with the matrix product.
    pub fusion: &'a LinearFusion<'a>,
}

/// [`Linear`] applied to the output of the op `prologue`, in one op: the prologue output is quantised
/// directly instead of being written to memory in the activation type. GPU only; [`PrologueLinear::supports`]
/// gives the supported shapes.
#[derive(Debug)]
pub struct PrologueLinear<'a> {
    /// Output, `[tokens, outputs]`.
    pub y: MatMut<'a>,
    /// Op that computes the input `[tokens, inputs]`.
    pub prologue: LinearPrologue<'a>,
    /// Weights, `[outputs, inputs]`.
    pub weight: &'a PackedMatrix,
    /// Bias, f32 `[outputs]`.
    pub bias: Option<MatRef<'a>>,
}
