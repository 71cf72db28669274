//! Arithmetic on pooled vectors: normalisation, cosine similarity, sigmoid. Sums are computed in f64, so that
//! the f32 results do not depend on the order of summation.

/// Lower bound of the norm by which a vector is divided.
const NORM_MIN: f64 = 1e-12;
/// Lower bound of the product of two norms, by which a cosine similarity divides.
const NORM_PRODUCT_MIN: f64 = 1e-8;

/// Truncates a pooled hidden state to its first `dimensions` channels; if `normalise` is set, scales it to
/// unit length.
pub(super) fn embedding(mut hidden: Vec<f32>, dimensions: usize, normalise: bool) -> Vec<f32> {
    hidden.truncate(dimensions);
    if normalise {
        let norm = dot(&hidden, &hidden).sqrt().max(NORM_MIN);
        for x in &mut hidden {
            *x = (f64::from(*x) / norm) as f32;
        }
    }
    hidden
}

/// Returns the cosine similarity of two vectors.
pub(super) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let norms = (dot(a, a) * dot(b, b)).sqrt().max(NORM_PRODUCT_MIN);
    (dot(a, b) / norms) as f32
}

/// Returns the logistic function of a logit: 1 / (1 + exp(−logit)).
pub(super) fn sigmoid(logit: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(logit)).exp())) as f32
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embeddings_are_cut_before_they_are_normalised() {
        assert_eq!(embedding(vec![3.0, 4.0, 12.0], 2, true), [0.6, 0.8]);
        assert_eq!(embedding(vec![3.0, 4.0, 12.0], 2, false), [3.0, 4.0]);
        assert_eq!(embedding(vec![0.0; 3], 3, true), [0.0; 3], "no division by zero");
    }

    #[test]
    fn similarity_ignores_lengths() {
        assert_eq!(cosine(&[1.0, 0.0], &[5.0, 0.0]), 1.0);
        assert_eq!(cosine(&[1.0, 1.0], &[-2.0, -2.0]), -1.0);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 0.0]), 0.0);
        assert_eq!((sigmoid(0.0), sigmoid(100.0), sigmoid(-200.0)), (0.5, 1.0, 0.0));
    }
}
