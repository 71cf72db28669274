//! One step: what a batch says, and nothing else.
//!
//! A step is submitted and finished apart: between the two the device works and the next step may be
//! submitted. The stage of a step is one copy to the device, its answers are one copy back.

use crate::ExecutorError;
use crate::bitmasks::{StepBitmasks, TokenBitmaskSource};
use crate::clock::ns_since;
use crate::draft_state_tracker::{DraftRowCounts, DraftStateTracker};
use crate::inputs::StepLimits;
use crate::model_context::ModelContext;
use crate::ngram_proposer::NgramProposer;
use crate::pending_step::PendingStep;
use crate::sampler::{self, LogitsRow};
use crate::sequence_slots::{self, BlockTableChange, HostSequenceSlots};
use crate::step_graphs::{GraphKey, StepGraphs};
use crate::step_launch::{DeviceState, StepLaunch, samples_subset};
use crate::trace::{StepFacts, StepTracer};
use models::ExpertExchange;
use ops::{
    CopyInFlight, DraftBuffers, DraftVerification, KvPool, Ops, PinnedBuffer, PoolLayout,
    RowBounds, SamplerOutputMemory, StageRow, StagingBuffer, StepBuffers, StepShape, StepSize,
    Tensor,
};
use protocol::{Batch, BatchRow, DispatchMode, DraftAcceptance, Epoch, SpeculativeConfig};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// Steps whose inputs or answers may be under way at a time.
pub(crate) const STEPS_IN_FLIGHT: usize = 2;

/// How large everything is that steps change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepStateSize {
    pub(crate) kv: PoolLayout,
    /// Of the model that drafts, for the same blocks.
    pub(crate) draft_kv: Option<PoolLayout>,
    pub(crate) limits: StepLimits,
    /// Longest request.
    pub(crate) longest: usize,
    /// Questions answered at a time.
    pub(crate) logits_rows: usize,
    /// Likeliest ids an answer can list.
    pub(crate) top_logprobs: usize,
}

/// What a step changes: KV bytes, seats and staging, all sized when the KV cache was.
pub(crate) struct StepState {
    epoch: Epoch,
    size: StepStateSize,
    pub(crate) device: DeviceState,
    seq_slots: HostSequenceSlots,
    ngram_proposer: Option<NgramProposer>,
    draft_tracking: Option<DraftStateTracker>,
    staging: StagingBuffer,
    stage_words_max: usize,
    table_changes: Vec<BlockTableChange>,
    logits_rows: Vec<LogitsRow>,
    /// They want whole rows of logits, where ranks share a head.
    full_logits: bool,
    uploads: VecDeque<CopyInFlight>,
    free_staging: Vec<PinnedBuffer>,
    output_memory: (Sender<SamplerOutputMemory>, Receiver<SamplerOutputMemory>),
    pub(crate) graphs: StepGraphs,
}

impl StepState {
    pub(crate) fn new(ops: &Ops, epoch: Epoch, size: StepStateSize) -> Result<Self, ExecutorError> {
        let StepStateSize {
            kv,
            draft_kv,
            limits,
            longest,
            logits_rows: questions,
            top_logprobs: top,
        } = size;
        // A step's ids and tables, or the history and mask of a few requests that take a seat, or the masks of
        // all its questions.
        let (tables, mask) = (limits.rows * limits.table_width, limits.vocab.div_ceil(32));
        let drafts = if limits.speculation.is_some() { limits.tokens } else { 0 }; // As history, too.
        let words = limits.tokens + drafts + tables + 4 * (longest + mask);
        let words = words.max(limits.rows.min(questions) * mask);
        let stage_bytes = sampler::stage_bytes(&limits, questions, words);
        let buffers = StepBuffers::new(
            ops,
            StepSize {
                tokens: limits.tokens,
                rows: limits.stage_rows(),
                logits_rows: questions,
                top_logprobs: top,
                stage_bytes,
                block_tokens: limits.block_tokens as usize,
                verification: limits
                    .speculation
                    .map_or(DraftVerification::NoDrafts, draft_verification),
            },
        )?;
        let (layer_drafts, drafts) = limits.draft_tracking(kv.blocks(), questions).unzip();
        let drafts = drafts.map(|size| DraftBuffers::new(ops, size)).transpose()?;
        let answers = channel();
        for _ in 0..=STEPS_IN_FLIGHT {
            // The receiver lives in the same struct.
            let _ = answers.0.send(buffers.output_memory(ops)?);
        }
        let pinned = |_| ops.device().alloc_pinned(stage_bytes);
        let free = (0..STEPS_IN_FLIGHT).map(pinned).collect::<Result<_, _>>()?;
        Ok(Self {
            epoch,
            size,
            device: DeviceState {
                kv: KvPool::new(ops, kv)?,
                draft_kv: draft_kv.map(|kv| KvPool::new(ops, kv)).transpose()?,
                seq_slots: ops::DeviceSequenceSlots::new(
                    ops,
                    limits.rows,
                    limits.table_width,
                    longest,
                    limits.vocab,
                )?,
                buffers,
                drafts,
            },
            seq_slots: HostSequenceSlots::new(
                limits.rows as u32,
                limits.table_width,
                kv.blocks() as u32,
            ),
            ngram_proposer: limits.speculation.and_then(|how| NgramProposer::new(how, limits.rows)),
            draft_tracking: layer_drafts,
            staging: StagingBuffer::default(),
            stage_words_max: words,
            table_changes: Vec::new(),
            logits_rows: Vec::new(),
            full_logits: false,
            uploads: VecDeque::new(),
            free_staging: free,
            output_memory: answers,
            graphs: StepGraphs::default(),
        })
    }

    /// The KV cache of who drafts, and what a draft layer has made over it.
    #[cfg(test)]
    pub(crate) fn draft_state(&self) -> (&KvPool, Option<&DraftBuffers>) {
        let DeviceState { kv, draft_kv, drafts, .. } = &self.device;
        (draft_kv.as_ref().unwrap_or(kv), drafts.as_ref())
    }

    /// Bytes of the KV cache.
    pub(crate) fn kv_bytes(&self) -> u64 {
        (self.size.kv.bytes() + self.size.draft_kv.map_or(0, |kv| kv.bytes())) as u64
    }

    /// Hands a batch to the device; the answers come with [`PendingStep::finish`]. The masks of a batch are waited
    /// for once its forward pass is under way; all its questions are asked after that.
    pub(crate) fn submit(
        &mut self,
        engine: &ModelContext,
        batch: &Batch,
        masks: &mut dyn TokenBitmaskSource,
        tracer: Option<&mut StepTracer>,
    ) -> Result<PendingStep, ExecutorError> {
        let started = Instant::now();
        let mut pending =
            PendingStep::new(started, batch, self.epoch, self.output_memory.0.clone());
        if let Some(drafter) = &mut self.ngram_proposer {
            drafter.receive_history(&batch.rows);
        }
        self.stage_rows(engine, batch)?;
        pending.history_sender =
            self.ngram_proposer.as_mut().map(|drafter| drafter.history_sender(&batch.rows));
        for (row, output) in batch.rows.iter().zip(&mut pending.rows) {
            output.drafted = self.seq_slots.get(row.seq_slot).drafts() as u8;
        }
        // Where other replicas wait for this one's experts, a step without rows is one of no tokens.
        if batch.rows.is_empty() && engine.dp.size() == 1 {
            return Ok(pending);
        }
        let mut questions = std::mem::take(&mut self.logits_rows);
        sampler::collect_logits_rows(
            batch,
            &self.seq_slots,
            self.size.top_logprobs,
            &mut questions,
        );
        let (asked, vocab) = ((batch, &self.seq_slots), self.size.limits.vocab);
        self.full_logits =
            sampler::needs_full_logits(&questions, asked, vocab, engine.vocab_parallel_support());
        let masked = batch.rows.iter().any(|row| row.masked);
        let none = StepBitmasks::default();
        let first = if masked { 0 } else { self.stage_slice(batch, &none, &questions) };
        for row in batch.rows.iter().filter(|row| row.samples) {
            self.seq_slots.mark_sampled(row, batch.step);
        }
        pending.timing.inputs_ns = ns_since(started);
        let graph = if masked { None } else { self.matching_graph(engine, batch, first) };
        pending.timing.replayed = graph.is_some();
        if let Some(tracer) = tracer {
            let recording = graph.and_then(|size| self.graphs.get(size));
            let can_mark = recording.is_none_or(|recording| recording.instrumented.is_some());
            let facts = StepFacts::new(batch, graph.map(|size| size.rows));
            pending.trace = tracer.step(&engine.ops, facts, can_mark, started)?;
        }
        let asked = (first, questions.len());
        let hidden = self.run(engine, batch, asked, graph, &mut pending)?;
        let masks = StepBitmasks::wait(batch, masks)?;
        sampler::drop_overdue(&mut questions, &masks);
        pending.overdue_rows = masks.overdue_rows();
        self.sample_remaining(engine, (batch, &masks), &questions, (first, hidden), &mut pending)?;
        self.logits_rows = questions;
        if let Some(reports) = &engine.expert_load_reporter {
            pending.experts = reports.begin(&engine.ops, graph.is_some())?;
        }
        pending.timing.collectives = engine.collective_timing();
        pending.launched =
            [&engine.tp, &engine.dp].iter().filter_map(|g| g.launch_checkpoint()).collect();
        Ok(pending)
    }

    /// Stages the rows, and the seats they take; uploads early what would not fit.
    fn stage_rows(&mut self, engine: &ModelContext, batch: &Batch) -> Result<(), ExecutorError> {
        self.size.limits.check(batch, engine.dp.size() > 1)?;
        self.staging.clear();
        self.table_changes.clear();
        let heavy = self.size.longest + self.size.limits.vocab.div_ceil(32);
        for row in &batch.rows {
            self.table_changes.push(self.seq_slots.update(row)?);
        }
        if let Some(layer) = &mut self.draft_tracking {
            layer.update_tables(&batch.rows);
        }
        for row in &batch.rows {
            if let Some(drafter) = &mut self.ngram_proposer {
                self.seq_slots.set_drafts(row, drafter.draft(row), &mut self.staging);
            }
            if self.draft_tracking.is_some() && row.len == 1 && row.start > 0 {
                self.seq_slots.expect_device_drafts(row);
            }
            let unmasked = self.seq_slots.clears_mask(row);
            let full = || self.staging.inits.len() >= self.size.limits.rows;
            if (unmasked || row.seq_init.is_some())
                && (self.staging.words.len() > 3 * heavy || full())
            {
                self.flush(engine)?;
            }
            if unmasked {
                self.seq_slots.unmask(row.seq_slot, self.size.limits.vocab, &mut self.staging);
            }
            if let Some(init) = &row.seq_init {
                sequence_slots::stage_init(
                    row.seq_slot,
                    init,
                    self.size.limits.vocab,
                    &mut self.staging,
                );
            }
        }
        let tables: usize = self.table_changes.iter().map(|change| change.blocks.len()).sum();
        let rows = self.size.limits.tokens + tables;
        if self.staging.words.len() + rows > self.stage_words_max {
            self.flush(engine)?;
        }
        for (row, change) in batch.rows.iter().zip(self.table_changes.drain(..)) {
            if let Some(layer) = &mut self.draft_tracking {
                let place = (self.staging.tokens, self.seq_slots.get(row.seq_slot).device_drafts);
                layer.stage(row, place, &mut self.staging)?;
            }
            self.size.limits.stage_row(row, change, &self.seq_slots, &mut self.staging)?;
        }
        Ok(())
    }

    /// Uploads what has been staged about seats, ahead of the step.
    fn flush(&mut self, engine: &ModelContext) -> Result<(), ExecutorError> {
        self.upload(&engine.ops)?;
        let DeviceState { seq_slots: seats, buffers, .. } = &mut self.device;
        buffers.prepare(&engine.ops, seats, StepShape::default())?;
        self.staging.clear();
        Ok(())
    }

    /// Stages as many questions as fit and returns their number.
    fn stage_slice(
        &mut self,
        batch: &Batch,
        masks: &StepBitmasks,
        questions: &[LogitsRow],
    ) -> usize {
        let (edits_max, words_max) = (sampler::edits_max(&self.size.limits), self.stage_words_max);
        let most = questions.len().min(self.size.logits_rows);
        for (n, question) in questions[..most].iter().enumerate() {
            let (edits, words) = (self.staging.edits.len(), self.staging.words.len());
            let inits = self.staging.inits.len();
            let one = std::slice::from_ref(question);
            let (state, vocab) = ((&self.seq_slots, masks), self.size.limits.vocab);
            sampler::stage_logits_rows(one, batch, state, vocab, &mut self.staging);
            let full = self.staging.edits.len() > edits_max || self.staging.words.len() > words_max;
            if full && n > 0 {
                self.staging.logits_rows.pop();
                self.staging.inits.truncate(inits);
                self.staging.edits.truncate(edits);
                self.staging.words.truncate(words);
                return n;
            }
        }
        most
    }

    fn upload(&mut self, ops: &Ops) -> Result<(), ExecutorError> {
        let memory = match self.free_staging.pop() {
            Some(memory) => memory,
            None => self.uploads.pop_front().expect("each is free or in flight").wait()?,
        };
        self.uploads.push_back(self.device.buffers.upload(ops, &self.staging, memory)?);
        Ok(())
    }

    /// The recording that serves a batch whose first slice of `questions` is staged; `None` = it must be launched.
    fn matching_graph(
        &self,
        engine: &ModelContext,
        batch: &Batch,
        questions: usize,
    ) -> Option<GraphKey> {
        let DispatchMode::Graph { rows, width } = batch.dispatch else { return None };
        let (most, tokens) = (rows * width, self.staging.tokens.max(questions) as u32);
        let fits = self.staging.rows.len() == self.staging.tokens && tokens <= most;
        if !fits || batch.rows.len() > rows as usize {
            return None;
        }
        // Replicas that step together replay the same, and a draft layer has its rows; anybody else replays what its
        // rows fit into.
        let exact = engine.dp.size() > 1 || self.draft_tracking.is_some();
        let least = if exact { most } else { tokens };
        let longest = row_bounds(&self.staging, &self.size.limits).max_context_len;
        self.graphs.size(self.full_logits, least..=most, longest)
    }

    /// Forward pass and the first slice of answers, `questions` of all, by replay or launch by launch. Returns the
    /// hidden states where more slices may follow.
    fn run(
        &mut self,
        engine: &ModelContext,
        batch: &Batch,
        (questions, of_all): (usize, usize),
        graph: Option<GraphKey>,
        pending: &mut PendingStep,
    ) -> Result<Option<Tensor>, ExecutorError> {
        let (ops, trace) = (&engine.ops, &mut pending.trace);
        self.upload(ops)?;
        if let Some(trace) = trace {
            trace.uploaded(*ops.stream())?;
        }
        let marked = trace.as_mut().filter(|trace| trace.is_instrumented());
        if let Some(recording) = graph.and_then(|size| self.graphs.get(size)) {
            let graph = match (marked, &recording.instrumented) {
                (Some(trace), Some((graph, laps))) => {
                    trace.set_spans(Arc::clone(laps));
                    graph
                }
                _ => &recording.graph,
            };
            engine.tp.on_replayed(&recording.collectives[0])?;
            engine.dp.on_replayed(&recording.collectives[1])?;
            ops.device().replay(ops.stream(), graph)?;
            return Ok(None);
        }
        let (tokens, rows) = (self.staging.tokens, self.staging.rows.len());
        let bounds = row_bounds(&self.staging, &self.size.limits);
        let shape = StepShape { tokens, rows, logits_rows: questions, bounds };
        let mut laps = marked.as_ref().map(|trace| trace.span_recorder(ops));
        let drafts = self.draft_tracking.is_some().then(|| self.draft_rows(engine, batch));
        let asked_only = questions == of_all && samples_subset(&shape) && drafts.is_none();
        let (dp_rows, exchange) = (batch.moe_tokens as usize, expert_exchange(batch.dispatch));
        let whole_rows = self.full_logits;
        let launch = StepLaunch {
            shape,
            dp_rows,
            expert_exchange: exchange,
            logits_rows_only: asked_only,
            full_logits: whole_rows,
            drafts,
        };
        let hidden = self.device.launch(engine, launch, &mut pending.timing, &mut laps)?;
        if let (Some(trace), Some(laps)) = (marked, laps) {
            trace.set_spans(laps.finish());
        }
        Ok(Some(hidden))
    }

    /// The rows of a batch that the draft layer has to do with.
    fn draft_rows(&self, engine: &ModelContext, batch: &Batch) -> DraftRowCounts {
        let drafted = |row: &BatchRow| self.seq_slots.get(row.seq_slot).device_drafts > 0;
        let drafting = batch.rows.iter().rposition(drafted).map_or(0, |last| last + 1);
        let dp_rows = if engine.dp.size() > 1 { batch.draft_rows as usize } else { 0 };
        DraftRowCounts { rows: batch.rows.len(), drafting, dp_rows }
    }

    /// Answers what has not been answered yet, slice by slice; all but the last are waited for. The first slice
    /// is empty where the forward pass did not wait for masks.
    fn sample_remaining(
        &mut self,
        engine: &ModelContext,
        (batch, masks): (&Batch, &StepBitmasks),
        questions: &[LogitsRow],
        (first, hidden): (usize, Option<Tensor>),
        pending: &mut PendingStep,
    ) -> Result<(), ExecutorError> {
        let ops = &engine.ops;
        let whole = first == questions.len();
        let (mut done, mut slices) = (first, usize::from(whole || first > 0));
        let mut slice = &questions[..first];
        loop {
            if done == questions.len() || !slice.is_empty() {
                let memory =
                    self.output_memory.1.recv().expect("the sender lives in the same struct");
                let lists = sampler::wants_top_logprobs(slice);
                let asked = (slice.len(), lists);
                let answers = self.device.buffers.download(ops, memory, asked)?;
                if done == questions.len() {
                    pending.logits_rows.extend_from_slice(slice);
                    pending.outputs = Some(answers);
                    if let Some(trace) = &mut pending.trace {
                        trace.submitted(*ops.stream(), slices)?;
                    }
                    return Ok(());
                }
                let answers = answers.wait()?;
                sampler::write_outputs(slice, &answers, &mut pending.rows);
                let _ = self.output_memory.0.send(answers.into_memory());
            }
            let hidden = hidden.as_ref().expect("a graph answers all questions at once");
            self.staging.clear();
            let n = self.stage_slice(batch, masks, &questions[done..]);
            self.upload(ops)?;
            let asked = (n, self.full_logits);
            self.device.sample_slice(engine, hidden, asked, &mut pending.timing)?;
            slice = &questions[done..done + n];
            done += n;
            slices += 1;
        }
    }
}

/// Who says which drafts stand.
fn draft_verification(how: SpeculativeConfig) -> DraftVerification {
    match how.acceptance {
        DraftAcceptance::Exact => DraftVerification::MatchSampled,
        DraftAcceptance::Synthetic { per_mille } => DraftVerification::Synthetic { per_mille },
    }
}

/// How tokens come to the experts of other replicas: recordings have sizes that do not depend on what routers choose, and ranks that launch what others
/// replay do as these.
fn expert_exchange(bucket: DispatchMode) -> ExpertExchange {
    match bucket {
        DispatchMode::Graph { .. } => ExpertExchange::AllGather,
        DispatchMode::Eager { .. } => ExpertExchange::Auto,
    }
}

/// Bounds of the rows of a stage, which has those of one token first.
fn row_bounds(stage: &StagingBuffer, limits: &StepLimits) -> RowBounds {
    let lengths = |row: &StageRow| (row.len as usize, (row.start + row.len) as usize);
    RowBounds::of(
        stage.rows.iter().map(lengths),
        if limits.one_token_rows { limits.tokens_per_row() } else { 1 },
    )
}
