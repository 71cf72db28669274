//! Which drafts can be made, and verified, where.

use models::Config;
use protocol::{Drafter, Speculation};

/// Most drafts of a row that a draft layer is asked for.
pub const LAYER_DRAFTS_MAX: u8 = 4;

/// Most drafts of a row that a model of its own is asked for.
pub const MODEL_DRAFTS_MAX: u8 = 16;

/// Drafts that cannot be made or verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpeculationError {
    /// More than a draft layer is asked for.
    #[error(
        "num_speculative_tokens {drafts}: a model's own draft layer makes 1 to {LAYER_DRAFTS_MAX}"
    )]
    Drafts {
        /// Drafts asked for.
        drafts: u8,
    },
    /// No draft layer, or several.
    #[error(
        "method mtp needs num_nextn_predict_layers 1 in config.json; {architecture} has {layers} here"
    )]
    Layers {
        /// The model.
        architecture: &'static str,
        /// Draft layers of the checkpoint.
        layers: usize,
    },
    /// More than anybody asks for.
    #[error(
        "num_speculative_tokens {drafts}: a model drafts 1 to {MODEL_DRAFTS_MAX} tokens for another"
    )]
    ModelDrafts {
        /// Drafts asked for.
        drafts: u8,
    },
    /// No model to draft.
    #[error("method draft_model needs a model")]
    NoModel,
    /// Two models whose ids mean different tokens.
    #[error("the draft model has {draft} ids, the model {model}: drafts must be ids of the model")]
    Vocabulary {
        /// Ids of the one that drafts.
        draft: usize,
        /// Ids of the other.
        model: usize,
    },
}

/// Checks that a model can be served with such drafts, before anything is loaded.
///
/// Errors: what is in the way.
pub fn check_speculation(
    speculation: Option<Speculation>,
    (model, draft): (&Config, Option<&Config>),
) -> Result<(), SpeculationError> {
    let Some(Speculation { drafts, drafter, .. }) = speculation else { return Ok(()) };
    match drafter {
        Drafter::Ngram { .. } => Ok(()),
        Drafter::Layer => check_layer(drafts, model),
        Drafter::Model => check_model(drafts, model, draft),
    }
}

fn check_model(drafts: u8, model: &Config, draft: Option<&Config>) -> Result<(), SpeculationError> {
    if !(1..=MODEL_DRAFTS_MAX).contains(&drafts) {
        return Err(SpeculationError::ModelDrafts { drafts });
    }
    let draft = draft.ok_or(SpeculationError::NoModel)?;
    let (draft, model) = (draft.vocab, model.vocab);
    if draft != model {
        return Err(SpeculationError::Vocabulary { draft, model });
    }
    Ok(())
}

fn check_layer(drafts: u8, model: &Config) -> Result<(), SpeculationError> {
    if !(1..=LAYER_DRAFTS_MAX).contains(&drafts) {
        return Err(SpeculationError::Drafts { drafts });
    }
    if model.draft_layers != 1 {
        let (architecture, layers) = (model.architecture.name(), model.draft_layers);
        return Err(SpeculationError::Layers { architecture, layers });
    }
    Ok(())
}
