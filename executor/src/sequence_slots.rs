//! Host state of running requests: one sequence slot per request, updated by the rows of each batch.
//!
//! The rest of a sequence slot (block table, sampling parameters, token history, last token) is on the
//! device. The first row of a request initialises the sequence slot, and so does its first row after a
//! preemption or an executor restart (a new epoch of the request). The scheduler can restore all of this
//! state, so an executor may fail at any time.

mod block_table_change;
mod block_table_limits;
mod token_bitmask;

pub(crate) use block_table_change::BlockTableChange;
pub(crate) use block_table_limits::BlockTableLimits;
pub(crate) use token_bitmask::{bitmask_words, stage_bitmask};

use crate::BatchError;
use ops::{SequenceSamplingParams, StagedLogitEdit, StagedSequenceInit, StagingBuffer};
use protocol::{
    BatchRow, BlockTableUpdate, RequestId, SamplingParams, SequenceInit, SequenceSlot, StepId,
    Token,
};
use token_bitmask::stage_allowed_mask;

/// Host part of the state of all sequence slots.
pub(crate) struct HostSequenceSlots {
    states: Vec<HostSequenceState>,
    /// Limits of the block tables of each KV group.
    groups: Vec<BlockTableLimits>,
    /// Number of blocks in the pool.
    blocks: u32,
}

/// Request and request epoch that a sequence slot is assigned to. The epoch of a request changes when the
/// request is preempted or its executor restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotOwner {
    request: RequestId,
    epoch: u32,
}

impl SlotOwner {
    pub(crate) fn of(row: &BatchRow) -> Self {
        Self { request: row.request, epoch: row.epoch }
    }
}

/// Host part of the state of one sequence slot. A sequence slot holds the state of one running request.
pub(crate) struct HostSequenceState {
    /// Request and epoch that the slot is assigned to; `None` if the slot was never assigned.
    owner: Option<SlotOwner>,
    /// Sampling parameters of the request.
    pub(crate) sampling: SamplingParams,
    params: SequenceSamplingParams,
    /// Number of prompt tokens; later positions are output tokens.
    pub(crate) prompt_len: u32,
    /// Newest step that sampled a token for the slot.
    sampled_at: Option<StepId>,
    /// Draft tokens of the current row that were proposed on the host.
    pub(crate) host_drafts: Vec<Token>,
    /// Number of draft tokens of the current row that are proposed on the device.
    pub(crate) device_drafts: u8,
    /// Entries of the block table in each KV group.
    tables: Vec<BlockTableExtent>,
}

/// Logit edits of one logits row in the staging buffer; the default is no edit.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StagedEditRange {
    /// Index of the first edit.
    pub(crate) first: i32,
    /// Number of edits.
    pub(crate) count: i32,
}

/// Entries of a block table that contain blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct BlockTableExtent {
    /// Index of the first entry. It is above 0 if the blocks before the window of the request's first row were
    /// not allocated; kernels never read the entries before it.
    pub(crate) first: usize,
    /// Number of entries, including those before `first`.
    pub(crate) len: usize,
}

impl HostSequenceSlots {
    /// Creates `seq_slots` empty sequence slots, each with a block table for each of `groups`. The tables
    /// contain blocks of a pool of `blocks` blocks.
    pub(crate) fn new(seq_slots: u32, groups: Vec<BlockTableLimits>, blocks: u32) -> Self {
        let empty = || HostSequenceState {
            owner: None,
            sampling: SamplingParams::greedy(),
            params: SequenceSamplingParams::default(),
            prompt_len: 0,
            sampled_at: None,
            host_drafts: Vec::new(),
            device_drafts: 0,
            tables: vec![BlockTableExtent::default(); groups.len()],
        };
        Self { states: (0..seq_slots).map(|_| empty()).collect(), groups, blocks }
    }

    /// Limits of the block tables of each KV group.
    pub(crate) fn groups(&self) -> &[BlockTableLimits] {
        &self.groups
    }

    /// Updates the owner and the block table lengths of the row's sequence slot. Appends the change of the
    /// block table in each KV group to `changes`.
    pub(crate) fn update(
        &mut self,
        row: &BatchRow,
        changes: &mut Vec<BlockTableChange>,
    ) -> Result<(), BatchError> {
        let (seq_slot, limit) = (row.seq_slot, self.states.len());
        let state = self
            .states
            .get_mut(seq_slot.0 as usize)
            .ok_or(BatchError::NoSequenceSlot { seq_slot, limit })?;
        if let Some(init) = &row.seq_init {
            state.assign(SlotOwner::of(row), init);
        }
        if state.owner != Some(SlotOwner::of(row)) {
            return Err(BatchError::SlotOwnerMismatch { request: row.request, seq_slot });
        }
        state.host_drafts.clear();
        state.device_drafts = 0;
        let first_change = changes.len();
        let unchanged =
            |table: &BlockTableExtent| BlockTableChange { from: table.len, blocks: Vec::new() };
        changes.extend(state.tables.iter().map(unchanged));
        let changes = &mut changes[first_change..];
        for update in &row.table_updates {
            let (request, group, groups) = (row.request, update.group, self.groups.len());
            let Some(limits) = self.groups.get(usize::from(group)) else {
                return Err(BatchError::UnknownKvGroup { request, group, groups });
            };
            if let Some(block) = update.blocks.iter().find(|block| block.0 >= self.blocks) {
                return Err(BatchError::Block { block: block.0, limit: self.blocks });
            }
            let (table, change) =
                (&mut state.tables[usize::from(group)], &mut changes[usize::from(group)]);
            let fits = table.apply(update, limits);
            change.add(update, limits.block_id_step);
            if !fits || change.blocks.len() > limits.update_entries {
                return Err(BatchError::InvalidTableUpdate { request, group });
            }
        }
        Ok(())
    }

    /// Returns the state of a sequence slot. May be called only after `update` has accepted a row of the
    /// slot.
    pub(crate) fn get(&self, seq_slot: SequenceSlot) -> &HostSequenceState {
        &self.states[seq_slot.0 as usize]
    }

    /// Records that `step` samples a token for `row`. If the row has draft tokens, the position of
    /// the newest token is computed on the device, because it depends on the number of accepted draft tokens.
    pub(crate) fn mark_sampled(&mut self, row: &BatchRow, step: StepId) {
        self.states[row.seq_slot.0 as usize].sampled_at = Some(step);
    }

    /// Sets the draft tokens of a row that `update` has accepted, and writes them to the staging buffer.
    /// Sampling rules that depend on earlier tokens, such as penalties, read the draft tokens as well.
    pub(crate) fn set_drafts(
        &mut self,
        row: &BatchRow,
        drafts: &[Token],
        stage: &mut StagingBuffer,
    ) {
        let state = &mut self.states[row.seq_slot.0 as usize];
        state.host_drafts.extend_from_slice(drafts);
        if !drafts.is_empty() && state.sampling.needs_token_history() {
            stage.inits.push(StagedSequenceInit {
                seq_slot: row.seq_slot.0 as i32,
                history_at: stage.words.len() as i32,
                history_from: (row.start + row.len) as i32,
                history_len: drafts.len() as i32,
                mask_at: -1,
                reserved: [0; 3],
                params: state.params,
            });
            stage.push_words(drafts.iter().map(|&id| id as i32));
        }
    }

    /// Records that the device proposes `row.drafts` draft tokens for the current row.
    pub(crate) fn expect_device_drafts(&mut self, row: &BatchRow) {
        self.states[row.seq_slot.0 as usize].device_drafts = row.drafts;
    }
}

impl HostSequenceState {
    fn assign(&mut self, owner: SlotOwner, init: &SequenceInit) {
        self.owner = Some(owner);
        self.sampling.clone_from(&init.sampling);
        self.params = sampling_params(init);
        self.prompt_len = init.prompt_len;
        self.sampled_at = None;
        self.tables.fill(BlockTableExtent::default());
    }

    /// Number of draft tokens of the current row, proposed on the host or on the device.
    pub(crate) fn drafts(&self) -> u32 {
        self.host_drafts.len() as u32 + u32::from(self.device_drafts)
    }

    /// Entries of the slot's block table in each KV group.
    pub(crate) fn tables(&self) -> &[BlockTableExtent] {
        &self.tables
    }

    /// Whether the newest token of the slot is the one that `step` sampled.
    pub(crate) fn has_token_of(&self, step: StepId) -> bool {
        self.sampled_at == Some(step)
    }

    /// Writes to the staging buffer the logit edits for a token that is sampled at position `min_position` or
    /// later: bad words, stop token ids before `min_tokens`, and logit bias.
    pub(crate) fn stage_edits(
        &self,
        min_position: u32,
        stage: &mut StagingBuffer,
    ) -> StagedEditRange {
        let first = stage.edits.len();
        let masked = |id: Token| StagedLogitEdit {
            id,
            value: f32::NEG_INFINITY,
            ..StagedLogitEdit::default()
        };
        for word in &self.sampling.bad_words {
            let Some((&end, start)) = word.split_last() else { continue };
            let when_at = stage.push_words(start.iter().map(|&id| id as i32));
            stage.edits.push(StagedLogitEdit {
                when_at,
                when_len: start.len() as i32,
                ..masked(end)
            });
        }
        let first_stop_position = self.prompt_len.saturating_add(self.sampling.min_tokens);
        if min_position < first_stop_position {
            let when_at = first_stop_position.min(i32::MAX as u32) as i32; // The device checks the exact position.
            let banned = |&id| StagedLogitEdit { when_at, when_len: -1, ..masked(id) };
            stage.edits.extend(self.sampling.stop_token_ids.iter().map(banned));
        }
        let bias = self.sampling.logit_bias.iter();
        stage.edits.extend(bias.map(|&(id, value)| StagedLogitEdit {
            id,
            value,
            ..StagedLogitEdit::default()
        }));
        StagedEditRange { first: first as i32, count: (stage.edits.len() - first) as i32 }
    }
}

impl BlockTableExtent {
    /// Applies an update and returns whether the table fits its limits. The first update of a table of a
    /// window may begin at any entry; no other update may leave a gap.
    fn apply(&mut self, update: &BlockTableUpdate, limits: &BlockTableLimits) -> bool {
        let first_entry = update.first_entry as usize;
        let may_skip = self.len == 0 && limits.kind.window().is_some();
        let leaves_gap = first_entry > self.len && !may_skip;
        self.first = if self.len == 0 { first_entry } else { self.first.min(first_entry) };
        self.len = first_entry + update.blocks.len();
        !leaves_gap && self.len <= limits.width
    }
}

/// Writes the initial state of a sequence slot for a new request to the staging buffer: sampling parameters,
/// allowed ids, token history.
pub(crate) fn stage_init(
    seq_slot: SequenceSlot,
    init: &SequenceInit,
    vocab: usize,
    stage: &mut StagingBuffer,
) {
    let sampling = &init.sampling;
    let mask_at = stage_allowed_mask(sampling, vocab, stage);
    let history = if sampling.needs_token_history() { &init.token_history[..] } else { &[] };
    stage.inits.push(StagedSequenceInit {
        seq_slot: seq_slot.0 as i32,
        history_at: stage.words.len() as i32,
        history_from: 0,
        history_len: history.len() as i32,
        mask_at,
        reserved: [0; 3],
        params: sampling_params(init),
    });
    stage.push_words(history.iter().map(|&id| id as i32));
}

fn sampling_params(init: &SequenceInit) -> SequenceSamplingParams {
    let s = &init.sampling;
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    SequenceSamplingParams {
        temperature: s.temperature,
        top_p: s.top_p,
        min_p: s.min_p,
        top_k: s.top_k.min(i32::MAX as u32) as i32,
        repetition: s.repetition_penalty,
        frequency: s.frequency_penalty,
        presence: s.presence_penalty,
        flags: flag(s.allowed_token_ids.is_some(), ops::RULE_MASKED)
            | flag(s.needs_token_history(), ops::RULE_HISTORY),
        key: init.rng_key,
        prompt_len: init.prompt_len as i32,
        reserved: 0,
    }
}
