//! One-shot (custom) all-reduces through memory that the GPUs of one host share; GPU only.

use device::gpu::PeerView;
use device::{DType, MatMut, MatRef};

/// Size and element type of the matrix of an all-reduce.
#[derive(Debug, Clone, Copy)]
pub struct AllReduceShape {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Element type.
    pub dtype: DType,
}

/// `x = Σ x` over the ranks. Rows are contiguous; [`fits`](Self::fits) gives the supported shapes.
#[derive(Debug)]
pub struct OneShotAllReduce<'a> {
    /// `[T, H]`, replaced in place.
    pub x: MatMut<'a>,
    /// Memory of all ranks.
    pub peers: &'a PeerView,
}

/// `x += Σ delta` over the ranks, then `y = rms_norm(x)`, rounded as by two separate ops.
/// [`fits`](Self::fits) gives the supported shapes.
#[derive(Debug)]
pub struct OneShotAllReduceNorm<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// Residual stream `[T, H]`, updated in place.
    pub x: MatMut<'a>,
    /// Summand of this rank, `[T, H]`.
    pub delta: MatRef<'a>,
    /// Weight of the norm, `[H]`.
    pub weight: MatRef<'a>,
    /// Added to the mean square.
    pub eps: f32,
    /// Memory of all ranks.
    pub peers: &'a PeerView,
}
