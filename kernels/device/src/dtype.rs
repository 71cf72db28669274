//! Element types of device memory (`DType`), and the corresponding Rust types.

pub use half::{bf16, f16};

use crate::Fp8E4m3;

/// Element type of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16 (the upper 16 bits of binary32).
    BF16,
    /// IEEE binary16.
    F16,
    /// OCP fp8 e4m3, for weights with scales and for the KV cache.
    F8E4M3,
    /// 32-bit integer, for token ids, positions, lengths and block ids.
    I32,
    /// 64-bit integer, for KV cache slots: block id × block size + offset in the block; −1 = no slot.
    I64,
}

impl DType {
    /// Size of one element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F8E4M3 => 1,
            Self::BF16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// Rust type that corresponds to an element type [`DType`].
///
/// # Safety
/// `Self` has the size of `DTYPE` and no padding, and every bit pattern is a valid value.
pub unsafe trait DeviceElement: Copy + Send + Sync + 'static {
    /// Element type that corresponds to this Rust type.
    const DTYPE: DType;
}

/// Floating-point element type. Kernels compute in f32 and round to nearest even when they store.
pub trait FloatElement: DeviceElement {
    /// Type to which activations are converted before they are multiplied by weights of this type.
    type MatmulOperand: FloatElement;
    /// Converts the element to f32.
    fn load(self) -> f32;
    /// Converts `x` to this type, rounded to nearest even.
    fn store(x: f32) -> Self;
    /// Converts `x`, which must be exactly representable in this type, so that no rounding is needed.
    fn truncate(x: f32) -> Self {
        Self::store(x)
    }
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        // SAFETY: the type is plain old data of exactly `DType::bytes` bytes; every bit pattern is a valid
        // value.
        unsafe impl DeviceElement for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(f32 => F32, bf16 => BF16, f16 => F16, Fp8E4m3 => F8E4M3, i32 => I32, i64 => I64);

impl FloatElement for f32 {
    type MatmulOperand = Self;
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn store(x: f32) -> Self {
        x
    }
}

impl FloatElement for bf16 {
    type MatmulOperand = Self;
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// Rounds `x` to the nearest bf16, ties to even, without branches, so that loops vectorise. NaN becomes a
    /// quiet NaN.
    #[inline(always)]
    fn store(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        let quiet = (bits >> 16) as u16 | 0x40;
        Self::from_bits(if x.is_nan() { quiet } else { rounded })
    }
    #[inline(always)]
    fn truncate(x: f32) -> Self {
        Self::from_bits((x.to_bits() >> 16) as u16)
    }
}

/// Conversions without branches, so that loops vectorise. The results are bit-identical to those of the F16C
/// instructions.
impl FloatElement for f16 {
    /// `MatmulOperand` is f32, because no CPU instruction multiplies f16 values with f32 accumulation: activations
    /// are converted to f32 once, instead of for each product.
    type MatmulOperand = f32;
    #[inline(always)]
    fn load(self) -> f32 {
        const INFINITY: u32 = 0x7c00 << 13;
        const MIN_NORMAL: u32 = 0x0400 << 13;
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        // 112 is the difference between the exponent biases of f32 (127) and f16 (15).
        let normal = magnitude + (112 << 23);
        // Subnormal numbers: the fraction is combined with the exponent of the smallest normal f16, and the
        // value of the smallest normal f16 is subtracted.
        let least = f32::from_bits(113 << 23);
        let subnormal = (f32::from_bits(magnitude + (113 << 23)) - least).to_bits();
        let quiet = if magnitude > INFINITY { 0x7fc0_0000 } else { 0x7f80_0000 };
        let finite = if magnitude < MIN_NORMAL { subnormal } else { normal };
        let wide = if magnitude >= INFINITY { magnitude | quiet } else { finite };
        f32::from_bits(wide | (bits & 0x8000) << 16)
    }
    /// Rounds `x` to the nearest f16, ties to even; NaN becomes a quiet NaN.
    #[inline(always)]
    fn store(x: f32) -> Self {
        const MIN_NORMAL: u32 = 113 << 23;
        const BEYOND: u32 = (127 + 16) << 23;
        let sign = (x.to_bits() >> 16) & 0x8000;
        let exact = x.to_bits() & 0x7fff_ffff;
        let bounded = if exact > BEYOND { BEYOND } else { exact };
        // A carry out of the fraction increments the exponent. A carry out of the largest finite exponent
        // yields infinity.
        let halfway = 0x0fff + ((bounded >> 13) & 1);
        let normal = bounded.wrapping_sub(112 << 23).wrapping_add(halfway) >> 13;
        // Subnormal numbers: adding 0.5 aligns the last fraction bit of the f32 with the last fraction bit of
        // a subnormal f16, so that the addition rounds correctly.
        let subnormal = (f32::from_bits(bounded) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let finite = if bounded < MIN_NORMAL { subnormal } else { normal };
        let quiet = (exact >> 13) & 0x03ff | 0x7e00;
        Self::from_bits((sign | if x.is_nan() { quiet } else { finite }) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every f16 value, tests the value itself, the f32 midpoint between the value and the next f16
    /// value, and both f32 neighbours of the midpoint.
    #[test]
    fn half_conversions_follow_ieee754() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            let wide = half.load();
            assert_eq!(wide.to_bits() & !0x0040_0000, half.to_f32().to_bits() & !0x0040_0000);
            if wide.is_nan() {
                assert_eq!(f16::store(wide).to_bits(), bits | 0x0200);
                continue;
            }
            assert_eq!(f16::store(wide).to_bits(), bits);
            let next = f16::from_bits(bits.wrapping_add(1));
            let middle = wide.midpoint(next.load());
            for x in [middle.next_down(), middle, middle.next_up(), wide * 3.0, wide / 3.0] {
                let expected = f16::from_f32(x);
                let same = f16::store(x).to_bits() == expected.to_bits();
                assert!(same || x.is_nan(), "{x:e} to {expected}");
            }
        }
        for x in [1e38, f32::MAX, 65519.0, 65520.0, 65536.0, 1e-30, f32::from_bits(1)] {
            assert_eq!(f16::store(-x).to_bits(), f16::from_f32(-x).to_bits(), "{x:e}");
        }
    }
}
