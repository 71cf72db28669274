//! RMS norm with a learned weight per channel.

use crate::{ModelLoadError, Weights};
use ops::{NormWeight, Tensor};

/// RMS norm: `weight · cast(x / sqrt(mean(x²) + eps))`, computed in f32 and cast before the multiplication.
#[derive(Debug)]
pub(crate) struct RmsNormLayer {
    pub(crate) weight: Tensor, // [channels]
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
