//! The laps of a step: what was launched between two marks inside it.

use super::FIRST_LAP;
use crate::ExecutorError;
use kernels::{Kernels, Marks};
use ops::{Ops, Stream};
use std::sync::Arc;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The step's inputs on their way to the device.
    Upload,
    /// Seats, tables, ids, positions and slots.
    Prepare,
    /// The layers.
    Forward,
    /// What a draft layer makes, and keeps for later.
    Draft,
    /// Logits of the tokens asked about.
    Head,
    /// Tokens out of logits.
    Sampling,
    /// Answers on their way to the host.
    Download,
}

impl Scope {
    /// As the trace names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Upload => "upload",
            Self::Prepare => "prepare",
            Self::Forward => "forward",
            Self::Draft => "draft",
            Self::Head => "head",
            Self::Sampling => "sampling",
            Self::Download => "download",
        }
    }
}

/// What ended with one mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lap {
    /// Where it belongs.
    pub(crate) scope: Scope,
    /// The kernel; `None` where the device names none, and the lap is the whole scope.
    pub(crate) kernel: Option<&'static str>,
}

/// Sets marks while a step is launched, or recorded.
pub(crate) struct Laps {
    device: Arc<dyn Kernels>,
    stream: Stream,
    marks: Arc<dyn Marks>,
    passed: Vec<Lap>,
}

impl Laps {
    pub(super) fn new(ops: &Ops, marks: Arc<dyn Marks>) -> Self {
        // The first lap of every step is its upload.
        let passed = vec![Lap { scope: Scope::Upload, kernel: None }];
        Self { device: Arc::clone(ops.device()), stream: *ops.stream(), marks, passed }
    }

    /// Launches `work` as a part of the step, marked if there are laps.
    pub(crate) fn within<T>(
        laps: &mut Option<Self>,
        scope: Scope,
        work: impl FnOnce() -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let Some(laps) = laps else { return work() };
        laps.device.begin_marking(&laps.marks, FIRST_LAP + laps.passed.len());
        let done = work();
        let kernels = laps.device.end_marking();
        if kernels.is_empty() && FIRST_LAP + laps.passed.len() < laps.marks.len() {
            laps.marks.set(&laps.stream, FIRST_LAP + laps.passed.len())?;
            laps.passed.push(Lap { scope, kernel: None });
        }
        laps.passed.extend(kernels.into_iter().map(|name| Lap { scope, kernel: Some(name) }));
        done
    }

    /// All of them, the upload included.
    pub(crate) fn finish(self) -> Arc<[Lap]> {
        self.passed.into()
    }
}
