//! Which drafts can be made, and verified, where.

use models::ModelConfig;
use protocol::{SpeculativeConfig, SpeculativeMethod};

/// Most drafts of a row that a draft layer is asked for.
pub const MTP_DRAFTS_MAX: u8 = 4;

/// Most drafts of a row that a model of its own is asked for.
pub const MODEL_DRAFTS_MAX: u8 = 16;

/// Drafts that cannot be made or verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpeculationError {
    /// More than a draft layer is asked for.
    #[error("num_speculative_tokens {drafts}: a draft layer makes 1 to {MTP_DRAFTS_MAX}")]
    TooManyDrafts {
        /// Drafts asked for.
        drafts: u8,
    },
    /// No draft layer, or several.
    #[error(
        "method mtp needs num_nextn_predict_layers 1 in config.json; {architecture} has {layers} here"
    )]
    MtpModules {
        /// The model.
        architecture: &'static str,
        /// Draft layers of the checkpoint.
        layers: usize,
    },
    /// More than anybody asks for.
    #[error(
        "num_speculative_tokens {drafts}: a model drafts 1 to {MODEL_DRAFTS_MAX} tokens for another"
    )]
    TooManyModelDrafts {
        /// Drafts asked for.
        drafts: u8,
    },
    /// No model to draft.
    #[error("method draft_model needs a model")]
    NoDraftModel,
    /// Two models whose ids mean different tokens.
    #[error(
        "field `vocab_size` of the model that drafts: it has {draft} ids, the model {model}, and drafts must be ids of the model"
    )]
    Vocabulary {
        /// Ids of the one that drafts.
        draft: usize,
        /// Ids of the other.
        model: usize,
    },
    /// Nothing to draft by, or what is no such checkpoint.
    #[error("method eagle3 needs a model whose field `architectures` is LlamaForCausalLMEagle3")]
    NoEagleCheckpoint,
    /// A checkpoint of one method that another one is to draft by.
    #[error("method draft_model: a model of LlamaForCausalLMEagle3 drafts by method eagle3")]
    UnexpectedEagleCheckpoint,
    /// A checkpoint that was made for a model of another width.
    #[error(
        "field `{field}` of the model that drafts: its states have {draft} channels, those of the model {model} (hidden_size)"
    )]
    HiddenSize {
        /// Who says so.
        field: &'static str,
        /// Channels that it begins with.
        draft: usize,
        /// Channels of the model.
        model: usize,
    },
    /// A checkpoint that was made for a deeper model.
    #[error(
        "field `eagle_aux_hidden_state_layer_ids` of the model that drafts: what enters layer {layer}, of a model of {layers} layers"
    )]
    AuxLayer {
        /// The layer.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
}

/// Checks that a model can be served with such drafts, before anything is loaded.
///
/// Errors: what is in the way.
pub fn check_speculation(
    speculation: Option<SpeculativeConfig>,
    model: &ModelConfig,
    draft: Option<&ModelConfig>,
) -> Result<(), SpeculationError> {
    let Some(SpeculativeConfig { draft_tokens: drafts, method: drafter, .. }) = speculation else {
        return Ok(());
    };
    match drafter {
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
    let both = draft.and_then(|draft| Some((draft, draft.eagle?)));
    let (draft, eagle) = both.ok_or(SpeculationError::NoEagleCheckpoint)?;
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
    if !(1..=MTP_DRAFTS_MAX).contains(&drafts) {
        return Err(SpeculationError::TooManyDrafts { drafts });
    }
    if model.mtp_layers != 1 {
        let (architecture, layers) = (model.architecture.name(), model.mtp_layers);
        return Err(SpeculationError::MtpModules { architecture, layers });
    }
    Ok(())
}
