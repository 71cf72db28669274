//! Pass 3 of the planner: admissions.

use super::{PlannedAdmission, StepPlanner};
use crate::request::Request;
use crate::request::states::StateCheckpoints;
use crate::scheduling_state::BlockedQueueHead;
use crate::slab::SlabSlot;
use kvcache::{PrefixHit, TableEntries};

impl StepPlanner<'_> {
    /// Pass 3: admits waiting requests until a request does not fit. Blocks for all known tokens of a request
    /// are allocated at admission, so partially prefilled requests cannot deadlock. In window groups, the blocks
    /// that partially prefilled requests will allocate are left to them; the first such request can preempt all
    /// others that are partially prefilled.
    pub(super) fn admit(&mut self) {
        if !self.plan.preempt.is_empty() || self.lacks_window_blocks || self.is_blocked() {
            return;
        }
        let state = self.state;
        self.blocks_left = self.blocks_left.saturating_sub(self.window_blocks_of_prefills());
        let mut free_slots = state.free_slot_count();
        for slot in state.waiting.slots() {
            if free_slots == 0 || self.budget == 0 {
                break;
            }
            let request = &state.requests[slot];
            if !self.admit_one(slot, request) {
                break;
            }
            free_slots -= 1;
        }
    }

    /// Returns whether the queue head still cannot be admitted, so that its prefix lookup need not be
    /// repeated. Since the last lookup, the number of free blocks that the request needs can have decreased
    /// by at most two amounts: the number of blocks registered in the prefix cache since then, and the number
    /// of evictable blocks of its prefix hit, which other requests may have pinned.
    fn is_blocked(&self) -> bool {
        let Some(blocked) = self.state.blocked_head else { return false };
        let head = self.state.waiting.slots().next();
        if head.is_none_or(|slot| self.state.requests[slot].id != blocked.request) {
            return false;
        }
        let published_blocks = self.kv.published_blocks() - blocked.published_blocks;
        let published_checkpoints =
            self.kv.states().published_checkpoints() - blocked.published_checkpoints;
        if self.kv.group_counts().windowed > 0 && published_blocks > 0 || published_checkpoints > 0
        {
            // A single block in a window group, or a checkpoint, may complete a prefix hit of many blocks.
            return false;
        }
        let needed_min = u64::from(blocked.needed_blocks.saturating_sub(blocked.evictable_hits))
            .saturating_sub(published_blocks);
        u64::from(self.kv.available_blocks()) < needed_min
    }

    /// Plans the admission of a request and its first chunk. Returns false if blocks, state slots or tokens of the
    /// step do not suffice.
    fn admit_one(&mut self, slot: SlabSlot, request: &Request) -> bool {
        let state_slots =
            if self.kv.states().is_empty() { 0 } else { request.state_slots_needed() };
        if state_slots > self.state_slots_left {
            return false;
        }
        let first_hit = self.plan.hits.len();
        let hit = self.find_hit(request);
        let len = request.len;
        let total_blocks =
            self.blocks_of_request(if request.non_preemptible { request.limit } else { len });
        let needed_blocks = total_blocks.saturating_sub(hit.found) + hit.evictable;
        let state_slots = state_slots + hit.evictable_states;
        let start = hit.blocks * self.kv.block_tokens();
        let checkpoints = self.checkpoints(hit, state_slots);
        let fits = needed_blocks + self.admission_headroom() <= self.blocks_left;
        let chunk = if fits && state_slots <= self.state_slots_left {
            self.chunk_len(request, start, len - start, checkpoints)
        } else {
            0
        };
        if !fits {
            self.record_blocked_head(request, needed_blocks, hit);
        }
        if chunk == 0 {
            self.plan.hits.truncate(first_hit);
            return false;
        }
        self.blocks_left -= needed_blocks;
        self.state_slots_left -= state_slots;
        let (kept, windowed) = (self.kv.blocks_for(len), self.kv.blocks_for(start + chunk));
        let allocated =
            self.kv.blocks_to_grow(TableEntries::default(), TableEntries { kept, windowed });
        let reserved_blocks = if request.non_preemptible { total_blocks - allocated } else { 0 };
        let (window_entries, demand) = (windowed, checkpoints.demand);
        let admission = PlannedAdmission { slot, hit, window_entries, reserved_blocks, demand };
        self.plan.admit.push(admission);
        self.add_chunk(slot, start, len - start, chunk, 0);
        true
    }

    /// Looks up the prefix hit of a request to admit, and appends its blocks to the plan.
    fn find_hit(&mut self, request: &Request) -> PrefixHit {
        if request.may_use_prefix_cache(self.kv) {
            self.kv.match_prefix(request.content(), &mut self.plan.hits)
        } else {
            PrefixHit::default()
        }
    }

    /// Returns the checkpoints of a request that is admitted with `hit` and uses `state_slots` slots of each state group.
    /// It makes one at the end of a longer hit, if a further slot is left.
    pub(super) fn checkpoints(&self, hit: PrefixHit, state_slots: u32) -> StateCheckpoints {
        let is_wanted = hit.blocks < hit.wanted && state_slots < self.state_slots_left;
        let demand = if is_wanted { hit.wanted * self.kv.block_tokens() } else { 0 };
        StateCheckpoints { last: hit.blocks * self.kv.block_tokens(), demand }
    }

    /// Records that a request lacks blocks. If this plan admits requests, the next prefix lookup may have another
    /// result, so the request is recorded only if it is the queue head.
    fn record_blocked_head(&mut self, request: &Request, needed_blocks: u32, hit: PrefixHit) {
        let blocked = BlockedQueueHead {
            request: request.id,
            needed_blocks,
            evictable_hits: hit.evictable,
            published_blocks: self.kv.published_blocks(),
            published_checkpoints: self.kv.states().published_checkpoints(),
        };
        self.plan.blocked_head = self.plan.admit.is_empty().then_some(blocked);
    }

    /// Returns the largest number of blocks that partially prefilled requests will allocate in window groups, in
    /// addition to the blocks that they hold and reserve.
    fn window_blocks_of_prefills(&self) -> u32 {
        if self.kv.group_counts().windowed == 0 {
            return 0;
        }
        let in_flight = self.limits.request_tokens_in_flight();
        let running = self.state.running.slots().map(|slot| &self.state.requests[slot]);
        let prefills = running.filter(|r| r.continues_prefill() && !r.non_preemptible);
        let missing = prefills.map(|request| {
            let most = self.kv.window_blocks_of_request(request.len, in_flight);
            most.saturating_sub(request.window_blocks_held(self.kv))
        });
        missing.sum()
    }

    /// Returns the largest number of blocks that a request of `len` tokens holds at a time.
    fn blocks_of_request(&self, len: u32) -> u32 {
        let TableEntries { kept, windowed } = self.kv.group_counts();
        let blocks = self.kv.blocks_for(len) * kept;
        if windowed == 0 {
            return blocks;
        }
        blocks + self.kv.window_blocks_of_request(len, self.limits.request_tokens_in_flight())
    }

    /// Returns the number of blocks that must be free after an admission, so that running requests can grow
    /// without preemption.
    fn admission_headroom(&self) -> u32 {
        let running = (self.state.running.len() + self.plan.admit.len()) as u32;
        running.min(self.kv.counts().pool / 20)
    }
}
