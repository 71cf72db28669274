//! Requests that wait outside the engine until a grammar they need is compiled.

use super::{ENGINE_UNAVAILABLE, EngineClient, EngineMessage};
use grammar::DecodingGuide;
use protocol::RequestId;
use scheduler::{FinishReason, RejectReason, RequestSubmission, SchedulerEvent, TokenEvent};
use std::mem;
use std::sync::atomic::Ordering;

/// Submits that are held back. Dropping it ends them as if the engine were gone.
pub struct DeferredSubmit {
    client: EngineClient,
    submits: Vec<RequestSubmission>,
}

impl DeferredSubmit {
    pub(super) fn new(client: EngineClient, submits: Vec<RequestSubmission>) -> Self {
        client.state.metrics.deferred.fetch_add(submits.len() as u64, Ordering::Relaxed);
        Self { client, submits }
    }

    /// Submits those that nobody took back meanwhile.
    pub fn release(mut self, guide: &DecodingGuide) {
        for submit in self.take() {
            let request = submit.id;
            let guided = EngineMessage::DecodingGuide { request, guide: guide.clone() };
            // The route is held while they are sent: an abort comes before and nothing is sent, or behind.
            if let Some(_route) = self.client.state.inflight.get(&request) {
                let submit = EngineMessage::Event(SchedulerEvent::Submit(Box::new(submit)));
                self.client.state.inbox.push_all([guided, submit]);
            }
        }
    }

    /// Ends them: what they need cannot be made.
    pub fn reject(mut self, refusal: &RejectReason) {
        self.end(&FinishReason::Rejected(Box::new(refusal.clone())));
    }

    /// They wait no more.
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
