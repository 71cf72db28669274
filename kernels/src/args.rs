//! Argument structs that several ops share: batch metadata of attention, RoPE tables, fusions of linear
//! layers, MoE routes and expert weights.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use crate::{GateActivation, GatedDeltaRule, PackedMatrix, PackedMatrixGroup};

/// Number of query channels and of key channels of a QKV projection `[tokens, query + key + value channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QkChannelCounts {
    /// Number of query channels, which are the first columns.
    pub query: usize,
    /// Number of key channels, which follow the query channels.
    pub key: usize,
}

/// Batch metadata of attention: how the tokens of a step are divided into rows, and the KV blocks of each
/// row. A row is a run of successive tokens of one request.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMetadata<'a> {
    /// Prefix sums of the row lengths: row `r` has tokens `[cu_q[r], cu_q[r + 1])`; i32 `[rows + 1]`.
    pub cu_q: MatRef<'a>,
    /// Context length of each row: number of keys, including those of the tokens of the row; i32 `[rows]`.
    pub context_lens: MatRef<'a>,
    /// Block ids in order of position; i32 `[tables, blocks]`. Entries for positions beyond the context
    /// length of a row are not read.
    pub block_tables: MatRef<'a>,
    /// Row `r` reads block table `table_rows[r]`; i32 `[rows]`. `None` = row `r` reads block table `r`.
    pub table_rows: Option<MatRef<'a>>,
    /// Upper bounds on token counts and context lengths, computed on the host without reading device memory.
    pub bounds: BatchUpperBounds,
}

/// Lengths of a row of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRowLengths {
    /// Tokens that the step computes.
    pub tokens: usize,
    /// Context length at the end of the step, in tokens.
    pub context: usize,
}

/// Upper bounds on the rows of a step. The host selects kernels, split factors and grid sizes from these
/// bounds; apart from rounding, results do not depend on the bounds. A captured graph can be replayed for
/// every step within the bounds that it was captured with. Tighter bounds only improve speed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BatchUpperBounds {
    /// Number of decode rows: rows with one token each, at the start of the batch, padding rows included.
    pub decode_rows: usize,
    /// Maximum number of decode rows that are successive tokens of one request: they share a block table, and
    /// each row sees one key more than the row before. 0 or 1: every decode row belongs to a different
    /// request.
    pub max_rows_per_request: usize,
    /// Maximum number of tokens of a row that is not a decode row.
    pub max_query_len: usize,
    /// Maximum context length of all rows, in keys.
    pub max_context_len: usize,
    /// Number of tokens up to the end of the last row that has fewer than
    /// [`MLA_PREFILL_TOKENS`](Self::MLA_PREFILL_TOKENS) tokens. Every later row is an MLA prefill row, which
    /// has at least that many tokens.
    pub mla_decode_tokens: usize,
    /// Sum of the context lengths of all MLA prefill rows, in keys.
    pub mla_prefill_keys: usize,
    /// Number of rows of more than [`GatedDeltaRule::RECURRENT_TOKENS`] tokens, whose gated delta rule is computed in
    /// chunks.
    pub chunked_rows: usize,
}

impl BatchUpperBounds {
    /// Maximum context length, in tokens, of the separate graph that is captured for single-row steps with a
    /// short context. Attention splits the keys of short and of long contexts differently, so long contexts
    /// need another graph.
    pub const SHORT_CONTEXT: usize = 2048;
    /// Minimum number of tokens of an MLA prefill row. On a GPU such a row uses non-absorbed MLA: keys and
    /// values of its whole context are up-projected from the compressed KV, which is less work than
    /// multiplying its queries by W_UKᵀ. By operation count both forms cost the same at
    /// `C (M + V) / (2 C − M − V)` tokens, 170 in DeepSeek-V3 (`C` = `kv_lora_rank`, `M` =
    /// `qk_nope_head_dim`, `V` = `v_head_dim`).
    pub const MLA_PREFILL_TOKENS: usize = 128;

    /// Returns the exact bounds of `rows`. `max_rows_per_request` is the maximum number of decode rows of one
    /// request.
    #[must_use]
    pub fn of(
        rows: impl IntoIterator<Item = BatchRowLengths>,
        max_rows_per_request: usize,
    ) -> Self {
        let mut bounds = Self { max_rows_per_request, ..Self::default() };
        let (mut end, mut leading) = (0, true);
        for BatchRowLengths { tokens, context } in rows {
            end += tokens;
            leading &= tokens == 1;
            if leading {
                bounds.decode_rows += 1;
            } else {
                bounds.max_query_len = bounds.max_query_len.max(tokens);
            }
            bounds.max_context_len = bounds.max_context_len.max(context);
            if tokens < Self::MLA_PREFILL_TOKENS {
                bounds.mla_decode_tokens = end;
            } else {
                bounds.mla_prefill_keys += context;
            }
            bounds.chunked_rows += usize::from(tokens > GatedDeltaRule::RECURRENT_TOKENS);
        }
        bounds
    }

    /// Returns bounds that hold for every batch of `tokens` tokens in `rows` non-empty rows, whatever the
    /// lengths of the rows. `positions`: number of positions that a block table covers.
    #[must_use]
    pub fn of_any(tokens: usize, rows: usize, positions: usize) -> Self {
        let decode_rows = if tokens == rows { rows } else { 0 };
        let max_query_len = tokens + 1 - rows.clamp(1, tokens + 1);
        let rows_of = |tokens_min: usize| {
            if max_query_len < tokens_min { 0 } else { rows.min(tokens / tokens_min) }
        };
        Self {
            decode_rows,
            max_rows_per_request: 1,
            max_query_len,
            max_context_len: positions,
            mla_decode_tokens: tokens,
            mla_prefill_keys: rows_of(Self::MLA_PREFILL_TOKENS) * positions,
            chunked_rows: rows_of(GatedDeltaRule::RECURRENT_TOKENS + 1),
        }
    }
}

/// RoPE tables, half pairing (NeoX): channel `i` is rotated with channel `i + rotary / 2`, for `rotary`
/// rotated channels.
#[derive(Debug, Clone, Copy)]
pub struct RopeCosSin<'a> {
    /// Cosines by position; f32 `[positions, rotary / 2]`.
    pub cos: MatRef<'a>,
    /// Sines by position; f32 `[positions, rotary / 2]`.
    pub sin: MatRef<'a>,
}

/// Arguments of [`QkNormRopeKvWrite`](crate::QkNormRopeKvWrite).
#[derive(Debug, Clone, Copy)]
pub struct QkNormRopeArgs<'a> {
    /// QKV projections `[tokens, (heads + 2 kv_heads) · head_dim]`: query heads, key heads, value heads.
    pub qkv: MatRef<'a>,
    /// Weight `[head_dim]` of the query norm, in the type of `qkv`, or in f32 (see
    /// [`RmsNorm`](crate::RmsNorm)); `None` = the model has no query norm.
    pub q_norm: Option<MatRef<'a>>,
    /// Weight `[head_dim]` of the key norm, in the type of `q_norm`; `None` = the model has no key norm.
    pub k_norm: Option<MatRef<'a>>,
    /// Epsilon of both RMS norms, added to the mean square.
    pub eps: f32,
    /// RoPE tables by position.
    pub rope: RopeCosSin<'a>,
    /// Position of each token; i32 `[tokens]`.
    pub positions: MatRef<'a>,
    /// KV slot of each token; i64 `[tokens]`. −1 = the key and value of the token are not stored.
    pub slots: MatRef<'a>,
    /// Number of query heads.
    pub heads: usize,
    /// Layer index in the KV pool.
    pub layer: usize,
    /// Scales of keys and of values in an fp8 KV pool.
    pub kv_scales: KvCacheScales<'a>,
}

/// Scales of the keys and values in an fp8 KV pool: each element is stored divided by its scale.
#[derive(Debug, Clone, Copy)]
pub enum KvCacheScales<'a> {
    /// One scale for all keys and one for all values of the layer. KV pools of other types ignore them.
    Layer {
        /// Scale of the keys.
        key: f32,
        /// Scale of the values.
        value: f32,
    },
    /// Factor of each head, f32 `[1, heads + 2 kv_heads]`: query heads, key heads, value heads. Queries, keys
    /// and values are multiplied by the factor of their head when they are stored. The factor of a key or value
    /// head is the reciprocal of its scale; the factor of a query head is the scale of its key head over the
    /// scale that the softmax scale includes. Only for fp8 KV pools.
    Heads(MatRef<'a>),
}

impl KvCacheScales<'_> {
    /// Keys and values are stored as they are.
    pub const UNIT: Self = Self::Layer { key: 1.0, value: 1.0 };
}

impl QkNormRopeArgs<'_> {
    /// Element type of the norm weights; `None` = the model has no query and key norms.
    pub(crate) fn norm_dtype(&self) -> Option<DType> {
        self.q_norm.or(self.k_norm).map(|weight| weight.dtype())
    }
}

/// Keys that the queries of a layer attend to, in addition to the causal mask.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttentionKeyRange {
    /// First position that attention reads; no query is at an earlier position. 1 in an MTP module or EAGLE-3
    /// layer, which has no KV entry for position 0; otherwise 0.
    pub first_position: usize,
    /// Size of the sliding window: maximum number of keys that a query attends to, including its own. `None`
    /// = the whole context.
    pub window: Option<usize>,
}

impl AttentionKeyRange {
    /// Returns the first key that the query at `position` attends to: `max(first_position, position + 1 −
    /// window)`.
    #[must_use]
    pub const fn first_key(self, position: usize) -> usize {
        let begin = match self.window {
            Some(window) => (position + 1).saturating_sub(window),
            None => 0,
        };
        if begin > self.first_position { begin } else { self.first_position }
    }
}

/// Arguments of [`PagedAttention`](crate::PagedAttention). No block table entry before the block of the first
/// key of a row is read.
#[derive(Debug, Clone, Copy)]
pub struct PagedAttentionArgs<'a> {
    /// Queries `[tokens, heads · head_dim]`.
    pub q: MatRef<'a>,
    /// Batch metadata: rows, context lengths and block tables.
    pub rows: AttentionMetadata<'a>,
    /// Number of query heads.
    pub heads: usize,
    /// Layer index in the KV pool.
    pub layer: usize,
    /// Factor of the attention scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Keys that the queries attend to.
    pub keys: AttentionKeyRange,
    /// Attention sinks: one score per query head, f32 `[1, heads]`, which is not multiplied by `scale`. It is
    /// added to the denominator of the softmax as the score of a key whose value is zero. `None` = no sinks.
    pub sinks: Option<MatRef<'a>>,
}

/// Ops that [`FusedLinear`](crate::FusedLinear) runs in the same launch as the matrix product. Results equal
/// those of the separate kernels.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearFusion<'a> {
    /// RMS norm of the input: its weight `[inputs]` in the type of the input, and its epsilon.
    pub norm: Option<(MatRef<'a>, f32)>,
    /// Bias added to the outputs; f32 `[outputs]`.
    pub bias: Option<MatRef<'a>>,
    /// Epilogue `y [tokens, outputs / 2]`: activation of gate and up; the first half of the outputs are the
    /// gates. `None` = `y` has all outputs.
    pub gate: Option<GateActivation>,
    /// Adds the product to `y` instead of overwriting `y`; used for the residual stream.
    pub add: bool,
    /// The linear layer that is launched next; the device may prefetch part of its weights during this
    /// launch.
    pub prefetch: Option<PrefetchHint<'a>>,
}

/// The linear layer that is launched next, whose weights a [`LinearFusion`] launch may prefetch. Results do
/// not depend on this hint.
#[derive(Debug, Clone, Copy)]
pub struct PrefetchHint<'a> {
    /// Weights of the next linear layer.
    pub weight: &'a PackedMatrix,
    /// Whether the next linear layer is a gate and up projection with a fused activation.
    pub gated: bool,
}

/// Prologue of [`PrologueLinear`](crate::PrologueLinear): the op that computes the input of the matrix
/// product. Results equal those of the separate kernels.
#[derive(Debug)]
pub enum LinearPrologue<'a> {
    /// `x += delta` on the residual stream `[tokens, inputs]`, then an RMS norm of `x`.
    AddNorm {
        /// The residual stream.
        x: MatMut<'a>,
        /// Matrix that is added to the residual stream, `[tokens, inputs]`.
        delta: MatRef<'a>,
        /// Weight of the norm, `[inputs]`, in the type of `x` or in f32 (see [`RmsNorm`](crate::RmsNorm)).
        norm: MatRef<'a>,
        /// Epsilon of the norm, added to the mean square.
        eps: f32,
    },
    /// Activation of the gate and up columns of a matrix.
    Gated {
        /// Gate columns, then up columns: `[tokens, 2 inputs]`.
        x: MatRef<'a>,
        /// Function of gate and up.
        activation: GateActivation,
    },
}

impl LinearPrologue<'_> {
    /// Number of rows (tokens) of the matrix product.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::AddNorm { x, .. } => x.rows(),
            Self::Gated { x, .. } => x.rows(),
        }
    }
}

/// Selected experts of each token and their routing weights.
#[derive(Debug, Clone, Copy)]
pub struct TopKRoutes<'a> {
    /// Expert indices of each token; i32 `[tokens, top_k]`.
    pub experts: MatRef<'a>,
    /// Routing weights of each token; f32 `[tokens, top_k]`.
    pub weights: MatRef<'a>,
}

/// Distribution of experts over the `ranks` expert-parallel (EP) ranks of an all-to-all: rank `r` has the
/// `experts_per_rank` experts from index `(r · rank_stride + rank_offset) · experts_per_rank` on. The other
/// experts belong to other ranks of the tensor-parallel group of a rank, which have the same tokens and take
/// part in other all-to-alls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertParallelLayout {
    /// Number of experts on each rank.
    pub experts_per_rank: usize,
    /// Number of ranks in the all-to-all.
    pub ranks: usize,
    /// Number of ranks that have the same tokens: the size of a tensor-parallel group, of which only one rank
    /// takes part in this all-to-all.
    pub rank_stride: usize,
    /// Index of this rank within its tensor-parallel group, whose ranks all have the same tokens.
    pub rank_offset: usize,
}

impl ExpertParallelLayout {
    /// Returns the index, within the all-to-all, of the rank that has `expert`; `None` if no rank of the
    /// all-to-all has `expert`.
    #[must_use]
    pub fn rank_of(&self, expert: i32) -> Option<usize> {
        let owner = usize::try_from(expert).ok()? / self.experts_per_rank.max(1);
        let rank = owner / self.rank_stride;
        (owner % self.rank_stride == self.rank_offset && rank < self.ranks).then_some(rank)
    }
}

/// Router logits, and the settings of softmax routing.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxRouterArgs<'a> {
    /// Logits before the softmax; f32 `[tokens, experts]`.
    pub logits: MatRef<'a>,
    /// Number of routed experts per token.
    pub top_k: usize,
    /// Whether the routing weights of a token are divided by their sum, so that they sum to 1.
    pub renormalise: bool,
    /// Number of shared experts, whose indices follow those of the routed experts: every token is routed to
    /// them in addition, with weight 1.
    pub shared: usize,
}

/// Weights of the experts on this rank.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// Global index of the first expert of this rank. Experts outside `[first_expert, first_expert + len)`
    /// are skipped, where `len` is the number of matrices in `gate_up`.
    pub first_expert: usize,
    /// Gate and up projections `[2 intermediate_size, hidden_size]` of each expert, gate rows first.
    pub gate_up: &'a PackedMatrixGroup,
    /// Down projections `[hidden_size, intermediate_size]` of each expert.
    pub down: &'a PackedMatrixGroup,
    /// Function that computes the input of a down projection from gate and up.
    pub activation: GateActivation,
    /// Biases of the gate and up projections of each expert, f32 `[len, 2 intermediate_size]`.
    pub gate_up_bias: Option<MatRef<'a>>,
    /// Biases of the down projection of each expert, f32 `[len, hidden_size]`. They are added before the
    /// multiplication by the routing weight.
    pub down_bias: Option<MatRef<'a>>,
}

impl<'a> ExpertWeights<'a> {
    /// Creates experts without biases, whose activation is SiLU.
    #[must_use]
    pub const fn unbiased(
        first_expert: usize,
        gate_up: &'a PackedMatrixGroup,
        down: &'a PackedMatrixGroup,
    ) -> Self {
        let activation = GateActivation::Silu;
        Self { first_expert, gate_up, down, activation, gate_up_bias: None, down_bias: None }
    }

    /// Whether a projection has biases.
    pub(crate) const fn has_biases(&self) -> bool {
        self.gate_up_bias.is_some() || self.down_bias.is_some()
    }

    /// Checks that the types and shapes of biases agree with the projections.
    pub(crate) fn check_biases(&self, kernel: &'static str) -> Result<(), DeviceError> {
        let all = [(self.gate_up_bias, self.gate_up), (self.down_bias, self.down)];
        for (bias, group) in all.into_iter().filter_map(|(bias, group)| Some((bias?, group))) {
            check_dtype(kernel, "expert bias", bias.dtype(), DType::F32)?;
            check_size(kernel, "rows of expert bias", bias.rows(), group.len())?;
            check_size(kernel, "columns of expert bias", bias.cols(), group.n())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn row(tokens: usize, context: usize) -> BatchRowLengths {
        BatchRowLengths { tokens, context }
    }

    #[test]
    fn row_bounds_separate_short_and_long_rows() {
        let long = BatchUpperBounds::MLA_PREFILL_TOKENS;
        let decodes = [row(1, 9), row(1, 0)];
        let prefills = [row(long, 900), row(long - 1, 400), row(long + 1, 300), row(long, 0)];
        let bounds = BatchUpperBounds::of(decodes.into_iter().chain(prefills), 2);
        let exact = BatchUpperBounds {
            decode_rows: 2,
            max_rows_per_request: 2,
            max_query_len: long + 1,
            max_context_len: 900,
            mla_decode_tokens: 2 * long + 1,
            mla_prefill_keys: 1200,
            chunked_rows: 4,
        };
        assert_eq!(bounds, exact);
        let decodes = BatchUpperBounds::of([row(1, 7), row(1, 8)], 1);
        assert_eq!(
            (decodes.mla_decode_tokens, decodes.mla_prefill_keys, decodes.max_query_len),
            (2, 0, 0)
        );
        let drafts = GatedDeltaRule::RECURRENT_TOKENS;
        let mixed = [row(1, 7), row(drafts, 50), row(drafts + 1, 60), row(1000, 1000)];
        assert_eq!(BatchUpperBounds::of(mixed, 1).chunked_rows, 2);
    }

    #[test]
    fn bounds_of_any_cover_the_worst_case() {
        let long = BatchUpperBounds::MLA_PREFILL_TOKENS;
        let lens =
            [vec![long; 4], vec![long - 1, 1], vec![3 * long, 1, 1], vec![18; 5], vec![1, 1, 1]];
        for lens in lens {
            let any = BatchUpperBounds::of_any(lens.iter().sum(), lens.len(), 5000);
            let exact = BatchUpperBounds::of(lens.iter().map(|&len| row(len, 5000)), 1);
            assert!(
                any.max_query_len >= exact.max_query_len
                    && any.mla_prefill_keys >= exact.mla_prefill_keys
            );
            assert!(any.mla_decode_tokens >= exact.mla_decode_tokens, "{lens:?}");
            assert!(any.chunked_rows >= exact.chunked_rows, "{lens:?}");
        }
    }
}

/// Size and element type of the matrix that an all-reduce sums.
#[derive(Debug, Clone, Copy)]
pub struct AllReduceShape {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Element type.
    pub dtype: DType,
}
