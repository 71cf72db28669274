//! Flags for access control: API keys, the admin listener, and CORS.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{CommandLineError, ProcessEnvironment, rejected};

/// Flags with secret values, which are never shown.
pub(super) const SECRET_FLAGS: &[&str] = &["api-key", "admin-key"];

/// Flags for API keys, the admin listener and CORS.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// API key that clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; repeatable
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// File with API keys, one per line; empty lines and lines that start with # are ignored
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Admin key, valid for the admin routes and all other routes; repeatable
    #[arg(long, value_name = "KEY")]
    pub admin_key: Vec<String>,
    /// Separate listen address for the admin routes; without --admin-key every client may use them there
    #[arg(long, value_name = "HOST:PORT")]
    pub admin_listen: Option<String>,
    /// Require an API key for /metrics
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub metrics_require_key: bool,
    /// Allowed CORS origins: * for all, or a JSON list as in vLLM
    #[arg(long, value_parser = json_strings, value_name = "JSON")]
    pub allowed_origins: Option<StringListArg>,
    /// Allowed CORS methods; * for all
    #[arg(long, value_parser = json_strings, value_name = "JSON")]
    pub allowed_methods: Option<StringListArg>,
    /// Allowed CORS headers; * for all
    #[arg(long, value_parser = json_strings, value_name = "JSON")]
    pub allowed_headers: Option<StringListArg>,
    /// Allow CORS requests with credentials
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub allow_credentials: bool,
}

/// List of strings that a flag takes as one argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StringListArg(pub Vec<String>);

/// Parses a JSON list such as `["a", "b"]`, or a word without brackets as a list with one element.
fn json_strings(text: &str) -> Result<StringListArg, String> {
    if !text.trim_start().starts_with('[') {
        return Ok(StringListArg(vec![text.to_owned()]));
    }
    serde_json::from_str(text)
        .map(StringListArg)
        .map_err(|e| format!("not a JSON list of strings: {e}"))
}

impl AccessArgs {
    /// Returns the API keys of clients, from the flags and from the key file.
    ///
    /// Errors: the key file cannot be read or contains no key; a client key equals an admin key.
    pub fn client_keys(&self) -> Result<Vec<String>, CommandLineError> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            keys.extend(read_key_file(path)?);
        }
        if keys.iter().any(|key| self.admin_key.contains(key)) {
            return rejected("--admin-key: must differ from all client keys");
        }
        Ok(keys)
    }

    /// If no API key is given, uses the key from the environment. Rejects invalid combinations of flags.
    pub(super) fn check(
        &mut self,
        environment: &ProcessEnvironment,
    ) -> Result<(), CommandLineError> {
        if self.api_key.is_empty() && self.api_key_file.is_none() {
            self.api_key.extend(environment.api_key.clone());
        }
        // Keys are trimmed because the HTTP header parser trims the keys of requests.
        for key in self.api_key.iter_mut().chain(&mut self.admin_key) {
            *key = key.trim().to_owned();
        }
        if self.api_key.iter().chain(&self.admin_key).any(String::is_empty) {
            return rejected("--api-key, --admin-key: a key must not be empty");
        }
        if self.metrics_require_key && self.api_key.is_empty() && self.api_key_file.is_none() {
            return rejected("--metrics-require-key: needs --api-key or --api-key-file");
        }
        self.check_cors()
    }

    /// Rejects invalid combinations of the CORS flags.
    fn check_cors(&self) -> Result<(), CommandLineError> {
        let all = |list: &Option<StringListArg>| {
            list.as_ref().is_some_and(|l| l.0.iter().any(|o| o == "*"))
        };
        let lists = [&self.allowed_origins, &self.allowed_methods, &self.allowed_headers];
        if self.allow_credentials && lists.into_iter().any(all) {
            return rejected(
                "--allow-credentials: browsers reject it together with *; list the origins",
            );
        }
        if self.allowed_origins.is_none()
            && (self.allow_credentials || lists[1..].iter().any(|l| l.is_some()))
        {
            return rejected(
                "--allowed-methods, --allowed-headers, --allow-credentials: need --allowed-origins",
            );
        }
        Ok(())
    }
}

fn read_key_file(path: &Path) -> Result<Vec<String>, CommandLineError> {
    let error_of = |cause: &dyn std::fmt::Display| {
        CommandLineError::Rejected(format!("--api-key-file {}: {cause}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| error_of(&error))?;
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    if keys.is_empty() { Err(error_of(&"contains no key")) } else { Ok(keys) }
}
