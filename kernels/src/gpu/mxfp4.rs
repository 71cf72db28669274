//! Encoding of weights in MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6) for GPU kernels: groups of 32
//! successive elements of a row, each an E2M1 value of 4 bits, with one E8M0 scale `2^(s − 127)` of 8 bits.
//!
//! Weights of an MXFP4 checkpoint arrive dequantised. Each group is encoded with the smallest scale that represents
//! its largest magnitude, so that decoding returns the same values. `csrc/dev/mxfp4.h` has the memory layout of a row.

use crate::HostMat;

/// Number of successive elements of a row that share a scale.
pub(super) const GROUP: usize = 32;
/// Number of bytes of the elements of a group.
const GROUP_BYTES: usize = GROUP / 2;
/// Alignment of rows in bytes.
const ROW_ALIGNMENT: usize = 16;
/// Largest scale that the kernels decode: 2.
const MAX_SCALE: i32 = 128;
/// Exponent bias of E8M0 scales and of f32.
const BIAS: i32 = 127;
/// Exponent of the largest E2M1 value, 6.
const MAX_EXPONENT: i32 = 2;

/// Size in bytes of an encoded row of `cols` elements; `cols` is a multiple of [`GROUP`].
pub(super) const fn row_bytes(cols: usize) -> usize {
    cols / 2 + (cols / GROUP).next_multiple_of(ROW_ALIGNMENT)
}

/// Writes the encoded rows of `from` contiguously to `out`. Returns false, and leaves the contents of `out`
/// undefined, if a value cannot be represented exactly.
///
/// # Panics
/// If the number of columns is not a multiple of [`GROUP`], or the length of `out` is not that of the encoded rows.
pub(super) fn encode(from: HostMat<'_>, out: &mut [u8]) -> bool {
    let (cols, row_bytes) = (from.cols(), row_bytes(from.cols()));
    assert!(cols.is_multiple_of(GROUP) && out.len() == from.rows() * row_bytes);
    let mut row = vec![0f32; cols];
    for (r, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        from.read_row(r, &mut row);
        let (groups, scales) = out.split_at_mut(cols / 2);
        scales.fill(0);
        let values = row.as_chunks::<GROUP>().0;
        let outputs = groups.as_chunks_mut::<GROUP_BYTES>().0;
        for ((values, group), scale) in values.iter().zip(outputs).zip(scales) {
            let Some(encoded) = encode_group(values) else { return false };
            (*group, *scale) = (encoded.elements, encoded.scale);
        }
    }
    true
}

/// Encoded elements and scale of a group.
struct EncodedGroup {
    elements: [u8; GROUP_BYTES],
    scale: u8,
}

/// Returns the encoded group; `None` if a value cannot be represented exactly.
fn encode_group(values: &[f32; GROUP]) -> Option<EncodedGroup> {
    let exponent = |x: f32| (x.to_bits() >> 23 & 0xff) as i32 - BIAS;
    let nonzero = values.iter().filter(|x| **x != 0.0);
    let largest = nonzero.map(|x| exponent(*x)).max().unwrap_or(MAX_EXPONENT - BIAS);
    let scale = (largest - MAX_EXPONENT + BIAS).max(0);
    if scale > MAX_SCALE {
        return None;
    }
    let mut words = [0u32; GROUP / 8];
    for (i, x) in values.iter().enumerate() {
        let element = encode_element(*x, scale - BIAS)?;
        words[i / 8] |= element << (i % 8 / 2 * 4 + i % 2 * 16);
    }
    let mut elements = [0; GROUP_BYTES];
    for (bytes, word) in elements.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    Some(EncodedGroup { elements, scale: scale as u8 })
}

/// Returns the E2M1 bits of `x · 2^−scale`: sign, two exponent bits, mantissa bit; `None` if it is not an E2M1 value.
fn encode_element(x: f32, scale: i32) -> Option<u32> {
    let bits = x.to_bits();
    let (sign, exponent, mantissa) = (bits >> 31 << 3, bits >> 23 & 0xff, bits & 0x7f_ffff);
    if x == 0.0 {
        return Some(sign);
    }
    let half = match mantissa {
        0 => 0,
        0x40_0000 => 1,
        _ => return None,
    };
    // An f32 with exponent bits 0 is subnormal: its mantissa has no implicit one.
    match exponent as i32 - BIAS - scale {
        -1 if exponent > 0 && half == 0 => Some(sign | 1),
        above @ 0..=MAX_EXPONENT if exponent > 0 => Some(sign | (above as u32 + 1) << 1 | half),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::DType;

    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    fn decoded(group: &EncodedGroup, i: usize) -> f32 {
        let word = group.elements.as_chunks::<4>().0[i / 8];
        let element = u32::from_le_bytes(word) >> (i % 8 / 2 * 4 + i % 2 * 16) & 15;
        let magnitude =
            MAGNITUDES[(element & 7) as usize] * (f32::from(group.scale) - 127.0).exp2();
        if element & 8 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn encoded_groups_decode_to_the_same_values() {
        for exponent in [-120, -9, 0, 1] {
            for largest in 1..8 {
                let values = std::array::from_fn(|i| {
                    let magnitude = MAGNITUDES[i % (largest + 1)] * 2f32.powi(exponent);
                    if i % 3 == 0 { -magnitude } else { magnitude }
                });
                let group = encode_group(&values).unwrap();
                for (i, x) in values.iter().enumerate() {
                    assert_eq!(decoded(&group, i), *x, "{largest} {exponent}");
                }
            }
        }
        let zeros = encode_group(&[0.0; GROUP]).unwrap();
        assert!((0..GROUP).all(|i| decoded(&zeros, i) == 0.0));
    }

    #[test]
    fn values_outside_of_the_format_are_rejected() {
        for (a, b) in [(1.0, 1.25), (6.0, 0.25), (4.0, 0.75), (16.0, 24.0), (f32::NAN, 1.0)] {
            let mut values = [0.0; GROUP];
            (values[3], values[30]) = (a, b);
            assert!(encode_group(&values).is_none(), "{a} {b}");
        }
    }

    #[test]
    fn rows_have_their_groups_before_their_scales() {
        let mut values = vec![0f32; 2 * 64];
        (values[64], values[64 + 33]) = (1.0, -3.0);
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mat = HostMat::new(&bytes, DType::F32, 2, 64).unwrap();
        let mut out = [1u8; 2 * row_bytes(64)];
        assert!(encode(mat, &mut out));
        let row = &out[row_bytes(64)..];
        assert_eq!((row.len(), row[0], row[16 + 2]), (48, 6, 15));
        assert_eq!((row[32], row[33], row[34]), (125, 126, 0));
    }
}
