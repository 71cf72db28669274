//! `ActivationScaling`: how the quantisation scales of fp8 GEMM inputs are computed.

use device::Fp8E4m3;

/// Lower bound to which [`ActivationScaling::PowerOfTwo`] clamps the largest magnitude of a group before it
/// computes the scale (`act_quant` in DeepSeek-V3.1 `inference/kernel.py`).
const MIN_PEAK: f32 = 1e-4;
/// In [`ActivationScaling::Dynamic`], a group of activations whose largest magnitude is at most this value
/// has scale 1, because the inverse of a smaller scale would overflow.
const MIN_DYNAMIC_PEAK: f32 = 1e-30;

/// How the scales of fp8 activations are computed. A kernel that quantises activations stores each value
/// divided by the scale of its group, as fp8. Kernels with 16-bit activations ignore this setting.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum ActivationScaling {
    /// The scale is the largest magnitude of the group divided by 448.
    #[default]
    Dynamic,
    /// The scale of `Dynamic`, rounded up to a power of two (`scale_fmt` `ue8m0` of DeepSeek-V3.1).
    PowerOfTwo,
    /// All groups have this scale. Values beyond ±448 times the scale saturate.
    Static(f32),
}

impl ActivationScaling {
    /// Returns the scale of a group of activations whose largest magnitude is `peak`.
    #[must_use]
    pub fn scale(self, peak: f32) -> f32 {
        let ratio = |peak: f32| peak * (1.0 / Fp8E4m3::MAX);
        match self {
            Self::Dynamic if peak > MIN_DYNAMIC_PEAK => ratio(peak),
            Self::Dynamic => 1.0,
            Self::PowerOfTwo => round_up_to_power_of_two(ratio(peak.max(MIN_PEAK))),
            Self::Static(scale) => scale,
        }
    }

    /// Returns the scale of [`Static`](Self::Static) scaling.
    pub(crate) fn static_scale(self) -> Option<f32> {
        match self {
            Self::Static(scale) => Some(scale),
            Self::Dynamic | Self::PowerOfTwo => None,
        }
    }

    /// Returns the activation scaling of a weight matrix that is stacked from several matrices (such as Q, K
    /// and V), given the scaling of each. If all are static, the result is the maximum of their scales, as in
    /// vLLM. If they have different kinds of scaling, the result is `Dynamic`.
    #[must_use]
    pub fn combined(parts: impl IntoIterator<Item = Self>) -> Self {
        let combine = |a: Self, b: Self| match (a, b) {
            (Self::Static(a), Self::Static(b)) => Self::Static(a.max(b)),
            (a, b) if a == b => a,
            _ => Self::Dynamic,
        };
        parts.into_iter().reduce(combine).unwrap_or_default()
    }

    /// Value of the preprocessor define `SCALING` of fp8_quantize/quantize.h.
    pub(crate) fn define(self) -> u32 {
        match self {
            Self::Dynamic => 0,
            Self::PowerOfTwo => 1,
            Self::Static(_) => 2,
        }
    }
}

/// Returns the smallest power of two that is at least `x`; `x` is a positive normal number.
fn round_up_to_power_of_two(x: f32) -> f32 {
    const MANTISSA: u32 = (1 << 23) - 1;
    f32::from_bits((x.to_bits() + MANTISSA) & !MANTISSA)
}

#[cfg(test)]
mod tests {
    use super::ActivationScaling::{Dynamic, PowerOfTwo, Static};
    use super::*;

    #[test]
    fn scales_round_up_to_powers_of_two() {
        for (peak, scale) in [(448.0, 1.0), (448.1, 2.0), (447.9, 1.0), (1.0, 2f32.powi(-8))] {
            assert_eq!(PowerOfTwo.scale(peak), scale, "{peak}");
        }
        // 1e-4 / 448 is between 2^-23 and 2^-22.
        assert_eq!([0.0, 1e-6, 1e-4].map(|peak| PowerOfTwo.scale(peak)), [2f32.powi(-22); 3]);
        assert_eq!([896.0, 0.0].map(|peak| Dynamic.scale(peak)), [2.0, 1.0]);
        assert_eq!(Static(0.25).scale(1e9), 0.25);
    }

    #[test]
    fn stacked_parts_use_the_largest_static_scale() {
        assert_eq!(
            ActivationScaling::combined([Static(0.5), Static(2.0), Static(1.0)]),
            Static(2.0)
        );
        assert_eq!(ActivationScaling::combined([PowerOfTwo, PowerOfTwo]), PowerOfTwo);
        assert_eq!(ActivationScaling::combined([PowerOfTwo, Static(2.0)]), Dynamic);
        assert_eq!(ActivationScaling::combined([]), Dynamic);
    }
}
