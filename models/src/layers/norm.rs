//! RMS norm with a learned weight per channel.

use crate::config::NormPlacement;
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{RmsNormParams, Tensor};

/// RMS norm: `weight · cast(x / sqrt(mean(x²) + eps))`. The normalised value is computed in f32 and cast to
/// the dtype of `x` before the multiplication. If the weight is f32 and `x` is not, the product is computed in
/// f32 and cast once.
#[derive(Debug)]
pub(crate) struct RmsNormLayer {
    pub(crate) weight: Tensor, // [channels]
    pub(crate) eps: f32,
}

impl RmsNormLayer {
    pub(crate) fn load(w: &Weights<'_>, eps: f32) -> Result<Self, ModelLoadError> {
        Ok(Self { weight: w.norm_vector("weight")?, eps })
    }

    /// Creates a norm with the weight `weight`, f32 `[channels]`.
    pub(crate) fn with_weight(weight: Tensor, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// Computes the norm of each row of `x [rows, channels]`.
    pub(crate) fn of(&self, f: &ForwardContext<'_>, x: &Tensor) -> Result<Tensor, ForwardError> {
        Ok(f.ops.rms_norm(x, &self.weight, self.eps)?)
    }

    pub(crate) fn as_op(&self) -> RmsNormParams<'_> {
        RmsNormParams { weight: &self.weight, eps: self.eps }
    }
}

/// RMS norms before and after attention, or before and after the feed-forward part of a decoder layer.
#[derive(Debug)]
pub(crate) struct SublayerNorms {
    /// Norm of the residual stream before the first projection.
    pub(crate) input: Option<RmsNormLayer>,
    /// Norm of the output of attention or of the MLP before the output is added to the residual stream.
    pub(crate) output: Option<RmsNormLayer>,
}

/// Borrowed [`SublayerNorms`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct SublayerNormRefs<'a> {
    /// Norm of the residual stream before the first projection.
    pub(crate) input: Option<&'a RmsNormLayer>,
    /// Norm of the output of attention or of the MLP before the output is added to the residual stream.
    pub(crate) output: Option<&'a RmsNormLayer>,
}

impl SublayerNorms {
    /// Loads the norms of attention and of the feed-forward part of a layer; weight names in `w` are relative to the
    /// name prefix of the layer.
    pub(crate) fn load_both(
        config: &ModelConfig,
        w: &Weights<'_>,
    ) -> Result<[Self; 2], ModelLoadError> {
        let load = |name: &str| RmsNormLayer::load(&w.at(name), config.stream_eps()).map(Some);
        Ok(match config.norm_placement() {
            NormPlacement::Input => [
                Self { input: load("input_layernorm")?, output: None },
                Self { input: load("post_attention_layernorm")?, output: None },
            ],
            NormPlacement::Output => [
                Self { input: None, output: load("post_attention_layernorm")? },
                Self { input: None, output: load("post_feedforward_layernorm")? },
            ],
            NormPlacement::Both => [
                Self { input: load("input_layernorm")?, output: load("post_attention_layernorm")? },
                Self {
                    input: load("pre_feedforward_layernorm")?,
                    output: load("post_feedforward_layernorm")?,
                },
            ],
        })
    }
}

impl<'a> From<&'a SublayerNorms> for SublayerNormRefs<'a> {
    fn from(norms: &'a SublayerNorms) -> Self {
        Self { input: norms.input.as_ref(), output: norms.output.as_ref() }
    }
}

impl<'a> From<&'a RmsNormLayer> for SublayerNormRefs<'a> {
    fn from(norm: &'a RmsNormLayer) -> Self {
        Self { input: Some(norm), output: None }
    }
}
