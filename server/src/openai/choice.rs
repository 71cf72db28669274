//! One choice: engine events in, text deltas out.
//!
//! Invariants: deltas concatenate to the same text at any cut; text is always valid UTF-8; nothing
//! follows the end. The token that ends a choice counts in usage; its text appears only with
//! `include_stop_str_in_output`.

use protocol::{RowError, Token, TokenLogprobs};
use scheduler::{AbortCause, FinishReason, RejectReason, RequestError, StopReason, TokenEvent};
use text::{Detokenizer, OutputParser, OutputPieces, StopMatcher};

/// How a choice ended, in the client's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChoiceFinish {
    /// End of text, a stop id or a stop string.
    Stop(StopMatch),
    /// The same, behind a tool call.
    Calls(StopMatch),
    /// `max_tokens` or the context.
    Length,
    /// Taken back by the server.
    Abort(AbortCause),
    /// Failed alone, or with the engine.
    Error(RequestError),
    /// Never accepted.
    Rejected(RejectReason),
}

/// The value of `stop_reason`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StopMatch {
    /// End of text: null.
    Eos,
    /// A stop id.
    Id(Token),
    /// A stop string.
    Text(String),
}

impl ChoiceFinish {
    /// The value of `finish_reason`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Calls(_) => "tool_calls",
            Self::Length => "length",
            Self::Abort(_) => "abort",
            Self::Error(_) | Self::Rejected(_) => "error",
        }
    }

    /// Whether the row's own logits, and not the engine, are at fault.
    pub(crate) fn is_row_error(&self) -> bool {
        matches!(
            self,
            Self::Error(RequestError::RowFailed(RowError::NonFiniteLogits | RowError::AllMasked))
        ) || matches!(self, Self::Error(RequestError::BadOutput))
    }
}

/// What is new in a choice.
#[derive(Debug, Default)]
pub(crate) struct ChoiceDelta {
    /// New text, as the model wrote it.
    pub text: String,
    /// The same, told apart, if somebody reads it.
    pub pieces: OutputPieces,
    /// New tokens, also those without text yet.
    pub tokens: Vec<Token>,
    /// One entry per new token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// A token came that has no text, and none is held back: a sign of life for who counts events.
    pub has_textless_token: bool,
    /// Set on the last delta.
    pub end: Option<ChoiceFinish>,
}

impl ChoiceDelta {
    /// Forgets everything but the memory.
    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.pieces.clear();
        self.has_textless_token = false;
        self.tokens.clear();
        self.logprobs.clear();
        self.end = None;
    }
}

/// Rules of the text of a choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StopRules {
    /// Tokens before which a stop string does not stop.
    pub min_tokens: u32,
    /// The token that stops keeps its text.
    pub include_stop: bool,
}

/// State of one choice.
pub(crate) struct ChoiceState {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    rules: StopRules,
    parser: Option<OutputParser>,
    /// Tokens produced so far.
    pub tokens: u32,
    /// Those of them that are reasoning.
    pub reasoning_tokens: u32,
    /// Prompt tokens found in the cache, once known.
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of the prompt, as far as they have come.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    ended: bool,
    scratch: String,
}

impl ChoiceState {
    /// A choice before its first token.
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

    /// Whether reasoning is told apart.
    pub(crate) fn reads_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::reads_reasoning)
    }

    fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::is_reasoning)
    }

    /// Whether the last delta has been produced.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes an event and adds what it brings to `delta`.
    ///
    /// Returns whether a stop string was found, so that the engine must be told.
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
            let (from, reasoned) = (delta.text.len(), self.is_reasoning());
            let stopped = i < with_text && self.push_token(token, delta);
            self.parse(from, delta);
            self.reasoning_tokens += u32::from(reasoned && self.is_reasoning());
            if stopped {
                return true;
            }
        }
        let Some(finish) = event.finish_reason else { return false };
        let from = delta.text.len();
        let stopped = self.finish(finish, delta);
        self.parse(from, delta);
        stopped
    }

    /// Tells apart what the text has become since byte `from`, to the end if the choice has ended.
    fn parse(&mut self, from: usize, delta: &mut ChoiceDelta) {
        let Some(parser) = &mut self.parser else { return };
        parser.push(&delta.text[from..], &mut delta.pieces);
        if !self.ended {
            return;
        }
        parser.finish(&mut delta.pieces);
        if parser.complete_calls() > 0
            && let Some(ChoiceFinish::Stop(by)) = &delta.end
        {
            delta.end = Some(ChoiceFinish::Calls(by.clone()));
        }
    }

    /// Adds one token's text; true if a stop string ended the choice.
    fn push_token(&mut self, token: Token, delta: &mut ChoiceDelta) -> bool {
        self.scratch.clear();
        self.detokenizer.push(token, &mut self.scratch);
        if self.scratch.is_empty() {
            delta.has_textless_token |=
                !self.detokenizer.is_holding() && !self.matcher.is_holding();
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

    /// Ends the choice; true if the text held back turned out to hold a stop string.
    fn finish(&mut self, finish: FinishReason, delta: &mut ChoiceDelta) -> bool {
        self.ended = true;
        self.scratch.clear();
        self.detokenizer.finish(&mut self.scratch);
        if let Some(stop) = self.matcher.push(&self.scratch, &mut delta.text) {
            delta.end = Some(ChoiceFinish::Stop(StopMatch::Text(stop.to_owned())));
            return false;
        }
        self.matcher.finish(&mut delta.text);
        delta.end = Some(match finish {
            FinishReason::Stop(StopReason::StopToken(id)) => ChoiceFinish::Stop(StopMatch::Id(id)),
            // `StopString` cannot come: only this choice finds stop strings, and then it has ended.
            FinishReason::Stop(StopReason::Eos(_) | StopReason::StopString) => {
                ChoiceFinish::Stop(StopMatch::Eos)
            }
            FinishReason::Length => ChoiceFinish::Length,
            FinishReason::Abort(cause) => ChoiceFinish::Abort(cause),
            FinishReason::Error(code) => ChoiceFinish::Error(code),
            FinishReason::Rejected(refusal) => ChoiceFinish::Rejected(*refusal),
        });
        false
    }
}
