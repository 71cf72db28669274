//! Requests whose submission to the engine is deferred until their grammar is compiled.

use super::{ENGINE_UNAVAILABLE, EngineClient, EngineMessage};
use grammar::DecodingGuide;
use protocol::RequestId;
use scheduler::{FinishReason, RejectReason, RequestSubmission, SchedulerEvent, TokenEvent};
use std::mem;
use std::sync::atomic::Ordering;

/// Requests that have not been submitted to the engine yet. Dropping this value finishes the requests with
/// `ENGINE_UNAVAILABLE`.
pub struct DeferredRequests {
    client: EngineClient,
    submits: Vec<RequestSubmission>,
}

impl DeferredRequests {
    pub(super) fn new(client: EngineClient, submits: Vec<RequestSubmission>) -> Self {
        client.state.metrics.deferred.fetch_add(submits.len() as u64, Ordering::Relaxed);
        Self { client, submits }
    }

    /// Submits the requests that were not aborted while they were deferred, each with the decoding guide
    /// `guide` (grammar and thinking budget).
    pub fn release(mut self, guide: &DecodingGuide) {
        for submit in self.take() {
            let request = submit.id;
            let guided = EngineMessage::DecodingGuide { request, guide: guide.clone() };
            // The map entry of the request stays locked while the messages are queued. So an abort either
            // removes the entry first, and nothing is queued, or the abort message follows the `Submit`
            // message.
            if let Some(_route) = self.client.state.inflight.get(&request) {
                let submit = EngineMessage::Event(SchedulerEvent::Submit(Box::new(submit)));
                self.client.state.inbox.push_all([guided, submit]);
            }
        }
    }

    /// Finishes the requests as rejected, because their grammar cannot be compiled.
    pub fn reject(mut self, reason: &RejectReason) {
        self.end(&FinishReason::Rejected(Box::new(reason.clone())));
    }

    /// Moves the submissions out of `self` and subtracts them from the metric of deferred requests.
    fn take(&mut self) -> Vec<RequestSubmission> {
        let submits = mem::take(&mut self.submits);
        self.client.state.metrics.deferred.fetch_sub(submits.len() as u64, Ordering::Relaxed);
        submits
    }

    fn end(&mut self, finish: &FinishReason) {
        let end = |submit: RequestSubmission| -> TokenEvent {
            let request: RequestId = submit.id;
            TokenEvent::finished(request, finish.clone())
        };
        let ends = self.take().into_iter().map(end).collect();
        self.client.deliver(ends);
    }
}

impl Drop for DeferredRequests {
    fn drop(&mut self) {
        if !self.submits.is_empty() {
            self.end(&ENGINE_UNAVAILABLE);
        }
    }
}
