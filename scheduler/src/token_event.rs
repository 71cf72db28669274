//! What the engine tells a request's owner.

use crate::RejectReason;
use protocol::{Replica, RequestId, RowError, ThinVec, Token, TokenLogprobs, TokenVec};

/// News of one request. Exactly one event of a request carries `finish`, and none follows it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Whose news.
    pub request: RequestId,
    /// New tokens, in order; never repeated, also not after preemption or a device loss.
    pub tokens: TokenVec,
    /// One entry per new token, if asked for.
    pub logprobs: ThinVec<TokenLogprobs>,
    /// Entries of further prompt positions, from position 1 on and in order, if asked for.
    pub prompt_logprobs: ThinVec<TokenLogprobs>,
    /// How the request came to run; with its first event only.
    pub first_admission: Option<FirstAdmission>,
    /// Times the request was preempted so far.
    pub preemptions: u32,
    /// Set on the last event.
    pub finish_reason: Option<FinishReason>,
}

impl TokenEvent {
    pub(crate) const EMPTY: Self = Self {
        request: RequestId(0),
        tokens: TokenVec::new(),
        logprobs: ThinVec::new(),
        prompt_logprobs: ThinVec::new(),
        first_admission: None,
        preemptions: 0,
        finish_reason: None,
    };

    /// The end of a request, and nothing else.
    pub fn finished(request: RequestId, finish: FinishReason) -> Self {
        Self { request, finish_reason: Some(finish), ..Self::EMPTY }
    }
}

/// Figures of a request's first admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstAdmission {
    /// Where it ran first; it may have moved since.
    pub replica: Replica,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u32,
    /// Milliseconds since submit.
    pub queued_ms: u32,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop condition was met.
    Stop(StopReason),
    /// `max_tokens` or the model's length was reached.
    Length,
    /// Its owner took it back.
    Abort(AbortCause),
    /// It failed alone.
    Error(RequestError),
    /// It was never accepted. Boxed: every event of every step is as large as the largest end.
    Rejected(Box<RejectReason>),
}

/// Which stop condition was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// This end-of-text id was produced; it is the last token delivered.
    Eos(Token),
    /// This id of `stop_ids` was produced; it is the last token delivered.
    StopToken(Token),
    /// The submitter found a stop string in the text.
    StopString,
}

/// Why a request is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortCause {
    /// A stop string was found in the text: the request ends as `Stop(StopString)`.
    StopString,
    /// The client went away.
    ClientDisconnected,
    /// The client does not read.
    SlowReader,
    /// The server is shutting down.
    Shutdown,
    /// A deadline of the request passed.
    Deadline,
    /// An operator asked for it.
    Operator,
}

/// Why a single request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestError {
    /// The device could not compute its row.
    RowFailed(RowError),
    /// The device answered with an id outside the vocabulary, or with a wrong number of ids.
    BadOutput,
    /// Its replica was lost and did not return in time, or returned too small.
    ReplicaUnavailable,
}
