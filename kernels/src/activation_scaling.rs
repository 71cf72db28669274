//! `ActivationScaling`: rule for the scales with which inputs of a GEMM with fp8 weights are quantised.

use device::Fp8E4m3;

/// Smallest magnitude for which [`ActivationScaling::PowerOfTwo`] computes a scale; the scale of smaller
/// magnitudes is the scale of this magnitude (`act_quant` in DeepSeek-V3.1 `inference/kernel.py`).
const MIN_PEAK: f32 = 1e-4;
/// Magnitude from which on [`ActivationScaling::Dynamic`] computes a scale. Scales of smaller magnitudes would
/// have no finite inverse.
const MIN_DYNAMIC_PEAK: f32 = 1e-30;

/// Rule for the scales of activations. A kernel that quantises activations stores each value divided by the
/// scale of its group, as fp8. Kernels with 16-bit activations ignore the rule.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum ActivationScaling {
    /// The largest magnitude of the group divided by 448.
    #[default]
    Dynamic,
    /// The scale of `Dynamic`, rounded up to a power of two (`scale_fmt` `ue8m0` of DeepSeek-V3.1).
    PowerOfTwo,
    /// This scale, for all groups. Values beyond ±448 times the scale are saturated.
    Static(f32),
}

impl ActivationScaling {
    /// Scale of a group of activations whose largest magnitude is `peak`.
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

    /// Rule for a matrix that consists of parts with these rules. Static scales are combined to the largest
    /// one, as in vLLM. Parts with different rules are quantised with `Dynamic`.
    #[must_use]
    pub fn combined(parts: impl IntoIterator<Item = Self>) -> Self {
        let combine = |a: Self, b: Self| match (a, b) {
            (Self::Static(a), Self::Static(b)) => Self::Static(a.max(b)),
            (a, b) if a == b => a,
            _ => Self::Dynamic,
        };
        parts.into_iter().reduce(combine).unwrap_or_default()
    }

    /// Value of the define `SCALING` in fp8_quantize/quantize.h.
    pub(crate) fn define(self) -> u32 {
        match self {
            Self::Dynamic => 0,
            Self::PowerOfTwo => 1,
            Self::Static(_) => 2,
        }
    }
}

/// Smallest power of two that is not below `x`, a normal number above 0.
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
