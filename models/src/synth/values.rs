//! Values of synthetic weights: a hash function computes any element of any tensor independently, in a few
//! instructions.
//!
//! `key = mix(fnv1a64(name) ⊕ seed)` and `u(i) = mix(key + (i + 1) · γ)`, where `i` is the row-major index in
//! the whole tensor `mix` is the finaliser of splitmix64 and `γ` is its increment. The bits of `u(i)` select
//! an odd multiple of 1/128 in (−1, 1). A weight is this number times a power of two, and therefore exact in
//! bf16, f16 and f32.

use ops::Fp8E4m3;

/// Distribution of the values of a synthetic tensor. `x` is an odd multiple of 1/128 in (−1, 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynthDistribution {
    /// `x · 2^e`, where `x` is an odd multiple of 1/128 in (−1, 1), and `e` is the largest integer with `4^e
    /// · inputs ≤ 6`. With this `e`, the output of a layer with `inputs` input channels has about the same
    /// variance as its input.
    Linear,
    /// Four times the values of `Linear`, so that router logits of different experts differ clearly.
    Router,
    /// `x`, an odd multiple of 1/128 in (−1, 1), unscaled.
    Embedding,
    /// `x / 16`, where `x` is an odd multiple of 1/128 in (−1, 1).
    Bias,
    /// `1 + k / 128`, where the hash selects an integer `k` from −8 to 7.
    Norm,
    /// `k / 128`, where the hash selects an integer `k` from −8 to 7: weights of norms to which the model adds 1.
    CentredNorm,
    /// The values of `Norm` in every model: weights of norms that are not zero-centred, although other norms of the model
    /// are.
    UncentredNorm,
    /// Integers: offsets from draft token ids to target token ids, which are spread evenly over the
    /// vocabulary; see `SynthDraftVocab`.
    Offsets,
    /// Scales of an fp8 linear layer: powers of two from `2^(e − 1)` to `2^(e + 2)`, where `e` is defined as
    /// for `Linear`. The fp8 elements are the unscaled values `x` rounded to e4m3.
    Scale,
    /// Scales of an MXFP4 layer: powers of two from `2^(e − 4)` to `2^(e − 1)`, where `e` is defined as for
    /// `Linear`. The hash selects the E2M1 elements, whose magnitude is at most 6.
    GroupScale,
    /// Attention sinks: `2 x`, where `x` is an odd multiple of 1/128 in (−1, 1).
    Sink,
    /// Static activation scales: powers of two from 1/32 to 1/4.
    InputScale,
}

/// Generator that computes the values of one synthetic tensor.
#[derive(Debug, Clone, Copy)]
pub struct SynthValueGenerator {
    key: u64,
    values: SynthDistribution,
    scale: f32,
    /// FP8 e4m3 encoding of each of the 128 possible values of `x`.
    e4m3: [u8; 128],
}

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

impl SynthValueGenerator {
    /// Creates the generator of the tensor `name`, whose rows have `inputs` elements.
    #[must_use]
    pub fn new(name: &str, seed: u64, values: SynthDistribution, inputs: usize) -> Self {
        let exponent = match values {
            SynthDistribution::Linear => gain_exponent(inputs),
            SynthDistribution::Scale => gain_exponent(inputs) - 1,
            SynthDistribution::Router => gain_exponent(inputs) + 2,
            SynthDistribution::Embedding
            | SynthDistribution::Norm
            | SynthDistribution::CentredNorm
            | SynthDistribution::UncentredNorm
            | SynthDistribution::Offsets => 0,
            SynthDistribution::GroupScale => gain_exponent(inputs) - 4,
            SynthDistribution::Sink => 1,
            SynthDistribution::Bias => -4,
            SynthDistribution::InputScale => -5,
        };
        let e4m3 = std::array::from_fn(|i| Fp8E4m3::from_f32(level(i as u64)).to_bits());
        Self { key: mix(fnv1a64(name) ^ seed), values, scale: 2f32.powi(exponent), e4m3 }
    }

    /// Value of the tensor element with row-major index `i`.
    #[must_use]
    pub fn value(&self, i: u64) -> f32 {
        let u = self.word(i);
        match self.values {
            SynthDistribution::Norm | SynthDistribution::UncentredNorm => {
                1.0 + ((u >> 60) as f32 - 8.0) / 128.0
            }
            SynthDistribution::CentredNorm => ((u >> 60) as f32 - 8.0) / 128.0,
            SynthDistribution::Scale
            | SynthDistribution::GroupScale
            | SynthDistribution::InputScale => (1 << (u >> 62)) as f32 * self.scale,
            _ => level(u >> 57) * self.scale,
        }
    }

    /// FP8 e4m3 encoding of the unscaled value of the tensor element with row-major index `i`.
    #[must_use]
    pub fn e4m3(&self, i: u64) -> u8 {
        self.e4m3[(self.word(i) >> 57) as usize]
    }

    /// E8M0 encoding of the scale with row-major index `i`; the value is a power of two.
    #[must_use]
    pub fn e8m0(&self, i: u64) -> u8 {
        (self.value(i).to_bits() >> 23) as u8
    }

    /// E2M1 encoding (4 bits) of the tensor element with row-major index `i`.
    #[must_use]
    pub fn e2m1(&self, i: u64) -> u8 {
        (self.word(i) >> 60) as u8
    }

    fn word(&self, i: u64) -> u64 {
        mix(self.key.wrapping_add(i.wrapping_add(1).wrapping_mul(GAMMA)))
    }
}

/// Draft vocabulary whose draft token ids are spread evenly over the target token ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SynthDraftVocab {
    /// Number of draft token ids.
    pub(crate) draft_ids: usize,
    /// Number of target token ids.
    pub(crate) target_ids: usize,
}

impl SynthDraftVocab {
    /// Offset from draft token id `i` to its target token id.
    pub(crate) fn offset(self, i: u64) -> i64 {
        (i * self.target_ids as u64 / self.draft_ids.max(1) as u64 - i) as i64
    }

    /// Whether any draft token id maps to the target token id `id`.
    pub(crate) fn contains(self, id: u64) -> bool {
        let (draft_ids, target_ids) = (self.draft_ids as u64, self.target_ids.max(1) as u64);
        let near = id * draft_ids / target_ids; // The draft id with this target, or the draft id before it.
        (near..draft_ids.min(near + 2)).any(|i| i as i64 + self.offset(i) == id as i64)
    }
}

/// Returns the value with index `i` in the ascending list of the 128 odd multiples of 1/128 in (−1, 1).
/// Synthetic weights are these values times a power of two.
fn level(i: u64) -> f32 {
    (2.0 * i as f32 - 127.0) / 128.0
}

/// Exponent `e` of the scale `2^e` of synthetic linear layers: the largest `e` with `4^e · inputs ≤ 6`.
fn gain_exponent(inputs: usize) -> i32 {
    let inputs = inputs.max(1) as f64;
    let mut e = 1;
    while 4f64.powi(e) * inputs > 6.0 {
        e -= 1;
    }
    e
}

fn fnv1a64(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    name.bytes().fold(0xCBF2_9CE4_8422_2325, step)
}

fn mix(mut z: u64) -> u64 {
    z ^= z >> 30;
    z = z.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^= z >> 27;
    z = z.wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_match_known_answers() {
        let embed = SynthValueGenerator::new(
            "model.embed_tokens.weight",
            0,
            SynthDistribution::Embedding,
            64,
        );
        assert_eq!(fnv1a64("model.embed_tokens.weight"), 0xa88f_d795_d5c6_d156);
        assert_eq!(embed.key, 0x1acb_025c_f390_dc05);
        assert_eq!((embed.word(0), embed.value(0)), (0x14c5_ae35_e159_aee3, -0.835_937_5));
        assert_eq!((embed.word(1), embed.value(1)), (0x6d6a_6dc5_def1_b6d4, -0.148_437_5));
        let q = "model.layers.0.self_attn.q_proj.weight";
        let q = SynthValueGenerator::new(q, 0, SynthDistribution::Embedding, 64);
        assert_eq!((q.word(1_000_000), q.value(1_000_000)), (0x7190_5eb6_ba06_fc5b, -0.117_187_5));
        let head = SynthValueGenerator::new("lm_head.weight", 7, SynthDistribution::Embedding, 64);
        assert_eq!((head.word(0), head.value(0)), (0x3514_6076_cf07_d6c9, -0.585_937_5));
    }

    #[test]
    fn linear_gain_is_about_one() {
        for (inputs, e) in [(1, 1), (2, 0), (6, 0), (7, -1), (24, -1), (64, -2), (1024, -4)] {
            assert_eq!(gain_exponent(inputs), e, "{inputs}");
        }
        let linear = SynthValueGenerator::new("w", 1, SynthDistribution::Linear, 1024);
        let square = (0..100_000).map(|i| linear.value(i).powi(2)).sum::<f32>() / 100_000.0;
        assert!((0.5..2.0).contains(&(square * 1024.0)), "{square}");
    }

    #[test]
    fn every_value_is_exact_in_bf16() {
        for values in [
            SynthDistribution::Linear,
            SynthDistribution::Router,
            SynthDistribution::Bias,
            SynthDistribution::Sink,
            SynthDistribution::Norm,
            SynthDistribution::CentredNorm,
        ] {
            let generator = SynthValueGenerator::new("w", 3, values, 64);
            let exact = |i| half::bf16::from_f32(generator.value(i)).to_f32() == generator.value(i);
            assert!((0..4096).all(exact), "{values:?}");
        }
    }
}
