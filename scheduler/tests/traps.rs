//! One test per mistake that engines are known to make, at the engine's own surface.

use expect_test::{Expect, expect};
use protocol::{
    Batch, Bucket, Epoch, KvEvent, KvGroup, KvKind, KvSpec, Replica, RequestId, RowError,
    RowOutput, Sampling, StepId, StepOutput, StepTiming, Token, TokenLogprobs, Tokens,
};
use scheduler::{
    AbortCause, Control, Effect, Engine, EngineConfig, ErrorCode, Event, ExtraKeys, Finish,
    KvConfig, Limits, Refusal, Routing, StepStats, StopReason, Submit, TokenEvent,
};
use std::collections::VecDeque;

const VOCAB: u32 = 1_000;

/// An engine, the steps on their way, and everything it said.
struct Bench {
    engine: Engine,
    now_ms: u64,
    sent: VecDeque<(Replica, Batch)>,
    news: Vec<TokenEvent>,
    kv: Vec<KvEvent>,
    stats: Vec<StepStats>,
    done: Vec<u64>,
}

fn config(blocks: u32, max_model_len: u32) -> EngineConfig {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: 4, groups: vec![group] };
    EngineConfig::new(Limits::cpu(max_model_len, VOCAB), KvConfig::new(spec, blocks, [1, 2]))
}

fn submit(id: u64, tokens: impl IntoIterator<Item = Token>, max_tokens: u32) -> Submit {
    Submit {
        id: RequestId(id),
        tokens: tokens.into_iter().collect(),
        max_tokens,
        sampling: Sampling::greedy(),
        key: id,
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra: None,
        replica: None,
        keys: Vec::new(),
    }
}

/// What the device says at a position when nothing is said otherwise.
fn said(position: u32) -> Token {
    500 + position
}

fn plain_answer(batch: &Batch) -> StepOutput {
    let row = |row: &protocol::Row| {
        let token = Tokens::one(said(row.start + row.len));
        let emitted = if row.samples { token } else { Tokens::new() };
        RowOutput { emitted, ..RowOutput::default() }
    };
    let rows = batch.rows.iter().map(row).collect();
    StepOutput { step: batch.step, epoch: batch.epoch, rows, timing: StepTiming::default() }
}

impl Bench {
    fn new(config: EngineConfig) -> Self {
        Self {
            engine: Engine::new(config).expect("limits are in range"),
            now_ms: 0,
            sent: VecDeque::new(),
            news: Vec::new(),
            kv: Vec::new(),
            stats: Vec::new(),
            done: Vec::new(),
        }
    }

    fn tick(&mut self, events: impl IntoIterator<Item = Event>) {
        let (mut inbox, mut effects): (Vec<Event>, Vec<Effect>) =
            (events.into_iter().collect(), Vec::new());
        self.engine.tick(self.now_ms, &mut inbox, &mut effects);
        for effect in effects {
            match effect {
                Effect::Send { replica, batch } => self.sent.push_back((replica, batch)),
                Effect::Tokens(events) => self.news.extend(events),
                Effect::Kv { events, .. } => self.kv.extend(events),
                Effect::Stats(stats) => self.stats.push(stats),
                Effect::ControlDone { op_id } => self.done.push(op_id),
            }
        }
        self.engine.check();
    }

    fn submit(&mut self, submits: impl IntoIterator<Item = Submit>) {
        self.tick(submits.into_iter().map(|submit| Event::Submit(Box::new(submit))));
    }

    /// Answers the oldest step, after `change`.
    fn answer_with(&mut self, change: impl FnOnce(&mut StepOutput)) {
        let (replica, batch) = self.sent.pop_front().expect("a step is in flight");
        let mut output = plain_answer(&batch);
        change(&mut output);
        self.tick([Event::Output { replica, output }]);
    }

    fn answer(&mut self) {
        self.answer_with(|_| {});
    }

    fn finish_all(&mut self) {
        while !self.sent.is_empty() {
            self.answer();
        }
        assert!(self.engine.is_idle(), "nothing in flight, yet not idle");
    }

    fn tokens(&self, id: u64) -> Vec<Token> {
        let own = self.news.iter().filter(|event| event.request == RequestId(id));
        own.flat_map(|event| event.tokens.iter().copied()).collect()
    }

    fn finish(&self, id: u64) -> Option<Finish> {
        let mut own = self.news.iter().filter(|event| event.request == RequestId(id));
        own.find_map(|event| event.finish.clone())
    }

    fn last_stats(&self) -> &StepStats {
        self.stats.last().expect("something happened")
    }

    /// Rows of the newest batch as `request[start,end)`, `*` where a row samples.
    fn rows(&self) -> String {
        let (_, batch) = self.sent.back().expect("a step is in flight");
        let row = |row: &protocol::Row| {
            let star = if row.samples { "*" } else { "" };
            format!("{}[{},{}){star}", row.request.0, row.start, row.start + row.len)
        };
        batch.rows.iter().map(row).collect::<Vec<_>>().join(" ")
    }

    #[track_caller]
    fn expect_rows(&self, expected: &Expect) {
        expected.assert_eq(&self.rows());
    }
}

#[test]
fn generated_blocks_are_found_by_the_next_turn() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..6, 7)]);
    bench.finish_all();
    let history: Vec<Token> = (0..6).chain(bench.tokens(1)).chain([9, 9]).collect();
    assert_eq!(history.len(), 15);
    bench.submit([submit(2, history, 1)]);
    // 12 of the 13 tokens of the first turn are in full blocks; its last one was never forwarded.
    bench.expect_rows(&expect!["2[12,15)*"]);
    bench.finish_all();
    let first = bench.news.iter().find(|event| event.request == RequestId(2));
    assert_eq!(first.and_then(|event| event.cached_tokens), Some(12));
}

#[test]
fn salts_keep_prefixes_apart() {
    let mut bench = Bench::new(config(16, 40));
    let salted = |id, salt: Option<&str>| Submit {
        extra: ExtraKeys::salted(salt.map(str::to_owned)),
        ..submit(id, 0..9, 1)
    };
    bench.submit([salted(1, Some("a"))]);
    bench.finish_all();
    for (id, salt, start) in [(2, None, 0), (3, Some("b"), 0), (4, Some("a"), 8)] {
        bench.submit([salted(id, salt)]);
        assert_eq!(bench.rows(), format!("{id}[{start},9)*"));
        bench.finish_all();
    }
}

#[test]
fn lengths_end_exactly_at_the_limit() {
    let mut bench = Bench::new(config(16, 10));
    bench.submit([submit(1, 0..4, 3), submit(2, 0..4, 6)]);
    bench.finish_all();
    assert_eq!(bench.tokens(1), [said(4), said(5), said(6)]);
    assert_eq!(bench.finish(1), Some(Finish::Length));
    assert_eq!(bench.tokens(2).len(), 6, "up to the model's length");
    assert_eq!(bench.finish(2), Some(Finish::Length));
}

#[test]
fn length_ends_waste_no_row_with_two_steps_in_flight() {
    let mut config = config(16, 40);
    config.limits.steps_in_flight = 2;
    let mut bench = Bench::new(config);
    bench.submit([submit(1, 0..4, 3)]);
    bench.finish_all();
    assert_eq!((bench.tokens(1).len(), bench.last_stats().steps_total), (3, 3));
    assert_eq!(bench.last_stats().rows_dropped_total, 0);
}

#[test]
fn scoring_ends_after_its_last_chunk_and_never_samples() {
    let mut config = config(16, 40);
    config.limits.tokens_per_step = 8;
    let mut bench = Bench::new(config);
    bench.submit([submit(1, 0..9, 0), submit(2, 0..1, 0)]);
    bench.expect_rows(&expect!["1[0,8)"]);
    bench.answer();
    bench.expect_rows(&expect!["1[8,9) 2[0,1)"]);
    bench.finish_all();
    assert_eq!((bench.finish(1), bench.finish(2)), (Some(Finish::Length), Some(Finish::Length)));
    assert!(bench.tokens(1).is_empty() && bench.tokens(2).is_empty());
}

#[test]
fn stop_ids_end_the_request_and_what_follows_is_cut() {
    let mut config = config(16, 40);
    config.limits.drafts = 4;
    let mut bench = Bench::new(config);
    let mut asked = submit(1, 0..4, 20);
    (asked.eos_ids, asked.stop_ids) = (vec![7], vec![8, 7]);
    bench.submit([asked]);
    bench.answer();
    bench.answer_with(|output| {
        output.rows[0].emitted = vec![5, 6, 8, 7, 9].into();
        output.rows[0].accepted = 4;
    });
    assert_eq!(bench.tokens(1), [said(4), 5, 6, 8], "tokens behind the stop reach nobody");
    assert_eq!(bench.finish(1), Some(Finish::Stop(StopReason::Id(8))));
    bench.finish_all();
}

#[test]
fn an_id_that_is_both_end_of_text_and_stop_counts_as_end_of_text() {
    let mut bench = Bench::new(config(16, 40));
    let both = vec![said(4)];
    bench.submit([Submit { eos_ids: both.clone(), stop_ids: both, ..submit(1, 0..4, 9) }]);
    bench.finish_all();
    assert_eq!(bench.finish(1), Some(Finish::Stop(StopReason::Eos(said(4)))));
}

#[test]
fn an_abort_in_mid_prompt_acts_at_once() {
    let mut config = config(128, 400);
    config.limits.tokens_per_step = 64;
    let mut bench = Bench::new(config);
    bench.submit([submit(1, 0..390, 4), submit(2, 0..390, 4)]);
    assert_eq!(bench.last_stats().running, 1);
    let aborts = [1, 2, 2, 77]
        .map(|id| Event::Abort { request: RequestId(id), cause: AbortCause::ClientGone });
    bench.tick(aborts);
    let ends = bench.news.iter().filter(|event| event.finish.is_some()).count();
    assert_eq!(ends, 2, "one end each; unknown and repeated aborts say nothing");
    let stats = bench.last_stats();
    assert_eq!((stats.running, stats.waiting, stats.blocks.in_use), (0, 0, 0));
    bench.answer(); // The row in flight belongs to nobody any more.
    assert_eq!(bench.last_stats().rows_dropped_total, 1);
    assert!(bench.engine.is_idle());
}

#[test]
fn a_stop_string_ends_as_a_stop() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..4, 9)]);
    let cause = AbortCause::StopText;
    bench.tick([Event::Abort { request: RequestId(1), cause }]);
    assert_eq!(bench.finish(1), Some(Finish::Stop(StopReason::Text)));
}

#[test]
fn refusals_carry_their_numbers_and_end_the_request() {
    let mut config = config(10, 40);
    config.limits.requests_waiting = 3;
    config.limits.tokens_waiting = 50;
    config.limits.requests_running = 1;
    let mut bench = Bench::new(config);
    let pinned = Submit { replica: Some(Replica(1)), ..submit(5, 0..4, 4) };
    bench.submit([
        submit(1, [], 4),
        submit(2, [1, VOCAB], 4),
        submit(3, 0..40, 1),
        submit(4, 0..20, 21),
        pinned,
        submit(6, 0..20, 4),
        submit(7, 0..20, 4),
        submit(8, 0..20, 4),
        submit(9, 0..2, 4),
        submit(10, 0..2, 4),
    ]);
    let refused = |id| match bench.finish(id) {
        Some(Finish::Refused(refusal)) => refusal,
        other => panic!("request {id} ended as {other:?}"),
    };
    assert_eq!(refused(1), Refusal::EmptyPrompt);
    assert_eq!(refused(2), Refusal::UnknownToken { token: VOCAB, vocab_size: VOCAB });
    assert_eq!(refused(3), Refusal::PromptTooLong { prompt_len: 40, max_model_len: 40 });
    let too_long = Refusal::TotalTooLong { prompt_len: 20, max_tokens: 21, max_model_len: 40 };
    assert_eq!(refused(4), too_long);
    assert_eq!(refused(5), Refusal::UnknownReplica { replica: 1, replicas: 1 });
    assert_eq!(refused(8), Refusal::QueueTokens { waiting: 40, asked: 20, cap: 50 });
    assert_eq!(refused(10), Refusal::QueueFull { waiting: 3, cap: 3 });
    assert!(refused(10).is_temporary() && !refused(3).is_temporary());
    assert_eq!(bench.finish(6).or(bench.finish(7)).or(bench.finish(9)), None);
    bench.finish_all();
}

#[test]
fn a_pool_below_one_request_is_refused_at_start() {
    let error = Engine::new(config(9, 37)).expect_err("36 tokens are not 37");
    let text = "9 KV blocks of 4 tokens hold 36 tokens, less than max_model_len 37";
    assert_eq!(error.to_string(), text);
}

#[test]
fn a_failed_row_ends_alone_and_is_not_findable() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..9, 4), submit(2, 100..109, 3)]);
    bench.answer_with(|output| {
        output.rows[0].emitted = Tokens::new();
        output.rows[0].error = Some(RowError::NonFiniteLogits);
    });
    let code = ErrorCode::Row(RowError::NonFiniteLogits);
    assert_eq!(bench.finish(1), Some(Finish::Error(code)));
    bench.submit([submit(3, 0..9, 1)]);
    bench.answer();
    assert!(bench.rows().contains("3[0,9)*"), "{}", bench.rows());
    bench.finish_all();
    assert_eq!(bench.finish(2), Some(Finish::Length));
}

#[test]
fn an_impossible_answer_ends_the_request_as_bad_output() {
    for emitted in [vec![], vec![1, 2], vec![VOCAB]] {
        let mut bench = Bench::new(config(16, 40));
        bench.submit([submit(1, 0..9, 4)]);
        bench.answer_with(|output| output.rows[0].emitted = emitted.into());
        assert_eq!(bench.finish(1), Some(Finish::Error(ErrorCode::BadOutput)));
    }
}

#[test]
fn repeated_stale_and_early_outputs_are_dropped() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..4, 4)]);
    let (replica, batch) = bench.sent[0].clone();
    let output = plain_answer(&batch);
    let changed = |step, epoch| StepOutput { step: StepId(step), epoch, ..output.clone() };
    let (now, before) = (batch.epoch, Epoch(batch.epoch.0 - 1));
    for output in [changed(2, now), changed(1, before), changed(0, now)] {
        bench.tick([Event::Output { replica, output }]);
    }
    assert!(bench.news.is_empty());
    bench.answer();
    bench.tick([Event::Output { replica, output }]);
    assert_eq!(bench.last_stats().outputs_dropped_total, 4);
    bench.finish_all();
    assert_eq!(bench.tokens(1).len(), 4);
}

#[test]
fn a_lost_replica_costs_time_but_no_token() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..6, 6)]);
    bench.answer();
    bench.answer();
    let (replica, batch) = bench.sent.pop_front().expect("a step in flight");
    bench.tick([Event::Lost { replica }]);
    assert_eq!(bench.kv.last(), Some(&KvEvent::Cleared));
    assert_eq!((bench.last_stats().running, bench.last_stats().ready), (0, false));
    bench.tick([Event::Output { replica, output: plain_answer(&batch) }]);
    assert!(bench.sent.is_empty(), "nothing runs without executors");
    bench.tick([Event::Ready { replica, blocks: 12, graph_rows: vec![1] }]);
    bench.expect_rows(&expect!["1[0,8)*"]);
    let (_, again) = &bench.sent[0];
    assert_eq!(again.epoch, batch.epoch.next());
    assert_eq!(again.rows[0].tables[0].from, 0, "a new epoch starts with the whole table");
    assert!(again.rows[0].init.is_some() && again.rows[0].epoch == 1);
    bench.finish_all();
    let expected: Vec<Token> = (6..12).map(said).collect();
    assert_eq!(bench.tokens(1), expected);
    assert_eq!(bench.last_stats().blocks.pool, 12);
}

#[test]
fn a_replica_that_stays_away_fails_its_requests() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..6, 6)]);
    bench.sent.clear();
    bench.tick([Event::Lost { replica: Replica(0) }]);
    bench.now_ms = 119_999;
    bench.submit([submit(2, 0..6, 6)]);
    assert_eq!(bench.finish(1), None);
    bench.now_ms = 120_000;
    bench.tick([]);
    let gone = Some(Finish::Error(ErrorCode::EngineUnavailable));
    assert_eq!((bench.finish(1), bench.finish(2)), (gone.clone(), gone));
    assert!(bench.engine.is_idle());
}

#[test]
fn prompt_logprobs_read_no_cache_and_are_delivered_once() {
    let entry =
        |position: u32| TokenLogprobs { token: position, logprob: -1.0, rank: 1, top: Vec::new() };
    let mut config = config(16, 40);
    config.limits.tokens_per_step = 8;
    let mut bench = Bench::new(config);
    bench.submit([submit(1, 0..10, 1)]);
    bench.finish_all();
    let mut asked = submit(2, 0..10, 2);
    asked.sampling.prompt_logprobs = Some(0);
    bench.submit([asked]);
    bench.expect_rows(&expect!["2[0,8)"]);
    bench.answer_with(|output| output.rows[0].prompt_logprobs = (1..9).map(entry).collect());
    bench.tick([Event::Lost { replica: Replica(0) }]);
    bench.sent.clear();
    bench.tick([Event::Ready { replica: Replica(0), blocks: 16, graph_rows: Vec::new() }]);
    bench.expect_rows(&expect!["2[0,8)"]);
    bench.answer_with(|output| output.rows[0].prompt_logprobs = (1..9).map(entry).collect());
    bench.answer_with(|output| output.rows[0].prompt_logprobs = vec![entry(9)]);
    bench.finish_all();
    let own = bench.news.iter().filter(|event| event.request == RequestId(2));
    let positions: Vec<Token> =
        own.flat_map(|event| &event.prompt_logprobs).map(|entry| entry.token).collect();
    assert_eq!(positions, (1..10).collect::<Vec<_>>());
}

#[test]
fn priority_goes_before_arrival_and_arrival_decides_ties() {
    let mut config = config(16, 40);
    config.limits.requests_running = 1;
    let mut bench = Bench::new(config);
    let with = |id, priority| Submit { priority, ..submit(id, 0..4, 1) };
    bench.submit([with(1, 0), with(2, 1), with(3, 0), with(4, -1)]);
    bench.finish_all();
    let order: Vec<u64> = bench.news.iter().map(|event| event.request.0).collect();
    assert_eq!(order, [4, 1, 3, 2]);
}

#[test]
fn clearing_the_cache_leaves_running_requests_alone() {
    let mut bench = Bench::new(config(16, 40));
    bench.submit([submit(1, 0..9, 9)]);
    bench.answer();
    bench.tick([Event::Control(Control::ClearPrefixCache { op_id: 5 })]);
    assert_eq!((bench.done.as_slice(), bench.kv.last()), (&[5][..], Some(&KvEvent::Cleared)));
    bench.finish_all();
    assert_eq!(bench.tokens(1).len(), 9);
    assert_eq!(bench.last_stats().blocks.cached, 0, "its later blocks would have a false root");
    bench.submit([submit(2, 0..9, 1)]);
    bench.expect_rows(&expect!["2[0,9)*"]);
    bench.finish_all();
}

#[test]
fn recompute_runs_to_the_known_end_in_one_rule() {
    // 30 blocks hold both prompts, not both outputs: the later one is preempted with output known.
    let mut config = config(30, 120);
    config.limits.tokens_per_step = 32;
    config.kv.caching = false;
    let mut bench = Bench::new(config);
    bench.submit([submit(1, 0..40, 80), submit(2, 100..140, 80)]);
    let mut recomputed = Vec::new();
    while !bench.sent.is_empty() {
        let (_, batch) = bench.sent.back().expect("just looked");
        let again = batch.rows.iter().filter(|row| row.request.0 == 2 && row.epoch > 0);
        recomputed.extend(again.map(|row| (row.start, row.len, row.samples)));
        bench.answer();
    }
    let chunks = recomputed.iter().filter(|row| row.1 > 1).count();
    assert!(chunks >= 2, "the recompute took several chunks");
    let end = recomputed.iter().position(|row| row.2).expect("it samples again");
    assert!(recomputed[end].0 + recomputed[end].1 > 40, "never at the end of the prompt");
    let expected: Vec<Token> = (40..120).map(said).collect();
    assert_eq!(bench.tokens(2), expected);
    assert_eq!(bench.tokens(1), expected);
}

#[test]
fn lockstep_ranks_get_equal_headers_and_idle_ones_empty_batches() {
    let mut config = config(16, 40);
    (config.replicas, config.lockstep, config.graph_rows) = (3, true, vec![1, 2, 4]);
    let mut bench = Bench::new(config);
    bench.tick([]);
    assert!(bench.sent.is_empty(), "nobody has work: nothing is sent");
    let pinned =
        |id, replica, len| Submit { replica: Some(Replica(replica)), ..submit(id, 0..len, 3) };
    bench.submit([pinned(1, 0, 9), pinned(2, 1, 4), pinned(3, 1, 4), pinned(4, 1, 4)]);
    let headers = |bench: &Bench| -> Vec<(Bucket, u32, usize)> {
        let header = |(_, b): &(Replica, Batch)| (b.bucket, b.moe_tokens, b.rows.len());
        bench.sent.iter().map(header).collect()
    };
    let eager = Bucket::Eager { tokens: 12 };
    assert_eq!(headers(&bench), [(eager, 12, 1), (eager, 12, 3), (eager, 12, 0)]);
    bench.answer();
    bench.answer();
    assert_eq!(bench.sent.len(), 1, "the group waits for its last rank");
    bench.answer();
    let graph = Bucket::Graph { rows: 4, width: 1 };
    assert_eq!(headers(&bench), [(graph, 4, 1), (graph, 4, 3), (graph, 4, 0)]);
    bench.finish_all();
}

#[test]
fn a_dead_rank_ends_its_lockstep_group() {
    let mut config = config(16, 40);
    (config.replicas, config.lockstep) = (2, true);
    let mut bench = Bench::new(config);
    bench.submit([submit(1, 0..4, 3), submit(2, 0..4, 3)]);
    bench.sent.clear();
    bench.tick([Event::Lost { replica: Replica(1) }]);
    let ready = |i| Event::Ready { replica: Replica(i), blocks: 16, graph_rows: Vec::new() };
    bench.tick([ready(1)]);
    assert!(bench.sent.is_empty(), "one rank alone cannot step");
    bench.tick([ready(0)]);
    assert_eq!(bench.sent.len(), 2);
    bench.finish_all();
    assert_eq!((bench.tokens(1).len(), bench.tokens(2).len()), (3, 3));
}

#[test]
fn a_dead_replica_s_queue_moves_but_for_pinned_requests() {
    let mut config = config(16, 40);
    config.replicas = 2;
    let mut bench = Bench::new(config);
    let pinned = Submit { replica: Some(Replica(0)), ..submit(3, 0..4, 3) };
    bench.submit([submit(1, 0..8, 3), submit(2, 100..108, 3), pinned]);
    assert_eq!(bench.sent.len(), 2);
    bench.sent.retain(|(replica, _)| replica.0 == 1);
    bench.tick([Event::Lost { replica: Replica(0) }]);
    while !bench.sent.is_empty() {
        bench.answer();
    }
    assert_eq!((bench.tokens(1).len(), bench.tokens(2).len()), (3, 3));
    assert_eq!(bench.finish(3), None, "it was asked for on the lost replica");
    bench.tick([Event::Ready { replica: Replica(0), blocks: 16, graph_rows: Vec::new() }]);
    bench.finish_all();
    assert_eq!(bench.tokens(3).len(), 3);
}

#[test]
fn routing_follows_the_prefix_unless_told_otherwise() {
    let placed = |routing| {
        let mut config = config(64, 40);
        (config.replicas, config.routing) = (2, routing);
        let mut bench = Bench::new(config);
        let mut places = Vec::new();
        let mut place = |bench: &mut Bench, submit: Submit, ends: bool| {
            bench.submit([submit]);
            places.push(bench.sent.back().expect("it runs").0.0);
            if ends {
                bench.finish_all();
            }
        };
        place(&mut bench, submit(1, 0..17, 1), true);
        place(&mut bench, submit(2, 100..117, 1), true);
        place(&mut bench, submit(3, 100..117, 1), true); // Cached on the second replica.
        place(&mut bench, submit(4, 0..17, 1), true); // Cached on the first one.
        place(&mut bench, submit(5, 200..230, 1), false); // Long and unfinished.
        place(&mut bench, submit(6, 300..304, 1), false);
        bench.finish_all();
        places
    };
    assert_eq!(placed(Routing::Prefix), [0, 1, 1, 0, 1, 0]);
    assert_eq!(placed(Routing::RoundRobin), [0, 1, 0, 1, 0, 1]);
    assert_eq!(placed(Routing::LeastRequests)[4..], [0, 1]);
    assert_eq!(placed(Routing::LeastTokens)[4..], [0, 1]);
}
