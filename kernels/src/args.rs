//! Arguments of kernels that take more than a handful.
//!
//! `T` tokens, `R` rows, `N` query heads, `K` KV heads, `D` head size, `E` experts, `W` table width.

use device::{MatMut, MatRef};

use crate::{PackedGroup, PackedMatrix};

/// How the tokens of a step belong to rows, and where their keys lie.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMetadata<'a> {
    /// Row `r` owns tokens `[cu_q[r], cu_q[r + 1])`; i32 `[R + 1]`.
    pub cu_q: MatRef<'a>,
    /// Keys of row `r`, its own tokens included; i32 `[R]`.
    pub context_lens: MatRef<'a>,
    /// Block tables in order of position; i32 `[S, W]`, entries behind a context are not read.
    pub block_tables: MatRef<'a>,
    /// Row `r` reads table `table_rows[r]`; i32 `[R]`. `None` = table `r`.
    pub table_rows: Option<MatRef<'a>>,
    /// What the host knows of the rows.
    pub bounds: RowBounds,
}

/// Bounds of the rows of a step. They choose kernels, cuts and grids, of results only the rounding, and a captured graph serves
/// every step within those it was captured with. Tighter bounds only run faster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowBounds {
    /// The first so many rows have one token each, padded rows included.
    pub decode_rows: usize,
    /// Of those, rows that are successive tokens of a request, one behind the other, at most: they share a table, and each sees one key
    /// more than the one before. Less than 2: no two do.
    pub max_rows_per_request: usize,
    /// Tokens of the longest row behind those.
    pub max_query_len: usize,
    /// Keys of the longest row of all.
    pub max_context_len: usize,
    /// Tokens of the step up to the last row of fewer than [`MLA_PREFILL_TOKENS`](Self::MLA_PREFILL_TOKENS): behind them all rows are long.
    pub mla_decode_tokens: usize,
    /// Keys of all long rows together.
    pub mla_prefill_keys: usize,
}

impl RowBounds {
    /// Contexts up to which a step of one row is worth a recording of its own: attention divides their keys otherwise.
    pub const SHORT_CONTEXT: usize = 2048;
    /// Tokens from which on a row is long: latent attention on a GPU makes keys and values of all that it sees, which is less work than
    /// taking its queries to the latents. By operations alone both cost the same at `C (M + V) / (2 C − M − V)`, 170 tokens in DeepSeek-V3.
    pub const MLA_PREFILL_TOKENS: usize = 128;

    /// Exact bounds of rows of so many tokens and keys each. Those of one token, in front, may be up to `successive` of a request.
    #[must_use]
    pub fn of(rows: impl IntoIterator<Item = (usize, usize)>, successive: usize) -> Self {
        let mut bounds = Self { max_rows_per_request: successive, ..Self::default() };
        let (mut tokens, mut in_front) = (0, true);
        for (own, context) in rows {
            tokens += own;
            in_front &= own == 1;
            if in_front {
                bounds.decode_rows += 1;
            } else {
                bounds.max_query_len = bounds.max_query_len.max(own);
            }
            bounds.max_context_len = bounds.max_context_len.max(context);
            if own < Self::MLA_PREFILL_TOKENS {
                bounds.mla_decode_tokens = tokens;
            } else {
                bounds.mla_prefill_keys += context;
            }
        }
        bounds
    }

    /// What holds for any `rows` rows of `tokens` tokens in all, none of them empty, and `positions`
    /// positions in a block table.
    #[must_use]
    pub fn of_any(tokens: usize, rows: usize, positions: usize) -> Self {
        let decode_rows = if tokens == rows { rows } else { 0 };
        let longest_q = tokens + 1 - rows.clamp(1, tokens + 1);
        let long_rows = if longest_q < Self::MLA_PREFILL_TOKENS {
            0
        } else {
            rows.min(tokens / Self::MLA_PREFILL_TOKENS)
        };
        Self {
            decode_rows,
            max_rows_per_request: 1,
            max_query_len: longest_q,
            max_context_len: positions,
            mla_decode_tokens: tokens,
            mla_prefill_keys: long_rows * positions,
        }
    }
}

/// Rotary embedding, half pairing: channel `i` turns with `i + rotary / 2`.
#[derive(Debug, Clone, Copy)]
pub struct RopeCosSin<'a> {
    /// Cosines by position; f32 `[P, rotary / 2]`.
    pub cos: MatRef<'a>,
    /// Sines by position; same shape.
    pub sin: MatRef<'a>,
}

/// Arguments of `qk_norm_rope_kv_write`.
#[derive(Debug, Clone, Copy)]
pub struct QkNormRopeArgs<'a> {
    /// Projections `[T, (N + 2 K) D]`: query heads, key heads, value heads.
    pub qkv: MatRef<'a>,
    /// Weight `[D]` of the query norm, if the model has one.
    pub q_norm: Option<MatRef<'a>>,
    /// Weight `[D]` of the key norm.
    pub k_norm: Option<MatRef<'a>>,
    /// Added to the mean square of both norms.
    pub eps: f32,
    /// Rotation by position.
    pub rope: RopeCosSin<'a>,
    /// Position of each token; i32 `[T]`.
    pub positions: MatRef<'a>,
    /// Slot of each token, −1 stores nothing; i64 `[T]`.
    pub slots: MatRef<'a>,
    /// Query heads.
    pub heads: usize,
    /// Layer of the pool.
    pub layer: usize,
    /// What keys and values are divided by before a pool in fp8 stores them; read by no other.
    pub kv_scales: [f32; 2],
}

/// Arguments of `paged_attention`.
#[derive(Debug, Clone, Copy)]
pub struct PagedAttentionArgs<'a> {
    /// Queries `[T, N D]`.
    pub q: MatRef<'a>,
    /// Rows, lengths, tables.
    pub rows: AttentionMetadata<'a>,
    /// Query heads.
    pub heads: usize,
    /// Layer of the pool.
    pub layer: usize,
    /// Factor of the scores, usually `D^-½`.
    pub scale: f32,
    /// Keys before this position are not seen, and nobody asks there: 0, or of a draft layer 1.
    pub first: usize,
}

/// What `linear_around` does in one launch beside the product. Results are those of the separate kernels.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearFusion<'a> {
    /// Weight `[K]` and epsilon of a root-mean-square norm of the input.
    pub norm: Option<(MatRef<'a>, f32)>,
    /// Added to the sums; f32 `[N]`.
    pub bias: Option<MatRef<'a>>,
    /// `y [T, N / 2] = silu(gate) · up` instead of the outputs, gate rows first.
    pub silu_mul: bool,
    /// `y += …` instead of `y = …`: the residual stream.
    pub add: bool,
    /// The product that reads its weights next: a device may bring some of them nearer meanwhile.
    pub prefetch: Option<PrefetchHint<'a>>,
}

/// A product to come: results never depend on it.
#[derive(Debug, Clone, Copy)]
pub struct PrefetchHint<'a> {
    /// Its weights.
    pub weight: &'a PackedMatrix,
    /// Whether it will be one of gate and up with `silu_mul`.
    pub silu_mul: bool,
}

/// What makes the inputs of a product that `linear_after` computes. Results are those of the separate kernels.
#[derive(Debug)]
pub enum LinearPrologue<'a> {
    /// `x += delta`, the residual stream `[T, K]`, then a root-mean-square norm of it with weight `[K]`.
    AddNorm {
        /// The residual stream.
        x: MatMut<'a>,
        /// What is added to it, `[T, K]`.
        delta: MatRef<'a>,
        /// Weight of the norm.
        norm: MatRef<'a>,
        /// What the mean of squares is raised by.
        eps: f32,
    },
    /// `silu(gate) · up` of `[T, 2 K]`, gate columns first.
    SiluMul(MatRef<'a>),
}

impl LinearPrologue<'_> {
    /// Rows of the product.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::AddNorm { x, .. } => x.rows(),
            Self::SiluMul(x) => x.rows(),
        }
    }
}

/// Which experts a token goes to, and with which weight.
#[derive(Debug, Clone, Copy)]
pub struct TopKRoutes<'a> {
    /// Expert of each choice; i32 `[T, k]`.
    pub experts: MatRef<'a>,
    /// Weight of each choice; f32 `[T, k]`.
    pub weights: MatRef<'a>,
}

/// Which experts lie on each of `size` ranks that send each other tokens: rank `r` holds `each` of them, from `(r · stride + offset) · each` on. Those
/// between belong to ranks that hold the same tokens as this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertParallelLayout {
    /// Experts on each rank.
    pub experts_per_rank: usize,
    /// Ranks that send each other tokens.
    pub ranks: usize,
    /// Ranks that hold the same tokens.
    pub rank_stride: usize,
    /// This rank among those.
    pub rank_offset: usize,
}

impl ExpertParallelLayout {
    /// The rank of `size` that holds an expert, if any of them does.
    #[must_use]
    pub fn rank_of(&self, expert: i32) -> Option<usize> {
        let holder = usize::try_from(expert).ok()? / self.experts_per_rank.max(1);
        let rank = holder / self.rank_stride;
        (holder % self.rank_stride == self.rank_offset && rank < self.ranks).then_some(rank)
    }
}

/// What a router says of all experts, and how many a token goes to.
#[derive(Debug, Clone, Copy)]
pub struct RouterLogits<'a> {
    /// f32 `[T, E]`, before the softmax.
    pub logits: MatRef<'a>,
    /// Choices of a token.
    pub top_k: usize,
    /// Whether a token's weights sum to 1.
    pub normalise: bool,
    /// Experts behind the last one, which every token goes to beside, with weight 1.
    pub shared: usize,
}

/// Weights of the experts on this rank.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// Global number of the first one; choices outside `[first, first + len)` are left out.
    pub first: usize,
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
