//! Output of all choices of one HTTP request: polls the engine's token events and converts them to deltas.

mod request_errors;

use super::choice::{ChoiceDelta, ChoiceFinishReason, ChoiceState};
use super::spec_decode_metrics::{SpecDecodeMetricsOptions, SpecDecodeStepCounts};
use super::usage::UsageInfo;
use crate::access_record::AccessLogRecord;
use crate::api_error::ApiError;
use crate::request_spans::SpanGenerationParams;
use crate::request_trace::{RequestTraceRecord, RequestTracer};
use engine::{IndexedTokenEvent, QueuedBytesPermit, RequestEventStream};
use protocol::{Token, TokenLogprobs};
use request_errors::rejection_error;
pub(crate) use request_errors::{draining, engine_error};
use scheduler::{AbortCause, TokenEvent};
use std::future::poll_fn;
use std::mem;
use std::task::{Context, Poll};
use std::time::Instant;
use tracing::Span;

/// Maximum number of pending chunks of a slow client. Above this number, the chunks of each choice are merged
/// into one.
const PENDING_CHUNKS_MAX: usize = 256;

/// Information about the prompts of a request, for `usage` and errors.
#[derive(Debug, Clone)]
pub(crate) struct PromptInfo {
    /// Number of tokens in each prompt.
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

/// Generation in progress of one request: receives the output of all choices, ordered by prompt: choice `i`
/// of prompt `p` has index `p × n + i`.
pub(crate) struct RequestGeneration {
    /// Trace of the request; it is written when the generation is dropped. It is the first field so that it
    /// is dropped before `stream`: shutdown waits only until all streams are dropped.
    trace: Option<Box<RequestTraceRecord>>,
    /// Counts for the access log line and span of the request; `None` if the request has neither.
    access: Option<AccessLogRecord>,
    /// Generation parameters shown in the request's span; `None` if it has no span.
    parameters: Option<Box<SpanGenerationParams>>,
    /// Counts of draft tokens; `None` if the reply does not contain them.
    spec_decode: Option<Box<SpecDecodeStepCounts>>,
    stream: RequestEventStream,
    choices: Vec<ChoiceState>,
    n: usize,
    prompts: PromptInfo,
    events: Vec<IndexedTokenEvent>,
    unfinished: usize,
    /// Unsent output of each choice; it is sent once it has `stream_interval` tokens or the choice ends.
    pending: Vec<ChoiceDelta>,
    interval: usize,
    /// Error that ends the whole request, taken from the first choice that ended with such an error.
    request_error: Option<ApiError>,
    /// Log span of the request.
    span: Span,
}

impl RequestGeneration {
    /// Creates the output state of `choices`; each prompt has `n` choices.
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
            spec_decode: None,
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

    /// Enables the trace of the request, which is written when the generation is dropped; `received` is the
    /// request's arrival time.
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

    /// Sets the parameters shown in the request's span.
    pub(crate) fn set_span_parameters(&mut self, parameters: SpanGenerationParams) {
        self.parameters = Some(Box::new(parameters));
    }

    /// Counts draft tokens, for `metrics` in the reply.
    pub(crate) fn count_drafts(&mut self, options: SpecDecodeMetricsOptions) {
        self.spec_decode = Some(Box::new(SpecDecodeStepCounts::new(options)));
    }

    /// Returns the member `metrics` of the reply, preceded by a comma; empty if the reply does not contain it.
    /// As in vLLM, the statistics are null if the request has several choices.
    pub(crate) fn metrics_member(&self) -> String {
        let Some(counts) = &self.spec_decode else { return String::new() };
        let json = if self.choices.len() == 1 { counts.json() } else { "null".to_owned() };
        format!(",\"metrics\":{{\"speculative_decoding\":{json}}}")
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

    /// Waits for the first token events. A failure reported here can still set the HTTP status, because no
    /// byte of the reply has been sent.
    ///
    /// Errors: the rejection or failure, with an HTTP status.
    pub(crate) async fn wait_first_event(&mut self) -> Result<(), ApiError> {
        poll_fn(|cx| self.poll_events(cx)).await;
        let failed = |indexed: &IndexedTokenEvent| match indexed.event.finish_reason.clone()? {
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

    /// Becomes ready when there are token events for `drain`.
    pub(crate) fn poll_events(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.stream.poll_events(cx, &mut self.events) {
            Poll::Pending if self.events.is_empty() => Poll::Pending,
            _ => Poll::Ready(()),
        }
    }

    /// Processes all token events received so far. Calls `sink` with each delta that is ready, the index of
    /// its choice, and this generation.
    pub(crate) fn drain(&mut self, mut sink: impl FnMut(u32, &mut ChoiceDelta, &Self)) {
        // For a slow client, chunks are merged; the concatenated text is the same.
        let merge = self.events.len() > PENDING_CHUNKS_MAX;
        let mut events = mem::take(&mut self.events);
        for IndexedTokenEvent { index, event } in events.drain(..) {
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
        if let Some(counts) = &mut self.spec_decode {
            counts.add(event.drafts);
        }
        if choice.push(event, delta) {
            self.stream.abort_one(index as u32, AbortCause::StopString);
        }
        if self.choices[index].has_ended() {
            self.unfinished -= 1;
            if let Some(ChoiceFinishReason::Error(code)) =
                delta.end.as_ref().filter(|end| end.is_row_error())
            {
                let reason = engine_error(*code).reason;
                self.span.in_scope(|| tracing::warn!(choice = index, reason, "a choice failed"));
            }
            if matches!(delta.end, Some(ChoiceFinishReason::Abort(AbortCause::Shutdown))) {
                self.span.in_scope(|| tracing::info!(choice = index, "aborted by the drain"));
            }
            if let (Some(trace), Some(end)) = (&mut self.trace, &delta.end) {
                trace.end(index, end.name());
            }
            if let (Some(access), Some(end)) = (&self.access, &delta.end) {
                access.end(end.name());
            }
            self.request_error = self.request_error.take().or_else(|| match &delta.end {
                Some(ChoiceFinishReason::Rejected(reason)) => {
                    Some(rejection_error(reason, &self.prompts))
                }
                Some(ChoiceFinishReason::Error(code))
                    if !delta.end.as_ref().is_some_and(ChoiceFinishReason::is_row_error) =>
                {
                    Some(engine_error(*code))
                }
                Some(ChoiceFinishReason::Abort(AbortCause::Shutdown)) => Some(draining()),
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
            // Later choices of a prompt find the KV blocks of the first choice in the prefix cache. Such hits
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

    /// Sets the names of the prompt field and of the output length field for error messages.
    pub(crate) fn rename_fields(&mut self, field: &'static str, max_tokens_field: &'static str) {
        (self.prompts.field, self.prompts.max_tokens_field) = (field, max_tokens_field);
    }

    /// Returns the prompt log-probabilities of a choice.
    pub(crate) fn prompt_logprobs(&self, index: usize) -> &[TokenLogprobs] {
        &self.choices[index].prompt_logprobs
    }

    /// Takes the prompt log-probabilities of a choice from this generation.
    pub(crate) fn take_prompt_logprobs(&mut self, index: usize) -> Vec<TokenLogprobs> {
        mem::take(&mut self.choices[index].prompt_logprobs)
    }

    /// Takes the pooled vector of a pooling request from this generation.
    pub(crate) fn take_pooled(&mut self, index: usize) -> Vec<f32> {
        mem::take(&mut self.choices[index].pooled)
    }

    /// Returns the request's memory reservation. The reply body must hold it as long as it uses the memory.
    pub(crate) fn into_memory_reservation(mut self) -> QueuedBytesPermit {
        self.stream.take_queued_bytes()
    }

    /// Returns the number of choices of all prompts.
    pub(crate) fn choices(&self) -> usize {
        self.choices.len()
    }
}

/// A generation dropped before its end means that the client has disconnected. This is only logged, because
/// no reply can be sent.
impl Drop for RequestGeneration {
    fn drop(&mut self) {
        if !self.has_ended() {
            self.span.in_scope(|| tracing::debug!(status = 499, "the client disconnected"));
        }
    }
}
