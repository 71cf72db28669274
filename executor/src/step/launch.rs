//! Launches the kernels of a step: forward pass, LM head, sampler and draft passes. The launches are the same
//! for eager steps and for capture.
//!
//! Legend: T tokens, n logits rows, H hidden size, V vocabulary size.

use crate::ExecutorError;
use crate::clock::ns_since;
use crate::model_context::ModelContext;
use crate::spec_decode::{DraftRowCounts, ProposerModel};
use crate::trace::{SpanRecorder, TraceScope};
use models::{AuxHiddenStateCollector, ExpertExchangeMethod, ForwardContext};
use ops::{DType, DraftBuffers, KvPool, Ops, StepBuffers, StepShape, Tensor, TokenIdDownload};
use protocol::StepTiming;
use std::time::Instant;

/// Sizes and options of the launches of one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLaunchOptions {
    pub(crate) shape: StepShape,
    /// Number of rows per replica that MoE layers are padded to in a lockstep group; unused without lockstep.
    pub(crate) dp_rows: usize,
    /// Collective that exchanges tokens with the experts of other replicas (all-gather or all-to-all).
    pub(crate) expert_exchange: ExpertExchangeMethod,
    /// Whether the last layer computes hidden states only for the positions whose logits are needed.
    pub(crate) logits_rows_only: bool,
    /// Whether ranks that share the LM head all-gather full rows of logits before sampling.
    pub(crate) full_logits: bool,
    /// Whether recurrent states of rows with draft tokens are updated, because all logits rows are sampled in this launch.
    pub(crate) replays_states: bool,
    /// Row counts for the proposer on the device, if there is one.
    pub(crate) drafts: Option<DraftRowCounts>,
    /// Whether the token ids of the step, including draft tokens proposed on the device, are copied to the
    /// host.
    pub(crate) copies_ids: bool,
}

impl StepLaunchOptions {
    /// Creates the launch options of a step that has the same size on all ranks. `drafting`: number of rows
    /// with draft tokens, if a proposer runs on the device.
    pub(crate) fn uniform(
        shape: StepShape,
        full_logits: bool,
        drafting: Option<usize>,
        context: &ModelContext,
    ) -> Self {
        let padded = |rows| if context.dp.size() > 1 { rows } else { 0 };
        let draft_rows = |rows| DraftRowCounts { rows, drafting: rows, dp_rows: padded(rows) };
        Self {
            shape,
            dp_rows: padded(shape.tokens),
            expert_exchange: ExpertExchangeMethod::AllGather,
            logits_rows_only: samples_subset(&shape) && drafting.is_none(),
            full_logits,
            replays_states: true,
            drafts: drafting.map(draft_rows),
            copies_ids: false,
        }
    }
}

/// Device part of the state that all steps share and change: KV pools, sequence slots and buffers.
pub(crate) struct StepDeviceState {
    pub(crate) kv: KvPool,
    pub(crate) draft_kv: Option<KvPool>,
    pub(crate) seq_slots: ops::DeviceSequenceSlots,
    pub(crate) buffers: StepBuffers,
    /// Buffers of the proposer on the device (MTP module, EAGLE-3 layer or draft model), if there is one.
    pub(crate) drafts: Option<DraftBuffers>,
    /// Download of the token ids to the host, if a proposer runs on the device.
    pub(crate) id_copy: Option<TokenIdDownload>,
}

impl StepDeviceState {
    /// Launches a step whose inputs have been uploaded in the layout that `launch` describes. Returns the
    /// hidden states.
    pub(crate) fn launch(
        &mut self,
        context: &ModelContext,
        launch: StepLaunchOptions,
        timing: &mut StepTiming,
        recorder: &mut Option<SpanRecorder>,
    ) -> Result<Tensor, ExecutorError> {
        let started = Instant::now();
        let ModelContext { ops, model, .. } = context;
        let StepLaunchOptions {
            shape,
            dp_rows,
            expert_exchange,
            logits_rows_only,
            full_logits,
            replays_states,
            drafts,
            copies_ids,
        } = launch;
        SpanRecorder::record_scope(recorder, TraceScope::Prepare, || {
            Ok(self.buffers.prepare(ops, &mut self.seq_slots, shape)?)
        })?;
        if drafts.is_some() {
            SpanRecorder::record_scope(recorder, TraceScope::Draft, || {
                self.propose_drafts(context, &launch)
            })?;
        }
        if let (true, Some(copy)) = (copies_ids, &mut self.id_copy) {
            copy.start(ops, &self.buffers, shape.tokens)?;
        }
        let (batch, ids) = self.buffers.view(&self.seq_slots, shape)?;
        let (kv, expert_load) = (&self.kv, context.expert_load());
        ops.prepare_replay(kv, &batch)?;
        let sample_positions = self.buffers.logits_indices(shape.logits_rows)?;
        let logits_indices = logits_rows_only.then_some(&sample_positions);
        let aux_hidden_states =
            context.proposer.as_ref().and_then(ProposerModel::aux_hidden_states);
        let aux = aux_hidden_states.as_ref();
        let f = ForwardContext {
            dp_rows,
            expert_exchange,
            logits_indices,
            aux_hidden_states: aux,
            expert_load,
            ..context.forward_context(kv, &batch)
        };
        let hidden = SpanRecorder::record_scope(recorder, TraceScope::Forward, || {
            Ok(model.forward(&f, &ids)?)
        })?; // [T or n, H]
        if shape.logits_rows > 0 {
            let head = || match logits_indices {
                Some(_) => Ok(model.shard_logits(&f, &hidden)?),
                None => Ok(model.shard_logits(&f, &ops.gather_rows(&hidden, &sample_positions)?)?),
            };
            let logits = SpanRecorder::record_scope(recorder, TraceScope::LmHead, head)?; // [n, V of this rank]
            drop((batch, ids, sample_positions));
            timing.forward_ns += ns_since(started);
            let sample = || self.sample(context, &logits, full_logits, timing);
            SpanRecorder::record_scope(recorder, TraceScope::Sampling, sample)?;
        } else {
            drop((batch, ids, sample_positions));
            timing.forward_ns += ns_since(started);
        }
        if replays_states {
            self.replay_states(context, shape)?;
        }
        if let Some(DraftRowCounts { rows, .. }) = drafts {
            let states = aux_hidden_states.and_then(AuxHiddenStateCollector::states);
            let states = states.as_ref().unwrap_or(&hidden);
            let observe = || self.observe_tokens(context, &launch, rows, states);
            SpanRecorder::record_scope(recorder, TraceScope::Draft, observe)?;
        }
        Ok(hidden)
    }

    /// Applies the accepted draft tokens of a step of shape `shape` to recurrent states, after all its logits rows have been
    /// sampled.
    pub(crate) fn replay_states(
        &self,
        context: &ModelContext,
        shape: StepShape,
    ) -> Result<(), ExecutorError> {
        let (batch, _) = self.buffers.view(&self.seq_slots, shape)?;
        Ok(context.ops.replay_states(&self.kv, &batch, &self.seq_slots)?)
    }

    /// Gathers the rows of `x` from which logits are computed. The token indices of these `n` logits rows
    /// have been staged and uploaded.
    pub(crate) fn gather_staged(
        &mut self,
        ops: &Ops,
        x: &Tensor,
        n: usize,
    ) -> Result<Tensor, ExecutorError> {
        let shape = StepShape { logits_rows: n, ..StepShape::default() };
        self.buffers.prepare(ops, &mut self.seq_slots, shape)?;
        Ok(ops.gather_rows(x, &self.buffers.logits_indices(n)?)?)
    }

    /// Samples `n` rows of logits whose inputs have been staged and uploaded.
    pub(crate) fn sample_slice(
        &mut self,
        context: &ModelContext,
        hidden: &Tensor,
        n: usize,
        full_logits: bool,
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let ModelContext { ops, model, .. } = context;
        let shape = StepShape { logits_rows: n, ..StepShape::default() };
        self.buffers.prepare(ops, &mut self.seq_slots, shape)?;
        let (batch, _) = self.buffers.view(&self.seq_slots, shape)?;
        let f = ForwardContext {
            expert_load: context.expert_load(),
            ..context.forward_context(&self.kv, &batch)
        };
        let sample_positions = self.buffers.logits_indices(n)?;
        let sampled_hidden = ops.gather_rows(hidden, &sample_positions)?; // [n, H]
        let logits = model.shard_logits(&f, &sampled_hidden)?; // [n, V of this rank]
        drop((batch, sample_positions));
        timing.forward_ns += ns_since(started);
        self.sample(context, &logits, full_logits, timing)
    }

    /// Samples tokens from this rank's vocabulary shard of the logits. With `full_logits`, the ranks gather
    /// full rows of logits first; otherwise sampling is vocab-parallel.
    fn sample(
        &mut self,
        context: &ModelContext,
        logits: &Tensor,
        full_logits: bool,
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let ModelContext { ops, tp, vocab_shard, .. } = context;
        let Self { buffers, seq_slots, .. } = self;
        if tp.size() == 1 {
            buffers.sample(ops, seq_slots, logits)?;
        } else if full_logits {
            let mut gathered_logits =
                ops.scratch(DType::F32, &[logits.rows(), vocab_shard.vocab])?;
            tp.all_gather(ops.stream(), logits.mat()?, gathered_logits.mat_mut()?)?;
            buffers.sample(ops, seq_slots, &gathered_logits)?;
        } else {
            context.with_all_gather(|gather| {
                buffers.sample_vocab_parallel(ops, seq_slots, logits, vocab_shard, gather)
            })?;
        }
        timing.sample_ns += ns_since(started);
        Ok(())
    }
}

/// Whether logits are computed for some tokens of a step, but not for all.
pub(crate) fn samples_subset(shape: &StepShape) -> bool {
    (1..shape.tokens).contains(&shape.logits_rows)
}
