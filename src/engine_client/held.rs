//! Requests that wait outside the engine until a grammar they need is compiled.

use super::{ENGINE_LOST, EngineClient, Signal};
use crate::grammar::Guide;
use protocol::RequestId;
use scheduler::{Event, Finish, Refusal, Submit, TokenEvent};
use std::mem;
use std::sync::atomic::Ordering;

/// Submits that are held back. Dropping it ends them as if the engine were gone.
pub struct Held {
    client: EngineClient,
    submits: Vec<Submit>,
}

impl Held {
    pub(super) fn new(client: EngineClient, submits: Vec<Submit>) -> Self {
        client.shared.metrics.deferred.fetch_add(submits.len() as u64, Ordering::Relaxed);
        Self { client, submits }
    }

    /// Submits those that nobody took back meanwhile.
    pub fn release(mut self, guide: &Guide) {
        for submit in self.take() {
            let request = submit.id;
            let guided = Signal::Guide { request, guide: guide.clone() };
            // The route is held while they are sent: an abort comes before and nothing is sent, or behind.
            if let Some(_route) = self.client.shared.inflight.get(&request) {
                let submit = Signal::Event(Event::Submit(Box::new(submit)));
                self.client.shared.inbox.push_all([guided, submit]);
            }
        }
    }

    /// Ends them: what they need cannot be made.
    pub fn refuse(mut self, refusal: &Refusal) {
        self.end(&Finish::Refused(Box::new(refusal.clone())));
    }

    /// They wait no more.
    fn take(&mut self) -> Vec<Submit> {
        let submits = mem::take(&mut self.submits);
        self.client.shared.metrics.deferred.fetch_sub(submits.len() as u64, Ordering::Relaxed);
        submits
    }

    fn end(&mut self, finish: &Finish) {
        let end = |submit: Submit| -> TokenEvent {
            let request: RequestId = submit.id;
            TokenEvent::end(request, finish.clone())
        };
        let ends = self.take().into_iter().map(end).collect();
        self.client.deliver(ends);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.submits.is_empty() {
            self.end(&ENGINE_LOST);
        }
    }
}
