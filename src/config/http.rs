//! Flags of the HTTP server and of the content of its replies.

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::units::{DurationArg, json_object};
use super::{CommandLineError, rejected};
use text::{ReasoningFamily, ToolCallSyntax};

/// Listen address and timeouts of the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct HttpArgs {
    /// Listen address; use --api-key for addresses other than loopback
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Listen port; 0 selects a free port and prints it
    #[arg(long, alias = "server-port", default_value_t = 8000)]
    pub port: u16,
    /// Interval of SSE keep-alive comments on idle streams; 0 = never
    #[arg(long, default_value = "15s", value_name = "SECONDS")]
    pub sse_keep_alive_interval: DurationArg,
    /// Time that running streams get after SIGTERM
    #[arg(long, default_value = "30s", value_name = "SECONDS")]
    pub shutdown_timeout: DurationArg,
}

/// Flags for the content of replies: chat template, parsers, log-probabilities and usage.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Replies")]
pub struct ReplyArgs {
    /// Chat template instead of the model's: a file, or the template itself
    #[arg(long, value_name = "FILE_OR_TEXT")]
    pub chat_template: Option<String>,
    /// Default template variables, which requests may override
    #[arg(long, value_parser = json_object, value_name = "JSON")]
    pub default_chat_template_kwargs: Option<Map<String, Value>>,
    /// Accept `chat_template` in requests; only for clients that are trusted like the operator
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub trust_request_chat_template: bool,
    /// Enable GET /tokenizer_info, which returns the tokenizer's configuration and the chat template
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_tokenizer_info_endpoint: bool,
    /// Source of sampling defaults: auto = the model's generation_config.json, none = the defaults of the API
    #[arg(long, default_value = "auto", value_name = "auto|none")]
    generation_config: String,
    /// Tool-call parser: auto = selected by chat template or architecture, none = tool calls are not parsed
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub tool_call_parser: String,
    /// Reasoning parser: auto = selected by chat template or architecture, none = reasoning is not parsed
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub reasoning_parser: String,
    /// Reply fields that contain reasoning
    #[arg(long, default_value = "both", value_name = "NAME")]
    pub reasoning_field: ReasoningFieldArg,
    /// Maximum logprobs of a request; -1 = the whole vocabulary, on a GPU the top 1024 ids
    #[arg(long, default_value_t = 20, allow_negative_numbers = true, value_name = "COUNT")]
    pub max_logprobs: i64,
    /// Write tokens in logprobs as `token_id:N`
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub return_tokens_as_token_ids: bool,
    /// Report usage in every chunk of every stream
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_force_include_usage: bool,
    /// Report cached tokens in usage
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_prompt_tokens_details: bool,
    /// Reject unknown request fields instead of listing them in a response header
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub strict_fields: bool,
    /// `owned_by` of the model card; gateways use it to detect the API dialect
    #[arg(long, default_value = "vllm", value_name = "NAME")]
    pub owned_by: String,
}

/// Names of the reply fields that contain reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReasoningFieldArg {
    /// Fields `reasoning` and `reasoning_content`
    Both,
    /// Field `reasoning`, the current name
    Reasoning,
    /// Field `reasoning_content`, the older name
    #[value(name = "reasoning_content", alias = "reasoning-content")]
    ReasoningContent,
}

/// Rejects an unknown parser name, with a list of the known names.
fn check_parser_name(flag: &str, name: &str, names: &[&str]) -> Result<(), CommandLineError> {
    if matches!(name, "auto" | "none") || names.contains(&name) {
        return Ok(());
    }
    rejected(format!("{flag} {name}: one of auto, none, {}", names.join(", ")))
}

impl ReplyArgs {
    /// Whether the sampling defaults are read from `generation_config.json`.
    pub fn uses_generation_config(&self) -> bool {
        self.generation_config == "auto"
    }

    /// Rejects invalid values of the flags.
    pub(super) fn check(&self) -> Result<(), CommandLineError> {
        if !matches!(self.generation_config.as_str(), "auto" | "none" | "vllm") {
            return rejected(format!(
                "--generation-config {}: auto or none (a folder is not supported)",
                self.generation_config
            ));
        }
        let calls: Vec<&str> = ToolCallSyntax::NAMES.iter().map(|(name, _)| *name).collect();
        check_parser_name("--tool-call-parser", &self.tool_call_parser, &calls)?;
        let reasoning: Vec<&str> = ReasoningFamily::NAMES.iter().map(|(name, _)| *name).collect();
        check_parser_name("--reasoning-parser", &self.reasoning_parser, &reasoning)?;
        if self.max_logprobs < -1 {
            return rejected(format!("--max-logprobs {}: -1 or more", self.max_logprobs));
        }
        Ok(())
    }
}
