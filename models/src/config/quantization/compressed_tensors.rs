//! `quantization_config` in the format `compressed-tensors` (llm-compressor).

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use super::kv_scales::check_kv_cache_scheme;
use super::{
    ActivationScheme, BLOCK, CheckpointScaleGranularity, LayerQuantization, ModulePattern,
    QuantizationConfig, QuantizationGroup, QuantizationTarget, expect_text,
};

const FIELDS: &[&str] = &[
    "quant_method",
    "format",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "quantization_status",
    "global_compression_ratio",
    "run_compressed",
    "version",
];
/// Fields of a group in `config_groups`.
const GROUP_FIELDS: &[&str] =
    &["targets", "weights", "input_activations", "output_activations", "format"];
/// Fields of the objects `weights` and `input_activations`. The fields `observer` and `observer_kwargs`
/// describe the calibration and do not affect inference.
const TENSOR_FIELDS: &[&str] = &[
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
];
/// Values of the field `format` for which an FP8 weight is stored as one FP8 tensor and a tensor of scales.
const FLOAT_FORMATS: &[&str] = &["float-quantized", "naive-quantized"];

pub(super) fn read(object: &JsonFields) -> Result<QuantizationConfig, ModelConfigError> {
    object.reject_unknown(FIELDS)?;
    reject_unsupported_parts(object)?;
    check_kv_cache_scheme(object)?;
    expect_text(object, "format", &[FLOAT_FORMATS[0], FLOAT_FORMATS[1], "mixed-precision"])?;
    let groups = groups(object)?;
    if groups.is_empty() {
        return Err(object.missing("config_groups"));
    }
    Ok(QuantizationConfig {
        groups,
        ignored: ModulePattern::list(object, "ignore", ModulePattern::new)?,
    })
}

/// Rejects features of compressed-tensors that change the weights and are not supported: sparse weights, and
/// transforms of weights and activations.
fn reject_unsupported_parts(object: &JsonFields) -> Result<(), ModelConfigError> {
    if let Some(sparsity) = object.object("sparsity_config")? {
        expect_text(&sparsity, "format", &["dense"])?;
        if sparsity.names().next().is_some() && sparsity.value("format").is_none() {
            return Err(object.unsupported("sparsity_config", "only dense weights are"));
        }
    }
    if let Some(transforms) = object.object("transform_config")?
        && transforms.names().next().is_some()
    {
        return Err(object.unsupported("transform_config", "only untransformed weights are"));
    }
    Ok(())
}

/// Reads the groups of `config_groups`; none if the field is absent.
pub(super) fn groups(object: &JsonFields) -> Result<Vec<QuantizationGroup>, ModelConfigError> {
    let Some(groups) = object.object("config_groups")? else { return Ok(Vec::new()) };
    let read = |name: &str| {
        let fields = groups.object(name)?.ok_or_else(|| groups.missing(name))?;
        group(&fields)
    };
    groups.names().map(read).collect()
}

fn group(fields: &JsonFields) -> Result<QuantizationGroup, ModelConfigError> {
    fields.reject_unknown(GROUP_FIELDS)?;
    expect_text(fields, "format", FLOAT_FORMATS)?;
    if fields.value("output_activations").is_some() {
        return Err(fields.unsupported("output_activations", "only unquantised outputs are"));
    }
    let names = fields.strings("targets")?.ok_or_else(|| fields.missing("targets"))?;
    let patterns = ModulePattern::list(fields, "targets", ModulePattern::new)?.into_iter();
    let target = |(name, pattern): (&str, ModulePattern)| match name {
        "Linear" => QuantizationTarget::Linear,
        _ => QuantizationTarget::Named(pattern),
    };
    let targets = names.into_iter().zip(patterns).map(target).collect();
    let member = |field: &str| fields.object(field)?.ok_or_else(|| fields.missing(field));
    let (weights, inputs) = (member("weights")?, member("input_activations")?);
    check_float8(&weights)?;
    check_float8(&inputs)?;
    let scales = granularity(&weights)?;
    let format = LayerQuantization {
        scales,
        activations: activations(&inputs, scales)?,
        suffixes: &["_scale"],
    };
    Ok(QuantizationGroup { targets, format })
}

/// Rejects quantisation schemes of weights or activations other than symmetric FP8.
pub(super) fn check_float8(fields: &JsonFields) -> Result<(), ModelConfigError> {
    fields.reject_unknown(TENSOR_FIELDS)?;
    if fields.value("actorder").is_some_and(|order| *order != false) {
        return Err(fields.unsupported("actorder", "only false is"));
    }
    expect_text(fields, "type", &["float"])?;
    if fields.size("num_bits", 64)? != 8 {
        return Err(fields.unsupported("num_bits", "only 8 is"));
    }
    if !fields.flag("symmetric", true)? {
        return Err(fields.unsupported("symmetric", "only true is"));
    }
    Ok(())
}

/// Reads the granularity of the weight scales. If `strategy` is absent, a layer has one scale, as in
/// compressed-tensors.
fn granularity(weights: &JsonFields) -> Result<CheckpointScaleGranularity, ModelConfigError> {
    if weights.value("group_size").is_some() {
        return Err(weights.unsupported("group_size", "only weights without groups are"));
    }
    let scales = match weights.text("strategy")?.unwrap_or("tensor") {
        "tensor" => CheckpointScaleGranularity::Tensor,
        "channel" => CheckpointScaleGranularity::Channels,
        "block" => CheckpointScaleGranularity::Blocks,
        _ => return Err(weights.unsupported("strategy", "tensor, channel and block are")),
    };
    let block = weights.value("block_structure");
    if scales == CheckpointScaleGranularity::Blocks
        && block != Some(&serde_json::json!([BLOCK, BLOCK]))
    {
        return Err(weights.unsupported("block_structure", "only [128, 128] is"));
    }
    Ok(scales)
}

/// Reads the rule for the activation scales. Dynamic per-tensor scales are replaced by dynamic per-token
/// scales, which are more accurate and do not depend on the other tokens of a batch.
fn activations(
    inputs: &JsonFields,
    scales: CheckpointScaleGranularity,
) -> Result<ActivationScheme, ModelConfigError> {
    if inputs.value("group_size").is_some_and(|size| *size != BLOCK) {
        return Err(inputs.unsupported("group_size", "only 128 is"));
    }
    let is_dynamic = inputs.flag("dynamic", false)?;
    if scales == CheckpointScaleGranularity::Blocks {
        if !is_dynamic {
            return Err(inputs.unsupported("dynamic", "only dynamic scales are, with block scales"));
        }
        expect_text(inputs, "strategy", &["group"])?;
        return Ok(ActivationScheme::Dynamic);
    }
    if is_dynamic {
        expect_text(inputs, "strategy", &["token", "tensor"])?;
        return Ok(ActivationScheme::Dynamic);
    }
    if inputs.text("strategy")?.is_some_and(|strategy| strategy != "tensor") {
        return Err(inputs.unsupported("strategy", "only tensor is, with static scales"));
    }
    Ok(ActivationScheme::Static)
}
