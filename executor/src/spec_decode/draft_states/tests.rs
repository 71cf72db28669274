//! Compares draft KV, stored hidden states and draft tokens with a reference, bit by bit.

use crate::executor::Executor;
use crate::spec_decode::{ProposerModel, ProposerTestState};
use crate::{ExecutorConfig, KvCacheDtype, KvCacheSize, ModelDtype};
use models::sharding::ParallelRanks;
use models::{AuxHiddenStateCollector, ForwardContext, KvGrouping, ModelConfig, kv_layout};
use ops::{DType, DeviceBatchMetadata, HostBatchMetadata, KvPool, Ops};
use protocol::{
    Batch, BatchRow, BlockId, BlockTableUpdate, DeviceKind, DraftAcceptanceRule, Epoch,
    ExecutorSettings, GraphCaptureConfig, ParallelConfig, Rank, RequestId, RowInput,
    SamplingParams, SequenceInit, SequenceSlot, SpeculativeConfig, SpeculativeMethod, StepId,
    StepLaunchMode, ThinVec, Token,
};
use std::path::{Path, PathBuf};

const BLOCK: usize = 16;
const BLOCKS: u32 = 64;
/// Layer index of the MTP module in a target model of three layers.
const MTP_LAYER: usize = 3;

/// Proposer under test: an MTP module with MLA, or an EAGLE-3 layer with GQA.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ProposerKind {
    Mtp,
    Eagle3,
}

const KINDS: [ProposerKind; 2] = [ProposerKind::Mtp, ProposerKind::Eagle3];

/// EAGLE-3 layer with a draft vocabulary of 48 of the target model's 64 ids.
const EAGLE: &str = r#"{
    "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 64, "draft_vocab_size": 48,
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512
}"#;

fn config(kind: ProposerKind) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 64,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "norm_topk_prob": true, "hidden_act": "silu", "num_nextn_predict_layers": 1
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    let settings = ExecutorSettings {
        model_dir: PathBuf::new(),
        draft_model_dir: (kind == ProposerKind::Eagle3).then(PathBuf::new),
        config_overrides: None,
        synth_seed: Some(7),
        device: DeviceKind::Cpu,
        gpus: Vec::new(),
        libraries: None,
        kernel_cache: None,
        dtype: ModelDtype::Float32,
        kv_cache_dtype: KvCacheDtype::Auto,
        threads: Some(1),
        block_tokens: BLOCK as u32,
        max_model_len: 256,
        kv_tokens_min: 256,
        max_num_seqs: 4,
        tokens_per_step: 256,
        kv_cache_size: KvCacheSize::Blocks(BLOCKS),
        memory_utilization: 0.9,
        graph_capture: GraphCaptureConfig::default(),
        speculative: Some(SpeculativeConfig {
            draft_tokens: 4,
            method: match kind {
                ProposerKind::Mtp => SpeculativeMethod::Mtp,
                ProposerKind::Eagle3 => SpeculativeMethod::Eagle3,
            },
            acceptance: DraftAcceptanceRule::Exact,
        }),
        max_logprobs: 0,
        profile_dir: None,
        epoch: Epoch(1),
        rank: Rank(0),
        parallel: ParallelConfig::default(),
        ranks_on_host: 1,
        expert_placement: None,
        one_shot_all_reduce: true,
        host_address: None,
        rendezvous: None,
    };
    let eagle = || ModelConfig::from_json(Path::new("config.json"), EAGLE).unwrap();
    let draft = (kind == ProposerKind::Eagle3).then(eagle);
    let environment = crate::DeviceEnvironment::default();
    ExecutorConfig { model, draft, manifest: 0, environment, settings }
}

fn executor(kind: ProposerKind) -> Executor {
    let mut executor = Executor::load(config(kind), &mut |_| {}).unwrap();
    executor.size_kv(BLOCKS, &mut |_| {}).unwrap();
    executor
}

fn tokens() -> Vec<Token> {
    (0..100).map(|i| (i * i * 7 + i * 5 + 3) % 64).collect()
}

/// A test request with fixed tokens (teacher forcing). Draft tokens are proposed and verified, but never
/// become tokens of the request.
struct TeacherForcedRequest {
    seq_slot: u32,
    table: Vec<BlockId>,
    needs_init: bool,
}

impl TeacherForcedRequest {
    fn new(seq_slot: u32, first_block: u32) -> Self {
        let table = (first_block..first_block + 8).map(|i| BlockId(i * 37 % BLOCKS)).collect();
        Self { seq_slot, table, needs_init: true }
    }

    /// Returns a row of `len` tokens from position `start` on. The row samples, so that draft tokens are
    /// verified.
    fn row(&mut self, tokens: &[Token], start: usize, len: usize, drafts: u8) -> BatchRow {
        let update =
            BlockTableUpdate { group: 0, first_entry: 0, blocks: self.table.clone().into() };
        let sampling = SamplingParams::greedy();
        let init = SequenceInit { sampling, rng_key: 0, prompt_len: 1, token_history: vec![] };
        let first = std::mem::take(&mut self.needs_init);
        BatchRow {
            request: RequestId(self.seq_slot.into()),
            epoch: 1,
            seq_slot: SequenceSlot(self.seq_slot),
            start: start as u32,
            len: len as u32,
            drafts,
            samples: true,
            masked: false,
            input: RowInput::Tokens(tokens[start..start + len].to_vec().into()),
            table_updates: if first { vec![update].into() } else { ThinVec::new() },
            state_slots: protocol::ThinVec::new(),
            next_token: None,
            seq_init: first.then(|| Box::new(init)),
        }
    }

    fn slot(&self, position: usize) -> usize {
        self.table[position / BLOCK].0 as usize * BLOCK + position % BLOCK
    }
}

fn step(executor: &mut Executor, id: &mut u64, rows: Vec<BatchRow>) -> Vec<u8> {
    *id += 1;
    let tokens = rows.iter().map(|row| row.len + u32::from(row.drafts)).sum();
    let (dispatch, epoch) = (StepLaunchMode::Eager { tokens }, Epoch(1));
    let batch =
        Batch { step: StepId(*id), epoch, dispatch, moe_tokens: tokens, draft_rows: 0, rows };
    let output = executor.step(&batch).unwrap();
    output.rows.iter().map(|row| row.drafted).collect()
}

/// Returns the draft KV that the executor has written for a request, except for its first token, and the
/// block-boundary states (hidden state of each block's last token) of its blocks.
fn written_kv(
    executor: &Executor,
    request: &TeacherForcedRequest,
    positions: usize,
) -> Vec<Vec<f32>> {
    let ProposerTestState { kv, draft_buffers, context } = executor.draft_state();
    let row = |p| {
        if matches!(context.proposer, Some(ProposerModel::Mtp(_))) {
            return kv.read_mla_row(&context.ops, MTP_LAYER, request.slot(p)).unwrap();
        }
        let head = |head| kv.read_slot(&context.ops, [0, 0], request.slot(p), head).unwrap();
        let [a, b] = [0, 1].map(head);
        [a.0, a.1, b.0, b.1].concat()
    };
    let boundary_states = draft_buffers.read_boundary_states(&context.ops).unwrap();
    let width = boundary_states.len() / BLOCKS as usize;
    let boundary_state =
        |b: usize| boundary_states[request.table[b].0 as usize * width..][..width].to_vec();
    (1..positions).map(row).chain((0..positions / BLOCK).map(boundary_state)).collect()
}

#[test]
fn mtp_kv_is_batch_invariant() {
    KINDS.into_iter().for_each(check_kv_is_batch_invariant);
}

fn check_kv_is_batch_invariant(kind: ProposerKind) {
    let tokens = tokens();
    let mut executor = executor(kind);
    let mut id = 0;
    let mut uninterrupted = TeacherForcedRequest::new(0, 0);
    step(&mut executor, &mut id, vec![uninterrupted.row(&tokens, 0, 100, 0)]);
    let expected = written_kv(&executor, &uninterrupted, 100);
    assert!(expected.iter().all(|row| row.iter().any(|x| *x != 0.0)));
    for chunk in [1, 7, 16, 33] {
        let mut request = TeacherForcedRequest::new(1, 8);
        for start in (0..100).step_by(chunk) {
            let row = request.row(&tokens, start, chunk.min(100 - start), 0);
            step(&mut executor, &mut id, vec![row]);
        }
        assert!(written_kv(&executor, &request, 100) == expected, "chunks of {chunk}");
    }
    // Forward the last token of each row twice more, as the scheduler does if a grammar bitmask is overdue.
    let mut overdue = TeacherForcedRequest::new(1, 8);
    for (start, len) in [(0, 1), (1, 1), (2, 14), (16, 1), (17, 15), (32, 30), (62, 38)] {
        for (start, len) in [(start, len), (start + len - 1, 1), (start + len - 1, 1)] {
            step(&mut executor, &mut id, vec![overdue.row(&tokens, start, len, 0)]);
        }
    }
    assert!(written_kv(&executor, &overdue, 100) == expected, "recomputed tokens");
    // A request starts after a prefix hit on three blocks, which another request (`uninterrupted`) has
    // written.
    let mut hit = TeacherForcedRequest::new(2, 16);
    hit.table[..3].copy_from_slice(&uninterrupted.table[..3]);
    step(&mut executor, &mut id, vec![hit.row(&tokens, 48, 30, 0)]);
    step(&mut executor, &mut id, vec![hit.row(&tokens, 78, 22, 0)]);
    assert!(written_kv(&executor, &hit, 100) == expected, "after a prefix hit");
    // Another request overwrites the blocks of a request; then the request is recomputed in the same blocks.
    let others: Vec<Token> = tokens.iter().rev().copied().collect();
    let mut other = TeacherForcedRequest::new(3, 8);
    step(&mut executor, &mut id, vec![other.row(&others, 0, 100, 0)]);
    assert!(written_kv(&executor, &other, 100) != expected);
    let mut recomputed = TeacherForcedRequest::new(1, 8);
    step(&mut executor, &mut id, vec![recomputed.row(&tokens, 0, 64, 0)]);
    // Decode token by token, with draft tokens after each token, nearly all of which are rejected.
    for start in 64..100 {
        let drafted = step(&mut executor, &mut id, vec![recomputed.row(&tokens, start, 1, 4)]);
        assert_eq!(drafted, [4], "at {start}");
    }
    assert!(written_kv(&executor, &recomputed, 100) == expected, "with drafts");
}

/// Returns the draft tokens that the last step proposed for a row.
fn proposed_drafts(executor: &Executor, row: usize) -> Vec<Token> {
    let ProposerTestState { draft_buffers, context, .. } = executor.draft_state();
    let drafts = draft_buffers.read_drafts(&context.ops).unwrap();
    drafts.chunks(draft_buffers.rows()).map(|of_pass| of_pass[row]).collect()
}

#[test]
fn mtp_kv_is_exact_after_accepted_drafts() {
    KINDS.into_iter().for_each(check_kv_after_accepted_drafts);
}

fn check_kv_after_accepted_drafts(kind: ProposerKind) {
    let mut executor = executor(kind);
    let (mut id, mut tokens) = (0, tokens());
    tokens.truncate(40);
    let mut request = TeacherForcedRequest::new(0, 0);
    step(&mut executor, &mut id, vec![request.row(&tokens, 0, 39, 0)]);
    // The number of accepted draft tokens varies from 0 to 4, across several block boundaries.
    for accepted in (0..=4).cycle().take(20) {
        let rows = vec![request.row(&tokens, tokens.len() - 1, 1, 4)];
        assert_eq!(step(&mut executor, &mut id, rows), [4]);
        tokens.extend(&proposed_drafts(&executor, 0)[..accepted]);
        tokens.push((tokens.len() as Token * 11 + 5) % 64);
    }
    let last = tokens.len() - 1;
    step(&mut executor, &mut id, vec![request.row(&tokens, last, 1, 0)]);
    let mut uninterrupted = TeacherForcedRequest::new(1, 8);
    step(&mut executor, &mut id, vec![uninterrupted.row(&tokens, 0, tokens.len(), 0)]);
    assert!(
        written_kv(&executor, &request, tokens.len())
            == written_kv(&executor, &uninterrupted, tokens.len())
    );
}

/// Returns a batch of one sequence with tokens from position `start` on. Its blocks are the first blocks of a
/// separate pool, in order.
fn view(ops: &Ops, start: usize, len: usize) -> DeviceBatchMetadata {
    let inputs = HostBatchMetadata {
        positions: (start..start + len).map(|p| p as i32).collect(),
        slots: (start..start + len).map(|p| p as i64).collect(),
        cu_q: vec![0, len as i32],
        context_lens: vec![(start + len) as i32],
        block_tables: (0..8).collect(),
        further_groups: Vec::new(),
        state_slots: Vec::new(),
    };
    DeviceBatchMetadata::new(ops, &inputs).unwrap()
}

/// Computes reference draft tokens after the token at index `at`, in separate KV pools: runs one pass over
/// the whole sequence, then one pass per draft token.
fn reference_drafts(
    executor: &Executor,
    kind: ProposerKind,
    tokens: &[Token],
    at: usize,
) -> Vec<Token> {
    let context = executor.draft_state().context;
    let ops = &context.ops;
    let pool = |model: &ModelConfig| {
        let (order, ranks) = (ops.device().kv_order(), ParallelRanks::SINGLE);
        let grouping = KvGrouping::single(model);
        let layout = kv_layout(model, &grouping, DType::F32, 8, BLOCK, order, &ranks).unwrap();
        KvPool::new(ops, layout).unwrap()
    };
    let config = config(kind);
    let kv = pool(&ModelConfig { load_mtp: kind == ProposerKind::Mtp, ..config.model });
    let draft_kv = config.draft.as_ref().map(pool);
    let draft_kv = draft_kv.as_ref().unwrap_or(&kv);
    let ids =
        |ids: &[Token]| ops.ids(&ids.iter().map(|&id| id as i32).collect::<Vec<_>>()).unwrap();
    let batch = view(ops, 0, at);
    let aux = context.proposer.as_ref().and_then(ProposerModel::aux_hidden_states);
    let f =
        ForwardContext { aux_hidden_states: aux.as_ref(), ..context.forward_context(&kv, &batch) };
    let states = context.model.forward(&f, &ids(&tokens[..at])).unwrap();
    let states =
        ops.read_f32(&aux.and_then(AuxHiddenStateCollector::states).unwrap_or(states)).unwrap();
    let width = states.len() / at;
    let (mut start, mut previous_states, mut next_tokens) = (1, states, tokens[1..=at].to_vec());
    let mut drafts = Vec::new();
    for _ in 0..4 {
        let batch = view(ops, start, next_tokens.len());
        let f = context.forward_context(draft_kv, &batch);
        let states =
            ops.floats(&previous_states, ops.dtype(), &[next_tokens.len(), width]).unwrap();
        let (model, ids) = (context.model.as_ref(), ids(&next_tokens));
        let (states, logits) = match context.proposer.as_ref().unwrap() {
            ProposerModel::Eagle3(eagle) => {
                let output = eagle.draft(&f, model, &ids, states).unwrap();
                let logits = eagle.logits(&f, &output.hidden).unwrap();
                (output.next_hidden.unwrap(), logits)
            }
            ProposerModel::Mtp(module) => {
                let hidden = module.forward(&f, &ids, &states).unwrap();
                let logits = model.logits(&f, &hidden).unwrap();
                (hidden, logits)
            }
            ProposerModel::DraftModel(_) => unreachable!("not under test"),
        };
        start += next_tokens.len();
        let all = ops.read_f32(&logits).unwrap();
        let best = argmax(&all[all.len() - logits.cols()..]);
        drafts.push(if kind == ProposerKind::Eagle3 { best * 64 / 48 } else { best });
        let states = ops.read_f32(&states).unwrap();
        previous_states = states[states.len() - width..].to_vec();
        next_tokens = vec![drafts[drafts.len() - 1]];
    }
    drafts
}

/// Returns the lowest id with the largest logit.
fn argmax(logits: &[f32]) -> Token {
    let larger = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, larger) as Token
}

#[test]
fn drafts_match_the_reference() {
    KINDS.into_iter().for_each(check_drafts_match_reference);
}

fn check_drafts_match_reference(kind: ProposerKind) {
    let tokens = tokens();
    let mut executor = executor(kind);
    let mut id = 0;
    for at in [1, 2, 15, 16, 17, 47, 70] {
        let mut request = TeacherForcedRequest::new(0, 0);
        step(&mut executor, &mut id, vec![request.row(&tokens, 0, at, 0)]);
        let row = request.row(&tokens, at, 1, 4);
        assert_eq!(step(&mut executor, &mut id, vec![row]), [4]);
        let expected = reference_drafts(&executor, kind, &tokens, at);
        assert_eq!(proposed_drafts(&executor, 0), expected, "after token {at}");
    }
}

/// A row is rejected if the hidden state of the token before it is not stored.
#[test]
fn row_without_preceding_state_is_rejected() {
    let mut executor = executor(ProposerKind::Mtp);
    let row = TeacherForcedRequest::new(0, 0).row(&tokens(), 17, 5, 0);
    let (step, dispatch) = (StepId(1), StepLaunchMode::Eager { tokens: 5 });
    let batch =
        Batch { step, epoch: Epoch(1), dispatch, moe_tokens: 5, draft_rows: 0, rows: vec![row] };
    let error = executor.step(&batch).unwrap_err().to_string();
    assert!(error.contains("position 17"), "{error}");
}
