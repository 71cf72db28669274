//! Conversion of weights from the element type of the checkpoint to the element type on the device, row by
//! row.

use device::{DType, FloatElement, bf16, f16};

use crate::HostMat;

/// Writes the rows of `from` contiguously to `out` as `dtype` (f32, bf16 or f16), rounded to nearest even. If
/// both types are fp8, elements are copied and scales are ignored.
///
/// # Panics
/// If the length of `out` differs from the size of the converted rows.
pub(super) fn convert(from: HostMat<'_>, dtype: DType, out: &mut [u8]) {
    let row_bytes = from.cols() * dtype.bytes();
    assert_eq!(out.len(), from.rows() * row_bytes);
    let unscaled = from.scales().is_none() || dtype == DType::F8E4M3;
    if let (true, Some(bytes)) = (unscaled && from.dtype() == dtype, from.contiguous_bytes()) {
        return out.copy_from_slice(bytes);
    }
    for r in 0..from.rows() {
        let (bytes, out_row) = (from.row_bytes(r), &mut out[r * row_bytes..][..row_bytes]);
        match (from.dtype(), dtype) {
            (DType::F8E4M3, DType::F8E4M3) => out_row.copy_from_slice(bytes),
            _ if !unscaled => widen(from, r, dtype, out_row),
            (a, b) if a == b => out_row.copy_from_slice(bytes),
            (DType::F32, DType::BF16) => {
                map_elements(bytes, out_row, |b| to_bf16(f32::from_le_bytes(b)));
            }
            (DType::F32, DType::F16) => {
                map_elements(bytes, out_row, |b| to_f16(f32::from_le_bytes(b)));
            }
            (DType::F16, DType::BF16) => map_elements(bytes, out_row, |b| to_bf16(of_f16(b))),
            (DType::BF16, DType::F16) => map_elements(bytes, out_row, |b| to_f16(of_bf16(b))),
            (DType::BF16, DType::F32) => map_elements(bytes, out_row, |b| of_bf16(b).to_le_bytes()),
            (DType::F16, DType::F32) => map_elements(bytes, out_row, |b| of_f16(b).to_le_bytes()),
            _ => widen(from, r, dtype, out_row),
        }
    }
}

/// Converts row `r` to `dtype` through f32: for quantised weights, and for pairs of types without a direct
/// conversion.
fn widen(from: HostMat<'_>, r: usize, dtype: DType, out: &mut [u8]) {
    let mut row = vec![0f32; from.cols()];
    from.read_row(r, &mut row);
    for (x, out) in row.iter().zip(out.chunks_exact_mut(dtype.bytes())) {
        match dtype {
            DType::BF16 => out.copy_from_slice(&to_bf16(*x)),
            DType::F16 => out.copy_from_slice(&to_f16(*x)),
            _ => out.copy_from_slice(&x.to_le_bytes()),
        }
    }
}

fn to_bf16(x: f32) -> [u8; 2] {
    bf16::store(x).to_le_bytes()
}

/// Converts an f32 to f16; values outside the range of f16 become infinite.
fn to_f16(x: f32) -> [u8; 2] {
    f16::store(x).to_le_bytes()
}

fn of_bf16(bytes: [u8; 2]) -> f32 {
    bf16::from_le_bytes(bytes).load()
}

fn of_f16(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).load()
}

fn map_elements<const A: usize, const B: usize>(
    from: &[u8],
    to: &mut [u8],
    value: impl Fn([u8; A]) -> [u8; B],
) {
    for (x, y) in from.as_chunks::<A>().0.iter().zip(to.as_chunks_mut::<B>().0) {
        *y = value(*x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_rounds_like_scalar_conversion() {
        let values = [0.0f32, -1.5, 0.1, 65504.0, -1e-7, 6e-5, 1.0039, 7.0];
        let types = [DType::F32, DType::BF16, DType::F16, DType::I32];
        for from in types {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|&x| match from {
                    DType::F32 => x.to_le_bytes().to_vec(),
                    DType::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
                    DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                    _ => (x as i32).to_le_bytes().to_vec(),
                })
                .collect();
            // The middle two columns of a 2 × 4 matrix: their rows are not contiguous.
            let mat = HostMat::new(&bytes, from, 2, 4).unwrap().column_range(1, 2);
            let mut expected = vec![0f32; 4];
            mat.read_row(0, &mut expected[..2]);
            mat.read_row(1, &mut expected[2..]);
            let mut narrow = [0u8; 8];
            convert(mat, DType::BF16, &mut narrow);
            let got: Vec<f32> =
                narrow.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
            let rounded: Vec<f32> = expected.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            assert_eq!(got, rounded, "{from:?} to bf16");
            convert(mat, DType::F16, &mut narrow);
            let got: Vec<f32> =
                narrow.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect();
            let rounded: Vec<f32> = expected.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            assert_eq!(got, rounded, "{from:?} to f16");
            let mut full = [0u8; 16];
            convert(mat, DType::F32, &mut full);
            let got: Vec<f32> = full.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            assert_eq!(got, expected, "{from:?} to f32");
        }
    }
}
