//! Decoder-only model for any architecture: embedding, decoder layers, final norm and LM head.

use std::sync::Arc;

use super::{
    LmHead, MtpModule, PerLayerInputs, ResidualStream, RmsNormLayer, RotaryEmbedding,
    VocabParallelEmbedding,
};
use crate::config::ModelHead;
use crate::weight_table::SCORE;
use crate::{
    ForwardContext, ForwardError, LoadedModel, Model, ModelConfig, ModelLoadError, Weights,
};
use ops::Tensor;

/// Decoder-only model. `L` is the decoder layer type of the architecture.
#[derive(Debug)]
pub(crate) struct DecoderModel<L> {
    embed: Arc<VocabParallelEmbedding>,
    layers: Vec<L>,
    norm: RmsNormLayer,
    lm_head: LmHead,
    /// Factor of the embeddings at the start of the residual stream: embedding multiplier / residual
    /// multiplier.
    embedding_scale: f32,
    /// Per-layer inputs; `None` if the model has none.
    layer_inputs: Option<PerLayerInputs>,
    /// Residual multiplier. The stored residual stream times this factor is the hidden state.
    residual_scale: f32,
}

/// Decoder layer: attention and MLP. Each architecture file implements this trait.
pub(crate) trait DecoderLayer: Sized {
    /// Loads decoder layer `i`. Weight names in `w` are relative to the name prefix of this layer.
    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError>;

    /// Updates the residual stream `x` of shape `[tokens, hidden size]`. If `logits_indices`, i32 `[rows]`,
    /// are given, only the rows of the tokens at these indices remain in the stream after attention.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError>;

    /// Writes the keys and values of the tokens in `x`, `[tokens, hidden size]`, to the KV cache, for
    /// attention of later tokens; the content of `x` is undefined afterwards.
    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
    ) -> Result<(), ForwardError> {
        self.forward(f, x, None)
    }
}

impl<L: DecoderLayer + Send + 'static> DecoderModel<L> {
    /// Loads the decoder, and its MTP module if `ModelConfig::load_mtp` is set.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<LoadedModel, ModelLoadError> {
        let rope = RotaryEmbedding::load(config, w)?;
        let body = w.at("model");
        let (embed, lm_head) = LmHead::load_with_embedding(config, w)?;
        let embed = Arc::new(embed);
        let layer = |i| L::load(config, &body.at(format_args!("layers.{i}")), &rope, i);
        let layers = (0..config.layers).map(layer).collect::<Result<Vec<L>, _>>()?;
        let norm = RmsNormLayer::load(&body.at("norm"), config.stream_eps())?;
        let mtp = |i: usize| {
            let w = body.at(format_args!("layers.{i}"));
            MtpModule::<L>::load(config, &w, &rope, i, Arc::clone(&embed))
        };
        let mtp = config.load_mtp.then(|| mtp(config.layers)).transpose()?;
        let has_score = matches!(config.head, ModelHead::Classifier { .. });
        let score = has_score.then(|| w.host_matrix(SCORE)).transpose()?;
        let residual_scale = config.multipliers.residual;
        let embedding_scale = config.multipliers.embedding_in(w.ops().dtype()) / residual_scale;
        let layer_inputs = PerLayerInputs::load(config, w)?;
        let model =
            Self { embed, layers, norm, lm_head, embedding_scale, layer_inputs, residual_scale };
        Ok(LoadedModel { model: Box::new(model), score, mtp: mtp.map(|mtp| Box::new(mtp) as _) })
    }
}

impl<L: DecoderLayer + Send> Model for DecoderModel<L> {
    fn forward(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        let mut x = self.embed.forward(f, ids)?; // [tokens, hidden size]
        f.ops.scale(&mut x, self.embedding_scale)?;
        let layer_inputs = self.layer_inputs.as_ref();
        let layer_inputs = layer_inputs.map(|inputs| inputs.forward(f, ids, &x)).transpose()?;
        let x = ResidualStream::with_scale(x, self.residual_scale);
        let mut x = x.with_layer_inputs(layer_inputs);
        for (i, layer) in self.layers.iter().enumerate() {
            x.collect_aux_state(f, i)?;
            let last = i + 1 == self.layers.len();
            layer.forward(f, &mut x, f.logits_indices.filter(|_| last))?;
            x.probe_layer(f, i)?;
        }
        x.collect_aux_state(f, self.layers.len())?;
        x.final_normed(f, &self.norm)
    }

    fn embed(&self, f: &ForwardContext<'_>, ids: &Tensor) -> Result<Tensor, ForwardError> {
        self.embed.forward(f, ids)
    }

    fn logits(&self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        self.lm_head.full_logits(f, hidden)
    }

    fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.lm_head.shard_logits(f, hidden)
    }
}
