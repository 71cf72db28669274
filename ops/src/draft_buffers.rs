//! Device memory of a draft module (MTP, EAGLE-3 or draft model): the inputs of its draft passes, the draft
//! tokens, and the hidden states from which draft passes start. A draft pass computes one draft token per
//! row.

use device::DType;
use kernels::step::{DraftHiddenStates, DraftPassArgs, DraftPassArrays, ReplayShape};
use kernels::{
    AllGatherFn, BatchRowLengths, BatchUpperBounds, DraftArgmax, DraftHiddenStateGather,
    DraftHiddenStateWrite, DraftIdTranslation, DraftInsertion, DraftPassPreparation,
    VocabParallelDraftArgmax, VocabShard,
};

use crate::{DeviceBatchMetadata, DeviceSequenceSlots, OpError, Ops, StepBuffers, Tensor};

/// Maximum sizes of all steps, for which the draft buffers are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftBufferLimits {
    /// Maximum number of rows of a step.
    pub rows: usize,
    /// Number of draft passes in a step, which is the maximum number of draft tokens of a row.
    pub passes: usize,
    /// Number of sequence slots.
    pub seq_slots: usize,
    /// Hidden size: number of channels of a hidden state.
    pub hidden: usize,
    /// Number of block ids of KV group 0: blocks of the KV pool times the distance of their ids.
    pub block_ids: usize,
    /// Maximum number of rows for which logits are computed at a time; more rows are computed in slices.
    pub logits: usize,
}

/// Draft buffers, allocated at start-up with full size and fixed addresses. The layers of a draft module are
/// in KV group 0.
#[derive(Debug)]
pub struct DraftBuffers {
    size: DraftBufferLimits,
    ids: Tensor,             // i32 [1, rows]
    positions: Tensor,       // i32 [1, rows]
    slots: Tensor,           // i64 [1, rows]
    cu_q: Tensor,            // i32 [1, rows + 1]
    context_lens: Tensor,    // i32 [1, rows]
    row_seq_slots: Tensor,   // i32 [1, rows]
    drafts: Tensor,          // i32 [passes, rows]
    slot_states: Tensor,     // [seq_slots · states_per_slot, hidden]
    first_positions: Tensor, // i32 [1, seq_slots]
    boundary_states: Tensor, // [block_ids, hidden]
    slices: Vec<Tensor>,     // i32 [≤ logits] each; together the row indices from 0
}

impl DraftBufferLimits {
    /// Number of hidden states per sequence slot: the states of the token before the newest one, of the
    /// newest token, and of the draft tokens after it.
    #[must_use]
    pub fn states_per_slot(&self) -> usize {
        2 + self.passes
    }
}

impl DraftBuffers {
    /// Allocates memory for steps up to `size`.
    pub fn new(ops: &Ops, size: DraftBufferLimits) -> Result<Self, OpError> {
        let words = |n: usize| ops.zeros(DType::I32, &[1, n]);
        let states = |n: usize| ops.zeros(ops.dtype(), &[n, size.hidden]);
        let DraftBufferLimits { rows, .. } = size;
        let slice = |first: usize| {
            let end = rows.min(first + size.logits);
            let ids: Vec<i32> = (first as i32..end as i32).collect();
            let mut slice = ops.zeros(DType::I32, &[ids.len()])?;
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            ops.device.upload(slice.buffer_mut()?, 0, &bytes)?;
            Ok(slice)
        };
        Ok(Self {
            size,
            ids: words(rows)?,
            positions: words(rows)?,
            slots: ops.zeros(DType::I64, &[1, rows])?,
            cu_q: words(rows + 1)?,
            context_lens: words(rows)?,
            row_seq_slots: words(rows)?,
            drafts: ops.zeros(DType::I32, &[size.passes, rows])?,
            slot_states: states(size.seq_slots * size.states_per_slot())?,
            first_positions: words(size.seq_slots)?,
            boundary_states: states(size.block_ids)?,
            slices: (0..rows).step_by(size.logits).map(slice).collect::<Result<_, OpError>>()?,
        })
    }

    /// Prepares the inputs of draft pass `pass` (0 = first draft token): one token for each of the first
    /// `rows` rows of a step, which `StepBuffers::prepare` has laid out before.
    pub fn prepare_pass(
        &mut self,
        ops: &Ops,
        step: &StepBuffers,
        seq_slots: &DeviceSequenceSlots,
        rows: usize,
        pass: usize,
    ) -> Result<(), OpError> {
        let mut to = DraftPassArrays {
            ids: self.ids.mat_mut()?,
            positions: self.positions.mat_mut()?,
            slots: self.slots.mat_mut()?,
            cu_q: self.cu_q.mat_mut()?,
            context_lens: self.context_lens.mat_mut()?,
            row_seq_slots: self.row_seq_slots.mat_mut()?,
        };
        let (ids, positions) = (step.ids.mat()?, step.positions.mat()?);
        let (drafts, tables) = (self.drafts.mat()?, seq_slots.tables.mat()?);
        let block_tokens = step.size.block_tokens;
        let pass = DraftPassArgs { pass, rows, ids, positions, drafts, tables, block_tokens };
        Ok(ops.device.launch(
            &ops.stream,
            DraftPassPreparation { stage: step.stage.mat()?, arrays: &mut to, pass: &pass },
        )?)
    }

    /// Returns the inputs that `prepare_pass` has computed: the batch of the draft pass, with contexts of up
    /// to `longest` keys, and its token ids, i32 `[rows]`.
    pub fn view(
        &self,
        seq_slots: &DeviceSequenceSlots,
        rows: usize,
        longest: usize,
    ) -> Result<(DeviceBatchMetadata, Tensor), OpError> {
        let row = BatchRowLengths { tokens: 1, context: longest };
        let batch = DeviceBatchMetadata {
            positions: self.positions.narrow(&[rows])?,
            slots: self.slots.narrow(&[1, rows])?,
            cu_q: self.cu_q.narrow(&[rows + 1])?,
            context_lens: self.context_lens.narrow(&[rows])?,
            block_tables: seq_slots.first_group_tables()?,
            table_rows: Some(self.row_seq_slots.narrow(&[rows])?),
            row_facts: None,
            bounds: BatchUpperBounds::of(std::iter::repeat_n(row, rows), 1),
            replay: ReplayShape::default(),
        };
        Ok((batch, self.ids.narrow(&[rows])?))
    }

    /// Gathers the hidden states that the first draft pass starts from, one for each row of the step,
    /// `[rows, hidden_size]`.
    pub fn pass_input_states(
        &mut self,
        ops: &Ops,
        step: &StepBuffers,
        rows: usize,
    ) -> Result<Tensor, OpError> {
        let mut y = ops.scratch(ops.dtype(), &[rows, self.size.hidden])?;
        self.gather_states(ops, step, rows, None, &mut y)?;
        Ok(y)
    }

    /// Gathers the hidden state of the token before each token of a step of `rows` rows, `[tokens,
    /// hidden_size]`. `hidden` has the hidden states of the tokens of the step, `[tokens, hidden_size]`.
    pub fn previous_states(
        &mut self,
        ops: &Ops,
        step: &StepBuffers,
        hidden: &Tensor,
        rows: usize,
    ) -> Result<Tensor, OpError> {
        let mut y = ops.scratch(ops.dtype(), hidden.shape())?;
        self.gather_states(ops, step, rows, Some(hidden), &mut y)?;
        Ok(y)
    }

    /// Gathers hidden states to `y`. If `hidden` has the states of the tokens of the step, gathers the state
    /// of the token before each of these tokens. Without `hidden`, gathers the states that the first draft
    /// pass starts from.
    fn gather_states(
        &mut self,
        ops: &Ops,
        step: &StepBuffers,
        rows: usize,
        hidden: Option<&Tensor>,
        y: &mut Tensor,
    ) -> Result<(), OpError> {
        let (stage, positions) = step.staged()?;
        let hidden = hidden.map(Tensor::mat).transpose()?;
        let (y, states) = (y.mat_mut()?, &self.states()?);
        let op = DraftHiddenStateGather { stage, positions, rows, y, hidden, states };
        Ok(ops.device.launch(&ops.stream, op)?)
    }

    /// Stores the hidden states that draft passes of later steps start from. `hidden [tokens, hidden_size]`
    /// has the states of a step of `rows` rows.
    pub fn store_states(
        &mut self,
        ops: &Ops,
        step: &StepBuffers,
        seq_slots: &DeviceSequenceSlots,
        hidden: &Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        let (stage, positions) = step.staged()?;
        let mut states = self.states()?;
        Ok(ops.device.launch(
            &ops.stream,
            DraftHiddenStateWrite {
                stage,
                positions,
                states: &mut states,
                hidden: hidden.mat()?,
                rows,
                tables: seq_slots.tables.mat()?,
                block_tokens: step.size.block_tokens,
            },
        )?)
    }

    /// Chooses the draft tokens of a pass: the most probable token id for each hidden state in `hidden [rows,
    /// hidden_size]`. `logits` computes this rank's logits of the given row indices, f32 `[indices,
    /// shard.cols]`; `gather` all-gathers the candidates of all ranks.
    pub fn choose_tokens<E: From<OpError>>(
        &mut self,
        ops: &Ops,
        hidden: &Tensor,
        pass: usize,
        shard: &VocabShard,
        gather: &mut AllGatherFn<'_>,
        mut logits: impl FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        let rows = hidden.rows();
        let mut choose = |first: usize, logits: &Tensor| {
            let (logits, drafts) = (logits.mat()?, self.drafts.mat_mut()?);
            launch_argmax(ops, DraftArgmax { drafts, pass, first, logits }, shard, gather)
        };
        if rows <= self.size.logits {
            return Ok(choose(0, &logits(hidden)?)?);
        }
        for (i, slice) in self.slices.iter().enumerate() {
            let first = i * self.size.logits;
            let of_slice = slice.narrow(&[slice.len().min(rows.saturating_sub(first))])?;
            if !of_slice.is_empty() {
                choose(first, &logits(&ops.gather_rows(hidden, &of_slice)?)?)?;
            }
        }
        Ok(())
    }

    /// Maps the first `rows` draft tokens of a pass to token ids of the target model, by `target_ids`, i32
    /// `[1, draft vocabulary]`; for a draft module with a separate vocabulary (EAGLE-3).
    pub fn map_ids(
        &mut self,
        ops: &Ops,
        rows: usize,
        pass: usize,
        target_ids: &Tensor,
    ) -> Result<(), OpError> {
        let drafts = self.drafts.mat_mut()?;
        Ok(ops.device.launch(
            &ops.stream,
            DraftIdTranslation { drafts, pass, count: rows, ids: target_ids.mat()? },
        )?)
    }

    /// Inserts the draft tokens of the first `rows` rows into the input tokens of a prepared step, whose
    /// forward pass verifies them, and into the token histories of their sequence slots.
    pub fn insert(
        &self,
        ops: &Ops,
        step: &mut StepBuffers,
        seq_slots: &mut DeviceSequenceSlots,
        rows: usize,
    ) -> Result<(), OpError> {
        let StepBuffers { ids, stage, positions, .. } = step;
        let (ids, history) = (ids.mat_mut()?, seq_slots.history.mat_mut()?);
        let (stage, positions, drafts) = (stage.mat()?, positions.mat()?, self.drafts.mat()?);
        let op = DraftInsertion { stage, positions, rows, ids, history, drafts };
        Ok(ops.device.launch(&ops.stream, op)?)
    }

    /// Maximum number of rows of a step.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.size.rows
    }

    /// Number of draft passes in a step.
    #[must_use]
    pub fn passes(&self) -> usize {
        self.size.passes
    }

    /// Reads all draft tokens, by pass and row, for tests.
    pub fn read_drafts(&self, ops: &Ops) -> Result<Vec<u32>, OpError> {
        let mut bytes = vec![0; self.drafts.len() * 4];
        ops.device.download(&ops.stream, self.drafts.buffer(), 0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0;
        Ok(words.iter().map(|&id| u32::from_ne_bytes(id)).collect())
    }

    /// Reads the hidden states of the last token of each KV block, `[blocks, hidden_size]`, for tests.
    pub fn read_boundary_states(&self, ops: &Ops) -> Result<Vec<f32>, OpError> {
        ops.read_f32(&self.boundary_states)
    }

    fn states(&mut self) -> Result<DraftHiddenStates<'_>, OpError> {
        let (slot_states, first_positions) =
            (self.slot_states.mat_mut()?, self.first_positions.mat_mut()?);
        Ok(DraftHiddenStates {
            slot_states,
            first_positions,
            states_per_slot: self.size.states_per_slot(),
            boundary_states: self.boundary_states.mat_mut()?,
        })
    }
}

/// Launches the argmax that chooses draft tokens: over the logits of this rank in `local`, or over the
/// logits of all ranks if the vocabulary is sharded.
fn launch_argmax(
    ops: &Ops,
    local: DraftArgmax<'_>,
    shard: &VocabShard,
    gather: &mut AllGatherFn<'_>,
) -> Result<(), OpError> {
    if shard.ranks == 1 {
        return Ok(ops.device.launch(&ops.stream, local)?);
    }
    let DraftArgmax { drafts, pass, first, logits } = local;
    let sharded = VocabParallelDraftArgmax { drafts, pass, first, logits, shard, gather };
    Ok(ops.device.launch(&ops.stream, sharded)?)
}
