//! Carries out a plan: moves requests and blocks, and writes the batch.
//!
//! The order matters. Victims first, then the prefix hits of *all* admissions are pinned, then
//! fresh blocks are taken: an allocation must not evict a hit of the same plan.

use crate::FirstRun;
use crate::plan::{Admission, Plan, PlannedRow};
use crate::publish::publish;
use crate::request::{PREEMPTIONS_MAX, Request};
use crate::state::{Flight, FlightRow, State};
use crate::stats::Requeue;
use kvcache::{Bug, KvCache, Planted};
use protocol::{BlockId, Input, Row, SeatInit, StepId, TableUpdate, ThinVec, Tokens};

/// Carries out `plan` but for its rows, which `launch` writes.
pub(crate) fn commit(state: &mut State, kv: &mut KvCache, plan: &Plan, now_ms: u64) {
    preempt(state, kv, plan);
    if state.planted.has(Bug::TakeBeforeClaim) {
        grow(state, kv, &plan.rows);
        for_each_admission(plan, |admission, found| {
            claim(state, kv, admission, found);
            take(state, kv, admission);
        });
    } else {
        for_each_admission(plan, |admission, found| claim(state, kv, admission, found));
        grow(state, kv, &plan.rows);
        for_each_admission(plan, |admission, _| take(state, kv, admission));
    }
    admit(state, kv, plan, now_ms);
    if !plan.admit.is_empty() {
        state.blocked = None;
    } else if plan.blocked.is_some() {
        state.blocked = plan.blocked;
    }
}

fn preempt(state: &mut State, kv: &mut KvCache, plan: &Plan) {
    for &slot in &plan.preempt {
        let request = &mut state.requests[slot];
        request.preemptions = request.preemptions.saturating_add(1);
        let guarded = request.preemptions >= PREEMPTIONS_MAX;
        request.guarded = guarded && !state.planted.has(Bug::NeverGuarded);
        state.running.remove(request.cold.key);
        state.requeue(slot, kv, Requeue::Preemption);
        state.totals.preemptions += 1;
    }
}

/// Calls `f` with each admission and the blocks of its prefix hit.
fn for_each_admission(plan: &Plan, mut f: impl FnMut(Admission, &[BlockId])) {
    let mut hits = plan.hits.as_slice();
    for &admission in &plan.admit {
        let (found, rest) = hits.split_at(admission.hits as usize);
        f(admission, found);
        hits = rest;
    }
}

/// Pins the prefix hit of an admission.
fn claim(state: &mut State, kv: &mut KvCache, admission: Admission, found: &[BlockId]) {
    let table = state.spare_table();
    state.requests[admission.slot].claim(table, found, kv);
}

/// Takes the blocks an admission needs beside its hit.
fn take(state: &mut State, kv: &mut KvCache, admission: Admission) {
    let request = &mut state.requests[admission.slot];
    request.grow(kv.blocks_for(request.len) - admission.hits, kv);
}

/// Takes blocks for the growth of running requests; guarded ones draw on what was set aside.
fn grow(state: &mut State, kv: &mut KvCache, rows: &[PlannedRow]) {
    for row in rows.iter().filter(|row| row.grow > 0) {
        let request = &mut state.requests[row.slot];
        let own = row.grow.min(request.reserved);
        request.reserved -= own;
        state.reserved -= own;
        request.grow(row.grow, kv);
    }
}

/// Moves admitted requests to the running line: they hold their blocks and get a seat.
fn admit(state: &mut State, kv: &KvCache, plan: &Plan, now_ms: u64) {
    for &Admission { slot, hits, reserve } in &plan.admit {
        let seat = state.take_seat();
        let request = &mut state.requests[slot];
        let cached = hits * kv.block_tokens();
        request.seat = Some(seat);
        request.reserved = reserve;
        (request.computed, request.settled, request.published) = (cached, cached, hits);
        request.publishing = kv.is_caching();
        let cold = &mut *request.cold;
        if cold.asked.first_run.is_none() {
            let queued_ms = now_ms.saturating_sub(cold.asked.submitted_ms) as u32;
            let cached_tokens = cached.min(cold.prompt_len);
            cold.asked.first_run =
                Some(FirstRun { replica: state.replica, cached_tokens, queued_ms });
            state.totals.prompt_tokens += u64::from(cold.prompt_len);
            state.totals.prompt_tokens_cached += u64::from(cached_tokens);
        }
        if let Some((why, computed)) = cold.asked.setback.take() {
            state.totals.recomputed_tokens.add(why, computed.saturating_sub(cached));
        }
        if kv.is_caching() {
            state.totals.prefix_queries += u64::from(request.len);
            state.totals.prefix_hits += u64::from(cached);
        }
        state.reserved += reserve;
        state.waiting_tokens -= u64::from(request.len);
        let key = cold.key;
        state.waiting.remove(key);
        state.running.insert(key, slot);
    }
}

/// Writes the rows of the batch and advances the cursors. A step is in flight afterwards, also one
/// without rows.
pub(crate) fn launch(
    state: &mut State,
    kv: &mut KvCache,
    planned: &[PlannedRow],
    histories: bool,
) -> Vec<Row> {
    let step = state.step.next();
    let mut flying = state.spare_rows();
    flying.reserve(planned.len());
    let rows = planned.iter().map(|plan| {
        let request = &mut state.requests[plan.slot];
        let covered = u64::from(request.blocks) * u64::from(kv.block_tokens());
        let end = u64::from(plan.start + plan.len) + u64::from(request.slack);
        let end = end + u64::from(plan.drafts);
        assert!(end <= covered, "{:?} writes up to {end}, its table covers {covered}", request.id);
        let samples = samples(request, plan, state.planted);
        flying.push(FlightRow {
            slot: plan.slot,
            request: request.id,
            epoch: request.epoch,
            len: plan.len,
            drafts: plan.drafts,
            samples,
        });
        if state.planted.has(Bug::PublishBeforeCompute) {
            publish(request, kv, &state.hasher, request.len);
        }
        write_row(request, plan, (samples, step), histories, state.planted)
    });
    let rows = rows.collect();
    state.step = step;
    state.flights.push_back(Flight { step, rows: flying });
    rows
}

/// Whether the row samples.
fn samples(request: &Request, plan: &PlannedRow, planted: Planted) -> bool {
    let end = plan.start + plan.len;
    let at_prompt_end = planted.has(Bug::SampleAtPromptEnd) && request.preemptions > 0;
    request.samples_at(end) || (at_prompt_end && end == request.cold.prompt_len)
}

/// Writes one row of `step` and moves its request's cursors behind it.
///
/// The input comes last: nothing that may fail lies between it and its place in the batch, so it is
/// written straight there.
#[inline]
fn write_row(
    request: &mut Request,
    plan: &PlannedRow,
    (samples, step): (bool, StepId),
    histories: bool,
    planted: Planted,
) -> Row {
    assert_eq!(plan.start, request.computed, "{:?} was planned from elsewhere", request.id);
    let end = plan.start + plan.len;
    let sampled_at = request.sampled_at;
    let slack = if planted.has(Bug::SlackNotTold) { 0 } else { request.slack };
    request.rows_in_flight += 1;
    request.computed = end;
    request.drafted = samples;
    if samples {
        request.promised += 1;
        request.slack += u16::from(plan.drafts);
        let late = planted.has(Bug::SeatReadLate) && request.promised > 1;
        request.sampled_at = if late { sampled_at } else { step };
    }
    let init = std::mem::take(&mut request.fresh).then(|| Box::new(seat_init(request, histories)));
    let tables = table_updates(request);
    let seat = request.seat.expect("a running request has a seat");
    let next = (end < request.len).then(|| request.tokens()[end as usize]);
    let input = if plan.start + 1 == request.len {
        Input::Tokens(Tokens::one(request.last()))
    } else if end <= request.len {
        request.gather();
        Input::Tokens(request.tokens()[plan.start as usize..end as usize].into())
    } else {
        assert_eq!(plan.len, 1, "only the last known token can still be on the device");
        Input::SampledAt { step: sampled_at, slack }
    };
    Row {
        request: request.id,
        epoch: request.epoch,
        seat,
        start: plan.start,
        len: plan.len,
        drafts: plan.drafts,
        samples,
        masked: samples && request.masking.is_on(),
        input,
        tables,
        next,
        init,
    }
}

/// What the seat does not know of the table yet.
fn table_updates(request: &mut Request) -> ThinVec<TableUpdate> {
    let from = request.sent;
    if from >= request.blocks {
        return ThinVec::new();
    }
    request.sent = request.blocks;
    let blocks = request.cold.table.blocks()[from as usize..].into();
    ThinVec::from([TableUpdate { group: 0, from, blocks }])
}

fn seat_init(request: &mut Request, histories: bool) -> SeatInit {
    request.gather();
    let asked = &request.cold.asked;
    let reads = histories || asked.sampling.reads_history();
    let history = if reads { request.tokens() } else { &[] };
    SeatInit {
        sampling: asked.sampling.clone(),
        key: asked.key,
        prompt_len: request.cold.prompt_len,
        history: history.to_vec(),
    }
}
