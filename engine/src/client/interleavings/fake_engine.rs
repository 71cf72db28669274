//! Fake engine that finishes requests after a number of tokens.

use super::super::*;
use shuttle::sync::mpsc;
use shuttle::thread;
use std::collections::BTreeMap;
use std::time::Duration;

/// Minimal engine: generates one token per loop iteration for every running request.
#[derive(Default)]
pub(super) struct FakeEngine {
    /// Tokens left to generate, by request.
    pub(super) live: BTreeMap<RequestId, u32>,
    /// Request whose decoding guide has been received, but whose `Submit` event has not.
    pub(super) guided: Option<RequestId>,
}

impl FakeEngine {
    /// Runs until `Stop` and returns the requests that are still running.
    pub(super) fn run(
        mut self,
        inbox: &BulkInbox<EngineMessage>,
        events_tx: &mpsc::Sender<Vec<TokenEvent>>,
    ) -> Vec<RequestId> {
        let mut messages = Vec::new();
        loop {
            // While requests are running, this message wakes the engine. In a real server, the step output of
            // an executor wakes it.
            if !self.live.is_empty() {
                inbox.push(EngineMessage::RestartsExhausted("a step is done".to_owned()));
            }
            inbox.drain(&mut messages, Duration::from_secs(1));
            let mut events = Vec::new();
            for message in messages.drain(..) {
                match message {
                    EngineMessage::Event(event) => self.handle(event, &mut events),
                    EngineMessage::DecodingGuide { request, .. } => self.guided = Some(request),
                    EngineMessage::Stop => return self.live.into_keys().collect(),
                    _ => {}
                }
            }
            self.step(&mut events);
            if !events.is_empty() {
                drop(events_tx.send(events));
            }
            thread::yield_now();
        }
    }

    fn handle(&mut self, event: SchedulerEvent, events: &mut Vec<TokenEvent>) {
        match event {
            SchedulerEvent::Submit(submit) => {
                let guided = self.guided.take();
                assert!(
                    guided.is_none_or(|request| request == submit.id),
                    "guide of another request"
                );
                let previous = self.live.insert(submit.id, submit.max_tokens);
                assert_eq!(previous, None, "submitted twice");
            }
            SchedulerEvent::Abort { request, cause } => {
                if self.live.remove(&request).is_some() {
                    events.push(TokenEvent::finished(request, FinishReason::Abort(cause)));
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn step(&mut self, events: &mut Vec<TokenEvent>) {
        self.live.retain(|&request, left| {
            *left -= 1;
            let finish = (*left == 0).then_some(FinishReason::Length);
            let end = TokenEvent::finished(request, FinishReason::Length);
            events.push(TokenEvent { tokens: [7].as_slice().into(), finish_reason: finish, ..end });
            *left > 0
        });
    }
}
