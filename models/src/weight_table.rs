//! The one table of weights: checkpoint name, shape, shard, and the values a synthetic checkpoint
//! gives it. Loader, coverage check and synth all read this table and nothing else.

use crate::ModelConfig;
use crate::config::ScaleGrid;
use crate::sharding::{HeadKind, ShardSpec, SplitUnit};
use crate::synth::SynthValues;

pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Of a checkpoint that drafts for another model, which may leave it to that one.
pub(crate) const EAGLE_EMBEDDING: &str = "embed_tokens.weight";
/// By draft, how far behind the same number its id is; whoever drafts any id needs none.
pub(crate) const DRAFT_TO_TARGET: &str = "d2t";
/// Where the layer of such a checkpoint lies, and what newer ones call it.
pub(crate) const MIDLAYER: [&str; 2] = ["midlayer.", "layers.0."];

/// One weight of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint; experts one by one.
    pub name: String,
    /// Stored shape, from the configuration.
    pub shape: Vec<usize>,
    /// How ranks split it.
    pub shard: ShardSpec,
    /// What a synthetic checkpoint fills it with.
    pub values: SynthValues,
    /// Of a weight that may be stored in fp8.
    pub scales: Option<ScaleSpec>,
    /// Whether a checkpoint may leave it out; synthetic ones do.
    pub optional: bool,
}

/// The scales of a weight that may be stored in fp8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Which elements share one.
    pub grid: ScaleGrid,
    /// Whether a synthetic checkpoint has them: the configuration does not leave this weight out.
    pub expected: bool,
}

impl TensorSpec {
    /// The shape as rows and columns; a vector has one column.
    #[must_use]
    pub fn matrix(&self) -> [usize; 2] {
        match self.shape[..] {
            [rows, cols] => [rows, cols],
            _ => [self.elements(), 1],
        }
    }

    /// Rows and columns of the scales of such a weight.
    #[must_use]
    pub fn scale_shape(&self, grid: ScaleGrid) -> [usize; 2] {
        let [rows, cols] = self.matrix();
        let each = grid.each(cols);
        [rows.div_ceil(each[0]), cols.div_ceil(each[1])]
    }

    /// Its scales, if a synthetic checkpoint stores it in fp8.
    #[must_use]
    pub fn quantized(&self) -> Option<&ScaleSpec> {
        self.scales.as_ref().filter(|scales| scales.expected)
    }

    /// Elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A dimension named by the configuration.
#[derive(Debug, Clone, Copy)]
enum ConfigDim {
    Vocab,
    Hidden,
    /// Two of them.
    TwoHidden,
    /// What queries, keys and values are made of.
    AttentionInput,
    /// Of the model that is drafted for.
    TargetHidden,
    /// Three of them.
    AuxStates,
    /// Ids that a draft can be.
    DraftVocab,
    /// All query heads.
    Query,
    /// All key heads, or all value heads.
    KeyValue,
    /// One head.
    Head,
    Intermediate,
    Experts,
    ExpertIntermediate,
    SharedIntermediate,
    /// All value heads of queries.
    Value,
    QLoraRank,
    KvLoraRank,
    /// A latent and the turned channels of a key.
    KvLoraRankPlusRope,
    /// What is made of a latent: of each head a key and a value.
    MlaKvUp,
}

/// Where a name sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameScope {
    Top,
    /// `model.layers.{i}.`
    Layer,
    /// The same, in layers with a dense MLP.
    Dense,
    /// The same, in layers with experts.
    Sparse,
    /// `model.layers.{i}.mlp.experts.{e}.`
    Expert,
    /// `model.layers.{i}.` of a draft layer, beside all that another layer has.
    Mtp,
    /// At the top of a checkpoint that drafts for another model.
    Eagle,
    /// `midlayer.` there, beside all that another layer has.
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

/// Each weight of every supported family; the last field says which configurations have it.
#[rustfmt::skip]
const TABLE: &[WeightTableEntry] = &[
    (NameScope::Top, EMBEDDING, &[ConfigDim::Vocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Embedding, always),
    (NameScope::Top, "model.norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Top, HEAD, &[ConfigDim::Vocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Linear, |c| !c.tied),

    (NameScope::Layer, "input_layernorm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Layer, "post_attention_layernorm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Layer, "self_attn.q_proj.weight", &[ConfigDim::Query, ConfigDim::AttentionInput], ShardSpec::Heads(HeadKind::Query), SynthValues::Linear, |c| !makes_queries(c)),
    (NameScope::Layer, "self_attn.k_proj.weight", &[ConfigDim::KeyValue, ConfigDim::AttentionInput], ShardSpec::Heads(HeadKind::KeyValue), SynthValues::Linear, |c| c.mla.is_none()),
    (NameScope::Layer, "self_attn.v_proj.weight", &[ConfigDim::KeyValue, ConfigDim::AttentionInput], ShardSpec::Heads(HeadKind::KeyValue), SynthValues::Linear, |c| c.mla.is_none()),
    (NameScope::Layer, "self_attn.q_a_proj.weight", &[ConfigDim::QLoraRank, ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Linear, makes_queries),
    (NameScope::Layer, "self_attn.q_a_layernorm.weight", &[ConfigDim::QLoraRank], ShardSpec::Replicated, SynthValues::Norm, makes_queries),
    (NameScope::Layer, "self_attn.q_b_proj.weight", &[ConfigDim::Query, ConfigDim::QLoraRank], ShardSpec::Heads(HeadKind::Query), SynthValues::Linear, makes_queries),
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
    (NameScope::Eagle, "fc_norm.0.weight", &[ConfigDim::TargetHidden], ShardSpec::Replicated, SynthValues::Norm, has_state_norms),
    (NameScope::Eagle, "fc_norm.1.weight", &[ConfigDim::TargetHidden], ShardSpec::Replicated, SynthValues::Norm, has_state_norms),
    (NameScope::Eagle, "fc_norm.2.weight", &[ConfigDim::TargetHidden], ShardSpec::Replicated, SynthValues::Norm, has_state_norms),
    (NameScope::Eagle, EAGLE_EMBEDDING, &[ConfigDim::Vocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Embedding, always),
    (NameScope::Eagle, "norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
    (NameScope::Eagle, HEAD, &[ConfigDim::DraftVocab, ConfigDim::Hidden], ShardSpec::VocabRows, SynthValues::Linear, always),
    (NameScope::Midlayer, "hidden_norm.weight", &[ConfigDim::Hidden], ShardSpec::Replicated, SynthValues::Norm, always),
];

fn always(_: &ModelConfig) -> bool {
    true
}

fn makes_queries(config: &ModelConfig) -> bool {
    config.mla.is_some_and(|latent| latent.q_lora_rank.is_some())
}

fn has_state_norms(config: &ModelConfig) -> bool {
    config.eagle.is_some_and(|eagle| eagle.aux_norms)
}

/// What the model that is drafted for has as well, or what says nothing.
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

/// Every weight that a checkpoint of this configuration holds, in a fixed order.
#[must_use]
pub fn tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    if config.eagle.is_some() {
        let [midlayer, _] = MIDLAYER;
        specs.extend(at(config, NameScope::Eagle, ""));
        for place in [NameScope::Midlayer, NameScope::Layer, NameScope::Dense] {
            specs.extend(at(config, place, midlayer));
        }
        return specs;
    }
    specs.extend(at(config, NameScope::Top, ""));
    for i in 0..config.kv_layers() {
        let layer = format!("model.layers.{i}.");
        if i >= config.layers {
            specs.extend(at(config, NameScope::Mtp, &layer));
        }
        specs.extend(at(config, NameScope::Layer, &layer));
        let Some(moe) = config.moe_at(i) else {
            specs.extend(at(config, NameScope::Dense, &layer));
            continue;
        };
        specs.extend(at(config, NameScope::Sparse, &layer));
        for e in 0..moe.experts {
            specs.extend(at(config, NameScope::Expert, &format!("{layer}mlp.experts.{e}.")));
        }
    }
    specs
}

/// What draft layers store a second time: the name, and the name of what it equals.
#[must_use]
pub fn mtp_copies(config: &ModelConfig) -> Vec<(String, &'static str)> {
    let head = if config.tied { EMBEDDING } else { HEAD };
    let of_layer = |i: usize| {
        [("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", head)]
            .map(|(copy, of)| (format!("model.layers.{i}.{copy}"), of))
    };
    (config.layers..config.layers + config.mtp_layers).flat_map(of_layer).collect()
}

fn at(config: &ModelConfig, place: NameScope, prefix: &str) -> impl Iterator<Item = TensorSpec> {
    let here = TABLE.iter().filter(move |entry| entry.0 == place && (entry.5)(config));
    here.map(move |(place, name, shape, shard, values, _)| {
        let name = format!("{prefix}{name}");
        TensorSpec {
            scales: scales(config, *place, &name, *values),
            optional: is_optional(config, &name),
            name,
            shape: shape.iter().map(|d| d.of(config)).collect(),
            shard: *shard,
            values: *values,
        }
    })
}

/// Linear layers may be quantised, but neither the head nor a router.
fn scales(
    config: &ModelConfig,
    place: NameScope,
    name: &str,
    values: SynthValues,
) -> Option<ScaleSpec> {
    let quantization = config.quantization.as_ref()?;
    let module = name.strip_suffix(".weight")?;
    (place != NameScope::Top && values == SynthValues::Linear).then(|| ScaleSpec {
        name: format!("{name}{}", quantization.suffix),
        grid: quantization.scales,
        // Published checkpoints in fp8 leave a draft layer's own projection as it is, without saying so.
        expected: place != NameScope::Mtp && !quantization.ignores(module),
    })
}

impl ConfigDim {
    fn of(self, config: &ModelConfig) -> usize {
        let (moe, latent, eagle) = (config.moe.as_ref(), config.mla, config.eagle);
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
            Self::QLoraRank => latent.and_then(|l| l.q_lora_rank).unwrap_or(0),
            Self::KvLoraRank => latent.map_or(0, |l| l.kv_lora_rank),
            Self::KvLoraRankPlusRope => latent.map_or(0, |l| l.kv_lora_rank + l.qk_rope_head_dim),
            Self::MlaKvUp => config.heads * latent.map_or(0, |l| l.qk_nope_head_dim + l.v_head_dim),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::Eagle3Config;
    use serde_json::json;
    use std::path::Path;

    /// The text of a configuration of 2 layers (one dense, one with experts if it has any).
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
    fn a_table_lists_what_a_checkpoint_holds() {
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
    fn mtp_checkpoint_has_one_layer_of_twice_the_inputs() {
        let mut config = tiny("LlamaForCausalLM");
        let [hidden, vocab] = [config.hidden, config.vocab];
        config.layers = 1;
        config.eagle = Some(Eagle3Config {
            target_hidden: 64,
            vocab: 100,
            aux_layers: None,
            aux_norms: true,
            normed_residual: false,
            carries_normed_state: false,
        });
        let specs = tensors(&config);
        assert_eq!(specs.len(), 5 + 3 + 1 + 9);
        let shape = |name: &str| &specs.iter().find(|s| s.name == name).unwrap().shape;
        assert_eq!(shape("midlayer.self_attn.k_proj.weight")[1], 2 * hidden);
        assert_eq!(shape("fc.weight"), &[hidden, 3 * 64]);
        assert_eq!((shape(HEAD), shape(DRAFT_TO_TARGET)), (&vec![100, hidden], &vec![100]));
        assert_eq!(shape(EAGLE_EMBEDDING), &[vocab, hidden]);
        let optional = |specs: &[TensorSpec]| specs.iter().filter(|s| s.optional).count();
        assert_eq!(optional(&specs), 0, "of other sizes, it has both itself");
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
