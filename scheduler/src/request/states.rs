//! State slots of a request: which of its rows begin at a checkpoint, and which slots a row reads and writes.
//!
//! Rows of prompts end at checkpoints, so that the state at a checkpoint exists between two rows: at multiples of the
//! interval (rungs), at the last block boundary of the prompt, and where the prefix hit of the request would have
//! ended if a checkpoint had existed there (demand). Output tokens have a checkpoint at each block boundary that is at
//! least an interval after the last checkpoint.
//!
//! A row with draft tokens ends at a position that is known only after its output has been applied. Requests therefore
//! have no draft tokens shortly before a checkpoint, so that a row starts exactly there.

use super::Request;
use crate::SchedulerLimits;
use crate::plan::PlannedRow;
use kvcache::{KvCache, StateRow, StateSlots};
use protocol::{StateSlotAccess, ThinVec};

/// State slots of a request, and the positions of its checkpoints.
#[derive(Debug, Default)]
pub(crate) struct RequestStates {
    pub(crate) slots: StateSlots,
    pub(crate) checkpoints: StateCheckpoints,
}

/// Positions of the checkpoints of a request, known at its admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StateCheckpoints {
    /// Position of the last checkpoint that the request made or was admitted with; 0 = none.
    pub(crate) last: u32,
    /// End of the prefix hit of the last admission, if a checkpoint had existed there; 0 = the hit was not shortened.
    pub(crate) demand: u32,
}

impl Request {
    /// Returns the number of state slots of each group that the request needs: a live slot, and a spare slot if its
    /// rows may have to be repeated because their grammar bitmasks are overdue.
    pub(crate) fn state_slots_needed(&self) -> u32 {
        1 + u32::from(self.has_grammar())
    }

    fn has_grammar(&self) -> bool {
        self.cold_fields.params.first_masked_position != u32::MAX
    }

    /// Returns the last block boundary of the prompt at which a prefix hit of the same prompt can end.
    fn prompt_end(&self, block_tokens: u32) -> u32 {
        (self.cold_fields.prompt_len - 1) / block_tokens * block_tokens
    }

    /// Returns the first position after `start` at which a row must end because a checkpoint follows; `u32::MAX` = none.
    fn next_checkpoint(
        &self,
        start: u32,
        checkpoints: StateCheckpoints,
        kv: &KvCache,
        limits: &SchedulerLimits,
    ) -> u32 {
        let size = kv.block_tokens();
        let interval = limits.checkpoint_interval(size);
        let prompt_len = self.cold_fields.prompt_len;
        let rung = (start + 1).checked_next_multiple_of(interval).filter(|&p| p < prompt_len);
        let after_last = (checkpoints.last + interval).next_multiple_of(size);
        let later = Some(after_last).filter(|&p| interval > 0 && p >= prompt_len);
        let fixed = [Some(self.prompt_end(size)), Some(checkpoints.demand), rung, later];
        fixed.into_iter().flatten().filter(|&p| p > start).min().unwrap_or(u32::MAX)
    }

    /// Returns how many of the `uncomputed` tokens from position `start` on a row of a model with state groups may
    /// forward. Rows end at checkpoints. A token that is sampled under a grammar bitmask is sampled by a row of one
    /// token, which can be repeated from the state before it if the bitmask is overdue.
    pub(crate) fn tokens_to_checkpoint(
        &self,
        start: u32,
        uncomputed: u32,
        checkpoints: StateCheckpoints,
        kv: &KvCache,
        limits: &SchedulerLimits,
    ) -> u32 {
        let end = start + uncomputed;
        let is_masked = self.mask_state.is_masked() && self.samples_at(end);
        let end = if is_masked && uncomputed > 1 { end - 1 } else { end };
        if !kv.is_caching() {
            return end - start;
        }
        end.min(self.next_checkpoint(start, checkpoints, kv, limits)) - start
    }

    /// Returns the largest number of draft tokens of the next decode row, so that a later row starts at the next checkpoint
    /// and its start is known when it is planned: rows that are planned before the output of this row has been applied
    /// have no draft tokens, and end at the checkpoint at the latest.
    pub(crate) fn drafts_to_checkpoint(&self, kv: &KvCache, limits: &SchedulerLimits) -> u32 {
        if kv.states().is_empty() || !kv.is_caching() {
            return u32::MAX;
        }
        let (start, checkpoints) = (self.computed_tokens, self.cold_fields.states.checkpoints);
        let checkpoint = self.next_checkpoint(start, checkpoints, kv, limits);
        let in_flight = limits.steps_in_flight.saturating_sub(1);
        let end = start + u32::from(self.draft_slack) + 1 + in_flight;
        checkpoint.saturating_sub(end)
    }

    /// Whether the state before a row that starts at `start` is to become a checkpoint. The row that samples the last
    /// output token makes none, unless it starts in the prompt.
    fn is_checkpoint(&self, start: u32, kv: &KvCache, limits: &SchedulerLimits) -> bool {
        let size = kv.block_tokens();
        let StateCheckpoints { last, demand } = self.cold_fields.states.checkpoints;
        let is_exact = self.draft_slack == 0; // Otherwise the row may start later.
        if !kv.is_caching() || !is_exact || !start.is_multiple_of(size) || start <= last {
            return false;
        }
        let interval = limits.checkpoint_interval(size);
        if start >= self.cold_fields.prompt_len {
            let finishes = self.known_len() + 1 >= self.limit;
            return start == demand || interval > 0 && start - last >= interval && !finishes;
        }
        let is_rung = interval > 0 && start.is_multiple_of(interval);
        is_rung || start == demand || start == self.prompt_end(size)
    }

    /// Returns the state slots that a planned row reads and writes. `is_masked`: it samples under a grammar bitmask.
    pub(crate) fn state_accesses(
        &mut self,
        row: &PlannedRow,
        is_masked: bool,
        kv: &mut KvCache,
        limits: &SchedulerLimits,
    ) -> ThinVec<StateSlotAccess> {
        if kv.states().is_empty() {
            return ThinVec::new();
        }
        assert!(!is_masked || row.len == 1, "a masked row of {:?} cannot be repeated", self.id);
        let checkpoint = self.is_checkpoint(row.start, kv, limits);
        let states = &mut self.cold_fields.states;
        let row = StateRow { start: row.start, checkpoint, may_repeat: is_masked };
        let accesses = kv.states_mut().access(&mut states.slots, row);
        if states.slots.has_pending_checkpoint(row.start) {
            states.checkpoints.last = row.start;
        }
        accesses
    }

    /// Adds a reference to the checkpoint of a prefix hit of `blocks` blocks.
    pub(crate) fn pin_checkpoint(&mut self, blocks: u32, kv: &mut KvCache) {
        if blocks > 0 && !kv.states().is_empty() {
            let position = blocks * kv.block_tokens();
            let cold = &mut *self.cold_fields;
            let key = cold.block_keys[blocks as usize - 1];
            kv.states_mut().pin(&mut cold.states.slots, key, position);
        }
    }

    /// Allocates the state slots of an admitted request.
    pub(crate) fn allocate_state_slots(&mut self, kv: &mut KvCache) {
        if !kv.states().is_empty() {
            let with_spare = self.has_grammar();
            kv.states_mut().allocate(&mut self.cold_fields.states.slots, with_spare);
        }
    }

    /// Registers the checkpoints that applied rows have written, and releases the slots that they have read.
    pub(crate) fn settle_state_slots(&mut self, kv: &mut KvCache) {
        if !kv.states().is_empty() {
            let (computed, size) = (self.committed_kv_len, kv.block_tokens());
            let published = self.published_blocks * size;
            let cold = &mut *self.cold_fields;
            kv.states_mut().settle(&mut cold.states.slots, computed, published, &cold.block_keys);
        }
    }
}
