//! Test scheduler: it tracks requests, allocates blocks, and builds batches in the format of the real
//! scheduler.

use crate::deadlines::{DeadlineBarrier, THREAD_TIMEOUT};
use executor::{
    DeviceEnvironment, Executor, ExecutorConfig, ExecutorError, KvCacheSize, ModelDtype,
    RankRendezvous, SubmittedStep, TokenBitmaskSource,
};
use models::ModelConfig;
use protocol::{
    Batch, BatchRow, BitmaskRow, BlockId, BlockTableUpdate, DraftAcceptanceRule, Epoch,
    ExecutorSettings, ExpertPlacement, KvKind, ParallelConfig, Rank, RequestId, RowError, RowInput,
    RowOutput, SamplingParams, SequenceInit, SequenceSlot, SpeculativeConfig, SpeculativeMethod,
    StateSlot, StateSlotAccess, StepDrafts, StepId, StepLaunchMode, StepOutput, Token,
    TokenBitmask, TokenLogprobs,
};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

pub(crate) const BLOCK: usize = 16;
pub(crate) const VOCAB: u32 = 384;
const BLOCKS: u32 = 512;

/// Returns a dense model of 3 layers with synthetic weights.
pub(crate) fn config(dtype: ModelDtype, threads: u32) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": true, "attention_bias": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    let (settings, environment) = (settings(dtype, threads), DeviceEnvironment::default());
    ExecutorConfig { model, draft: None, manifest: 0, environment, settings }
}

/// Returns an MoE model with the same sizes as the model of `config`, with 8 experts in all layers except the
/// first.
pub(crate) fn moe_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": true, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        "tie_word_embeddings": false, "attention_bias": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Returns a model with sandwich norms, in which every second layer has a sliding window of 10 tokens, which is
/// shorter than a KV block.
pub(crate) fn window_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160,
        "max_position_embeddings": 512, "sliding_window": 10, "sliding_window_pattern": 2,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Returns a model whose layers without a window have KV heads of half the size of the others, and whose last layer reads
/// the keys and values of an earlier layer.
pub(crate) fn two_head_sizes_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 32, "intermediate_size": 160,
        "attention_k_eq_v": true, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 512, "sliding_window": 10, "layer_types": ["sliding_attention",
        "full_attention", "sliding_attention", "full_attention", "full_attention"],
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Returns a model with gated delta nets in the first and the last layer.
pub(crate) fn recurrent_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

/// Adds speculative decoding by the MTP module of the model of `recurrent_model`, with up to `drafts` draft tokens per row.
pub(crate) fn recurrent_mtp_drafting(dtype: ModelDtype, drafts: u8) -> ExecutorConfig {
    with_mtp(recurrent_model(dtype), drafts)
}

/// Adds speculative decoding by the model's own MTP module, with up to `drafts` draft tokens per row.
pub(crate) fn with_mtp(mut config: ExecutorConfig, drafts: u8) -> ExecutorConfig {
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method: SpeculativeMethod::Mtp,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

/// Returns an MLA model with 8 experts in all layers except the first.
pub(crate) fn mla_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "norm_topk_prob": true, "hidden_act": "silu", "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 1) }
}

/// Adds speculative decoding by n-gram lookup, with up to `drafts` draft tokens per row.
pub(crate) fn speculating(mut config: ExecutorConfig, drafts: u8) -> ExecutorConfig {
    let method = SpeculativeMethod::Ngram { lookup_min: 1, lookup_max: 3 };
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

/// Returns the MLA model with an MTP module that proposes up to `drafts` draft tokens.
pub(crate) fn mtp_drafting(dtype: ModelDtype, drafts: u8) -> ExecutorConfig {
    let mut config = mla_model(dtype);
    config.model.mtp_layers = 1;
    config.settings.speculative = Some(SpeculativeConfig {
        draft_tokens: drafts,
        method: SpeculativeMethod::Mtp,
        acceptance: DraftAcceptanceRule::Exact,
    });
    config
}

/// Adds speculative decoding by a draft model, with up to `drafts` draft tokens per row.
pub(crate) fn model_drafting(
    mut config: ExecutorConfig,
    draft: ModelConfig,
    drafts: u8,
) -> ExecutorConfig {
    let (method, acceptance) = (SpeculativeMethod::DraftModel, DraftAcceptanceRule::Exact);
    config.settings.speculative =
        Some(SpeculativeConfig { draft_tokens: drafts, method, acceptance });
    (config.settings.draft_model_dir, config.draft) = (Some(PathBuf::new()), Some(draft));
    config
}

/// Returns an EAGLE-3 layer with a draft vocabulary of 96 of the target model's ids.
pub(crate) fn eagle() -> ModelConfig {
    let text = r#"{
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 384,
        "draft_vocab_size": 96, "target_hidden_size": 64, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false,
        "eagle_config": {"use_aux_hidden_state": true}, "torch_dtype": "bfloat16"
    }"#;
    ModelConfig::from_json(Path::new("config.json"), text).unwrap()
}

/// Adds speculative decoding by an EAGLE-3 layer, with up to `drafts` draft tokens per row.
pub(crate) fn eagle_drafting(
    config: ExecutorConfig,
    eagle: ModelConfig,
    drafts: u8,
) -> ExecutorConfig {
    let mut config = model_drafting(config, eagle, drafts);
    let (method, acceptance) = (SpeculativeMethod::Eagle3, DraftAcceptanceRule::Exact);
    config.settings.speculative =
        Some(SpeculativeConfig { draft_tokens: drafts, method, acceptance });
    config
}

/// Splits a model over `tp_size` ranks, with expert parallelism if `experts`.
pub(crate) fn shared(mut config: ExecutorConfig, tp_size: u16, experts: bool) -> ExecutorConfig {
    config.settings.parallel = ParallelConfig { tp_size, dp_size: 1, expert_parallel: experts };
    config
}

/// Adds an expert placement (EPLB map) in which experts are out of order and some are replicated on both
/// ranks.
pub(crate) fn with_expert_placement(mut config: ExecutorConfig) -> ExecutorConfig {
    let layers = vec![
        Vec::new(), // Layer 0 is dense.
        vec![3, 0, 1, 7, 2, 5, 4, 6, 3, 0, 1, 7],
        vec![6, 0, 1, 7, 4, 5, 3, 2],
    ];
    config.settings.expert_placement = Some(ExpertPlacement { layers });
    config
}

/// Adds an expert placement that includes the layer of the MTP module.
pub(crate) fn with_all_experts_placed(config: ExecutorConfig) -> ExecutorConfig {
    let mut config = with_expert_placement(config);
    let layers = &mut config.settings.expert_placement.as_mut().unwrap().layers;
    layers.push(vec![5, 0, 1, 6, 2, 7, 4, 3, 0, 5]);
    config
}

fn settings(dtype: ModelDtype, threads: u32) -> ExecutorSettings {
    ExecutorSettings {
        model_dir: PathBuf::new(),
        draft_model_dir: None,
        config_overrides: None,
        synth_seed: Some(5),
        device: protocol::DeviceKind::Cpu,
        gpus: Vec::new(),
        libraries: None,
        kernel_cache: None,
        dtype,
        kv_cache_dtype: executor::KvCacheDtype::Auto,
        threads: Some(threads),
        block_tokens: BLOCK as u32,
        max_model_len: 256,
        kv_tokens_min: 256,
        max_num_seqs: 40,
        tokens_per_step: 1024,
        kv_cache_size: KvCacheSize::Blocks(BLOCKS),
        memory_utilization: 0.9,
        graph_capture: protocol::GraphCaptureConfig::default(),
        speculative: None,
        max_logprobs: u32::MAX,
        profile_dir: None,
        epoch: Epoch(1),
        rank: Rank(0),
        parallel: ParallelConfig::default(),
        ranks_on_host: 1,
        expert_placement: None,
        one_shot_all_reduce: true,
        rendezvous: None,
    }
}

/// Next tokens of a request that a step computes.
pub(crate) struct HarnessRequestChunk<'a> {
    pub(crate) request: &'a mut HarnessRequest,
    /// Number of tokens.
    pub(crate) len: usize,
}

/// A request of the test scheduler, with the state that a scheduler tracks.
pub(crate) struct HarnessRequest {
    pub(crate) tokens: Vec<Token>,
    pub(crate) prompt_len: usize,
    pub(crate) computed: usize,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) prompt_logprobs: Vec<TokenLogprobs>,
    /// Result of the pooling method, once the whole prompt is computed.
    pub(crate) pooled: Vec<f32>,
    pub(crate) table: RequestTables,
    /// Whether rows that sample have a grammar bitmask. The test bitmask depends only on the newest token.
    pub(crate) masked: bool,
    /// Maximum number of draft tokens per row.
    pub(crate) drafts: u8,
    /// Number of draft tokens proposed so far.
    pub(crate) drafted: usize,
    /// State slot that the next row reads instead of the request's own one: a checkpoint.
    pub(crate) checkpoint: Option<u32>,
    /// Whether the spare state slot has the state, which rows with a grammar bitmask write if their own slot has it.
    in_spare: bool,
    /// Number of draft tokens accepted so far.
    pub(crate) accepted: usize,
    sampling: SamplingParams,
    key: u64,
    id: u64,
    epoch: u32,
    seq_slot: u32,
    needs_init: bool,
    sampled_at: Option<StepId>,
    /// Totals over the request's rows in flight: number of tokens (without draft tokens), number of rows that
    /// sample, number of draft tokens.
    in_flight: [usize; 3],
}

impl HarnessRequest {
    /// Returns the next `len` tokens of the request as part of a step.
    pub(crate) const fn chunk(&mut self, len: usize) -> HarnessRequestChunk<'_> {
        HarnessRequestChunk { request: self, len }
    }

    /// Creates a request with a prompt that is derived from `id`.
    pub(crate) fn new(id: u64, prompt_len: usize, sampling: SamplingParams) -> Self {
        let token = |i| ((id * 131 + i * i * 7 + i * 29 + 3) % u64::from(VOCAB)) as Token;
        Self {
            tokens: (0..prompt_len as u64).map(token).collect(),
            prompt_len,
            computed: 0,
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            pooled: Vec::new(),
            table: RequestTables::default(),
            masked: false,
            drafts: 0,
            drafted: 0,
            checkpoint: None,
            in_spare: false,
            accepted: 0,
            sampling,
            key: id.wrapping_mul(0x9E37_79B9_7F4A_7C15),
            id,
            epoch: 1,
            seq_slot: (id % 40) as u32,
            needs_init: true,
            sampled_at: None,
            in_flight: [0; 3],
        }
    }

    pub(crate) fn in_slot(mut self, seq_slot: u32) -> Self {
        self.seq_slot = seq_slot;
        self
    }

    /// Returns the generated tokens and their log-probabilities.
    pub(crate) fn output(&self) -> (Vec<Token>, Vec<TokenLogprobs>) {
        (self.tokens[self.prompt_len..].to_vec(), self.logprobs.clone())
    }

    /// Preempts the request: assigns sequence slot `seq_slot`, discards the computed positions, and returns
    /// the blocks to free.
    pub(crate) fn preempt(&mut self, seq_slot: u32) -> RequestTables {
        self.epoch += 1;
        self.seq_slot = seq_slot;
        self.needs_init = true;
        (self.computed, self.sampled_at, self.in_flight) = (0, None, [0; 3]);
        std::mem::take(&mut self.table)
    }

    /// Adds a submitted row to the totals in `in_flight`; if `over` is true, subtracts a finished row
    /// instead.
    fn set_in_flight(&mut self, row: &BatchRow, over: bool) {
        let of_row = [row.len as usize, row.samples.into(), row.drafts.into()];
        for (sum, of_row) in self.in_flight.iter_mut().zip(of_row) {
            *sum = if over { *sum - of_row } else { *sum + of_row };
        }
    }

    /// Checks the output of a row, and adds its tokens and log-probabilities to the request.
    pub(crate) fn apply_output(&mut self, row: &BatchRow, result: &RowOutput) {
        assert_eq!(result.error, None);
        let accepted = usize::from(result.accepted);
        assert_eq!(result.sampled_tokens.len(), usize::from(row.samples) + accepted);
        self.in_spare ^= row.masked;
        if row.masked {
            let before = self.tokens.last().into_iter().chain(&result.sampled_tokens[..]);
            let mut pairs = before.zip(&result.sampled_tokens[..]);
            assert!(pairs.all(|(&last, &id)| allows(last, id)), "a token is not allowed");
        }
        assert!(result.accepted <= result.drafted && result.drafted <= row.drafts);
        self.computed += row.len as usize + accepted;
        self.drafted += usize::from(result.drafted);
        self.accepted += accepted;
        self.tokens.extend(&result.sampled_tokens);
        self.logprobs.extend(result.logprobs.clone());
        if let Some(prompt) = &result.prompt {
            self.prompt_logprobs.extend(prompt.logprobs.clone());
            self.pooled.extend(&prompt.pooled);
        }
    }

    /// Number of known tokens, plus the minimum number of tokens that the rows in flight will sample.
    fn expected_len(&self) -> usize {
        self.tokens.len() + self.in_flight[1]
    }

    /// Start position of the next row if no draft token in flight is accepted.
    fn start(&self) -> usize {
        self.computed + self.in_flight[0]
    }

    pub(crate) fn remaining(&self) -> usize {
        self.expected_len() - self.start()
    }
}

/// Whether the grammar bitmask after the token `last` allows `id`. It allows half of the ids.
fn allows(last: Token, id: Token) -> bool {
    (id.wrapping_mul(2_654_435_761) ^ last.wrapping_mul(40_503)).count_ones().is_multiple_of(2)
}

/// Returns the grammar bitmask after the token `last`.
fn bitmask_after(last: Token) -> TokenBitmask {
    let mut words = vec![0; VOCAB as usize / 32];
    for id in (0..VOCAB).filter(|&id| allows(last, id)) {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words.into()
}

/// Row of a step that needs grammar bitmasks.
#[derive(Clone, Copy)]
struct ConstrainedRow {
    row: u32,
    request: RequestId,
    /// Newest token of the request, from which its first bitmask is computed.
    last: Token,
    awaits_drafts: bool,
}

/// Bitmask source of a test step: computes each bitmask from the newest token or draft token.
#[derive(Clone)]
struct ScriptedBitmaskSource {
    step: StepId,
    rows: Vec<ConstrainedRow>,
    drafts: Option<StepDrafts>,
    /// Maximum number of bitmasks of a row; 0 = all bitmasks are overdue.
    masks_max: usize,
}

impl ScriptedBitmaskSource {
    /// Returns the bitmasks of a row: for its first sample position, and for the position after each allowed
    /// draft token.
    fn of(&self, row: ConstrainedRow) -> BitmaskRow {
        let mut bitmasks = vec![bitmask_after(row.last)];
        let reported = self.drafts.iter().flat_map(|drafts| &drafts.rows);
        let mut reported = reported.filter(|drafts| drafts.request == row.request);
        let drafts = reported.next();
        assert!(drafts.is_some() == row.awaits_drafts && reported.next().is_none());
        let mut last = row.last;
        for &draft in drafts.iter().flat_map(|drafts| &drafts.tokens[..]) {
            if !allows(last, draft) {
                break;
            }
            bitmasks.push(bitmask_after(draft));
            last = draft;
        }
        bitmasks.truncate(self.masks_max);
        BitmaskRow { row: row.row, bitmasks }
    }
}

impl TokenBitmaskSource for ScriptedBitmaskSource {
    fn report_drafts(&mut self, drafts: StepDrafts) -> Result<(), ExecutorError> {
        assert_eq!(drafts.step, self.step);
        assert!(self.drafts.replace(drafts).is_none(), "one report per step");
        Ok(())
    }

    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        assert_eq!((self.step, self.rows.len()), (step, rows));
        Ok(self.rows.iter().map(|&row| self.of(row)).collect())
    }
}

/// Sets the configuration of one rank. Emulated ranks are threads of this process; each has its own device of
/// the emulator library.
fn take_rank(config: &mut ExecutorConfig, rank: Rank) {
    config.settings.rank = rank;
    let shared = config.settings.parallel.world_size() > 1;
    if let Some(libraries) = config.settings.libraries.as_mut().filter(|_| shared) {
        libraries.collectives = Some(libraries.driver.clone());
    }
}

/// A rank of a replica other than the first rank. It runs the same batches as the first rank, on its own
/// thread.
struct FollowerRank {
    batches: Sender<(Batch, ScriptedBitmaskSource)>,
    outputs: Receiver<StepOutput>,
}

impl FollowerRank {
    fn start(mut config: ExecutorConfig, rank: Rank, blocks: u32) -> Self {
        take_rank(&mut config, rank);
        let (batches, todo) = channel::<(Batch, ScriptedBitmaskSource)>();
        let (done, outputs) = channel();
        thread::spawn(move || {
            let mut executor = Executor::load(config, &mut |_| {}).unwrap();
            executor.size_kv(blocks, &mut |_| {}).unwrap();
            for (batch, mut masks) in todo {
                let submitted = executor.submit_with_bitmasks(&batch, &mut masks).unwrap();
                if done.send(submitted.finish().unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { batches, outputs }
    }
}

/// Group of replicas that run in lockstep. In each step, the replicas agree on the maximum numbers of rows
/// and tokens.
pub(crate) struct LockstepGroup {
    parallel: ParallelConfig,
    pub(crate) rendezvous: RankRendezvous,
    barrier: DeadlineBarrier,
    max: AtomicU32,
}

impl LockstepGroup {
    /// Creates the group for the replicas of a configuration.
    pub(crate) fn new(config: &ExecutorConfig) -> Self {
        let parallel = config.settings.parallel;
        let (rendezvous, barrier) =
            (RankRendezvous::new(parallel).unwrap(), DeadlineBarrier::new(parallel.dp_size.into()));
        Self { parallel, rendezvous, barrier, max: AtomicU32::new(0) }
    }

    /// Returns the maximum of the values of all replicas, at least 1. Blocks until all replicas have called
    /// it.
    pub(crate) fn agree(&self, value: u32) -> u32 {
        self.agree_from(value).max(1) // The scheduler never sends a step without tokens in any replica; this harness does.
    }

    /// Returns the maximum of the values of all replicas, possibly 0. Blocks until all replicas have called
    /// it.
    fn agree_from(&self, value: u32) -> u32 {
        self.max.fetch_max(value, SeqCst);
        self.barrier.wait();
        let max = self.max.load(SeqCst);
        if self.barrier.wait() {
            self.max.store(0, SeqCst);
        }
        self.barrier.wait();
        max
    }
}

/// Block tables of a request, one for each KV group.
#[derive(Default)]
pub(crate) struct RequestTables {
    groups: Vec<GroupTable>,
    /// Whether blocks before the window are kept, because other requests may use them.
    pub(crate) keeps_blocks: bool,
}

/// Block table of a request in one KV group.
#[derive(Clone, Default)]
struct GroupTable {
    /// Entries; `None` = no block, because all its positions are before the window.
    blocks: Vec<Option<BlockId>>,
    /// Number of entries that the executor has received.
    sent: usize,
}

impl RequestTables {
    /// Returns the tables of a request with a prefix hit of `blocks` blocks in these tables.
    pub(crate) fn prefix(&self, blocks: usize) -> Self {
        let of_group =
            |table: &GroupTable| GroupTable { blocks: table.blocks[..blocks].to_vec(), sent: 0 };
        Self { groups: self.groups.iter().map(of_group).collect(), keeps_blocks: true }
    }

    /// Removes the entries from `at` on and returns them as tables.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let of_group =
            |table: &mut GroupTable| GroupTable { blocks: table.blocks.split_off(at), sent: 0 };
        Self { groups: self.groups.iter_mut().map(of_group).collect(), keeps_blocks: false }
    }

    /// Allocates blocks for a row that writes `positions`, and returns the updates of the tables. Blocks
    /// before the window of the row's first token are freed: other rows of the same step may use them.
    fn update(
        &mut self,
        kinds: &[KvKind],
        positions: Range<usize>,
        free: &mut Vec<BlockId>,
    ) -> Vec<BlockTableUpdate> {
        self.groups.resize_with(kinds.len(), GroupTable::default);
        let mut updates = Vec::new();
        for ((group, table), kind) in (0..).zip(&mut self.groups).zip(kinds) {
            let first = kind.first_read(positions.start as u32) as usize / BLOCK;
            if !self.keeps_blocks {
                let behind = first.min(table.blocks.len());
                free.extend(table.blocks[..behind].iter_mut().filter_map(Option::take));
            }
            while table.blocks.len() * BLOCK < positions.end {
                table.blocks.push(Some(free.pop().unwrap()));
            }
            // The first update of a table may leave out the blocks before the window.
            let first_entry = if table.sent == 0 { first } else { table.sent };
            if first_entry < table.blocks.len() {
                let blocks = table.blocks[first_entry..].iter().map(|block| block.unwrap());
                let (first_entry, blocks) = (first_entry as u32, blocks.collect());
                updates.push(BlockTableUpdate { group, first_entry, blocks });
            }
            table.sent = table.blocks.len();
        }
        updates
    }
}

/// A test scheduler with its executor and free blocks; with several ranks, it drives all ranks of a replica.
pub(crate) struct SchedulerHarness {
    pub(crate) executor: Executor,
    followers: Vec<FollowerRank>,
    /// Lockstep group of the replica (replicas that run every step together). A replica without lockstep is
    /// alone in its group.
    pub(crate) lockstep: Arc<LockstepGroup>,
    /// Kind of each KV group.
    groups: Vec<KvKind>,
    /// Kind of each state group.
    pub(crate) states: Vec<KvKind>,
    free: Vec<BlockId>,
    step: StepId,
    /// Whether decode rows refer to the step that sampled their token (`RowInput::SampledAt`) instead of
    /// containing the token.
    pub(crate) from_device: bool,
    /// Whether the bitmasks are overdue in every second step.
    pub(crate) overdue_bitmasks: bool,
    /// Maximum number of bitmasks of a row; the bitmasks after further draft tokens are overdue.
    pub(crate) masks_max: usize,
    /// Row counts of the captured graphs. Decode steps replay these graphs; empty = all steps are launched
    /// eagerly.
    pub(crate) graphs: Vec<u32>,
    /// Number of tokens in a decode row with the maximum number of draft tokens.
    tokens_per_row: u32,
}

impl SchedulerHarness {
    pub(crate) fn new(dtype: ModelDtype, threads: u32) -> Self {
        Self::with(config(dtype, threads))
    }

    pub(crate) fn with(config: ExecutorConfig) -> Self {
        let lockstep = Arc::new(LockstepGroup::new(&config));
        Self::of_replica(config, 0, lockstep)
    }

    /// Creates one of the replicas of a lockstep group.
    pub(crate) fn of_replica(
        mut config: ExecutorConfig,
        replica: u16,
        lockstep: Arc<LockstepGroup>,
    ) -> Self {
        let KvCacheSize::Blocks(blocks) = config.settings.kv_cache_size else {
            panic!("kv_cache_size is not a number of blocks")
        };
        config.settings.rendezvous = Some(lockstep.rendezvous.path().to_owned());
        let width = 1 + config.settings.speculative.map_or(0, |how| u32::from(how.draft_tokens));
        let follow = |rank| FollowerRank::start(config.clone(), Rank(rank), blocks);
        let tp_size = lockstep.parallel.tp_size;
        let first = replica * tp_size;
        let followers = (first + 1..first + tp_size).map(follow).collect();
        take_rank(&mut config, Rank(first));
        let mut executor = Executor::load(config, &mut |_| {}).unwrap();
        let kinds = executor.kv_spec().groups.iter().map(|group| group.kind);
        let (states, groups) = kinds.partition(|kind| kind.is_state());
        let graphs = executor.size_kv(blocks, &mut |_| {}).unwrap().capture_sizes;
        // The order of the free blocks is a permutation, so that requests get non-contiguous blocks.
        let free = (0..blocks).map(|i| BlockId(i * 229 % blocks)).collect();
        Self {
            executor,
            followers,
            lockstep,
            groups,
            states,
            free,
            step: StepId(0),
            from_device: false,
            overdue_bitmasks: false,
            masks_max: usize::MAX,
            graphs,
            tokens_per_row: width,
        }
    }

    pub(crate) fn free(&mut self, tables: RequestTables) {
        self.free.extend(tables.groups.into_iter().flat_map(|table| table.blocks).flatten());
    }

    /// Runs one step with the next tokens of each request, and applies the step's output to the requests.
    pub(crate) fn step(&mut self, requests: &mut [HarnessRequestChunk<'_>]) -> StepOutput {
        let (rows, output) = self.try_step(requests);
        for ((chunk, row), result) in requests.iter_mut().zip(&rows).zip(&output.rows) {
            let request = &mut *chunk.request;
            if row.masked && self.is_bitmask_overdue() {
                assert_eq!(
                    (result.error, result.sampled_tokens.len()),
                    (Some(RowError::MaskOverdue), 0)
                );
                request.computed += row.len as usize - 1;
                let prompt = result.prompt.iter().flat_map(|prompt| prompt.logprobs.clone());
                request.prompt_logprobs.extend(prompt);
                request.sampled_at = None;
                continue;
            }
            request.apply_output(row, result);
        }
        output
    }

    /// Runs one step and returns its rows and its output. The output is not applied to the requests.
    pub(crate) fn try_step(
        &mut self,
        requests: &mut [HarnessRequestChunk<'_>],
    ) -> (Vec<BatchRow>, StepOutput) {
        let (batch, submitted) = self.submit(requests);
        self.complete_oldest(batch, submitted)
    }

    /// Submits a step with the next tokens of each request.
    fn submit(&mut self, requests: &mut [HarnessRequestChunk<'_>]) -> (Batch, SubmittedStep) {
        self.step = self.step.next();
        let rows: Vec<BatchRow> =
            requests.iter_mut().map(|chunk| self.row(chunk.request, chunk.len)).collect();
        // Replicas in lockstep (which run every step together) must replay the same graph, so they agree on
        // the maximum number of rows.
        let most_rows = self.lockstep.agree(rows.len() as u32);
        let tokens = |row: &BatchRow| row.len + u32::from(row.drafts);
        let longest = self.lockstep.agree(rows.iter().map(|row| row.len).max().unwrap_or(0));
        let most_tokens = self.lockstep.agree(rows.iter().map(tokens).sum());
        let drafting =
            rows.iter().rposition(|row| row.drafts > 0).map_or(0, |last| last as u32 + 1);
        let most_drafting = self.lockstep.agree_from(drafting);
        let captured = self.graphs.iter().find(|&&graph| graph >= most_rows && longest == 1);
        let width = self.tokens_per_row;
        let (dispatch, moe_tokens, draft_rows) = match captured {
            Some(&rows) => (StepLaunchMode::Graph { rows, width }, rows * width, rows),
            None => (StepLaunchMode::Eager { tokens: most_tokens }, most_tokens, most_drafting),
        };
        let (step, epoch) = (self.step, Epoch(1));
        let batch = Batch { step, epoch, dispatch, moe_tokens, draft_rows, rows };
        let masked = (0..).zip(requests.iter().zip(&batch.rows)).filter(|(_, (_, row))| row.masked);
        let rows =
            masked.map(|(row, (HarnessRequestChunk { request, .. }, batch_row))| ConstrainedRow {
                row,
                request: batch_row.request,
                last: request.tokens[request.tokens.len() - 1],
                awaits_drafts: batch_row.drafts > 0,
            });
        let masks_max = if self.is_bitmask_overdue() { 0 } else { self.masks_max };
        let mut masks =
            ScriptedBitmaskSource { step, rows: rows.collect(), drafts: None, masks_max };
        for follower in &self.followers {
            follower.batches.send((batch.clone(), masks.clone())).unwrap();
        }
        let submitted = self.executor.submit_with_bitmasks(&batch, &mut masks).unwrap();
        (batch, submitted)
    }

    /// Waits for the output of the oldest step, and checks that all ranks report the same output.
    fn complete_oldest(
        &mut self,
        batch: Batch,
        submitted: SubmittedStep,
    ) -> (Vec<BatchRow>, StepOutput) {
        let output = submitted.finish().unwrap();
        for (rank, follower) in (1..).zip(&self.followers) {
            let theirs = follower.outputs.recv_timeout(THREAD_TIMEOUT).unwrap();
            assert_eq!(theirs.rows, output.rows, "rank {rank} in step {}", batch.step.0);
        }
        assert_eq!((output.step, output.epoch), (batch.step, batch.epoch));
        assert_eq!(output.rows.len(), batch.rows.len());
        (batch.rows, output)
    }

    /// Whether the bitmasks of the current step are overdue.
    fn is_bitmask_overdue(&self) -> bool {
        self.overdue_bitmasks && !self.step.0.is_multiple_of(2)
    }

    /// State slots of a row that starts at `start`. Each sequence slot has a state slot of the same number, and some have a
    /// spare slot. A row with a grammar bitmask (`masked`) may have to be repeated and writes the other slot.
    fn state_slots(
        &self,
        request: &mut HarnessRequest,
        start: usize,
        masked: bool,
    ) -> protocol::ThinVec<StateSlotAccess> {
        const SPARE_SLOTS: u32 = 40;
        let slot = |in_spare: bool| {
            let spare = SPARE_SLOTS + request.seq_slot % 10;
            StateSlot(if in_spare { spare } else { request.seq_slot })
        };
        let write = slot(request.in_spare ^ masked);
        let own = slot(request.in_spare);
        let read = request.checkpoint.take().map_or(own, StateSlot);
        let read = (start > 0).then_some(read);
        let groups = self.groups.len() as u8..;
        let access = |(group, _)| StateSlotAccess { group, read, write };
        groups.zip(&self.states).map(access).collect()
    }

    fn row(&mut self, request: &mut HarnessRequest, len: usize) -> BatchRow {
        let (start, end, slack) = (request.start(), request.start() + len, request.in_flight[2]);
        let samples = end == request.expected_len() && request.sampling.pooling.is_none();
        let state_slots = self.state_slots(request, start, request.masked && samples);
        // The first row of a request has no sampled token that draft tokens could continue. The same holds
        // for its first row after a preemption.
        let drafts = if len == 1 && request.sampled_at.is_some() { request.drafts } else { 0 };
        let positions = start..end + slack + usize::from(drafts);
        let updates = request.table.update(&self.groups, positions, &mut self.free);
        let reads = request.sampling.needs_token_history() || request.drafts > 0;
        let init = std::mem::take(&mut request.needs_init).then(|| SequenceInit {
            sampling: request.sampling.clone(),
            rng_key: request.key,
            prompt_len: request.prompt_len as u32,
            token_history: if reads { request.tokens.clone() } else { Vec::new() },
        });
        let is_on_device_only = end > request.tokens.len();
        let from_device = is_on_device_only || self.from_device && len == 1 && !request.masked;
        let input = match request.sampled_at {
            Some(step) if from_device => RowInput::SampledAt { step, draft_slack: slack as u16 },
            _ => RowInput::Tokens(request.tokens[start..end].to_vec().into()),
        };
        request.sampled_at = samples.then_some(self.step);
        BatchRow {
            request: RequestId(request.id),
            epoch: request.epoch,
            seq_slot: SequenceSlot(request.seq_slot),
            start: start as u32,
            len: len as u32,
            drafts,
            samples,
            masked: request.masked && samples,
            input,
            table_updates: updates.into(),
            state_slots,
            next_token: request.tokens.get(end).copied(),
            seq_init: init.map(Box::new),
        }
    }

    /// Computes all known tokens of a request in chunks of `chunk` tokens, then decodes up to `total` tokens.
    pub(crate) fn finish(&mut self, request: &mut HarnessRequest, chunk: usize, total: usize) {
        while request.tokens.len() < total {
            let len = self.chunk_len(request, chunk);
            self.step(&mut [request.chunk(len)]);
        }
    }

    /// Returns the length of the next row of a request, `max` at most. With recurrent states, a token under a grammar bitmask is
    /// sampled by a row of one token, which can be repeated if the bitmask is overdue.
    fn chunk_len(&self, request: &HarnessRequest, max: usize) -> usize {
        let (remaining, len) = (request.remaining(), request.remaining().min(max));
        let is_split = !self.states.is_empty() && request.masked && len == remaining && len > 1;
        len - usize::from(is_split)
    }

    /// Runs several requests together until each has `total` tokens. The chunk sizes vary by step and
    /// request.
    pub(crate) fn finish_all(&mut self, requests: &mut [HarnessRequest], total: usize) {
        for turn in 0.. {
            let mut rows: Vec<HarnessRequestChunk<'_>> = Vec::new();
            for (i, request) in
                requests.iter_mut().enumerate().filter(|(_, request)| request.tokens.len() < total)
            {
                let len = self.chunk_len(request, 1 + (i * 5 + turn * 11) % 30);
                rows.push(request.chunk(len));
            }
            if rows.is_empty() {
                return;
            }
            rows.sort_by_key(|chunk| (chunk.len > 1, chunk.request.id)); // Decode rows come first.
            self.step(&mut rows);
        }
    }

    /// Runs several requests with two steps in flight: each step is submitted before the previous one is
    /// finished. `between_steps` is called after each submission and may change the requests.
    pub(crate) fn finish_async(
        &mut self,
        requests: &mut [HarnessRequest],
        total: usize,
        mut between_steps: impl FnMut(&mut Self, &mut [HarnessRequest], usize),
    ) {
        let mut ahead: Option<(Vec<usize>, Batch, SubmittedStep)> = None;
        for turn in 0.. {
            let mut rows: Vec<(usize, HarnessRequestChunk<'_>)> = Vec::new();
            for (i, request) in requests.iter_mut().enumerate() {
                let len = self.chunk_len(request, 1 + (i * 5 + turn * 11) % 30);
                if request.expected_len() < total && len > 0 {
                    rows.push((i, request.chunk(len)));
                }
            }
            rows.sort_by_key(|(i, chunk)| (chunk.len > 1, *i)); // Decode rows come first.
            let (indices, mut rows): (Vec<usize>, Vec<_>) = rows.into_iter().unzip();
            let next = (!rows.is_empty()).then(|| self.submit(&mut rows));
            let sent = next.iter().flat_map(|(batch, _)| &batch.rows);
            rows.iter_mut()
                .zip(sent)
                .for_each(|(chunk, row)| chunk.request.set_in_flight(row, false));
            between_steps(self, requests, turn);
            let over = ahead.is_none() && next.is_none();
            if let Some((indices, batch, submitted)) = ahead {
                let (rows, output) = self.complete_oldest(batch, submitted);
                for ((index, row), result) in indices.into_iter().zip(&rows).zip(&output.rows) {
                    let request = &mut requests[index];
                    if row.epoch == request.epoch {
                        request.set_in_flight(row, true);
                        request.apply_output(row, result);
                    }
                }
            }
            if over {
                return;
            }
            ahead = next.map(|(batch, submitted)| (indices, batch, submitted));
        }
    }
}
