//! Flags of the HTTP server and of its replies.

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::units::{DurationArg, json_object};
use super::{CommandLineError, rejected};
use text::{ReasoningFamily, ToolCallSyntax};

/// Listen address and timeouts of the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct HttpArgs {
    /// Address to listen on; beyond loopback a key is advised
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, alias = "server-port", default_value_t = 8000)]
    pub port: u16,
    /// Comment on idle streams after this long; 0 = never
    #[arg(long, default_value = "15s", value_name = "SECONDS")]
    pub sse_keep_alive_interval: DurationArg,
    /// On SIGTERM, streams may run on for this long
    #[arg(long, default_value = "30s", value_name = "SECONDS")]
    pub shutdown_timeout: DurationArg,
}

/// Format of replies.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Replies")]
pub struct ReplyArgs {
    /// Chat template to use instead of the model's: a file, or the template itself
    #[arg(long, value_name = "FILE_OR_TEXT")]
    pub chat_template: Option<String>,
    /// Template variables that requests may override
    #[arg(long, value_parser = json_object, value_name = "JSON")]
    pub default_chat_template_kwargs: Option<Map<String, Value>>,
    /// Take `chat_template` of requests: only from clients that are trusted like the operator
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub trust_request_chat_template: bool,
    /// Answer GET /tokenizer_info with the tokenizer's configuration and the chat template
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_tokenizer_info_endpoint: bool,
    /// Sampling defaults: auto takes the model's generation_config.json, none the API's
    #[arg(long, default_value = "auto", value_name = "auto|none")]
    generation_config: String,
    /// Tool-call syntax of the model: auto takes the template's or the architecture's, none reads no calls
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub tool_call_parser: String,
    /// Reasoning syntax of the model: auto takes the template's or the architecture's, none tells none apart
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub reasoning_parser: String,
    /// Fields that show reasoning
    #[arg(long, default_value = "both", value_name = "NAME")]
    pub reasoning_field: ReasoningFieldArg,
    /// Most logprobs a request may ask for; -1 = the vocabulary, on a GPU its 1024 likeliest ids
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
    /// Refuse unknown request fields instead of naming them in a header
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub strict_fields: bool,
    /// `owned_by` of the model card; gateways read it as the dialect
    #[arg(long, default_value = "vllm", value_name = "NAME")]
    pub owned_by: String,
}

/// Reply fields that contain reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReasoningFieldArg {
    /// Both of the following
    Both,
    /// The name of today
    Reasoning,
    /// The older name
    #[value(name = "reasoning_content", alias = "reasoning-content")]
    ReasoningContent,
}

/// Rejects an unknown parser and lists the known ones.
fn check_parser_name(flag: &str, name: &str, names: &[&str]) -> Result<(), CommandLineError> {
    if matches!(name, "auto" | "none") || names.contains(&name) {
        return Ok(());
    }
    rejected(format!("{flag} {name}: one of auto, none, {}", names.join(", ")))
}

impl ReplyArgs {
    /// Whether `generation_config.json` sets the sampling defaults.
    pub fn uses_generation_config(&self) -> bool {
        self.generation_config == "auto"
    }

    /// Rejects invalid values.
    pub(super) fn check(&self) -> Result<(), CommandLineError> {
        if !matches!(self.generation_config.as_str(), "auto" | "none" | "vllm") {
            return rejected(format!(
                "--generation-config {}: auto or none (a folder of its own is not read)",
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
