//! Quantisation of linear layers: parser of `quantization_config` in the formats `fp8`, `compressed-tensors`
//! and `modelopt`. The stored dtype of a weight decides whether it is quantised; the configuration defines the
//! scales.

mod compressed_tensors;
mod fp8;
mod kv_scales;
mod modelopt;
mod module_pattern;

pub use module_pattern::ModulePattern;

use super::ModelConfigError;
use super::json_fields::JsonFields;
use std::path::Path;

/// Number of rows and of columns of the weight blocks that share one scale, in block-quantised checkpoints.
const BLOCK: usize = 128;

/// FP8 e4m3 weights with scales: the format of each layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationConfig {
    /// Groups of layers with one format each. Of the groups whose targets match a layer, the first one that
    /// names the layer applies, else the first one.
    pub groups: Vec<QuantizationGroup>,
    /// Modules that are excluded from quantisation, as listed in `quantization_config`.
    pub ignored: Vec<ModulePattern>,
}

/// Linear layers that are quantised in one format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationGroup {
    /// Layers of the group.
    pub targets: Vec<LayerTarget>,
    /// Format of these layers.
    pub format: LayerQuantization,
}

/// Entry in the list of layers that a group quantises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerTarget {
    /// All linear layers, written as the class `Linear`.
    Linear,
    /// Layers with a name.
    Named(ModulePattern),
}

/// Format of the quantised weights and activations of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerQuantization {
    /// Number of weights that share one scale.
    pub scales: CheckpointScaleGranularity,
    /// Rule for the scales of activations.
    pub activations: ActivationScheme,
    /// Suffixes of which one is appended to the name of a weight to form the name of its scales. Synthetic
    /// checkpoints use the first one.
    pub suffixes: &'static [&'static str],
}

/// Group of weights of a linear layer that share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointScaleGranularity {
    /// Blocks of 128 × 128 weights. Activations have one scale per token and group of 128 channels.
    Blocks,
    /// All weights of one output channel. Activations have one scale per token.
    Channels,
    /// All weights of the layer. Activations have one scale per token, or a static scale.
    Tensor,
}

/// Rule for the scales of a layer's activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationScheme {
    /// The largest magnitude divided by 448.
    Dynamic,
    /// The scale of `Dynamic`, rounded up to a power of two (`scale_fmt` `ue8m0`).
    PowerOfTwo,
    /// A scale that the checkpoint stores.
    Static,
}

impl CheckpointScaleGranularity {
    /// Number of rows and number of columns that one scale covers, in a weight of shape `[rows, cols]`.
    #[must_use]
    pub fn block_shape(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Blocks => [BLOCK, BLOCK],
            Self::Channels => [1, cols.max(1)],
            Self::Tensor => [rows.max(1), cols.max(1)],
        }
    }
}

impl QuantizationConfig {
    /// Makes a configuration in which all linear layers have the format `format`, except `ignored`.
    #[must_use]
    pub fn uniform(format: LayerQuantization, ignored: Vec<ModulePattern>) -> Self {
        let groups = vec![QuantizationGroup { targets: vec![LayerTarget::Linear], format }];
        Self { groups, ignored }
    }

    /// Reads `quantization_config`; returns an error for formats that are not supported.
    pub(super) fn read(fields: &JsonFields) -> Result<Option<Self>, ModelConfigError> {
        if fields.value("compression_config").is_some() {
            return Err(fields.unsupported("compression_config", "only quantization_config is"));
        }
        let Some(object) = fields.object("quantization_config")? else { return Ok(None) };
        let method = object.text("quant_method")?.unwrap_or_default();
        match method {
            "fp8" => fp8::read(&object).map(Some),
            "compressed-tensors" => compressed_tensors::read(&object).map(Some),
            "modelopt" => modelopt::read(&object).map(Some),
            _ => Err(object.unsupported(
                "quant_method",
                "fp8, compressed-tensors and modelopt are; serve the unquantised model, or a checkpoint in \
                 one of these formats",
            )),
        }
    }

    /// Reads `hf_quant_config.json` of the model folder `dir`, in which older checkpoints of ModelOpt have their
    /// configuration. Returns the configuration of `config.json`, whose fields are `fields`, if there is one.
    ///
    /// Errors: the format is not supported, or the files disagree.
    pub(super) fn or_hf_quant_config(
        own: Option<Self>,
        fields: &JsonFields,
        dir: &Path,
    ) -> Result<Option<Self>, ModelConfigError> {
        let path = dir.join("hf_quant_config.json");
        if !path.exists() {
            return Ok(own);
        }
        modelopt::read_file(own, fields, &path)
    }

    /// Format of the layer that checkpoints store under one of `names` (modules, without `.weight`); `None` if no group
    /// contains it. Layers that are excluded from quantisation have the format that a quantised layer would have.
    #[must_use]
    pub fn of_layer(&self, names: &[&str]) -> Option<LayerQuantization> {
        let selects = |p: &ModulePattern| names.iter().any(|name| p.selects(name));
        let names = |target: &LayerTarget| matches!(target, LayerTarget::Named(p) if selects(p));
        let is_linear = |target: &LayerTarget| *target == LayerTarget::Linear;
        let named = self.groups.iter().find(|group| group.targets.iter().any(names));
        let linear = || self.groups.iter().find(|group| group.targets.iter().any(is_linear));
        named.or_else(linear).map(|group| group.format)
    }

    /// Whether the layer `name` (a module, without `.weight`) is excluded from quantisation.
    #[must_use]
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored.covers(name))
    }
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
