//! Token embedding and head, split over `f.tp` by rows of the vocabulary, and one matrix if tied.

use crate::weight_table::{EMBEDDING, HEAD};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{DType, EmbeddingTable, PackedLinear, Tensor};

/// Token ids to rows of a table; a rank gives zeros for ids it does not hold.
#[derive(Debug)]
pub(crate) struct VocabParallelEmbedding(EmbeddingTable);

/// Hidden states to logits.
#[derive(Debug)]
pub(crate) struct LmHead {
    /// This rank's rows of the vocabulary, and the zero rows that fill its share.
    head: PackedLinear,
    vocab: usize,
}

impl VocabParallelEmbedding {
    /// The matrix `name` of `vocab` rows.
    pub(crate) fn load(w: &Weights<'_>, name: &str, vocab: usize) -> Result<Self, ModelLoadError> {
        let (rows, _) = w.ranks().vocab(vocab);
        Ok(Self(EmbeddingTable::from_rows(w.vocab_rows(name)?, rows.start)))
    }

    /// `[T]` to `[T, H]`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut x = f.ops.embed(&self.0, ids)?;
        f.tp.all_reduce(f.ops.stream(), x.mat_mut()?)?;
        Ok(x)
    }
}

impl LmHead {
    /// Embedding and head. A tied matrix is held once, packed as the head wants it.
    pub(crate) fn load_with_embedding(
        config: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<(VocabParallelEmbedding, Self), ModelLoadError> {
        if config.tied {
            let (rows, _) = w.ranks().vocab(config.vocab);
            let head = w.vocab_linear(EMBEDDING)?;
            let embedding = VocabParallelEmbedding(head.tied_embedding(rows.start));
            return Ok((embedding, Self { head, vocab: config.vocab }));
        }
        let embedding = VocabParallelEmbedding::load(w, EMBEDDING, config.vocab)?;
        Ok((embedding, Self::load(w, HEAD, config.vocab)?))
    }

    /// The matrix `name` of `vocab` rows.
    pub(crate) fn load(w: &Weights<'_>, name: &str, vocab: usize) -> Result<Self, ModelLoadError> {
        Ok(Self { head: w.vocab_linear(name)?, vocab })
    }

    /// `hidden [n, H]` to the logits f32 `[n, V of this rank]`. On the last ranks columns of padding follow, see
    /// `ParallelRanks::vocab_shard`.
    pub(crate) fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        Ok(f.ops.linear_f32(hidden, &self.head)?)
    }

    /// The logits f32 `[n, V]`, the same on all ranks. Those of padding are left out, so no id without a meaning can
    /// win.
    pub(crate) fn full_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let own = self.shard_logits(f, hidden)?;
        if f.tp.size() == 1 {
            return Ok(own);
        }
        let mut all = f.ops.scratch(DType::F32, &[own.rows(), self.vocab])?;
        f.tp.all_gather(f.ops.stream(), own.mat()?, all.mat_mut()?)?;
        Ok(all) // [n, V]
    }
}
