//! Plans the next step of one replica.
//!
//! Planning is pure: it reads state and cache without changing them. It rejects no request, because
//! `admission_control.rs` has already rejected requests that can never fit. `commit` executes the plan
//! directly afterwards, so blocks that the plan counts as free are still free.

mod admission;
mod chunk_alignment;
mod step_plan;
mod time_budget;

use crate::request::Request;
use crate::request::states::StateCheckpoints;
use crate::scheduling_state::ReplicaRequests;
use crate::slab::SlabSlot;
use crate::{SchedulerLimits, StepCosts};
use chunk_alignment::align_chunk;
use kvcache::{BlockTable, KvCache, TableEntries};
use protocol::BlockId;
pub(crate) use step_plan::{PlannedAdmission, PlannedRow, StepPlan};
use time_budget::TimeBudget;

/// For each block, the number of its references that are held by victims (the requests to preempt). A shared
/// block becomes free only if victims hold all its references.
#[derive(Debug, Default)]
struct VictimBlockRefs {
    ref_counts: Vec<u32>,
    touched_blocks: Vec<BlockId>,
}

impl VictimBlockRefs {
    /// Adds a request to preempt. Returns the number of blocks that its preemption frees.
    fn add_victim(&mut self, request: &Request, kv: &KvCache) -> u32 {
        self.ref_counts.resize(kv.counts().pool as usize, 0);
        let mut freed = 0;
        let tables = request.cold_fields.block_tables.iter();
        for &block in tables.flat_map(BlockTable::held) {
            let count = &mut self.ref_counts[block.0 as usize];
            *count += 1;
            freed += u32::from(*count == kv.ref_count(block));
            self.touched_blocks.push(block);
        }
        freed
    }

    fn clear(&mut self) {
        for block in self.touched_blocks.drain(..) {
            self.ref_counts[block.0 as usize] = 0;
        }
    }
}

/// Plans the next step of one replica. The buffers of the previous plan, `plan`, are reused.
///
/// Three passes share one token budget: decode rows, then prefill chunks of running requests, then
/// admissions. Each pass is in queue order, and the passes define the row order. A decode row that lacks a
/// block preempts requests of lower priority. So does a prefill chunk, if the model has KV groups with a sliding
/// window. A plan that preempts requests admits no request, because the freed blocks would go to a younger request. Admission stops at the first request that does not fit: no
/// request bypasses the queue head. `costs` are the estimated costs of steps, by which `SchedulerLimits::max_step_ms` shortens
/// prefill chunks.
pub(crate) fn plan(
    state: &ReplicaRequests,
    kv: &KvCache,
    limits: &SchedulerLimits,
    costs: Option<StepCosts>,
    mut plan: StepPlan,
) -> StepPlan {
    plan.clear();
    let blocks_left = kv.available_blocks() - state.reserved_blocks;
    let mut planner = StepPlanner {
        state,
        kv,
        limits,
        budget: limits.tokens_per_step,
        time_budget: TimeBudget::new(state, limits, costs),
        blocks_left,
        state_slots_left: kv.states().available(),
        victims_from: state.running.len(),
        lacks_window_blocks: false,
        plan,
    };
    planner.run_passes();
    planner.plan
}

/// Planner of one step: the scheduling state, the remaining limits, and the plan so far.
struct StepPlanner<'a> {
    state: &'a ReplicaRequests,
    kv: &'a KvCache,
    limits: &'a SchedulerLimits,
    /// Tokens that the plan may still add to the step.
    budget: u32,
    /// Time that the plan may still add to the step; `None` = no limit.
    time_budget: Option<TimeBudget>,
    /// Number of free blocks that are neither reserved for non-preemptible requests nor used by the plan.
    blocks_left: u32,
    /// Number of available state slots of each state group that the plan has not used.
    state_slots_left: u32,
    /// All preemptible requests at this position of the running queue or later are preempted by the plan, except
    /// decoding requests if the first of them was preempted for a prefill chunk.
    victims_from: usize,
    /// Whether a prefill chunk lacks blocks of window groups, so that no request is admitted.
    lacks_window_blocks: bool,
    plan: StepPlan,
}

impl StepPlanner<'_> {
    /// Runs the passes in their order. Without mixed batches, decode rows are planned only for a step
    /// without prefill.
    fn run_passes(&mut self) {
        if self.limits.mixed_batches {
            self.decode();
            let non_decoding = std::mem::take(&mut self.plan.non_decoding);
            self.continue_prefills(non_decoding.iter().copied());
            self.plan.non_decoding = non_decoding;
            self.admit();
        } else {
            self.continue_prefills(0..self.state.running.len());
            self.admit();
            if self.plan.rows.is_empty() {
                self.decode();
            }
        }
    }

    /// Pass 1: plans one token and its draft tokens for every decoding request.
    fn decode(&mut self) {
        let state = self.state;
        let mut has_capacity = true;
        for (index, slot) in state.running.slots().enumerate() {
            let request = &state.requests[slot];
            if !request.can_decode() {
                self.plan.non_decoding.push(index);
            } else if has_capacity && !self.is_victim(index, request) {
                has_capacity = self.budget > 0 && self.decode_one(index, slot, request);
            }
        }
        self.plan.decode_rows = self.plan.rows.len();
        self.plan.decode_preempts = self.plan.preempt.len();
    }

    /// Plans the decode row of one request. Returns false if there are too few free blocks for the row; a
    /// preemptible request is then preempted itself.
    fn decode_one(&mut self, index: usize, slot: SlabSlot, request: &Request) -> bool {
        let Some(row) = self.fit_decode(index, slot, request) else {
            if !request.non_preemptible {
                self.add_victim(index);
            }
            return false;
        };
        let from_reserve = row.new_blocks.min(request.reserved_blocks);
        self.blocks_left -= row.new_blocks - from_reserve;
        let tokens = 1 + u32::from(row.drafts);
        self.budget -= tokens;
        if let Some(time) = &mut self.time_budget {
            time.add_decode_tokens(tokens);
        }
        self.plan.rows.push(row);
        true
    }

    /// Returns the decode row of a request. If there are too few free blocks, the row gets no draft tokens,
    /// and then other requests are preempted; `None` if the row still does not fit.
    fn fit_decode(
        &mut self,
        index: usize,
        slot: SlabSlot,
        request: &Request,
    ) -> Option<PlannedRow> {
        let row = |drafts: u32, new_blocks| {
            let (start, drafts) = (request.computed_tokens, drafts as u8);
            PlannedRow { slot, start, len: 1, drafts, new_blocks }
        };
        let drafts = self.draft_count(request);
        let new_blocks = self.blocks_to_grow(request, drafts);
        if new_blocks <= self.blocks_left + request.reserved_blocks {
            return Some(row(drafts, new_blocks));
        }
        let new_blocks = self.blocks_to_grow(request, 0);
        while new_blocks > self.blocks_left + request.reserved_blocks {
            let victim = (index + 1..self.victims_from).rev().find(|&other| {
                !self.state.requests[self.state.running.get(other)].non_preemptible
            })?;
            self.add_victim(victim);
        }
        Some(row(0, new_blocks))
    }

    /// Returns the number of draft tokens of a decode row. It is 0 if the request's previous row since its
    /// admission did not sample, and 0 while grammar bitmasks of the request are overdue or slow. A row that
    /// is planned without a bitmask has no draft tokens at positions that need a bitmask. Draft tokens end before the next
    /// checkpoint of recurrent state.
    fn draft_count(&self, request: &Request) -> u32 {
        if !request.slot_has_drafts || !request.mask_state.allows_drafts() {
            return 0;
        }
        let last_position = if request.mask_state.is_masked() {
            request.limit
        } else {
            request.limit.min(request.first_masked_position())
        };
        let draft_slack = u32::from(request.draft_slack);
        let positions_left = last_position.saturating_sub(request.known_len() + draft_slack + 1);
        let positions_left = positions_left.min(request.drafts_to_checkpoint(self.kv, self.limits));
        u32::from(self.limits.draft_tokens).min(positions_left).min(self.budget - 1)
    }

    /// Returns the number of blocks that a decode row appends to the request's block tables. They suffice even
    /// if every draft token in flight is accepted.
    fn blocks_to_grow(&self, request: &Request, drafts: u32) -> u32 {
        let positions = request.computed_tokens + u32::from(request.draft_slack) + 1 + drafts;
        let target = TableEntries::all(self.kv.blocks_for(positions));
        self.kv.blocks_to_grow(request.table_entries(self.kv), target)
    }

    fn is_victim(&self, index: usize, request: &Request) -> bool {
        index >= self.victims_from && !request.non_preemptible
    }

    fn add_victim(&mut self, index: usize) {
        let slot = self.state.running.get(index);
        self.blocks_left += self.plan.victim_blocks.add_victim(&self.state.requests[slot], self.kv);
        self.plan.preempt.push(slot);
        self.victims_from = index;
    }

    /// Pass 2: plans a prefill chunk for every running request at the queue positions `indices` that has
    /// several uncomputed tokens. The blocks of these requests were allocated at admission, except those of
    /// window groups, which a chunk allocates.
    fn continue_prefills(&mut self, indices: impl Iterator<Item = usize>) {
        let state = self.state;
        for index in indices {
            let slot = state.running.get(index);
            let request = &state.requests[slot];
            if !request.continues_prefill() || self.is_victim(index, request) {
                continue;
            }
            if self.lacks_window_blocks && !request.non_preemptible {
                continue; // Later chunks use their reserve only.
            }
            let (start, uncomputed) = (request.computed_tokens, request.uncomputed_tokens());
            let checkpoints = request.cold_fields.states.checkpoints;
            let len = self.chunk_len(request, start, uncomputed, checkpoints);
            if len == 0 {
                break;
            }
            let Some(new_blocks) = self.fit_chunk(index, request, start + len) else {
                self.lacks_window_blocks = true;
                continue;
            };
            self.add_chunk(slot, start, uncomputed, len, new_blocks);
        }
    }

    /// Returns the number of blocks in window groups that a prefill chunk up to position `end` allocates, and
    /// subtracts them from the blocks left. If there are too few, later requests that cannot decode, and
    /// therefore have no row in this plan, are preempted; `None` if the chunk still does not fit. The chunk of a
    /// non-preemptible request always fits, because its reserve has the blocks.
    fn fit_chunk(&mut self, index: usize, request: &Request, end: u32) -> Option<u32> {
        let target = TableEntries::all(self.kv.blocks_for(end));
        let new_blocks = self.kv.blocks_to_grow(request.table_entries(self.kv), target);
        while new_blocks > self.blocks_left + request.reserved_blocks {
            let victim = (index + 1..self.victims_from).rev().find(|&other| {
                let other = &self.state.requests[self.state.running.get(other)];
                !other.non_preemptible && !other.can_decode()
            })?;
            self.add_victim(victim);
        }
        self.blocks_left -= new_blocks - new_blocks.min(request.reserved_blocks);
        Some(new_blocks)
    }

    fn add_chunk(
        &mut self,
        slot: SlabSlot,
        start: u32,
        uncomputed: u32,
        len: u32,
        new_blocks: u32,
    ) {
        self.budget = self.budget.saturating_sub(len);
        if let Some(time) = &mut self.time_budget {
            time.add_chunk(start, len);
        }
        self.plan.pending_prefill_tokens += u64::from(uncomputed);
        self.plan.rows.push(PlannedRow { slot, start, len, drafts: 0, new_blocks });
    }

    /// Returns the length of the next row of a request that forwards tokens from `start` on; 0 = none in this step.
    fn chunk_len(
        &self,
        request: &Request,
        start: u32,
        uncomputed: u32,
        checkpoints: StateCheckpoints,
    ) -> u32 {
        let uncomputed = if self.kv.states().is_empty() {
            uncomputed
        } else {
            request.tokens_to_checkpoint(start, uncomputed, checkpoints, self.kv, self.limits)
        };
        let has_prefill = self.plan.rows.len() > self.plan.decode_rows;
        let cap = self.budget.min(self.limits.tokens_per_chunk.unwrap_or(u32::MAX));
        let quantum = self.limits.chunk_quantum(self.kv.block_tokens());
        let cap = match &self.time_budget {
            // The first chunk of a step always makes progress.
            Some(time) if has_prefill => cap.min(time.longest_chunk(start)),
            Some(time) => cap.min(time.longest_chunk(start).max(quantum)),
            None => cap,
        };
        align_chunk(start, uncomputed, cap, quantum, has_prefill)
    }
}

#[cfg(test)]
mod tests;
