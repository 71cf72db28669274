//! Types and parser of a model's `config.json` and `generation_config.json`.
//!
//! Each field that changes the arithmetic is either supported or rejected with an error that names the file
//! and the field: if a feature were ignored silently, the model would generate fluent but wrong text.

mod architecture;
mod architecture_rules;
mod architecture_traits;
mod config_overrides;
#[cfg(test)]
mod deepseek_tests;
mod eagle3;
mod error;
#[cfg(test)]
mod family_tests;
mod gated_delta;
mod gemma3;
#[cfg(test)]
mod gemma3_tests;
mod gemma4;
#[cfg(test)]
mod gemma4_tests;
mod generation;
#[cfg(test)]
mod gpt_oss_tests;
mod heads;
mod json_fields;
mod layer_attention;
mod layer_rope;
mod layer_shapes;
mod mla;
mod model_head;
mod moe;
mod multipliers;
mod parse_config;
mod quantization;
#[cfg(test)]
mod quantization_tests;
mod rope;
mod temperature;
#[cfg(test)]
mod tests;
mod text_part;

pub use architecture::ModelArchitecture;
pub use eagle3::Eagle3Config;
pub use error::ModelConfigError;
pub use gated_delta::GatedDeltaConfig;
pub use generation::GenerationConfig;
pub use layer_attention::LayerAttentionConfig;
pub use layer_shapes::{KvProjectionKind, LayerShapeConfig};
pub use model_head::ModelHead;
pub use multipliers::ActivationMultipliers;
pub(crate) use quantization::MXFP4_GROUP;
pub use quantization::{
    ActivationScheme, CheckpointScaleGranularity, LayerQuantization, ModulePattern,
    QuantizationConfig, QuantizationGroup, QuantizationTarget,
};
pub use rope::{RopeConfig, RopeScaling};
pub use temperature::AttentionTemperatureConfig;

use self::architecture_rules::QkNormKind;
use self::architecture_traits::ArchitectureTraits;
use crate::foreign_formats::folder_format_hint;
use crate::weights::{RotaryPairKind, RotaryRowOrder};
pub(crate) use architecture_rules::{
    DecoderLayerKind, StackedRowKind, StoredExpertKind, SynthTokenizerKind,
};
use ops::{ExpertGroups, GateActivation, RouterScoreFunction};
use serde_json::{Map, Value};
use std::path::Path;

/// Settings that define the arithmetic of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture, which selects the implementation of the model.
    pub architecture: ModelArchitecture,
    /// Head after the final norm: LM head, classification head or none.
    pub head: ModelHead,
    /// Matryoshka dimensions of an embedding model, to which embeddings may be truncated: `None` = embeddings
    /// cannot be truncated, an empty list = any number of dimensions is allowed.
    pub matryoshka: Option<Vec<u32>>,
    /// Vocabulary size: number of rows of the embedding.
    pub vocab: usize,
    /// Hidden size: width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads of a layer, over all ranks.
    pub heads: usize,
    /// Number of KV heads, over all ranks; for MLA equal to the number of query heads.
    pub kv_heads: usize,
    /// Number of channels per head of query and key.
    pub head_dim: usize,
    /// Intermediate size of a dense MLP.
    pub intermediate: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Base frequency and scaling of the rotary embedding (RoPE).
    pub rope: RopeConfig,
    /// Indices of the layers without RoPE (NoPE), ascending.
    pub nope_layers: Vec<usize>,
    /// Attention temperature: each query is multiplied by a factor that depends on its position; `None` = all
    /// factors are 1.
    pub attention_temperature: Option<AttentionTemperatureConfig>,
    /// Layers with a sliding window; `None` = every layer attends to the whole context.
    pub layer_attention: Option<LayerAttentionConfig>,
    /// Sizes of the layers that differ from the sizes in this configuration; `None` = all layers are alike.
    pub layer_shapes: Option<LayerShapeConfig>,
    /// Source of the keys and values of a layer.
    pub kv_projection: KvProjectionKind,
    /// Inputs of each layer that are computed from the token and its embedding; `None` = the model has none.
    pub per_layer_input: Option<PerLayerInputConfig>,
    /// Constant factors of activations.
    pub multipliers: ActivationMultipliers,
    /// Logit softcap: logits are `cap · tanh(logit / cap)`; `None` = logits are not capped.
    pub logit_softcap: Option<f32>,
    /// Longest context that the model was trained for (`max_position_embeddings`).
    pub max_positions: usize,
    /// Whether the LM head and the embedding share one weight matrix (`tie_word_embeddings`).
    pub tied: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub out_bias: bool,
    /// Whether the projections of a dense MLP have biases.
    pub mlp_bias: bool,
    /// MLA dimensions; `None` if the layers use grouped-query attention.
    pub mla: Option<MlaConfig>,
    /// Gated delta net layers; `None` = every layer is an attention layer.
    pub gated_delta: Option<GatedDeltaConfig>,
    /// Number of MTP (NextN) modules in the checkpoint.
    pub mtp_layers: usize,
    /// Whether MTP modules are loaded. This is not a field of `config.json`: the code that loads the model
    /// sets it.
    pub load_mtp: bool,
    /// Settings of an EAGLE-3 draft model; `None` for other architectures.
    pub eagle: Option<Eagle3Config>,
    /// Settings of the MoE layers, if the model has experts.
    pub moe: Option<MoeConfig>,
    /// Quantisation format of the linear layers; `None` if they are not quantised.
    pub quantization: Option<QuantizationConfig>,
    /// Data type of the weights that `config.json` declares (`dtype` or `torch_dtype`).
    pub dtype: Option<CheckpointDType>,
    /// BOS token, if the model uses one.
    pub bos: Option<u32>,
    /// EOS tokens; `generation_config.json` overrides `config.json`. If neither has any, the default of the architecture.
    pub eos: Vec<u32>,
    /// Sampling defaults from `generation_config.json`.
    pub generation: GenerationConfig,
}

/// Dimensions of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaConfig {
    /// Number of channels of the compressed query; `None` if queries are projected directly.
    pub q_lora_rank: Option<usize>,
    /// Number of channels of the compressed KV of a token.
    pub kv_lora_rank: usize,
    /// Number of channels per head of query and key that RoPE does not rotate.
    pub qk_nope_head_dim: usize,
    /// Number of channels per head of the query that RoPE rotates; also the number of channels of the rotated
    /// key, which all heads share.
    pub qk_rope_head_dim: usize,
    /// Number of channels per head of the value.
    pub v_head_dim: usize,
}

/// Settings of the mixture-of-experts (MoE) layers: experts, router and the layers that have experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Number of routed experts of a layer with experts.
    pub experts: usize,
    /// Number of routed experts that the router selects for each token.
    pub top_k: usize,
    /// Intermediate size of one routed expert.
    pub intermediate: usize,
    /// Sum of the intermediate sizes of a layer's shared experts, each of which is as wide as a routed
    /// expert; 0 = the model has no shared experts.
    pub shared_intermediate: usize,
    /// Whether a layer has one shared expert of `shared_intermediate` channels, whose output is multiplied by the
    /// sigmoid of a gate (`shared_expert_gate`).
    pub has_shared_gate: bool,
    /// Function that turns router logits into scores: softmax or sigmoid.
    pub score: RouterScoreFunction,
    /// Whether a bias is added to the scores when experts are selected (`e_score_correction_bias`). The bias
    /// does not change the routing weights, with which the outputs of the selected experts are summed.
    pub has_correction_bias: bool,
    /// Groups of experts for group-limited routing: the router first selects groups, then experts within
    /// these groups.
    pub expert_groups: Option<ExpertGroups>,
    /// Whether the routing weights of a token's selected experts are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Factor by which the routing weights of a token's selected experts are multiplied
    /// (`routed_scaling_factor`).
    pub scale: f32,
    /// Layer `i` has experts if `sparse_step` divides `i + 1` and `dense_layers` does not contain `i`.
    pub sparse_step: usize,
    /// Indices of layers that have a dense MLP although `sparse_step` selects them, ascending.
    pub dense_layers: Vec<usize>,
    /// Activation of the experts.
    pub activation: GateActivation,
    /// Whether the router and the projections of the experts have biases.
    pub has_biases: bool,
    /// Whether layers with experts also have a dense MLP: the outputs of both are normalised and added. The router
    /// has a norm of its own, and each expert a factor of its output (transformers `modeling_gemma4.py`).
    pub has_dense_mlp: bool,
}

/// Sizes of the per-layer inputs (PLE): each layer receives channels that are computed from the token and its embedding
/// (transformers `modeling_gemma4.py`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerInputConfig {
    /// Number of channels that each layer receives.
    pub channels: usize,
    /// Number of rows of the embedding from which the channels of all layers are read.
    pub vocab: usize,
}

/// Placement of the RMS norms of attention and of the feed-forward part in a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Pre-norm: the residual stream is normalised before the first projection.
    Input,
    /// Post-norm: the output of attention or of the MLP is normalised before it is added to the residual
    /// stream (OLMo 2, arXiv 2501.00656, section 3.2).
    Output,
    /// Sandwich norm: both the residual stream and the output are normalised (Gemma 3, arXiv 2503.19786, section
    /// 2).
    Both,
}

/// Meaning of the stored weights of RMS norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormWeightKind {
    /// `weight · cast(x / rms)`: the normalised value is rounded to the dtype of `x` before the multiplication.
    Standard,
    /// `cast((1 + weight) · x / rms)`: 1 is added to the stored weight in f32, and the product is rounded once
    /// (Gemma 3, transformers `modeling_gemma3.py`).
    ZeroCentred,
    /// `cast(weight · x / rms)`: the product is computed in f32 and rounded once (transformers
    /// `modeling_gpt_oss.py`).
    Unrounded,
}

/// Data type of the weights that `config.json` declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointDType {
    /// `float32`
    F32,
    /// `bfloat16`
    BF16,
    /// `float16`
    F16,
}

impl ModelConfig {
    /// Reads `config.json` of a model folder and, if the files exist, `generation_config.json` and
    /// `hf_quant_config.json`.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelConfigError> {
        Self::from_dir_with(dir, &Map::new())
    }

    /// Reads a model folder as `from_dir` does, after applying `overrides` to the fields of `config.json`:
    /// objects are merged, names with dots are paths, and null sets a field to null.
    pub fn from_dir_with(
        dir: &Path,
        overrides: &Map<String, Value>,
    ) -> Result<Self, ModelConfigError> {
        let generation = GenerationConfig::read(dir)?;
        let path = dir.join("config.json");
        if !path.exists() {
            return Err(ModelConfigError::Absent {
                dir: dir.to_owned(),
                hint: folder_format_hint(dir),
            });
        }
        let fields = json_fields::JsonFields::read(&path)?;
        let moved = config_overrides::quantization_of_file(&fields, dir, overrides)?;
        let fields = fields.with(&moved).with(overrides);
        let mut config = parse_config::config(&fields, generation)?;
        if moved.is_empty() {
            let own = config.quantization.take();
            config.quantization = QuantizationConfig::or_hf_quant_config(own, &fields, dir)?;
        }
        Ok(config)
    }

    /// Reads a single configuration file of any name; `generation_config.json` is not read.
    pub fn from_file(path: &Path) -> Result<Self, ModelConfigError> {
        parse_config::config(&json_fields::JsonFields::read(path)?, GenerationConfig::default())
    }

    /// Parses the text of a `config.json`; `path` is used in error messages only.
    pub fn from_json(path: &Path, text: &str) -> Result<Self, ModelConfigError> {
        let fields = json_fields::JsonFields::parse(path, text.as_bytes())?;
        parse_config::config(&fields, GenerationConfig::default())
    }

    const fn traits(&self) -> &'static ArchitectureTraits {
        self.architecture.traits()
    }

    /// Whether queries and keys have an RMS norm per head before RoPE.
    #[must_use]
    pub fn qk_norm(&self) -> bool {
        self.traits().qk_norm == QkNormKind::PerHead
    }

    /// Whether each query head has a gate: the attention output is multiplied by the sigmoid of the gate.
    #[must_use]
    pub fn has_output_gate(&self) -> bool {
        self.gated_delta.is_some()
    }

    /// Whether decoder layer `i` has a recurrent state instead of keys and values.
    #[must_use]
    pub fn is_recurrent(&self, i: usize) -> bool {
        self.gated_delta.as_ref().is_some_and(|delta| delta.is_delta(i))
    }

    /// Whether all query heads together, and all key heads together, have an RMS norm before RoPE.
    #[must_use]
    pub fn full_qk_norm(&self) -> bool {
        self.traits().qk_norm == QkNormKind::AllHeads
    }

    /// Placement of the RMS norms of decoder layers.
    #[must_use]
    pub fn norm_placement(&self) -> NormPlacement {
        self.traits().norm_placement
    }

    /// Whether the values have an RMS norm per head, without weights.
    #[must_use]
    pub fn value_norm(&self) -> bool {
        self.architecture.is_gemma4()
    }

    /// Whether the output of each layer is multiplied by a number in the checkpoint (`layer_scalar`).
    #[must_use]
    pub fn has_layer_scalar(&self) -> bool {
        self.architecture.is_gemma4()
    }

    /// Meaning of the stored weights of all RMS norms.
    #[must_use]
    pub fn norm_weights(&self) -> NormWeightKind {
        self.traits().norm_weights
    }

    /// Whether each query head has an attention sink: a learned score that joins the denominator of the softmax
    /// (arXiv 2309.17453; transformers `modeling_gpt_oss.py`).
    #[must_use]
    pub fn has_sinks(&self) -> bool {
        self.traits().has_sinks
    }

    /// Activation of the dense gated MLPs.
    #[must_use]
    pub fn gate_activation(&self) -> GateActivation {
        self.traits().gate_activation
    }

    /// Number of keys to which a query of decoder layer `i` attends, including the key of its own position;
    /// `None` = the whole context.
    #[must_use]
    pub fn window_at(&self, i: usize) -> Option<usize> {
        let attention = self.layer_attention.as_ref()?;
        attention.is_windowed(i).then_some(attention.window)
    }

    /// Factor by which the dot products of queries and keys are multiplied before the softmax.
    #[must_use]
    pub fn softmax_scale(&self) -> f32 {
        self.multipliers.attention.unwrap_or_else(|| (self.head_dim as f32).powf(-0.5))
    }

    /// Epsilon of the RMS norms of the residual stream. The stream is stored divided by the residual
    /// multiplier `m`, so that the outputs of attention and MLP are added without a multiplication. RMS norm
    /// of `x` with epsilon `eps` equals RMS norm of `x / m` with epsilon `eps / m²`.
    #[must_use]
    pub fn stream_eps(&self) -> f32 {
        self.rms_eps / self.multipliers.residual.powi(2)
    }

    /// Row order of the query and key projections if RoPE rotates only a part of the channels of a head, or adjacent
    /// channels; otherwise `None`.
    #[must_use]
    pub(crate) fn rotary_rows(&self) -> Option<RotaryRowOrder> {
        let (rotated, pairs) = (self.rotated_channels(), self.traits().rotary_pairs);
        let rows = RotaryRowOrder { head_dim: self.head_dim, rotated, pairs };
        let reorders = self.mla.is_none() && self.gated_delta.is_none();
        let differs = rotated < self.head_dim || pairs == RotaryPairKind::Adjacent;
        (reorders && differs).then_some(rows)
    }

    /// Number of channels per head of query and key that RoPE rotates.
    #[must_use]
    pub fn rotated_channels(&self) -> usize {
        if self.gated_delta.is_some() {
            return self.rotary();
        }
        (self.rotary() as f64 * self.rope.partial_rotary_factor) as usize
    }

    /// Number of channels per head of query and key in the RoPE tables. With partial RoPE, this number
    /// includes channels that RoPE does not rotate, except in models with gated delta net layers: their QK norm has
    /// a weight per channel, so that the channels keep their stored order.
    #[must_use]
    pub fn rotary(&self) -> usize {
        if self.gated_delta.is_some() {
            return (self.head_dim as f64 * self.rope.partial_rotary_factor) as usize;
        }
        self.mla.map_or(self.head_dim, |mla| mla.qk_rope_head_dim)
    }

    /// Number of channels per head of the value.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.mla.map_or(self.head_dim, |mla| mla.v_head_dim)
    }

    /// Longest context that the rotary embedding supports, in tokens. RoPE scaling extends the original
    /// context length by a factor; the result is the maximum of this extended length and `max_positions`.
    #[must_use]
    pub fn context_max(&self) -> usize {
        let extended = match self.rope.scaling {
            // `max_position_embeddings` of Gemma models is already the extended length.
            RopeScaling::Linear { .. } if self.architecture.is_gemma() => 0.0,
            // With these scalings, `max_position_embeddings` is already the extended length.
            RopeScaling::Default
            | RopeScaling::Llama3 { .. }
            | RopeScaling::LongRope { .. }
            | RopeScaling::Proportional { .. } => 0.0,
            RopeScaling::Linear { factor } => self.max_positions as f64 * factor,
            RopeScaling::Yarn { factor, original_positions, .. } => original_positions * factor,
        };
        self.max_positions.max(extended as usize)
    }

    /// MoE settings of layer `i`; `None` if its MLP is dense.
    #[must_use]
    pub fn moe_at(&self, i: usize) -> Option<&MoeConfig> {
        let moe = self.moe.as_ref()?;
        let is_sparse = (i + 1).is_multiple_of(moe.sparse_step) && !moe.dense_layers.contains(&i);
        is_sparse.then_some(moe)
    }

    /// Number of layers with a KV cache: decoder layers and loaded MTP modules.
    #[must_use]
    pub fn kv_layers(&self) -> usize {
        self.layers + if self.load_mtp { self.mtp_layers } else { 0 }
    }

    /// Number of channels of the hidden state that is stored at each KV block boundary; MTP and EAGLE-3
    /// proposers need this state to continue after a prefix cache hit. 0 if the configuration has no
    /// proposer.
    #[must_use]
    pub fn boundary_state_channels(&self) -> usize {
        if self.load_mtp || self.eagle.is_some() { self.hidden } else { 0 }
    }

    /// Number of decoder layers with experts.
    #[must_use]
    pub fn sparse_layers(&self) -> usize {
        (0..self.layers).filter(|&i| self.moe_at(i).is_some()).count()
    }
}

impl MoeConfig {
    /// Number of shared experts per layer that are as wide as a routed expert and have no gate.
    #[must_use]
    pub fn shared_experts(&self) -> usize {
        if self.has_shared_gate { 0 } else { self.shared_intermediate / self.intermediate }
    }
}
