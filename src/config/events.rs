//! Flags of `hadron events`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::units::DurationArg;

/// Command for KV events of this server, or of another engine with vLLM's format.
#[derive(Debug, Clone, Subcommand)]
pub enum EventsCommand {
    /// Print events as they come
    Tail(TailArgs),
    /// Verify frames, sequence, replay and the set of blocks; exits with 1 if something is wrong
    Check(CheckArgs),
    /// Write batches as they were sent
    Dump(DumpArgs),
}

/// Publisher to subscribe to.
#[derive(Debug, Clone, Args)]
pub struct SubscribeArgs {
    /// The publisher, e.g. tcp://127.0.0.1:5557 [default: as the server at --url says]
    pub endpoint: Option<String>,
    /// Where it replays batches, which fills gaps [default: as the server says, if no ENDPOINT is given]
    #[arg(long, value_name = "ENDPOINT")]
    pub replay: Option<String>,
    /// A server to ask where it publishes
    #[arg(long, alias = "base-url", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub url: String,
    /// Key to send to that server [default: HADRON_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Which of the server's replicas
    #[arg(long, default_value_t = 0, value_name = "RANK")]
    pub dp_rank: u16,
    /// Only topics that begin with this
    #[arg(long, default_value = "", value_name = "PREFIX")]
    pub topic: String,
    /// Begin with a replay from this number on; 0 is everything the publisher knows
    #[arg(long, value_name = "SEQ")]
    pub from: Option<u64>,
    /// Stop after so many batches
    #[arg(long, value_name = "COUNT")]
    pub batches: Option<u64>,
}

/// `hadron events tail`.
#[derive(Debug, Clone, Args)]
pub struct TailArgs {
    /// Subscription options.
    #[command(flatten)]
    pub subscribe: SubscribeArgs,
    /// Stop after this long
    #[arg(long, value_name = "SECONDS")]
    pub duration: Option<DurationArg>,
    /// One JSON object a batch instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `hadron events check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Subscription options.
    #[command(flatten)]
    pub subscribe: SubscribeArgs,
    /// Listen for this long
    #[arg(long, default_value = "10s", value_name = "SECONDS")]
    pub duration: DurationArg,
    /// Write the set of blocks here, one hash a line, sorted
    #[arg(long, value_name = "FILE")]
    pub blocks: Option<PathBuf>,
}

/// `hadron events dump`.
#[derive(Debug, Clone, Args)]
pub struct DumpArgs {
    /// Subscription options.
    #[command(flatten)]
    pub subscribe: SubscribeArgs,
    /// Stop after this long
    #[arg(long, value_name = "SECONDS")]
    pub duration: Option<DurationArg>,
    /// Where to write; MessagePack arrays [topic, sequence, payload] one after another
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}
