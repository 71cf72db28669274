//! One request: committed tokens, computed positions, and the blocks that hold them.
//!
//! There is no status field and no prefill or decode type. A row forwards known tokens from `computed_tokens`
//! on and samples iff it reaches the last known token. Chunked prefill, recomputation after a preemption and
//! decode differ only in the number of uncomputed tokens.

mod blocks;
pub(crate) mod states;

use crate::cold_fields::{RequestColdFields, WindowTableState};
use crate::mask_state::GrammarMaskState;
use crate::request::states::RequestStates;
use crate::{RequestSubmission, SchedulerConfig, StopReason, TokenEvent};
use kvcache::{KvCache, TableEntries};
use protocol::{RequestId, SequenceSlot, StepId, Token, TokenVec};

/// Number of preemptions after which a request becomes non-preemptible.
pub(crate) const PREEMPTIONS_MAX: u8 = 4;

/// Number of newest committed tokens that `Request::tail` stores inline.
const TAIL_TOKENS: usize = 16;

/// A waiting or running request of one replica: the fields that every step reads, in two and a half cache
/// lines.
///
/// With thousands of running requests, reading these cache lines takes most of the time of a step. Fields
/// that most rows do not need are in `cold_fields`.
#[derive(Debug)]
#[repr(align(32))]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) cold_fields: Box<RequestColdFields>,
    /// Token ids that end the request: EOS ids first, then stop ids of the client. Every committed token is
    /// compared with these ids, so short lists are stored inline.
    stop_ids: TokenVec,
    /// Id of the last sent step in which the request samples. Until the sampled token is applied, only the
    /// executor holds it, and the next row refers to the token by this step id.
    pub(crate) last_sampling_step: StepId,
    /// Epoch of the request, incremented by preemption and executor failure; row results of other epochs are
    /// dropped.
    pub(crate) epoch: u32,
    /// Sequence slot on the device while the request runs.
    pub(crate) seq_slot: Option<SequenceSlot>,
    /// Number of committed tokens: prompt and output.
    pub(crate) len: u32,
    /// Length at which the request finishes: prompt plus `max_tokens`, at most `max_model_len`.
    pub(crate) limit: u32,
    /// Number of positions that have been computed or are computed by rows in flight. Draft tokens of rows in
    /// flight are not counted.
    pub(crate) computed_tokens: u32,
    /// Number of leading positions whose KV has been computed, according to the applied outputs.
    pub(crate) committed_kv_len: u32,
    /// Number of leading full blocks that are registered in the prefix cache.
    pub(crate) published_blocks: u32,
    /// Number of entries in the block tables of groups that keep all positions; `RequestColdFields::windows` has
    /// the number for window groups.
    pub(crate) block_count: u32,
    /// Number of leading entries of these tables that were sent to the executor.
    pub(crate) sent_blocks: u32,
    /// Free blocks reserved for the growth of this request.
    pub(crate) reserved_blocks: u32,
    /// Newest tokens: the token at position p is at index p modulo `TAIL_TOKENS`.
    tail: [Token; TAIL_TOKENS],
    /// Number of rows in flight.
    pub(crate) rows_in_flight: u8,
    /// Number of rows in flight that sample.
    pub(crate) pending_samples: u8,
    /// Sum of the draft tokens of rows in flight.
    pub(crate) draft_slack: u16,
    pub(crate) preemptions: u8,
    /// Whether the last row sent in the current epoch (since the last preemption or executor failure)
    /// samples, so that the device can propose draft tokens for the next row.
    pub(crate) slot_has_drafts: bool,
    /// Whether the next row is the first row of the request since its admission, its last preemption or an
    /// executor failure.
    pub(crate) first_row_of_epoch: bool,
    /// Whether further full blocks may be registered in the prefix cache.
    pub(crate) may_publish: bool,
    pub(crate) non_preemptible: bool,
    /// State of the grammar bitmasks of the request.
    pub(crate) mask_state: GrammarMaskState,
    /// Whether a token event was emitted; the first event carries admission data.
    first_event_sent: bool,
}

const _: () = assert!(size_of::<Option<Request>>() == 160, "two and a half cache lines");

impl Request {
    pub(crate) fn new(
        submit: RequestSubmission,
        arrival: u64,
        now_ms: u64,
        config: &SchedulerConfig,
    ) -> Self {
        let (id, len) = (submit.id, submit.tokens.len() as u32);
        let limit = len.saturating_add(submit.max_tokens).min(config.limits.max_model_len);
        let mask_state = GrammarMaskState::new(submit.first_masked_token);
        let stop_ids = submit.eos_ids.iter().chain(&submit.stop_ids).copied().collect();
        let mut tail = [0; TAIL_TOKENS];
        for (position, &token) in submit.tokens.iter().enumerate().rev().take(TAIL_TOKENS) {
            tail[position % TAIL_TOKENS] = token;
        }
        Self {
            id,
            cold_fields: Box::new(RequestColdFields::new(submit, arrival, now_ms)),
            stop_ids,
            last_sampling_step: StepId(0),
            epoch: 0,
            seq_slot: None,
            len,
            limit,
            computed_tokens: 0,
            committed_kv_len: 0,
            published_blocks: 0,
            block_count: 0,
            sent_blocks: 0,
            reserved_blocks: 0,
            tail,
            rows_in_flight: 0,
            pending_samples: 0,
            draft_slack: 0,
            preemptions: 0,
            slot_has_drafts: false,
            first_row_of_epoch: true,
            may_publish: true,
            non_preemptible: false,
            mask_state,
            first_event_sent: false,
        }
    }

    /// Appends a sampled token to the committed tokens. For the first token of a row,
    /// `GrammarMaskState::on_row_committed` is called before this function.
    #[inline]
    pub(crate) fn commit(&mut self, token: Token) {
        self.tail[self.len as usize % TAIL_TOKENS] = token;
        self.len += 1;
        if self.mask_state == GrammarMaskState::NotStarted
            && self.len >= self.cold_fields.params.first_masked_position
        {
            self.mask_state.begin();
        }
        if (self.len as usize).is_multiple_of(TAIL_TOKENS) {
            self.flush_tail();
        }
    }

    /// Copies the newest tokens from `tail` to the token vector. This is required before a call of `tokens`;
    /// the tokens of waiting requests are always flushed.
    pub(crate) fn flush_tail(&mut self) {
        self.flush_tail_below(self.len);
    }

    /// Copies the tokens in `tail` to the token vector, unless the vector already contains all tokens below
    /// `position`.
    pub(crate) fn flush_tail_below(&mut self, position: u32) {
        let tail = &self.tail;
        let flushed = self.cold_fields.tokens.len();
        if flushed < position as usize {
            self.cold_fields
                .tokens
                .extend((flushed..self.len as usize).map(|p| tail[p % TAIL_TOKENS]));
        }
    }

    /// Returns the committed tokens; panics if `flush_tail` was not called after the last commit.
    pub(crate) fn tokens(&self) -> &[Token] {
        assert_eq!(
            self.cold_fields.tokens.len() as u32,
            self.len,
            "tokens of {:?} are not flushed",
            self.id
        );
        &self.cold_fields.tokens
    }

    /// Returns the last committed token.
    #[inline]
    pub(crate) fn last_token(&self) -> Token {
        self.tail[(self.len as usize - 1) % TAIL_TOKENS]
    }

    /// Returns why a committed `token` ends the request, or `None`.
    #[inline]
    pub(crate) fn stop_reason(&self, token: Token) -> Option<StopReason> {
        let index = self.stop_ids.iter().position(|&id| id == token)?;
        let is_eos = index < self.cold_fields.eos_count as usize;
        Some(if is_eos { StopReason::Eos(token) } else { StopReason::StopToken(token) })
    }

    /// Returns the number of committed tokens plus tokens pending in rows in flight.
    #[inline]
    pub(crate) fn known_len(&self) -> u32 {
        self.len + u32::from(self.pending_samples)
    }

    /// Returns the number of known tokens that no row has forwarded.
    #[inline]
    pub(crate) fn uncomputed_tokens(&self) -> u32 {
        self.known_len() - self.computed_tokens
    }

    /// Returns whether the next row decodes: it forwards the last known token and samples. A request that may
    /// reach its length limit with the tokens in flight does not decode, so that no row is wasted. A request
    /// with a grammar waits until the token in flight is known, because the next bitmask depends on this
    /// token.
    #[inline]
    pub(crate) fn can_decode(&self) -> bool {
        let waits = || {
            self.mask_state.is_waiting() || self.pending_samples > 0 && self.next_token_is_masked()
        };
        self.needs_one_token() && !waits()
    }

    /// Returns whether the token after the last pending token is sampled under a grammar bitmask, if every
    /// draft token in flight is accepted.
    #[inline]
    fn next_token_is_masked(&self) -> bool {
        self.mask_state.is_masked()
            || self.known_len() + u32::from(self.draft_slack) >= self.first_masked_position()
    }

    /// Returns the first position whose token is sampled under a grammar bitmask.
    #[inline]
    pub(crate) fn first_masked_position(&self) -> u32 {
        match self.mask_state {
            GrammarMaskState::Unmasked => u32::MAX,
            GrammarMaskState::NotStarted => self.cold_fields.params.first_masked_position,
            _ => 0,
        }
    }

    /// Returns whether exactly one known token is uncomputed, and the request stays below its length limit
    /// even if all draft tokens in flight are accepted.
    #[inline]
    fn needs_one_token(&self) -> bool {
        self.uncomputed_tokens() == 1 && self.known_len() + u32::from(self.draft_slack) < self.limit
    }

    /// Returns whether the next row is a prefill chunk of several tokens, or the last token of a prompt
    /// without output (`max_tokens` 0).
    #[inline]
    pub(crate) fn continues_prefill(&self) -> bool {
        self.uncomputed_tokens() > 0 && self.pending_samples == 0 && !self.needs_one_token()
    }

    /// Returns whether a row that ends at position `end` samples.
    #[inline]
    pub(crate) fn samples_at(&self, end: u32) -> bool {
        end == self.known_len() && end < self.limit
    }

    /// Appends an event of this request for the caller to fill in. The first event carries admission data.
    ///
    /// The event is filled in place: building an event and then moving it was the slowest part of a step.
    #[inline]
    pub(crate) fn push_event<'a>(&mut self, events: &'a mut Vec<TokenEvent>) -> &'a mut TokenEvent {
        let event = events.push_mut(TokenEvent::EMPTY);
        event.request = self.id;
        event.preemptions = u32::from(self.preemptions);
        if !self.first_event_sent {
            self.first_event_sent = true;
            event.first_admission = self.cold_fields.params.first_admission;
        }
        event
    }

    /// Panics unless the fields of `Request` agree with the fields in `cold_fields`.
    pub(crate) fn check(&self, kv: &KvCache) {
        let RequestColdFields { tokens, block_tables, .. } = &*self.cold_fields;
        let TableEntries { kept, windowed } = self.table_entries(kv);
        let kept_groups = kv.group_counts().kept as usize;
        for (group, table) in block_tables.iter().enumerate() {
            let entries = if group < kept_groups { kept } else { windowed };
            assert_eq!(entries, table.len(), "blocks of {:?} miscounted, group {group}", self.id);
        }
        let flushed = tokens.len();
        assert!(
            (flushed..=flushed + TAIL_TOKENS).contains(&(self.len as usize)),
            "tokens are missing from the tail"
        );
        let newest = (self.len as usize).saturating_sub(TAIL_TOKENS)..flushed;
        let same = newest.into_iter().all(|p| self.tail[p % TAIL_TOKENS] == tokens[p]);
        assert!(same, "the newest tokens of {:?} differ from the tail", self.id);
    }

    /// Starts a new epoch: results of rows in flight will be dropped, and all committed tokens are
    /// recomputed. The block table must be empty.
    pub(crate) fn restart(&mut self) {
        assert!(self.cold_fields.block_tables.is_empty(), "a restarted request holds no blocks");
        assert!(self.cold_fields.states.slots.is_empty(), "a restarted request holds state slots");
        self.cold_fields.windows = WindowTableState::default();
        self.cold_fields.states = RequestStates::default();
        self.epoch += 1;
        (self.computed_tokens, self.committed_kv_len, self.published_blocks, self.sent_blocks) =
            (0, 0, 0, 0);
        (self.rows_in_flight, self.pending_samples, self.draft_slack, self.reserved_blocks) =
            (0, 0, 0, 0);
        (self.slot_has_drafts, self.first_row_of_epoch, self.may_publish) = (false, true, true);
    }
}
