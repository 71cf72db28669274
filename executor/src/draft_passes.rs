//! What a model's draft layer computes in a step: guesses in front of the forward pass, and behind it what later guesses
//! attend to and begin with.

use crate::ExecutorError;
use crate::layer_drafts::DraftRows;
use crate::step::{DeviceState, Engine, Launch};
use models::{Exchange, Forward};
use ops::{BatchView, KvPool, StepShape, Tensor};

impl DeviceState {
    /// Makes the drafts of a step that has been prepared, by as many passes of the layer as a row may have drafts, and enters
    /// them. All ranks make as many.
    pub(crate) fn draft(&mut self, engine: &Engine, launch: &Launch) -> Result<(), ExecutorError> {
        let Self { kv, seats, buffers, drafts } = self;
        let (Some(made), Some(DraftRows { drafting, dp_rows, .. })) = (drafts, launch.drafts)
        else {
            return Ok(());
        };
        if drafting == 0 && dp_rows == 0 {
            return Ok(());
        }
        let (ops, model) = (&engine.ops, &engine.model);
        let longest = launch.shape.bounds.longest_context;
        let mut before = made.before_rows(ops, buffers, drafting)?; // [R, H]
        for pass in 0..made.passes() {
            made.lay_out(ops, (buffers, seats), (drafting, pass))?;
            let (batch, ids) = made.view(seats, drafting, longest)?;
            let f = forward(engine, (kv, &batch), (dp_rows, launch.exchange));
            let hidden = model.draft(&f, &ids, &before)?; // [R, H]
            if drafting > 0 {
                let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(model.logits(&f, hidden)?);
                made.choose(ops, (&hidden, pass), logits)?;
            }
            before = hidden;
        }
        Ok(made.place(ops, (buffers, seats), drafting)?)
    }

    /// Lets the layer see the tokens of a step, whose hidden states are `hidden [T, H]`, and keeps those that later rows
    /// begin with.
    pub(crate) fn keep_for_drafts(
        &mut self,
        engine: &Engine,
        (shape, rows): (StepShape, usize),
        hidden: &Tensor,
    ) -> Result<(), ExecutorError> {
        let Self { kv, seats, buffers, drafts } = self;
        let Some(made) = drafts.as_mut().filter(|_| shape.tokens > 0) else { return Ok(()) };
        let ops = &engine.ops;
        let before = made.before_tokens(ops, buffers, (hidden, rows))?; // [T, H]
        let (batch, ids) = buffers.view(seats, shape)?;
        let f = forward(engine, (kv, &batch), (0, Exchange::Gather));
        engine.model.keep_for_drafts(&f, &ids, &before)?;
        Ok(made.carry(ops, (buffers, seats), (hidden, rows))?)
    }
}

/// A pass of the draft layer. Its experts are counted nowhere, and it is not watched.
fn forward<'a>(
    engine: &'a Engine,
    (kv, batch): (&'a KvPool, &'a BatchView),
    (dp_rows, exchange): (usize, Exchange),
) -> Forward<'a> {
    let Engine { ops, tp, dp, .. } = engine;
    let (asked, load, probe) = (None, None, None);
    Forward { ops, tp, dp, dp_rows, exchange, kv, batch, asked, load, probe }
}
