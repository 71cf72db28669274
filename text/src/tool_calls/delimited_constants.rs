//! List and object constants in the delimited syntax.

use super::delimited_calls::DelimitedCallSyntax;
use serde_json::Value;

/// Formats a value in the syntax that the model generates.
pub(super) fn constant_text(syntax: &DelimitedCallSyntax, value: &Value) -> String {
    let delimiter = syntax.delimiter;
    match value {
        Value::String(text) => format!("{delimiter}{text}{delimiter}"),
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(|one| constant_text(syntax, one)).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(members) => {
            let member =
                |(key, value): (&String, &Value)| format!("{key}:{}", constant_text(syntax, value));
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn constants_are_written_without_quotes() {
        let value = json!({"k": ["x", 1, {"l": null}]});
        let syntax = DelimitedCallSyntax { open: "(", close: ")", delimiter: "<escape>" };
        assert_eq!(constant_text(&syntax, &value), "{k:[<escape>x<escape>,1,{l:null}]}");
    }
}
