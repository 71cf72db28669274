//! Limits of a replica's steps and of the waiting queue, fixed at start.

/// Limits that the scheduler enforces on steps, running requests and the waiting queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Maximum number of tokens forwarded by one step of one replica, draft tokens included
    /// (`--max-num-batched-tokens`).
    pub tokens_per_step: u32,
    /// Maximum number of running requests per replica (`--max-num-seqs`). Each running request has one
    /// sequence slot on the device.
    pub max_num_seqs: u32,
    /// Maximum length of a prefill chunk in tokens (`--long-prefill-token-threshold`); `None` =
    /// `tokens_per_step`.
    pub tokens_per_chunk: Option<u32>,
    /// Expected time in milliseconds of a step while requests are decoding (`--max-step-ms`): prefill chunks are shortened to it, to
    /// not less than one chunk quantum per step; `None` = no limit.
    pub max_step_ms: Option<u32>,
    /// Maximum number of steps that have been sent to the executors and whose output has not been applied, 1
    /// to 4. The default is 1 on the CPU and 2 on GPUs.
    pub steps_in_flight: u32,
    /// Maximum length of prompt plus output of one request (`--max-model-len`).
    pub max_model_len: u32,
    /// Vocabulary size: valid token ids are below it.
    pub vocab_size: u32,
    /// Maximum number of waiting requests over all replicas; further submissions are rejected.
    pub max_waiting_requests: u32,
    /// Maximum number of tokens of waiting requests over all replicas; further submissions are rejected.
    pub max_waiting_tokens: u64,
    /// Whether one step may contain both decode rows and prefill chunks. Set to false only to measure the
    /// effect.
    pub mixed_batches: bool,
    /// Number of draft tokens per decode row (k), at most [`DRAFT_TOKENS_MAX`](crate::DRAFT_TOKENS_MAX); 0
    /// disables speculative decoding.
    pub draft_tokens: u8,
    /// Whether the draft token proposer reads the token history of every request. If so, each sequence slot
    /// is initialised with the token history.
    pub needs_token_history: bool,
    /// Distance in tokens of the checkpoints of recurrent state, rounded up to whole blocks; 0 = checkpoints only at
    /// the end of prompts and where prefix hits were shortened.
    pub state_checkpoint_tokens: u32,
    /// Time in milliseconds that the requests of a failed replica wait for its restart before they fail.
    pub failure_timeout_ms: u64,
}

impl SchedulerLimits {
    /// Returns the default limits of the CPU backend: 512 tokens per step, one step in flight.
    pub fn cpu(max_model_len: u32, vocab_size: u32) -> Self {
        Self {
            tokens_per_step: 512,
            max_num_seqs: 512,
            tokens_per_chunk: None,
            max_step_ms: None,
            steps_in_flight: 1,
            max_model_len,
            vocab_size,
            max_waiting_requests: 16_384,
            max_waiting_tokens: 64 << 20,
            mixed_batches: true,
            draft_tokens: 0,
            needs_token_history: false,
            state_checkpoint_tokens: 8_192,
            failure_timeout_ms: 120_000,
        }
    }

    /// Returns the alignment of prefill chunk ends in tokens: a multiple of `block_tokens`, at least 64
    /// unless `tokens_per_step` is smaller.
    pub fn chunk_quantum(&self, block_tokens: u32) -> u32 {
        if self.tokens_per_step < 64 {
            return block_tokens;
        }
        block_tokens * 64_u32.div_ceil(block_tokens)
    }

    /// Returns the distance of the checkpoints of recurrent state in tokens, a multiple of `block_tokens`; 0 = no
    /// checkpoints at fixed distances.
    pub fn checkpoint_interval(&self, block_tokens: u32) -> u32 {
        self.state_checkpoint_tokens.checked_next_multiple_of(block_tokens).unwrap_or(0)
    }

    /// Returns the largest number of tokens of one request in steps whose outputs have not been applied.
    pub fn request_tokens_in_flight(&self) -> u32 {
        let row = self.tokens_per_chunk.unwrap_or(u32::MAX).max(1 + u32::from(self.draft_tokens));
        self.steps_in_flight.saturating_mul(row.min(self.tokens_per_step))
    }

    /// Returns the number of sequence slots, bounded so that decode rows alone never fill the token budget of
    /// a step.
    pub fn seq_slot_count(&self) -> u32 {
        let per_row = 1 + u32::from(self.draft_tokens);
        self.max_num_seqs.min(((self.tokens_per_step - 1) / per_row).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_rows_never_fill_a_step() {
        for (tokens_per_step, max_num_seqs, draft_tokens, expected) in [
            (512, 512, 0, 511),
            (512, 100, 0, 100),
            (100, 64, 4, 19),
            (101, 64, 4, 20),
            (1, 8, 2, 1),
        ] {
            let limits = SchedulerLimits {
                tokens_per_step,
                max_num_seqs,
                draft_tokens,
                ..SchedulerLimits::cpu(8, 100)
            };
            assert_eq!(limits.seq_slot_count(), expected, "{limits:?}");
        }
    }
}
