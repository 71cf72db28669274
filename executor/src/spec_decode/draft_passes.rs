//! What a proposer computes on the device in a step: draft tokens before the forward pass of the target model, and after it the
//! keys and values that later draft tokens attend to.

use super::DraftRowCounts;
use crate::ExecutorError;
use crate::model_context::ModelContext;
use crate::step::{DeviceState, StepLaunch};
use models::{
    AuxHiddenStates, DraftPassOutput, Eagle3Model, ExpertExchange, ForwardContext, ForwardError,
    Model, MtpModel,
};
use ops::{BatchView, DraftBuffers, KvPool, MatMut, MatRef, Tensor, VocabShard};

/// A draft model with weights and a KV pool of its own.
pub(crate) enum DraftModel {
    /// A separate decoder model.
    Standalone(Box<dyn Model>),
    /// An EAGLE-3 layer, which starts from auxiliary hidden states of the target model.
    Eagle3(Box<Eagle3Model>),
}

impl DraftModel {
    /// Auxiliary hidden states that the draft model reads from a forward pass of the target model, if any.
    pub(crate) fn aux_hidden_states(&self) -> Option<AuxHiddenStates<'_>> {
        match self {
            Self::Standalone(_) => None,
            Self::Eagle3(eagle) => Some(eagle.aux_hidden_states()),
        }
    }
}

/// A model that proposes draft tokens, one token per row and pass.
trait DraftPasses {
    /// Runs a pass over the newest tokens `ids [R]` of rows; `before`: hidden states `[R, H]` of the tokens
    /// before them, if [`reads_hidden_states`](Self::reads_hidden_states).
    fn propose(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<Tensor>,
    ) -> Result<DraftPassOutput, ForwardError>;

    /// Writes the KV of the tokens `ids [T]` of a step; `before`: hidden states `[T, H]` of the tokens before them, if
    /// [`reads_hidden_states`](Self::reads_hidden_states).
    fn observe(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<&Tensor>,
    ) -> Result<(), ForwardError>;

    /// Logits of this rank's vocabulary shard, f32 `[n, V of this rank]`, of `hidden [n, H]`.
    fn shard_logits(&self, f: &ForwardContext<'_>, hidden: &Tensor)
    -> Result<Tensor, ForwardError>;

    /// KV pool of the draft passes.
    fn kv(&self) -> &KvPool;

    /// Whether passes start from hidden states of the target model.
    fn reads_hidden_states(&self) -> bool {
        true
    }

    /// Whether passes may run experts that replicas share: all replicas then run the same number of passes.
    fn shares_experts(&self) -> bool {
        true
    }

    /// The vocabulary of draft tokens, if it is not the target model's.
    fn draft_vocab(&self) -> Option<DraftVocab<'_>> {
        None
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

/// The MTP module of the target model, which shares the target model's KV pool.
struct MtpPasses<'a> {
    module: &'a dyn MtpModel,
    model: &'a dyn Model,
    kv: &'a KvPool,
}

impl DraftPasses for MtpPasses<'_> {
    fn propose(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<Tensor>,
    ) -> Result<DraftPassOutput, ForwardError> {
        let before = before.ok_or(ForwardError::NoHiddenStates)?;
        Ok(DraftPassOutput { hidden: self.module.forward(f, ids, &before)?, next_hidden: None })
    }

    fn observe(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.module.write_kv_only(f, ids, before.ok_or(ForwardError::NoHiddenStates)?)
    }

    fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.model.shard_logits(f, hidden)
    }

    fn kv(&self) -> &KvPool {
        self.kv
    }
}

/// A separate decoder model, with its own KV pool.
struct DraftModelPasses<'a> {
    model: &'a dyn Model,
    kv: &'a KvPool,
}

impl DraftPasses for DraftModelPasses<'_> {
    fn propose(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        _: Option<Tensor>,
    ) -> Result<DraftPassOutput, ForwardError> {
        Ok(DraftPassOutput { hidden: self.model.forward(f, ids)?, next_hidden: None })
    }

    fn observe(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        _: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.model.forward(f, ids).map(drop) // Only the KV write is needed.
    }

    fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.model.shard_logits(f, hidden)
    }

    fn kv(&self) -> &KvPool {
        self.kv
    }

    fn reads_hidden_states(&self) -> bool {
        false
    }
}

/// An EAGLE-3 layer, with its own KV pool.
struct Eagle3Passes<'a> {
    eagle: &'a Eagle3Model,
    model: &'a dyn Model,
    kv: &'a KvPool,
}

impl DraftPasses for Eagle3Passes<'_> {
    fn propose(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<Tensor>,
    ) -> Result<DraftPassOutput, ForwardError> {
        self.eagle.draft(f, (self.model, ids), before.ok_or(ForwardError::NoHiddenStates)?)
    }

    fn observe(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        before: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let before = before.ok_or(ForwardError::NoHiddenStates)?;
        self.eagle.write_kv_only(f, (self.model, ids), before)
    }

    fn shard_logits(
        &self,
        f: &ForwardContext<'_>,
        hidden: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        self.eagle.shard_logits(f, hidden)
    }

    fn kv(&self) -> &KvPool {
        self.kv
    }

    fn shares_experts(&self) -> bool {
        false
    }

    fn draft_vocab(&self) -> Option<DraftVocab<'_>> {
        let (shard, target_ids) = (self.eagle.vocab_shard(), self.eagle.draft_to_target());
        Some(DraftVocab { shard, target_ids })
    }
}

/// Selects the draft passes of the model's proposer.
///
/// Errors: neither a draft model nor an MTP module was loaded.
fn passes_of<'a>(
    context: &'a ModelContext,
    kv: &'a KvPool,
    draft_kv: Option<&'a KvPool>,
) -> Result<Box<dyn DraftPasses + 'a>, ForwardError> {
    let model = context.model.as_ref();
    match (&context.draft, draft_kv) {
        (Some(DraftModel::Standalone(model)), Some(kv)) => {
            Ok(Box::new(DraftModelPasses { model: model.as_ref(), kv }))
        }
        (Some(DraftModel::Eagle3(eagle)), Some(kv)) => {
            Ok(Box::new(Eagle3Passes { eagle, model, kv }))
        }
        _ => {
            let module = context.mtp.as_deref().ok_or(ForwardError::NoMtpModule)?;
            Ok(Box::new(MtpPasses { module, model, kv }))
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
        let (Some(made), Some(DraftRowCounts { drafting, dp_rows, .. })) = (drafts, launch.drafts)
        else {
            return Ok(());
        };
        let passes = passes_of(context, kv, draft_kv.as_ref())?;
        if drafting == 0 && (dp_rows == 0 || !passes.shares_experts()) {
            return Ok(());
        }
        let (ops, longest) = (&context.ops, launch.shape.bounds.max_context_len);
        let exchange = PassExchange { dp_rows, experts: launch.expert_exchange };
        let states = || made.pass_input_states(ops, buffers, drafting); // [R, H]
        let mut before = passes.reads_hidden_states().then(states).transpose()?;
        for pass in 0..made.passes() {
            made.prepare_pass(ops, (buffers, seq_slots), (drafting, pass))?;
            let (batch, ids) = made.view(seq_slots, drafting, longest)?;
            let f = pass_context(context, passes.kv(), &batch, exchange);
            let DraftPassOutput { hidden, next_hidden } = passes.propose(&f, &ids, before)?; // [R, H]
            if drafting > 0 {
                choose_drafts(made, context, passes.as_ref(), &f, &hidden, pass)?;
            }
            before = Some(next_hidden.unwrap_or(hidden));
        }
        Ok(made.insert(ops, (buffers, seq_slots), drafting)?)
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
        let (Some(made), shape) = (drafts.as_mut(), launch.shape) else { return Ok(()) };
        let passes = passes_of(context, kv, draft_kv.as_ref())?;
        let ops = &context.ops;
        if !passes.reads_hidden_states() {
            if shape.tokens > 0 || launch.dp_rows > 0 {
                let (batch, ids) = buffers.view(seq_slots, shape)?;
                let (dp_rows, experts) = (launch.dp_rows, launch.expert_exchange);
                let exchange = PassExchange { dp_rows, experts };
                let f = pass_context(context, passes.kv(), &batch, exchange);
                passes.observe(&f, &ids, None)?;
            }
            return Ok(());
        }
        if shape.tokens == 0 {
            return Ok(());
        }
        let before = made.previous_states(ops, buffers, (states, rows))?; // [T, H]
        let (batch, ids) = buffers.view(seq_slots, shape)?;
        let exchange = PassExchange { dp_rows: 0, experts: ExpertExchange::AllGather };
        let f = pass_context(context, passes.kv(), &batch, exchange);
        passes.observe(&f, &ids, Some(&before))?;
        drop((batch, ids));
        Ok(made.store_states(ops, (buffers, seq_slots), (states, rows))?)
    }
}

/// Chooses the draft tokens of a pass from the hidden states of its rows, `hidden [R, H]`, together with the
/// ranks of the other vocabulary shards.
fn choose_drafts(
    made: &mut DraftBuffers,
    context: &ModelContext,
    passes: &dyn DraftPasses,
    f: &ForwardContext<'_>,
    hidden: &Tensor,
    pass: usize,
) -> Result<(), ExecutorError> {
    let ModelContext { ops, tp, vocab_shard, .. } = context;
    let mut gathered = Ok(());
    let mut gather = |own: MatRef<'_>, all: MatMut<'_>| {
        gathered = tp.all_gather(ops.stream(), own, all);
        gathered.is_ok()
    };
    let same = DraftVocab { shard: vocab_shard, target_ids: None };
    let vocab = passes.draft_vocab().unwrap_or(same);
    let logits = |hidden: &Tensor| Ok::<_, ExecutorError>(passes.shard_logits(f, hidden)?);
    let chosen = made.choose_tokens(ops, (hidden, pass), (vocab.shard, &mut gather), logits);
    gathered?; // More specific than the error of the choice.
    chosen?;
    match vocab.target_ids {
        Some(ids) => Ok(made.map_ids(ops, (hidden.rows(), pass), ids)?),
        None => Ok(()),
    }
}
