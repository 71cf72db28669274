//! What handlers, the engine's thread, the fan-out thread and operators hand to each other, in orders that a scheduler
//! of tests draws: who reads a stream sees one end, whoever ends it, and nothing is left behind.
//!
//! Their map is under one lock, so whoever lists it sees a moment of it; the real one is listed part by part.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

use super::*;
use crate::metrics::MetricsConfig;
use kvcache::KvConfig;
use protocol::{KvSpec, Sampling};
use scheduler::Refusal;
use shuttle::future::block_on;
use shuttle::sync::mpsc;
use shuttle::{check_random, thread};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::time::Duration;

/// Drawn orders of each test.
const ORDERS: usize = 3_000;
/// Tokens of a request that ends only if somebody ends it.
const ENDLESS: u32 = u32::MAX;

/// A server without an engine.
struct Hall {
    client: EngineClient,
    inbox: Arc<Inbox<Signal>>,
}

impl Hall {
    fn new() -> Self {
        let inbox = Arc::new(Inbox::default());
        let spec = KvSpec { block_tokens: 4, groups: Vec::new() };
        let hasher = PromptHasher::new(KvConfig::new(spec, 1, [0; 2]).hasher(), false);
        let limits = AdmissionLimits { requests: 100, prefill_tokens: 100, bytes: 100 };
        let metrics = Metrics::new(&MetricsConfig::new("model", 64)).unwrap();
        let admission = Admission::new(limits);
        let client = EngineClient::new(Arc::clone(&inbox), hasher, admission, metrics);
        Self { client, inbox }
    }

    fn ticket(&self, requests: u64) -> Ticket {
        let admission = self.client.admission();
        let mut ticket = admission.enter(admission.hold()).unwrap();
        ticket.grow(requests, requests).unwrap();
        ticket
    }

    /// A stream of requests for so many tokens each.
    fn submit(&self, name: &str, max_tokens: &[u32]) -> EventStream {
        let ticket = self.ticket(max_tokens.len() as u64);
        self.client.submit(submits(max_tokens), 1, name, ticket)
    }

    fn hold(&self, name: &str, max_tokens: &[u32]) -> (EventStream, Held) {
        let ticket = self.ticket(max_tokens.len() as u64);
        self.client.hold(submits(max_tokens), 1, name, ticket)
    }

    /// Starts the engine's thread and the one that hands out its events.
    fn staff(&self) -> Staff {
        let (news, lists) = mpsc::channel();
        let inbox = Arc::clone(&self.inbox);
        let engine = thread::spawn(move || StandIn::default().run(&inbox, &news));
        let client = self.client.clone();
        let fan_out = thread::spawn(move || lists.iter().for_each(|list| client.deliver(list)));
        Staff { engine, fan_out }
    }

    /// Once all clients have gone: nobody computes for them, and nothing is counted as theirs.
    fn assert_empty(&self, staff: Staff) {
        self.inbox.push(Signal::Stop);
        assert_eq!(staff.engine.join().unwrap(), [], "computed for nobody");
        staff.fan_out.join().unwrap();
        let admission = self.client.admission();
        assert_eq!((admission.requests(), admission.prefill_tokens()), (0, 0));
        assert_eq!(self.client.requests_in_flight(), 0);
        let deferred = &self.client.shared.metrics.deferred;
        assert_eq!(deferred.load(Ordering::Relaxed), 0);
    }
}

struct Staff {
    engine: thread::JoinHandle<Vec<RequestId>>,
    fan_out: thread::JoinHandle<()>,
}

fn submits(max_tokens: &[u32]) -> Vec<Submit> {
    let submit = |max_tokens: &u32| Submit {
        id: RequestId(0),
        tokens: vec![1],
        max_tokens: *max_tokens,
        sampling: Sampling::greedy(),
        masked_from: None,
        key: 0,
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra: None,
        replica: None,
        keys: Vec::new(),
    };
    max_tokens.iter().map(submit).collect()
}

/// As much of an engine as its neighbours see: it gives every live request a token a turn.
#[derive(Default)]
struct StandIn {
    /// Tokens that they still get.
    live: BTreeMap<RequestId, u32>,
    /// A request whose guide came, and not its submit.
    guided: Option<RequestId>,
}

impl StandIn {
    /// Works until it is stopped, and returns what is live then.
    fn run(
        mut self,
        inbox: &Inbox<Signal>,
        news: &mpsc::Sender<Vec<TokenEvent>>,
    ) -> Vec<RequestId> {
        let mut signals = Vec::new();
        loop {
            // As an executor's answer would, this wakes it up as long as there is something to do.
            if !self.live.is_empty() {
                inbox.push(Signal::GiveUp("a step is done".to_owned()));
            }
            inbox.take(&mut signals, Duration::from_secs(1));
            let mut events = Vec::new();
            for signal in signals.drain(..) {
                match signal {
                    Signal::Event(event) => self.hear(event, &mut events),
                    Signal::Guide { request, .. } => self.guided = Some(request),
                    Signal::Stop => return self.live.into_keys().collect(),
                    _ => {}
                }
            }
            self.step(&mut events);
            if !events.is_empty() {
                drop(news.send(events));
            }
            thread::yield_now();
        }
    }

    fn hear(&mut self, event: Event, events: &mut Vec<TokenEvent>) {
        match event {
            Event::Submit(submit) => {
                let guided = self.guided.take();
                assert!(guided.is_none_or(|request| request == submit.id), "another's guide");
                let former = self.live.insert(submit.id, submit.max_tokens);
                assert_eq!(former, None, "submitted twice");
            }
            Event::Abort { request, cause } => {
                if self.live.remove(&request).is_some() {
                    events.push(TokenEvent::end(request, Finish::Abort(cause)));
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn step(&mut self, events: &mut Vec<TokenEvent>) {
        self.live.retain(|&request, left| {
            *left -= 1;
            let finish = (*left == 0).then_some(Finish::Length);
            let end = TokenEvent::end(request, Finish::Length);
            events.push(TokenEvent { tokens: [7].as_slice().into(), finish, ..end });
            *left > 0
        });
    }
}

/// Reads a stream of `count` requests until all have ended. Returns their tokens and ends.
fn read(mut stream: EventStream, count: usize) -> Vec<(usize, Finish)> {
    let mut seen: Vec<(usize, Option<Finish>)> = vec![(0, None); count];
    let mut events = Vec::new();
    while seen.iter().any(|(_, end)| end.is_none()) {
        block_on(poll_fn(|cx| stream.poll_take(cx, &mut events)));
        for (index, event) in events.drain(..) {
            let (tokens, end) = &mut seen[index as usize];
            assert_eq!(*end, None, "news behind the end of request {index}");
            *tokens += event.tokens.len();
            *end = event.finish;
        }
    }
    seen.into_iter().map(|(tokens, end)| (tokens, end.unwrap())).collect()
}

/// What those are sent by that wait for a grammar.
fn release(held: Held) {
    held.release(&Guide::default());
}

/// Reads one token, or an end, and leaves.
fn leave_early(mut stream: EventStream) {
    let mut events = Vec::new();
    block_on(poll_fn(|cx| stream.poll_take(cx, &mut events)));
}

#[test]
fn a_request_ends_once_whoever_ends_it() {
    check_random(
        || {
            let hall = Arc::new(Hall::new());
            let staff = hall.staff();
            let spawn = |work: fn(&Hall)| {
                let hall = Arc::clone(&hall);
                thread::spawn(move || work(&hall))
            };
            let clients = [
                spawn(|hall| {
                    let ends = read(hall.submit("whole", &[2, 1]), 2);
                    assert_eq!(ends, [(2, Finish::Length), (1, Finish::Length)]);
                }),
                spawn(|hall| leave_early(hall.submit("leaves", &[ENDLESS]))),
                spawn(|hall| {
                    let ends = read(hall.submit("meant", &[ENDLESS]), 1);
                    assert_eq!(ends[0].1, Finish::Abort(AbortCause::Operator));
                }),
                spawn(|hall| {
                    while hall.client.abort_named(|name| name == "meant") == 0 {
                        thread::yield_now();
                    }
                }),
            ];
            for client in clients {
                client.join().unwrap();
            }
            hall.assert_empty(staff);
        },
        ORDERS,
    );
}

#[test]
fn what_waits_for_its_grammar_is_sent_once_or_ends() {
    check_random(
        || {
            let hall = Hall::new();
            let staff = hall.staff();
            let client = hall.client.clone();
            let operator = thread::spawn(move || client.abort_named(|name| name == "held"));
            let ways: [fn(Held); 3] =
                [release, |held| held.refuse(&Refusal::EmptyPrompt), drop::<Held>];
            let streams = ways.map(|way| {
                let (stream, held) = hall.hold("held", &[2, 1]);
                (thread::spawn(move || way(held)), thread::spawn(move || read(stream, 2)))
            });
            let (left, held) = hall.hold("leaves", &[ENDLESS]);
            let compiler = thread::spawn(move || release(held));
            drop(left);
            compiler.join().unwrap();
            for (compiler, reader) in streams {
                compiler.join().unwrap();
                reader.join().unwrap();
            }
            operator.join().unwrap();
            hall.assert_empty(staff);
        },
        ORDERS,
    );
}

/// Streams of endless requests, one of which waited for its grammar, that all have to end as `finish` says.
fn endless(hall: &Arc<Hall>, finish: &Finish) -> [thread::JoinHandle<()>; 2] {
    [false, true].map(|waits| {
        let (hall, finish) = (Arc::clone(hall), finish.clone());
        thread::spawn(move || {
            let (stream, count) = if waits {
                let (stream, held) = hall.hold("held", &[ENDLESS]);
                release(held);
                (stream, 1)
            } else {
                (hall.submit("sent", &[ENDLESS, ENDLESS]), 2)
            };
            let ends = read(stream, count);
            assert!(ends.iter().all(|(_, end)| *end == finish), "{ends:?}");
        })
    })
}

#[test]
fn nobody_waits_for_an_engine_that_is_gone() {
    check_random(
        || {
            let hall = Arc::new(Hall::new());
            let staff = hall.staff();
            let clients = endless(&hall, &ENGINE_LOST);
            // It stops whatever it has in hand, and then all streams are ended, as `EngineThread::fail` does.
            hall.inbox.push(Signal::Stop);
            drop(staff.engine.join().unwrap());
            hall.client.close(&ENGINE_LOST);
            staff.fan_out.join().unwrap();
            for client in clients {
                client.join().unwrap();
            }
            let admission = hall.client.admission();
            assert_eq!((admission.requests(), admission.prefill_tokens()), (0, 0));
            assert_eq!(hall.client.requests_in_flight(), 0);
        },
        ORDERS,
    );
}

#[test]
fn a_drain_whose_time_is_over_ends_what_comes_late_too() {
    check_random(
        || {
            let hall = Arc::new(Hall::new());
            let staff = hall.staff();
            let drain = Finish::Abort(AbortCause::Drain);
            let clients = endless(&hall, &drain);
            hall.client.close(&drain);
            for client in clients {
                client.join().unwrap();
            }
            hall.assert_empty(staff);
        },
        ORDERS,
    );
}

#[test]
fn an_inbox_loses_nothing_and_never_sleeps_on() {
    check_random(
        || {
            let inbox = Arc::new(Inbox::default());
            let writers = [0, 10, 20].map(|first| {
                let inbox = Arc::clone(&inbox);
                thread::spawn(move || {
                    inbox.push(first);
                    inbox.push_all([first + 1, first + 2]);
                })
            });
            let mut taken: Vec<i32> = Vec::new();
            while taken.len() < 9 {
                inbox.take(&mut taken, Duration::from_secs(1));
            }
            for writer in writers {
                writer.join().unwrap();
            }
            for first in [0, 10, 20] {
                let of_one = taken.iter().filter(|item| **item / 10 * 10 == first);
                assert!(of_one.copied().eq(first..first + 3), "{taken:?}");
            }
        },
        ORDERS,
    );
}
