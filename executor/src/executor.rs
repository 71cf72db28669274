//! `Executor`: a loaded model with its KV cache, driven by calls.

use crate::graph::{self, Graphs};
use crate::inputs::StepLimits;
use crate::step::{Engine, Pending, State, StateSize};
use crate::{ExecutorConfig, ExecutorError, device, kv_pool, rehearsal, sampler, warm_up};
use collectives::Group;
use kernels::KvLayout;
use models::{LoadOptions, kv_spec, load_model};
use ops::{Ops, StepShape};
use protocol::{Batch, KvSpec, Memory, Phase, Ready, StepOutput};

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
    config: ExecutorConfig,
    engine: Engine,
    spec: KvSpec,
    state: Option<State>,
}

impl Executor {
    /// Starts the device and loads the model.
    pub fn load(
        config: ExecutorConfig,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, ExecutorError> {
        let (device, threads) = device::open(&config)?;
        let dtype = device::dtype(&config);
        let ops = Ops::new(device, dtype)?;
        let phase = Phase::Load;
        let options = LoadOptions {
            ops: &ops,
            format: config.source,
            max_positions: config.max_model_len as usize,
            threads,
            progress: &mut |done, total| progress(Progress { phase, done, total }),
        };
        let model = load_model(&config.dir, &config.model, options)?;
        let spec = kv_spec(&config.model, dtype, config.block_tokens);
        let engine = Engine { ops, model, tp: Group::single(), ep: Group::single() };
        Ok(Self { config, engine, spec, state: None })
    }

    /// Runs the first passes, on blocks of their own, and says what this rank can hold.
    pub fn warm_up(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<Memory, ExecutorError> {
        let block_tokens = self.config.block_tokens;
        let whole_budget = self.engine.ops.device().captures_graphs();
        let passes = warm_up::passes(&self.config, self.questions(), whole_budget);
        let mut state = self.state(warm_up::blocks(&passes, block_tokens))?;
        let (phase, total) = (Phase::WarmUp, passes.len() as u64);
        progress(Progress { phase, done: 0, total });
        if whole_budget {
            let shapes = self.shapes_to_come(&passes);
            rehearsal::rehearse(&self.engine, &mut state.device, shapes)?;
        }
        let ns_per_token = warm_up::measure(
            &passes,
            block_tokens,
            |batch| state.submit(&self.engine, batch)?.finish(),
            |done| progress(Progress { phase, done, total }),
        )?;
        let blocks = self.blocks(&state)?;
        drop(state);
        kv_pool::check(blocks, block_tokens, self.config.kv_tokens_min)?;
        Ok(Memory { spec: self.spec.clone(), blocks, ns_per_token })
    }

    /// Allocates the KV cache and everything else that steps change; contents are lost.
    pub fn size_kv(
        &mut self,
        blocks: u32,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Ready, ExecutorError> {
        kv_pool::check(blocks, self.config.block_tokens, self.config.kv_tokens_min)?;
        self.state = None;
        let mut state = self.state(blocks)?;
        let graph_rows = self.graph_rows();
        let (phase, total) = (Phase::Capture, graph_rows.len() as u64);
        if total > 0 {
            let longest = self.config.max_model_len as usize;
            let tell = |done| progress(Progress { phase, done, total });
            let device = &mut state.device;
            state.graphs = Graphs::capture(&self.engine, device, &graph_rows, longest, tell);
        }
        let graph_rows = state.graphs.rows();
        self.state = Some(state);
        Ok(Ready { blocks, graph_rows })
    }

    /// Hands a batch to the device. Steps run in the order in which they were submitted.
    ///
    /// Errors: all are final. After one of them the executor is of no further use.
    pub fn submit(&mut self, batch: &Batch) -> Result<Submitted, ExecutorError> {
        let state = self.state.as_mut().ok_or(ExecutorError::NotSized)?;
        Ok(Submitted(state.submit(&self.engine, batch)?))
    }

    /// Runs a batch and answers every row of it: `submit`, then `finish`.
    pub fn step(&mut self, batch: &Batch) -> Result<StepOutput, ExecutorError> {
        self.submit(batch)?.finish()
    }

    /// Layout of the KV cache.
    #[must_use]
    pub fn kv_spec(&self) -> &KvSpec {
        &self.spec
    }

    /// Blocks this rank can hold, measured while everything else is allocated.
    fn blocks(&self, state: &State) -> Result<u32, ExecutorError> {
        let memory = self.engine.ops.mem_info();
        let (kv, block_bytes) = (self.config.kv, self.spec.bytes_per_block());
        if !self.engine.ops.device().captures_graphs() {
            return Ok(kv_pool::blocks(kv, memory.free_bytes, block_bytes));
        }
        let gpu = kv_pool::GpuMemory {
            total: memory.total_bytes,
            free: memory.free_bytes + state.kv_bytes(),
            utilization: self.config.memory_utilization,
            graphs: self.graph_rows().len() as u64,
        };
        gpu.blocks(kv, block_bytes)
    }

    /// Likeliest ids an answer can list.
    fn top(&self) -> usize {
        (self.config.logprobs_max as usize).min(self.config.model.vocab)
    }

    /// Questions answered at a time.
    fn questions(&self) -> usize {
        let gpu = self.engine.ops.device().captures_graphs();
        sampler::questions_per_slice(self.config.model.vocab, self.top(), gpu)
    }

    /// Shapes of the first passes and of the steps to record.
    fn shapes_to_come(&self, passes: &[Vec<u32>]) -> Vec<StepShape> {
        let questions = self.questions();
        let pass = |lens: &Vec<u32>| rehearsal::shape(lens, questions);
        let longest = self.config.max_model_len as usize;
        let graph = |rows| graph::shape(rows as usize, longest);
        passes.iter().map(pass).chain(self.graph_rows().into_iter().map(graph)).collect()
    }

    /// Rows of the steps to record.
    fn graph_rows(&self) -> Vec<u32> {
        if self.config.enforce_eager || !self.engine.ops.device().captures_graphs() {
            return Vec::new();
        }
        let rows = self.config.max_num_seqs.min(self.config.tokens_per_step) as usize;
        graph::rows_up_to(rows.min(self.questions()))
    }

    fn state(&self, blocks: u32) -> Result<State, ExecutorError> {
        let ExecutorConfig { model, block_tokens, max_num_seqs, max_model_len, .. } = &self.config;
        let (device, longest) = (self.engine.ops.device(), *max_model_len as usize);
        let kv = KvLayout {
            layers: model.layers,
            blocks: blocks as usize,
            block_tokens: *block_tokens as usize,
            kv_heads: model.kv_heads,
            head_dim: model.head_dim,
            dtype: self.engine.ops.dtype(),
            order: device.kv_order(),
        };
        let limits = StepLimits {
            tokens: self.config.tokens_per_step as usize,
            rows: *max_num_seqs as usize,
            block_tokens: *block_tokens,
            width: longest.div_ceil(*block_tokens as usize),
            vocab: model.vocab,
        };
        let (questions, top) = (self.questions(), self.top());
        let size = StateSize { kv, limits, longest, questions, top };
        State::new(&self.engine.ops, self.config.epoch, size)
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
