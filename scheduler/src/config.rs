//! Configuration of the scheduler: replicas, limits, KV cache and routing.

use crate::{DRAFT_TOKENS_MAX, SchedulerLimits};
use kvcache::{KvConfig, KvConfigError};

/// Maximum of `SchedulerLimits::steps_in_flight`.
const STEPS_IN_FLIGHT_MAX: u32 = 4;

/// Configuration of a `Scheduler`. The scheduler treats all replicas as ready from its first tick on.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Limits of steps and queues.
    pub limits: SchedulerLimits,
    /// Configuration of the KV cache of each replica.
    pub kv: KvConfig,
    /// Number of replicas (DP ranks), at least 1.
    pub replicas: u16,
    /// Whether the replicas share collectives and therefore run every step together (lockstep).
    pub lockstep: bool,
    /// Policy that chooses the replica for submissions without a requested replica.
    pub routing: RoutingPolicy,
    /// Whether prefill is delayed until enough ranks have prefill work. Used only in lockstep.
    pub prefill_gate: bool,
    /// Row counts of the captured graphs of the executors, ascending; empty = all steps are launched eagerly.
    pub capture_sizes: Vec<u32>,
}

impl SchedulerConfig {
    /// Returns the configuration of one replica without captured graphs.
    pub fn new(limits: SchedulerLimits, kv: KvConfig) -> Self {
        Self {
            limits,
            kv,
            replicas: 1,
            lockstep: false,
            routing: RoutingPolicy::Prefix,
            prefill_gate: true,
            capture_sizes: Vec::new(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SchedulerConfigError> {
        let limits = &self.limits;
        let block_tokens = self.kv.spec.block_tokens;
        let tokens_per_chunk = limits.tokens_per_chunk.unwrap_or(block_tokens);
        for (name, value, min, max) in [
            ("tokens_per_step", limits.tokens_per_step, 1, u32::MAX),
            ("max_num_seqs", limits.max_num_seqs, 1, u32::MAX),
            ("tokens_per_chunk", tokens_per_chunk, block_tokens, u32::MAX),
            ("steps_in_flight", limits.steps_in_flight, 1, STEPS_IN_FLIGHT_MAX),
            ("max_model_len", limits.max_model_len, 1, 1 << 30),
            ("vocab_size", limits.vocab_size, 1, u32::MAX),
            ("draft_tokens", limits.draft_tokens.into(), 0, DRAFT_TOKENS_MAX as u32),
            ("state_checkpoint_tokens", limits.state_checkpoint_tokens, 0, 1 << 30),
            ("replicas", u32::from(self.replicas), 1, u32::from(u16::MAX)),
        ] {
            if !(min..=max).contains(&value) {
                let (value, min, max) = (value.into(), min.into(), max.into());
                return Err(SchedulerConfigError::LimitOutOfRange { name, value, min, max });
            }
        }
        self.kv.validate()?;
        self.validate_pool()
    }

    /// Checks that the KV pool fits the limits.
    fn validate_pool(&self) -> Result<(), SchedulerConfigError> {
        let limits = &self.limits;
        let block_tokens = self.kv.spec.block_tokens;
        let (blocks, max_model_len) = (self.kv.blocks, limits.max_model_len);
        let in_flight = limits.request_tokens_in_flight();
        let needed = self.kv.spec.blocks_of_request(max_model_len, in_flight);
        if needed > blocks {
            return Err(SchedulerConfigError::PoolTooSmall {
                blocks,
                block_tokens,
                needed,
                longest_request: self.kv.spec.longest_request(blocks, in_flight),
                max_model_len,
            });
        }
        Ok(())
    }
}

/// Policy that chooses the replica for submissions without a requested replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RoutingPolicy {
    /// Chooses the replica with the lowest sum of two numbers: the prompt tokens of its waiting and running
    /// requests, and the prompt tokens of the new request that are not in its prefix cache. Replicas with
    /// equal sums are chosen in turn.
    #[default]
    Prefix,
    /// Chooses the replica with the lowest sum of two numbers: the prompt tokens of its waiting and running
    /// requests, and 512 times the number of these requests.
    LeastTokens,
    /// Chooses the replica with the lowest number of waiting and running requests.
    LeastRequests,
    /// Chooses the replicas in round-robin order.
    RoundRobin,
}

/// Error of `Scheduler::new`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchedulerConfigError {
    /// The KV cache configuration is invalid.
    #[error(transparent)]
    KvCache(#[from] KvConfigError),
    /// A limit is outside its range.
    #[error("{name} is {value}, must be between {min} and {max}")]
    LimitOutOfRange {
        /// Name of a field of `SchedulerLimits` or `SchedulerConfig`.
        name: &'static str,
        /// Configured value.
        value: u64,
        /// Smallest valid value.
        min: u64,
        /// Largest valid value.
        max: u64,
    },
    /// The KV pool cannot hold one request of length `max_model_len`.
    #[error(
        "the KV pool has {blocks} blocks of {block_tokens} tokens, a request of max_model_len \
         {max_model_len} needs {needed}"
    )]
    PoolTooSmall {
        /// Blocks in the pool.
        blocks: u32,
        /// Tokens per block.
        block_tokens: u32,
        /// Largest number of blocks that one request holds at a time.
        needed: u32,
        /// Length of the longest request that the pool can hold.
        longest_request: u32,
        /// Configured maximum length of prompt plus output.
        max_model_len: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{KvGroup, KvKind, KvSpec};

    /// Applies `change` to a valid configuration of 8 blocks of 4 tokens, and returns its validation error.
    fn validation_error(change: impl FnOnce(&mut SchedulerConfig)) -> Option<String> {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let mut config =
            SchedulerConfig::new(SchedulerLimits::cpu(32, 100), KvConfig::new(spec, 8, [1, 2]));
        change(&mut config);
        config.validate().err().map(|e| e.to_string())
    }

    #[test]
    fn out_of_range_limits_are_rejected() {
        assert_eq!(validation_error(|_| {}), None, "32 tokens fit exactly");
        assert_eq!(validation_error(|config| config.limits.steps_in_flight = 4), None);
        assert_eq!(validation_error(|config| config.limits.tokens_per_chunk = Some(4)), None);
        let error = validation_error(|config| config.limits.steps_in_flight = 5)
            .expect("above the maximum");
        assert_eq!(error, "steps_in_flight is 5, must be between 1 and 4");
        let error = validation_error(|config| config.limits.tokens_per_chunk = Some(3))
            .expect("below the minimum");
        assert!(error.starts_with("tokens_per_chunk is 3, must be between 4 and"), "{error}");
        let error = validation_error(|config| config.limits.max_model_len = 33)
            .expect("larger than the pool");
        let expected =
            "the KV pool has 8 blocks of 4 tokens, a request of max_model_len 33 needs 9";
        assert_eq!(error, expected);
        let error =
            validation_error(|config| config.kv.hash_bits = 0).expect("hash_bits is invalid");
        assert_eq!(error, KvConfigError::HashBits { bits: 0 }.to_string());
    }
}
