//! Events of a simulation, and the heap that orders them by time, then by insertion.

use protocol::{RequestId, StepOutput};
use scheduler::AbortCause;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// An event that happens in the simulation at a scheduled time.
#[derive(Debug)]
pub(crate) enum SimEvent {
    /// A client sends its request.
    Arrive(usize),
    /// A client aborts its request.
    Abort(usize, AbortCause),
    /// The executors of a replica finish the oldest queued step. In all events, `incarnation` counts how
    /// often the executors of the replica have been started; an event for earlier executors is ignored.
    StepDone { replica: usize, incarnation: u32 },
    /// A step output reaches the scheduler.
    Reply { replica: usize, reply: InFlightStepOutput },
    /// The failure of a replica's executors reaches the scheduler. `incarnation` identifies the replacement
    /// executors; if they have also failed, the event is ignored.
    ExecutorsFailed { replica: usize, incarnation: u32 },
    /// New executors of a replica are ready.
    ExecutorsReady { replica: usize, incarnation: u32 },
    /// Both ends of a link detect that the link has lost messages to the executors.
    LinkFailureSeen { replica: usize, incarnation: u32 },
    /// An executor fails soon after it was restored.
    FailAgain { replica: usize, incarnation: u32 },
    /// An executor sends a heartbeat if it has sent no other message within the heartbeat interval.
    HeartbeatDue { replica: usize, incarnation: u32 },
    /// A heartbeat reaches the scheduler's side of the link.
    HeartbeatArrives { replica: usize, incarnation: u32 },
    /// The heartbeat timeout of the executors may have expired.
    CheckHeartbeat { replica: usize, incarnation: u32 },
    /// The executors of a replica hang.
    Hang { replica: usize },
    /// A grammar bitmask is ready, after it was overdue or because it is built ahead of the step.
    MaskReady { request: RequestId, output_tokens: u32 },
    /// No further grammar bitmask is needed for the request.
    MasksDone { request: RequestId },
    /// An operator clears the prefix cache.
    ClearPrefixCache,
    /// The clock advances and the scheduler runs a tick.
    Wake,
    /// No fault is injected from now on.
    EndFaults,
}

impl SimEvent {
    /// Whether the event belongs to heartbeat monitoring, which continues even if no other event happens.
    pub(crate) fn is_heartbeat_check(&self) -> bool {
        matches!(
            self,
            Self::HeartbeatDue { .. } | Self::HeartbeatArrives { .. } | Self::CheckHeartbeat { .. }
        )
    }
}

/// A step output on its way to the scheduler.
#[derive(Debug)]
pub(crate) struct InFlightStepOutput {
    /// The step output that is in flight.
    pub(crate) output: StepOutput,
    /// KV blocks that the output confirms as computed, each as row index and hash-model context (hash of all
    /// tokens up to the end of the block).
    pub(crate) filled_blocks: Vec<(usize, u64)>,
    /// Whether the same output was already delivered.
    pub(crate) repeated: bool,
    /// Number of executor starts of the replica up to the executors that sent the output; it identifies their
    /// link.
    pub(crate) incarnation: u32,
}

/// An event with its time and insertion number.
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

/// Events that have not happened yet.
#[derive(Debug, Default)]
pub(crate) struct SimEventQueue {
    heap: BinaryHeap<Reverse<ScheduledEvent>>,
    next_order: u64,
}

impl SimEventQueue {
    /// Schedules an event of the simulation.
    pub(crate) fn add(&mut self, at_ms: u64, what: SimEvent) {
        self.next_order += 1;
        self.heap.push(Reverse(ScheduledEvent { at_ms, order: self.next_order, event: what }));
    }

    /// Time of the next event; `None` if there is none.
    pub(crate) fn next_ms(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(dated)| dated.at_ms)
    }

    /// Removes and returns the next event if it is due.
    pub(crate) fn pop_due(&mut self, now_ms: u64) -> Option<SimEvent> {
        if self.next_ms()? > now_ms {
            return None;
        }
        self.heap.pop().map(|Reverse(dated)| dated.event)
    }
}
