//! The server's side of the engine: submits, event streams, admission.
//!
//! Owns the in-flight map and hands each request's events to its stream. Dropping a stream takes
//! back everything in it that has not finished. Knows token ids only; no text, no HTTP.

mod admission;
mod held;
mod inbox;
#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
mod mailbox;
mod prefill_rate;
mod resident;

pub use admission::{Admission, AdmissionLimits, HeldBytes, Overload, Ticket};
pub use held::Held;
pub use inbox::Inbox;
pub use mailbox::EventStream;
pub use resident::Resident;

use crate::grammar::Guide;
use crate::metrics::{Metrics, RequestTimes};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{DashMap, Mutex, lock};
use mailbox::Mailbox;
use protocol::{Epoch, Profiled, Ready, Replica, RequestId, StepId, ToExecutor};
use scheduler::{
    AbortCause, Enrolment, ErrorCode, Event, Finish, Loss, PromptHasher, StepStats, Submit,
    TokenEvent,
};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// Which executor says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// Its replica.
    pub replica: Replica,
    /// Its generation; what one of another generation than the engine's says is old news.
    pub epoch: Epoch,
    /// Its place among the ranks of the replica.
    pub rank: u16,
}

/// What reaches the engine's thread.
#[derive(Debug)]
pub enum Signal {
    /// For `Engine::tick`.
    Event(Event),
    /// What the output of a request follows whose submit comes next.
    Guide {
        /// The request.
        request: RequestId,
        /// What limits its tokens.
        guide: Guide,
    },
    /// An executor failed or is gone, and why.
    Lost {
        /// Which.
        sender: Sender,
        /// What kind of loss it is.
        loss: Loss,
        /// What happened.
        cause: String,
    },
    /// The executors of a replica are ready, of the engine's generation and with an empty cache.
    Back {
        /// Whose.
        replica: Replica,
        /// Road to them.
        executor: SyncSender<ToExecutor>,
        /// What they brought up.
        ready: Ready,
    },
    /// Record steps in new traces, or no more.
    Profile {
        /// Whether to record.
        on: bool,
        /// Where every executor's answer goes; closed once there will be no more.
        replies: UnboundedSender<Profiled>,
    },
    /// An executor's answer to that.
    Profiled(Sender, Profiled),
    /// A rank has done a step that another one answers.
    StepDone(Sender, StepId),
    /// List the blocks that prefix hits may find.
    Resident {
        /// Who waits for the list, one entry per replica.
        reply: oneshot::Sender<Vec<Resident>>,
    },
    /// Forget every cached prefix.
    ClearPrefixCache {
        /// Send requests that hold blocks back to the queue; else they prevent it.
        restart: bool,
        /// Who waits to hear whether it was done.
        reply: oneshot::Sender<bool>,
    },
    /// An executor gave a sign of life.
    Beat(Sender),
    /// There will be no executor any more, and why.
    GiveUp(String),
    /// Stop the loop.
    Stop,
}

/// Where a request's events go.
#[derive(Debug)]
struct Route {
    mailbox: Arc<Mailbox>,
    /// Place of the request in its stream.
    index: u32,
    times: RequestTimes,
    /// What its client calls it; names may be shared.
    name: Arc<str>,
}

/// Handle to the engine; clones share everything.
#[derive(Clone)]
pub struct EngineClient {
    shared: Arc<Shared>,
}

struct Shared {
    inflight: DashMap<RequestId, Route>,
    inbox: Arc<Inbox<Signal>>,
    hasher: PromptHasher,
    admission: Arc<Admission>,
    next_id: AtomicU64,
    /// How requests end from now on, those included that come later.
    closed: Mutex<Option<Finish>>,
    /// Of each replica.
    stats: Mutex<Vec<StepStats>>,
    metrics: Arc<Metrics>,
}

impl EngineClient {
    /// A client of the engine that reads `inbox` and hashes prompts with `hasher`.
    pub fn new(
        inbox: Arc<Inbox<Signal>>,
        hasher: PromptHasher,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let next_id = AtomicU64::new(1);
        let inflight = DashMap::new();
        let (closed, stats) = (Mutex::default(), Mutex::default());
        let shared = Shared { inflight, inbox, hasher, admission, next_id, closed, stats, metrics };
        Self { shared: Arc::new(shared) }
    }

    /// Counters that decide whether a request is taken.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.shared.admission
    }

    /// Sends requests as one stream, `n` for each prompt; `submits[i].id` is overwritten with a fresh id and
    /// its events carry index `i`. Hashes the prompts here, so call it where computing is allowed.
    ///
    /// `name`: what the client calls them all.
    pub fn submit(
        &self,
        mut submits: Vec<Submit>,
        n: u32,
        name: &str,
        ticket: Ticket,
    ) -> EventStream {
        let stream = self.register(&mut submits, n, name, ticket);
        let ids: Vec<RequestId> = submits.iter().map(|submit| submit.id).collect();
        let events = submits.into_iter().map(|s| Signal::Event(Event::Submit(Box::new(s))));
        self.shared.inbox.push_all(events);
        for request in ids {
            if !self.shared.inflight.contains_key(&request) {
                // Whoever took it back before it was sent was heard too early. What has ended in the engine it ignores.
                let cause = AbortCause::Operator;
                self.shared.inbox.push(Signal::Event(Event::Abort { request, cause }));
            }
        }
        stream
    }

    /// The same, but the engine hears of them only once something that they need is there.
    pub fn hold(
        &self,
        mut submits: Vec<Submit>,
        n: u32,
        name: &str,
        ticket: Ticket,
    ) -> (EventStream, Held) {
        let stream = self.register(&mut submits, n, name, ticket);
        (stream, Held::new(self.clone(), submits))
    }

    fn register(&self, submits: &mut [Submit], n: u32, name: &str, ticket: Ticket) -> EventStream {
        let name: Arc<str> = name.into();
        let count = submits.len() as u64;
        let first = self.shared.next_id.fetch_add(count, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        Enrolment::default().enrol(submits, first, &name, &self.shared.hasher);
        let prompt_tokens = submits.iter().map(|submit| submit.tokens.len() as u64).collect();
        let mut index = 0;
        for choices in submits.chunks(n.max(1) as usize) {
            let (n, len) = (choices.len() as u32, choices[0].tokens.len() as u32);
            let times = RequestTimes::of_choices(n, ticket.entered(), len, choices[0].max_tokens);
            for (submit, times) in choices.iter().zip(times) {
                let (mailbox, name) = (Arc::clone(&mailbox), Arc::clone(&name));
                let route = Route { mailbox, index, times, name };
                self.shared.inflight.insert(submit.id, route);
                index += 1;
            }
        }
        // `close` may have looked before they were there.
        let closed = lock(&self.shared.closed).clone();
        if let Some(finish) = closed {
            for submit in submits.iter() {
                self.end(submit.id, &finish);
            }
        }
        EventStream::new(self.clone(), mailbox, RequestId(first), prompt_tokens, ticket)
    }

    /// Takes a request back. Its stream hears no more of it; unknown ones are ignored.
    pub fn abort(&self, request: RequestId, cause: AbortCause) {
        if let Some((_, route)) = self.shared.inflight.remove(&request) {
            let requests = &self.shared.metrics.requests;
            requests.ended(&route.times, &Finish::Abort(cause), Instant::now());
            self.shared.inbox.push(Signal::Event(Event::Abort { request, cause }));
        }
    }

    /// Takes back every request whose name is meant; their streams end as aborted. Returns how many.
    pub fn abort_named(&self, is_meant: impl Fn(&str) -> bool) -> usize {
        let inflight = self.shared.inflight.iter();
        let named = inflight.map(|entry| (*entry.key(), Arc::clone(&entry.value().name)));
        let meant = Enrolment::default().meant(named, is_meant);
        let finish = Finish::Abort(AbortCause::Operator);
        meant.into_iter().filter(|request| self.end(*request, &finish)).count()
    }

    /// Hands one step's events to their streams and wakes them.
    pub fn deliver(&self, events: Vec<TokenEvent>) {
        let round = self.shared.metrics.requests.round();
        for event in events {
            let request = event.request;
            if event.finish.is_some() {
                // Removed first: a stream that sees the end must not abort what has ended.
                if let Some((_, mut route)) = self.shared.inflight.remove(&request) {
                    round.event(&mut route.times, &event);
                    route.mailbox.put(route.index, event);
                }
            } else if let Some(mut route) = self.shared.inflight.get_mut(&request) {
                round.event(&mut route.times, &event);
                route.mailbox.put(route.index, event);
            }
        }
    }

    /// Ends every request, also those that come later: as aborted ones, or because the engine is lost. How many were
    /// there.
    pub fn close(&self, finish: &Finish) -> usize {
        *lock(&self.shared.closed) = Some(finish.clone());
        let requests: Vec<RequestId> = self.shared.inflight.iter().map(|e| *e.key()).collect();
        requests.into_iter().filter(|request| self.end(*request, finish)).count()
    }

    /// Ends a request; whether it was still there.
    fn end(&self, request: RequestId, finish: &Finish) -> bool {
        let Some((_, route)) = self.shared.inflight.remove(&request) else { return false };
        self.shared.metrics.requests.ended(&route.times, finish, Instant::now());
        if let Finish::Abort(cause) = *finish {
            self.shared.inbox.push(Signal::Event(Event::Abort { request, cause }));
        }
        route.mailbox.put(route.index, TokenEvent::end(request, finish.clone()));
        true
    }

    /// Has steps recorded in new traces, or no more. Each executor that is there answers.
    pub fn profile(&self, on: bool) -> UnboundedReceiver<Profiled> {
        let (replies, answers) = unbounded_channel();
        self.shared.inbox.push(Signal::Profile { on, replies });
        answers
    }

    /// Has every cached prefix forgotten. The answer is whether it was done: requests that hold blocks
    /// prevent it, unless they are to be restarted.
    pub fn reset_prefix_cache(&self, restart: bool) -> oneshot::Receiver<bool> {
        let (reply, answer) = oneshot::channel();
        self.shared.inbox.push(Signal::ClearPrefixCache { restart, reply });
        answer
    }

    /// Lists the blocks that prefix hits may find, between two steps. The answer is an error if the engine is gone.
    pub fn resident(&self) -> oneshot::Receiver<Vec<Resident>> {
        let (reply, answer) = oneshot::channel();
        self.shared.inbox.push(Signal::Resident { reply });
        answer
    }

    /// Counters of the first replica after its last tick that changed them.
    pub fn stats(&self) -> StepStats {
        self.replicas().into_iter().next().unwrap_or_default()
    }

    /// Counters of every replica that has told any.
    pub fn replicas(&self) -> Vec<StepStats> {
        lock(&self.shared.stats).clone()
    }

    /// Publishes counters of a replica.
    pub fn set_stats(&self, stats: StepStats) {
        let mut all = lock(&self.shared.stats);
        let index = usize::from(stats.replica.0);
        if index >= all.len() {
            all.resize(index + 1, StepStats::default());
        }
        all[index] = stats;
    }

    /// Requests sent and not ended.
    pub fn requests_in_flight(&self) -> usize {
        self.shared.inflight.len()
    }
}

/// How requests end when the engine is gone for good.
pub const ENGINE_LOST: Finish = Finish::Error(ErrorCode::EngineUnavailable);
