//! Values of all flags of `serve`, which `/server_info` returns.

use clap::{ArgMatches, CommandFactory as _};
use serde_json::{Map, Value};

use super::CliArgs;
use super::access::SECRET_FLAGS;

/// Returns the value of every flag of `serve`, given or default. For flags with secret values
/// (`SECRET_FLAGS`, API keys), returns only the number of values.
pub(super) fn serve_flag_values(matches: &ArgMatches) -> Map<String, Value> {
    let Some(serve_matches) = matches.subcommand_matches("serve") else { return Map::new() };
    let command = CliArgs::command();
    let Some(serve) = command.find_subcommand("serve") else { return Map::new() };
    let flags = serve.get_arguments().filter(|flag| !flag.is_hide_set());
    let flag_names = flags.filter_map(|flag| Some((flag.get_long()?, flag.get_id().as_str())));
    let values = flag_names.filter_map(|(name, id)| {
        let raw_values: Vec<Value> =
            serve_matches.get_raw(id)?.map(|word| value(&word.to_string_lossy())).collect();
        let value = match raw_values.as_slice() {
            _ if SECRET_FLAGS.contains(&name) => Value::from(raw_values.len()),
            [one] => one.clone(),
            _ => Value::from(raw_values),
        };
        Some((name.to_owned(), value))
    });
    values.collect()
}

/// Converts the text of a value into a JSON number or boolean if it is one, else into a string.
fn value(word: &str) -> Value {
    match word.parse::<i64>() {
        Ok(number) => Value::from(number),
        Err(_) => word.parse::<bool>().map_or_else(|_| Value::from(word), Value::from),
    }
}
