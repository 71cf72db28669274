//! `quantization_config` in the format `modelopt` (NVIDIA ModelOpt), and the file `hf_quant_config.json`.

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use super::compressed_tensors::groups;
use super::kv_scales::check_kv_cache_scheme;
use super::{
    ActivationScheme, CheckpointScaleGranularity, LayerQuantization, ModulePattern,
    QuantizationConfig, QuantizationGroup, QuantizationTarget, expect_text,
};
use std::path::Path;

/// Known fields of `quantization_config` in the format `modelopt`. `producer` contains the ModelOpt version.
const FIELDS: &[&str] = &[
    "quant_method",
    "quant_algo",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "config_groups",
    "ignore",
    "exclude_modules",
    "producer",
];
const ALGORITHM: &str = "quant_algo";

pub(super) fn read(object: &JsonFields) -> Result<QuantizationConfig, ModelConfigError> {
    object.reject_unknown(FIELDS)?;
    object.reject_disagreement("ignore", object, "exclude_modules")?;
    check_kv_cache_scheme(object)?;
    expect_text(object, "kv_cache_quant_algo", &["FP8"])?;
    let format = match object.text(ALGORITHM)? {
        Some("FP8") => format(CheckpointScaleGranularity::Tensor, ActivationScheme::Static),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => {
            format(CheckpointScaleGranularity::Channels, ActivationScheme::Dynamic)
        }
        _ => return Err(object.unsupported(ALGORITHM, "FP8 and FP8_PER_CHANNEL_PER_TOKEN are")),
    };
    let expected = QuantizationGroup { targets: vec![QuantizationTarget::Linear], format };
    if groups(object)?.iter().any(|group| *group != expected) {
        let why = "only one group of all linear layers in the format of quant_algo is";
        return Err(object.unsupported("config_groups", why));
    }
    let mut ignored = ModulePattern::list(object, "ignore", ModulePattern::glob)?;
    ignored.extend(ModulePattern::list(object, "exclude_modules", ModulePattern::glob)?);
    Ok(QuantizationConfig::uniform(format, ignored))
}

/// Reads `hf_quant_config.json` at `path`, and returns the configuration `own` of `config.json` or, if there
/// is none, the configuration in this file. `fields` are the fields of `config.json`.
pub(super) fn read_file(
    own: Option<QuantizationConfig>,
    fields: &JsonFields,
    path: &Path,
) -> Result<Option<QuantizationConfig>, ModelConfigError> {
    let file = JsonFields::read(path)?;
    let Some(object) = file.object("quantization")? else { return Ok(own) };
    if let Some(config) = fields.object("quantization_config")? {
        object.reject_disagreement(ALGORITHM, &config, ALGORITHM)?;
    }
    match own {
        // Without `quant_algo`, only the KV cache is quantised.
        None if object.value(ALGORITHM).is_none() => Ok(None),
        None => read(&object).map(Some),
        own => Ok(own),
    }
}

fn format(scales: CheckpointScaleGranularity, activations: ActivationScheme) -> LayerQuantization {
    LayerQuantization { scales, activations, suffixes: &["_scale"] }
}
