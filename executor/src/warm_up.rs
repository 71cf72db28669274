//! The first forward passes: they fill the arena to its high-water mark and measure the device.

use crate::{ExecutorConfig, ExecutorError};
use protocol::{
    Batch, BlockId, Bucket, Epoch, Input, RequestId, Row, Sampling, Seat, SeatInit, StepId,
    StepOutput, TableUpdate,
};
use std::time::Instant;

/// More tokens would only lengthen the start where memory is not divided by what they show.
const TOKENS_MAX: u32 = 512;

/// Lengths of the rows of each pass: the largest prefill, the widest decode, and a single row.
pub(crate) fn passes(
    config: &ExecutorConfig,
    rows_per_slice: usize,
    whole_budget: bool,
) -> [Vec<u32>; 3] {
    let seats = config.max_num_seqs;
    let all = u64::from(seats) * u64::from(config.max_model_len);
    let most = if whole_budget { u32::MAX } else { TOKENS_MAX };
    let tokens = all.min(u64::from(config.tokens_per_step.min(most))) as u32;
    let whole = tokens / config.max_model_len;
    let rest = tokens % config.max_model_len;
    let mut prefill = vec![config.max_model_len; whole as usize];
    prefill.extend((rest > 0).then_some(rest));
    let decodes = seats.min(tokens).min(rows_per_slice as u32);
    [prefill, vec![1; decodes as usize], vec![1]]
}

/// Blocks that the largest pass takes.
pub(crate) fn blocks(passes: &[Vec<u32>], block_tokens: u32) -> u32 {
    let of_pass = |rows: &Vec<u32>| rows.iter().map(|len| len.div_ceil(block_tokens)).sum();
    passes.iter().map(of_pass).max().unwrap_or(0)
}

/// Runs each pass through `step` and returns nanoseconds per token of the slowest one.
pub(crate) fn measure(
    passes: &[Vec<u32>],
    block_tokens: u32,
    mut step: impl FnMut(&Batch) -> Result<StepOutput, ExecutorError>,
    mut done: impl FnMut(u64),
) -> Result<u64, ExecutorError> {
    let mut slowest = 0;
    for (i, lens) in (0..).zip(passes) {
        let batch = batch(lens, block_tokens, StepId(i + 1));
        let started = Instant::now();
        step(&batch)?;
        let tokens: u32 = lens.iter().sum();
        let ns = started.elapsed().as_nanos() as u64;
        slowest = slowest.max(ns / u64::from(tokens.max(1)));
        done(i + 1);
    }
    Ok(slowest)
}

/// One row per length, every row sampling by all rules that cost time.
fn batch(lens: &[u32], block_tokens: u32, step: StepId) -> Batch {
    let sampling =
        Sampling { temperature: 1.0, top_p: 0.9, logprobs: Some(1), ..Sampling::greedy() };
    let mut next_block = 0;
    let row = |(seat, &len): (u32, &u32)| {
        let end = next_block + len.div_ceil(block_tokens);
        let blocks = (next_block..end).map(BlockId).collect();
        next_block = end;
        let key = u64::from(seat);
        let init = SeatInit { sampling: sampling.clone(), key, prompt_len: len, history: vec![] };
        Row {
            request: RequestId(key),
            epoch: step.0 as u32,
            seat: Seat(seat),
            start: 0,
            len,
            drafts: 0,
            samples: true,
            input: Input::Tokens(vec![0; len as usize].into()),
            tables: vec![TableUpdate { group: 0, from: 0, blocks }].into(),
            next: None,
            init: Some(Box::new(init)),
        }
    };
    let rows = (0..).zip(lens).map(row).collect();
    let bucket = Bucket::Eager { tokens: lens.iter().sum() };
    Batch { step, epoch: Epoch::default(), bucket, moe_tokens: 0, rows }
}
