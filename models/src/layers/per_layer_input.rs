//! Per-layer inputs (PLE): each layer receives channels that are computed from the token and from its embedding
//! (transformers `modeling_gemma4.py`).

use super::{ResidualStream, RmsNormLayer, VocabParallelEmbedding};
use crate::config::PerLayerInputConfig;
use crate::weight_table::PER_LAYER_EMBEDDING;
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{GateActivation, PackedLinear, Tensor};
use std::f32::consts::FRAC_1_SQRT_2;

/// Computes the inputs of all layers, `(norm(W e / √hidden) + √channels · E[id]) / √2`, where `e` is the scaled embedding
/// of a token and `E` an embedding of its own. The norm is over the channels of one layer.
#[derive(Debug)]
pub(crate) struct PerLayerInputs {
    embed: VocabParallelEmbedding,
    projection: PackedLinear,
    norm: RmsNormLayer,
    /// Factor of the rows of the embedding.
    embedding_scale: f32,
    /// Factor of the projection.
    projection_scale: f32,
    /// Number of channels of one layer.
    channels: usize,
}

impl PerLayerInputs {
    /// Loads the embedding and the projection; `None` if the model has no per-layer inputs.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<Option<Self>, ModelLoadError> {
        let Some(PerLayerInputConfig { channels, vocab }) = config.per_layer_input else {
            return Ok(None);
        };
        let body = w.at("model");
        let norm = RmsNormLayer::load(&body.at("per_layer_projection_norm"), config.rms_eps)?;
        let scale = (channels as f64).sqrt() as f32;
        Ok(Some(Self {
            embed: VocabParallelEmbedding::load(w, PER_LAYER_EMBEDDING, vocab)?,
            projection: body.linear(&["per_layer_model_projection"], false)?,
            norm,
            embedding_scale: config.multipliers.rounded_in(scale, w.ops().dtype()),
            projection_scale: (config.hidden as f64).powf(-0.5) as f32,
            channels,
        }))
    }

    /// Returns the inputs of all layers, `[tokens, layers · channels]`, for token ids `[tokens]` with the scaled
    /// embeddings `embedded [tokens, hidden size]`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        embedded: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut tokens = self.embed.forward(f, ids)?; // [tokens, layers · channels]
        f.ops.scale(&mut tokens, self.embedding_scale)?;
        let mut context = f.ops.linear(embedded, &self.projection)?;
        f.ops.scale(&mut context, self.projection_scale)?;
        let shape = [context.rows(), context.cols()];
        let by_layer = [context.len() / self.channels, self.channels];
        let context = self.norm.of(f, &context.reshape(&by_layer)?)?.reshape(&shape)?;
        let mut sum = f.ops.add(&context, &tokens)?;
        f.ops.scale(&mut sum, FRAC_1_SQRT_2)?;
        Ok(sum)
    }
}

/// MLP that adds the per-layer input of a layer to the residual stream: `x += norm(W (gelu(gate x) · input))`.
#[derive(Debug)]
pub(crate) struct LayerInputMlp {
    gate: PackedLinear,
    projection: PackedLinear,
    norm: RmsNormLayer,
    activation: GateActivation,
    /// First channel of the layer in the inputs of all layers.
    first: usize,
}

impl LayerInputMlp {
    /// Loads the MLP of layer `layer`; `None` if the model has no per-layer inputs.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        layer: usize,
    ) -> Result<Option<Self>, ModelLoadError> {
        let Some(PerLayerInputConfig { channels, .. }) = config.per_layer_input else {
            return Ok(None);
        };
        Ok(Some(Self {
            gate: w.linear(&["per_layer_input_gate"], false)?,
            projection: w.linear(&["per_layer_projection"], false)?,
            norm: RmsNormLayer::load(&w.at("post_per_layer_input_norm"), config.stream_eps())?,
            activation: config.gate_activation(),
            first: layer * channels,
        }))
    }

    /// Updates the residual stream `x`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
    ) -> Result<(), ForwardError> {
        let gate = f.ops.linear(x.summed(f)?, &self.gate)?; // [tokens, channels]
        let Some(inputs) = x.layer_inputs() else { return Ok(()) };
        let h = f.ops.gated_product(&gate, inputs, self.first, self.activation)?;
        let delta = f.ops.linear(&h, &self.projection)?; // [tokens, hidden size]
        x.add_norm_of(f, &delta, &self.norm)
    }
}
