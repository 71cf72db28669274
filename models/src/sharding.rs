//! Sharding of weights over ranks. The table in `weight_table.rs` has a [`ShardSpec`] for each weight;
//! [`ShardSpec::slice`] computes the rows and columns of the weight that a rank reads.
//!
//! Weights are stored as `[outputs, inputs]`, so that a split of the outputs (column parallel) splits the
//! rows of the stored matrix. If a dimension cannot be split evenly, an error with the dimension, its size
//! and the number of ranks is returned.

use crate::ModelConfig;
use crate::config::GatedDeltaConfig;
use ops::VocabShard;
use std::ops::Range;

/// Rule by which one weight is split over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardSpec {
    /// Every rank has the whole weight.
    Replicated,
    /// Rows of the vocabulary are split (vocab parallel); the shards of the last ranks are padded with zero
    /// rows.
    VocabRows,
    /// Outputs are split by attention head.
    Heads(AttentionHeadKind),
    /// Outputs are split into equal parts (column parallel).
    Cols,
    /// Inputs are split into equal parts that are multiples of the given unit, such as a channel or a head
    /// (row parallel); the partial products are all-reduced.
    Rows(SplitUnit),
    /// Only rank 0 has the weight. Used for biases that must be added only once to a sum over the ranks.
    FirstRankOnly,
    /// Outputs of an expert weight: split as `Cols`, or not split with expert parallelism.
    ExpertCols,
    /// Inputs of an expert weight: split as `Rows`, or not split with expert parallelism.
    ExpertRows,
    /// Bias of an expert's outputs: only rank 0 has it, or with expert parallelism every rank.
    ExpertFirstRank,
}

/// Kind of attention heads whose rows a projection computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionHeadKind {
    /// Query heads.
    Query,
    /// KV heads; if there are fewer heads than ranks, several ranks have the same head.
    KeyValue,
    /// Key and value of each query head, up-projected from compressed KV (MLA).
    MlaKvUp,
    /// Attention sinks: one row per query head.
    Sink,
    /// Query heads with the gates of their outputs.
    GatedQuery,
    /// Value heads of a gated delta net: one row per head.
    DeltaValue,
}

/// Group of input channels that a row-parallel split does not separate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitUnit {
    /// Single input channels: the split may be at any channel.
    Channel,
    /// All value channels of an attention head, which remain on one rank.
    Head,
    /// All value channels of a key head of a gated delta net.
    DeltaKeyHead,
}

/// Index of a rank on one parallel axis, and number of ranks on this axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelRank {
    /// Index of the rank, below `size`.
    pub rank: usize,
    /// Number of ranks on the axis.
    pub size: usize,
}

/// Index of this rank on each axis along which weights are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelRanks {
    /// Index of this rank and number of ranks on the tensor-parallel axis.
    pub tp: ParallelRank,
    /// Index of this rank and number of ranks on the expert-parallel axis. If the axis has one rank, experts
    /// are split like dense weights. Otherwise whole experts are distributed over all ranks of all replicas;
    /// the ranks of a replica have consecutive indices.
    pub ep: ParallelRank,
}

/// Part of a stored matrix that one rank reads; a vector is a matrix with one column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSlice {
    /// Range of rows of the stored matrix that the rank reads.
    pub rows: Range<usize>,
    /// Range of columns of the stored matrix that the rank reads.
    pub cols: Range<usize>,
    /// Number of zero rows that are appended to the stored rows.
    pub padding: usize,
}

/// A dimension cannot be split evenly over the ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} {count} cannot be split over {ranks} ranks; the nearest number that works is {nearest}"
)]
pub struct UnevenSplitError {
    /// Name of the dimension: a field of `config.json`, or a description.
    pub what: &'static str,
    /// Size of the dimension that cannot be split.
    pub count: usize,
    /// Requested number of ranks, over which the dimension cannot be split.
    pub ranks: usize,
    /// Nearest number of ranks over which the dimension can be split.
    pub nearest: usize,
}

/// The number of vocabulary rows per rank, including padding, is a multiple of this value.
const VOCAB_UNIT: usize = 64;

impl ParallelRank {
    /// The only rank of an axis whose parallel size is 1.
    pub const SINGLE: Self = Self { rank: 0, size: 1 };

    /// Range of the `count` items that belong to this rank; returns an error if the items cannot be split
    /// evenly. `what` is the name of the dimension in the error message.
    pub fn share(self, what: &'static str, count: usize) -> Result<Range<usize>, UnevenSplitError> {
        if !count.is_multiple_of(self.size) {
            let ranks = self.size;
            let divisors = (1..=count).filter(|d| count.is_multiple_of(*d));
            let nearest = divisors.min_by_key(|d| d.abs_diff(ranks)).unwrap_or(1);
            return Err(UnevenSplitError { what, count, ranks, nearest });
        }
        let per_rank = count / self.size;
        Ok(self.rank * per_rank..(self.rank + 1) * per_rank)
    }
}

impl ParallelRanks {
    /// Indices of the only rank of a model that runs on one device.
    pub const SINGLE: Self = Self { tp: ParallelRank::SINGLE, ep: ParallelRank::SINGLE };

    /// Range of the query heads that this rank computes.
    pub fn query_heads(&self, config: &ModelConfig) -> Result<Range<usize>, UnevenSplitError> {
        self.tp.share("num_attention_heads", config.heads)
    }

    /// Range of the KV heads that this rank computes; if there are more ranks than heads, several ranks have
    /// the same head.
    pub fn kv_heads(&self, config: &ModelConfig) -> Result<Range<usize>, UnevenSplitError> {
        const WHAT: &str = "num_key_value_heads";
        let (heads, size) = (config.kv_heads, self.tp.size);
        if heads >= size {
            return self.tp.share(WHAT, heads);
        }
        if !size.is_multiple_of(heads) {
            let nearest = size / heads * heads;
            return Err(UnevenSplitError { what: WHAT, count: heads, ranks: size, nearest });
        }
        let head = self.tp.rank * heads / size;
        Ok(head..head + 1)
    }

    /// Range of the key heads of a gated delta net that this rank computes.
    pub(crate) fn key_heads(
        &self,
        delta: &GatedDeltaConfig,
    ) -> Result<Range<usize>, UnevenSplitError> {
        self.tp.share("linear_num_key_heads", delta.key_heads)
    }

    /// Range of the vocabulary rows on this rank, and number of zero rows that are appended to them.
    #[must_use]
    pub fn vocab(&self, vocab: usize) -> (Range<usize>, usize) {
        let ParallelRank { rank, size } = self.tp;
        if size == 1 {
            return (0..vocab, 0);
        }
        let per_rank = vocab.next_multiple_of(VOCAB_UNIT * size) / size;
        let (start, end) = ((rank * per_rank).min(vocab), ((rank + 1) * per_rank).min(vocab));
        (start..end, per_rank - (end - start))
    }

    /// Describes this rank's shard of the vocabulary for vocab-parallel sampling.
    #[must_use]
    pub fn vocab_shard(&self, vocab: usize) -> VocabShard {
        let (ids, padding) = self.vocab(vocab);
        let cols = ids.len() + padding;
        VocabShard { first_id: ids.start, ids: ids.len(), cols, vocab, ranks: self.tp.size }
    }

    /// Range of the experts on this rank with expert parallelism, where each expert is wholly on one rank.
    pub fn experts(&self, experts: usize) -> Result<Range<usize>, UnevenSplitError> {
        self.ep.share("num_experts", experts)
    }
}

impl ShardSpec {
    /// Returns the part of a stored `[rows, cols]` matrix that the rank with the indices `ranks` reads. With
    /// expert parallelism, the result for an expert weight is the whole matrix; callers do not load the
    /// experts of other ranks.
    pub fn slice(
        self,
        [rows, cols]: [usize; 2],
        config: &ModelConfig,
        ranks: &ParallelRanks,
    ) -> Result<WeightSlice, UnevenSplitError> {
        let whole = WeightSlice { rows: 0..rows, cols: 0..cols, padding: 0 };
        let scaled = |r: Range<usize>, dim: usize| r.start * dim..r.end * dim;
        let heads = |r: Range<usize>| scaled(r, config.head_dim);
        let delta_heads = |each: fn(&GatedDeltaConfig) -> usize| match &config.gated_delta {
            Some(delta) => Ok(scaled(ranks.key_heads(delta)?, each(delta))),
            None => Ok(0..0),
        };
        let is_ep = ranks.ep.size > 1;
        Ok(match self {
            Self::Replicated => whole,
            Self::VocabRows => {
                let (rows, padding) = ranks.vocab(rows);
                WeightSlice { rows, padding, ..whole }
            }
            Self::Heads(AttentionHeadKind::Query) => {
                WeightSlice { rows: heads(ranks.query_heads(config)?), ..whole }
            }
            Self::Heads(AttentionHeadKind::KeyValue) => {
                WeightSlice { rows: heads(ranks.kv_heads(config)?), ..whole }
            }
            Self::Heads(AttentionHeadKind::MlaKvUp) => {
                let dim = config.mla.map_or(0, |mla| mla.qk_nope_head_dim + mla.v_head_dim);
                WeightSlice { rows: scaled(ranks.query_heads(config)?, dim), ..whole }
            }
            Self::Heads(AttentionHeadKind::Sink) => {
                WeightSlice { rows: ranks.query_heads(config)?, ..whole }
            }
            Self::Heads(AttentionHeadKind::GatedQuery) => WeightSlice {
                rows: scaled(ranks.query_heads(config)?, 2 * config.head_dim),
                ..whole
            },
            Self::Heads(AttentionHeadKind::DeltaValue) => {
                WeightSlice { rows: delta_heads(GatedDeltaConfig::heads_per_key)?, ..whole }
            }
            Self::Rows(SplitUnit::DeltaKeyHead) => {
                let channels = |delta: &GatedDeltaConfig| delta.heads_per_key() * delta.value_dim;
                WeightSlice { cols: delta_heads(channels)?, ..whole }
            }
            Self::ExpertCols | Self::ExpertRows | Self::ExpertFirstRank if is_ep => whole,
            Self::FirstRankOnly | Self::ExpertFirstRank if ranks.tp.rank == 0 => whole,
            Self::FirstRankOnly | Self::ExpertFirstRank => WeightSlice { rows: 0..0, ..whole },
            Self::Cols | Self::ExpertCols => {
                WeightSlice { rows: ranks.tp.share("output channels", rows)?, ..whole }
            }
            Self::Rows(SplitUnit::Channel) | Self::ExpertRows => {
                WeightSlice { cols: ranks.tp.share("input channels", cols)?, ..whole }
            }
            Self::Rows(SplitUnit::Head) => WeightSlice {
                cols: scaled(ranks.query_heads(config)?, config.value_dim()),
                ..whole
            },
        })
    }
}

impl WeightSlice {
    /// Number of elements that this rank reads from the stored matrix, without padding rows.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.rows.len() * self.cols.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight_table::tests::tiny;

    fn ranks(rank: usize, size: usize) -> ParallelRanks {
        ParallelRanks { tp: ParallelRank { rank, size }, ep: ParallelRank::SINGLE }
    }

    /// Shards of all ranks, formatted as ranges of rows and columns.
    fn split(shard: ShardSpec, shape: [usize; 2], size: usize) -> String {
        let config = tiny("Qwen3ForCausalLM"); // It has 4 query heads and 2 KV heads of 16 channels.
        let one = |rank| match shard.slice(shape, &config, &ranks(rank, size)) {
            Ok(WeightSlice { rows, cols, padding: 0 }) => format!("{rows:?}x{cols:?}"),
            Ok(WeightSlice { rows, cols, padding }) => format!("{rows:?}+{padding}x{cols:?}"),
            Err(e) => e.to_string(),
        };
        (0..size).map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn shards_are_sliced_by_spec() {
        let cases = [
            (ShardSpec::Replicated, [8, 4], 2, "0..8x0..4 0..8x0..4"),
            (ShardSpec::VocabRows, [272, 4], 1, "0..272x0..4"),
            (ShardSpec::VocabRows, [272, 4], 2, "0..192x0..4 192..272+112x0..4"),
            (
                ShardSpec::VocabRows,
                [130, 4],
                4,
                "0..64x0..4 64..128x0..4 128..130+62x0..4 130..130+64x0..4",
            ),
            (ShardSpec::Heads(AttentionHeadKind::Query), [64, 4], 2, "0..32x0..4 32..64x0..4"),
            (ShardSpec::Heads(AttentionHeadKind::KeyValue), [32, 4], 2, "0..16x0..4 16..32x0..4"),
            (
                ShardSpec::Heads(AttentionHeadKind::KeyValue),
                [32, 4],
                4,
                "0..16x0..4 0..16x0..4 16..32x0..4 16..32x0..4",
            ),
            (ShardSpec::Cols, [12, 4], 4, "0..3x0..4 3..6x0..4 6..9x0..4 9..12x0..4"),
            (ShardSpec::Rows(SplitUnit::Channel), [4, 12], 2, "0..4x0..6 0..4x6..12"),
            (ShardSpec::Rows(SplitUnit::Head), [4, 64], 2, "0..4x0..32 0..4x32..64"),
            (ShardSpec::FirstRankOnly, [4, 1], 2, "0..4x0..1 0..0x0..1"),
            (ShardSpec::ExpertFirstRank, [4, 1], 2, "0..4x0..1 0..0x0..1"),
            (ShardSpec::Heads(AttentionHeadKind::Sink), [4, 1], 2, "0..2x0..1 2..4x0..1"),
            (ShardSpec::ExpertCols, [12, 4], 2, "0..6x0..4 6..12x0..4"),
            (ShardSpec::ExpertRows, [4, 12], 2, "0..4x0..6 0..4x6..12"),
        ];
        for (shard, shape, size, expected) in cases {
            assert_eq!(split(shard, shape, size), expected, "{shard:?}");
        }
    }

    #[test]
    fn uneven_splits_are_rejected_with_the_numbers() {
        let nearest = "num_attention_heads 4 cannot be split over 3 ranks; \
                       the nearest number that works is 2";
        assert_eq!(
            split(ShardSpec::Heads(AttentionHeadKind::Query), [64, 4], 3),
            [nearest; 3].join(" ")
        );
        let error = ranks(0, 3).kv_heads(&tiny("Qwen3ForCausalLM")).unwrap_err();
        assert_eq!((error.count, error.ranks, error.nearest), (2, 3, 2));
        assert!(split(ShardSpec::Cols, [10, 4], 4).contains("output channels 10 cannot be split"));
    }

    #[test]
    fn expert_parallel_experts_are_whole() {
        let ep_ranks = ParallelRanks {
            tp: ParallelRank { rank: 1, size: 2 },
            ep: ParallelRank { rank: 1, size: 2 },
        };
        let config = tiny("Qwen3MoeForCausalLM");
        let slice = ShardSpec::ExpertCols.slice([12, 4], &config, &ep_ranks).unwrap();
        assert_eq!(slice, WeightSlice { rows: 0..12, cols: 0..4, padding: 0 });
        assert_eq!(ep_ranks.experts(8).unwrap(), 4..8);
        assert!(ep_ranks.experts(7).is_err());
    }
}
