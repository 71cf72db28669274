//! Table of all weights of all supported architectures: name in the checkpoint, shape, sharding, and
//! distribution of the values in a synthetic checkpoint. The loader, its coverage check and the writer of
//! synthetic checkpoints use this table only.

use crate::ModelConfig;
use crate::config::ScaleGrid;
use crate::sharding::{HeadKind, ShardSpec, SplitUnit};
use crate::synth::SynthValues;

pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the embedding in an EAGLE-3 checkpoint; a checkpoint without it uses the embedding of the target
/// model.
pub(crate) const EAGLE_EMBEDDING: &str = "embed_tokens.weight";
/// Name of the offsets from draft token ids to target token ids; absent if the draft vocabulary is the target
/// vocabulary.
pub(crate) const DRAFT_TO_TARGET: &str = "d2t";
/// Name prefix of the decoder layer in EAGLE-3 checkpoints: older checkpoints, then newer checkpoints.
pub(crate) const MIDLAYER: [&str; 2] = ["midlayer.", "layers.0."];

/// Metadata of one weight of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint. Each expert has its own entry, even if experts are stored fused.
    pub name: String,
    /// Shape of the whole weight, computed from the configuration.
    pub shape: Vec<usize>,
    /// Rule by which the weight is split over the ranks.
    pub shard: ShardSpec,
    /// Distribution of the values in a synthetic checkpoint.
    pub values: SynthValues,
    /// Scales of the weight; `None` if the weight cannot be stored in fp8.
    pub scales: Option<ScaleSpec>,
    /// Whether a checkpoint may omit the weight. Synthetic checkpoints omit it.
    pub optional: bool,
}

/// Metadata of the scales of a weight that may be stored in fp8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleSpec {
    /// Name of the scales in the checkpoint.
    pub name: String,
    /// Group of weights that share one scale.
    pub grid: ScaleGrid,
    /// Whether a synthetic checkpoint stores the weight in fp8 with these scales; false if the configuration
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

    /// Number of rows and columns of the scales of this weight.
    #[must_use]
    pub fn scale_shape(&self, grid: ScaleGrid) -> [usize; 2] {
        let [rows, cols] = self.matrix();
        let block = grid.block_shape(cols);
        [rows.div_ceil(block[0]), cols.div_ceil(block[1])]
    }

    /// Scales of the weight; `None` if synthetic checkpoints do not store the weight in fp8.
    #[must_use]
    pub fn quantized(&self) -> Option<&ScaleSpec> {
        self.scales.as_ref().filter(|scales| scales.expected)
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Dimension of a weight's shape, computed from the configuration.
#[derive(Debug, Clone, Copy)]
enum ConfigDim {
    Vocab,
    Hidden,
    /// Two times the hidden size.
    TwoHidden,
    /// Input channels of the query, key and value projections: the hidden size, or two times the hidden size
    /// in EAGLE-3.
    AttentionInput,
    /// Hidden size of the target model.
    TargetHidden,
    /// Channels of three auxiliary hidden states.
    AuxStates,
    /// Size of the draft vocabulary.
    DraftVocab,
    /// Channels of all query heads.
    Query,
    /// Channels of all key heads, or of all value heads.
    KeyValue,
    /// Channels of one head.
    Head,
    Intermediate,
    Experts,
    ExpertIntermediate,
    SharedIntermediate,
    /// Value channels of all query heads.
    Value,
    QLoraRank,
    KvLoraRank,
    /// Compressed KV channels and RoPE channels of the key.
    KvLoraRankPlusRope,
    /// Output channels of `kv_b_proj`: key channels without RoPE and value channels of each head.
    MlaKvUp,
}

/// Part of the model that has a weight. It determines the name prefix of the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameScope {
    Top,
    /// Every decoder layer, prefix `model.layers.{i}.`
    Layer,
    /// Layers with a dense MLP, prefix `model.layers.{i}.`
    Dense,
    /// Layers with experts, prefix `model.layers.{i}.`
    Sparse,
    /// Every routed expert, prefix `model.layers.{i}.mlp.experts.{e}.`
    Expert,
    /// MTP modules, in addition to the weights of a decoder layer, prefix `model.layers.{i}.`
    Mtp,
    /// EAGLE-3 draft model, without prefix.
    Eagle,
    /// Decoder layer of an EAGLE-3 draft model, in addition to the weights of a Llama layer, prefix
    /// `midlayer.`
    Midlayer,
}

type WeightTableEntry = (
    NameScope,
    &'static str,
    &'static [ConfigDim],
    ShardSpec,
    SynthValues,
    fn(&ModelConfig) -> bool,
);

/// Weights of all supported architectures; the last field of an entry selects the configurations that have
/// the weight.
#[rustfmt::skip]
const TABLE: &[WeightTableEntry] = &[
    (NameScope::Top, EMBEDDING, &[ConfigDim::Vocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Embedding, always),
    (NameScope::Top, "model.norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Top, HEAD, &[ConfigDim::Vocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Linear, |c| !c.tied),

    (NameScope::Layer, "input_layernorm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Layer, "post_attention_layernorm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Layer, "self_attn.q_proj.weight", &[ConfigDim::Query, ConfigDim::AttentionInput], ShardSpec::Heads(HeadKind::Query), SynthValues::Linear, |c| !has_q_lora(c)),
    (NameScope::Layer, "self_attn.k_proj.weight", &[ConfigDim::KeyValue, ConfigDim::AttentionInput], ShardSpec::Heads(HeadKind::KeyValue), SynthValues::Linear, |c| c.mla.is_none()),
    (NameScope::Layer, "self_attn.v_proj.weight", &[ConfigDim::KeyValue, ConfigDim::AttentionInput], ShardSpec::Heads(HeadKind::KeyValue), SynthValues::Linear, |c| c.mla.is_none()),
    (NameScope::Layer, "self_attn.q_a_proj.weight", &[ConfigDim::QLoraRank, ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Linear, has_q_lora),
    (NameScope::Layer, "self_attn.q_a_layernorm.weight", &[ConfigDim::QLoraRank], ShardSpec::Replicated, SynthValues::Norm, has_q_lora),
    (NameScope::Layer, "self_attn.q_b_proj.weight", &[ConfigDim::Query, ConfigDim::QLoraRank], ShardSpec::Heads(HeadKind::Query), SynthValues::Linear, has_q_lora),
    (NameScope::Layer, "self_attn.kv_a_proj_with_mqa.weight", &[ConfigDim::KvLoraRankPlusRope, ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Linear, |c| c.mla.is_some()),
    (NameScope::Layer, "self_attn.kv_a_layernorm.weight", &[ConfigDim::KvLoraRank], ShardSpec::Replicated, SynthValues::Norm, |c| c.mla.is_some()),
    (NameScope::Layer, "self_attn.kv_b_proj.weight", &[ConfigDim::MlaKvUp, ConfigDim::KvLoraRank], ShardSpec::Heads(HeadKind::MlaKvUp), SynthValues::Linear, |c| c.mla.is_some()),
    (NameScope::Layer, "self_attn.o_proj.weight", &[ConfigDim::Hidden, ConfigDim::Value], ShardSpec::Rows(SplitUnit::Head), SynthValues::Linear, always),
    (NameScope::Layer, "self_attn.q_proj.bias", &[ConfigDim::Query], ShardSpec::Heads(HeadKind::Query), SynthValues::Bias, |c| c.qkv_bias),
    (NameScope::Layer, "self_attn.k_proj.bias", &[ConfigDim::KeyValue], ShardSpec::Heads(HeadKind::KeyValue), SynthValues::Bias, |c| c.qkv_bias),
    (NameScope::Layer, "self_attn.v_proj.bias", &[ConfigDim::KeyValue], ShardSpec::Heads(HeadKind::KeyValue), SynthValues::Bias, |c| c.qkv_bias),
    (NameScope::Layer, "self_attn.o_proj.bias", &[ConfigDim::Hidden], ShardSpec::FirstRankOnly, SynthValues::Bias, |c| c.out_bias),
    (NameScope::Layer, "self_attn.q_norm.weight", &[ConfigDim::Head], ShardSpec::Replicated, SynthValues::Norm, ModelConfig::qk_norm),
    (NameScope::Layer, "self_attn.k_norm.weight", &[ConfigDim::Head], ShardSpec::Replicated, SynthValues::Norm, ModelConfig::qk_norm),

    (NameScope::Dense, "mlp.gate_proj.weight", &[ConfigDim::Intermediate, ConfigDim::Hidden], ShardSpec::Cols, SynthValues::Linear, always),
    (NameScope::Dense, "mlp.up_proj.weight", &[ConfigDim::Intermediate, ConfigDim::Hidden], ShardSpec::Cols, SynthValues::Linear, always),
    (NameScope::Dense, "mlp.down_proj.weight", &[ConfigDim::Hidden, ConfigDim::Intermediate], ShardSpec::Rows(SplitUnit::Channel), SynthValues::Linear, always),
    (NameScope::Dense, "mlp.gate_proj.bias", &[ConfigDim::Intermediate], ShardSpec::Cols, SynthValues::Bias, |c| c.mlp_bias),
    (NameScope::Dense, "mlp.up_proj.bias", &[ConfigDim::Intermediate], ShardSpec::Cols, SynthValues::Bias, |c| c.mlp_bias),
    (NameScope::Dense, "mlp.down_proj.bias", &[ConfigDim::Hidden], ShardSpec::FirstRankOnly, SynthValues::Bias, |c| c.mlp_bias),

    (NameScope::Sparse, "mlp.gate.weight", &[ConfigDim::Experts, ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Router, always),
    (NameScope::Sparse, "mlp.gate.e_score_correction_bias", &[ConfigDim::Experts], ShardSpec::Replicated, SynthValues::Bias, |c| c.moe.as_ref().is_some_and(|m| m.has_correction_bias)),
    (NameScope::Sparse, "mlp.shared_experts.gate_proj.weight", &[ConfigDim::SharedIntermediate, ConfigDim::Hidden], ShardSpec::Cols, SynthValues::Linear, has_shared),
    (NameScope::Sparse, "mlp.shared_experts.up_proj.weight", &[ConfigDim::SharedIntermediate, ConfigDim::Hidden], ShardSpec::Cols, SynthValues::Linear, has_shared),
    (NameScope::Sparse, "mlp.shared_experts.down_proj.weight", &[ConfigDim::Hidden, ConfigDim::SharedIntermediate], ShardSpec::Rows(SplitUnit::Channel), SynthValues::Linear, has_shared),
    (NameScope::Expert, "gate_proj.weight", &[ConfigDim::ExpertIntermediate, ConfigDim::Hidden], ShardSpec::ExpertCols, SynthValues::Linear, always),
    (NameScope::Expert, "up_proj.weight", &[ConfigDim::ExpertIntermediate, ConfigDim::Hidden], ShardSpec::ExpertCols, SynthValues::Linear, always),
    (NameScope::Expert, "down_proj.weight", &[ConfigDim::Hidden, ConfigDim::ExpertIntermediate], ShardSpec::ExpertRows, SynthValues::Linear, always),

    (NameScope::Mtp, "enorm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Mtp, "hnorm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Mtp, "eh_proj.weight", &[ConfigDim::Hidden, ConfigDim::TwoHidden], ShardSpec::Replicated, SynthValues::Linear, always),
    (NameScope::Mtp, "shared_head.norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),

    (NameScope::Eagle, DRAFT_TO_TARGET, &[ConfigDim::DraftVocab], ShardSpec::Replicated, SynthValues::Offsets, always),
    (NameScope::Eagle, "fc.weight", &[ConfigDim::Hidden, ConfigDim::AuxStates], ShardSpec::Replicated, SynthValues::Linear, always),
    (NameScope::Eagle, "fc_norm.0.weight", &[ConfigDim::TargetHidden], ShardSpec::Replicated, SynthValues::Norm, has_fc_norm),
    (NameScope::Eagle, "fc_norm.1.weight", &[ConfigDim::TargetHidden], ShardSpec::Replicated, SynthValues::Norm, has_fc_norm),
    (NameScope::Eagle, "fc_norm.2.weight", &[ConfigDim::TargetHidden], ShardSpec::Replicated, SynthValues::Norm, has_fc_norm),
    (NameScope::Eagle, EAGLE_EMBEDDING, &[ConfigDim::Vocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Embedding, always),
    (NameScope::Eagle, "norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Eagle, HEAD, &[ConfigDim::DraftVocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Linear, always),
    (NameScope::Midlayer, "hidden_norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
];

fn always(_: &ModelConfig) -> bool {
    true
}

fn has_q_lora(config: &ModelConfig) -> bool {
    config.mla.is_some_and(|mla| mla.q_lora_rank.is_some())
}

fn has_fc_norm(config: &ModelConfig) -> bool {
    config.eagle.is_some_and(|eagle| eagle.fc_norm)
}

/// Whether an EAGLE-3 checkpoint may omit the weight: the embedding if the target model has an embedding of
/// equal size, and the offsets if the draft vocabulary is as large as the target vocabulary.
fn is_optional(config: &ModelConfig, name: &str) -> bool {
    let Some(eagle) = config.eagle else { return false };
    match name {
        EAGLE_EMBEDDING => eagle.target_hidden == config.hidden,
        DRAFT_TO_TARGET => eagle.vocab == config.vocab,
        _ => false,
    }
}

fn has_shared(config: &ModelConfig) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.shared_intermediate > 0)
}

/// All weights of a checkpoint with this configuration, in a fixed order.
#[must_use]
pub fn tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    if config.eagle.is_some() {
        let [midlayer, _] = MIDLAYER;
        specs.extend(specs_in(config, NameScope::Eagle, ""));
        for scope in [NameScope::Midlayer, NameScope::Layer, NameScope::Dense] {
            specs.extend(specs_in(config, scope, midlayer));
        }
        return specs;
    }
    specs.extend(specs_in(config, NameScope::Top, ""));
    for i in 0..config.kv_layers() {
        let layer = format!("model.layers.{i}.");
        if i >= config.layers {
            specs.extend(specs_in(config, NameScope::Mtp, &layer));
        }
        specs.extend(specs_in(config, NameScope::Layer, &layer));
        let Some(moe) = config.moe_at(i) else {
            specs.extend(specs_in(config, NameScope::Dense, &layer));
            continue;
        };
        specs.extend(specs_in(config, NameScope::Sparse, &layer));
        for e in 0..moe.experts {
            specs.extend(specs_in(config, NameScope::Expert, &format!("{layer}mlp.experts.{e}.")));
        }
    }
    specs
}

/// Weights of which MTP modules store a copy: name of the copy, and name of the original.
#[must_use]
pub fn mtp_copies(config: &ModelConfig) -> Vec<(String, &'static str)> {
    let head = if config.tied { EMBEDDING } else { HEAD };
    let of_layer = |i: usize| {
        [("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", head)]
            .map(|(copy, of)| (format!("model.layers.{i}.{copy}"), of))
    };
    (config.layers..config.layers + config.mtp_layers).flat_map(of_layer).collect()
}

fn specs_in(
    config: &ModelConfig,
    scope: NameScope,
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
            values: *values,
        }
    })
}

/// Scales of a weight that may be quantised: weights of linear layers, except the LM head and routers.
fn scales(
    config: &ModelConfig,
    scope: NameScope,
    name: &str,
    values: SynthValues,
) -> Option<ScaleSpec> {
    let quantization = config.quantization.as_ref()?;
    let module = name.strip_suffix(".weight")?;
    (scope != NameScope::Top && values == SynthValues::Linear).then(|| ScaleSpec {
        name: format!("{name}{}", quantization.suffix),
        grid: quantization.scales,
        // In published fp8 checkpoints, `eh_proj` of an MTP module is not quantised, although the
        // configuration does not list it as excluded.
        expected: scope != NameScope::Mtp && !quantization.ignores(module),
    })
}

impl ConfigDim {
    fn of(self, config: &ModelConfig) -> usize {
        let (moe, mla, eagle) = (config.moe.as_ref(), config.mla, config.eagle);
        match self {
            Self::Vocab => config.vocab,
            Self::Hidden => config.hidden,
            Self::TwoHidden => 2 * config.hidden,
            Self::AttentionInput => config.hidden * if eagle.is_some() { 2 } else { 1 },
            Self::TargetHidden => eagle.map_or(0, |e| e.target_hidden),
            Self::AuxStates => 3 * eagle.map_or(0, |e| e.target_hidden),
            Self::DraftVocab => eagle.map_or(0, |e| e.vocab),
            Self::Query => config.heads * config.head_dim,
            Self::KeyValue => config.kv_heads * config.head_dim,
            Self::Head => config.head_dim,
            Self::Intermediate => config.intermediate,
            Self::Experts => moe.map_or(0, |m| m.experts),
            Self::ExpertIntermediate => moe.map_or(0, |m| m.intermediate),
            Self::SharedIntermediate => moe.map_or(0, |m| m.shared_intermediate),
            Self::Value => config.heads * config.value_dim(),
            Self::QLoraRank => mla.and_then(|l| l.q_lora_rank).unwrap_or(0),
            Self::KvLoraRank => mla.map_or(0, |l| l.kv_lora_rank),
            Self::KvLoraRankPlusRope => mla.map_or(0, |l| l.kv_lora_rank + l.qk_rope_head_dim),
            Self::MlaKvUp => config.heads * mla.map_or(0, |l| l.qk_nope_head_dim + l.v_head_dim),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::Eagle3Config;
    use serde_json::json;
    use std::path::Path;

    /// JSON of a configuration with 2 layers: the first is dense; the second has experts if the architecture
    /// has experts.
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
