//! `Executor`: a loaded model with its KV cache, driven by calls.

use crate::inputs::{Inputs, StepLimits};
use crate::seats::Seats;
use crate::step::{Engine, State};
use crate::{Dtype, ExecutorConfig, ExecutorError, kv_pool, sampler, warm_up};
use collectives::Group;
use kernels::cpu::{CpuConfig, CpuDevice};
use kernels::{DType, DeviceError, KvLayout};
use models::config::CheckpointDType;
use models::{LoadOptions, kv_spec, load_model};
use ops::{KvPool, Ops};
use protocol::{Batch, KvSpec, Memory, Phase, Ready, StepOutput};
use std::sync::Arc;

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
        let device = open_device(&config)?;
        let threads = device.threads().threads();
        let dtype = dtype(&config);
        let ops = Ops::new(Arc::new(device), dtype)?;
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
        let passes = warm_up::passes(&self.config, self.rows_per_slice());
        let mut state = self.state(warm_up::blocks(&passes, block_tokens))?;
        let (phase, total) = (Phase::WarmUp, passes.len() as u64);
        progress(Progress { phase, done: 0, total });
        let ns_per_token = warm_up::measure(
            &passes,
            block_tokens,
            |batch| state.step(&self.engine, batch),
            |done| progress(Progress { phase, done, total }),
        )?;
        drop(state);
        let free_bytes = self.engine.ops.mem_info().free_bytes;
        let blocks = kv_pool::blocks(self.config.kv, free_bytes, self.spec.bytes_per_block());
        kv_pool::check(blocks, block_tokens, self.config.kv_tokens_min)?;
        Ok(Memory { spec: self.spec.clone(), blocks, ns_per_token })
    }

    /// Allocates the KV cache and everything else that steps change; contents are lost.
    pub fn size_kv(&mut self, blocks: u32) -> Result<Ready, ExecutorError> {
        kv_pool::check(blocks, self.config.block_tokens, self.config.kv_tokens_min)?;
        self.state = None;
        self.state = Some(self.state(blocks)?);
        Ok(Ready { blocks, graph_rows: Vec::new() })
    }

    /// Runs a batch and answers every row of it.
    ///
    /// Errors: all are final. After one of them the executor is of no further use.
    pub fn step(&mut self, batch: &Batch) -> Result<StepOutput, ExecutorError> {
        let state = self.state.as_mut().ok_or(ExecutorError::NotSized)?;
        state.step(&self.engine, batch)
    }

    /// Layout of the KV cache.
    #[must_use]
    pub fn kv_spec(&self) -> &KvSpec {
        &self.spec
    }

    fn rows_per_slice(&self) -> usize {
        sampler::rows_per_slice(self.config.model.vocab)
    }

    fn state(&self, blocks: u32) -> Result<State, ExecutorError> {
        let ExecutorConfig { model, block_tokens, max_num_seqs, .. } = &self.config;
        let layout = KvLayout {
            layers: model.layers,
            blocks: blocks as usize,
            block_tokens: *block_tokens as usize,
            kv_heads: model.kv_heads,
            head_dim: model.head_dim,
            dtype: self.engine.ops.dtype(),
        };
        let width = self.config.max_model_len.div_ceil(*block_tokens) as usize;
        let limits = StepLimits {
            tokens: self.config.tokens_per_step as usize,
            rows: *max_num_seqs as usize,
            block_tokens: *block_tokens,
            width,
            vocab: model.vocab,
        };
        Ok(State {
            epoch: self.config.epoch,
            kv: KvPool::new(&self.engine.ops, layout)?,
            seats: Seats::new(*max_num_seqs, width, blocks),
            inputs: Inputs::new(limits),
            banned: Vec::new(),
            rows_per_slice: self.rows_per_slice(),
        })
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("ops", &self.engine.ops).finish_non_exhaustive()
    }
}

fn open_device(config: &ExecutorConfig) -> Result<CpuDevice, DeviceError> {
    CpuDevice::new(CpuConfig { threads: config.threads.unwrap_or(0), ..CpuConfig::default() })
}

fn dtype(config: &ExecutorConfig) -> DType {
    match (config.dtype, config.model.dtype) {
        (Dtype::Float32, _) | (Dtype::Auto, Some(CheckpointDType::F32)) => DType::F32,
        (Dtype::Bfloat16 | Dtype::Auto, _) => DType::BF16,
    }
}
