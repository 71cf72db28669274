//! Checks of the speculative decoding settings against the model configurations.

use models::ModelConfig;
use protocol::{SpeculativeConfig, SpeculativeMethod};

/// Maximum number of draft tokens per row of an MTP module or EAGLE-3 layer.
pub const MTP_DRAFTS_MAX: u8 = 16;

/// Maximum number of draft tokens per row of a draft model.
pub const MODEL_DRAFTS_MAX: u8 = 16;

// Rows with draft tokens are computed in the form that `StateReplay` repeats.
const _: () = {
    let most = if MTP_DRAFTS_MAX > MODEL_DRAFTS_MAX { MTP_DRAFTS_MAX } else { MODEL_DRAFTS_MAX };
    assert!((most as usize) < kernels::GatedDeltaRule::RECURRENT_TOKENS);
};

/// Reason why speculative decoding settings cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpeculationError {
    /// The draft model has recurrent states, which its draft passes would have to rewind to the last accepted draft token.
    #[error("{architecture} is not supported as draft model: its layers have recurrent states")]
    RecurrentDraftModel {
        /// Architecture of the draft model.
        architecture: &'static str,
    },
    /// The draft model has MLA, whose compressed KV has no layout for the block ids of layers of different sizes.
    #[error(
        "{draft} is not supported as draft model of {architecture}: its layers have MLA, and those of {architecture} KV heads of two sizes"
    )]
    MlaDraftModel {
        /// Architecture of the draft model.
        draft: &'static str,
        /// Architecture of the target model.
        architecture: &'static str,
    },
    /// The draft model has keys and values of different sizes, which its one KV group cannot store.
    #[error(
        "{architecture} is not supported as draft model: with global_head_dim its KV blocks have several layouts"
    )]
    DraftLayerShapes {
        /// Architecture of the draft model.
        architecture: &'static str,
    },
    /// The number of draft tokens is outside the supported range of an MTP module or EAGLE-3 layer.
    #[error(
        "num_speculative_tokens {drafts}: an MTP module or EAGLE-3 layer supports 1 to {MTP_DRAFTS_MAX}"
    )]
    TooManyDrafts {
        /// Configured number of draft tokens.
        drafts: u8,
    },
    /// The checkpoint has no MTP modules.
    #[error(
        "method mtp: this {architecture} model has no MTP modules (num_nextn_predict_layers, or mtp_num_hidden_layers of Qwen models, in config.json); use ngram or a draft model"
    )]
    NoMtpModules {
        /// Architecture of the model.
        architecture: &'static str,
    },
    /// The checkpoint has several MTP modules.
    #[error(
        "method mtp: this {architecture} model has {layers} MTP modules (num_nextn_predict_layers, or mtp_num_hidden_layers of Qwen models, in config.json); 1 is supported"
    )]
    MtpModules {
        /// Architecture of the model.
        architecture: &'static str,
        /// Number of MTP modules in the checkpoint.
        layers: usize,
    },
    /// The number of draft tokens is outside the supported range of a draft model.
    #[error("num_speculative_tokens {drafts}: a draft model supports 1 to {MODEL_DRAFTS_MAX}")]
    TooManyModelDrafts {
        /// Configured number of draft tokens.
        drafts: u8,
    },
    /// The method needs a draft model, but none is configured.
    #[error("method draft_model needs field `model`")]
    NoDraftModel,
    /// Draft model and target model have different vocabulary sizes.
    #[error(
        "field `vocab_size` of the draft model is {draft}, that of the target model is {model}: they must be equal"
    )]
    Vocabulary {
        /// Vocabulary size of the draft model.
        draft: usize,
        /// Vocabulary size of the target model.
        model: usize,
    },
    /// The method is EAGLE-3, but no draft model is configured, or the draft model is not an EAGLE-3
    /// checkpoint.
    #[error(
        "method eagle3 needs a draft model whose field `architectures` is LlamaForCausalLMEagle3"
    )]
    NoEagleCheckpoint,
    /// The method is `draft_model`, but the configured checkpoint is an EAGLE-3 layer.
    #[error("method draft_model: a draft model of LlamaForCausalLMEagle3 needs method eagle3")]
    UnexpectedEagleCheckpoint,
    /// The EAGLE-3 checkpoint was trained for a target model with another hidden size.
    #[error(
        "field `{field}` of the draft model is {draft}, hidden_size of the target model is {model}: they must be equal"
    )]
    HiddenSize {
        /// Field of the draft model's `config.json` that contains `draft`.
        field: &'static str,
        /// Hidden size of the target model that the EAGLE-3 layer was trained for.
        draft: usize,
        /// Hidden size of the target model.
        model: usize,
    },
    /// The EAGLE-3 checkpoint reads the input of a layer that the target model does not have.
    #[error(
        "field `eagle_aux_hidden_state_layer_ids` of the draft model: input of layer {layer}, the target model has {layers} layers"
    )]
    AuxLayer {
        /// Index of the layer from which the EAGLE-3 layer reads the input.
        layer: usize,
        /// Number of layers of the target model.
        layers: usize,
    },
}

/// Checks that a model can be served with the speculative decoding settings. Called before the model is
/// loaded.
///
/// Errors: the error names the first setting that conflicts with the models.
pub fn check_speculation(
    speculation: Option<SpeculativeConfig>,
    model: &ModelConfig,
    draft: Option<&ModelConfig>,
) -> Result<(), SpeculationError> {
    let Some(SpeculativeConfig { draft_tokens: drafts, method, .. }) = speculation else {
        return Ok(());
    };
    if let Some(draft) = draft.filter(|draft| draft.gated_delta.is_some()) {
        let architecture = draft.architecture.name();
        return Err(SpeculationError::RecurrentDraftModel { architecture });
    }
    if let Some(draft) = draft.filter(|draft| draft.layer_shapes.is_some()) {
        let architecture = draft.architecture.name();
        return Err(SpeculationError::DraftLayerShapes { architecture });
    }
    if let Some(draft) = draft.filter(|draft| draft.mla.is_some() && model.layer_shapes.is_some()) {
        let (draft, architecture) = (draft.architecture.name(), model.architecture.name());
        return Err(SpeculationError::MlaDraftModel { draft, architecture });
    }
    match method {
        SpeculativeMethod::Ngram { .. } => Ok(()),
        SpeculativeMethod::Mtp => check_mtp(drafts, model),
        SpeculativeMethod::DraftModel => check_draft_model(drafts, model, draft),
        SpeculativeMethod::Eagle3 => check_eagle3(drafts, model, draft),
    }
}

fn check_eagle3(
    drafts: u8,
    model: &ModelConfig,
    draft: Option<&ModelConfig>,
) -> Result<(), SpeculationError> {
    if !(1..=MTP_DRAFTS_MAX).contains(&drafts) {
        return Err(SpeculationError::TooManyDrafts { drafts });
    }
    let with_eagle = draft.and_then(|draft| Some((draft, draft.eagle?)));
    let (draft, eagle) = with_eagle.ok_or(SpeculationError::NoEagleCheckpoint)?;
    check_vocabulary(draft, model)?;
    if eagle.target_hidden != model.hidden {
        let stated = eagle.target_hidden != draft.hidden;
        let field = if stated { "target_hidden_size" } else { "hidden_size" };
        let (draft, model) = (eagle.target_hidden, model.hidden);
        return Err(SpeculationError::HiddenSize { field, draft, model });
    }
    let (layers, inputs) = (model.layers, eagle.aux_layers_for(model.layers));
    match inputs.into_iter().find(|&layer| layer > layers) {
        Some(layer) => Err(SpeculationError::AuxLayer { layer, layers }),
        None => Ok(()),
    }
}

fn check_draft_model(
    drafts: u8,
    model: &ModelConfig,
    draft: Option<&ModelConfig>,
) -> Result<(), SpeculationError> {
    if !(1..=MODEL_DRAFTS_MAX).contains(&drafts) {
        return Err(SpeculationError::TooManyModelDrafts { drafts });
    }
    let draft = draft.ok_or(SpeculationError::NoDraftModel)?;
    if draft.eagle.is_some() {
        return Err(SpeculationError::UnexpectedEagleCheckpoint);
    }
    check_vocabulary(draft, model)
}

fn check_vocabulary(draft: &ModelConfig, model: &ModelConfig) -> Result<(), SpeculationError> {
    let (draft, model) = (draft.vocab, model.vocab);
    if draft != model {
        return Err(SpeculationError::Vocabulary { draft, model });
    }
    Ok(())
}

fn check_mtp(drafts: u8, model: &ModelConfig) -> Result<(), SpeculationError> {
    let architecture = model.architecture.name();
    match model.mtp_layers {
        0 => Err(SpeculationError::NoMtpModules { architecture }),
        1 if !(1..=MTP_DRAFTS_MAX).contains(&drafts) => {
            Err(SpeculationError::TooManyDrafts { drafts })
        }
        1 => Ok(()),
        layers => Err(SpeculationError::MtpModules { architecture, layers }),
    }
}
