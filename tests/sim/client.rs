//! A client's view of its request: I9 (one terminal event), I10 (tokens only grow) and I13 (the text
//! is what the request alone and cold would get), plus refusals and log-probabilities.

use crate::broken::{Checked, ensure};
use crate::hash_model::text::{EMPTY, Oracle, entry, fold, logprobs};
use crate::mask_maker::MaskMaker;
use crate::requests::oracle;
use crate::setup::Setup;
use protocol::{RequestId, RowError, Token, TokenLogprobs};
use scheduler::{AbortCause, ErrorCode, Finish, FirstRun, Refusal, StopReason, Submit, TokenEvent};

/// Where a request stands in its owner's eyes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not sent yet.
    Unsent,
    /// Sent, no terminal event seen.
    Live,
    /// Terminal event seen.
    Done,
}

/// What may befall a request besides an ordinary end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Excuses {
    /// An abort was handed to the engine.
    pub(crate) abort: Option<AbortCause>,
    /// A row of it was made to fail.
    pub(crate) row_failed: bool,
    /// A row of it was answered with ids that cannot be.
    pub(crate) bad_output: bool,
    /// Its replica may have been away for too long.
    pub(crate) unavailable: bool,
}

/// A request and all its owner knows.
#[derive(Debug)]
pub(crate) struct Client {
    /// What is asked.
    pub(crate) submit: Submit,
    /// What its owner calls it.
    pub(crate) name: String,
    /// Progress.
    pub(crate) stage: Stage,
    /// What else may happen.
    pub(crate) excuses: Excuses,
    /// Whether a row of it was ever sent.
    pub(crate) started: bool,
    /// Tokens received.
    pub(crate) delivered: u32,
    /// Prompt and tokens received.
    pub(crate) text: Vec<Token>,
    /// Preemptions reported.
    pub(crate) preemptions: u32,
    /// Who makes its masks.
    pub(crate) masks: MaskMaker,
    oracle: Oracle,
    last: Option<StopReason>,
    prompt_logprobs: Vec<TokenLogprobs>,
    admitted: bool,
}

impl Client {
    /// A client that has not asked yet.
    pub(crate) fn new(submit: Submit, setup: &Setup) -> Self {
        let vocab = setup.engine.limits.vocab_size;
        Self {
            oracle: oracle(&submit, vocab),
            name: submit.id.0.to_string(),
            stage: Stage::Unsent,
            excuses: Excuses::default(),
            started: false,
            delivered: 0,
            text: submit.tokens.clone(),
            preemptions: 0,
            masks: MaskMaker::default(),
            last: None,
            prompt_logprobs: Vec::new(),
            admitted: false,
            submit,
        }
    }

    /// The request's id.
    pub(crate) fn id(&self) -> RequestId {
        self.submit.id
    }

    /// Longest length prompt and answer may reach.
    pub(crate) fn limit(&self) -> u32 {
        self.submit.tokens.len() as u32 + self.submit.max_tokens
    }

    /// Position behind the last token that is ever forwarded: the last one produced never is.
    pub(crate) fn forwarded(&self) -> u32 {
        self.limit() - u32::from(self.submit.max_tokens > 0)
    }

    /// Tokens of its output so far.
    pub(crate) fn outputs(&self) -> u32 {
        (self.text.len() - self.submit.tokens.len()) as u32
    }

    /// Takes one event.
    pub(crate) fn hear(&mut self, event: &TokenEvent, setup: &Setup) -> Checked {
        let id = self.id().0;
        ensure!("I9", self.stage == Stage::Live, "request {id} is {:?}: {event:?}", self.stage);
        if let Some(FirstRun { cached_tokens: cached, .. }) = event.first_run {
            ensure!("I9", !self.admitted, "request {id} is told twice that it runs: {event:?}");
            self.admitted = true;
            let most = self.submit.tokens.len() as u32;
            ensure!("I13", cached < most, "request {id}: {cached} of {most} prompt ids cached");
            ensure!("I13", cached % setup.block_tokens() == 0, "request {id}: {cached} cached");
        }
        let silent = event.tokens.is_empty() && event.prompt_logprobs.is_empty();
        ensure!("I9", self.admitted || silent, "request {id} speaks before it runs: {event:?}");
        ensure!("I11", event.preemptions <= 4, "request {id}: {} preemptions", event.preemptions);
        ensure!("I10", event.preemptions >= self.preemptions, "request {id}: preemptions shrink");
        self.preemptions = event.preemptions;
        self.hear_tokens(event, setup)?;
        self.prompt_logprobs.extend_from_slice(&event.prompt_logprobs);
        let most = self.submit.max_tokens;
        let over = self.last.is_some() || most > 0 && self.delivered == most;
        match &event.finish {
            None => {
                ensure!("I9", !over, "request {id} has all its tokens, but no end: {event:?}");
                ensure!("I10", !is_empty(event), "request {id}: news without content: {event:?}");
                Ok(())
            }
            Some(finish) => {
                self.stage = Stage::Done;
                self.ends_well(finish, setup)
            }
        }
    }

    /// Each token is the oracle's next one and nothing follows an end.
    fn hear_tokens(&mut self, event: &TokenEvent, setup: &Setup) -> Checked {
        let (id, submit) = (self.submit.id.0, &self.submit);
        let wanted = submit.sampling.logprobs;
        let told = event.logprobs.len();
        let expected = wanted.map_or(0, |_| event.tokens.len());
        ensure!("I10", told == expected, "request {id}: {told} logprobs, expected {expected}");
        for (i, &token) in event.tokens.iter().enumerate() {
            let over = self.last.is_some() || self.delivered >= submit.max_tokens;
            ensure!("I9", !over, "request {id}: token {token} behind its end: {event:?}");
            let context = self.oracle.context();
            let right = self.oracle.next();
            ensure!(
                "I13",
                right == Some(token),
                "request {id}: token {} is {token}, alone it is {right:?}",
                self.delivered
            );
            if let Some(top) = wanted {
                let right = logprobs(context, token, top, setup.engine.limits.vocab_size);
                ensure!("I13", event.logprobs[i] == right, "request {id}: {:?}", event.logprobs[i]);
            }
            self.delivered += 1;
            self.text.push(token);
            self.last = if submit.eos_ids.contains(&token) {
                Some(StopReason::Eos(token))
            } else {
                submit.stop_ids.contains(&token).then_some(StopReason::Id(token))
            };
        }
        Ok(())
    }

    /// The end is the right one.
    fn ends_well(&mut self, finish: &Finish, setup: &Setup) -> Checked {
        let (id, delivered, excuses) = (self.id().0, self.delivered, self.excuses);
        let right = match finish {
            Finish::Stop(StopReason::Text) => excuses.abort == Some(AbortCause::StopText),
            Finish::Abort(AbortCause::StopText)
            | Finish::Error(ErrorCode::Row(RowError::MaskLate)) => false,
            Finish::Abort(cause) => excuses.abort == Some(*cause),
            Finish::Stop(reason) => self.last == Some(*reason),
            Finish::Length => self.last.is_none() && delivered == self.submit.max_tokens,
            Finish::Error(ErrorCode::Row(RowError::NonFiniteLogits)) => excuses.row_failed,
            Finish::Error(ErrorCode::Row(RowError::AllMasked)) => self.oracle.next().is_none(),
            Finish::Error(ErrorCode::BadOutput) => excuses.bad_output,
            Finish::Error(ErrorCode::EngineUnavailable) => excuses.unavailable,
            Finish::Refused(refusal) => delivered == 0 && self.deserves(refusal, setup),
        };
        let last = self.last;
        ensure!(
            "I9",
            right,
            "request {id} ends {finish:?}: {delivered} tokens, {last:?}, {excuses:?}"
        );
        let whole = matches!(finish, Finish::Length)
            || matches!(finish, Finish::Stop(StopReason::Eos(_) | StopReason::Id(_)));
        if whole { self.prompt_was_scored(setup) } else { Ok(()) }
    }

    /// Every prompt position behind the first one was scored once, in order, if asked for.
    fn prompt_was_scored(&self, setup: &Setup) -> Checked {
        let (id, tokens) = (self.id().0, &self.submit.tokens);
        let Some(top) = self.submit.sampling.prompt_logprobs else {
            ensure!("I13", self.prompt_logprobs.is_empty(), "request {id}: scores not asked for");
            return Ok(());
        };
        let vocab = setup.engine.limits.vocab_size;
        let mut context = fold(EMPTY, entry(EMPTY, tokens[0]));
        let (told, asked) = (self.prompt_logprobs.len(), tokens.len() - 1);
        ensure!("I13", told == asked, "request {id}: {told} of {asked} prompt ids scored");
        for (position, (&token, told)) in tokens[1..].iter().zip(&self.prompt_logprobs).enumerate()
        {
            let right = logprobs(context, token, top, vocab);
            ensure!("I13", *told == right, "request {id}: score of position {}", position + 1);
            context = fold(context, entry(context, token));
        }
        Ok(())
    }

    /// Whether a refusal tells the truth.
    fn deserves(&self, refusal: &Refusal, setup: &Setup) -> bool {
        let (submit, limits) = (&self.submit, &setup.engine.limits);
        let (prompt, longest) = (submit.tokens.len() as u64, limits.max_model_len);
        match refusal {
            Refusal::EmptyPrompt => prompt == 0,
            Refusal::UnknownToken { token, .. } => {
                *token >= limits.vocab_size && submit.tokens.contains(token)
            }
            Refusal::PromptTooLong { .. } => prompt >= u64::from(longest),
            Refusal::TotalTooLong { .. } => {
                prompt + u64::from(submit.max_tokens) > u64::from(longest)
            }
            Refusal::PoolTooSmall { blocks, pool } => blocks > pool,
            Refusal::QueueFull { waiting, cap } => {
                waiting >= cap && *cap == limits.requests_waiting
            }
            Refusal::QueueTokens { waiting, asked, cap } => {
                waiting + asked > *cap && *cap == limits.tokens_waiting && *asked == prompt
            }
            Refusal::UnknownReplica { replica, replicas } => replica >= replicas,
            // Only who holds requests back says so.
            Refusal::Unusable { .. } | Refusal::NotNow { .. } | Refusal::Crowded { .. } => false,
        }
    }

    /// Whether the engine must refuse this request, whatever else happens.
    pub(crate) fn is_hopeless(&self, setup: &Setup) -> bool {
        let (submit, limits) = (&self.submit, &setup.engine.limits);
        let prompt = submit.tokens.len() as u32;
        prompt == 0
            || prompt >= limits.max_model_len
            || self.limit() > limits.max_model_len
            || submit.tokens.iter().any(|&t| t >= limits.vocab_size)
            || submit.replica.is_some_and(|r| r.0 >= setup.engine.replicas)
    }
}

/// Whether an event says nothing.
fn is_empty(event: &TokenEvent) -> bool {
    event.tokens.is_empty() && event.prompt_logprobs.is_empty() && event.first_run.is_none()
}
