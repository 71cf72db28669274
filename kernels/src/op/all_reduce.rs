//! One-shot (custom) all-reduces through memory that the GPUs of one host can all access; GPU only.

use device::gpu::PeerMemoryView;
use device::{MatMut, MatRef};

/// Sums `x` over the ranks. Rows must be contiguous; [`fits`](Self::fits) gives the supported shapes.
#[derive(Debug)]
pub struct OneShotAllReduce<'a> {
    /// Matrix of this rank, replaced by the sum over the ranks; `[tokens, hidden_size]`.
    pub x: MatMut<'a>,
    /// Shared memory of all ranks, through which the ranks exchange their matrices.
    pub peers: &'a PeerMemoryView,
}

/// Adds the sum of `delta` over the ranks to `x`, then computes `y = rms_norm(x)`. Results are rounded as by
/// an all-reduce followed by [`AddRmsNorm`](crate::AddRmsNorm). [`fits`](Self::fits) gives the supported
/// shapes.
#[derive(Debug)]
pub struct OneShotAllReduceNorm<'a> {
    /// Output of the norm, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Residual stream `[tokens, hidden_size]`, updated in place.
    pub x: MatMut<'a>,
    /// Matrix of this rank to be summed over the ranks, `[tokens, hidden_size]`.
    pub delta: MatRef<'a>,
    /// Weight of the norm `[hidden_size]`, in the type of `x` or in f32 (see [`RmsNorm`](crate::RmsNorm)).
    pub weight: MatRef<'a>,
    /// Epsilon of the norm, added to the mean square.
    pub eps: f32,
    /// Shared memory of all ranks, through which the ranks exchange their matrices.
    pub peers: &'a PeerMemoryView,
}
