//! Expert load statistics: the number of tokens routed to each expert.

use device::{
    DType, DeviceError, MatMut, MatRef, check_at_least, check_dense, check_dtype, check_size,
};

/// Token counts by layer and expert, incremented by router kernels for the experts that they select.
#[derive(Debug)]
pub struct ExpertLoadArgs<'a> {
    /// Token counts; i32 `[layers, experts]`. They wrap around on overflow.
    pub tokens: MatMut<'a>,
    /// Index of the MoE layer of the router: the row of `tokens` whose counts are incremented.
    pub layer: usize,
    /// KV slot of each token; i64 `[1, tokens]`. A token with slot −1 is padding and is not counted. `None` =
    /// all tokens are counted.
    pub slots: Option<MatRef<'a>>,
}

impl ExpertLoadArgs<'_> {
    /// Checks that the shapes and types fit router logits `[tokens, experts]`.
    pub(crate) fn check(
        &self,
        kernel: &'static str,
        logits: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        check_dtype(kernel, "counts", self.tokens.dtype(), DType::I32)?;
        check_size(kernel, "columns of counts", self.tokens.cols(), logits.cols())?;
        check_at_least(kernel, "rows of counts", self.tokens.rows(), self.layer + 1)?;
        check_dense(kernel, "counts", self.tokens.as_ref())?;
        let Some(slots) = self.slots else { return Ok(()) };
        check_dtype(kernel, "slots", slots.dtype(), DType::I64)?;
        check_at_least(kernel, "slots", slots.cols(), logits.rows())
    }
}
