//! Random tests of the scheduler with a simulated device that reads tokens back through block tables.
//!
//! The device writes token ids to the KV slots of a batch, reads the whole prefix back through the block
//! table, and samples a hash of it. An aliased, stale or misplaced block therefore yields a wrong token. The
//! test is smaller than `tests/sim` and injects no executor faults, so it runs within seconds.

mod executor;

use executor::{RandomWalkExecutor, RandomWalkRng, next_token};
use protocol::{
    Batch, BatchRow, BlockId, KvGroup, KvKind, KvSpec, Replica, RequestId, RowInput, RowOutput,
    SamplingParams, StepOutput, StepTiming, Token, TokenVec,
};
use scheduler::{
    AbortCause, FinishReason, KvConfig, RequestSubmission, Scheduler, SchedulerConfig,
    SchedulerEffect, SchedulerEvent, SchedulerLimits, TokenEvent,
};
use std::collections::{BTreeMap, VecDeque};

const VOCAB: u32 = 64;

struct RandomWalkHarness {
    scheduler: Scheduler,
    rng: RandomWalkRng,
    devices: Vec<RandomWalkExecutor>,
    inbox: Vec<SchedulerEvent>,
    received: BTreeMap<RequestId, (Vec<Token>, Option<FinishReason>)>,
    config: SchedulerConfig,
}

fn config(random: &mut RandomWalkRng) -> SchedulerConfig {
    let block_tokens = random.pick(&[1, 2, 3, 4, 8, 16]);
    let max_model_len: u32 = random.pick(&[40, 80]);
    let blocks_min = max_model_len.div_ceil(block_tokens);
    let blocks =
        random.pick(&[blocks_min, blocks_min + 1, 2 * blocks_min, 4 * blocks_min, 30 * blocks_min]);
    let mut limits = SchedulerLimits::cpu(max_model_len, VOCAB);
    limits.tokens_per_step = random.pick(&[1, 2, 5, 16, 40, 100, 300]);
    limits.max_num_seqs = random.pick(&[1, 3, 8, 20]);
    limits.tokens_per_chunk = random.pick(&[None, None, Some(block_tokens), Some(40)]);
    limits.steps_in_flight = random.pick(&[1, 2]);
    limits.draft_tokens = random.pick(&[0, 0, 1, 2, 4]);
    limits.mixed_batches = random.draw(0, 5) > 0;
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let mut kv = KvConfig::new(spec, blocks, [1, 2]);
    kv.caching = random.draw(0, 4) > 0;
    kv.hash_bits = random.pick(&[64, 16, 4]);
    let mut config = SchedulerConfig::new(limits, kv);
    config.replicas = random.pick(&[1, 1, 2, 4]) as u16;
    config.lockstep = random.draw(0, 2) == 0;
    config.capture_sizes = vec![1, 2, 4, 8];
    config
}

impl RandomWalkHarness {
    fn new(seed: u64) -> Self {
        let mut random = RandomWalkRng(seed);
        let config = config(&mut random);
        let (blocks, block_tokens) = (config.kv.blocks, config.kv.spec.block_tokens);
        let device = |_| RandomWalkExecutor {
            block_tokens,
            slots: vec![None; (blocks * block_tokens) as usize],
            seq_slots: BTreeMap::new(),
            outputs: VecDeque::new(),
        };
        let devices = (0..config.replicas).map(device).collect();
        let scheduler = Scheduler::new(config.clone()).expect("a valid configuration");
        Self {
            scheduler,
            rng: random,
            devices,
            inbox: Vec::new(),
            received: BTreeMap::new(),
            config,
        }
    }

    fn submit(&mut self, id: u64, tokens: Vec<Token>, max_tokens: u32, stop_ids: Vec<Token>) {
        let block_keys = self.scheduler.hasher().hash_prompt(&tokens, None);
        let submit = RequestSubmission {
            id: RequestId(id),
            tokens,
            max_tokens,
            sampling: SamplingParams::greedy(),
            first_masked_token: None,
            rng_key: id,
            eos_ids: Vec::new(),
            stop_ids,
            priority: 0,
            extra_keys: None,
            replica: None,
            block_keys,
        };
        self.received.insert(RequestId(id), (Vec::new(), None));
        self.inbox.push(SchedulerEvent::Submit(Box::new(submit)));
    }

    fn tick(&mut self) {
        let mut effects = Vec::new();
        self.scheduler.tick(0, &mut self.inbox, &mut effects);
        for effect in effects {
            match effect {
                SchedulerEffect::SendBatch { replica, batch } => {
                    self.check_and_run(replica, &batch);
                }
                SchedulerEffect::TokenEvents(events) => {
                    for event in events {
                        self.take_token_event(event);
                    }
                }
                SchedulerEffect::KvEvents { .. }
                | SchedulerEffect::BlocksEvicted { .. }
                | SchedulerEffect::Stats(_)
                | SchedulerEffect::ControlDone { .. } => {}
            }
        }
        self.scheduler.check();
    }

    fn check_and_run(&mut self, replica: Replica, batch: &Batch) {
        let tokens: u32 = batch.rows.iter().map(|r| r.len + u32::from(r.drafts)).sum();
        assert!(tokens <= self.config.limits.tokens_per_step, "{tokens} tokens in a step");
        self.devices[usize::from(replica.0)].run(batch, &mut self.rng);
    }

    fn take_token_event(&mut self, event: TokenEvent) {
        let (tokens, finish) =
            self.received.get_mut(&event.request).expect("an event of a known request");
        assert_eq!(*finish, None, "an event after the finish of {:?}", event.request);
        tokens.extend(event.tokens);
        *finish = event.finish_reason;
        assert!(event.preemptions <= 4);
    }

    /// Completes the oldest step in flight of a randomly chosen replica. Returns false if no step is in
    /// flight.
    fn complete_oldest_step(&mut self) -> bool {
        let waiting: Vec<usize> =
            (0..self.devices.len()).filter(|&i| !self.devices[i].outputs.is_empty()).collect();
        if waiting.is_empty() {
            return false;
        }
        let replica = self.rng.pick(&waiting);
        let output = self.devices[replica].outputs.pop_front().expect("the device has an output");
        self.inbox.push(SchedulerEvent::StepOutput { replica: Replica(replica as u16), output });
        true
    }
}

/// Returns the output that a prompt must have, computed without a scheduler.
fn tokens_alone(prompt: &[Token], max_tokens: u32, stop_ids: &[Token]) -> Vec<Token> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        tokens.push(next_token(&tokens));
        if stop_ids.contains(&tokens[tokens.len() - 1]) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

fn walk(seed: u64) {
    let mut world = RandomWalkHarness::new(seed);
    let max_model_len = world.config.limits.max_model_len;
    let shared: Vec<Token> = (0..60).map(|_| world.rng.draw(0, VOCAB)).collect();
    let mut requests = Vec::new();
    let mut remaining = world.rng.draw(1, 25);
    let aborts = world.rng.pick(&[0, 0, 20]);
    for round in 0.. {
        assert!(round < 100_000, "no progress");
        while remaining > 0 && world.rng.draw(0, 4) == 0 {
            remaining -= 1;
            let len = world.rng.draw(1, max_model_len);
            let common = world.rng.draw(0, len + 1).min(60);
            let mut prompt = shared[..common as usize].to_vec();
            prompt.extend((common..len).map(|_| world.rng.draw(0, VOCAB)));
            let max_tokens = world.rng.draw(0, max_model_len - len + 1);
            let stop_ids = vec![world.rng.draw(0, 2 * VOCAB)];
            world.submit(requests.len() as u64, prompt.clone(), max_tokens, stop_ids.clone());
            requests.push((prompt, max_tokens, stop_ids));
        }
        let mut aborted = None;
        if aborts > 0 && world.rng.draw(0, aborts) == 0 && !requests.is_empty() {
            let request = RequestId(u64::from(world.rng.draw(0, requests.len() as u32)));
            world
                .inbox
                .push(SchedulerEvent::Abort { request, cause: AbortCause::ClientDisconnected });
            aborted = Some(request);
        }
        let completed = world.rng.draw(0, 3) > 0 && world.complete_oldest_step();
        let devices_idle = world.devices.iter().all(|device| device.outputs.is_empty());
        let had_events = !world.inbox.is_empty();
        world.tick();
        let ended = aborted.is_none_or(|request| world.received[&request].1.is_some());
        assert!(ended, "{aborted:?} is live after its abort");
        if remaining == 0 && !completed && devices_idle && !had_events && world.scheduler.is_idle()
        {
            break;
        }
    }
    for (i, (prompt, max_tokens, stop_ids)) in requests.iter().enumerate() {
        let (tokens, finish) = &world.received[&RequestId(i as u64)];
        let expected = tokens_alone(prompt, *max_tokens, stop_ids);
        match finish {
            Some(FinishReason::Abort(_)) => assert!(expected.starts_with(tokens), "request {i}"),
            Some(FinishReason::Stop(_) | FinishReason::Length) => {
                assert_eq!(*tokens, expected, "request {i}");
            }
            other => panic!("request {i} finished as {other:?}"),
        }
    }
}

#[test]
fn random_walks_produce_the_tokens_of_each_request_alone() {
    for seed in 0..2_000 {
        let outcome = std::panic::catch_unwind(|| walk(seed));
        assert!(outcome.is_ok(), "seed {seed}");
    }
}
