//! Names of the supported model architectures.

use std::fmt;

/// Model architectures that are supported, identified by the name in the field `architectures` of
/// `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelArchitecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`
    Mistral,
    /// `Mistral3ForConditionalGeneration`, text part
    Mistral3,
    /// `Ministral3ForCausalLM`
    Ministral3,
    /// `MixtralForCausalLM`
    Mixtral,
    /// `Qwen2ForCausalLM`
    Qwen2,
    /// `Qwen2MoeForCausalLM`
    Qwen2Moe,
    /// `Qwen3ForCausalLM`
    Qwen3,
    /// `Qwen3MoeForCausalLM`
    Qwen3Moe,
    /// `Qwen3VLForConditionalGeneration`, text part
    Qwen3Vl,
    /// `Qwen3VLMoeForConditionalGeneration`, text part
    Qwen3VlMoe,
    /// `GraniteForCausalLM`
    Granite,
    /// `GraniteMoeHybridForCausalLM` without experts and Mamba layers: Granite 4 dense
    GraniteMoeHybrid,
    /// `SmolLM3ForCausalLM`
    SmolLm3,
    /// `Olmo2ForCausalLM`
    Olmo2,
    /// `Olmo3ForCausalLM`
    Olmo3,
    /// `SeedOssForCausalLM`
    SeedOss,
    /// `Ernie4_5ForCausalLM`
    Ernie45,
    /// `GlmForCausalLM`
    Glm,
    /// `Glm4ForCausalLM`
    Glm4,
    /// `DeepseekV2ForCausalLM`
    DeepseekV2,
    /// `DeepseekV3ForCausalLM`
    DeepseekV3,
    /// `Phi3ForCausalLM`
    Phi3,
    /// `Gemma3ForCausalLM`
    Gemma3,
    /// `Gemma3ForConditionalGeneration`, text part
    Gemma3Multimodal,
    /// `Gemma4ForCausalLM`
    Gemma4,
    /// `Gemma4ForConditionalGeneration`, text part
    Gemma4Multimodal,
    /// `Gemma4UnifiedForConditionalGeneration`, text part
    Gemma4Unified,
    /// `GptOssForCausalLM`
    GptOss,
    /// `Qwen3NextForCausalLM`
    Qwen3Next,
    /// `Qwen3_5ForCausalLM`
    Qwen35,
    /// `Qwen3_5ForConditionalGeneration`, text part
    Qwen35Multimodal,
    /// `Qwen3_5MoeForCausalLM`
    Qwen35Moe,
    /// `Qwen3_5MoeForConditionalGeneration`, text part
    Qwen35MoeMultimodal,
    /// `LlamaForCausalLMEagle3`: draft model of EAGLE-3
    LlamaEagle3,
}

impl ModelArchitecture {
    /// All supported architectures.
    pub const ALL: [Self; 35] = [
        Self::Llama,
        Self::Mistral,
        Self::Mistral3,
        Self::Ministral3,
        Self::Mixtral,
        Self::Qwen2,
        Self::Qwen2Moe,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Qwen3Vl,
        Self::Qwen3VlMoe,
        Self::Granite,
        Self::GraniteMoeHybrid,
        Self::SmolLm3,
        Self::Olmo2,
        Self::Olmo3,
        Self::SeedOss,
        Self::Ernie45,
        Self::Glm,
        Self::Glm4,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::Phi3,
        Self::Gemma3,
        Self::Gemma3Multimodal,
        Self::Gemma4,
        Self::Gemma4Multimodal,
        Self::Gemma4Unified,
        Self::GptOss,
        Self::Qwen3Next,
        Self::Qwen35,
        Self::Qwen35Multimodal,
        Self::Qwen35Moe,
        Self::Qwen35MoeMultimodal,
        Self::LlamaEagle3,
    ];

    /// Name of the architecture in the field `architectures` of `config.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Mistral3 => "Mistral3ForConditionalGeneration",
            Self::Ministral3 => "Ministral3ForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen2Moe => "Qwen2MoeForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Qwen3Vl => "Qwen3VLForConditionalGeneration",
            Self::Qwen3VlMoe => "Qwen3VLMoeForConditionalGeneration",
            Self::Granite => "GraniteForCausalLM",
            Self::GraniteMoeHybrid => "GraniteMoeHybridForCausalLM",
            Self::SmolLm3 => "SmolLM3ForCausalLM",
            Self::Olmo2 => "Olmo2ForCausalLM",
            Self::Olmo3 => "Olmo3ForCausalLM",
            Self::SeedOss => "SeedOssForCausalLM",
            Self::Ernie45 => "Ernie4_5ForCausalLM",
            Self::Glm => "GlmForCausalLM",
            Self::Glm4 => "Glm4ForCausalLM",
            Self::DeepseekV2 => "DeepseekV2ForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Gemma3Multimodal => "Gemma3ForConditionalGeneration",
            Self::Gemma4 => "Gemma4ForCausalLM",
            Self::Gemma4Multimodal => "Gemma4ForConditionalGeneration",
            Self::Gemma4Unified => "Gemma4UnifiedForConditionalGeneration",
            Self::GptOss => "GptOssForCausalLM",
            Self::Qwen3Next => "Qwen3NextForCausalLM",
            Self::Qwen35 => "Qwen3_5ForCausalLM",
            Self::Qwen35Multimodal => "Qwen3_5ForConditionalGeneration",
            Self::Qwen35Moe => "Qwen3_5MoeForCausalLM",
            Self::Qwen35MoeMultimodal => "Qwen3_5MoeForConditionalGeneration",
            Self::LlamaEagle3 => "LlamaForCausalLMEagle3",
        }
    }

    /// Whether the layers are those of Gemma 3.
    pub(crate) const fn is_gemma3(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Gemma3Multimodal)
    }

    /// Whether the layers are those of Gemma 4.
    pub const fn is_gemma4(self) -> bool {
        matches!(self, Self::Gemma4 | Self::Gemma4Multimodal | Self::Gemma4Unified)
    }

    /// Whether the activation is GELU and embeddings are multiplied by the square root of the hidden size.
    pub(crate) const fn is_gemma(self) -> bool {
        self.is_gemma3() || self.is_gemma4()
    }
}

impl fmt::Display for ModelArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
