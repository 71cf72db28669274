//! Conversion of the JSON fields of `config.json` to [`ModelConfig`], including the differences between
//! architectures.
//!
//! The size limits of fields are far above the values of every published model, but low enough that products
//! of a few fields do not overflow u64 for any input.

use super::architecture_rules::AttentionBiasRule;
use super::gemma3::{self, logit_softcap};
use super::gemma4::{self, per_layer_input};
use super::heads::{HeadCounts, gqa_heads, mla_heads};
use super::json_fields::JsonFields;
use super::mla::mla;
use super::model_head::{CheckpointKind, matryoshka};
use super::moe::moe;
use super::rope::{RopeConfig, RopeScaling};
use super::text_part::text_fields;
use super::{
    ActivationMultipliers, CheckpointDType, Eagle3Config, GatedDeltaConfig, GenerationConfig,
    KvProjectionKind, LayerAttentionConfig, LayerShapeConfig, ModelArchitecture, ModelConfig,
    ModelConfigError, QuantizationConfig,
};

pub(super) const WIDTH_LIMIT: u64 = 1 << 20;
pub(super) const VOCAB_LIMIT: u64 = 1 << 24;
pub(super) const LAYER_LIMIT: u64 = 1 << 12;
pub(super) const POSITION_LIMIT: u64 = 1 << 24;

pub(super) fn config(
    fields: &JsonFields,
    generation: GenerationConfig,
) -> Result<ModelConfig, ModelConfigError> {
    let CheckpointKind { architecture, head } = CheckpointKind::read(fields)?;
    let fields = &text_fields(fields, architecture)?;
    let fields = &RopeConfig::with_defaults(fields, architecture)?;
    let fields = &gemma3::with_defaults(fields, architecture);
    let fields = &gemma4::with_defaults(fields, architecture);
    reject_unsupported(fields, architecture)?;
    gemma3::reject_unsupported(fields, architecture)?;
    gemma4::reject_unsupported(fields, architecture)?;
    reject_hybrid_layers(fields, architecture)?;
    let layers = fields.size("num_hidden_layers", LAYER_LIMIT)?;
    let hidden = fields.size("hidden_size", WIDTH_LIMIT)?;
    let mla = mla(fields, architecture)?;
    let heads = match &mla {
        Some(mla) => mla_heads(fields, mla)?,
        None => gqa_heads(fields, architecture, hidden)?,
    };
    let HeadCounts { query: heads, key_value: kv_heads, dim: head_dim } = heads;
    let max_positions = fields.size("max_position_embeddings", POSITION_LIMIT)?;
    let AttentionBiasFlags { qkv_bias, out_bias } = AttentionBiasFlags::read(fields, architecture)?;
    let vocab = fields.size("vocab_size", VOCAB_LIMIT)?;
    let config_eos = eos_tokens(fields, architecture, vocab)?;
    let mut config = ModelConfig {
        architecture,
        matryoshka: matryoshka(fields)?,
        vocab,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate: intermediate(fields, architecture)?,
        rms_eps: fields.positive("rms_norm_eps")? as f32,
        rope: RopeConfig::read(fields, architecture, max_positions)?,
        attention_temperature: RopeConfig::temperature(fields, architecture)?,
        nope_layers: nope_layers(fields, architecture, layers)?,
        layer_attention: None,
        layer_shapes: None,
        kv_projection: KvProjectionKind::Separate,
        per_layer_input: per_layer_input(fields, architecture)?,
        multipliers: ActivationMultipliers::read(fields, architecture, hidden)?,
        logit_softcap: logit_softcap(fields, architecture)?,
        max_positions,
        // If a checkpoint has no LM head, the model is treated as tied, so that no memory is allocated for an
        // LM head.
        tied: fields.flag("tie_word_embeddings", architecture.traits().ties_by_default)?
            || !head.has_lm_head(),
        head,
        qkv_bias,
        out_bias,
        mlp_bias: fields.flag(mlp_bias_field(architecture), false)?,
        mla,
        gated_delta: GatedDeltaConfig::read(fields, architecture, layers)?,
        mtp_layers: mtp_layers(fields, architecture)?,
        load_mtp: false,
        eagle: Eagle3Config::read(fields, architecture, hidden)?,
        moe: moe(fields, architecture, layers)?,
        quantization: QuantizationConfig::read(fields, architecture)?,
        dtype: dtype(fields)?,
        bos: generation.bos.or(fields.tokens("bos_token_id")?.first().copied()),
        eos: if generation.eos.is_empty() { config_eos } else { generation.eos.clone() },
        generation,
    };
    config.layer_attention = LayerAttentionConfig::read(fields, &config)?;
    config.layer_shapes = LayerShapeConfig::read(fields, &config)?;
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

/// Checks the number of channels that RoPE rotates, and the number of frequency divisors of longrope scaling.
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

/// Reads the EOS tokens, with the default of the architecture if the field is absent. The value null means no EOS token, as in
/// transformers. Default tokens outside of the vocabulary are omitted.
fn eos_tokens(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    vocab: usize,
) -> Result<Vec<u32>, ModelConfigError> {
    const FIELD: &str = "eos_token_id";
    if fields.value(FIELD).is_some() || fields.is_null(FIELD) {
        return fields.tokens(FIELD);
    }
    let is_in_vocabulary = |token: &u32| (*token as usize) < vocab;
    Ok(architecture.traits().eos_default.iter().copied().filter(is_in_vocabulary).collect())
}

/// Rejects fields that would change the arithmetic but are not supported for this architecture.
fn reject_unsupported(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<(), ModelConfigError> {
    let is_silu = |act: &str| act == "silu" || architecture.is_gemma();
    if fields.text("hidden_act")?.is_some_and(|act| !is_silu(act)) {
        return Err(fields.unsupported("hidden_act", "only silu is"));
    }
    if !fields.flag("is_causal", true)? {
        return Err(fields.unsupported("is_causal", "bidirectional attention is not"));
    }
    let traits = architecture.traits();
    if !traits.attention_bias.reads_field() && fields.flag("attention_bias", false)? {
        return Err(fields.unsupported("attention_bias", "this architecture does not read it"));
    }
    if fields.flag("lm_head_bias", false)? {
        return Err(fields.unsupported("lm_head_bias", "LM heads have no biases"));
    }
    if !traits.may_have_mlp_bias && fields.flag("mlp_bias", false)? {
        return Err(fields.unsupported("mlp_bias", "this architecture has no MLP biases"));
    }
    Ok(())
}

/// Which attention projections have biases.
struct AttentionBiasFlags {
    qkv_bias: bool,
    out_bias: bool,
}

impl AttentionBiasFlags {
    fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Self, ModelConfigError> {
        let both = |bias| Self { qkv_bias: bias, out_bias: bias };
        Ok(match architecture.traits().attention_bias {
            AttentionBiasRule::Fixed { qkv } => Self { qkv_bias: qkv, out_bias: false },
            AttentionBiasRule::QkvField => {
                Self { qkv_bias: fields.flag("qkv_bias", true)?, out_bias: false }
            }
            AttentionBiasRule::QkvOnly => {
                Self { qkv_bias: fields.flag("attention_bias", true)?, out_bias: false }
            }
            AttentionBiasRule::SharedField => both(fields.flag("use_bias", false)?),
            AttentionBiasRule::Field { default } => both(fields.flag("attention_bias", default)?),
            AttentionBiasRule::TwoFields => Self {
                qkv_bias: fields.flag("attention_bias", true)?,
                out_bias: fields.flag("attention_out_bias", false)?,
            },
        })
    }
}

/// Name of the field that tells whether the projections of dense MLPs have biases.
const fn mlp_bias_field(architecture: ModelArchitecture) -> &'static str {
    match architecture.traits().attention_bias {
        AttentionBiasRule::SharedField => "use_bias",
        _ => "mlp_bias",
    }
}

/// Reads the intermediate size of a dense MLP; 0 if every layer has experts and the field is absent.
fn intermediate(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<usize, ModelConfigError> {
    let field = architecture.traits().intermediate_field;
    let is_sparse = matches!(
        architecture,
        ModelArchitecture::Qwen35Moe | ModelArchitecture::Qwen35MoeMultimodal
    );
    if is_sparse {
        return Ok(fields.size_or_none(field, WIDTH_LIMIT)?.unwrap_or(0));
    }
    fields.size(field, WIDTH_LIMIT)
}

/// Rejects GraniteMoeHybrid configurations with experts or Mamba layers (transformers
/// `configuration_granitemoehybrid.py`): only the dense models with attention in every layer are supported.
fn reject_hybrid_layers(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<(), ModelConfigError> {
    if architecture != ModelArchitecture::GraniteMoeHybrid {
        return Ok(());
    }
    if fields.number_or_none("num_local_experts")? != Some(0.0) {
        return Err(fields.unsupported("num_local_experts", "only 0 is: dense models"));
    }
    const TYPES: &str = "layer_types";
    const WHY: &str = "every layer must be `attention`";
    let types = fields.strings(TYPES)?.unwrap_or_default();
    if types.is_empty() {
        return Err(fields.unsupported(TYPES, WHY));
    }
    let is_attention = |kind: &str| matches!(kind, "attention" | "full_attention");
    match types.iter().position(|kind| !is_attention(kind)) {
        Some(layer) => Err(fields.unsupported_entry(TYPES, layer, WHY)),
        None => Ok(()),
    }
}

/// Reads the indices of the layers without RoPE: the layers whose value in `no_rope_layers` is 0 or, if this
/// list is absent, every `no_rope_layer_interval`-th layer (transformers `configuration_smollm3.py`).
fn nope_layers(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    layers: usize,
) -> Result<Vec<usize>, ModelConfigError> {
    const FIELD: &str = "no_rope_layers";
    const DEFAULT_INTERVAL: usize = 4;
    match architecture {
        ModelArchitecture::SmolLm3 => {}
        // If `position_embedding_type` is not `rope`, no layer has RoPE (transformers
        // `modeling_granitemoehybrid.py`).
        ModelArchitecture::GraniteMoeHybrid
            if fields.text("position_embedding_type")? != Some("rope") =>
        {
            return Ok((0..layers).collect());
        }
        _ => return Ok(Vec::new()),
    }
    let list = "a list with 1 (RoPE) or 0 for each layer";
    let Some(flags) = fields.list(FIELD, list, "1 (RoPE) or 0", serde_json::Value::as_u64)? else {
        let interval = fields.size_or_none("no_rope_layer_interval", LAYER_LIMIT)?;
        let interval = interval.unwrap_or(DEFAULT_INTERVAL);
        return Ok((0..layers).filter(|i| (i + 1).is_multiple_of(interval)).collect());
    };
    if flags.len() < layers {
        let detail = format!("{} entries for {layers} layers", flags.len());
        return Err(fields.contradiction(FIELD, detail));
    }
    Ok((0..layers).filter(|i| flags[*i] == 0).collect())
}

/// Reads the number of MTP modules in the checkpoint: `num_nextn_predict_layers`, or `mtp_num_hidden_layers` of Qwen3-Next
/// and Qwen3.5, whose checkpoints have one if the field is absent.
fn mtp_layers(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<usize, ModelConfigError> {
    let (field, absent) = match architecture {
        ModelArchitecture::DeepseekV3 => ("num_nextn_predict_layers", 0),
        _ if architecture.traits().has_gated_delta => ("mtp_num_hidden_layers", 1),
        _ => return Ok(0),
    };
    Ok(fields.count_or_none(field, LAYER_LIMIT)?.unwrap_or(absent))
}

/// Reads the declared data type from `dtype` (new name) or `torch_dtype` (old name). The declared data type
/// is the default data type of the computation; weights are cast to the data type of the computation.
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
