//! Carries out a plan: moves requests and blocks, and writes the batch.
//!
//! The order matters. Victims first, then the prefix hits of *all* admissions are pinned, then
//! fresh blocks are taken: an allocation must not evict a hit of the same plan.

use crate::plan::{Admission, Plan, PlannedRow};
use crate::publish::publish;
use crate::request::{Admitted, PREEMPTIONS_MAX, Request};
use crate::state::{Flight, FlightRow, State};
use kvcache::{Bug, KvCache};
use protocol::{BlockId, Input, Row, SeatInit, TableUpdate, Tokens};

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
        request.preemptions += 1;
        let guarded = request.preemptions >= PREEMPTIONS_MAX;
        request.guarded = guarded && !state.planted.has(Bug::NeverGuarded);
        state.running.remove(request.key);
        state.requeue(slot, kv);
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
    let mut table = state.spare_table();
    kv.claim(&mut table, found);
    state.requests[admission.slot].table = table;
}

/// Takes the blocks an admission needs beside its hit.
fn take(state: &mut State, kv: &mut KvCache, admission: Admission) {
    let request = &mut state.requests[admission.slot];
    let blocks = kv.blocks_for(request.tokens.len() as u32) - admission.hits;
    kv.grow(&mut request.table, blocks);
}

/// Takes blocks for the growth of running requests; guarded ones draw on what was set aside.
fn grow(state: &mut State, kv: &mut KvCache, rows: &[PlannedRow]) {
    for row in rows.iter().filter(|row| row.grow > 0) {
        let request = &mut state.requests[row.slot];
        let own = row.grow.min(request.reserved);
        request.reserved -= own;
        state.reserved -= own;
        kv.grow(&mut request.table, row.grow);
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
        if request.asked.admitted.is_none() {
            request.asked.admitted = Some(Admitted { at_ms: now_ms, cached_tokens: cached });
            state.totals.prompt_tokens += u64::from(request.prompt_len);
        }
        if kv.is_caching() {
            state.totals.prefix_queries += request.tokens.len() as u64;
            state.totals.prefix_hits += u64::from(cached);
        }
        state.reserved += reserve;
        state.waiting_tokens -= request.tokens.len() as u64;
        let key = request.key;
        state.waiting.remove(key);
        state.running.insert(key, slot);
    }
}

/// Writes the rows of the batch and advances the cursors. A step is in flight afterwards, also one
/// without rows.
pub(crate) fn launch(state: &mut State, kv: &mut KvCache, planned: &[PlannedRow]) -> Vec<Row> {
    let step = state.step.next();
    let mut flying = state.spare_rows();
    let mut rows = Vec::with_capacity(planned.len());
    for plan in planned {
        let request = &mut state.requests[plan.slot];
        let row = write_row(request, plan, state.planted.has(Bug::SampleAtPromptEnd));
        let covered = u64::from(request.table.len()) * u64::from(kv.block_tokens());
        let end = u64::from(plan.start + request.slack + plan.len) + u64::from(plan.drafts);
        assert!(end <= covered, "{:?} writes up to {end}, its table covers {covered}", request.id);
        request.rows_in_flight += 1;
        request.computed += plan.len;
        request.drafted = row.samples;
        if row.samples {
            request.promised += 1;
            request.slack += u32::from(plan.drafts);
            request.sampled_at = step;
        }
        flying.push(FlightRow {
            slot: plan.slot,
            request: request.id,
            epoch: request.epoch,
            len: plan.len,
            drafts: plan.drafts,
            samples: row.samples,
        });
        rows.push(row);
        if state.planted.has(Bug::PublishBeforeCompute) {
            let known = request.tokens.len() as u32;
            publish(request, kv, &state.hasher, known);
        }
    }
    state.step = step;
    state.flights.push_back(Flight { step, rows: flying });
    rows
}

fn write_row(request: &mut Request, plan: &PlannedRow, sample_at_prompt_end: bool) -> Row {
    let (start, end) = (plan.start as usize, (plan.start + plan.len) as usize);
    assert_eq!(plan.start, request.computed, "{:?} was planned from elsewhere", request.id);
    let input = if start + 1 == request.tokens.len() {
        Input::Tokens(Tokens::one(request.last))
    } else if end <= request.tokens.len() {
        Input::Tokens(request.tokens[start..end].into())
    } else {
        assert_eq!(plan.len, 1, "only the last known token can still be on the device");
        Input::SampledAt(request.sampled_at)
    };
    let mut samples = request.samples_at(end as u32);
    if sample_at_prompt_end && request.preemptions > 0 {
        samples |= end as u32 == request.prompt_len;
    }
    let init = request.fresh.then(|| Box::new(seat_init(request)));
    request.fresh = false;
    Row {
        request: request.id,
        epoch: request.epoch,
        seat: request.seat.expect("a running request has a seat"),
        start: plan.start,
        len: plan.len,
        drafts: plan.drafts,
        samples,
        input,
        tables: table_updates(request),
        next: request.tokens.get(end).copied(),
        init,
    }
}

/// What the seat does not know of the table yet.
fn table_updates(request: &mut Request) -> Vec<TableUpdate> {
    let (from, len) = (request.sent, request.table.len());
    if from >= len {
        return Vec::new();
    }
    request.sent = len;
    let blocks = request.table.blocks()[from as usize..].to_vec();
    vec![TableUpdate { group: 0, from, blocks }]
}

fn seat_init(request: &Request) -> SeatInit {
    let reads_history = request.asked.sampling.reads_history();
    SeatInit {
        sampling: request.asked.sampling.clone(),
        key: request.asked.key,
        prompt_len: request.prompt_len,
        history: if reads_history { request.tokens.clone() } else { Vec::new() },
    }
}
