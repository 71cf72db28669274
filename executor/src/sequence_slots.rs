//! What the host remembers of each running request, one seat per request, and how a row changes it.
//!
//! The rest of a seat (tables, rules, history, last token) lies on the device, where it is set up by the
//! first row of a request's epoch. Nothing on either side is the only copy of anything, so an executor
//! may be lost at any time.

use crate::BatchError;
use ops::{SequenceSamplingParams, StageEdit, StageSequenceInit, StagingBuffer};
use protocol::{
    BatchRow, BlockTableUpdate, RequestId, SamplingParams, SequenceInit, SequenceSlot, StepId,
    Token,
};

/// All seats.
pub(crate) struct HostSequenceSlots {
    states: Vec<HostSequenceState>,
    table_width: usize,
    blocks: u32,
}

/// The request that holds a sequence slot, in one of its epochs.
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

/// State of one request.
pub(crate) struct HostSequenceState {
    /// Who sits here, in which epoch; `None` before the first request.
    owner: Option<SlotOwner>,
    /// How its tokens are chosen, and the same as the device has it.
    pub(crate) sampling: SamplingParams,
    rules: SequenceSamplingParams,
    /// Positions from here on are output.
    pub(crate) prompt_len: u32,
    /// The newest step that sampled a token here.
    sampled_at: Option<StepId>,
    /// What the row under way guesses, as far as the host does.
    pub(crate) host_drafts: Vec<Token>,
    /// Guesses that the device makes instead.
    pub(crate) device_drafts: u8,
    /// The mask of a step may lie on the device's seat.
    masked: bool,
    table_len: usize,
}

/// Entries of a block table that a row replaces.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockTableChange {
    /// First entry.
    pub(crate) from: usize,
    /// The new ones, up to the end of the table.
    pub(crate) blocks: Vec<i32>,
}

impl HostSequenceSlots {
    /// `seats` empty seats for tables of up to `width` blocks out of a pool of `blocks`.
    pub(crate) fn new(seats: u32, width: usize, blocks: u32) -> Self {
        let empty = || HostSequenceState {
            owner: None,
            sampling: SamplingParams::greedy(),
            rules: SequenceSamplingParams::default(),
            prompt_len: 0,
            sampled_at: None,
            host_drafts: Vec::new(),
            device_drafts: 0,
            masked: false,
            table_len: 0,
        };
        Self { states: (0..seats).map(|_| empty()).collect(), table_width: width, blocks }
    }

    /// Takes over what a row says about its seat: the occupant and the length of the block table.
    pub(crate) fn update(&mut self, row: &BatchRow) -> Result<BlockTableChange, BatchError> {
        let (seat, limit) = (row.seq_slot, self.states.len());
        let state = self
            .states
            .get_mut(seat.0 as usize)
            .ok_or(BatchError::NoSequenceSlot { seq_slot: seat, limit })?;
        if let Some(init) = &row.seq_init {
            state.assign(SlotOwner::of(row), init);
        }
        if state.owner != Some(SlotOwner::of(row)) {
            return Err(BatchError::SlotOwnerMismatch { request: row.request, seq_slot: seat });
        }
        state.host_drafts.clear();
        state.device_drafts = 0;
        let mut change = BlockTableChange { from: state.table_len, blocks: Vec::new() };
        for update in &row.table_updates {
            let end = update.first_entry as usize + update.blocks.len();
            if update.group != 0
                || update.first_entry as usize > state.table_len
                || end > self.table_width
            {
                return Err(BatchError::InvalidTableUpdate { request: row.request });
            }
            if let Some(block) = update.blocks.iter().find(|block| block.0 >= self.blocks) {
                return Err(BatchError::Block { block: block.0, limit: self.blocks });
            }
            change.add(update);
            state.table_len = end;
        }
        Ok(change)
    }

    /// State of a seat that `update` has accepted.
    pub(crate) fn get(&self, seat: SequenceSlot) -> &HostSequenceState {
        &self.states[seat.0 as usize]
    }

    /// Notes that `step` samples a token for `row`. Which one is the newest where drafts are verified the device's seat
    /// knows.
    pub(crate) fn mark_sampled(&mut self, row: &BatchRow, step: StepId) {
        let state = &mut self.states[row.seq_slot.0 as usize];
        state.sampled_at = Some(step);
        state.masked |= row.masked;
    }

    /// Whether `row` samples without a mask where one of an earlier step may still lie.
    pub(crate) fn clears_mask(&self, row: &BatchRow) -> bool {
        self.get(row.seq_slot).masked && row.samples && !row.masked
    }

    /// Stages that nothing but its own rules limits a seat any more.
    pub(crate) fn unmask(&mut self, seat: SequenceSlot, vocab: usize, stage: &mut StagingBuffer) {
        let state = &mut self.states[seat.0 as usize];
        state.masked = false;
        let mask_at = stage_allowed_mask(&state.sampling, vocab, stage);
        let (seat, rules) = (seat.0 as i32, state.rules);
        stage.inits.push(StageSequenceInit {
            seq_slot: seat,
            mask_at,
            params: rules,
            ..StageSequenceInit::default()
        });
    }

    /// Drafts of the row under way on a seat that `update` has accepted; rules that read earlier ids read them too.
    pub(crate) fn set_drafts(
        &mut self,
        row: &BatchRow,
        drafts: &[Token],
        stage: &mut StagingBuffer,
    ) {
        let state = &mut self.states[row.seq_slot.0 as usize];
        state.host_drafts.extend_from_slice(drafts);
        if !drafts.is_empty() && state.sampling.needs_token_history() {
            stage.inits.push(StageSequenceInit {
                seq_slot: row.seq_slot.0 as i32,
                history_at: stage.words.len() as i32,
                history_from: (row.start + row.len) as i32,
                history_len: drafts.len() as i32,
                mask_at: -1,
                reserved: [0; 3],
                params: state.rules,
            });
            stage.push_words(drafts.iter().map(|&id| id as i32));
        }
    }
}

impl HostSequenceSlots {
    /// As many drafts of the row under way are made on the device.
    pub(crate) fn expect_device_drafts(&mut self, row: &BatchRow) {
        self.states[row.seq_slot.0 as usize].device_drafts = row.drafts;
    }
}

impl BlockTableChange {
    /// Each update ends the table; a later one replaces what it overlaps.
    fn add(&mut self, update: &BlockTableUpdate) {
        let from = update.first_entry as usize;
        if from < self.from {
            self.blocks.clear();
            self.from = from;
        }
        self.blocks.truncate(from - self.from);
        self.blocks.extend(update.blocks.iter().map(|block| block.0 as i32));
    }
}

impl HostSequenceState {
    fn assign(&mut self, owner: SlotOwner, init: &SequenceInit) {
        self.owner = Some(owner);
        self.sampling.clone_from(&init.sampling);
        self.rules = sampling_params(init);
        self.prompt_len = init.prompt_len;
        self.sampled_at = None;
        self.masked = false;
        self.table_len = 0;
    }

    /// Drafts of the row under way.
    pub(crate) fn drafts(&self) -> u32 {
        self.host_drafts.len() as u32 + u32::from(self.device_drafts)
    }

    /// Entries of the block table.
    pub(crate) fn table_len(&self) -> usize {
        self.table_len
    }

    /// Whether the newest token on the seat is the one that `step` sampled.
    pub(crate) fn holds_token_of(&self, step: StepId) -> bool {
        self.sampled_at == Some(step)
    }

    /// Stages what changes single logits of a token at position `least` or behind it: bad words, stop ids that would come
    /// too early, and the bias. Returns the first edit and their number.
    pub(crate) fn stage_edits(&self, least: u32, stage: &mut StagingBuffer) -> (i32, i32) {
        let first = stage.edits.len();
        let masked = |id: Token| StageEdit { id, value: f32::NEG_INFINITY, ..StageEdit::default() };
        for word in &self.sampling.bad_words {
            let Some((&end, start)) = word.split_last() else { continue };
            let when_at = stage.push_words(start.iter().map(|&id| id as i32));
            stage.edits.push(StageEdit { when_at, when_len: start.len() as i32, ..masked(end) });
        }
        let may_stop = self.prompt_len.saturating_add(self.sampling.min_tokens);
        if least < may_stop {
            let when_at = may_stop.min(i32::MAX as u32) as i32; // The device knows the position.
            let early = |&id| StageEdit { when_at, when_len: -1, ..masked(id) };
            stage.edits.extend(self.sampling.stop_token_ids.iter().map(early));
        }
        let bias = self.sampling.logit_bias.iter();
        stage.edits.extend(bias.map(|&(id, value)| StageEdit {
            id,
            value,
            ..StageEdit::default()
        }));
        (first as i32, (stage.edits.len() - first) as i32)
    }
}

/// Words of a mask over `vocab` ids.
pub(crate) fn bitmask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// Stages the device's part of a seat.
pub(crate) fn stage_init(
    seat: SequenceSlot,
    init: &SequenceInit,
    vocab: usize,
    stage: &mut StagingBuffer,
) {
    let sampling = &init.sampling;
    let mask_at = stage_allowed_mask(sampling, vocab, stage);
    let history = if sampling.needs_token_history() { &init.token_history[..] } else { &[] };
    stage.inits.push(StageSequenceInit {
        seq_slot: seat.0 as i32,
        history_at: stage.words.len() as i32,
        history_from: 0,
        history_len: history.len() as i32,
        mask_at,
        reserved: [0; 3],
        params: sampling_params(init),
    });
    stage.push_words(history.iter().map(|&id| id as i32));
}

/// Stages what a seat may sample next: the ids of `mask`, as far as its own rules allow them.
pub(crate) fn stage_bitmask(
    seat: SequenceSlot,
    state: &HostSequenceState,
    mask: &[u32],
    vocab: usize,
    stage: &mut StagingBuffer,
) {
    let own = allowed_mask(&state.sampling, vocab);
    let word = |i: usize| {
        let own = own.as_ref().map_or(u32::MAX, |own| own[i]);
        (mask.get(i).copied().unwrap_or(0) & own) as i32
    };
    let mask_at = stage.push_words((0..bitmask_words(vocab)).map(word));
    let rules =
        SequenceSamplingParams { flags: state.rules.flags | ops::RULE_MASKED, ..state.rules };
    let seat = seat.0 as i32;
    stage.inits.push(StageSequenceInit {
        seq_slot: seat,
        mask_at,
        params: rules,
        ..StageSequenceInit::default()
    });
}

/// Stages the allowed ids of a request; where they begin, -1 if all are allowed.
fn stage_allowed_mask(sampling: &SamplingParams, vocab: usize, stage: &mut StagingBuffer) -> i32 {
    let allowed = allowed_mask(sampling, vocab);
    allowed.map_or(-1, |mask| stage.push_words(mask.into_iter().map(|word| word as i32)))
}

/// The allowed ids of a request as bits; `None` = all.
fn allowed_mask(sampling: &SamplingParams, vocab: usize) -> Option<Vec<u32>> {
    let allowed = sampling.allowed_token_ids.as_ref()?;
    let mut mask = vec![0u32; bitmask_words(vocab)];
    for &id in allowed.iter().filter(|&&id| (id as usize) < vocab) {
        mask[id as usize / 32] |= 1 << (id % 32);
    }
    Some(mask)
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
