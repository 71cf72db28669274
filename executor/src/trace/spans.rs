//! Spans of an instrumented step: the time between two successive event timestamps.

use std::sync::Arc;

use device::TimestampEvents;
use kernels::KernelBackend;
use ops::{DeviceStream, Ops};

use super::FIRST_SPAN_EVENT;
use crate::ExecutorError;

/// Part of a step in the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceScope {
    /// Copy of the step's inputs to the device.
    Upload,
    /// Preparation kernel: sequence slots, block tables, token ids, positions and KV slots.
    Prepare,
    /// Layers of the target model.
    Forward,
    /// Draft passes, and the kernels that store the draft KV and the hidden states for later draft passes.
    Draft,
    /// LM head: logits at the sample positions.
    LmHead,
    /// Sampling of tokens from the logits.
    Sampling,
    /// Copy of sampled tokens to the host.
    Download,
}

impl TraceScope {
    /// Name of the scope in the trace file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Upload => "upload",
            Self::Prepare => "prepare",
            Self::Forward => "forward",
            Self::Draft => "draft",
            Self::LmHead => "head",
            Self::Sampling => "sampling",
            Self::Download => "download",
        }
    }
}

/// A span: the time from the end of the previous span to an event timestamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceSpan {
    /// Part of the step that the span belongs to.
    pub(crate) scope: TraceScope,
    /// Name of the kernel; `None` = the device does not report kernel names, and the span covers the whole
    /// scope.
    pub(crate) kernel: Option<&'static str>,
}

/// Records the event timestamps and spans of a step while it is launched or captured.
pub(crate) struct SpanRecorder {
    device: KernelBackend,
    stream: DeviceStream,
    timestamps: Arc<dyn TimestampEvents>,
    spans: Vec<DeviceSpan>,
}

impl SpanRecorder {
    pub(super) fn new(ops: &Ops, timestamps: Arc<dyn TimestampEvents>) -> Self {
        // The first span of every step is the upload of its inputs.
        let spans = vec![DeviceSpan { scope: TraceScope::Upload, kernel: None }];
        Self { device: ops.device().clone(), stream: *ops.stream(), timestamps, spans }
    }

    /// Runs `work`, which launches the kernels of `scope`. If `recorder` is set, event timestamps are
    /// recorded.
    pub(crate) fn record_scope<T>(
        recorder: &mut Option<Self>,
        scope: TraceScope,
        work: impl FnOnce() -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let Some(recorder) = recorder else { return work() };
        recorder
            .device
            .begin_kernel_timestamps(&recorder.timestamps, FIRST_SPAN_EVENT + recorder.spans.len());
        let done = work();
        let kernels = recorder.device.end_kernel_timestamps();
        if kernels.is_empty() && FIRST_SPAN_EVENT + recorder.spans.len() < recorder.timestamps.len()
        {
            recorder
                .timestamps
                .record(&recorder.stream, FIRST_SPAN_EVENT + recorder.spans.len())?;
            recorder.spans.push(DeviceSpan { scope, kernel: None });
        }
        recorder
            .spans
            .extend(kernels.into_iter().map(|name| DeviceSpan { scope, kernel: Some(name) }));
        done
    }

    /// Returns all spans, including the upload.
    pub(crate) fn finish(self) -> Arc<[DeviceSpan]> {
        self.spans.into()
    }
}
