//! Linear layers. Legend: T tokens, K inputs, N outputs.

use device::{MatMut, MatRef};

use crate::{LinearFusion, LinearPrologue, PackedMatrix};

/// `y = x Wᵀ + bias`
#[derive(Debug)]
pub struct Linear<'a> {
    /// f32 or the dtype of `x`; `[T, N]`
    pub y: MatMut<'a>,
    /// `[T, K]`
    pub x: MatRef<'a>,
    /// `[N, K]`
    pub weight: &'a PackedMatrix,
    /// f32 `[N]`
    pub bias: Option<MatRef<'a>>,
}

/// [`Linear`] fused with the ops before and after it. GPU only; see [`FusedLinear::supports`].
#[derive(Debug)]
pub struct FusedLinear<'a> {
    /// `[T, N]`, or `[T, N / 2]` with `silu_mul`
    pub y: MatMut<'a>,
    /// `[T, K]`
    pub x: MatRef<'a>,
    /// `[N, K]`
    pub weight: &'a PackedMatrix,
    /// Ops fused with the product.
    pub fusion: &'a LinearFusion<'a>,
}

/// [`Linear`] on the output of `prologue`, which is not stored in the activation type. GPU only; see
/// [`PrologueLinear::supports`].
#[derive(Debug)]
pub struct PrologueLinear<'a> {
    /// `[T, N]`
    pub y: MatMut<'a>,
    /// Op that computes the input `[T, K]`.
    pub prologue: LinearPrologue<'a>,
    /// `[N, K]`
    pub weight: &'a PackedMatrix,
    /// f32 `[N]`
    pub bias: Option<MatRef<'a>>,
}
