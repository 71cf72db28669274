//! Supported features of each architecture, from which `docs/models.md` is generated, and the default parsers of outputs.

use crate::ModelArchitecture;

/// Kind of attention that an architecture uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Grouped-query attention, which includes multi-head and multi-query attention.
    Gqa,
    /// Multi-head latent attention with a compressed KV cache.
    Mla,
    /// Gated delta nets with recurrent state, and grouped-query attention in some layers.
    GatedDelta,
}

/// Features that are supported for one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchitectureSupport {
    /// Kind of attention in all layers.
    pub attention: AttentionKind,
    /// Whether layers may have experts, so that expert parallelism applies.
    pub has_experts: bool,
    /// Whether checkpoints may contain an MTP module, for `--spec-method mtp`.
    pub has_mtp: bool,
    /// Whether the architecture is a draft model, which only runs together with a target model.
    pub is_draft_only: bool,
    /// FP8 formats of weights and KV cache that are supported.
    pub formats: Fp8Support,
    /// Name of the tool-call parser if the chat template selects none; `None` = the models have no tool calls.
    pub tool_call_parser: Option<&'static str>,
    /// Name of the reasoning parser if the markers in the chat template select none.
    pub reasoning_parser: Option<&'static str>,
    /// Names of published checkpoints of the architecture, listed as examples in `docs/models.md`.
    pub examples: &'static [&'static str],
    /// Restrictions on fields of `config.json`; other values are rejected.
    pub limits: &'static [&'static str],
}

/// Supported FP8 formats, in addition to f32, bf16 and f16, which all architectures support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Support {
    /// FP8 e4m3 weights with dynamic or static activation scales.
    pub fp8_weights: bool,
    /// FP8 e4m3 KV cache (`--kv-cache-dtype fp8`).
    pub fp8_kv_cache: bool,
}

const LONGROPE: &str = "`rope_scaling`: `longrope`; if the configured maximum length exceeds \
    `original_max_position_embeddings`, all requests use `long_factor`, otherwise all use `short_factor`";
const TEXT_PART: &str = "only the text part (`text_config`) is loaded";
const CAUSAL_ONLY: &str = "`use_bidirectional_attention`: false; `attn_logit_softcapping`: null";
const UNCAPPED: &str = "`final_logit_softcapping`: null";
const DENSE_GRANITE: &str = "`num_local_experts`: 0; `layer_types`: `attention` in every layer";
const MXFP4_EXPERTS: &str =
    "MXFP4 experts (`quant_method`: `mxfp4`) are dequantised when they are loaded on CPUs";
const NO_DRAFT_MODEL: &str = "cannot be a draft model; `mtp_num_hidden_layers`: 1 for `mtp`";
const FULL_ROPE: &str =
    "`rope_scaling`: `linear`, `llama3` and `yarn`; no partial rotary embedding";

const VISION_ONLY: &str = "`use_bidirectional_attention`: null or `vision`";
const NOT_DRAFT: &str = "cannot be a draft model";
const PROPORTIONAL: &str =
    "`rope_parameters`: `proportional`, `linear`, `llama3` and `yarn` by layer type";

const INTERLEAVED: &str =
    "FP8 weights of query, key and value with block scales are dequantised on GPUs";
const SCALED_ROPE: &str = "`rope_scaling`: `linear`, `llama3` and `yarn`";

const DENSE: ArchitectureSupport = ArchitectureSupport {
    attention: AttentionKind::Gqa,
    has_experts: false,
    has_mtp: false,
    is_draft_only: false,
    formats: Fp8Support { fp8_weights: true, fp8_kv_cache: true },
    tool_call_parser: None,
    reasoning_parser: None,
    examples: &[],
    limits: &[FULL_ROPE],
};

const DEEPSEEK_BASE: ArchitectureSupport = ArchitectureSupport {
    attention: AttentionKind::Mla,
    has_experts: true,
    formats: Fp8Support { fp8_weights: true, fp8_kv_cache: false },
    tool_call_parser: Some("deepseek_v3"),
    ..DENSE
};

const HYBRID: ArchitectureSupport = ArchitectureSupport {
    attention: AttentionKind::GatedDelta,
    has_mtp: true,
    limits: &[NO_DRAFT_MODEL],
    ..DENSE
};

const LLAMA: ArchitectureSupport = ArchitectureSupport {
    examples: &["Llama 2, 3.x", "SmolLM2", "R1-Distill-Llama"],
    tool_call_parser: Some("llama3_json"),
    ..DENSE
};
const MISTRAL: ArchitectureSupport = ArchitectureSupport {
    examples: &["Mistral-7B v0.1 to v0.3", "Mistral-Nemo"],
    tool_call_parser: Some("mistral"),
    ..DENSE
};
const MISTRAL3: ArchitectureSupport = ArchitectureSupport {
    examples: &["Mistral-Small-3.1, 3.2", "Magistral-Small-2509", "Ministral-3"],
    limits: &[TEXT_PART, FULL_ROPE],
    ..MISTRAL
};
const MINISTRAL3: ArchitectureSupport =
    ArchitectureSupport { examples: &["Ministral-3 (text only)"], ..MISTRAL };
const QWEN3_VL: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3-VL-2B to 32B"],
    limits: &[TEXT_PART, FULL_ROPE],
    ..QWEN3
};
const QWEN3_VL_MOE: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"],
    has_experts: true,
    ..QWEN3_VL
};
const MIXTRAL: ArchitectureSupport = ArchitectureSupport {
    examples: &["Mixtral-8x7B", "Mixtral-8x22B"],
    has_experts: true,
    ..MISTRAL
};
const QWEN2: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen2, Qwen2.5", "R1-Distill-Qwen"],
    tool_call_parser: Some("hermes"),
    ..DENSE
};
const QWEN2_MOE: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen1.5-MoE-A2.7B", "Qwen2-57B-A14B"],
    has_experts: true,
    ..QWEN2
};
const QWEN3: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3-0.6B to 32B"],
    reasoning_parser: Some("qwen3"),
    ..QWEN2
};
const QWEN3_MOE: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3-30B-A3B", "Qwen3-235B-A22B"],
    has_experts: true,
    ..QWEN3
};
const GRANITE: ArchitectureSupport =
    ArchitectureSupport { examples: &["Granite 3.x"], tool_call_parser: Some("granite"), ..DENSE };
const GRANITE_MOE_HYBRID: ArchitectureSupport = ArchitectureSupport {
    examples: &["Granite-4.0-micro, 350m, 1b"],
    limits: &[DENSE_GRANITE, FULL_ROPE],
    tool_call_parser: Some("hermes"),
    ..DENSE
};
const SMOL_LM3: ArchitectureSupport = ArchitectureSupport {
    examples: &["SmolLM3-3B"],
    tool_call_parser: Some("hermes"),
    reasoning_parser: Some("qwen3"),
    ..DENSE
};
const OLMO2: ArchitectureSupport = ArchitectureSupport { examples: &["OLMo-2-1B to 32B"], ..DENSE };
const OLMO3: ArchitectureSupport =
    ArchitectureSupport { examples: &["OLMo 3"], tool_call_parser: Some("olmo3"), ..DENSE };
const SEED_OSS: ArchitectureSupport = ArchitectureSupport {
    examples: &["Seed-OSS-36B"],
    tool_call_parser: Some("seed_oss"),
    ..DENSE
};
const GLM: ArchitectureSupport = ArchitectureSupport {
    examples: &["glm-4-9b-chat-hf"],
    limits: &[SCALED_ROPE, INTERLEAVED],
    tool_call_parser: Some("glm4"),
    ..DENSE
};
const GLM4: ArchitectureSupport = ArchitectureSupport {
    examples: &["GLM-4-9B-0414, 32B-0414", "GLM-Z1-9B-0414, 32B-0414"],
    ..GLM
};
const ERNIE45: ArchitectureSupport = ArchitectureSupport {
    examples: &["ERNIE-4.5-0.3B"],
    limits: &[FULL_ROPE, INTERLEAVED],
    ..DENSE
};
const DEEPSEEK_V2: ArchitectureSupport =
    ArchitectureSupport { examples: &["DeepSeek-V2", "DeepSeek-V2-Lite"], ..DEEPSEEK_BASE };
const DEEPSEEK_V3: ArchitectureSupport = ArchitectureSupport {
    examples: &["DeepSeek-V3, V3-0324, V3.1", "DeepSeek-R1"],
    has_mtp: true,
    ..DEEPSEEK_BASE
};
const PHI3: ArchitectureSupport = ArchitectureSupport {
    examples: &["Phi-4", "Phi-4-mini", "Phi-3.5-mini", "Phi-3-mini-4k, 128k"],
    limits: &[LONGROPE],
    tool_call_parser: Some("phi4_mini_json"),
    ..DENSE
};
const GEMMA3: ArchitectureSupport = ArchitectureSupport {
    examples: &["gemma-3-270m", "gemma-3-1b"],
    limits: &[CAUSAL_ONLY, FULL_ROPE],
    tool_call_parser: Some("gemma3_tool_code"),
    ..DENSE
};
const GEMMA3_MULTIMODAL: ArchitectureSupport = ArchitectureSupport {
    examples: &["gemma-3-4b, 12b, 27b"],
    limits: &[TEXT_PART, CAUSAL_ONLY, UNCAPPED, FULL_ROPE],
    ..GEMMA3
};
const GEMMA4: ArchitectureSupport = ArchitectureSupport {
    examples: &["gemma-4 (text only)"],
    has_experts: true,
    limits: &[VISION_ONLY, NOT_DRAFT, PROPORTIONAL],
    tool_call_parser: Some("gemma4"),
    reasoning_parser: Some("gemma4"),
    ..DENSE
};
const GEMMA4_MULTIMODAL: ArchitectureSupport = ArchitectureSupport {
    examples: &["gemma-4-E2B, E4B, 31B", "gemma-4-26B-A4B"],
    limits: &[TEXT_PART, VISION_ONLY, NOT_DRAFT, PROPORTIONAL],
    ..GEMMA4
};
const GEMMA4_UNIFIED: ArchitectureSupport =
    ArchitectureSupport { examples: &["gemma-4-12B"], has_experts: false, ..GEMMA4_MULTIMODAL };
const GPT_OSS: ArchitectureSupport = ArchitectureSupport {
    examples: &["gpt-oss-20b", "gpt-oss-120b"],
    has_experts: true,
    formats: Fp8Support { fp8_weights: false, fp8_kv_cache: true },
    limits: &[MXFP4_EXPERTS, FULL_ROPE],
    tool_call_parser: Some("hermes"),
    ..DENSE
};
const QWEN3_NEXT: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3-Next-80B-A3B", "Qwen3-Coder-Next"],
    has_experts: true,
    tool_call_parser: Some("hermes"),
    ..HYBRID
};
const QWEN35: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3.5 (text only)"],
    tool_call_parser: Some("qwen3_coder"),
    reasoning_parser: Some("qwen3"),
    ..HYBRID
};
const QWEN35_MULTIMODAL: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3.5-0.8B to 27B", "Qwen3.6-27B", "Qwen3.8-27B"],
    limits: &[TEXT_PART, NO_DRAFT_MODEL],
    ..QWEN35
};
const QWEN35_MOE: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3.8-2.4T-A95B", "Qwen3.5-MoE (text only)"],
    has_experts: true,
    ..QWEN35
};
const QWEN35_MOE_MULTIMODAL: ArchitectureSupport = ArchitectureSupport {
    examples: &["Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B", "Qwen3.6-35B-A3B"],
    has_experts: true,
    ..QWEN35_MULTIMODAL
};
const LLAMA_EAGLE3: ArchitectureSupport = ArchitectureSupport {
    examples: &["EAGLE3-LLaMA3.1", "Qwen3 EAGLE-3 heads"],
    is_draft_only: true,
    formats: Fp8Support { fp8_weights: false, fp8_kv_cache: false },
    limits: &["`num_hidden_layers`: 1", "`tie_word_embeddings`: false"],
    tool_call_parser: Some("llama3_json"),
    ..DENSE
};

impl ModelArchitecture {
    /// Returns the features that are supported for the architecture.
    #[must_use]
    pub const fn support(self) -> ArchitectureSupport {
        match self {
            Self::Llama => LLAMA,
            Self::Mistral => MISTRAL,
            Self::Mistral3 => MISTRAL3,
            Self::Ministral3 => MINISTRAL3,
            Self::Qwen3Vl => QWEN3_VL,
            Self::Qwen3VlMoe => QWEN3_VL_MOE,
            Self::Mixtral => MIXTRAL,
            Self::Qwen2 => QWEN2,
            Self::Qwen2Moe => QWEN2_MOE,
            Self::Qwen3 => QWEN3,
            Self::Qwen3Moe => QWEN3_MOE,
            Self::Granite => GRANITE,
            Self::GraniteMoeHybrid => GRANITE_MOE_HYBRID,
            Self::SmolLm3 => SMOL_LM3,
            Self::Olmo2 => OLMO2,
            Self::Olmo3 => OLMO3,
            Self::SeedOss => SEED_OSS,
            Self::Glm => GLM,
            Self::Glm4 => GLM4,
            Self::Ernie45 => ERNIE45,
            Self::DeepseekV2 => DEEPSEEK_V2,
            Self::DeepseekV3 => DEEPSEEK_V3,
            Self::Phi3 => PHI3,
            Self::Gemma3 => GEMMA3,
            Self::Gemma3Multimodal => GEMMA3_MULTIMODAL,
            Self::Gemma4 => GEMMA4,
            Self::Gemma4Multimodal => GEMMA4_MULTIMODAL,
            Self::Gemma4Unified => GEMMA4_UNIFIED,
            Self::GptOss => GPT_OSS,
            Self::Qwen3Next => QWEN3_NEXT,
            Self::Qwen35 => QWEN35,
            Self::Qwen35Multimodal => QWEN35_MULTIMODAL,
            Self::Qwen35Moe => QWEN35_MOE,
            Self::Qwen35MoeMultimodal => QWEN35_MOE_MULTIMODAL,
            Self::LlamaEagle3 => LLAMA_EAGLE3,
        }
    }
}
