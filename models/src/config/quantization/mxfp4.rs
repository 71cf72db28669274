//! `quantization_config` in the format `mxfp4` (gpt-oss): the experts are stored in MXFP4.

use super::super::json_fields::JsonFields;
use super::super::{ModelArchitecture, ModelConfigError};
use super::{
    ActivationScheme, CheckpointScaleGranularity, LayerQuantization, ModulePattern,
    QuantizationConfig, QuantizationGroup, QuantizationTarget,
};

/// Known fields of `quantization_config` in the format `mxfp4`. `dequantize` is an option of the transformers
/// loader and does not describe the checkpoint.
const FIELDS: &[&str] = &["quant_method", "modules_to_not_convert", "dequantize"];
/// Modules that checkpoints in this format quantise: the projections of the routed experts.
const EXPERTS: &str = r"re:.*\.mlp\.experts\.";

pub(super) fn read(
    object: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<QuantizationConfig, ModelConfigError> {
    if !architecture.traits().may_have_mxfp4_experts {
        return Err(object.unsupported("quant_method", "mxfp4 is for GptOssForCausalLM only"));
    }
    object.reject_unknown(FIELDS)?;
    let format = LayerQuantization {
        scales: CheckpointScaleGranularity::Mxfp4,
        activations: ActivationScheme::Dynamic,
        suffixes: &["_scale"],
    };
    let ignored = ModulePattern::list(object, "modules_to_not_convert", ModulePattern::glob)?;
    let experts = ModulePattern::new(EXPERTS).map_err(|error| {
        object.unsupported("quant_method", &format!("the pattern of experts is invalid: {error}"))
    })?;
    let targets = vec![QuantizationTarget::Named(experts)];
    Ok(QuantizationConfig { groups: vec![QuantizationGroup { targets, format }], ignored })
}
