//! The vocabulary shard of a rank, and the types of vocab-parallel sampling: supported rows, and the
//! all-gather.

use device::{MatMut, MatRef};

/// The range of token ids for which a rank computes logits in a vocab-parallel LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabShard {
    /// First token id of the shard; a multiple of 64 unless the shard is empty.
    pub first_id: usize,
    /// Number of token ids in the shard.
    pub ids: usize,
    /// Number of logits columns, equal on every rank: the ids of the shard, plus padding columns at the end
    /// of the vocabulary.
    pub cols: usize,
    /// Vocabulary size: number of token ids on all ranks.
    pub vocab: usize,
    /// Number of ranks that share the LM head.
    pub ranks: usize,
}

impl VocabShard {
    /// Makes the shard of a single rank: the whole vocabulary.
    pub(crate) fn whole(vocab: usize) -> Self {
        Self { first_id: 0, ids: vocab, cols: vocab, vocab, ranks: 1 }
    }
}

/// Logits rows that a device can sample vocab-parallel, without gathering whole rows first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VocabParallelSupport {
    /// No rows: whole rows are gathered before sampling.
    Unsupported,
    /// Rows that sample a token without log-probabilities and have no filter, or whose first filter is top-k
    /// with a `k` of at most this value.
    TopK(usize),
    /// All rows, with any filters and log-probabilities.
    AllRules,
}

/// All-gather along columns: concatenates the local matrix `[rows, c]` of every rank (first argument) into a
/// matrix `[rows, C]` (second argument). The columns of rank `r` begin at column `r · c` of the result;
/// columns from index `C` on are dropped. Returns `false` if another rank has failed.
pub type AllGatherFn<'a> = dyn FnMut(MatRef<'_>, MatMut<'_>) -> bool + 'a;
