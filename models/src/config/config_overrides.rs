//! Overrides of the fields of `config.json` (`--hf-overrides`).
//!
//! As in vLLM, an object in the overrides is merged field by field into the object of the same name. A dotted
//! name (`rope_scaling.factor`) is the path of a nested field. A field that is set to null means what null
//! means in transformers: it differs from an absent field if the default of the field is not `None`.

use serde_json::{Map, Value, map::Entry};

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
    fn path_through_a_value_replaces_the_value() {
        let mut config = json!({"rope_scaling": null, "hidden_size": 1});
        let overrides = json!({"rope_scaling.factor": 2.0, "hidden_size.x": 1});
        apply_overrides(config.as_object_mut().unwrap(), overrides.as_object().unwrap());
        assert_eq!(config, json!({"rope_scaling": {"factor": 2.0}, "hidden_size": {"x": 1}}));
    }
}
