//! `Executor`: a loaded model with its KV cache. Its methods run batches; it has no link to a scheduler.

use crate::expert_load_report::ExpertLoadReporter;
use crate::model_context::ModelContext;
use crate::open_device::OpenedDevice;
use crate::ranks::{RankGroups, SingleHost};
use crate::sequence_slots::BlockTableLimits;
use crate::spec_decode::{self, ProposerModel};
use crate::step::{
    self, GraphCapturePlan, PendingStep, ReplayCaptureLimits, STEPS_IN_FLIGHT, StepDeviceState,
    StepGraphs, StepLimits, StepState, StepStateSize, TokenBitmaskSource,
    UnconstrainedBitmaskSource,
};
use crate::trace::{StepTracer, TraceSession};
use crate::{
    EndpointExchange, ExecutorConfig, ExecutorError, GPU_LOGPROBS_MAX, KvCacheSize,
    check_draft_world, check_sampler, check_speculation, check_world, kv_sizing, open_device,
    precompile, ranks, source, warm_up,
};
use models::sharding::{ParallelRanks, UnevenSplitError};
use models::{
    ForwardError, KvGrouping, LoadedModel, ModelLoadError, ModelLoadOptions, kv_layout, kv_spec,
    load_eagle3, load_model, state_layout,
};
use ops::{
    BatchUpperBounds, DType, Ops, RecurrentStateLayout, ReplayBufferLimits, ReplayShape, StepShape,
};
use protocol::{
    Batch, ExecutorReady, ExecutorSettings, ExpertPlacement, KvSpec, SpeculativeConfig,
    SpeculativeMethod, StartupPhase, StepOutput, WarmUpReport, WeightsDigest,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Up to this number of rows, a GEMM kernel may be specialised for the exact number of rows.
const SMALL_BATCH_ROWS: u32 = 16;

/// Maximum number of steps whose outputs the scheduler has not applied.
const UNAPPLIED_STEPS_MAX: u32 = 4;

/// Progress of a start-up phase (load, warm-up, capture).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartupPhaseProgress {
    /// Start-up phase that the progress belongs to.
    pub phase: StartupPhase,
    /// Amount of work finished, for example bytes of weights, warm-up passes or captured graphs.
    pub done: u64,
    /// Total amount of work, in the unit of `done`; 0 while the total is unknown.
    pub total: u64,
}

/// A loaded model on a device. It runs steps after `size_kv` has allocated its KV cache.
pub struct Executor {
    /// This field is declared before `model` so that it is dropped first: captured graphs refer to the
    /// collective groups of `model`.
    state: Option<StepState>,
    config: ExecutorConfig,
    model: ModelContext,
    ranks: ParallelRanks,
    /// Assignment of the target model's layers to KV groups.
    kv_grouping: KvGrouping,
    spec: KvSpec,
    weights: WeightsDigest,
    /// Records traces of steps; `None` = no trace folder is configured.
    tracer: Option<StepTracer>,
}

impl Executor {
    /// Opens the device and loads this rank's shard of the model. All ranks are on one host.
    pub fn load(
        config: ExecutorConfig,
        progress: &mut dyn FnMut(StartupPhaseProgress),
    ) -> Result<Self, ExecutorError> {
        Self::load_on_hosts(config, &mut SingleHost, progress)
    }

    /// Opens the device and loads this rank's shard of the model. If the ranks are on several hosts, they find each other through
    /// `exchange`.
    pub fn load_on_hosts(
        mut config: ExecutorConfig,
        exchange: &mut dyn EndpointExchange,
        progress: &mut dyn FnMut(StartupPhaseProgress),
    ) -> Result<Self, ExecutorError> {
        let settings = &config.settings;
        config.model.load_mtp =
            settings.speculative.is_some_and(|config| config.method == SpeculativeMethod::Mtp);
        let placement = settings.expert_placement.as_ref();
        check_world(settings.parallel, &config.model, placement)?;
        if let Some(draft) = &config.draft {
            check_draft_world(settings.parallel, draft)?;
        }
        let ranks = ranks::ranks(settings.parallel, settings.rank)?;
        check_speculation(settings.speculative, &config.model, config.draft.as_ref())?;
        check_sampler(settings.device, settings.parallel, &config.model)?;
        let OpenedDevice { backend, threads } = open_device::open(&config)?;
        let RankGroups { tp, dp } = ranks::groups(settings, backend.gpu(), exchange, progress)?;
        let dtype = open_device::dtype(settings);
        let kv_dtype = open_device::kv_dtype(settings, dtype);
        let uses_mla = |model: &models::ModelConfig| model.mla.is_some();
        let any_mla = uses_mla(&config.model) || config.draft.as_ref().is_some_and(uses_mla);
        if any_mla && kv_dtype != dtype {
            return Err(ExecutorError::MlaKvDtype);
        }
        let ops = Ops::new(backend, dtype)?;
        progress(StartupPhaseProgress { phase: StartupPhase::Load, done: 0, total: 0 }); // The total is reported during the load.
        let max_positions = settings.max_model_len as usize;
        let device_drafts = spec_decode::runs_on_device(settings.speculative);
        let kv_grouping = KvGrouping::new(&config.model, max_positions, device_drafts, &ranks);
        let mut loader = ModelLoader {
            ops: &ops,
            settings,
            ranks,
            kv_dtype,
            threads,
            model_bytes: 0,
            bytes_before: 0,
            progress,
            digest: WeightsDigest::default(),
        };
        let target = &config.model;
        let LoadedModel { model, mtp, score } =
            loader.load(placement, &kv_grouping, |options| {
                load_model(&settings.model_dir, target, options)
            })?;
        let digest = std::mem::take(&mut loader.digest);
        let draft = config.draft.as_ref().zip(settings.draft_model_dir.as_deref());
        let draft = draft.map(|(draft, dir)| {
            loader.load(None, &KvGrouping::of_draft(draft, &kv_grouping), |options| {
                match draft.eagle {
                    Some(_) => load_eagle3(dir, draft, target, options)
                        .map(Box::new)
                        .map(ProposerModel::Eagle3),
                    None => load_model(dir, draft, options)
                        .map(|loaded| ProposerModel::DraftModel(loaded.model)),
                }
            })
        });
        let proposer = draft.transpose()?.or_else(|| mtp.map(ProposerModel::Mtp));
        if proposer.is_none() && spec_decode::runs_on_device(settings.speculative) {
            return Err(ForwardError::NoMtpModule.into());
        }
        let weights = digest.with_draft(loader.digest);
        ops.device().finish_loading();
        let spec = combined_kv_spec(&config, &kv_grouping, kv_dtype, &ranks)?;
        let rank = config.settings.rank.0;
        let folder = config.settings.profile_dir.clone();
        let tracer = folder.map(|folder| StepTracer::new(ops.device(), folder, rank));
        let tracer = tracer.transpose()?;
        let vocab_shard = ranks.vocab_shard(config.model.vocab);
        // All ranks of a replica route tokens to the same experts, so only the rank that reports outputs
        // counts the routed tokens.
        let counts_experts = ranks::reports_outputs(settings);
        let expert_load_reporter =
            if counts_experts { ExpertLoadReporter::new(&ops, &config.model)? } else { None };
        let score = score.map(Arc::from);
        let model_context =
            ModelContext { ops, model, score, proposer, tp, dp, vocab_shard, expert_load_reporter };
        let (state, model) = (None, model_context);
        Ok(Self { state, config, model, ranks, kv_grouping, spec, weights, tracer })
    }

    /// Returns digests of the loaded weights: of the target model, and of the draft model if there is one.
    #[must_use]
    pub fn weights_digest(&self) -> WeightsDigest {
        self.weights
    }

    /// Runs the warm-up passes on a temporary KV cache. Returns the KV layout, the number of KV blocks that
    /// fit on this rank, and a cost model fitted to the measured step times.
    pub fn warm_up(
        &mut self,
        progress: &mut dyn FnMut(StartupPhaseProgress),
    ) -> Result<WarmUpReport, ExecutorError> {
        let gpu = self.model.ops.device().captures_graphs();
        let passes = warm_up::warm_up_passes(&self.config.settings, self.max_logits_rows(), gpu);
        let mut state = self.state(warm_up::blocks(&passes, &self.spec))?;
        if gpu {
            self.precompile(&passes, &mut state.device, progress)?;
        }
        let (phase, total) = (StartupPhase::WarmUp, passes.len() as u64);
        progress(StartupPhaseProgress { phase, done: 0, total });
        let step_cost = warm_up::measure(
            &passes,
            &self.spec,
            gpu,
            |batch| {
                state.submit(&self.model, batch, &mut UnconstrainedBitmaskSource, None)?.finish()
            },
            |done| progress(StartupPhaseProgress { phase, done, total }),
        )?;
        let gpu_blocks = gpu.then(|| self.gpu_blocks(&state)).transpose()?;
        drop(state); // Its recurrent states take memory of the host.
        let blocks = gpu_blocks.map_or_else(|| self.host_blocks(), Ok)?;
        self.check_kv_blocks(blocks)?;
        Ok(WarmUpReport { kv_spec: self.spec.clone(), kv_blocks: blocks, step_cost })
    }

    /// Allocates the KV cache and all other state that steps change. If a KV cache was allocated earlier, its
    /// contents are lost.
    pub fn size_kv(
        &mut self,
        blocks: u32,
        progress: &mut dyn FnMut(StartupPhaseProgress),
    ) -> Result<ExecutorReady, ExecutorError> {
        self.check_kv_blocks(blocks)?;
        self.state = None;
        let mut state = self.state(blocks)?;
        let (plan, shapes) = (self.capture_plan(), self.graph_shapes());
        let (phase, total) = (StartupPhase::Capture, shapes.len() as u64);
        if total > 0 {
            let report_progress = |done| progress(StartupPhaseProgress { phase, done, total });
            let (device, tracer) = (&mut state.device, self.tracer.as_ref());
            state.graphs =
                StepGraphs::capture(&self.model, device, &plan, &shapes, tracer, report_progress);
        }
        let graph_rows = state.graphs.rows();
        self.model.ops.device().freeze_autotuning();
        self.state = Some(state);
        Ok(ExecutorReady { kv_blocks: blocks, capture_sizes: graph_rows })
    }

    /// Starts a new trace file, in which all steps submitted after this call are recorded. An earlier trace
    /// in progress records no further steps.
    ///
    /// Errors: no trace folder is configured, or the file cannot be created.
    pub fn begin_trace(&mut self) -> Result<TraceHandle, ExecutorError> {
        let tracer = self.tracer.as_mut().ok_or(ExecutorError::TracingDisabled)?;
        Ok(TraceHandle(tracer.begin(&self.model.ops)?))
    }

    /// Stops the trace for steps submitted after this call. [`TraceHandle::close`] completes the trace file
    /// when the steps in flight are finished.
    pub fn end_trace(&mut self) {
        if let Some(tracer) = &mut self.tracer {
            tracer.end();
        }
    }

    /// Submits a batch without masked rows (rows sampled under a grammar bitmask) to the device. Steps run in
    /// submission order.
    ///
    /// Errors: after any error, the executor cannot be used.
    pub fn submit(&mut self, batch: &Batch) -> Result<SubmittedStep, ExecutorError> {
        self.submit_with_bitmasks(batch, &mut UnconstrainedBitmaskSource)
    }

    /// Like [`Executor::submit`], for a batch that may have masked rows (rows sampled under a grammar
    /// bitmask). The bitmasks are read from `masks` after the forward pass has been launched.
    pub fn submit_with_bitmasks(
        &mut self,
        batch: &Batch,
        masks: &mut dyn TokenBitmaskSource,
    ) -> Result<SubmittedStep, ExecutorError> {
        let (modules, start) = (self.loaded_kernel_modules(), Instant::now());
        let state = self.state.as_mut().ok_or(ExecutorError::KvCacheNotSized)?;
        let submitted =
            SubmittedStep(state.submit(&self.model, batch, masks, self.tracer.as_mut())?);
        let late = self.loaded_kernel_modules() - modules;
        if late > 0 {
            precompile::warn_late_compilation(batch, late, start.elapsed());
        }
        Ok(submitted)
    }

    /// Submits a batch without masked rows (rows sampled under a grammar bitmask), waits for it and returns
    /// its output.
    pub fn step(&mut self, batch: &Batch) -> Result<StepOutput, ExecutorError> {
        self.submit(batch)?.finish()
    }

    /// Returns the free memory of the device in bytes. Steps allocate no device memory, so the value does not
    /// change while steps run.
    #[must_use]
    pub fn memory_free_bytes(&self) -> u64 {
        self.model.ops.mem_info().free_bytes
    }

    /// Returns the number of kernel modules that are loaded. Kernels are compiled before the executor is ready, so the value does
    /// not change while steps run.
    #[must_use]
    pub fn loaded_kernel_modules(&self) -> usize {
        self.model.ops.device().loaded_modules()
    }

    /// Returns the layout of the KV cache.
    #[must_use]
    pub fn kv_spec(&self) -> &KvSpec {
        &self.spec
    }

    /// Returns the KV pool and the draft buffers of the proposer, and the models. Used by tests of draft
    /// tokens.
    #[cfg(test)]
    pub(crate) fn draft_state(&self) -> crate::spec_decode::ProposerTestState<'_> {
        let state = self.state.as_ref().expect("KV cache is allocated");
        crate::spec_decode::ProposerTestState {
            kv: state.draft_kv(),
            draft_buffers: state.draft_buffers().expect("the proposer runs on the device"),
            context: &self.model,
        }
    }

    /// Maximum number of tokens in the steps in flight.
    fn tokens_in_flight(&self) -> u32 {
        (STEPS_IN_FLIGHT as u32).saturating_mul(self.config.settings.tokens_per_step)
    }

    /// Maximum number of tokens in the steps whose outputs the scheduler has not applied. More steps can wait for
    /// their output than are in flight on the device.
    fn most_tokens_in_flight(&self) -> u32 {
        UNAPPLIED_STEPS_MAX.saturating_mul(self.config.settings.tokens_per_step)
    }

    /// Number of KV blocks that one request of `kv_tokens_min` tokens needs.
    fn kv_blocks_min(&self) -> u32 {
        self.spec.blocks_of_request(self.config.settings.kv_tokens_min, self.tokens_in_flight())
    }

    /// Number of state slots; 0 = the model has no recurrent state.
    fn state_slots(&self) -> usize {
        self.spec.state_slots(self.config.settings.max_num_seqs) as usize
    }

    /// Returns an error if a pool of `blocks` blocks is too small for a request of `kv_tokens_min` tokens.
    fn check_kv_blocks(&self, blocks: u32) -> Result<(), ExecutorError> {
        let settings = &self.config.settings;
        let tokens = settings.kv_tokens_min;
        kv_sizing::check(blocks, self.kv_blocks_min(), settings.block_tokens, tokens)
    }

    /// Bytes of the recurrent states of all state slots of this rank, and of the inputs of their updates after draft tokens.
    fn state_bytes(&self) -> Result<u64, ExecutorError> {
        let states = self.state_slots() as u64 * self.spec.bytes_per_state_slot();
        let Some(layout) = self.state_layout()?.filter(|_| self.tokens_per_row() > 1) else {
            return Ok(states);
        };
        let (rows, requests) = (self.rows_max() as usize, self.config.settings.max_num_seqs);
        let replay = ReplayShape { rows: requests as usize, tokens: rows };
        let limits = ReplayBufferLimits { rows, replay };
        Ok(states + limits.bytes(&layout, self.model.ops.dtype()) as u64)
    }

    /// Layout of the recurrent states; `None` = the model has none.
    fn state_layout(&self) -> Result<Option<RecurrentStateLayout>, ExecutorError> {
        let (model, slots) = (&self.config.model, self.state_slots());
        state_layout(model, &self.kv_grouping, slots, &self.ranks).map_err(uneven_heads_error)
    }

    /// Returns the number of KV blocks of this rank in the memory of the host, while no states are allocated.
    fn host_blocks(&self) -> Result<u32, ExecutorError> {
        let memory = self.model.ops.mem_info();
        let (settings, block_bytes) = (&self.config.settings, self.spec.bytes_per_block());
        let (ranks, states) = (settings.ranks_on_host.into(), self.state_bytes()?);
        let free = memory.free_bytes.saturating_sub(states.saturating_mul(ranks));
        let blocks = kv_sizing::blocks(settings.kv_cache_size, free, block_bytes, ranks);
        let kv_bytes = u64::from(blocks).saturating_mul(block_bytes);
        kv_sizing::check_host(kv_bytes, states, ranks, memory)?;
        if matches!(settings.kv_cache_size, KvCacheSize::Auto) {
            let (needed, tokens) = (self.kv_blocks_min(), settings.kv_tokens_min);
            kv_sizing::check_share(blocks, block_bytes, needed, free, tokens)?;
        }
        Ok(blocks)
    }

    /// Returns the number of KV blocks that fit on this GPU. The free memory is measured after everything except the KV
    /// cache has been allocated.
    fn gpu_blocks(&self, state: &StepState) -> Result<u32, ExecutorError> {
        let memory = self.model.ops.mem_info();
        let variants = self.model.full_logits_variants().len() << u32::from(self.tracer.is_some());
        let gpu = kv_sizing::GpuMemoryBudget {
            total: memory.total_bytes,
            free: memory.free_bytes + state.kv_bytes(),
            utilization: self.config.settings.memory_utilization,
            graphs: (self.graph_shapes().len() * variants) as u64,
            states: self.state_bytes()?,
        };
        gpu.blocks(self.config.settings.kv_cache_size, self.spec.bytes_per_block())
    }

    /// Maximum number of top log-probabilities per token: the configured value, limited to the maximum that
    /// the device's sampler supports.
    fn max_top_logprobs(&self) -> usize {
        let gpu = self.model.ops.device().captures_graphs();
        let limit = if gpu { GPU_LOGPROBS_MAX } else { u32::MAX };
        (self.config.settings.max_logprobs.min(limit) as usize).min(self.config.model.vocab)
    }

    /// Maximum number of logits rows (one row of vocabulary logits per sampled position) that are computed
    /// and sampled in one pass; the memory for logits limits this number.
    fn max_logits_rows(&self) -> usize {
        let gpu = self.model.ops.device().captures_graphs();
        step::logits_rows_per_slice(self.config.model.vocab, self.max_top_logprobs(), gpu)
    }

    /// Maximum number of tokens in a decode row: the input token and the draft tokens.
    fn tokens_per_row(&self) -> u32 {
        1 + self.config.settings.speculative.map_or(0, |config| u32::from(config.draft_tokens))
    }

    /// Maximum number of one-token rows in a decode step. A decoding request has one row for its input token
    /// and one row for each of its draft tokens.
    fn rows_max(&self) -> u32 {
        let settings = &self.config.settings;
        settings.max_num_seqs.saturating_mul(self.tokens_per_row()).min(settings.tokens_per_step)
    }

    /// Compiles the kernels, and allocates the memory, of the warm-up passes and of later steps in a dry run
    /// (launches execute nothing).
    fn precompile(
        &self,
        passes: &[Vec<u32>],
        device: &mut StepDeviceState,
        progress: &mut dyn FnMut(StartupPhaseProgress),
    ) -> Result<(), ExecutorError> {
        let compiled = &mut |done, total| {
            progress(StartupPhaseProgress { phase: StartupPhase::Compile, done, total });
        };
        let shapes = self.precompile_shapes(passes);
        precompile::precompile(&self.model, device, shapes, compiled)
    }

    /// Returns the step shapes whose kernels are compiled, and whose memory is allocated, in a dry run
    /// (launches execute nothing): warm-up passes, decode steps of up to `SMALL_BATCH_ROWS` rows, the steps
    /// to capture, prompts of several lengths alone and with decode rows, and the steps that need the most memory for
    /// attention.
    fn precompile_shapes(&self, passes: &[Vec<u32>]) -> Vec<StepShape> {
        let (logits_rows, rows_per_request) =
            (self.max_logits_rows(), self.tokens_per_row() as usize);
        let pass =
            |lens: &Vec<u32>| precompile::precompile_shape(lens, logits_rows, rows_per_request);
        let graphs = self.graph_shapes();
        let small_batches =
            (1..=SMALL_BATCH_ROWS.min(self.rows_max())).map(|rows| pass(&vec![1; rows as usize]));
        let passes = self
            .longest_prefill_shape(passes)
            .into_iter()
            .chain(small_batches)
            .chain(passes.iter().map(pass));
        let prompts = ops::prompt_batches(self.config.settings.tokens_per_step, self.rows_max());
        let prompts: Vec<StepShape> = prompts.iter().map(pass).collect();
        passes.chain(graphs).chain(prompts).chain([self.widest_decode_shape()]).collect()
    }

    /// Shape of the prefill step with the most tokens and the longest contexts, for rows of any length. Of
    /// all steps except decode steps, this step needs the most memory for attention.
    fn longest_prefill_shape(&self, passes: &[Vec<u32>]) -> Option<StepShape> {
        let settings = &self.config.settings;
        let tokens = passes.iter().map(|lens| lens.iter().sum::<u32>()).max()? as usize;
        let rows = (settings.max_num_seqs as usize)
            .min((tokens / BatchUpperBounds::MLA_PREFILL_TOKENS).max(1));
        let bounds = BatchUpperBounds::of_any(tokens, rows, settings.max_model_len as usize);
        let logits_rows = rows.min(self.max_logits_rows());
        Some(StepShape { tokens, rows, logits_rows, bounds, ..StepShape::default() })
    }

    /// Shape of the eager decode step with the most rows and the longest contexts. Of all decode steps, this
    /// step needs the most memory for attention.
    fn widest_decode_shape(&self) -> StepShape {
        let (rows, longest) = (self.rows_max() as usize, self.config.settings.max_model_len);
        let shape = self.capture_plan().decode_shape(rows, longest as usize);
        StepShape { logits_rows: rows.min(self.max_logits_rows()), ..shape }
    }

    /// Returns the shapes of the decode steps to capture as CUDA/HIP graphs, in ascending order of rows.
    fn graph_shapes(&self) -> Vec<StepShape> {
        self.capture_plan().shapes(self.config.settings.max_model_len as usize)
    }

    fn capture_plan(&self) -> GraphCapturePlan {
        let settings = &self.config.settings;
        let tokens_per_row = self.tokens_per_row();
        if !self.model.ops.device().captures_graphs() {
            return GraphCapturePlan { tokens_per_row, ..GraphCapturePlan::default() };
        }
        let max_rows =
            (self.rows_max() as usize).min(self.max_logits_rows()) / tokens_per_row as usize;
        let rows = step::row_counts_to_capture(&settings.graph_capture, max_rows);
        // N-gram lookup often proposes no draft tokens, so graphs without draft tokens are captured too.
        // Replicas that run in lockstep (every step together) must replay the same graph, so they capture
        // graphs with draft tokens only.
        let is_ngram =
            |config: SpeculativeConfig| matches!(config.method, SpeculativeMethod::Ngram { .. });
        let also_without_drafts =
            settings.speculative.is_some_and(is_ngram) && !settings.parallel.lockstep();
        let width = match settings.speculative.filter(|_| self.state_slots() > 0) {
            None => 0,
            Some(config) if is_ngram(config) => 2, // A row may have fewer draft tokens than the maximum.
            Some(_) => tokens_per_row as usize,
        };
        let replay = ReplayCaptureLimits { width, requests: settings.max_num_seqs as usize };
        GraphCapturePlan { rows, tokens_per_row, also_without_drafts, replay }
    }

    fn state(&self, blocks: u32) -> Result<StepState, ExecutorError> {
        let ExecutorConfig { model, draft, settings, .. } = &self.config;
        let ExecutorSettings { block_tokens, max_num_seqs, max_model_len, .. } = settings;
        let (device, longest) = (self.model.ops.device(), *max_model_len as usize);
        let dtype = open_device::kv_dtype(&self.config.settings, self.model.ops.dtype());
        let layout = |model: &models::ModelConfig, grouping: &KvGrouping| {
            let (blocks, block_tokens) = (blocks as usize, *block_tokens as usize);
            let order = device.kv_order();
            kv_layout(model, grouping, dtype, blocks, block_tokens, order, &self.ranks)
                .map_err(uneven_heads_error)
        };
        let kv = layout(model, &self.kv_grouping)?;
        let draft_layout = |draft| layout(draft, &KvGrouping::of_draft(draft, &self.kv_grouping));
        let draft_kv = draft.as_ref().map(draft_layout).transpose()?;
        let states = self.state_layout()?;
        let ranks = if device.captures_graphs() { 1 } else { self.config.settings.ranks_on_host };
        kv_sizing::check_states(states.as_ref(), self.model.ops.mem_info(), ranks.into())?;
        let in_flight = self.most_tokens_in_flight();
        let tables = BlockTableLimits::of_groups(&self.spec, *max_model_len, in_flight, |group| {
            kv.block_id_step(group)
        });
        let limits = StepLimits {
            tokens: self.config.settings.tokens_per_step as usize,
            rows: *max_num_seqs as usize,
            block_tokens: *block_tokens,
            groups: tables.len(),
            table_update_entries: tables.iter().map(|group| group.update_entries).sum(),
            state_slots: states.map_or(0, |states| states.slots),
            vocab: model.vocab,
            hidden: draft.as_ref().map_or(model, |draft| draft).hidden,
            speculation: self.config.settings.speculative,
            split_decode_rows: device.captures_graphs(),
        };
        let (logits_rows, top) = (self.max_logits_rows(), self.max_top_logprobs());
        let top_logprobs = top;
        let size =
            StepStateSize { kv, states, draft_kv, limits, longest, logits_rows, top_logprobs };
        StepState::new(&self.model.ops, self.config.settings.epoch, &size, tables)
    }
}

/// Loads the target model, then the draft model. The progress report covers both models together.
struct ModelLoader<'a> {
    ops: &'a Ops,
    settings: &'a ExecutorSettings,
    ranks: ParallelRanks,
    kv_dtype: DType,
    threads: usize,
    /// Total bytes of the weights of the model that is being loaded, for the progress report.
    model_bytes: u64,
    /// Total bytes of the weights that were loaded before the current model. The progress report covers
    /// target model and draft model together.
    bytes_before: u64,
    progress: &'a mut dyn FnMut(StartupPhaseProgress),
    /// Digest of the weights of the model that is being loaded.
    digest: WeightsDigest,
}

impl ModelLoader<'_> {
    fn load<T>(
        &mut self,
        placement: Option<&ExpertPlacement>,
        kv_grouping: &KvGrouping,
        how: impl FnOnce(ModelLoadOptions<'_>) -> Result<T, ModelLoadError>,
    ) -> Result<T, ModelLoadError> {
        self.bytes_before += std::mem::take(&mut self.model_bytes);
        how(ModelLoadOptions {
            ops: self.ops,
            ranks: self.ranks,
            placement,
            format: source(self.settings),
            kv_dtype: self.kv_dtype,
            kv_grouping,
            max_positions: self.settings.max_model_len as usize,
            threads: self.threads,
            progress: &mut |done, total| {
                self.model_bytes = total;
                let (done, total) = (self.bytes_before + done, self.bytes_before + total);
                (self.progress)(StartupPhaseProgress { phase: StartupPhase::Load, done, total });
            },
            digest: &mut self.digest,
        })
    }
}

/// Returns the KV cache layout of the target model, whose layers are grouped by `grouping`. The draft model's
/// KV pool has the same block ids, so that each block of any group has space for its keys and values.
fn combined_kv_spec(
    config: &ExecutorConfig,
    grouping: &KvGrouping,
    dtype: DType,
    ranks: &ParallelRanks,
) -> Result<KvSpec, ExecutorError> {
    let of = |model: &models::ModelConfig, grouping: &KvGrouping| {
        let block_tokens = config.settings.block_tokens;
        kv_spec(model, grouping, dtype, block_tokens, ranks).map_err(uneven_heads_error)
    };
    let mut spec = of(&config.model, grouping)?;
    if let Some(draft) = &config.draft {
        let draft_bytes = of(draft, &KvGrouping::of_draft(draft, grouping))?.bytes_per_block();
        for group in spec.groups.iter_mut().filter(|group| !group.kind.is_state()) {
            group.bytes_per_block += draft_bytes;
        }
    }
    Ok(spec)
}

/// Returns the error for attention heads that cannot be split evenly over the ranks.
fn uneven_heads_error(error: UnevenSplitError) -> ExecutorError {
    ModelLoadError::Split { tensor: "k_proj".to_owned(), error }.into()
}

/// Handle of a trace in progress. The trace may be closed on another thread.
#[derive(Clone)]
pub struct TraceHandle(Arc<TraceSession>);

impl TraceHandle {
    /// Path of the trace file. It contains Chrome's trace event JSON, and is valid JSON after every write.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Completes the trace file with the steps that are finished; later steps are not recorded. A trace file
    /// without steps is removed.
    ///
    /// Errors: the trace file could not be written.
    pub fn close(&self) -> Result<(), ExecutorError> {
        self.0.close()
    }
}

/// A submitted step that is in flight on the device. It may be finished on another thread.
pub struct SubmittedStep(PendingStep);

impl SubmittedStep {
    /// Waits for the device and returns the output of the step.
    pub fn finish(self) -> Result<StepOutput, ExecutorError> {
        self.0.finish()
    }
}

impl std::fmt::Debug for TraceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceHandle").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for SubmittedStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubmittedStep").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("ops", &self.model.ops).finish_non_exhaustive()
    }
}
