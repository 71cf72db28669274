//! Flags of `hadron grammar-worker`, an internal command that `hadron serve` starts.

use clap::Args;

use super::LogFormat;

/// Arguments of `hadron grammar-worker`. It receives the vocabulary and the grammars through its standard
/// input.
#[derive(Debug, Clone, Args)]
pub struct GrammarWorkerArgs {
    /// Format of log lines
    #[arg(long, default_value = "human")]
    pub log_format: LogFormat,
}
