//! Client side of the engine: request submission, event streams and admission control.
//!
//! Owns the map of requests in flight and delivers the token events of each request to its event stream.
//! Dropping a stream aborts its unfinished requests. Handles token ids only; text and HTTP are handled by
//! other crates.

mod admission;
mod cached_blocks;
mod deferred_submit;
mod engine_message;
mod inbox;
#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
mod mailbox;
mod prefill_rate;

pub use admission::{
    AdmissionController, AdmissionLimits, AdmissionPermit, OverloadRejection, QueuedBytesPermit,
};
pub use cached_blocks::PrefixIndexSnapshot;
pub use deferred_submit::DeferredRequests;
pub use engine_message::{EngineMessage, ExecutorId};
pub use inbox::BulkInbox;
pub use mailbox::{IndexedTokenEvent, RequestEventStream};

#[cfg(not(feature = "interleavings"))]
use dashmap::DashMap;
use grammar::sync::atomic::{AtomicU64, Ordering};
use grammar::sync::{Mutex, lock};
use mailbox::StreamMailbox;
use metrics::{RequestTimes, ServerMetrics};
use protocol::{ProfilerStatus, RequestId};
use scheduler::{
    AbortCause, FinishReason, PromptHasher, RequestError, RequestSubmission, SchedulerEvent,
    SchedulerStats, TokenEvent, assign_request_ids, request_ids_by_client_id,
};
#[cfg(feature = "interleavings")]
use shuttle_dashmap_impl::DashMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

/// Destination of the token events of a request: the mailbox (event queue) of its stream.
#[derive(Debug)]
struct EventDestination {
    mailbox: Arc<StreamMailbox>,
    /// Index of the request in its stream.
    index: u32,
    times: RequestTimes,
    /// Request id given by the client; several requests can have the same client id.
    client_id: Arc<str>,
}

/// Handle to the engine through which requests are submitted, aborted and observed. Clones share all state.
#[derive(Clone)]
pub struct EngineClient {
    state: Arc<EngineClientState>,
}

/// State that all clones of an engine client share.
struct EngineClientState {
    inflight: DashMap<RequestId, EventDestination>,
    inbox: Arc<BulkInbox<EngineMessage>>,
    hasher: PromptHasher,
    admission: Arc<AdmissionController>,
    next_id: AtomicU64,
    /// Finish reason passed to `close`; requests registered after `close` finish with this reason too. `None`
    /// = `close` has not been called.
    closed: Mutex<Option<FinishReason>>,
    /// Latest step statistics of each replica.
    stats: Mutex<Vec<SchedulerStats>>,
    metrics: Arc<ServerMetrics>,
}

impl EngineClient {
    /// Creates a client that sends messages to the engine through `inbox`. `hasher` hashes the prompts.
    pub fn new(
        inbox: Arc<BulkInbox<EngineMessage>>,
        hasher: PromptHasher,
        admission: Arc<AdmissionController>,
        metrics: Arc<ServerMetrics>,
    ) -> Self {
        let next_id = AtomicU64::new(1);
        let inflight = DashMap::new();
        let (closed, stats) = (Mutex::default(), Mutex::default());
        let shared = EngineClientState {
            inflight,
            inbox,
            hasher,
            admission,
            next_id,
            closed,
            stats,
            metrics,
        };
        Self { state: Arc::new(shared) }
    }

    /// Returns the admission controller of this client.
    pub fn admission(&self) -> &Arc<AdmissionController> {
        &self.state.admission
    }

    /// Submits requests that share one event stream, with `n` choices per prompt. Assigns a new id to each
    /// request (`submits[i].id`); the events of this request carry the index `i`. Hashes the prompts on the
    /// calling thread, so it must be called where CPU-bound work is allowed.
    ///
    /// `client_id`: request id given by the client, shared by all requests of the stream.
    pub fn submit(
        &self,
        mut submits: Vec<RequestSubmission>,
        n: u32,
        client_id: &str,
        permit: AdmissionPermit,
    ) -> RequestEventStream {
        let stream = self.register(&mut submits, n, client_id, permit);
        let ids: Vec<RequestId> = submits.iter().map(|submit| submit.id).collect();
        let events =
            submits.into_iter().map(|s| EngineMessage::Event(SchedulerEvent::Submit(Box::new(s))));
        self.state.inbox.push_all(events);
        for request in ids {
            if !self.state.inflight.contains_key(&request) {
                // The request was aborted before `Submit` was queued, so the engine has ignored the abort.
                // Send the abort again; the engine ignores aborts of requests that have ended.
                let cause = AbortCause::Operator;
                self.state
                    .inbox
                    .push(EngineMessage::Event(SchedulerEvent::Abort { request, cause }));
            }
        }
        stream
    }

    /// Registers requests like `submit`, but does not send them to the engine yet.
    /// `DeferredRequests::release` sends them when a dependency of the requests (such as a compiled grammar)
    /// is ready.
    pub fn submit_deferred(
        &self,
        mut submits: Vec<RequestSubmission>,
        n: u32,
        client_id: &str,
        permit: AdmissionPermit,
    ) -> (RequestEventStream, DeferredRequests) {
        let stream = self.register(&mut submits, n, client_id, permit);
        (stream, DeferredRequests::new(self.clone(), submits))
    }

    fn register(
        &self,
        submits: &mut [RequestSubmission],
        n: u32,
        client_id: &str,
        permit: AdmissionPermit,
    ) -> RequestEventStream {
        let client_id: Arc<str> = client_id.into();
        let count = submits.len() as u64;
        let first = self.state.next_id.fetch_add(count, Ordering::Relaxed);
        let mailbox = Arc::new(StreamMailbox::default());
        assign_request_ids(submits, first, &self.state.hasher);
        let prompt_tokens = submits.iter().map(|submit| submit.tokens.len() as u64).collect();
        self.insert_routes(submits, n, &client_id, permit.admitted_at(), &mailbox);
        // `close` may have run before these requests were added to the map, so finish them here with the same
        // reason.
        let closed = lock(&self.state.closed).clone();
        if let Some(finish) = closed {
            for submit in submits.iter() {
                self.finish_request(submit.id, &finish);
            }
        }
        RequestEventStream::new(self.clone(), mailbox, RequestId(first), prompt_tokens, permit)
    }

    /// Adds the requests of one stream to the map of requests in flight. `n`: number of choices per prompt.
    fn insert_routes(
        &self,
        submits: &[RequestSubmission],
        n: u32,
        client_id: &Arc<str>,
        admitted_at: Instant,
        mailbox: &Arc<StreamMailbox>,
    ) {
        let mut index = 0;
        for choices in submits.chunks(n.max(1) as usize) {
            let (n, len) = (choices.len() as u32, choices[0].tokens.len() as u32);
            let times = RequestTimes::of_choices(n, admitted_at, len, choices[0].max_tokens);
            for (submit, times) in choices.iter().zip(times) {
                let (mailbox, client_id) = (Arc::clone(mailbox), Arc::clone(client_id));
                let route = EventDestination { mailbox, index, times, client_id };
                self.state.inflight.insert(submit.id, route);
                index += 1;
            }
        }
    }

    /// Aborts a request; its stream receives no further events. Unknown requests are ignored.
    pub fn abort(&self, request: RequestId, cause: AbortCause) {
        if let Some((_, route)) = self.state.inflight.remove(&request) {
            let requests = &self.state.metrics.requests;
            requests.ended(&route.times, &FinishReason::Abort(cause), Instant::now());
            self.state.inbox.push(EngineMessage::Event(SchedulerEvent::Abort { request, cause }));
        }
    }

    /// Aborts every request whose client-given request id satisfies `matches`; their streams receive an abort
    /// as the finish reason. Returns the number of aborted requests.
    pub fn abort_by_client_id(&self, matches: impl Fn(&str) -> bool) -> usize {
        let requests = request_ids_by_client_id(
            self.state.inflight.iter(),
            |entry| *entry.key(),
            |entry| &entry.value().client_id,
            matches,
        );
        let finish = FinishReason::Abort(AbortCause::Operator);
        requests.into_iter().filter(|request| self.finish_request(*request, &finish)).count()
    }

    /// Delivers the token events of one engine step to the streams and wakes the tasks that read the streams.
    pub fn deliver(&self, events: Vec<TokenEvent>) {
        let round = self.state.metrics.requests.delivery_round();
        for event in events {
            let request = event.request;
            if event.finish_reason.is_some() {
                // Remove the request from the map first: a client that reads the finish event and drops its
                // stream must not abort the request, which has finished.
                if let Some((_, mut route)) = self.state.inflight.remove(&request) {
                    round.event(&mut route.times, &event);
                    route.mailbox.put(route.index, event);
                }
            } else if let Some(mut route) = self.state.inflight.get_mut(&request) {
                round.event(&mut route.times, &event);
                route.mailbox.put(route.index, event);
            }
        }
    }

    /// Finishes all requests, including requests registered later, with the reason `finish`: an abort, or a
    /// failure of the engine. Returns the number of requests that were in flight.
    pub fn close(&self, finish: &FinishReason) -> usize {
        *lock(&self.state.closed) = Some(finish.clone());
        let requests: Vec<RequestId> = self.state.inflight.iter().map(|e| *e.key()).collect();
        requests.into_iter().filter(|request| self.finish_request(*request, finish)).count()
    }

    /// Finishes a request; returns whether it was still in flight.
    fn finish_request(&self, request: RequestId, finish: &FinishReason) -> bool {
        let Some((_, route)) = self.state.inflight.remove(&request) else { return false };
        self.state.metrics.requests.ended(&route.times, finish, Instant::now());
        if let FinishReason::Abort(cause) = *finish {
            self.state.inbox.push(EngineMessage::Event(SchedulerEvent::Abort { request, cause }));
        }
        route.mailbox.put(route.index, TokenEvent::finished(request, finish.clone()));
        true
    }

    /// Starts or stops the profiler of all executors. Every running executor sends one status.
    pub fn profile(&self, on: bool) -> UnboundedReceiver<ProfilerStatus> {
        let (replies, statuses) = unbounded_channel();
        self.state.inbox.push(EngineMessage::Profile { on, replies });
        statuses
    }

    /// Clears the prefix caches. The receiver gets true if they were cleared. While requests hold KV blocks,
    /// the caches are cleared only if `restart` is set, which requeues these requests.
    pub fn reset_prefix_cache(&self, restart: bool) -> oneshot::Receiver<bool> {
        let (reply, receiver) = oneshot::channel();
        self.state.inbox.push(EngineMessage::ResetPrefixCache { restart, reply });
        receiver
    }

    /// Lists the KV blocks in the prefix indices, as a snapshot taken between two steps. The receiver gets an
    /// error if the engine has stopped.
    pub fn cached_blocks(&self) -> oneshot::Receiver<Vec<PrefixIndexSnapshot>> {
        let (reply, receiver) = oneshot::channel();
        self.state.inbox.push(EngineMessage::ListCachedBlocks { reply });
        receiver
    }

    /// Returns the latest statistics of replica 0.
    pub fn stats(&self) -> SchedulerStats {
        self.replica_stats().into_iter().next().unwrap_or_default()
    }

    /// Returns the latest statistics of every replica that has reported any.
    pub fn replica_stats(&self) -> Vec<SchedulerStats> {
        lock(&self.state.stats).clone()
    }

    /// Stores the latest statistics of a replica.
    pub fn set_stats(&self, stats: SchedulerStats) {
        let mut all = lock(&self.state.stats);
        let index = usize::from(stats.replica.0);
        if index >= all.len() {
            all.resize(index + 1, SchedulerStats::default());
        }
        all[index] = stats;
    }

    /// Number of requests that were submitted and have not finished.
    pub fn requests_in_flight(&self) -> usize {
        self.state.inflight.len()
    }
}

/// Finish reason of requests whose engine has failed permanently.
pub(crate) const ENGINE_UNAVAILABLE: FinishReason =
    FinishReason::Error(RequestError::ReplicaUnavailable);
