//! A model's `config.json` as typed values.
//!
//! Each field that changes the arithmetic is either supported or rejected with file and field name: a
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

/// Settings that define the arithmetic of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture, which selects the model file.
    pub architecture: ModelArchitecture,
    /// Vocabulary size: number of rows of the embedding.
    pub vocab: usize,
    /// Hidden size: width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads, over all ranks.
    pub heads: usize,
    /// Number of KV heads, over all ranks; for MLA equal to the number of query heads.
    pub kv_heads: usize,
    /// Number of channels of the query and key of a head.
    pub head_dim: usize,
    /// Width of a dense MLP.
    pub intermediate: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Rotary embedding (RoPE).
    pub rope: RopeConfig,
    /// Longest context that the model was trained for (`max_position_embeddings`).
    pub max_positions: usize,
    /// Whether LM head and embedding share their weights.
    pub tied: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub out_bias: bool,
    /// Whether the projections of a dense MLP have biases.
    pub mlp_bias: bool,
    /// MLA dimensions, if the layers use MLA.
    pub mla: Option<MlaConfig>,
    /// Number of MTP (NextN) modules in the checkpoint.
    pub mtp_layers: usize,
    /// Whether MTP modules are loaded. Not a field of the file: set by the caller that loads the model.
    pub load_mtp: bool,
    /// Settings of an EAGLE-3 draft model.
    pub eagle: Option<Eagle3Config>,
    /// Settings of the MoE layers, if the model has experts.
    pub moe: Option<MoeConfig>,
    /// Quantisation of linear layers.
    pub quantization: Option<QuantizationConfig>,
    /// Data type that the checkpoint declares.
    pub dtype: Option<CheckpointDType>,
    /// BOS token, if the model uses one.
    pub bos: Option<u32>,
    /// EOS tokens; `generation_config.json` overrides `config.json`.
    pub eos: Vec<u32>,
    /// Sampling defaults of the checkpoint.
    pub generation: GenerationConfig,
}

/// Dimensions of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaConfig {
    /// Number of channels of the compressed query; `None` if queries are not compressed.
    pub q_lora_rank: Option<usize>,
    /// Number of channels of the compressed KV.
    pub kv_lora_rank: usize,
    /// Number of channels of a head's key without RoPE.
    pub qk_nope_head_dim: usize,
    /// Number of channels of the key with RoPE; shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Number of channels of a head's value.
    pub v_head_dim: usize,
}

/// Settings of the MoE layers.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Number of routed experts per layer.
    pub experts: usize,
    /// Number of routed experts per token.
    pub top_k: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Total width of the shared experts of a layer, each as wide as a routed expert; 0 = none.
    pub shared_intermediate: usize,
    /// Scoring function of the router.
    pub score: RouterScore,
    /// Whether a bias is added to the scores for the selection of experts only (`e_score_correction_bias`).
    pub has_correction_bias: bool,
    /// Groups of experts that are selected before the experts (group-limited routing).
    pub expert_groups: Option<ExpertGroups>,
    /// Whether the weights of a token's experts are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Factor of the expert weights (`routed_scaling_factor`).
    pub scale: f32,
    /// Layer `i` has experts if `(i + 1) % sparse_step = 0` and it is not in `dense_layers`.
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
    /// `LlamaForCausalLMEagle3`, a draft model
    LlamaEagle3,
}

/// Data type that a checkpoint may declare.
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

    /// Reads a model folder as `from_dir` does, with some members of `config.json` added or replaced.
    pub fn from_dir_with(
        dir: &Path,
        overrides: &Map<String, Value>,
    ) -> Result<Self, ModelConfigError> {
        let generation = GenerationConfig::read(dir)?;
        let fields = json_fields::JsonFields::read(&dir.join("config.json"))?;
        parse_config::config(&fields.with(overrides), generation)
    }

    /// Reads a single configuration file of any name, without `generation_config.json`.
    pub fn from_file(path: &Path) -> Result<Self, ModelConfigError> {
        parse_config::config(&json_fields::JsonFields::read(path)?, GenerationConfig::default())
    }

    /// Parses the text of a `config.json`; `path` is for error messages.
    pub fn from_json(path: &Path, text: &str) -> Result<Self, ModelConfigError> {
        let fields = json_fields::JsonFields::parse(path, text.as_bytes())?;
        parse_config::config(&fields, GenerationConfig::default())
    }

    /// Whether queries and keys have an RMS norm per head.
    #[must_use]
    pub fn qk_norm(&self) -> bool {
        matches!(self.architecture, ModelArchitecture::Qwen3 | ModelArchitecture::Qwen3Moe)
    }

    /// Number of channels of a head that RoPE rotates.
    #[must_use]
    pub fn rotary(&self) -> usize {
        self.mla.map_or(self.head_dim, |mla| mla.qk_rope_head_dim)
    }

    /// Number of channels of a head's value.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.mla.map_or(self.head_dim, |mla| mla.v_head_dim)
    }

    /// Longest context of the rotary embedding, in tokens: `max_positions`, or, if RoPE scaling extends a
    /// shorter range beyond it, the length of that range times the factor.
    #[must_use]
    pub fn context_max(&self) -> usize {
        let extended = match self.rope.scaling {
            // Files with llama3 scaling state the extended length.
            RopeScaling::Default | RopeScaling::Llama3 { .. } => 0.0,
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

    /// Number of layers with a KV cache, including loaded MTP modules.
    #[must_use]
    pub fn kv_layers(&self) -> usize {
        self.layers + if self.load_mtp { self.mtp_layers } else { 0 }
    }

    /// Number of channels of the block-boundary hidden state, from which a proposer continues; 0 without a
    /// proposer.
    #[must_use]
    pub fn boundary_state_channels(&self) -> usize {
        if self.load_mtp || self.eagle.is_some() { self.hidden } else { 0 }
    }

    /// Number of layers with experts.
    #[must_use]
    pub fn sparse_layers(&self) -> usize {
        (0..self.layers).filter(|&i| self.moe_at(i).is_some()).count()
    }
}

impl MoeConfig {
    /// Number of shared experts per layer.
    #[must_use]
    pub fn shared_experts(&self) -> usize {
        self.shared_intermediate / self.intermediate
    }
}

impl ModelArchitecture {
    /// All supported architectures.
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

    /// Name in `config.json`.
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
