//! Memory and prefix hits of models with sliding windows: block counts of long requests, hits of conversations and
//! of prompts that share their beginning. The tokens are those of the simulated device.

use crate::hash_model::{HashModel, HashModelConfig, KvSlotAccess};
use kvcache::KvConfig;
use protocol::{KvGroup, KvKind, KvSpec, Replica, RequestId, SamplingParams, Token};
use scheduler::{
    RequestSubmission, Scheduler, SchedulerConfig, SchedulerEffect, SchedulerEvent, SchedulerLimits,
};

const BLOCK_TOKENS: u32 = 16;
const VOCAB: Token = 50_000;

/// A scheduler and a simulated device that completes every step immediately.
struct WindowServer {
    scheduler: Scheduler,
    device: HashModel,
    requests: u64,
    /// Largest number of blocks in use after a step that sampled.
    blocks_max: u32,
}

/// Result of one request.
struct FinishedRequest {
    /// Prompt and output.
    tokens: Vec<Token>,
    /// Position at which the first row started: the length of the prefix hit.
    first_start: u32,
}

impl WindowServer {
    fn new(kinds: &[KvKind], blocks: u32, max_model_len: u32) -> Self {
        let group = |&kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: kinds.iter().map(group).collect() };
        let mut limits = SchedulerLimits::cpu(max_model_len, VOCAB);
        limits.tokens_per_step = 2048;
        let config = SchedulerConfig::new(limits, KvConfig::new(spec, blocks, [1, 2]));
        let device = HashModel::new(HashModelConfig {
            blocks,
            block_tokens: BLOCK_TOKENS,
            vocab: VOCAB,
            drafts: 0,
            slot_access: KvSlotAccess::ReadWrite,
            kinds: kinds.to_vec(),
            state_slots: 0,
        });
        let scheduler = Scheduler::new(config).expect("a valid configuration");
        Self { scheduler, device, requests: 0, blocks_max: 0 }
    }

    /// Runs one request to its end.
    fn run(&mut self, prompt: &[Token], max_tokens: u32) -> FinishedRequest {
        self.requests += 1;
        let block_keys = self.scheduler.hasher().hash_prompt(prompt, None);
        let mut inbox = vec![SchedulerEvent::Submit(Box::new(RequestSubmission {
            id: RequestId(self.requests),
            tokens: prompt.to_vec(),
            max_tokens,
            sampling: SamplingParams::greedy(),
            first_masked_token: None,
            rng_key: 0,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            priority: 0,
            extra_keys: None,
            replica: None,
            block_keys,
        }))];
        let mut finished = FinishedRequest { tokens: prompt.to_vec(), first_start: 0 };
        let mut effects = Vec::new();
        while !inbox.is_empty() {
            self.scheduler.tick(0, &mut inbox, &mut effects);
            inbox.clear();
            for effect in effects.drain(..) {
                match effect {
                    SchedulerEffect::SendBatch { replica, batch } => {
                        for row in batch.rows.iter().filter(|row| row.seq_init.is_some()) {
                            finished.first_start = row.start;
                        }
                        if batch.rows.iter().any(|row| row.samples) {
                            let in_use = self.scheduler.kv(Replica(0)).counts().in_use;
                            self.blocks_max = self.blocks_max.max(in_use);
                        }
                        let output = self.device.run(&batch).expect("a valid batch");
                        inbox.push(SchedulerEvent::StepOutput { replica, output });
                    }
                    SchedulerEffect::TokenEvents(events) => {
                        finished.tokens.extend(events.iter().flat_map(|event| &event.tokens));
                    }
                    _ => {}
                }
            }
        }
        self.scheduler.check();
        finished
    }

    /// Tokens of prefix hits that each KV group offered, gave and cut.
    fn group_hits(&self) -> Vec<[u64; 3]> {
        let stats = self.scheduler.stats(Replica(0));
        let groups = stats.kv_group_hits_total.iter();
        groups.map(|group| [group.offered, group.given, group.missed]).collect()
    }
}

fn prompt(seed: u32, len: u32) -> Vec<Token> {
    (0..len).map(|i| (seed * 7_919 + i * 31) % VOCAB).collect()
}

/// Returns the number of blocks that a request of 32,768 tokens uses while it decodes, with one group that keeps all
/// positions and `windows` window groups.
fn blocks_at_32k(windows: usize, tokens: u32) -> u32 {
    let window = KvKind::Window { tokens };
    let kinds: Vec<_> = [KvKind::Full].into_iter().chain(vec![window; windows]).collect();
    let mut server = WindowServer::new(&kinds, 20_000, 40_000);
    server.run(&prompt(1, 32_752), 1);
    // The prompt is a prefix hit, so that the next request computes its last tokens only.
    server.blocks_max = 0;
    let finished = server.run(&prompt(1, 32_752), 16);
    assert_eq!((finished.tokens.len(), finished.first_start), (32_768, 32_736));
    server.blocks_max
}

#[test]
fn windows_bound_the_memory_of_long_requests() {
    // gpt-oss-20b: 12 layers of each kind, windows of 128 tokens; 50.2 % of 2 times 2,048 blocks.
    assert_eq!(blocks_at_32k(1, 128), 2_057);
    // Gemma 3 27B: 10 layers with the whole context, 52 with a window of 1,024 tokens in groups of 10; 19.2 % of 6.2
    // times 2,048 blocks.
    assert_eq!(blocks_at_32k(6, 1024), 2_438);
}

#[test]
fn conversations_hit_all_but_their_last_block() {
    let kinds = [KvKind::Full, KvKind::Window { tokens: 300 }, KvKind::Window { tokens: 40 }];
    let mut server = WindowServer::new(&kinds, 20_000, 40_000);
    let mut tokens = prompt(2, 5_000);
    for turn in 0..4 {
        let finished = server.run(&tokens, 101);
        let computed = if turn == 0 { 0 } else { tokens.len() as u32 - 57 };
        assert!(finished.first_start + BLOCK_TOKENS > computed.saturating_sub(1), "turn {turn}");
        tokens = finished.tokens;
        tokens.extend(prompt(3 + turn, 57));
    }
}

#[test]
fn third_prompt_with_a_shared_beginning_hits_it() {
    let kinds = [KvKind::Full, KvKind::Window { tokens: 300 }];
    let mut server = WindowServer::new(&kinds, 500, 5_600);
    let with_tail = |tail: u32| [prompt(2, 4_000), prompt(tail, 1_500)].concat();
    let mut starts = [5, 6, 7, 8].map(|tail| server.run(&with_tail(tail), 4).first_start).to_vec();
    server.run(&prompt(9, 700), 4);
    starts.push(server.run(&with_tail(10), 4).first_start);
    // The pool is too small for the windows of all positions: the last ones that the first request released are
    // evicted. The second request keeps the window at which its own hit was cut, and later requests keep the window
    // of their hits, also while other requests evict blocks.
    assert!((1..4_000).contains(&starts[1]), "{starts:?}");
    assert_eq!((starts[0], &starts[2..]), (0, &[4_000; 3][..]));
    // All lookups but the first found 4,000 tokens in the group that keeps all positions.
    let given = u64::from(starts.iter().sum::<u32>());
    let cut = 16_000 - given;
    assert_eq!(server.group_hits(), [[16_000, given, 0], [given, given, cut]]);
}
