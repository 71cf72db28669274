//! Messages to the scheduler thread, from clients and executors.

use super::PrefixIndexSnapshot;
use grammar::DecodingGuide;
use protocol::{
    Epoch, ExecutorCommand, ExecutorReady, ProfilerStatus, Replica, RequestId, StepDrafts, StepId,
};
use scheduler::{ExecutorFailure, SchedulerEvent};
use std::sync::mpsc::SyncSender;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// Identity of the executor that sent a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorId {
    /// Replica of the executor.
    pub replica: Replica,
    /// Generation of the executor; messages from a generation other than the engine's current one are stale.
    pub epoch: Epoch,
    /// Tensor-parallel rank within the replica.
    pub rank: u16,
}

/// Message to the scheduler thread.
#[derive(Debug)]
pub enum EngineMessage {
    /// Scheduler event, passed to the next `Scheduler::tick`.
    Event(SchedulerEvent),
    /// Decoding guide (grammar and thinking budget) of a request with constrained output. The `Submit` event
    /// of the request is the next message.
    DecodingGuide {
        /// Request that the guide belongs to.
        request: RequestId,
        /// Grammar and thinking budget of the request.
        guide: DecodingGuide,
    },
    /// An executor reported a failure, or its process ended.
    ExecutorFailed {
        /// Executor that failed.
        sender: ExecutorId,
        /// Failure class, for statistics and metrics.
        failure: ExecutorFailure,
        /// Description of the failure.
        cause: String,
    },
    /// The executors of a replica are ready. They have the engine's current generation and an empty KV cache.
    ExecutorRestored {
        /// Replica of the executors.
        replica: Replica,
        /// Command queue of the executors.
        executor: SyncSender<ExecutorCommand>,
        /// Number of KV blocks and captured graph sizes of the executors.
        ready: ExecutorReady,
    },
    /// Starts or stops the profiler of all executors.
    Profile {
        /// Whether the profiler starts; `false` stops it.
        on: bool,
        /// Receives the status of every executor; closed after the last status.
        replies: UnboundedSender<ProfilerStatus>,
    },
    /// Reply of an executor to the profiler command that `Profile` sent it.
    ProfileReply(ExecutorId, ProfilerStatus),
    /// A rank other than the replica's rank 0 has finished a step.
    StepDone(ExecutorId, StepId),
    /// Rank 0 of a replica reports the draft tokens of the grammar-masked rows of a step.
    Drafts(ExecutorId, StepDrafts),
    /// Lists the cached blocks of all replicas.
    ListCachedBlocks {
        /// Receives the list, one entry per replica.
        reply: oneshot::Sender<Vec<PrefixIndexSnapshot>>,
    },
    /// Clears the prefix caches of all replicas.
    ResetPrefixCache {
        /// Whether requests that hold blocks are requeued; otherwise such requests prevent the reset.
        restart: bool,
        /// Receives whether the prefix caches were cleared.
        reply: oneshot::Sender<bool>,
    },
    /// Heartbeat of an executor.
    Heartbeat(ExecutorId),
    /// Failed executors will not be started again, because the restart limits are exceeded. Carries the
    /// cause.
    RestartsExhausted(String),
    /// Stops the engine loop.
    Stop,
}
