//! Device arrays of a step whose inputs are arrays of a foreign host: an inference server with its own scheduler.

use device::DType;
use kernels::step::ReplayShape;
use kernels::{BatchUpperBounds, ForeignStepArrays, ForeignStepInputs, ForeignStepPreparation};

use crate::{DeviceBatchMetadata, OpError, Ops, Tensor};

/// Inputs of a forward pass of a foreign host's step: its batch, and the token ids, i32 `[tokens]`.
#[derive(Debug)]
pub struct ForeignStepBatch {
    /// Positions, KV slots, row boundaries and block tables.
    pub metadata: DeviceBatchMetadata,
    /// Token ids, i32 `[tokens]`.
    pub ids: Tensor,
}

/// Device memory for the inputs of a foreign host's steps, with a fixed address, so that the host can capture a step.
#[derive(Debug)]
pub struct ForeignStepBuffers {
    ids: Tensor,          // i32 [1, tokens]
    positions: Tensor,    // i32 [1, tokens]
    slots: Tensor,        // i64 [1, tokens]
    cu_q: Tensor,         // i32 [1, rows + 1]
    context_lens: Tensor, // i32 [1, rows]
}

impl ForeignStepBuffers {
    /// Allocates memory for steps of up to `tokens` tokens and `rows` rows.
    pub fn new(ops: &Ops, tokens: usize, rows: usize) -> Result<Self, OpError> {
        let words = |n: usize| ops.zeros(DType::I32, &[1, n]);
        Ok(Self {
            ids: words(tokens)?,
            positions: words(tokens)?,
            slots: ops.zeros(DType::I64, &[1, tokens])?,
            cu_q: words(rows + 1)?,
            context_lens: words(rows)?,
        })
    }

    /// Converts the arrays of a step, and returns the inputs of its forward pass. `block_tables` are those of the rows, i32
    /// `[rows, width]`; `bounds` are upper bounds of the rows.
    ///
    /// Errors: the arrays have different lengths, or exceed the sizes of the buffers.
    pub fn prepare(
        &mut self,
        ops: &Ops,
        host: ForeignStepArrays<'_>,
        block_tables: Tensor,
        bounds: BatchUpperBounds,
    ) -> Result<ForeignStepBatch, OpError> {
        let (tokens, rows) = (host.ids.cols(), host.context_lens.cols());
        let step = ForeignStepInputs {
            ids: self.ids.mat_mut()?,
            positions: self.positions.mat_mut()?,
            slots: self.slots.mat_mut()?,
            cu_q: self.cu_q.mat_mut()?,
            context_lens: self.context_lens.mat_mut()?,
        };
        ops.device.launch(&ops.stream, ForeignStepPreparation { host, step })?;
        let metadata = DeviceBatchMetadata {
            positions: self.positions.narrow(&[tokens])?,
            slots: self.slots.narrow(&[1, tokens])?,
            cu_q: self.cu_q.narrow(&[rows + 1])?,
            context_lens: self.context_lens.narrow(&[rows])?,
            block_tables,
            table_rows: None,
            row_facts: None,
            bounds,
            replay: ReplayShape::default(),
        };
        Ok(ForeignStepBatch { metadata, ids: self.ids.narrow(&[tokens])? })
    }
}
