//! One request: committed tokens, how far they are computed, and the blocks that hold them.
//!
//! There is no status field and no prefill or decode type. A row forwards known tokens from
//! `computed` on and samples iff it reaches the last one; chunked prefill, recompute after a
//! preemption and decode are this one rule with different `want`.

use crate::cold_fields::ColdFields;
use crate::mask_state::MaskState;
use crate::{RequestSubmission, SchedulerConfig, StopReason, TokenEvent};
use kvcache::{BlockHasher, BlockTable, InjectedFault, KvCache, SequenceContent};
use protocol::{BlockId, RequestId, SequenceSlot, StepId, Token, TokenVec};

/// Preemptions after which a request becomes guarded and is never a victim again.
pub(crate) const PREEMPTIONS_MAX: u8 = 4;

/// Newest committed tokens that lie beside the cursors.
const TAIL_TOKENS: usize = 16;

/// A request of one replica, waiting or running: what every step reads, in two and a half cache lines.
///
/// With thousands of requests running, a step takes as long as fetching them does. What most rows
/// do not need is one pointer further, in `cold`.
#[derive(Debug)]
#[repr(align(32))]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) cold_fields: Box<ColdFields>,
    /// Ids that end the request: end of text first, then the user's. Every token of every step is
    /// compared with them, so the usual few lie in place.
    stop_ids: TokenVec,
    /// Step of the last row sent that samples: where a token not yet seen by the host lies.
    pub(crate) last_sampling_step: StepId,
    /// Grows with preemption and device loss; results of another epoch are dropped.
    pub(crate) epoch: u32,
    /// Row of device state; a request has one while it runs.
    pub(crate) seq_slot: Option<SequenceSlot>,
    /// Committed tokens: prompt, then output.
    pub(crate) len: u32,
    /// Length at which the request ends: prompt plus `max_tokens`, at most the model's length.
    pub(crate) limit: u32,
    /// Positions written by rows sent, counting no accepted draft for rows in flight.
    pub(crate) computed_tokens: u32,
    /// Positions whose KV an applied output has confirmed.
    pub(crate) committed_kv_len: u32,
    /// Leading full blocks that are published.
    pub(crate) published_blocks: u32,
    /// Entries of the table, and the leading ones that the device knows.
    pub(crate) block_count: u32,
    pub(crate) sent_blocks: u32,
    /// Free blocks set aside for this request's growth.
    pub(crate) reserved_blocks: u32,
    /// The newest tokens: the one at position p lies at p modulo the length.
    tail: [Token; TAIL_TOKENS],
    /// Rows in flight, and of these the ones that sample and their drafts in all.
    pub(crate) rows_in_flight: u8,
    pub(crate) pending_samples: u8,
    pub(crate) draft_slack: u16,
    pub(crate) preemptions: u8,
    /// Whether the last row sent in this epoch samples, so that the seat holds drafts.
    pub(crate) slot_has_drafts: bool,
    /// Whether the next row is the first of its epoch.
    pub(crate) first_row_of_epoch: bool,
    /// Whether further full blocks may be published.
    pub(crate) may_publish: bool,
    pub(crate) non_preemptible: bool,
    /// How the masks of its rows that sample come, if it has any.
    pub(crate) mask_state: MaskState,
    /// Whether an event was sent; the first one carries figures about admission.
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
        let masking = MaskState::new(submit.first_masked_token);
        let extra_token =
            u32::from(config.fault_injection.is_active(InjectedFault::LengthLimitOffByOne));
        let stops = submit.eos_ids.iter().chain(&submit.stop_ids).copied().collect();
        let mut tail = [0; TAIL_TOKENS];
        for (position, &token) in submit.tokens.iter().enumerate().rev().take(TAIL_TOKENS) {
            tail[position % TAIL_TOKENS] = token;
        }
        Self {
            id,
            cold_fields: Box::new(ColdFields::new(submit, arrival, now_ms)),
            stop_ids: stops,
            last_sampling_step: StepId(0),
            epoch: 0,
            seq_slot: None,
            len,
            limit: limit + extra_token,
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
            mask_state: masking,
            first_event_sent: false,
        }
    }

    /// Commits a produced token.
    #[inline]
    pub(crate) fn commit(&mut self, token: Token) {
        self.tail[self.len as usize % TAIL_TOKENS] = token;
        self.len += 1;
        self.mask_state.on_token_committed();
        if self.mask_state == MaskState::NotStarted
            && self.len >= self.cold_fields.params.first_masked_position
        {
            self.mask_state.begin();
        }
        if (self.len as usize).is_multiple_of(TAIL_TOKENS) {
            self.flush_tail();
        }
    }

    /// Brings the newest tokens to the others. Whoever reads `tokens` calls it first; those of
    /// waiting requests are gathered.
    pub(crate) fn flush_tail(&mut self) {
        self.flush_tail_below(self.len);
    }

    /// The same unless the tokens below `position` are gathered already.
    pub(crate) fn flush_tail_below(&mut self, position: u32) {
        let tail = &self.tail;
        let gathered = self.cold_fields.tokens.len();
        if gathered < position as usize {
            self.cold_fields
                .tokens
                .extend((gathered..self.len as usize).map(|p| tail[p % TAIL_TOKENS]));
        }
    }

    /// The committed tokens, all gathered.
    pub(crate) fn tokens(&self) -> &[Token] {
        assert_eq!(
            self.cold_fields.tokens.len() as u32,
            self.len,
            "tokens of {:?} are scattered",
            self.id
        );
        &self.cold_fields.tokens
    }

    /// The last committed token.
    #[inline]
    pub(crate) fn last_token(&self) -> Token {
        self.tail[(self.len as usize - 1) % TAIL_TOKENS]
    }

    /// Why a committed `token` ends the request, if it does.
    #[inline]
    pub(crate) fn stop_reason(&self, token: Token) -> Option<StopReason> {
        let place = self.stop_ids.iter().position(|&id| id == token)?;
        let is_eos = place < self.cold_fields.eos_count as usize;
        Some(if is_eos { StopReason::Eos(token) } else { StopReason::StopToken(token) })
    }

    /// Gives a request without blocks the found ones; they are pinned.
    pub(crate) fn pin_blocks(
        &mut self,
        mut table: BlockTable,
        found: &[BlockId],
        kv: &mut KvCache,
    ) {
        kv.pin(&mut table, found);
        self.block_count = table.len();
        self.cold_fields.block_table = table;
    }

    /// Appends free blocks to the table.
    pub(crate) fn allocate_blocks(&mut self, count: u32, kv: &mut KvCache) {
        kv.allocate(&mut self.cold_fields.block_table, count);
        self.block_count += count;
    }

    /// Gives all blocks back; returns the emptied table.
    pub(crate) fn free_blocks(&mut self, kv: &mut KvCache) -> BlockTable {
        let mut table = std::mem::take(&mut self.cold_fields.block_table);
        kv.free(&mut table);
        self.block_count = 0;
        table
    }

    /// Loses a block for ever, as a forgotten release would.
    #[cfg(feature = "planted")]
    pub(crate) fn leak_block(&mut self, kv: &mut KvCache) {
        kv.leak_block(&mut self.cold_fields.block_table);
        self.block_count = self.cold_fields.block_table.len();
    }

    /// Computes the keys of full blocks that have none yet.
    pub(crate) fn extend_block_keys(&mut self, hasher: &BlockHasher) {
        let ColdFields { block_keys: keys, tokens, extra_keys: extra, .. } = &mut *self.cold_fields;
        hasher.extend_keys(keys, tokens, extra.as_deref());
    }

    /// Committed tokens plus those promised by rows in flight.
    #[inline]
    pub(crate) fn known_len(&self) -> u32 {
        self.len + u32::from(self.pending_samples)
    }

    /// Known tokens that no row has forwarded.
    #[inline]
    pub(crate) fn uncomputed_tokens(&self) -> u32 {
        self.known_len() - self.computed_tokens
    }

    /// Whether the next row produces a token from the last known one. Requests about to reach their
    /// limit do not, so a length end never wastes a row; masked ones wait for the token itself, because the mask
    /// of the next one follows from it.
    #[inline]
    pub(crate) fn can_decode(&self) -> bool {
        let waits = || {
            self.mask_state.is_waiting() || self.pending_samples > 0 && self.next_token_is_masked()
        };
        self.needs_one_token() && !waits()
    }

    /// Whether the token behind the last one promised, every draft accepted, is limited by a mask.
    #[inline]
    fn next_token_is_masked(&self) -> bool {
        self.mask_state.is_masked()
            || self.known_len() + u32::from(self.draft_slack) >= self.first_masked_position()
    }

    /// Tokens below this position are sampled without a mask.
    #[inline]
    pub(crate) fn first_masked_position(&self) -> u32 {
        match self.mask_state {
            MaskState::Unmasked => u32::MAX,
            MaskState::NotStarted => self.cold_fields.params.first_masked_position,
            _ => 0,
        }
    }

    /// Whether all known tokens but the last are forwarded, and another one may follow.
    #[inline]
    fn needs_one_token(&self) -> bool {
        self.uncomputed_tokens() == 1 && self.known_len() + u32::from(self.draft_slack) < self.limit
    }

    /// Whether the next row is a chunk of several tokens, or the last one of a prompt that is only scored.
    #[inline]
    pub(crate) fn continues_prefill(&self) -> bool {
        self.uncomputed_tokens() > 0 && self.pending_samples == 0 && !self.needs_one_token()
    }

    /// Whether a row that ends at position `end` samples.
    #[inline]
    pub(crate) fn samples_at(&self, end: u32) -> bool {
        end == self.known_len() && end < self.limit
    }

    /// Whether cached blocks may stand in for its prompt: log-probabilities need every position forwarded.
    pub(crate) fn may_use_prefix_cache(&self) -> bool {
        self.cold_fields.params.sampling.prompt_logprobs.is_none()
            || self.cold_fields.prompt_logprobs_sent >= self.cold_fields.prompt_len
    }

    pub(crate) fn content(&self) -> SequenceContent<'_> {
        let ColdFields { block_keys: keys, extra_keys: extra, .. } = &*self.cold_fields;
        SequenceContent { tokens: self.tokens(), block_keys: keys, extra_keys: extra.as_ref() }
    }

    /// Appends news of this request, to be filled in. The first event carries figures about its admission.
    ///
    /// Filled in where it lies: events built elsewhere and moved were the slowest part of a step.
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

    /// Panics unless the hot part repeats what the cold part says.
    pub(crate) fn check(&self) {
        let ColdFields { tokens, block_table: table, .. } = &*self.cold_fields;
        assert_eq!(self.block_count, table.len(), "blocks of {:?} miscounted", self.id);
        let gathered = tokens.len();
        assert!(
            (gathered..=gathered + TAIL_TOKENS).contains(&(self.len as usize)),
            "tokens are lost"
        );
        let newest = (self.len as usize).saturating_sub(TAIL_TOKENS)..gathered;
        let same = newest.into_iter().all(|p| self.tail[p % TAIL_TOKENS] == tokens[p]);
        assert!(same, "the newest tokens of {:?} differ", self.id);
    }

    /// Starts a new epoch: what rows in flight bring will be dropped, and everything is recomputed
    /// from committed tokens. The table must have been freed.
    pub(crate) fn restart(&mut self) {
        assert!(self.cold_fields.block_table.is_empty(), "a restarted request holds no blocks");
        self.epoch += 1;
        (self.computed_tokens, self.committed_kv_len, self.published_blocks, self.sent_blocks) =
            (0, 0, 0, 0);
        (self.rows_in_flight, self.pending_samples, self.draft_slack, self.reserved_blocks) =
            (0, 0, 0, 0);
        (self.slot_has_drafts, self.first_row_of_epoch, self.may_publish) = (false, true, true);
    }
}
