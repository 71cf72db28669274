//! Pooling of a step: returns the hidden states of the rows that end the prompt of a pooling request.
//!
//! The hidden states are gathered on the device after the forward pass and copied to the host while later
//! steps run. The executor converts them to f32 on the host; the API server normalises them.

use super::context::StepContext;
use super::{STEPS_IN_FLIGHT, StepState};
use crate::ExecutorError;
use crate::sequence_slots::HostSequenceSlots;
use ops::{
    DownloadedTensor, MeanPoolingSums, Ops, PinnedBuffer, StagedLogitsRow, StepShape, Tensor,
    TensorDownload,
};
use protocol::{Batch, PoolingMethod, RowError, RowOutput};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A batch row that ends the prompt of a request whose pooling method reads hidden states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PooledRow {
    /// Index of the row in the batch.
    batch_row: usize,
    /// Row index at which the pooled value is gathered on the device: the index of the batch row's last token
    /// among all tokens of the step or, for mean pooling, the sequence slot.
    index: u32,
    /// Sequence slot of the request.
    seq_slot: u32,
    value: PooledValueKind,
}

/// Kind of value that the host computes from a gathered row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PooledValueKind {
    /// The row itself.
    HiddenState,
    /// Mean: the gathered sum of hidden states, divided by this number of prompt tokens.
    Mean(u32),
    /// Dot product of the gathered hidden state and the weights of the classification head.
    ClassLogit,
}

/// Rows of a step whose hidden states are pooled.
#[derive(Debug, Default)]
pub(super) struct PooledRows {
    /// Rows that end a prompt and whose pooled value is computed from the hidden state of the row's last
    /// token.
    last_tokens: Vec<PooledRow>,
    /// Rows that end a prompt and whose value is computed from the sum of hidden states that is stored for
    /// their sequence slot (mean pooling).
    sums: Vec<PooledRow>,
    /// Whether any row adds its hidden states to the sum that is stored for its sequence slot (mean pooling).
    adds_to_sums: bool,
}

impl PooledRows {
    /// Collects the rows whose hidden states are pooled, in row order.
    pub(super) fn collect(batch: &Batch, slots: &HostSequenceSlots) -> Self {
        let (mut found, mut end) = (Self::default(), 0);
        for (batch_row, row) in batch.rows.iter().enumerate() {
            let state = slots.get(row.seq_slot);
            end += row.len + state.drafts();
            let ends_prompt = row.start + row.len == state.prompt_len;
            let pooled = |index, value| {
                let seq_slot = row.seq_slot.0;
                ends_prompt.then_some(PooledRow { batch_row, index, seq_slot, value })
            };
            match state.sampling.pooling {
                Some(PoolingMethod::LastToken) => {
                    found.last_tokens.extend(pooled(end - 1, PooledValueKind::HiddenState));
                }
                Some(PoolingMethod::ClassLogits) => {
                    found.last_tokens.extend(pooled(end - 1, PooledValueKind::ClassLogit));
                }
                Some(PoolingMethod::Mean) => {
                    found.adds_to_sums = true;
                    let value = PooledValueKind::Mean(state.prompt_len);
                    found.sums.extend(pooled(row.seq_slot.0, value));
                }
                Some(PoolingMethod::TokenLogprobs(_)) | None => {}
            }
        }
        found
    }

    /// Whether the step needs the hidden states of all its tokens.
    pub(super) fn reads_hidden_states(&self) -> bool {
        self.adds_to_sums || !self.last_tokens.is_empty()
    }
}

/// A slice of the pooled rows of a step. Their hidden states are being copied to the host.
#[derive(Debug)]
pub(crate) struct PooledSlice {
    rows: Vec<PooledRow>,
    download: TensorDownload,
    /// Weights of the classification head, if the model has one.
    score: Option<Arc<[f32]>>,
    memory_return: Sender<PinnedBuffer>,
}

/// Pinned host memory for pooled hidden states. It is allocated at the first step with pooling.
pub(super) struct PoolingHostMemory {
    sender: Sender<PinnedBuffer>,
    receiver: Receiver<PinnedBuffer>,
}

impl PoolingHostMemory {
    pub(super) fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }

    /// Takes memory of `bytes` bytes from the pool, or allocates it.
    fn take(&self, ops: &Ops, bytes: usize) -> Result<PinnedBuffer, ExecutorError> {
        let free = self.receiver.try_iter().take(STEPS_IN_FLIGHT);
        let fitting = free.into_iter().find(|memory| memory.bytes().len() >= bytes);
        Ok(fitting.map_or_else(|| ops.device().alloc_pinned(bytes), Ok)?)
    }
}

impl StepState {
    /// Gathers the pooled rows of a step and starts their copies to the host. Must be called after the
    /// forward pass has been launched.
    pub(super) fn pool(&mut self, context: &mut StepContext<'_>) -> Result<(), ExecutorError> {
        let Some(hidden) = &context.hidden else { return Ok(()) };
        let PooledRows { last_tokens, sums, adds_to_sums } = &context.pooled_rows;
        let mut slices = Vec::new();
        if *adds_to_sums {
            let all_sums = self.add_to_sums(context, hidden)?;
            for rows in sums.chunks(self.size.logits_rows) {
                slices.push(self.pool_slice(context, all_sums.sums(), rows)?);
            }
            self.pooled_sums = Some(all_sums);
        }
        for rows in last_tokens.chunks(self.size.logits_rows) {
            slices.push(self.pool_slice(context, hidden, rows)?);
        }
        context.pending.pooled = slices;
        Ok(())
    }

    /// Adds the hidden states of a step to the sums that are stored per sequence slot, and returns the sums
    /// of all sequence slots. Must be called before the next `prepare`, which overwrites the row boundaries
    /// on the device.
    fn add_to_sums(
        &mut self,
        context: &StepContext<'_>,
        hidden: &Tensor,
    ) -> Result<MeanPoolingSums, ExecutorError> {
        let (ops, stage) = (&context.model.ops, &self.staging.stage);
        let mut sums = match self.pooled_sums.take() {
            Some(sums) => sums,
            None => MeanPoolingSums::new(ops, self.size.limits.rows, hidden.cols())?,
        };
        let (tokens, rows) = (stage.tokens, stage.rows.len());
        let shape = StepShape { tokens, rows, ..StepShape::default() };
        let (batch, _) = self.device.buffers.view(&self.device.seq_slots, shape)?;
        sums.add(ops, hidden, &batch)?;
        Ok(sums)
    }

    fn pool_slice(
        &mut self,
        context: &StepContext<'_>,
        source: &Tensor,
        rows: &[PooledRow],
    ) -> Result<PooledSlice, ExecutorError> {
        let ops = &context.model.ops;
        let stage = &mut self.staging.stage;
        stage.clear();
        stage.logits_rows.extend(rows.iter().map(|row| StagedLogitsRow {
            token: row.index as i32,
            seq_slot: row.seq_slot as i32,
            known_token: -1,
            top: -1,
            ..StagedLogitsRow::default()
        }));
        self.staging.upload(ops, &mut self.device.buffers)?;
        let pooled = self.device.gather_staged(ops, source, rows.len())?;
        let slice_rows = self.size.logits_rows.min(self.size.limits.rows);
        let bytes = slice_rows * pooled.cols() * pooled.dtype().bytes();
        let memory = self.pooled_memory.take(ops, bytes)?;
        let download = ops.start_read(&pooled, memory)?;
        let memory_return = self.pooled_memory.sender.clone();
        let score = context.model.score.clone();
        Ok(PooledSlice { rows: rows.to_vec(), download, score, memory_return })
    }
}

impl PooledSlice {
    /// Waits for the copy and writes the pooled values to the outputs of the batch rows.
    pub(crate) fn finish(self, outputs: &mut [RowOutput]) -> Result<(), ExecutorError> {
        let DownloadedTensor { values, memory } = self.download.wait()?;
        let width = values.len() / self.rows.len();
        for (row, values) in self.rows.iter().zip(values.chunks(width)) {
            let pooled = match (row.value, &self.score) {
                (PooledValueKind::HiddenState, _) => values.to_vec(),
                (PooledValueKind::Mean(tokens), _) => {
                    values.iter().map(|sum| sum / tokens as f32).collect()
                }
                (PooledValueKind::ClassLogit, Some(score)) => {
                    vec![class_logit(values, score)]
                }
                (PooledValueKind::ClassLogit, None) => Vec::new(),
            };
            write_pooled(pooled, &mut outputs[row.batch_row]);
        }
        // The send fails if the executor was dropped; the memory is then not needed.
        let _ = self.memory_return.send(memory);
        Ok(())
    }
}

/// Returns the output of the classification head for a hidden state. The sum is computed in f64, so that it
/// does not depend on the order of the terms.
fn class_logit(hidden: &[f32], score: &[f32]) -> f32 {
    hidden.iter().zip(score).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() as f32
}

/// Writes the pooled values of a row to its output, or an error if they contain NaN or infinity.
fn write_pooled(values: Vec<f32>, output: &mut RowOutput) {
    if values.iter().all(|value| value.is_finite()) {
        output.prompt_mut().pooled = values;
    } else {
        *output = RowOutput { error: Some(RowError::NonFiniteLogits), ..RowOutput::default() };
    }
}
