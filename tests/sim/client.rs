//! A simulated client: its request and everything that it has received. Checks I9 (one terminal event), I10
//! (the output only grows) and I13 (the output equals the output of the same request alone with an empty
//! cache), and checks rejections and log-probabilities.

use crate::hash_model::text::{
    EMPTY, HashOracle, entry, fold, logprobs, pooled, pooled_count, pooling_hash,
};
use crate::invariant::{CheckResult, ensure};
use crate::mask_worker::SimMaskWorker;
use crate::request_generator::oracle;
use crate::sim_config::SimConfig;
use protocol::{RequestId, RowError, Token, TokenLogprobs};
use scheduler::{
    AbortCause, FinishReason, FirstAdmission, RejectReason, RequestError, RequestSubmission,
    StopReason, TokenEvent,
};

/// State of a request, according to the events that its client has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientStage {
    /// The request has not been sent yet.
    Unsent,
    /// The request was sent; no terminal event has been received.
    Live,
    /// A terminal event has been received.
    Done,
}

/// Outcomes of a request, other than a regular finish, that are permitted because of injected faults.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AllowedOutcomes {
    /// Cause of the abort that was sent for the request. The request may end with this cause.
    pub(crate) aborted: Option<AbortCause>,
    /// Whether fault injection made a row of the request fail.
    pub(crate) row_failed: bool,
    /// Whether fault injection put invalid token ids into an output of the request.
    pub(crate) bad_output: bool,
    /// Whether the request may end with `ReplicaUnavailable`, because its replica may have been failed for
    /// longer than the failure timeout.
    pub(crate) unavailable: bool,
}

/// A request and everything its client has received.
#[derive(Debug)]
pub(crate) struct SimClient {
    /// The submitted request.
    pub(crate) submit: RequestSubmission,
    /// Request id chosen by the client.
    pub(crate) client_id: String,
    /// State of the request, according to the events that its client has received.
    pub(crate) stage: ClientStage,
    /// Outcomes that are permitted in addition to a regular finish.
    pub(crate) allowed: AllowedOutcomes,
    /// Whether a row of the request was ever sent to an executor.
    pub(crate) started: bool,
    /// Number of output tokens that the client has received.
    pub(crate) delivered: u32,
    /// Prompt tokens, then output tokens received.
    pub(crate) known_tokens: Vec<Token>,
    /// Number of preemptions that token events have reported.
    pub(crate) preemptions: u32,
    /// Simulated worker that builds the request's grammar bitmasks.
    pub(crate) mask_worker: SimMaskWorker,
    oracle: HashOracle,
    last_stop: Option<StopReason>,
    prompt_logprobs: Vec<TokenLogprobs>,
    pooled: Vec<f32>,
    admitted: bool,
}

impl SimClient {
    /// Creates a client that has not sent its request yet.
    pub(crate) fn new(submit: RequestSubmission, config: &SimConfig) -> Self {
        let vocab = config.scheduler.limits.vocab_size;
        Self {
            oracle: oracle(&submit, vocab),
            client_id: submit.id.0.to_string(),
            stage: ClientStage::Unsent,
            allowed: AllowedOutcomes::default(),
            started: false,
            delivered: 0,
            known_tokens: submit.tokens.clone(),
            preemptions: 0,
            mask_worker: SimMaskWorker::default(),
            last_stop: None,
            prompt_logprobs: Vec::new(),
            pooled: Vec::new(),
            admitted: false,
            submit,
        }
    }

    /// Internal id of the request.
    pub(crate) fn id(&self) -> RequestId {
        self.submit.id
    }

    /// Maximum total length of prompt and output in tokens.
    pub(crate) fn limit(&self) -> u32 {
        self.submit.tokens.len() as u32 + self.submit.max_tokens
    }

    /// End position (exclusive) of the tokens that can be model inputs: all tokens except the last output
    /// token.
    pub(crate) fn forwarded_limit(&self) -> u32 {
        self.limit() - u32::from(self.submit.max_tokens > 0)
    }

    /// Number of output tokens received so far.
    pub(crate) fn output_len(&self) -> u32 {
        (self.known_tokens.len() - self.submit.tokens.len()) as u32
    }

    /// Checks one token event against the oracle (the expected output, computed without a scheduler), and
    /// records the event.
    pub(crate) fn take_token_event(
        &mut self,
        event: &TokenEvent,
        config: &SimConfig,
    ) -> CheckResult {
        let id = self.id().0;
        ensure!(
            "I9",
            self.stage == ClientStage::Live,
            "request {id} is {:?}: {event:?}",
            self.stage
        );
        if let Some(FirstAdmission { cached_tokens: cached, .. }) = event.first_admission {
            ensure!("I9", !self.admitted, "request {id} is admitted twice: {event:?}");
            self.admitted = true;
            let most = self.submit.tokens.len() as u32;
            ensure!("I13", cached < most, "request {id}: {cached} of {most} prompt ids cached");
            ensure!("I13", cached % config.block_tokens() == 0, "request {id}: {cached} cached");
        }
        let no_output = event.tokens.is_empty() && event.prompt_logprobs().is_empty();
        ensure!(
            "I9",
            self.admitted || no_output,
            "request {id} has output before its admission: {event:?}"
        );
        ensure!("I11", event.preemptions <= 4, "request {id}: {} preemptions", event.preemptions);
        ensure!("I10", event.preemptions >= self.preemptions, "request {id}: preemptions decrease");
        self.preemptions = event.preemptions;
        self.check_tokens(event, config)?;
        if let Some(prompt) = &event.prompt {
            self.prompt_logprobs.extend_from_slice(&prompt.logprobs);
            self.pooled.extend_from_slice(&prompt.pooled);
        }
        let most = self.submit.max_tokens;
        let complete = self.last_stop.is_some() || most > 0 && self.delivered == most;
        match &event.finish_reason {
            None => {
                ensure!(
                    "I9",
                    !complete,
                    "request {id} has all its tokens, but no finish reason: {event:?}"
                );
                ensure!("I10", !is_empty(event), "request {id}: empty event: {event:?}");
                Ok(())
            }
            Some(finish) => {
                self.stage = ClientStage::Done;
                self.check_finish(finish, config)
            }
        }
    }

    /// Checks that each token equals the next token of the oracle (the expected output, computed without a
    /// scheduler), and that no token follows the end of the output.
    fn check_tokens(&mut self, event: &TokenEvent, config: &SimConfig) -> CheckResult {
        let (id, submit) = (self.submit.id.0, &self.submit);
        let wanted = submit.sampling.logprobs;
        let reported = event.logprobs.len();
        let expected = wanted.map_or(0, |_| event.tokens.len());
        ensure!(
            "I10",
            reported == expected,
            "request {id}: {reported} logprobs, expected {expected}"
        );
        for (i, &token) in event.tokens.iter().enumerate() {
            let complete = self.last_stop.is_some() || self.delivered >= submit.max_tokens;
            ensure!("I9", !complete, "request {id}: token {token} after its last token: {event:?}");
            let context = self.oracle.context();
            let expected = self.oracle.next();
            ensure!(
                "I13",
                expected == Some(token),
                "request {id}: token {} is {token}, expected {expected:?}",
                self.delivered
            );
            if let Some(top) = wanted {
                let expected = logprobs(context, token, top, config.scheduler.limits.vocab_size);
                ensure!(
                    "I13",
                    event.logprobs[i] == expected,
                    "request {id}: {:?}",
                    event.logprobs[i]
                );
            }
            self.delivered += 1;
            self.known_tokens.push(token);
            self.last_stop = if submit.eos_ids.contains(&token) {
                Some(StopReason::Eos(token))
            } else {
                submit.stop_ids.contains(&token).then_some(StopReason::StopToken(token))
            };
        }
        Ok(())
    }

    /// Checks that the finish reason follows from the received tokens, or that `allowed` permits it because
    /// of an injected fault.
    fn check_finish(&mut self, finish: &FinishReason, config: &SimConfig) -> CheckResult {
        let (id, delivered, allowed) = (self.id().0, self.delivered, self.allowed);
        let valid = match finish {
            FinishReason::Stop(StopReason::StopString) => {
                allowed.aborted == Some(AbortCause::StopString)
            }
            FinishReason::Abort(AbortCause::StopString)
            | FinishReason::Error(RequestError::RowFailed(RowError::MaskOverdue)) => false,
            FinishReason::Abort(cause) => allowed.aborted == Some(*cause),
            FinishReason::Stop(StopReason::Pooled) => self.submit.sampling.pooling.is_some(),
            FinishReason::Stop(reason) => self.last_stop == Some(*reason),
            FinishReason::Length => {
                self.last_stop.is_none()
                    && delivered == self.submit.max_tokens
                    && self.submit.sampling.pooling.is_none()
            }
            FinishReason::Error(RequestError::RowFailed(RowError::NonFiniteLogits)) => {
                allowed.row_failed
            }
            FinishReason::Error(RequestError::RowFailed(RowError::AllMasked)) => {
                self.oracle.next().is_none()
            }
            FinishReason::Error(RequestError::BadOutput) => allowed.bad_output,
            FinishReason::Error(RequestError::ReplicaUnavailable) => allowed.unavailable,
            FinishReason::Rejected(reason) => {
                delivered == 0 && self.is_valid_rejection(reason, config)
            }
        };
        let last = self.last_stop;
        ensure!(
            "I9",
            valid,
            "request {id} ends with {finish:?}: {delivered} tokens, {last:?}, {allowed:?}"
        );
        let complete = matches!(finish, FinishReason::Length)
            || matches!(finish, FinishReason::Stop(reason) if *reason != StopReason::StopString);
        if complete {
            self.check_pooled()?;
            self.check_prompt_logprobs(config)
        } else {
            Ok(())
        }
    }

    /// Checks that a pooling request has the result of its prompt, and that other requests have no pooling
    /// result.
    fn check_pooled(&self) -> CheckResult {
        let pooling = self.submit.sampling.pooling.as_ref();
        let expected = pooling.map_or_else(Vec::new, |method| {
            pooled(pooling_hash(method, &self.submit.tokens), pooled_count(method))
        });
        let (id, found) = (self.id().0, &self.pooled);
        ensure!("I13", *found == expected, "request {id}: pooled {found:?}, not {expected:?}");
        Ok(())
    }

    /// Checks that, if prompt log-probabilities were requested, every prompt position after the first has
    /// exactly one log-probability, in order of positions.
    fn check_prompt_logprobs(&self, config: &SimConfig) -> CheckResult {
        let (id, tokens) = (self.id().0, &self.submit.tokens);
        let Some(top) = self.submit.sampling.prompt_logprobs else {
            ensure!(
                "I13",
                self.prompt_logprobs.is_empty(),
                "request {id}: prompt logprobs were not requested"
            );
            return Ok(());
        };
        let vocab = config.scheduler.limits.vocab_size;
        let mut context = fold(EMPTY, entry(EMPTY, tokens[0]));
        let (scored, expected) = (self.prompt_logprobs.len(), tokens.len() - 1);
        ensure!(
            "I13",
            scored == expected,
            "request {id}: {scored} of {expected} prompt ids scored"
        );
        for (position, (&token, reported)) in
            tokens[1..].iter().zip(&self.prompt_logprobs).enumerate()
        {
            let expected = logprobs(context, token, top, vocab);
            ensure!(
                "I13",
                *reported == expected,
                "request {id}: logprobs of position {}",
                position + 1
            );
            context = fold(context, entry(context, token));
        }
        Ok(())
    }

    /// Whether the reason of a rejection applies to the request.
    fn is_valid_rejection(&self, reason: &RejectReason, config: &SimConfig) -> bool {
        let (submit, limits) = (&self.submit, &config.scheduler.limits);
        let (prompt, longest) = (submit.tokens.len() as u64, limits.max_model_len);
        match reason {
            RejectReason::EmptyPrompt => prompt == 0,
            RejectReason::UnknownToken { token, .. } => {
                *token >= limits.vocab_size && submit.tokens.contains(token)
            }
            RejectReason::PromptTooLong { .. } => {
                prompt + u64::from(submit.sampling.pooling.is_none()) > u64::from(longest)
            }
            RejectReason::TotalTooLong { .. } => {
                prompt + u64::from(submit.max_tokens) > u64::from(longest)
            }
            RejectReason::PoolTooSmall { blocks, pool } => blocks > pool,
            RejectReason::QueueFull { waiting, cap } => {
                waiting >= cap && *cap == limits.max_waiting_requests
            }
            RejectReason::QueueTokensFull { waiting, requested, cap } => {
                waiting + requested > *cap
                    && *cap == limits.max_waiting_tokens
                    && *requested == prompt
            }
            RejectReason::UnknownReplica { replica, replicas } => replica >= replicas,
            // The engine client's admission control produces these rejections; the simulation does not
            // include it.
            RejectReason::InvalidParameter { .. }
            | RejectReason::TemporarilyUnavailable { .. }
            | RejectReason::Overloaded { .. } => false,
        }
    }

    /// Whether the request can never run, at any load, so that the scheduler must reject it.
    pub(crate) fn must_be_rejected(&self, config: &SimConfig) -> bool {
        let (submit, limits) = (&self.submit, &config.scheduler.limits);
        let prompt = submit.tokens.len() as u32;
        prompt == 0
            || prompt + u32::from(submit.sampling.pooling.is_none()) > limits.max_model_len
            || self.limit() > limits.max_model_len
            || submit.tokens.iter().any(|&t| t >= limits.vocab_size)
            || submit.replica.is_some_and(|r| r.0 >= config.scheduler.replicas)
    }
}

/// Whether a token event has neither tokens nor prompt log-probabilities nor a first admission.
fn is_empty(event: &TokenEvent) -> bool {
    event.tokens.is_empty() && event.prompt_logprobs().is_empty() && event.first_admission.is_none()
}
