//! Passes of a proposer on the device. The passes before the forward pass of the target model propose draft
//! tokens. The pass after the forward pass writes the draft KV that later draft passes attend to.
//!
//! Legend: R rows, T tokens of the step, n logits rows, H hidden size, V vocabulary size.

use super::DraftRowCounts;
use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::step::{StepDeviceState, StepLaunchOptions};
use models::{
    AuxHiddenStateCollector, DraftPassOutput, Eagle3Model, ExpertExchangeMethod, ForwardContext,
    ForwardError, Model, MtpModel,
};
use ops::{
    DeviceBatchMetadata, DeviceSequenceSlots, DraftBuffers, KvPool, StepBuffers, StepShape, Tensor,
    VocabShard,
};

/// Model that proposes draft tokens on the device.
pub(crate) enum ProposerModel {
    /// The MTP module of the target model, which shares the target model's KV pool.
    Mtp(Box<dyn MtpModel>),
    /// A separate decoder model with its own KV pool.
    DraftModel(Box<dyn Model>),
    /// An EAGLE-3 layer with its own KV pool. It reads auxiliary hidden states of the target model.
    Eagle3(Box<Eagle3Model>),
}

impl ProposerModel {
    /// Returns which auxiliary hidden states of the target model's forward pass the proposer reads, if any.
    pub(crate) fn aux_hidden_states(&self) -> Option<AuxHiddenStateCollector<'_>> {
        match self {
            Self::Mtp(_) | Self::DraftModel(_) => None,
            Self::Eagle3(eagle) => Some(eagle.aux_hidden_states()),
        }
    }
}

/// Vocabulary from which a proposer on the device chooses draft tokens.
#[derive(Clone, Copy)]
struct DraftVocab<'a> {
    /// Vocabulary shard of this rank's draft logits.
    shard: &'a VocabShard,
    /// Target token id of each draft token id (EAGLE-3's d2t table); `None` = draft token ids equal target
    /// token ids.
    target_ids: Option<&'a Tensor>,
}

/// Runs the forward passes of a proposer. In a pass that proposes draft tokens, each row has one token.
#[derive(Clone, Copy)]
struct DraftPassRunner<'a> {
    proposer: &'a ProposerModel,
    target: &'a dyn Model,
    /// KV pool that the passes read and write.
    kv: &'a KvPool,
}

impl DraftPassRunner<'_> {
    /// Runs a pass over the newest token of each row, `ids [R]`. `previous`: hidden states `[R, H]` of the
    /// tokens before the newest tokens; required if [`reads_hidden_states`](Self::reads_hidden_states).
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

    /// Writes the keys and values that the proposer's layers compute for the step's tokens, `ids [T]`.
    /// `previous`: hidden state of the token before each of these tokens, `[T, H]`; required if
    /// [`reads_hidden_states`](Self::reads_hidden_states).
    fn observe(
        self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let states = || previous.ok_or(ForwardError::NoHiddenStates);
        match self.proposer {
            ProposerModel::Mtp(module) => module.write_kv_only(f, ids, states()?),
            // The output is dropped: only the KV write is needed.
            ProposerModel::DraftModel(model) => model.forward(f, ids).map(drop),
            ProposerModel::Eagle3(eagle) => eagle.write_kv_only(f, self.target, ids, states()?),
        }
    }

    /// Runs [`observe`](Self::observe) over the tokens of a prepared step of shape `shape`.
    fn observe_step(
        self,
        context: &ModelContext,
        buffers: &StepBuffers,
        seq_slots: &DeviceSequenceSlots,
        shape: StepShape,
        exchange: LockstepDraftPassOptions,
        previous: Option<&Tensor>,
    ) -> Result<(), ExecutorError> {
        let (batch, ids) = buffers.view(seq_slots, shape)?;
        let f = pass_context(context, self.kv, &batch, exchange);
        Ok(self.observe(&f, &ids, previous)?)
    }

    /// Returns the logits of `hidden [n, H]` for this rank's vocabulary shard, f32 `[n, V of this rank]`.
    fn shard_logits(self, f: &ForwardContext<'_>, hidden: &Tensor) -> Result<Tensor, ForwardError> {
        match self.proposer {
            ProposerModel::Mtp(_) => self.target.shard_logits(f, hidden),
            ProposerModel::DraftModel(model) => model.shard_logits(f, hidden),
            ProposerModel::Eagle3(eagle) => eagle.shard_logits(f, hidden),
        }
    }

    /// Whether passes read hidden states of the target model.
    fn reads_hidden_states(self) -> bool {
        !matches!(self.proposer, ProposerModel::DraftModel(_))
    }

    /// Whether the passes may run MoE experts that are distributed over the replicas. If so, all replicas
    /// must run the same number of passes.
    fn shares_experts(self) -> bool {
        !matches!(self.proposer, ProposerModel::Eagle3(_))
    }
}

impl ModelContext {
    /// Returns the object that runs the proposer's passes; `None` = no proposer runs on the device.
    /// `draft_kv`: KV pool of the proposer, if it does not share the target model's KV pool.
    fn draft_passes<'a>(
        &'a self,
        kv: &'a KvPool,
        draft_kv: Option<&'a KvPool>,
    ) -> Option<DraftPassRunner<'a>> {
        let proposer = self.proposer.as_ref()?;
        Some(DraftPassRunner { proposer, target: self.model.as_ref(), kv: draft_kv.unwrap_or(kv) })
    }

    /// Returns the vocabulary of the proposer's draft tokens. EAGLE-3 may have a vocabulary of its own.
    fn draft_vocab(&self) -> DraftVocab<'_> {
        match &self.proposer {
            Some(ProposerModel::Eagle3(eagle)) => {
                DraftVocab { shard: eagle.vocab_shard(), target_ids: eagle.draft_to_target() }
            }
            _ => DraftVocab { shard: &self.vocab_shard, target_ids: None },
        }
    }
}

/// Settings of a draft pass that all replicas run in lockstep (DP attention with expert parallelism).
#[derive(Clone, Copy)]
struct LockstepDraftPassOptions {
    /// Number of rows per replica that MoE layers are padded to.
    dp_rows: usize,
    /// Collective that exchanges tokens with the experts of other replicas (all-gather or all-to-all).
    experts: ExpertExchangeMethod,
}

/// Context of a draft pass over `batch`. Draft passes do not count routed tokens and return no intermediate
/// results.
fn pass_context<'a>(
    context: &'a ModelContext,
    kv: &'a KvPool,
    batch: &'a DeviceBatchMetadata,
    exchange: LockstepDraftPassOptions,
) -> ForwardContext<'a> {
    let LockstepDraftPassOptions { dp_rows, experts } = exchange;
    ForwardContext { dp_rows, expert_exchange: experts, ..context.forward_context(kv, batch) }
}

impl StepDeviceState {
    /// Proposes the draft tokens of a prepared step and inserts them into the step's token ids. The number of
    /// passes is always the maximum number of draft tokens per row, so that all ranks run the same number of
    /// passes.
    pub(crate) fn propose_drafts(
        &mut self,
        context: &ModelContext,
        launch: &StepLaunchOptions,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seq_slots, buffers, drafts, .. } = self;
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
        let exchange = LockstepDraftPassOptions { dp_rows, experts: launch.expert_exchange };
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

    /// Runs the pass that writes the draft KV of the tokens of a step with `rows` rows, and stores the hidden
    /// states that later rows read. `states [T, H]`: hidden states of the tokens or, for EAGLE-3, their
    /// auxiliary hidden states.
    pub(crate) fn observe_tokens(
        &mut self,
        context: &ModelContext,
        launch: &StepLaunchOptions,
        rows: usize,
        states: &Tensor,
    ) -> Result<(), ExecutorError> {
        let Self { kv, draft_kv, seq_slots, buffers, drafts, .. } = self;
        let (Some(draft_buffers), shape) = (drafts.as_mut(), launch.shape) else { return Ok(()) };
        let Some(passes) = context.draft_passes(kv, draft_kv.as_ref()) else { return Ok(()) };
        let ops = &context.ops;
        if !passes.reads_hidden_states() {
            if shape.tokens > 0 || launch.dp_rows > 0 {
                let (dp_rows, experts) = (launch.dp_rows, launch.expert_exchange);
                let exchange = LockstepDraftPassOptions { dp_rows, experts };
                passes.observe_step(context, buffers, seq_slots, shape, exchange, None)?;
            }
            return Ok(());
        }
        if shape.tokens == 0 {
            return Ok(());
        }
        let previous = draft_buffers.previous_states(ops, buffers, states, rows)?; // [T, H]
        let exchange =
            LockstepDraftPassOptions { dp_rows: 0, experts: ExpertExchangeMethod::AllGather };
        passes.observe_step(context, buffers, seq_slots, shape, exchange, Some(&previous))?;
        Ok(draft_buffers.store_states(ops, buffers, seq_slots, states, rows)?)
    }
}

/// Chooses the draft token of each row from the hidden states `hidden [R, H]` of a pass. Collective: every
/// rank that computes a vocabulary shard of the draft logits must call it.
fn choose_drafts(
    draft_buffers: &mut DraftBuffers,
    context: &ModelContext,
    passes: DraftPassRunner<'_>,
    f: &ForwardContext<'_>,
    hidden: &Tensor,
    pass: usize,
) -> Result<(), ExecutorError> {
    let (ops, vocab) = (&context.ops, context.draft_vocab());
    let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(passes.shard_logits(f, hidden)?);
    context.with_all_gather(|gather| {
        draft_buffers.choose_tokens(ops, hidden, pass, vocab.shard, gather, logits)
    })?;
    match vocab.target_ids {
        Some(ids) => Ok(draft_buffers.map_ids(ops, hidden.rows(), pass, ids)?),
        None => Ok(()),
    }
}
