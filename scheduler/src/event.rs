//! What goes into a tick and what comes out.

use crate::{AbortCause, RequestSubmission, StepStats, TokenEvent};
use kvcache::BlockLifetime;
use protocol::{Batch, KvEvent, Replica, RequestId, StepOutput};

/// Something that happened since the last tick.
#[derive(Debug)]
pub enum SchedulerEvent {
    /// A new request.
    Submit(Box<RequestSubmission>),
    /// A request is taken back; unknown and finished ones are ignored.
    Abort {
        /// Which.
        request: RequestId,
        /// Why.
        cause: AbortCause,
    },
    /// An operation on the whole engine.
    Control(ControlCommand),
    /// An executor answered a batch.
    StepOutput {
        /// Who answered.
        replica: Replica,
        /// The answer.
        output: StepOutput,
    },
    /// A replica's executors are gone. Its requests wait for `ExecutorsReady`; in lockstep the whole group is lost.
    ExecutorsFailed {
        /// Which.
        replica: Replica,
        /// Why they were given up; decides nothing, but is told with what the loss cost.
        failure: ExecutorFailure,
    },
    /// A lost replica is back, with an empty KV cache. Its executors expect the epoch of
    /// `Scheduler::epoch`.
    ExecutorsReady {
        /// Which.
        replica: Replica,
        /// Blocks it allocated.
        blocks: u32,
        /// Row counts of captured graphs, ascending.
        capture_sizes: Vec<u32>,
    },
    /// The mask of a constrained request's next token is there; what is said of another token is old news.
    MaskReady {
        /// Whose.
        request: RequestId,
        /// Tokens of its output in front of that token.
        output_tokens: u32,
        /// Whether the masks behind it are slow too: each is waited for before its row is planned.
        wait_for_next: bool,
    },
    /// No mask limits what a request samples from now on. Masked rows that are under way are answered as ever.
    MasksDone {
        /// Whose.
        request: RequestId,
    },
}

/// Why executors were given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutorFailure {
    /// Their process or thread ended, or their link closed.
    Exited,
    /// They gave no sign of life.
    HeartbeatTimeout,
    /// They gave signs of life, but did not answer a step.
    StepTimeout,
    /// They said that they failed.
    ReportedFault,
}

/// An operation on the whole engine; answered by `SchedulerEffect::ControlDone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlCommand {
    /// Forget every cached prefix on every replica, unless requests hold blocks.
    ClearPrefixCache {
        /// Echoed in the answer.
        op_id: u64,
        /// Send those requests back to the queue instead: they are computed anew.
        requeue_running: bool,
    },
}

/// Something to be done because of a tick, in this order.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation in every step")]
pub enum SchedulerEffect {
    /// Send a batch to every executor of the replica.
    SendBatch {
        /// To whom.
        replica: Replica,
        /// What.
        batch: Batch,
    },
    /// News of requests, at most one list per applied output or inbox.
    TokenEvents(Vec<TokenEvent>),
    /// Changes of a replica's prefix index.
    KvEvents {
        /// Whose.
        replica: Replica,
        /// In order.
        events: Vec<KvEvent>,
    },
    /// Sampled blocks of a replica were evicted.
    BlocksEvicted {
        /// Whose.
        replica: Replica,
        /// How long they had stayed, in order.
        lifetimes: Vec<BlockLifetime>,
    },
    /// Counters of a replica that changed in this tick.
    Stats(StepStats),
    /// A control operation is over.
    ControlDone {
        /// Its id.
        op_id: u64,
        /// Whether it was carried out.
        succeeded: bool,
    },
}
