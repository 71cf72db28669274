//! A model's `config.json` as typed values, in the words of this project.
//!
//! Whatever changes the arithmetic is either read here or refused here, naming file and field: a
//! feature that is silently ignored would give fluent, wrong text.

#[cfg(test)]
mod deepseek_tests;
mod eagle3;
mod error;
mod generation;
mod json_fields;
mod mla;
mod moe;
mod parse_config;
mod quantization;
mod rope;
#[cfg(test)]
mod tests;

pub use eagle3::Eagle3Config;
pub use error::ModelConfigError;
pub use generation::GenerationConfig;
pub use quantization::{IgnoredModule, QuantizationConfig, ScaleGrid};
pub use rope::{RopeConfig, RopeScaling};

use ops::{ExpertGroups, RouterScore};
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;

/// Everything that defines the arithmetic of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Which model file computes it.
    pub architecture: ModelArchitecture,
    /// Token ids: rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads over all ranks.
    pub heads: usize,
    /// Key and value heads over all ranks; of latent attention as many as query heads.
    pub kv_heads: usize,
    /// Channels of a head's queries and keys.
    pub head_dim: usize,
    /// Width of a dense MLP.
    pub intermediate: usize,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Longest context the model was made for.
    pub max_positions: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub out_bias: bool,
    /// Whether the projections of a dense MLP have biases.
    pub mlp_bias: bool,
    /// Sizes of latent attention, if the layers have it.
    pub mla: Option<MlaConfig>,
    /// Layers behind the last one that predict further tokens.
    pub mtp_layers: usize,
    /// Whether these are read. No file says so: it is up to who loads the model.
    pub load_mtp: bool,
    /// Of a checkpoint that drafts for another model.
    pub eagle: Option<Eagle3Config>,
    /// Experts, if some layers have them.
    pub moe: Option<MoeConfig>,
    /// How linear layers are quantised, if they are.
    pub quantization: Option<QuantizationConfig>,
    /// The dtype the checkpoint was made in.
    pub dtype: Option<CheckpointDType>,
    /// First token of a text, if the model wants one.
    pub bos: Option<u32>,
    /// Tokens that end a text; `generation_config.json` overrides `config.json`.
    pub eos: Vec<u32>,
    /// Sampling defaults of the checkpoint.
    pub generation: GenerationConfig,
}

/// Sizes of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaConfig {
    /// Channels of the latent from which queries are made, if they are.
    pub q_lora_rank: Option<usize>,
    /// Channels of the latent from which keys and values are made.
    pub kv_lora_rank: usize,
    /// Channels of a head's key that do not turn.
    pub qk_nope_head_dim: usize,
    /// Channels of the key that turn with the position; the same in all heads.
    pub qk_rope_head_dim: usize,
    /// Channels of a head's value.
    pub v_head_dim: usize,
}

/// Settings of the layers with experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Width of all shared experts of a layer together, each as wide as another; 0 = none.
    pub shared_intermediate: usize,
    /// What the router makes of its logits.
    pub score: RouterScore,
    /// Whether something is added to the scores for the choice alone.
    pub has_correction_bias: bool,
    /// Groups of experts that are chosen first.
    pub expert_groups: Option<ExpertGroups>,
    /// Whether the weights of a token's experts are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// What these weights are multiplied by.
    pub scale: f32,
    /// Layer `i` has experts iff `(i + 1) % sparse_step = 0` and it is not in `dense_layers`.
    pub sparse_step: usize,
    /// Layers with a dense MLP, ascending.
    pub dense_layers: Vec<usize>,
}

/// Supported architectures, by the name in `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelArchitecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`
    Mistral,
    /// `Qwen2ForCausalLM`
    Qwen2,
    /// `Qwen3ForCausalLM`
    Qwen3,
    /// `Qwen3MoeForCausalLM`
    Qwen3Moe,
    /// `DeepseekV2ForCausalLM`
    DeepseekV2,
    /// `DeepseekV3ForCausalLM`
    DeepseekV3,
    /// `LlamaForCausalLMEagle3`, which drafts for another model
    LlamaEagle3,
}

/// A dtype that a checkpoint may declare.
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
    /// Reads `config.json` and, if it exists, `generation_config.json` of a model folder.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelConfigError> {
        Self::from_dir_with(dir, &Map::new())
    }

    /// As `from_dir`, with some members of `config.json` added or replaced.
    pub fn from_dir_with(
        dir: &Path,
        overrides: &Map<String, Value>,
    ) -> Result<Self, ModelConfigError> {
        let generation = GenerationConfig::read(dir)?;
        let fields = json_fields::JsonFields::read(&dir.join("config.json"))?;
        parse_config::config(&fields.with(overrides), generation)
    }

    /// Reads a lone `config.json` under any name.
    pub fn from_file(path: &Path) -> Result<Self, ModelConfigError> {
        parse_config::config(&json_fields::JsonFields::read(path)?, GenerationConfig::default())
    }

    /// Parses the text of a `config.json`; `path` is for error messages.
    pub fn from_json(path: &Path, text: &str) -> Result<Self, ModelConfigError> {
        let fields = json_fields::JsonFields::parse(path, text.as_bytes())?;
        parse_config::config(&fields, GenerationConfig::default())
    }

    /// Whether queries and keys are normalised per head.
    #[must_use]
    pub fn qk_norm(&self) -> bool {
        matches!(self.architecture, ModelArchitecture::Qwen3 | ModelArchitecture::Qwen3Moe)
    }

    /// Channels of a head that turn with the position.
    #[must_use]
    pub fn rotary(&self) -> usize {
        self.mla.map_or(self.head_dim, |latent| latent.qk_rope_head_dim)
    }

    /// Channels of a head's values.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.mla.map_or(self.head_dim, |latent| latent.v_head_dim)
    }

    /// Longest context the rotary embedding was made for, in tokens: `max_positions`, but where a
    /// scaling stretches a shorter range, that range times its factor.
    #[must_use]
    pub fn context_max(&self) -> usize {
        let stretched = match self.rope.scaling {
            // Files of llama3 scaling state the stretched length.
            RopeScaling::Default | RopeScaling::Llama3 { .. } => 0.0,
            RopeScaling::Linear { factor } => self.max_positions as f64 * factor,
            RopeScaling::Yarn { factor, original_positions, .. } => original_positions * factor,
        };
        self.max_positions.max(stretched as usize)
    }

    /// The experts of layer `i`, unless its MLP is dense.
    #[must_use]
    pub fn moe_at(&self, i: usize) -> Option<&MoeConfig> {
        let moe = self.moe.as_ref()?;
        let sparse = (i + 1).is_multiple_of(moe.sparse_step) && !moe.dense_layers.contains(&i);
        sparse.then_some(moe)
    }

    /// Layers that keep something of each token.
    #[must_use]
    pub fn kv_layers(&self) -> usize {
        self.layers + if self.load_mtp { self.mtp_layers } else { 0 }
    }

    /// Channels of the hidden state at the end of a block: who drafts behind it begins with that.
    #[must_use]
    pub fn boundary_state_channels(&self) -> usize {
        if self.load_mtp || self.eagle.is_some() { self.hidden } else { 0 }
    }

    /// Layers with experts.
    #[must_use]
    pub fn sparse_layers(&self) -> usize {
        (0..self.layers).filter(|&i| self.moe_at(i).is_some()).count()
    }
}

impl MoeConfig {
    /// Experts of a layer that every token goes to.
    #[must_use]
    pub fn shared(&self) -> usize {
        self.shared_intermediate / self.intermediate
    }
}

impl ModelArchitecture {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::LlamaEagle3,
    ];

    /// The name in `config.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::DeepseekV2 => "DeepseekV2ForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
            Self::LlamaEagle3 => "LlamaForCausalLMEagle3",
        }
    }
}

impl fmt::Display for ModelArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
