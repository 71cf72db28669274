//! `quantization_config` in the format `fp8`: block scales (DeepSeek), or one scale per layer (AutoFP8, Mistral).

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use super::kv_scales::check_kv_cache_scheme;
use super::{
    ActivationScheme, BLOCK, CheckpointScaleGranularity, LayerQuantization, ModulePattern,
    QuantizationConfig, expect_text,
};

/// Known fields of `quantization_config` in the format `fp8`. `dequantize` is an option of the transformers
/// loader and does not describe the checkpoint.
const FIELDS: &[&str] = &[
    "quant_method",
    "fmt",
    "activation_scheme",
    "scale_fmt",
    "expert_dtype",
    "modules_to_convert",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "kv_cache_scheme",
    "dequantize",
    "weight_per_tensor",
    "act_per_tensor",
];

pub(super) fn read(object: &JsonFields) -> Result<QuantizationConfig, ModelConfigError> {
    object.reject_unknown(FIELDS)?;
    object.reject_disagreement("modules_to_not_convert", object, "ignored_layers")?;
    expect_text(object, "fmt", &["e4m3"])?;
    check_kv_cache_scheme(object)?;
    let scales = match object.value("weight_block_size") {
        None => CheckpointScaleGranularity::Tensor,
        Some(size) if *size == serde_json::json!([BLOCK, BLOCK]) => {
            CheckpointScaleGranularity::Blocks
        }
        Some(_) => return Err(object.unsupported("weight_block_size", "only [128, 128] is")),
    };
    let activations = activations(object, scales)?;
    check_per_tensor_flags(object, scales, activations)?;
    let mut ignored = ModulePattern::list(object, "modules_to_not_convert", ModulePattern::new)?;
    ignored.extend(ModulePattern::list(object, "ignored_layers", ModulePattern::new)?);
    let suffixes = &["_scale_inv", "_scale"];
    Ok(QuantizationConfig::uniform(LayerQuantization { scales, activations, suffixes }, ignored))
}

/// Checks the flags with which Qwen3.5 and later checkpoints repeat whether weights and activations have one scale each.
fn check_per_tensor_flags(
    object: &JsonFields,
    scales: CheckpointScaleGranularity,
    activations: ActivationScheme,
) -> Result<(), ModelConfigError> {
    let has_one_scale = scales == CheckpointScaleGranularity::Tensor;
    let is_static = activations == ActivationScheme::Static;
    for (flag, expected) in [("weight_per_tensor", has_one_scale), ("act_per_tensor", is_static)] {
        if object.flag(flag, expected)? != expected {
            let why = format!("only {expected} is, with these scales");
            return Err(object.unsupported(flag, &why));
        }
    }
    Ok(())
}

fn activations(
    object: &JsonFields,
    scales: CheckpointScaleGranularity,
) -> Result<ActivationScheme, ModelConfigError> {
    expect_text(object, "activation_scheme", &["dynamic", "static"])?;
    expect_text(object, "scale_fmt", &["ue8m0", "float"])?;
    expect_text(object, "expert_dtype", &["fp8"])?;
    if object.value("modules_to_convert").is_some_and(|list| *list != serde_json::json!([])) {
        return Err(object.unsupported("modules_to_convert", "only null is"));
    }
    let has_blocks = scales == CheckpointScaleGranularity::Blocks;
    let is_static = object.text("activation_scheme")? == Some("static");
    if is_static && has_blocks {
        return Err(object.unsupported("activation_scheme", "only dynamic is, with block scales"));
    }
    let is_power_of_two = object.text("scale_fmt")? == Some("ue8m0");
    if is_power_of_two && !has_blocks {
        return Err(object.unsupported("scale_fmt", "only block scales of powers of two are"));
    }
    Ok(match (is_static, is_power_of_two) {
        (true, _) => ActivationScheme::Static,
        (_, true) => ActivationScheme::PowerOfTwo,
        _ => ActivationScheme::Dynamic,
    })
}
