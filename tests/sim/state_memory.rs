//! Prefix hits of models with recurrent state: conversations, long prompts, and prompts that share their beginning. The
//! tokens are those of the simulated device, so that a request that resumes from a wrong state has wrong tokens.

use crate::hash_model::text::{HashOracle, HashSampler};
use crate::hash_model::{HashModel, HashModelConfig, KvSlotAccess};
use kvcache::KvConfig;
use protocol::{KvGroup, KvKind, KvSpec, Replica, RequestId, SamplingParams, Token};
use scheduler::{
    RequestSubmission, Scheduler, SchedulerConfig, SchedulerEffect, SchedulerEvent, SchedulerLimits,
};

const BLOCK_TOKENS: u32 = 16;
const VOCAB: Token = 50_000;
const INTERVAL: u32 = 1_024;

/// A scheduler and a simulated device that completes every step immediately.
struct StateServer {
    scheduler: Scheduler,
    device: HashModel,
    requests: u64,
}

/// Result of one request.
struct StateServerResult {
    /// Prompt and output.
    tokens: Vec<Token>,
    /// Start positions of the rows that read another state slot than they write.
    forks: Vec<u32>,
    /// Position at which the first row started: the length of the prefix hit.
    first_start: u32,
}

impl StateServer {
    fn new(state_slots: u32) -> Self {
        Self::with_drafts(state_slots, 0)
    }

    fn with_drafts(state_slots: u32, drafts: u8) -> Self {
        let state = KvKind::State { slots_per_request: 1, bytes_per_slot: 8 };
        let group = |kind: KvKind| {
            let bytes_per_block = u64::from(!kind.is_state());
            KvGroup { layers: vec![0], kind, bytes_per_block }
        };
        let kinds = vec![KvKind::Full, state, state];
        let groups = kinds.iter().copied().map(group).collect();
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups };
        let mut limits = SchedulerLimits::cpu(40_000, VOCAB);
        (limits.tokens_per_step, limits.state_checkpoint_tokens) = (2_048, INTERVAL);
        limits.draft_tokens = drafts;
        let kv = KvConfig { state_slots, ..KvConfig::new(spec, 20_000, [1, 2]) };
        let device = HashModel::new(HashModelConfig {
            blocks: kv.blocks,
            block_tokens: BLOCK_TOKENS,
            vocab: VOCAB,
            drafts,
            slot_access: KvSlotAccess::ReadWrite,
            kinds,
            state_slots,
        });
        let scheduler =
            Scheduler::new(SchedulerConfig::new(limits, kv)).expect("a valid configuration");
        Self { scheduler, device, requests: 0 }
    }

    /// Runs one request to its end, and compares its output with that of the oracle.
    fn run(&mut self, prompt: &[Token], max_tokens: u32) -> StateServerResult {
        self.requests += 1;
        let submit = RequestSubmission {
            max_tokens,
            block_keys: self.scheduler.hasher().hash_prompt(prompt, None),
            id: RequestId(self.requests),
            tokens: prompt.to_vec(),
            sampling: SamplingParams::greedy(),
            first_masked_token: None,
            rng_key: 0,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra_keys: None,
            replica: None,
        };
        let mut inbox = vec![SchedulerEvent::Submit(Box::new(submit))];
        let mut result =
            StateServerResult { tokens: prompt.to_vec(), forks: Vec::new(), first_start: 0 };
        let mut effects = Vec::new();
        while !inbox.is_empty() {
            self.scheduler.tick(0, &mut inbox, &mut effects);
            inbox.clear();
            for effect in effects.drain(..) {
                match effect {
                    SchedulerEffect::SendBatch { replica, batch } => {
                        for row in &batch.rows {
                            if row.seq_init.is_some() {
                                result.first_start = row.start;
                            } else if row.state_slots.iter().any(|s| s.read != Some(s.write)) {
                                result.forks.push(row.start);
                            }
                        }
                        let output = self.device.run(&batch).expect("a valid batch");
                        inbox.push(SchedulerEvent::StepOutput { replica, output });
                    }
                    SchedulerEffect::TokenEvents(events) => {
                        result.tokens.extend(events.iter().flat_map(|event| &event.tokens));
                    }
                    _ => {}
                }
            }
        }
        self.scheduler.check();
        let sampler = HashSampler::new(VOCAB, SamplingParams::greedy(), 0, prompt.len() as u32);
        let output = &result.tokens[prompt.len()..];
        assert!(HashOracle::new(sampler, prompt).take(output.len()).eq(output.iter().copied()));
        result
    }

    /// Tokens of prefix hits that each KV group offered, gave and cut.
    fn group_hits(&self) -> Vec<[u64; 3]> {
        let stats = self.scheduler.stats(Replica(0));
        let groups = stats.kv_group_hits_total.iter();
        groups.map(|group| [group.offered, group.given, group.missed]).collect()
    }

    /// Number of checkpoints that no request references.
    fn checkpoints(&self) -> u32 {
        self.scheduler.kv(Replica(0)).states().counts(1).checkpoints
    }
}

fn prompt(seed: u32, len: u32) -> Vec<Token> {
    (0..len).map(|i| (seed * 7_919 + i * 31) % VOCAB).collect()
}

#[test]
fn prompts_make_checkpoints_at_rungs_and_at_their_end() {
    let mut server = StateServer::new(100);
    let result = server.run(&prompt(1, 2_500), 2);
    // The last block boundary of the prompt is 2,496.
    assert_eq!((result.first_start, result.forks), (0, vec![1_024, 2_048, 2_496]));
    assert_eq!(server.checkpoints(), 3);
    // The whole prompt is a hit, so that the second request makes no further checkpoint.
    let result = server.run(&prompt(1, 2_500), 2);
    assert_eq!((result.first_start, result.forks), (2_496, vec![]));
    assert_eq!(server.checkpoints(), 3);
}

#[test]
fn outputs_make_checkpoints_one_interval_apart() {
    let mut server = StateServer::new(100);
    let result = server.run(&prompt(1, 500), 2_200);
    assert_eq!(result.forks, [496, 496 + 1_024, 496 + 2 * 1_024]);
    // The last row would begin at such a position, but the request ends with it.
    let result = server.run(&prompt(2, 500), 496 + 1_024 - 500 + 2);
    assert_eq!(result.forks, [496]);
}

#[test]
fn conversations_hit_all_but_their_last_interval() {
    let mut server = StateServer::new(100);
    let mut tokens = prompt(2, 5_000);
    for turn in 0..5 {
        let result = server.run(&tokens, 1_500);
        let known = if turn == 0 { 0 } else { tokens.len() as u32 - 57 };
        assert!(result.first_start + INTERVAL + BLOCK_TOKENS > known, "turn {turn}");
        tokens = result.tokens;
        tokens.extend(prompt(3 + turn, 57));
    }
}

#[test]
fn shared_beginning_is_resumed_by_the_third_request() {
    let mut server = StateServer::new(100);
    let with_tail = |tail: u32| [prompt(2, 1_900), prompt(tail, 300)].concat();
    let starts = [5, 6, 7, 8].map(|tail| server.run(&with_tail(tail), 4).first_start);
    // The prompts part at 1,900. The second request finds the rung, and makes a checkpoint where they part.
    assert_eq!(starts, [0, 1_024, 1_888, 1_888]);
    // Blocks were cached up to 1,888 in three lookups; the states of the first of them only up to 1,024.
    let given = 1_024 + 2 * 1_888;
    let expected = [[3 * 1_888, given, 0], [given, given, 864], [given, given, 0]];
    assert_eq!(server.group_hits(), expected);
}

#[test]
fn few_slots_cost_checkpoints_but_no_request() {
    let mut server = StateServer::new(3);
    for (turn, hit) in [(0, 0), (1, 4_096)] {
        let result = server.run(&prompt(2, 4_100), 3_000);
        assert_eq!(result.tokens.len(), 7_100, "turn {turn}");
        assert!(result.first_start <= hit, "turn {turn} starts at {}", result.first_start);
        assert!(server.checkpoints() <= 3);
    }
}

#[test]
fn draft_tokens_do_not_move_checkpoints() {
    for drafts in [1, 3, 15] {
        let mut server = StateServer::with_drafts(100, drafts);
        let result = server.run(&prompt(1, 500), 2_200);
        assert_eq!(result.forks, [496, 496 + 1_024, 496 + 2 * 1_024], "{drafts} draft tokens");
        let next = [result.tokens, prompt(9, 40)].concat();
        assert_eq!(server.run(&next, 4).first_start, 496 + 2 * 1_024, "{drafts} draft tokens");
    }
}
