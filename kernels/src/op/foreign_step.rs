//! Inputs of a forward pass from the arrays of a foreign host: an inference server with its own scheduler.

use device::{DType, DeviceError, MatMut, MatRef, check_at_least, check_dtype, check_size};

const KERNEL: &str = "prepare_foreign_step";

/// Arrays of a step in the memory of a foreign host.
///
/// With `row_starts`, the step has rows of any length and no padding. Without, row `r` has the token `r` alone, and rows whose
/// context length is 0 are padding.
#[derive(Debug, Clone, Copy)]
pub struct ForeignStepArrays<'a> {
    /// Token ids, i32 or i64 `[1, tokens]`.
    pub ids: MatRef<'a>,
    /// Position of each token, i32 or i64 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// KV slot of each token, i64 `[1, tokens]`; −1 = its key and value are not stored.
    pub slots: MatRef<'a>,
    /// Index of the first token of each row, then the number of tokens, i32 `[1, rows + 1]`; `None` = one token per row.
    pub row_starts: Option<MatRef<'a>>,
    /// Context length of each row, i32 or i64 `[1, rows]`; 0 = padding.
    pub context_lens: MatRef<'a>,
}

/// Converts the arrays of a step of a foreign host to the types and the padding of a forward pass: the token of padding gets id 0,
/// position 0 and KV slot −1, whatever the arrays of the host have there.
#[derive(Debug)]
pub struct ForeignStepPreparation<'a> {
    /// Inputs: the arrays of the host.
    pub host: ForeignStepArrays<'a>,
    /// Outputs: the arrays of the forward pass.
    pub step: ForeignStepInputs<'a>,
}

/// Arrays of a forward pass that [`ForeignStepPreparation`] writes, each at least as long as its input.
#[derive(Debug)]
pub struct ForeignStepInputs<'a> {
    /// Token ids, i32.
    pub ids: MatMut<'a>,
    /// Positions, i32.
    pub positions: MatMut<'a>,
    /// KV slots, i64.
    pub slots: MatMut<'a>,
    /// Row boundaries, i32.
    pub cu_q: MatMut<'a>,
    /// Context lengths, i32.
    pub context_lens: MatMut<'a>,
}

impl ForeignStepPreparation<'_> {
    /// Checks that the types and the lengths of the arrays agree.
    ///
    /// Errors: the error names the array.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let Self { host, step } = self;
        let ForeignStepArrays { ids, positions, slots, row_starts, context_lens } = host;
        let (tokens, rows) = (ids.cols(), context_lens.cols());
        check_size(KERNEL, "positions", positions.cols(), tokens)?;
        check_size(KERNEL, "KV slots", slots.cols(), tokens)?;
        match row_starts {
            Some(starts) => check_size(KERNEL, "row starts", starts.cols(), rows + 1)?,
            None => check_size(KERNEL, "rows of one token", rows, tokens)?,
        }
        for (what, x) in [("ids", ids), ("positions", positions), ("context_lens", context_lens)] {
            if !matches!(x.dtype(), DType::I32 | DType::I64) {
                return Err(DeviceError::Unsupported { kernel: KERNEL, what, dtype: x.dtype() });
            }
        }
        check_dtype(KERNEL, "KV slots", slots.dtype(), DType::I64)?;
        if let Some(starts) = row_starts {
            check_dtype(KERNEL, "row starts", starts.dtype(), DType::I32)?;
        }
        for (what, x, len) in [
            ("ids of the step", &step.ids, tokens),
            ("positions of the step", &step.positions, tokens),
            ("row starts of the step", &step.cu_q, rows + 1),
            ("context lengths of the step", &step.context_lens, rows),
        ] {
            check_dtype(KERNEL, what, x.dtype(), DType::I32)?;
            check_at_least(KERNEL, what, x.cols(), len)?;
        }
        check_dtype(KERNEL, "KV slots of the step", step.slots.dtype(), DType::I64)?;
        check_at_least(KERNEL, "KV slots of the step", step.slots.cols(), tokens)
    }
}
