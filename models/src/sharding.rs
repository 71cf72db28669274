//! How a weight is split over ranks, as data: the table in `table.rs` names a [`ShardSpec`] per weight,
//! and [`ShardSpec::slice`] turns it into the rows and columns that one rank reads.
//!
//! Weights are stored `[outputs, inputs]`, so splitting the outputs ("columns" of the product) cuts
//! stored rows. A split that does not come out even is refused with the numbers.

use crate::ModelConfig;
use ops::VocabShard;
use std::ops::Range;

/// How one weight is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardSpec {
    /// Every rank holds all of it.
    Replicated,
    /// Vocabulary rows; the last rank's share is padded with zero rows.
    VocabRows,
    /// Outputs, by attention head.
    Heads(HeadKind),
    /// Outputs, in equal parts.
    Cols,
    /// Inputs, in equal parts that are multiples of the unit; the products are summed over ranks.
    Rows(SplitUnit),
    /// Held by rank 0 alone: a bias that is added once, before the sum over ranks.
    FirstRankOnly,
    /// Outputs of one expert: its owner holds it whole if experts are spread, else as `Cols`.
    ExpertCols,
    /// Inputs of one expert: likewise, else as `Rows`.
    ExpertRows,
}

/// Which heads a projection makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// Query heads.
    Query,
    /// Key and value heads; replicated if there are fewer than ranks.
    KeyValue,
    /// A key and a value of each query head, made of a latent.
    MlaKvUp,
}

/// What a split may not cut through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitUnit {
    /// One channel.
    Channel,
    /// The value channels of a head.
    Head,
}

/// One position on a parallel axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelRank {
    /// Position, below `size`.
    pub rank: usize,
    /// Ranks on the axis.
    pub size: usize,
}

/// Where this rank stands on the axes that split weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelRanks {
    /// Tensor parallel.
    pub tp: ParallelRank,
    /// Expert parallel: of size 1, experts are split like dense weights. Else they are spread over all ranks of all
    /// replicas, those of a replica one after the other.
    pub ep: ParallelRank,
}

/// The part of a stored matrix that a rank holds; a vector is a matrix of one column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSlice {
    /// Stored rows.
    pub rows: Range<usize>,
    /// Stored columns.
    pub cols: Range<usize>,
    /// Zero rows that follow.
    pub padding: usize,
}

/// A split that does not come out even.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} {count} cannot be split over {ranks} ranks; the nearest number that works is {nearest}"
)]
pub struct UnevenSplit {
    /// What is split.
    pub what: &'static str,
    /// How many there are.
    pub count: usize,
    /// Ranks asked for.
    pub ranks: usize,
    /// Closest number of ranks that divides the count.
    pub nearest: usize,
}

/// Rows of the padded vocabulary are a multiple of this on every rank.
const VOCAB_UNIT: usize = 64;

impl ParallelRank {
    /// The only rank of its axis.
    pub const SINGLE: Self = Self { rank: 0, size: 1 };

    /// This rank's share of `count` things, which must split evenly.
    pub fn share(self, what: &'static str, count: usize) -> Result<Range<usize>, UnevenSplit> {
        if !count.is_multiple_of(self.size) {
            let ranks = self.size;
            let divisors = (1..=count).filter(|d| count.is_multiple_of(*d));
            let nearest = divisors.min_by_key(|d| d.abs_diff(ranks)).unwrap_or(1);
            return Err(UnevenSplit { what, count, ranks, nearest });
        }
        let each = count / self.size;
        Ok(self.rank * each..(self.rank + 1) * each)
    }
}

impl ParallelRanks {
    /// A model on one device.
    pub const SINGLE: Self = Self { tp: ParallelRank::SINGLE, ep: ParallelRank::SINGLE };

    /// Query heads on this rank.
    pub fn query_heads(&self, config: &ModelConfig) -> Result<Range<usize>, UnevenSplit> {
        self.tp.share("num_attention_heads", config.heads)
    }

    /// Key and value heads on this rank; with more ranks than heads, several ranks hold the same one.
    pub fn kv_heads(&self, config: &ModelConfig) -> Result<Range<usize>, UnevenSplit> {
        const WHAT: &str = "num_key_value_heads";
        let (heads, size) = (config.kv_heads, self.tp.size);
        if heads >= size {
            return self.tp.share(WHAT, heads);
        }
        if !size.is_multiple_of(heads) {
            let nearest = size / heads * heads;
            return Err(UnevenSplit { what: WHAT, count: heads, ranks: size, nearest });
        }
        let head = self.tp.rank * heads / size;
        Ok(head..head + 1)
    }

    /// Vocabulary rows on this rank, and the zero rows behind them.
    #[must_use]
    pub fn vocab(&self, vocab: usize) -> (Range<usize>, usize) {
        let ParallelRank { rank, size } = self.tp;
        if size == 1 {
            return (0..vocab, 0);
        }
        let each = vocab.next_multiple_of(VOCAB_UNIT * size) / size;
        let (start, end) = ((rank * each).min(vocab), ((rank + 1) * each).min(vocab));
        (start..end, each - (end - start))
    }

    /// The same as those see it who choose among the logits of this rank.
    #[must_use]
    pub fn vocab_shard(&self, vocab: usize) -> VocabShard {
        let (ids, padding) = self.vocab(vocab);
        let cols = ids.len() + padding;
        VocabShard { first_id: ids.start, ids: ids.len(), cols, vocab, ranks: self.tp.size }
    }

    /// Experts on this rank.
    pub fn experts(&self, experts: usize) -> Result<Range<usize>, UnevenSplit> {
        self.ep.share("num_experts", experts)
    }
}

impl ShardSpec {
    /// The part of a stored `[rows, cols]` that the rank at `ranks` holds. Experts that a rank does
    /// not own are never asked for, so with spread experts the answer is the whole.
    pub fn slice(
        self,
        [rows, cols]: [usize; 2],
        config: &ModelConfig,
        ranks: &ParallelRanks,
    ) -> Result<WeightSlice, UnevenSplit> {
        let all = WeightSlice { rows: 0..rows, cols: 0..cols, padding: 0 };
        let of = |r: Range<usize>, dim: usize| r.start * dim..r.end * dim;
        let heads = |r: Range<usize>| of(r, config.head_dim);
        let spread = ranks.ep.size > 1;
        Ok(match self {
            Self::Replicated => all,
            Self::VocabRows => {
                let (rows, padding) = ranks.vocab(rows);
                WeightSlice { rows, padding, ..all }
            }
            Self::Heads(HeadKind::Query) => {
                WeightSlice { rows: heads(ranks.query_heads(config)?), ..all }
            }
            Self::Heads(HeadKind::KeyValue) => {
                WeightSlice { rows: heads(ranks.kv_heads(config)?), ..all }
            }
            Self::Heads(HeadKind::MlaKvUp) => {
                let dim =
                    config.mla.map_or(0, |latent| latent.qk_nope_head_dim + latent.v_head_dim);
                WeightSlice { rows: of(ranks.query_heads(config)?, dim), ..all }
            }
            Self::FirstRankOnly if ranks.tp.rank == 0 => all,
            Self::FirstRankOnly => WeightSlice { rows: 0..0, ..all },
            Self::ExpertCols | Self::ExpertRows if spread => all,
            Self::Cols | Self::ExpertCols => {
                WeightSlice { rows: ranks.tp.share("output channels", rows)?, ..all }
            }
            Self::Rows(SplitUnit::Channel) | Self::ExpertRows => {
                WeightSlice { cols: ranks.tp.share("input channels", cols)?, ..all }
            }
            Self::Rows(SplitUnit::Head) => {
                WeightSlice { cols: of(ranks.query_heads(config)?, config.value_dim()), ..all }
            }
        })
    }
}

impl WeightSlice {
    /// Elements read from the file.
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

    /// Shards of all ranks, written as row and column ranges.
    fn split(shard: ShardSpec, shape: [usize; 2], size: usize) -> String {
        let config = tiny("Qwen3ForCausalLM"); // 4 query heads, 2 KV heads of 16 channels.
        let one = |rank| match shard.slice(shape, &config, &ranks(rank, size)) {
            Ok(WeightSlice { rows, cols, padding: 0 }) => format!("{rows:?}x{cols:?}"),
            Ok(WeightSlice { rows, cols, padding }) => format!("{rows:?}+{padding}x{cols:?}"),
            Err(e) => e.to_string(),
        };
        (0..size).map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_shard_is_cut_as_the_table_says() {
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
            (ShardSpec::Heads(HeadKind::Query), [64, 4], 2, "0..32x0..4 32..64x0..4"),
            (ShardSpec::Heads(HeadKind::KeyValue), [32, 4], 2, "0..16x0..4 16..32x0..4"),
            (
                ShardSpec::Heads(HeadKind::KeyValue),
                [32, 4],
                4,
                "0..16x0..4 0..16x0..4 16..32x0..4 16..32x0..4",
            ),
            (ShardSpec::Cols, [12, 4], 4, "0..3x0..4 3..6x0..4 6..9x0..4 9..12x0..4"),
            (ShardSpec::Rows(SplitUnit::Channel), [4, 12], 2, "0..4x0..6 0..4x6..12"),
            (ShardSpec::Rows(SplitUnit::Head), [4, 64], 2, "0..4x0..32 0..4x32..64"),
            (ShardSpec::FirstRankOnly, [4, 1], 2, "0..4x0..1 0..0x0..1"),
            (ShardSpec::ExpertCols, [12, 4], 2, "0..6x0..4 6..12x0..4"),
            (ShardSpec::ExpertRows, [4, 12], 2, "0..4x0..6 0..4x6..12"),
        ];
        for (shard, shape, size, expected) in cases {
            assert_eq!(split(shard, shape, size), expected, "{shard:?}");
        }
    }

    #[test]
    fn uneven_splits_are_refused_with_the_numbers() {
        let nearest = "num_attention_heads 4 cannot be split over 3 ranks; \
                       the nearest number that works is 2";
        assert_eq!(split(ShardSpec::Heads(HeadKind::Query), [64, 4], 3), [nearest; 3].join(" "));
        let error = ranks(0, 3).kv_heads(&tiny("Qwen3ForCausalLM")).unwrap_err();
        assert_eq!((error.count, error.ranks, error.nearest), (2, 3, 2));
        assert!(split(ShardSpec::Cols, [10, 4], 4).contains("output channels 10 cannot be split"));
    }

    #[test]
    fn expert_parallel_experts_are_whole() {
        let spread = ParallelRanks {
            tp: ParallelRank { rank: 1, size: 2 },
            ep: ParallelRank { rank: 1, size: 2 },
        };
        let config = tiny("Qwen3MoeForCausalLM");
        let slice = ShardSpec::ExpertCols.slice([12, 4], &config, &spread).unwrap();
        assert_eq!(slice, WeightSlice { rows: 0..12, cols: 0..4, padding: 0 });
        assert_eq!(spread.experts(8).unwrap(), 4..8);
        assert!(spread.experts(7).is_err());
    }
}
