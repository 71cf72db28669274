//! Token counts and times of one HTTP request, for its access log line and its trace span.

use crate::request_spans::{RequestSpan, SpanGenerationParams};
use scheduler::TokenEvent;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// HTTP status logged if the client disconnected before the reply, as in nginx.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Token counts and times of one request, shared by all clones. The request handler finds a clone in the
/// request's extensions. The request's span ends when the last clone is dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessLogRecord(Arc<Mutex<AccessLogFields>>);

/// HTTP status, token counts and times of one request; contents of an [`AccessLogRecord`].
#[derive(Debug)]
pub(crate) struct AccessLogFields {
    /// HTTP status of the reply.
    pub status: u16,
    /// Number of prompt tokens; `None` if the request submitted nothing to the engine.
    pub prompt_tokens: Option<u64>,
    /// Number of prompt tokens found in the prefix cache, summed over all admitted choices.
    pub cached_tokens: u64,
    /// Number of output tokens, summed over all choices.
    pub output_tokens: u64,
    /// Time that the first admitted choice waited in the scheduler queue, from its submission to its
    /// admission.
    pub queued: Option<Duration>,
    /// Time at which the first output token arrived from the engine.
    pub first_token: Option<Instant>,
    /// Distinct finish reasons of the choices that have ended.
    pub finish_reasons: Vec<&'static str>,
    /// Generation parameters for the trace span; `None` if the request has no trace span or submitted
    /// nothing to the engine.
    pub parameters: Option<Box<SpanGenerationParams>>,
    span: Option<RequestSpan>,
}

impl Default for AccessLogFields {
    fn default() -> Self {
        Self {
            status: CLIENT_CLOSED_REQUEST,
            prompt_tokens: None,
            cached_tokens: 0,
            output_tokens: 0,
            queued: None,
            first_token: None,
            finish_reasons: Vec::new(),
            parameters: None,
            span: None,
        }
    }
}

impl AccessLogRecord {
    /// Creates the record of a request; `span` is its trace span, if it has one.
    pub(crate) fn new(span: Option<RequestSpan>) -> Self {
        let record = Self::default();
        record.counts().span = span;
        record
    }

    /// Locks the request's status, token counts and times, and returns them.
    pub(crate) fn counts(&self) -> MutexGuard<'_, AccessLogFields> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a generation was submitted; `prompt_tokens` contains the number of tokens of each
    /// prompt.
    pub(crate) fn begin(
        &self,
        prompt_tokens: &[u32],
        parameters: Option<Box<SpanGenerationParams>>,
    ) {
        let mut counts = self.counts();
        counts.prompt_tokens = Some(prompt_tokens.iter().copied().map(u64::from).sum());
        counts.parameters = parameters;
    }

    /// Updates the token counts and times from a token event of a choice: its admission or its new tokens.
    pub(crate) fn record(&self, event: &TokenEvent) {
        if event.tokens.is_empty() && event.first_admission.is_none() {
            return;
        }
        let mut counts = self.counts();
        if let Some(admission) = event.first_admission {
            counts.cached_tokens += u64::from(admission.cached_tokens);
            let queued = Duration::from_millis(u64::from(admission.queued_ms));
            counts.queued.get_or_insert(queued);
        }
        if !event.tokens.is_empty() {
            counts.output_tokens += event.tokens.len() as u64;
            counts.first_token.get_or_insert_with(Instant::now);
        }
    }

    /// Records the finish reason of a choice.
    pub(crate) fn end(&self, finish: &'static str) {
        let mut counts = self.counts();
        if !counts.finish_reasons.contains(&finish) {
            counts.finish_reasons.push(finish);
        }
    }
}

impl AccessLogFields {
    /// Returns the finish reasons of a generation; `None` if the request submitted nothing to the engine.
    /// If no choice has a finish reason, the client has disconnected, and the result is `client_gone`.
    pub(crate) fn finish_reasons(&self) -> Option<Vec<&'static str>> {
        self.prompt_tokens?;
        match self.finish_reasons.as_slice() {
            [] => Some(vec!["client_gone"]),
            reasons => Some(reasons.to_vec()),
        }
    }
}

impl Drop for AccessLogFields {
    fn drop(&mut self) {
        if let Some(span) = self.span.take() {
            span.end(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finish_reasons_of_choices_are_listed_once() {
        let record = AccessLogRecord::default();
        assert_eq!(record.counts().finish_reasons(), None);
        record.begin(&[3, 4], None);
        assert_eq!(record.counts().finish_reasons(), Some(vec!["client_gone"]));
        for reason in ["stop", "length", "stop"] {
            record.end(reason);
        }
        let counts = record.counts();
        assert_eq!(counts.finish_reasons(), Some(vec!["stop", "length"]));
        assert_eq!(counts.prompt_tokens, Some(7));
    }
}
