//! One request: committed tokens, how far they are computed, and the blocks that hold them.
//!
//! There is no status field and no prefill or decode type. A row forwards known tokens from
//! `computed` on and samples iff it reaches the last one; chunked prefill, recompute after a
//! preemption and decode are this one rule with different `want`.

use crate::line::Key;
use crate::{EngineConfig, Finish, StopReason, Submit, TokenEvent};
use kvcache::{BlockKey, Bug, Content, ExtraKeys, Table};
use protocol::{RequestId, Sampling, Seat, StepId, Token, Tokens};
use std::sync::Arc;

/// Preemptions after which a request becomes guarded and is never a victim again.
pub(crate) const PREEMPTIONS_MAX: u32 = 4;

/// Output tokens that a request has room for from the start; longer outputs grow by doubling.
const TOKENS_AHEAD: u32 = 1_024;

/// A request of one replica, waiting or running.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// Grows with preemption and device loss; results of another epoch are dropped.
    pub(crate) epoch: u32,
    /// Row of device state; a request has one while it runs.
    pub(crate) seat: Option<Seat>,
    /// Committed tokens only: prompt, then output.
    pub(crate) tokens: Vec<Token>,
    /// The last committed token, beside the cursors: a decode row needs nothing else of `tokens`.
    pub(crate) last: Token,
    pub(crate) prompt_len: u32,
    /// Length at which the request ends: prompt plus `max_tokens`, at most the model's length.
    pub(crate) limit: u32,
    /// Positions written by rows sent, counting no accepted draft for rows in flight.
    pub(crate) computed: u32,
    /// Positions whose KV an applied output has confirmed.
    pub(crate) settled: u32,
    /// Rows in flight, and of these the ones that sample and their drafts in all.
    pub(crate) rows_in_flight: u32,
    pub(crate) promised: u32,
    pub(crate) slack: u32,
    /// Step of the last row sent that samples: where a token not yet seen by the host lies.
    pub(crate) sampled_at: StepId,
    /// Whether the last row sent in this epoch samples, so that the seat holds drafts.
    pub(crate) drafted: bool,
    /// Whether the next row is the first of its epoch.
    pub(crate) fresh: bool,
    /// Whether further full blocks may be published.
    pub(crate) publishing: bool,
    /// Leading full blocks that are published.
    pub(crate) published: u32,
    /// Leading table entries that the device knows.
    pub(crate) sent: u32,
    pub(crate) table: Table,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) guarded: bool,
    /// Free blocks set aside for this request's growth.
    pub(crate) reserved: u32,
    pub(crate) preemptions: u32,
    pub(crate) key: Key,
    pub(crate) stops: Stops,
    /// Prompt position whose log-probability is delivered next.
    pub(crate) scored: u32,
    /// Whether an event was sent; the first one carries figures about admission.
    pub(crate) announced: bool,
    pub(crate) asked: Box<Asked>,
}

/// What the user asked and what steps rarely read.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) sampling: Sampling,
    pub(crate) key: u64,
    pub(crate) extra: Option<Arc<ExtraKeys>>,
    /// The replica was chosen by the user: the request moves to no other.
    pub(crate) pinned: bool,
    /// Tokens this request adds to its replica's outstanding load.
    pub(crate) charge: u64,
    pub(crate) submitted_ms: u64,
    /// First admission: when, and prompt tokens found in the cache.
    pub(crate) admitted: Option<Admitted>,
}

/// Figures of a request's first admission.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Admitted {
    pub(crate) at_ms: u64,
    pub(crate) cached_tokens: u32,
}

/// Ids that end a request: end of text first, then the user's. Every token of every step is compared
/// with them, so the usual few lie in place.
#[derive(Debug)]
pub(crate) struct Stops {
    ids: Tokens,
    eos: u32,
}

impl Stops {
    fn new(eos_ids: &[Token], stop_ids: &[Token]) -> Self {
        let ids = eos_ids.iter().chain(stop_ids).copied().collect();
        Self { ids, eos: eos_ids.len() as u32 }
    }

    /// Why `token` ends the request, if it does.
    #[inline]
    pub(crate) fn reason(&self, token: Token) -> Option<StopReason> {
        let place = self.ids.iter().position(|&id| id == token)?;
        let is_eos = place < self.eos as usize;
        Some(if is_eos { StopReason::Eos(token) } else { StopReason::Id(token) })
    }
}

impl Request {
    pub(crate) fn new(submit: Submit, arrival: u64, now_ms: u64, config: &EngineConfig) -> Self {
        let prompt_len = submit.tokens.len() as u32;
        let mut tokens = submit.tokens;
        tokens.reserve_exact(submit.max_tokens.min(TOKENS_AHEAD) as usize);
        let limit = prompt_len.saturating_add(submit.max_tokens).min(config.limits.max_model_len);
        let extra_token = u32::from(config.planted.has(Bug::LengthLimitOffByOne));
        let asked = Asked {
            sampling: submit.sampling,
            key: submit.key,
            extra: submit.extra,
            pinned: submit.replica.is_some(),
            charge: tokens.len() as u64,
            submitted_ms: now_ms,
            admitted: None,
        };
        Self {
            id: submit.id,
            epoch: 0,
            seat: None,
            last: tokens.last().copied().unwrap_or_default(),
            tokens,
            prompt_len,
            limit: limit + extra_token,
            computed: 0,
            settled: 0,
            rows_in_flight: 0,
            promised: 0,
            slack: 0,
            sampled_at: StepId(0),
            drafted: false,
            fresh: true,
            publishing: true,
            published: 0,
            sent: 0,
            table: Table::default(),
            keys: submit.keys,
            guarded: false,
            reserved: 0,
            preemptions: 0,
            key: Key { priority: submit.priority, arrival },
            stops: Stops::new(&submit.eos_ids, &submit.stop_ids),
            scored: 1,
            announced: false,
            asked: Box::new(asked),
        }
    }

    /// Commits a produced token.
    #[inline]
    pub(crate) fn commit(&mut self, token: Token) {
        self.tokens.push(token);
        self.last = token;
    }

    /// Committed tokens plus those promised by rows in flight.
    #[inline]
    pub(crate) fn known(&self) -> u32 {
        self.tokens.len() as u32 + self.promised
    }

    /// Known tokens that no row has forwarded.
    #[inline]
    pub(crate) fn want(&self) -> u32 {
        self.known() - self.computed
    }

    /// Whether the next row produces a token from the last known one. Requests about to reach their
    /// limit do not, so a length end never wastes a row.
    #[inline]
    pub(crate) fn decodes(&self) -> bool {
        self.want() == 1 && self.known() + self.slack < self.limit
    }

    /// Whether the next row is a chunk of several tokens, or the last one of a prompt that is only scored.
    #[inline]
    pub(crate) fn resumes(&self) -> bool {
        self.want() > 0 && self.promised == 0 && !self.decodes()
    }

    /// Whether a row that ends at position `end` samples.
    #[inline]
    pub(crate) fn samples_at(&self, end: u32) -> bool {
        end == self.known() && end < self.limit
    }

    /// Whether the request ends with its prompt.
    pub(crate) fn only_scores(&self) -> bool {
        self.limit == self.prompt_len
    }

    /// Whether cached blocks may stand in for its prompt: log-probabilities need every position forwarded.
    pub(crate) fn reads_cache(&self) -> bool {
        self.asked.sampling.prompt_logprobs.is_none() || self.scored >= self.prompt_len
    }

    pub(crate) fn content(&self) -> Content<'_> {
        Content { tokens: &self.tokens, keys: &self.keys, extra: self.asked.extra.as_ref() }
    }

    /// News of this request. The first event carries figures about its admission.
    #[inline]
    pub(crate) fn event(&mut self, tokens: Tokens, finish: Option<Finish>) -> TokenEvent {
        let first = if self.announced { None } else { self.asked.admitted };
        self.announced = true;
        TokenEvent {
            request: self.id,
            tokens,
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            cached_tokens: first.map(|f| f.cached_tokens.min(self.prompt_len)),
            queued_ms: first.map(|f| f.at_ms.saturating_sub(self.asked.submitted_ms)),
            preemptions: self.preemptions,
            finish,
        }
    }

    /// Starts a new epoch: what rows in flight bring will be dropped, and everything is recomputed
    /// from committed tokens. The table must have been freed.
    pub(crate) fn restart(&mut self) {
        assert!(self.table.is_empty(), "a restarted request holds no blocks");
        self.epoch += 1;
        (self.computed, self.settled, self.published, self.sent) = (0, 0, 0, 0);
        (self.rows_in_flight, self.promised, self.slack, self.reserved) = (0, 0, 0, 0);
        (self.drafted, self.fresh, self.publishing) = (false, true, true);
    }
}
