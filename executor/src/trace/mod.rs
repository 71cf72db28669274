//! Traces of steps: where the host's time went, and where the device's, as a file that Perfetto opens.
//!
//! A step notes a handful of times of the host and two marks on the device; one step in `INSTRUMENT_EVERY` of its kind
//! is marked launch by launch as well, which keeps its kernels from overlapping and so makes it slower: such
//! steps are labelled. Marks are read when the step's answers have come, a thread of its own writes.
//! Without `ExecutorSettings::profile` nothing of this exists.

mod family;
mod file;
mod session;
mod spans;
mod step;

pub(crate) use session::TraceSession;
pub(crate) use spans::{DeviceSpan, SpanRecorder, TraceScope};
pub(crate) use step::{StepFacts, StepTrace};

use std::collections::HashMap;
use std::fs::create_dir_all;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use device::EventTimestamps;
use kernels::KernelBackend;
use ops::Ops;

use crate::ExecutorError;

/// Of so many steps of a kind one is marked launch by launch: it takes up to twice as long as the others.
const INSTRUMENT_EVERY: u32 = 64;
/// Which of them: the first of a kind may wait for choices that are made once.
const INSTRUMENTED_STEP: u32 = 1;
/// Launches of a step that can be marked.
const SPANS_MAX: usize = 4096;
/// Places for the marks of whole steps. A step reads the end of its predecessor, and no more than three steps
/// are in flight, because each holds the memory of its answers.
const STEP_EVENT_SLOTS: usize = 8;
/// The mark from which a session counts.
const ORIGIN_EVENT: usize = 0;
/// The first mark inside a step.
pub(crate) const FIRST_SPAN_EVENT: usize = 1 + 2 * STEP_EVENT_SLOTS;

/// What records the steps of one executor, if anything does.
pub(crate) struct StepTracer {
    folder: PathBuf,
    rank: u16,
    timestamps: Arc<dyn EventTimestamps>,
    /// Whether the marks inside a step are free: they belong to one step at a time.
    span_events_free: Arc<AtomicBool>,
    session: Option<Arc<TraceSession>>,
    /// Steps so far, by the rows of their recording.
    kinds: HashMap<Option<u32>, u32>,
    next_slot: usize,
}

impl StepTracer {
    /// Reserves the marks; nothing is recorded yet.
    ///
    /// Errors: the folder cannot be made, which is better known before the first step.
    pub(crate) fn new(
        device: &KernelBackend,
        folder: PathBuf,
        rank: u16,
    ) -> Result<Self, ExecutorError> {
        if let Err(error) = create_dir_all(&folder) {
            let (folder, error) = (folder.display().to_string(), error.to_string());
            return Err(ExecutorError::Trace { folder, error });
        }
        Ok(Self {
            folder,
            rank,
            timestamps: device.alloc_timestamps(FIRST_SPAN_EVENT + SPANS_MAX)?,
            span_events_free: Arc::new(AtomicBool::new(true)),
            session: None,
            kinds: HashMap::new(),
            next_slot: 0,
        })
    }

    /// Steps from now on go into a new file.
    pub(crate) fn begin(&mut self, ops: &Ops) -> Result<Arc<TraceSession>, ExecutorError> {
        self.timestamps.record(ops.stream(), ORIGIN_EVENT)?;
        self.timestamps.wait(ORIGIN_EVENT)?;
        let session =
            Arc::new(TraceSession::begin(&self.folder, self.rank, Arc::clone(&self.timestamps))?);
        self.kinds.clear();
        self.session = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Steps from now on are not recorded. Those in flight still are.
    pub(crate) fn end(&mut self) {
        self.session = None;
    }

    /// Marks for the laps of a step of `ops`.
    pub(crate) fn span_recorder(&self, ops: &Ops) -> SpanRecorder {
        SpanRecorder::new(ops, Arc::clone(&self.timestamps))
    }

    /// A step that is about to be launched; `None` if nothing is recorded.
    ///
    /// `can_mark`: whether it is launched, or replayed from a recording that has marks.
    pub(crate) fn step(
        &mut self,
        ops: &Ops,
        facts: StepFacts,
        can_mark: bool,
        staged: Instant,
    ) -> Result<Option<StepTrace>, ExecutorError> {
        let Some(session) = self.session.as_ref().filter(|session| session.records()) else {
            return Ok(None);
        };
        let count = self.kinds.entry(facts.graph).or_default();
        let turn = can_mark && *count % INSTRUMENT_EVERY == INSTRUMENTED_STEP;
        let token = turn.then(|| SpanLease::take(&self.span_events_free)).flatten();
        *count += 1;
        self.next_slot = (self.next_slot + 1) % STEP_EVENT_SLOTS;
        let start = 1 + 2 * self.next_slot;
        self.timestamps.record(ops.stream(), start)?;
        Ok(Some(StepTrace::new(Arc::clone(session), facts, start, token, staged)))
    }
}

/// Leave to set the marks inside a step, given back when dropped.
#[derive(Debug)]
pub(crate) struct SpanLease(Arc<AtomicBool>);

impl SpanLease {
    fn take(free: &Arc<AtomicBool>) -> Option<Self> {
        free.swap(false, Ordering::Acquire).then(|| Self(Arc::clone(free)))
    }
}

impl Drop for SpanLease {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
