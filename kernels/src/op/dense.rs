//! Token embedding, RMS norms, elementwise ops and the gather of rows.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::PackedMatrix;

/// Embedding lookup: `y[t] = table[ids[t] - first]`, or zeros if `ids[t] - first` is outside the table, which
/// occurs in a vocab-parallel embedding.
#[derive(Debug)]
pub struct TokenEmbedding<'a> {
    /// Embeddings, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Token ids, i32 `[tokens]`.
    pub ids: MatRef<'a>,
    /// Embedding table of this rank, `[vocab_size, hidden_size]`.
    pub table: MatRef<'a>,
    /// Token id of the first row of `table`.
    pub first: usize,
}

/// [`TokenEmbedding`] with a packed table: if the embedding is tied to the LM head, the weights are stored
/// only once, in packed form.
#[derive(Debug)]
pub struct PackedEmbedding<'a> {
    /// Embeddings, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Token ids, i32 `[tokens]`.
    pub ids: MatRef<'a>,
    /// Packed embedding table of this rank, `[vocab_size, hidden_size]`.
    pub table: &'a PackedMatrix,
    /// Token id of the first row of `table`.
    pub first: usize,
}

/// RMS norm, `y = w · cast(x / sqrt(mean(x²) + eps))` (Zhang and Sennrich, 2019); `cast` rounds to the
/// activation type.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// Output, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Input, `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Weight, `[hidden_size]`.
    pub weight: MatRef<'a>,
    /// Epsilon, added to the mean square.
    pub eps: f32,
}

/// Computes `x += delta`, then `y = rms_norm(x)`. The sum is rounded once, when it is stored to the residual
/// stream.
#[derive(Debug)]
pub struct AddRmsNorm<'a> {
    /// Output of the norm, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Residual stream `[tokens, hidden_size]`, updated in place.
    pub x: MatMut<'a>,
    /// Matrix that is added to the residual stream, `[tokens, hidden_size]`.
    pub delta: MatRef<'a>,
    /// Weight of the norm, `[hidden_size]`.
    pub weight: MatRef<'a>,
    /// Epsilon of the norm, added to the mean square.
    pub eps: f32,
}

/// Gated activation of an MLP, `y = silu(gate) · up`.
#[derive(Debug)]
pub struct SiluMul<'a> {
    /// Output, `[tokens, intermediate_size]`.
    pub y: MatMut<'a>,
    /// Input `[tokens, 2 intermediate_size]`: gate columns, then up columns.
    pub x: MatRef<'a>,
}

/// Elementwise sum `y = a + b` of matrices of one shape.
#[derive(Debug)]
pub struct TensorAdd<'a> {
    /// Sum, with the shape of `a` and `b`.
    pub y: MatMut<'a>,
    /// First summand.
    pub a: MatRef<'a>,
    /// Second summand.
    pub b: MatRef<'a>,
}

/// Soft-caps attention logits or final logits, `x = cap · tanh(x / cap)`, in place (Gemma 2, arXiv
/// 2408.00118, section 2). No served model uses it today.
#[derive(Debug)]
pub struct LogitSoftcap<'a> {
    /// Logits `[tokens, columns]`, replaced in place.
    pub x: MatMut<'a>,
    /// Bound on the absolute value of the results; not 0.
    pub cap: f32,
}

/// Multiplication by a scalar, `x = factor · x` in place.
#[derive(Debug)]
pub struct TensorScalarMul<'a> {
    /// Matrix `[rows, columns]`, replaced in place.
    pub x: MatMut<'a>,
    /// Factor of every element.
    pub factor: f32,
}

/// Addition of gated rows, `y[i] = y[i] + sigmoid(gate[i]) · x[i]` in place; adds the output of a shared
/// expert with a gate (transformers `modeling_qwen2_moe.py`).
#[derive(Debug)]
pub struct SigmoidGatedAdd<'a> {
    /// Sum `[tokens, columns]`, updated in place.
    pub y: MatMut<'a>,
    /// Rows that are added; same shape and type as `y`.
    pub x: MatRef<'a>,
    /// Gate logits, f32 `[tokens, 1]`.
    pub gate: MatRef<'a>,
}

/// Gather of rows: `y[i] = x[rows[i]]`.
#[derive(Debug)]
pub struct RowGather<'a> {
    /// Gathered rows, `[gathered_rows, hidden_size]`.
    pub y: MatMut<'a>,
    /// Source rows, `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Row index in `x` of each row of `y`; i32 `[gathered_rows]`.
    pub rows: MatRef<'a>,
}

impl SigmoidGatedAdd<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "gated_add";
        check_size(KERNEL, "rows", self.x.rows(), self.y.rows())?;
        check_size(KERNEL, "columns", self.x.cols(), self.y.cols())?;
        check_dtype(KERNEL, "input", self.x.dtype(), self.y.dtype())?;
        check_size(KERNEL, "gates", self.gate.rows(), self.y.rows())?;
        check_size(KERNEL, "columns of gates", self.gate.cols(), 1)?;
        check_dtype(KERNEL, "gate", self.gate.dtype(), DType::F32)
    }
}

impl RmsNorm<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        check_norm(self.y.as_ref(), self.x, self.weight)
    }
}

impl AddRmsNorm<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, x, delta) = (RMS_NORM, self.x.as_ref(), self.delta);
        check_norm(self.y.as_ref(), x, self.weight)?;
        check_size(kernel, "rows of the addend", delta.rows(), x.rows())?;
        check_size(kernel, "columns of the addend", delta.cols(), x.cols())?;
        check_dtype(kernel, "addend", delta.dtype(), x.dtype())
    }
}

impl SiluMul<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, y, x) = ("silu_mul", self.y.as_ref(), self.x);
        check_size(kernel, "rows", y.rows(), x.rows())?;
        check_size(kernel, "columns", x.cols(), 2 * y.cols())?;
        check_dtype(kernel, "output", y.dtype(), x.dtype())
    }
}

impl TensorAdd<'_> {
    /// Checks that shapes and types agree.
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
