//! Launches the forward pass of a step with the first slice of its logits rows: replays a captured
//! graph (CUDA graph or HIP graph), or launches kernel by kernel.

use super::StepState;
use super::context::StepContext;
use super::graphs::StepGraphKey;
use super::launch::{StepLaunchOptions, samples_subset};
use super::limits::StepLimits;
use crate::ExecutorError;
use crate::spec_decode::DraftRowCounts;
use crate::trace::{StepTracer, TracedStepInfo};
use models::ExpertExchangeMethod;
use ops::{BatchRowLengths, BatchUpperBounds, StagedStepRow, StagingBuffer, StepShape};
use protocol::{BatchRow, StepLaunchMode};
use std::sync::Arc;

impl StepState {
    /// Uploads the staged inputs of the step, and launches the forward pass with the first slice of logits
    /// rows.
    pub(super) fn forward(
        &mut self,
        context: &mut StepContext<'_>,
        tracer: Option<&mut StepTracer>,
    ) -> Result<(), ExecutorError> {
        // A replayed graph returns no hidden states, but pooling and the later sampling of rows with a
        // grammar bitmask read them, so such steps are launched eagerly.
        let is_eager = context.is_masked() || context.pooled_rows.reads_hidden_states();
        context.graph = if is_eager { None } else { self.matching_graph(context) };
        context.pending.timing.replayed = context.graph.is_some();
        let ops = &context.model.ops;
        if let Some(tracer) = tracer {
            let captured = context.graph.and_then(|key| self.graphs.get(key));
            let instrumented = captured.is_none_or(|graph| graph.instrumented.is_some());
            let facts = TracedStepInfo::new(context.batch, context.graph.map(|key| key.rows));
            let started = context.pending.started;
            context.pending.trace = tracer.step(ops, facts, instrumented, started)?;
        }
        self.staging.upload(ops, &mut self.device.buffers)?;
        if let Some(trace) = &mut context.pending.trace {
            trace.uploaded(*ops.stream())?;
        }
        if self.replay(context)? { Ok(()) } else { self.launch(context) }
    }

    /// Returns the key of the captured graph that fits a step, after the step's rows and its first slice of
    /// logits rows are staged; `None` = the step is launched eagerly.
    fn matching_graph(&self, context: &StepContext<'_>) -> Option<StepGraphKey> {
        let (batch, stage) = (context.batch, &self.staging.stage);
        let StepLaunchMode::Graph { rows, width } = batch.dispatch else { return None };
        let (max_rows, tokens) = (rows * width, stage.tokens.max(context.first_slice) as u32);
        let fits = stage.rows.len() == stage.tokens && tokens <= max_rows;
        if !fits || batch.rows.len() > rows as usize {
            return None;
        }
        // Replicas in lockstep (which run every step together) must replay the same graph, and a graph with a
        // proposer on the device has a fixed number of draft rows. All other steps replay the smallest graph
        // that fits their rows.
        let exact = context.model.dp.size() > 1 || self.device.drafts.is_some();
        let min_rows = if exact { max_rows } else { tokens };
        let longest = row_bounds(stage, &self.size.limits).max_context_len;
        self.graphs.smallest_key(context.full_logits, min_rows..=max_rows, longest)
    }

    /// Replays the captured graph of the step, if there is one. Returns whether a graph was replayed.
    fn replay(&self, context: &mut StepContext<'_>) -> Result<bool, ExecutorError> {
        let Some(captured) = context.graph.and_then(|key| self.graphs.get(key)) else {
            return Ok(false);
        };
        let trace = context.pending.trace.as_mut().filter(|trace| trace.is_instrumented());
        let graph = match (trace, &captured.instrumented) {
            (Some(trace), Some((graph, spans))) => {
                trace.set_spans(Arc::clone(spans));
                graph
            }
            _ => &captured.graph,
        };
        let model = context.model;
        model.tp.on_replayed(&captured.collectives[0])?;
        model.dp.on_replayed(&captured.collectives[1])?;
        model.ops.device().replay(model.ops.stream(), graph)?;
        Ok(true)
    }

    fn launch(&mut self, context: &mut StepContext<'_>) -> Result<(), ExecutorError> {
        let (model, batch, shape) = (context.model, context.batch, self.shape(context));
        let samples_all = context.first_slice == context.logits_rows.len();
        context.unreplayed = (!samples_all).then_some(shape);
        let drafts = self.device.drafts.is_some().then(|| self.draft_rows(context));
        let all_rows = samples_all && !context.pooled_rows.reads_hidden_states();
        let launch = StepLaunchOptions {
            shape,
            dp_rows: batch.moe_tokens as usize,
            expert_exchange: expert_exchange(batch.dispatch),
            logits_rows_only: all_rows && samples_subset(&shape) && drafts.is_none(),
            full_logits: context.full_logits,
            replays_states: samples_all,
            drafts,
            copies_ids: context.reports_drafts,
        };
        let pending = &mut context.pending;
        let trace = pending.trace.as_mut().filter(|trace| trace.is_instrumented());
        let mut spans = trace.as_ref().map(|trace| trace.span_recorder(&model.ops));
        let hidden = self.device.launch(model, launch, &mut pending.timing, &mut spans)?;
        if let (Some(trace), Some(spans)) = (trace, spans) {
            trace.set_spans(spans.finish());
        }
        context.hidden = Some(hidden);
        Ok(())
    }

    fn shape(&self, context: &StepContext<'_>) -> StepShape {
        let stage = &self.staging.stage;
        StepShape {
            tokens: stage.tokens,
            rows: stage.rows.len(),
            logits_rows: context.first_slice,
            bounds: row_bounds(stage, &self.size.limits),
            replay: stage.replay,
        }
    }

    /// Returns the row counts for the proposer on the device.
    fn draft_rows(&self, context: &StepContext<'_>) -> DraftRowCounts {
        let batch = context.batch;
        let drafted = |row: &BatchRow| self.seq_slots.get(row.seq_slot).device_drafts > 0;
        let drafting = batch.rows.iter().rposition(drafted).map_or(0, |last| last + 1);
        let dp_rows = if context.model.dp.size() > 1 { batch.draft_rows as usize } else { 0 };
        DraftRowCounts { rows: batch.rows.len(), drafting, dp_rows }
    }
}

/// Returns the collective that exchanges tokens with the experts of other replicas. Captured graphs need a
/// collective whose sizes do not depend on expert routing. A rank that launches eagerly while other ranks
/// replay a graph must use the same collective as the graph.
fn expert_exchange(dispatch: StepLaunchMode) -> ExpertExchangeMethod {
    match dispatch {
        StepLaunchMode::Graph { .. } => ExpertExchangeMethod::AllGather,
        StepLaunchMode::Eager { .. } => ExpertExchangeMethod::Auto,
    }
}

/// Returns the upper bounds of the staged rows that determine launch sizes, such as the longest row and the
/// longest context. In the staging buffer, one-token rows come first.
fn row_bounds(stage: &StagingBuffer, limits: &StepLimits) -> BatchUpperBounds {
    let lengths = |row: &StagedStepRow| BatchRowLengths {
        tokens: row.len as usize,
        context: (row.start + row.len) as usize,
    };
    let rows_per_request = if limits.split_decode_rows { limits.tokens_per_row() } else { 1 };
    BatchUpperBounds::of(stage.rows.iter().map(lengths), rows_per_request)
}
