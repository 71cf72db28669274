//! One step: what a batch says, and nothing else.

use crate::ExecutorError;
use crate::inputs::Inputs;
use crate::sampler;
use crate::seats::Seats;
use collectives::Group;
use models::{Forward, Model};
use ops::{BatchView, KvPool, Ops, Tensor};
use protocol::{Batch, Epoch, RowOutput, StepOutput, StepTiming, Token};
use std::time::Instant;

/// What a step computes with: the weights, and who shares them.
pub(crate) struct Engine {
    pub(crate) ops: Ops,
    pub(crate) model: Box<dyn Model>,
    pub(crate) tp: Group,
    pub(crate) ep: Group,
}

/// What a step changes: KV bytes, seats and staging, all sized when the KV cache was.
pub(crate) struct State {
    pub(crate) epoch: Epoch,
    pub(crate) kv: KvPool,
    pub(crate) seats: Seats,
    pub(crate) inputs: Inputs,
    pub(crate) banned: Vec<Vec<Token>>,
    pub(crate) rows_per_slice: usize,
}

impl State {
    /// Runs a batch.
    pub(crate) fn step(
        &mut self,
        engine: &Engine,
        batch: &Batch,
    ) -> Result<StepOutput, ExecutorError> {
        let mut timing = StepTiming::default();
        let mut rows = vec![RowOutput::default(); batch.rows.len()];
        let started = Instant::now();
        for row in &batch.rows {
            self.seats.update(row)?;
        }
        self.inputs.build(batch, &self.seats)?;
        if !batch.rows.is_empty() {
            let view = BatchView::new(&engine.ops, &self.inputs.batch)?;
            let ids = engine.ops.ids(&self.inputs.ids)?;
            timing.inputs_ns = ns_since(started);
            self.run(engine, batch, (&view, &ids), &mut rows, &mut timing)?;
        }
        Ok(StepOutput { step: batch.step, epoch: self.epoch, rows, timing })
    }

    fn run(
        &mut self,
        engine: &Engine,
        batch: &Batch,
        (view, ids): (&BatchView, &Tensor),
        rows: &mut [RowOutput],
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let Engine { ops, model, tp, ep } = engine;
        let started = Instant::now();
        let f = Forward { ops, tp, ep, kv: &self.kv, batch: view, probe: None };
        let hidden = model.forward(&f, ids)?; // [T, H]
        timing.forward_ns = ns_since(started);
        let questions = sampler::questions(batch, &self.inputs, &self.seats);
        for slice in questions.chunks(self.rows_per_slice) {
            let started = Instant::now();
            let wanted: Vec<i32> = slice.iter().map(|q| q.token).collect();
            let logits = model.logits(&f, &hidden, &ops.ids(&wanted)?)?; // [n, V]
            timing.forward_ns += ns_since(started);
            let started = Instant::now();
            let requests = sampler::requests(slice, batch, &self.seats, &mut self.banned);
            let answers = ops.sample(&logits, &requests)?;
            for (question, answer) in slice.iter().zip(answers) {
                sampler::enter(question, answer, &mut rows[question.row]);
            }
            timing.sample_ns += ns_since(started);
        }
        self.record(batch, rows);
        Ok(())
    }

    /// Notes sampled tokens on their seats, for rows to come that name them by step.
    fn record(&mut self, batch: &Batch, rows: &[RowOutput]) {
        for (row, output) in batch.rows.iter().zip(rows) {
            for &token in &output.emitted {
                self.seats.get_mut(row.seat).record(batch.step, token);
            }
        }
    }
}

fn ns_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
