//! Quantisation of linear layers: parser of `quantization_config` in the formats `fp8` and
//! `compressed-tensors`. The stored dtype of a weight decides whether it is quantised; the configuration
//! defines the scales.

use super::ModelConfigError;
use super::json_fields::JsonFields;
use regex::Regex;

/// Number of rows and of columns of the weight blocks that share one scale, in block-quantised checkpoints.
const BLOCK: usize = 128;

/// Format of FP8 e4m3 weights with scales; activations are quantised dynamically.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationConfig {
    /// Number of weights that share one scale: a block or an output channel.
    pub scales: CheckpointScaleGranularity,
    /// Suffix that is appended to the name of a weight to form the name of its scales.
    pub suffix: &'static str,
    /// Modules that are excluded from quantisation, as listed in `quantization_config`.
    pub ignored: Vec<IgnoredModule>,
}

/// Entry in the list of modules that are not quantised: a module name, or `re:` followed by a regular
/// expression that must match the beginning of the module name (as Python's `re.match`).
#[derive(Debug, Clone)]
pub struct IgnoredModule {
    entry: String,
    pattern: Option<Regex>,
}

impl IgnoredModule {
    /// Parses an entry of the list of modules that are not quantised.
    ///
    /// Errors: the regular expression is invalid or uses look-around, which is not supported.
    pub fn new(entry: &str) -> Result<Self, regex::Error> {
        let pattern = entry.strip_prefix("re:").map(|p| Regex::new(&format!("^(?:{p})")));
        Ok(Self { entry: entry.to_owned(), pattern: pattern.transpose()? })
    }

    /// Whether the entry selects the module `name`: the entry equals the name, is a parent module, is a
    /// suffix of the name, or is a regular expression that matches.
    fn matches(&self, name: &str) -> bool {
        match &self.pattern {
            Some(pattern) => pattern.is_match(name),
            None => {
                name == self.entry
                    || modules_ending_in(name, &self.entry)
                    || modules_beginning_with(name, &self.entry)
            }
        }
    }
}

impl PartialEq for IgnoredModule {
    fn eq(&self, other: &Self) -> bool {
        self.entry == other.entry
    }
}

impl Eq for IgnoredModule {}

/// Group of weights of a linear layer that share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointScaleGranularity {
    /// Blocks of 128 × 128 weights. Activations have one scale per token and group of 128 channels.
    Blocks,
    /// All weights of one output channel. Activations have one scale per token.
    Channels,
}

impl CheckpointScaleGranularity {
    /// Number of output channels and number of input channels that one scale covers, in a layer of `inputs`
    /// input channels.
    #[must_use]
    pub fn block_shape(self, inputs: usize) -> [usize; 2] {
        match self {
            Self::Blocks => [BLOCK, BLOCK],
            Self::Channels => [1, inputs.max(1)],
        }
    }
}

impl QuantizationConfig {
    /// Reads `quantization_config`; returns an error for formats that are not supported.
    pub(super) fn read(fields: &JsonFields) -> Result<Option<Self>, ModelConfigError> {
        if fields.value("compression_config").is_some() {
            return Err(fields.unsupported("compression_config", "only quantization_config is"));
        }
        let Some(object) = fields.object("quantization_config")? else { return Ok(None) };
        let method = object.text("quant_method")?.unwrap_or_default();
        match method {
            "fp8" => fp8(&object).map(Some),
            "compressed-tensors" => compressed_tensors(&object).map(Some),
            _ => Err(object.unsupported(
                "quant_method",
                "fp8 and compressed-tensors are; serve the unquantised model, or a checkpoint in one of these \
                 formats",
            )),
        }
    }

    /// Whether the layer `name` (a module, without `.weight`) is excluded from quantisation.
    #[must_use]
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored.matches(name))
    }
}

fn modules_ending_in(name: &str, entry: &str) -> bool {
    name.strip_suffix(entry).is_some_and(|rest| rest.ends_with('.'))
}

fn modules_beginning_with(name: &str, entry: &str) -> bool {
    name.strip_prefix(entry).is_some_and(|rest| rest.starts_with('.'))
}

/// Fields of `quantization_config` in the format `fp8`. `dequantize` is an option of the loader of
/// transformers.
const FP8_FIELDS: &[&str] = &[
    "quant_method",
    "fmt",
    "activation_scheme",
    "scale_fmt",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "dequantize",
];
/// Fields of `quantization_config` in the format `compressed-tensors`.
const COMPRESSED_TENSORS_FIELDS: &[&str] = &[
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
/// Fields of the description of quantised weights or activations. The observer describes the calibration,
/// which is complete.
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

fn fp8(object: &JsonFields) -> Result<QuantizationConfig, ModelConfigError> {
    object.reject_unknown(FP8_FIELDS)?;
    object.reject_disagreement("modules_to_not_convert", object, "ignored_layers")?;
    expect_text(object, "fmt", &["e4m3"])?;
    expect_text(object, "activation_scheme", &["dynamic"])?;
    if object.value("scale_fmt").is_some() {
        return Err(object.unsupported("scale_fmt", "only f32 scales are"));
    }
    let block = object.value("weight_block_size");
    if block.is_none_or(|size| *size != serde_json::json!([BLOCK, BLOCK])) {
        return Err(object.unsupported("weight_block_size", "only [128, 128] is"));
    }
    let mut ignored = list(object, "modules_to_not_convert")?;
    ignored.extend(list(object, "ignored_layers")?);
    Ok(QuantizationConfig {
        scales: CheckpointScaleGranularity::Blocks,
        suffix: "_scale_inv",
        ignored,
    })
}

/// Rejects parts of the format `compressed-tensors` that change the weights or the KV cache and are not
/// supported: sparse weights, transforms of weights and activations, and scales of the KV cache.
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
    if object.value("kv_cache_scheme").is_some() {
        let why = "the scales of the KV cache are not read; override it with null, and set \
                   --kv-cache-dtype for an FP8 cache";
        return Err(object.unsupported("kv_cache_scheme", why));
    }
    Ok(())
}

fn compressed_tensors(object: &JsonFields) -> Result<QuantizationConfig, ModelConfigError> {
    object.reject_unknown(COMPRESSED_TENSORS_FIELDS)?;
    reject_unsupported_parts(object)?;
    expect_text(object, "format", &["float-quantized"])?;
    let groups = object.object("config_groups")?;
    let groups = groups.ok_or_else(|| object.missing("config_groups"))?;
    let mut names = groups.names();
    let (Some(name), None) = (names.next(), names.next()) else {
        return Err(object.unsupported("config_groups", "only one group is"));
    };
    let group = groups.object(name)?.ok_or_else(|| groups.missing(name))?;
    group.reject_unknown(GROUP_FIELDS)?;
    expect_text(&group, "format", &["float-quantized"])?;
    if group.strings("targets")?.unwrap_or_default() != ["Linear"] {
        return Err(group.unsupported("targets", "only [\"Linear\"] is"));
    }
    if group.value("output_activations").is_some() {
        return Err(group.unsupported("output_activations", "only unquantised outputs are"));
    }
    let member = |field: &str| -> Result<JsonFields, ModelConfigError> {
        group.object(field)?.ok_or_else(|| group.missing(field))
    };
    let (weights, inputs) = (member("weights")?, member("input_activations")?);
    for fields in [&weights, &inputs] {
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
    }
    if !inputs.flag("dynamic", false)? {
        return Err(inputs.unsupported("dynamic", "only dynamic scales of activations are"));
    }
    let strategy = weights.text("strategy")?.unwrap_or_default();
    let (scales, input_strategy) = match strategy {
        "channel" => (CheckpointScaleGranularity::Channels, "token"),
        "block" => (CheckpointScaleGranularity::Blocks, "group"),
        _ => return Err(weights.unsupported("strategy", "channel and block are")),
    };
    expect_text(&inputs, "strategy", &[input_strategy])?;
    if inputs.value("group_size").is_some_and(|size| *size != BLOCK) {
        return Err(inputs.unsupported("group_size", "only 128 is"));
    }
    if weights.value("group_size").is_some() {
        return Err(weights.unsupported("group_size", "only weights without groups are"));
    }
    let block = weights.value("block_structure");
    if scales == CheckpointScaleGranularity::Blocks
        && block != Some(&serde_json::json!([BLOCK, BLOCK]))
    {
        return Err(weights.unsupported("block_structure", "only [128, 128] is"));
    }
    Ok(QuantizationConfig { scales, suffix: "_scale", ignored: list(object, "ignore")? })
}

/// Rejects the field `field` if it is present and its value is not one of `texts`.
fn expect_text(fields: &JsonFields, field: &str, texts: &[&str]) -> Result<(), ModelConfigError> {
    match fields.text(field)? {
        Some(text) if !texts.contains(&text) => {
            Err(fields.unsupported(field, &format!("only {} is", texts.join(", "))))
        }
        _ => Ok(()),
    }
}

fn list(fields: &JsonFields, field: &str) -> Result<Vec<IgnoredModule>, ModelConfigError> {
    let entries = fields.strings(field)?.unwrap_or_default().into_iter();
    let read = |entry: &str| {
        let invalid_pattern =
            |_| fields.unsupported(field, "valid regular expressions without look-around are");
        IgnoredModule::new(entry).map_err(invalid_pattern)
    };
    entries.map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn ignoring(entries: &[&str]) -> Result<QuantizationConfig, ModelConfigError> {
        let object = serde_json::json!({
            "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": entries
        });
        let config = serde_json::json!({ "quantization_config": object }).to_string();
        let fields = JsonFields::parse(Path::new("config.json"), config.as_bytes())?;
        QuantizationConfig::read(&fields).map(Option::unwrap)
    }

    #[test]
    fn modules_are_ignored_by_name_suffix_and_pattern() {
        let config = ignoring(&[
            "lm_head",
            "model.layers.0",
            "mlp.gate",
            "re:.*self_attn\\.q_proj$",
            "re:^vision.*",
            "re:.*\\.[12]\\.self_attn\\.(k|v)_proj",
        ])
        .unwrap();
        for (name, expected) in [
            ("lm_head", true),
            ("model.layers.0.mlp.up_proj", true),
            ("model.layers.01.mlp.up_proj", false),
            ("model.layers.3.mlp.gate", true),
            ("model.layers.3.mlp.gate_proj", false),
            ("model.layers.3.self_attn.q_proj", true),
            ("model.layers.3.self_attn.q_proj_b", false),
            ("model.layers.2.self_attn.v_proj", true),
            ("model.layers.3.self_attn.v_proj", false),
            ("vision.tower", true),
            ("model.vision", false),
        ] {
            assert_eq!(config.ignores(name), expected, "{name}");
        }
        let error = ignoring(&["re:(?!lm_head).*"]).unwrap_err().to_string();
        assert!(error.contains("modules_to_not_convert"), "{error}");
    }
}
