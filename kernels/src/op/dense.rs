//! Token embedding, RMS norms, elementwise ops, the gather of rows and the sum of rows for pooling.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::{GateActivation, PackedMatrix, QkChannelCounts};

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
/// activation type if the weight has that type. An f32 weight is multiplied in f32, and only `y` is rounded, as
/// in transformers `modeling_gemma3.py` and `modeling_gpt_oss.py`.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// Output, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Input, `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Weight `[hidden_size]`, in the type of `x` or in f32.
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
    /// Weight of the norm `[hidden_size]`, in the type of `x` or in f32 (see [`RmsNorm`]).
    pub weight: MatRef<'a>,
    /// Epsilon of the norm, added to the mean square.
    pub eps: f32,
}

/// Gated activation of an MLP: `y` is the activation function of gate and up.
#[derive(Debug)]
pub struct GatedActivation<'a> {
    /// Output, `[tokens, intermediate_size]`.
    pub y: MatMut<'a>,
    /// Input `[tokens, 2 intermediate_size]`: gate columns, then up columns.
    pub x: MatRef<'a>,
    /// Function of gate and up.
    pub activation: GateActivation,
}

/// Gated activation of separate matrices: `y` is the activation function of `gate` and `up`.
#[derive(Debug)]
pub struct GatedProduct<'a> {
    /// Output `[tokens, columns]`.
    pub y: MatMut<'a>,
    /// Gate, with the shape of `y`.
    pub gate: MatRef<'a>,
    /// Factor of the activated gate, with the shape of `y`.
    pub up: MatRef<'a>,
    /// Function of gate and up.
    pub activation: GateActivation,
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
/// 2408.00118, section 2).
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

impl GatedActivation<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, y, x) = ("gated_activation", self.y.as_ref(), self.x);
        check_size(kernel, "rows", y.rows(), x.rows())?;
        check_size(kernel, "columns", x.cols(), 2 * y.cols())?;
        check_dtype(kernel, "output", y.dtype(), x.dtype())
    }
}

impl GatedProduct<'_> {
    pub(crate) const KERNEL: &'static str = "gated_product";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let y = self.y.as_ref();
        for (x, what) in [(self.gate, "gate"), (self.up, "up")] {
            check_size(Self::KERNEL, "rows", x.rows(), y.rows())?;
            check_size(Self::KERNEL, "columns", x.cols(), y.cols())?;
            check_dtype(Self::KERNEL, what, x.dtype(), y.dtype())?;
        }
        Ok(())
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

/// Checks the element type of a norm weight: that of the activations, or f32.
pub(crate) fn check_norm_dtype(
    kernel: &'static str,
    what: &'static str,
    weight: DType,
    activations: DType,
) -> Result<(), DeviceError> {
    if weight == DType::F32 { Ok(()) } else { check_dtype(kernel, what, weight, activations) }
}

fn check_norm(y: MatRef<'_>, x: MatRef<'_>, w: MatRef<'_>) -> Result<(), DeviceError> {
    check_size(RMS_NORM, "rows", y.rows(), x.rows())?;
    check_size(RMS_NORM, "columns", y.cols(), x.cols())?;
    check_size(RMS_NORM, "weight", w.cols(), x.cols())?;
    check_dtype(RMS_NORM, "output", y.dtype(), x.dtype())?;
    check_norm_dtype(RMS_NORM, "weight", w.dtype(), x.dtype())
}

/// Sums of squares of a rank's queries and keys: `sums[t] = [Σ q[t]², Σ k[t]²]`.
#[derive(Debug)]
pub struct QkSquareSums<'a> {
    /// Sums, f32 `[tokens, 2]`, dense: queries, then keys.
    pub sums: MatMut<'a>,
    /// QKV projection, `[tokens, at least query + key channels]`.
    pub qkv: MatRef<'a>,
    /// Number of query and key channels.
    pub channels: QkChannelCounts,
}

/// RMS norm over all query heads together and over all key heads together, in place (OLMo 2, arXiv 2501.00656,
/// section 3.2): `q = weight · q / √(Σ q² / count + eps)`, computed in f32 and rounded once.
#[derive(Debug)]
pub struct QkFullNorm<'a> {
    /// QKV projection, `[tokens, at least query + key channels]`, updated in place.
    pub qkv: MatMut<'a>,
    /// Sums of squares over all tensor-parallel ranks, f32 `[tokens, 2]`, dense: queries, then keys.
    pub sums: MatRef<'a>,
    /// Weights `[1, query + key channels]` of this rank's queries, then of its keys.
    pub weight: MatRef<'a>,
    /// Number of query and key channels of this rank.
    pub channels: QkChannelCounts,
    /// Number of ranks whose squares `sums` contains; all ranks have equally many channels.
    pub ranks: usize,
    /// Epsilon of the norm, added to the mean square.
    pub eps: f32,
}

/// Attention temperature: multiplies the queries of each token by the factor of its position, in place (Llama 4;
/// transformers `get_llama_4_attn_scale` in `modeling_ministral3.py`).
#[derive(Debug)]
pub struct QueryTemperatureScaling<'a> {
    /// QKV projection, `[tokens, at least query channels]`, updated in place.
    pub qkv: MatMut<'a>,
    /// Factor of each position, f32 `[1, positions]`.
    pub factors: MatRef<'a>,
    /// Position of each token, i32 `[1, tokens]`; below the number of factors.
    pub positions: MatRef<'a>,
    /// Number of query channels, which are the first columns.
    pub query: usize,
}

impl QkSquareSums<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "qk_square_sums";
        check_channels(KERNEL, self.qkv.cols(), self.channels)?;
        check_sums(KERNEL, self.sums.as_ref(), self.qkv.rows())
    }
}

impl QkFullNorm<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "qk_full_norm";
        check_channels(KERNEL, self.qkv.cols(), self.channels)?;
        check_sums(KERNEL, self.sums, self.qkv.rows())?;
        let QkChannelCounts { query, key } = self.channels;
        check_size(KERNEL, "weights", self.weight.cols(), query + key)?;
        check_dtype(KERNEL, "weight", self.weight.dtype(), self.qkv.dtype())?;
        check_size(KERNEL, "ranks", self.ranks, self.ranks.max(1))
    }
}

impl QueryTemperatureScaling<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        const KERNEL: &str = "attention_temperature";
        check_channels(KERNEL, self.qkv.cols(), QkChannelCounts { query: self.query, key: 0 })?;
        check_size(KERNEL, "positions", self.positions.cols(), self.qkv.rows())?;
        check_dtype(KERNEL, "positions", self.positions.dtype(), DType::I32)?;
        check_dtype(KERNEL, "factors", self.factors.dtype(), DType::F32)
    }
}

/// Checks that a QKV projection of `cols` columns has the query and key channels.
fn check_channels(
    kernel: &'static str,
    cols: usize,
    channels: QkChannelCounts,
) -> Result<(), DeviceError> {
    let needed = channels.query + channels.key;
    check_size(kernel, "columns of qkv", cols, cols.max(needed))
}

fn check_sums(kernel: &'static str, sums: MatRef<'_>, tokens: usize) -> Result<(), DeviceError> {
    check_size(kernel, "rows of the sums", sums.rows(), tokens)?;
    check_size(kernel, "columns of the sums", sums.cols(), 2)?;
    check_size(kernel, "row stride of the sums", sums.stride(), 2)?;
    check_dtype(kernel, "sums", sums.dtype(), DType::F32)
}

/// Sums of hidden states by sequence slot, for mean pooling over chunked prompts:
/// `sums[seq_slots[r]] = (continues[r] ? sums[seq_slots[r]] : 0) + Σ x[t]`, where `t` runs over the tokens of row
/// `r` in order. Each sum is one chain of f32 additions in order of position, so that it does not depend on how
/// a prompt is divided into rows.
#[derive(Debug)]
pub struct HiddenStateSum<'a> {
    /// Sums by sequence slot; f32 `[seq_slots, hidden_size]`.
    pub sums: MatMut<'a>,
    /// Hidden states `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Prefix sums of the row lengths: row `r` has tokens `[cu_q[r], cu_q[r + 1])`; i32 `[rows + 1]`.
    pub cu_q: MatRef<'a>,
    /// Sequence slot of each row, different for all rows; i32 `[rows]`.
    pub seq_slots: MatRef<'a>,
    /// 1 = the row continues its sequence, 0 = it begins one; i32 `[rows]`.
    pub continues: MatRef<'a>,
}

impl HiddenStateSum<'_> {
    pub(crate) const KERNEL: &'static str = "pool_sum_rows";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let rows = self.seq_slots.cols();
        check_dtype(Self::KERNEL, "sums", self.sums.dtype(), DType::F32)?;
        check_size(Self::KERNEL, "columns", self.sums.cols(), self.x.cols())?;
        check_size(Self::KERNEL, "row boundaries", self.cu_q.cols(), rows + 1)?;
        check_size(Self::KERNEL, "row flags", self.continues.cols(), rows)?;
        for (what, array) in [
            ("row boundaries", self.cu_q),
            ("sequence slots", self.seq_slots),
            ("row flags", self.continues),
        ] {
            check_dtype(Self::KERNEL, what, array.dtype(), DType::I32)?;
        }
        Ok(())
    }
}
