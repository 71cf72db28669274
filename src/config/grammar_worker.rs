//! Flags of `hadron grammar-worker`, an internal command that `hadron serve` starts.

use clap::Args;

use super::LogFormat;

/// `hadron grammar-worker`. Receives the vocabulary and grammars through standard input.
#[derive(Debug, Clone, Args)]
pub struct GrammarWorkerArgs {
    /// Format of log lines
    #[arg(long, default_value = "human")]
    pub log_format: LogFormat,
}
