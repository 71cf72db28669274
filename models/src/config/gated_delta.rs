//! Parser of the gated delta net layers of Qwen3-Next and Qwen3.5, as in transformers `configuration_qwen3_next.py` and
//! `configuration_qwen3_5.py`.

use super::json_fields::JsonFields;
use super::parse_config::{LAYER_LIMIT, WIDTH_LIMIT};
use super::{ModelArchitecture, ModelConfigError};
use std::ops::Range;

const TYPES: &str = "layer_types";
const LINEAR: &str = "linear_attention";
const FULL: &str = "full_attention";
/// Without a list of layer types, every n-th layer attends to the whole context.
const DEFAULT_INTERVAL: usize = 4;
const CONV_WIDTH_LIMIT: u64 = 64;
const KEY_DIM: &str = "linear_key_head_dim";
/// Channels per key head are a multiple of this number. GPUs with 64 lanes per wavefront need twice as many.
const KEY_DIM_UNIT: usize = 16;
/// Largest number of channels per key head that the kernels support.
const KEY_DIM_MAX: usize = 256;
const VALUE_DIM: &str = "linear_value_head_dim";
/// Channels per value head are a multiple of this number.
const VALUE_DIM_UNIT: usize = 8;

/// Gated delta net layers (arXiv 2412.06464) of a model whose other layers are attention layers with an output gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatedDeltaConfig {
    /// Number of key heads over all ranks, which are also the query heads.
    pub key_heads: usize,
    /// Number of value heads over all ranks. Successive value heads share a key head.
    pub value_heads: usize,
    /// Number of channels per query or key head.
    pub key_dim: usize,
    /// Number of channels per value head.
    pub value_dim: usize,
    /// Number of tokens that the causal convolution reads, the current token included.
    pub conv_width: usize,
    /// For each decoder layer, whether it is a gated delta net layer.
    pub layers: Vec<bool>,
    /// Whether the rows of the input projections are grouped by key head (Qwen3-Next).
    pub grouped_rows: bool,
}

impl GatedDeltaConfig {
    /// Reads the settings; `None` for architectures without such layers.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        layers: usize,
    ) -> Result<Option<Self>, ModelConfigError> {
        if !architecture.traits().has_gated_delta {
            return Ok(None);
        }
        let size = |field: &str, absent: usize| {
            Ok(fields.size_or_none(field, WIDTH_LIMIT)?.unwrap_or(absent))
        };
        let key_heads = size("linear_num_key_heads", 16)?;
        let value_heads = size("linear_num_value_heads", 32)?;
        if !value_heads.is_multiple_of(key_heads) {
            let detail = format!("{key_heads} does not divide {value_heads} value heads");
            return Err(fields.contradiction("linear_num_key_heads", detail));
        }
        const WIDTH: &str = "linear_conv_kernel_dim";
        let conv_width = fields.size_or_none(WIDTH, CONV_WIDTH_LIMIT)?.unwrap_or(4);
        if conv_width < 2 {
            return Err(fields.unsupported(WIDTH, "at least 2 is"));
        }
        let (key_dim, value_dim) = (size(KEY_DIM, 128)?, size(VALUE_DIM, 128)?);
        if !key_dim.is_multiple_of(KEY_DIM_UNIT) || key_dim > KEY_DIM_MAX {
            let why = format!("multiples of {KEY_DIM_UNIT} up to {KEY_DIM_MAX} are, not {key_dim}");
            return Err(fields.unsupported(KEY_DIM, &why));
        }
        if !value_dim.is_multiple_of(VALUE_DIM_UNIT) {
            let why = format!("multiples of {VALUE_DIM_UNIT} are, not {value_dim}");
            return Err(fields.unsupported(VALUE_DIM, &why));
        }
        check_gates(fields)?;
        Ok(Some(Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            conv_width,
            layers: delta_layers(fields, layers)?,
            grouped_rows: architecture == ModelArchitecture::Qwen3Next,
        }))
    }

    /// Whether decoder layer `i` is a gated delta net layer.
    #[must_use]
    pub fn is_delta(&self, i: usize) -> bool {
        self.layers.get(i).is_some_and(|delta| *delta)
    }

    /// Number of value heads per key head.
    #[must_use]
    pub fn heads_per_key(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Number of query channels, which is also the number of key channels, over all ranks.
    #[must_use]
    pub fn key_channels(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Number of value channels over all ranks.
    #[must_use]
    pub fn value_channels(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Number of channels of the causal convolution, over all ranks: queries, keys and values.
    #[must_use]
    pub fn conv_channels(&self) -> usize {
        2 * self.key_channels() + self.value_channels()
    }

    /// Ranges of the channels of the queries, keys and values of the key heads `heads`, in the convolution.
    pub(crate) fn conv_ranges(&self, heads: &Range<usize>) -> [Range<usize>; 3] {
        let (keys, key) = (self.key_channels(), self.key_dim);
        let value = self.heads_per_key() * self.value_dim;
        [(0, key), (keys, key), (2 * keys, value)]
            .map(|(first, each)| first + heads.start * each..first + heads.end * each)
    }
}

/// Checks the gates: of attention by a sigmoid, and of gated delta nets by SiLU, also called swish (vLLM
/// `qwen_gdn_linear_attn.py`).
fn check_gates(fields: &JsonFields) -> Result<(), ModelConfigError> {
    const DELTA_GATE: &str = "output_gate_type";
    if !fields.flag("attn_output_gate", true)? {
        return Err(fields.unsupported("attn_output_gate", "only true is"));
    }
    match fields.text(DELTA_GATE)? {
        None | Some("silu" | "swish") => Ok(()),
        Some(_) => Err(fields.unsupported(DELTA_GATE, "only silu and swish are")),
    }
}

/// Reads for each layer whether it is a gated delta net layer.
fn delta_layers(fields: &JsonFields, layers: usize) -> Result<Vec<bool>, ModelConfigError> {
    let Some(types) = fields.strings(TYPES)? else {
        let interval = fields.size_or_none("full_attention_interval", LAYER_LIMIT)?;
        let interval = interval.unwrap_or(DEFAULT_INTERVAL);
        if interval > layers {
            let detail = format!("{interval} exceeds num_hidden_layers {layers}");
            return Err(fields.contradiction("full_attention_interval", detail));
        }
        return Ok((0..layers).map(|i| !(i + 1).is_multiple_of(interval)).collect());
    };
    if let Some(layer) = types.iter().position(|kind| ![LINEAR, FULL].contains(kind)) {
        let why = format!("supported are {LINEAR} and {FULL}");
        return Err(fields.unsupported_entry(TYPES, layer, &why));
    }
    if types.len() != layers {
        let detail = format!("{} entries for {layers} layers", types.len());
        return Err(fields.contradiction(TYPES, detail));
    }
    if !types.contains(&FULL) {
        return Err(fields.unsupported(TYPES, "at least one layer must be full_attention"));
    }
    Ok(types.iter().map(|kind| *kind == LINEAR).collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parse, with};
    use super::*;
    use crate::ModelConfig;
    use crate::config::{NormWeightKind, RopeScaling};
    use crate::weight_table::{TensorSpec, tensors};
    use serde_json::{Value, json};

    /// Configuration of Qwen3-Next-80B-A3B, shortened.
    fn qwen3_next() -> Value {
        json!({
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false,
            "bos_token_id": 151_643, "decoder_sparse_step": 1, "eos_token_id": 151_645,
            "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262_144, "mlp_only_layers": [],
            "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16,
            "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
            "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 10_000_000,
            "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "vocab_size": 151_936
        })
    }

    /// Text part of Qwen3.5-35B-A3B, shortened.
    fn qwen35_moe() -> Value {
        let rope = json!({
            "mrope_interleaved": true, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10_000_000, "rope_type": "default"
        });
        let changes = json!({
            "architectures": ["Qwen3_5MoeForCausalLM"], "attn_output_gate": true,
            "intermediate_size": "REMOVE", "norm_topk_prob": "REMOVE",
            "decoder_sparse_step": "REMOVE", "mlp_only_layers": "REMOVE",
            "partial_rotary_factor": "REMOVE", "rope_theta": "REMOVE",
            "rope_scaling": "REMOVE", "rope_parameters": rope, "num_hidden_layers": 4,
            "mtp_num_hidden_layers": 1,
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL]
        });
        with(qwen3_next(), changes)
    }

    #[test]
    fn published_hybrid_configs_are_read() {
        let config = parse(&qwen3_next()).unwrap();
        let delta = config.gated_delta.as_ref().unwrap();
        assert_eq!((delta.key_heads, delta.value_heads, delta.conv_width), (16, 32, 4));
        assert_eq!((delta.conv_channels(), delta.grouped_rows), (8192, true));
        assert_eq!(delta.layers.iter().filter(|is_delta| !**is_delta).count(), 12);
        assert!(delta.is_delta(0) && !delta.is_delta(3) && !delta.is_delta(48));
        assert_eq!((config.head_dim, config.rotary(), config.rotated_channels()), (256, 64, 64));
        assert_eq!((config.rotary_rows(), &config.rope.scaling), (None, &RopeScaling::Default));
        assert_eq!(config.norm_weights(), NormWeightKind::ZeroCentred);
        let moe = config.moe.as_ref().unwrap();
        assert!(config.qk_norm() && moe.norm_topk_prob && moe.has_shared_gate);

        let config = parse(&qwen35_moe()).unwrap();
        let delta = config.gated_delta.as_ref().unwrap();
        assert_eq!(
            (&delta.layers[..], delta.grouped_rows),
            (&[true, true, true, false][..], false)
        );
        assert_eq!((config.rotary(), config.rope.theta), (64, 1e7));
        assert!(config.moe.as_ref().unwrap().norm_topk_prob);
        assert_eq!(delta.conv_ranges(&(4..8)), [512..1024, 2560..3072, 5120..6144]);
        let without_factor = json!({"rope_type": "default", "rope_theta": 1e7});
        let config = with(qwen35_moe(), json!({"rope_parameters": without_factor}));
        assert_eq!(parse(&config).unwrap().rotary(), 64, "0.25 is the default");
    }

    /// Configuration of Qwen3.8-2.4T-A95B-FP8, shortened: the fields of a text part, without the text part's object.
    fn qwen38() -> Value {
        let layer = |i: usize| if (i + 1).is_multiple_of(4) { FULL } else { LINEAR };
        let scales = json!({
            "act_per_tensor": false, "activation_scheme": "dynamic", "modules_to_not_convert":
            ["lm_head", "model.layers.0.linear_attn.in_proj_a", "mtp.fc"], "quant_method": "fp8",
            "weight_block_size": [128, 128], "weight_per_tensor": false
        });
        let changes = json!({
            "hidden_size": 8192, "layer_types": (0..92).map(layer).collect::<Vec<_>>(),
            "linear_num_value_heads": 128, "mamba_ssm_dtype": "float32",
            "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 2048,
            "mtp_use_dedicated_embeddings": false, "num_attention_heads": 64,
            "num_hidden_layers": 92, "num_key_value_heads": 4, "output_gate_type": "swish",
            "partial_rotary_factor": 0.25,
            "quantization_config": scales, "shared_expert_intermediate_size": 2048,
            "vocab_size": 248_320
        });
        with(qwen35_moe(), changes)
    }

    /// The number of weights, the MTP module included, is that of the published checkpoint: 4.89 TB in bf16.
    #[test]
    fn qwen38_config_has_the_published_shape() {
        let config = ModelConfig { load_mtp: true, ..parse(&qwen38()).unwrap() };
        let delta = config.gated_delta.as_ref().unwrap();
        let moe = config.moe.as_ref().unwrap();
        assert_eq!(config.architecture, ModelArchitecture::Qwen35Moe);
        assert_eq!(
            (config.layers, delta.layers.iter().filter(|is_delta| **is_delta).count()),
            (92, 69)
        );
        assert_eq!((config.mtp_layers, config.kv_layers()), (1, 93));
        assert!(delta.is_delta(90) && !delta.is_delta(91));
        assert_eq!((delta.heads_per_key(), delta.conv_channels()), (8, 20_480));
        assert_eq!((moe.experts, moe.top_k, moe.dense_layers.len()), (512, 10, 0));
        assert!(moe.norm_topk_prob && moe.has_shared_gate);
        assert_eq!((config.rotary(), config.max_positions), (64, 262_144));
        let weights = tensors(&config);
        let elements: usize = weights.iter().map(TensorSpec::elements).sum();
        assert_eq!(elements / 1_000_000_000, 2446);
        let quantized =
            |name: &str| weights.iter().any(|w| w.name == name && w.quantized().is_some());
        assert!(quantized("model.layers.0.linear_attn.in_proj_qkv.weight"));
        assert!(quantized("model.layers.92.mlp.experts.511.down_proj.weight"));
        assert!(!quantized("model.layers.0.linear_attn.in_proj_a.weight"));
        assert!(!quantized("model.layers.92.eh_proj.weight"));
    }

    #[test]
    fn text_part_of_multimodal_hybrids_is_read() {
        let mut text = qwen35_moe();
        text.as_object_mut().unwrap().remove("architectures");
        text["model_type"] = json!("qwen3_5_moe_text");
        let outer = json!({
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text,
            "tie_word_embeddings": false
        });
        let config = parse(&outer).unwrap();
        assert_eq!(config.architecture, ModelArchitecture::Qwen35MoeMultimodal);
        assert!(config.gated_delta.is_some());
    }

    #[test]
    fn invalid_hybrid_configs_are_rejected() {
        for (changes, expected) in [
            (json!({"layer_types": [LINEAR, FULL]}), "2 entries for 4 layers"),
            (json!({"layer_types": [LINEAR, LINEAR, LINEAR, LINEAR]}), "at least one layer"),
            (json!({"layer_types": [LINEAR, FULL, FULL, "sliding_attention"]}), "supported are"),
            (json!({"linear_num_key_heads": 12}), "12 does not divide 32"),
            (json!({"linear_conv_kernel_dim": 1}), "at least 2"),
            (json!({"linear_key_head_dim": 24}), "linear_key_head_dim"),
            (json!({"linear_key_head_dim": 512}), "multiples of 16 up to 256 are, not 512"),
            (json!({"linear_value_head_dim": 20}), "linear_value_head_dim"),
            (json!({"attn_output_gate": false}), "attn_output_gate"),
            (json!({"output_gate_type": "sigmoid"}), "only silu and swish"),
            (json!({"norm_topk_prob": false}), "norm_topk_prob"),
            (json!({"attention_bias": true}), "attention_bias"),
        ] {
            let text = parse(&with(qwen35_moe(), changes)).unwrap_err().to_string();
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
