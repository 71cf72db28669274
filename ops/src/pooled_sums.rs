//! Sums of hidden states by sequence slot, for mean pooling over chunked prompts.

use device::DType;
use kernels::HiddenStateSum;
use kernels::step::RowMetadataField;

use crate::{DeviceBatchMetadata, OpError, Ops, Tensor};

/// Sum of the hidden states of each sequence slot's tokens, on the device.
#[derive(Debug)]
pub struct MeanPoolingSums {
    sums: Tensor, // f32 [seq_slots, hidden_size]
}

impl MeanPoolingSums {
    /// Allocates the sums of `seq_slots` sequence slots.
    pub fn new(ops: &Ops, seq_slots: usize, hidden_size: usize) -> Result<Self, OpError> {
        Ok(Self { sums: ops.zeros(DType::F32, &[seq_slots, hidden_size])? })
    }

    /// Adds the hidden states `x [tokens, hidden_size]` of a step to the sums of its rows. For a row that
    /// begins its sequence, the sum is first reset to 0.
    pub fn add(
        &mut self,
        ops: &Ops,
        x: &Tensor,
        batch: &DeviceBatchMetadata,
    ) -> Result<(), OpError> {
        let facts = |fact| {
            let missing = OpError::Shape {
                op: "pool_sum_rows",
                what: "row facts",
                got: vec![0],
                expected: vec![batch.rows()],
            };
            batch.row_fact(fact)?.ok_or(missing)
        };
        let op = HiddenStateSum {
            sums: self.sums.mat_mut()?,
            x: x.mat()?,
            cu_q: batch.cu_q.mat()?,
            seq_slots: facts(RowMetadataField::SequenceSlot)?,
            continues: facts(RowMetadataField::ContinuesSequence)?,
        };
        Ok(ops.device.launch(&ops.stream, op)?)
    }

    /// Sums of all sequence slots, f32 `[seq_slots, hidden_size]`.
    #[must_use]
    pub fn sums(&self) -> &Tensor {
        &self.sums
    }
}
