//! What the host remembers of each running request, one seat per request, and how a row changes it.
//!
//! The rest of a seat (tables, rules, history, last token) lies on the device, where it is set up by the
//! first row of a request's epoch. Nothing on either side is the only copy of anything, so an executor
//! may be lost at any time.

use crate::BatchError;
use ops::{SeatRules, Stage, StageEdit, StageInit};
use protocol::{RequestId, Row, Sampling, Seat, SeatInit, StepId, TableUpdate, Token};

/// All seats.
pub(crate) struct Seats {
    states: Vec<SeatState>,
    width: usize,
    blocks: u32,
}

/// State of one request.
pub(crate) struct SeatState {
    /// Who sits here, in which epoch; `None` before the first request.
    owner: Option<(RequestId, u32)>,
    /// How its tokens are chosen, and the same as the device has it.
    pub(crate) sampling: Sampling,
    rules: SeatRules,
    /// Positions from here on are output.
    pub(crate) prompt_len: u32,
    /// The newest step that sampled a token here.
    sampled_at: Option<StepId>,
    /// What the row under way guesses, as far as the host does.
    pub(crate) guesses: Vec<Token>,
    /// Guesses that the device makes instead.
    pub(crate) made: u8,
    /// The mask of a step may lie on the device's seat.
    masked: bool,
    table_len: usize,
}

/// Entries of a block table that a row replaces.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TableChange {
    /// First entry.
    pub(crate) from: usize,
    /// The new ones, up to the end of the table.
    pub(crate) blocks: Vec<i32>,
}

impl Seats {
    /// `seats` empty seats for tables of up to `width` blocks out of a pool of `blocks`.
    pub(crate) fn new(seats: u32, width: usize, blocks: u32) -> Self {
        let empty = || SeatState {
            owner: None,
            sampling: Sampling::greedy(),
            rules: SeatRules::default(),
            prompt_len: 0,
            sampled_at: None,
            guesses: Vec::new(),
            made: 0,
            masked: false,
            table_len: 0,
        };
        Self { states: (0..seats).map(|_| empty()).collect(), width, blocks }
    }

    /// Takes over what a row says about its seat: the occupant and the length of the block table.
    pub(crate) fn update(&mut self, row: &Row) -> Result<TableChange, BatchError> {
        let (seat, limit) = (row.seat, self.states.len());
        let state = self.states.get_mut(seat.0 as usize).ok_or(BatchError::Seat { seat, limit })?;
        if let Some(init) = &row.init {
            state.occupy((row.request, row.epoch), init);
        }
        if state.owner != Some((row.request, row.epoch)) {
            return Err(BatchError::Stranger { request: row.request, seat });
        }
        state.guesses.clear();
        state.made = 0;
        let mut change = TableChange { from: state.table_len, blocks: Vec::new() };
        for update in &row.tables {
            let end = update.from as usize + update.blocks.len();
            if update.group != 0 || update.from as usize > state.table_len || end > self.width {
                return Err(BatchError::Table { request: row.request });
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
    pub(crate) fn get(&self, seat: Seat) -> &SeatState {
        &self.states[seat.0 as usize]
    }

    /// Notes that `step` samples a token for `row`. Which one is the newest where drafts are verified the device's seat
    /// knows.
    pub(crate) fn samples(&mut self, row: &Row, step: StepId) {
        let state = &mut self.states[row.seat.0 as usize];
        state.sampled_at = Some(step);
        state.masked |= row.masked;
    }

    /// Whether `row` samples without a mask where one of an earlier step may still lie.
    pub(crate) fn is_unmasked_by(&self, row: &Row) -> bool {
        self.get(row.seat).masked && row.samples && !row.masked
    }

    /// Stages that nothing but its own rules limits a seat any more.
    pub(crate) fn unmask(&mut self, seat: Seat, vocab: usize, stage: &mut Stage) {
        let state = &mut self.states[seat.0 as usize];
        state.masked = false;
        let mask_at = stage_own_mask(&state.sampling, vocab, stage);
        let (seat, rules) = (seat.0 as i32, state.rules);
        stage.inits.push(StageInit { seat, mask_at, rules, ..StageInit::default() });
    }

    /// Drafts of the row under way on a seat that `update` has accepted; rules that read earlier ids read them too.
    pub(crate) fn guess(&mut self, row: &Row, drafts: &[Token], stage: &mut Stage) {
        let state = &mut self.states[row.seat.0 as usize];
        state.guesses.extend_from_slice(drafts);
        if !drafts.is_empty() && state.sampling.reads_history() {
            stage.inits.push(StageInit {
                seat: row.seat.0 as i32,
                history_at: stage.words.len() as i32,
                history_from: (row.start + row.len) as i32,
                history_len: drafts.len() as i32,
                mask_at: -1,
                reserved: [0; 3],
                rules: state.rules,
            });
            stage.push_words(drafts.iter().map(|&id| id as i32));
        }
    }
}

impl Seats {
    /// As many drafts of the row under way are made on the device.
    pub(crate) fn await_drafts(&mut self, row: &Row) {
        self.states[row.seat.0 as usize].made = row.drafts;
    }
}

impl TableChange {
    /// Each update ends the table; a later one replaces what it overlaps.
    fn add(&mut self, update: &TableUpdate) {
        let from = update.from as usize;
        if from < self.from {
            self.blocks.clear();
            self.from = from;
        }
        self.blocks.truncate(from - self.from);
        self.blocks.extend(update.blocks.iter().map(|block| block.0 as i32));
    }
}

impl SeatState {
    fn occupy(&mut self, owner: (RequestId, u32), init: &SeatInit) {
        self.owner = Some(owner);
        self.sampling.clone_from(&init.sampling);
        self.rules = rules(init);
        self.prompt_len = init.prompt_len;
        self.sampled_at = None;
        self.masked = false;
        self.table_len = 0;
    }

    /// Drafts of the row under way.
    pub(crate) fn drafts(&self) -> u32 {
        self.guesses.len() as u32 + u32::from(self.made)
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
    pub(crate) fn stage_edits(&self, least: u32, stage: &mut Stage) -> (i32, i32) {
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
            stage.edits.extend(self.sampling.stop_ids.iter().map(early));
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
pub(crate) fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// Stages the device's part of a seat.
pub(crate) fn stage_init(seat: Seat, init: &SeatInit, vocab: usize, stage: &mut Stage) {
    let sampling = &init.sampling;
    let mask_at = stage_own_mask(sampling, vocab, stage);
    let history = if sampling.reads_history() { &init.history[..] } else { &[] };
    stage.inits.push(StageInit {
        seat: seat.0 as i32,
        history_at: stage.words.len() as i32,
        history_from: 0,
        history_len: history.len() as i32,
        mask_at,
        reserved: [0; 3],
        rules: rules(init),
    });
    stage.push_words(history.iter().map(|&id| id as i32));
}

/// Stages what a seat may sample next: the ids of `mask`, as far as its own rules allow them.
pub(crate) fn stage_mask(
    seat: Seat,
    state: &SeatState,
    mask: &[u32],
    vocab: usize,
    stage: &mut Stage,
) {
    let own = allowed_mask(&state.sampling, vocab);
    let word = |i: usize| {
        let own = own.as_ref().map_or(u32::MAX, |own| own[i]);
        (mask.get(i).copied().unwrap_or(0) & own) as i32
    };
    let mask_at = stage.push_words((0..mask_words(vocab)).map(word));
    let rules = SeatRules { flags: state.rules.flags | ops::RULE_MASKED, ..state.rules };
    let seat = seat.0 as i32;
    stage.inits.push(StageInit { seat, mask_at, rules, ..StageInit::default() });
}

/// Stages the allowed ids of a request; where they begin, -1 if all are allowed.
fn stage_own_mask(sampling: &Sampling, vocab: usize, stage: &mut Stage) -> i32 {
    let allowed = allowed_mask(sampling, vocab);
    allowed.map_or(-1, |mask| stage.push_words(mask.into_iter().map(|word| word as i32)))
}

/// The allowed ids of a request as bits; `None` = all.
fn allowed_mask(sampling: &Sampling, vocab: usize) -> Option<Vec<u32>> {
    let allowed = sampling.allowed.as_ref()?;
    let mut mask = vec![0u32; mask_words(vocab)];
    for &id in allowed.iter().filter(|&&id| (id as usize) < vocab) {
        mask[id as usize / 32] |= 1 << (id % 32);
    }
    Some(mask)
}

fn rules(init: &SeatInit) -> SeatRules {
    let s = &init.sampling;
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    SeatRules {
        temperature: s.temperature,
        top_p: s.top_p,
        min_p: s.min_p,
        top_k: s.top_k.min(i32::MAX as u32) as i32,
        repetition: s.repetition,
        frequency: s.frequency,
        presence: s.presence,
        flags: flag(s.allowed.is_some(), ops::RULE_MASKED)
            | flag(s.reads_history(), ops::RULE_HISTORY),
        key: init.key,
        prompt_len: init.prompt_len as i32,
        reserved: 0,
    }
}
