//! Names under which checkpoints store the weights of the weight table.
//!
//! The weight table has one canonical name per weight. A checkpoint may store the weight under another
//! prefix, under a name of its family, or as rows of a fused tensor. The tables of this file list these
//! spellings; the loader replaces stored names by canonical names, and synthetic checkpoints get the names
//! that transformers reads. Values of synthetic weights depend on canonical names only.

use crate::weight_table::MIDLAYER;
use crate::{ModelArchitecture, ModelConfig};

/// Two spellings of a part of tensor names.
#[derive(Debug, Clone, Copy)]
struct NameSpelling {
    stored: &'static str,
    canonical: &'static str,
}

const fn spelling(stored: &'static str, canonical: &'static str) -> NameSpelling {
    NameSpelling { stored, canonical }
}

/// Prefixes of the text part of a multimodal model, in checkpoints that transformers 5 writes.
const MODEL_LANGUAGE_MODEL: &[NameSpelling] = &[spelling("model.language_model.", "model.")];
/// Prefixes of the text part of a multimodal model, in older checkpoints.
const LANGUAGE_MODEL: &[NameSpelling] =
    &[spelling("language_model.model.", "model."), spelling("language_model.lm_head.", "lm_head.")];
/// Prefixes of checkpoints of `…Model` architectures, which store the decoder only.
const DECODER_ONLY: &[NameSpelling] = &[
    spelling("embed_tokens.", "model.embed_tokens."),
    spelling("layers.", "model.layers."),
    spelling("norm.", "model.norm."),
];
/// Prefix of the decoder layer in newer EAGLE-3 checkpoints.
const DRAFT_LAYER: &[NameSpelling] = &[spelling(MIDLAYER[1], MIDLAYER[0])];

/// Modules of a Mixtral layer (`modeling_mixtral.py` before transformers 5, whose checkpoints are published).
const MIXTRAL_MODULES: &[NameSpelling] = &[
    spelling(".block_sparse_moe.", ".mlp."),
    spelling(".w1.", ".gate_proj."),
    spelling(".w2.", ".down_proj."),
    spelling(".w3.", ".up_proj."),
];

/// Prefixes of the tensors of vision encoders and their projections, which the text part does not need.
const VISION_PREFIXES: &[&str] = &[
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
];

/// Spellings of modules inside of a layer, which depend on the model family.
fn module_spellings(config: &ModelConfig) -> &'static [NameSpelling] {
    match config.architecture {
        ModelArchitecture::Mixtral => MIXTRAL_MODULES,
        _ => &[],
    }
}

/// Returns the canonical name of a stored tensor; names without another spelling are canonical.
pub(super) fn canonical_name(config: &ModelConfig, stored: &str) -> String {
    let prefixes: &[&[NameSpelling]] = match config.eagle {
        Some(_) => &[DRAFT_LAYER],
        None => &[MODEL_LANGUAGE_MODEL, LANGUAGE_MODEL, DECODER_ONLY],
    };
    let renamed = prefixes.iter().copied().flatten().find_map(|spelling| {
        let rest = stored.strip_prefix(spelling.stored)?;
        Some(format!("{}{rest}", spelling.canonical))
    });
    let name = renamed.unwrap_or_else(|| stored.to_owned());
    let modules = module_spellings(config).iter();
    modules.fold(name, |name, spelling| name.replace(spelling.stored, spelling.canonical))
}

/// Returns the name that published checkpoints of the family have for the tensor `canonical`.
pub(crate) fn family_name(config: &ModelConfig, canonical: &str) -> String {
    let prefixes: &[NameSpelling] = match config.architecture {
        ModelArchitecture::Mistral3 => LANGUAGE_MODEL,
        ModelArchitecture::Qwen3Vl | ModelArchitecture::Qwen3VlMoe => MODEL_LANGUAGE_MODEL,
        _ => &[],
    };
    let renamed = prefixes.iter().find_map(|spelling| {
        let rest = canonical.strip_prefix(spelling.canonical)?;
        Some(format!("{}{rest}", spelling.stored))
    });
    let name = renamed.unwrap_or_else(|| canonical.to_owned());
    let modules = module_spellings(config).iter();
    modules.fold(name, |name, spelling| name.replace(spelling.canonical, spelling.stored))
}

/// Whether the tensor `name` belongs to the vision part of a multimodal model, of which only the text part is
/// loaded.
pub(super) fn is_vision_tensor(config: &ModelConfig, name: &str) -> bool {
    config.architecture.is_multimodal()
        && VISION_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}
