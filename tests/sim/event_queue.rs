//! What can happen in a world, and the heap that orders it by time, then by when it was decided.

use protocol::{RequestId, StepOutput};
use scheduler::AbortCause;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Something that will happen.
#[derive(Debug)]
pub(crate) enum SimEvent {
    /// A client sends its request.
    Arrive(usize),
    /// A client takes its request back.
    Abort(usize, AbortCause),
    /// The step at the head of a replica's executors is done.
    StepDone { replica: usize, incarnation: u32 },
    /// An output reaches the scheduler.
    Reply { replica: usize, reply: InFlightReply },
    /// The scheduler learns that a replica's executors are gone, unless those of `incarnation`, which were to follow them, have died too.
    ExecutorsFailed { replica: usize, incarnation: u32 },
    /// New executors of a replica are ready.
    ExecutorsReady { replica: usize, incarnation: u32 },
    /// Both ends notice that nothing reaches the executors any more.
    LinkFailureSeen { replica: usize, incarnation: u32 },
    /// An executor dies soon after it came back.
    FailAgain { replica: usize, incarnation: u32 },
    /// An executor that says nothing may have to give a sign of life.
    HeartbeatDue { replica: usize, incarnation: u32 },
    /// A sign of life reaches the scheduler's side.
    HeartbeatArrives { replica: usize, incarnation: u32 },
    /// Whoever reads the link to the executors of a life may have waited for long enough.
    CheckHeartbeat { replica: usize, incarnation: u32 },
    /// The executors of a replica hang.
    Hang { replica: usize },
    /// A mask that was late, or is made ahead, is there.
    MaskReady { request: RequestId, output_tokens: u32 },
    /// No mask limits a request any more.
    MasksDone { request: RequestId },
    /// Somebody clears the prefix cache.
    ClearPrefixCache,
    /// Time passes.
    Wake,
    /// From here on nothing goes wrong.
    EndFaults,
}

impl SimEvent {
    /// Whether it is a part of the watch over executors, which goes on while nothing else happens.
    pub(crate) fn is_heartbeat_check(&self) -> bool {
        matches!(
            self,
            Self::HeartbeatDue { .. } | Self::HeartbeatArrives { .. } | Self::CheckHeartbeat { .. }
        )
    }
}

/// An output on its way.
#[derive(Debug)]
pub(crate) struct InFlightReply {
    /// The output.
    pub(crate) output: StepOutput,
    /// Contexts of the blocks it confirms, with the index of their row.
    pub(crate) filled_blocks: Vec<(usize, u64)>,
    /// Whether an equal output has arrived before.
    pub(crate) repeated: bool,
    /// The life of the executors that sent it, and so the link on which it comes.
    pub(crate) incarnation: u32,
}

/// A happening and its place in time.
#[derive(Debug)]
struct ScheduledEvent {
    at_ms: u64,
    order: u64,
    event: SimEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at_ms, self.order).cmp(&(other.at_ms, other.order))
    }
}

/// The future.
#[derive(Debug, Default)]
pub(crate) struct SimEventQueue {
    heap: BinaryHeap<Reverse<ScheduledEvent>>,
    next_order: u64,
}

impl SimEventQueue {
    /// Decides that something happens at a time.
    pub(crate) fn add(&mut self, at_ms: u64, what: SimEvent) {
        self.next_order += 1;
        self.heap.push(Reverse(ScheduledEvent { at_ms, order: self.next_order, event: what }));
    }

    /// Time of the next happening.
    pub(crate) fn next_ms(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(dated)| dated.at_ms)
    }

    /// The next happening, if its time has come.
    pub(crate) fn pop_due(&mut self, now_ms: u64) -> Option<SimEvent> {
        if self.next_ms()? > now_ms {
            return None;
        }
        self.heap.pop().map(|Reverse(dated)| dated.event)
    }
}
