//! Rotary embedding (RoPE): rotation frequencies from the configuration, and tables of cosines and sines by
//! position.
//!
//! Frequencies and tables are computed in f32, as in transformers, so that the angles at large positions are
//! bit-identical to those of transformers.

use crate::config::{RopeConfig, RopeScaling};
use crate::{ModelConfig, ModelLoadError, Weights};
use ops::{RopeTable, Tensor};
use std::f64::consts::TAU;
use std::sync::Arc;

/// Tables of cosines and sines by position, shared by all layers of a kind.
#[derive(Debug, Clone)]
pub(crate) struct RotaryEmbedding {
    pub(crate) table: Arc<RopeTable>,
    /// Tables of the layers that differ from `table`. A layer uses the first table that lists it.
    others: Arc<[LayerRopeTable]>,
    /// Attention temperature: factor of the queries of each position, f32 `[positions]`; `None` = all factors are 1.
    pub(crate) temperature: Option<Arc<Tensor>>,
}

/// Table of some layers: of layers without RoPE (NoPE), for which all angles are 0, so that queries and keys are not
/// changed; or of layers with a sliding window and RoPE settings of their own.
#[derive(Debug)]
struct LayerRopeTable {
    table: Arc<RopeTable>,
    /// Indices of the layers.
    layers: Vec<usize>,
}

impl RotaryEmbedding {
    /// Creates the tables for all positions up to the longest context that requests can use.
    pub(crate) fn load(config: &ModelConfig, w: &Weights<'_>) -> Result<Self, ModelLoadError> {
        let full = config.at_full_layers();
        let half = full.rotary() / 2;
        let mut others = Vec::new();
        if !config.nope_layers.is_empty() {
            let count = w.positions() * half;
            let table = upload(w, &vec![1.0; count], &vec![0.0; count], half)?;
            others.push(LayerRopeTable { table, layers: config.nope_layers.clone() });
        }
        if let Some(attention) = &config.layer_attention
            && let Some(rope) = &attention.rope
        {
            let layers = (0..config.layers).filter(|&i| attention.is_windowed(i)).collect();
            let table = table(rope, config.rotated_channels(), config.rotary() / 2, w)?;
            others.push(LayerRopeTable { table, layers });
        }
        let table = table(&config.rope, full.rotated_channels(), half, w)?;
        Ok(Self { table, others: others.into(), temperature: temperature(config, w)? })
    }

    /// Returns the rotary embedding of layer `layer`.
    pub(crate) fn at_layer(&self, layer: usize) -> Self {
        match self.others.iter().find(|other| other.layers.contains(&layer)) {
            Some(other) => Self { table: Arc::clone(&other.table), ..self.clone() },
            None => self.clone(),
        }
    }
}

/// Computes and uploads the table for `half` channel pairs per head, of which the first `rotated / 2` are rotated.
fn table(
    rope: &RopeConfig,
    rotated: usize,
    half: usize,
    w: &Weights<'_>,
) -> Result<Arc<RopeTable>, ModelLoadError> {
    let mut frequencies = frequencies(rope, rotated, w.positions());
    let scale = match rope.scaling {
        RopeScaling::Yarn { attention_factor, .. }
        | RopeScaling::LongRope { attention_factor, .. } => attention_factor as f32,
        _ => 1.0,
    };
    let mut scales = vec![scale; frequencies.len()];
    // Channels that RoPE does not rotate (see `RotaryRowOrder`) have the angle 0.
    frequencies.resize(half, 0.0);
    scales.resize(half, 1.0);
    let angles = || {
        let at = |position: usize| frequencies.iter().map(move |f| position as f32 * f);
        (0..w.positions()).flat_map(at)
    };
    let scales = || scales.iter().cycle();
    let cos: Vec<f32> = angles().zip(scales()).map(|(a, scale)| a.cos() * scale).collect();
    let sin: Vec<f32> = angles().zip(scales()).map(|(a, scale)| a.sin() * scale).collect();
    upload(w, &cos, &sin, half)
}

/// Uploads cosines and sines, `[positions, half]` each.
fn upload(
    w: &Weights<'_>,
    cos: &[f32],
    sin: &[f32],
    half: usize,
) -> Result<Arc<RopeTable>, ModelLoadError> {
    let table = w.ops().rope_table(cos, sin, half).map_err(|e| w.device("rope", e))?;
    Ok(Arc::new(table))
}

/// Uploads the factors of the attention temperature for all positions; returns `None` if every factor is 1.
fn temperature(
    config: &ModelConfig,
    w: &Weights<'_>,
) -> Result<Option<Arc<Tensor>>, ModelLoadError> {
    let Some(temperature) = config.attention_temperature else { return Ok(None) };
    let factors: Vec<f32> = (0..w.positions()).map(|p| temperature.factor(p)).collect();
    if factors.iter().all(|factor| factor.to_bits() == 1f32.to_bits()) {
        return Ok(None);
    }
    let table = w.ops().temperature_table(&factors);
    table.map(|table| Some(Arc::new(table))).map_err(|e| w.device("attention temperature", e))
}

/// Rotation frequency of each channel pair, in radians per position; `positions` is the length of the longest
/// context, in tokens.
fn frequencies(rope: &RopeConfig, rotary: usize, positions: usize) -> Vec<f32> {
    let channels = (0..rotary).step_by(2);
    let plain = channels.map(|i| 1.0 / (rope.theta as f32).powf(i as f32 / rotary as f32));
    match &rope.scaling {
        RopeScaling::LongRope { short_factors, long_factors, original_positions, .. } => {
            let is_long = positions as f64 > *original_positions;
            let factors = if is_long { long_factors } else { short_factors };
            plain.zip(factors).map(|(f, factor)| f / *factor as f32).collect()
        }
        RopeScaling::Default => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / *factor as f32).collect(),
        RopeScaling::Proportional { factor, rotated } => {
            let pairs = (rotated * rotary as f64 / 2.0).floor() as usize;
            let scaled = |(i, f): (usize, f32)| if i < pairs { f / *factor as f32 } else { 0.0 };
            plain.enumerate().map(scaled).collect()
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
            let (low, high) = (*low_freq_factor as f32, *high_freq_factor as f32);
            let (factor, original) = (*factor as f32, *original_positions as f32);
            plain.map(|f| llama3(f, factor, low, high, original)).collect()
        }
        RopeScaling::Yarn {
            factor, beta_fast, beta_slow, original_positions, truncate, ..
        } => {
            let channel = |rotations: f64| {
                let wavelength = original_positions / (rotations * TAU);
                rotary as f64 * wavelength.ln() / (2.0 * rope.theta.ln())
            };
            let (mut low, mut high) = (channel(*beta_fast), channel(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, high) = (low.max(0.0), high.min(rotary as f64 - 1.0));
            let width = if low == high { 0.001 } else { high - low };
            let ramp = |i: usize| ((i as f64 - low) / width).clamp(0.0, 1.0) as f32;
            let blend = |f: f32, part: f32| f / *factor as f32 * part + f * (1.0 - part);
            plain.enumerate().map(|(i, f)| blend(f, ramp(i))).collect()
        }
    }
}

/// Scales the frequency `f` as Llama 3 does: the frequency is divided by `factor` for long wavelengths,
/// unchanged for short wavelengths, and interpolated between them.
fn llama3(f: f32, factor: f32, low: f32, high: f32, original: f32) -> f32 {
    let wavelength = TAU as f32 / f;
    if wavelength < original / high {
        return f;
    }
    if wavelength > original / low {
        return f / factor;
    }
    let smooth = (original / wavelength - low) / (high - low);
    (1.0 - smooth) * f / factor + smooth * f
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Vec<f32> {
        let rope = RopeConfig { theta: 10_000.0, scaling, partial_rotary_factor: 1.0 };
        frequencies(&rope, 8, 512)
    }

    #[test]
    fn rope_frequencies_follow_their_scaling() {
        let plain = rope(RopeScaling::Default);
        for (f, expected) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((f - expected).abs() < expected * 1e-6, "{f}");
        }
        let linear = rope(RopeScaling::Linear { factor: 4.0 });
        assert!(linear.iter().zip(&plain).all(|(l, p)| *l == p / 4.0));
        let llama = rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 128.0,
        });
        // The four wavelengths are 6, 63, 628 and 6283 positions; wavelengths below 32 are short and
        // wavelengths above 128 are long.
        assert_eq!((llama[0], llama[2], llama[3]), (plain[0], plain[2] / 8.0, plain[3] / 8.0));
        assert!(plain[1] / 8.0 < llama[1] && llama[1] < plain[1]);
    }

    #[test]
    fn proportional_rope_rotates_the_first_pairs() {
        let plain = rope(RopeScaling::Default);
        let found = rope(RopeScaling::Proportional { factor: 2.0, rotated: 0.5 });
        assert_eq!(found, [plain[0] / 2.0, plain[1] / 2.0, 0.0, 0.0]);
    }

    #[test]
    fn yarn_keeps_fast_channels_and_divides_slow_ones() {
        let yarn = rope(RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: 4096.0,
            attention_factor: 1.0,
            all_dim_gain: 1.0,
            truncate: true,
        });
        let plain = rope(RopeScaling::Default);
        assert_eq!((yarn[0], yarn[3]), (plain[0], plain[3] / 4.0));
    }
}
