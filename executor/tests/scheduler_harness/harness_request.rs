//! A request of the test scheduler, and the outputs of its rows.

use super::model_configs::VOCAB;
use super::request_tables::RequestTables;
use super::scripted_bitmasks::allows;
use protocol::{BatchRow, RowOutput, SamplingParams, StepId, Token, TokenLogprobs};

/// Next tokens of a request that a step computes.
pub(crate) struct HarnessRequestChunk<'a> {
    pub(crate) request: &'a mut HarnessRequest,
    /// Number of tokens.
    pub(crate) len: usize,
}

/// A request of the test scheduler, with the state that a scheduler tracks.
pub(crate) struct HarnessRequest {
    pub(crate) tokens: Vec<Token>,
    pub(crate) prompt_len: usize,
    pub(crate) computed: usize,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) prompt_logprobs: Vec<TokenLogprobs>,
    /// Result of the pooling method, once the whole prompt is computed.
    pub(crate) pooled: Vec<f32>,
    pub(crate) table: RequestTables,
    /// Whether rows that sample have a grammar bitmask. The test bitmask depends only on the newest token.
    pub(crate) masked: bool,
    /// Maximum number of draft tokens per row.
    pub(crate) drafts: u8,
    /// Number of draft tokens proposed so far.
    pub(crate) drafted: usize,
    /// State slot that the next row reads instead of the request's own one: a checkpoint.
    pub(crate) checkpoint: Option<u32>,
    /// Whether the spare state slot has the state, which rows with a grammar bitmask write if their own slot has it.
    pub(super) in_spare: bool,
    /// Number of draft tokens accepted so far.
    pub(crate) accepted: usize,
    pub(super) sampling: SamplingParams,
    pub(super) key: u64,
    pub(super) id: u64,
    pub(super) epoch: u32,
    pub(super) seq_slot: u32,
    pub(super) needs_init: bool,
    pub(super) sampled_at: Option<StepId>,
    /// Totals over the request's rows in flight: number of tokens (without draft tokens), number of rows that
    /// sample, number of draft tokens.
    pub(super) in_flight: [usize; 3],
}

impl HarnessRequest {
    /// Returns the next `len` tokens of the request as part of a step.
    pub(crate) const fn chunk(&mut self, len: usize) -> HarnessRequestChunk<'_> {
        HarnessRequestChunk { request: self, len }
    }

    /// Creates a request with a prompt that is derived from `id`.
    pub(crate) fn new(id: u64, prompt_len: usize, sampling: SamplingParams) -> Self {
        let token = |i| ((id * 131 + i * i * 7 + i * 29 + 3) % u64::from(VOCAB)) as Token;
        Self {
            tokens: (0..prompt_len as u64).map(token).collect(),
            prompt_len,
            computed: 0,
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            pooled: Vec::new(),
            table: RequestTables::default(),
            masked: false,
            drafts: 0,
            drafted: 0,
            checkpoint: None,
            in_spare: false,
            accepted: 0,
            sampling,
            key: id.wrapping_mul(0x9E37_79B9_7F4A_7C15),
            id,
            epoch: 1,
            seq_slot: (id % 40) as u32,
            needs_init: true,
            sampled_at: None,
            in_flight: [0; 3],
        }
    }

    pub(crate) fn in_slot(mut self, seq_slot: u32) -> Self {
        self.move_to_slot(seq_slot);
        self
    }

    /// Assigns sequence slot `seq_slot` to a request that has not run.
    pub(crate) fn move_to_slot(&mut self, seq_slot: u32) {
        self.seq_slot = seq_slot;
    }

    /// Returns the generated tokens and their log-probabilities.
    pub(crate) fn output(&self) -> (Vec<Token>, Vec<TokenLogprobs>) {
        (self.tokens[self.prompt_len..].to_vec(), self.logprobs.clone())
    }

    /// Preempts the request: assigns sequence slot `seq_slot`, discards the computed positions, and returns
    /// the blocks to free.
    pub(crate) fn preempt(&mut self, seq_slot: u32) -> RequestTables {
        self.epoch += 1;
        self.seq_slot = seq_slot;
        self.needs_init = true;
        (self.computed, self.sampled_at, self.in_flight) = (0, None, [0; 3]);
        std::mem::take(&mut self.table)
    }

    /// Adds a submitted row to the totals in `in_flight`; if `over` is true, subtracts a finished row
    /// instead.
    pub(super) fn set_in_flight(&mut self, row: &BatchRow, over: bool) {
        let of_row = [row.len as usize, row.samples.into(), row.drafts.into()];
        for (sum, of_row) in self.in_flight.iter_mut().zip(of_row) {
            *sum = if over { *sum - of_row } else { *sum + of_row };
        }
    }

    /// Checks the output of a row, and adds its tokens and log-probabilities to the request.
    pub(crate) fn apply_output(&mut self, row: &BatchRow, result: &RowOutput) {
        assert_eq!(result.error, None);
        let accepted = usize::from(result.accepted);
        assert_eq!(result.sampled_tokens.len(), usize::from(row.samples) + accepted);
        self.in_spare ^= row.masked;
        if row.masked {
            let before = self.tokens.last().into_iter().chain(&result.sampled_tokens[..]);
            let mut pairs = before.zip(&result.sampled_tokens[..]);
            assert!(pairs.all(|(&last, &id)| allows(last, id)), "a token is not allowed");
        }
        assert!(result.accepted <= result.drafted && result.drafted <= row.drafts);
        self.computed += row.len as usize + accepted;
        self.drafted += usize::from(result.drafted);
        self.accepted += accepted;
        self.tokens.extend(&result.sampled_tokens);
        self.logprobs.extend(result.logprobs.clone());
        if let Some(prompt) = &result.prompt {
            self.prompt_logprobs.extend(prompt.logprobs.clone());
            self.pooled.extend(&prompt.pooled);
        }
    }

    /// Number of known tokens, plus the minimum number of tokens that the rows in flight will sample.
    pub(super) fn expected_len(&self) -> usize {
        self.tokens.len() + self.in_flight[1]
    }

    /// Start position of the next row if no draft token in flight is accepted.
    pub(super) fn start(&self) -> usize {
        self.computed + self.in_flight[0]
    }

    pub(crate) fn remaining(&self) -> usize {
        self.expected_len() - self.start()
    }
}
