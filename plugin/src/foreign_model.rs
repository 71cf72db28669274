//! A model whose host is a foreign inference server: its forward pass reads and writes memory of the host.

use models::config::ModelHead;
use models::{
    ExpertExchangeMethod, ForwardContext, KvGrouping, LoadedModel, Model, ModelConfig,
    ModelLoadOptions, OutputMemory, kv_layout, load_model,
};
use ops::{
    BatchUpperBounds, DType, DeviceBatchMetadata, ForeignStepArrays, ForeignStepBatch,
    ForeignStepBuffers, HostBatchMetadata, KvPool, KvPoolLayout, Ops, Tensor,
};
use protocol::{KvKind, WeightsDigest};

use crate::foreign_array::INTEGERS;
use crate::foreign_ranks::RankGroup;
use crate::{ForeignArray, ForeignRanks, PluginError, PluginOptions, open_device};

/// One step of a host, as `hadron_step` in `include/hadron.h`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct ForeignStep {
    /// Size of this structure in bytes.
    pub struct_bytes: u32,
    /// Whether row `r` has exactly token `r`, and rows without context are padding.
    pub one_token_rows: u32,
    /// Stream of the host.
    pub stream: u64,
    /// Token ids, i32 or i64 `[tokens]`.
    pub token_ids: ForeignArray,
    /// Positions, i32 or i64 `[tokens]`.
    pub positions: ForeignArray,
    /// KV slots, i64 `[tokens]`.
    pub slots: ForeignArray,
    /// Row boundaries, i32 `[rows + 1]`.
    pub row_starts: ForeignArray,
    /// Context lengths, i32 or i64 `[rows]`.
    pub context_lens: ForeignArray,
    /// Block tables, i32 `[rows, table_width]`.
    pub block_tables: ForeignArray,
    /// Indices of the tokens whose hidden states are computed, i32 `[outputs]`.
    pub output_tokens: ForeignArray,
    /// Output: hidden states `[outputs, hidden_size]`, or `[tokens, hidden_size]` if `outputs` is 0.
    pub hidden: ForeignArray,
    /// Number of tokens.
    pub tokens: u32,
    /// Number of rows.
    pub rows: u32,
    /// Entries of a block table.
    pub table_width: u32,
    /// Number of the first rows that have one token each.
    pub decode_rows: u32,
    /// Upper bound of the tokens of a row.
    pub max_query_len: u32,
    /// Upper bound of the context lengths.
    pub max_context_len: u32,
    /// Number of tokens whose hidden states are computed, at most `rows`; 0 = all tokens.
    pub outputs: u32,
    /// Zero.
    pub reserved: u32,
}

/// Work of the device since a model was opened, as `hadron_counters` in `include/hadron.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ModelCounters {
    /// Allocations of device memory.
    pub allocations: u64,
    /// Loaded kernel modules.
    pub kernel_modules: u64,
    /// Waits of the host for the device.
    pub synchronizations: u64,
    /// Completed forward passes.
    pub steps: u64,
}

/// A loaded model, with the scratch memory of its steps and the KV cache of the host.
pub struct ForeignModel {
    pub(crate) options: PluginOptions,
    pub(crate) config: ModelConfig,
    pub(crate) ops: Ops,
    /// Declared before `ranks`: the model's tensors are dropped before the communicator.
    model: Box<dyn Model>,
    pub(crate) ranks: RankGroup,
    data_parallel: collectives::ParallelGroup,
    pub(crate) grouping: KvGrouping,
    pub(crate) weight_bytes: u64,
    pub(crate) buffers: ForeignStepBuffers,
    /// Pool of one block for the rehearsal; the LM head needs a pool and a batch, which it does not read.
    pub(crate) rehearsal_pool: KvPool,
    empty_batch: DeviceBatchMetadata,
    kv: Option<KvPool>,
    steps: u64,
}

impl ForeignModel {
    /// Opens the device and loads the model.
    ///
    /// Errors: the model is not supported under a foreign host, or cannot be loaded.
    ///
    /// # Safety
    /// `host` is as `include/hadron.h` describes.
    pub unsafe fn open(
        options: PluginOptions,
        host: Option<&ForeignRanks>,
    ) -> Result<Self, PluginError> {
        let config = ModelConfig::from_dir(&options.model_dir)?;
        check_model(&config)?;
        let opened = open_device::open(&options, host.map_or(1, |host| host.size as usize))?;
        // SAFETY: the caller guarantees the communication of the host.
        let join = |host| unsafe { RankGroup::join(host, &opened.backend) };
        let ranks = host.map_or_else(|| Ok(RankGroup::single()), join)?;
        let grouping = KvGrouping::new(&config, options.max_model_len, false, &ranks.ranks);
        check_grouping(&config, &grouping)?;
        let (dtype, kv_dtype) = (options.dtype(), options.kv_dtype());
        if config.mla.is_some() && kv_dtype != dtype {
            return Err(PluginError::MlaKvDtype);
        }
        let ops = Ops::new(opened.backend, dtype)?;
        let mut weight_bytes = 0;
        let LoadedModel { model, .. } = load_model(
            &options.model_dir,
            &config,
            ModelLoadOptions {
                ops: &ops,
                ranks: ranks.ranks,
                placement: None,
                format: options.format(),
                kv_dtype,
                kv_grouping: &grouping,
                max_positions: options.max_model_len,
                threads: opened.threads,
                progress: &mut |_, total| weight_bytes = total,
                digest: &mut WeightsDigest::default(),
            },
        )?;
        ops.device().finish_loading();
        let buffers = ForeignStepBuffers::new(&ops, options.max_num_tokens, options.max_num_rows)?;
        let data_parallel = collectives::ParallelGroup::single();
        let order = ops.device().kv_order();
        let (blocks, tokens) = (1, options.block_tokens);
        let layout = kv_layout(&config, &grouping, kv_dtype, blocks, tokens, order, &ranks.ranks)?;
        let rehearsal_pool = KvPool::new(&ops, layout)?;
        let no_rows = HostBatchMetadata { cu_q: vec![0], ..HostBatchMetadata::default() };
        let empty_batch = DeviceBatchMetadata::new(&ops, &no_rows)?;
        let (kv, steps) = (None, 0);
        Ok(Self {
            options,
            config,
            ops,
            model,
            ranks,
            data_parallel,
            grouping,
            weight_bytes,
            buffers,
            rehearsal_pool,
            empty_batch,
            kv,
            steps,
        })
    }

    /// Returns the layout of a KV cache of `blocks` blocks of `block_tokens` tokens on this rank.
    pub(crate) fn kv_layout(
        &self,
        blocks: usize,
        block_tokens: usize,
    ) -> Result<KvPoolLayout, PluginError> {
        let (dtype, order) = (self.options.kv_dtype(), self.ops.device().kv_order());
        let (config, ranks) = (&self.config, &self.ranks.ranks);
        Ok(kv_layout(config, &self.grouping, dtype, blocks, block_tokens, order, ranks)?)
    }

    /// Replaces the KV cache by the arrays `layers` of the host, one per layer.
    ///
    /// Errors: the number of arrays, a size or an alignment does not fit the model.
    ///
    /// # Safety
    /// The arrays are memory of the device that exists until the next call of this function, or until the model is dropped.
    pub unsafe fn bind_kv(
        &mut self,
        layers: &[ForeignArray],
        blocks: usize,
        block_tokens: usize,
    ) -> Result<(), PluginError> {
        check_equal("block_tokens", block_tokens as u64, self.options.block_tokens as u64)?;
        check_at_most("blocks", blocks, i32::MAX as usize / block_tokens)?;
        let layout = self.kv_layout(blocks, block_tokens)?;
        let count = self.grouping.pool_layers();
        if layers.len() != count {
            let (got, expected) = (layers.len() as u64, count as u64);
            return Err(PluginError::Mismatch {
                argument: "layers of the KV cache",
                got,
                expected,
            });
        }
        let bytes = layout.bytes() / count.max(1);
        let dtypes = only_dtype(self.options.kv_dtype());
        layers
            .iter()
            .try_for_each(|layer| layer.dtype("layer of the KV cache", dtypes).map(drop))?;
        // SAFETY: the caller guarantees the memory.
        let buffer = |layer: &ForeignArray| unsafe { layer.buffer("layer of the KV cache", bytes) };
        let buffers = layers.iter().map(buffer).collect::<Result<Vec<_>, _>>()?;
        self.kv = Some(KvPool::foreign(buffers, layout)?);
        Ok(())
    }

    /// Runs the forward pass of a step. On a GPU, returns when all launches are submitted to the stream of the host.
    ///
    /// Errors: an argument is invalid, or the device failed.
    ///
    /// # Safety
    /// The arrays are memory of the device, of which only `hidden` is written, and the stream is a stream of the device. They
    /// exist until the launches of the step have completed.
    pub unsafe fn forward(&mut self, step: &ForeignStep) -> Result<(), PluginError> {
        let ForeignStep { tokens, rows, table_width, .. } = *step;
        let (tokens, rows, width) = (tokens as usize, rows as usize, table_width as usize);
        if tokens == 0 {
            return Ok(());
        }
        self.check_step(step)?;
        let Self { ops, kv, buffers, .. } = self;
        let pool = kv.as_ref().ok_or(PluginError::KvNotBound)?;
        let dtype = ops.dtype();
        step.hidden.dtype("hidden", only_dtype(dtype))?;
        let outputs = step.outputs as usize;
        let hidden_rows = if outputs == 0 { tokens } else { outputs };
        // SAFETY: the caller guarantees memory and stream for the launches of this call.
        let (host, tables, output_tokens, hidden, stream) = unsafe {
            let integers =
                |argument, array: &ForeignArray, len| array.vector(argument, INTEGERS, len);
            let row_starts = || step.row_starts.vector("row_starts", &[DType::I32], rows + 1);
            let host = ForeignStepArrays {
                ids: integers("token_ids", &step.token_ids, tokens)?,
                positions: integers("positions", &step.positions, tokens)?,
                slots: step.slots.vector("slots", &[DType::I64], tokens)?,
                row_starts: (step.one_token_rows == 0).then(row_starts).transpose()?,
                context_lens: integers("context_lens", &step.context_lens, rows)?,
            };
            step.block_tables.dtype("block_tables", &[DType::I32])?;
            let tables = step.block_tables.buffer("block_tables", rows * width * 4)?;
            let output_tokens = || {
                step.output_tokens.dtype("output_tokens", &[DType::I32])?;
                step.output_tokens.buffer("output_tokens", outputs * 4)
            };
            let output_tokens = (outputs > 0).then(output_tokens).transpose()?;
            let hidden_bytes = hidden_rows * self.config.hidden * dtype.bytes();
            let hidden = step.hidden.buffer("hidden", hidden_bytes)?;
            let gpu = ops.device().gpu();
            let stream = gpu.map(|gpu| gpu.enter_foreign_stream(step.stream)).transpose();
            (host, tables, output_tokens, hidden, stream.map_err(device::DeviceError::from)?)
        };
        let tables = Tensor::foreign(tables, DType::I32, &[rows, width])?;
        let hidden = Tensor::foreign(hidden, dtype, &[hidden_rows, self.config.hidden])?;
        let output_tokens = output_tokens
            .map(|buffer| Tensor::foreign(buffer, DType::I32, &[outputs]))
            .transpose()?;
        let batch = buffers.prepare(ops, host, tables, StepNumbers::of(step).bounds())?;
        let output = OutputMemory::new(hidden);
        let ForeignStepBatch { metadata, ids } = &batch;
        let f = ForwardContext {
            logits_indices: output_tokens.as_ref(),
            ..context(ops, &self.ranks, &self.data_parallel, pool, metadata, Some(&output))
        };
        self.model.forward(&f, ids)?;
        drop(stream);
        self.steps += 1;
        Ok(())
    }

    /// Computes the logits, f32 `[rows, vocab_size]`, of `hidden [rows, hidden_size]`.
    ///
    /// Errors: an argument is invalid, or the device failed.
    ///
    /// # Safety
    /// As for [`ForeignModel::forward`]; only `logits` is written.
    pub unsafe fn logits(
        &mut self,
        stream: u64,
        hidden: &ForeignArray,
        logits: &ForeignArray,
        rows: usize,
    ) -> Result<(), PluginError> {
        let limit = self.options.max_num_tokens.max(self.options.max_num_rows);
        check_at_most("rows", rows, limit)?;
        if rows == 0 {
            return Ok(());
        }
        let dtype = self.ops.dtype();
        hidden.dtype("hidden", only_dtype(dtype))?;
        logits.dtype("logits", &[DType::F32])?;
        let (channels, vocab) = (self.config.hidden, self.config.vocab);
        // SAFETY: the caller guarantees memory and stream for the launches of this call.
        let (hidden, logits, stream) = unsafe {
            let hidden = hidden.buffer("hidden", rows * channels * dtype.bytes())?;
            let logits = logits.buffer("logits", rows * vocab * 4)?;
            let gpu = self.ops.device().gpu();
            let stream = gpu.map(|gpu| gpu.enter_foreign_stream(stream)).transpose();
            (hidden, logits, stream.map_err(device::DeviceError::from)?)
        };
        let hidden = Tensor::foreign(hidden, dtype, &[rows, channels])?;
        let logits = Tensor::foreign(logits, DType::F32, &[rows, vocab])?;
        self.head(&hidden, logits)?;
        drop(stream);
        Ok(())
    }

    /// Computes the logits of `hidden [rows, hidden_size]` in the memory of `logits`.
    pub(crate) fn head(&self, hidden: &Tensor, logits: Tensor) -> Result<(), PluginError> {
        let Self { ops, ranks, data_parallel, rehearsal_pool, empty_batch, .. } = self;
        let output = OutputMemory::new(logits);
        let f = context(ops, ranks, data_parallel, rehearsal_pool, empty_batch, Some(&output));
        self.model.logits(&f, hidden)?;
        Ok(())
    }

    /// Runs a forward pass over a batch on the pool for the rehearsal. Returns the hidden states of all tokens, or of those with
    /// the indices `output_tokens`, i32 `[outputs]`.
    pub(crate) fn rehearse_batch(
        &self,
        batch: &DeviceBatchMetadata,
        ids: &Tensor,
        output_tokens: Option<&Tensor>,
    ) -> Result<Tensor, PluginError> {
        let Self { ops, ranks, data_parallel, rehearsal_pool, .. } = self;
        let f = ForwardContext {
            logits_indices: output_tokens,
            ..context(ops, ranks, data_parallel, rehearsal_pool, batch, None)
        };
        Ok(self.model.forward(&f, ids)?)
    }

    /// Returns the work of the device since the model was opened.
    #[must_use]
    pub fn counters(&self) -> ModelCounters {
        let driver = self.ops.device();
        let device::DriverCallCounts { allocations, synchronizations } =
            driver.driver_call_counts();
        let kernel_modules = driver.loaded_modules() as u64;
        ModelCounters { allocations, kernel_modules, synchronizations, steps: self.steps }
    }

    /// Checks the numbers of a step against the limits of the model and against each other.
    fn check_step(&self, step: &ForeignStep) -> Result<(), PluginError> {
        let expected = size_of::<ForeignStep>() as u64;
        check_equal("struct_bytes", u64::from(step.struct_bytes), expected)?;
        let PluginOptions { max_num_tokens, max_num_rows, max_model_len, .. } = self.options;
        check_at_most("tokens", step.tokens as usize, max_num_tokens)?;
        check_at_most("rows", step.rows as usize, max_num_rows)?;
        check_at_most("max_context_len", step.max_context_len as usize, max_model_len)?;
        check_at_most("decode_rows", step.decode_rows as usize, step.rows as usize)?;
        check_at_most("max_query_len", step.max_query_len as usize, step.tokens as usize)?;
        check_at_most("outputs", step.outputs as usize, step.rows as usize)?;
        if step.one_token_rows != 0 {
            check_equal("rows of one token", u64::from(step.rows), u64::from(step.tokens))?;
        }
        if self.kv.is_none() {
            return Err(PluginError::KvNotBound);
        }
        let table_tokens = step.table_width as usize * self.options.block_tokens;
        check_at_most("max_context_len", step.max_context_len as usize, table_tokens)
    }
}

/// Returns the inputs of a forward pass or of a pass of the LM head.
fn context<'a>(
    ops: &'a Ops,
    ranks: &'a RankGroup,
    data_parallel: &'a collectives::ParallelGroup,
    kv: &'a KvPool,
    batch: &'a DeviceBatchMetadata,
    output_memory: Option<&'a OutputMemory>,
) -> ForwardContext<'a> {
    ForwardContext {
        ops,
        tp: &ranks.group,
        dp: data_parallel,
        dp_rows: 0,
        expert_exchange: ExpertExchangeMethod::AllGather,
        kv,
        batch,
        logits_indices: None,
        aux_hidden_states: None,
        expert_load: None,
        output_memory,
        probe: None,
    }
}

/// Rejects models with a part that no foreign host runs.
fn check_model(config: &ModelConfig) -> Result<(), PluginError> {
    let architecture = config.architecture.name();
    let what = match config.head {
        _ if config.eagle.is_some() => "the weights of a draft model only",
        ModelHead::Language => return Ok(()),
        ModelHead::Absent => "no LM head",
        ModelHead::Classifier { .. } | ModelHead::TokenClassifier { .. } => "a classification head",
    };
    Err(PluginError::UnsupportedModel { architecture, what })
}

/// Rejects models whose KV cache is not the same for all layers.
fn check_grouping(config: &ModelConfig, grouping: &KvGrouping) -> Result<(), PluginError> {
    let architecture = config.architecture.name();
    let what = match grouping.kinds() {
        _ if grouping.state_layers() > 0 => "layers with recurrent state",
        _ if config.layer_shapes.is_some() => "KV heads of different sizes",
        [KvKind::Full | KvKind::Mla] => return Ok(()),
        _ => "layers with a sliding window shorter than max_model_len",
    };
    Err(PluginError::UnsupportedModel { architecture, what })
}

/// Numbers of a step by which kernels are selected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepNumbers {
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    /// Number of the first rows that have one token each.
    pub(crate) decode_rows: usize,
    /// Upper bound of the tokens of the other rows.
    pub(crate) max_query_len: usize,
    /// Upper bound of the context lengths.
    pub(crate) max_context_len: usize,
}

impl StepNumbers {
    fn of(step: &ForeignStep) -> Self {
        let (tokens, rows) = (step.tokens as usize, step.rows as usize);
        let decode_rows = if step.one_token_rows != 0 { rows } else { step.decode_rows as usize };
        let (max_query_len, max_context_len) =
            (step.max_query_len as usize, step.max_context_len as usize);
        Self { tokens, rows, decode_rows, max_query_len, max_context_len }
    }

    /// Returns upper bounds of the rows of every step with these numbers.
    pub(crate) fn bounds(&self) -> BatchUpperBounds {
        let Self { tokens, rows, decode_rows, max_query_len, max_context_len } = *self;
        let further_rows = rows - decode_rows;
        let further_tokens = tokens - decode_rows.min(tokens);
        let any = BatchUpperBounds::of_any(further_tokens, further_rows, max_context_len);
        let max_query_len = if further_rows == 0 { 0 } else { max_query_len };
        BatchUpperBounds {
            decode_rows,
            max_query_len,
            max_context_len,
            mla_decode_tokens: tokens,
            ..any
        }
    }
}

/// Returns a floating-point dtype as the only dtype of an argument.
fn only_dtype(dtype: DType) -> &'static [DType] {
    match dtype {
        DType::F32 => &[DType::F32],
        DType::F16 => &[DType::F16],
        DType::F8E4M3 => &[DType::F8E4M3],
        _ => &[DType::BF16],
    }
}

fn check_at_most(argument: &'static str, got: usize, limit: usize) -> Result<(), PluginError> {
    let (got, limit) = (got as u64, limit as u64);
    if got > limit { Err(PluginError::AboveLimit { argument, got, limit }) } else { Ok(()) }
}

fn check_equal(argument: &'static str, got: u64, expected: u64) -> Result<(), PluginError> {
    if got == expected { Ok(()) } else { Err(PluginError::Mismatch { argument, got, expected }) }
}
