//! Quantisation of linear layers: parser of `quantization_config` in the formats `fp8`, `compressed-tensors`,
//! `modelopt` and `mxfp4`. Whether a weight is quantised depends on its dtype in the checkpoint; the configuration
//! defines the scales.

mod compressed_tensors;
mod fp8;
mod kv_scales;
mod modelopt;
mod module_pattern;
mod mxfp4;

pub use module_pattern::ModulePattern;

use super::json_fields::JsonFields;
use super::{ModelArchitecture, ModelConfigError};
use std::collections::BTreeSet;
use std::path::Path;

/// File with the quantisation of older ModelOpt checkpoints.
pub(super) const HF_QUANT_CONFIG_FILE: &str = "hf_quant_config.json";

/// Number of rows and of columns of the weight blocks that have one scale each, in block-quantised
/// checkpoints.
const BLOCK: usize = 128;

/// Number of successive weights of an output channel that share a scale in MXFP4 checkpoints.
pub(crate) const MXFP4_GROUP: usize = 32;

/// Quantisation of a checkpoint with FP8 e4m3 or MXFP4 weights: the format of each linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationConfig {
    /// Groups of layers; all layers of a group have the same format. The first group with a matching name
    /// pattern applies to a layer; if there is none, the first group of all linear layers applies.
    pub groups: Vec<QuantizationGroup>,
    /// Modules that are excluded from quantisation, as listed in `quantization_config`.
    pub ignored: Vec<ModulePattern>,
}

/// Group of linear layers that are quantised in the same format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationGroup {
    /// Layers of the group.
    pub targets: Vec<QuantizationTarget>,
    /// Format of these layers.
    pub format: LayerQuantization,
}

/// Entry in the list of layers that a group quantises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QuantizationTarget {
    /// All linear layers (`Linear`, the name of the PyTorch class).
    Linear,
    /// Layers with a name.
    Named(ModulePattern),
    /// The modules with these names, and all layers within them.
    Listed(BTreeSet<String>),
}

/// Quantisation format of the weights and activations of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerQuantization {
    /// Granularity of the weight scales.
    pub scales: CheckpointScaleGranularity,
    /// Rule for the activation scales.
    pub activations: ActivationScheme,
    /// Possible suffixes of the scale tensor: its name is the name of the weight followed by one of these
    /// suffixes. Synthetic checkpoints use the first suffix.
    pub suffixes: &'static [&'static str],
}

/// Granularity of the weight scales of a linear layer: the weights that share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointScaleGranularity {
    /// The 128 × 128 weights of a block share a scale. Activations have one scale per token and group of 128
    /// channels.
    Blocks,
    /// All weights of an output channel share a scale. Activations have one scale per token.
    Channels,
    /// All weights of the layer share a scale. Activations have one scale per token, or a static scale.
    Tensor,
    /// MXFP4: 32 successive weights of an output channel share a scale, a power of two (OCP Microscaling Formats
    /// 1.0). CPUs dequantise the weights when they are loaded; activations are not quantised.
    Mxfp4,
}

/// Rule for the activation scales of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationScheme {
    /// The scale is the largest magnitude of the activations divided by 448, the largest e4m3 value.
    Dynamic,
    /// The scale of `Dynamic` is rounded up to a power of two (`scale_fmt` `ue8m0`).
    PowerOfTwo,
    /// The scale is stored in the checkpoint.
    Static,
}

impl CheckpointScaleGranularity {
    /// Number of rows and number of columns that share a scale, for a weight of shape `[rows, cols]`.
    #[must_use]
    pub fn block_shape(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Blocks => [BLOCK, BLOCK],
            Self::Channels => [1, cols.max(1)],
            Self::Tensor => [rows.max(1), cols.max(1)],
            Self::Mxfp4 => [1, MXFP4_GROUP],
        }
    }
}

impl LayerQuantization {
    /// Whether weights in this format are FP8 e4m3.
    #[must_use]
    pub fn is_fp8(&self) -> bool {
        self.scales != CheckpointScaleGranularity::Mxfp4
    }
}

impl QuantizationConfig {
    /// Makes a configuration in which all linear layers have the format `format`, except `ignored`.
    #[must_use]
    pub fn uniform(format: LayerQuantization, ignored: Vec<ModulePattern>) -> Self {
        let groups = vec![QuantizationGroup { targets: vec![QuantizationTarget::Linear], format }];
        Self { groups, ignored }
    }

    /// Whether a group of layers is quantised in MXFP4.
    pub(crate) fn has_mxfp4(&self) -> bool {
        self.groups.iter().any(|group| !group.format.is_fp8())
    }

    /// Reads `quantization_config`; returns an error for formats that are not supported.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Option<Self>, ModelConfigError> {
        if fields.value("compression_config").is_some() {
            return Err(fields.unsupported("compression_config", "only quantization_config is"));
        }
        if fields.value("quantization").is_some() {
            let why = "weights that MLX has quantised are not read; serve the original model";
            return Err(fields.unsupported("quantization", why));
        }
        let Some(object) = fields.object("quantization_config")? else { return Ok(None) };
        let method = object.text("quant_method")?.unwrap_or_default();
        match method {
            "fp8" => fp8::read(&object).map(Some),
            "compressed-tensors" => compressed_tensors::read(&object).map(Some),
            "modelopt" => modelopt::read(&object).map(Some),
            "mxfp4" => mxfp4::read(&object, architecture).map(Some),
            _ => Err(object.unsupported(
                "quant_method",
                "fp8, compressed-tensors, modelopt and mxfp4 are; serve the unquantised model, or a checkpoint in \
                 one of these formats",
            )),
        }
    }

    /// Returns the configuration `own` of `config.json` or, if there is none, the configuration in
    /// `hf_quant_config.json` of the model folder `dir`; older ModelOpt checkpoints use this file. `fields`
    /// are the fields of `config.json`.
    ///
    /// Errors: the format is not supported, or the two files contradict each other.
    pub(super) fn or_hf_quant_config(
        own: Option<Self>,
        fields: &JsonFields,
        dir: &Path,
    ) -> Result<Option<Self>, ModelConfigError> {
        let path = dir.join(HF_QUANT_CONFIG_FILE);
        if !path.exists() {
            return Ok(own);
        }
        modelopt::read_file(own, fields, &path)
    }

    /// Format of a linear layer; `None` if no group contains the layer. `names` are the module names under
    /// which checkpoints store the layer, without `.weight`. For a layer that is excluded from quantisation,
    /// the result is the format that the layer would otherwise have.
    #[must_use]
    pub fn of_layer(&self, names: &[&str]) -> Option<LayerQuantization> {
        let names = |target: &QuantizationTarget| match target {
            QuantizationTarget::Linear => false,
            QuantizationTarget::Named(pattern) => names.iter().any(|name| pattern.selects(name)),
            QuantizationTarget::Listed(listed) => names.iter().any(|name| {
                let ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
                ends.into_iter().any(|end| listed.contains(&name[..end]))
            }),
        };
        let is_linear = |target: &QuantizationTarget| *target == QuantizationTarget::Linear;
        let named = self.groups.iter().find(|group| group.targets.iter().any(names));
        let linear = || self.groups.iter().find(|group| group.targets.iter().any(is_linear));
        named.or_else(linear).map(|group| group.format)
    }

    /// Whether the layer with the module name `name`, without `.weight`, is excluded from quantisation.
    #[must_use]
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored.covers(name))
    }
}

/// Returns an error if the field `field` is present and its value is not one of `texts`.
fn expect_text(fields: &JsonFields, field: &str, texts: &[&str]) -> Result<(), ModelConfigError> {
    match fields.text(field)? {
        Some(text) if !texts.contains(&text) => {
            Err(fields.unsupported(field, &format!("only {} is", texts.join(", "))))
        }
        _ => Ok(()),
    }
}
