//! Flags of `hadron grammar-worker`, which `hadron serve` starts; nobody types them.

use clap::Args;

use super::LogFormat;

/// `hadron grammar-worker`: vocabulary and grammars come through standard input.
#[derive(Debug, Clone, Args)]
pub struct GrammarWorkerArgs {
    /// Form of the log's lines
    #[arg(long, default_value = "human")]
    pub log_format: LogFormat,
}
