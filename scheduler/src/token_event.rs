//! Token events: results that the scheduler emits for a request.

use crate::RejectReason;
use protocol::{
    PromptResults, Replica, RequestId, RowError, ThinVec, Token, TokenLogprobs, TokenVec,
};

/// Event of one request: new tokens, results about the prompt, or the end of the request. Exactly one event
/// of a request has a `finish_reason`, and it is the last event.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Request that the event belongs to.
    pub request: RequestId,
    /// New tokens in order; never repeated, not even after preemption or executor failure.
    pub tokens: TokenVec,
    /// Logprobs of the new tokens, one entry per token, if requested.
    pub logprobs: ThinVec<TokenLogprobs>,
    /// Results about the prompt, if requested: logprobs of further prompt positions, in order from position 1
    /// on, and the result of a pooling request, which is only in its last event.
    pub prompt: Option<Box<PromptResults>>,
    /// Data about the first admission; only in the first event of a request.
    pub first_admission: Option<FirstAdmission>,
    /// Draft tokens that the step of this event verified.
    pub drafts: VerifiedDraftCounts,
    /// Number of times that the request has been preempted.
    pub preemptions: u32,
    /// Reason why the request finished; set only in the last event.
    pub finish_reason: Option<FinishReason>,
}

impl TokenEvent {
    pub(crate) const EMPTY: Self = Self {
        request: RequestId(0),
        tokens: TokenVec::new(),
        logprobs: ThinVec::new(),
        prompt: None,
        first_admission: None,
        drafts: VerifiedDraftCounts { drafted: 0, accepted: 0 },
        preemptions: 0,
        finish_reason: None,
    };

    /// Returns the logprobs of prompt positions; empty if there are none.
    pub fn prompt_logprobs(&self) -> &[TokenLogprobs] {
        self.prompt.as_ref().map_or(&[], |prompt| &prompt.logprobs)
    }

    /// Returns an event that only finishes a request.
    pub fn finished(request: RequestId, finish: FinishReason) -> Self {
        Self { request, finish_reason: Some(finish), ..Self::EMPTY }
    }
}

/// Numbers of draft tokens of one row that the model verified and accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VerifiedDraftCounts {
    /// Number of draft tokens, accepted or rejected.
    pub drafted: u8,
    /// Number of accepted draft tokens.
    pub accepted: u8,
}

/// Data about a request's first admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstAdmission {
    /// Replica of the first admission; the request may have migrated since.
    pub replica: Replica,
    /// Number of prompt tokens that were prefix hits.
    pub cached_tokens: u32,
    /// Milliseconds between submission and admission.
    pub queued_ms: u32,
}

/// Reason why a request finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop condition was met.
    Stop(StopReason),
    /// `max_tokens` or `max_model_len` was reached.
    Length,
    /// The request was aborted.
    Abort(AbortCause),
    /// The request failed; other requests are unaffected.
    Error(RequestError),
    /// The request was rejected. Boxed to keep events small: the largest finish reason determines the size of
    /// every event.
    Rejected(Box<RejectReason>),
}

/// Stop condition that was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// This EOS token was sampled; it is the last token delivered.
    Eos(Token),
    /// This id of `stop_ids` was sampled; it is the last token delivered.
    StopToken(Token),
    /// The submitter found a stop string in the text.
    StopString,
    /// The prompt of a pooling request was computed, and no token was sampled.
    Pooled,
}

/// Cause of an abort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortCause {
    /// A stop string was found in the text: the request finishes as `Stop(StopString)`.
    StopString,
    /// The client disconnected.
    ClientDisconnected,
    /// The client reads too slowly.
    SlowReader,
    /// The server is shutting down.
    Shutdown,
    /// The deadline of the request passed.
    Deadline,
    /// An operator aborted the request.
    Operator,
}

/// Failure of a single request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestError {
    /// The executor could not compute the row.
    RowFailed(RowError),
    /// The executor returned a token id outside the vocabulary or a wrong number of tokens.
    BadOutput,
    /// The replica failed and was not restored in time, or was restored with a pool that is too small.
    ReplicaUnavailable,
}
