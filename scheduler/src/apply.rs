//! Applies the output of a step: commits sampled tokens, registers full blocks in the prefix cache and
//! finishes requests.
//!
//! If a request finished or was preempted after the step was sent, the step's result for this request is
//! dropped. An output that does not belong to the oldest step in flight is dropped completely and counted.

use crate::publish::publish_full_blocks;
use crate::request::Request;
use crate::scheduling_state::{ReplicaCounters, ReplicaRequests, ScheduledRow};
use crate::slab::SlabSlot;
use crate::{
    FinishReason, RequestError, SchedulerLimits, StopReason, TokenEvent, VerifiedDraftCounts,
};
use kvcache::{KvCache, WindowCheckpoints};
use protocol::{PromptResults, RowError, RowOutput, StepOutput, Token, TokenLogprobs};
use std::mem::take;

/// Distance of the positions at which the windows of running requests stay cached until they are evicted in
/// order of use.
const WINDOW_CHECKPOINT_TOKENS: u32 = 8192;

/// Applies `output`, which must belong to the oldest step in flight. Token events are appended to `events`,
/// and the slab slots (indices of stored requests) of finished requests to `finished`.
pub(crate) fn apply(
    state: &mut ReplicaRequests,
    kv: &mut KvCache,
    limits: &SchedulerLimits,
    mut output: StepOutput,
    events: &mut Vec<TokenEvent>,
    finished: &mut Vec<SlabSlot>,
) {
    let expected =
        state.steps_in_flight.front().map(|scheduled| (scheduled.step, scheduled.rows.len()));
    if expected != Some((output.step, output.rows.len())) {
        state.totals.outputs_dropped += 1;
        return;
    }
    let Some(scheduled) = state.steps_in_flight.pop_front() else { return };
    state.totals.steps += 1;
    let first_finished = finished.len();
    for (row, result) in scheduled.rows.iter().zip(&mut output.rows) {
        let live = |r: &&mut Request| r.id == row.request && r.epoch == row.epoch;
        let Some(request) = state.requests.get_mut(row.slot).filter(live) else {
            state.totals.rows_dropped += 1;
            continue;
        };
        let len_before = request.len;
        let row_result = ScheduledRowOutput { row, output: result };
        let totals = &mut state.totals;
        let finish = apply_row(request, kv, &state.hasher, limits, row_result, totals, events);
        state.totals.generated_tokens += u64::from(request.len - len_before);
        if finish {
            finished.push(row.slot);
        } else {
            state.reserved_blocks += release_before_window(request, kv, limits);
        }
    }
    state.recycle_rows(scheduled.rows);
    for &slot in &finished[first_finished..] {
        state.release(slot, kv);
    }
}

/// Releases the blocks of window groups that no later row of `request` reads. Returns the number of blocks by
/// which the reserve of the request grew: a non-preemptible request keeps the number of blocks that it holds and
/// reserves.
fn release_before_window(request: &mut Request, kv: &mut KvCache, limits: &SchedulerLimits) -> u32 {
    if kv.group_counts().windowed == 0 {
        return 0;
    }
    let returns_to_reserve = request.owns_windows(kv);
    let cold = &mut *request.cold_fields;
    let size = kv.block_tokens();
    let state_interval = limits.checkpoint_interval(size);
    let interval = if !kv.states().is_empty() && state_interval > 0 {
        state_interval
    } else {
        WINDOW_CHECKPOINT_TOKENS.next_multiple_of(size)
    };
    let checkpoints = WindowCheckpoints {
        prompt_end: (cold.prompt_len - 1) / size * size,
        hit_end: cold.windows.hit_end,
        interval,
    };
    let tables = &mut cold.block_tables;
    let available = kv.release_before_window(tables, request.committed_kv_len, checkpoints);
    let reserved = if returns_to_reserve { available } else { 0 };
    request.reserved_blocks += reserved;
    reserved
}

/// A batch row as it was scheduled, and the output that the executor returned for it.
struct ScheduledRowOutput<'a> {
    row: &'a ScheduledRow,
    output: &'a mut RowOutput,
}

/// Applies the result of one batch row, and moves its logprobs into an event. Returns whether the request
/// finished.
fn apply_row(
    request: &mut Request,
    kv: &mut KvCache,
    hasher: &kvcache::BlockHasher,
    limits: &SchedulerLimits,
    row_result: ScheduledRowOutput<'_>,
    totals: &mut ReplicaCounters,
    events: &mut Vec<TokenEvent>,
) -> bool {
    let ScheduledRowOutput { row, output: result } = row_result;
    request.rows_in_flight -= 1;
    if row.samples {
        request.pending_samples -= 1;
        request.draft_slack -= u16::from(row.drafts);
    }
    let mask_overdue = is_mask_overdue(request, row, result);
    if let Some(code) = row_error(row, result, limits.vocab_size).filter(|_| !mask_overdue) {
        request.push_event(events).finish_reason = Some(FinishReason::Error(code));
        return true;
    }
    // Draft tokens that were accepted in earlier steps shift the start of this row, so the start is read from
    // the committed KV length and not from the plan.
    let start = request.committed_kv_len;
    totals.drafts.add(result.drafted, result.accepted);
    request.computed_tokens += u32::from(result.accepted);
    request.committed_kv_len += row.len + u32::from(result.accepted);
    if mask_overdue {
        recompute_last_token(request);
    }
    let (committed, finish) = commit_tokens(request, &result.sampled_tokens);
    publish_full_blocks(request, kv, hasher, request.committed_kv_len);
    request.settle_state_slots(kv);
    let prompt = take(&mut result.prompt).map(|mut prompt| {
        keep_undelivered_logprobs(request, start, &mut prompt.logprobs);
        prompt
    });
    let has_prompt_results = prompt.as_ref().is_some_and(|prompt| !prompt.logprobs.is_empty());
    if committed == 0 && !has_prompt_results && finish.is_none() {
        return false;
    }
    result.logprobs.truncate(committed);
    let finish = finish.map(|finish| checked_finish(request, prompt.as_deref(), finish));
    let event = request.push_event(events);
    event.tokens.extend(result.sampled_tokens[..committed].iter().copied());
    event.logprobs = take(&mut result.logprobs);
    event.prompt = prompt;
    event.drafts = VerifiedDraftCounts { drafted: result.drafted, accepted: result.accepted };
    let is_finished = finish.is_some();
    if is_finished {
        event.finish_reason = finish;
    }
    is_finished
}

/// Returns whether the row ran its forward pass but did not sample because its grammar bitmask was overdue.
fn is_mask_overdue(request: &Request, row: &ScheduledRow, result: &RowOutput) -> bool {
    let no_output = result.sampled_tokens.is_empty() && (result.drafted, result.accepted) == (0, 0);
    result.error == Some(RowError::MaskOverdue)
        && row.samples
        && no_output
        && request.mask_state.is_masked()
}

/// Marks the last token of the row as uncomputed, so that a later row forwards it again and samples when the
/// grammar bitmask is ready. No later row of the request is in flight, because requests with a grammar wait
/// for each token before the next row is sent.
fn recompute_last_token(request: &mut Request) {
    request.mask_state.on_overdue();
    request.computed_tokens -= 1;
    request.committed_kv_len -= 1;
}

/// Returns why the row result is unusable: a row error, a wrong number of tokens, or a token id out of range.
/// Returns `None` if the result is valid.
fn row_error(row: &ScheduledRow, result: &RowOutput, vocab_size: u32) -> Option<RequestError> {
    if let Some(error) = result.error {
        return Some(RequestError::RowFailed(error));
    }
    let expected = if row.samples { usize::from(result.accepted) + 1 } else { 0 };
    let valid = result.sampled_tokens.len() == expected
        && result.accepted <= result.drafted
        && result.drafted <= row.drafts
        && result.sampled_tokens.iter().all(|&token| token < vocab_size);
    (!valid).then_some(RequestError::BadOutput)
}

/// Commits the emitted tokens in order, up to and including the first token that finishes the request.
/// Returns the number of committed tokens and the finish reason.
fn commit_tokens(request: &mut Request, emitted: &[Token]) -> (usize, Option<FinishReason>) {
    if !emitted.is_empty() {
        request.mask_state.on_row_committed();
    }
    for (i, &token) in emitted.iter().enumerate() {
        request.commit(token);
        let stop = request.stop_reason(token).map(FinishReason::Stop);
        let full = || (request.len >= request.limit).then_some(FinishReason::Length);
        let finish = stop.or_else(full);
        if finish.is_some() {
            return (i + 1, finish);
        }
    }
    // A request without output tokens (`max_tokens` 0) finishes when its whole prompt is computed. Any other
    // request finishes when the token at its length limit is sampled; this token is not forwarded.
    let scored = request.committed_kv_len >= request.limit;
    (emitted.len(), scored.then_some(FinishReason::Length))
}

/// Returns the finish reason of a request that is about to finish. For a pooling request, the reason is
/// `stop`, as in vLLM, or an error if the pooling result is missing.
fn checked_finish(
    request: &Request,
    prompt: Option<&PromptResults>,
    finish: FinishReason,
) -> FinishReason {
    let is_pooled = prompt.is_some_and(|prompt| !prompt.pooled.is_empty());
    match &request.cold_fields.params.sampling.pooling {
        Some(_) if !is_pooled => FinishReason::Error(RequestError::BadOutput),
        Some(_) => FinishReason::Stop(StopReason::Pooled),
        None => finish,
    }
}

/// Keeps in `entries` only the prompt logprobs that have not been delivered: after a preemption, rows
/// recompute positions whose logprobs were delivered. The row starts at position `start`, so `entries[0]`
/// belongs to position `start + 1`.
fn keep_undelivered_logprobs(request: &mut Request, start: u32, entries: &mut Vec<TokenLogprobs>) {
    let cold = &mut request.cold_fields;
    let prompt_entries = (cold.prompt_len - 1).saturating_sub(start) as usize;
    let delivered = cold.prompt_logprobs_sent.saturating_sub(start + 1) as usize;
    entries.truncate(prompt_entries);
    entries.drain(..delivered.min(entries.len()));
    cold.prompt_logprobs_sent += entries.len() as u32;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RequestSubmission, SchedulerConfig};
    use kvcache::KvConfig;
    use protocol::{KvGroup, KvKind, KvSpec, TokenVec};
    use std::ops::Range;

    fn request(prompt: u32) -> Request {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let config =
            SchedulerConfig::new(SchedulerLimits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
        let submit = RequestSubmission::greedy(1, (0..prompt).collect(), &config.kv.block_hasher());
        Request::new(RequestSubmission { first_masked_token: Some(0), ..submit }, 0, 0, &config)
    }

    #[test]
    fn mask_is_overdue_for_sampling_row_without_output() {
        let request = request(9);
        let row = |samples| ScheduledRow {
            slot: SlabSlot(0),
            request: request.id,
            epoch: 0,
            len: 9,
            drafts: 2,
            samples,
        };
        let mask_overdue = RowOutput { error: Some(RowError::MaskOverdue), ..RowOutput::default() };
        assert!(is_mask_overdue(&request, &row(true), &mask_overdue));
        assert!(!is_mask_overdue(&request, &row(false), &mask_overdue));
        assert!(!is_mask_overdue(&request, &row(true), &RowOutput::default()));
        for output in [
            RowOutput { drafted: 1, ..mask_overdue.clone() },
            RowOutput { accepted: 1, ..mask_overdue.clone() },
            RowOutput { sampled_tokens: TokenVec::one(7), ..mask_overdue.clone() },
        ] {
            assert!(!is_mask_overdue(&request, &row(true), &output), "{output:?}");
        }
    }

    /// Checks `keep_undelivered_logprobs` for rows that recompute positions whose logprobs were delivered,
    /// and for a row that extends past the prompt.
    #[test]
    fn prompt_logprobs_are_delivered_once() {
        let mut request = request(9);
        let entries = |positions: Range<u32>| -> Vec<TokenLogprobs> {
            let token_logprobs =
                |token| TokenLogprobs { token, logprob: -1.0, rank: 1, top_logprobs: Vec::new() };
            positions.map(token_logprobs).collect()
        };
        let mut deliver = |start, end| -> Vec<Token> {
            let mut undelivered = entries(start + 1..end);
            keep_undelivered_logprobs(&mut request, start, &mut undelivered);
            undelivered.iter().map(|entry| entry.token).collect()
        };
        assert_eq!(deliver(0, 5), [1, 2, 3, 4]);
        assert_eq!(deliver(2, 12), [5, 6, 7, 8]);
        assert!(deliver(0, 9).is_empty());
    }
}
