//! Expert load: counts of the tokens routed to each expert.

use device::{
    DType, DeviceError, MatMut, MatRef, check_at_least, check_dense, check_dtype, check_size,
};

/// Token counts by layer and expert, to which the selections of a router are added.
#[derive(Debug)]
pub struct ExpertLoadArgs<'a> {
    /// Counts; i32 `[layers, E]`. They wrap around.
    pub tokens: MatMut<'a>,
    /// Layer of the router.
    pub layer: usize,
    /// KV slots; i64 `[1, T]`. A token with slot -1 is padding and is not counted. `None` = all tokens count.
    pub slots: Option<MatRef<'a>>,
}

impl ExpertLoadArgs<'_> {
    /// Rejects shapes and types that do not fit the `logits [T, E]` of a router.
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
