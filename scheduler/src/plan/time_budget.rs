//! Time budget of a step: its expected time while requests are decoding.

use crate::scheduling_state::ReplicaRequests;
use crate::{SchedulerLimits, StepCosts};

/// Expected time that a plan may still add to its step.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeBudget {
    left_ns: f64,
    costs: StepCosts,
}

impl TimeBudget {
    /// Returns the time budget of the next step; `None` if there is no limit, if the costs are unknown, or if no request
    /// decodes: a long step then delays no token.
    pub(super) fn new(
        state: &ReplicaRequests,
        limits: &SchedulerLimits,
        costs: Option<StepCosts>,
    ) -> Option<Self> {
        let (max_step_ms, costs) = limits.max_step_ms.zip(costs)?;
        // Without mixed batches, decode rows wait until no prompt is left, however long its chunks are.
        let is_decoding = limits.mixed_batches
            && state.running.slots().any(|slot| state.requests[slot].can_decode());
        let left_ns = f64::from(max_step_ms) * 1e6 - costs.fixed_ns;
        is_decoding.then_some(Self { left_ns, costs })
    }

    /// Counts the tokens of a decode row.
    pub(super) fn add_decode_tokens(&mut self, tokens: u32) {
        self.left_ns -= self.costs.token_ns * f64::from(tokens);
    }

    /// Counts a prefill chunk of `len` tokens from position `start` on.
    pub(super) fn add_chunk(&mut self, start: u32, len: u32) {
        self.left_ns -= self.costs.chunk_ns(start, len);
    }

    /// Returns the length of the longest prefill chunk from position `start` on that fits.
    pub(super) fn longest_chunk(&self, start: u32) -> u32 {
        self.costs.chunk_within(start, self.left_ns)
    }
}
