//! Flags of the log and of the request trace file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{CommandLineError, rejected};

/// Flags of the log and of the request trace file.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs")]
pub struct LogArgs {
    /// Format of log lines on stderr; RUST_LOG filters them
    #[arg(long, default_value = "human")]
    pub log_format: LogFormat,
    /// Log one line per finished request: route, status, finish reason, tokens, times
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_log_requests: bool,
    /// Do not log the throughput every 10 s
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub disable_log_stats: bool,
    /// Endpoint of an OpenTelemetry collector (OTLP over HTTP) to which a span per request is exported, for example
    /// http://127.0.0.1:4318/v1/traces
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
    /// File to which one JSON line per finished request is written
    #[arg(long, alias = "request-log", value_name = "FILE")]
    pub trace_requests: Option<PathBuf>,
    /// Include token ids of prompts and outputs in the --trace-requests file
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub trace_prompts: bool,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Readable text, one line per log event
    Human,
    /// One JSON object per log event
    Json,
}

impl LogFormat {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Human => "human",
            Self::Json => "json",
        }
    }
}

impl LogArgs {
    /// Rejects `--trace-prompts` without a request trace file.
    pub(super) fn check(&self) -> Result<(), CommandLineError> {
        if self.trace_prompts && self.trace_requests.is_none() {
            return rejected("--trace-prompts: needs --trace-requests FILE");
        }
        Ok(())
    }
}
