//! RoPE settings of architectures that store them by layer type: for layers that attend to the whole context, and
//! for layers with a sliding window (transformers `configuration_gemma3.py`, `configuration_gemma4.py`,
//! `configuration_olmo3.py`).

use super::json_fields::JsonFields;
use super::rope::{NEW_FORM, OLD_FORM};
use super::{ModelArchitecture, ModelConfigError};

/// Field of Gemma 3 with the base of the rotation frequencies of windowed layers.
pub(super) const LOCAL_THETA: &str = "rope_local_base_freq";
const FULL: &str = "full_attention";
const WINDOWED: &str = "sliding_attention";

/// Objects and fields from which the RoPE settings of one layer type are read.
pub(super) struct RopeSource {
    /// Object in the new form (`rope_parameters`).
    pub(super) new: Option<JsonFields>,
    /// Object in the old form (`rope_scaling`).
    pub(super) old: Option<JsonFields>,
    /// Name of the field of `config.json` with the base of the rotation frequencies.
    pub(super) theta_field: &'static str,
    /// Base of the rotation frequencies if no field defines it.
    pub(super) default_theta: f64,
}

impl RopeSource {
    /// Finds the settings of the layers that attend to the whole context; without layer types, of all layers.
    pub(super) fn full(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Self, ModelConfigError> {
        let new = fields.object(NEW_FORM)?;
        let new =
            if architecture.traits().has_rope_by_layer_type { of_type(new, FULL)? } else { new };
        let old = fields.object(OLD_FORM)?;
        let default_theta = architecture.traits().rope_theta_default;
        Ok(Self { new, old, theta_field: "rope_theta", default_theta })
    }

    /// Finds the settings of the windowed layers. The old form has only their base.
    pub(super) fn windowed(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Self, ModelConfigError> {
        let new = of_type(fields.object(NEW_FORM)?, WINDOWED)?;
        if architecture.is_gemma3() {
            let (theta_field, default_theta) = (LOCAL_THETA, 10_000.0);
            return Ok(Self { new, old: None, theta_field, default_theta });
        }
        if architecture.is_gemma4() {
            return Ok(Self { new, old: None, theta_field: "rope_theta", default_theta: 10_000.0 });
        }
        let (theta_field, default_theta) = ("rope_theta", architecture.traits().rope_theta_default);
        let theta = fields.positive_or_none(theta_field)?;
        let has_theta = new.as_ref().is_some_and(|map| map.value(theta_field).is_some());
        if !has_theta && theta.is_some_and(|theta| theta.to_bits() != default_theta.to_bits()) {
            // transformers reads the field for the other layers only, other engines for all layers.
            let why = format!(
                "windowed layers have {default_theta} unless rope_parameters.{WINDOWED} has a value"
            );
            return Err(fields.unsupported(theta_field, &why));
        }
        Ok(Self { new, old: None, theta_field, default_theta })
    }
}

/// Returns the object of the layer type `kind`. transformers ignores all other RoPE settings in the new form.
fn of_type(
    settings: Option<JsonFields>,
    kind: &str,
) -> Result<Option<JsonFields>, ModelConfigError> {
    let Some(map) = settings else { return Ok(None) };
    if let Some(name) = map.names().find(|name| ![FULL, WINDOWED].contains(name)) {
        return Err(map.unsupported(name, "only the objects of the layer types are read"));
    }
    map.object(kind)
}

/// Rejects RoPE settings of a layer type that transformers does not read and that therefore have no effect in
/// transformers.
pub(super) fn reject_unread_settings(
    fields: &JsonFields,
    map: &JsonFields,
) -> Result<(), ModelConfigError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    // Without `rope_type`, transformers uses the type `default`.
    if map.value("rope_type").is_none() && map.text("type")?.is_some_and(|kind| kind != "default") {
        return Err(map.unsupported("type", "this architecture reads `rope_type`"));
    }
    if !map.flag("truncate", true)? {
        return Err(map.unsupported("truncate", "this architecture does not read it"));
    }
    match (fields.value(ORIGINAL), map.value(ORIGINAL)) {
        (Some(_), None) => Err(fields.unsupported(ORIGINAL, "it belongs to the RoPE settings")),
        _ => Ok(()),
    }
}
