//! Parser of the layers with a sliding window, which attend to the last keys of the context only. The rules are
//! those of transformers `configuration_*.py`.

use super::architecture_rules::WindowedLayerRule;
use super::json_fields::JsonFields;
use super::parse_config::{LAYER_LIMIT, POSITION_LIMIT};
use super::{ModelArchitecture, ModelConfig, ModelConfigError, RopeConfig};

const TYPES: &str = "layer_types";
const WINDOW: &str = "sliding_window";
const FULL: &str = "full_attention";
const WINDOWED: &str = "sliding_attention";

/// Layers with a sliding window, of a model in which at least one layer has a window.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerAttentionConfig {
    /// Number of keys to which a query of a windowed layer attends, including the key of its own position.
    pub window: usize,
    /// For each decoder layer, whether it has the window; other layers attend to the whole context.
    pub windowed: Vec<bool>,
    /// RoPE settings of the windowed layers; `None` = the settings of the other layers.
    pub rope: Option<RopeConfig>,
}

impl LayerAttentionConfig {
    /// Reads the windows of a model, of which all other settings have been read; returns `None` if no layer has
    /// a window.
    pub(super) fn read(
        fields: &JsonFields,
        config: &ModelConfig,
    ) -> Result<Option<Self>, ModelConfigError> {
        let architecture = config.architecture;
        let window = window(fields, architecture)?;
        let windowed = windowed_layers(fields, config, window)?;
        if !windowed.contains(&true) {
            return Ok(None);
        }
        let Some(window) = window else {
            let why = format!("layers of the type {WINDOWED} need a window that is in use");
            return Err(fields.unsupported(WINDOW, &why));
        };
        let read = || RopeConfig::read_windowed(fields, architecture, config.max_positions);
        let rope = architecture.traits().has_rope_by_layer_type.then(read).transpose()?;
        // A window at least as long as the context has no effect.
        let has_effect = window < config.context_max() || rope.is_some();
        Ok(has_effect.then_some(Self { window, windowed, rope }))
    }

    /// Whether decoder layer `i` has the window.
    #[must_use]
    pub fn is_windowed(&self, i: usize) -> bool {
        self.windowed.get(i).is_some_and(|windowed| *windowed)
    }
}

/// Reads the size of the window; `None` = no window.
fn window(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<Option<usize>, ModelConfigError> {
    if architecture.traits().has_window_switch && !fields.flag("use_sliding_window", false)? {
        return Ok(None);
    }
    let absent = absent_window(fields, architecture).filter(|_| !fields.is_null(WINDOW));
    Ok(fields.size_or_none(WINDOW, POSITION_LIMIT)?.or(absent))
}

/// Window of configurations without the field `sliding_window`. The value null means no window.
fn absent_window(fields: &JsonFields, architecture: ModelArchitecture) -> Option<usize> {
    architecture.text_traits(fields).window_default
}

/// Reads for each layer whether it has the window `window`; the result may be empty if no layer has one.
fn windowed_layers(
    fields: &JsonFields,
    config: &ModelConfig,
    window: Option<usize>,
) -> Result<Vec<bool>, ModelConfigError> {
    if config.gated_delta.is_some() {
        return Ok(Vec::new()); // Their layer types are read by `GatedDeltaConfig`.
    }
    let listed = listed_layers(fields, config)?;
    let layers = 0..config.layers;
    let by_rule = match config.architecture.traits().windowed_layers {
        WindowedLayerRule::Absent => return equal_layers(fields, config, listed, None),
        WindowedLayerRule::All => return equal_layers(fields, config, listed, window),
        WindowedLayerRule::Even => layers.map(|i| i.is_multiple_of(2)).collect(),
        WindowedLayerRule::ExceptEveryFourth => {
            layers.map(|i| !(i + 1).is_multiple_of(4)).collect()
        }
        WindowedLayerRule::ExceptEveryNth => match listed {
            Some(listed) => return Ok(listed), // The pattern is read only if there is no list.
            None => gemma3_layers(fields, config.layers)?,
        },
        WindowedLayerRule::ExceptEverySixthAndLast => {
            let by_rule = || layers.map(|i| !(i + 1).is_multiple_of(6)).collect();
            let mut windowed: Vec<bool> = listed.unwrap_or_else(by_rule);
            windowed[config.layers - 1] = false;
            return Ok(windowed);
        }
        WindowedLayerRule::FromIndex => {
            let from = max_window_layers(fields)?;
            layers.map(|i| window.is_some() && i as f64 >= from).collect()
        }
        WindowedLayerRule::EvenBelowIndex => {
            let below = max_window_layers(fields)?;
            let is_used = fields.flag("use_sliding_window", false)?;
            layers.map(|i| is_used && i.is_multiple_of(2) && (i as f64) < below).collect()
        }
        WindowedLayerRule::WithoutRope => {
            layers.map(|i| window.is_some() && config.nope_layers.contains(&i)).collect()
        }
    };
    Ok(listed.unwrap_or(by_rule))
}

fn max_window_layers(fields: &JsonFields) -> Result<f64, ModelConfigError> {
    Ok(fields.number_or_none("max_window_layers")?.unwrap_or(28.0))
}

/// Layers of an architecture in which all layers have the window or none has. Such architectures do not read the
/// list of layer types, which must agree.
fn equal_layers(
    fields: &JsonFields,
    config: &ModelConfig,
    listed: Option<Vec<bool>>,
    window: Option<usize>,
) -> Result<Vec<bool>, ModelConfigError> {
    let windowed = window.is_some_and(|window| window < config.context_max());
    let differing = listed.and_then(|listed| listed.iter().position(|&layer| layer != windowed));
    if let Some(layer) = differing {
        let kind = if windowed { WINDOWED } else { FULL };
        let why = format!("every layer has the type {kind}, as `{WINDOW}` says");
        return Err(fields.unsupported_entry(TYPES, layer, &why));
    }
    Ok(vec![windowed; config.layers])
}

/// Layers of Gemma 3 with a window if there is no list of layer types: all except every n-th.
fn gemma3_layers(fields: &JsonFields, layers: usize) -> Result<Vec<bool>, ModelConfigError> {
    const PATTERN: &str = "sliding_window_pattern";
    const OTHER_PATTERN: &str = "_sliding_window_pattern";
    const DEFAULT_PATTERN: usize = 6;
    let pattern = fields.size_or_none(PATTERN, LAYER_LIMIT)?.unwrap_or(DEFAULT_PATTERN);
    if fields.size_or_none(OTHER_PATTERN, LAYER_LIMIT)?.is_some_and(|other| other != pattern) {
        let why = format!("transformers reads `{TYPES}` or `{PATTERN}`");
        return Err(fields.unsupported(OTHER_PATTERN, &why));
    }
    Ok((0..layers).map(|i| !(i + 1).is_multiple_of(pattern)).collect())
}

/// Reads the list of layer types; returns for each layer whether it has a window, or `None` without a list.
fn listed_layers(
    fields: &JsonFields,
    config: &ModelConfig,
) -> Result<Option<Vec<bool>>, ModelConfigError> {
    let Some(types) = fields.strings(TYPES)? else { return Ok(None) };
    let attention = config.architecture.traits().attention_layer_type;
    let is_known = |kind: &&str| [FULL, WINDOWED].contains(kind) || attention == Some(*kind);
    if let Some(layer) = types.iter().position(|kind| !is_known(kind)) {
        let why = format!("supported are {FULL} and {WINDOWED}");
        return Err(fields.unsupported_entry(TYPES, layer, &why));
    }
    if types.len() != config.layers {
        let detail = format!("{} entries for {} layers", types.len(), config.layers);
        return Err(fields.contradiction(TYPES, detail));
    }
    Ok(Some(types.iter().map(|kind| *kind == WINDOWED).collect()))
}
