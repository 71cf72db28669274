//! OCP fp8 e4m3 numbers: 4 exponent bits with bias 7, 3 mantissa bits, no infinity; 0x7f and 0xff are NaN.

/// Number in OCP fp8 e4m3 format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Fp8E4m3(u8);

/// 2¹²⁰: factor in the conversion to f32 that corrects the exponent bias from 7 (e4m3) to 127 (f32).
const REBIAS: f32 = f32::from_bits((127 + 120) << 23);
/// Smallest normal e4m3 number; smaller numbers are multiples of 2⁻⁹.
const MIN_NORMAL: f32 = 1.0 / 64.0;
/// 1.5 · 2²³: adding this constant to a small f32 rounds the f32 to an integer.
const ROUNDER: f32 = 12_582_912.0;

impl Fp8E4m3 {
    /// Largest finite e4m3 number.
    pub const MAX: f32 = 448.0;

    /// Creates a number from its 8-bit encoding.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Returns the 8-bit encoding of the number.
    #[must_use]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Converts the number to f32, which represents it exactly.
    #[must_use]
    pub fn to_f32(self) -> f32 {
        let (sign, magnitude) = (u32::from(self.0 & 0x80), u32::from(self.0 & 0x7f));
        if magnitude == 0x7f {
            return f32::NAN;
        }
        // Exponent and mantissa are shifted to their positions in f32; the multiplication corrects the bias
        // exactly.
        f32::from_bits(sign << 24 | magnitude << 20) * REBIAS
    }

    /// Rounds `x` to the nearest e4m3 number, ties to even. Values beyond ±448 are clamped to ±448; NaN
    /// remains NaN.
    #[must_use]
    pub fn from_f32(x: f32) -> Self {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return Self(sign | 0x7f);
        }
        let magnitude = x.abs().min(Self::MAX);
        let bits = if magnitude < MIN_NORMAL {
            (magnitude * 512.0 + ROUNDER).to_bits() as u8
        } else {
            let bits = magnitude.to_bits();
            let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
            ((rounded >> 20) - (120 << 3)) as u8
        };
        Self(sign | bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_round_trips_through_f32() {
        for bits in 0..=255u8 {
            let x = Fp8E4m3::from_bits(bits).to_f32();
            assert_eq!(x.is_nan(), bits & 0x7f == 0x7f);
            if !x.is_nan() {
                assert_eq!(Fp8E4m3::from_f32(x).to_bits(), bits, "{x}");
            }
        }
        for (bits, x) in [(0x7e, 448.0), (0x38, 1.0), (0xb8, -1.0), (0x01, 1.0 / 512.0)] {
            assert_eq!(Fp8E4m3::from_bits(bits).to_f32(), x);
        }
    }

    #[test]
    fn conversion_rounds_to_nearest_even() {
        let value = |bits: u8| Fp8E4m3::from_bits(bits).to_f32();
        for i in 0..40_000u32 {
            let x =
                f32::from_bits(i.wrapping_mul(107_374) ^ 0x3a00_0000 & 0x7fff_ffff).abs() % 600.0;
            let bits = Fp8E4m3::from_f32(x).to_bits();
            let distance = |bits: u8| (value(bits) - x).abs();
            for other in [bits.saturating_sub(1), (bits + 1).min(0x7e)] {
                let closer = distance(other) < distance(bits);
                let tie = distance(other) == distance(bits) && other != bits && bits % 2 == 1;
                assert!(!closer && !tie, "{x}: {bits} or {other}");
            }
        }
        assert_eq!(Fp8E4m3::from_f32(1e9).to_f32(), 448.0);
        assert_eq!(Fp8E4m3::from_f32(-f32::INFINITY).to_f32(), -448.0);
        assert!(Fp8E4m3::from_f32(f32::NAN).to_f32().is_nan());
    }
}
