//! Vocab-parallel token embedding and LM head: the rows of both matrices are split over the ranks of `f.tp`,
//! the tensor-parallel group. If the weights are tied, both layers share one matrix.

use crate::weight_table::{EMBEDDING, HEAD};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{DType, EmbeddingTable, PackedLinear, Tensor};

/// Vocab-parallel embedding: for token ids outside of its shard, a rank contributes zeros to the all-reduce.
#[derive(Debug)]
pub(crate) struct VocabParallelEmbedding(EmbeddingTable);

/// Vocab-parallel LM head: each rank computes the logits of its shard of the vocabulary.
#[derive(Debug)]
pub(crate) struct LmHead {
    /// Vocabulary rows of this rank, followed by zero rows as padding.
    head: PackedLinear,
    vocab: usize,
    /// Factor of the logits.
    scale: f32,
    /// Logit softcap, which is applied after the factor.
    softcap: Option<f32>,
}

impl VocabParallelEmbedding {
    /// Loads the embedding matrix `name` with `vocab` rows.
    pub(crate) fn load(w: &Weights<'_>, name: &str, vocab: usize) -> Result<Self, ModelLoadError> {
        let (rows, _) = w.ranks().vocab(vocab);
        Ok(Self(EmbeddingTable::from_rows(w.vocab_rows(name)?, rows.start)))
    }

    /// Embeds token ids `[tokens]` to `[tokens, hidden size]`.
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
    /// Loads embedding and LM head. Tied weights are stored once, in the layout that the LM head needs.
    pub(crate) fn load_with_embedding(
        config: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<(VocabParallelEmbedding, Self), ModelLoadError> {
        let (scale, softcap) = (1.0 / config.multipliers.logits, config.logit_softcap);
        if config.tied {
            let (rows, _) = w.ranks().vocab(config.vocab);
            let head = w.vocab_linear(EMBEDDING)?;
            let embedding = VocabParallelEmbedding(head.tied_embedding(rows.start));
            return Ok((embedding, Self { head, vocab: config.vocab, scale, softcap }));
        }
        let embedding = VocabParallelEmbedding::load(w, EMBEDDING, config.vocab)?;
        Ok((embedding, Self { scale, softcap, ..Self::load(w, HEAD, config.vocab)? }))
    }

    /// Loads the LM head matrix `name` with `vocab` rows.
    pub(crate) fn load(w: &Weights<'_>, name: &str, vocab: usize) -> Result<Self, ModelLoadError> {
        Ok(Self { head: w.vocab_linear(name)?, vocab, scale: 1.0, softcap: None })
    }

    /// Computes the logits of this rank's shard of the vocabulary, f32 `[rows, token ids of this rank]`, from
    /// `hidden [rows, hidden size]`. On the last ranks, the columns of the shard are followed by padding
    /// columns: see `ParallelRanks::vocab_shard`.
    pub(crate) fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let logits = f.ops.scratch(DType::F32, &[hidden.rows(), self.head.outputs()])?;
        self.shard_logits_to(logits, f, hidden)
    }

    fn shard_logits_to(
        &self,
        logits: Tensor,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut logits = f.ops.linear_to(logits, hidden, &self.head)?;
        f.ops.scale(&mut logits, self.scale)?;
        if let Some(cap) = self.softcap {
            f.ops.softcap(&mut logits, cap)?;
        }
        Ok(logits)
    }

    /// Computes the logits of the whole vocabulary, f32 `[rows, vocabulary]`, equal on all ranks, in the memory of the caller
    /// if there is any. Padding columns are removed, so that no invalid token id can be sampled.
    pub(crate) fn full_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut all = f.output(DType::F32, [hidden.rows(), self.vocab])?;
        if f.tp.size() == 1 {
            return self.shard_logits_to(all, f, hidden);
        }
        let shard = self.shard_logits(f, hidden)?;
        f.tp.all_gather(f.ops.stream(), shard.mat()?, all.mat_mut()?)?;
        Ok(all) // [rows, vocabulary]
    }
}
