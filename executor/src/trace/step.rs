//! Trace of one step: the times that are recorded while it runs, and the trace events for the file.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use device::DeviceError;
use ops::{DeviceStream, Ops};
use protocol::{Batch, StepId};

use super::family::family;
use super::{DeviceSpan, FIRST_SPAN_EVENT, SpanEventLease, SpanRecorder, TraceScope, TraceSession};

/// Track numbers of a rank in the trace file: submit thread, reply thread, device.
const SUBMIT: u32 = 1;
const REPLY: u32 = 2;
const DEVICE: u32 = 3;

/// Id and size of a step, for the trace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TracedStepInfo {
    step: StepId,
    rows: usize,
    /// Number of rows that initialise their sequence slot: the first row of each request, and its first row
    /// after a preemption or an executor restart.
    newly_assigned: usize,
    tokens: u32,
    /// Number of rows of the captured graph that is replayed; `None` = the step is launched eagerly.
    pub(super) graph: Option<u32>,
}

impl TracedStepInfo {
    pub(crate) fn new(batch: &Batch, graph: Option<u32>) -> Self {
        Self {
            step: batch.step,
            rows: batch.rows.len(),
            newly_assigned: batch.rows.iter().filter(|row| row.seq_init.is_some()).count(),
            tokens: batch.rows.iter().map(|row| row.len).sum(),
            graph,
        }
    }
}

/// Trace of a step that is in flight.
pub(crate) struct StepTrace {
    session: Arc<TraceSession>,
    facts: TracedStepInfo,
    /// Index of the device timestamp at the start of the step; the timestamp at the end has the next index.
    start: usize,
    lease: Option<SpanEventLease>,
    spans: Option<Arc<[DeviceSpan]>>,
    /// Whether the time between the last span and the end of the step is the download of the sampled tokens.
    /// False if the step has several downloads.
    downloads: bool,
    staged: Instant,
    launched: Instant,
    submitted: Instant,
}

impl StepTrace {
    pub(super) fn new(
        session: Arc<TraceSession>,
        facts: TracedStepInfo,
        start: usize,
        lease: Option<SpanEventLease>,
        staged: Instant,
    ) -> Self {
        let now = Instant::now();
        let (spans, downloads, launched, submitted) = (None, true, now, now);
        Self { session, facts, start, lease, spans, downloads, staged, launched, submitted }
    }

    /// Whether this step is instrumented, so that it uses the event timestamps between launches.
    pub(crate) fn is_instrumented(&self) -> bool {
        self.lease.is_some()
    }

    /// Records the event timestamp at the end of the upload.
    pub(crate) fn uploaded(&self, s: DeviceStream) -> Result<(), DeviceError> {
        if !self.is_instrumented() {
            return Ok(());
        }
        self.session.timestamps().record(&s, FIRST_SPAN_EVENT)
    }

    /// Creates a recorder for the spans of this step's launches.
    pub(crate) fn span_recorder(&self, ops: &Ops) -> SpanRecorder {
        self.session.spans(ops)
    }

    /// Sets the spans of the step after it was launched or replayed.
    pub(crate) fn set_spans(&mut self, spans: Arc<[DeviceSpan]>) {
        self.spans = Some(spans);
    }

    /// Records that all kernels have been launched. `slices`: number of downloads of sampled tokens in the
    /// step.
    pub(crate) fn submitted(&mut self, s: DeviceStream, slices: usize) -> Result<(), DeviceError> {
        self.session.timestamps().record(&s, self.start + 1)?;
        self.downloads = slices == 1;
        self.submitted = Instant::now();
        Ok(())
    }

    /// Completes the trace of the step. The host waited for the outputs of the step from `wait_start` to
    /// `wait_end` and then read the outputs. Must be called for the steps in order.
    pub(crate) fn finish(self, wait_start: Instant, wait_end: Instant) {
        let read_end = Instant::now();
        match self.read([wait_start, wait_end, read_end]) {
            Ok(record) => self.session.record(record),
            Err(error) => self.session.abandon(&error),
        }
    }

    fn read(
        &self,
        [wait_start, wait_end, read_end]: [Instant; 3],
    ) -> Result<StepTraceRecord, DeviceError> {
        let host = |at| self.session.host_ns(at);
        let device = self.session.device_time(self.start, self.start + 1)?;
        let mut ends = Vec::new();
        let spans = self.spans.iter().flat_map(|spans| spans.iter());
        for (i, span) in spans.enumerate() {
            let ns = self.session.timestamps().elapsed_ns(self.start, FIRST_SPAN_EVENT + i)?;
            ends.push((*span, device.start_ns + ns));
        }
        if self.downloads && !ends.is_empty() {
            ends.push((DeviceSpan { scope: TraceScope::Download, kernel: None }, device.end_ns));
        }
        let submit = [self.staged, self.launched, self.submitted].map(host);
        let reply = [wait_start, wait_end, read_end].map(host);
        Ok(StepTraceRecord { facts: self.facts, submit, reply, device, spans: ends })
    }
}

/// Start and end of an event of the trace, in nanoseconds from the session's origin.
#[derive(Debug, Clone, Copy)]
pub(super) struct TraceInterval {
    pub(super) start_ns: i64,
    pub(super) end_ns: i64,
}

/// Trace of a finished step, for the writer thread. Times are nanoseconds from the session's origin.
pub(super) struct StepTraceRecord {
    facts: TracedStepInfo,
    /// Host times of the submit thread: start of staging, start of launching, end of launching.
    submit: [i64; 3],
    /// Host times of the reply thread: start of waiting, end of waiting, end of reading the outputs.
    reply: [i64; 3],
    /// Device time of the step.
    device: TraceInterval,
    /// Spans with their end times. Each span starts at the end of the previous one, the first at the start of
    /// the step.
    spans: Vec<(DeviceSpan, i64)>,
}

/// A complete event (`"ph":"X"`) of the trace file.
struct ChromeTraceSpan<'a> {
    name: &'a str,
    kind: &'a str,
    track: u32,
    interval: TraceInterval,
}

impl StepTraceRecord {
    /// Formats the events of the step, separated by commas and line ends.
    pub(super) fn events(&self, rank: u16) -> String {
        let mut out = String::with_capacity(1024 + 160 * self.spans.len());
        let TracedStepInfo { step, rows, newly_assigned, tokens, graph } = self.facts;
        let graph = graph.map_or_else(|| "null".to_owned(), |rows| rows.to_string());
        let instrumented = !self.spans.is_empty();
        let args = format!(
            r#""step":{},"rows":{rows},"fresh":{newly_assigned},"tokens":{tokens},"graph":{graph},"marked":{instrumented}"#,
            step.0
        );
        let name = format!("step {}", step.0);
        let mut put = |name: &str, kind: &str, track: u32, interval: TraceInterval, args: &str| {
            if !out.is_empty() {
                out.push_str(",\n");
            }
            write_span(&mut out, rank, &ChromeTraceSpan { name, kind, track, interval }, args);
        };
        let between = |start_ns, end_ns| TraceInterval { start_ns, end_ns };
        let [staged, launched, submitted] = self.submit;
        put(&name, "host", SUBMIT, between(staged, submitted), &args);
        put("stage", "host", SUBMIT, between(staged, launched), "");
        put("submit", "host", SUBMIT, between(launched, submitted), "");
        let [wait_start, wait_end, read_end] = self.reply;
        put(&name, "host", REPLY, between(wait_start, read_end), &args);
        put("wait", "host", REPLY, between(wait_start, wait_end), "");
        put("answer", "host", REPLY, between(wait_end, read_end), "");
        put(&name, "step", DEVICE, self.device, &args);
        let mut from = self.device.start_ns;
        for spans in self.spans.chunk_by(|a, b| a.0.scope == b.0.scope) {
            let (Some((first, _)), Some(&(_, to))) = (spans.first(), spans.last()) else {
                continue;
            };
            if first.kernel.is_some() {
                put(first.scope.name(), "scope", DEVICE, between(from, to), "");
            }
            for (span, end) in spans {
                let family = format!(r#""family":"{}""#, family(span));
                let name = span.kernel.unwrap_or(span.scope.name());
                put(name, "kernel", DEVICE, between(from, *end), &family);
                from = *end;
            }
        }
        out
    }
}

fn write_span(out: &mut String, rank: u16, span: &ChromeTraceSpan<'_>, args: &str) {
    let ChromeTraceSpan { name, kind, track, interval } = span;
    let TraceInterval { start_ns, end_ns } = *interval;
    let (from, ns) = (start_ns.max(0), (end_ns - start_ns).max(0));
    // A write to a string cannot fail.
    let _ = write!(
        out,
        r#"{{"name":"{name}","cat":"{kind}","ph":"X","ts":{}.{:03},"dur":{}.{:03},"pid":{rank},"tid":{track},"args":{{{args}}}}}"#,
        from / 1000,
        from % 1000,
        ns / 1000,
        ns % 1000,
    );
}

/// Returns the metadata events that name the process and the tracks.
pub(super) fn names(rank: u16) -> [String; 4] {
    let named = |what: &str, track: u32, name: &str| {
        format!(
            r#"{{"name":"{what}","ph":"M","pid":{rank},"tid":{track},"args":{{"name":"{name}"}}}}"#
        )
    };
    [
        named("process_name", 0, &format!("hadron rank {rank}")),
        named("thread_name", SUBMIT, "host: submit"),
        named("thread_name", REPLY, "host: answer"),
        named("thread_name", DEVICE, "device"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_events_form_a_tree() {
        let span = |scope, kernel, ns| (DeviceSpan { scope, kernel }, ns);
        let facts = TracedStepInfo {
            step: StepId(7),
            rows: 2,
            newly_assigned: 1,
            tokens: 9,
            graph: Some(4),
        };
        let record = StepTraceRecord {
            facts,
            submit: [1_000, 2_500, 4_000],
            reply: [4_100, 9_000, 9_200],
            device: TraceInterval { start_ns: 2_600, end_ns: 8_900 },
            spans: vec![
                span(TraceScope::Upload, None, 3_000),
                span(TraceScope::Forward, Some("rms_norm"), 4_000),
                span(TraceScope::Forward, Some("gemm_small_m"), 6_001),
                span(TraceScope::Download, None, 8_900),
            ],
        };
        let events = record.events(0);
        let lines: Vec<&str> = events.split(",\n").collect();
        assert_eq!(lines.len(), 12);
        let args = r#"{"step":7,"rows":2,"fresh":1,"tokens":9,"graph":4,"marked":true}"#;
        let expected = [
            format!(
                r#"{{"name":"step 7","cat":"step","ph":"X","ts":2.600,"dur":6.300,"pid":0,"tid":3,"args":{args}}}"#
            ),
            r#"{"name":"upload","cat":"kernel","ph":"X","ts":2.600,"dur":0.400,"pid":0,"tid":3,"args":{"family":"upload"}}"#.to_owned(),
            r#"{"name":"forward","cat":"scope","ph":"X","ts":3.000,"dur":3.001,"pid":0,"tid":3,"args":{}}"#.to_owned(),
            r#"{"name":"rms_norm","cat":"kernel","ph":"X","ts":3.000,"dur":1.000,"pid":0,"tid":3,"args":{"family":"norms"}}"#.to_owned(),
            r#"{"name":"gemm_small_m","cat":"kernel","ph":"X","ts":4.000,"dur":2.001,"pid":0,"tid":3,"args":{"family":"linear layers"}}"#.to_owned(),
        ];
        assert_eq!(&lines[6..11], &expected[..]);
    }
}
