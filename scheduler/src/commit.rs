//! Executes a plan: moves requests between queues, allocates blocks (also for draft tokens) and writes the
//! batch.
//!
//! The order matters: first preempt requests, then pin the prefix hits of *all* admitted requests (add a
//! reference to their cached blocks), then allocate blocks. An allocation must not evict a prefix hit of the
//! same plan.

use crate::plan::{PlannedAdmission, PlannedRow, StepPlan};
use crate::request::states::StateCheckpoints;
use crate::request::{PREEMPTIONS_MAX, Request};
use crate::scheduling_state::{ReplicaRequests, ScheduledRow, ScheduledStep};
use crate::stats::RequeueReason;
use crate::{FirstAdmission, SchedulerLimits};
use kvcache::{BlockTable, KvCache, TableEntries};
use protocol::{
    BatchRow, BlockId, BlockTableUpdate, RowInput, SequenceInit, StepId, ThinVec, TokenVec,
};

/// Executes `plan`, except that the batch rows are written by `write_batch_rows`.
pub(crate) fn commit(state: &mut ReplicaRequests, kv: &mut KvCache, plan: &StepPlan, now_ms: u64) {
    preempt(state, kv, plan);
    for_each_admission(plan, |admission, found| pin_hit(state, kv, admission, found));
    grow_running(state, kv, &plan.rows);
    for_each_admission(plan, |admission, _| allocate_admission(state, kv, admission));
    admit(state, kv, plan, now_ms);
    if !plan.admit.is_empty() {
        state.blocked_head = None;
    } else if plan.blocked_head.is_some() {
        state.blocked_head = plan.blocked_head;
    }
}

fn preempt(state: &mut ReplicaRequests, kv: &mut KvCache, plan: &StepPlan) {
    for &slot in &plan.preempt {
        let request = &mut state.requests[slot];
        request.preemptions = request.preemptions.saturating_add(1);
        request.non_preemptible = request.preemptions >= PREEMPTIONS_MAX;
        state.running.remove(request.cold_fields.queue_key);
        state.requeue(slot, kv, RequeueReason::Preemption);
        state.totals.preemptions += 1;
    }
}

/// Calls `f` with each request to admit and the blocks of its prefix hit in all groups.
fn for_each_admission(plan: &StepPlan, mut f: impl FnMut(PlannedAdmission, &[BlockId])) {
    let mut blocks = plan.hits.as_slice();
    for &admission in &plan.admit {
        let (found, rest) = blocks.split_at(admission.hit.found as usize);
        f(admission, found);
        blocks = rest;
    }
}

/// Counts the prefix hit of an admitted request, and adds a reference to each of its cached blocks, so that later
/// allocations cannot evict these blocks.
fn pin_hit(
    state: &mut ReplicaRequests,
    kv: &mut KvCache,
    admission: PlannedAdmission,
    found: &[BlockId],
) {
    state.kv_group_hits.count(&state.requests[admission.slot], admission.hit, kv);
    let tables = state.take_spare_block_tables();
    let request = &mut state.requests[admission.slot];
    request.pin_blocks(tables, admission.hit.blocks, found, kv);
    request.pin_checkpoint(admission.hit.blocks, kv);
}

/// Allocates the state slots of an admitted request, and the blocks that it needs in addition to the blocks of its
/// prefix hit: in window groups, those of its first chunk.
fn allocate_admission(state: &mut ReplicaRequests, kv: &mut KvCache, admission: PlannedAdmission) {
    let request = &mut state.requests[admission.slot];
    let (kept, windowed) = (kv.blocks_for(request.len), admission.window_entries);
    request.grow_tables(TableEntries { kept, windowed }, kv);
    request.allocate_state_slots(kv);
}

/// Allocates the blocks that running requests need for their next rows. Non-preemptible requests use their
/// reserved blocks first.
fn grow_running(state: &mut ReplicaRequests, kv: &mut KvCache, rows: &[PlannedRow]) {
    for row in rows.iter().filter(|row| row.new_blocks > 0) {
        let request = &mut state.requests[row.slot];
        let from_reserve = row.new_blocks.min(request.reserved_blocks);
        request.reserved_blocks -= from_reserve;
        state.reserved_blocks -= from_reserve;
        let end = row.start + row.len + u32::from(row.drafts) + u32::from(request.draft_slack);
        request.grow_tables(TableEntries::all(kv.blocks_for(end)), kv);
    }
}

/// Moves admitted requests to the running queue and assigns sequence slots to them. Their blocks have already
/// been allocated.
fn admit(state: &mut ReplicaRequests, kv: &KvCache, plan: &StepPlan, now_ms: u64) {
    for &PlannedAdmission { slot, hit, reserved_blocks, demand, .. } in &plan.admit {
        let seq_slot = state.take_sequence_slot();
        let request = &mut state.requests[slot];
        let cached = hit.blocks * kv.block_tokens();
        request.seq_slot = Some(seq_slot);
        request.reserved_blocks = reserved_blocks;
        (request.computed_tokens, request.committed_kv_len, request.published_blocks) =
            (cached, cached, hit.blocks);
        request.may_publish = kv.is_caching();
        let cold = &mut *request.cold_fields;
        cold.states.checkpoints = StateCheckpoints { last: cached, demand };
        if cold.params.first_admission.is_none() {
            let queued_ms = now_ms.saturating_sub(cold.params.submitted_ms) as u32;
            let cached_tokens = cached.min(cold.prompt_len);
            cold.params.first_admission =
                Some(FirstAdmission { replica: state.replica, cached_tokens, queued_ms });
            state.totals.prompt_tokens += u64::from(cold.prompt_len);
            state.totals.prompt_tokens_cached += u64::from(cached_tokens);
        }
        if let Some((reason, computed)) = cold.params.last_requeue.take() {
            state.totals.recomputed_tokens.add(reason, computed.saturating_sub(cached));
        }
        if kv.is_caching() {
            state.totals.prefix_queries += u64::from(request.len);
            state.totals.prefix_hits += u64::from(cached);
            cold.windows.hit_end = hit.wanted * kv.block_tokens();
        }
        state.reserved_blocks += reserved_blocks;
        state.waiting_tokens -= u64::from(request.len);
        let key = cold.queue_key;
        state.waiting.remove(key);
        state.running.insert(key, slot);
    }
}

/// Panics if a planned row writes positions that the block tables of its request do not cover.
fn check_table_positions(request: &Request, kv: &KvCache, plan: &PlannedRow) {
    let entries = request.smallest_table(kv);
    let table_positions = u64::from(entries) * u64::from(kv.block_tokens());
    let end = u64::from(plan.start + plan.len) + u64::from(request.draft_slack);
    let end = end + u64::from(plan.drafts);
    assert!(
        end <= table_positions,
        "{:?} writes up to position {end}, its block tables cover {table_positions} positions",
        request.id
    );
}

/// Writes the rows of the batch, advances the computed positions of their requests, and adds the step to
/// `steps_in_flight`, even if the step has no rows.
pub(crate) fn write_batch_rows(
    state: &mut ReplicaRequests,
    kv: &mut KvCache,
    planned: &[PlannedRow],
    limits: &SchedulerLimits,
) -> Vec<BatchRow> {
    let step = state.step.next();
    let mut rows_in_flight = state.take_spare_row_buffer();
    rows_in_flight.reserve(planned.len());
    let rows = planned.iter().map(|plan| {
        let request = &mut state.requests[plan.slot];
        check_table_positions(request, kv, plan);
        let samples = request.samples_at(plan.start + plan.len);
        rows_in_flight.push(ScheduledRow {
            slot: plan.slot,
            request: request.id,
            epoch: request.epoch,
            len: plan.len,
            drafts: plan.drafts,
            samples,
        });
        write_row(request, kv, plan, samples, step, limits)
    });
    let rows = rows.collect();
    state.step = step;
    state.steps_in_flight.push_back(ScheduledStep { step, rows: rows_in_flight });
    rows
}

/// Builds one batch row of step `step` and advances the computed position of its request.
///
/// The `BatchRow` value is built last, after everything that can panic, so that the compiler constructs it
/// directly in the batch.
#[inline]
fn write_row(
    request: &mut Request,
    kv: &mut KvCache,
    plan: &PlannedRow,
    samples: bool,
    step: StepId,
    limits: &SchedulerLimits,
) -> BatchRow {
    assert_eq!(
        plan.start, request.computed_tokens,
        "the row of {:?} does not start at its computed tokens",
        request.id
    );
    let masked = samples && request.mask_state.is_masked();
    let state_slots = request.state_accesses(plan, masked, kv, limits);
    let end = plan.start + plan.len;
    let sampled_at = request.last_sampling_step;
    let draft_slack = request.draft_slack;
    request.rows_in_flight += 1;
    request.computed_tokens = end;
    request.slot_has_drafts = samples;
    if samples {
        request.pending_samples += 1;
        request.draft_slack += u16::from(plan.drafts);
        request.last_sampling_step = step;
    }
    let seq_init = std::mem::take(&mut request.first_row_of_epoch)
        .then(|| Box::new(sequence_init(request, limits.needs_token_history)));
    let table_updates = block_table_updates(request, kv);
    let seq_slot = request.seq_slot.expect("a running request has a sequence slot");
    let next_token = (end < request.len).then(|| request.tokens()[end as usize]);
    let input = if plan.start + 1 == request.len {
        RowInput::Tokens(TokenVec::one(request.last_token()))
    } else if end <= request.len {
        request.flush_tail();
        RowInput::Tokens(request.tokens()[plan.start as usize..end as usize].into())
    } else {
        assert_eq!(plan.len, 1, "a pending token is forwarded alone");
        RowInput::SampledAt { step: sampled_at, draft_slack }
    };
    BatchRow {
        request: request.id,
        epoch: request.epoch,
        seq_slot,
        start: plan.start,
        len: plan.len,
        drafts: plan.drafts,
        samples,
        masked,
        input,
        table_updates,
        state_slots,
        next_token,
        seq_init,
    }
}

/// Returns the block table entries that have not been sent to the executor.
fn block_table_updates(request: &mut Request, kv: &KvCache) -> ThinVec<BlockTableUpdate> {
    let TableEntries { kept, windowed } = kv.group_counts();
    let mut updates = ThinVec::new();
    if request.sent_blocks < request.block_count {
        let tables = request.cold_fields.block_tables.iter().take(kept as usize);
        updates.extend(table_updates(0, tables, request.sent_blocks));
        request.sent_blocks = request.block_count;
    }
    if windowed > 0 {
        let cold = &mut *request.cold_fields;
        let tables = cold.block_tables.iter().skip(kept as usize);
        updates.extend(table_updates(kept as u8, tables, cold.windows.sent_entries));
        cold.windows.sent_entries = cold.windows.entries;
    }
    updates
}

/// Returns the entries of `tables` from index `from` on; the first table is that of group `first_group`. Released
/// entries are not sent, because no later row reads them.
fn table_updates<'a>(
    first_group: u8,
    tables: impl Iterator<Item = &'a BlockTable>,
    from: u32,
) -> impl Iterator<Item = BlockTableUpdate> {
    (first_group..=u8::MAX).zip(tables).filter(move |(_, table)| from < table.len()).map(
        move |(group, table)| {
            let first_entry = from.max(table.first_held());
            let blocks = table.blocks()[first_entry as usize..].into();
            BlockTableUpdate { group, first_entry, blocks }
        },
    )
}

fn sequence_init(request: &mut Request, needs_token_history: bool) -> SequenceInit {
    request.flush_tail();
    let params = &request.cold_fields.params;
    let needs_history = needs_token_history || params.sampling.needs_token_history();
    let history = if needs_history { request.tokens() } else { &[] };
    SequenceInit {
        sampling: params.sampling.clone(),
        rng_key: params.rng_key,
        prompt_len: request.cold_fields.prompt_len,
        token_history: history.to_vec(),
    }
}
