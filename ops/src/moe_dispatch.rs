//! Dispatch and combine of expert parallel (EP) MoE: each token of this rank is sent once to every rank that
//! has one of the token's experts.

use device::DType;
use kernels::{ExpertParallelLayout, MoeCombine, MoeDispatchLayout, RowGather};

use crate::{ExpertRouting, OpError, Ops, Tensor};

/// Dispatch plan of one layer: which tokens are sent to which rank.
#[derive(Debug)]
pub struct MoeDispatchPlan {
    /// Indices of the tokens that are sent to rank 0, ascending, then the indices of the tokens that are sent
    /// to rank 1, and so on (send order); i32 `[ranks · tokens]`. Entries after the last sent token are
    /// undefined.
    tokens: Tensor,
    /// Row index of each token in send order, for each rank that it is sent to; −1 = the token is not sent to
    /// that rank; i32 `[tokens, ranks]`.
    row_of_token: Tensor,
    counts: Vec<usize>,
}

impl MoeDispatchPlan {
    /// Number of tokens that are sent to each rank.
    #[must_use]
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }
}

impl Ops {
    /// Computes which tokens are sent to which rank of `layout`. Waits for the device, because the host needs
    /// the counts.
    pub fn moe_dispatch(
        &self,
        routing: &ExpertRouting,
        layout: &ExpertParallelLayout,
    ) -> Result<MoeDispatchPlan, OpError> {
        let (t, size) = (routing.experts.rows(), layout.ranks);
        let mut tokens = self.scratch(DType::I32, &[size * t])?;
        let mut row_of_token = self.scratch(DType::I32, &[t, size])?;
        let mut counts = self.scratch(DType::I32, &[size])?;
        let op = MoeDispatchLayout {
            tokens: tokens.mat_mut()?,
            token_rows: row_of_token.mat_mut()?,
            counts: counts.mat_mut()?,
            experts: routing.experts.mat()?,
            layout,
        };
        self.device.launch(&self.stream, op)?;
        let mut bytes = vec![0; size * DType::I32.bytes()];
        self.device.download(&self.stream, counts.buffer(), 0, &mut bytes)?;
        let count = |bytes: &[u8; 4]| u32::from_ne_bytes(*bytes) as usize;
        Ok(MoeDispatchPlan {
            tokens,
            row_of_token,
            counts: bytes.as_chunks().0.iter().map(count).collect(),
        })
    }

    /// Gathers the rows of `x [tokens, cols]` in send order, `[sent rows, cols]`, in memory that holds
    /// `capacity_rows` rows.
    pub fn dispatch_rows(
        &self,
        x: &Tensor,
        dispatch: &MoeDispatchPlan,
        capacity_rows: usize,
    ) -> Result<Tensor, OpError> {
        let rows = dispatch.counts.iter().sum();
        let mut y = self.scratch_with_capacity(capacity_rows, x.dtype(), &[rows, x.cols()])?;
        let tokens = dispatch.tokens.narrow(&[rows])?;
        self.device.launch(
            &self.stream,
            RowGather { y: y.mat_mut()?, x: x.mat()?, rows: tokens.mat()? },
        )?;
        Ok(y)
    }

    /// Allocates a result like [`Ops::scratch`] in memory for `capacity_rows` rows, so that steps with
    /// different numbers of rows reuse the same buffer.
    pub fn scratch_with_capacity(
        &self,
        capacity_rows: usize,
        dtype: DType,
        shape: &[usize; 2],
    ) -> Result<Tensor, OpError> {
        self.scratch(dtype, &[capacity_rows.max(shape[0]), shape[1]])?.first_rows(shape[0])
    }

    /// Combines the results that the ranks return: sums the rows of each token in `x [sent rows,
    /// hidden_size]` (in send order) in f32, in the order of ranks. Returns `[tokens, hidden_size]`.
    pub fn moe_combine_ranks(
        &self,
        x: &Tensor,
        dispatch: &MoeDispatchPlan,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), &[dispatch.row_of_token.rows(), x.cols()])?;
        self.device.launch(
            &self.stream,
            MoeCombine { y: y.mat_mut()?, x: x.mat()?, token_rows: dispatch.row_of_token.mat()? },
        )?;
        Ok(y)
    }
}
