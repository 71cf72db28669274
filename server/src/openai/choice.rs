//! Output state of one choice: converts engine events to text deltas.
//!
//! Invariants: deltas concatenate to the same text at any cut; text is always valid UTF-8; there is no output
//! after the end. The token that ends a choice counts in usage; its text appears only with
//! `include_stop_str_in_output`.

use protocol::{RowError, Token, TokenLogprobs};
use scheduler::{AbortCause, FinishReason, RejectReason, RequestError, StopReason, TokenEvent};
use text::{Detokenizer, OutputParser, OutputPieces, StopMatcher};

/// End of a choice, as reported to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChoiceFinish {
    /// End of text, a stop id or a stop string.
    Stop(StopMatch),
    /// End of text, a stop id or a stop string, after at least one tool call.
    Calls(StopMatch),
    /// `max_tokens` or the context length was reached.
    Length,
    /// Aborted: disconnect or slow client, deadline, shutdown, or operator.
    Abort(AbortCause),
    /// Failed: this row only, or the engine.
    Error(RequestError),
    /// Rejected by the scheduler.
    Rejected(RejectReason),
}

/// Reason for a stop; the value of `stop_reason`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StopMatch {
    /// End of text: null.
    Eos,
    /// Stop token id.
    Id(Token),
    /// Stop string.
    Text(String),
}

impl ChoiceFinish {
    /// Value of `finish_reason`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Calls(_) => "tool_calls",
            Self::Length => "length",
            Self::Abort(_) => "abort",
            Self::Error(_) | Self::Rejected(_) => "error",
        }
    }

    /// Whether the row's own logits are at fault, not the engine.
    pub(crate) fn is_row_error(&self) -> bool {
        matches!(
            self,
            Self::Error(RequestError::RowFailed(RowError::NonFiniteLogits | RowError::AllMasked))
        ) || matches!(self, Self::Error(RequestError::BadOutput))
    }
}

/// New output of a choice.
#[derive(Debug, Default)]
pub(crate) struct ChoiceDelta {
    /// New text, as generated.
    pub text: String,
    /// New text split into reasoning, content and tool calls, if the choice has a parser.
    pub pieces: OutputPieces,
    /// New tokens, including tokens without text so far.
    pub tokens: Vec<Token>,
    /// Log-probabilities, one entry per new token, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Whether a token without text has arrived while no text is held back. It is streamed as an empty chunk,
    /// so that clients that count events see progress.
    pub has_textless_token: bool,
    /// Set on the last delta.
    pub end: Option<ChoiceFinish>,
}

impl ChoiceDelta {
    /// Clears the delta and keeps its allocations.
    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.pieces.clear();
        self.has_textless_token = false;
        self.tokens.clear();
        self.logprobs.clear();
        self.end = None;
    }
}

/// Stop rules of a choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StopRules {
    /// Number of tokens at the start of the output in which stop strings are not matched.
    pub min_tokens: u32,
    /// Whether the token that stops the output keeps its text.
    pub include_stop: bool,
}

/// State of one choice.
pub(crate) struct ChoiceState {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    rules: StopRules,
    parser: Option<OutputParser>,
    /// Number of tokens generated so far.
    pub tokens: u32,
    /// Number of reasoning tokens generated so far.
    pub reasoning_tokens: u32,
    /// Number of prompt tokens found in the prefix cache, once known.
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of the prompt received so far.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    ended: bool,
    scratch: String,
}

impl ChoiceState {
    /// Creates the state of a choice before its first token.
    pub(crate) fn new(
        detokenizer: Detokenizer,
        matcher: StopMatcher,
        rules: StopRules,
        parser: Option<OutputParser>,
    ) -> Self {
        Self {
            detokenizer,
            matcher,
            rules,
            parser,
            tokens: 0,
            reasoning_tokens: 0,
            cached_tokens: None,
            prompt_logprobs: Vec::new(),
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

    /// Whether the last delta has been produced.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Applies an event and appends its output to `delta`.
    ///
    /// Returns whether a stop string was found: the caller must then abort the request in the engine.
    pub(crate) fn push(&mut self, event: TokenEvent, delta: &mut ChoiceDelta) -> bool {
        if self.ended {
            return false;
        }
        self.cached_tokens =
            self.cached_tokens.or(event.first_admission.map(|run| run.cached_tokens));
        self.prompt_logprobs.extend(event.prompt_logprobs);
        let stopped = matches!(
            event.finish_reason,
            Some(FinishReason::Stop(StopReason::Eos(_) | StopReason::StopToken(_)))
        );
        let textless = usize::from(stopped && !self.rules.include_stop);
        let with_text = event.tokens.len().saturating_sub(textless);
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

    /// Parses the text from byte `from` on; finishes the parser if the choice has ended.
    fn parse(&mut self, from: usize, delta: &mut ChoiceDelta) {
        let Some(parser) = &mut self.parser else { return };
        parser.push(&delta.text[from..], &mut delta.pieces);
        if !self.ended {
            return;
        }
        parser.finish(&mut delta.pieces);
        if parser.complete_calls() > 0
            && let Some(ChoiceFinish::Stop(stop)) = &delta.end
        {
            delta.end = Some(ChoiceFinish::Calls(stop.clone()));
        }
    }

    /// Appends one token's text; returns true if a stop string ended the choice.
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
        delta.end = Some(ChoiceFinish::Stop(StopMatch::Text(stop.to_owned())));
        self.ended = true;
        true
    }

    /// Ends the choice. A stop string in the text held back so far becomes the finish reason.
    fn finish(&mut self, finish: FinishReason, delta: &mut ChoiceDelta) {
        self.ended = true;
        self.scratch.clear();
        self.detokenizer.finish(&mut self.scratch);
        if let Some(stop) = self.matcher.push(&self.scratch, &mut delta.text) {
            delta.end = Some(ChoiceFinish::Stop(StopMatch::Text(stop.to_owned())));
            return;
        }
        self.matcher.finish(&mut delta.text);
        delta.end = Some(match finish {
            FinishReason::Stop(StopReason::StopToken(id)) => ChoiceFinish::Stop(StopMatch::Id(id)),
            // `StopString` cannot occur: only this choice matches stop strings, and it has ended then.
            FinishReason::Stop(StopReason::Eos(_) | StopReason::StopString) => {
                ChoiceFinish::Stop(StopMatch::Eos)
            }
            FinishReason::Length => ChoiceFinish::Length,
            FinishReason::Abort(cause) => ChoiceFinish::Abort(cause),
            FinishReason::Error(code) => ChoiceFinish::Error(code),
            FinishReason::Rejected(reason) => ChoiceFinish::Rejected(*reason),
        });
    }
}
