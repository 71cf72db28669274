//! Embeddings, norms and elementwise ops. Legend: T tokens, H hidden size, V vocabulary, I intermediate size.

use device::{MatMut, MatRef};

use crate::PackedMatrix;

/// `y[t] = table[ids[t] - first]`, zeros where `ids[t] - first` is outside the table (vocab-parallel embedding).
#[derive(Debug)]
pub struct TokenEmbedding<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// i32 `[T]`
    pub ids: MatRef<'a>,
    /// `[V, H]`
    pub table: MatRef<'a>,
    /// Id of the first row of `table`.
    pub first: usize,
}

/// [`TokenEmbedding`] from a packed matrix: a tied embedding is stored once.
#[derive(Debug)]
pub struct PackedEmbedding<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// i32 `[T]`
    pub ids: MatRef<'a>,
    /// `[V, H]`
    pub table: &'a PackedMatrix,
    /// Id of the first row of `table`.
    pub first: usize,
}

/// `y = w · cast(x / sqrt(mean(x²) + eps))` (Zhang and Sennrich, 2019).
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// `[T, H]`
    pub x: MatRef<'a>,
    /// `[H]`
    pub weight: MatRef<'a>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `x += delta; y = rms_norm(x)`: the residual stream is rounded once.
#[derive(Debug)]
pub struct AddRmsNorm<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// Residual stream `[T, H]`, updated in place.
    pub x: MatMut<'a>,
    /// `[T, H]`
    pub delta: MatRef<'a>,
    /// `[H]`
    pub weight: MatRef<'a>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `y = silu(gate) · up`
#[derive(Debug)]
pub struct SiluMul<'a> {
    /// `[T, I]`
    pub y: MatMut<'a>,
    /// Gate columns, then up columns; `[T, 2 I]`
    pub x: MatRef<'a>,
}

/// `y = a + b`, all of one shape.
#[derive(Debug)]
pub struct TensorAdd<'a> {
    /// Output.
    pub y: MatMut<'a>,
    /// First summand.
    pub a: MatRef<'a>,
    /// Second summand.
    pub b: MatRef<'a>,
}

/// `y[i] = x[rows[i]]`
#[derive(Debug)]
pub struct RowGather<'a> {
    /// `[n, H]`
    pub y: MatMut<'a>,
    /// `[T, H]`
    pub x: MatRef<'a>,
    /// i32 `[n]`
    pub rows: MatRef<'a>,
}
