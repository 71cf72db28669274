//! What a draft layer, or a model that drafts for another, computes in a step: guesses in front of the forward pass, and behind
//! it what later guesses attend to and begin with.

use crate::ExecutorError;
use crate::engine::Engine;
use crate::launch::{DeviceState, Launch};
use crate::layer_drafts::DraftRows;
use models::{Drafted, Eagle3, Exchange, Forward, ForwardError, Model, Taps};
use ops::{BatchView, DraftBuffers, KvPool, Mat, MatMut, Tensor, VocabPart};

/// Who drafts for a model, with weights and a pool of its own.
pub(crate) enum Draft {
    /// Another model.
    Model(Box<dyn Model>),
    /// A layer that begins with hidden states of the model.
    Eagle3(Box<Eagle3>),
}

impl Draft {
    /// Who watches a forward pass of the model for it, if it wants to see one.
    pub(crate) fn taps(&self) -> Option<Taps<'_>> {
        match self {
            Self::Model(_) => None,
            Self::Eagle3(eagle) => Some(eagle.taps()),
        }
    }
}

impl DeviceState {
    /// Makes the drafts of a step that has been prepared, by as many passes as a row may have drafts, and enters them. All
    /// ranks make as many.
    pub(crate) fn draft(&mut self, engine: &Engine, launch: &Launch) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seats, buffers, drafts } = self;
        let (Some(made), Some(DraftRows { drafting, dp_rows, .. })) = (drafts, launch.drafts)
        else {
            return Ok(());
        };
        let (ops, by) = (&engine.ops, By::of(engine, (kv, draft_kv.as_ref())));
        if drafting == 0 && (dp_rows == 0 || !by.meets_replicas()) {
            return Ok(());
        }
        let longest = launch.shape.bounds.longest_context;
        let mut before = match by {
            By::Layer(..) | By::Eagle3(..) => Some(made.before_rows(ops, buffers, drafting)?), // [R, H]
            By::Model(..) => None,
        };
        for pass in 0..made.passes() {
            made.lay_out(ops, (buffers, seats), (drafting, pass))?;
            let (batch, ids) = made.view(seats, drafting, longest)?;
            let f = by.forward(engine, &batch, (dp_rows, launch.exchange));
            let Drafted { hidden, carried } = by.guess(&f, &ids, before)?; // [R, H]
            if drafting > 0 {
                choose(made, engine, (&hidden, pass), (by, &f))?;
            }
            before = Some(carried.unwrap_or(hidden));
        }
        Ok(made.place(ops, (buffers, seats), drafting)?)
    }

    /// Lets who drafts see the tokens of a step, whose hidden states, or what a layer begins with instead, are `states [T, H]`, and
    /// keeps those that later rows begin with.
    pub(crate) fn keep_for_drafts(
        &mut self,
        engine: &Engine,
        (launch, rows): (&Launch, usize),
        states: &Tensor,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seats, buffers, drafts } = self;
        let (Some(made), shape) = (drafts.as_mut(), launch.shape) else { return Ok(()) };
        let (ops, by) = (&engine.ops, By::of(engine, (kv, draft_kv.as_ref())));
        let computes = shape.tokens > 0 || launch.dp_rows > 0 && matches!(by, By::Model(..));
        if !computes {
            return Ok(());
        }
        if let By::Model(model, _) = by {
            let (batch, ids) = buffers.view(seats, shape)?;
            let f = by.forward(engine, &batch, (launch.dp_rows, launch.exchange));
            model.forward(&f, &ids)?; // What it keeps is all that is wanted.
            return Ok(());
        }
        let before = made.before_tokens(ops, buffers, (states, rows))?; // [T, H]
        let (batch, ids) = buffers.view(seats, shape)?;
        let f = by.forward(engine, &batch, (0, Exchange::Gather));
        match by {
            By::Eagle3((eagle, model), _) => eagle.keep(&f, (model, &ids), &before)?,
            By::Layer(model, _) | By::Model(model, _) => {
                model.keep_for_drafts(&f, &ids, &before)?;
            }
        }
        drop((batch, ids));
        Ok(made.carry(ops, (buffers, seats), (states, rows))?)
    }
}

/// Makes the drafts of a pass out of the states behind its rows, `hidden [R, H]`, and this rank's logits of them, together with those
/// who have the others.
fn choose(
    made: &mut DraftBuffers,
    engine: &Engine,
    (hidden, pass): (&Tensor, usize),
    (by, f): (By<'_>, &Forward<'_>),
) -> Result<(), ExecutorError> {
    let Engine { ops, tp, part, .. } = engine;
    let mut gathered = Ok(());
    let mut gather = |own: Mat<'_>, all: MatMut<'_>| {
        gathered = tp.all_gather(ops.stream(), own, all);
        gathered.is_ok()
    };
    let (part, names) = by.ids().unwrap_or((part, None));
    let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(by.own_logits(f, hidden)?);
    let chosen = made.choose(ops, (hidden, pass), (part, &mut gather), logits);
    gathered?; // It says more than that the others are gone.
    chosen?;
    match names {
        Some(names) => Ok(made.name(ops, (hidden.rows(), pass), names)?),
        None => Ok(()),
    }
}

/// Who drafts, and what it keeps of each token.
#[derive(Clone, Copy)]
enum By<'a> {
    /// The model's own layer, in the model's pool.
    Layer(&'a dyn Model, &'a KvPool),
    /// Another model, in a pool of its own.
    Model(&'a dyn Model, &'a KvPool),
    /// A layer that begins with hidden states of the model, in a pool of its own.
    Eagle3((&'a Eagle3, &'a dyn Model), &'a KvPool),
}

impl<'a> By<'a> {
    fn of(engine: &'a Engine, (kv, draft_kv): (&'a KvPool, Option<&'a KvPool>)) -> Self {
        match (&engine.draft, draft_kv) {
            (Some(Draft::Model(model)), Some(kv)) => Self::Model(model.as_ref(), kv),
            (Some(Draft::Eagle3(eagle)), Some(kv)) => {
                Self::Eagle3((eagle, engine.model.as_ref()), kv)
            }
            _ => Self::Layer(engine.model.as_ref(), kv),
        }
    }

    /// Whether replicas that share experts meet in its passes: it may have experts.
    fn meets_replicas(self) -> bool {
        !matches!(self, Self::Eagle3(..))
    }

    /// What the head makes guesses of behind tokens `ids [R]`; a layer's are made of the states `before` them, `[R, H]`, too.
    fn guess(
        self,
        f: &Forward<'_>,
        ids: &Tensor,
        before: Option<Tensor>,
    ) -> Result<Drafted, ForwardError> {
        let hidden = match (self, before) {
            (Self::Layer(model, _), Some(before)) => model.draft(f, ids, &before)?,
            (Self::Eagle3((eagle, model), _), Some(before)) => {
                return eagle.draft(f, (model, ids), before);
            }
            (Self::Layer(model, _) | Self::Model(model, _) | Self::Eagle3((_, model), _), _) => {
                model.forward(f, ids)?
            }
        };
        Ok(Drafted { hidden, carried: None })
    }

    /// This rank's logits f32 `[n, V of this rank]` of `hidden [n, H]`.
    fn own_logits(self, f: &Forward<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        match self {
            Self::Layer(model, _) | Self::Model(model, _) => model.own_logits(f, hidden),
            Self::Eagle3((eagle, _), _) => eagle.own_logits(f, hidden),
        }
    }

    /// The part of the ids whose logits this rank makes, and what the model calls them, where they are not the model's.
    fn ids(self) -> Option<(&'a VocabPart, Option<&'a Tensor>)> {
        match self {
            Self::Layer(..) | Self::Model(..) => None,
            Self::Eagle3((eagle, _), _) => Some((eagle.part(), eagle.names())),
        }
    }

    /// A pass over a batch. Its experts are counted nowhere, and it is not watched.
    fn forward(
        self,
        engine: &'a Engine,
        batch: &'a BatchView,
        (dp_rows, exchange): (usize, Exchange),
    ) -> Forward<'a> {
        let (Self::Layer(_, kv) | Self::Model(_, kv) | Self::Eagle3(_, kv)) = self;
        Forward { dp_rows, exchange, ..engine.pass(kv, batch) }
    }
}
