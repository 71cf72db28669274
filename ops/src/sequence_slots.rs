//! State of running requests on the device: one sequence slot per request.

use device::DType;
use kernels::step::{LatestToken, SequenceSamplingParams, SequenceSlotArrays};

use crate::{OpError, Ops, Tensor};

/// Device state of running requests, one sequence slot each: latest token, block table, token history,
/// bitmask of allowed ids, sampling parameters. Allocated at start-up. Contains only copies of data that is
/// also stored elsewhere.
#[derive(Debug)]
pub struct DeviceSequenceSlots {
    pub(crate) latest: Tensor,  // i32 [seq_slots, 3]
    pub(crate) tables: Tensor,  // i32 [groups · seq_slots, width]
    pub(crate) history: Tensor, // i32 [seq_slots, max_len]
    masks: Tensor,              // i32 [seq_slots, ceil(vocab / 32)]
    params: Tensor,             // i32 [seq_slots, 12]
}

/// Sizes of the sequence slots on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSlotLimits {
    /// Number of sequence slots.
    pub seq_slots: usize,
    /// Number of KV groups, each with a block table per sequence slot.
    pub groups: usize,
    /// Maximum number of blocks of a block table.
    pub table_width: usize,
    /// Maximum number of tokens of a request.
    pub max_len: usize,
    /// Number of token ids in the vocabulary.
    pub vocab: usize,
}

impl DeviceSequenceSlots {
    /// Allocates zeroed sequence slots.
    pub fn new(ops: &Ops, size: SequenceSlotLimits) -> Result<Self, OpError> {
        let SequenceSlotLimits { seq_slots, groups, table_width, max_len, vocab } = size;
        let zeros = |cols: usize| ops.zeros(DType::I32, &[seq_slots, cols]);
        Ok(Self {
            latest: zeros(size_of::<LatestToken>() / 4)?,
            tables: ops.zeros(DType::I32, &[groups * seq_slots, table_width])?,
            history: zeros(max_len)?,
            masks: zeros(vocab.div_ceil(32))?,
            params: zeros(size_of::<SequenceSamplingParams>() / 4)?,
        })
    }

    /// Returns the block tables of KV group 0, i32 `[seq_slots, width]`.
    pub(crate) fn first_group_tables(&self) -> Result<Tensor, OpError> {
        self.tables.narrow(&[self.params.rows(), self.tables.cols()])
    }

    pub(crate) fn arrays(&mut self) -> Result<SequenceSlotArrays<'_>, OpError> {
        Ok(SequenceSlotArrays {
            latest: self.latest.mat_mut()?,
            tables: self.tables.mat_mut()?,
            history: self.history.mat_mut()?,
            masks: self.masks.mat_mut()?,
            params: self.params.mat_mut()?,
        })
    }
}
