//! RMS norm over all query heads together and over all key heads together, after the QKV projection.

use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{QkChannelCounts, QkFullNormWeights, Tensor};

/// QK norm over all heads (OLMo 2). The sums of squares are all-reduced over the tensor-parallel ranks.
#[derive(Debug)]
pub(crate) struct FullQkNorm {
    weight: Tensor, // [query channels + key channels of this rank]
    channels: QkChannelCounts,
    eps: f32,
}

impl FullQkNorm {
    /// Loads the norm of an attention layer; `None` if the architecture has no QK norm over all heads.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<Option<Self>, ModelLoadError> {
        if !config.full_qk_norm() {
            return Ok(None);
        }
        let ranks = w.ranks();
        let query = ranks.query_heads(config).map_err(|e| w.split("q_norm", e))?;
        let key = ranks.kv_heads(config).map_err(|e| w.split("k_norm", e))?;
        let [query, key] = [query, key].map(|heads| heads.len() * config.head_dim);
        let weight = w.stacked_vector(&["q_norm.weight", "k_norm.weight"])?;
        Ok(Some(Self { weight, channels: QkChannelCounts { query, key }, eps: config.rms_eps }))
    }

    /// Normalises the queries and keys of `qkv [tokens, query + key + value channels of this rank]`, in place.
    pub(crate) fn apply(
        &self,
        f: &ForwardContext<'_>,
        qkv: &mut Tensor,
    ) -> Result<(), ForwardError> {
        let Self { weight, channels, eps } = self;
        let ranks = f.tp.size();
        let mut sums = f.ops.qk_square_sums(qkv, *channels)?; // f32 [tokens, 2]
        if ranks > 1 {
            // A KV head that several ranks have is counted several times, both in the sum of squares and in
            // the number of channels, so that the mean square is correct.
            f.tp.all_reduce(f.ops.stream(), sums.mat_mut()?)?;
        }
        let norm = QkFullNormWeights { weight, channels: *channels, ranks, eps: *eps };
        Ok(f.ops.qk_full_norm(qkv, &sums, &norm)?)
    }
}
