//! What losses, preemptions and resets cost is told by its cause, by the replica that pays.

use protocol::{
    Batch, KvGroup, KvKind, KvSpec, Replica, RequestId, RowOutput, Sampling, StepOutput,
    StepTiming, Token,
};
use scheduler::{
    AbortCause, ByLoss, Control, Effect, Engine, EngineConfig, Event, KvConfig, Limits, Loss,
    Recomputed, StepStats, Submit,
};

const BLOCK_TOKENS: u32 = 4;

/// An engine, what it sent last to each replica, its counters, and the answer to the last control operation.
struct Bench {
    engine: Engine,
    sent: Vec<Option<Batch>>,
    stats: Vec<StepStats>,
    done: Option<bool>,
}

impl Bench {
    fn new(replicas: u16, blocks: u32) -> Self {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let limits = Limits { steps_in_flight: 1, ..Limits::cpu(64, 100) };
        let config = EngineConfig::new(limits, KvConfig::new(spec, blocks, [1, 2]));
        let engine =
            Engine::new(EngineConfig { replicas, ..config }).expect("a valid configuration");
        let several = usize::from(replicas);
        let (sent, stats) = (vec![None; several], vec![StepStats::default(); several]);
        Self { engine, sent, stats, done: None }
    }

    fn tick(&mut self, event: Event) {
        let mut effects = Vec::new();
        self.engine.tick(0, &mut vec![event], &mut effects);
        for effect in effects {
            match effect {
                Effect::Send { replica, batch } => {
                    self.sent[usize::from(replica.0)] = Some(batch);
                }
                Effect::Stats(stats) => {
                    let replica = usize::from(stats.replica.0);
                    self.stats[replica] = stats;
                }
                Effect::ControlDone { op_id: 1, done } => self.done = Some(done),
                _ => {}
            }
        }
    }

    /// A request of so many tokens, none of which another has.
    fn submit(&mut self, id: u64, tokens: u32) {
        self.submit_masked(id, tokens, None);
    }

    /// The same, with masks from a token of its output on.
    fn submit_masked(&mut self, id: u64, tokens: u32, masked_from: Option<u32>) {
        let tokens: Vec<Token> = (0..tokens).map(|i| id as u32 * 30 + i).collect();
        let keys = self.engine.hasher().hash(&tokens, None);
        self.tick(Event::Submit(Box::new(Submit {
            id: RequestId(id),
            tokens,
            max_tokens: 30,
            sampling: Sampling::greedy(),
            masked_from,
            key: id,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra: None,
            replica: None,
            keys,
        })));
    }

    /// The replica answers what it was sent: a token for every row that samples.
    fn answer(&mut self, replica: u16) {
        let batch = self.sent[usize::from(replica)].take().expect("a step is under way");
        let mut rows = vec![RowOutput::default(); batch.rows.len()];
        for (output, row) in rows.iter_mut().zip(&batch.rows) {
            if row.samples {
                output.emitted.push(7);
            }
        }
        let Batch { step, epoch, .. } = batch;
        let timing = StepTiming::default();
        let output = StepOutput { step, epoch, rows, timing, experts: Vec::new() };
        self.tick(Event::Output { replica: Replica(replica), output });
    }

    /// Whether the prefix cache was cleared.
    fn clear(&mut self, restart: bool) -> bool {
        self.tick(Event::Control(Control::ClearPrefixCache { op_id: 1, restart }));
        self.done.take().expect("a control operation is answered at once")
    }

    fn lose(&mut self, replica: u16, loss: Loss) {
        self.tick(Event::Lost { replica: Replica(replica), loss });
    }

    fn costs(&self, replica: usize) -> (ByLoss, Recomputed) {
        let stats = &self.stats[replica];
        (stats.requests_recovered_total, stats.tokens_recomputed_total)
    }
}

#[test]
fn a_loss_is_counted_where_it_was_and_what_it_cost_where_it_is_made_good() {
    let mut bench = Bench::new(2, 16);
    bench.submit(1, 6);
    bench.answer(0); // Its prompt and a token of its answer are computed or under way.
    bench.answer(0);
    bench.lose(0, Loss::Silent);
    let recovered = ByLoss { silent: 1, ..ByLoss::default() };
    assert_eq!(bench.costs(0), (recovered, Recomputed::default()));
    let lost = ByLoss { silent: 8, ..ByLoss::default() };
    let recomputed = Recomputed { loss: lost, ..Recomputed::default() };
    assert_eq!(bench.costs(1), (ByLoss::default(), recomputed), "the other replica does it");
    // The next loss has another cause, and nobody else is left: it waits for the next executors.
    bench.lose(1, Loss::Fault);
    let recovered = ByLoss { fault: 1, ..ByLoss::default() };
    assert_eq!(bench.costs(1), (recovered, recomputed));
    let ready = Event::Ready { replica: Replica(1), blocks: 16, graph_rows: Vec::new() };
    bench.tick(ready);
    let lost = ByLoss { fault: 8, ..lost };
    assert_eq!(bench.costs(1), (recovered, Recomputed { loss: lost, ..recomputed }));
}

#[test]
fn preemptions_and_resets_are_no_losses() {
    let mut bench = Bench::new(1, 16);
    bench.submit(1, 6);
    bench.answer(0);
    assert!(bench.clear(true));
    bench.answer(0); // Of the time before: there is room for a step again.
    let (recovered, recomputed) = bench.costs(0);
    assert_eq!(recovered, ByLoss::default());
    assert_eq!(recomputed, Recomputed { reset: 7, ..Recomputed::default() });

    // Two that outgrow the pool: one has to go, and its published blocks with it.
    let mut bench = Bench::new(1, 16);
    bench.submit(1, 30);
    bench.submit(2, 30);
    while bench.stats[0].preemptions_total == 0 {
        bench.answer(0);
    }
    while bench.stats[0].tokens_recomputed_total == Recomputed::default() {
        bench.answer(0);
    }
    let (recovered, recomputed) = bench.costs(0);
    assert_eq!(recovered, ByLoss::default());
    let Recomputed { preemption, reset, loss } = recomputed;
    assert!(preemption > 0 && (reset, loss) == (0, ByLoss::default()), "{recomputed:?}");
}

#[test]
fn an_answer_for_a_request_that_has_left_is_dropped_and_counted() {
    let mut bench = Bench::new(1, 16);
    bench.submit(1, 6);
    bench.submit(2, 6);
    bench.tick(Event::Abort { request: RequestId(1), cause: AbortCause::ClientGone });
    bench.answer(0);
    bench.answer(0);
    assert_eq!(bench.stats[0].rows_dropped_total, 1);
}

#[test]
fn an_answer_of_executors_that_are_gone_is_dropped_and_counted() {
    let mut bench = Bench::new(1, 16);
    bench.submit(1, 6);
    let mut batch = bench.sent[0].clone().expect("a step is under way");
    batch.epoch.0 += 1; // Everything else is what is awaited.
    let awaited = bench.sent[0].replace(batch);
    bench.answer(0);
    assert_eq!(bench.stats[0].outputs_dropped_total, 1);
    bench.sent[0] = awaited;
    bench.answer(0);
    assert_eq!(bench.stats[0].outputs_dropped_total, 1);
}

#[test]
fn prefixes_are_forgotten_while_nobody_holds_blocks_or_if_all_start_again() {
    let mut bench = Bench::new(1, 16);
    bench.submit(1, 6);
    bench.answer(0);
    assert!(!bench.clear(false), "its blocks are held");
    assert_eq!((bench.stats[0].running, bench.stats[0].prefix_queries_total), (1, 6));
    bench.tick(Event::Abort { request: RequestId(1), cause: AbortCause::ClientGone });
    assert_eq!(bench.stats[0].blocks.cached, 1);
    assert!(bench.clear(false), "what nobody holds is only forgotten");
    assert_eq!(bench.stats[0].blocks.cached, 0);
}

#[test]
fn counters_tell_of_the_last_step_and_of_all_that_were_answered() {
    let mut bench = Bench::new(1, 16);
    assert!(bench.engine.is_idle());
    bench.submit(1, 6);
    for (answered, tokens) in [(0, 6), (1, 1), (2, 1)] {
        let stats = &bench.stats[0];
        assert_eq!((stats.rows, stats.step_tokens, stats.steps_total), (1, tokens, answered));
        assert_eq!(bench.engine.stats(Replica(0)), *stats, "who asks is told the same");
        assert!(!bench.engine.is_idle());
        bench.answer(0);
    }
    bench.tick(Event::Abort { request: RequestId(1), cause: AbortCause::ClientGone });
    assert!(!bench.engine.is_idle(), "its last step is under way");
    bench.answer(0);
    assert!(bench.engine.is_idle());
}

#[test]
fn rows_are_masked_until_no_mask_limits_them_any_more() {
    let mut bench = Bench::new(1, 16);
    bench.submit_masked(1, 6, Some(1));
    let mut masked = Vec::new();
    for step in 0..5 {
        masked.push(bench.sent[0].as_ref().expect("a step is under way").rows[0].masked);
        if step == 2 {
            bench.tick(Event::MasksOver { request: RequestId(1) });
        }
        bench.answer(0);
    }
    assert_eq!(masked, [false, true, true, false, false], "the third was under way");
}

#[test]
fn a_replica_that_comes_back_takes_nothing_from_those_that_were_there() {
    let mut bench = Bench::new(2, 16);
    bench.lose(0, Loss::Exited);
    bench.submit(1, 6);
    bench.submit(2, 6); // Waits for the step under way.
    let ready = Event::Ready { replica: Replica(0), blocks: 16, graph_rows: Vec::new() };
    bench.tick(ready);
    assert_eq!((bench.stats[1].running, bench.stats[1].waiting), (1, 1));
    assert!(bench.sent[0].is_none());
}

#[test]
fn replicas_in_lockstep_are_lost_together_and_others_alone() {
    for (lockstep, expected) in [(true, &[0, 1][..]), (false, &[1])] {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let config = EngineConfig::new(Limits::cpu(64, 100), KvConfig::new(spec, 16, [1, 2]));
        let engine = Engine::new(EngineConfig { replicas: 2, lockstep, ..config }).unwrap();
        let group: Vec<u16> = engine.group(Replica(1)).map(|replica| replica.0).collect();
        assert_eq!(group, expected);
    }
}
