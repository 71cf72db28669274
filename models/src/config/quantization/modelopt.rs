//! `quantization_config` in the format `modelopt` (NVIDIA ModelOpt), and the file `hf_quant_config.json`.

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use super::compressed_tensors::groups;
use super::kv_scales::check_kv_cache_scheme;
use super::{
    ActivationScheme, CheckpointScaleGranularity, LayerQuantization, ModulePattern,
    QuantizationConfig, QuantizationGroup, QuantizationTarget, expect_text,
};
use std::collections::BTreeSet;
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
    LAYERS,
];
const ALGORITHM: &str = "quant_algo";
/// Algorithm of a checkpoint whose layers have algorithms of their own, in the object `LAYERS`.
const MIXED: &str = "MIXED_PRECISION";
const LAYERS: &str = "quantized_layers";

pub(super) fn read(object: &JsonFields) -> Result<QuantizationConfig, ModelConfigError> {
    object.reject_unknown(FIELDS)?;
    object.reject_disagreement("ignore", object, "exclude_modules")?;
    check_kv_cache_scheme(object)?;
    expect_text(object, "kv_cache_quant_algo", &["FP8"])?;
    let mut ignored = ModulePattern::list(object, "ignore", ModulePattern::glob)?;
    ignored.extend(ModulePattern::list(object, "exclude_modules", ModulePattern::glob)?);
    if object.text(ALGORITHM)? == Some(MIXED) {
        return Ok(QuantizationConfig { groups: listed_groups(object)?, ignored });
    }
    if object.value(LAYERS).is_some() {
        return Err(object.unsupported(LAYERS, "only with quant_algo MIXED_PRECISION it is"));
    }
    let format = format_of(object)?;
    let expected = QuantizationGroup { targets: vec![QuantizationTarget::Linear], format };
    if groups(object)?.iter().any(|group| *group != expected) {
        let why = "only one group of all linear layers in the format of quant_algo is";
        return Err(object.unsupported("config_groups", why));
    }
    Ok(QuantizationConfig::uniform(format, ignored))
}

/// Returns one group per format of the layers in `quantized_layers`. Layers that are not listed are not
/// quantised.
///
/// Errors: a layer has an algorithm that is not supported; the error names the layer.
fn listed_groups(object: &JsonFields) -> Result<Vec<QuantizationGroup>, ModelConfigError> {
    let layers = object.object(LAYERS)?.ok_or_else(|| object.missing(LAYERS))?;
    check_group_targets(object, &layers)?;
    let mut formats: Vec<(LayerQuantization, BTreeSet<String>)> = Vec::new();
    for name in layers.names() {
        let layer = layers.object(name)?.ok_or_else(|| layers.missing(name))?;
        layer.reject_unknown(&[ALGORITHM])?;
        let format = format_of(&layer)?;
        match formats.iter_mut().find(|(known, _)| *known == format) {
            Some((_, names)) => drop(names.insert(name.to_owned())),
            None => formats.push((format, BTreeSet::from([name.to_owned()]))),
        }
    }
    let group = |(format, names)| QuantizationGroup {
        targets: vec![QuantizationTarget::Listed(names)],
        format,
    };
    Ok(formats.into_iter().map(group).collect())
}

/// Checks that the groups in `config_groups` consist of the layers `layers`. ModelOpt writes the formats of the layers in
/// `quantized_layers` and, less precisely, in these groups: a group of `FP8_PER_CHANNEL_PER_TOKEN` has static activation
/// scales, and a group of `fp8_pb_wo` has no scales.
fn check_group_targets(object: &JsonFields, layers: &JsonFields) -> Result<(), ModelConfigError> {
    let Some(groups) = object.object("config_groups")? else { return Ok(()) };
    for name in groups.names() {
        let group = groups.object(name)?.ok_or_else(|| groups.missing(name))?;
        let targets = group.strings("targets")?.ok_or_else(|| group.missing("targets"))?;
        if let Some(index) = targets.iter().position(|target| layers.value(target).is_none()) {
            return Err(group.unsupported_entry(
                "targets",
                index,
                "layers of quantized_layers are",
            ));
        }
    }
    Ok(())
}

/// Returns the format of the algorithm in `object`. ModelOpt writes `fp8_pb_wo` (FP8 per block, weight only) in lower case;
/// activations of these layers are quantised as those of other layers with block scales.
fn format_of(object: &JsonFields) -> Result<LayerQuantization, ModelConfigError> {
    match object.text(ALGORITHM)?.map(str::to_ascii_uppercase).as_deref() {
        Some("FP8") => Ok(format(CheckpointScaleGranularity::Tensor, ActivationScheme::Static)),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => {
            Ok(format(CheckpointScaleGranularity::Channels, ActivationScheme::Dynamic))
        }
        Some("FP8_PB_WO") => {
            Ok(format(CheckpointScaleGranularity::Blocks, ActivationScheme::Dynamic))
        }
        _ => {
            let why = "FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO are";
            Err(object.unsupported(ALGORITHM, why))
        }
    }
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
