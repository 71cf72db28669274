//! Parser of the MoE settings in `config.json`: experts, routers and group-limited routing.

use super::json_fields::JsonFields;
use super::parse_config::{LAYER_LIMIT, WIDTH_LIMIT};
use super::{ModelArchitecture, ModelConfigError, MoeConfig};
use ops::{ExpertGroups, GateActivation, GroupScoreFunction, RouterScoreFunction};

const EXPERT_LIMIT: u64 = 1 << 14;
/// Number of routed experts per token, in most architectures.
const PER_TOKEN: &str = "num_experts_per_tok";
/// Maximum number of experts, summed over all layers. It limits the weight table, which has three entries per
/// expert.
const ALL_EXPERTS_LIMIT: usize = 1 << 18;

/// Reads the MoE settings; returns `None` for architectures without experts.
pub(super) fn moe(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    layers: usize,
) -> Result<Option<MoeConfig>, ModelConfigError> {
    let moe = match architecture {
        ModelArchitecture::Qwen2Moe => qwen2(fields, layers).map(Some),
        ModelArchitecture::Qwen3Moe => qwen3(fields, layers).map(Some),
        ModelArchitecture::Qwen3VlMoe => qwen3_vl(fields, layers).map(Some),
        ModelArchitecture::Qwen3Next => qwen3_next(fields, layers).map(Some),
        ModelArchitecture::Qwen35Moe | ModelArchitecture::Qwen35MoeMultimodal => {
            qwen35(fields, layers).map(Some)
        }
        ModelArchitecture::Mixtral => mixtral(fields).map(Some),
        ModelArchitecture::GptOss => gpt_oss(fields).map(Some),
        ModelArchitecture::Gemma4 | ModelArchitecture::Gemma4Multimodal => gemma4(fields),
        ModelArchitecture::DeepseekV2 | ModelArchitecture::DeepseekV3 => {
            deepseek(fields, architecture, layers).map(Some)
        }
        _ => Ok(None),
    }?;
    match &moe {
        Some(moe) if moe.experts * layers > ALL_EXPERTS_LIMIT => {
            let detail =
                format!("{} experts in {layers} layers, above {ALL_EXPERTS_LIMIT}", moe.experts);
            Err(fields.contradiction("num_hidden_layers", detail))
        }
        _ => Ok(moe),
    }
}

fn qwen3(fields: &JsonFields, layers: usize) -> Result<MoeConfig, ModelConfigError> {
    let experts = expert_count(fields, "num_experts", "num_local_experts")?;
    Ok(MoeConfig {
        experts,
        top_k: experts_per_token(fields, PER_TOKEN, experts)?,
        intermediate: fields.size("moe_intermediate_size", WIDTH_LIMIT)?,
        shared_intermediate: 0,
        has_shared_gate: false,
        score: RouterScoreFunction::Softmax,
        has_correction_bias: false,
        expert_groups: None,
        norm_topk_prob: fields.flag("norm_topk_prob", false)?,
        scale: 1.0,
        sparse_step: fields.size_or_none("decoder_sparse_step", LAYER_LIMIT)?.unwrap_or(1),
        dense_layers: dense_layers(fields, layers)?,
        activation: GateActivation::Silu,
        has_biases: false,
        has_dense_mlp: false,
    })
}

/// Reads the MoE settings of Qwen2-MoE: the settings of Qwen3-MoE, and a shared expert with a gate.
fn qwen2(fields: &JsonFields, layers: usize) -> Result<MoeConfig, ModelConfigError> {
    Ok(MoeConfig {
        shared_intermediate: fields.size("shared_expert_intermediate_size", WIDTH_LIMIT)?,
        has_shared_gate: true,
        ..qwen3(fields, layers)?
    })
}

/// Reads the MoE settings of Qwen3-Next: those of Qwen2-MoE, except that the routing weights of a token's experts are
/// scaled to sum to 1 by default.
fn qwen3_next(fields: &JsonFields, layers: usize) -> Result<MoeConfig, ModelConfigError> {
    let norm_topk_prob = fields.flag("norm_topk_prob", true)?;
    Ok(MoeConfig { norm_topk_prob, ..qwen2(fields, layers)? })
}

/// Reads the MoE settings of Qwen3.5-MoE: those of Qwen2-MoE, but every layer has experts, and the routing weights of a
/// token's experts are always scaled to sum to 1.
fn qwen35(fields: &JsonFields, layers: usize) -> Result<MoeConfig, ModelConfigError> {
    if !fields.flag("norm_topk_prob", true)? {
        return Err(
            fields.unsupported("norm_topk_prob", "this architecture normalises the weights")
        );
    }
    let moe = qwen2(fields, layers)?;
    Ok(MoeConfig { norm_topk_prob: true, sparse_step: 1, dense_layers: Vec::new(), ..moe })
}

/// Reads the MoE settings of Qwen3-VL-MoE: the settings of Qwen3-MoE, but the routing weights of a token's
/// experts are always scaled to sum to 1.
fn qwen3_vl(fields: &JsonFields, layers: usize) -> Result<MoeConfig, ModelConfigError> {
    if !fields.flag("norm_topk_prob", true)? {
        return Err(
            fields.unsupported("norm_topk_prob", "this architecture normalises the weights")
        );
    }
    Ok(MoeConfig { norm_topk_prob: true, ..qwen3(fields, layers)? })
}

/// Reads the MoE settings of Mixtral, as transformers `modeling_mixtral.py` does: every layer has experts,
/// and the softmax over the logits of the selected experts yields their routing weights. This is equal to a
/// softmax over the logits of all experts, after which the routing weights of the selected experts are scaled
/// to sum to 1.
fn mixtral(fields: &JsonFields) -> Result<MoeConfig, ModelConfigError> {
    let experts = expert_count(fields, "num_local_experts", "num_experts")?;
    Ok(MoeConfig {
        experts,
        top_k: experts_per_token(fields, PER_TOKEN, experts)?,
        intermediate: fields.size("intermediate_size", WIDTH_LIMIT)?,
        shared_intermediate: 0,
        has_shared_gate: false,
        score: RouterScoreFunction::Softmax,
        has_correction_bias: false,
        expert_groups: None,
        norm_topk_prob: true,
        scale: 1.0,
        sparse_step: 1,
        dense_layers: Vec::new(),
        activation: GateActivation::Silu,
        has_biases: false,
        has_dense_mlp: false,
    })
}

/// Reads the MoE settings of gpt-oss, as transformers `modeling_gpt_oss.py` does: every layer has experts with
/// biases and a clamped activation, and the softmax over the logits of the selected experts yields their routing
/// weights.
fn gpt_oss(fields: &JsonFields) -> Result<MoeConfig, ModelConfigError> {
    const OTHER: &str = "experts_per_token";
    fields.reject_disagreement(PER_TOKEN, fields, OTHER)?;
    let alpha = fields.positive_or_none("swiglu_alpha")?.unwrap_or(1.702) as f32;
    let limit = fields.positive_or_none("swiglu_limit")?.unwrap_or(7.0) as f32;
    let activation = GateActivation::ClampedSilu { alpha, limit };
    Ok(MoeConfig { activation, has_biases: true, ..mixtral(fields)? })
}

/// Reads the MoE settings of Gemma 4, as transformers `modeling_gemma4.py` does: every layer has experts in parallel with a dense
/// MLP, or no layer has experts.
fn gemma4(fields: &JsonFields) -> Result<Option<MoeConfig>, ModelConfigError> {
    const TOP_K: &str = "top_k_experts";
    if !fields.flag("enable_moe_block", false)? {
        return Ok(None);
    }
    let experts = fields.size("num_experts", EXPERT_LIMIT)?;
    Ok(Some(MoeConfig {
        experts,
        top_k: experts_per_token(fields, TOP_K, experts)?,
        intermediate: fields.size("moe_intermediate_size", WIDTH_LIMIT)?,
        shared_intermediate: 0,
        has_shared_gate: false,
        score: RouterScoreFunction::Softmax,
        has_correction_bias: false,
        expert_groups: None,
        norm_topk_prob: true,
        scale: 1.0,
        sparse_step: 1,
        dense_layers: Vec::new(),
        activation: GateActivation::GeluTanh,
        has_biases: false,
        has_dense_mlp: true,
    }))
}

/// Reads the number of routed experts of a layer from `field`, or from the alternative spelling `other`.
fn expert_count(fields: &JsonFields, field: &str, other: &str) -> Result<usize, ModelConfigError> {
    fields.reject_disagreement(field, fields, other)?;
    match fields.size_or_none(field, EXPERT_LIMIT)? {
        Some(experts) => Ok(experts),
        None => fields.size_or_none(other, EXPERT_LIMIT)?.ok_or_else(|| fields.missing(field)),
    }
}

/// Reads the number of routed experts per token from `field`, and checks that it is at most `experts`.
fn experts_per_token(
    fields: &JsonFields,
    field: &str,
    experts: usize,
) -> Result<usize, ModelConfigError> {
    let top_k = fields.size(field, EXPERT_LIMIT)?;
    if top_k > experts {
        let detail = format!("{top_k} of {experts} experts");
        return Err(fields.contradiction(field, detail));
    }
    Ok(top_k)
}

/// Reads the MoE settings of DeepSeek models, as transformers `modeling_deepseek_v2.py` and
/// `modeling_deepseek_v3.py` do: the first layers have a dense MLP, all other layers have experts.
fn deepseek(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    layers: usize,
) -> Result<MoeConfig, ModelConfigError> {
    let v3 = architecture == ModelArchitecture::DeepseekV3;
    let score = if v3 { RouterScoreFunction::Sigmoid } else { RouterScoreFunction::Softmax };
    let name = if v3 { "sigmoid" } else { "softmax" };
    if fields.text("scoring_func")?.is_some_and(|score| score != name) {
        return Err(
            fields.unsupported("scoring_func", "this architecture requires another function")
        );
    }
    if fields.size_or_none("moe_layer_freq", LAYER_LIMIT)?.is_some_and(|step| step != 1) {
        return Err(fields.unsupported("moe_layer_freq", "only 1 is"));
    }
    let renormalise = fields.flag("norm_topk_prob", v3)?;
    if renormalise && !v3 {
        return Err(fields
            .unsupported("norm_topk_prob", "this architecture does not normalise the weights"));
    }
    let experts = fields.size("n_routed_experts", EXPERT_LIMIT)?;
    let groups = groups(fields, v3, experts)?;
    let selectable = groups.map_or(experts, |groups| experts / groups.count * groups.topk_group);
    let intermediate = fields.size("moe_intermediate_size", WIDTH_LIMIT)?;
    let shared = fields.size_or_none("n_shared_experts", EXPERT_LIMIT)?.unwrap_or(0);
    let dense = match fields.number_or_none("first_k_dense_replace")? {
        None => {
            if v3 {
                3
            } else {
                0
            }
        }
        Some(layers) => layers.max(0.0) as usize,
    };
    Ok(MoeConfig {
        experts,
        top_k: experts_per_token(fields, PER_TOKEN, selectable)?,
        intermediate,
        shared_intermediate: shared * intermediate,
        has_shared_gate: false,
        score,
        has_correction_bias: v3,
        expert_groups: groups,
        norm_topk_prob: renormalise,
        scale: fields.positive_or_none("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        sparse_step: 1,
        dense_layers: (0..dense.min(layers)).collect(),
        activation: GateActivation::Silu,
        has_biases: false,
        has_dense_mlp: false,
    })
}

/// Reads the expert groups of group-limited routing; returns `None` if the router selects from all experts.
fn groups(
    fields: &JsonFields,
    v3: bool,
    experts: usize,
) -> Result<Option<ExpertGroups>, ModelConfigError> {
    let score = match (fields.text("topk_method")?, v3) {
        (None | Some("greedy"), false) => return Ok(None),
        (Some("group_limited_greedy"), false) => GroupScoreFunction::Largest,
        (None | Some("noaux_tc"), true) => GroupScoreFunction::Top2Sum,
        _ => {
            return Err(
                fields.unsupported("topk_method", "this architecture requires another method")
            );
        }
    };
    let count = fields.size("n_group", EXPERT_LIMIT)?;
    let topk_group = fields.size("topk_group", EXPERT_LIMIT)?;
    let min_experts = if v3 { 2 } else { 1 };
    if !experts.is_multiple_of(count) || experts / count < min_experts {
        let detail = format!("{count} groups of {experts} experts");
        return Err(fields.contradiction("n_group", detail));
    }
    if topk_group > count {
        let detail = format!("{topk_group} of {count} groups");
        return Err(fields.contradiction("topk_group", detail));
    }
    Ok((topk_group < count).then_some(ExpertGroups { count, topk_group, score }))
}

fn dense_layers(fields: &JsonFields, layers: usize) -> Result<Vec<usize>, ModelConfigError> {
    const FIELD: &str = "mlp_only_layers";
    let number = serde_json::Value::as_u64;
    let numbers = fields.list(FIELD, "a list of layer numbers", "a layer number", number)?;
    let mut numbers = numbers.unwrap_or_default();
    numbers.sort_unstable();
    numbers.dedup();
    if let Some(invalid) = numbers.iter().find(|n| **n >= layers as u64) {
        let detail = format!("layer {invalid} of {layers} layers");
        return Err(fields.contradiction(FIELD, detail));
    }
    Ok(numbers.into_iter().map(|n| n as usize).collect())
}
