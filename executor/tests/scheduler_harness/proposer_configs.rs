//! Configurations of executors with speculative decoding: one function per proposer.

use super::model_configs::{mla_model, recurrent_model};
use executor::{ExecutorConfig, ModelDtype};
use models::ModelConfig;
use protocol::{DraftAcceptanceRule, SpeculativeConfig, SpeculativeMethod};
use std::path::{Path, PathBuf};

/// Adds speculative decoding by the MTP module of the model of `recurrent_model`, with up to `drafts` draft tokens per row.
pub(crate) fn recurrent_mtp_drafting(dtype: ModelDtype, drafts: u8) -> ExecutorConfig {
    with_mtp(recurrent_model(dtype), drafts)
}

/// Adds speculative decoding by the model's own MTP module, with up to `drafts` draft tokens per row.
pub(crate) fn with_mtp(mut config: ExecutorConfig, drafts: u8) -> ExecutorConfig {
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method: SpeculativeMethod::Mtp,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

/// Adds speculative decoding by n-gram lookup, with up to `drafts` draft tokens per row.
pub(crate) fn speculating(mut config: ExecutorConfig, drafts: u8) -> ExecutorConfig {
    let method = SpeculativeMethod::Ngram { lookup_min: 1, lookup_max: 3 };
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

/// Returns the MLA model with an MTP module that proposes up to `drafts` draft tokens.
pub(crate) fn mtp_drafting(dtype: ModelDtype, drafts: u8) -> ExecutorConfig {
    let mut config = mla_model(dtype);
    config.model.mtp_layers = 1;
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method: SpeculativeMethod::Mtp,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

/// Adds speculative decoding by a draft model, with up to `drafts` draft tokens per row.
pub(crate) fn model_drafting(
    mut config: ExecutorConfig,
    draft: ModelConfig,
    drafts: u8,
) -> ExecutorConfig {
    let (method, acceptance) = (SpeculativeMethod::DraftModel, DraftAcceptanceRule::Exact);
    config.settings.speculative =
        Some(SpeculativeConfig { draft_tokens: drafts, method, acceptance });
    (config.settings.draft_model_dir, config.draft) = (Some(PathBuf::new()), Some(draft));
    config
}

/// Returns an EAGLE-3 layer with a draft vocabulary of 96 of the target model's ids.
pub(crate) fn eagle() -> ModelConfig {
    let text = r#"{
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 384,
        "draft_vocab_size": 96, "target_hidden_size": 64, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false,
        "eagle_config": {"use_aux_hidden_state": true}, "torch_dtype": "bfloat16"
    }"#;
    ModelConfig::from_json(Path::new("config.json"), text).unwrap()
}

/// Adds speculative decoding by an EAGLE-3 layer, with up to `drafts` draft tokens per row.
pub(crate) fn eagle_drafting(
    config: ExecutorConfig,
    eagle: ModelConfig,
    drafts: u8,
) -> ExecutorConfig {
    let mut config = model_drafting(config, eagle, drafts);
    let (method, acceptance) = (SpeculativeMethod::Eagle3, DraftAcceptanceRule::Exact);
    config.settings.speculative =
        Some(SpeculativeConfig { draft_tokens: drafts, method, acceptance });
    config
}
