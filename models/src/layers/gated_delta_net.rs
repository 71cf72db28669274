//! Gated delta net: attention with a recurrent state of constant size (arXiv 2412.06464).

use super::{ResidualStream, RmsNormLayer, RowParallelLinear};
use crate::config::GatedDeltaConfig;
use crate::{ForwardContext, ForwardError, KvLayerIndex, ModelConfig, ModelLoadError, Weights};
use ops::{DeltaRuleParams, PackedLinear, Tensor};

/// Gated delta net of a decoder layer: `x += out_proj(norm(o) · silu(z))`, where `o` is the output of the gated delta
/// rule over `q`, `k` and `v`, which are the causal convolution of projections of `norm(x)`. Each rank has some key
/// heads, and the value heads that share them.
#[derive(Debug)]
pub(crate) struct GatedDeltaNet {
    /// Projections of queries, keys, values and gates `z`.
    qkvz: PackedLinear,
    /// Projections of the write strength and of the decay.
    gates: PackedLinear,
    conv: Tensor,    // f32 [width, channels]
    a_log: Tensor,   // f32 [value heads]
    dt_bias: Tensor, // f32 [value heads]
    norm: Tensor,    // f32 [value channels per head]
    eps: f32,
    out_proj: RowParallelLinear,
    /// Index of the layer in the state pool.
    layer: usize,
}

impl GatedDeltaNet {
    /// Loads the gated delta net of decoder layer `layer`.
    pub(crate) fn load(
        config: &ModelConfig,
        delta: &GatedDeltaConfig,
        w: &Weights<'_>,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let heads = w.ranks().key_heads(delta).map_err(|e| w.split("in_proj", e))?;
        let KvLayerIndex { layer, .. } = w.kv_layer(layer);
        Ok(Self {
            qkvz: w.delta_qkvz(delta, &heads)?,
            gates: w.delta_gates(delta, &heads)?,
            conv: w.conv_weight(delta, &heads)?,
            a_log: w.vector_f32("A_log")?,
            dt_bias: w.vector_f32("dt_bias")?,
            norm: w.vector_f32("norm.weight")?,
            eps: config.rms_eps,
            out_proj: RowParallelLinear::load(w, "out_proj", false)?,
            layer,
        })
    }

    /// Updates the residual stream `x`, and the recurrent states of the rows. If `logits_indices`, i32 `[rows]`, are
    /// given, only the rows of the tokens at these indices remain in the stream afterwards.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let (ops, layer) = (f.ops, self.layer);
        let h = x.normed(f, norm)?; // [tokens, hidden size]
        let qkvz = ops.linear(&h, &self.qkvz)?; // [tokens, q + k + v + z channels]
        let gates = ops.linear(&h, &self.gates)?; // [tokens, 2 · value heads]
        let qkv = ops.causal_convolution(&qkvz, &self.conv, layer, f.kv, f.batch)?;
        let params = DeltaRuleParams { a_log: &self.a_log, dt_bias: &self.dt_bias, layer };
        ops.store_replay_inputs(&qkvz, &qkv, &gates, &params, f.kv, f.batch)?;
        let o = ops.gated_delta_rule(&qkv, &gates, &params, f.kv, f.batch)?; // [tokens, v channels]
        let mut y = ops.gated_rms_norm(&o, &qkvz, &self.norm, self.eps)?; // [tokens, v channels]
        if let Some(rows) = logits_indices {
            x.retain_rows(f, rows)?; // [rows, hidden size]
            y = ops.gather_rows(&y, rows)?; // [rows, v channels]
        }
        self.out_proj.add_to(f, x, &y, None) // [tokens or rows, hidden size]; all-reduced over f.tp
    }
}
