//! Output of all choices of one HTTP request: polls the token events of the engine and converts them to
//! deltas.

use super::choice::{ChoiceDelta, ChoiceFinish, ChoiceState};
use super::usage::UsageInfo;
use crate::access_record::AccessLogRecord;
use crate::api_error::ApiError;
use crate::context_overflow::ContextOverflow;
use crate::request_spans::SpanGenerationParams;
use crate::request_trace::{RequestTraceRecord, RequestTracer};
use axum::http::StatusCode;
use engine::{QueuedBytes, RequestEventStream};
use protocol::{RowError, Token, TokenLogprobs};
use scheduler::{AbortCause, RejectReason, RequestError, TokenEvent};
use std::future::poll_fn;
use std::mem;
use std::task::{Context, Poll};
use std::time::Instant;
use tracing::Span;

/// Maximum number of pending chunks of a slow client. If there are more, the chunks of each choice are merged
/// into one.
const PENDING_CHUNKS_MAX: usize = 256;

/// Information about the prompts of a request, for `usage` and errors.
#[derive(Debug, Clone)]
pub(crate) struct PromptInfo {
    /// Number of tokens of each prompt.
    pub tokens: Vec<u32>,
    /// Tokens per KV block; 0 = prefix caching is off.
    pub block_tokens: u32,
    /// Whether `usage` contains `prompt_tokens_details`.
    pub details: bool,
    /// Name of the field that contains the prompts.
    pub field: &'static str,
    /// Name of the field that limits the number of output tokens.
    pub max_tokens_field: &'static str,
    /// Token ids of the prompts if the request trace contains them, else empty.
    pub ids: Vec<Vec<Token>>,
}

/// Output of all choices of a request. The choices are ordered by prompt: choice `i` of a prompt has index
/// `prompt × n + i`.
pub(crate) struct RequestGeneration {
    /// Trace of the request; it is written when the generation is dropped. It is the first field, so it is
    /// dropped before `stream`: the shutdown waits only for the streams.
    trace: Option<Box<RequestTraceRecord>>,
    /// Record of the request for the access log and its span; `None` = the request has neither.
    access: Option<AccessLogRecord>,
    /// Parameters that the span of the request shows; `None` = it has none.
    parameters: Option<Box<SpanGenerationParams>>,
    stream: RequestEventStream,
    choices: Vec<ChoiceState>,
    n: usize,
    prompts: PromptInfo,
    events: Vec<(u32, TokenEvent)>,
    unfinished: usize,
    /// Output of each choice that has not been sent, because it has fewer than `stream_interval` tokens.
    pending: Vec<ChoiceDelta>,
    interval: usize,
    /// Error that ends the whole request; set when a choice ends with such an error.
    request_error: Option<ApiError>,
    /// Log span of the request.
    span: Span,
}

impl RequestGeneration {
    /// Creates the output state of `choices`, of which each prompt has `n`.
    pub(crate) fn new(
        stream: RequestEventStream,
        choices: Vec<ChoiceState>,
        n: usize,
        prompts: PromptInfo,
        interval: u32,
    ) -> Self {
        let unfinished = choices.len();
        let pending = choices.iter().map(|_| ChoiceDelta::default()).collect();
        let interval = interval as usize;
        let (events, request_error, trace, span) = (Vec::new(), None, None, Span::current());
        Self {
            trace,
            access: None,
            parameters: None,
            stream,
            choices,
            n,
            prompts,
            events,
            unfinished,
            pending,
            interval,
            request_error,
            span,
        }
    }

    /// Enables the trace of this request, which is written when the generation is dropped; `received` is the
    /// arrival time of the request.
    pub(crate) fn trace(
        &mut self,
        tracer: &RequestTracer,
        received: Instant,
        head: serde_json::Value,
    ) {
        let (prompt_lens, choices) = (self.prompts.tokens.clone(), self.choices.len());
        let mut trace =
            Box::new(RequestTraceRecord::new(tracer, received, head, prompt_lens, choices));
        trace.set_prompts(&mem::take(&mut self.prompts.ids));
        self.trace = Some(trace);
    }

    /// Sets the parameters that the span of this request shows.
    pub(crate) fn set_span_parameters(&mut self, parameters: SpanGenerationParams) {
        self.parameters = Some(Box::new(parameters));
    }

    /// Records the tokens and finish reasons of this request in `record`.
    pub(crate) fn record_access(&mut self, record: AccessLogRecord) {
        record.begin(&self.prompts.tokens, self.parameters.take());
        self.access = Some(record);
    }

    /// Whether the request has ended: every choice has ended, or an error has ended the whole request.
    pub(crate) fn has_ended(&self) -> bool {
        self.unfinished == 0 || self.request_error.is_some()
    }

    /// Returns the error that ended the whole request, if any, and clears it.
    pub(crate) fn take_request_error(&mut self) -> Option<ApiError> {
        self.request_error.take()
    }

    /// Waits for the first token events. If the request fails here, no byte of the reply has been sent.
    ///
    /// Errors: the rejection or failure, with an HTTP status.
    pub(crate) async fn wait_first_event(&mut self) -> Result<(), ApiError> {
        poll_fn(|cx| self.poll_events(cx)).await;
        let failed = |(_, event): &(u32, TokenEvent)| match event.finish_reason.clone()? {
            scheduler::FinishReason::Rejected(reason) => {
                Some(rejection_error(&reason, &self.prompts))
            }
            scheduler::FinishReason::Error(code) => Some(engine_error(code)),
            scheduler::FinishReason::Abort(AbortCause::Shutdown) => Some(draining()),
            _ => None,
        };
        let Some(error) = self.events.iter().find_map(failed) else { return Ok(()) };
        self.drain(|_, _, _| ()); // Records the end of each choice in the trace.
        self.request_error.get_or_insert_with(|| error.clone());
        Err(error)
    }

    /// Waits until there are token events for `drain`.
    pub(crate) fn poll_events(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.stream.poll_events(cx, &mut self.events) {
            Poll::Pending if self.events.is_empty() => Poll::Pending,
            _ => Poll::Ready(()),
        }
    }

    /// Processes all token events received so far. Passes each delta that is ready to `sink`, with the index
    /// of its choice and this generation.
    pub(crate) fn drain(&mut self, mut sink: impl FnMut(u32, &mut ChoiceDelta, &Self)) {
        // The chunks of a slow client are merged; its text remains the same.
        let merge = self.events.len() > PENDING_CHUNKS_MAX;
        let mut events = mem::take(&mut self.events);
        for (index, event) in events.drain(..) {
            self.push(index as usize, event);
            if !merge {
                self.flush_delta(index as usize, &mut sink);
            }
        }
        self.events = events;
        if merge {
            for index in 0..self.choices.len() {
                self.flush_delta(index, &mut sink);
            }
        }
    }

    fn push(&mut self, index: usize, event: TokenEvent) {
        let (choice, delta) = (&mut self.choices[index], &mut self.pending[index]);
        if choice.has_ended() {
            return;
        }
        if let Some(trace) = &mut self.trace {
            trace.record(index, &event);
        }
        if let Some(access) = &self.access {
            access.record(&event);
        }
        if choice.push(event, delta) {
            self.stream.abort_one(index as u32, AbortCause::StopString);
        }
        if self.choices[index].has_ended() {
            self.unfinished -= 1;
            if let Some(ChoiceFinish::Error(code)) =
                delta.end.as_ref().filter(|end| end.is_row_error())
            {
                let reason = engine_error(*code).reason;
                self.span.in_scope(|| tracing::warn!(choice = index, reason, "a choice failed"));
            }
            if matches!(delta.end, Some(ChoiceFinish::Abort(AbortCause::Shutdown))) {
                self.span.in_scope(|| tracing::info!(choice = index, "aborted by the drain"));
            }
            if let (Some(trace), Some(end)) = (&mut self.trace, &delta.end) {
                trace.end(index, end.name());
            }
            if let (Some(access), Some(end)) = (&self.access, &delta.end) {
                access.end(end.name());
            }
            self.request_error = self.request_error.take().or_else(|| match &delta.end {
                Some(ChoiceFinish::Rejected(reason)) => {
                    Some(rejection_error(reason, &self.prompts))
                }
                Some(ChoiceFinish::Error(code))
                    if !delta.end.as_ref().is_some_and(ChoiceFinish::is_row_error) =>
                {
                    Some(engine_error(*code))
                }
                Some(ChoiceFinish::Abort(AbortCause::Shutdown)) => Some(draining()),
                _ => None,
            });
        }
    }

    fn flush_delta(&mut self, index: usize, sink: &mut impl FnMut(u32, &mut ChoiceDelta, &Self)) {
        let delta = &self.pending[index];
        let ready = delta.end.is_some() || delta.tokens.len() >= self.interval;
        if !ready {
            return;
        }
        let mut delta = mem::take(&mut self.pending[index]);
        sink(index as u32, &mut delta, self);
        delta.clear();
        self.pending[index] = delta;
    }

    /// Returns the token counts so far.
    pub(crate) fn usage(&self) -> UsageInfo {
        let mut usage = UsageInfo { details: self.prompts.details, ..UsageInfo::default() };
        usage.completion_tokens = self.choices.iter().map(|c| u64::from(c.tokens)).sum();
        usage.draft_tokens = self.choices.iter().map(|c| u64::from(c.draft_tokens)).sum();
        usage.accepted_draft_tokens =
            self.choices.iter().map(|c| u64::from(c.accepted_draft_tokens)).sum();
        if self.choices.iter().any(ChoiceState::parses_reasoning) {
            let tokens = self.choices.iter().map(|c| u64::from(c.reasoning_tokens)).sum();
            usage.reasoning_tokens = Some(tokens);
        }
        for (choices, &len) in self.choices.chunks(self.n).zip(&self.prompts.tokens) {
            // Later choices of a prompt find the blocks of its first choice in the prefix cache. These hits
            // do not count as cached tokens.
            let cached = choices.iter().find_map(|c| c.cached_tokens).unwrap_or(0);
            let cacheable = match self.prompts.block_tokens {
                0 => 0,
                block => len / block * block,
            };
            usage.prompt_tokens += u64::from(len);
            usage.cached_tokens += u64::from(cached);
            usage.created_cache_tokens += u64::from(cacheable.saturating_sub(cached));
        }
        usage
    }

    /// Returns the token counts of one choice so far.
    pub(crate) fn choice_usage(&self, index: usize) -> UsageInfo {
        let choice = &self.choices[index];
        let prompt_tokens = self.prompts.tokens.get(index / self.n).copied().unwrap_or(0);
        UsageInfo {
            prompt_tokens: u64::from(prompt_tokens),
            completion_tokens: u64::from(choice.tokens),
            cached_tokens: u64::from(choice.cached_tokens.unwrap_or(0)),
            ..UsageInfo::default()
        }
    }

    /// Sets the names that errors use for the field of the prompts and for that of the output length.
    pub(crate) fn rename_fields(&mut self, field: &'static str, max_tokens_field: &'static str) {
        (self.prompts.field, self.prompts.max_tokens_field) = (field, max_tokens_field);
    }

    /// Returns the log-probabilities of the prompt of a choice.
    pub(crate) fn prompt_logprobs(&self, index: usize) -> &[TokenLogprobs] {
        &self.choices[index].prompt_logprobs
    }

    /// Removes the log-probabilities of the prompt of a choice from this generation and returns them.
    pub(crate) fn take_prompt_logprobs(&mut self, index: usize) -> Vec<TokenLogprobs> {
        mem::take(&mut self.choices[index].prompt_logprobs)
    }

    /// Removes the result of a pooling request from this generation and returns it.
    pub(crate) fn take_pooled(&mut self, index: usize) -> Vec<f32> {
        mem::take(&mut self.choices[index].pooled)
    }

    /// Returns the memory reservation of the request, which the body of the reply holds while it uses this
    /// memory.
    pub(crate) fn into_memory_reservation(mut self) -> QueuedBytes {
        self.stream.take_queued_bytes()
    }

    /// Returns the number of choices, over all prompts.
    pub(crate) fn choices(&self) -> usize {
        self.choices.len()
    }
}

/// A drop before the end means that the client has disconnected. This is only logged, because it cannot be
/// reported.
impl Drop for RequestGeneration {
    fn drop(&mut self) {
        if !self.has_ended() {
            self.span.in_scope(|| tracing::debug!(status = 499, "the client disconnected"));
        }
    }
}

/// Converts a rejection by the scheduler to an API error.
fn rejection_error(reason: &RejectReason, prompts: &PromptInfo) -> ApiError {
    let (field, max_tokens_field) = (prompts.field, prompts.max_tokens_field);
    let message = reason.to_string();
    match reason {
        RejectReason::QueueFull { .. } => overloaded("max_num_queued_reqs", message, 1),
        RejectReason::QueueTokensFull { .. } => overloaded("max_num_queued_tokens", message, 1),
        &RejectReason::PromptTooLong { prompt_len, max_model_len } => {
            context_overflow(prompt_len, 1, max_model_len).into_error(field)
        }
        &RejectReason::TotalTooLong { prompt_len, max_tokens, max_model_len } => {
            context_overflow(prompt_len, max_tokens, max_model_len).into_error(field)
        }
        RejectReason::PoolTooSmall { .. } => {
            ApiError::bad_request("never_fits", max_tokens_field, message)
        }
        RejectReason::InvalidParameter { param, message } => {
            let message = format!("{param}: {message}");
            ApiError::bad_request("invalid_grammar", param.clone(), message)
        }
        RejectReason::Overloaded { .. } => overloaded("grammars_overloaded", message, 10),
        RejectReason::TemporarilyUnavailable { .. } => {
            ApiError::unavailable("engine_unavailable", &message, 10)
        }
        RejectReason::UnknownReplica { .. } => ApiError::invalid("data_parallel_rank", message),
        RejectReason::EmptyPrompt | RejectReason::UnknownToken { .. } => {
            ApiError::invalid(field, message)
        }
    }
}

fn context_overflow(prompt_tokens: u64, max_tokens: u32, context_length: u32) -> ContextOverflow {
    ContextOverflow { prompt_tokens, is_lower_bound: false, max_tokens, context_length }
}

fn overloaded(reason: &'static str, message: String, retry_after_s: u32) -> ApiError {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, reason, message);
    ApiError { retry_after_s: Some(retry_after_s), ..error }
}

/// Converts an engine failure to an API error.
pub(crate) fn engine_error(code: RequestError) -> ApiError {
    match code {
        RequestError::ReplicaUnavailable => {
            ApiError::unavailable("engine_unavailable", "the engine is not available", 10)
        }
        // The constraints of the request allow no common token. Which of them is wrong is unknown, because
        // only their intersection is empty.
        RequestError::RowFailed(RowError::AllMasked) => ApiError::bad_request(
            "no_token_allowed",
            "",
            "no token is allowed at this position: the request's constraints (allowed_token_ids, bad_words, min_tokens, \
             logit_bias, a grammar) exclude each other, or the grammar exceeds its cost limit",
        ),
        RequestError::RowFailed(RowError::NonFiniteLogits) => ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "nan_logits",
            "the model produced non-finite logits for this request",
        ),
        // The scheduler plans a row with an overdue grammar bitmask again, so `MaskOverdue` never ends a
        // request.
        RequestError::BadOutput | RequestError::RowFailed(RowError::MaskOverdue) => {
            ApiError::internal()
        }
    }
}

/// Creates the 503 error for requests that the shutdown ends.
pub(crate) fn draining() -> ApiError {
    ApiError::unavailable("draining", "the server is shutting down", 1)
}
