//! Access flags: API keys, the admin listener, and CORS.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{CommandLineError, ProcessEnvironment, rejected};

/// Flags with secret values, which are never shown.
pub(super) const SECRET_FLAGS: &[&str] = &["api-key", "admin-key"];

/// Access control of the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// A key that clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; repeatable
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// A file of such keys, one a line; empty lines and those that begin with # are left out
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The key of operators: opens the admin routes, and all others; repeatable
    #[arg(long, value_name = "KEY")]
    pub admin_key: Vec<String>,
    /// An address of its own on which the admin routes answer, without --admin-key to any client
    #[arg(long, value_name = "HOST:PORT")]
    pub admin_listen: Option<String>,
    /// Ask scrapers of /metrics for a key, too
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub metrics_require_key: bool,
    /// Sites whose pages may call this server from a browser: * for all, or a JSON list as vLLM takes
    #[arg(long, value_parser = json_strings, value_name = "JSON")]
    pub allowed_origins: Option<StringListArg>,
    /// Methods that pages of those sites may use; * for all
    #[arg(long, value_parser = json_strings, value_name = "JSON")]
    pub allowed_methods: Option<StringListArg>,
    /// Headers that pages of those sites may send; * for all
    #[arg(long, value_parser = json_strings, value_name = "JSON")]
    pub allowed_headers: Option<StringListArg>,
    /// Let pages of those sites send cookies and keys that the browser holds
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub allow_credentials: bool,
}

/// List of strings from one argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StringListArg(pub Vec<String>);

/// Parses `["a", "b"]`, or a bare word as a list with one element.
fn json_strings(text: &str) -> Result<StringListArg, String> {
    if !text.trim_start().starts_with('[') {
        return Ok(StringListArg(vec![text.to_owned()]));
    }
    serde_json::from_str(text)
        .map(StringListArg)
        .map_err(|e| format!("not a JSON list of strings: {e}"))
}

impl AccessArgs {
    /// Returns the client keys from flags and from the key file.
    ///
    /// Errors: the file cannot be read or contains no key; a client key equals an admin key.
    pub fn client_keys(&self) -> Result<Vec<String>, CommandLineError> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            keys.extend(read_key_file(path)?);
        }
        if keys.iter().any(|key| self.admin_key.contains(key)) {
            return rejected("--admin-key: clients must not have the same key");
        }
        Ok(keys)
    }

    /// Uses the key of the environment if no key is given, and rejects invalid combinations.
    pub(super) fn check(
        &mut self,
        environment: &ProcessEnvironment,
    ) -> Result<(), CommandLineError> {
        if self.api_key.is_empty() && self.api_key_file.is_none() {
            self.api_key.extend(environment.api_key.clone());
        }
        // Trim keys as the header parser does.
        for key in self.api_key.iter_mut().chain(&mut self.admin_key) {
            *key = key.trim().to_owned();
        }
        if self.api_key.iter().chain(&self.admin_key).any(String::is_empty) {
            return rejected("--api-key, --admin-key: a key may not be empty");
        }
        if self.metrics_require_key && self.api_key.is_empty() && self.api_key_file.is_none() {
            return rejected(
                "--metrics-require-key: there is no key to ask for: give --api-key or --api-key-file",
            );
        }
        let all = |list: &Option<StringListArg>| {
            list.as_ref().is_some_and(|l| l.0.iter().any(|o| o == "*"))
        };
        let lists = [&self.allowed_origins, &self.allowed_methods, &self.allowed_headers];
        if self.allow_credentials && lists.into_iter().any(all) {
            return rejected(
                "--allow-credentials: browsers refuse it together with *: name the sites",
            );
        }
        if self.allowed_origins.is_none()
            && (self.allow_credentials || lists[1..].iter().any(|l| l.is_some()))
        {
            return rejected(
                "--allowed-methods, --allowed-headers, --allow-credentials: say for whom with --allowed-origins",
            );
        }
        Ok(())
    }
}

fn read_key_file(path: &Path) -> Result<Vec<String>, CommandLineError> {
    let told = |cause: &dyn std::fmt::Display| {
        CommandLineError::Rejected(format!("--api-key-file {}: {cause}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| told(&error))?;
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    if keys.is_empty() { Err(told(&"holds no key")) } else { Ok(keys) }
}
