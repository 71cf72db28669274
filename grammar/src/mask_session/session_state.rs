//! State of a mask session that only its worker reads: the decoding guide and the processor time used.

use super::super::decoding_guide::DecodingGuideState;
use super::super::limits::{MASK_BUDGET, MASK_BUDGET_PER_TOKEN};
use super::super::mask_lookahead::MaskLookahead;
use protocol::RequestId;
use std::time::Duration;

/// State of the decoding guide (grammar and thinking budget) of a mask session, locked while a worker
/// thread runs the session.
pub(super) struct MaskSessionState {
    pub(super) guide: DecodingGuideState,
    /// Number of output tokens before the first token that a mask may restrict.
    pub(super) first_masked_token: u32,
    /// Number of output tokens passed to the session so far.
    pub(super) output_tokens: u32,
    /// Total processor time of the request's token bitmasks, excluding bitmasks for positions after draft
    /// tokens.
    pub(super) spent: Duration,
    /// Total processor time of token bitmasks for positions after draft tokens. It has a separate limit, so
    /// that draft tokens cannot end a request that would finish without draft tokens.
    pub(super) spent_on_drafts: Duration,
    pub(super) pacing: MaskLookahead,
}

impl MaskSessionState {
    /// Returns the maximum processor time that the request may have spent on token bitmasks by now.
    pub(super) fn cpu_budget(&self) -> Duration {
        MASK_BUDGET + MASK_BUDGET_PER_TOKEN * self.output_tokens
    }

    /// Whether the request is within its processor-time budget for masks.
    pub(super) fn is_within_cpu_budget(&self, request: RequestId) -> bool {
        let is_within_budget = self.spent <= self.cpu_budget();
        if !is_within_budget {
            let (request, spent_ms) = (request.0, self.spent.as_millis() as u64);
            tracing::warn!(request, spent_ms, "processor-time budget for masks exceeded");
        }
        is_within_budget
    }
}
