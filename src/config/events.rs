//! Flags of `hadron events`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::units::DurationArg;

/// Action on the KV events of Hadron, or of another engine with the format of vLLM.
#[derive(Debug, Clone, Subcommand)]
pub enum EventsCommand {
    /// Print events as they arrive
    Tail(EventsTailArgs),
    /// Verify frames, sequence numbers, replay and the set of blocks; exits with 1 if a violation is found
    Check(EventsCheckArgs),
    /// Write batches to a file as they were sent
    Dump(EventsDumpArgs),
}

/// Publisher of KV events to subscribe to, and the range of batches to receive.
#[derive(Debug, Clone, Args)]
pub struct EventsSubscribeArgs {
    /// Publisher endpoint, e.g. tcp://127.0.0.1:5557 [default: reported by the server at --url]
    pub endpoint: Option<String>,
    /// Replay endpoint, used to fill gaps [default: reported by the server, if no ENDPOINT is given]
    #[arg(long, value_name = "ENDPOINT")]
    pub replay: Option<String>,
    /// Server that reports the endpoints of its publishers
    #[arg(long, alias = "base-url", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub url: String,
    /// API key for the server [default: HADRON_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Replica of the server
    #[arg(long, default_value_t = 0, value_name = "RANK")]
    pub dp_rank: u16,
    /// Topic prefix to subscribe to
    #[arg(long, default_value = "", value_name = "PREFIX")]
    pub topic: String,
    /// Start with a replay from this sequence number; 0 = everything in the publisher's buffer
    #[arg(long, value_name = "SEQ")]
    pub from: Option<u64>,
    /// Stop after this number of batches
    #[arg(long, value_name = "COUNT")]
    pub batches: Option<u64>,
}

/// Arguments of `hadron events tail`.
#[derive(Debug, Clone, Args)]
pub struct EventsTailArgs {
    /// Publisher to subscribe to.
    #[command(flatten)]
    pub subscribe: EventsSubscribeArgs,
    /// Stop after this time
    #[arg(long, value_name = "SECONDS")]
    pub duration: Option<DurationArg>,
    /// Print one JSON object per batch instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `hadron events check`.
#[derive(Debug, Clone, Args)]
pub struct EventsCheckArgs {
    /// Publisher to subscribe to.
    #[command(flatten)]
    pub subscribe: EventsSubscribeArgs,
    /// Duration of the check
    #[arg(long, default_value = "10s", value_name = "SECONDS")]
    pub duration: DurationArg,
    /// Write the set of blocks to this file, one hash per line, sorted
    #[arg(long, value_name = "FILE")]
    pub blocks: Option<PathBuf>,
}

/// Arguments of `hadron events dump`.
#[derive(Debug, Clone, Args)]
pub struct EventsDumpArgs {
    /// Publisher to subscribe to.
    #[command(flatten)]
    pub subscribe: EventsSubscribeArgs,
    /// Stop after this time
    #[arg(long, value_name = "SECONDS")]
    pub duration: Option<DurationArg>,
    /// Output file; a sequence of MessagePack arrays [topic, sequence, payload]
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}
