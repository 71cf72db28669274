//! A trace session: one trace file with its writer thread, and the conversion of device times.

use std::fs::remove_file;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{io, thread};

use device::{DeviceError, TimestampEvents};
use ops::Ops;

use super::file::ChromeTraceFile;
use super::step::{StepTraceRecord, TraceInterval};
use super::{ORIGIN_EVENT, SpanRecorder};
use crate::ExecutorError;

/// Maximum number of steps in the queue of the writer thread; further steps are dropped and counted.
const WAITING_MAX: usize = 64;
/// Interval at which recorded steps are written to disk.
const FLUSH_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum bytes of a trace file. Trace viewers cannot open larger files, and the disk must not fill up.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Maximum time that `close` waits for the writer thread.
const CLOSE_WAIT: Duration = Duration::from_secs(10);

/// A trace in progress, shared by the steps that are recorded in it.
pub(crate) struct TraceSession {
    path: PathBuf,
    timestamps: Arc<dyn TimestampEvents>,
    /// Host time of the event timestamp `ORIGIN_EVENT`. All times of the trace are relative to it.
    origin: Instant,
    clock: Mutex<DeviceTimeReference>,
    steps: Mutex<Option<SyncSender<StepTraceRecord>>>,
    written: Mutex<Receiver<io::Result<()>>>,
    /// Whether recording has stopped because the file is full, the file cannot be written, or a device error
    /// occurred.
    over: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
}

/// An event timestamp with a known device time. Elapsed times between two event timestamps are f32
/// milliseconds, which are precise only for short intervals, so the times of each step are measured from the
/// previous step.
#[derive(Debug, Clone, Copy)]
struct DeviceTimeReference {
    origin_event: usize,
    ns: i64,
}

impl TraceSession {
    /// Creates a trace file in `folder` and starts its writer thread. The caller has just recorded
    /// `ORIGIN_EVENT`.
    pub(super) fn begin(
        folder: &Path,
        rank: u16,
        timestamps: Arc<dyn TimestampEvents>,
    ) -> Result<Self, ExecutorError> {
        let origin = Instant::now();
        let failed = |error: io::Error| {
            let folder = folder.display().to_string();
            ExecutorError::Trace { folder, error: error.to_string() }
        };
        let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let version = env!("CARGO_PKG_VERSION");
        let head = format!(
            r#"{{"version":"hadron {version}","rank":"{rank}","started_unix_ns":"{unix_ns}"}}"#
        );
        let file = ChromeTraceFile::create(folder, rank, &head, FILE_BYTES_MAX).map_err(failed)?;
        let path = file.path().to_owned();
        let (steps, receiver) = sync_channel(WAITING_MAX);
        let (done, written) = sync_channel(1);
        let (over, dropped) = (Arc::default(), Arc::default());
        let (writer_over, writer_dropped) = (Arc::clone(&over), Arc::clone(&dropped));
        let writer =
            ChromeTraceWriter { file, rank, steps: 0, over: writer_over, dropped: writer_dropped };
        let thread = thread::Builder::new().name("trace".to_owned());
        let run = move || {
            let _ = done.send(writer.run(&receiver)); // The send fails if the session was dropped without `close`.
        };
        thread.spawn(run).map_err(failed)?;
        tracing::info!(file = %path.display(), "recording a trace");
        Ok(Self {
            path,
            timestamps,
            origin,
            clock: Mutex::new(DeviceTimeReference { origin_event: ORIGIN_EVENT, ns: 0 }),
            steps: Mutex::new(Some(steps)),
            written: Mutex::new(written),
            over,
            dropped,
        })
    }

    /// Path of the trace file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the session still records steps. Recording stops if the file is full, the file cannot be
    /// written, or a device error occurs.
    pub(super) fn records(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    /// Pool of event timestamps that the steps record on the device.
    pub(super) fn timestamps(&self) -> &dyn TimestampEvents {
        self.timestamps.as_ref()
    }

    /// Creates a recorder for the spans of an instrumented step.
    pub(super) fn spans(&self, ops: &Ops) -> SpanRecorder {
        SpanRecorder::new(ops, Arc::clone(&self.timestamps))
    }

    /// Returns the host time `at` in nanoseconds from the origin.
    pub(super) fn host_ns(&self, at: Instant) -> i64 {
        at.saturating_duration_since(self.origin).as_nanos() as i64
    }

    /// Returns the device time between the event timestamps `start` and `end` of a step. Must be called for the
    /// steps in order.
    pub(super) fn device_time(
        &self,
        start: usize,
        end: usize,
    ) -> Result<TraceInterval, DeviceError> {
        self.timestamps.wait(end)?;
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let start_ns = clock.ns + self.timestamps.elapsed_ns(clock.origin_event, start)?;
        let end_ns = start_ns + self.timestamps.elapsed_ns(start, end)?;
        *clock = DeviceTimeReference { origin_event: end, ns: end_ns };
        Ok(TraceInterval { start_ns, end_ns })
    }

    /// Queues a step for the writer thread, without blocking. If the queue is full, the step is dropped and
    /// counted.
    pub(super) fn record(&self, step: StepTraceRecord) {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(steps) = steps.as_ref() else { return };
        if let Err(TrySendError::Full(_)) = steps.try_send(step) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Stops recording after a device error.
    pub(super) fn abandon(&self, error: &DeviceError) {
        if !self.over.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "the trace ends: event timestamps cannot be read");
        }
    }

    /// Completes the file, or removes it if it contains no steps. Steps that are recorded later are dropped.
    ///
    /// Errors: the file could not be written.
    pub(crate) fn close(&self) -> Result<(), ExecutorError> {
        drop(self.steps.lock().unwrap_or_else(PoisonError::into_inner).take());
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let error = match written.recv_timeout(CLOSE_WAIT) {
            // The session has already been closed.
            Ok(Ok(())) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(RecvTimeoutError::Timeout) => {
                format!("not written after {} s", CLOSE_WAIT.as_secs())
            }
        };
        let folder = self.path.display().to_string();
        Err(ExecutorError::Trace { folder, error })
    }
}

/// Writes the steps of a session to its file, on the writer thread.
struct ChromeTraceWriter {
    file: ChromeTraceFile,
    rank: u16,
    /// Number of steps that have been written. A file without steps is removed at the end.
    steps: u64,
    over: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
}

impl ChromeTraceWriter {
    fn run(mut self, steps: &Receiver<StepTraceRecord>) -> io::Result<()> {
        let written = self.write(steps).and_then(|()| match self.steps {
            0 => remove_file(self.file.path()),
            _ => Ok(()),
        });
        if let Err(error) = &written {
            self.over.store(true, Ordering::Relaxed);
            tracing::warn!(%error, file = %self.file.path().display(), "the trace ends: write failed");
        }
        written
    }

    fn write(&mut self, steps: &Receiver<StepTraceRecord>) -> io::Result<()> {
        for event in super::step::names(self.rank) {
            self.file.push(&event)?;
        }
        let mut flushed = Instant::now();
        loop {
            match steps.recv_timeout(FLUSH_INTERVAL) {
                Ok(step) => self.step(&step)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if flushed.elapsed() >= FLUSH_INTERVAL {
                self.file.flush()?;
                flushed = Instant::now();
            }
        }
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "steps were dropped from the trace: the writer was too slow");
        }
        self.file.flush()
    }

    /// Writes all trace events of a step or, if the file is full, none of them.
    fn step(&mut self, step: &StepTraceRecord) -> io::Result<()> {
        if self.over.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.file.push(&step.events(self.rank))? {
            self.steps += 1;
        } else {
            self.over.store(true, Ordering::Relaxed);
            let file = self.file.path().display();
            tracing::warn!(%file, bytes = FILE_BYTES_MAX, "the trace file is full: later steps are not recorded");
        }
        Ok(())
    }
}
