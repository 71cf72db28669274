//! Dimensions of the shapes in the weight table.

use crate::ModelConfig;
use crate::config::GatedDeltaConfig;

/// Dimension of a weight's shape, computed from the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) enum WeightDim {
    Vocab,
    /// One output: the label of a classification head, or the gate of a shared expert.
    One,
    Hidden,
    /// Two times the hidden size.
    TwoHidden,
    /// Input channels of the query, key and value projections: the hidden size, or two times the hidden size
    /// in EAGLE-3 draft models.
    AttentionInput,
    /// Hidden size of the target model of an EAGLE-3 draft model.
    TargetHidden,
    /// Channels of the three auxiliary hidden states that an EAGLE-3 draft model reads.
    AuxStates,
    /// Size of the draft vocabulary of an EAGLE-3 draft model.
    DraftVocab,
    /// Query channels of all query heads.
    Query,
    /// Channels of all key heads, or of all value heads.
    KeyValue,
    /// Query or key channels of one head.
    Head,
    /// Number of query heads.
    QueryHeads,
    /// Channels of the per-layer input of one layer.
    PerLayerInput,
    /// Channels of the per-layer inputs of all layers.
    PerLayerInputs,
    /// Number of rows of the embedding of the per-layer inputs.
    PerLayerVocab,
    Intermediate,
    Experts,
    ExpertIntermediate,
    SharedIntermediate,
    /// Value channels of all query heads.
    Value,
    QLoraRank,
    KvLoraRank,
    /// Compressed KV channels plus RoPE channels of the key.
    KvLoraRankPlusRope,
    /// Output channels of `kv_b_proj`: the key channels without RoPE and the value channels of all heads.
    MlaKvUp,
    /// Query channels of all query heads, and as many output gates.
    GatedQuery,
    /// Number of value heads of a gated delta net.
    DeltaHeads,
    /// Two times the number of value heads of a gated delta net.
    TwoDeltaHeads,
    /// Value channels of one head of a gated delta net.
    DeltaHead,
    /// Value channels of all heads of a gated delta net.
    DeltaValue,
    /// Query, key and value channels of all heads of a gated delta net.
    DeltaConv,
    /// Query, key, value and gate channels of all heads of a gated delta net.
    DeltaQkvz,
    /// Number of tokens that the causal convolution of a gated delta net reads.
    ConvWidth,
}

impl WeightDim {
    /// Size of the dimension in a model with this configuration; 0 if the model does not have the dimension.
    pub(super) fn of(self, config: &ModelConfig) -> usize {
        let (moe, mla, eagle) = (config.moe.as_ref(), config.mla, config.eagle);
        let per_layer = config.per_layer_input;
        let delta =
            |size: fn(&GatedDeltaConfig) -> usize| config.gated_delta.as_ref().map_or(0, size);
        match self {
            Self::Vocab => config.vocab,
            Self::One => 1,
            Self::Hidden => config.hidden,
            Self::TwoHidden => 2 * config.hidden,
            Self::AttentionInput => config.hidden * if eagle.is_some() { 2 } else { 1 },
            Self::TargetHidden => eagle.map_or(0, |e| e.target_hidden),
            Self::AuxStates => 3 * eagle.map_or(0, |e| e.target_hidden),
            Self::DraftVocab => eagle.map_or(0, |e| e.vocab),
            Self::Query => config.heads * config.head_dim,
            Self::KeyValue => config.kv_heads * config.head_dim,
            Self::Head => config.head_dim,
            Self::QueryHeads => config.heads,
            Self::PerLayerInput => per_layer.map_or(0, |p| p.channels),
            Self::PerLayerInputs => config.layers * per_layer.map_or(0, |p| p.channels),
            Self::PerLayerVocab => per_layer.map_or(0, |p| p.vocab),
            Self::Intermediate => config.intermediate,
            Self::Experts => moe.map_or(0, |m| m.experts),
            Self::ExpertIntermediate => moe.map_or(0, |m| m.intermediate),
            Self::SharedIntermediate => moe.map_or(0, |m| m.shared_intermediate),
            Self::Value => config.heads * config.value_dim(),
            Self::QLoraRank => mla.and_then(|l| l.q_lora_rank).unwrap_or(0),
            Self::KvLoraRank => mla.map_or(0, |l| l.kv_lora_rank),
            Self::KvLoraRankPlusRope => mla.map_or(0, |l| l.kv_lora_rank + l.qk_rope_head_dim),
            Self::GatedQuery => 2 * config.heads * config.head_dim,
            Self::DeltaHeads => delta(|d| d.value_heads),
            Self::TwoDeltaHeads => delta(|d| 2 * d.value_heads),
            Self::DeltaHead => delta(|d| d.value_dim),
            Self::DeltaValue => delta(GatedDeltaConfig::value_channels),
            Self::DeltaConv => delta(GatedDeltaConfig::conv_channels),
            Self::DeltaQkvz => delta(|d| d.conv_channels() + d.value_channels()),
            Self::ConvWidth => delta(|d| d.conv_width),
            Self::MlaKvUp => config.heads * mla.map_or(0, |l| l.qk_nope_head_dim + l.v_head_dim),
        }
    }
}
