//! Why executors did not come up, and whose fault it was.

use super::weights_baseline::DigestConflict;
use metrics::StartFailure;
use protocol::{Rank, StartupPhase};
use std::fmt;
use std::time::Duration;

/// Why the executors did not come up.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// One said why.
    #[error("{executor}{text} (while: {phase})")]
    Reported {
        /// Whose words these are.
        executor: ExecutorLabel,
        /// What it was doing.
        phase: &'static str,
        /// Its own words.
        text: String,
    },
    /// One ended without a word.
    #[error("{cause} (while: {phase})")]
    Exited {
        /// What it was doing.
        phase: &'static str,
        /// Who it was, and how it ended.
        cause: String,
    },
    /// Nothing moved for too long.
    #[error("{executor}no progress for {} s (while: {phase})", limit.as_secs())]
    Stalled {
        /// Who moved least.
        executor: ExecutorLabel,
        /// What it was doing.
        phase: &'static str,
        /// Longest time without progress.
        limit: Duration,
    },
    /// They move, but the time is over.
    #[error("{executor}not ready after {} s (while: {phase}); --startup-timeout sets this bound", limit.as_secs())]
    Timeout {
        /// Who moved least.
        executor: ExecutorLabel,
        /// What it was doing.
        phase: &'static str,
        /// Longest start.
        limit: Duration,
    },
    /// One is another build, or serves something else.
    #[error("{executor}the executor has {what} {theirs}, this process {ours}")]
    Mismatch {
        /// Which one.
        executor: ExecutorLabel,
        /// What differs.
        what: &'static str,
        /// Of the executor.
        theirs: String,
        /// Of this process.
        ours: String,
    },
    /// One has loaded other weights than the first start did, or than another rank.
    #[error("{executor}weights_changed: {change}")]
    WeightsChanged {
        /// Which one.
        executor: ExecutorLabel,
        /// What differs.
        change: WeightsChange,
    },
    /// A node has not come.
    #[error("node {node} has not joined after {} s; --startup-timeout sets this bound", limit.as_secs())]
    NodeMissing {
        /// Which.
        node: u16,
        /// Longest time.
        limit: Duration,
    },
    /// The process was asked to stop.
    #[error("stopped by signal {0} while starting")]
    Interrupted(i32),
    /// The system gives no thread.
    #[error("cannot listen to the executors: {0}")]
    Threads(#[from] std::io::Error),
}

/// What shows that weights are not those of the first start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WeightsChange {
    /// Before they were loaded: `config.json`, or names, sizes, headers or samples of the weight files.
    #[error(
        "the model folder has the model digest {theirs:016x}, but {ours:016x} as this process has read it"
    )]
    Folder {
        /// As the executor has read it.
        theirs: u64,
        /// As this process has read it at its start.
        ours: u64,
    },
    /// The bytes that were loaded.
    #[error(transparent)]
    Loaded(#[from] DigestConflict),
}

/// An executor in front of what is said of it; nobody, if there is only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorLabel {
    /// Another node than this.
    pub(super) node: Option<u16>,
    pub(super) rank: Option<Rank>,
}

impl ExecutorLabel {
    /// Whichever executor of another node.
    pub fn of_node(node: u16) -> Self {
        Self { node: Some(node), rank: None }
    }
}

impl fmt::Display for ExecutorLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.node, self.rank) {
            (None, None) => Ok(()),
            (None, Some(rank)) => write!(f, "rank {}: ", rank.0),
            (Some(node), None) => write!(f, "node {node}: "),
            (Some(node), Some(rank)) => write!(f, "node {node}, rank {}: ", rank.0),
        }
    }
}

impl StartError {
    /// The class of this failure.
    pub fn failure(&self) -> StartFailure {
        match self {
            Self::WeightsChanged { .. } => StartFailure::WeightsChanged,
            Self::Reported { .. } => StartFailure::Fault,
            Self::Exited { .. } | Self::Interrupted(_) => StartFailure::Exited,
            Self::Stalled { .. } | Self::Timeout { .. } | Self::NodeMissing { .. } => {
                StartFailure::Timeout
            }
            Self::Mismatch { .. } => StartFailure::Mismatch,
            Self::Threads(_) => StartFailure::System,
        }
    }

    /// Whether an executor could not even open its device.
    pub fn is_device_error(&self) -> bool {
        let opening = StartupPhase::Device.name();
        matches!(self, Self::Reported { phase, .. } | Self::Exited { phase, .. } if *phase == opening)
    }
}
