//! Warm-up passes: they allocate the arena memory of the largest steps and measure the cost of a step.

use crate::ExecutorError;
use protocol::{
    Batch, BatchRow, BlockId, BlockTableUpdate, Epoch, ExecutorSettings, KvSpec, RequestId,
    RowInput, SamplingParams, SequenceInit, SequenceSlot, StateSlot, StateSlotAccess, StepCost,
    StepId, StepLaunchMode, StepOutput, ThinVec,
};
use std::time::Instant;

/// Maximum number of tokens of a warm-up pass on the CPU. On the CPU, the size of the KV cache does not
/// depend on the memory use of the passes, so longer passes would only delay the start.
const TOKENS_MAX: u32 = 512;

/// Returns the row lengths of three passes: the largest prefill, the decode step with the most rows, and a
/// single one-token row.
pub(crate) fn warm_up_passes(
    settings: &ExecutorSettings,
    rows_per_slice: usize,
    full_budget: bool,
) -> [Vec<u32>; 3] {
    let max_num_seqs = settings.max_num_seqs;
    let all = u64::from(max_num_seqs) * u64::from(settings.max_model_len);
    let max_tokens = if full_budget { u32::MAX } else { TOKENS_MAX };
    let tokens = all.min(u64::from(settings.tokens_per_step.min(max_tokens))) as u32;
    let full_rows = tokens / settings.max_model_len;
    let remainder = tokens % settings.max_model_len;
    let mut prefill = vec![settings.max_model_len; full_rows as usize];
    prefill.extend((remainder > 0).then_some(remainder));
    let decodes = max_num_seqs.min(tokens).min(rows_per_slice as u32);
    [prefill, vec![1; decodes as usize], vec![1]]
}

/// Number of KV blocks that the largest pass needs, in all KV groups together.
pub(crate) fn blocks(passes: &[Vec<u32>], spec: &KvSpec) -> u32 {
    let of_row = |len: &u32| len.div_ceil(spec.block_tokens) * block_groups(spec);
    passes.iter().map(|rows| rows.iter().map(of_row).sum()).max().unwrap_or(0)
}

/// Number of KV groups that have blocks; state groups, which have none, follow them.
fn block_groups(spec: &KvSpec) -> u32 {
    spec.groups.iter().filter(|group| !group.kind.is_state()).count() as u32
}

/// Runs each pass with `step` and fits the step cost model to the measured times. The first run of a pass may
/// autotune kernels and fill caches; if `measure_second_run` is true, each pass runs twice and the second run
/// is measured.
pub(crate) fn measure(
    passes: &[Vec<u32>],
    spec: &KvSpec,
    measure_second_run: bool,
    mut step: impl FnMut(&Batch) -> Result<StepOutput, ExecutorError>,
    mut done: impl FnMut(u64),
) -> Result<StepCost, ExecutorError> {
    let mut measured = Vec::new();
    let mut id = StepId(0);
    for (i, lens) in (1..).zip(passes) {
        let mut ns = 0;
        for _ in 0..=u32::from(measure_second_run) {
            id = id.next();
            let batch = batch(lens, spec, id);
            let started = Instant::now();
            step(&batch)?;
            ns = started.elapsed().as_nanos() as u64;
        }
        measured.push(WarmUpPass { tokens: lens.iter().sum(), ns });
        done(i);
    }
    Ok(fit_step_cost(&measured))
}

/// Number of tokens and time of a measured pass.
#[derive(Debug, Clone, Copy)]
struct WarmUpPass {
    tokens: u32,
    ns: u64,
}

/// Fits step time as a linear function of the number of tokens: a line through the measured passes with the
/// fewest and the most tokens, raised so that no measured pass took longer than the line predicts.
fn fit_step_cost(measured: &[WarmUpPass]) -> StepCost {
    let tokens = |pass: &&WarmUpPass| pass.tokens;
    let (smallest, largest) =
        (measured.iter().min_by_key(tokens), measured.iter().max_by_key(tokens));
    let per_token_ns = smallest.zip(largest).map_or(0, |(smallest, largest)| {
        let tokens = u64::from((largest.tokens - smallest.tokens).max(1));
        largest.ns.saturating_sub(smallest.ns) / tokens
    });
    let fixed = |pass: &WarmUpPass| pass.ns.saturating_sub(per_token_ns * u64::from(pass.tokens));
    StepCost { fixed_ns: measured.iter().map(fixed).max().unwrap_or(0), per_token_ns }
}

/// State slots of a row that starts a sequence: each row writes a slot of its own.
fn state_slots(spec: &KvSpec, seq_slot: u32) -> ThinVec<StateSlotAccess> {
    let groups = (0..).zip(&spec.groups).filter(|(_, group)| group.kind.is_state());
    let write = StateSlot(seq_slot);
    groups.map(|(group, _)| StateSlotAccess { group, read: None, write }).collect()
}

/// Returns a batch with one row for each length in `lens`. Every row samples with temperature, top-p and
/// log-probabilities, so that the measured cost includes them.
fn batch(lens: &[u32], spec: &KvSpec, step: StepId) -> Batch {
    let sampling = SamplingParams {
        temperature: 1.0,
        top_p: 0.9,
        logprobs: Some(1),
        ..SamplingParams::greedy()
    };
    let mut next_block = 0;
    let row = |(seq_slot, &len): (u32, &u32)| {
        let mut table = |group: u8| {
            let end = next_block + len.div_ceil(spec.block_tokens);
            let blocks = (next_block..end).map(BlockId).collect();
            next_block = end;
            BlockTableUpdate { group, first_entry: 0, blocks }
        };
        let table_updates: ThinVec<_> = (0..block_groups(spec) as u8).map(&mut table).collect();
        let key = u64::from(seq_slot);
        let init = SequenceInit {
            sampling: sampling.clone(),
            rng_key: key,
            prompt_len: len,
            token_history: vec![],
        };
        BatchRow {
            request: RequestId(key),
            epoch: step.0 as u32,
            seq_slot: SequenceSlot(seq_slot),
            start: 0,
            len,
            drafts: 0,
            samples: true,
            masked: false,
            input: RowInput::Tokens(vec![0; len as usize].into()),
            table_updates,
            state_slots: state_slots(spec, seq_slot),
            next_token: None,
            seq_init: Some(Box::new(init)),
        }
    };
    let rows = (0..).zip(lens).map(row).collect();
    let tokens = lens.iter().sum();
    let dispatch = StepLaunchMode::Eager { tokens };
    // All replicas run the same warm-up passes, so the maximum number of tokens over all replicas is the
    // number of tokens of this replica.
    Batch { step, epoch: Epoch::default(), dispatch, moe_tokens: tokens, draft_rows: 0, rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_cost_covers_every_pass() {
        // The line is 2 ms plus 0.01 ms per token; the decode pass of 512 rows takes 4 ms more.
        let pass = |tokens, ns| WarmUpPass { tokens, ns };
        let passes = [pass(8192, 83_920_000), pass(512, 11_120_000), pass(1, 2_010_000)];
        let step_cost = fit_step_cost(&passes);
        assert_eq!(step_cost, StepCost { fixed_ns: 6_000_000, per_token_ns: 10_000 });
        // If the pass with the fewest tokens is slower than the pass with the most tokens, the cost per token
        // is 0.
        assert_eq!(
            fit_step_cost(&[pass(64, 5_000), pass(1, 9_000)]),
            StepCost { fixed_ns: 9_000, per_token_ns: 0 }
        );
        assert_eq!(fit_step_cost(&[pass(1, 700)]), StepCost { fixed_ns: 700, per_token_ns: 0 });
    }
}
