//! Requests held outside the engine until their grammar is compiled.

use super::{ENGINE_UNAVAILABLE, EngineClient, EngineMessage};
use grammar::DecodingGuide;
use protocol::RequestId;
use scheduler::{FinishReason, RejectReason, RequestSubmission, SchedulerEvent, TokenEvent};
use std::mem;
use std::sync::atomic::Ordering;

/// Submissions that are held back. Dropping the value finishes them with `ENGINE_UNAVAILABLE`.
pub struct DeferredSubmit {
    client: EngineClient,
    submits: Vec<RequestSubmission>,
}

impl DeferredSubmit {
    pub(super) fn new(client: EngineClient, submits: Vec<RequestSubmission>) -> Self {
        client.state.metrics.deferred.fetch_add(submits.len() as u64, Ordering::Relaxed);
        Self { client, submits }
    }

    /// Submits the requests that have not been aborted meanwhile.
    pub fn release(mut self, guide: &DecodingGuide) {
        for submit in self.take() {
            let request = submit.id;
            let guided = EngineMessage::DecodingGuide { request, guide: guide.clone() };
            // The map entry stays locked while the messages are queued: an abort either comes before and
            // nothing is sent, or its message follows the `Submit`.
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

    /// Takes the submissions out and lowers the counter of deferred requests.
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

impl Drop for DeferredSubmit {
    fn drop(&mut self) {
        if !self.submits.is_empty() {
            self.end(&ENGINE_UNAVAILABLE);
        }
    }
}
