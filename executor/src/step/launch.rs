//! Launches of a step: forward pass, LM head, sampler and draft passes, the same whether or not they are
//! captured.

use crate::ExecutorError;
use crate::clock::ns_since;
use crate::model_context::ModelContext;
use crate::spec_decode::{DraftModel, DraftRowCounts};
use crate::trace::{SpanRecorder, TraceScope};
use models::{AuxHiddenStates, ExpertExchange, ForwardContext};
use ops::{DType, DraftBuffers, KvPool, MatMut, MatRef, StepBuffers, StepShape, Tensor};
use protocol::StepTiming;
use std::time::Instant;

/// Sizes and options of a step's launches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLaunch {
    pub(crate) shape: StepShape,
    /// Rows per replica that MoE layers are padded to in a lockstep group; unused otherwise.
    pub(crate) dp_rows: usize,
    /// How tokens reach the experts of other replicas.
    pub(crate) expert_exchange: ExpertExchange,
    /// Whether only hidden states at sample positions are needed.
    pub(crate) logits_rows_only: bool,
    /// Whether ranks that share the LM head all-gather full rows of logits.
    pub(crate) full_logits: bool,
    /// Row counts of the proposer on the device, if there is one.
    pub(crate) drafts: Option<DraftRowCounts>,
}

impl StepLaunch {
    /// A step of the same size on all ranks. `drafting`: number of rows with draft tokens, if a proposer runs
    /// on the device.
    pub(crate) fn of_all(
        shape: StepShape,
        full_logits: bool,
        drafting: Option<usize>,
        engine: &ModelContext,
    ) -> Self {
        let of_all = |rows| if engine.dp.size() > 1 { rows } else { 0 };
        let of_rows = |rows| DraftRowCounts { rows, drafting: rows, dp_rows: of_all(rows) };
        Self {
            shape,
            dp_rows: of_all(shape.tokens),
            expert_exchange: ExpertExchange::AllGather,
            logits_rows_only: samples_subset(&shape) && drafting.is_none(),
            full_logits,
            drafts: drafting.map(of_rows),
        }
    }
}

/// Device state that steps change.
pub(crate) struct DeviceState {
    pub(crate) kv: KvPool,
    pub(crate) draft_kv: Option<KvPool>,
    pub(crate) seq_slots: ops::DeviceSequenceSlots,
    pub(crate) buffers: StepBuffers,
    /// Buffers of the MTP module, EAGLE-3 layer or draft model, if there is one.
    pub(crate) drafts: Option<DraftBuffers>,
}

impl DeviceState {
    /// Launches a whole step from an uploaded stage, laid out as `launch` states. Returns the hidden states.
    pub(crate) fn launch(
        &mut self,
        engine: &ModelContext,
        launch: StepLaunch,
        timing: &mut StepTiming,
        laps: &mut Option<SpanRecorder>,
    ) -> Result<Tensor, ExecutorError> {
        let started = Instant::now();
        let ModelContext { ops, model, .. } = engine;
        let StepLaunch {
            shape,
            dp_rows,
            expert_exchange: exchange,
            logits_rows_only: asked_only,
            full_logits: whole_rows,
            drafts,
        } = launch;
        SpanRecorder::record_scope(laps, TraceScope::Prepare, || {
            Ok(self.buffers.prepare(ops, &mut self.seq_slots, shape)?)
        })?;
        if drafts.is_some() {
            SpanRecorder::record_scope(laps, TraceScope::Draft, || {
                self.propose_drafts(engine, &launch)
            })?;
        }
        let (batch, ids) = self.buffers.view(&self.seq_slots, shape)?;
        let (kv, load) = (&self.kv, engine.expert_load());
        let tokens = self.buffers.logits_indices(shape.logits_rows)?;
        let asked = asked_only.then_some(&tokens);
        let watching = engine.draft.as_ref().and_then(DraftModel::aux_hidden_states);
        let taps = watching.as_ref();
        let f = ForwardContext {
            dp_rows,
            expert_exchange: exchange,
            logits_indices: asked,
            aux_hidden_states: taps,
            expert_load: load,
            ..engine.forward_context(kv, &batch)
        };
        let hidden =
            SpanRecorder::record_scope(laps, TraceScope::Forward, || Ok(model.forward(&f, &ids)?))?; // [T or n, H]
        if shape.logits_rows > 0 {
            let head = || match asked {
                Some(_) => Ok(model.shard_logits(&f, &hidden)?),
                None => Ok(model.shard_logits(&f, &ops.gather_rows(&hidden, &tokens)?)?),
            };
            let logits = SpanRecorder::record_scope(laps, TraceScope::LmHead, head)?; // [n, V of this rank]
            drop((batch, ids, tokens));
            timing.forward_ns += ns_since(started);
            let sample = || self.sample(engine, &logits, whole_rows, timing);
            SpanRecorder::record_scope(laps, TraceScope::Sampling, sample)?;
        } else {
            drop((batch, ids, tokens));
            timing.forward_ns += ns_since(started);
        }
        if let Some(DraftRowCounts { rows, .. }) = drafts {
            let states = watching.and_then(AuxHiddenStates::states);
            let states = states.as_ref().unwrap_or(&hidden);
            let keep = || self.observe_tokens(engine, &launch, rows, states);
            SpanRecorder::record_scope(laps, TraceScope::Draft, keep)?;
        }
        Ok(hidden)
    }

    /// Samples the `n` logits rows of an uploaded stage.
    pub(crate) fn sample_slice(
        &mut self,
        engine: &ModelContext,
        hidden: &Tensor,
        n: usize,
        full_logits: bool,
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let ModelContext { ops, model, .. } = engine;
        let shape = StepShape { logits_rows: n, ..StepShape::default() };
        self.buffers.prepare(ops, &mut self.seq_slots, shape)?;
        let (batch, _) = self.buffers.view(&self.seq_slots, shape)?;
        let f = ForwardContext {
            expert_load: engine.expert_load(),
            ..engine.forward_context(&self.kv, &batch)
        };
        let asked = self.buffers.logits_indices(n)?;
        let wanted = ops.gather_rows(hidden, &asked)?; // [n, H]
        let logits = model.shard_logits(&f, &wanted)?; // [n, V of this rank]
        drop((batch, asked));
        timing.forward_ns += ns_since(started);
        self.sample(engine, &logits, full_logits, timing)
    }

    /// Samples tokens from this rank's vocabulary shard of logits: vocab-parallel, or from full rows with
    /// `full_logits`.
    fn sample(
        &mut self,
        engine: &ModelContext,
        logits: &Tensor,
        full_logits: bool,
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let ModelContext { ops, tp, vocab_shard: part, .. } = engine;
        let Self { buffers, seq_slots: seats, .. } = self;
        if tp.size() == 1 {
            buffers.sample(ops, seats, logits)?;
        } else if full_logits {
            let mut whole = ops.scratch(DType::F32, &[logits.rows(), part.vocab])?;
            tp.all_gather(ops.stream(), logits.mat()?, whole.mat_mut()?)?;
            buffers.sample(ops, seats, &whole)?;
        } else {
            let mut gathered = Ok(());
            let mut gather = |own: MatRef<'_>, all: MatMut<'_>| {
                gathered = tp.all_gather(ops.stream(), own, all);
                gathered.is_ok()
            };
            let sampled = buffers.sample_vocab_parallel(ops, seats, (logits, part), &mut gather);
            gathered?; // More specific than the sampler's error.
            sampled?;
        }
        timing.sample_ns += ns_since(started);
        Ok(())
    }
}

/// Whether a step has tokens without logits row, and at least one logits row.
pub(crate) fn samples_subset(shape: &StepShape) -> bool {
    (1..shape.tokens).contains(&shape.logits_rows)
}
