//! The one table of weights: checkpoint name, shape, shard, and the values a synthetic checkpoint
//! gives it. Loader, coverage check and synth all read this table and nothing else.

use crate::Config;
use crate::config::ScaleGrid;
use crate::sharding::{Heads, Shard, Unit};
use crate::synth::Values;

pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";

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
    (Place::Layer, "self_attn.q_proj.weight", &[Dim::Query, Dim::Hidden], Shard::Heads(Heads::Query), Values::Linear, |c| !makes_queries(c)),
    (Place::Layer, "self_attn.k_proj.weight", &[Dim::KeyValue, Dim::Hidden], Shard::Heads(Heads::KeyValue), Values::Linear, |c| c.latent.is_none()),
    (Place::Layer, "self_attn.v_proj.weight", &[Dim::KeyValue, Dim::Hidden], Shard::Heads(Heads::KeyValue), Values::Linear, |c| c.latent.is_none()),
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
];

fn always(_: &Config) -> bool {
    true
}

fn makes_queries(config: &Config) -> bool {
    config.latent.is_some_and(|latent| latent.query.is_some())
}

fn has_shared(config: &Config) -> bool {
    config.moe.as_ref().is_some_and(|moe| moe.shared_intermediate > 0)
}

/// Every weight that a checkpoint of this configuration holds, in a fixed order.
#[must_use]
pub fn tensors(config: &Config) -> Vec<TensorSpec> {
    let mut specs = Vec::new();
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
        let (moe, latent) = (config.moe.as_ref(), config.latent);
        match self {
            Self::Vocab => config.vocab,
            Self::Hidden => config.hidden,
            Self::TwoHidden => 2 * config.hidden,
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
    fn names_are_unique() {
        let mut names: Vec<_> = tensors(&tiny("Qwen3MoeForCausalLM"));
        names.sort_by(|a, b| a.name.cmp(&b.name));
        assert!(names.windows(2).all(|w| w[0].name != w[1].name));
    }
}
