//! Overrides of the fields of `config.json` (`--hf-overrides`).
//!
//! As in vLLM, an object in the overrides is merged field by field into the object of the same name. A dotted
//! name (`rope_scaling.factor`) is the path of a nested field. A field that is set to null means what null
//! means in transformers: it differs from an absent field if the default of the field is not `None`.

use super::json_fields::JsonFields;
use super::quantization::HF_QUANT_CONFIG_FILE;
use super::{ModelConfig, ModelConfigError};
use serde_json::{Map, Value, json, map::Entry};
use std::path::Path;

const QUANTIZATION: &str = "quantization_config";

impl ModelConfig {
    /// Returns the fields of `config.json` of the folder `dir` after applying `overrides`; without this file,
    /// the fields that the overrides set.
    pub fn fields_with(
        dir: &Path,
        overrides: &Map<String, Value>,
    ) -> Result<Map<String, Value>, ModelConfigError> {
        let path = dir.join("config.json");
        let fields =
            if path.exists() { JsonFields::read(&path)? } else { JsonFields::absent(&path) };
        Ok(fields.with(overrides).into_map())
    }
}

/// Returns the field `quantization_config` with the contents of `hf_quant_config.json` in the folder `dir` if
/// `overrides` apply to it; empty otherwise. `fields` are the fields of `config.json`, which take precedence.
pub(super) fn quantization_of_file(
    fields: &JsonFields,
    dir: &Path,
    overrides: &Map<String, Value>,
) -> Result<Map<String, Value>, ModelConfigError> {
    let is_override = |(name, value): (&String, &Value)| {
        name.split('.').next() == Some(QUANTIZATION) && !value.is_null()
    };
    let path = dir.join(HF_QUANT_CONFIG_FILE);
    if fields.value(QUANTIZATION).is_some() || !overrides.iter().any(is_override) || !path.exists()
    {
        return Ok(Map::new());
    }
    let Some(object) = JsonFields::read(&path)?.object("quantization")? else {
        return Ok(Map::new());
    };
    let mut quantization = object.into_map();
    quantization.insert("quant_method".to_owned(), json!("modelopt"));
    Ok(Map::from_iter([(QUANTIZATION.to_owned(), Value::Object(quantization))]))
}

/// Applies the overrides `overrides` to the fields `members` of a configuration.
pub(super) fn apply_overrides(members: &mut Map<String, Value>, overrides: &Map<String, Value>) {
    for (path, value) in overrides {
        let (parents, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut object = &mut *members;
        for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
            object = object_member(object, parent);
        }
        match value {
            Value::Object(inner) => apply_overrides(object_member(object, name), inner),
            value => drop(object.insert(name.to_owned(), value.clone())),
        }
    }
}

/// Returns the object that is stored in the field `name`. A value of another type is replaced by an empty
/// object.
fn object_member<'a>(
    members: &'a mut Map<String, Value>,
    name: &str,
) -> &'a mut Map<String, Value> {
    let member = match members.entry(name) {
        Entry::Vacant(entry) => entry.insert(Value::Null),
        Entry::Occupied(entry) => entry.into_mut(),
    };
    if !member.is_object() {
        *member = Value::Object(Map::new());
    }
    match member {
        Value::Object(object) => object,
        _ => unreachable!("the member has been made an object"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_are_merged_and_dots_are_paths() {
        let mut config = json!({
            "hidden_size": 64, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "sliding_window": 9
        });
        let overrides = json!({
            "hidden_size": 32,
            "rope_scaling": {"factor": 4.0},
            "rope_scaling.truncate": false,
            "quantization_config.config_groups.group_0.weights": {"num_bits": 8},
            "sliding_window": null,
        });
        apply_overrides(config.as_object_mut().unwrap(), overrides.as_object().unwrap());
        let expected = json!({
            "hidden_size": 32,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": false},
            "quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            "sliding_window": null,
        });
        assert_eq!(config, expected);
    }

    #[test]
    fn fields_of_a_folder_are_overridden() {
        let dir = tempfile::tempdir().unwrap();
        let overrides = json!({"eos_token_id": [7]});
        let fields = || ModelConfig::fields_with(dir.path(), overrides.as_object().unwrap());
        assert_eq!(Value::Object(fields().unwrap()), overrides);
        std::fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 1, "x": 2}"#).unwrap();
        assert_eq!(Value::Object(fields().unwrap()), json!({"eos_token_id": [7], "x": 2}));
    }

    #[test]
    fn path_through_a_value_replaces_the_value() {
        let mut config = json!({"rope_scaling": null, "hidden_size": 1});
        let overrides = json!({"rope_scaling.factor": 2.0, "hidden_size.x": 1});
        apply_overrides(config.as_object_mut().unwrap(), overrides.as_object().unwrap());
        assert_eq!(config, json!({"rope_scaling": {"factor": 2.0}, "hidden_size": {"x": 1}}));
    }
}
