//! Errors of an executor start, and the failure class of each error.

use super::weights_baseline::DigestConflict;
use metrics::RestartFailureKind;
use protocol::{Rank, StartupPhase};
use std::fmt;
use std::time::Duration;

/// Reason why the executors did not become ready.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An executor reported an error.
    #[error("{executor}{text} (while: {phase})")]
    Reported {
        /// Executor that reported the error.
        executor: ExecutorLabel,
        /// Startup phase of the executor.
        phase: &'static str,
        /// Error text of the executor.
        text: String,
    },
    /// An executor exited without reporting an error.
    #[error("{cause} (while: {phase})")]
    Exited {
        /// Startup phase of the executor.
        phase: &'static str,
        /// Name of the executor, and how it exited.
        cause: String,
    },
    /// No executor made progress for too long.
    #[error("{executor}no progress for {} s (while: {phase})", limit.as_secs())]
    Stalled {
        /// Executor that has made no progress for the longest time.
        executor: ExecutorLabel,
        /// Startup phase of the executor.
        phase: &'static str,
        /// Maximum time without progress.
        limit: Duration,
    },
    /// The executors made progress, but the maximum total time has passed.
    #[error("{executor}not ready after {} s (while: {phase}); --startup-timeout sets this bound", limit.as_secs())]
    Timeout {
        /// Executor that has made no progress for the longest time.
        executor: ExecutorLabel,
        /// Startup phase of the executor.
        phase: &'static str,
        /// Maximum duration of a start.
        limit: Duration,
    },
    /// An executor has another Hadron version, protocol version, epoch or rank than expected.
    #[error("{executor}the executor has {what} {theirs}, this process {ours}")]
    Mismatch {
        /// Executor that reported the unexpected value.
        executor: ExecutorLabel,
        /// Name of the property that differs.
        what: &'static str,
        /// Value reported by the executor.
        theirs: String,
        /// Value expected by this process.
        ours: String,
    },
    /// An executor has loaded weights that differ from those of the first start or of another rank.
    #[error("{executor}weights_changed: {change}")]
    WeightsChanged {
        /// Executor with the changed weights.
        executor: ExecutorLabel,
        /// Digests that show that the weights have changed.
        change: WeightsDigestMismatch,
    },
    /// A node has not joined the cluster in time.
    #[error("node {node} has not joined after {} s; --startup-timeout sets this bound", limit.as_secs())]
    NodeMissing {
        /// Rank of the missing node.
        node: u16,
        /// Maximum wait for the node.
        limit: Duration,
    },
    /// The process received this signal during the start.
    #[error("stopped by signal {0} while starting")]
    Interrupted(i32),
    /// The operating system provides no thread or file descriptor.
    #[error("cannot start the reader threads of the executors: {0}")]
    Threads(#[from] std::io::Error),
}

/// Digests that show that the weights differ from those of the first start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WeightsDigestMismatch {
    /// Detected before loading: `config.json`, or the names, sizes, headers or samples of the weight files,
    /// differ.
    #[error(
        "the model folder's digest is {theirs:016x}, but was {ours:016x} when this process started"
    )]
    Folder {
        /// Digest of the model folder that the executor computed.
        theirs: u64,
        /// Digest of the model folder that this process computed at its start.
        ours: u64,
    },
    /// Detected after loading: the digests of the loaded weights conflict.
    #[error(transparent)]
    Loaded(#[from] DigestConflict),
}

/// Prefix of error texts that names an executor; empty if the server has only one executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorLabel {
    /// Node of the executor; `None` = this node.
    pub(super) node: Option<u16>,
    pub(super) rank: Option<Rank>,
}

impl ExecutorLabel {
    /// Returns the label of an unspecified executor on another node.
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
    /// Returns the failure class of this error.
    pub fn failure(&self) -> RestartFailureKind {
        match self {
            Self::WeightsChanged { .. } => RestartFailureKind::WeightsChanged,
            Self::Reported { .. } => RestartFailureKind::Fault,
            Self::Exited { .. } | Self::Interrupted(_) => RestartFailureKind::Exited,
            Self::Stalled { .. } | Self::Timeout { .. } | Self::NodeMissing { .. } => {
                RestartFailureKind::Timeout
            }
            Self::Mismatch { .. } => RestartFailureKind::Mismatch,
            Self::Threads(_) => RestartFailureKind::System,
        }
    }

    /// Whether the start failed while an executor opened its device.
    pub fn is_device_error(&self) -> bool {
        let opening = StartupPhase::Device.name();
        matches!(self, Self::Reported { phase, .. } | Self::Exited { phase, .. } if *phase == opening)
    }
}
