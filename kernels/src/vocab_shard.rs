//! A rank's part of the vocabulary, and how ranks hear of each other's.

use device::{MatMut, MatRef};

/// The ids whose logits a rank has, where several share a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabShard {
    /// The first of them; a multiple of 64, unless there are none.
    pub first_id: usize,
    /// How many.
    pub ids: usize,
    /// Columns of every rank's logits: the ids, and padding behind the last ones of the vocabulary.
    pub cols: usize,
    /// Ids of all ranks.
    pub vocab: usize,
    /// Ranks.
    pub ranks: usize,
}

impl VocabShard {
    /// The part that is all of it.
    pub(crate) fn whole(vocab: usize) -> Self {
        Self { first_id: 0, ids: vocab, cols: vocab, vocab, ranks: 1 }
    }
}

/// Which questions a device answers out of parts of the rows that they are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VocabParallelSupport {
    /// None: rows are brought together before.
    Unsupported,
    /// Those that choose a token without log-probabilities, and cut first by a top-k of at most so many ids, or not at all.
    TopK(usize),
    /// All.
    AllRules,
}

/// Lays what the ranks bring, `own [n, c]`, side by side: `all [n, C]`, where columns from `r · c` on are those of rank `r`,
/// and those beyond `C` are left out. `false` = the others are gone.
pub type GatherFn<'a> = dyn FnMut(MatRef<'_>, MatMut<'_>) -> bool + 'a;
