//! The real scheduler over the real executor on the demo model in f32: a request's tokens and
//! log-probabilities are the same bits whatever the scheduler decides about it.

use crate::http_host;
use executor::{Dtype, Executor, ExecutorConfig, ExecutorError, KvSize, Masks};
use hadron::grammar::{Compiled, Constraint, Form, GrammarTimings, Grammars, Session};
use hadron::text::Tokenizer;
use models::Config;
use protocol::{
    Acceptance, Batch, Drafter, Epoch, MaskRow, Parallel, Rank, Replica, RequestId, Sampling,
    Settings, Speculation, StepId, Token, TokenLogprobs,
};
use scheduler::{
    Drafted, Effect, Engine, EngineConfig, Event, Finish, KvConfig, Limits, StepStats, Submit,
    TokenEvent,
};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

const REQUESTS: u64 = 32;
const MAX_TOKENS: u32 = 24;
pub(crate) const MAX_MODEL_LEN: u32 = 512;
const BLOCK: u32 = 16;
/// Far more than any of the worlds needs.
const TICKS_MAX: u32 = 20_000;

/// How the requests are run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct World {
    pub(crate) tokens_per_step: u32,
    pub(crate) requests_running: u32,
    pub(crate) blocks: u32,
    pub(crate) caching: bool,
    /// Steps planned ahead of the output: tokens are then taken from the device.
    pub(crate) steps_in_flight: u32,
    /// Most tokens guessed and verified in a row.
    pub(crate) drafts: u8,
    /// The model guesses for itself, as one that drafts; else they are looked up.
    pub(crate) itself: bool,
}

/// One request after the other.
pub(crate) const PLAIN: World = World {
    tokens_per_step: 512,
    requests_running: 1,
    blocks: 400,
    caching: false,
    steps_in_flight: 1,
    drafts: 0,
    itself: false,
};

type Outputs = BTreeMap<RequestId, (Vec<Token>, Vec<TokenLogprobs>)>;

#[derive(Default)]
struct Ran {
    outputs: Outputs,
    preemptions: u32,
    cached_tokens: u64,
    /// What became of drafts, at the end.
    drafts: Drafted,
}

pub(crate) fn model() -> Config {
    Config::from_dir(&folder()).unwrap()
}

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/demo"))
}

/// Prompts of 20 to 300 tokens; each quarter of them shares a beginning.
fn submit(engine: &Engine, i: u64, vocab: u32) -> Submit {
    let len = 20 + (i * 37) % 280;
    let id = |at: u64| {
        let family = if at < 64 { i % 4 } else { i };
        ((family * 7919 + at * at * 31 + at * 17 + 5) % u64::from(vocab)) as Token
    };
    let tokens: Vec<Token> = (0..len).map(id).collect();
    let plain = Sampling { logprobs: Some(2), ..Sampling::greedy() };
    let drawn = Sampling { temperature: 0.9, top_p: 0.95, ..plain.clone() };
    let penalised = Sampling { repetition: 1.2, frequency: 0.3, ..drawn.clone() };
    let sampling = [plain, drawn, penalised][i as usize % 3].clone();
    Submit {
        id: RequestId(i),
        max_tokens: MAX_TOKENS,
        keys: engine.hasher().hash(&tokens, None),
        tokens,
        sampling,
        masked_from: is_constrained(RequestId(i)).then_some(0),
        key: i.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra: None,
        replica: None,
    }
}

/// Some of the requests follow a grammar.
fn is_constrained(request: RequestId) -> bool {
    request.0 % 4 == 1
}

/// A grammar without an end, of the demo's tokens.
fn grammar() -> Compiled {
    let form = Form::Regex("([a-z]+|[0-9]{1,3})([ ,.] ?([a-z]+|[0-9]{1,3}))*".to_owned());
    compile([form]).remove(0)
}

/// Grammars of the demo's tokens.
pub(crate) fn compile(forms: impl IntoIterator<Item = Form>) -> Vec<Compiled> {
    let tokenizer = Arc::new(Tokenizer::load(&folder()).unwrap());
    let timings = Arc::new(GrammarTimings::default());
    let vocabulary = move || tokenizer.grammar_vocabulary();
    let grammars = Grammars::start(vocabulary, &http_host::trials(), timings).unwrap();
    let compile = |form| {
        let (told, compiled) = channel();
        grammars.compile(Constraint::new(form, "test"), move |result| told.send(result).unwrap());
        compiled.recv_timeout(std::time::Duration::from_mins(2)).unwrap().unwrap()
    };
    forms.into_iter().map(compile).collect()
}

/// Sessions of the constrained requests, fed with what was committed.
struct Sessions<'a> {
    grammar: &'a Compiled,
    by_request: BTreeMap<RequestId, Session>,
    wanted: Vec<(u32, RequestId)>,
}

impl Sessions<'_> {
    fn hear(&mut self, event: &TokenEvent) {
        if is_constrained(event.request) {
            let new = || self.grammar.seed(true).session();
            self.by_request.entry(event.request).or_insert_with(new).advance(&event.tokens);
        }
    }

    fn expect(&mut self, batch: &Batch) {
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        self.wanted = rows.map(|(index, row)| (index, row.request)).collect();
        let right = batch.rows.iter().all(|r| r.masked == (r.samples && is_constrained(r.request)));
        assert!(right, "rows of constrained requests are masked where they sample");
    }
}

impl Masks for Sessions<'_> {
    fn wait(&mut self, _: StepId, rows: usize) -> Result<Vec<MaskRow>, ExecutorError> {
        assert_eq!(self.wanted.len(), rows);
        let Self { grammar, by_request, wanted } = self;
        let mask = |&(row, request): &(u32, RequestId)| {
            let session = by_request.entry(request).or_insert_with(|| grammar.seed(true).session());
            MaskRow { row, allowed: session.mask().expect("the grammar goes on"), late: false }
        };
        Ok(wanted.iter().map(mask).collect())
    }
}

/// The demo model, of a generation of executors.
pub(crate) fn executor(world: World, epoch: Epoch) -> Executor {
    let lookup = Drafter::Ngram { min: 1, max: 3 };
    let config = ExecutorConfig {
        model: model(),
        manifest: 0,
        draft: world.itself.then(model),
        settings: Settings {
            dir: folder(),
            draft_dir: world.itself.then(folder),
            overrides: None,
            synth_seed: None,
            device: protocol::Device::Cpu,
            gpus: Vec::new(),
            libraries: None,
            kernel_cache: None,
            dtype: Dtype::Float32,
            kv_dtype: executor::KvDtype::Auto,
            threads: Some(1), // Tests run side by side.
            block_tokens: BLOCK,
            max_model_len: MAX_MODEL_LEN,
            kv_tokens_min: MAX_MODEL_LEN,
            max_num_seqs: world.requests_running,
            tokens_per_step: world.tokens_per_step,
            kv: KvSize::Blocks(world.blocks),
            memory_utilization: 0.9,
            capture: protocol::Capture::default(),
            speculation: (world.drafts > 0).then_some(Speculation {
                drafts: world.drafts,
                drafter: if world.itself { Drafter::Model } else { lookup },
                acceptance: Acceptance::Exact,
            }),
            logprobs_max: u32::MAX,
            profile: None,
            epoch,
            rank: Rank(0),
            parallel: Parallel::default(),
            host_ranks: 1,
            placement: None,
            one_shot_sums: true,
            meeting: None,
        },
    };
    let mut executor = Executor::load(config, &mut |_| {}).unwrap();
    executor.size_kv(world.blocks, &mut |_| {}).unwrap();
    executor
}

fn run(world: World, grammar: &Compiled) -> Ran {
    let mut sessions = Sessions { grammar, by_request: BTreeMap::new(), wanted: Vec::new() };
    let mut executor = executor(world, Epoch(1));
    let vocab = model().vocab as u32;
    let limits = Limits {
        tokens_per_step: world.tokens_per_step,
        requests_running: world.requests_running,
        steps_in_flight: world.steps_in_flight,
        drafts: world.drafts,
        histories: world.drafts > 0 && !world.itself,
        ..Limits::cpu(MAX_MODEL_LEN, vocab)
    };
    let mut kv = KvConfig::new(executor.kv_spec().clone(), world.blocks, [1, 2]);
    kv.caching = world.caching;
    let mut engine = Engine::new(EngineConfig::new(limits, kv)).unwrap();
    assert_eq!(engine.epoch(Replica(0)), Epoch(1), "the executor's");
    let submits = (0..REQUESTS).map(|i| Event::Submit(Box::new(submit(&engine, i, vocab))));
    let mut inbox: Vec<Event> = submits.collect();
    let mut ran = Ran::default();
    let mut finished = 0;
    let mut effects = Vec::new();
    for tick in 0.. {
        if finished == REQUESTS {
            break;
        }
        assert!(tick < TICKS_MAX, "{finished} of {REQUESTS} requests are done");
        engine.tick(0, &mut inbox, &mut effects);
        for effect in &effects {
            if let Effect::Tokens(events) = effect {
                for event in events {
                    sessions.hear(event);
                }
            }
        }
        for effect in effects.drain(..) {
            match effect {
                Effect::Send { batch, .. } => {
                    sessions.expect(&batch);
                    let output =
                        executor.submit_masked(&batch, &mut sessions).unwrap().finish().unwrap();
                    inbox.push(Event::Output { replica: Replica(0), output });
                }
                Effect::Tokens(events) => {
                    finished += events.into_iter().map(|e| u64::from(ran.take(e))).sum::<u64>();
                }
                Effect::Stats(StepStats { drafts_total, .. }) => ran.drafts = drafts_total,
                Effect::Kv { .. } | Effect::Evicted { .. } | Effect::ControlDone { .. } => {}
            }
        }
    }
    ran
}

impl Ran {
    /// Notes an event; whether it is a request's last.
    fn take(&mut self, event: TokenEvent) -> bool {
        self.cached_tokens += u64::from(event.first_run.map_or(0, |run| run.cached_tokens));
        let (tokens, logprobs) = self.outputs.entry(event.request).or_default();
        tokens.extend(&event.tokens);
        logprobs.extend(event.logprobs);
        let ends = event.finish.is_some();
        if ends {
            assert_eq!(event.finish, Some(Finish::Length));
            assert_eq!((tokens.len(), logprobs.len()), (MAX_TOKENS as usize, MAX_TOKENS as usize));
            self.preemptions += event.preemptions;
        }
        ends
    }
}

#[test]
fn what_the_scheduler_decides_changes_no_bit() {
    let grammar = grammar();
    let alone = run(PLAIN, &grammar);
    assert_eq!(alone.outputs.len() as u64, REQUESTS);
    let together = World { requests_running: 32, ..PLAIN };
    let cramped = World { tokens_per_step: 48, blocks: 40, caching: true, ..together };
    let ahead = World { itself: true, steps_in_flight: 2, ..together };
    let worlds = [
        ("in a batch of 32", together),
        ("in small chunks", World { tokens_per_step: 40, ..together }),
        ("behind prefix hits", World { caching: true, ..together }),
        ("planned ahead", World { steps_in_flight: 2, ..together }),
        ("preempted", World { blocks: 40, ..together }),
        ("all at once", World { steps_in_flight: 2, ..cramped }),
        ("with drafts, alone", World { drafts: 1, ..PLAIN }),
        ("with drafts, in a batch of 32", World { drafts: 4, ..together }),
        ("with drafts, all at once", World { drafts: 3, ..cramped }),
        ("by a model, planned ahead", World { drafts: 1, ..ahead }),
        (
            "by a model, behind hits",
            World { drafts: 3, caching: true, tokens_per_step: 48, ..ahead },
        ),
        ("by a model, preempted", World { drafts: 4, blocks: 40, ..ahead }),
    ];
    for (name, world) in worlds {
        let ran = run(world, &grammar);
        assert_eq!(ran.preemptions > 0, world.blocks == 40, "{name}: {}", ran.preemptions);
        assert_eq!(ran.cached_tokens > 0, world.caching, "{name}: {}", ran.cached_tokens);
        let (Drafted { tokens: drafted, .. }, accepted) = (ran.drafts, ran.drafts.accepted[0]);
        assert_eq!(
            world.drafts > 0,
            0 < accepted && accepted < drafted,
            "{name}: {:?}",
            ran.drafts
        );
        assert_eq!(ran.outputs, alone.outputs, "{name}");
    }
}
