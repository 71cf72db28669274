//! Ops of pooling.

use device::{DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

/// Sums of hidden states by sequence slot, for mean pooling over chunked prompts:
/// `sums[seq_slots[r]] = (continues[r] ? sums[seq_slots[r]] : 0) + Σ x[t]`, where `t` runs over the tokens of row
/// `r` in order. Each sum is one chain of f32 additions in order of position, so that it does not depend on how
/// a prompt is divided into rows.
#[derive(Debug)]
pub struct HiddenStateSum<'a> {
    /// Sums by sequence slot; f32 `[seq_slots, hidden_size]`.
    pub sums: MatMut<'a>,
    /// Hidden states `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Prefix sums of the row lengths: row `r` has tokens `[cu_q[r], cu_q[r + 1])`; i32 `[rows + 1]`.
    pub cu_q: MatRef<'a>,
    /// Sequence slot of each row, different for all rows; i32 `[rows]`.
    pub seq_slots: MatRef<'a>,
    /// 1 = the row continues its sequence, 0 = it begins one; i32 `[rows]`.
    pub continues: MatRef<'a>,
}

impl HiddenStateSum<'_> {
    pub(crate) const KERNEL: &'static str = "pool_sum_rows";

    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let rows = self.seq_slots.cols();
        check_dtype(Self::KERNEL, "sums", self.sums.dtype(), DType::F32)?;
        check_size(Self::KERNEL, "columns", self.sums.cols(), self.x.cols())?;
        check_size(Self::KERNEL, "row boundaries", self.cu_q.cols(), rows + 1)?;
        check_size(Self::KERNEL, "row flags", self.continues.cols(), rows)?;
        for (what, array) in [
            ("row boundaries", self.cu_q),
            ("sequence slots", self.seq_slots),
            ("row flags", self.continues),
        ] {
            check_dtype(Self::KERNEL, what, array.dtype(), DType::I32)?;
        }
        Ok(())
    }
}
