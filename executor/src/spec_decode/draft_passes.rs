//! What a proposer computes on the device in a step: draft tokens before the forward pass of the target
//! model, and after it the keys and values that later draft tokens attend to.

use super::DraftRowCounts;
use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::step::{DeviceState, StepLaunch};
use models::{
    AuxHiddenStates, DraftPassOutput, Eagle3Model, ExpertExchange, ForwardContext, ForwardError,
    Model, MtpModel,
};
use ops::{BatchView, DraftBuffers, KvPool, MatMut, MatRef, Tensor, VocabShard};

/// A model that proposes draft tokens on the device.
pub(crate) enum ProposerModel {
    /// The MTP module of the target model, which shares the target model's KV pool.
    Mtp(Box<dyn MtpModel>),
    /// A separate decoder model, with its own KV pool.
    DraftModel(Box<dyn Model>),
    /// An EAGLE-3 layer, which starts from auxiliary hidden states of the target model, with its own KV pool.
    Eagle3(Box<Eagle3Model>),
}

impl ProposerModel {
    /// Auxiliary hidden states that the proposer reads from a forward pass of the target model, if any.
    pub(crate) fn aux_hidden_states(&self) -> Option<AuxHiddenStates<'_>> {
        match self {
            Self::Mtp(_) | Self::DraftModel(_) => None,
            Self::Eagle3(eagle) => Some(eagle.aux_hidden_states()),
        }
    }
}

/// The vocabulary of draft tokens.
#[derive(Clone, Copy)]
struct DraftVocab<'a> {
    /// Vocabulary shard of this rank's draft logits.
    shard: &'a VocabShard,
    /// Target token ids by draft token id (EAGLE-3's d2t); `None`: the ids are the same.
    target_ids: Option<&'a Tensor>,
}

/// Passes of a proposer, with one token per row and pass.
#[derive(Clone, Copy)]
struct DraftPasses<'a> {
    proposer: &'a ProposerModel,
    target: &'a dyn Model,
    /// KV pool of the passes.
    kv: &'a KvPool,
}

impl DraftPasses<'_> {
    /// Runs a pass over the newest tokens `ids [R]` of rows; `previous`: hidden states `[R, H]` of the tokens
    /// before them, if [`reads_hidden_states`](Self::reads_hidden_states).
    fn propose(
        self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: Option<Tensor>,
    ) -> Result<DraftPassOutput, ForwardError> {
        let states = || previous.ok_or(ForwardError::NoHiddenStates);
        let hidden = match self.proposer {
            ProposerModel::Mtp(module) => module.forward(f, ids, &states()?)?,
            ProposerModel::DraftModel(model) => model.forward(f, ids)?,
            ProposerModel::Eagle3(eagle) => return eagle.draft(f, self.target, ids, states()?),
        };
        Ok(DraftPassOutput { hidden, next_hidden: None })
    }

    /// Writes the KV of the tokens `ids [T]` of a step; `previous`: hidden states `[T, H]` of the tokens
    /// before them, if [`reads_hidden_states`](Self::reads_hidden_states).
    fn observe(
        self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let states = || previous.ok_or(ForwardError::NoHiddenStates);
        match self.proposer {
            ProposerModel::Mtp(module) => module.write_kv_only(f, ids, states()?),
            // Only the KV write is needed.
            ProposerModel::DraftModel(model) => model.forward(f, ids).map(drop),
            ProposerModel::Eagle3(eagle) => eagle.write_kv_only(f, self.target, ids, states()?),
        }
    }

    /// Logits of this rank's vocabulary shard, f32 `[n, V of this rank]`, of `hidden [n, H]`.
    fn shard_logits(self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        match self.proposer {
            ProposerModel::Mtp(_) => self.target.shard_logits(f, hidden),
            ProposerModel::DraftModel(model) => model.shard_logits(f, hidden),
            ProposerModel::Eagle3(eagle) => eagle.shard_logits(f, hidden),
        }
    }

    /// Whether passes start from hidden states of the target model.
    fn reads_hidden_states(self) -> bool {
        !matches!(self.proposer, ProposerModel::DraftModel(_))
    }

    /// Whether passes may run experts that replicas share: all replicas then run the same number of passes.
    fn shares_experts(self) -> bool {
        !matches!(self.proposer, ProposerModel::Eagle3(_))
    }
}

impl ModelContext {
    /// Passes of the proposer, if there is one; `draft_kv`: its own KV pool, if it has one.
    fn draft_passes<'a>(
        &'a self,
        kv: &'a KvPool,
        draft_kv: Option<&'a KvPool>,
    ) -> Option<DraftPasses<'a>> {
        let proposer = self.proposer.as_ref()?;
        Some(DraftPasses { proposer, target: self.model.as_ref(), kv: draft_kv.unwrap_or(kv) })
    }

    /// Vocabulary of the proposer's draft tokens: EAGLE-3 may have one of its own.
    fn draft_vocab(&self) -> DraftVocab<'_> {
        match &self.proposer {
            Some(ProposerModel::Eagle3(eagle)) => {
                DraftVocab { shard: eagle.vocab_shard(), target_ids: eagle.draft_to_target() }
            }
            _ => DraftVocab { shard: &self.vocab_shard, target_ids: None },
        }
    }
}

/// How replicas compute a pass together (DP attention with expert parallel).
#[derive(Clone, Copy)]
struct PassExchange {
    /// Rows per replica that MoE layers are padded to.
    dp_rows: usize,
    /// How tokens reach the experts of other replicas.
    experts: ExpertExchange,
}

/// Context of a pass over `batch`, without expert load counters and probe.
fn pass_context<'a>(
    context: &'a ModelContext,
    kv: &'a KvPool,
    batch: &'a BatchView,
    exchange: PassExchange,
) -> ForwardContext<'a> {
    let PassExchange { dp_rows, experts } = exchange;
    ForwardContext { dp_rows, expert_exchange: experts, ..context.forward_context(kv, batch) }
}

impl DeviceState {
    /// Proposes the draft tokens of a prepared step, in as many passes as the maximum number of draft tokens
    /// per row, and inserts them. All ranks run the same number of passes.
    pub(crate) fn propose_drafts(
        &mut self,
        context: &ModelContext,
        launch: &StepLaunch,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seq_slots, buffers, drafts } = self;
        let (Some(draft_buffers), Some(DraftRowCounts { drafting, dp_rows, .. })) =
            (drafts, launch.drafts)
        else {
            return Ok(());
        };
        let Some(passes) = context.draft_passes(kv, draft_kv.as_ref()) else { return Ok(()) };
        if drafting == 0 && (dp_rows == 0 || !passes.shares_experts()) {
            return Ok(());
        }
        let (ops, longest) = (&context.ops, launch.shape.bounds.max_context_len);
        let exchange = PassExchange { dp_rows, experts: launch.expert_exchange };
        let states = || draft_buffers.pass_input_states(ops, buffers, drafting); // [R, H]
        let mut previous = passes.reads_hidden_states().then(states).transpose()?;
        for pass in 0..draft_buffers.passes() {
            draft_buffers.prepare_pass(ops, buffers, seq_slots, drafting, pass)?;
            let (batch, ids) = draft_buffers.view(seq_slots, drafting, longest)?;
            let f = pass_context(context, passes.kv, &batch, exchange);
            let DraftPassOutput { hidden, next_hidden } = passes.propose(&f, &ids, previous)?; // [R, H]
            if drafting > 0 {
                choose_drafts(draft_buffers, context, passes, &f, &hidden, pass)?;
            }
            previous = Some(next_hidden.unwrap_or(hidden));
        }
        Ok(draft_buffers.insert(ops, buffers, seq_slots, drafting)?)
    }

    /// Lets the proposer observe the tokens of a step with `rows` rows, and stores the hidden states that
    /// later rows start from. `states [T, H]`: hidden states of the tokens, or the auxiliary hidden states
    /// that the proposer reads instead.
    pub(crate) fn observe_tokens(
        &mut self,
        context: &ModelContext,
        launch: &StepLaunch,
        rows: usize,
        states: &Tensor,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seq_slots, buffers, drafts } = self;
        let (Some(draft_buffers), shape) = (drafts.as_mut(), launch.shape) else { return Ok(()) };
        let Some(passes) = context.draft_passes(kv, draft_kv.as_ref()) else { return Ok(()) };
        let ops = &context.ops;
        if !passes.reads_hidden_states() {
            if shape.tokens > 0 || launch.dp_rows > 0 {
                let (batch, ids) = buffers.view(seq_slots, shape)?;
                let (dp_rows, experts) = (launch.dp_rows, launch.expert_exchange);
                let exchange = PassExchange { dp_rows, experts };
                let f = pass_context(context, passes.kv, &batch, exchange);
                passes.observe(&f, &ids, None)?;
            }
            return Ok(());
        }
        if shape.tokens == 0 {
            return Ok(());
        }
        let previous = draft_buffers.previous_states(ops, buffers, states, rows)?; // [T, H]
        let (batch, ids) = buffers.view(seq_slots, shape)?;
        let exchange = PassExchange { dp_rows: 0, experts: ExpertExchange::AllGather };
        let f = pass_context(context, passes.kv, &batch, exchange);
        passes.observe(&f, &ids, Some(&previous))?;
        drop((batch, ids));
        Ok(draft_buffers.store_states(ops, buffers, seq_slots, states, rows)?)
    }
}

/// Chooses the draft tokens of a pass from the hidden states of its rows, `hidden [R, H]`, together with the
/// ranks of the other vocabulary shards.
fn choose_drafts(
    draft_buffers: &mut DraftBuffers,
    context: &ModelContext,
    passes: DraftPasses<'_>,
    f: &ForwardContext<'_>,
    hidden: &Tensor,
    pass: usize,
) -> Result<(), ExecutorError> {
    let ModelContext { ops, tp, .. } = context;
    let mut gathered = Ok(());
    let mut gather = |local: MatRef<'_>, all: MatMut<'_>| {
        gathered = tp.all_gather(ops.stream(), local, all);
        gathered.is_ok()
    };
    let vocab = context.draft_vocab();
    let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(passes.shard_logits(f, hidden)?);
    let chosen = draft_buffers.choose_tokens(ops, hidden, pass, vocab.shard, &mut gather, logits);
    gathered?; // More specific than the error of the choice.
    chosen?;
    match vocab.target_ids {
        Some(ids) => Ok(draft_buffers.map_ids(ops, hidden.rows(), pass, ids)?),
        None => Ok(()),
    }
}
