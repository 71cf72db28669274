//! Output state of one choice: converts the engine's token events to text deltas.
//!
//! Invariants: the concatenated text of the deltas does not depend on how events are grouped; text is always
//! valid UTF-8; there is no output after the end. The token that ends a choice counts in `usage`; its text is
//! part of the output only with `include_stop_str_in_output`.

use protocol::{RowError, Token, TokenLogprobs};
use scheduler::{AbortCause, FinishReason, RejectReason, RequestError, StopReason, TokenEvent};
use text::{Detokenizer, OutputParser, OutputPieces, StopMatcher};

/// Why a choice ended, as reported to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChoiceFinishReason {
    /// The output ended with an EOS token, a stop token or a stop string.
    Stop(StopMatch),
    /// As `Stop`, but the output contains at least one tool call.
    Calls(StopMatch),
    /// `max_tokens` or the context length was reached.
    Length,
    /// The request was aborted: disconnect or slow client, deadline, shutdown, or operator.
    Abort(AbortCause),
    /// An error ended the choice: an error of the engine, or an error that affects only this choice's row
    /// of the batch.
    Error(RequestError),
    /// The scheduler rejected the request.
    Rejected(RejectReason),
}

/// What stopped the output; determines the value of `stop_reason`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StopMatch {
    /// An EOS token; `stop_reason` is null.
    Eos,
    /// A stop token with this id.
    Id(Token),
    /// A stop string with this text.
    Text(String),
}

impl ChoiceFinishReason {
    /// Returns the value of `finish_reason`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Calls(_) => "tool_calls",
            Self::Length => "length",
            Self::Abort(_) => "abort",
            Self::Error(_) | Self::Rejected(_) => "error",
        }
    }

    /// Whether only this choice failed, because of its logits or its output in the batch, while the engine
    /// continues to work for other requests.
    pub(crate) fn is_row_error(&self) -> bool {
        matches!(
            self,
            Self::Error(RequestError::RowFailed(RowError::NonFiniteLogits | RowError::AllMasked))
        ) || matches!(self, Self::Error(RequestError::BadOutput))
    }
}

/// Output of a choice since the last delta.
#[derive(Debug, Default)]
pub(crate) struct ChoiceDelta {
    /// New text as generated, before parsing.
    pub text: String,
    /// New text split into reasoning, content and tool calls, if the choice has a parser.
    pub pieces: OutputPieces,
    /// New tokens, including tokens whose text is still withheld.
    pub tokens: Vec<Token>,
    /// Log-probabilities of the new tokens, one entry per token, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Whether a token without text arrived while no text was withheld. The delta is then streamed even if it
    /// is empty, so that clients that count events see progress.
    pub has_textless_token: bool,
    /// Why the choice ended; set only in its last delta.
    pub end: Option<ChoiceFinishReason>,
}

impl ChoiceDelta {
    /// Clears this delta and keeps its allocations.
    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.pieces.clear();
        self.has_textless_token = false;
        self.tokens.clear();
        self.logprobs.clear();
        self.end = None;
    }
}

/// Parameters that determine how stop strings and stop tokens end a choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChoiceStopParams {
    /// Number of tokens at the start of the output in which stop strings are not matched (`min_tokens`).
    pub min_tokens: u32,
    /// Whether the output includes the text of the token that stops it.
    pub include_stop: bool,
}

/// State of one choice between two token events.
pub(crate) struct ChoiceState {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    rules: ChoiceStopParams,
    parser: Option<OutputParser>,
    /// Number of tokens generated so far.
    pub tokens: u32,
    /// Number of reasoning tokens generated so far.
    pub reasoning_tokens: u32,
    /// Number of draft tokens that were verified so far, accepted or rejected.
    pub draft_tokens: u32,
    /// Number of accepted draft tokens so far.
    pub accepted_draft_tokens: u32,
    /// Number of prompt tokens found in the prefix cache; `None` until the request is admitted.
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of the prompt tokens received so far.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Pooled vector that the engine returned for a pooling request; empty for other requests.
    pub pooled: Vec<f32>,
    ended: bool,
    scratch: String,
}

impl ChoiceState {
    /// Creates the state of a choice that has no token yet.
    pub(crate) fn new(
        detokenizer: Detokenizer,
        matcher: StopMatcher,
        rules: ChoiceStopParams,
        parser: Option<OutputParser>,
    ) -> Self {
        Self {
            detokenizer,
            matcher,
            rules,
            parser,
            tokens: 0,
            reasoning_tokens: 0,
            draft_tokens: 0,
            accepted_draft_tokens: 0,
            cached_tokens: None,
            prompt_logprobs: Vec::new(),
            pooled: Vec::new(),
            ended: false,
            scratch: String::new(),
        }
    }

    /// Whether the choice has a reasoning parser.
    pub(crate) fn parses_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::parses_reasoning)
    }

    fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::is_reasoning)
    }

    /// Whether the choice has ended: its last delta has been produced.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Applies a token event of the engine and appends its output to `delta`.
    ///
    /// Returns whether a stop string was found. The engine does not detect stop strings, so the caller must
    /// then abort the request in the engine.
    pub(crate) fn push(&mut self, event: TokenEvent, delta: &mut ChoiceDelta) -> bool {
        if self.ended {
            return false;
        }
        let with_text = self.tokens_with_text(&event);
        self.count_cached_and_draft_tokens(&event);
        if let Some(prompt) = event.prompt {
            self.prompt_logprobs.extend(prompt.logprobs);
            self.pooled.extend(prompt.pooled);
        }
        let mut logprobs = event.logprobs.into_iter();
        for (i, &token) in event.tokens.iter().enumerate() {
            self.tokens += 1;
            delta.tokens.push(token);
            delta.logprobs.extend(logprobs.next());
            let (from, was_reasoning) = (delta.text.len(), self.is_reasoning());
            let stopped = i < with_text && self.push_token(token, delta);
            self.parse(from, delta);
            self.reasoning_tokens += u32::from(was_reasoning && self.is_reasoning());
            if stopped {
                return true;
            }
        }
        let Some(finish) = event.finish_reason else { return false };
        let from = delta.text.len();
        self.finish(finish, delta);
        self.parse(from, delta);
        false
    }

    fn count_cached_and_draft_tokens(&mut self, event: &TokenEvent) {
        self.cached_tokens =
            self.cached_tokens.or(event.first_admission.map(|run| run.cached_tokens));
        self.draft_tokens += u32::from(event.drafts.drafted);
        self.accepted_draft_tokens += u32::from(event.drafts.accepted);
    }

    /// Returns the number of tokens in the event whose text is output: all tokens, except a token that stops
    /// the choice, unless the request includes that token's text.
    fn tokens_with_text(&self, event: &TokenEvent) -> usize {
        let stopped = matches!(
            event.finish_reason,
            Some(FinishReason::Stop(StopReason::Eos(_) | StopReason::StopToken(_)))
        );
        let textless = usize::from(stopped && !self.rules.include_stop);
        event.tokens.len().saturating_sub(textless)
    }

    /// Parses the text of `delta` starting at byte `from`; if the choice has ended, also finishes the parser.
    fn parse(&mut self, from: usize, delta: &mut ChoiceDelta) {
        let Some(parser) = &mut self.parser else { return };
        parser.push(&delta.text[from..], &mut delta.pieces);
        if !self.ended {
            return;
        }
        parser.finish(&mut delta.pieces);
        if parser.complete_calls() > 0
            && let Some(ChoiceFinishReason::Stop(stop)) = &delta.end
        {
            delta.end = Some(ChoiceFinishReason::Calls(stop.clone()));
        }
    }

    /// Appends the text of one token to `delta`; returns true if a stop string ended the choice.
    fn push_token(&mut self, token: Token, delta: &mut ChoiceDelta) -> bool {
        self.scratch.clear();
        self.detokenizer.push(token, &mut self.scratch);
        if self.scratch.is_empty() {
            delta.has_textless_token |=
                !self.detokenizer.has_pending() && !self.matcher.has_pending();
            return false;
        }
        if self.tokens <= self.rules.min_tokens {
            self.matcher.push_unmatched(&self.scratch, &mut delta.text);
            return false;
        }
        let Some(stop) = self.matcher.push(&self.scratch, &mut delta.text) else { return false };
        delta.end = Some(ChoiceFinishReason::Stop(StopMatch::Text(stop.to_owned())));
        self.ended = true;
        true
    }

    /// Ends the choice. If the withheld text ends with a stop string, the stop string becomes the finish
    /// reason.
    fn finish(&mut self, finish: FinishReason, delta: &mut ChoiceDelta) {
        self.ended = true;
        self.scratch.clear();
        self.detokenizer.finish(&mut self.scratch);
        if let Some(stop) = self.matcher.push(&self.scratch, &mut delta.text) {
            delta.end = Some(ChoiceFinishReason::Stop(StopMatch::Text(stop.to_owned())));
            return;
        }
        self.matcher.finish(&mut delta.text);
        delta.end = Some(match finish {
            FinishReason::Stop(StopReason::StopToken(id)) => {
                ChoiceFinishReason::Stop(StopMatch::Id(id))
            }
            // `StopString` does not occur here: stop strings are matched only by this object, which has
            // already ended the choice in that case.
            FinishReason::Stop(
                StopReason::Eos(_) | StopReason::StopString | StopReason::Pooled,
            ) => ChoiceFinishReason::Stop(StopMatch::Eos),
            FinishReason::Length => ChoiceFinishReason::Length,
            FinishReason::Abort(cause) => ChoiceFinishReason::Abort(cause),
            FinishReason::Error(code) => ChoiceFinishReason::Error(code),
            FinishReason::Rejected(reason) => ChoiceFinishReason::Rejected(*reason),
        });
    }
}
