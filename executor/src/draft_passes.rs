//! What a draft layer, or a model that drafts for another, computes in a step: guesses in front of the forward pass, and behind
//! it what later guesses attend to and begin with.

use crate::ExecutorError;
use crate::layer_drafts::DraftRows;
use crate::step::{DeviceState, Engine, Launch};
use models::{Exchange, Forward, ForwardError, Model};
use ops::{BatchView, DraftBuffers, KvPool, Mat, MatMut, StepShape, Tensor};

impl DeviceState {
    /// Makes the drafts of a step that has been prepared, by as many passes as a row may have drafts, and enters them. All
    /// ranks make as many.
    pub(crate) fn draft(&mut self, engine: &Engine, launch: &Launch) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seats, buffers, drafts } = self;
        let (Some(made), Some(DraftRows { drafting, dp_rows, .. })) = (drafts, launch.drafts)
        else {
            return Ok(());
        };
        if drafting == 0 && dp_rows == 0 {
            return Ok(());
        }
        let (ops, by) = (&engine.ops, By::of(engine, (kv, draft_kv.as_ref())));
        let longest = launch.shape.bounds.longest_context;
        let mut before = match by {
            By::Layer(..) => Some(made.before_rows(ops, buffers, drafting)?), // [R, H]
            By::Model(..) => None,
        };
        for pass in 0..made.passes() {
            made.lay_out(ops, (buffers, seats), (drafting, pass))?;
            let (batch, ids) = made.view(seats, drafting, longest)?;
            let f = by.forward(engine, &batch, (dp_rows, launch.exchange));
            let hidden = by.guess(&f, &ids, before.as_ref())?; // [R, H]
            if drafting > 0 {
                choose(made, engine, (&hidden, pass), |hidden| by.model().own_logits(&f, hidden))?;
            }
            before = before.map(|_| hidden);
        }
        Ok(made.place(ops, (buffers, seats), drafting)?)
    }

    /// Lets who drafts see the tokens of a step, whose hidden states are `hidden [T, H]`, and keeps those that later rows
    /// begin with.
    pub(crate) fn keep_for_drafts(
        &mut self,
        engine: &Engine,
        (launch, rows): (&Launch, usize),
        hidden: &Tensor,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seats, buffers, drafts } = self;
        let (Some(made), shape) = (drafts.as_mut(), launch.shape) else { return Ok(()) };
        let (ops, by) = (&engine.ops, By::of(engine, (kv, draft_kv.as_ref())));
        let computes = shape.tokens > 0 || launch.dp_rows > 0 && matches!(by, By::Model(..));
        if !computes {
            return Ok(());
        }
        let view = |shape: StepShape| buffers.view(seats, shape);
        match by {
            By::Layer(model, _) => {
                let before = made.before_tokens(ops, buffers, (hidden, rows))?; // [T, H]
                let (batch, ids) = view(shape)?;
                let f = by.forward(engine, &batch, (0, Exchange::Gather));
                model.keep_for_drafts(&f, &ids, &before)?;
                drop((batch, ids));
                Ok(made.carry(ops, (buffers, seats), (hidden, rows))?)
            }
            By::Model(model, _) => {
                let (batch, ids) = view(shape)?;
                let f = by.forward(engine, &batch, (launch.dp_rows, launch.exchange));
                model.forward(&f, &ids)?; // What it keeps is all that is wanted.
                Ok(())
            }
        }
    }
}

/// Makes the drafts of a pass out of the states behind its rows, `hidden [R, H]`, and this rank's logits of them, together with those
/// who have the others.
fn choose(
    made: &mut DraftBuffers,
    engine: &Engine,
    (hidden, pass): (&Tensor, usize),
    own_logits: impl Fn(&Tensor) -> Result<Tensor, ForwardError>,
) -> Result<(), ExecutorError> {
    let Engine { ops, tp, part, .. } = engine;
    let mut gathered = Ok(());
    let mut gather = |own: Mat<'_>, all: MatMut<'_>| {
        gathered = tp.all_gather(ops.stream(), own, all);
        gathered.is_ok()
    };
    let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(own_logits(hidden)?);
    let chosen = made.choose(ops, (hidden, pass), (part, &mut gather), logits);
    gathered?; // It says more than that the others are gone.
    chosen
}

/// Who drafts, and what it keeps of each token.
#[derive(Clone, Copy)]
enum By<'a> {
    /// The model's own layer, in the model's pool.
    Layer(&'a dyn Model, &'a KvPool),
    /// Another model, in a pool of its own.
    Model(&'a dyn Model, &'a KvPool),
}

impl<'a> By<'a> {
    fn of(engine: &'a Engine, (kv, draft_kv): (&'a KvPool, Option<&'a KvPool>)) -> Self {
        match (&engine.draft, draft_kv) {
            (Some(model), Some(kv)) => Self::Model(model.as_ref(), kv),
            _ => Self::Layer(engine.model.as_ref(), kv),
        }
    }

    fn model(self) -> &'a dyn Model {
        match self {
            Self::Layer(model, _) | Self::Model(model, _) => model,
        }
    }

    /// The hidden states behind tokens `ids [R]`; a layer's are made of those `before` them, `[R, H]`, too.
    fn guess(
        self,
        f: &Forward<'_>,
        ids: &Tensor,
        before: Option<&Tensor>,
    ) -> Result<Tensor, ForwardError> {
        match before {
            Some(before) => self.model().draft(f, ids, before),
            None => self.model().forward(f, ids),
        }
    }

    /// A pass over a batch. Its experts are counted nowhere, and it is not watched.
    fn forward(
        self,
        engine: &'a Engine,
        batch: &'a BatchView,
        (dp_rows, exchange): (usize, Exchange),
    ) -> Forward<'a> {
        let Engine { ops, tp, dp, .. } = engine;
        let (Self::Layer(_, kv) | Self::Model(_, kv)) = self;
        let (asked, load, probe) = (None, None, None);
        Forward { ops, tp, dp, dp_rows, exchange, kv, batch, asked, load, probe }
    }
}
