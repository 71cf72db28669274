//! Token embedding and head, split over `f.tp` by rows of the vocabulary, and one matrix if tied.

use crate::{Config, Forward, ForwardError, LoadError, Weights};
use ops::{DType, Embedding, PackedLinear, Tensor};

/// Token ids to rows of a table; a rank gives zeros for ids it does not hold.
#[derive(Debug)]
pub(crate) struct VocabParallelEmbedding(Embedding);

/// Hidden states to logits.
#[derive(Debug)]
pub(crate) struct LmHead {
    /// This rank's rows of the vocabulary, and the zero rows that fill its share.
    head: PackedLinear,
    vocab: usize,
}

impl VocabParallelEmbedding {
    /// `[T]` to `[T, H]`.
    pub(crate) fn forward(&self, f: &Forward<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        let mut x = f.ops.embed(&self.0, ids)?;
        f.tp.all_reduce(f.ops.stream(), x.mat_mut()?)?;
        Ok(x)
    }
}

impl LmHead {
    /// Embedding and head. A tied matrix is held once, packed as the head wants it.
    pub(crate) fn load_with_embedding(
        config: &Config,
        w: &Weights<'_>,
    ) -> Result<(VocabParallelEmbedding, Self), LoadError> {
        const EMBEDDING: &str = "model.embed_tokens.weight";
        let (rows, _) = w.ranks().vocab(config.vocab);
        if config.tied {
            let head = w.vocab_linear(EMBEDDING)?;
            let embedding = VocabParallelEmbedding(head.tied_embedding(rows.start));
            return Ok((embedding, Self { head, vocab: config.vocab }));
        }
        let table = Embedding::from_rows(w.vocab_rows(EMBEDDING)?, rows.start);
        let head = w.vocab_linear("lm_head.weight")?;
        Ok((VocabParallelEmbedding(table), Self { head, vocab: config.vocab }))
    }

    /// `hidden [n, H]` to the logits f32 `[n, V of this rank]`. On the last ranks columns of padding follow, see
    /// `Ranks::vocab_part`.
    pub(crate) fn own(&self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        Ok(f.ops.linear_f32(hidden, &self.head)?)
    }

    /// The logits f32 `[n, V]`, the same on all ranks. Those of padding are left out, so no id without a meaning can
    /// win.
    pub(crate) fn whole(&self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        let own = self.own(f, hidden)?;
        if f.tp.size() == 1 {
            return Ok(own);
        }
        let mut all = f.ops.scratch(DType::F32, &[own.rows(), self.vocab])?;
        f.tp.all_gather(f.ops.stream(), own.mat()?, all.mat_mut()?)?;
        Ok(all) // [n, V]
    }
}
