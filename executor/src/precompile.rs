//! Dry run of the step shapes that are used later: launches execute nothing, but their kernels are recorded
//! and then compiled in parallel. Without the dry run, the first steps would compile the kernels one by one.

use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::step::{StepDeviceState, StepLaunchOptions};
use kernels::GatedDeltaRule;
use ops::{BatchRowLengths, BatchUpperBounds, DraftBuffers, StepShape};
use protocol::{Batch, StepTiming};
use std::time::Duration;

/// Smallest number of tokens of a prompt in `prompt_batches`.
const PROMPT_TOKENS_MIN: u32 = 32;
/// Number of tokens of the shortest row whose gated delta rule is computed in chunks.
const SHORT_PROMPT_TOKENS: u32 = GatedDeltaRule::RECURRENT_TOKENS as u32 + 1;

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

/// Returns the row lengths of steps with a prompt alone, and with as many decode rows as possible before it, and of a step with
/// as many short prompts as possible. The kernels of linear layers and experts depend on the number of tokens, for which two
/// values per power of two are used; the kernel of the gated delta rule depends on the number of prompts. The largest step has
/// `tokens_max` tokens, and steps have at most `rows_max` rows.
pub(crate) fn prompt_batches(tokens_max: u32, rows_max: u32) -> Vec<Vec<u32>> {
    let powers = (PROMPT_TOKENS_MIN.ilog2()..u32::BITS).map(|exponent| 1 << exponent);
    let counts = powers.flat_map(|tokens: u32| [tokens, tokens + tokens / 2]);
    let counts = counts.take_while(|&tokens| tokens < tokens_max).chain([tokens_max]);
    let batches = counts.flat_map(|tokens| {
        // A prompt of fewer tokens could be a row of draft tokens.
        let decodes = rows_max.saturating_sub(1).min(tokens.saturating_sub(PROMPT_TOKENS_MIN));
        let mut mixed = vec![1; decodes as usize];
        mixed.push(tokens - decodes);
        [vec![tokens], mixed]
    });
    let prompts = rows_max.min(tokens_max / SHORT_PROMPT_TOKENS);
    batches.chain((prompts > 0).then(|| vec![SHORT_PROMPT_TOKENS; prompts as usize])).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_batches_reach_the_largest_step_with_all_rows() {
        let batches = prompt_batches(100, 8);
        let tokens: Vec<u32> = batches.iter().map(|lens| lens.iter().sum()).collect();
        assert_eq!(tokens, [32, 32, 48, 48, 64, 64, 96, 96, 100, 100, 90]);
        assert_eq!(batches[10], [18; 5]);
        assert_eq!(batches[0], [32]);
        assert_eq!(batches[1], [32], "no decode rows");
        assert_eq!(batches[3], [1, 1, 1, 1, 1, 1, 1, 41]);
        assert_eq!(batches[9], [1, 1, 1, 1, 1, 1, 1, 93]);
        assert_eq!(prompt_batches(16, 8), [[16], [16]]);
    }
}
