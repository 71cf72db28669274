//! Flags of `hadron eval`, and those shared by all HTTP clients of the binary.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::units::DurationArg;

/// Server to connect to.
#[derive(Debug, Clone, Args)]
pub struct ClientArgs {
    /// The server, without /v1
    #[arg(long, alias = "url", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub base_url: String,
    /// Served name of the model [default: the first of /v1/models]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Key to send [default: HADRON_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// A request without progress for this long has failed
    #[arg(long, default_value = "600s", value_name = "SECONDS")]
    pub timeout: DurationArg,
}

/// Check to run.
#[derive(Debug, Clone, Subcommand)]
pub enum EvalCommand {
    /// Ask questions with one right answer and count the exact matches
    Tasks(TasksArgs),
    /// Compare a server with a reference, position by position, on committed token ids
    Golden(GoldenArgs),
    /// Log-probability of each line of token ids under the served model
    Logprobs(LogprobsArgs),
    /// Whether two servers answer the same prompts with the same tokens
    Equal(EqualArgs),
}

/// `hadron eval tasks`.
#[derive(Debug, Clone, Args)]
pub struct TasksArgs {
    /// Server options.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Questions, one JSON object a line: id, kind, messages or prompt, answer [default: the 500 of the
    /// demo model, which this binary carries]
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Requests in flight
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    pub concurrency: usize,
    /// Ask only the first so many questions
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Longest answer in tokens
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    pub max_tokens: u32,
    /// Exit with 1 below this share of right answers, 0 to 1
    #[arg(long, value_name = "SHARE")]
    pub min_score: Option<f64>,
    /// Write the score and every answer here as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// `hadron eval logprobs`.
#[derive(Debug, Clone, Args)]
pub struct LogprobsArgs {
    /// Server options.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Lines of token ids: a JSON array each, or an object with `tokens`
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Requests in flight
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    pub concurrency: usize,
    /// Write one JSON object per line here [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Output of an earlier run of the same lines, to compare with
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Fail above this mean difference of log-probabilities from the reference
    #[arg(long, value_name = "NATS", requires = "reference")]
    pub mean_delta_max: Option<f64>,
    /// Fail below this share of positions with the reference's most likely id
    #[arg(long, value_name = "SHARE", requires = "reference")]
    pub top_share_min: Option<f64>,
}

/// `hadron eval equal`.
#[derive(Debug, Clone, Args)]
pub struct EqualArgs {
    /// Server options.
    #[command(flatten)]
    pub client: ClientArgs,
    /// The other server
    #[arg(long, value_name = "URL")]
    pub other_url: String,
    /// Prompts: lines of token ids, or questions as `eval tasks` reads them
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Requests in flight at the first server
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    pub concurrency: usize,
    /// Requests in flight at the other
    #[arg(long, default_value_t = 32, value_name = "COUNT")]
    pub other_concurrency: usize,
    /// Ask only the first so many prompts
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Tokens to generate for each
    #[arg(long, default_value_t = 64, value_name = "TOKENS")]
    pub max_tokens: u32,
}

/// `hadron eval golden`.
#[derive(Debug, Clone, Args)]
pub struct GoldenArgs {
    /// Server options.
    #[command(flatten)]
    pub client: ClientArgs,
    /// The reference, of tests/data/golden: token ids and logits computed elsewhere
    #[arg(value_name = "FIXTURE")]
    pub fixture: PathBuf,
    /// Only write the fixture's checkpoint into this folder, to be served
    #[arg(long, value_name = "DIR")]
    pub write_model: Option<PathBuf>,
    /// Largest mean difference of log-probabilities
    #[arg(long, default_value_t = 0.06, value_name = "NATS")]
    pub mean_max: f64,
    /// Largest 99th percentile of the difference
    #[arg(long, default_value_t = 0.20, value_name = "NATS")]
    pub p99_max: f64,
    /// Largest loss of the reference's log-probability by taking the server's best token
    #[arg(long, default_value_t = 0.20, value_name = "NATS")]
    pub regret_max: f64,
}
