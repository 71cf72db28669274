//! Flags of `hadron executor`, an internal command that `hadron serve` starts.

use clap::Args;

use super::LogFormat;

/// Arguments of `hadron executor`. Its standard input is the link to the server, which sends all other
/// settings.
#[derive(Debug, Clone, Args)]
pub struct ExecutorArgs {
    /// Rank of the executor
    #[arg(long)]
    pub rank: u16,
    /// Epoch of the executor group
    #[arg(long)]
    pub epoch: u64,
    /// Format of log lines
    #[arg(long, default_value = "human")]
    pub log_format: LogFormat,
}
