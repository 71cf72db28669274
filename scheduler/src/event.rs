//! What goes into a tick and what comes out.

use crate::{AbortCause, StepStats, Submit, TokenEvent};
use kvcache::Stay;
use protocol::{Batch, KvEvent, Replica, RequestId, StepOutput};

/// Something that happened since the last tick.
#[derive(Debug)]
pub enum Event {
    /// A new request.
    Submit(Box<Submit>),
    /// A request is taken back; unknown and finished ones are ignored.
    Abort {
        /// Which.
        request: RequestId,
        /// Why.
        cause: AbortCause,
    },
    /// An operation on the whole engine.
    Control(Control),
    /// An executor answered a batch.
    Output {
        /// Who answered.
        replica: Replica,
        /// The answer.
        output: StepOutput,
    },
    /// A replica's executors are gone. Its requests wait for `Ready`; in lockstep the whole group is lost.
    Lost {
        /// Which.
        replica: Replica,
        /// Why they were given up; decides nothing, but is told with what the loss cost.
        loss: Loss,
    },
    /// A lost replica is back, with an empty KV cache. Its executors expect the epoch of
    /// `Engine::epoch`.
    Ready {
        /// Which.
        replica: Replica,
        /// Blocks it allocated.
        blocks: u32,
        /// Row counts of captured graphs, ascending.
        graph_rows: Vec<u32>,
    },
    /// The mask of a constrained request's next token is there; what is said of another token is old news.
    MaskMade {
        /// Whose.
        request: RequestId,
        /// Tokens of its output in front of that token.
        outputs: u32,
        /// Whether the masks behind it are slow too: each is waited for before its row is planned.
        ahead: bool,
    },
    /// No mask limits what a request samples from now on. Masked rows that are under way are answered as ever.
    MasksOver {
        /// Whose.
        request: RequestId,
    },
}

/// Why executors were given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Their process or thread ended, or their link closed.
    Exited,
    /// They gave no sign of life.
    Silent,
    /// They gave signs of life, but did not answer a step.
    Late,
    /// They said that they failed.
    Fault,
}

/// An operation on the whole engine; answered by `Effect::ControlDone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Forget every cached prefix on every replica, unless requests hold blocks.
    ClearPrefixCache {
        /// Echoed in the answer.
        op_id: u64,
        /// Send those requests back to the queue instead: they are computed anew.
        restart: bool,
    },
}

/// Something to be done because of a tick, in this order.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation in every step")]
pub enum Effect {
    /// Send a batch to every executor of the replica.
    Send {
        /// To whom.
        replica: Replica,
        /// What.
        batch: Batch,
    },
    /// News of requests, at most one list per applied output or inbox.
    Tokens(Vec<TokenEvent>),
    /// Changes of a replica's prefix index.
    Kv {
        /// Whose.
        replica: Replica,
        /// In order.
        events: Vec<KvEvent>,
    },
    /// Sampled blocks of a replica were evicted.
    Evicted {
        /// Whose.
        replica: Replica,
        /// How long they had stayed, in order.
        stays: Vec<Stay>,
    },
    /// Counters of a replica that changed in this tick.
    Stats(StepStats),
    /// A control operation is over.
    ControlDone {
        /// Its id.
        op_id: u64,
        /// Whether it was carried out.
        done: bool,
    },
}
