//! `Executor`: a loaded model with its KV cache, driven by calls.

use crate::device::Opened;
use crate::draft_passes::Draft;
use crate::engine::Engine;
use crate::expert_reports::ExpertReports;
use crate::graph::{self, Graphs, Wanted};
use crate::inputs::StepLimits;
use crate::masks::{Masks, NoMasks};
use crate::pending::Pending;
use crate::step::{State, StateSize};
use crate::trace::{Session, Tracer};
use crate::{
    ExecutorConfig, ExecutorError, GPU_LOGPROBS_MAX, KvSize, check_draft_world, check_speculation,
    check_world, device, kv_pool, ranks, rehearsal, sampler, source, warm_up,
};
use models::sharding::{Indivisible, Ranks};
use models::{LoadError, LoadOptions, kv_layout, kv_spec, load_eagle3, load_model};
use ops::{DType, Ops, RowBounds, StepShape};
use protocol::{
    Batch, Drafter, ExpertPlacement, KvSpec, Memory, Phase, Ready, Settings, Speculation,
    StepOutput, WeightsDigest,
};
use std::path::Path;
use std::sync::Arc;

/// Up to so many rows a product's kernel may be made for just that many.
const FEW_ROWS: u32 = 16;

/// How far a phase of the start-up has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Units finished: bytes of weights, or passes.
    pub done: u64,
    /// Units in all.
    pub total: u64,
}

/// A model on a device. It computes once `size_kv` has given it a KV cache.
pub struct Executor {
    /// Before the engine: recordings know its ways to other ranks.
    state: Option<State>,
    config: ExecutorConfig,
    engine: Engine,
    ranks: Ranks,
    spec: KvSpec,
    weights: WeightsDigest,
    /// Where a folder for traces is configured.
    tracer: Option<Tracer>,
}

impl Executor {
    /// Starts the device and loads this rank's part of the model.
    pub fn load(
        mut config: ExecutorConfig,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, ExecutorError> {
        let settings = &config.settings;
        config.model.drafting =
            settings.speculation.is_some_and(|how| how.drafter == Drafter::Layer);
        let placement = settings.placement.as_ref();
        check_world(settings.parallel, &config.model, placement)?;
        if let Some(draft) = &config.draft {
            check_draft_world(settings.parallel, draft)?;
        }
        let ranks = ranks::ranks(settings.parallel, settings.rank)?;
        let models = (&config.model, config.draft.as_ref());
        check_speculation(settings.speculation, models)?;
        let Opened { kernels, gpu, threads } = device::open(settings)?;
        let [tp, dp] = ranks::groups(settings, gpu.as_ref(), progress)?;
        let dtype = device::dtype(settings);
        let kv_dtype = device::kv_dtype(settings, dtype);
        let latent = |model: &models::Config| model.latent.is_some();
        let latents = latent(&config.model) || config.draft.as_ref().is_some_and(latent);
        if latents && kv_dtype != dtype {
            return Err(ExecutorError::LatentKv);
        }
        let ops = Ops::new(kernels, dtype)?;
        progress(Progress { phase: Phase::Load, done: 0, total: 0 }); // How much it is shows on the way.
        let mut loading = Loading {
            ops: &ops,
            settings,
            ranks,
            kv_dtype,
            threads,
            read: 0,
            before: 0,
            progress,
            digest: WeightsDigest::default(),
        };
        let target = &config.model;
        let model =
            loading.load(placement, |options| load_model(&settings.dir, target, options))?;
        let digest = std::mem::take(&mut loading.digest);
        let draft = config.draft.as_ref().zip(settings.draft_dir.as_deref());
        let draft = draft.map(|(draft, dir)| {
            loading.load(None, |options| match draft.eagle {
                Some(_) => {
                    load_eagle3(dir, (draft, target), options).map(Box::new).map(Draft::Eagle3)
                }
                None => load_model(dir, draft, options).map(Draft::Model),
            })
        });
        let draft = draft.transpose()?;
        let weights = digest.with_draft(loading.digest);
        let spec = of_both(&config, kv_dtype, &ranks)?;
        let rank = config.settings.rank.0;
        let folder = config.settings.profile.clone();
        let tracer = folder.map(|folder| Tracer::new(ops.device().as_ref(), folder, rank));
        let tracer = tracer.transpose()?;
        let part = ranks.vocab_part(config.model.vocab);
        // All ranks of a replica choose the same experts: the one that answers counts.
        let counts = ranks::answers(settings);
        let reports = if counts { ExpertReports::new(&ops, &config.model)? } else { None };
        let engine = Engine { ops, model, draft, tp, dp, part, reports };
        Ok(Self { config, engine, ranks, spec, weights, state: None, tracer })
    }

    /// Digests of the weights that were loaded, the draft model's among them.
    #[must_use]
    pub fn weights_digest(&self) -> WeightsDigest {
        self.weights
    }

    /// Runs the first passes, on blocks of their own, and says what this rank can hold.
    pub fn warm_up(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<Memory, ExecutorError> {
        let block_tokens = self.config.settings.block_tokens;
        let gpu = self.engine.ops.device().captures_graphs();
        let passes = warm_up::passes(&self.config.settings, self.questions(), gpu);
        let mut state = self.state(warm_up::blocks(&passes, block_tokens))?;
        if gpu {
            let compiled = &mut |done, total| {
                progress(Progress { phase: Phase::Compile, done, total });
            };
            let shapes = self.shapes_to_come(&passes);
            rehearsal::rehearse(&self.engine, &mut state.device, shapes, compiled)?;
        }
        let (phase, total) = (Phase::WarmUp, passes.len() as u64);
        progress(Progress { phase, done: 0, total });
        let pace = warm_up::measure(
            &passes,
            block_tokens,
            gpu,
            |batch| state.submit(&self.engine, batch, &mut NoMasks, None)?.finish(),
            |done| progress(Progress { phase, done, total }),
        )?;
        let blocks = self.blocks(&state)?;
        drop(state);
        kv_pool::check(blocks, block_tokens, self.config.settings.kv_tokens_min)?;
        Ok(Memory { spec: self.spec.clone(), blocks, pace })
    }

    /// Allocates the KV cache and everything else that steps change; contents are lost.
    pub fn size_kv(
        &mut self,
        blocks: u32,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Ready, ExecutorError> {
        let settings = &self.config.settings;
        kv_pool::check(blocks, settings.block_tokens, settings.kv_tokens_min)?;
        self.state = None;
        let mut state = self.state(blocks)?;
        let (wanted, shapes) = (self.graphs_wanted(), self.graph_shapes());
        let (phase, total) = (Phase::Capture, shapes.len() as u64);
        if total > 0 {
            let tell = |done| progress(Progress { phase, done, total });
            let (device, tracer) = (&mut state.device, self.tracer.as_ref());
            state.graphs = Graphs::capture(&self.engine, device, (&wanted, &shapes), tracer, tell);
        }
        let graph_rows = state.graphs.rows();
        self.engine.ops.device().settle();
        self.state = Some(state);
        Ok(Ready { blocks, graph_rows })
    }

    /// Records steps from now on in a new file; one that is under way gets no more.
    ///
    /// Errors: no folder is configured, or the file cannot be made.
    pub fn begin_trace(&mut self) -> Result<Trace, ExecutorError> {
        let tracer = self.tracer.as_mut().ok_or(ExecutorError::NoTraces)?;
        Ok(Trace(tracer.begin(&self.engine.ops)?))
    }

    /// Records no step from now on. [`Trace::close`] completes the file once those in flight are finished.
    pub fn end_trace(&mut self) {
        if let Some(tracer) = &mut self.tracer {
            tracer.end();
        }
    }

    /// Hands a batch without masked rows to the device. Steps run in the order in which they were submitted.
    ///
    /// Errors: all are final. After one of them the executor is of no further use.
    pub fn submit(&mut self, batch: &Batch) -> Result<Submitted, ExecutorError> {
        self.submit_masked(batch, &mut NoMasks)
    }

    /// The same for any batch. `masks` are asked for only if it has masked rows, and while its forward pass runs.
    pub fn submit_masked(
        &mut self,
        batch: &Batch,
        masks: &mut dyn Masks,
    ) -> Result<Submitted, ExecutorError> {
        let state = self.state.as_mut().ok_or(ExecutorError::NotSized)?;
        Ok(Submitted(state.submit(&self.engine, batch, masks, self.tracer.as_mut())?))
    }

    /// Runs a batch without masked rows and answers every row of it: `submit`, then `finish`.
    pub fn step(&mut self, batch: &Batch) -> Result<StepOutput, ExecutorError> {
        self.submit(batch)?.finish()
    }

    /// Bytes of the device that can still be allocated. Steps take none of them.
    #[must_use]
    pub fn memory_free_bytes(&self) -> u64 {
        self.engine.ops.mem_info().free_bytes
    }

    /// Layout of the KV cache.
    #[must_use]
    pub fn kv_spec(&self) -> &KvSpec {
        &self.spec
    }

    /// The parts that tests of drafts look into.
    #[cfg(test)]
    pub(crate) fn drafting(&self) -> (&ops::KvPool, &ops::DraftBuffers, &Engine) {
        let (kv, made) = self.state.as_ref().expect("it is sized").drafting();
        (kv, made.expect("it drafts by its layer"), &self.engine)
    }

    /// Blocks this rank can hold, measured while everything else is allocated.
    fn blocks(&self, state: &State) -> Result<u32, ExecutorError> {
        let memory = self.engine.ops.mem_info();
        let (kv, block_bytes) = (self.config.settings.kv, self.spec.bytes_per_block());
        if !self.engine.ops.device().captures_graphs() {
            let settings = &self.config.settings;
            let blocks =
                kv_pool::blocks(kv, memory.free_bytes, block_bytes, settings.host_ranks.into());
            if matches!(kv, KvSize::Auto) {
                let longest = settings.kv_tokens_min;
                let needed = longest.div_ceil(settings.block_tokens);
                kv_pool::check_share(blocks, block_bytes, needed, memory.free_bytes, longest)?;
            }
            return Ok(blocks);
        }
        let kinds = self.engine.whole_rows().len() << u32::from(self.tracer.is_some());
        let gpu = kv_pool::GpuMemory {
            total: memory.total_bytes,
            free: memory.free_bytes + state.kv_bytes(),
            utilization: self.config.settings.memory_utilization,
            graphs: (self.graph_shapes().len() * kinds) as u64,
        };
        gpu.blocks(kv, block_bytes)
    }

    /// Likeliest ids an answer can list.
    fn top(&self) -> usize {
        let gpu = self.engine.ops.device().captures_graphs();
        let most = if gpu { GPU_LOGPROBS_MAX } else { u32::MAX };
        (self.config.settings.logprobs_max.min(most) as usize).min(self.config.model.vocab)
    }

    /// Questions answered at a time.
    fn questions(&self) -> usize {
        let gpu = self.engine.ops.device().captures_graphs();
        sampler::questions_per_slice(self.config.model.vocab, self.top(), gpu)
    }

    /// Tokens of a row with all its drafts.
    fn width(&self) -> u32 {
        1 + self.config.settings.speculation.map_or(0, |how| u32::from(how.drafts))
    }

    /// Rows of one token in the widest decode step, drafts among them.
    fn rows_max(&self) -> u32 {
        let settings = &self.config.settings;
        settings.max_num_seqs.saturating_mul(self.width()).min(settings.tokens_per_step)
    }

    /// Shapes to rehearse: the first passes, the steps to record, and the one that no pass has. A rehearsal
    /// takes the memory that its steps need.
    fn shapes_to_come(&self, passes: &[Vec<u32>]) -> Vec<StepShape> {
        let (questions, width) = (self.questions(), self.width() as usize);
        let pass = |lens: &Vec<u32>| rehearsal::shape(lens, questions, width);
        let graphs = self.graph_shapes();
        let few = (1..=FEW_ROWS.min(self.rows_max())).map(|rows| pass(&vec![1; rows as usize]));
        let passes = self.longest(passes).into_iter().chain(few).chain(passes.iter().map(pass));
        passes.chain(graphs).chain([self.deepest()]).collect()
    }

    /// The prefill of most tokens behind the longest contexts, in rows of any length: what attention needs most memory for
    /// beside decodes.
    fn longest(&self, passes: &[Vec<u32>]) -> Option<StepShape> {
        let settings = &self.config.settings;
        let tokens = passes.iter().map(|lens| lens.iter().sum::<u32>()).max()? as usize;
        let rows = (settings.max_num_seqs as usize).min((tokens / RowBounds::LONG).max(1));
        let bounds = RowBounds::of_any(tokens, rows, settings.max_model_len as usize);
        Some(StepShape { tokens, rows, questions: rows.min(self.questions()), bounds })
    }

    /// The widest decode step with the longest contexts, launch by launch: what attention needs most memory
    /// for.
    fn deepest(&self) -> StepShape {
        let (rows, longest) = (self.rows_max() as usize, self.config.settings.max_model_len);
        let shape = graph::shape(rows, self.width() as usize, longest as usize);
        StepShape { questions: rows.min(self.questions()), ..shape }
    }

    /// Shapes of the steps to record, fewest rows first.
    fn graph_shapes(&self) -> Vec<StepShape> {
        self.graphs_wanted().shapes(self.config.settings.max_model_len as usize)
    }

    fn graphs_wanted(&self) -> Wanted {
        let settings = &self.config.settings;
        if !self.engine.ops.device().captures_graphs() {
            return Wanted::default();
        }
        let width = self.width();
        let most = (self.rows_max() as usize).min(self.questions()) / width as usize;
        let rows = graph::rows_to_capture(&settings.capture, most);
        // Who looks tokens up often finds none. Replicas that step together replay what all can.
        let looks_up = |how: Speculation| matches!(how.drafter, Drafter::Ngram { .. });
        let fewer = settings.speculation.is_some_and(looks_up) && !settings.parallel.lockstep();
        Wanted { rows, width, fewer }
    }

    fn state(&self, blocks: u32) -> Result<State, ExecutorError> {
        let ExecutorConfig { model, draft, settings, .. } = &self.config;
        let Settings { block_tokens, max_num_seqs, max_model_len, .. } = settings;
        let (device, longest) = (self.engine.ops.device(), *max_model_len as usize);
        let dtype = device::kv_dtype(&self.config.settings, self.engine.ops.dtype());
        let layout = |model: &models::Config| {
            let (size, order) = ((blocks as usize, *block_tokens as usize), device.kv_order());
            kv_layout(model, dtype, size, order, &self.ranks).map_err(of_heads)
        };
        let kv = layout(model)?;
        let draft_kv = draft.as_ref().map(layout).transpose()?;
        let limits = StepLimits {
            tokens: self.config.settings.tokens_per_step as usize,
            rows: *max_num_seqs as usize,
            block_tokens: *block_tokens,
            width: longest.div_ceil(*block_tokens as usize),
            vocab: model.vocab,
            hidden: draft.as_ref().map_or(model, |draft| draft).hidden,
            speculation: self.config.settings.speculation,
            apart: device.captures_graphs(),
        };
        let (questions, top) = (self.questions(), self.top());
        let size = StateSize { kv, draft_kv, limits, longest, questions, top };
        State::new(&self.engine.ops, self.config.settings.epoch, size)
    }
}

/// Models being loaded, one after the other.
struct Loading<'a> {
    ops: &'a Ops,
    settings: &'a Settings,
    ranks: Ranks,
    kv_dtype: DType,
    threads: usize,
    /// Bytes of the one being loaded, and of those in front of it.
    read: u64,
    before: u64,
    progress: &'a mut dyn FnMut(Progress),
    /// Of the one being loaded.
    digest: WeightsDigest,
}

impl Loading<'_> {
    fn load<T>(
        &mut self,
        placement: Option<&ExpertPlacement>,
        how: impl FnOnce(LoadOptions<'_>) -> Result<T, LoadError>,
    ) -> Result<T, LoadError> {
        let Self { ops, settings, ranks, kv_dtype, threads, read, before, progress, digest } = self;
        *before += std::mem::take(read);
        how(LoadOptions {
            ops,
            ranks: *ranks,
            placement,
            format: source(settings),
            kv_dtype: *kv_dtype,
            max_positions: settings.max_model_len as usize,
            threads: *threads,
            progress: &mut |done, total| {
                *read = total;
                let (done, total) = (*before + done, *before + total);
                progress(Progress { phase: Phase::Load, done, total });
            },
            digest,
        })
    }
}

/// The KV cache of a model, and in the same blocks that of the model that drafts for it.
fn of_both(config: &ExecutorConfig, dtype: DType, ranks: &Ranks) -> Result<KvSpec, ExecutorError> {
    let of = |model: &models::Config| {
        kv_spec(model, dtype, config.settings.block_tokens, ranks).map_err(of_heads)
    };
    let mut spec = of(&config.model)?;
    let drafts = config.draft.as_ref().map(of).transpose()?;
    if let (Some(group), Some(drafts)) = (spec.groups.first_mut(), drafts) {
        group.bytes_per_block += drafts.bytes_per_block();
    }
    Ok(spec)
}

/// Heads that do not split over the ranks.
fn of_heads(error: Indivisible) -> ExecutorError {
    LoadError::Split { tensor: "k_proj".to_owned(), error }.into()
}

/// A trace under way. May be closed on another thread.
#[derive(Clone)]
pub struct Trace(Arc<Session>);

impl Trace {
    /// The file: Chrome's JSON, which parses at any time.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Completes the file with the steps that have been finished; later ones are left out. Without any there is no
    /// file any more.
    ///
    /// Errors: it could not be written.
    pub fn close(&self) -> Result<(), ExecutorError> {
        self.0.close()
    }
}

/// A step that the device works on. May be finished on another thread.
pub struct Submitted(Pending);

impl Submitted {
    /// Waits for the device and forms the answer.
    pub fn finish(self) -> Result<StepOutput, ExecutorError> {
        self.0.finish()
    }
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trace").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Submitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submitted").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("ops", &self.engine.ops).finish_non_exhaustive()
    }
}
