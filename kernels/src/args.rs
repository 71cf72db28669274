//! Argument structs of kernels with many arguments.
//!
//! Legend: `T` tokens, `R` rows, `N` query heads, `K` KV heads, `D` head size, `E` experts, `W` block table
//! width, `S` block tables.

use device::{MatMut, MatRef};

use crate::{PackedGroup, PackedMatrix};

/// Assignment of the tokens of a step to rows, and the block tables of their keys.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMetadata<'a> {
    /// Row `r` owns tokens `[cu_q[r], cu_q[r + 1])`; i32 `[R + 1]`.
    pub cu_q: MatRef<'a>,
    /// Context length of row `r` in keys, its own tokens included; i32 `[R]`.
    pub context_lens: MatRef<'a>,
    /// Block tables in order of position; i32 `[S, W]`. Entries after the end of a context are not read.
    pub block_tables: MatRef<'a>,
    /// Row `r` reads block table `table_rows[r]`; i32 `[R]`. `None` = row `r` reads block table `r`.
    pub table_rows: Option<MatRef<'a>>,
    /// Upper bounds on the rows, known to the host.
    pub bounds: RowBounds,
}

/// Upper bounds on the rows of a step. They select kernels, split factors and grid sizes; of the results,
/// only the rounding depends on them. A captured graph serves every step within the bounds that it was
/// captured with. Tighter bounds only improve speed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowBounds {
    /// Number of leading rows with one token each, padding rows included.
    pub decode_rows: usize,
    /// Maximum number of those rows that are successive tokens of one request: they share a block table, and
    /// each row sees one key more than the row before. Below 2: no two rows belong to one request.
    pub max_rows_per_request: usize,
    /// Maximum number of tokens of a row after the decode rows.
    pub max_query_len: usize,
    /// Maximum context length of all rows, in keys.
    pub max_context_len: usize,
    /// Number of tokens up to the end of the last row with fewer than
    /// [`MLA_PREFILL_TOKENS`](Self::MLA_PREFILL_TOKENS) tokens: every later row is an MLA prefill row.
    pub mla_decode_tokens: usize,
    /// Sum of the context lengths of all MLA prefill rows, in keys.
    pub mla_prefill_keys: usize,
}

impl RowBounds {
    /// Maximum context length, in tokens, for which a step of one row has a captured graph of its own:
    /// attention splits the keys of short and long contexts differently.
    pub const SHORT_CONTEXT: usize = 2048;
    /// Minimum number of tokens of an MLA prefill row. On a GPU such a row uses non-absorbed MLA: keys and
    /// values of its whole context are up-projected from the compressed KV, which is less work than
    /// multiplying its queries by W_UKᵀ. By operation count both forms cost the same at
    /// `C (M + V) / (2 C − M − V)` tokens, 170 in DeepSeek-V3 (`C` = `kv_lora_rank`, `M` =
    /// `qk_nope_head_dim`, `V` = `v_head_dim`).
    pub const MLA_PREFILL_TOKENS: usize = 128;

    /// Returns the exact bounds of rows given as (tokens, context length). Up to `max_rows_per_request` of
    /// the leading one-token rows may belong to one request.
    #[must_use]
    pub fn of(rows: impl IntoIterator<Item = (usize, usize)>, max_rows_per_request: usize) -> Self {
        let mut bounds = Self { max_rows_per_request, ..Self::default() };
        let (mut end, mut leading) = (0, true);
        for (tokens, context) in rows {
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
        }
        bounds
    }

    /// Returns bounds that hold for any `rows` non-empty rows with `tokens` tokens in total and block tables
    /// of `positions` positions.
    #[must_use]
    pub fn of_any(tokens: usize, rows: usize, positions: usize) -> Self {
        let decode_rows = if tokens == rows { rows } else { 0 };
        let max_query_len = tokens + 1 - rows.clamp(1, tokens + 1);
        let long_rows = if max_query_len < Self::MLA_PREFILL_TOKENS {
            0
        } else {
            rows.min(tokens / Self::MLA_PREFILL_TOKENS)
        };
        Self {
            decode_rows,
            max_rows_per_request: 1,
            max_query_len,
            max_context_len: positions,
            mla_decode_tokens: tokens,
            mla_prefill_keys: long_rows * positions,
        }
    }
}

/// RoPE tables, half pairing (NeoX): channel `i` is rotated with channel `i + rotary / 2`.
#[derive(Debug, Clone, Copy)]
pub struct RopeCosSin<'a> {
    /// Cosines by position; f32 `[P, rotary / 2]`.
    pub cos: MatRef<'a>,
    /// Sines by position; same shape.
    pub sin: MatRef<'a>,
}

/// Arguments of [`QkNormRopeKvWrite`](crate::QkNormRopeKvWrite).
#[derive(Debug, Clone, Copy)]
pub struct QkNormRopeArgs<'a> {
    /// QKV projections `[T, (N + 2 K) D]`: query heads, key heads, value heads.
    pub qkv: MatRef<'a>,
    /// Weight `[D]` of the query norm; `None` = the model has no query norm.
    pub q_norm: Option<MatRef<'a>>,
    /// Weight `[D]` of the key norm; `None` = the model has no key norm.
    pub k_norm: Option<MatRef<'a>>,
    /// Added to the mean square of both norms.
    pub eps: f32,
    /// RoPE tables by position.
    pub rope: RopeCosSin<'a>,
    /// Position of each token; i32 `[T]`.
    pub positions: MatRef<'a>,
    /// KV slot of each token, −1 stores nothing; i64 `[T]`.
    pub slots: MatRef<'a>,
    /// Number of query heads.
    pub heads: usize,
    /// Layer index in the KV pool.
    pub layer: usize,
    /// Scales of keys and values: an fp8 KV pool stores each element divided by its scale. Other pools ignore
    /// them.
    pub kv_scales: [f32; 2],
}

/// Arguments of [`PagedAttention`](crate::PagedAttention).
#[derive(Debug, Clone, Copy)]
pub struct PagedAttentionArgs<'a> {
    /// Queries `[T, N D]`.
    pub q: MatRef<'a>,
    /// Rows, context lengths and block tables.
    pub rows: AttentionMetadata<'a>,
    /// Number of query heads.
    pub heads: usize,
    /// Layer index in the KV pool.
    pub layer: usize,
    /// Factor of the attention scores, usually `D^-½`.
    pub scale: f32,
    /// First position that attention reads; no query is at an earlier position. 1 in an MTP module or EAGLE-3
    /// layer, which has no KV entry for position 0; otherwise 0.
    pub first_position: usize,
}

/// Ops that [`FusedLinear`](crate::FusedLinear) runs in the launch of the product. Results equal those of the
/// separate kernels.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearFusion<'a> {
    /// Weight `[K]` and epsilon of an RMS norm of the input.
    pub norm: Option<(MatRef<'a>, f32)>,
    /// Bias added to the outputs; f32 `[N]`.
    pub bias: Option<MatRef<'a>>,
    /// Epilogue `y [T, N / 2] = silu(gate) · up`; the first half of the outputs are the gates.
    pub silu_mul: bool,
    /// `y += …` instead of `y = …`, for the residual stream.
    pub add: bool,
    /// Linear layer that reads its weights next: the device may prefetch part of them during this launch.
    pub prefetch: Option<PrefetchHint<'a>>,
}

/// Next linear layer, as a prefetch hint. Results do not depend on it.
#[derive(Debug, Clone, Copy)]
pub struct PrefetchHint<'a> {
    /// Weights of the next linear layer.
    pub weight: &'a PackedMatrix,
    /// Whether the next linear layer is a gate and up projection with `silu_mul`.
    pub silu_mul: bool,
}

/// Prologue of [`PrologueLinear`](crate::PrologueLinear): computes the inputs of the product. Results equal
/// those of the separate kernels.
#[derive(Debug)]
pub enum LinearPrologue<'a> {
    /// `x += delta` on the residual stream `[T, K]`, then an RMS norm of `x` with weight `[K]`.
    AddNorm {
        /// The residual stream.
        x: MatMut<'a>,
        /// Summand of the residual stream, `[T, K]`.
        delta: MatRef<'a>,
        /// Weight of the norm.
        norm: MatRef<'a>,
        /// Added to the mean square.
        eps: f32,
    },
    /// `silu(gate) · up` of `[T, 2 K]`, gate columns first.
    SiluMul(MatRef<'a>),
}

impl LinearPrologue<'_> {
    /// Number of rows of the product.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::AddNorm { x, .. } => x.rows(),
            Self::SiluMul(x) => x.rows(),
        }
    }
}

/// Selected experts of each token and their routing weights.
#[derive(Debug, Clone, Copy)]
pub struct TopKRoutes<'a> {
    /// Expert indices of each token; i32 `[T, k]`.
    pub experts: MatRef<'a>,
    /// Routing weights of each token; f32 `[T, k]`.
    pub weights: MatRef<'a>,
}

/// Distribution of experts over the `ranks` expert-parallel (EP) ranks of an all-to-all: rank `r` has the
/// `experts_per_rank` experts from `(r · rank_stride + rank_offset) · experts_per_rank` on. Experts between
/// these ranges belong to ranks that have the same tokens as this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertParallelLayout {
    /// Number of experts on each rank.
    pub experts_per_rank: usize,
    /// Number of ranks in the all-to-all.
    pub ranks: usize,
    /// Number of ranks that have the same tokens.
    pub rank_stride: usize,
    /// Index of this rank among the ranks with the same tokens.
    pub rank_offset: usize,
}

impl ExpertParallelLayout {
    /// Returns the rank of the all-to-all that has an expert, if any of its ranks has it.
    #[must_use]
    pub fn rank_of(&self, expert: i32) -> Option<usize> {
        let owner = usize::try_from(expert).ok()? / self.experts_per_rank.max(1);
        let rank = owner / self.rank_stride;
        (owner % self.rank_stride == self.rank_offset && rank < self.ranks).then_some(rank)
    }
}

/// Router logits and the number of experts per token.
#[derive(Debug, Clone, Copy)]
pub struct RouterLogits<'a> {
    /// Logits before the softmax; f32 `[T, E]`.
    pub logits: MatRef<'a>,
    /// Number of routed experts per token.
    pub top_k: usize,
    /// Whether a token's weights sum to 1.
    pub renormalise: bool,
    /// Number of shared experts, at indices `E..E + shared`: every token is routed to them in addition, with
    /// weight 1.
    pub shared: usize,
}

/// Weights of the experts on this rank.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// Global index of the first expert; experts outside `[first_expert, first_expert + len)` are skipped.
    pub first_expert: usize,
    /// Gate and up projections `[2 I, H]`, gate rows first.
    pub gate_up: &'a PackedGroup,
    /// Down projections `[H, I]`.
    pub down: &'a PackedGroup,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_bounds_separate_short_and_long_rows() {
        let long = RowBounds::MLA_PREFILL_TOKENS;
        let rows = [(1, 9), (1, 0), (long, 900), (long - 1, 400), (long + 1, 300), (long, 0)];
        let bounds = RowBounds::of(rows, 2);
        let exact = RowBounds {
            decode_rows: 2,
            max_rows_per_request: 2,
            max_query_len: long + 1,
            max_context_len: 900,
            mla_decode_tokens: 2 * long + 1,
            mla_prefill_keys: 1200,
        };
        assert_eq!(bounds, exact);
        let decodes = RowBounds::of([(1, 7), (1, 8)], 1);
        assert_eq!(
            (decodes.mla_decode_tokens, decodes.mla_prefill_keys, decodes.max_query_len),
            (2, 0, 0)
        );
    }

    #[test]
    fn bounds_of_any_cover_the_worst_case() {
        let long = RowBounds::MLA_PREFILL_TOKENS;
        for lens in [vec![long; 4], vec![long - 1, 1], vec![3 * long, 1, 1], vec![1, 1, 1]] {
            let any = RowBounds::of_any(lens.iter().sum(), lens.len(), 5000);
            let exact = RowBounds::of(lens.iter().map(|&len| (len, 5000)), 1);
            assert!(
                any.max_query_len >= exact.max_query_len
                    && any.mla_prefill_keys >= exact.mla_prefill_keys
            );
            assert!(any.mla_decode_tokens >= exact.mla_decode_tokens, "{lens:?}");
        }
    }
}
