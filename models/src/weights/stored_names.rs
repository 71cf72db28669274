//! Names under which checkpoints store the weights of the weight table.
//!
//! The weight table has one canonical name per weight. A checkpoint may store the weight with a different
//! prefix, with a name that is specific to the model family (`stored_prefixes` and `stored_modules` of
//! `ArchitectureTraits`), or as rows of a fused tensor. The loader replaces stored names by canonical names; synthetic
//! checkpoints are written with the names that transformers reads. The values of synthetic weights depend on
//! canonical names only.

use crate::ModelConfig;
use crate::weight_table::MIDLAYER;

/// Replacement of a part of tensor names: stored spelling and canonical spelling.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorNameReplacement {
    stored: &'static str,
    canonical: &'static str,
}

/// Returns the replacement of `stored` by `canonical`.
pub(crate) const fn spelling(
    stored: &'static str,
    canonical: &'static str,
) -> TensorNameReplacement {
    TensorNameReplacement { stored, canonical }
}

/// Prefix of the text part of a multimodal model, in checkpoints that transformers 5 writes.
pub(crate) const MODEL_LANGUAGE_MODEL: &[TensorNameReplacement] =
    &[spelling("model.language_model.", "model.")];
/// Prefixes of the text part of a multimodal model, in older checkpoints.
pub(crate) const LANGUAGE_MODEL: &[TensorNameReplacement] =
    &[spelling("language_model.model.", "model."), spelling("language_model.lm_head.", "lm_head.")];
/// Prefixes in checkpoints of `…Model` architectures, which store the decoder without an LM head.
const DECODER_ONLY: &[TensorNameReplacement] = &[
    spelling("embed_tokens.", "model.embed_tokens."),
    spelling("layers.", "model.layers."),
    spelling("norm.", "model.norm."),
];
/// Prefix of the decoder layer in newer EAGLE-3 checkpoints.
const DRAFT_LAYER: &[TensorNameReplacement] = &[spelling(MIDLAYER[1], MIDLAYER[0])];

/// Prefix of the tensors of the MTP module of Qwen3-Next and Qwen3.5.
pub(super) const MTP: &str = "mtp.";
/// Prefix of the decoder layers within the MTP module.
const MTP_LAYERS: &str = "layers.";
/// Modules of the MTP module outside of its decoder layer (vLLM `qwen3_next_mtp.py`).
const MTP_MODULES: &[TensorNameReplacement] = &[
    spelling("fc.", "eh_proj."),
    spelling("pre_fc_norm_embedding.", "enorm."),
    spelling("pre_fc_norm_hidden.", "hnorm."),
    spelling("norm.", "shared_head.norm."),
];

/// Prefixes of the tensors of vision and audio encoders and of their projections to the language model, which are not
/// loaded.
const VISION_PREFIXES: &[&str] = &[
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
    "model.vision_embedder.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
];

/// Returns the canonical name of a tensor of an MTP module that is stored apart from the decoder layers; `None` for all
/// other tensors.
fn canonical_mtp_name(config: &ModelConfig, stored: &str) -> Option<String> {
    let rest = stored.strip_prefix(MTP).filter(|_| config.gated_delta.is_some())?;
    let module = MTP_MODULES.iter().find_map(|spelling| {
        let rest = rest.strip_prefix(spelling.stored)?;
        Some(format!("model.layers.{}.{}{rest}", config.layers, spelling.canonical))
    });
    module.or_else(|| {
        let (index, rest) = rest.strip_prefix(MTP_LAYERS)?.split_once('.')?;
        let index: usize = index.parse().ok()?;
        Some(format!("model.layers.{}.{rest}", config.layers.checked_add(index)?))
    })
}

/// Returns the stored name of a tensor of an MTP module that is stored apart from the decoder layers; `None` for all other
/// tensors.
fn stored_mtp_name(config: &ModelConfig, canonical: &str) -> Option<String> {
    config.gated_delta.as_ref()?;
    let (index, rest) = canonical.strip_prefix("model.layers.")?.split_once('.')?;
    let index = index.parse::<usize>().ok()?.checked_sub(config.layers)?;
    let module = MTP_MODULES.iter().find_map(|spelling| {
        Some(format!("{MTP}{}{}", spelling.stored, rest.strip_prefix(spelling.canonical)?))
    });
    Some(module.unwrap_or_else(|| format!("{MTP}{MTP_LAYERS}{index}.{rest}")))
}

/// Returns the canonical name of a stored tensor; a name that is in no spelling table is already canonical.
pub(super) fn canonical_name(config: &ModelConfig, stored: &str) -> String {
    if let Some(name) = canonical_mtp_name(config, stored) {
        return name;
    }
    let prefixes: &[&[TensorNameReplacement]] = match config.eagle {
        Some(_) => &[DRAFT_LAYER],
        None => &[MODEL_LANGUAGE_MODEL, LANGUAGE_MODEL, DECODER_ONLY],
    };
    let renamed = prefixes.iter().copied().flatten().find_map(|spelling| {
        let rest = stored.strip_prefix(spelling.stored)?;
        Some(format!("{}{rest}", spelling.canonical))
    });
    let name = renamed.unwrap_or_else(|| stored.to_owned());
    let modules = config.architecture.traits().stored_modules.iter();
    modules.fold(name, |name, spelling| name.replace(spelling.stored, spelling.canonical))
}

/// Returns the name of the tensor `canonical` in published checkpoints of the model family.
pub(crate) fn family_name(config: &ModelConfig, canonical: &str) -> String {
    if let Some(name) = stored_mtp_name(config, canonical) {
        return name;
    }
    let traits = config.architecture.traits();
    let renamed = traits.stored_prefixes.iter().find_map(|spelling| {
        let rest = canonical.strip_prefix(spelling.canonical)?;
        Some(format!("{}{rest}", spelling.stored))
    });
    let name = renamed.unwrap_or_else(|| canonical.to_owned());
    let modules = traits.stored_modules.iter().rev();
    modules.fold(name, |name, spelling| name.replace(spelling.canonical, spelling.stored))
}

/// Whether the tensor `name` belongs to the vision part of a multimodal model; only the text part is loaded.
pub(super) fn is_vision_tensor(config: &ModelConfig, name: &str) -> bool {
    config.architecture.is_multimodal()
        && VISION_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelArchitecture;
    use crate::weight_table::tests::tiny;

    const NAMES: &[&str] = &[
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.pre_feedforward_layernorm.weight",
        "model.layers.1.post_feedforward_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "lm_head.weight",
    ];

    #[test]
    fn family_names_are_read_as_canonical_names() {
        for architecture in ModelArchitecture::ALL {
            let config = ModelConfig { architecture, ..tiny("LlamaForCausalLM") };
            for name in NAMES {
                let stored = family_name(&config, name);
                assert_eq!(canonical_name(&config, &stored), *name, "{architecture}: {stored}");
            }
        }
    }

    #[test]
    fn norms_of_glm4_have_other_names() {
        let config = tiny("Glm4ForCausalLM");
        for (canonical, stored) in [
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ] {
            let [canonical, stored] =
                [canonical, stored].map(|norm| format!("model.layers.0.{norm}.weight"));
            assert_eq!(family_name(&config, &canonical), stored);
            assert_eq!(canonical_name(&config, &stored), canonical);
        }
    }
}
