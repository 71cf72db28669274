//! What a draft layer, or a model that drafts for another, computes in a step: guesses in front of the forward pass, and behind
//! it what later guesses attend to and begin with.

use crate::ExecutorError;
use crate::draft_state_tracker::DraftRowCounts;
use crate::model_context::ModelContext;
use crate::step_launch::{DeviceState, StepLaunch};
use models::{
    AuxHiddenStates, DraftPassOutput, Eagle3Model, ExpertExchange, ForwardContext, ForwardError,
    Model, MtpModel,
};
use ops::{BatchView, DraftBuffers, KvPool, MatMut, MatRef, Tensor, VocabShard};

/// Who drafts for a model, with weights and a pool of its own.
pub(crate) enum DraftModel {
    /// Another model.
    Standalone(Box<dyn Model>),
    /// A layer that begins with hidden states of the model.
    Eagle3(Box<Eagle3Model>),
}

impl DraftModel {
    /// Who watches a forward pass of the model for it, if it wants to see one.
    pub(crate) fn aux_hidden_states(&self) -> Option<AuxHiddenStates<'_>> {
        match self {
            Self::Standalone(_) => None,
            Self::Eagle3(eagle) => Some(eagle.aux_hidden_states()),
        }
    }
}

impl DeviceState {
    /// Makes the drafts of a step that has been prepared, by as many passes as a row may have drafts, and enters them. All
    /// ranks make as many.
    pub(crate) fn draft(
        &mut self,
        engine: &ModelContext,
        launch: &StepLaunch,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seq_slots: seats, buffers, drafts } = self;
        let (Some(made), Some(DraftRowCounts { drafting, dp_rows, .. })) = (drafts, launch.drafts)
        else {
            return Ok(());
        };
        let (ops, by) = (&engine.ops, DraftProposer::of(engine, (kv, draft_kv.as_ref())));
        if drafting == 0 && (dp_rows == 0 || !by.shares_experts_across_replicas()) {
            return Ok(());
        }
        let longest = launch.shape.bounds.max_context_len;
        let mut before = match by {
            DraftProposer::Mtp(..) | DraftProposer::Eagle3(..) => {
                Some(made.pass_input_states(ops, buffers, drafting)?)
            } // [R, H]
            DraftProposer::DraftModel(..) => None,
        };
        for pass in 0..made.passes() {
            made.prepare_pass(ops, (buffers, seats), (drafting, pass))?;
            let (batch, ids) = made.view(seats, drafting, longest)?;
            let f = by.forward_context(engine, &batch, (dp_rows, launch.expert_exchange));
            let DraftPassOutput { hidden, next_hidden: carried } = by.propose(&f, &ids, before)?; // [R, H]
            if drafting > 0 {
                argmax_drafts(made, engine, (&hidden, pass), (by, &f))?;
            }
            before = Some(carried.unwrap_or(hidden));
        }
        Ok(made.insert(ops, (buffers, seats), drafting)?)
    }

    /// Lets who drafts see the tokens of a step, whose hidden states, or what a layer begins with instead, are `states [T, H]`, and
    /// keeps those that later rows begin with.
    pub(crate) fn mtp_write_kv(
        &mut self,
        engine: &ModelContext,
        (launch, rows): (&StepLaunch, usize),
        states: &Tensor,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seq_slots: seats, buffers, drafts } = self;
        let (Some(made), shape) = (drafts.as_mut(), launch.shape) else { return Ok(()) };
        let (ops, by) = (&engine.ops, DraftProposer::of(engine, (kv, draft_kv.as_ref())));
        let computes =
            shape.tokens > 0 || launch.dp_rows > 0 && matches!(by, DraftProposer::DraftModel(..));
        if !computes {
            return Ok(());
        }
        if let DraftProposer::DraftModel(model, _) = by {
            let (batch, ids) = buffers.view(seats, shape)?;
            let f = by.forward_context(engine, &batch, (launch.dp_rows, launch.expert_exchange));
            model.forward(&f, &ids)?; // What it keeps is all that is wanted.
            return Ok(());
        }
        let before = made.previous_states(ops, buffers, (states, rows))?; // [T, H]
        let (batch, ids) = buffers.view(seats, shape)?;
        let f = by.forward_context(engine, &batch, (0, ExpertExchange::AllGather));
        match by {
            DraftProposer::Eagle3((eagle, model), _) => {
                eagle.write_kv_only(&f, (model, &ids), &before)?;
            }
            DraftProposer::Mtp((Some(mtp), _), _) => mtp.write_kv_only(&f, &ids, &before)?,
            DraftProposer::Mtp((None, _), _) | DraftProposer::DraftModel(..) => {}
        }
        drop((batch, ids));
        Ok(made.store_states(ops, (buffers, seats), (states, rows))?)
    }
}

/// Makes the drafts of a pass out of the states behind its rows, `hidden [R, H]`, and this rank's logits of them, together with those
/// who have the others.
fn argmax_drafts(
    made: &mut DraftBuffers,
    engine: &ModelContext,
    (hidden, pass): (&Tensor, usize),
    (by, f): (DraftProposer<'_>, &ForwardContext<'_>),
) -> Result<(), ExecutorError> {
    let ModelContext { ops, tp, vocab_shard: part, .. } = engine;
    let mut gathered = Ok(());
    let mut gather = |own: MatRef<'_>, all: MatMut<'_>| {
        gathered = tp.all_gather(ops.stream(), own, all);
        gathered.is_ok()
    };
    let (part, names) = by.draft_vocab().unwrap_or((part, None));
    let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(by.shard_logits(f, hidden)?);
    let chosen = made.choose_tokens(ops, (hidden, pass), (part, &mut gather), logits);
    gathered?; // It says more than that the others are gone.
    chosen?;
    match names {
        Some(names) => Ok(made.map_ids(ops, (hidden.rows(), pass), names)?),
        None => Ok(()),
    }
}

/// Who drafts, and what it keeps of each token.
#[derive(Clone, Copy)]
enum DraftProposer<'a> {
    /// The model's MTP module, in the model's pool; `None`: it has none.
    Mtp((Option<&'a dyn MtpModel>, &'a dyn Model), &'a KvPool),
    /// Another model, in a pool of its own.
    DraftModel(&'a dyn Model, &'a KvPool),
    /// A layer that begins with hidden states of the model, in a pool of its own.
    Eagle3((&'a Eagle3Model, &'a dyn Model), &'a KvPool),
}

impl<'a> DraftProposer<'a> {
    fn of(engine: &'a ModelContext, (kv, draft_kv): (&'a KvPool, Option<&'a KvPool>)) -> Self {
        match (&engine.draft, draft_kv) {
            (Some(DraftModel::Standalone(model)), Some(kv)) => Self::DraftModel(model.as_ref(), kv),
            (Some(DraftModel::Eagle3(eagle)), Some(kv)) => {
                Self::Eagle3((eagle, engine.model.as_ref()), kv)
            }
            _ => Self::Mtp((engine.mtp.as_deref(), engine.model.as_ref()), kv),
        }
    }

    /// Whether replicas that share experts meet in its passes: it may have experts.
    fn shares_experts_across_replicas(self) -> bool {
        !matches!(self, Self::Eagle3(..))
    }

    /// What the head makes guesses of behind tokens `ids [R]`; a layer's are made of the states `before` them, `[R, H]`, too.
    fn propose(
        self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<Tensor>,
    ) -> Result<DraftPassOutput, ForwardError> {
        let hidden = match (self, before) {
            (Self::Mtp((Some(mtp), _), _), Some(before)) => mtp.forward(f, ids, &before)?,
            (Self::Eagle3((eagle, model), _), Some(before)) => {
                return eagle.draft(f, (model, ids), before);
            }
            (
                Self::Mtp((_, model), _) | Self::DraftModel(model, _) | Self::Eagle3((_, model), _),
                _,
            ) => model.forward(f, ids)?,
        };
        Ok(DraftPassOutput { hidden, next_hidden: None })
    }

    /// This rank's logits f32 `[n, V of this rank]` of `hidden [n, H]`.
    fn shard_logits(self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        match self {
            Self::Mtp((_, model), _) | Self::DraftModel(model, _) => model.shard_logits(f, hidden),
            Self::Eagle3((eagle, _), _) => eagle.shard_logits(f, hidden),
        }
    }

    /// The part of the ids whose logits this rank makes, and what the model calls them, where they are not the model's.
    fn draft_vocab(self) -> Option<(&'a VocabShard, Option<&'a Tensor>)> {
        match self {
            Self::Mtp(..) | Self::DraftModel(..) => None,
            Self::Eagle3((eagle, _), _) => Some((eagle.vocab_shard(), eagle.draft_to_target())),
        }
    }

    /// A pass over a batch. Its experts are counted nowhere, and it is not watched.
    fn forward_context(
        self,
        engine: &'a ModelContext,
        batch: &'a BatchView,
        (dp_rows, exchange): (usize, ExpertExchange),
    ) -> ForwardContext<'a> {
        let (Self::Mtp(_, kv) | Self::DraftModel(_, kv) | Self::Eagle3(_, kv)) = self;
        ForwardContext { dp_rows, expert_exchange: exchange, ..engine.forward_context(kv, batch) }
    }
}
