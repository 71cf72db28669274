//! Flags of `hadron eval`, and the flags that select a server, which `bench`, `eval` and `events` share.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::units::DurationArg;

/// Server to send requests to.
#[derive(Debug, Clone, Args)]
pub struct EvalClientArgs {
    /// Base URL of the server, without /v1
    #[arg(long, alias = "url", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub base_url: String,
    /// Served model name [default: the first of /v1/models]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// API key [default: HADRON_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Timeout of a request without progress
    #[arg(long, default_value = "600s", value_name = "SECONDS")]
    pub timeout: DurationArg,
}

/// Checks of a server's outputs; a run of `hadron eval` performs one of them.
#[derive(Debug, Clone, Subcommand)]
pub enum EvalCommand {
    /// Send questions with one correct answer and count exact matches
    Tasks(EvalTasksArgs),
    /// Compare the log-probabilities of a server with a reference, position by position
    Golden(EvalGoldenArgs),
    /// Log-probability of each line of token ids under the served model
    Logprobs(EvalLogprobsArgs),
    /// Check that two servers return equal tokens for equal prompts
    Equal(EvalEqualArgs),
}

/// Arguments of `hadron eval tasks`.
#[derive(Debug, Clone, Args)]
pub struct EvalTasksArgs {
    /// Server to check.
    #[command(flatten)]
    pub client: EvalClientArgs,
    /// Questions, one JSON object per line: id, kind, messages or prompt, answer [default: the 500 embedded
    /// questions of the demo model]
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Concurrent requests
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    pub concurrency: usize,
    /// Use only the first COUNT questions
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Maximum tokens per answer
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    pub max_tokens: u32,
    /// Exit with 1 if the share of correct answers is below this value, 0 to 1
    #[arg(long, value_name = "SHARE")]
    pub min_score: Option<f64>,
    /// Write the score and all answers to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `hadron eval logprobs`.
#[derive(Debug, Clone, Args)]
pub struct EvalLogprobsArgs {
    /// Server to check.
    #[command(flatten)]
    pub client: EvalClientArgs,
    /// Lines of token ids: a JSON array each, or an object with `tokens`
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Concurrent requests
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    pub concurrency: usize,
    /// Write one JSON object per line to this file [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Output of an earlier run with the same lines, to compare with
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Fail if the mean difference of log-probabilities from the reference is above this value
    #[arg(long, value_name = "NATS", requires = "reference")]
    pub mean_delta_max: Option<f64>,
    /// Fail if the share of positions with equal most likely ids is below this value
    #[arg(long, value_name = "SHARE", requires = "reference")]
    pub top_share_min: Option<f64>,
}

/// Arguments of `hadron eval equal`.
#[derive(Debug, Clone, Args)]
pub struct EvalEqualArgs {
    /// First of the two servers.
    #[command(flatten)]
    pub client: EvalClientArgs,
    /// Base URL of the second server
    #[arg(long, value_name = "URL")]
    pub other_url: String,
    /// Prompts: lines of token ids, or questions as in `eval tasks`
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Concurrent requests at the first server
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    pub concurrency: usize,
    /// Concurrent requests at the second server
    #[arg(long, default_value_t = 32, value_name = "COUNT")]
    pub other_concurrency: usize,
    /// Use only the first COUNT prompts
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Tokens to generate per prompt
    #[arg(long, default_value_t = 64, value_name = "TOKENS")]
    pub max_tokens: u32,
}

/// Arguments of `hadron eval golden`.
#[derive(Debug, Clone, Args)]
pub struct EvalGoldenArgs {
    /// Server to check.
    #[command(flatten)]
    pub client: EvalClientArgs,
    /// Reference file of tests/data/golden: token ids, and logits computed by HF transformers
    #[arg(value_name = "FIXTURE")]
    pub fixture: PathBuf,
    /// Only write the checkpoint of the fixture to this folder, to be served
    #[arg(long, value_name = "DIR")]
    pub write_model: Option<PathBuf>,
    /// Maximum mean difference of log-probabilities
    #[arg(long, default_value_t = 0.06, value_name = "NATS")]
    pub mean_max: f64,
    /// Maximum 99th percentile of the difference
    #[arg(long, default_value_t = 0.20, value_name = "NATS")]
    pub p99_max: f64,
    /// Maximum regret: log-probability that the reference loses by the server's most likely token
    #[arg(long, default_value_t = 0.20, value_name = "NATS")]
    pub regret_max: f64,
}
