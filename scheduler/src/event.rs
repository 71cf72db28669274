//! Inputs (`SchedulerEvent`) and outputs (`SchedulerEffect`) of a tick, which is one call of
//! `Scheduler::tick`.

use crate::{AbortCause, RequestSubmission, SchedulerStats, TokenEvent};
use kvcache::BlockLifetime;
use protocol::{Batch, KvEvent, Replica, RequestId, StepOutput};

/// Input of a tick (one call of `Scheduler::tick`): an event that occurred since the previous tick.
#[derive(Debug)]
pub enum SchedulerEvent {
    /// A new request.
    Submit(Box<RequestSubmission>),
    /// Aborts a request; unknown and finished requests are ignored.
    Abort {
        /// Request to abort.
        request: RequestId,
        /// Cause of the abort.
        cause: AbortCause,
    },
    /// A control command for all replicas.
    Control(ControlCommand),
    /// An executor finished a step.
    StepOutput {
        /// Replica of the executor.
        replica: Replica,
        /// Output of the step.
        output: StepOutput,
    },
    /// The executors of a replica failed. The requests of the replica wait for `ExecutorsReady`; in lockstep,
    /// the executors of the whole group have failed.
    ExecutorsFailed {
        /// Failed replica.
        replica: Replica,
        /// Kind of failure. It affects statistics, not scheduling decisions.
        failure: ExecutorFailure,
    },
    /// A failed replica is ready again, with an empty KV cache. Its executors expect batches with the epoch
    /// that `Scheduler::epoch` returns.
    ExecutorsReady {
        /// Restored replica.
        replica: Replica,
        /// Number of KV blocks that the executors allocated; 0 = unchanged.
        blocks: u32,
        /// Row counts of captured graphs, ascending.
        capture_sizes: Vec<u32>,
    },
    /// The grammar bitmask of a request's next token is ready. The event is ignored if the request has a
    /// different number of output tokens.
    MaskReady {
        /// Constrained request.
        request: RequestId,
        /// Number of output tokens before the token that the bitmask constrains.
        output_tokens: u32,
        /// Whether later bitmasks are expected to be slow too. If so, each row is planned only after its
        /// bitmask is ready.
        wait_for_next: bool,
    },
    /// No later token of the request is constrained by a grammar. Results of rows in flight with a grammar
    /// bitmask are applied as usual.
    MasksDone {
        /// Constrained request.
        request: RequestId,
    },
}

/// Reason why executors are considered failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutorFailure {
    /// The process or thread ended, or the link closed.
    Exited,
    /// No heartbeat arrived within the heartbeat timeout.
    HeartbeatTimeout,
    /// Heartbeats arrived, but a step exceeded its deadline.
    StepTimeout,
    /// The executor reported a failure.
    ReportedFault,
}

/// A control command for all replicas; completed by `SchedulerEffect::ControlDone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlCommand {
    /// Clears the prefix cache of every replica; fails if requests hold blocks, unless `requeue_running` is
    /// set.
    ClearPrefixCache {
        /// Id that is repeated in `SchedulerEffect::ControlDone`.
        op_id: u64,
        /// Whether to requeue running requests, which are recomputed, instead of failing.
        requeue_running: bool,
    },
}

/// Output of a tick (one call of `Scheduler::tick`). The caller must carry out the effects in order.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation in every step")]
pub enum SchedulerEffect {
    /// Sends a batch to every executor of the replica.
    SendBatch {
        /// Destination replica.
        replica: Replica,
        /// Batch to send.
        batch: Batch,
    },
    /// Token events of requests, at most one list per tick.
    TokenEvents(Vec<TokenEvent>),
    /// Changes of a replica's prefix index.
    KvEvents {
        /// Replica of the prefix index.
        replica: Replica,
        /// Changes, in the order in which they were made.
        events: Vec<KvEvent>,
    },
    /// A replica evicted blocks whose lifetimes are recorded (a sample of all blocks).
    BlocksEvicted {
        /// Replica that evicted the blocks.
        replica: Replica,
        /// Lifetimes of the evicted blocks, in order of eviction.
        lifetimes: Vec<BlockLifetime>,
    },
    /// Statistics of a replica; emitted only if they changed in this tick.
    Stats(SchedulerStats),
    /// A control command is complete.
    ControlDone {
        /// Id of the command.
        op_id: u64,
        /// Whether the command was carried out.
        succeeded: bool,
    },
}
