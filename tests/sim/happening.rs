//! What can happen in a world, and the heap that orders it by time, then by when it was decided.

use protocol::{RequestId, StepOutput};
use scheduler::AbortCause;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Something that will happen.
#[derive(Debug)]
pub(crate) enum Happening {
    /// A client sends its request.
    Arrive(usize),
    /// A client takes its request back.
    Abort(usize, AbortCause),
    /// The step at the head of a replica's executors is done.
    StepDone { replica: usize, incarnation: u32 },
    /// An output reaches the scheduler.
    Reply { replica: usize, reply: Reply },
    /// The scheduler learns that a replica's executors are gone, unless those of `incarnation`, which were to follow them, have died too.
    Lost { replica: usize, incarnation: u32 },
    /// New executors of a replica are ready.
    Ready { replica: usize, incarnation: u32 },
    /// Both ends notice that nothing reaches the executors any more.
    Deaf { replica: usize, incarnation: u32 },
    /// An executor dies soon after it came back.
    Relapse { replica: usize, incarnation: u32 },
    /// An executor that says nothing may have to give a sign of life.
    Beat { replica: usize, life: u32 },
    /// A sign of life reaches the scheduler's side.
    Alive { replica: usize, life: u32 },
    /// Whoever reads the link to the executors of a life may have waited for long enough.
    Look { replica: usize, life: u32 },
    /// The executors of a replica hang.
    Hang { replica: usize },
    /// A mask that was late, or is made ahead, is there.
    MaskMade { request: RequestId, outputs: u32 },
    /// No mask limits a request any more.
    MasksOver { request: RequestId },
    /// Somebody clears the prefix cache.
    Clear,
    /// Time passes.
    Wake,
    /// From here on nothing goes wrong.
    Heal,
}

impl Happening {
    /// Whether it is a part of the watch over executors, which goes on while nothing else happens.
    pub(crate) fn is_watch(&self) -> bool {
        matches!(self, Self::Beat { .. } | Self::Alive { .. } | Self::Look { .. })
    }
}

/// An output on its way.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The output.
    pub(crate) output: StepOutput,
    /// Contexts of the blocks it confirms, with the index of their row.
    pub(crate) filled: Vec<(usize, u64)>,
    /// Whether an equal output has arrived before.
    pub(crate) repeated: bool,
    /// The life of the executors that sent it, and so the link on which it comes.
    pub(crate) link: u32,
}

/// A happening and its place in time.
#[derive(Debug)]
struct Dated {
    at_ms: u64,
    order: u64,
    what: Happening,
}

impl PartialEq for Dated {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Dated {}

impl PartialOrd for Dated {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Dated {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at_ms, self.order).cmp(&(other.at_ms, other.order))
    }
}

/// The future.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    heap: BinaryHeap<Reverse<Dated>>,
    decided: u64,
}

impl Agenda {
    /// Decides that something happens at a time.
    pub(crate) fn add(&mut self, at_ms: u64, what: Happening) {
        self.decided += 1;
        self.heap.push(Reverse(Dated { at_ms, order: self.decided, what }));
    }

    /// Time of the next happening.
    pub(crate) fn next_ms(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(dated)| dated.at_ms)
    }

    /// The next happening, if its time has come.
    pub(crate) fn take(&mut self, now_ms: u64) -> Option<Happening> {
        if self.next_ms()? > now_ms {
            return None;
        }
        self.heap.pop().map(|Reverse(dated)| dated.what)
    }
}
