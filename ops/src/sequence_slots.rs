//! State of running requests on the device: one sequence slot per request.

use device::DType;
use kernels::step::{LatestToken, SequenceSamplingParams, SequenceSlotArrays};

use crate::{OpError, Ops, Tensor};

/// Device state of running requests, one sequence slot each: latest token, block table, token history,
/// bitmask of allowed ids, sampling parameters. Allocated at start-up. Contains only copies of data that is
/// also stored elsewhere.
#[derive(Debug)]
pub struct DeviceSequenceSlots {
    latest: Tensor,             // i32 [seq_slots, 3]
    pub(crate) tables: Tensor,  // i32 [seq_slots, width]
    pub(crate) history: Tensor, // i32 [seq_slots, max_len]
    masks: Tensor,              // i32 [seq_slots, ceil(vocab / 32)]
    params: Tensor,             // i32 [seq_slots, 12]
}

impl DeviceSequenceSlots {
    /// Allocates `seq_slots` zeroed sequence slots, for requests of up to `max_len` tokens with block tables
    /// of `width` blocks.
    pub fn new(
        ops: &Ops,
        seq_slots: usize,
        width: usize,
        max_len: usize,
        vocab: usize,
    ) -> Result<Self, OpError> {
        let zeros = |cols: usize| ops.zeros(DType::I32, &[seq_slots, cols]);
        Ok(Self {
            latest: zeros(size_of::<LatestToken>() / 4)?,
            tables: zeros(width)?,
            history: zeros(max_len)?,
            masks: zeros(vocab.div_ceil(32))?,
            params: zeros(size_of::<SequenceSamplingParams>() / 4)?,
        })
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
