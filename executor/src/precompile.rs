//! A rehearsal of the steps to come: what they need is compiled side by side, before the first one runs and
//! would have it compiled piece by piece.

use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::step::{DeviceState, StepLaunch};
use ops::{DraftBuffers, RowBounds, StepShape};
use protocol::StepTiming;

/// Goes through a step of each shape without running it. `progress` hears how many modules of how many are
/// compiled.
pub(crate) fn precompile(
    engine: &ModelContext,
    device: &mut DeviceState,
    shapes: impl IntoIterator<Item = StepShape>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ExecutorError> {
    let driver = engine.ops.device();
    driver.begin_dry_run();
    let rows_max = device.drafts.as_ref().map(DraftBuffers::rows);
    let mut launch = |shape: StepShape| {
        let drafting = rows_max.map(|most| most.min(shape.bounds.decode_rows));
        engine.full_logits_variants().iter().try_for_each(|&whole_rows| {
            let launch = StepLaunch::of_all(shape, whole_rows, drafting, engine);
            device.launch(engine, launch, &mut StepTiming::default(), &mut None).map(drop)
        })
    };
    let launched = shapes.into_iter().try_for_each(&mut launch);
    driver.end_dry_run(progress)?;
    launched
}

/// The shape of a step with rows of these lengths, which asks at most `questions`; those of one token may be up to `successive` of a
/// request.
pub(crate) fn precompile_shape(lens: &[u32], questions: usize, successive: usize) -> StepShape {
    let rows = lens.len();
    let bounds = RowBounds::of(lens.iter().map(|&len| (len as usize, len as usize)), successive);
    let tokens = lens.iter().sum::<u32>() as usize;
    StepShape { tokens, rows, logits_rows: rows.min(questions), bounds }
}
