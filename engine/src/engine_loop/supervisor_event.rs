//! Events for the thread that restarts executors.

use crate::executors::ExecutorLink;
use metrics::RestartFailureKind;
use protocol::{Epoch, ExecutorReady, Replica};

/// Event for the supervisor, which runs on the main thread.
pub enum SupervisorEvent {
    /// The process received this signal.
    Signal(i32),
    /// The executors of a replica have failed. The engine has detached them and waits for their replacements,
    /// which have the epoch (executor generation) `epoch`.
    ExecutorsFailed {
        /// Replica of the executors.
        replica: Replica,
        /// Epoch (executor generation) of the replacement executors.
        epoch: Epoch,
        /// Why the executors failed.
        cause: String,
    },
    /// A restart of a replica's executors has finished.
    StartFinished {
        /// Replica of the executors; in a lockstep group (replicas that share experts and execute each step
        /// together), the first replica of the group.
        replica: Replica,
        /// Epoch (executor generation) of the started executors.
        epoch: Epoch,
        /// On success: one link per replica of the lockstep group (replicas that execute each step together),
        /// starting with `replica`, and the number of KV blocks and the captured graphs of the executors. On
        /// failure: the reason.
        outcome: Result<(Vec<ExecutorLink>, ExecutorReady), ExecutorRestartFailure>,
    },
    /// No executor is running and none will be started, so the engine has stopped. Contains the cause.
    EngineFailed(String),
}

/// Failure of an executor restart, as reported to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorRestartFailure {
    /// Failure class.
    pub failure: RestartFailureKind,
    /// Description of the failure.
    pub text: String,
}
