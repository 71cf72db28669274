//! Names of the parts of a request that are accepted but have no effect on the reply. They are listed in the
//! reply header of ignored fields and counted, and `--strict-fields` accepts them.

use crate::api_error::ApiError;
use crate::request_fields::RequestFields;

/// Maximum number of names in the reply header; all names are counted.
const NAMES_MAX: usize = 32;

/// Fields that OpenAI's servers use for caching, billing and moderation, and that clients set by themselves.
const FIELDS: &[&str] = &[
    "client_metadata",
    "context_management",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
];

/// Parts of one request that have no effect.
#[derive(Debug, Default)]
pub(crate) struct AcceptedHints {
    names: Vec<String>,
    count: usize,
}

impl AcceptedHints {
    /// Adds the path of a field, a tool or an input item. It must be printable ASCII.
    pub(crate) fn add(&mut self, name: impl Into<String>) {
        self.count += 1;
        if self.names.len() < NAMES_MAX {
            self.names.push(name.into());
        }
    }

    /// Returns the number of added names.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the names for the reply header.
    pub(crate) fn into_names(self) -> Vec<String> {
        self.names
    }

    /// Takes the fields that have no effect whatever their value is.
    ///
    /// Errors: HTTP status 400 for values of `include` that request log-probabilities, and for stream
    /// options that are not an object.
    pub(super) fn take_fields(&mut self, fields: &mut RequestFields) -> Result<(), ApiError> {
        for name in FIELDS {
            if fields.take(name).is_some() {
                self.add(*name);
            }
        }
        if let Some(value) = fields.take("stream_options") {
            RequestFields::of("stream_options".to_owned(), value)?.bool("include_obfuscation")?;
            self.add("stream_options");
        }
        let included = fields.strings("include", 256, 64)?.unwrap_or_default();
        // The other values name parts of items that this server does not generate. Reasoning is always
        // returned as plain text, so its encrypted form is not needed.
        if included.iter().any(|name| name == "message.output_text.logprobs") {
            return Err(no_logprobs("include"));
        }
        if !included.is_empty() {
            self.add("include");
        }
        Ok(())
    }

    /// Adds the fields of an object that no code has parsed.
    pub(super) fn add_remaining(&mut self, object: &RequestFields) {
        for name in object.ignored_names() {
            self.add(object.path(&name));
        }
    }

    /// Takes a keyword that has no effect and must be one of `values`.
    pub(super) fn take_keyword(
        &mut self,
        fields: &mut RequestFields,
        name: &str,
        values: &[&str],
    ) -> Result<Option<String>, ApiError> {
        let Some(value) = fields.string(name, 64)? else { return Ok(None) };
        if !values.contains(&value.as_str()) {
            let message = format!("must be one of {}", values.join(", "));
            return Err(ApiError::invalid(fields.path(name), message));
        }
        self.add(fields.path(name));
        Ok(Some(value))
    }
}

/// Creates the 400 error for a field that requests log-probabilities.
pub(super) fn no_logprobs(field: &str) -> ApiError {
    ApiError::unsupported(field, "log-probabilities are supported by /v1/chat/completions only")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_counted_and_few_are_listed() {
        let mut hints = AcceptedHints::default();
        for index in 0..100 {
            hints.add(format!("tools[{index}]"));
        }
        assert_eq!((hints.count(), hints.into_names().len()), (100, NAMES_MAX));
    }
}
