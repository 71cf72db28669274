//! RMS norm with a weight.

use crate::{ModelLoadError, Weights};
use ops::{NormWeight, Tensor};

/// `w · cast(x / sqrt(mean(x²) + eps))`
#[derive(Debug)]
pub(crate) struct RmsNormLayer {
    pub(crate) weight: Tensor, // [H]
    pub(crate) eps: f32,
}

impl RmsNormLayer {
    pub(crate) fn load(w: &Weights<'_>, eps: f32) -> Result<Self, ModelLoadError> {
        Ok(Self { weight: w.vector("weight")?, eps })
    }

    pub(crate) fn as_op(&self) -> NormWeight<'_> {
        NormWeight { weight: &self.weight, eps: self.eps }
    }
}
