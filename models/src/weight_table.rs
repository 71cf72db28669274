//! Table of all weights of all supported architectures: name in the checkpoint, shape, sharding, and
//! distribution of the values in a synthetic checkpoint. The weight loader, its check for missing and
//! unexpected tensors, and the writer of synthetic checkpoints all use this table.

mod weight_dim;

use self::weight_dim::WeightDim;
use crate::ModelConfig;
use crate::config::{
    KvProjectionKind, LayerQuantization, ModelHead, NormPlacement, NormWeightKind,
};
use crate::sharding::{AttentionHeadKind, ShardSpec, SplitUnit};
use crate::synth::SynthDistribution;
use crate::weights::family_name;

pub(crate) const HEAD: &str = "lm_head.weight";
/// Name of the embedding from which the per-layer inputs are read.
pub(crate) const PER_LAYER_EMBEDDING: &str = "model.embed_tokens_per_layer.weight";
/// Name of the classification head of checkpoints that score text pairs.
pub(crate) const SCORE: &str = "score.weight";
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the embedding in an EAGLE-3 checkpoint; if it is absent, the embedding of the target model is
/// used.
pub(crate) const EAGLE_EMBEDDING: &str = "embed_tokens.weight";
/// Name of the offsets from draft token ids to target token ids; absent if both models have the same
/// vocabulary.
pub(crate) const DRAFT_TO_TARGET: &str = "d2t";
/// Name prefix of the decoder layer in EAGLE-3 checkpoints: first of older checkpoints, then of newer
/// checkpoints.
pub(crate) const MIDLAYER: [&str; 2] = ["midlayer.", "layers.0."];

/// Name, shape, sharding and storage of one weight of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint. Each expert has its own entry, even if experts are stored fused.
    pub name: String,
    /// Shape of the whole weight over all ranks, computed from the configuration.
    pub shape: Vec<usize>,
    /// Rule by which the weight is split over the ranks.
    pub shard: ShardSpec,
    /// Distribution of the values in a synthetic checkpoint.
    pub values: SynthDistribution,
    /// Scales of the weight; `None` if the weight cannot be quantised.
    pub scales: Option<ScaleSpec>,
    /// Whether a checkpoint may omit the weight. Synthetic checkpoints omit optional weights.
    pub optional: bool,
    /// Decoder layer or MTP module of the weight; `None` outside of layers.
    pub layer: Option<usize>,
}

/// Metadata of the scales of a weight that may be quantised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleSpec {
    /// Quantisation format of the weight and of the activations.
    pub format: LayerQuantization,
    /// Whether a synthetic checkpoint stores the weight quantised with these scales; false if the configuration
    /// excludes the weight from quantisation.
    pub expected: bool,
}

impl TensorSpec {
    /// Number of rows and columns of the weight; a vector has one column.
    #[must_use]
    pub fn matrix(&self) -> [usize; 2] {
        match self.shape[..] {
            [rows, cols] => [rows, cols],
            _ => [self.elements(), 1],
        }
    }

    /// Number of rows and columns of the scales of this weight in the format `format`.
    #[must_use]
    pub fn scale_shape(&self, format: LayerQuantization) -> [usize; 2] {
        let [rows, cols] = self.matrix();
        let block = format.scales.block_shape([rows, cols]);
        [rows.div_ceil(block[0]), cols.div_ceil(block[1])]
    }

    /// Names under which checkpoints may store the scales of this weight in the format `format`. Synthetic
    /// checkpoints use the first name.
    pub fn scale_names(&self, format: LayerQuantization) -> impl Iterator<Item = String> {
        format.suffixes.iter().map(|suffix| format!("{}{suffix}", self.name))
    }

    /// Names under which checkpoints may store the static activation scale of this weight. Synthetic
    /// checkpoints use the first name.
    #[must_use]
    pub fn input_scale_names(&self) -> [String; 2] {
        let module = self.name.strip_suffix(".weight").unwrap_or(&self.name);
        ["input_scale", "activation_scale"].map(|scale| format!("{module}.{scale}"))
    }

    /// Scales of the weight; `None` if synthetic checkpoints store the weight unquantised.
    #[must_use]
    pub fn quantized(&self) -> Option<&ScaleSpec> {
        self.scales.as_ref().filter(|scales| scales.expected)
    }

    /// Whether checkpoints may store the weight in fp8.
    #[must_use]
    pub fn may_be_fp8(&self) -> bool {
        self.scales.as_ref().is_some_and(|scales| scales.format.is_fp8())
    }

    /// Scales of the weight; `None` if synthetic checkpoints do not store the weight in MXFP4.
    #[must_use]
    pub fn quantized_mxfp4(&self) -> Option<&ScaleSpec> {
        self.quantized().filter(|scales| !scales.format.is_fp8())
    }

    /// Number of elements of the weight.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Part of the model to which a weight belongs. It determines the name prefix of the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WeightScope {
    Top,
    /// Weight of every decoder layer, with the name prefix `model.layers.{i}.`
    Layer,
    /// Weight of layers with attention, with the name prefix `model.layers.{i}.`
    Attention,
    /// Weight of gated delta net layers, with the name prefix `model.layers.{i}.`
    Delta,
    /// Weight of layers with a dense MLP, with the name prefix `model.layers.{i}.`
    Dense,
    /// Weight of layers with experts, with the name prefix `model.layers.{i}.`
    Sparse,
    /// Weight of every routed expert, with the name prefix `model.layers.{i}.mlp.experts.{e}.`
    Expert,
    /// Weight of MTP modules in addition to the weights of a decoder layer, with the name prefix
    /// `model.layers.{i}.`
    Mtp,
    /// Weight of an EAGLE-3 draft model outside of its decoder layer, without name prefix.
    Eagle,
    /// Weight of the decoder layer of an EAGLE-3 draft model in addition to the weights of a Llama layer,
    /// with the name prefix `midlayer.`
    Midlayer,
}

/// Entry of the weight table: scope, name, shape, sharding, distribution of synthetic values, and a
/// condition that selects the configurations that have the weight.
type WeightTableEntry = (
    WeightScope,
    &'static str,
    &'static [WeightDim],
    ShardSpec,
    SynthDistribution,
    fn(&ModelConfig) -> bool,
);

/// Weights of all supported architectures; the last field of an entry selects the configurations that have
/// the weight.
#[rustfmt::skip]
const TABLE: &[WeightTableEntry] = &[
    (WeightScope::Top, EMBEDDING, &[WeightDim::Vocab, WeightDim::Hidden], ShardSpec::VocabRows, SynthDistribution::Embedding, always),
    (WeightScope::Top, "model.norm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),
    (WeightScope::Top, HEAD, &[WeightDim::Vocab, WeightDim::Hidden], ShardSpec::VocabRows, SynthDistribution::Linear, |c| !c.tied),
    (WeightScope::Top, SCORE, &[WeightDim::One, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, |c| matches!(c.head, ModelHead::Classifier { .. })),

    (WeightScope::Top, PER_LAYER_EMBEDDING, &[WeightDim::PerLayerVocab, WeightDim::PerLayerInputs], ShardSpec::VocabRows, SynthDistribution::Embedding, has_per_layer_input),
    (WeightScope::Top, "model.per_layer_model_projection.weight", &[WeightDim::PerLayerInputs, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, has_per_layer_input),
    (WeightScope::Top, "model.per_layer_projection_norm.weight", &[WeightDim::PerLayerInput], ShardSpec::Replicated, SynthDistribution::Norm, has_per_layer_input),

    (WeightScope::Layer, "input_layernorm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_input_norms),
    (WeightScope::Layer, "post_attention_layernorm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),
    (WeightScope::Layer, "pre_feedforward_layernorm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, |c| c.norm_placement() == NormPlacement::Both),
    (WeightScope::Layer, "post_feedforward_layernorm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_output_norms),
    (WeightScope::Layer, "layer_scalar", &[WeightDim::One], ShardSpec::Replicated, SynthDistribution::Norm, ModelConfig::has_layer_scalar),
    (WeightScope::Layer, "per_layer_input_gate.weight", &[WeightDim::PerLayerInput, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, has_per_layer_input),
    (WeightScope::Layer, "per_layer_projection.weight", &[WeightDim::Hidden, WeightDim::PerLayerInput], ShardSpec::Replicated, SynthDistribution::Linear, has_per_layer_input),
    (WeightScope::Layer, "post_per_layer_input_norm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_per_layer_input),
    (WeightScope::Attention, "self_attn.q_proj.weight", &[WeightDim::Query, WeightDim::AttentionInput], ShardSpec::Heads(AttentionHeadKind::Query), SynthDistribution::Linear, |c| !has_q_lora(c) && !c.has_output_gate()),
    (WeightScope::Attention, "self_attn.q_proj.weight", &[WeightDim::GatedQuery, WeightDim::AttentionInput], ShardSpec::Heads(AttentionHeadKind::GatedQuery), SynthDistribution::Linear, ModelConfig::has_output_gate),
    (WeightScope::Attention, "self_attn.k_proj.weight", &[WeightDim::KeyValue, WeightDim::AttentionInput], ShardSpec::Heads(AttentionHeadKind::KeyValue), SynthDistribution::Linear, has_keys),
    (WeightScope::Attention, "self_attn.v_proj.weight", &[WeightDim::KeyValue, WeightDim::AttentionInput], ShardSpec::Heads(AttentionHeadKind::KeyValue), SynthDistribution::Linear, has_values),
    (WeightScope::Attention, "self_attn.q_a_proj.weight", &[WeightDim::QLoraRank, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, has_q_lora),
    (WeightScope::Attention, "self_attn.q_a_layernorm.weight", &[WeightDim::QLoraRank], ShardSpec::Replicated, SynthDistribution::Norm, has_q_lora),
    (WeightScope::Attention, "self_attn.q_b_proj.weight", &[WeightDim::Query, WeightDim::QLoraRank], ShardSpec::Heads(AttentionHeadKind::Query), SynthDistribution::Linear, has_q_lora),
    (WeightScope::Attention, "self_attn.kv_a_proj_with_mqa.weight", &[WeightDim::KvLoraRankPlusRope, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, |c| c.mla.is_some()),
    (WeightScope::Attention, "self_attn.kv_a_layernorm.weight", &[WeightDim::KvLoraRank], ShardSpec::Replicated, SynthDistribution::Norm, |c| c.mla.is_some()),
    (WeightScope::Attention, "self_attn.kv_b_proj.weight", &[WeightDim::MlaKvUp, WeightDim::KvLoraRank], ShardSpec::Heads(AttentionHeadKind::MlaKvUp), SynthDistribution::Linear, |c| c.mla.is_some()),
    (WeightScope::Attention, "self_attn.o_proj.weight", &[WeightDim::Hidden, WeightDim::Value], ShardSpec::Rows(SplitUnit::Head), SynthDistribution::Linear, always),
    (WeightScope::Attention, "self_attn.q_proj.bias", &[WeightDim::Query], ShardSpec::Heads(AttentionHeadKind::Query), SynthDistribution::Bias, |c| c.qkv_bias),
    (WeightScope::Attention, "self_attn.k_proj.bias", &[WeightDim::KeyValue], ShardSpec::Heads(AttentionHeadKind::KeyValue), SynthDistribution::Bias, |c| c.qkv_bias && has_keys(c)),
    (WeightScope::Attention, "self_attn.v_proj.bias", &[WeightDim::KeyValue], ShardSpec::Heads(AttentionHeadKind::KeyValue), SynthDistribution::Bias, |c| c.qkv_bias && has_values(c)),
    (WeightScope::Attention, "self_attn.o_proj.bias", &[WeightDim::Hidden], ShardSpec::FirstRankOnly, SynthDistribution::Bias, |c| c.out_bias),
    (WeightScope::Attention, "self_attn.q_norm.weight", &[WeightDim::Head], ShardSpec::Replicated, SynthDistribution::Norm, ModelConfig::qk_norm),
    (WeightScope::Attention, "self_attn.k_norm.weight", &[WeightDim::Head], ShardSpec::Replicated, SynthDistribution::Norm, |c| c.qk_norm() && has_keys(c)),
    (WeightScope::Attention, "self_attn.q_norm.weight", &[WeightDim::Query], ShardSpec::Heads(AttentionHeadKind::Query), SynthDistribution::Norm, ModelConfig::full_qk_norm),
    (WeightScope::Attention, "self_attn.k_norm.weight", &[WeightDim::KeyValue], ShardSpec::Heads(AttentionHeadKind::KeyValue), SynthDistribution::Norm, ModelConfig::full_qk_norm),
    (WeightScope::Attention, "self_attn.sinks", &[WeightDim::QueryHeads], ShardSpec::Heads(AttentionHeadKind::Sink), SynthDistribution::Sink, ModelConfig::has_sinks),

    (WeightScope::Delta, "linear_attn.in_proj_qkvz.weight", &[WeightDim::DeltaQkvz, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, has_grouped_rows),
    (WeightScope::Delta, "linear_attn.in_proj_ba.weight", &[WeightDim::TwoDeltaHeads, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, has_grouped_rows),
    (WeightScope::Delta, "linear_attn.in_proj_qkv.weight", &[WeightDim::DeltaConv, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, |c| !has_grouped_rows(c)),
    (WeightScope::Delta, "linear_attn.in_proj_z.weight", &[WeightDim::DeltaValue, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, |c| !has_grouped_rows(c)),
    (WeightScope::Delta, "linear_attn.in_proj_b.weight", &[WeightDim::DeltaHeads, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, |c| !has_grouped_rows(c)),
    (WeightScope::Delta, "linear_attn.in_proj_a.weight", &[WeightDim::DeltaHeads, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, |c| !has_grouped_rows(c)),
    (WeightScope::Delta, "linear_attn.conv1d.weight", &[WeightDim::DeltaConv, WeightDim::One, WeightDim::ConvWidth], ShardSpec::Replicated, SynthDistribution::Embedding, always),
    (WeightScope::Delta, "linear_attn.A_log", &[WeightDim::DeltaHeads], ShardSpec::Heads(AttentionHeadKind::DeltaValue), SynthDistribution::Embedding, always),
    (WeightScope::Delta, "linear_attn.dt_bias", &[WeightDim::DeltaHeads], ShardSpec::Heads(AttentionHeadKind::DeltaValue), SynthDistribution::Bias, always),
    (WeightScope::Delta, "linear_attn.norm.weight", &[WeightDim::DeltaHead], ShardSpec::Replicated, SynthDistribution::UncentredNorm, always),
    (WeightScope::Delta, "linear_attn.out_proj.weight", &[WeightDim::Hidden, WeightDim::DeltaValue], ShardSpec::Rows(SplitUnit::DeltaKeyHead), SynthDistribution::Linear, always),

    (WeightScope::Dense, "mlp.gate_proj.weight", &[WeightDim::Intermediate, WeightDim::Hidden], ShardSpec::Cols, SynthDistribution::Linear, always),
    (WeightScope::Dense, "mlp.up_proj.weight", &[WeightDim::Intermediate, WeightDim::Hidden], ShardSpec::Cols, SynthDistribution::Linear, always),
    (WeightScope::Dense, "mlp.down_proj.weight", &[WeightDim::Hidden, WeightDim::Intermediate], ShardSpec::Rows(SplitUnit::Channel), SynthDistribution::Linear, always),
    (WeightScope::Dense, "mlp.gate_proj.bias", &[WeightDim::Intermediate], ShardSpec::Cols, SynthDistribution::Bias, |c| c.mlp_bias),
    (WeightScope::Dense, "mlp.up_proj.bias", &[WeightDim::Intermediate], ShardSpec::Cols, SynthDistribution::Bias, |c| c.mlp_bias),
    (WeightScope::Dense, "mlp.down_proj.bias", &[WeightDim::Hidden], ShardSpec::FirstRankOnly, SynthDistribution::Bias, |c| c.mlp_bias),

    (WeightScope::Sparse, "mlp.gate.weight", &[WeightDim::Experts, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Router, always),
    (WeightScope::Sparse, "mlp.gate.bias", &[WeightDim::Experts], ShardSpec::Replicated, SynthDistribution::Bias, has_expert_biases),
    (WeightScope::Sparse, "mlp.gate.e_score_correction_bias", &[WeightDim::Experts], ShardSpec::Replicated, SynthDistribution::Bias, |c| c.moe.as_ref().is_some_and(|m| m.has_correction_bias)),
    (WeightScope::Sparse, "router.scale", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_parallel_dense_mlp),
    (WeightScope::Sparse, "router.per_expert_scale", &[WeightDim::Experts], ShardSpec::Replicated, SynthDistribution::Norm, has_parallel_dense_mlp),
    (WeightScope::Sparse, "pre_feedforward_layernorm_2.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_parallel_dense_mlp),
    (WeightScope::Sparse, "post_feedforward_layernorm_1.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_parallel_dense_mlp),
    (WeightScope::Sparse, "post_feedforward_layernorm_2.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, has_parallel_dense_mlp),
    (WeightScope::Sparse, "mlp.shared_experts.gate_proj.weight", &[WeightDim::SharedIntermediate, WeightDim::Hidden], ShardSpec::Cols, SynthDistribution::Linear, has_shared),
    (WeightScope::Sparse, "mlp.shared_experts.up_proj.weight", &[WeightDim::SharedIntermediate, WeightDim::Hidden], ShardSpec::Cols, SynthDistribution::Linear, has_shared),
    (WeightScope::Sparse, "mlp.shared_experts.down_proj.weight", &[WeightDim::Hidden, WeightDim::SharedIntermediate], ShardSpec::Rows(SplitUnit::Channel), SynthDistribution::Linear, has_shared),
    (WeightScope::Sparse, "mlp.shared_expert.gate_proj.weight", &[WeightDim::SharedIntermediate, WeightDim::Hidden], ShardSpec::Cols, SynthDistribution::Linear, has_gated_shared),
    (WeightScope::Sparse, "mlp.shared_expert.up_proj.weight", &[WeightDim::SharedIntermediate, WeightDim::Hidden], ShardSpec::Cols, SynthDistribution::Linear, has_gated_shared),
    (WeightScope::Sparse, "mlp.shared_expert.down_proj.weight", &[WeightDim::Hidden, WeightDim::SharedIntermediate], ShardSpec::Rows(SplitUnit::Channel), SynthDistribution::Linear, has_gated_shared),
    (WeightScope::Sparse, "mlp.shared_expert_gate.weight", &[WeightDim::One, WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Linear, has_gated_shared),
    (WeightScope::Expert, "gate_proj.weight", &[WeightDim::ExpertIntermediate, WeightDim::Hidden], ShardSpec::ExpertCols, SynthDistribution::Linear, always),
    (WeightScope::Expert, "up_proj.weight", &[WeightDim::ExpertIntermediate, WeightDim::Hidden], ShardSpec::ExpertCols, SynthDistribution::Linear, always),
    (WeightScope::Expert, "down_proj.weight", &[WeightDim::Hidden, WeightDim::ExpertIntermediate], ShardSpec::ExpertRows, SynthDistribution::Linear, always),
    (WeightScope::Expert, "gate_proj.bias", &[WeightDim::ExpertIntermediate], ShardSpec::ExpertCols, SynthDistribution::Bias, has_expert_biases),
    (WeightScope::Expert, "up_proj.bias", &[WeightDim::ExpertIntermediate], ShardSpec::ExpertCols, SynthDistribution::Bias, has_expert_biases),
    (WeightScope::Expert, "down_proj.bias", &[WeightDim::Hidden], ShardSpec::ExpertFirstRank, SynthDistribution::Bias, has_expert_biases),

    (WeightScope::Mtp, "enorm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),
    (WeightScope::Mtp, "hnorm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),
    (WeightScope::Mtp, "eh_proj.weight", &[WeightDim::Hidden, WeightDim::TwoHidden], ShardSpec::Replicated, SynthDistribution::Linear, always),
    (WeightScope::Mtp, "shared_head.norm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),

    (WeightScope::Eagle, DRAFT_TO_TARGET, &[WeightDim::DraftVocab], ShardSpec::Replicated, SynthDistribution::Offsets, always),
    (WeightScope::Eagle, "fc.weight", &[WeightDim::Hidden, WeightDim::AuxStates], ShardSpec::Replicated, SynthDistribution::Linear, always),
    (WeightScope::Eagle, "fc_norm.0.weight", &[WeightDim::TargetHidden], ShardSpec::Replicated, SynthDistribution::Norm, has_fc_norm),
    (WeightScope::Eagle, "fc_norm.1.weight", &[WeightDim::TargetHidden], ShardSpec::Replicated, SynthDistribution::Norm, has_fc_norm),
    (WeightScope::Eagle, "fc_norm.2.weight", &[WeightDim::TargetHidden], ShardSpec::Replicated, SynthDistribution::Norm, has_fc_norm),
    (WeightScope::Eagle, EAGLE_EMBEDDING, &[WeightDim::Vocab, WeightDim::Hidden], ShardSpec::VocabRows, SynthDistribution::Embedding, always),
    (WeightScope::Eagle, "norm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),
    (WeightScope::Eagle, HEAD, &[WeightDim::DraftVocab, WeightDim::Hidden], ShardSpec::VocabRows, SynthDistribution::Linear, always),
    (WeightScope::Midlayer, "hidden_norm.weight", &[WeightDim::Hidden], ShardSpec::Replicated, SynthDistribution::Norm, always),
];

fn always(_: &ModelConfig) -> bool {
    true
}

/// Whether the layer projects keys.
fn has_keys(config: &ModelConfig) -> bool {
    config.mla.is_none() && config.kv_projection != KvProjectionKind::Absent
}

/// Whether the layer projects values.
fn has_values(config: &ModelConfig) -> bool {
    config.mla.is_none() && config.kv_projection == KvProjectionKind::Separate
}

fn has_per_layer_input(config: &ModelConfig) -> bool {
    config.per_layer_input.is_some()
}

fn has_parallel_dense_mlp(config: &ModelConfig) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.has_dense_mlp)
}

fn has_input_norms(config: &ModelConfig) -> bool {
    config.norm_placement() != NormPlacement::Output
}

fn has_output_norms(config: &ModelConfig) -> bool {
    config.norm_placement() != NormPlacement::Input
}

/// Distribution of the values of a weight of a model with this configuration.
fn synth_values(config: &ModelConfig, values: SynthDistribution) -> SynthDistribution {
    let is_centred = config.norm_weights() == NormWeightKind::ZeroCentred;
    if is_centred && values == SynthDistribution::Norm {
        SynthDistribution::CentredNorm
    } else {
        values
    }
}

fn has_q_lora(config: &ModelConfig) -> bool {
    config.mla.is_some_and(|mla| mla.q_lora_rank.is_some())
}

/// Whether the rows of the input projections of gated delta nets are grouped by key head.
fn has_grouped_rows(config: &ModelConfig) -> bool {
    config.gated_delta.as_ref().is_some_and(|delta| delta.grouped_rows)
}

fn has_fc_norm(config: &ModelConfig) -> bool {
    config.eagle.is_some_and(|eagle| eagle.fc_norm)
}

/// Whether an EAGLE-3 checkpoint may omit the weight `name`. The embedding is optional if the target model
/// has the same hidden size; the draft id offsets are optional if the draft vocabulary is as large as the
/// target vocabulary.
fn is_optional(config: &ModelConfig, name: &str) -> bool {
    let Some(eagle) = config.eagle else { return false };
    match name {
        EAGLE_EMBEDDING => eagle.target_hidden == config.hidden,
        DRAFT_TO_TARGET => eagle.vocab == config.vocab,
        _ => false,
    }
}

fn has_shared(config: &ModelConfig) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.shared_experts() > 0)
}

fn has_expert_biases(config: &ModelConfig) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.has_biases)
}

fn has_gated_shared(config: &ModelConfig) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.has_shared_gate)
}

/// All weights of a checkpoint with this configuration, in a fixed order.
#[must_use]
pub fn tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    if config.eagle.is_some() {
        return eagle_tensors(config);
    }
    let mut specs: Vec<TensorSpec> = specs_in(config, WeightScope::Top, "").collect();
    for layer in 0..config.kv_layers() {
        let of_layer = layer_tensors(config, layer).into_iter();
        specs.extend(of_layer.map(|spec| TensorSpec { layer: Some(layer), ..spec }));
    }
    specs
}

/// Weights of an EAGLE-3 draft model.
fn eagle_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let [midlayer, _] = MIDLAYER;
    let mut specs: Vec<TensorSpec> = specs_in(config, WeightScope::Eagle, "").collect();
    let scopes =
        [WeightScope::Midlayer, WeightScope::Layer, WeightScope::Attention, WeightScope::Dense];
    for scope in scopes {
        specs.extend(specs_in(config, scope, midlayer));
    }
    specs
}

/// Weights of a decoder layer, or of an MTP module if `layer` is at least the number of decoder layers.
fn layer_tensors(config: &ModelConfig, layer: usize) -> Vec<TensorSpec> {
    let config = &*config.at_layer(layer);
    let prefix = format!("model.layers.{layer}.");
    let mut specs = Vec::new();
    if layer >= config.layers {
        specs.extend(specs_in(config, WeightScope::Mtp, &prefix));
    }
    specs.extend(specs_in(config, WeightScope::Layer, &prefix));
    let is_recurrent = config.is_recurrent(layer);
    let mixer = if is_recurrent { WeightScope::Delta } else { WeightScope::Attention };
    specs.extend(specs_in(config, mixer, &prefix));
    let Some(moe) = config.moe_at(layer) else {
        specs.extend(specs_in(config, WeightScope::Dense, &prefix));
        return specs;
    };
    if moe.has_dense_mlp {
        specs.extend(specs_in(config, WeightScope::Dense, &prefix));
    }
    specs.extend(specs_in(config, WeightScope::Sparse, &prefix));
    for e in 0..moe.experts {
        let prefix = format!("{prefix}mlp.experts.{e}.");
        specs.extend(specs_in(config, WeightScope::Expert, &prefix));
    }
    specs
}

/// Returns the weights that MTP modules store as copies of weights of the target model, as pairs of the name
/// of the copy and the name of the original. MTP modules of Qwen3-Next and Qwen3.5 store no copies.
#[must_use]
pub fn mtp_copies(config: &ModelConfig) -> Vec<(String, &'static str)> {
    if config.gated_delta.is_some() {
        return Vec::new();
    }
    let head = if config.tied { EMBEDDING } else { HEAD };
    let of_layer = |i: usize| {
        [("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", head)]
            .map(|(copy, of)| (format!("model.layers.{i}.{copy}"), of))
    };
    (config.layers..config.layers + config.mtp_layers).flat_map(of_layer).collect()
}

fn specs_in(
    config: &ModelConfig,
    scope: WeightScope,
    prefix: &str,
) -> impl Iterator<Item = TensorSpec> {
    let entries = TABLE.iter().filter(move |entry| entry.0 == scope && (entry.5)(config));
    entries.map(move |(scope, name, shape, shard, values, _)| {
        let name = format!("{prefix}{name}");
        TensorSpec {
            scales: scales(config, *scope, &name, *values),
            optional: is_optional(config, &name),
            name,
            shape: shape.iter().map(|d| d.of(config)).collect(),
            shard: *shard,
            values: synth_values(config, *values),
            layer: None,
        }
    })
}

/// Scales of a weight that may be quantised; `None` for the LM head, routers and all weights outside of
/// linear layers.
fn scales(
    config: &ModelConfig,
    scope: WeightScope,
    name: &str,
    values: SynthDistribution,
) -> Option<ScaleSpec> {
    let quantization = config.quantization.as_ref()?;
    let module = name.strip_suffix(".weight")?;
    let stored = stored_modules(config, module);
    let names: Vec<&str> = stored.iter().map(String::as_str).collect();
    let format = quantization.of_layer(&names)?;
    (scope != WeightScope::Top && values == SynthDistribution::Linear).then(|| ScaleSpec {
        format,
        // In published fp8 checkpoints, `eh_proj` of an MTP module is not quantised, although the
        // configuration does not list it as excluded.
        expected: scope != WeightScope::Mtp && !names.iter().any(|name| quantization.ignores(name)),
    })
}

/// Module names under which a checkpoint may store the linear layer `module`: the canonical name, the name in
/// the model family, and the names of a fused tensor that contains the layer.
fn stored_modules(config: &ModelConfig, module: &str) -> Vec<String> {
    const FUSED: [(&str, &str); 5] = [
        (".q_proj", ".qkv_proj"),
        (".k_proj", ".qkv_proj"),
        (".v_proj", ".qkv_proj"),
        (".gate_proj", ".gate_up_proj"),
        (".up_proj", ".gate_up_proj"),
    ];
    let of_family = |module: &str| {
        let name = family_name(config, &format!("{module}."));
        name.trim_end_matches('.').to_owned()
    };
    let mut names = vec![module.to_owned(), of_family(module)];
    let fused = FUSED.iter().find_map(|(part, fused)| Some((module.strip_suffix(part)?, fused)));
    if let Some((parent, fused)) = fused {
        let name = format!("{parent}{fused}");
        names.extend([of_family(&name), name]);
    }
    names
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::Eagle3Config;
    use serde_json::json;
    use std::path::Path;

    /// JSON of a configuration with 2 layers. The first layer has a dense MLP; the second layer has experts
    /// if the architecture supports experts.
    pub(crate) fn tiny_json(architecture: &str) -> String {
        json!({
            "architectures": [architecture], "vocab_size": 272, "hidden_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 48, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 512, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "norm_topk_prob": true, "mlp_only_layers": [0],
            "eos_token_id": 1
        })
        .to_string()
    }

    pub(crate) fn tiny(architecture: &str) -> ModelConfig {
        ModelConfig::from_json(Path::new("config.json"), &tiny_json(architecture)).unwrap()
    }

    #[test]
    fn table_lists_the_weights_of_a_checkpoint() {
        let names = |config: &ModelConfig| -> Vec<String> {
            tensors(config).into_iter().map(|s| s.name).collect()
        };
        let mut config = tiny("LlamaForCausalLM");
        assert_eq!(names(&config).len(), 3 + 2 * 9);
        config.tied = true;
        assert!(!names(&config).contains(&"lm_head.weight".to_owned()));
        assert_eq!(names(&tiny("Qwen2ForCausalLM")).len(), 3 + 2 * 12);
        let moe = names(&tiny("Qwen3MoeForCausalLM"));
        assert_eq!(moe.len(), 3 + (8 + 3) + (8 + 1 + 4 * 3));
        assert!(moe.contains(&"model.layers.1.mlp.experts.3.down_proj.weight".to_owned()));
    }

    #[test]
    fn eagle3_layer_has_twice_the_inputs() {
        let mut config = tiny("LlamaForCausalLM");
        let [hidden, vocab] = [config.hidden, config.vocab];
        config.layers = 1;
        config.eagle = Some(Eagle3Config {
            target_hidden: 64,
            vocab: 100,
            aux_layers: None,
            fc_norm: true,
            norm_before_residual: false,
            norm_output: false,
        });
        let specs = tensors(&config);
        assert_eq!(specs.len(), 5 + 3 + 1 + 9);
        let shape = |name: &str| &specs.iter().find(|s| s.name == name).unwrap().shape;
        assert_eq!(shape("midlayer.self_attn.k_proj.weight")[1], 2 * hidden);
        assert_eq!(shape("fc.weight"), &[hidden, 3 * 64]);
        assert_eq!((shape(HEAD), shape(DRAFT_TO_TARGET)), (&vec![100, hidden], &vec![100]));
        assert_eq!(shape(EAGLE_EMBEDDING), &[vocab, hidden]);
        let optional = |specs: &[TensorSpec]| specs.iter().filter(|s| s.optional).count();
        assert_eq!(optional(&specs), 0, "other sizes need both weights");
        config.eagle = config.eagle.map(|e| Eagle3Config { target_hidden: hidden, vocab, ..e });
        assert_eq!(optional(&tensors(&config)), 2);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = tensors(&tiny("Qwen3MoeForCausalLM"));
        names.sort_by(|a, b| a.name.cmp(&b.name));
        assert!(names.windows(2).all(|w| w[0].name != w[1].name));
    }
}
