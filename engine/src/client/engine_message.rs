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
    /// Epoch of the executor: its generation, which increases at each restart of failed executors. Messages
    /// from executors of an earlier epoch are ignored.
    pub epoch: Epoch,
    /// Tensor-parallel rank within the replica.
    pub rank: u16,
}

/// Message to the scheduler thread.
#[derive(Debug)]
pub enum EngineMessage {
    /// Scheduler event, an input of the next `Scheduler::tick`.
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
    /// The restarted executors of a replica are ready. They belong to the engine's current epoch (executor
    /// generation) and have an empty KV cache.
    ExecutorRestored {
        /// Replica of the executors.
        replica: Replica,
        /// Command queue of the executors.
        executor: SyncSender<ExecutorCommand>,
        /// Number of KV blocks and sizes of the captured CUDA graphs of the executors.
        ready: ExecutorReady,
    },
    /// Starts or stops the profiler of all executors.
    Profile {
        /// Whether the profiler starts; `false` stops it.
        on: bool,
        /// Channel that receives the status of every executor; closed after the last status.
        replies: UnboundedSender<ProfilerStatus>,
    },
    /// Reply of an executor to the profiler command that `Profile` sent it.
    ProfileReply(ExecutorId, ProfilerStatus),
    /// An executor other than rank 0 of its replica has finished a step.
    StepDone(ExecutorId, StepId),
    /// Rank 0 of a replica reports the draft tokens of a step for the rows (requests of the batch) whose
    /// sampling is masked by a grammar.
    Drafts(ExecutorId, StepDrafts),
    /// Lists the cached blocks of all replicas.
    ListCachedBlocks {
        /// Channel that receives the list, with one entry per replica.
        reply: oneshot::Sender<Vec<PrefixIndexSnapshot>>,
    },
    /// Clears the prefix caches of all replicas.
    ResetPrefixCache {
        /// If requests hold KV blocks: true = these requests are requeued and the caches are cleared; false =
        /// nothing is cleared.
        restart: bool,
        /// Channel that receives whether the prefix caches were cleared.
        reply: oneshot::Sender<bool>,
    },
    /// Heartbeat of an executor.
    Heartbeat(ExecutorId),
    /// Failed executors will not be started again, because the restart limits are exceeded. Contains the
    /// cause.
    RestartsExhausted(String),
    /// Stops the engine loop.
    Stop,
}
