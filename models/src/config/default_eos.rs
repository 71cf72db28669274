//! EOS tokens of models whose files contain none.

use super::ModelArchitecture;

/// Returns the default of `eos_token_id` of transformers (`configuration_*.py`); empty = the default is `None`.
pub(super) const fn default_eos(architecture: ModelArchitecture) -> &'static [u32] {
    use ModelArchitecture as A;
    match architecture {
        A::Llama
        | A::LlamaEagle3
        | A::Granite
        | A::GraniteMoeHybrid
        | A::SeedOss
        | A::Ernie45
        | A::Mistral
        | A::Mistral3
        | A::Ministral3
        | A::Mixtral
        | A::DeepseekV2 => &[2],
        A::DeepseekV3
        | A::Gemma3
        | A::Gemma3Multimodal
        | A::Gemma4
        | A::Gemma4Multimodal
        | A::Gemma4Unified => &[1],
        A::SmolLm3 => &[128_001],
        A::Glm | A::Glm4 => &[151_329, 151_336, 151_338],
        A::Olmo2 | A::Olmo3 => &[50_279],
        A::Phi3 => &[32_000],
        A::Qwen2
        | A::Qwen2Moe
        | A::Qwen3
        | A::Qwen3Moe
        | A::Qwen3Vl
        | A::Qwen3VlMoe
        | A::Qwen3Next
        | A::Qwen35
        | A::Qwen35Multimodal
        | A::Qwen35Moe
        | A::Qwen35MoeMultimodal
        | A::GptOss => &[],
    }
}
