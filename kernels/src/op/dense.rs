//! Embeddings, norms and elementwise ops. Legend: T tokens, H hidden size, V vocabulary, I intermediate size.

use device::{DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::PackedMatrix;

/// `y[t] = table[ids[t] - first]`; zeros if `ids[t] - first` is outside the table (vocab-parallel embedding).
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

/// `x = cap · tanh(x / cap)`, in place: soft-capping of attention logits and final logits (Gemma 2, arXiv
/// 2408.00118, section 2). No served model uses it today.
#[derive(Debug)]
pub struct LogitSoftcap<'a> {
    /// `[T, N]`
    pub x: MatMut<'a>,
    /// Bound of the results; not 0.
    pub cap: f32,
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

impl RmsNorm<'_> {
    /// Rejects shapes and types that contradict each other.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        check_norm(self.y.as_ref(), self.x, self.weight)
    }
}

impl AddRmsNorm<'_> {
    /// Rejects shapes and types that contradict each other.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, x, delta) = (RMS_NORM, self.x.as_ref(), self.delta);
        check_norm(self.y.as_ref(), x, self.weight)?;
        check_size(kernel, "rows of the addend", delta.rows(), x.rows())?;
        check_size(kernel, "columns of the addend", delta.cols(), x.cols())?;
        check_dtype(kernel, "addend", delta.dtype(), x.dtype())
    }
}

impl SiluMul<'_> {
    /// Rejects shapes and types that contradict each other.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, y, x) = ("silu_mul", self.y.as_ref(), self.x);
        check_size(kernel, "rows", y.rows(), x.rows())?;
        check_size(kernel, "columns", x.cols(), 2 * y.cols())?;
        check_dtype(kernel, "output", y.dtype(), x.dtype())
    }
}

impl TensorAdd<'_> {
    /// Rejects shapes and types that contradict each other.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, y) = ("add", self.y.as_ref());
        for (x, what) in [(self.a, "left"), (self.b, "right")] {
            check_size(kernel, "rows", x.rows(), y.rows())?;
            check_size(kernel, "columns", x.cols(), y.cols())?;
            check_dtype(kernel, what, x.dtype(), y.dtype())?;
        }
        Ok(())
    }
}

const RMS_NORM: &str = "rms_norm";

fn check_norm(y: MatRef<'_>, x: MatRef<'_>, w: MatRef<'_>) -> Result<(), DeviceError> {
    check_size(RMS_NORM, "rows", y.rows(), x.rows())?;
    check_size(RMS_NORM, "columns", y.cols(), x.cols())?;
    check_size(RMS_NORM, "weight", w.cols(), x.cols())?;
    check_dtype(RMS_NORM, "output", y.dtype(), x.dtype())?;
    check_dtype(RMS_NORM, "weight", w.dtype(), x.dtype())
}
