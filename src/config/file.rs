//! Reads `--config FILE.toml`, a file that sets flags of `serve` by their names.

use std::path::Path;

use toml::{Table, Value};

use super::{CommandLineError, rejected};

/// Converts a configuration file into command-line words of the form `--name=value`.
pub(super) fn argv_of_file(path: &Path) -> Result<Vec<String>, CommandLineError> {
    let error_of = |error: &dyn std::fmt::Display| {
        CommandLineError::Rejected(format!("{}: {error}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|e| error_of(&e))?;
    let table: Table = text.parse().map_err(|e: toml::de::Error| error_of(&e))?;
    let mut words = Vec::new();
    for (name, value) in &table {
        match value {
            Value::Array(items) if items.iter().all(|item| !item.is_table()) => {
                for item in items {
                    words.push(argv_of_flag(name, item, path)?);
                }
            }
            value => words.push(argv_of_flag(name, value, path)?),
        }
    }
    Ok(words)
}

fn argv_of_flag(name: &str, value: &Value, path: &Path) -> Result<String, CommandLineError> {
    let value = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(on) => on.to_string(),
        // A flag with a JSON value may be written as a TOML table.
        Value::Table(_) => match serde_json::to_string(value) {
            Ok(json) => json,
            Err(error) => return rejected(format!("{}: {name}: {error}", path.display())),
        },
        Value::Array(_) | Value::Datetime(_) => {
            return rejected(format!("{}: {name}: not a valid flag value", path.display()));
        }
    };
    Ok(format!("--{name}={value}"))
}
