//! Lists in the grammar of delimited calls.

use super::super::call_grammar::CallGrammarError;
use super::DelimitedSchemaConverter;
use serde_json::{Value, json};

/// List keywords that the grammar cannot express.
const UNSUPPORTED: &[&str] =
    &["contains", "unevaluatedItems", "additionalItems", "if", "then", "else", "not"];

/// Returns the Lark expression of `min` to `max` items separated by commas. `is_first`: no item precedes
/// these items. An empty `max` means no limit.
fn repeated(item: &str, is_first: bool, min: usize, max: &str) -> String {
    let more = |min: usize, max: &str| match (min, max) {
        (0, "") => format!("(\",\" {item})*"),
        (min, "") => format!("(\",\" {item}){{{min},{min}}} (\",\" {item})*"),
        (min, max) => format!("(\",\" {item}){{{min},{max}}}"),
    };
    if !is_first {
        return more(min, max);
    }
    let max = max.parse::<usize>().map_or(String::new(), |max| (max - 1).to_string());
    let all = format!("{item} {}", more(min.saturating_sub(1), &max));
    if min == 0 { format!("({all})?") } else { all }
}

impl DelimitedSchemaConverter<'_, '_> {
    /// Rejects keywords for lists that the grammar cannot enforce.
    fn check_list_keywords(&self, schema: &Value) -> Result<(), CallGrammarError> {
        if let Some(keyword) = UNSUPPORTED.iter().find(|keyword| schema.get(**keyword).is_some()) {
            return Err(self.unsupported(keyword));
        }
        if schema.get("uniqueItems").is_some_and(|unique| *unique != false) {
            return Err(self.unsupported("uniqueItems"));
        }
        Ok(())
    }

    pub(super) fn list(&mut self, schema: &Value) -> Result<Option<String>, CallGrammarError> {
        self.check_list_keywords(schema)?;
        let min = schema["minItems"].as_f64().unwrap_or(0.0) as usize;
        let mut max = schema["maxItems"].as_f64().map(|max| max as usize);
        let prefix = schema["prefixItems"].as_array().cloned().unwrap_or_default();
        let mut items = Vec::new();
        for schema in prefix.iter().take(max.unwrap_or(usize::MAX)) {
            let Some(item) = self.value(schema)? else {
                // No value matches this item's schema, so the list must end before this item.
                max = Some(items.len());
                break;
            };
            items.push(item);
        }
        let (min, max) =
            (min.saturating_sub(items.len()), max.map(|max| max.saturating_sub(items.len())));
        let rest = match schema.get("items") {
            _ if max == Some(0) => None,
            Some(schema) => self.value(&schema.clone())?,
            None => self.value(&json!({}))?,
        };
        let more = match (rest, max) {
            (None, _) if min > 0 => return Ok(None),
            (None, _) => String::new(),
            (Some(item), Some(max)) => repeated(&item, items.is_empty(), min, &max.to_string()),
            (Some(item), None) => repeated(&item, items.is_empty(), min, ""),
        };
        Ok(Some(format!("\"[\" {} {more} \"]\"", items.join(" \",\" "))))
    }
}
