//! `--trace-requests FILE`: a separate thread writes one JSON line per finished request.
//!
//! If the disk is too slow or full, whole lines are dropped and their number is logged; requests are never
//! delayed.

use super::request_trace_file::RequestTraceFile;
use protocol::Token;
use scheduler::TokenEvent;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Maximum number of trace lines queued for the writer thread.
const LINES_QUEUED_MAX: usize = 4_096;
/// Interval at which `flush` retries while the queue is full.
const QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Minimum interval between two log messages about dropped lines.
const DROP_REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Approximate number of bytes that are written at once.
const BATCH_BYTES: usize = 64 << 10;

enum TraceWriterCommand {
    Line(Value),
    /// Wakes the writer thread so that it checks `reopen`.
    Wake,
    /// Requests a reply once all earlier lines are written; the reply is true if no line has been dropped so
    /// far.
    Flush(SyncSender<bool>),
}

/// Handle through which trace lines are sent to the writer thread; all clones use the same thread.
#[derive(Debug, Clone)]
pub struct RequestTracer {
    lines: SyncSender<TraceWriterCommand>,
    shared: Arc<RequestTracerState>,
    /// Whether trace lines contain token ids.
    pub with_ids: bool,
}

/// State shared by the writer thread and its handles.
#[derive(Debug, Default)]
struct RequestTracerState {
    /// Number of lines dropped because the queue was full or a write failed.
    dropped_lines: AtomicU64,
    /// Whether the writer thread must reopen the file.
    reopen: AtomicBool,
}

impl RequestTracer {
    /// Opens the trace file for appending and starts the writer thread.
    ///
    /// Errors: the file cannot be opened, or the thread cannot be started.
    pub fn open(path: &Path, with_ids: bool) -> io::Result<Self> {
        let file = RequestTraceFile::open(path)?;
        let (lines, receiver) = sync_channel(LINES_QUEUED_MAX);
        let shared = Arc::new(RequestTracerState::default());
        let writer = RequestTraceWriter {
            file,
            batch: Vec::new(),
            shared: Arc::clone(&shared),
            reported: 0,
            reported_at: None,
            error: None,
        };
        std::thread::Builder::new()
            .name("request-trace".to_owned())
            .spawn(move || writer.run(&receiver))?;
        Ok(Self { lines, shared, with_ids })
    }

    /// Reopens the trace file under its name after the file was renamed (log rotation). Lines queued before
    /// this call are written to the renamed file.
    pub fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Relaxed);
        // If the queue is full, the writer thread is already running and needs no wake-up.
        let _ = self.lines.try_send(TraceWriterCommand::Wake);
    }

    /// Returns the number of dropped lines.
    pub fn dropped_lines(&self) -> u64 {
        self.shared.dropped_lines.load(Ordering::Relaxed)
    }

    /// Waits at most `limit` until all lines sent so far are written; returns true if they are written and no
    /// line has ever been dropped.
    #[must_use]
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let (done, written) = sync_channel(1);
        let mut message = TraceWriterCommand::Flush(done);
        while let Err(unsent) = self.lines.try_send(message) {
            let TrySendError::Full(unsent) = unsent else { return false };
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(QUEUE_POLL_INTERVAL);
            message = unsent;
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        written.recv_timeout(remaining).unwrap_or(false)
    }

    fn write(&self, line: Value) {
        if self.lines.try_send(TraceWriterCommand::Line(line)).is_err() {
            self.shared.dropped_lines.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// State used only by the writer thread.
struct RequestTraceWriter {
    file: RequestTraceFile,
    /// Complete lines that have not been written yet.
    batch: Vec<u8>,
    shared: Arc<RequestTracerState>,
    /// Number of dropped lines already reported in the log.
    reported: u64,
    reported_at: Option<Instant>,
    /// Last I/O error, for the report of dropped lines.
    error: Option<io::Error>,
}

impl RequestTraceWriter {
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread ends with the senders of its commands"
    )]
    fn run(mut self, receiver: &Receiver<TraceWriterCommand>) {
        while let Ok(mut message) = receiver.recv() {
            loop {
                self.handle(message);
                match receiver.try_recv() {
                    Ok(next) => message = next,
                    Err(_) => break,
                }
            }
            self.write();
            if self.shared.reopen.swap(false, Ordering::Relaxed) {
                self.reopen();
            }
            let is_due = self.reported_at.is_none_or(|at| at.elapsed() >= DROP_REPORT_INTERVAL);
            if is_due {
                self.report_dropped();
            }
        }
        self.report_dropped();
    }

    fn handle(&mut self, message: TraceWriterCommand) {
        match message {
            TraceWriterCommand::Line(line) => {
                self.batch.extend_from_slice(line.to_string().as_bytes());
                self.batch.push(b'\n');
                if self.batch.len() >= BATCH_BYTES {
                    self.write();
                }
            }
            TraceWriterCommand::Flush(done) => {
                self.write();
                // The server may exit after a flush, so dropped lines are reported immediately.
                self.report_dropped();
                // Sending fails if the receiver has timed out; the failure is ignored.
                let _ = done.try_send(self.shared.dropped_lines.load(Ordering::Relaxed) == 0);
            }
            TraceWriterCommand::Wake => {}
        }
    }

    fn write(&mut self) {
        let written = self.file.write_lines(&self.batch);
        self.batch.clear();
        if let Err(unwritten) = written {
            self.shared.dropped_lines.fetch_add(unwritten.lines, Ordering::Relaxed);
            self.error = Some(unwritten.cause);
        }
    }

    fn reopen(&mut self) {
        match self.file.reopen() {
            Ok(()) => tracing::info!("the file of --trace-requests was reopened"),
            Err(error) => tracing::warn!(
                %error,
                "cannot reopen the file of --trace-requests: lines are written to the former file"
            ),
        }
    }

    /// Logs the number of lines that were dropped since the last report.
    fn report_dropped(&mut self) {
        let dropped = self.shared.dropped_lines.load(Ordering::Relaxed);
        let lines = dropped - self.reported;
        if lines > 0 {
            (self.reported, self.reported_at) = (dropped, Some(Instant::now()));
            let error = self.error.take().map(tracing::field::display);
            tracing::warn!(
                lines,
                in_all = dropped,
                error,
                "lines of --trace-requests were dropped"
            );
        }
    }
}

/// Trace of one request. When it is dropped, its trace line is sent to the writer thread.
#[derive(Debug)]
pub(crate) struct RequestTraceRecord {
    tracer: RequestTracer,
    received: Instant,
    head: Value,
    first_token: Option<Instant>,
    queued_ms: Option<u32>,
    cached_tokens: Option<u32>,
    preemptions: u32,
    prompt_tokens: Vec<u32>,
    prompts: Vec<Vec<Token>>,
    choices: Vec<TracedChoice>,
}

/// Part of a request's trace that belongs to one choice.
#[derive(Debug, Clone, Default)]
struct TracedChoice {
    tokens: u32,
    ids: Vec<Token>,
    finish: Option<&'static str>,
}

impl RequestTraceRecord {
    /// Creates the trace of a request that arrived at `received` and has `choices` choices.
    ///
    /// `head`: JSON members at the start of the line, which identify the request.
    pub(crate) fn new(
        tracer: &RequestTracer,
        received: Instant,
        head: Value,
        prompt_tokens: Vec<u32>,
        choices: usize,
    ) -> Self {
        Self {
            tracer: tracer.clone(),
            received,
            head,
            first_token: None,
            queued_ms: None,
            cached_tokens: None,
            preemptions: 0,
            prompt_tokens,
            prompts: Vec::new(),
            choices: vec![TracedChoice::default(); choices],
        }
    }

    /// Stores the token ids of the prompts, if trace lines contain token ids.
    pub(crate) fn set_prompts(&mut self, prompts: &[Vec<Token>]) {
        if self.tracer.with_ids {
            self.prompts = prompts.to_vec();
        }
    }

    /// Records a token event of one choice.
    pub(crate) fn record(&mut self, index: usize, event: &TokenEvent) {
        if let Some(admission) = event.first_admission {
            self.queued_ms.get_or_insert(admission.queued_ms);
            self.cached_tokens.get_or_insert(admission.cached_tokens);
        }
        self.preemptions = self.preemptions.max(event.preemptions);
        if event.tokens.is_empty() {
            return;
        }
        self.first_token.get_or_insert_with(Instant::now);
        let Some(choice) = self.choices.get_mut(index) else { return };
        choice.tokens += event.tokens.len() as u32;
        if self.tracer.with_ids {
            choice.ids.extend(event.tokens.iter());
        }
    }

    /// Records the finish reason of one choice.
    pub(crate) fn end(&mut self, index: usize, finish: &'static str) {
        if let Some(choice) = self.choices.get_mut(index) {
            choice.finish.get_or_insert(finish);
        }
    }

    fn line(&mut self) -> Value {
        let ms = |at: Instant| at.duration_since(self.received).as_secs_f64() * 1e3;
        let mut line = self.head.take();
        let counts = self.choices.iter().map(|choice| choice.tokens);
        // A choice has no finish reason only if the client has disconnected.
        let ends = self.choices.iter().map(|choice| choice.finish.unwrap_or("client_gone"));
        line["prompt_tokens"] = json!(self.prompt_tokens);
        line["cached_tokens"] = json!(self.cached_tokens);
        line["completion_tokens"] = counts.collect();
        line["finish_reasons"] = ends.collect();
        line["preemptions"] = json!(self.preemptions);
        line["queued_ms"] = json!(self.queued_ms);
        line["first_token_ms"] = json!(self.first_token.map(ms));
        line["latency_ms"] = json!(ms(Instant::now()));
        if self.tracer.with_ids {
            line["prompt_ids"] = json!(self.prompts);
            line["completion_ids"] = self.choices.iter().map(|choice| json!(choice.ids)).collect();
        }
        line
    }
}

impl Drop for RequestTraceRecord {
    fn drop(&mut self) {
        let line = self.line();
        self.tracer.write(line);
    }
}

#[cfg(test)]
mod tests;
