//! What a step launches: the forward pass, the head, the sampler, and what drafts. Nothing here knows whether it is being recorded.

use crate::ExecutorError;
use crate::clock::ns_since;
use crate::draft_passes::Draft;
use crate::engine::Engine;
use crate::layer_drafts::DraftRows;
use crate::trace::{Laps, Scope};
use models::{Exchange, Forward, Taps};
use ops::{DType, DraftBuffers, KvPool, Mat, MatMut, StepBuffers, StepShape, Tensor};
use protocol::StepTiming;
use std::time::Instant;

/// What is launched for a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) shape: StepShape,
    /// Rows that each replica has room for where they bring their tokens together; of no meaning to one alone.
    pub(crate) dp_rows: usize,
    /// How tokens come to the experts of other replicas.
    pub(crate) exchange: Exchange,
    /// Nobody asks for the hidden states of other tokens than the questions are about.
    pub(crate) asked_only: bool,
    /// Ranks that share a head bring whole rows of logits together: some question wants them.
    pub(crate) whole_rows: bool,
    /// Where there is a draft layer.
    pub(crate) drafts: Option<DraftRows>,
}

impl Launch {
    /// A step that looks alike on all ranks. Where there is a draft layer, so many rows have drafts.
    pub(crate) fn of_all(
        (shape, whole_rows): (StepShape, bool),
        drafting: Option<usize>,
        engine: &Engine,
    ) -> Self {
        let of_all = |rows| if engine.dp.size() > 1 { rows } else { 0 };
        let of_rows = |rows| DraftRows { rows, drafting: rows, dp_rows: of_all(rows) };
        Self {
            shape,
            dp_rows: of_all(shape.tokens),
            exchange: Exchange::Gather,
            asked_only: asks_few(&shape) && drafting.is_none(),
            whole_rows,
            drafts: drafting.map(of_rows),
        }
    }
}

/// The part of what a step changes that lies on the device.
pub(crate) struct DeviceState {
    pub(crate) kv: KvPool,
    pub(crate) draft_kv: Option<KvPool>,
    pub(crate) seats: ops::Seats,
    pub(crate) buffers: StepBuffers,
    /// If the model's draft layer or another model makes drafts.
    pub(crate) drafts: Option<DraftBuffers>,
}

impl DeviceState {
    /// A whole step, launch by launch: what a stage that has been uploaded says, laid out as `launch` says.
    pub(crate) fn launch(
        &mut self,
        engine: &Engine,
        launch: Launch,
        timing: &mut StepTiming,
        laps: &mut Option<Laps>,
    ) -> Result<Tensor, ExecutorError> {
        let started = Instant::now();
        let Engine { ops, model, .. } = engine;
        let Launch { shape, dp_rows, exchange, asked_only, whole_rows, drafts } = launch;
        Laps::within(laps, Scope::Prepare, || {
            Ok(self.buffers.prepare(ops, &mut self.seats, shape)?)
        })?;
        if drafts.is_some() {
            Laps::within(laps, Scope::Draft, || self.draft(engine, &launch))?;
        }
        let (batch, ids) = self.buffers.view(&self.seats, shape)?;
        let (kv, load) = (&self.kv, engine.load());
        let tokens = self.buffers.question_tokens(shape.questions)?;
        let asked = asked_only.then_some(&tokens);
        let watching = engine.draft.as_ref().and_then(Draft::taps);
        let taps = watching.as_ref();
        let f = Forward { dp_rows, exchange, asked, taps, load, ..engine.pass(kv, &batch) };
        let hidden = Laps::within(laps, Scope::Forward, || Ok(model.forward(&f, &ids)?))?; // [T or n, H]
        if shape.questions > 0 {
            let head = || match asked {
                Some(_) => Ok(model.own_logits(&f, &hidden)?),
                None => Ok(model.own_logits(&f, &ops.gather_rows(&hidden, &tokens)?)?),
            };
            let logits = Laps::within(laps, Scope::Head, head)?; // [n, V of this rank]
            drop((batch, ids, tokens));
            timing.forward_ns += ns_since(started);
            let sample = || self.sample(engine, (&logits, whole_rows), timing);
            Laps::within(laps, Scope::Sampling, sample)?;
        } else {
            drop((batch, ids, tokens));
            timing.forward_ns += ns_since(started);
        }
        if let Some(DraftRows { rows, .. }) = drafts {
            let states = watching.and_then(Taps::states);
            let states = states.as_ref().unwrap_or(&hidden);
            let keep = || self.keep_for_drafts(engine, (&launch, rows), states);
            Laps::within(laps, Scope::Draft, keep)?;
        }
        Ok(hidden)
    }

    /// Answers the `n` questions of a stage that has been uploaded.
    pub(crate) fn answer(
        &mut self,
        engine: &Engine,
        hidden: &Tensor,
        (n, whole_rows): (usize, bool),
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let Engine { ops, model, .. } = engine;
        let shape = StepShape { questions: n, ..StepShape::default() };
        self.buffers.prepare(ops, &mut self.seats, shape)?;
        let (batch, _) = self.buffers.view(&self.seats, shape)?;
        let f = Forward { load: engine.load(), ..engine.pass(&self.kv, &batch) };
        let asked = self.buffers.question_tokens(n)?;
        let wanted = ops.gather_rows(hidden, &asked)?; // [n, H]
        let logits = model.own_logits(&f, &wanted)?; // [n, V of this rank]
        drop((batch, asked));
        timing.forward_ns += ns_since(started);
        self.sample(engine, (&logits, whole_rows), timing)
    }

    /// Chooses tokens out of this rank's logits, together with those who have the others: in parts, unless `whole_rows`.
    fn sample(
        &mut self,
        engine: &Engine,
        (logits, whole_rows): (&Tensor, bool),
        timing: &mut StepTiming,
    ) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let Engine { ops, tp, part, .. } = engine;
        let Self { buffers, seats, .. } = self;
        if tp.size() == 1 {
            buffers.sample(ops, seats, logits)?;
        } else if whole_rows {
            let mut whole = ops.scratch(DType::F32, &[logits.rows(), part.vocab])?;
            tp.all_gather(ops.stream(), logits.mat()?, whole.mat_mut()?)?;
            buffers.sample(ops, seats, &whole)?;
        } else {
            let mut gathered = Ok(());
            let mut gather = |own: Mat<'_>, all: MatMut<'_>| {
                gathered = tp.all_gather(ops.stream(), own, all);
                gathered.is_ok()
            };
            let sampled = buffers.sample_parts(ops, seats, (logits, part), &mut gather);
            gathered?; // It says more than that the others are gone.
            sampled?;
        }
        timing.sample_ns += ns_since(started);
        Ok(())
    }
}

/// Whether a step has tokens that none of its questions is about; a step without questions is left as it is.
pub(crate) fn asks_few(shape: &StepShape) -> bool {
    (1..shape.tokens).contains(&shape.questions)
}
