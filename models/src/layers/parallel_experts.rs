//! Experts in parallel with the dense MLP of a layer (transformers `modeling_gemma4.py`).

use super::{GatedMlp, MoeMlp, ResidualStream, RmsNormLayer, SublayerNorms};
use crate::config::MoeConfig;
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Mixture of experts in parallel with a dense MLP: `x += norm(norm_1(mlp(pre_norm(x))) + norm_2(experts(pre_norm_2(x))))`. The router
/// reads `scale · x / rms(x) / √hidden`; each expert has a factor of its output.
#[derive(Debug)]
pub(crate) struct ParallelExperts {
    experts: MoeMlp,
    router_norm: RmsNormLayer,
    /// Norm of the input of the experts.
    input_norm: RmsNormLayer,
    /// Norm of the output of the dense MLP.
    dense_norm: RmsNormLayer,
    /// Norm of the output of the experts.
    output_norm: RmsNormLayer,
}

impl ParallelExperts {
    /// Loads the experts of layer `layer`; weight names in `w` are relative to the name prefix of the layer.
    pub(crate) fn load(
        config: &ModelConfig,
        moe: &MoeConfig,
        w: &Weights<'_>,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let norm = |name: &str| RmsNormLayer::load(&w.at(name), config.stream_eps());
        let router = w.at("router");
        let factors = router.host_vector("per_expert_scale")?;
        let scale = router.scaled_norm("scale", (config.hidden as f64).powf(-0.5) as f32)?;
        Ok(Self {
            experts: MoeMlp::load_scaled(moe, &w.at("mlp"), layer, Some(&factors))?,
            router_norm: RmsNormLayer::with_weight(scale, config.stream_eps()),
            input_norm: norm("pre_feedforward_layernorm_2")?,
            dense_norm: norm("post_feedforward_layernorm_1")?,
            output_norm: norm("post_feedforward_layernorm_2")?,
        })
    }

    /// Updates the residual stream `x` with the outputs of `mlp` and of the experts. The stream contains the tokens with
    /// the indices `logits_indices`, i32 `[rows]`, or all tokens if `logits_indices` is `None`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        mlp: &GatedMlp,
        norms: &SublayerNorms,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let dense = mlp.output(f, x, norms.input.as_ref())?; // [tokens, hidden size]
        let (routed, h) = (x.normed(f, &self.router_norm)?, x.normed(f, &self.input_norm)?);
        let mut experts = self.experts.output(f, &h, &routed, logits_indices)?;
        f.tp.all_reduce(f.ops.stream(), experts.mat_mut()?)?;
        let [dense, experts] = [self.dense_norm.of(f, &dense)?, self.output_norm.of(f, &experts)?];
        let sum = f.ops.add(&dense, &experts)?;
        match &norms.output {
            Some(norm) => x.add_norm_of(f, &sum, norm)?,
            None => x.add_summed(sum),
        }
        Ok(())
    }
}
