//! The vocabulary shard of a rank, and the all-gather of vocab-parallel sampling.

use device::{MatMut, MatRef};

/// Token ids for which a rank computes logits in a vocab-parallel LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabShard {
    /// First token id of the shard; a multiple of 64 unless the shard is empty.
    pub first_id: usize,
    /// Number of token ids in the shard.
    pub ids: usize,
    /// Logits columns on every rank: the ids of its shard, padded at the end of the vocabulary.
    pub cols: usize,
    /// Vocabulary size: number of token ids on all ranks.
    pub vocab: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl VocabShard {
    /// Shard of a single rank: the whole vocabulary.
    pub(crate) fn whole(vocab: usize) -> Self {
        Self { first_id: 0, ids: vocab, cols: vocab, vocab, ranks: 1 }
    }
}

/// Logits rows that a device samples vocab-parallel, without gathering whole rows first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VocabParallelSupport {
    /// None: whole rows are gathered before sampling.
    Unsupported,
    /// Rows that sample a token without log-probabilities and have no filter, or top-k first, with at most
    /// this `k`.
    TopK(usize),
    /// All rows.
    AllRules,
}

/// All-gather of the ranks along columns: concatenates `own [n, c]` of all ranks to `all [n, C]`. Columns
/// from `r · c` on are those of rank `r`; columns after `C` are dropped. Returns `false` if another rank has
/// failed.
pub type GatherFn<'a> = dyn FnMut(MatRef<'_>, MatMut<'_>) -> bool + 'a;
