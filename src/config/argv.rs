//! Rewrites a command line into the spelling that clap expects.
//!
//! `--max_num_seqs` becomes `--max-num-seqs`; `--no-X` becomes `--X=false` for a boolean flag X; `-tp 2`
//! becomes `--tensor-parallel-size 2`; `--hf-overrides.X V` becomes `--hf-overrides={"X":V}`. Flags of other
//! engines are removed or rejected. Flags of `--config FILE` that the command line does not set are inserted
//! before those of the command line.

mod flag_spelling;

use flag_spelling::{canonical_spelling, edit_distance};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::Path;

use clap::Command;
use serde_json::{Map, Value};

use super::compat_flags::{INERT_FLAGS, is_no_op_value, unsupported_reason};
use super::{CommandLineError, file, rejected};

/// Command line in the spelling of clap, and notes about removed flags.
pub(super) struct RewrittenArgv {
    pub(super) argv: Vec<String>,
    pub(super) notes: Vec<String>,
    /// Whether `--served-model-name` was given without `=`. In this form it consumes all arguments after it.
    pub(super) served_names_variadic: bool,
}

/// Rewrites the command line `argv` into the spelling that clap expects. The first word is the program name.
pub(super) fn normalise(
    command: &Command,
    argv: Vec<OsString>,
) -> Result<RewrittenArgv, CommandLineError> {
    let argv = argv.into_iter().map(OsString::into_string).collect::<Result<Vec<_>, _>>();
    let mut argv = argv.map_err(|word| {
        CommandLineError::Usage(format!("error: {} is not valid UTF-8\n", word.to_string_lossy()))
    })?;
    // `launch` is equivalent to `serve`, so that all nodes can use the same command line and differ by
    // environment variables only.
    if let Some(word) = argv.get_mut(1).filter(|word| *word == "launch") {
        "serve".clone_into(word);
    }
    // Only `serve` accepts flags of other engines and configuration files.
    if argv.get(1).map(String::as_str) != Some("serve") {
        let argv = argv.into_iter().map(|word| canonical_spelling(&word)).collect();
        return Ok(RewrittenArgv { argv, notes: Vec::new(), served_names_variadic: false });
    }
    let Some(serve) = command.find_subcommand("serve") else {
        return rejected("serve: not in this build");
    };
    rewrite_serve(&ServeFlagNames::new(serve), &argv)
}

/// Rewrites the flags of a `serve` command line, and adds the flags of its configuration file.
fn rewrite_serve(
    flags: &ServeFlagNames,
    argv: &[String],
) -> Result<RewrittenArgv, CommandLineError> {
    let mut notes = Vec::new();
    let command_line_words = flags.rewrite(&argv[2..], &mut notes)?;
    let mut words: Vec<String> = argv[..2].to_vec();
    if let Some(path) = value_of(&command_line_words, "--config") {
        let path = Path::new(&path);
        let file_words = flags.rewrite(&file::argv_of_file(path)?, &mut notes)?;
        words.extend(flags.without_overridden(file_words, &command_line_words, path)?);
    }
    let served_names_variadic = command_line_words.iter().any(|word| word == "--served-model-name");
    words.extend(command_line_words);
    notes.sort_unstable();
    notes.dedup();
    Ok(RewrittenArgv { argv: words, notes, served_names_variadic })
}

/// Names of the flags of `serve`.
struct ServeFlagNames {
    /// Map from each name and alias of a flag to the flag's long name.
    names: BTreeMap<String, String>,
    /// Long names of the boolean flags.
    booleans: BTreeSet<String>,
}

impl ServeFlagNames {
    fn new(serve: &Command) -> Self {
        let mut names = BTreeMap::new();
        let mut booleans = BTreeSet::new();
        for flag in serve.get_arguments() {
            let Some(long) = flag.get_long() else { continue };
            if flag.is_require_equals_set() {
                booleans.insert(long.to_owned());
            }
            let aliases = flag.get_all_aliases().unwrap_or_default();
            for name in aliases.into_iter().chain([long]) {
                names.insert(name.to_owned(), long.to_owned());
            }
        }
        Self { names, booleans }
    }

    /// Rewrites `words`. Adds a note for each flag that has no effect.
    fn rewrite(
        &self,
        words: &[String],
        notes: &mut Vec<String>,
    ) -> Result<Vec<String>, CommandLineError> {
        let mut out = Vec::with_capacity(words.len());
        let mut words = words.iter().peekable();
        while let Some(word) = words.next() {
            if word == "--" {
                out.push(word.clone());
                out.extend(words.by_ref().cloned());
                break;
            }
            if let Some(member) = overridden_member(word) {
                out.push(config_override(member, &mut words)?);
                continue;
            }
            let word = self.rewrite_negation(&canonical_spelling(word));
            let Some(name) = word.strip_prefix("--") else {
                out.push(word);
                continue;
            };
            let (name, value) = name.split_once('=').map_or((name, None), |(n, v)| (n, Some(v)));
            let positive_name = name.strip_prefix("no-").unwrap_or(name);
            if let Some(flag) =
                INERT_FLAGS.iter().find(|flag| flag.name == name || flag.name == positive_name)
            {
                let value = match value {
                    None if flag.takes_value() => {
                        words.next_if(|next| !next.starts_with('-')).map(String::as_str)
                    }
                    value => value,
                };
                if let Some(value) = value.filter(|value| !flag.is_inert_with(value)) {
                    return rejected(format!("--{name} {value} is not supported: {}", flag.reason));
                }
                notes.push(format!("--{name} has no effect: {}", flag.reason));
                continue;
            }
            if let Some(reason) = unsupported_reason(name).filter(|_| value != Some("false")) {
                let value_arg = value.or_else(|| words.peek().map(|next| next.as_str()));
                if let Some(value_arg) =
                    value_arg.filter(|value_arg| is_no_op_value(name, value_arg))
                {
                    notes.push(format!(
                        "--{name} {value_arg} has no effect: it is the built-in behaviour"
                    ));
                    if value.is_none() {
                        words.next();
                    }
                    continue;
                }
                return rejected(format!("--{name} is not supported: {reason}"));
            }
            // A flag that disables an unsupported feature (`--no-X`, `--X=false`) is accepted.
            if let Some(reason) = unsupported_reason(positive_name) {
                notes.push(format!("--{name} has no effect: {reason}"));
                continue;
            }
            out.push(word);
        }
        Ok(out)
    }

    /// Rewrites `--no-X` as `--X=false` if X is a boolean flag.
    fn rewrite_negation(&self, word: &str) -> String {
        let long_name = word.strip_prefix("--no-").and_then(|name| self.names.get(name));
        match long_name.filter(|name| self.booleans.contains(*name)) {
            Some(name) => format!("--{name}=false"),
            None => word.to_owned(),
        }
    }

    /// Returns the long name of the flag that `word` sets; `None` = `word` is not a flag of `serve`.
    fn flag_name(&self, word: &str) -> Option<&str> {
        let name = word.strip_prefix("--")?;
        let name = name.split_once('=').map_or(name, |(name, _)| name);
        self.names.get(name).map(String::as_str)
    }

    /// Returns the name of the known flag that is most similar to `name`; `None` if no flag is similar.
    fn similar_name(&self, name: &str) -> Option<&str> {
        let names = self.names.keys().map(|flag| (edit_distance(name, flag), flag.as_str()));
        names.min().filter(|(edits, _)| edits * 3 <= name.len()).map(|(_, flag)| flag)
    }

    /// Returns the words of a configuration file without the flags that are also on the command line. Each
    /// word has the form `--name=value`.
    fn without_overridden(
        &self,
        file_words: Vec<String>,
        command_line_words: &[String],
        path: &Path,
    ) -> Result<Vec<String>, CommandLineError> {
        let mut overridden: BTreeSet<&str> =
            command_line_words.iter().filter_map(|word| self.flag_name(word)).collect();
        overridden.insert("config");
        // `serve MODEL` overrides `model` in the configuration file.
        if command_line_words.first().is_some_and(|word| !word.starts_with('-')) {
            overridden.insert("model");
        }
        let mut remaining = Vec::new();
        for word in file_words {
            match self.flag_name(&word) {
                Some(name) if overridden.contains(name) => {}
                Some(_) => remaining.push(word),
                None => {
                    let name = word.trim_start_matches('-').split('=').next().unwrap_or_default();
                    let similar = self.similar_name(name);
                    let hint = similar.map(|name| format!("; did you mean {name}?"));
                    let (path, hint) = (path.display(), hint.unwrap_or_default());
                    return rejected(format!("{path}: {name} is not a flag of serve{hint}"));
                }
            }
        }
        Ok(remaining)
    }
}

/// Returns what follows the dot in `--hf-overrides.MEMBER` or `--hf-overrides.MEMBER=VALUE`.
fn overridden_member(word: &str) -> Option<&str> {
    let prefixes = ["--hf-overrides.", "--hf_overrides."];
    prefixes.iter().find_map(|prefix| word.strip_prefix(prefix))
}

/// Converts `--hf-overrides.MEMBER=VALUE`, or `--hf-overrides.MEMBER` and the next word, to
/// `--hf-overrides={"MEMBER": VALUE}`. A value that is not JSON is a string.
fn config_override<'a>(
    member: &str,
    words: &mut impl Iterator<Item = &'a String>,
) -> Result<String, CommandLineError> {
    let (member, value) = match member.split_once('=') {
        Some((member, value)) => (member, Some(value)),
        None => (member, words.next().map(String::as_str)),
    };
    let Some(value) = value else {
        return rejected(format!("--hf-overrides.{member}: the value is missing"));
    };
    if member.split('.').any(str::is_empty) {
        return rejected(format!("--hf-overrides.{member}: a name between the dots is empty"));
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
    let overrides = Map::from_iter([(member.to_owned(), value)]);
    Ok(format!("--hf-overrides={}", Value::Object(overrides)))
}

/// Returns the last value that a command line gives for a flag.
fn value_of(words: &[String], name: &str) -> Option<String> {
    let mut found = None;
    for (index, word) in words.iter().enumerate() {
        if word == name {
            found = words.get(index + 1).cloned();
        } else if let Some(value) = word.strip_prefix(name).and_then(|w| w.strip_prefix('=')) {
            found = Some(value.to_owned());
        }
    }
    found
}
