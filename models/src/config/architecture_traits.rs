//! Properties by which architectures differ: default values of `config.json`, biases, norms, windows and RoPE.
//!
//! The values are those of transformers (`configuration_*.py`, `modeling_*.py`). Most rows inherit from another row and
//! list only the fields that differ.

use super::architecture_rules::{
    AttentionBiasRule, DecoderLayerKind, QkNormKind, StackedRowKind, StoredExpertKind,
    SynthTokenizerKind, WindowedLayerRule,
};
use super::json_fields::JsonFields;
use super::{ModelArchitecture, NormPlacement, NormWeightKind};
use crate::weights::{
    LANGUAGE_MODEL, MODEL_LANGUAGE_MODEL, RotaryPairKind, TensorNameReplacement, spelling,
};
use ops::GateActivation;

/// Properties of one architecture.
#[derive(Debug)]
pub(crate) struct ArchitectureTraits {
    /// Number of KV heads if the field is absent; `None` = the number of query heads.
    pub(crate) kv_heads_default: Option<usize>,
    /// Number of channels per head if the field is absent; `None` = the hidden size divided by the number of query
    /// heads.
    pub(crate) head_dim_default: Option<usize>,
    /// Base of the rotation frequencies if the field is absent.
    pub(crate) rope_theta_default: f64,
    /// Whether windowed layers have RoPE settings of their own.
    pub(crate) has_rope_by_layer_type: bool,
    /// Fraction of the channels of a head that RoPE rotates if the field is absent; `None` = the fraction is always 1.
    pub(crate) partial_rotary_default: Option<f64>,
    /// Channels of a head that RoPE rotates as a pair in layers with GQA.
    pub(crate) rotary_pairs: RotaryPairKind,
    /// Sliding window if the field is absent; `None` = no window.
    pub(crate) window_default: Option<usize>,
    /// Whether the window is in use only if the field `use_sliding_window` is true.
    pub(crate) has_window_switch: bool,
    /// Layers with a window.
    pub(crate) windowed_layers: WindowedLayerRule,
    /// Biases of the attention projections.
    pub(crate) attention_bias: AttentionBiasRule,
    /// Whether the field `mlp_bias` may be true.
    pub(crate) may_have_mlp_bias: bool,
    /// Default of `tie_word_embeddings`.
    pub(crate) ties_by_default: bool,
    /// RMS norm of queries and keys before RoPE.
    pub(crate) qk_norm: QkNormKind,
    /// Placement of the RMS norms of decoder layers.
    pub(crate) norm_placement: NormPlacement,
    /// Meaning of the stored weights of all RMS norms.
    pub(crate) norm_weights: NormWeightKind,
    /// Activation of the dense gated MLPs.
    pub(crate) gate_activation: GateActivation,
    /// Whether each query head has an attention sink.
    pub(crate) has_sinks: bool,
    /// Whether layers are gated delta nets.
    pub(crate) has_gated_delta: bool,
    /// Possible values of `text_config.model_type`; empty if the architecture is not multimodal.
    pub(crate) text_model_types: &'static [&'static str],
    /// Whether the fields `embedding_multiplier`, `residual_multiplier`, `attention_multiplier` and `logits_scaling` exist.
    pub(crate) has_multipliers: bool,
    /// Whether checkpoints may store the experts in MXFP4.
    pub(crate) may_have_mxfp4_experts: bool,
    /// Whether queries have an attention temperature (`temperature.rs`).
    pub(crate) has_temperature: bool,
    /// Text part with properties of its own.
    pub(crate) text_variant: Option<TextVariant>,
    /// Name of layers without a window in `layer_types`, in addition to `full_attention`.
    pub(crate) attention_layer_type: Option<&'static str>,
    /// Name of the field with the intermediate size of a dense MLP.
    pub(crate) intermediate_field: &'static str,
    /// Prefixes of the tensors of the text part in published checkpoints.
    pub(crate) stored_prefixes: &'static [TensorNameReplacement],
    /// Names of modules within a layer in published checkpoints. They are replaced in this order.
    pub(crate) stored_modules: &'static [TensorNameReplacement],
    /// Projections whose rows published checkpoints stack in one tensor.
    pub(crate) stacked_rows: StackedRowKind,
    /// Tensors of the experts in published checkpoints.
    pub(crate) stored_experts: StoredExpertKind,
    /// Kind of the decoder layers.
    pub(crate) decoder_layer: DecoderLayerKind,
    /// Special tokens and chat template of synthetic checkpoints.
    pub(crate) synth_tokenizer: SynthTokenizerKind,
    /// EOS tokens if the field is absent; empty = no EOS token.
    pub(crate) eos_default: &'static [u32],
}

/// Text part of a multimodal model with properties of its own.
#[derive(Debug)]
pub(crate) struct TextVariant {
    /// Value of `text_config.model_type`.
    model_type: &'static str,
    traits: &'static ArchitectureTraits,
}

const LLAMA: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: None,
    head_dim_default: None,
    rope_theta_default: 10_000.0,
    has_rope_by_layer_type: false,
    partial_rotary_default: None,
    rotary_pairs: RotaryPairKind::Halves,
    window_default: None,
    has_window_switch: false,
    windowed_layers: WindowedLayerRule::Absent,
    attention_bias: AttentionBiasRule::Field { default: false },
    may_have_mlp_bias: true,
    ties_by_default: false,
    qk_norm: QkNormKind::Absent,
    norm_placement: NormPlacement::Input,
    norm_weights: NormWeightKind::Standard,
    gate_activation: GateActivation::Silu,
    has_sinks: false,
    has_gated_delta: false,
    text_model_types: &[],
    has_multipliers: false,
    may_have_mxfp4_experts: false,
    has_temperature: false,
    text_variant: None,
    attention_layer_type: None,
    intermediate_field: "intermediate_size",
    stored_prefixes: &[],
    stored_modules: &[],
    stacked_rows: StackedRowKind::Absent,
    stored_experts: StoredExpertKind::Separate,
    decoder_layer: DecoderLayerKind::Llama,
    synth_tokenizer: SynthTokenizerKind::Llama3,
    eos_default: &[2],
};
const LLAMA_EAGLE3: ArchitectureTraits = ArchitectureTraits {
    attention_bias: AttentionBiasRule::Fixed { qkv: false },
    may_have_mlp_bias: false,
    decoder_layer: DecoderLayerKind::DraftOnly,
    ..LLAMA
};
const GRANITE: ArchitectureTraits = ArchitectureTraits { has_multipliers: true, ..LLAMA };
/// In variants with experts, the MLP of the dense models is the shared expert.
const GRANITE_MOE_HYBRID: ArchitectureTraits = ArchitectureTraits {
    may_have_mlp_bias: false,
    attention_layer_type: Some("attention"),
    intermediate_field: "shared_intermediate_size",
    stored_modules: &[
        spelling(".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
        spelling(".shared_mlp.output_linear.", ".mlp.down_proj."),
    ],
    stacked_rows: StackedRowKind::GateUp,
    ..GRANITE
};
const SMOL_LM3: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(4),
    rope_theta_default: 2_000_000.0,
    has_window_switch: true,
    windowed_layers: WindowedLayerRule::WithoutRope,
    ties_by_default: true,
    synth_tokenizer: SynthTokenizerKind::ChatMl,
    eos_default: &[128_001],
    ..LLAMA
};
const SEED_OSS: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(8),
    head_dim_default: Some(128),
    attention_bias: AttentionBiasRule::TwoFields,
    synth_tokenizer: SynthTokenizerKind::ChatMl,
    ..LLAMA
};
const ERNIE45: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(2),
    head_dim_default: Some(128),
    rope_theta_default: 500_000.0,
    rotary_pairs: RotaryPairKind::Adjacent,
    attention_bias: AttentionBiasRule::SharedField,
    may_have_mlp_bias: false,
    ties_by_default: true,
    synth_tokenizer: SynthTokenizerKind::Mistral,
    ..LLAMA
};
const GLM: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(2),
    head_dim_default: Some(128),
    partial_rotary_default: Some(0.5),
    rotary_pairs: RotaryPairKind::Adjacent,
    attention_bias: AttentionBiasRule::QkvOnly,
    may_have_mlp_bias: false,
    stacked_rows: StackedRowKind::GateUp,
    synth_tokenizer: SynthTokenizerKind::Glm,
    eos_default: &[151_329, 151_336, 151_338],
    ..LLAMA
};
const GLM4: ArchitectureTraits = ArchitectureTraits {
    norm_placement: NormPlacement::Both,
    // The second replacement writes the name that the first one replaces.
    stored_modules: &[
        spelling(".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        spelling(".post_self_attn_layernorm.", ".post_attention_layernorm."),
        spelling(".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    ],
    ..GLM
};
const OLMO2: ArchitectureTraits = ArchitectureTraits {
    may_have_mlp_bias: false,
    qk_norm: QkNormKind::AllHeads,
    norm_placement: NormPlacement::Output,
    synth_tokenizer: SynthTokenizerKind::ChatMl,
    eos_default: &[50_279],
    ..LLAMA
};
const OLMO3: ArchitectureTraits = ArchitectureTraits {
    rope_theta_default: 500_000.0,
    has_rope_by_layer_type: true,
    window_default: Some(4096),
    windowed_layers: WindowedLayerRule::ExceptEveryFourth,
    ..OLMO2
};

const MINISTRAL3: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(8),
    head_dim_default: Some(128),
    has_temperature: true,
    windowed_layers: WindowedLayerRule::All,
    attention_bias: AttentionBiasRule::Fixed { qkv: false },
    may_have_mlp_bias: false,
    synth_tokenizer: SynthTokenizerKind::Mistral,
    ..LLAMA
};
const MISTRAL: ArchitectureTraits = ArchitectureTraits {
    head_dim_default: None,
    has_temperature: false,
    window_default: Some(4096),
    ..MINISTRAL3
};
const MISTRAL3: ArchitectureTraits = ArchitectureTraits {
    text_model_types: &["mistral", "ministral3"],
    text_variant: Some(TextVariant { model_type: "ministral3", traits: &MINISTRAL3 }),
    stored_prefixes: LANGUAGE_MODEL,
    ..MISTRAL
};
/// The names of modules are those of `modeling_mixtral.py` before transformers 5.
const MIXTRAL: ArchitectureTraits = ArchitectureTraits {
    rope_theta_default: 1_000_000.0,
    window_default: None,
    stored_modules: &[
        spelling(".block_sparse_moe.", ".mlp."),
        spelling(".w1.", ".gate_proj."),
        spelling(".w2.", ".down_proj."),
        spelling(".w3.", ".up_proj."),
    ],
    decoder_layer: DecoderLayerKind::Qwen3Moe,
    ..MISTRAL
};

const QWEN2: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(32),
    window_default: Some(4096),
    has_window_switch: true,
    windowed_layers: WindowedLayerRule::FromIndex,
    attention_bias: AttentionBiasRule::Fixed { qkv: true },
    may_have_mlp_bias: false,
    synth_tokenizer: SynthTokenizerKind::ChatMl,
    eos_default: &[],
    ..LLAMA
};
const QWEN2_MOE: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(16),
    windowed_layers: WindowedLayerRule::EvenBelowIndex,
    attention_bias: AttentionBiasRule::QkvField,
    decoder_layer: DecoderLayerKind::Qwen3Moe,
    ..QWEN2
};
const QWEN3: ArchitectureTraits = ArchitectureTraits {
    head_dim_default: Some(128),
    attention_bias: AttentionBiasRule::Field { default: false },
    qk_norm: QkNormKind::PerHead,
    decoder_layer: DecoderLayerKind::Qwen3,
    ..QWEN2
};
const QWEN3_MOE: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(4),
    head_dim_default: None,
    windowed_layers: WindowedLayerRule::All,
    decoder_layer: DecoderLayerKind::Qwen3Moe,
    ..QWEN3
};
const QWEN3_VL: ArchitectureTraits = ArchitectureTraits {
    rope_theta_default: 500_000.0,
    window_default: None,
    has_window_switch: false,
    windowed_layers: WindowedLayerRule::Absent,
    text_model_types: &["qwen3_vl_text"],
    stored_prefixes: MODEL_LANGUAGE_MODEL,
    ..QWEN3
};
const QWEN3_VL_MOE: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(16),
    head_dim_default: None,
    text_model_types: &["qwen3_vl_moe_text"],
    stored_experts: StoredExpertKind::Transposed,
    decoder_layer: DecoderLayerKind::Qwen3Moe,
    ..QWEN3_VL
};
const QWEN3_NEXT: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(2),
    head_dim_default: Some(256),
    partial_rotary_default: Some(0.25),
    attention_bias: AttentionBiasRule::Fixed { qkv: false },
    may_have_mlp_bias: false,
    qk_norm: QkNormKind::PerHead,
    norm_weights: NormWeightKind::ZeroCentred,
    has_gated_delta: true,
    decoder_layer: DecoderLayerKind::Qwen3Next,
    synth_tokenizer: SynthTokenizerKind::ChatMl,
    eos_default: &[],
    ..LLAMA
};
const QWEN35: ArchitectureTraits = ArchitectureTraits { kv_heads_default: Some(4), ..QWEN3_NEXT };
const QWEN35_MULTIMODAL: ArchitectureTraits = ArchitectureTraits {
    text_model_types: &["qwen3_5_text"],
    stored_prefixes: MODEL_LANGUAGE_MODEL,
    ..QWEN35
};
const QWEN35_MOE: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(2),
    stored_experts: StoredExpertKind::Stacked,
    ..QWEN3_NEXT
};
const QWEN35_MOE_MULTIMODAL: ArchitectureTraits = ArchitectureTraits {
    text_model_types: &["qwen3_5_moe_text"],
    stored_prefixes: MODEL_LANGUAGE_MODEL,
    ..QWEN35_MOE
};

const DEEPSEEK: ArchitectureTraits = ArchitectureTraits {
    decoder_layer: DecoderLayerKind::Deepseek,
    synth_tokenizer: SynthTokenizerKind::Deepseek,
    ..LLAMA_EAGLE3
};
const DEEPSEEK_V3: ArchitectureTraits = ArchitectureTraits { eos_default: &[1], ..DEEPSEEK };
const PHI3: ArchitectureTraits = ArchitectureTraits {
    partial_rotary_default: Some(1.0),
    windowed_layers: WindowedLayerRule::All,
    attention_bias: AttentionBiasRule::Fixed { qkv: false },
    may_have_mlp_bias: false,
    stacked_rows: StackedRowKind::QkvAndGateUp,
    synth_tokenizer: SynthTokenizerKind::Phi,
    eos_default: &[32_000],
    ..LLAMA
};
const GEMMA3: ArchitectureTraits = ArchitectureTraits {
    rope_theta_default: 1_000_000.0,
    has_rope_by_layer_type: true,
    windowed_layers: WindowedLayerRule::ExceptEveryNth,
    may_have_mlp_bias: false,
    ties_by_default: true,
    qk_norm: QkNormKind::PerHead,
    norm_placement: NormPlacement::Both,
    norm_weights: NormWeightKind::ZeroCentred,
    gate_activation: GateActivation::GeluTanh,
    synth_tokenizer: SynthTokenizerKind::Gemma,
    eos_default: &[1],
    ..LLAMA
};
const GEMMA3_MULTIMODAL: ArchitectureTraits = ArchitectureTraits {
    text_model_types: &["gemma3_text"],
    stored_prefixes: LANGUAGE_MODEL,
    ..GEMMA3
};
const GEMMA4: ArchitectureTraits = ArchitectureTraits {
    windowed_layers: WindowedLayerRule::ExceptEverySixthAndLast,
    norm_weights: NormWeightKind::Unrounded,
    stored_modules: &[
        spelling(".router.proj.", ".mlp.gate."),
        spelling(".experts.", ".mlp.experts."),
    ],
    stored_experts: StoredExpertKind::Stacked,
    decoder_layer: DecoderLayerKind::Gemma4,
    synth_tokenizer: SynthTokenizerKind::Gemma4,
    ..GEMMA3
};
const GEMMA4_MULTIMODAL: ArchitectureTraits = ArchitectureTraits {
    text_model_types: &["gemma4_text"],
    stored_prefixes: MODEL_LANGUAGE_MODEL,
    ..GEMMA4
};
const GEMMA4_UNIFIED: ArchitectureTraits = ArchitectureTraits {
    text_model_types: &["gemma4_unified_text"],
    stored_modules: &[],
    stored_experts: StoredExpertKind::Separate,
    ..GEMMA4_MULTIMODAL
};
const GPT_OSS: ArchitectureTraits = ArchitectureTraits {
    kv_heads_default: Some(8),
    head_dim_default: Some(64),
    rope_theta_default: 150_000.0,
    window_default: Some(128),
    windowed_layers: WindowedLayerRule::Even,
    attention_bias: AttentionBiasRule::Field { default: true },
    may_have_mlp_bias: false,
    norm_weights: NormWeightKind::Unrounded,
    has_sinks: true,
    may_have_mxfp4_experts: true,
    stored_modules: &[spelling(".mlp.router.", ".mlp.gate.")],
    stored_experts: StoredExpertKind::Transposed,
    decoder_layer: DecoderLayerKind::Qwen3Moe,
    synth_tokenizer: SynthTokenizerKind::Harmony,
    eos_default: &[],
    ..LLAMA
};

impl ModelArchitecture {
    /// Returns the properties of the architecture.
    pub(crate) const fn traits(self) -> &'static ArchitectureTraits {
        match self {
            Self::Llama => &LLAMA,
            Self::Granite => &GRANITE,
            Self::GraniteMoeHybrid => &GRANITE_MOE_HYBRID,
            Self::SmolLm3 => &SMOL_LM3,
            Self::SeedOss => &SEED_OSS,
            Self::Ernie45 => &ERNIE45,
            Self::Glm => &GLM,
            Self::Glm4 => &GLM4,
            Self::Olmo2 => &OLMO2,
            Self::Olmo3 => &OLMO3,
            Self::Mistral => &MISTRAL,
            Self::Mistral3 => &MISTRAL3,
            Self::Ministral3 => &MINISTRAL3,
            Self::Mixtral => &MIXTRAL,
            Self::Qwen2 => &QWEN2,
            Self::Qwen2Moe => &QWEN2_MOE,
            Self::Qwen3 => &QWEN3,
            Self::Qwen3Moe => &QWEN3_MOE,
            Self::Qwen3Vl => &QWEN3_VL,
            Self::Qwen3VlMoe => &QWEN3_VL_MOE,
            Self::Qwen3Next => &QWEN3_NEXT,
            Self::Qwen35 => &QWEN35,
            Self::Qwen35Multimodal => &QWEN35_MULTIMODAL,
            Self::Qwen35Moe => &QWEN35_MOE,
            Self::Qwen35MoeMultimodal => &QWEN35_MOE_MULTIMODAL,
            Self::DeepseekV2 => &DEEPSEEK,
            Self::DeepseekV3 => &DEEPSEEK_V3,
            Self::Phi3 => &PHI3,
            Self::Gemma3 => &GEMMA3,
            Self::Gemma3Multimodal => &GEMMA3_MULTIMODAL,
            Self::Gemma4 => &GEMMA4,
            Self::Gemma4Multimodal => &GEMMA4_MULTIMODAL,
            Self::Gemma4Unified => &GEMMA4_UNIFIED,
            Self::GptOss => &GPT_OSS,
            Self::LlamaEagle3 => &LLAMA_EAGLE3,
        }
    }
}

impl ModelArchitecture {
    /// Returns the properties of the model or, for a multimodal model, of its text part with the configuration `fields`.
    pub(super) fn text_traits(self, fields: &JsonFields) -> &'static ArchitectureTraits {
        let model_type = fields.value("model_type").and_then(|value| value.as_str());
        let variant = self.traits().text_variant.as_ref();
        let variant = variant.filter(|variant| model_type == Some(variant.model_type));
        variant.map_or(self.traits(), |variant| variant.traits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weights of QK norms have the channel order of the checkpoint, so the rows of queries and keys must have it too.
    #[test]
    fn architectures_with_qk_norm_keep_the_row_order() {
        for architecture in ModelArchitecture::ALL {
            let traits = architecture.traits();
            let reorders = traits.rotary_pairs == RotaryPairKind::Adjacent
                || traits.partial_rotary_default.is_some() && !traits.has_gated_delta;
            assert!(!reorders || traits.qk_norm == QkNormKind::Absent, "{architecture}");
        }
    }
}
