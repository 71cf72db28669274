//! Takes in what a step brought: commits tokens, publishes blocks, ends requests.
//!
//! Results of requests that ended, or that were preempted since, are dropped. An output that is
//! not the answer to the oldest step in flight is dropped as a whole and counted.

use crate::publish::publish;
use crate::request::Request;
use crate::slab::Slot;
use crate::state::{FlightRow, State, Totals};
use crate::{ErrorCode, Finish, Limits, TokenEvent};
use kvcache::{Bug, KvCache, Planted};
use protocol::{RowError, RowOutput, StepOutput, ThinVec, Token, TokenLogprobs};
use std::mem::take;

/// Applies the answer to the oldest step in flight; events of its requests are appended to `events`,
/// requests that ended to `ended`.
pub(crate) fn apply(
    state: &mut State,
    kv: &mut KvCache,
    limits: &Limits,
    mut output: StepOutput,
    events: &mut Vec<TokenEvent>,
    ended: &mut Vec<Slot>,
) {
    let expected = state.flights.front().map(|flight| (flight.step, flight.rows.len()));
    let repeated = state.planted.has(Bug::RepeatedOutputApplied)
        && expected.is_some_and(|(_, rows)| rows == output.rows.len());
    if expected != Some((output.step, output.rows.len())) && !repeated {
        state.totals.outputs_dropped += 1;
        return;
    }
    let Some(flight) = state.flights.pop_front() else { return };
    state.totals.steps += 1;
    let first_ended = ended.len();
    for (row, result) in flight.rows.iter().zip(&mut output.rows) {
        let stale = state.planted.has(Bug::StaleEpochAccepted);
        let live = |r: &&mut Request| r.id == row.request && (r.epoch == row.epoch || stale);
        let Some(request) = state.requests.get_mut(row.slot).filter(live) else {
            state.totals.rows_dropped += 1;
            continue;
        };
        let known = request.len;
        let (totals, row_result) = (&mut state.totals, (row, result));
        let finish = apply_row(request, kv, &state.hasher, limits, row_result, totals, events);
        state.totals.generated_tokens += u64::from(request.len - known);
        if finish {
            ended.push(row.slot);
        }
    }
    state.recycle_rows(flight.rows);
    for &slot in &ended[first_ended..] {
        state.release(slot, kv);
    }
}

/// Applies one row, and takes out of it what goes to the user; whether its request ended.
fn apply_row(
    request: &mut Request,
    kv: &mut KvCache,
    hasher: &kvcache::Hasher,
    limits: &Limits,
    (row, result): (&FlightRow, &mut RowOutput),
    totals: &mut Totals,
    events: &mut Vec<TokenEvent>,
) -> bool {
    request.rows_in_flight -= 1;
    if row.samples {
        request.promised -= 1;
        request.slack -= u16::from(row.drafts);
    }
    let late = is_late(request, row, result);
    if let Some(code) = fault(row, result, limits.vocab_size).filter(|_| !late) {
        if kv.planted().has(Bug::ErrorRowPublished) {
            publish(request, kv, hasher, request.settled + row.len);
        }
        request.tell(events).finish = Some(Finish::Error(code));
        return true;
    }
    // Drafts accepted earlier have moved the row: its true start is what was settled before it.
    let start = request.settled;
    totals.drafts.add(result.drafted, result.accepted);
    request.computed += u32::from(result.accepted);
    let all_settle = kv.planted().has(Bug::RejectedDraftsSettle);
    let drafts = if all_settle { row.drafts } else { result.accepted };
    request.settled += row.len + u32::from(drafts);
    if late {
        forward_again(request);
    }
    let (taken, finish) = append(request, &result.emitted, kv.planted());
    publish(request, kv, hasher, request.settled);
    let prompt_logprobs = unseen_prompt_logprobs(request, start, take(&mut result.prompt_logprobs));
    if taken == 0 && prompt_logprobs.is_empty() && finish.is_none() {
        return false;
    }
    result.logprobs.truncate(taken);
    let event = request.tell(events);
    event.tokens.extend(result.emitted[..taken].iter().copied());
    event.logprobs = take(&mut result.logprobs);
    event.prompt_logprobs = prompt_logprobs;
    let ended = finish.is_some();
    if ended {
        event.finish = finish;
    }
    ended
}

/// Whether a row did all but sample, because its mask was late.
fn is_late(request: &Request, row: &FlightRow, result: &RowOutput) -> bool {
    let silent = result.emitted.is_empty() && (result.drafted, result.accepted) == (0, 0);
    result.error == Some(RowError::MaskLate) && row.samples && silent && request.masking.is_on()
}

/// Takes back the last token of a row that was to sample: it is forwarded again once its mask is there. Rows of
/// constrained requests wait for each other, so nothing was sent behind it.
fn forward_again(request: &mut Request) {
    request.masking.late();
    request.computed -= 1;
    request.settled -= 1;
}

/// Why a row's result cannot be used.
fn fault(row: &FlightRow, result: &RowOutput, vocab_size: u32) -> Option<ErrorCode> {
    if let Some(error) = result.error {
        return Some(ErrorCode::Row(error));
    }
    let expected = if row.samples { usize::from(result.accepted) + 1 } else { 0 };
    let right = result.emitted.len() == expected
        && result.accepted <= result.drafted
        && result.drafted <= row.drafts
        && result.emitted.iter().all(|&token| token < vocab_size);
    (!right).then_some(ErrorCode::BadOutput)
}

/// Commits emitted tokens up to the one that ends the request; how many these are.
fn append(request: &mut Request, emitted: &[Token], planted: Planted) -> (usize, Option<Finish>) {
    for (i, &token) in emitted.iter().enumerate() {
        request.commit(token);
        let stop = request.stop(token).map(Finish::Stop);
        let full = || (request.len >= request.limit).then_some(Finish::Length);
        let finish = stop.or_else(full);
        let runs_on = planted.has(Bug::StopAmongDraftsMissed) && i + 1 < emitted.len();
        if finish.is_some() && !runs_on {
            return (i + 1, finish);
        }
    }
    // Where a token may follow, the one that reaches the limit ends the request before it is forwarded.
    let scored = request.settled >= request.limit;
    (emitted.len(), scored.then_some(Finish::Length))
}

/// The part of a row's prompt log-probabilities that was not delivered before a preemption. The row
/// started at `start`, so its first entry is about position `start + 1`.
fn unseen_prompt_logprobs(
    request: &mut Request,
    start: u32,
    entries: ThinVec<TokenLogprobs>,
) -> ThinVec<TokenLogprobs> {
    if entries.is_empty() {
        return entries;
    }
    let cold = &mut request.cold;
    let in_prompt = (cold.prompt_len - 1).saturating_sub(start) as usize;
    let seen = cold.scored.saturating_sub(start + 1) as usize;
    let unseen: ThinVec<_> = entries.into_iter().take(in_prompt).skip(seen).collect();
    cold.scored += unseen.len() as u32;
    unseen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineConfig, Submit};
    use kvcache::KvConfig;
    use protocol::{KvGroup, KvKind, KvSpec, Tokens};
    use std::ops::Range;

    fn request(prompt: u32) -> Request {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let config = EngineConfig::new(Limits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
        let submit = Submit::greedy(1, (0..prompt).collect(), &config.kv.hasher());
        Request::new(Submit { masked_from: Some(0), ..submit }, 0, 0, &config)
    }

    #[test]
    fn a_mask_is_late_for_a_row_that_samples_and_said_nothing() {
        let request = request(9);
        let row = |samples| FlightRow {
            slot: Slot(0),
            request: request.id,
            epoch: 0,
            len: 9,
            drafts: 2,
            samples,
        };
        let late = RowOutput { error: Some(RowError::MaskLate), ..RowOutput::default() };
        assert!(is_late(&request, &row(true), &late));
        assert!(!is_late(&request, &row(false), &late));
        assert!(!is_late(&request, &row(true), &RowOutput::default()));
        for said in [
            RowOutput { drafted: 1, ..late.clone() },
            RowOutput { accepted: 1, ..late.clone() },
            RowOutput { emitted: Tokens::one(7), ..late.clone() },
        ] {
            assert!(!is_late(&request, &row(true), &said), "{said:?}");
        }
    }

    /// A row that recomputes more than was delivered, and goes on behind the prompt.
    #[test]
    fn scores_of_a_prompt_are_delivered_once_and_end_with_it() {
        let mut request = request(9);
        let entries = |positions: Range<u32>| -> ThinVec<TokenLogprobs> {
            let of = |token| TokenLogprobs { token, logprob: -1.0, rank: 1, top: Vec::new() };
            positions.map(of).collect()
        };
        let mut told = |start, end| -> Vec<Token> {
            let unseen = unseen_prompt_logprobs(&mut request, start, entries(start + 1..end));
            unseen.iter().map(|entry| entry.token).collect()
        };
        assert_eq!(told(0, 5), [1, 2, 3, 4]);
        assert_eq!(told(2, 12), [5, 6, 7, 8]);
        assert!(told(0, 9).is_empty());
    }
}
