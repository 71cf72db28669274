//! Token embedding and head, split over `f.tp` by rows of the vocabulary, and one matrix if tied.

use crate::{Config, Forward, ForwardError, LoadError, Weights};
use ops::{Embedding, PackedLinear, Tensor};

/// Token ids to rows of a table; a rank gives zeros for ids it does not hold.
#[derive(Debug)]
pub(crate) struct VocabParallelEmbedding(Embedding);

/// Hidden states to logits.
#[derive(Debug)]
pub(crate) struct LmHead(PackedLinear);

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
            return Ok((VocabParallelEmbedding(head.tied_embedding(rows.start)), Self(head)));
        }
        let table = Embedding::from_rows(w.vocab_rows(EMBEDDING)?, rows.start);
        Ok((VocabParallelEmbedding(table), Self(w.vocab_linear("lm_head.weight")?)))
    }

    /// `hidden [T, H]` to the logits f32 `[n, V]` of `rows [n]`.
    pub(crate) fn forward(
        &self,
        f: &Forward<'_>,
        hidden: &Tensor,
        rows: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let wanted = f.ops.gather_rows(hidden, rows)?; // [n, H]
        Ok(f.ops.linear_f32(&wanted, &self.0)?) // [n, V]
    }
}
