//! The laps of a step: what was launched between two marks inside it.

use std::sync::Arc;

use device::EventTimestamps;
use kernels::KernelBackend;
use ops::{DeviceStream, Ops};

use super::FIRST_SPAN_EVENT;
use crate::ExecutorError;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceScope {
    /// The step's inputs on their way to the device.
    Upload,
    /// Seats, tables, ids, positions and slots.
    Prepare,
    /// The layers.
    Forward,
    /// What a draft layer makes, and keeps for later.
    Draft,
    /// Logits of the tokens asked about.
    LmHead,
    /// Tokens out of logits.
    Sampling,
    /// Answers on their way to the host.
    Download,
}

impl TraceScope {
    /// As the trace names it.
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

/// What ended with one mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceSpan {
    /// Where it belongs.
    pub(crate) scope: TraceScope,
    /// The kernel; `None` where the device names none, and the lap is the whole scope.
    pub(crate) kernel: Option<&'static str>,
}

/// Sets marks while a step is launched, or recorded.
pub(crate) struct SpanRecorder {
    device: KernelBackend,
    stream: DeviceStream,
    timestamps: Arc<dyn EventTimestamps>,
    spans: Vec<DeviceSpan>,
}

impl SpanRecorder {
    pub(super) fn new(ops: &Ops, marks: Arc<dyn EventTimestamps>) -> Self {
        // The first lap of every step is its upload.
        let passed = vec![DeviceSpan { scope: TraceScope::Upload, kernel: None }];
        Self {
            device: ops.device().clone(),
            stream: *ops.stream(),
            timestamps: marks,
            spans: passed,
        }
    }

    /// Launches `work` as a part of the step, marked if there are laps.
    pub(crate) fn record_scope<T>(
        laps: &mut Option<Self>,
        scope: TraceScope,
        work: impl FnOnce() -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let Some(laps) = laps else { return work() };
        laps.device.begin_kernel_timestamps(&laps.timestamps, FIRST_SPAN_EVENT + laps.spans.len());
        let done = work();
        let kernels = laps.device.end_kernel_timestamps();
        if kernels.is_empty() && FIRST_SPAN_EVENT + laps.spans.len() < laps.timestamps.len() {
            laps.timestamps.record(&laps.stream, FIRST_SPAN_EVENT + laps.spans.len())?;
            laps.spans.push(DeviceSpan { scope, kernel: None });
        }
        laps.spans.extend(kernels.into_iter().map(|name| DeviceSpan { scope, kernel: Some(name) }));
        done
    }

    /// All of them, the upload included.
    pub(crate) fn finish(self) -> Arc<[DeviceSpan]> {
        self.spans.into()
    }
}
