//! Reads `--config FILE`, a TOML or YAML file that sets flags of `serve` by their names.

use std::path::Path;

use serde_json::{Map, Value};

use super::{CommandLineError, rejected};

/// Converts a configuration file into command-line words of the form `--name=value`.
pub(super) fn argv_of_file(path: &Path) -> Result<Vec<String>, CommandLineError> {
    let text = std::fs::read_to_string(path).map_err(|error| error_in(path, &error))?;
    let mut words = Vec::new();
    for (name, value) in &members(path, &text)? {
        match value {
            Value::Array(items) if items.iter().all(|item| !item.is_object()) => {
                for item in items {
                    words.push(argv_of_flag(name, item, path)?);
                }
            }
            // Configuration files of vLLM may have keys without a value; these are ignored.
            Value::Null => {}
            value => words.push(argv_of_flag(name, value, path)?),
        }
    }
    Ok(words)
}

/// Parses a configuration file as YAML if the file name ends in `.yaml` or `.yml`, otherwise as TOML.
fn members(path: &Path, text: &str) -> Result<Map<String, Value>, CommandLineError> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if !["yaml", "yml"].contains(&extension.to_ascii_lowercase().as_str()) {
        return toml::from_str(text).map_err(|error| error_in(path, &error));
    }
    match yaml_serde::from_str(text).map_err(|error| error_in(path, &error))? {
        Value::Object(members) => Ok(members),
        Value::Null => Ok(Map::new()),
        _ => rejected(format!("{}: must contain `flag: value` lines", path.display())),
    }
}

fn error_in(path: &Path, error: &dyn std::fmt::Display) -> CommandLineError {
    CommandLineError::Rejected(format!("{}: {error}", path.display()))
}

fn argv_of_flag(name: &str, value: &Value, path: &Path) -> Result<String, CommandLineError> {
    let value = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(on) => on.to_string(),
        // A flag with a JSON value may be written as a table.
        Value::Object(_) => value.to_string(),
        Value::Array(_) | Value::Null => {
            return rejected(format!("{}: {name}: not a valid flag value", path.display()));
        }
    };
    Ok(format!("--{name}={value}"))
}
