//! Serializes values that may contain integers of more than 64 bits, with all their digits.

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;
use text::integer_of_object;

/// Serializes a value returned by
/// [`JsonValue::into_template_value`](crate::strict_json::JsonValue::into_template_value) as JSON for clients
/// and stores.
pub(crate) struct TemplateValueJson<'a>(pub(crate) &'a Value);

impl TemplateValueJson<'_> {
    /// Returns the JSON text.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Serialize for TemplateValueJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(members) => {
                if let Some(digits) = integer_of_object(members) {
                    let number = RawValue::from_string(digits.to_owned());
                    return number.map_err(serde::ser::Error::custom)?.serialize(serializer);
                }
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (key, member) in members {
                    map.serialize_entry(key, &TemplateValueJson(member))?;
                }
                map.end()
            }
            Value::Array(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for item in items {
                    list.serialize_element(&TemplateValueJson(item))?;
                }
                list.end()
            }
            scalar => scalar.serialize(serializer),
        }
    }
}

/// Serializes the members of an object, for `#[serde(flatten, serialize_with)]`.
pub(crate) fn serialize_members<S: Serializer>(
    members: &serde_json::Map<String, Value>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(members.iter().map(|(key, member)| (key, TemplateValueJson(member))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strict_json::JsonValue;

    #[test]
    fn integers_of_any_size_are_written_with_all_digits() {
        let text = "{\"a\":[123456789012345678901234567890,-18446744073709551616,7,0.5],\"b\":{\"c\":\"x\",\"d\":null}}";
        let value = JsonValue::parse(text.as_bytes()).unwrap().into_template_value();
        assert_eq!(TemplateValueJson(&value).text(), text);
    }
}
