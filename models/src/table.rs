//! The one table of weights: checkpoint name, shape, shard, and the values a synthetic checkpoint
//! gives it. Loader, coverage check and synth all read this table and nothing else.

use crate::Config;
use crate::config::ScaleGrid;
use crate::sharding::{Heads, Shard, Unit};
use crate::synth::Values;

pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Of a checkpoint that drafts for another model, which may leave it to that one.
pub(crate) const EAGLE_EMBEDDING: &str = "embed_tokens.weight";
/// By draft, how far behind the same number its id is; whoever drafts any id needs none.
pub(crate) const OFFSETS: &str = "d2t";
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
    pub shard: Shard,
    /// What a synthetic checkpoint fills it with.
    pub values: Values,
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
    pub fn quantised(&self) -> Option<&ScaleSpec> {
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
enum Dim {
    Vocab,
    Hidden,
    /// Two of them.
    TwoHidden,
    /// What queries, keys and values are made of.
    Attended,
    /// Of the model that is drafted for.
    TargetHidden,
    /// Three of them.
    States,
    /// Ids that a draft can be.
    Drafts,
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
    QueryLatent,
    Latent,
    /// A latent and the turned channels of a key.
    LatentRow,
    /// What is made of a latent: of each head a key and a value.
    LatentHeads,
}

/// Where a name sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
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
    Draft,
    /// At the top of a checkpoint that drafts for another model.
    Eagle,
    /// `midlayer.` there, beside all that another layer has.
    Midlayer,
}

type Entry = (Place, &'static str, &'static [Dim], Shard, Values, fn(&Config) -> bool);

/// Each weight of every supported family; the last field says which configurations have it.
#[rustfmt::skip]
const TABLE: &[Entry] = &[
    (Place::Top, EMBEDDING, &[Dim::Vocab, Dim::Hidden], Shard::VocabRows, Values::Embedding, always),
    (Place::Top, "model.norm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
    (Place::Top, HEAD, &[Dim::Vocab, Dim::Hidden], Shard::VocabRows, Values::Linear, |c| !c.tied),

    (Place::Layer, "input_layernorm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
    (Place::Layer, "post_attention_layernorm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
    (Place::Layer, "self_attn.q_proj.weight", &[Dim::Query, Dim::Attended], Shard::Heads(Heads::Query), Values::Linear, |c| !makes_queries(c)),
    (Place::Layer, "self_attn.k_proj.weight", &[Dim::KeyValue, Dim::Attended], Shard::Heads(Heads::KeyValue), Values::Linear, |c| c.latent.is_none()),
    (Place::Layer, "self_attn.v_proj.weight", &[Dim::KeyValue, Dim::Attended], Shard::Heads(Heads::KeyValue), Values::Linear, |c| c.latent.is_none()),
    (Place::Layer, "self_attn.q_a_proj.weight", &[Dim::QueryLatent, Dim::Hidden], Shard::Replicated, Values::Linear, makes_queries),
    (Place::Layer, "self_attn.q_a_layernorm.weight", &[Dim::QueryLatent], Shard::Replicated, Values::Norm, makes_queries),
    (Place::Layer, "self_attn.q_b_proj.weight", &[Dim::Query, Dim::QueryLatent], Shard::Heads(Heads::Query), Values::Linear, makes_queries),
    (Place::Layer, "self_attn.kv_a_proj_with_mqa.weight", &[Dim::LatentRow, Dim::Hidden], Shard::Replicated, Values::Linear, |c| c.latent.is_some()),
    (Place::Layer, "self_attn.kv_a_layernorm.weight", &[Dim::Latent], Shard::Replicated, Values::Norm, |c| c.latent.is_some()),
    (Place::Layer, "self_attn.kv_b_proj.weight", &[Dim::LatentHeads, Dim::Latent], Shard::Heads(Heads::Latent), Values::Linear, |c| c.latent.is_some()),
    (Place::Layer, "self_attn.o_proj.weight", &[Dim::Hidden, Dim::Value], Shard::Rows(Unit::Head), Values::Linear, always),
    (Place::Layer, "self_attn.q_proj.bias", &[Dim::Query], Shard::Heads(Heads::Query), Values::Bias, |c| c.qkv_bias),
    (Place::Layer, "self_attn.k_proj.bias", &[Dim::KeyValue], Shard::Heads(Heads::KeyValue), Values::Bias, |c| c.qkv_bias),
    (Place::Layer, "self_attn.v_proj.bias", &[Dim::KeyValue], Shard::Heads(Heads::KeyValue), Values::Bias, |c| c.qkv_bias),
    (Place::Layer, "self_attn.o_proj.bias", &[Dim::Hidden], Shard::OnFirst, Values::Bias, |c| c.out_bias),
    (Place::Layer, "self_attn.q_norm.weight", &[Dim::Head], Shard::Replicated, Values::Norm, Config::qk_norm),
    (Place::Layer, "self_attn.k_norm.weight", &[Dim::Head], Shard::Replicated, Values::Norm, Config::qk_norm),

    (Place::Dense, "mlp.gate_proj.weight", &[Dim::Intermediate, Dim::Hidden], Shard::Cols, Values::Linear, always),
    (Place::Dense, "mlp.up_proj.weight", &[Dim::Intermediate, Dim::Hidden], Shard::Cols, Values::Linear, always),
    (Place::Dense, "mlp.down_proj.weight", &[Dim::Hidden, Dim::Intermediate], Shard::Rows(Unit::Channel), Values::Linear, always),
    (Place::Dense, "mlp.gate_proj.bias", &[Dim::Intermediate], Shard::Cols, Values::Bias, |c| c.mlp_bias),
    (Place::Dense, "mlp.up_proj.bias", &[Dim::Intermediate], Shard::Cols, Values::Bias, |c| c.mlp_bias),
    (Place::Dense, "mlp.down_proj.bias", &[Dim::Hidden], Shard::OnFirst, Values::Bias, |c| c.mlp_bias),

    (Place::Sparse, "mlp.gate.weight", &[Dim::Experts, Dim::Hidden], Shard::Replicated, Values::Router, always),
    (Place::Sparse, "mlp.gate.e_score_correction_bias", &[Dim::Experts], Shard::Replicated, Values::Bias, |c| c.moe.as_ref().is_some_and(|m| m.corrected)),
    (Place::Sparse, "mlp.shared_experts.gate_proj.weight", &[Dim::SharedIntermediate, Dim::Hidden], Shard::Cols, Values::Linear, has_shared),
    (Place::Sparse, "mlp.shared_experts.up_proj.weight", &[Dim::SharedIntermediate, Dim::Hidden], Shard::Cols, Values::Linear, has_shared),
    (Place::Sparse, "mlp.shared_experts.down_proj.weight", &[Dim::Hidden, Dim::SharedIntermediate], Shard::Rows(Unit::Channel), Values::Linear, has_shared),
    (Place::Expert, "gate_proj.weight", &[Dim::ExpertIntermediate, Dim::Hidden], Shard::ExpertCols, Values::Linear, always),
    (Place::Expert, "up_proj.weight", &[Dim::ExpertIntermediate, Dim::Hidden], Shard::ExpertCols, Values::Linear, always),
    (Place::Expert, "down_proj.weight", &[Dim::Hidden, Dim::ExpertIntermediate], Shard::ExpertRows, Values::Linear, always),

    (Place::Draft, "enorm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
    (Place::Draft, "hnorm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
    (Place::Draft, "eh_proj.weight", &[Dim::Hidden, Dim::TwoHidden], Shard::Replicated, Values::Linear, always),
    (Place::Draft, "shared_head.norm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),

    (Place::Eagle, OFFSETS, &[Dim::Drafts], Shard::Replicated, Values::Offsets, always),
    (Place::Eagle, "fc.weight", &[Dim::Hidden, Dim::States], Shard::Replicated, Values::Linear, always),
    (Place::Eagle, "fc_norm.0.weight", &[Dim::TargetHidden], Shard::Replicated, Values::Norm, has_state_norms),
    (Place::Eagle, "fc_norm.1.weight", &[Dim::TargetHidden], Shard::Replicated, Values::Norm, has_state_norms),
    (Place::Eagle, "fc_norm.2.weight", &[Dim::TargetHidden], Shard::Replicated, Values::Norm, has_state_norms),
    (Place::Eagle, EAGLE_EMBEDDING, &[Dim::Vocab, Dim::Hidden], Shard::VocabRows, Values::Embedding, always),
    (Place::Eagle, "norm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
    (Place::Eagle, HEAD, &[Dim::Drafts, Dim::Hidden], Shard::VocabRows, Values::Linear, always),
    (Place::Midlayer, "hidden_norm.weight", &[Dim::Hidden], Shard::Replicated, Values::Norm, always),
];

fn always(_: &Config) -> bool {
    true
}

fn makes_queries(config: &Config) -> bool {
    config.latent.is_some_and(|latent| latent.query.is_some())
}

fn has_state_norms(config: &Config) -> bool {
    config.eagle.is_some_and(|eagle| eagle.state_norms)
}

/// What the model that is drafted for has as well, or what says nothing.
fn is_optional(config: &Config, name: &str) -> bool {
    let Some(eagle) = config.eagle else { return false };
    match name {
        EAGLE_EMBEDDING => eagle.target_hidden == config.hidden,
        OFFSETS => eagle.vocab == config.vocab,
        _ => false,
    }
}

fn has_shared(config: &Config) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.shared_intermediate > 0)
}

/// Every weight that a checkpoint of this configuration holds, in a fixed order.
#[must_use]
pub fn tensors(config: &Config) -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    if config.eagle.is_some() {
        let [midlayer, _] = MIDLAYER;
        specs.extend(at(config, Place::Eagle, ""));
        for place in [Place::Midlayer, Place::Layer, Place::Dense] {
            specs.extend(at(config, place, midlayer));
        }
        return specs;
    }
    specs.extend(at(config, Place::Top, ""));
    for i in 0..config.kv_layers() {
        let layer = format!("model.layers.{i}.");
        if i >= config.layers {
            specs.extend(at(config, Place::Draft, &layer));
        }
        specs.extend(at(config, Place::Layer, &layer));
        let Some(moe) = config.moe_at(i) else {
            specs.extend(at(config, Place::Dense, &layer));
            continue;
        };
        specs.extend(at(config, Place::Sparse, &layer));
        for e in 0..moe.experts {
            specs.extend(at(config, Place::Expert, &format!("{layer}mlp.experts.{e}.")));
        }
    }
    specs
}

/// What draft layers store a second time: the name, and the name of what it equals.
#[must_use]
pub fn copies(config: &Config) -> Vec<(String, &'static str)> {
    let head = if config.tied { EMBEDDING } else { HEAD };
    let of_layer = |i: usize| {
        [("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", head)]
            .map(|(copy, of)| (format!("model.layers.{i}.{copy}"), of))
    };
    (config.layers..config.layers + config.draft_layers).flat_map(of_layer).collect()
}

fn at(config: &Config, place: Place, prefix: &str) -> impl Iterator<Item = TensorSpec> {
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
fn scales(config: &Config, place: Place, name: &str, values: Values) -> Option<ScaleSpec> {
    let quantization = config.quantization.as_ref()?;
    let module = name.strip_suffix(".weight")?;
    (place != Place::Top && values == Values::Linear).then(|| ScaleSpec {
        name: format!("{name}{}", quantization.suffix),
        grid: quantization.scales,
        // Published checkpoints in fp8 leave a draft layer's own projection as it is, without saying so.
        expected: place != Place::Draft && !quantization.ignores(module),
    })
}

impl Dim {
    fn of(self, config: &Config) -> usize {
        let (moe, latent, eagle) = (config.moe.as_ref(), config.latent, config.eagle);
        match self {
            Self::Vocab => config.vocab,
            Self::Hidden => config.hidden,
            Self::TwoHidden => 2 * config.hidden,
            Self::Attended => config.hidden * if eagle.is_some() { 2 } else { 1 },
            Self::TargetHidden => eagle.map_or(0, |e| e.target_hidden),
            Self::States => 3 * eagle.map_or(0, |e| e.target_hidden),
            Self::Drafts => eagle.map_or(0, |e| e.vocab),
            Self::Query => config.heads * config.head_dim,
            Self::KeyValue => config.kv_heads * config.head_dim,
            Self::Head => config.head_dim,
            Self::Intermediate => config.intermediate,
            Self::Experts => moe.map_or(0, |m| m.experts),
            Self::ExpertIntermediate => moe.map_or(0, |m| m.intermediate),
            Self::SharedIntermediate => moe.map_or(0, |m| m.shared_intermediate),
            Self::Value => config.heads * config.value_dim(),
            Self::QueryLatent => latent.and_then(|l| l.query).unwrap_or(0),
            Self::Latent => latent.map_or(0, |l| l.key_value),
            Self::LatentRow => latent.map_or(0, |l| l.key_value + l.turned),
            Self::LatentHeads => config.heads * latent.map_or(0, |l| l.unturned + l.value),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::EagleConfig;
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

    pub(crate) fn tiny(architecture: &str) -> Config {
        Config::from_json(Path::new("config.json"), &tiny_json(architecture)).unwrap()
    }

    #[test]
    fn a_table_lists_what_a_checkpoint_holds() {
        let names = |config: &Config| -> Vec<String> {
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
    fn a_checkpoint_that_drafts_has_one_layer_of_twice_the_inputs() {
        let mut config = tiny("LlamaForCausalLM");
        let [hidden, vocab] = [config.hidden, config.vocab];
        config.layers = 1;
        config.eagle = Some(EagleConfig {
            target_hidden: 64,
            vocab: 100,
            layers: None,
            state_norms: true,
            normed_residual: false,
            carries_normed: false,
        });
        let specs = tensors(&config);
        assert_eq!(specs.len(), 5 + 3 + 1 + 9);
        let shape = |name: &str| &specs.iter().find(|s| s.name == name).unwrap().shape;
        assert_eq!(shape("midlayer.self_attn.k_proj.weight")[1], 2 * hidden);
        assert_eq!(shape("fc.weight"), &[hidden, 3 * 64]);
        assert_eq!((shape(HEAD), shape(OFFSETS)), (&vec![100, hidden], &vec![100]));
        assert_eq!(shape(EAGLE_EMBEDDING), &[vocab, hidden]);
        let optional = |specs: &[TensorSpec]| specs.iter().filter(|s| s.optional).count();
        assert_eq!(optional(&specs), 0, "of other sizes, it has both itself");
        config.eagle = config.eagle.map(|e| EagleConfig { target_hidden: hidden, vocab, ..e });
        assert_eq!(optional(&tensors(&config)), 2);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = tensors(&tiny("Qwen3MoeForCausalLM"));
        names.sort_by(|a, b| a.name.cmp(&b.name));
        assert!(names.windows(2).all(|w| w[0].name != w[1].name));
    }
}
