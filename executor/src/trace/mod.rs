//! Traces of steps for Perfetto: host and device time of each step.
//!
//! A step records a few host times and two device event timestamps. Of the steps with the same row count, one
//! in `INSTRUMENT_EVERY` is instrumented: it also has event timestamps between launches. These timestamps
//! prevent kernels from overlapping, so an instrumented step is slower; the trace labels instrumented steps.
//! Timestamps are read after the step's outputs have arrived; a separate thread writes the file. Without
//! `ExecutorSettings::profile_dir`, nothing is recorded or allocated.

mod family;
mod file;
mod session;
mod spans;
mod step;

pub(crate) use session::TraceSession;
pub(crate) use spans::{DeviceSpan, SpanRecorder, TraceScope};
pub(crate) use step::{StepTrace, TracedStepInfo};

use std::collections::HashMap;
use std::fs::create_dir_all;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use device::TimestampEvents;
use kernels::KernelBackend;
use ops::Ops;

use crate::ExecutorError;

/// Of this number of steps with the same row count, one is instrumented (it has event timestamps between its
/// launches). An instrumented step takes up to twice the time of other steps.
const INSTRUMENT_EVERY: u32 = 64;
/// Index, among `INSTRUMENT_EVERY` steps with the same row count, of the step that is instrumented. The index
/// is not 0, because the first step of a row count may include autotuning.
const INSTRUMENTED_STEP: u32 = 1;
/// Maximum number of spans of an instrumented step.
const SPANS_MAX: usize = 4096;
/// Number of pairs of event timestamps (start and end of a step). Successive steps use the pairs in turn. The
/// times of a step are read relative to the end timestamp of the previous step, so the pairs of recent steps
/// must not be reused. At most three steps are in flight, the number of output buffers.
const STEP_EVENT_SLOTS: usize = 8;
/// Index of the event timestamp at which a trace begins. All times of the trace are relative to it.
const ORIGIN_EVENT: usize = 0;
/// Index of the first event timestamp between the launches of an instrumented step.
pub(crate) const FIRST_SPAN_EVENT: usize = 1 + 2 * STEP_EVENT_SLOTS;

/// Records traces of the steps of one executor.
pub(crate) struct StepTracer {
    folder: PathBuf,
    rank: u16,
    timestamps: Arc<dyn TimestampEvents>,
    /// Whether the event timestamps between launches are unused. Only one instrumented step at a time may use
    /// them.
    span_events_free: Arc<AtomicBool>,
    session: Option<Arc<TraceSession>>,
    /// Number of steps in the current trace, by the row count of the captured graph (`None` = eager steps).
    /// The next instrumented step of each row count follows from this number.
    step_counts: HashMap<Option<u32>, u32>,
    next_slot: usize,
}

impl StepTracer {
    /// Allocates the event timestamps. No trace is recorded yet.
    ///
    /// Errors: the trace folder cannot be created. It is created here so that this error is reported at
    /// start-up.
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
            step_counts: HashMap::new(),
            next_slot: 0,
        })
    }

    /// Starts a new trace file, in which later steps are recorded.
    pub(crate) fn begin(&mut self, ops: &Ops) -> Result<Arc<TraceSession>, ExecutorError> {
        self.timestamps.record(ops.stream(), ORIGIN_EVENT)?;
        self.timestamps.wait(ORIGIN_EVENT)?;
        let session =
            Arc::new(TraceSession::begin(&self.folder, self.rank, Arc::clone(&self.timestamps))?);
        self.step_counts.clear();
        self.session = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Stops the trace for steps that are submitted later. Steps in flight are still recorded.
    pub(crate) fn end(&mut self) {
        self.session = None;
    }

    /// Creates a recorder for the spans (times between successive launches) of a step that is captured as a
    /// graph.
    pub(crate) fn span_recorder(&self, ops: &Ops) -> SpanRecorder {
        SpanRecorder::new(ops, Arc::clone(&self.timestamps))
    }

    /// Starts the trace of a step that is about to be launched; returns `None` if no trace is being recorded.
    ///
    /// `can_instrument`: whether the step is launched eagerly, or its captured graph has an instrumented
    /// variant.
    pub(crate) fn step(
        &mut self,
        ops: &Ops,
        facts: TracedStepInfo,
        can_instrument: bool,
        staged: Instant,
    ) -> Result<Option<StepTrace>, ExecutorError> {
        let Some(session) = self.session.as_ref().filter(|session| session.records()) else {
            return Ok(None);
        };
        let count = self.step_counts.entry(facts.graph).or_default();
        let is_due = can_instrument && *count % INSTRUMENT_EVERY == INSTRUMENTED_STEP;
        let lease = is_due.then(|| SpanEventLease::take(&self.span_events_free)).flatten();
        *count += 1;
        self.next_slot = (self.next_slot + 1) % STEP_EVENT_SLOTS;
        let start = 1 + 2 * self.next_slot;
        self.timestamps.record(ops.stream(), start)?;
        Ok(Some(StepTrace::new(Arc::clone(session), facts, start, lease, staged)))
    }
}

/// Exclusive use of the event timestamps between launches by one step. The timestamps become free when the
/// lease is dropped.
#[derive(Debug)]
pub(crate) struct SpanEventLease(Arc<AtomicBool>);

impl SpanEventLease {
    fn take(free: &Arc<AtomicBool>) -> Option<Self> {
        free.swap(false, Ordering::Acquire).then(|| Self(Arc::clone(free)))
    }
}

impl Drop for SpanEventLease {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
