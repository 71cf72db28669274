//! Concurrency tests of the engine client: the Shuttle scheduler generates random interleavings of request
//! handlers, the engine thread, the thread that delivers token events to the streams, and operator commands.
//! Each request must finish exactly once, regardless of the cause, and all counters must return to zero.
//!
//! In these tests the map has a single lock, so iteration sees a consistent snapshot; the real `DashMap` is
//! iterated shard by shard.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod fake_engine;

use super::*;
use fake_engine::FakeEngine;
use grammar::DecodingGuide;
use grammar::sync::check_interleavings;
use kvcache::KvConfig;
use metrics::MetricsConfig;
use protocol::{KvSpec, SamplingParams};
use scheduler::RejectReason;
use shuttle::future::block_on;
use shuttle::sync::mpsc;
use shuttle::thread;
use std::future::poll_fn;
use std::time::Duration;

/// Number of random interleavings per test.
const INTERLEAVINGS: usize = 3_000;
/// `max_tokens` of a request that ends only when it is aborted.
const ENDLESS: u32 = u32::MAX;

/// Test harness: an engine client and its inbox, without an engine.
struct ClientHarness {
    client: EngineClient,
    inbox: Arc<BulkInbox<EngineMessage>>,
}

impl ClientHarness {
    fn new() -> Self {
        let inbox = Arc::new(BulkInbox::default());
        let spec = KvSpec { block_tokens: 4, groups: Vec::new() };
        let hasher = PromptHasher::new(KvConfig::new(spec, 1, [0; 2]).block_hasher(), false);
        let limits = AdmissionLimits { requests: 100, prefill_tokens: 100, bytes: 100 };
        let metrics = ServerMetrics::new(&MetricsConfig::new("model", 64)).unwrap();
        let admission = AdmissionController::new(limits);
        let client = EngineClient::new(Arc::clone(&inbox), hasher, admission, metrics);
        Self { client, inbox }
    }

    fn permit(&self, requests: u64) -> AdmissionPermit {
        let admission = self.client.admission();
        let mut permit = admission.admit(admission.queue_body()).unwrap();
        permit.grow(requests, requests).unwrap();
        permit
    }

    /// Submits one request for each value in `max_tokens`; all of them share one stream.
    fn submit(&self, client_id: &str, max_tokens: &[u32]) -> RequestEventStream {
        let permit = self.permit(max_tokens.len() as u64);
        self.client.submit(submits(max_tokens), 1, client_id, permit)
    }

    fn submit_deferred(
        &self,
        client_id: &str,
        max_tokens: &[u32],
    ) -> (RequestEventStream, DeferredRequests) {
        let permit = self.permit(max_tokens.len() as u64);
        self.client.submit_deferred(submits(max_tokens), 1, client_id, permit)
    }

    /// Starts the engine thread and the thread that delivers its token events to the streams.
    fn start_threads(&self) -> SimulatedEngineThreads {
        let (events_tx, events_rx) = mpsc::channel();
        let inbox = Arc::clone(&self.inbox);
        let engine = thread::spawn(move || FakeEngine::default().run(&inbox, &events_tx));
        let client = self.client.clone();
        let fan_out = thread::spawn(move || events_rx.iter().for_each(|list| client.deliver(list)));
        SimulatedEngineThreads { engine, fan_out }
    }

    /// Checks, after all clients have dropped their streams, that no request is running and all counters are
    /// zero.
    fn assert_empty(&self, threads: SimulatedEngineThreads) {
        self.inbox.push(EngineMessage::Stop);
        assert_eq!(threads.engine.join().unwrap(), [], "requests running without a client");
        threads.fan_out.join().unwrap();
        let admission = self.client.admission();
        assert_eq!((admission.requests(), admission.prefill_tokens()), (0, 0));
        assert_eq!(self.client.requests_in_flight(), 0);
        let deferred = &self.client.state.metrics.deferred;
        assert_eq!(deferred.load(Ordering::Relaxed), 0);
    }
}

/// Join handles of the threads of a test: the fake engine, and the delivery of its token events to the
/// streams.
struct SimulatedEngineThreads {
    engine: thread::JoinHandle<Vec<RequestId>>,
    fan_out: thread::JoinHandle<()>,
}

fn submits(max_tokens: &[u32]) -> Vec<RequestSubmission> {
    let submit = |max_tokens: &u32| RequestSubmission {
        id: RequestId(0),
        tokens: vec![1],
        max_tokens: *max_tokens,
        sampling: SamplingParams::greedy(),
        first_masked_token: None,
        rng_key: 0,
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra_keys: None,
        replica: None,
        block_keys: Vec::new(),
    };
    max_tokens.iter().map(submit).collect()
}

/// Reads a stream of `count` requests until all have finished. Returns the number of tokens and the finish
/// reasons.
fn read(mut stream: RequestEventStream, count: usize) -> Vec<(usize, FinishReason)> {
    let mut seen: Vec<(usize, Option<FinishReason>)> = vec![(0, None); count];
    let mut events = Vec::new();
    while seen.iter().any(|(_, end)| end.is_none()) {
        block_on(poll_fn(|cx| stream.poll_events(cx, &mut events)));
        for IndexedTokenEvent { index, event } in events.drain(..) {
            let (tokens, end) = &mut seen[index as usize];
            assert_eq!(*end, None, "event after the end of request {index}");
            *tokens += event.tokens.len();
            *end = event.finish_reason;
        }
    }
    seen.into_iter().map(|(tokens, end)| (tokens, end.unwrap())).collect()
}

/// Submits deferred requests to the engine, as the server does once their grammar is compiled.
fn release(deferred: DeferredRequests) {
    deferred.release(&DecodingGuide::default());
}

/// Reads the first events of a stream (tokens or a finish event), then drops the stream.
fn drop_early(mut stream: RequestEventStream) {
    let mut events = Vec::new();
    block_on(poll_fn(|cx| stream.poll_events(cx, &mut events)));
}

/// Waits until a request with the given client id is in flight, and aborts all requests with this client id.
fn abort_once_in_flight(harness: &ClientHarness, client_id: &str) {
    while harness.client.abort_by_client_id(|id| id == client_id) == 0 {
        thread::yield_now();
    }
}

#[test]
fn request_finishes_once_under_racing_aborts() {
    check_interleavings(INTERLEAVINGS, || {
        let harness = Arc::new(ClientHarness::new());
        let threads = harness.start_threads();
        let spawn = |work: fn(&ClientHarness)| {
            let harness = Arc::clone(&harness);
            thread::spawn(move || work(&harness))
        };
        let clients = [
            spawn(|harness| {
                let ends = read(harness.submit("finished", &[2, 1]), 2);
                assert_eq!(ends, [(2, FinishReason::Length), (1, FinishReason::Length)]);
            }),
            spawn(|harness| drop_early(harness.submit("dropped", &[ENDLESS]))),
            spawn(|harness| {
                let ends = read(harness.submit("aborted", &[ENDLESS]), 1);
                assert_eq!(ends[0].1, FinishReason::Abort(AbortCause::Operator));
            }),
            spawn(|harness| abort_once_in_flight(harness, "aborted")),
        ];
        for client in clients {
            client.join().unwrap();
        }
        harness.assert_empty(threads);
    });
}

#[test]
fn deferred_submit_is_sent_once_or_finished() {
    check_interleavings(INTERLEAVINGS, || {
        let harness = ClientHarness::new();
        let threads = harness.start_threads();
        let client = harness.client.clone();
        let operator = thread::spawn(move || client.abort_by_client_id(|id| id == "deferred"));
        let outcomes: [fn(DeferredRequests); 3] = [
            release,
            |deferred| deferred.reject(&RejectReason::EmptyPrompt),
            drop::<DeferredRequests>,
        ];
        let streams = outcomes.map(|outcome| {
            let (stream, deferred) = harness.submit_deferred("deferred", &[2, 1]);
            (thread::spawn(move || outcome(deferred)), thread::spawn(move || read(stream, 2)))
        });
        let (dropped, deferred) = harness.submit_deferred("dropped", &[ENDLESS]);
        let compiler = thread::spawn(move || release(deferred));
        drop(dropped);
        compiler.join().unwrap();
        for (compiler, reader) in streams {
            compiler.join().unwrap();
            reader.join().unwrap();
        }
        operator.join().unwrap();
        harness.assert_empty(threads);
    });
}

/// Starts two clients whose requests end only when they are aborted; the requests of one client are deferred
/// until a grammar is compiled. All requests must finish with `finish`.
fn endless(harness: &Arc<ClientHarness>, finish: &FinishReason) -> [thread::JoinHandle<()>; 2] {
    [false, true].map(|is_deferred| {
        let (harness, finish) = (Arc::clone(harness), finish.clone());
        thread::spawn(move || {
            let (stream, count) = if is_deferred {
                let (stream, deferred) = harness.submit_deferred("deferred", &[ENDLESS]);
                release(deferred);
                (stream, 1)
            } else {
                (harness.submit("sent", &[ENDLESS, ENDLESS]), 2)
            };
            let ends = read(stream, count);
            assert!(ends.iter().all(|(_, end)| *end == finish), "{ends:?}");
        })
    })
}

#[test]
fn all_requests_finish_when_the_engine_stops() {
    check_interleavings(INTERLEAVINGS, || {
        let harness = Arc::new(ClientHarness::new());
        let threads = harness.start_threads();
        let clients = endless(&harness, &ENGINE_UNAVAILABLE);
        // Stop the engine while requests are running, then finish all streams, as `EngineLoop::fail`
        // does.
        harness.inbox.push(EngineMessage::Stop);
        drop(threads.engine.join().unwrap());
        harness.client.close(&ENGINE_UNAVAILABLE);
        threads.fan_out.join().unwrap();
        for client in clients {
            client.join().unwrap();
        }
        let admission = harness.client.admission();
        assert_eq!((admission.requests(), admission.prefill_tokens()), (0, 0));
        assert_eq!(harness.client.requests_in_flight(), 0);
    });
}

#[test]
fn expired_drain_also_finishes_late_submits() {
    check_interleavings(INTERLEAVINGS, || {
        let harness = Arc::new(ClientHarness::new());
        let threads = harness.start_threads();
        let drain = FinishReason::Abort(AbortCause::Shutdown);
        let clients = endless(&harness, &drain);
        harness.client.close(&drain);
        for client in clients {
            client.join().unwrap();
        }
        harness.assert_empty(threads);
    });
}

#[test]
fn inbox_loses_no_item_and_no_wakeup() {
    check_interleavings(INTERLEAVINGS, || {
        let inbox = Arc::new(BulkInbox::default());
        let writers = [0, 10, 20].map(|first| {
            let inbox = Arc::clone(&inbox);
            thread::spawn(move || {
                inbox.push(first);
                inbox.push_all([first + 1, first + 2]);
            })
        });
        let mut taken: Vec<i32> = Vec::new();
        while taken.len() < 9 {
            inbox.drain(&mut taken, Duration::from_secs(1));
        }
        for writer in writers {
            writer.join().unwrap();
        }
        for first in [0, 10, 20] {
            let of_one = taken.iter().filter(|item| **item / 10 * 10 == first);
            assert!(of_one.copied().eq(first..first + 3), "{taken:?}");
        }
    });
}
