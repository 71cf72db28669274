//! One request: committed tokens, how far they are computed, and the blocks that hold them.
//!
//! There is no status field and no prefill or decode type. A row forwards known tokens from
//! `computed` on and samples iff it reaches the last one; chunked prefill, recompute after a
//! preemption and decode are this one rule with different `want`.

use crate::cold::Cold;
use crate::masking::Masking;
use crate::{EngineConfig, StopReason, Submit, TokenEvent};
use kvcache::{Bug, Content, Hasher, KvCache, Table};
use protocol::{BlockId, RequestId, Seat, StepId, Token, Tokens};

/// Preemptions after which a request becomes guarded and is never a victim again.
pub(crate) const PREEMPTIONS_MAX: u8 = 4;

/// Newest committed tokens that lie beside the cursors.
const TAIL: usize = 16;

/// A request of one replica, waiting or running: what every step reads, in two and a half cache lines.
///
/// With thousands of requests running, a step takes as long as fetching them does. What most rows
/// do not need is one pointer further, in `cold`.
#[derive(Debug)]
#[repr(align(32))]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) cold: Box<Cold>,
    /// Ids that end the request: end of text first, then the user's. Every token of every step is
    /// compared with them, so the usual few lie in place.
    stops: Tokens,
    /// Step of the last row sent that samples: where a token not yet seen by the host lies.
    pub(crate) sampled_at: StepId,
    /// Grows with preemption and device loss; results of another epoch are dropped.
    pub(crate) epoch: u32,
    /// Row of device state; a request has one while it runs.
    pub(crate) seat: Option<Seat>,
    /// Committed tokens: prompt, then output.
    pub(crate) len: u32,
    /// Length at which the request ends: prompt plus `max_tokens`, at most the model's length.
    pub(crate) limit: u32,
    /// Positions written by rows sent, counting no accepted draft for rows in flight.
    pub(crate) computed: u32,
    /// Positions whose KV an applied output has confirmed.
    pub(crate) settled: u32,
    /// Leading full blocks that are published.
    pub(crate) published: u32,
    /// Entries of the table, and the leading ones that the device knows.
    pub(crate) blocks: u32,
    pub(crate) sent: u32,
    /// Free blocks set aside for this request's growth.
    pub(crate) reserved: u32,
    /// The newest tokens: the one at position p lies at p modulo the length.
    tail: [Token; TAIL],
    /// Rows in flight, and of these the ones that sample and their drafts in all.
    pub(crate) rows_in_flight: u8,
    pub(crate) promised: u8,
    pub(crate) slack: u16,
    pub(crate) preemptions: u8,
    /// Whether the last row sent in this epoch samples, so that the seat holds drafts.
    pub(crate) drafted: bool,
    /// Whether the next row is the first of its epoch.
    pub(crate) fresh: bool,
    /// Whether further full blocks may be published.
    pub(crate) publishing: bool,
    pub(crate) guarded: bool,
    /// How the masks of its rows that sample come, if it has any.
    pub(crate) masking: Masking,
    /// Whether an event was sent; the first one carries figures about admission.
    announced: bool,
}

const _: () = assert!(size_of::<Option<Request>>() == 160, "two and a half cache lines");

impl Request {
    pub(crate) fn new(submit: Submit, arrival: u64, now_ms: u64, config: &EngineConfig) -> Self {
        let (id, len) = (submit.id, submit.tokens.len() as u32);
        let limit = len.saturating_add(submit.max_tokens).min(config.limits.max_model_len);
        let masking = Masking::new(submit.masked_from);
        let extra_token = u32::from(config.planted.has(Bug::LengthLimitOffByOne));
        let stops = submit.eos_ids.iter().chain(&submit.stop_ids).copied().collect();
        let mut tail = [0; TAIL];
        for (position, &token) in submit.tokens.iter().enumerate().rev().take(TAIL) {
            tail[position % TAIL] = token;
        }
        Self {
            id,
            cold: Box::new(Cold::new(submit, arrival, now_ms)),
            stops,
            sampled_at: StepId(0),
            epoch: 0,
            seat: None,
            len,
            limit: limit + extra_token,
            computed: 0,
            settled: 0,
            published: 0,
            blocks: 0,
            sent: 0,
            reserved: 0,
            tail,
            rows_in_flight: 0,
            promised: 0,
            slack: 0,
            preemptions: 0,
            drafted: false,
            fresh: true,
            publishing: true,
            guarded: false,
            masking,
            announced: false,
        }
    }

    /// Commits a produced token.
    #[inline]
    pub(crate) fn commit(&mut self, token: Token) {
        self.tail[self.len as usize % TAIL] = token;
        self.len += 1;
        self.masking.advance();
        if self.masking == Masking::Later && self.len >= self.cold.asked.masked_from {
            self.masking.begin();
        }
        if (self.len as usize).is_multiple_of(TAIL) {
            self.gather();
        }
    }

    /// Brings the newest tokens to the others. Whoever reads `tokens` calls it first; those of
    /// waiting requests are gathered.
    pub(crate) fn gather(&mut self) {
        self.gather_below(self.len);
    }

    /// The same unless the tokens below `position` are gathered already.
    pub(crate) fn gather_below(&mut self, position: u32) {
        let tail = &self.tail;
        let gathered = self.cold.tokens.len();
        if gathered < position as usize {
            self.cold.tokens.extend((gathered..self.len as usize).map(|p| tail[p % TAIL]));
        }
    }

    /// The committed tokens, all gathered.
    pub(crate) fn tokens(&self) -> &[Token] {
        assert_eq!(
            self.cold.tokens.len() as u32,
            self.len,
            "tokens of {:?} are scattered",
            self.id
        );
        &self.cold.tokens
    }

    /// The last committed token.
    #[inline]
    pub(crate) fn last(&self) -> Token {
        self.tail[(self.len as usize - 1) % TAIL]
    }

    /// Why a committed `token` ends the request, if it does.
    #[inline]
    pub(crate) fn stop(&self, token: Token) -> Option<StopReason> {
        let place = self.stops.iter().position(|&id| id == token)?;
        let is_eos = place < self.cold.eos as usize;
        Some(if is_eos { StopReason::Eos(token) } else { StopReason::Id(token) })
    }

    /// Gives a request without blocks the found ones; they are pinned.
    pub(crate) fn claim(&mut self, mut table: Table, found: &[BlockId], kv: &mut KvCache) {
        kv.claim(&mut table, found);
        self.blocks = table.len();
        self.cold.table = table;
    }

    /// Appends free blocks to the table.
    pub(crate) fn grow(&mut self, count: u32, kv: &mut KvCache) {
        kv.grow(&mut self.cold.table, count);
        self.blocks += count;
    }

    /// Gives all blocks back; returns the emptied table.
    pub(crate) fn free(&mut self, kv: &mut KvCache) -> Table {
        let mut table = std::mem::take(&mut self.cold.table);
        kv.free(&mut table);
        self.blocks = 0;
        table
    }

    /// Loses a block for ever, as a forgotten release would.
    #[cfg(feature = "planted")]
    pub(crate) fn leak(&mut self, kv: &mut KvCache) {
        kv.leak(&mut self.cold.table);
        self.blocks = self.cold.table.len();
    }

    /// Computes the keys of full blocks that have none yet.
    pub(crate) fn extend_keys(&mut self, hasher: &Hasher) {
        let Cold { keys, tokens, extra, .. } = &mut *self.cold;
        hasher.extend(keys, tokens, extra.as_deref());
    }

    /// Committed tokens plus those promised by rows in flight.
    #[inline]
    pub(crate) fn known(&self) -> u32 {
        self.len + u32::from(self.promised)
    }

    /// Known tokens that no row has forwarded.
    #[inline]
    pub(crate) fn want(&self) -> u32 {
        self.known() - self.computed
    }

    /// Whether the next row produces a token from the last known one. Requests about to reach their
    /// limit do not, so a length end never wastes a row; masked ones wait for the token itself, because the mask
    /// of the next one follows from it.
    #[inline]
    pub(crate) fn decodes(&self) -> bool {
        let waits = || self.masking.waits() || self.promised > 0 && self.samples_masked();
        self.wants_next() && !waits()
    }

    /// Whether the token behind the last one promised, every draft accepted, is limited by a mask.
    #[inline]
    fn samples_masked(&self) -> bool {
        self.masking.is_on() || self.known() + u32::from(self.slack) >= self.unmasked_below()
    }

    /// Tokens below this position are sampled without a mask.
    #[inline]
    pub(crate) fn unmasked_below(&self) -> u32 {
        match self.masking {
            Masking::Free => u32::MAX,
            Masking::Later => self.cold.asked.masked_from,
            _ => 0,
        }
    }

    /// Whether all known tokens but the last are forwarded, and another one may follow.
    #[inline]
    fn wants_next(&self) -> bool {
        self.want() == 1 && self.known() + u32::from(self.slack) < self.limit
    }

    /// Whether the next row is a chunk of several tokens, or the last one of a prompt that is only scored.
    #[inline]
    pub(crate) fn resumes(&self) -> bool {
        self.want() > 0 && self.promised == 0 && !self.wants_next()
    }

    /// Whether a row that ends at position `end` samples.
    #[inline]
    pub(crate) fn samples_at(&self, end: u32) -> bool {
        end == self.known() && end < self.limit
    }

    /// Whether cached blocks may stand in for its prompt: log-probabilities need every position forwarded.
    pub(crate) fn reads_cache(&self) -> bool {
        self.cold.asked.sampling.prompt_logprobs.is_none()
            || self.cold.scored >= self.cold.prompt_len
    }

    pub(crate) fn content(&self) -> Content<'_> {
        let Cold { keys, extra, .. } = &*self.cold;
        Content { tokens: self.tokens(), keys, extra: extra.as_ref() }
    }

    /// Appends news of this request, to be filled in. The first event carries figures about its admission.
    ///
    /// Filled in where it lies: events built elsewhere and moved were the slowest part of a step.
    #[inline]
    pub(crate) fn tell<'a>(&mut self, events: &'a mut Vec<TokenEvent>) -> &'a mut TokenEvent {
        let event = events.push_mut(TokenEvent::EMPTY);
        event.request = self.id;
        event.preemptions = u32::from(self.preemptions);
        if !self.announced {
            self.announced = true;
            event.first_run = self.cold.asked.first_run;
        }
        event
    }

    /// Panics unless the hot part repeats what the cold part says.
    pub(crate) fn check(&self) {
        let Cold { tokens, table, .. } = &*self.cold;
        assert_eq!(self.blocks, table.len(), "blocks of {:?} miscounted", self.id);
        let gathered = tokens.len();
        assert!((gathered..=gathered + TAIL).contains(&(self.len as usize)), "tokens are lost");
        let newest = (self.len as usize).saturating_sub(TAIL)..gathered;
        let same = newest.into_iter().all(|p| self.tail[p % TAIL] == tokens[p]);
        assert!(same, "the newest tokens of {:?} differ", self.id);
    }

    /// Starts a new epoch: what rows in flight bring will be dropped, and everything is recomputed
    /// from committed tokens. The table must have been freed.
    pub(crate) fn restart(&mut self) {
        assert!(self.cold.table.is_empty(), "a restarted request holds no blocks");
        self.epoch += 1;
        (self.computed, self.settled, self.published, self.sent) = (0, 0, 0, 0);
        (self.rows_in_flight, self.promised, self.slack, self.reserved) = (0, 0, 0, 0);
        (self.drafted, self.fresh, self.publishing) = (false, true, true);
    }
}
