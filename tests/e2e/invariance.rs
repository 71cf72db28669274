//! The real scheduler and executor on the demo model in f32: the tokens and log-probabilities of a request
//! are bit-identical whatever the scheduler decides.

use crate::test_server;
use executor::{
    Executor, ExecutorConfig, ExecutorError, KvCacheSize, ModelDtype, TokenBitmaskSource,
};
use grammar::{
    CompiledGrammar, GrammarCompilePool, GrammarSession, GrammarSessionFactory, GrammarSpec,
    GrammarTimings, OutputConstraint,
};
use models::ModelConfig;
use models::config::LayerAttentionConfig;
use protocol::{
    Batch, BitmaskRow, DraftAcceptanceRule, Epoch, ExecutorSettings, ParallelConfig, Rank, Replica,
    RequestId, SamplingParams, SpeculativeConfig, SpeculativeMethod, StepDrafts, StepId, Token,
    TokenBitmask, TokenLogprobs, TokenVec,
};
use scheduler::{
    FinishReason, KvConfig, RequestSubmission, Scheduler, SchedulerConfig, SchedulerEffect,
    SchedulerEvent, SchedulerLimits, SchedulerStats, SpecDecodeStats, TokenEvent,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use text::Tokenizer;

const REQUESTS: u64 = 32;
const MAX_TOKENS: u32 = 24;
pub(crate) const MAX_MODEL_LEN: u32 = 512;
pub(crate) const BLOCK: u32 = 16;
/// Maximum number of ticks (iterations of the scheduler loop) of a run, far more than any setting needs.
const TICKS_MAX: u32 = 20_000;

/// Scheduler limits and speculative-decoding settings of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineTestConfig {
    pub(crate) tokens_per_step: u32,
    pub(crate) requests_running: u32,
    pub(crate) blocks: u32,
    pub(crate) caching: bool,
    /// Maximum number of steps in flight. With more than one step in flight, later steps take their input
    /// tokens from device memory.
    pub(crate) steps_in_flight: u32,
    /// Maximum number of draft tokens per row.
    pub(crate) drafts: u8,
    /// Whether the model itself is the draft model; otherwise the n-gram proposer is used.
    pub(crate) uses_draft_model: bool,
    /// The model that runs.
    pub(crate) model: EngineTestModel,
    /// Distance of the checkpoints of recurrent state in tokens.
    pub(crate) state_checkpoint_tokens: u32,
}

/// Models that the engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineTestModel {
    /// The demo model.
    Demo,
    /// The demo model with a sliding window in every second layer, so that it has two KV groups.
    DemoWithWindows,
    /// A model with gated delta nets in two of three layers and synthetic weights. It has the vocabulary of the demo
    /// model.
    Recurrent,
}

/// Baseline configuration: runs one request after another, without batching, caching or draft tokens.
pub(crate) const SEQUENTIAL: EngineTestConfig = EngineTestConfig {
    tokens_per_step: 512,
    requests_running: 1,
    blocks: 400,
    caching: false,
    steps_in_flight: 1,
    drafts: 0,
    uses_draft_model: false,
    model: EngineTestModel::Demo,
    state_checkpoint_tokens: 8_192,
};

/// Window of every second layer of `EngineTestModel::DemoWithWindows`.
pub(crate) const WINDOW: usize = 40;

/// Output tokens and log-probabilities of each request.
type RequestOutputs = BTreeMap<RequestId, (Vec<Token>, Vec<TokenLogprobs>)>;

/// Outputs and statistics of one run of the engine.
#[derive(Default)]
struct RunOutputs {
    outputs: RequestOutputs,
    preemptions: u32,
    cached_tokens: u64,
    /// Speculative-decoding statistics at the end of the run.
    drafts: SpecDecodeStats,
}

pub(crate) fn model() -> ModelConfig {
    ModelConfig::from_dir(&folder()).unwrap()
}

/// Returns the model that a run serves.
fn model_of(world: EngineTestConfig) -> ModelConfig {
    let model = model();
    match world.model {
        EngineTestModel::Demo => model,
        EngineTestModel::DemoWithWindows => {
            let windowed = (0..model.layers).map(|layer| layer % 2 == 0).collect();
            let attention = LayerAttentionConfig { window: WINDOW, windowed, rope: None };
            ModelConfig { layer_attention: Some(attention), ..model }
        }
        EngineTestModel::Recurrent => recurrent_model(model.vocab),
    }
}

/// Returns a model of two gated delta nets and a layer with attention.
fn recurrent_model(vocab: usize) -> ModelConfig {
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": vocab,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": MAX_MODEL_LEN,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "tie_word_embeddings": true, "torch_dtype": "float32"
    });
    ModelConfig::from_json(Path::new("config.json"), &config.to_string()).unwrap()
}

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/demo"))
}

/// Request number `i` with a prompt of 20 to 300 tokens; prompts with equal `i % 4` share a prefix.
fn submit(engine: &Scheduler, i: u64, vocab: u32) -> RequestSubmission {
    let len = 20 + (i * 37) % 280;
    let id = |at: u64| {
        let family = if at < 64 { i % 4 } else { i };
        ((family * 7919 + at * at * 31 + at * 17 + 5) % u64::from(vocab)) as Token
    };
    let tokens: Vec<Token> = (0..len).map(id).collect();
    let plain = SamplingParams { logprobs: Some(2), ..SamplingParams::greedy() };
    let drawn = SamplingParams { temperature: 0.9, top_p: 0.95, ..plain.clone() };
    let penalised =
        SamplingParams { repetition_penalty: 1.2, frequency_penalty: 0.3, ..drawn.clone() };
    let sampling = [plain, drawn, penalised][i as usize % 3].clone();
    RequestSubmission {
        id: RequestId(i),
        max_tokens: MAX_TOKENS,
        block_keys: engine.hasher().hash_prompt(&tokens, None),
        tokens,
        sampling,
        first_masked_token: is_constrained(RequestId(i)).then_some(0),
        rng_key: i.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra_keys: None,
        replica: None,
    }
}

/// Whether the request's output follows a grammar.
fn is_constrained(request: RequestId) -> bool {
    request.0 % 4 == 1
}

/// A grammar over the demo tokenizer's tokens whose outputs never have to end.
fn grammar() -> CompiledGrammar {
    let form = GrammarSpec::Regex("([a-z]+|[0-9]{1,3})([ ,.] ?([a-z]+|[0-9]{1,3}))*".to_owned());
    compile([form]).remove(0)
}

/// Compiles grammars for the demo's tokenizer.
pub(crate) fn compile(forms: impl IntoIterator<Item = GrammarSpec>) -> Vec<CompiledGrammar> {
    let tokenizer = Arc::new(Tokenizer::load(&folder()).unwrap());
    let timings = Arc::new(GrammarTimings::default());
    let vocabulary = move || tokenizer.grammar_vocabulary();
    let grammars =
        GrammarCompilePool::start(vocabulary, &test_server::grammar_worker(), timings).unwrap();
    let compile = |form| {
        let (told, compiled) = channel();
        grammars
            .compile(OutputConstraint::new(form, "test"), move |result| told.send(result).unwrap());
        compiled.recv_timeout(std::time::Duration::from_mins(2)).unwrap().unwrap()
    };
    forms.into_iter().map(compile).collect()
}

/// Returns one bitmask after each draft token, up to the first draft token that the grammar does not allow.
/// Uses a new session that is advanced by `output`.
pub(crate) fn draft_bitmasks(
    seed: &GrammarSessionFactory,
    output: &[Token],
    drafts: &[Token],
) -> Vec<TokenBitmask> {
    let mut session = seed.session();
    let mut mask = session.mask().map(TokenBitmask::from);
    let mut bitmasks = Vec::new();
    for (i, &token) in output.iter().chain(drafts).enumerate() {
        if i >= output.len() && mask.as_ref().is_none_or(|mask| !mask.allows(token)) {
            break;
        }
        session.advance(&[token]);
        mask = session.mask().map(TokenBitmask::from);
        bitmasks.extend(mask.clone().filter(|_| i >= output.len()));
    }
    bitmasks
}

/// Draft tokens that the step report `reported` lists for a request; empty without a report.
pub(crate) fn drafts_of(reported: Option<&StepDrafts>, request: RequestId) -> TokenVec {
    let rows = reported.iter().flat_map(|drafts| &drafts.rows);
    rows.filter(|row| row.request == request)
        .map(|row| row.tokens.clone())
        .next()
        .unwrap_or_default()
}

/// Grammar sessions of the constrained requests, advanced by committed tokens.
struct ConstrainedSessions<'a> {
    grammar: &'a CompiledGrammar,
    by_request: BTreeMap<RequestId, GrammarSession>,
    outputs: BTreeMap<RequestId, Vec<Token>>,
    masked_rows: Vec<(u32, RequestId)>,
    drafts: Option<StepDrafts>,
}

impl ConstrainedSessions<'_> {
    fn observe(&mut self, event: &TokenEvent) {
        if is_constrained(event.request) {
            let new = || self.grammar.session_seed(true).session();
            self.by_request.entry(event.request).or_insert_with(new).advance(&event.tokens);
            self.outputs.entry(event.request).or_default().extend(&event.tokens[..]);
        }
    }

    fn expect(&mut self, batch: &Batch) {
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        self.masked_rows = rows.map(|(index, row)| (index, row.request)).collect();
        let right = batch.rows.iter().all(|r| r.masked == (r.samples && is_constrained(r.request)));
        assert!(right, "rows of constrained requests are masked where they sample");
    }
}

impl TokenBitmaskSource for ConstrainedSessions<'_> {
    fn report_drafts(&mut self, drafts: StepDrafts) -> Result<(), ExecutorError> {
        self.drafts = Some(drafts);
        Ok(())
    }

    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        assert_eq!(self.masked_rows.len(), rows);
        let reported = self.drafts.take().filter(|drafts| drafts.step == step);
        let Self { grammar, by_request, outputs, masked_rows: wanted, .. } = self;
        let mask = |&(row, request): &(u32, RequestId)| {
            let seed = grammar.session_seed(true);
            let session = by_request.entry(request).or_insert_with(|| seed.session());
            let mut bitmasks = vec![session.mask().expect("the grammar goes on").into()];
            let drafts = drafts_of(reported.as_ref(), request);
            if !drafts.is_empty() {
                let output = outputs.get(&request).map_or(&[][..], Vec::as_slice);
                bitmasks.extend(draft_bitmasks(&seed, output, &drafts));
            }
            BitmaskRow { row, bitmasks }
        };
        Ok(wanted.iter().map(mask).collect())
    }
}

/// Creates an executor of the demo model with the settings of `world`. It runs only batches of epoch `epoch`;
/// the scheduler increments its epoch at each executor failure.
pub(crate) fn executor(world: EngineTestConfig, epoch: Epoch) -> Executor {
    let lookup = SpeculativeMethod::Ngram { lookup_min: 1, lookup_max: 3 };
    let config = ExecutorConfig {
        environment: executor::DeviceEnvironment::default(),
        model: model_of(world),
        manifest: 0,
        draft: world.uses_draft_model.then(|| model_of(world)),
        settings: ExecutorSettings {
            model_dir: folder(),
            draft_model_dir: world.uses_draft_model.then(folder),
            config_overrides: None,
            synth_seed: (world.model == EngineTestModel::Recurrent).then_some(5),
            device: protocol::DeviceKind::Cpu,
            gpus: Vec::new(),
            libraries: None,
            kernel_cache: None,
            dtype: ModelDtype::Float32,
            kv_cache_dtype: executor::KvCacheDtype::Auto,
            threads: Some(1), // One thread, because tests run in parallel.
            block_tokens: BLOCK,
            max_model_len: MAX_MODEL_LEN,
            kv_tokens_min: MAX_MODEL_LEN,
            max_num_seqs: world.requests_running,
            tokens_per_step: world.tokens_per_step,
            kv_cache_size: KvCacheSize::Blocks(world.blocks),
            memory_utilization: 0.9,
            graph_capture: protocol::GraphCaptureConfig::default(),
            speculative: (world.drafts > 0).then_some(SpeculativeConfig {
                draft_tokens: world.drafts,
                method: if world.uses_draft_model { SpeculativeMethod::DraftModel } else { lookup },
                acceptance: DraftAcceptanceRule::Exact,
            }),
            max_logprobs: u32::MAX,
            profile_dir: None,
            epoch,
            rank: Rank(0),
            parallel: ParallelConfig::default(),
            ranks_on_host: 1,
            expert_placement: None,
            one_shot_all_reduce: true,
            host_address: None,
            rendezvous: None,
        },
    };
    let mut executor = Executor::load(config, &mut |_| {}).unwrap();
    executor.size_kv(world.blocks, &mut |_| {}).unwrap();
    executor
}

/// Returns the configuration of the KV cache for an executor of `executor(world, …)`.
pub(crate) fn kv_config(world: EngineTestConfig, executor: &Executor) -> KvConfig {
    let spec = executor.kv_spec().clone();
    let state_slots = spec.state_slots(world.requests_running);
    let caching = world.caching;
    KvConfig { caching, state_slots, ..KvConfig::new(spec, world.blocks, [1, 2]) }
}

fn run(world: EngineTestConfig, grammar: &CompiledGrammar) -> RunOutputs {
    let mut sessions = ConstrainedSessions {
        grammar,
        by_request: BTreeMap::new(),
        outputs: BTreeMap::new(),
        masked_rows: Vec::new(),
        drafts: None,
    };
    let mut executor = executor(world, Epoch(1));
    let vocab = model().vocab as u32;
    let limits = SchedulerLimits {
        tokens_per_step: world.tokens_per_step,
        max_num_seqs: world.requests_running,
        steps_in_flight: world.steps_in_flight,
        draft_tokens: world.drafts,
        needs_token_history: world.drafts > 0 && !world.uses_draft_model,
        state_checkpoint_tokens: world.state_checkpoint_tokens,
        ..SchedulerLimits::cpu(MAX_MODEL_LEN, vocab)
    };
    let kv = kv_config(world, &executor);
    let mut engine = Scheduler::new(SchedulerConfig::new(limits, kv)).unwrap();
    assert_eq!(engine.epoch(Replica(0)), Epoch(1), "the executor's");
    let submits =
        (0..REQUESTS).map(|i| SchedulerEvent::Submit(Box::new(submit(&engine, i, vocab))));
    let mut inbox: Vec<SchedulerEvent> = submits.collect();
    let mut ran = RunOutputs::default();
    let mut finished = 0;
    let mut effects = Vec::new();
    for tick in 0.. {
        if finished == REQUESTS {
            break;
        }
        assert!(tick < TICKS_MAX, "{finished} of {REQUESTS} requests are done");
        engine.tick(0, &mut inbox, &mut effects);
        for effect in &effects {
            if let SchedulerEffect::TokenEvents(events) = effect {
                for event in events {
                    sessions.observe(event);
                }
            }
        }
        for effect in effects.drain(..) {
            match effect {
                SchedulerEffect::SendBatch { batch, .. } => {
                    sessions.expect(&batch);
                    let output = executor
                        .submit_with_bitmasks(&batch, &mut sessions)
                        .unwrap()
                        .finish()
                        .unwrap();
                    inbox.push(SchedulerEvent::StepOutput { replica: Replica(0), output });
                }
                SchedulerEffect::TokenEvents(events) => {
                    finished += events.into_iter().map(|e| u64::from(ran.take(e))).sum::<u64>();
                }
                SchedulerEffect::Stats(SchedulerStats { drafts_total, .. }) => {
                    ran.drafts = drafts_total;
                }
                SchedulerEffect::KvEvents { .. }
                | SchedulerEffect::BlocksEvicted { .. }
                | SchedulerEffect::ControlDone { .. } => {}
            }
        }
    }
    ran
}

impl RunOutputs {
    /// Records a token event; returns whether it is the last one of its request.
    fn take(&mut self, event: TokenEvent) -> bool {
        self.cached_tokens += u64::from(event.first_admission.map_or(0, |run| run.cached_tokens));
        let (tokens, logprobs) = self.outputs.entry(event.request).or_default();
        tokens.extend(&event.tokens);
        logprobs.extend(event.logprobs);
        let ends = event.finish_reason.is_some();
        if ends {
            assert_eq!(event.finish_reason, Some(FinishReason::Length));
            assert_eq!((tokens.len(), logprobs.len()), (MAX_TOKENS as usize, MAX_TOKENS as usize));
            self.preemptions += event.preemptions;
        }
        ends
    }
}

#[test]
fn scheduler_decisions_change_no_output_bit() {
    let grammar = grammar();
    let baseline = run(SEQUENTIAL, &grammar);
    assert_eq!(baseline.outputs.len() as u64, REQUESTS);
    let together = EngineTestConfig { requests_running: 32, ..SEQUENTIAL };
    let cramped = EngineTestConfig { tokens_per_step: 48, blocks: 40, caching: true, ..together };
    let ahead = EngineTestConfig { uses_draft_model: true, steps_in_flight: 2, ..together };
    let worlds = [
        ("in a batch of 32", together),
        ("in small chunks", EngineTestConfig { tokens_per_step: 40, ..together }),
        ("after prefix hits", EngineTestConfig { caching: true, ..together }),
        ("planned ahead", EngineTestConfig { steps_in_flight: 2, ..together }),
        ("preempted", EngineTestConfig { blocks: 40, ..together }),
        ("all at once", EngineTestConfig { steps_in_flight: 2, ..cramped }),
        ("with drafts, alone", EngineTestConfig { drafts: 1, ..SEQUENTIAL }),
        ("with drafts, in a batch of 32", EngineTestConfig { drafts: 4, ..together }),
        ("with drafts, all at once", EngineTestConfig { drafts: 3, ..cramped }),
        ("by a model, planned ahead", EngineTestConfig { drafts: 1, ..ahead }),
        (
            "by a model, after hits",
            EngineTestConfig { drafts: 3, caching: true, tokens_per_step: 48, ..ahead },
        ),
        ("by a model, preempted", EngineTestConfig { drafts: 4, blocks: 40, ..ahead }),
    ];
    let mut preempting = 0;
    for (name, world) in worlds {
        let ran = run(world, &grammar);
        assert!(ran.preemptions == 0 || world.blocks == 40, "{name}: {}", ran.preemptions);
        preempting += u32::from(ran.preemptions > 0);
        assert_eq!(ran.cached_tokens > 0, world.caching, "{name}: {}", ran.cached_tokens);
        let (SpecDecodeStats { draft_tokens: drafted, .. }, accepted) =
            (ran.drafts, ran.drafts.accepted_per_position[0]);
        assert_eq!(
            world.drafts > 0,
            0 < accepted && accepted < drafted,
            "{name}: {:?}",
            ran.drafts
        );
        assert_eq!(ran.outputs, baseline.outputs, "{name}");
    }
    // With accepted draft tokens, requests end in fewer steps, so the small cache suffices without preemption
    // in some configurations.
    assert!(preempting >= 2, "{preempting} of four worlds with a small cache preempt");
}

/// As `scheduler_decisions_change_no_output_bit`, for a model whose blocks before the windows are freed while
/// requests run.
#[test]
fn decisions_with_windows_change_no_output_bit() {
    let grammar = grammar();
    let alone = EngineTestConfig { model: EngineTestModel::DemoWithWindows, ..SEQUENTIAL };
    let baseline = run(alone, &grammar);
    assert_ne!(baseline.outputs, run(SEQUENTIAL, &grammar).outputs, "the windows have an effect");
    let together = EngineTestConfig { requests_running: 32, ..alone };
    let cramped = EngineTestConfig { tokens_per_step: 48, blocks: 44, ..together };
    let hits = EngineTestConfig { caching: true, ..together };
    let ahead = EngineTestConfig { steps_in_flight: 2, ..cramped };
    for (name, world) in [
        ("in a batch of 32", together),
        ("after prefix hits", hits),
        ("in small chunks", cramped),
        ("planned ahead", ahead),
        ("planned ahead, after hits", EngineTestConfig { caching: true, ..ahead }),
        ("with drafts", EngineTestConfig { drafts: 3, caching: true, ..cramped }),
        ("by a model", EngineTestConfig { drafts: 3, uses_draft_model: true, ..ahead }),
        ("by a model, hits", EngineTestConfig { drafts: 3, uses_draft_model: true, ..hits }),
    ] {
        let ran = run(world, &grammar);
        assert_eq!(ran.cached_tokens > 0, world.caching, "{name}: {}", ran.cached_tokens);
        assert_eq!(ran.outputs, baseline.outputs, "{name}");
    }
}
