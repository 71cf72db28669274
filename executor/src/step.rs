//! One step: what a batch says, and nothing else.
//!
//! A step is submitted and finished apart: between the two the device works and the next step may be
//! submitted. The stage of a step is one copy to the device, its answers are one copy back.

use crate::ExecutorError;
use crate::clock::ns_since;
use crate::drafter::Drafter;
use crate::engine::Engine;
use crate::graph::{Graphs, Size};
use crate::inputs::StepLimits;
use crate::launch::{DeviceState, Launch, asks_few};
use crate::layer_drafts::{DraftRows, LayerDrafts};
use crate::masks::{Masks, StepMasks};
use crate::pending::Pending;
use crate::sampler::{self, Question};
use crate::seats::{self, Seats, TableChange};
use crate::trace::{StepFacts, Tracer};
use models::Exchange;
use ops::{
    AnswerMemory, DraftBuffers, InFlight, Judge, KvPool, Ops, Pinned, PoolLayout, RowBounds, Stage,
    StageRow, StepBuffers, StepShape, StepSize, Tensor,
};
use protocol::{Acceptance, Batch, Bucket, Epoch, Row, Speculation};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// Steps whose inputs or answers may be under way at a time.
pub(crate) const STEPS_IN_FLIGHT: usize = 2;

/// How large everything is that steps change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateSize {
    pub(crate) kv: PoolLayout,
    /// Of the model that drafts, for the same blocks.
    pub(crate) draft_kv: Option<PoolLayout>,
    pub(crate) limits: StepLimits,
    /// Longest request.
    pub(crate) longest: usize,
    /// Questions answered at a time.
    pub(crate) questions: usize,
    /// Likeliest ids an answer can list.
    pub(crate) top: usize,
}

/// What a step changes: KV bytes, seats and staging, all sized when the KV cache was.
pub(crate) struct State {
    epoch: Epoch,
    size: StateSize,
    pub(crate) device: DeviceState,
    seats: Seats,
    drafter: Option<Drafter>,
    layer_drafts: Option<LayerDrafts>,
    stage: Stage,
    stage_words_max: usize,
    changes: Vec<TableChange>,
    questions: Vec<Question>,
    /// They want whole rows of logits, where ranks share a head.
    whole_rows: bool,
    uploads: VecDeque<InFlight>,
    free: Vec<Pinned>,
    answers: (Sender<AnswerMemory>, Receiver<AnswerMemory>),
    pub(crate) graphs: Graphs,
}

impl State {
    pub(crate) fn new(ops: &Ops, epoch: Epoch, size: StateSize) -> Result<Self, ExecutorError> {
        let StateSize { kv, draft_kv, limits, longest, questions, top } = size;
        // A step's ids and tables, or the history and mask of a few requests that take a seat, or the masks of
        // all its questions.
        let (tables, mask) = (limits.rows * limits.width, limits.vocab.div_ceil(32));
        let drafts = if limits.speculation.is_some() { limits.tokens } else { 0 }; // As history, too.
        let words = limits.tokens + drafts + tables + 4 * (longest + mask);
        let words = words.max(limits.rows.min(questions) * mask);
        let stage_bytes = sampler::stage_bytes(&limits, questions, words);
        let buffers = StepBuffers::new(
            ops,
            StepSize {
                tokens: limits.tokens,
                rows: limits.stage_rows(),
                questions,
                top,
                stage_bytes,
                block_tokens: limits.block_tokens as usize,
                judge: limits.speculation.map_or(Judge::Nobody, judge),
            },
        )?;
        let (layer_drafts, drafts) = limits.layer_drafts(kv.blocks(), questions).unzip();
        let drafts = drafts.map(|size| DraftBuffers::new(ops, size)).transpose()?;
        let answers = channel();
        for _ in 0..=STEPS_IN_FLIGHT {
            // The receiver lives in the same struct.
            let _ = answers.0.send(buffers.answer_memory(ops)?);
        }
        let pinned = |_| ops.device().alloc_pinned(stage_bytes);
        let free = (0..STEPS_IN_FLIGHT).map(pinned).collect::<Result<_, _>>()?;
        Ok(Self {
            epoch,
            size,
            device: DeviceState {
                kv: KvPool::new(ops, kv)?,
                draft_kv: draft_kv.map(|kv| KvPool::new(ops, kv)).transpose()?,
                seats: ops::Seats::new(ops, limits.rows, limits.width, longest, limits.vocab)?,
                buffers,
                drafts,
            },
            seats: Seats::new(limits.rows as u32, limits.width, kv.blocks() as u32),
            drafter: limits.speculation.and_then(|how| Drafter::new(how, limits.rows)),
            layer_drafts,
            stage: Stage::default(),
            stage_words_max: words,
            changes: Vec::new(),
            questions: Vec::new(),
            whole_rows: false,
            uploads: VecDeque::new(),
            free,
            answers,
            graphs: Graphs::default(),
        })
    }

    /// The KV cache of who drafts, and what a draft layer has made over it.
    #[cfg(test)]
    pub(crate) fn drafting(&self) -> (&KvPool, Option<&DraftBuffers>) {
        let DeviceState { kv, draft_kv, drafts, .. } = &self.device;
        (draft_kv.as_ref().unwrap_or(kv), drafts.as_ref())
    }

    /// Bytes of the KV cache.
    pub(crate) fn kv_bytes(&self) -> u64 {
        (self.size.kv.bytes() + self.size.draft_kv.map_or(0, |kv| kv.bytes())) as u64
    }

    /// Hands a batch to the device; the answers come with [`Pending::finish`]. The masks of a batch are waited
    /// for once its forward pass is under way; all its questions are asked after that.
    pub(crate) fn submit(
        &mut self,
        engine: &Engine,
        batch: &Batch,
        masks: &mut dyn Masks,
        tracer: Option<&mut Tracer>,
    ) -> Result<Pending, ExecutorError> {
        let started = Instant::now();
        let mut pending = Pending::begun(started, batch, self.epoch, self.answers.0.clone());
        if let Some(drafter) = &mut self.drafter {
            drafter.hear(&batch.rows);
        }
        self.stage_rows(engine, batch)?;
        pending.speaker = self.drafter.as_mut().map(|drafter| drafter.speaker(&batch.rows));
        for (row, output) in batch.rows.iter().zip(&mut pending.rows) {
            output.drafted = self.seats.get(row.seat).drafts() as u8;
        }
        // Where other replicas wait for this one's experts, a step without rows is one of no tokens.
        if batch.rows.is_empty() && engine.dp.size() == 1 {
            return Ok(pending);
        }
        let mut questions = std::mem::take(&mut self.questions);
        sampler::questions(batch, &self.seats, self.size.top, &mut questions);
        let (asked, vocab) = ((batch, &self.seats), self.size.limits.vocab);
        self.whole_rows = sampler::want_whole_rows(&questions, asked, vocab, engine.in_parts());
        let masked = batch.rows.iter().any(|row| row.masked);
        let none = StepMasks::default();
        let first = if masked { 0 } else { self.stage_slice(batch, &none, &questions) };
        for row in batch.rows.iter().filter(|row| row.samples) {
            self.seats.samples(row, batch.step);
        }
        pending.timing.inputs_ns = ns_since(started);
        let graph = if masked { None } else { self.recorded(engine, batch, first) };
        pending.timing.replayed = graph.is_some();
        if let Some(tracer) = tracer {
            let recording = graph.and_then(|size| self.graphs.of(size));
            let can_mark = recording.is_none_or(|recording| recording.marked.is_some());
            let facts = StepFacts::new(batch, graph.map(|size| size.rows));
            pending.trace = tracer.step(&engine.ops, facts, can_mark, started)?;
        }
        let asked = (first, questions.len());
        let hidden = self.run(engine, batch, asked, graph, &mut pending)?;
        let masks = StepMasks::wait(batch, masks)?;
        sampler::drop_late(&mut questions, &masks);
        pending.late = masks.late();
        self.answer(engine, (batch, &masks), &questions, (first, hidden), &mut pending)?;
        self.questions = questions;
        if let Some(reports) = &engine.reports {
            pending.experts = reports.begin(&engine.ops, graph.is_some())?;
        }
        pending.timing.collectives = engine.collective_timing();
        pending.launched = [&engine.tp, &engine.dp].iter().filter_map(|g| g.launched()).collect();
        Ok(pending)
    }

    /// Stages the rows, and the seats they take; uploads early what would not fit.
    fn stage_rows(&mut self, engine: &Engine, batch: &Batch) -> Result<(), ExecutorError> {
        self.size.limits.check(batch, engine.dp.size() > 1)?;
        self.stage.clear();
        self.changes.clear();
        let heavy = self.size.longest + self.size.limits.vocab.div_ceil(32);
        for row in &batch.rows {
            self.changes.push(self.seats.update(row)?);
        }
        if let Some(layer) = &mut self.layer_drafts {
            layer.hear(&batch.rows);
        }
        for row in &batch.rows {
            if let Some(drafter) = &mut self.drafter {
                self.seats.guess(row, drafter.draft(row), &mut self.stage);
            }
            if self.layer_drafts.is_some() && row.len == 1 && row.start > 0 {
                self.seats.await_drafts(row);
            }
            let unmasked = self.seats.is_unmasked_by(row);
            let full = || self.stage.inits.len() >= self.size.limits.rows;
            if (unmasked || row.init.is_some()) && (self.stage.words.len() > 3 * heavy || full()) {
                self.flush(engine)?;
            }
            if unmasked {
                self.seats.unmask(row.seat, self.size.limits.vocab, &mut self.stage);
            }
            if let Some(init) = &row.init {
                seats::stage_init(row.seat, init, self.size.limits.vocab, &mut self.stage);
            }
        }
        let tables: usize = self.changes.iter().map(|change| change.blocks.len()).sum();
        let rows = self.size.limits.tokens + tables;
        if self.stage.words.len() + rows > self.stage_words_max {
            self.flush(engine)?;
        }
        for (row, change) in batch.rows.iter().zip(self.changes.drain(..)) {
            if let Some(layer) = &mut self.layer_drafts {
                let place = (self.stage.tokens, self.seats.get(row.seat).made);
                layer.stage(row, place, &mut self.stage)?;
            }
            self.size.limits.stage_row(row, change, &self.seats, &mut self.stage)?;
        }
        Ok(())
    }

    /// Uploads what has been staged about seats, ahead of the step.
    fn flush(&mut self, engine: &Engine) -> Result<(), ExecutorError> {
        self.upload(&engine.ops)?;
        let DeviceState { seats, buffers, .. } = &mut self.device;
        buffers.prepare(&engine.ops, seats, StepShape::default())?;
        self.stage.clear();
        Ok(())
    }

    /// Stages as many questions as fit and returns their number.
    fn stage_slice(&mut self, batch: &Batch, masks: &StepMasks, questions: &[Question]) -> usize {
        let (edits_max, words_max) = (sampler::edits_max(&self.size.limits), self.stage_words_max);
        let most = questions.len().min(self.size.questions);
        for (n, question) in questions[..most].iter().enumerate() {
            let (edits, words) = (self.stage.edits.len(), self.stage.words.len());
            let inits = self.stage.inits.len();
            let one = std::slice::from_ref(question);
            let (state, vocab) = ((&self.seats, masks), self.size.limits.vocab);
            sampler::stage_questions(one, batch, state, vocab, &mut self.stage);
            let full = self.stage.edits.len() > edits_max || self.stage.words.len() > words_max;
            if full && n > 0 {
                self.stage.questions.pop();
                self.stage.inits.truncate(inits);
                self.stage.edits.truncate(edits);
                self.stage.words.truncate(words);
                return n;
            }
        }
        most
    }

    fn upload(&mut self, ops: &Ops) -> Result<(), ExecutorError> {
        let memory = match self.free.pop() {
            Some(memory) => memory,
            None => self.uploads.pop_front().expect("each is free or in flight").wait()?,
        };
        self.uploads.push_back(self.device.buffers.upload(ops, &self.stage, memory)?);
        Ok(())
    }

    /// The recording that serves a batch whose first slice of `questions` is staged; `None` = it must be launched.
    fn recorded(&self, engine: &Engine, batch: &Batch, questions: usize) -> Option<Size> {
        let Bucket::Graph { rows, width } = batch.bucket else { return None };
        let (most, tokens) = (rows * width, self.stage.tokens.max(questions) as u32);
        let fits = self.stage.rows.len() == self.stage.tokens && tokens <= most;
        if !fits || batch.rows.len() > rows as usize {
            return None;
        }
        // Replicas that step together replay the same, and a draft layer has its rows; anybody else replays what its
        // rows fit into.
        let exact = engine.dp.size() > 1 || self.layer_drafts.is_some();
        let least = if exact { most } else { tokens };
        let longest = bounds(&self.stage, &self.size.limits).longest_context;
        self.graphs.size(self.whole_rows, least..=most, longest)
    }

    /// Forward pass and the first slice of answers, `questions` of all, by replay or launch by launch. Returns the
    /// hidden states where more slices may follow.
    fn run(
        &mut self,
        engine: &Engine,
        batch: &Batch,
        (questions, of_all): (usize, usize),
        graph: Option<Size>,
        pending: &mut Pending,
    ) -> Result<Option<Tensor>, ExecutorError> {
        let (ops, trace) = (&engine.ops, &mut pending.trace);
        self.upload(ops)?;
        if let Some(trace) = trace {
            trace.uploaded(*ops.stream())?;
        }
        let marked = trace.as_mut().filter(|trace| trace.is_marked());
        if let Some(recording) = graph.and_then(|size| self.graphs.of(size)) {
            let graph = match (marked, &recording.marked) {
                (Some(trace), Some((graph, laps))) => {
                    trace.set_laps(Arc::clone(laps));
                    graph
                }
                _ => &recording.graph,
            };
            engine.tp.replayed(&recording.calls[0])?;
            engine.dp.replayed(&recording.calls[1])?;
            ops.device().replay(ops.stream(), graph)?;
            return Ok(None);
        }
        let (tokens, rows) = (self.stage.tokens, self.stage.rows.len());
        let bounds = bounds(&self.stage, &self.size.limits);
        let shape = StepShape { tokens, rows, questions, bounds };
        let mut laps = marked.as_ref().map(|trace| trace.laps(ops));
        let drafts = self.layer_drafts.is_some().then(|| self.draft_rows(engine, batch));
        let asked_only = questions == of_all && asks_few(&shape) && drafts.is_none();
        let (dp_rows, exchange) = (batch.moe_tokens as usize, exchange(batch.bucket));
        let whole_rows = self.whole_rows;
        let launch = Launch { shape, dp_rows, exchange, asked_only, whole_rows, drafts };
        let hidden = self.device.launch(engine, launch, &mut pending.timing, &mut laps)?;
        if let (Some(trace), Some(laps)) = (marked, laps) {
            trace.set_laps(laps.finish());
        }
        Ok(Some(hidden))
    }

    /// The rows of a batch that the draft layer has to do with.
    fn draft_rows(&self, engine: &Engine, batch: &Batch) -> DraftRows {
        let drafted = |row: &Row| self.seats.get(row.seat).made > 0;
        let drafting = batch.rows.iter().rposition(drafted).map_or(0, |last| last + 1);
        let dp_rows = if engine.dp.size() > 1 { batch.draft_rows as usize } else { 0 };
        DraftRows { rows: batch.rows.len(), drafting, dp_rows }
    }

    /// Answers what has not been answered yet, slice by slice; all but the last are waited for. The first slice
    /// is empty where the forward pass did not wait for masks.
    fn answer(
        &mut self,
        engine: &Engine,
        (batch, masks): (&Batch, &StepMasks),
        questions: &[Question],
        (first, hidden): (usize, Option<Tensor>),
        pending: &mut Pending,
    ) -> Result<(), ExecutorError> {
        let ops = &engine.ops;
        let whole = first == questions.len();
        let (mut done, mut slices) = (first, usize::from(whole || first > 0));
        let mut slice = &questions[..first];
        loop {
            if done == questions.len() || !slice.is_empty() {
                let memory = self.answers.1.recv().expect("the sender lives in the same struct");
                let lists = sampler::lists(slice);
                let asked = (slice.len(), lists);
                let answers = self.device.buffers.download(ops, memory, asked)?;
                if done == questions.len() {
                    pending.questions.extend_from_slice(slice);
                    pending.answers = Some(answers);
                    if let Some(trace) = &mut pending.trace {
                        trace.submitted(*ops.stream(), slices)?;
                    }
                    return Ok(());
                }
                let answers = answers.wait()?;
                sampler::enter(slice, &answers, &mut pending.rows);
                let _ = self.answers.0.send(answers.into_memory());
            }
            let hidden = hidden.as_ref().expect("a graph answers all questions at once");
            self.stage.clear();
            let n = self.stage_slice(batch, masks, &questions[done..]);
            self.upload(ops)?;
            let asked = (n, self.whole_rows);
            self.device.answer(engine, hidden, asked, &mut pending.timing)?;
            slice = &questions[done..done + n];
            done += n;
            slices += 1;
        }
    }
}

/// Who says which drafts stand.
fn judge(how: Speculation) -> Judge {
    match how.acceptance {
        Acceptance::Exact => Judge::Answers,
        Acceptance::Synthetic { per_mille } => Judge::Chance { per_mille },
    }
}

/// How tokens come to the experts of other replicas: recordings have sizes that do not depend on what routers choose, and ranks that launch what others
/// replay do as these.
fn exchange(bucket: Bucket) -> Exchange {
    match bucket {
        Bucket::Graph { .. } => Exchange::Gather,
        Bucket::Eager { .. } => Exchange::Cheapest,
    }
}

/// Bounds of the rows of a stage, which has those of one token first.
fn bounds(stage: &Stage, limits: &StepLimits) -> RowBounds {
    let lengths = |row: &StageRow| (row.len as usize, (row.start + row.len) as usize);
    RowBounds::of(stage.rows.iter().map(lengths), if limits.apart { limits.width() } else { 1 })
}
