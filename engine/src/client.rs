//! The server's side of the engine: submits, event streams, admission.
//!
//! Owns the in-flight map and hands each request's events to its stream. Dropping a stream takes
//! back everything in it that has not finished. Knows token ids only; no text, no HTTP.

mod admission;
mod cached_blocks;
mod deferred_submit;
mod inbox;
#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
mod mailbox;
mod prefill_rate;

pub use admission::{
    AdmissionController, AdmissionLimits, AdmissionPermit, OverloadRejection, QueuedBytes,
};
pub use cached_blocks::CachedBlocks;
pub use deferred_submit::DeferredSubmit;
pub use inbox::BatchInbox;
pub use mailbox::RequestEventStream;

#[cfg(not(feature = "interleavings"))]
use dashmap::DashMap;
use grammar::DecodingGuide;
use grammar::sync::atomic::{AtomicU64, Ordering};
use grammar::sync::{Mutex, lock};
use mailbox::StreamMailbox;
use metrics::{RequestTimes, ServerMetrics};
use protocol::{Epoch, ExecutorCommand, ExecutorReady, ProfilerStatus, Replica, RequestId, StepId};
use scheduler::{
    AbortCause, ExecutorFailure, FinishReason, PromptHasher, RequestError, RequestIdAssigner,
    RequestSubmission, SchedulerEvent, StepStats, TokenEvent,
};
#[cfg(feature = "interleavings")]
use shuttle_dashmap_impl::DashMap;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// Which executor says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorId {
    /// Its replica.
    pub replica: Replica,
    /// Its generation; what one of another generation than the engine's says is old news.
    pub epoch: Epoch,
    /// Its place among the ranks of the replica.
    pub rank: u16,
}

/// What reaches the engine's thread.
#[derive(Debug)]
pub enum EngineMessage {
    /// For `Scheduler::tick`.
    Event(SchedulerEvent),
    /// What the output of a request follows whose submit comes next.
    DecodingGuide {
        /// The request.
        request: RequestId,
        /// What limits its tokens.
        guide: DecodingGuide,
    },
    /// An executor failed or is gone, and why.
    ExecutorFailed {
        /// Which.
        sender: ExecutorId,
        /// What kind of loss it is.
        failure: ExecutorFailure,
        /// What happened.
        cause: String,
    },
    /// The executors of a replica are ready, of the engine's generation and with an empty cache.
    ExecutorRestored {
        /// Whose.
        replica: Replica,
        /// Road to them.
        executor: SyncSender<ExecutorCommand>,
        /// What they brought up.
        ready: ExecutorReady,
    },
    /// Record steps in new traces, or no more.
    Profile {
        /// Whether to record.
        on: bool,
        /// Where every executor's answer goes; closed once there will be no more.
        replies: UnboundedSender<ProfilerStatus>,
    },
    /// An executor's answer to that.
    ProfileReply(ExecutorId, ProfilerStatus),
    /// A rank has done a step that another one answers.
    StepDone(ExecutorId, StepId),
    /// List the blocks that prefix hits may find.
    ListCachedBlocks {
        /// Who waits for the list, one entry per replica.
        reply: oneshot::Sender<Vec<CachedBlocks>>,
    },
    /// Forget every cached prefix.
    ResetPrefixCache {
        /// Send requests that hold blocks back to the queue; else they prevent it.
        restart: bool,
        /// Who waits to hear whether it was done.
        reply: oneshot::Sender<bool>,
    },
    /// An executor gave a sign of life.
    Heartbeat(ExecutorId),
    /// There will be no executor any more, and why.
    RestartsExhausted(String),
    /// Stop the loop.
    Stop,
}

/// Where a request's events go.
#[derive(Debug)]
struct RequestRoute {
    mailbox: Arc<StreamMailbox>,
    /// Place of the request in its stream.
    index: u32,
    times: RequestTimes,
    /// What its client calls it; names may be shared.
    name: Arc<str>,
}

/// Handle to the engine; clones share everything.
#[derive(Clone)]
pub struct EngineClient {
    state: Arc<EngineClientState>,
}

struct EngineClientState {
    inflight: DashMap<RequestId, RequestRoute>,
    inbox: Arc<BatchInbox<EngineMessage>>,
    hasher: PromptHasher,
    admission: Arc<AdmissionController>,
    next_id: AtomicU64,
    /// How requests end from now on, those included that come later.
    closed: Mutex<Option<FinishReason>>,
    /// Of each replica.
    stats: Mutex<Vec<StepStats>>,
    metrics: Arc<ServerMetrics>,
}

impl EngineClient {
    /// A client of the engine that reads `inbox` and hashes prompts with `hasher`.
    pub fn new(
        inbox: Arc<BatchInbox<EngineMessage>>,
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

    /// Counters that decide whether a request is taken.
    pub fn admission(&self) -> &Arc<AdmissionController> {
        &self.state.admission
    }

    /// Sends requests as one stream, `n` for each prompt; `submits[i].id` is overwritten with a fresh id and
    /// its events carry index `i`. Hashes the prompts here, so call it where computing is allowed.
    ///
    /// `name`: what the client calls them all.
    pub fn submit(
        &self,
        mut submits: Vec<RequestSubmission>,
        n: u32,
        name: &str,
        ticket: AdmissionPermit,
    ) -> RequestEventStream {
        let stream = self.register(&mut submits, n, name, ticket);
        let ids: Vec<RequestId> = submits.iter().map(|submit| submit.id).collect();
        let events =
            submits.into_iter().map(|s| EngineMessage::Event(SchedulerEvent::Submit(Box::new(s))));
        self.state.inbox.push_all(events);
        for request in ids {
            if !self.state.inflight.contains_key(&request) {
                // Whoever took it back before it was sent was heard too early. What has ended in the engine it ignores.
                let cause = AbortCause::Operator;
                self.state
                    .inbox
                    .push(EngineMessage::Event(SchedulerEvent::Abort { request, cause }));
            }
        }
        stream
    }

    /// The same, but the engine hears of them only once something that they need is there.
    pub fn submit_deferred(
        &self,
        mut submits: Vec<RequestSubmission>,
        n: u32,
        name: &str,
        ticket: AdmissionPermit,
    ) -> (RequestEventStream, DeferredSubmit) {
        let stream = self.register(&mut submits, n, name, ticket);
        (stream, DeferredSubmit::new(self.clone(), submits))
    }

    fn register(
        &self,
        submits: &mut [RequestSubmission],
        n: u32,
        name: &str,
        ticket: AdmissionPermit,
    ) -> RequestEventStream {
        let name: Arc<str> = name.into();
        let count = submits.len() as u64;
        let first = self.state.next_id.fetch_add(count, Ordering::Relaxed);
        let mailbox = Arc::new(StreamMailbox::default());
        RequestIdAssigner::default().assign_ids(submits, first, &name, &self.state.hasher);
        let prompt_tokens = submits.iter().map(|submit| submit.tokens.len() as u64).collect();
        let mut index = 0;
        for choices in submits.chunks(n.max(1) as usize) {
            let (n, len) = (choices.len() as u32, choices[0].tokens.len() as u32);
            let times =
                RequestTimes::of_choices(n, ticket.admitted_at(), len, choices[0].max_tokens);
            for (submit, times) in choices.iter().zip(times) {
                let (mailbox, name) = (Arc::clone(&mailbox), Arc::clone(&name));
                let route = RequestRoute { mailbox, index, times, name };
                self.state.inflight.insert(submit.id, route);
                index += 1;
            }
        }
        // `close` may have looked before they were there.
        let closed = lock(&self.state.closed).clone();
        if let Some(finish) = closed {
            for submit in submits.iter() {
                self.finish_request(submit.id, &finish);
            }
        }
        RequestEventStream::new(self.clone(), mailbox, RequestId(first), prompt_tokens, ticket)
    }

    /// Takes a request back. Its stream hears no more of it; unknown ones are ignored.
    pub fn abort(&self, request: RequestId, cause: AbortCause) {
        if let Some((_, route)) = self.state.inflight.remove(&request) {
            let requests = &self.state.metrics.requests;
            requests.ended(&route.times, &FinishReason::Abort(cause), Instant::now());
            self.state.inbox.push(EngineMessage::Event(SchedulerEvent::Abort { request, cause }));
        }
    }

    /// Takes back every request whose name is meant; their streams end as aborted. Returns how many.
    pub fn abort_by_name(&self, is_meant: impl Fn(&str) -> bool) -> usize {
        let inflight = self.state.inflight.iter();
        let named = inflight.map(|entry| (*entry.key(), Arc::clone(&entry.value().name)));
        let meant = RequestIdAssigner::default().ids_by_client_id(named, is_meant);
        let finish = FinishReason::Abort(AbortCause::Operator);
        meant.into_iter().filter(|request| self.finish_request(*request, &finish)).count()
    }

    /// Hands one step's events to their streams and wakes them.
    pub fn deliver(&self, events: Vec<TokenEvent>) {
        let round = self.state.metrics.requests.delivery_round();
        for event in events {
            let request = event.request;
            if event.finish_reason.is_some() {
                // Removed first: a stream that sees the end must not abort what has ended.
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

    /// Ends every request, also those that come later: as aborted ones, or because the engine is lost. How many were
    /// there.
    pub fn close(&self, finish: &FinishReason) -> usize {
        *lock(&self.state.closed) = Some(finish.clone());
        let requests: Vec<RequestId> = self.state.inflight.iter().map(|e| *e.key()).collect();
        requests.into_iter().filter(|request| self.finish_request(*request, finish)).count()
    }

    /// Ends a request; whether it was still there.
    fn finish_request(&self, request: RequestId, finish: &FinishReason) -> bool {
        let Some((_, route)) = self.state.inflight.remove(&request) else { return false };
        self.state.metrics.requests.ended(&route.times, finish, Instant::now());
        if let FinishReason::Abort(cause) = *finish {
            self.state.inbox.push(EngineMessage::Event(SchedulerEvent::Abort { request, cause }));
        }
        route.mailbox.put(route.index, TokenEvent::finished(request, finish.clone()));
        true
    }

    /// Has steps recorded in new traces, or no more. Each executor that is there answers.
    pub fn profile(&self, on: bool) -> UnboundedReceiver<ProfilerStatus> {
        let (replies, answers) = unbounded_channel();
        self.state.inbox.push(EngineMessage::Profile { on, replies });
        answers
    }

    /// Has every cached prefix forgotten. The answer is whether it was done: requests that hold blocks
    /// prevent it, unless they are to be restarted.
    pub fn reset_prefix_cache(&self, restart: bool) -> oneshot::Receiver<bool> {
        let (reply, answer) = oneshot::channel();
        self.state.inbox.push(EngineMessage::ResetPrefixCache { restart, reply });
        answer
    }

    /// Lists the blocks that prefix hits may find, between two steps. The answer is an error if the engine is gone.
    pub fn cached_blocks(&self) -> oneshot::Receiver<Vec<CachedBlocks>> {
        let (reply, answer) = oneshot::channel();
        self.state.inbox.push(EngineMessage::ListCachedBlocks { reply });
        answer
    }

    /// Counters of the first replica after its last tick that changed them.
    pub fn stats(&self) -> StepStats {
        self.replica_stats().into_iter().next().unwrap_or_default()
    }

    /// Counters of every replica that has told any.
    pub fn replica_stats(&self) -> Vec<StepStats> {
        lock(&self.state.stats).clone()
    }

    /// Publishes counters of a replica.
    pub fn set_stats(&self, stats: StepStats) {
        let mut all = lock(&self.state.stats);
        let index = usize::from(stats.replica.0);
        if index >= all.len() {
            all.resize(index + 1, StepStats::default());
        }
        all[index] = stats;
    }

    /// Requests sent and not ended.
    pub fn requests_in_flight(&self) -> usize {
        self.state.inflight.len()
    }
}

/// How requests end when the engine is gone for good.
pub(crate) const ENGINE_UNAVAILABLE: FinishReason =
    FinishReason::Error(RequestError::ReplicaUnavailable);
