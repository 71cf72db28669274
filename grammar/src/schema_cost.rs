//! Rejects schemas with unbounded compilation cost, because llguidance does not bound all of its compilation
//! work.
//!
//! llguidance's fuel limit covers the construction of regular expressions, but not the test whether an
//! intersection of regular expressions is empty, and not the lexer states of a `multipleOf`. Each limit here
//! is far above the values in real schemas.

use super::compile::GrammarError;
use serde_json::Value;

/// Maximum number of strings with `pattern` or `format` in a schema with `allOf`, because llguidance may have
/// to intersect the regular expressions of all of them.
const INTERSECTED_MAX: usize = 16;
/// Maximum number of property-name patterns (`patternProperties`), because each pattern is compared with
/// every other one.
const NAME_PATTERNS_MAX: usize = 64;
/// Maximum value of the significant digits of a `multipleOf`, read as an integer without trailing zeros. The
/// number of lexer states equals this value.
const MULTIPLE_MAX: u64 = 10_000;

/// Numbers of keywords of a schema that determine its compilation cost.
#[derive(Default)]
struct SchemaKeywordCounts {
    intersections: usize,
    patterns: usize,
    name_patterns: usize,
}

/// Rejects a schema whose compilation time may be unbounded.
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let mut counts = SchemaKeywordCounts::default();
    count(schema, &mut counts)?;
    let SchemaKeywordCounts { intersections, patterns, name_patterns } = counts;
    if intersections > 0 && patterns > INTERSECTED_MAX {
        return reject(format!(
            "a schema with allOf has {patterns} patterns and formats, the limit is {INTERSECTED_MAX}"
        ));
    }
    if name_patterns > NAME_PATTERNS_MAX {
        return reject(format!(
            "{name_patterns} patternProperties, the limit is {NAME_PATTERNS_MAX}"
        ));
    }
    Ok(())
}

fn reject(message: String) -> Result<(), GrammarError> {
    Err(GrammarError::Invalid(message))
}

/// Counts keywords at any depth. A property named `pattern` or `format` is not counted, because its value is
/// a schema, not a string.
fn count(value: &Value, counts: &mut SchemaKeywordCounts) -> Result<(), GrammarError> {
    match value {
        Value::Array(list) => list.iter().try_for_each(|item| count(item, counts)),
        Value::Object(map) => map.iter().try_for_each(|(key, value)| {
            match (key.as_str(), value) {
                ("allOf", Value::Array(_)) => counts.intersections += 1,
                ("pattern" | "format", Value::String(_)) => counts.patterns += 1,
                ("patternProperties", Value::Object(names)) => counts.name_patterns += names.len(),
                ("multipleOf", Value::Number(number)) if digits(number) > MULTIPLE_MAX => {
                    return reject(format!(
                        "the digits of multipleOf without trailing zeros exceed {MULTIPLE_MAX}"
                    ));
                }
                _ => {}
            }
            count(value, counts)
        }),
        _ => Ok(()),
    }
}

/// Returns the significant digits of a number as an integer without trailing zeros: 12 for 1200 and for
/// 0.012.
fn digits(number: &serde_json::Number) -> u64 {
    let text = number.to_string();
    let mantissa = text.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let digits = digits.trim_end_matches('0');
    digits.parse().unwrap_or(if digits.is_empty() { 0 } else { u64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_unbounded_schemas_are_rejected() {
        let patterns =
            |n: usize| (0..n).map(|i| json!({"pattern": format!("a{i}.*b")})).collect::<Vec<_>>();
        let names = |n: usize| {
            (0..n).map(|i| (format!("^a{i}"), json!(true))).collect::<serde_json::Map<_, _>>()
        };
        assert!(check(&json!({"allOf": patterns(16)})).is_ok());
        assert!(check(&json!({"allOf": patterns(17)})).is_err());
        assert!(check(&json!({"anyOf": patterns(100)})).is_ok());
        assert!(check(&json!({"patternProperties": names(64)})).is_ok());
        assert!(check(&json!({"patternProperties": names(65)})).is_err());
        assert!(
            check(&json!({"properties": {"pattern": {"allOf": []}, "multipleOf": {}}})).is_ok()
        );
        for (multiple, fits) in [
            (json!(7), true),
            (json!(0.25), true),
            (json!(5_000_000), true),
            (json!(1e-9), true),
            (json!(99_991), false),
            (json!(0.099_991), false),
        ] {
            assert_eq!(check(&json!({"multipleOf": multiple})).is_ok(), fits, "{multiple}");
        }
    }
}
