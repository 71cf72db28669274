//! Writes a value for chat templates as JSON text. Numbers are formatted as by Python's `json.dumps`, the
//! format that models saw in training.

use super::jinja::float_text;
use super::large_integers::integer_of_object;
use serde_json::Value;

/// Returns `value` as JSON text. The string `space` is inserted after each comma and colon.
pub fn json_text(value: &Value, space: &str) -> String {
    let mut out = String::new();
    write_value(value, space, &mut out);
    out
}

fn write_value(value: &Value, space: &str, out: &mut String) {
    let separate = |index: usize, out: &mut String| {
        if index > 0 {
            out.push(',');
            out.push_str(space);
        }
    };
    match value {
        Value::Object(members) => {
            if let Some(digits) = integer_of_object(members) {
                return out.push_str(digits);
            }
            out.push('{');
            for (index, (key, member)) in members.iter().enumerate() {
                separate(index, out);
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                out.push_str(space);
                write_value(member, space, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                separate(index, out);
                write_value(item, space, out);
            }
            out.push(']');
        }
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(float) => out.push_str(&float_text(float)),
            None => out.push_str(&number.to_string()),
        },
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::large_integers::template_integer;
    use serde_json::json;

    #[test]
    fn numbers_have_the_text_of_python() {
        let large = template_integer("123456789012345678901");
        let value = json!({"é\n": [1, 2.0, 1e20, 1e-7, large], "b": {"c": null, "d": [], "e": {}}});
        let text = "{\"é\\n\": [1, 2.0, 1e+20, 1e-07, 123456789012345678901], \
                    \"b\": {\"c\": null, \"d\": [], \"e\": {}}}";
        assert_eq!(json_text(&value, " "), text);
        assert_eq!(json_text(&json!({"a": [1, true]}), ""), "{\"a\":[1,true]}");
    }
}
