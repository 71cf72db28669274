//! Random weights and activations for the op benchmark.

use crate::ExecutorError;
use ops::{
    DType, GateActivation, HostMat, OpError, Ops, PackedExperts, PackedLinear, Tensor, bf16,
};

/// Total bytes of the copies of weights or KV blocks that successive launches rotate through: more than the
/// size of any cache, so that no copy is still cached when it is read again.
pub(super) const ROTATED_BYTES: usize = 300_000_000;
/// Maximum number of random values that are drawn. Larger matrices repeat these values, row by row.
const DRAWN_VALUES: usize = 8 << 20;

/// Random bf16 values between -0.5 and 0.5 that are used as weights.
#[derive(Debug)]
pub(super) struct RandomWeights {
    bytes: Vec<u8>,
}

/// Numbers of rows and columns of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MatrixSize {
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Sizes of the routed experts of an MoE layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertSize {
    pub(super) experts: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    /// Number of MoE layers in the model.
    pub(super) layers: usize,
}

impl RandomWeights {
    /// Draws random values for matrices of up to `largest` rows and columns. Matrices with more than
    /// `DRAWN_VALUES` elements repeat the values.
    pub(super) fn new(largest: MatrixSize) -> Self {
        let MatrixSize { rows, cols } = largest;
        Self::draw((rows * cols).min(DRAWN_VALUES.next_multiple_of(cols.max(1))))
    }

    /// Draws a separate value for every element of one matrix.
    pub(super) fn for_matrix(size: MatrixSize) -> Self {
        Self::draw(size.rows * size.cols)
    }

    fn draw(values: usize) -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let bytes = (0..values).flat_map(|_| bf16::from_f32(next_value(&mut state)).to_le_bytes());
        Self { bytes: bytes.collect() }
    }

    /// Returns a matrix as a list of matrices to concatenate along the rows; each of them starts with the
    /// same drawn values.
    fn parts(&self, size: MatrixSize) -> Result<Vec<HostMat<'_>>, OpError> {
        let MatrixSize { rows, cols } = size;
        let drawn = (self.bytes.len() / 2 / cols.max(1)).max(1);
        let part = |first: usize| {
            let rows = drawn.min(rows - first);
            Ok(HostMat::new(&self.bytes[..rows * cols * 2], DType::BF16, rows, cols)?)
        };
        (0..rows).step_by(drawn).map(part).collect()
    }

    /// Returns the random weights of a linear layer with `size.cols` inputs and `size.rows` outputs, packed
    /// for the GEMM kernels.
    pub(super) fn linear(
        &self,
        ops: &Ops,
        size: MatrixSize,
    ) -> Result<PackedLinear, ExecutorError> {
        Ok(ops.pack_linear(&self.parts(size)?, None)?)
    }

    /// Returns a row-major matrix on the device; untied embeddings have this layout.
    pub(super) fn table(&self, ops: &Ops, size: MatrixSize) -> Result<Tensor, ExecutorError> {
        Ok(ops.upload(&self.parts(size)?, ops.dtype())?)
    }

    /// Returns the matrix for which [`RandomWeights::for_matrix`] drew the values.
    pub(super) fn matrix(&self, size: MatrixSize) -> Result<HostMat<'_>, ExecutorError> {
        Ok(HostMat::new(&self.bytes, DType::BF16, size.rows, size.cols)?)
    }

    /// Returns the random weights of the experts of one MoE layer, packed for the expert kernels.
    pub(super) fn experts(
        &self,
        ops: &Ops,
        size: ExpertSize,
    ) -> Result<PackedExperts, ExecutorError> {
        let ExpertSize { experts, hidden, intermediate, layers } = size;
        let matrices = |rows: usize, cols: usize| {
            let one = || self.parts(MatrixSize { rows, cols });
            (0..experts).map(|_| one()).collect::<Result<Vec<_>, _>>()
        };
        let gate_up = matrices(2 * intermediate, hidden)?;
        let down = matrices(hidden, intermediate)?;
        Ok(ops.pack_experts(0, layers, &gate_up, &down, GateActivation::Silu)?)
    }
}

/// Returns random activations of the model's element type, `rows` x `cols`.
pub(super) fn activations(ops: &Ops, rows: usize, cols: usize) -> Result<Tensor, OpError> {
    floats(ops, ops.dtype(), rows, cols)
}

/// Returns random values of any floating-point type, `rows` x `cols`.
pub(super) fn floats(ops: &Ops, dtype: DType, rows: usize, cols: usize) -> Result<Tensor, OpError> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let values: Vec<f32> = (0..rows * cols).map(|_| next_value(&mut state)).collect();
    ops.floats(&values, dtype, &[rows, cols])
}

/// Returns the weights of a norm: all ones.
pub(super) fn norm(ops: &Ops, width: usize) -> Result<Tensor, OpError> {
    ops.floats(&vec![1.0; width], ops.dtype(), &[width])
}

/// Number of copies of a weight of `bytes` bytes that successive launches rotate through; at most one per
/// layer.
pub(super) fn copies(bytes: usize, layers: usize) -> usize {
    (ROTATED_BYTES / bytes.max(1)).clamp(1, layers.max(1))
}

/// Returns the next value of an xorshift generator, between -0.5 and 0.5.
fn next_value(state: &mut u64) -> f32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_exceed_caches_but_not_the_layers() {
        assert_eq!(copies(30_000_000, 28), 10);
        assert_eq!(copies(1_000, 28), 28);
        assert_eq!(copies(600_000_000, 28), 1);
    }
}
