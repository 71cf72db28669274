//! Event stream of one HTTP request, which consists of one or more engine requests and is read by one task.

use super::{AdmissionPermit, EngineClient, QueuedBytesPermit};
use grammar::sync::{Mutex, lock};
use protocol::RequestId;
use scheduler::{AbortCause, TokenEvent};
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Token event of one of the requests of a stream.
#[derive(Debug)]
pub struct IndexedTokenEvent {
    /// Index of the request in the stream.
    pub index: u32,
    /// The event.
    pub event: TokenEvent,
}

/// Mailbox of one stream: the token events that its reader has not received yet. Their number is bounded by
/// the `max_tokens` of the stream's requests.
#[derive(Debug, Default)]
pub(super) struct StreamMailbox {
    state: Mutex<StreamMailboxState>,
}

/// Undelivered events of a mailbox, by request index, and the waker of its reader.
#[derive(Debug, Default)]
struct StreamMailboxState {
    events: Vec<IndexedTokenEvent>,
    reader: Option<Waker>,
}

impl StreamMailbox {
    /// Adds an event and wakes the reader. The reader is woken at most once until its next poll.
    pub(super) fn put(&self, index: u32, event: TokenEvent) {
        let mut state = lock(&self.state);
        state.events.push(IndexedTokenEvent { index, event });
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// State of one engine request of the stream.
#[derive(Debug, Clone, Copy)]
struct StreamedRequest {
    /// Number of prompt tokens of the request that still count in the admission controller's counter of
    /// tokens not yet prefilled.
    prompt_tokens: u64,
    live: bool,
}

/// Event stream of the engine requests of one HTTP request. Dropping the stream aborts its unfinished
/// requests.
pub struct RequestEventStream {
    client: EngineClient,
    mailbox: Arc<StreamMailbox>,
    first: RequestId,
    requests: Vec<StreamedRequest>,
    permit: AdmissionPermit,
}

impl RequestEventStream {
    pub(super) fn new(
        client: EngineClient,
        mailbox: Arc<StreamMailbox>,
        first: RequestId,
        prompt_tokens: Vec<u64>,
        permit: AdmissionPermit,
    ) -> Self {
        let request = |prompt_tokens| StreamedRequest { prompt_tokens, live: true };
        let requests = prompt_tokens.into_iter().map(request).collect();
        Self { client, mailbox, first, requests, permit }
    }

    /// Moves the pending events to the end of `into`; returns `Pending` if there are none.
    pub fn poll_events(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut Vec<IndexedTokenEvent>,
    ) -> Poll<()> {
        let mut state = lock(&self.mailbox.state);
        if state.events.is_empty() {
            if !state.reader.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                state.reader = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        if into.is_empty() {
            mem::swap(&mut state.events, into);
        } else {
            into.append(&mut state.events);
        }
        drop(state);
        for IndexedTokenEvent { index, event } in into.iter() {
            self.release_admission(*index, event);
        }
        Poll::Ready(())
    }

    /// Subtracts completed load from the admission counters: the prompt tokens of a request at its first
    /// output token or at its end, and the request itself at its end.
    fn release_admission(&mut self, index: u32, event: &TokenEvent) {
        let Some(request) = self.requests.get_mut(index as usize) else { return };
        if request.prompt_tokens > 0 {
            let prefilled = !event.tokens.is_empty();
            if prefilled || event.finish_reason.is_some() {
                self.permit.release_tokens(mem::take(&mut request.prompt_tokens), prefilled);
            }
        }
        if event.finish_reason.is_some() && mem::take(&mut request.live) {
            self.permit.release_request();
        }
    }

    /// Moves the byte count of the HTTP request from the stream to the response: the response uses the
    /// counted memory until it is sent, which may be after the stream is dropped.
    pub fn take_queued_bytes(&mut self) -> QueuedBytesPermit {
        self.permit.take_queued_bytes()
    }

    /// Aborts one request, for example because its remaining output is not needed.
    pub fn abort_one(&mut self, index: u32, cause: AbortCause) {
        let Some(request) = self.requests.get_mut(index as usize) else { return };
        if mem::take(&mut request.live) {
            self.client.abort(RequestId(self.first.0 + u64::from(index)), cause);
            self.permit.release_request();
        }
    }
}

impl Drop for RequestEventStream {
    fn drop(&mut self) {
        for index in 0..self.requests.len() as u32 {
            self.abort_one(index, AbortCause::ClientDisconnected);
        }
    }
}
