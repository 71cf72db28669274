//! Conversion of the JSON fields of `config.json` to [`ModelConfig`], including the differences between
//! architectures.
//!
//! The size limits of fields are far above the values of every published model, but low enough that products
//! of a few fields do not overflow u64 for any input.

use super::json_fields::JsonFields;
use super::mla::mla;
use super::model_head::{CheckpointKind, matryoshka};
use super::moe::moe;
use super::rope::{RopeConfig, RopeScaling};
use super::text_part::text_fields;
use super::{
    ActivationMultipliers, CheckpointDType, Eagle3Config, GenerationConfig, MlaConfig,
    ModelArchitecture, ModelConfig, ModelConfigError, QuantizationConfig,
};

pub(super) const WIDTH_LIMIT: u64 = 1 << 20;
pub(super) const VOCAB_LIMIT: u64 = 1 << 24;
pub(super) const LAYER_LIMIT: u64 = 1 << 12;
const POSITION_LIMIT: u64 = 1 << 24;

/// Number of channels per head must be a multiple of this number, because of the layout of the KV pool.
const HEAD_UNIT: usize = 16;

pub(super) fn config(
    fields: &JsonFields,
    generation: GenerationConfig,
) -> Result<ModelConfig, ModelConfigError> {
    let CheckpointKind { architecture, head } = CheckpointKind::read(fields)?;
    let fields = &text_fields(fields, architecture)?;
    reject_unsupported(fields, architecture)?;
    let layers = fields.size("num_hidden_layers", LAYER_LIMIT)?;
    reject_sliding_windows(fields, architecture, layers)?;
    let hidden = fields.size("hidden_size", WIDTH_LIMIT)?;
    let mla = mla(fields, architecture)?;
    let (heads, kv_heads, head_dim) = match &mla {
        Some(mla) => mla_heads(fields, mla)?,
        None => gqa_heads(fields, hidden)?,
    };
    let max_positions = fields.size("max_position_embeddings", POSITION_LIMIT)?;
    let AttentionBiases { qkv_bias, out_bias } = AttentionBiases::read(fields, architecture)?;
    let config_eos = fields.tokens("eos_token_id")?;
    let config = ModelConfig {
        architecture,
        matryoshka: matryoshka(fields)?,
        vocab: fields.size("vocab_size", VOCAB_LIMIT)?,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate: fields.size("intermediate_size", WIDTH_LIMIT)?,
        rms_eps: fields.positive("rms_norm_eps")? as f32,
        rope: RopeConfig::read(fields, architecture, max_positions)?,
        nope_layers: nope_layers(fields, architecture, layers)?,
        multipliers: ActivationMultipliers::read(fields, architecture)?,
        max_positions,
        // A checkpoint without LM head needs no memory for one: the embedding is used in its place.
        tied: fields.flag("tie_word_embeddings", architecture.ties_by_default())?
            || !head.has_lm_head(),
        head,
        qkv_bias,
        out_bias,
        mlp_bias: fields.flag("mlp_bias", false)?,
        mla,
        mtp_layers: mtp_layers(fields, architecture)?,
        load_mtp: false,
        eagle: Eagle3Config::read(fields, architecture, hidden)?,
        moe: moe(fields, architecture, layers)?,
        quantization: QuantizationConfig::read(fields)?,
        dtype: dtype(fields)?,
        bos: generation.bos.or(fields.tokens("bos_token_id")?.first().copied()),
        eos: if generation.eos.is_empty() { config_eos } else { generation.eos.clone() },
        generation,
    };
    check_rotary(fields, &config)?;
    match config.context_max() {
        longest if longest as u64 > POSITION_LIMIT => {
            let detail =
                format!("extends the context to {longest} positions, above {POSITION_LIMIT}");
            Err(fields.contradiction("rope_scaling", detail))
        }
        _ => Ok(config),
    }
}

/// Checks the number of channels that RoPE rotates, and the number of factors of longrope scaling.
fn check_rotary(fields: &JsonFields, config: &ModelConfig) -> Result<(), ModelConfigError> {
    let rotated = config.rotated_channels();
    if rotated == 0 || !rotated.is_multiple_of(2) {
        let detail = format!("rotates {rotated} channels; RoPE needs a positive even number");
        return Err(fields.contradiction("partial_rotary_factor", detail));
    }
    let RopeScaling::LongRope { short_factors, long_factors, .. } = &config.rope.scaling else {
        return Ok(());
    };
    for (field, factors) in [("short_factor", short_factors), ("long_factor", long_factors)] {
        if factors.len() != rotated / 2 {
            let detail = format!("{} {field} entries for {} pairs", factors.len(), rotated / 2);
            return Err(fields.contradiction("rope_scaling", detail));
        }
    }
    Ok(())
}

/// Rejects fields that would change the arithmetic but are not supported for this architecture.
fn reject_unsupported(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<(), ModelConfigError> {
    if fields.text("hidden_act")?.is_some_and(|act| act != "silu") {
        return Err(fields.unsupported("hidden_act", "only silu is"));
    }
    if !fields.flag("is_causal", true)? {
        return Err(fields.unsupported("is_causal", "bidirectional attention is not"));
    }
    let fixed = matches!(
        architecture,
        ModelArchitecture::Mistral
            | ModelArchitecture::Mistral3
            | ModelArchitecture::Mixtral
            | ModelArchitecture::Qwen2
            | ModelArchitecture::Qwen2Moe
            | ModelArchitecture::DeepseekV2
            | ModelArchitecture::DeepseekV3
            | ModelArchitecture::Phi3
            | ModelArchitecture::LlamaEagle3
    );
    if fixed && fields.flag("attention_bias", false)? {
        return Err(
            fields.unsupported("attention_bias", "the biases of this architecture are fixed")
        );
    }
    if fields.flag("lm_head_bias", false)? {
        return Err(fields.unsupported("lm_head_bias", "LM heads have no biases"));
    }
    let may_have_mlp_bias = matches!(
        architecture,
        ModelArchitecture::Llama
            | ModelArchitecture::Granite
            | ModelArchitecture::SmolLm3
            | ModelArchitecture::SeedOss
    );
    if !may_have_mlp_bias && fields.flag("mlp_bias", false)? {
        return Err(fields.unsupported("mlp_bias", "this architecture has no MLP biases"));
    }
    Ok(())
}

/// Rejects configurations with sliding window attention, under the conditions under which transformers
/// applies a window.
fn reject_sliding_windows(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    layers: usize,
) -> Result<(), ModelConfigError> {
    const WHY: &str = "every layer must attend to the whole context";
    if has_sliding_window(fields, architecture, layers)? {
        return Err(fields.unsupported("sliding_window", WHY));
    }
    let types = fields.strings("layer_types")?.unwrap_or_default();
    if types.iter().any(|t| *t != "full_attention") {
        return Err(fields.unsupported("layer_types", WHY));
    }
    if !types.is_empty() && types.len() != layers {
        let detail = format!("{} entries for {layers} layers", types.len());
        return Err(fields.contradiction("layer_types", detail));
    }
    Ok(())
}

/// Whether fields other than `layer_types` make transformers apply a sliding window to at least one layer.
fn has_sliding_window(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    layers: usize,
) -> Result<bool, ModelConfigError> {
    let window = fields.size_or_none("sliding_window", POSITION_LIMIT)?;
    let has_window = window.is_some();
    Ok(match architecture {
        ModelArchitecture::Llama
        | ModelArchitecture::Granite
        | ModelArchitecture::SeedOss
        | ModelArchitecture::Qwen3Vl
        | ModelArchitecture::Qwen3VlMoe
        | ModelArchitecture::DeepseekV2
        | ModelArchitecture::DeepseekV3
        | ModelArchitecture::LlamaEagle3 => false,
        ModelArchitecture::SmolLm3 => {
            // Without `layer_types`, layers without RoPE have a window.
            let by_type = fields.value("layer_types").is_some();
            let has_nope_layers = !nope_layers(fields, architecture, layers)?.is_empty();
            !by_type && has_nope_layers && fields.flag("use_sliding_window", false)? && has_window
        }
        ModelArchitecture::Qwen2Moe => {
            // The first of every two layers below `max_window_layers` has a window.
            let below = fields.number_or_none("max_window_layers")?.unwrap_or(28.0);
            let by_type = fields.value("layer_types").is_some();
            !by_type && fields.flag("use_sliding_window", false)? && has_window && below > 0.0
        }
        // A window as long as the context includes every position.
        ModelArchitecture::Mistral
        | ModelArchitecture::Mistral3
        | ModelArchitecture::Mixtral
        | ModelArchitecture::Phi3 => {
            let positions = fields.size("max_position_embeddings", POSITION_LIMIT)?;
            let window = window.or(absent_window(fields, architecture));
            window.is_some_and(|window| window < positions)
        }
        ModelArchitecture::Qwen2 | ModelArchitecture::Qwen3 => {
            let from = fields.number_or_none("max_window_layers")?.unwrap_or(28.0);
            let by_type = fields.value("layer_types").is_some();
            let has_window_layers = !by_type && from < layers as f64;
            fields.flag("use_sliding_window", false)? && has_window && has_window_layers
        }
        ModelArchitecture::Qwen3Moe => fields.flag("use_sliding_window", false)? && has_window,
    })
}

impl ModelArchitecture {
    /// Value of `tie_word_embeddings` in configurations without it, as in transformers.
    const fn ties_by_default(self) -> bool {
        matches!(self, Self::SmolLm3)
    }
}

/// Window of Mistral configurations without the field `sliding_window` (transformers `configuration_mistral.py`); null
/// means no window.
fn absent_window(fields: &JsonFields, architecture: ModelArchitecture) -> Option<usize> {
    let is_mistral =
        matches!(architecture, ModelArchitecture::Mistral | ModelArchitecture::Mistral3);
    (is_mistral && !fields.is_null("sliding_window")).then_some(4096)
}

/// Which projections of attention have biases.
struct AttentionBiases {
    qkv_bias: bool,
    out_bias: bool,
}

impl AttentionBiases {
    fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Self, ModelConfigError> {
        let both = |bias| Self { qkv_bias: bias, out_bias: bias };
        Ok(match architecture {
            ModelArchitecture::Llama
            | ModelArchitecture::Qwen3
            | ModelArchitecture::Qwen3Moe
            | ModelArchitecture::Qwen3Vl
            | ModelArchitecture::Qwen3VlMoe
            | ModelArchitecture::Granite
            | ModelArchitecture::SmolLm3 => both(fields.flag("attention_bias", false)?),
            ModelArchitecture::SeedOss => Self {
                qkv_bias: fields.flag("attention_bias", true)?,
                out_bias: fields.flag("attention_out_bias", false)?,
            },
            ModelArchitecture::Qwen2 => Self { qkv_bias: true, out_bias: false },
            ModelArchitecture::Qwen2Moe => {
                Self { qkv_bias: fields.flag("qkv_bias", true)?, out_bias: false }
            }
            ModelArchitecture::Mistral
            | ModelArchitecture::Mistral3
            | ModelArchitecture::Mixtral
            | ModelArchitecture::DeepseekV2
            | ModelArchitecture::DeepseekV3
            | ModelArchitecture::Phi3
            | ModelArchitecture::LlamaEagle3 => both(false),
        })
    }
}

/// Reads the indices of layers without RoPE: those with 0 in `no_rope_layers`, or every `no_rope_layer_interval`-th
/// layer (transformers `configuration_smollm3.py`).
fn nope_layers(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    layers: usize,
) -> Result<Vec<usize>, ModelConfigError> {
    const FIELD: &str = "no_rope_layers";
    const DEFAULT_INTERVAL: usize = 4;
    if architecture != ModelArchitecture::SmolLm3 {
        return Ok(Vec::new());
    }
    let Some(value) = fields.value(FIELD) else {
        let interval = fields.size_or_none("no_rope_layer_interval", LAYER_LIMIT)?;
        let interval = interval.unwrap_or(DEFAULT_INTERVAL);
        return Ok((0..layers).filter(|i| (i + 1).is_multiple_of(interval)).collect());
    };
    let list = value.as_array().filter(|list| list.len() >= layers);
    let flags = list.and_then(|list| list.iter().map(serde_json::Value::as_u64).collect());
    let flags: Vec<u64> = flags
        .ok_or_else(|| fields.wrong(FIELD, "a list with 1 (RoPE) or 0 for each layer", value))?;
    Ok((0..layers).filter(|i| flags[*i] == 0).collect())
}

/// Reads the number of query heads, the number of KV heads and the number of channels per head.
fn gqa_heads(
    fields: &JsonFields,
    hidden: usize,
) -> Result<(usize, usize, usize), ModelConfigError> {
    let heads = fields.size("num_attention_heads", WIDTH_LIMIT)?;
    let kv_heads = fields.size_or_none("num_key_value_heads", WIDTH_LIMIT)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let detail = format!("{kv_heads} does not divide num_attention_heads {heads}");
        return Err(fields.contradiction("num_key_value_heads", detail));
    }
    let head_dim = fields.size_or_none("head_dim", WIDTH_LIMIT)?;
    if head_dim.is_none() && !hidden.is_multiple_of(heads) {
        let detail =
            format!("{heads} does not divide hidden_size {hidden}, and head_dim is absent");
        return Err(fields.contradiction("num_attention_heads", detail));
    }
    let head_dim = head_dim.unwrap_or(hidden / heads);
    if !head_dim.is_multiple_of(HEAD_UNIT) {
        let detail =
            format!("{head_dim} channels per head; kernels need a multiple of {HEAD_UNIT}");
        return Err(fields.contradiction("head_dim", detail));
    }
    Ok((heads, kv_heads, head_dim))
}

/// Reads the number of query heads, the number of KV heads and the number of channels per head for MLA, where
/// every query head has its own key and value.
fn mla_heads(
    fields: &JsonFields,
    mla: &MlaConfig,
) -> Result<(usize, usize, usize), ModelConfigError> {
    const FIELD: &str = "num_key_value_heads";
    let heads = fields.size("num_attention_heads", WIDTH_LIMIT)?;
    let kv_heads = fields.size_or_none(FIELD, WIDTH_LIMIT)?.unwrap_or(heads);
    if kv_heads != heads {
        let detail =
            format!("{kv_heads} KV heads for {heads} query heads; MLA has one per query head");
        return Err(fields.contradiction(FIELD, detail));
    }
    Ok((heads, heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
}

/// Reads the number of MTP modules in the checkpoint (`num_nextn_predict_layers`).
fn mtp_layers(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<usize, ModelConfigError> {
    if architecture != ModelArchitecture::DeepseekV3 {
        return Ok(0);
    }
    const FIELD: &str = "num_nextn_predict_layers";
    match fields.value(FIELD) {
        None => Ok(0),
        Some(value) if value.as_u64() == Some(0) => Ok(0),
        Some(_) => fields.size(FIELD, LAYER_LIMIT),
    }
}

/// Reads the declared data type from `dtype` (new name) or `torch_dtype` (old name). It is the default data
/// type of the computation; weights are cast to the data type of the computation.
fn dtype(fields: &JsonFields) -> Result<Option<CheckpointDType>, ModelConfigError> {
    fields.reject_disagreement("dtype", fields, "torch_dtype")?;
    let field = if fields.value("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(field)? {
        None => Ok(None),
        Some("float32") => Ok(Some(CheckpointDType::F32)),
        Some("bfloat16") => Ok(Some(CheckpointDType::BF16)),
        Some("float16") => Ok(Some(CheckpointDType::F16)),
        Some(_) => Err(fields.unsupported(field, "supported are float32, bfloat16 and float16")),
    }
}
