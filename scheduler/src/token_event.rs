//! What the engine tells a request's owner.

use crate::Refusal;
use protocol::{Replica, RequestId, RowError, ThinVec, Token, TokenLogprobs, Tokens};

/// News of one request. Exactly one event of a request carries `finish`, and none follows it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Whose news.
    pub request: RequestId,
    /// New tokens, in order; never repeated, also not after preemption or a device loss.
    pub tokens: Tokens,
    /// One entry per new token, if asked for.
    pub logprobs: ThinVec<TokenLogprobs>,
    /// Entries of further prompt positions, from position 1 on and in order, if asked for.
    pub prompt_logprobs: ThinVec<TokenLogprobs>,
    /// How the request came to run; with its first event only.
    pub first_run: Option<FirstRun>,
    /// Times the request was preempted so far.
    pub preemptions: u32,
    /// Set on the last event.
    pub finish: Option<Finish>,
}

impl TokenEvent {
    pub(crate) const EMPTY: Self = Self {
        request: RequestId(0),
        tokens: Tokens::new(),
        logprobs: ThinVec::new(),
        prompt_logprobs: ThinVec::new(),
        first_run: None,
        preemptions: 0,
        finish: None,
    };

    /// The end of a request, and nothing else.
    pub fn end(request: RequestId, finish: Finish) -> Self {
        Self { request, finish: Some(finish), ..Self::EMPTY }
    }
}

/// Figures of a request's first admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstRun {
    /// Where it ran first; it may have moved since.
    pub replica: Replica,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u32,
    /// Milliseconds since submit.
    pub queued_ms: u32,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// A stop condition was met.
    Stop(StopReason),
    /// `max_tokens` or the model's length was reached.
    Length,
    /// Its owner took it back.
    Abort(AbortCause),
    /// It failed alone.
    Error(ErrorCode),
    /// It was never accepted. Boxed: every event of every step is as large as the largest end.
    Refused(Box<Refusal>),
}

/// Which stop condition was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// This end-of-text id was produced; it is the last token delivered.
    Eos(Token),
    /// This id of `stop_ids` was produced; it is the last token delivered.
    Id(Token),
    /// The submitter found a stop string in the text.
    Text,
}

/// Why a request is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortCause {
    /// A stop string was found in the text: the request ends as `Stop(Text)`.
    StopText,
    /// The client went away.
    ClientGone,
    /// The client does not read.
    SlowReader,
    /// The server is shutting down.
    Drain,
    /// A deadline of the request passed.
    Deadline,
    /// An operator asked for it.
    Operator,
}

/// Why a single request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCode {
    /// The device could not compute its row.
    Row(RowError),
    /// The device answered with an id outside the vocabulary, or with a wrong number of ids.
    BadOutput,
    /// Its replica was lost and did not return in time, or returned too small.
    EngineUnavailable,
}
