//! What the device remembers of each running request: one seat per request.
//!
//! S seats, W block table width, L longest request, V vocabulary.

use kernels::DType;
use kernels::step::{Newest, SeatArrays, SeatRules};

use crate::{OpError, Ops, Tensor};

/// Seats on the device, all allocated at start. Nothing in them is the only copy of anything.
#[derive(Debug)]
pub struct Seats {
    newest: Tensor,             // i32 [S, 3]
    pub(crate) tables: Tensor,  // i32 [S, W]
    pub(crate) history: Tensor, // i32 [S, L]
    masks: Tensor,              // i32 [S, ceil(V / 32)]
    rules: Tensor,              // i32 [S, 12]
}

impl Seats {
    /// `seats` empty seats for requests of up to `longest` tokens in tables of `width` blocks.
    pub fn new(
        ops: &Ops,
        seats: usize,
        width: usize,
        longest: usize,
        vocab: usize,
    ) -> Result<Self, OpError> {
        let zeros = |cols: usize| ops.zeros(DType::I32, &[seats, cols]);
        Ok(Self {
            newest: zeros(size_of::<Newest>() / 4)?,
            tables: zeros(width)?,
            history: zeros(longest)?,
            masks: zeros(vocab.div_ceil(32))?,
            rules: zeros(size_of::<SeatRules>() / 4)?,
        })
    }

    pub(crate) fn arrays(&mut self) -> Result<SeatArrays<'_>, OpError> {
        Ok(SeatArrays {
            newest: self.newest.mat_mut()?,
            tables: self.tables.mat_mut()?,
            history: self.history.mat_mut()?,
            masks: self.masks.mat_mut()?,
            rules: self.rules.mat_mut()?,
        })
    }
}
