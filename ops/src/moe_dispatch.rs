//! Mixture of experts over ranks that hold experts whole: T tokens of this rank, each sent once to every rank with an expert of its own.

use device::DType;
use kernels::{ExpertParallelLayout, MoeCombine, RowGather, TokenDispatch};

use crate::{ExpertRouting, OpError, Ops, Tensor};

/// The tokens that each rank gets.
#[derive(Debug)]
pub struct MoeDispatch {
    /// i32 `[ranks · T]`: those for rank 0, ascending, then those for rank 1; behind them nothing in particular.
    tokens: Tensor,
    /// i32 `[T, ranks]`: where a token lies among them, -1 = it is not sent there.
    row_of_token: Tensor,
    counts: Vec<usize>,
}

impl MoeDispatch {
    /// Tokens for each rank.
    #[must_use]
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }
}

impl Ops {
    /// Which tokens go to which rank of `spread`; waits for the device, because the host must know their numbers.
    pub fn moe_dispatch(
        &self,
        routing: &ExpertRouting,
        spread: &ExpertParallelLayout,
    ) -> Result<MoeDispatch, OpError> {
        let (t, size) = (routing.experts.rows(), spread.ranks);
        let mut tokens = self.scratch(DType::I32, &[size * t])?;
        let mut places = self.scratch(DType::I32, &[t, size])?;
        let mut counts = self.scratch(DType::I32, &[size])?;
        let out = (tokens.mat_mut()?, places.mat_mut()?, counts.mat_mut()?);
        let (s, experts) = (&self.stream, routing.experts.mat()?);
        self.device.launch(
            s,
            TokenDispatch { tokens: out.0, places: out.1, counts: out.2, experts, layout: spread },
        )?;
        let mut bytes = vec![0; size * DType::I32.bytes()];
        self.device.download(s, counts.buffer(), 0, &mut bytes)?;
        let count = |bytes: &[u8; 4]| u32::from_ne_bytes(*bytes) as usize;
        Ok(MoeDispatch {
            tokens,
            row_of_token: places,
            counts: bytes.as_chunks().0.iter().map(count).collect(),
        })
    }

    /// The rows of `x [T, C]` in the order in which they are sent, `[n, C]`, in memory that holds `room` rows.
    pub fn dispatch_rows(
        &self,
        x: &Tensor,
        dispatch: &MoeDispatch,
        room: usize,
    ) -> Result<Tensor, OpError> {
        let rows = dispatch.counts.iter().sum();
        let mut y = self.scratch_in(room, x.dtype(), &[rows, x.cols()])?;
        let tokens = dispatch.tokens.narrow(&[rows])?;
        self.device.launch(
            &self.stream,
            RowGather { y: y.mat_mut()?, x: x.mat()?, rows: tokens.mat()? },
        )?;
        Ok(y)
    }

    /// A result like those of [`Ops::scratch`] in memory that holds `room` rows: steps that have other numbers of rows find it again.
    pub fn scratch_in(
        &self,
        room: usize,
        dtype: DType,
        shape: &[usize; 2],
    ) -> Result<Tensor, OpError> {
        self.scratch(dtype, &[room.max(shape[0]), shape[1]])?.first_rows(shape[0])
    }

    /// What the ranks made of each token, `x [n, H]` in the order in which tokens were sent, summed in the order of ranks in f32: `[T, H]`.
    pub fn moe_combine_ranks(&self, x: &Tensor, dispatch: &MoeDispatch) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), &[dispatch.row_of_token.rows(), x.cols()])?;
        self.device.launch(
            &self.stream,
            MoeCombine { y: y.mat_mut()?, x: x.mat()?, places: dispatch.row_of_token.mat()? },
        )?;
        Ok(y)
    }
}
