//! Where a router's choices are counted.

use device::{
    DType, DeviceError, MatMut, MatRef, check_at_least, check_dense, check_dtype, check_size,
};

/// Numbers of tokens by layer and expert, to which a router's choices are added.
#[derive(Debug)]
pub struct ExpertLoadArgs<'a> {
    /// i32 `[layers, E]`; they wrap around.
    pub tokens: MatMut<'a>,
    /// The layer of the router.
    pub layer: usize,
    /// i64 `[1, T]`: a token without a slot (-1) is padding, and not counted. `None` = all are.
    pub slots: Option<MatRef<'a>>,
}

impl ExpertLoadArgs<'_> {
    /// Refuses what does not fit a router's `logits [T, E]`.
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
