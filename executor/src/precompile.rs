//! Dry run of the step shapes that are used later: launches execute nothing, but their kernels are recorded
//! and then compiled in parallel. Without the dry run, the first steps would compile the kernels one by one.

use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::step::{StepDeviceState, StepLaunchOptions};
use ops::{BatchRowLengths, BatchUpperBounds, DraftBuffers, StepShape};
use protocol::{Batch, StepTiming};
use std::time::Duration;

/// Launches a step of each shape in a dry run (nothing is executed), then compiles the kernels of these
/// launches. `progress` receives the number of kernel modules compiled and the total number of kernel
/// modules.
pub(crate) fn precompile(
    model: &ModelContext,
    device: &mut StepDeviceState,
    shapes: impl IntoIterator<Item = StepShape>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ExecutorError> {
    let driver = model.ops.device();
    driver.begin_dry_run();
    let rows_max = device.drafts.as_ref().map(DraftBuffers::rows);
    let mut launch = |shape: StepShape| {
        let drafting = rows_max.map(|rows| rows.min(shape.bounds.decode_rows));
        model.full_logits_variants().iter().try_for_each(|&full_logits| {
            let launch = StepLaunchOptions::uniform(shape, full_logits, drafting, model);
            device.launch(model, launch, &mut StepTiming::default(), &mut None).map(drop)
        })
    };
    let launched = shapes.into_iter().try_for_each(&mut launch);
    driver.end_dry_run(progress)?;
    launched
}

/// Logs that kernels were compiled while serving: `modules` kernel modules in the submission of `batch`, which took `elapsed`. All
/// requests wait for such a step, so its shape is to be added to the dry run.
pub(crate) fn warn_late_compilation(batch: &Batch, modules: usize, elapsed: Duration) {
    let tokens: u64 = batch.rows.iter().map(|row| u64::from(row.len) + u64::from(row.drafts)).sum();
    tracing::warn!(
        step = batch.step.0,
        rows = batch.rows.len(),
        tokens,
        modules,
        milliseconds = elapsed.as_millis() as u64,
        "kernels were compiled while serving"
    );
}

/// Shape of a step with rows of lengths `lens` and at most `logits_rows` logits rows. Up to
/// `rows_per_request` one-token rows may belong to the same request.
pub(crate) fn precompile_shape(
    lens: &[u32],
    logits_rows: usize,
    rows_per_request: usize,
) -> StepShape {
    let rows = lens.len();
    let lengths = |&len: &u32| BatchRowLengths { tokens: len as usize, context: len as usize };
    let bounds = BatchUpperBounds::of(lens.iter().map(lengths), rows_per_request);
    let tokens = lens.iter().sum::<u32>() as usize;
    StepShape { tokens, rows, logits_rows: rows.min(logits_rows), bounds, ..StepShape::default() }
}
