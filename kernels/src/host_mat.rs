//! `HostMat`: a view of a weight matrix in host memory, as stored in a checkpoint file, with its
//! dequantisation scales.

use crate::ActivationScaling;
use device::{DType, DeviceError, Fp8E4m3};

/// Dequantisation scales of a quantised matrix: one scale per block of `block_shape[0] × block_shape[1]`
/// elements. A weight is the stored element times the scale of its block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostScales<'a> {
    values: &'a [f32],
    /// Number of scales per row of scale blocks, in the stored matrix.
    stride: usize,
    block_shape: [usize; 2],
    /// Row and column of the first element of this view in the stored matrix.
    origin: [usize; 2],
}

impl HostScales<'_> {
    /// Number of rows and number of columns of a block that shares one scale.
    #[must_use]
    pub fn block_shape(&self) -> [usize; 2] {
        self.block_shape
    }

    /// Row and column of the first element of this view in the stored matrix. The scale block of that element
    /// may begin before it.
    #[must_use]
    pub fn origin(&self) -> [usize; 2] {
        self.origin
    }

    /// Returns the scale of an element.
    ///
    /// # Panics
    /// If the element is out of range.
    #[must_use]
    pub fn at(&self, row: usize, col: usize) -> f32 {
        let row = (self.origin[0] + row) / self.block_shape[0];
        let col = (self.origin[1] + col) / self.block_shape[1];
        self.values[row * self.stride + col]
    }
}

/// View of a matrix in host memory as stored in a file: little endian, any alignment. Rows are `stride`
/// elements apart.
#[derive(Debug, Clone, Copy)]
pub struct HostMat<'a> {
    bytes: &'a [u8],
    dtype: DType,
    rows: usize,
    cols: usize,
    stride: usize,
    scales: Option<HostScales<'a>>,
    activation_scaling: ActivationScaling,
}

impl<'a> HostMat<'a> {
    /// Makes a view of `rows * cols` contiguous elements.
    ///
    /// Errors: the length of `bytes` differs from the size of the matrix.
    pub fn new(
        bytes: &'a [u8],
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        let expected = rows.saturating_mul(cols).saturating_mul(dtype.bytes());
        if bytes.len() != expected {
            let got = bytes.len();
            return Err(DeviceError::Shape { kernel: "host matrix", what: "bytes", got, expected });
        }
        let activation_scaling = ActivationScaling::default();
        Ok(Self { bytes, dtype, rows, cols, stride: cols, scales: None, activation_scaling })
    }

    /// Returns the matrix with dequantisation scales. `values` has one scale for each block of
    /// `block_shape[0]` rows and `block_shape[1]` columns, in row-major order of blocks; the last block of a
    /// row or column of blocks may be smaller.
    ///
    /// Errors: the length of `values` differs from the number of blocks.
    pub fn scaled(self, values: &'a [f32], block_shape: [usize; 2]) -> Result<Self, DeviceError> {
        let rows = self.rows.div_ceil(block_shape[0]);
        let stride = self.cols.div_ceil(block_shape[1]);
        let (got, expected) = (values.len(), rows * stride);
        if got != expected {
            return Err(DeviceError::Shape {
                kernel: "host matrix",
                what: "scales",
                got,
                expected,
            });
        }
        Ok(Self {
            scales: Some(HostScales { values, stride, block_shape, origin: [0, 0] }),
            ..self
        })
    }

    /// Sets how the activations that are multiplied by this matrix are scaled when they are quantised to fp8.
    #[must_use]
    pub fn with_activation_scaling(self, activation_scaling: ActivationScaling) -> Self {
        Self { activation_scaling, ..self }
    }

    /// How the activations that are multiplied by this matrix are scaled when they are quantised to fp8.
    #[must_use]
    pub fn activation_scaling(&self) -> ActivationScaling {
        self.activation_scaling
    }

    /// Dequantisation scales; `None` = the matrix is not quantised.
    #[must_use]
    pub fn scales(&self) -> Option<&HostScales<'a>> {
        self.scales.as_ref()
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns rows `[from, from + rows)`.
    ///
    /// # Panics
    /// If the range exceeds the matrix.
    #[must_use]
    pub fn row_range(&self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "rows {from}+{rows} of {}", self.rows);
        let bytes = &self.bytes[from * self.stride * self.dtype.bytes()..];
        Self { bytes, rows, scales: self.scales_from(from, 0), ..*self }
    }

    /// Returns columns `[from, from + cols)` of every row.
    ///
    /// # Panics
    /// If the range exceeds the matrix.
    #[must_use]
    pub fn column_range(&self, from: usize, cols: usize) -> Self {
        assert!(from + cols <= self.cols, "columns {from}+{cols} of {}", self.cols);
        let bytes = &self.bytes[from * self.dtype.bytes()..];
        Self { bytes, cols, scales: self.scales_from(0, from), ..*self }
    }

    fn scales_from(&self, row: usize, col: usize) -> Option<HostScales<'a>> {
        self.scales.map(|s| HostScales { origin: [s.origin[0] + row, s.origin[1] + col], ..s })
    }

    /// Returns the bytes of all rows if the rows are contiguous, otherwise `None`.
    pub(crate) fn contiguous_bytes(&self) -> Option<&'a [u8]> {
        let bytes = self.rows * self.cols * self.dtype.bytes();
        (self.stride == self.cols || self.rows <= 1).then(|| &self.bytes[..bytes])
    }

    /// Returns the bytes of row `r`.
    ///
    /// # Panics
    /// If the row is out of range.
    #[must_use]
    pub fn row_bytes(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        let size = self.dtype.bytes();
        &self.bytes[r * self.stride * size..][..self.cols * size]
    }

    /// Reads row `r` as f32, each element times its scale.
    ///
    /// # Panics
    /// If the row is out of range or the length of `out` is not `cols`.
    pub fn read_row(&self, r: usize, out: &mut [f32]) {
        let bytes = self.row_bytes(r);
        assert_eq!(out.len(), self.cols);
        match self.dtype {
            DType::F32 => read(bytes, out, f32::from_le_bytes),
            DType::BF16 => read(bytes, out, |b| half::bf16::from_le_bytes(b).to_f32()),
            DType::F16 => read(bytes, out, |b| half::f16::from_le_bytes(b).to_f32()),
            DType::F8E4M3 => read(bytes, out, |[b]| Fp8E4m3::from_bits(b).to_f32()),
            DType::I32 => read(bytes, out, |b| i32::from_le_bytes(b) as f32),
            DType::I64 => read(bytes, out, |b| i64::from_le_bytes(b) as f32),
        }
        let Some(scales) = &self.scales else { return };
        let mut c = 0;
        while c < self.cols {
            let block_cols = scales.block_shape[1];
            let to = (c + block_cols - (scales.origin[1] + c) % block_cols).min(self.cols);
            let factor = scales.at(r, c);
            out[c..to].iter_mut().for_each(|x| *x *= factor);
            c = to;
        }
    }
}

fn read<const B: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; B]) -> f32) {
    for (x, raw) in out.iter_mut().zip(bytes.as_chunks::<B>().0) {
        *x = value(*raw);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slice_of_quantized_matrix_keeps_block_scales() {
        let (rows, cols, block_shape) = (5, 7, [2, 3]);
        let bytes: Vec<u8> =
            (0..35).map(|i| Fp8E4m3::from_f32((i % 13) as f32).to_bits()).collect();
        let factors: Vec<f32> = (0..9).map(|i| 0.5 + i as f32).collect();
        let whole = HostMat::new(&bytes, DType::F8E4M3, rows, cols).unwrap();
        assert!(whole.scaled(&factors[1..], block_shape).is_err());
        let part = whole.scaled(&factors, block_shape).unwrap().row_range(1, 3).column_range(2, 4);
        let mut row = [0.0; 4];
        for r in 0..3 {
            part.read_row(r, &mut row);
            for (c, x) in row.iter().enumerate() {
                let element = (((r + 1) * cols + c + 2) % 13) as f32;
                let (row, col) = (r + 1, c + 2);
                assert_eq!(*x, element * factors[row / 2 * 3 + col / 3], "{r} {c}");
            }
        }
    }
}
