//! Bounds of a replica's steps and of the engine's queue. Everything is bounded at start.

/// What a step and the queue may hold. Units: tokens, requests, steps, milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Tokens forwarded by one step of one replica, drafts included (`--max-num-batched-tokens`).
    pub tokens_per_step: u32,
    /// Requests with a seat per replica (`--max-num-seqs`).
    pub max_num_seqs: u32,
    /// Longest prefill chunk (`--long-prefill-token-threshold`); `None` = the step's budget.
    pub tokens_per_chunk: Option<u32>,
    /// Steps sent and not yet answered, 1 to 4: 1 on the CPU, 2 on GPUs.
    pub steps_in_flight: u32,
    /// Prompt plus output of one request (`--max-model-len`).
    pub max_model_len: u32,
    /// Ids below this exist.
    pub vocab_size: u32,
    /// Requests waiting over all replicas before submits are refused.
    pub max_waiting_requests: u32,
    /// Tokens of waiting requests over all replicas before submits are refused.
    pub max_waiting_tokens: u64,
    /// Whether one step may hold both decodes and prefill chunks (off only for comparison runs).
    pub mixed_batches: bool,
    /// Draft tokens per decode row (k), at most [`DRAFT_TOKENS_MAX`](crate::DRAFT_TOKENS_MAX); 0 = no speculation.
    pub draft_tokens: u8,
    /// Whether whoever makes drafts reads all ids of a request, so that seats begin with them.
    pub needs_token_history: bool,
    /// How long requests of a lost replica wait for its return before they fail.
    pub failure_timeout_ms: u64,
}

impl SchedulerLimits {
    /// Defaults for the CPU backend: 512 tokens a step, one step in flight.
    pub fn cpu(max_model_len: u32, vocab_size: u32) -> Self {
        Self {
            tokens_per_step: 512,
            max_num_seqs: 512,
            tokens_per_chunk: None,
            steps_in_flight: 1,
            max_model_len,
            vocab_size,
            max_waiting_requests: 16_384,
            max_waiting_tokens: 64 << 20,
            mixed_batches: true,
            draft_tokens: 0,
            needs_token_history: false,
            failure_timeout_ms: 120_000,
        }
    }

    /// Multiple that chunk ends are aligned to: whole blocks, at least 64 tokens where a step allows it.
    pub fn chunk_quantum(&self, block_tokens: u32) -> u32 {
        if self.tokens_per_step < 64 {
            return block_tokens;
        }
        block_tokens * 64_u32.div_ceil(block_tokens)
    }

    /// Seats such that decode rows alone can never take the whole budget of a step.
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
        for (tokens_per_step, requests_running, drafts, expected) in [
            (512, 512, 0, 511),
            (512, 100, 0, 100),
            (100, 64, 4, 19),
            (101, 64, 4, 20),
            (1, 8, 2, 1),
        ] {
            let limits = SchedulerLimits {
                tokens_per_step,
                max_num_seqs: requests_running,
                draft_tokens: drafts,
                ..SchedulerLimits::cpu(8, 100)
            };
            assert_eq!(limits.seq_slot_count(), expected, "{limits:?}");
        }
    }
}
