//! Runs one batch as a step. The pipeline over a [`StepContext`] [stages](stage) the inputs, launches the
//! [forward](forward) pass, [pools](pooling) hidden states, [samples](sample) tokens and starts the [copy of
//! the outputs](pending_step).
//!
//! A step is submitted and finished separately: in between, the device computes, and the next step may be
//! submitted. All inputs of a step are uploaded in one copy, and its sampled tokens are downloaded in one
//! copy.

mod bitmasks;
mod context;
mod draft_report;
mod forward;
mod graphs;
mod launch;
mod limits;
mod logits_rows;
mod pending_step;
mod pooling;
mod row_facts;
mod sample;
mod stage;
mod staging_queue;

use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::sequence_slots::{BlockTableChange, BlockTableLimits, HostSequenceSlots};
use crate::spec_decode::{self, ConfiguredProposer, Proposer};
use crate::trace::StepTracer;
use context::StepContext;
use logits_rows::LogitsRow;
use ops::{
    DeviceSequenceSlots, DraftBuffers, KvPool, KvPoolLayout, MeanPoolingSums, Ops,
    RecurrentStateLayout, ReplayBufferLimits, SequenceSlotLimits, StepBufferLimits, StepBuffers,
    TokenIdDownload,
};
use pending_step::OutputMemoryPool;
use pooling::PoolingHostMemory;
use protocol::{Batch, Epoch};
use staging_queue::StagingQueue;

pub use bitmasks::{TokenBitmaskSource, UnconstrainedBitmaskSource};
pub(crate) use graphs::{GraphCapturePlan, ReplayCaptureLimits, StepGraphs, row_counts_to_capture};
pub(crate) use launch::{StepDeviceState, StepLaunchOptions};
pub(crate) use limits::StepLimits;
pub(crate) use logits_rows::logits_rows_per_slice;
pub(crate) use pending_step::PendingStep;

/// Maximum number of steps whose input or output copies are in flight.
pub(crate) const STEPS_IN_FLIGHT: usize = 2;

/// Sizes from which `StepState` (KV pools, sequence slots, buffers) is allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepStateSize {
    pub(crate) kv: KvPoolLayout,
    /// Layout of the recurrent states; `None` = the model has none.
    pub(crate) states: Option<RecurrentStateLayout>,
    /// Layout of the proposer's separate KV pool, which has the same block ids as `kv`; `None` = the proposer
    /// has no separate KV pool.
    pub(crate) draft_kv: Option<KvPoolLayout>,
    pub(crate) limits: StepLimits,
    /// Maximum number of tokens of a request (prompt and output).
    pub(crate) longest: usize,
    /// Maximum number of logits rows that are sampled at a time.
    pub(crate) logits_rows: usize,
    /// Maximum number of top log-probabilities per token.
    pub(crate) top_logprobs: usize,
}

/// State of an executor that all its steps share and change: KV pool, sequence slots and staging memory. It
/// is allocated when the KV cache is sized.
pub(crate) struct StepState {
    epoch: Epoch,
    size: StepStateSize,
    pub(crate) device: StepDeviceState,
    seq_slots: HostSequenceSlots,
    proposer: Option<Box<dyn Proposer>>,
    staging: StagingQueue,
    output_memory: OutputMemoryPool,
    pooled_memory: PoolingHostMemory,
    /// Sums of hidden states for mean pooling; allocated at the first step with mean pooling.
    pooled_sums: Option<MeanPoolingSums>,
    pub(crate) graphs: StepGraphs,
    /// Block table changes of the rows of the current step, with one change per KV group for each row. This vector and `logits_rows` are kept between
    /// steps, so that each step reuses their memory.
    table_changes: Vec<BlockTableChange>,
    logits_rows: Vec<LogitsRow>,
}

impl StepState {
    /// Allocates the state. `tables`: limits of the block tables of each KV group.
    pub(crate) fn new(
        ops: &Ops,
        epoch: Epoch,
        size: &StepStateSize,
        tables: Vec<BlockTableLimits>,
    ) -> Result<Self, ExecutorError> {
        let StepStateSize { kv, states, draft_kv, limits, longest, logits_rows, top_logprobs } =
            *size;
        let words = limits.stage_words(longest, logits_rows);
        let stage_bytes = logits_rows::stage_bytes(&limits, logits_rows, words);
        let buffers = StepBuffers::new(
            ops,
            StepBufferLimits {
                tokens: limits.tokens,
                rows: limits.stage_rows(),
                logits_rows,
                top_logprobs,
                stage_bytes,
                groups: limits.groups,
                block_tokens: limits.block_tokens as usize,
                verification: spec_decode::verification(limits.speculation),
            },
        )?;
        let setup = ConfiguredProposer::new(&limits, &kv, logits_rows);
        let drafts = setup.buffers.map(|size| DraftBuffers::new(ops, size)).transpose()?;
        let id_copy = drafts.as_ref().map(|_| TokenIdDownload::new(ops, &buffers)).transpose()?;
        let seq_slots = SequenceSlotLimits {
            seq_slots: limits.rows,
            groups: limits.groups,
            table_width: longest.div_ceil(limits.block_tokens as usize),
            max_len: longest,
            vocab: limits.vocab,
        };
        let seq_slots = DeviceSequenceSlots::new(ops, seq_slots)?;
        let replay = ReplayBufferLimits { rows: limits.stage_rows(), replay: limits.replay() };
        Ok(Self {
            epoch,
            size: *size,
            staging: StagingQueue::new(ops, words, stage_bytes)?,
            output_memory: OutputMemoryPool::new(ops, &buffers)?,
            pooled_memory: PoolingHostMemory::new(),
            pooled_sums: None,
            device: StepDeviceState {
                kv: KvPool::new(ops, kv)?.with_states(ops, states)?.with_replay(ops, replay)?,
                draft_kv: draft_kv.map(|kv| KvPool::new(ops, kv)).transpose()?,
                seq_slots,
                buffers,
                drafts,
                id_copy,
            },
            seq_slots: HostSequenceSlots::new(limits.rows as u32, tables, kv.blocks() as u32),
            proposer: setup.proposer,
            graphs: StepGraphs::default(),
            table_changes: Vec::new(),
            logits_rows: Vec::new(),
        })
    }

    /// Returns the KV pool of the proposer; without a pool of its own, the pool of the target model.
    #[cfg(test)]
    pub(crate) fn draft_kv(&self) -> &KvPool {
        self.device.draft_kv.as_ref().unwrap_or(&self.device.kv)
    }

    /// Returns the device buffers of the proposer; `None` if no proposer runs on the device.
    #[cfg(test)]
    pub(crate) fn draft_buffers(&self) -> Option<&DraftBuffers> {
        self.device.drafts.as_ref()
    }

    /// Total bytes of the KV pools of the target model and of the proposer.
    pub(crate) fn kv_bytes(&self) -> u64 {
        (self.size.kv.bytes() + self.size.draft_kv.map_or(0, |kv| kv.bytes())) as u64
    }

    /// Launches a batch; [`PendingStep::finish`] returns its output. If the batch has masked rows (rows
    /// sampled under a grammar), `submit` launches the forward pass, waits for the bitmasks of these rows,
    /// and then samples all logits rows.
    ///
    /// Errors: the batch is inconsistent or does not match the sequence slots, bitmasks are missing, or the
    /// device fails.
    pub(crate) fn submit(
        &mut self,
        model: &ModelContext,
        batch: &Batch,
        masks: &mut dyn TokenBitmaskSource,
        tracer: Option<&mut StepTracer>,
    ) -> Result<PendingStep, ExecutorError> {
        let pending = PendingStep::new(batch, self.epoch, self.output_memory.sender());
        let mut context = StepContext::new(model, batch, pending);
        context.reports_drafts = context.has_masked_drafts() && masks.needs_drafts();
        self.stage(&mut context)?;
        if context.is_idle() {
            return Ok(context.pending);
        }
        self.report_host_drafts(&context, masks)?;
        self.forward(&mut context, tracer)?;
        self.report_device_drafts(&context, masks)?;
        self.pool(&mut context)?;
        self.sample(&mut context, masks)?;
        self.start_output_copy(context)
    }
}
