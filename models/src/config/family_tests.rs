//! Tests of the fields that only some dense model families have.

use super::{
    ActivationMultipliers, AttentionTemperatureConfig, ModelConfig, NormPlacement, RopeScaling,
};
use serde_json::{Value, json};
use std::path::Path;

fn parse(architecture: &str, more: &Value) -> Result<ModelConfig, String> {
    let mut fields = json!({
        "architectures": [architecture], "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    });
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let config = ModelConfig::from_json(Path::new("config.json"), &fields.to_string());
    config.map_err(|error| error.to_string())
}

#[test]
fn granite_has_four_multipliers() {
    const NAME: &str = "GraniteForCausalLM";
    let fields = json!({"embedding_multiplier": 12, "residual_multiplier": 0.25,
        "attention_multiplier": 0.007_812_5, "logits_scaling": 16.0});
    let config = parse(NAME, &fields).unwrap();
    let multipliers = ActivationMultipliers {
        embedding: 12.0,
        rounds_embedding: false,
        residual: 0.25,
        attention: Some(0.007_812_5),
        logits: 16.0,
    };
    assert_eq!(config.multipliers, multipliers);
    assert_eq!((config.softmax_scale(), config.stream_eps()), (0.007_812_5, 16e-6));
    // Multipliers that are absent are 1, including the attention multiplier, as in transformers.
    assert_eq!(parse(NAME, &json!({})).unwrap().softmax_scale(), 1.0);
    let zero = parse(NAME, &json!({"logits_scaling": 0})).unwrap_err();
    assert!(zero.contains("logits_scaling"), "{zero}");
    assert_eq!(parse("LlamaForCausalLM", &fields).unwrap().softmax_scale(), 0.25);
}

#[test]
fn absent_eos_tokens_have_the_default_of_the_architecture() {
    let eos = |name: &str, fields: Value| parse(name, &fields).unwrap().eos;
    const GLM: [u32; 3] = [151_329, 151_336, 151_338];
    for (name, default) in [
        ("GlmForCausalLM", &GLM[..]),
        ("Glm4ForCausalLM", &GLM),
        ("Ernie4_5ForCausalLM", &[2]),
        ("Olmo2ForCausalLM", &[50_279]),
        ("Phi3ForCausalLM", &[32_000]),
        ("SmolLM3ForCausalLM", &[128_001]),
        ("Qwen3ForCausalLM", &[]),
    ] {
        let vocabulary = json!({"vocab_size": 160_000});
        assert_eq!(eos(name, vocabulary), default, "{name}");
        let small: Vec<u32> = default.iter().copied().filter(|id| *id < 320).collect();
        assert_eq!(eos(name, json!({})), small, "{name}");
        assert_eq!(eos(name, json!({"eos_token_id": 7})), [7], "{name}");
        assert_eq!(eos(name, json!({"eos_token_id": null})), [0; 0], "{name}");
    }
}

#[test]
fn smollm3_has_layers_without_rope() {
    const NAME: &str = "SmolLM3ForCausalLM";
    let layers = |fields: Value| parse(NAME, &fields).map(|config| config.nope_layers);
    assert_eq!(layers(json!({})).unwrap(), [3]);
    assert_eq!(layers(json!({"no_rope_layer_interval": 2})).unwrap(), [1, 3, 5]);
    assert_eq!(layers(json!({"no_rope_layers": [0, 1, 1, 1, 1, 0]})).unwrap(), [0, 5]);
    for wrong in [json!([1, 1]), json!("x"), json!([1, 1, 1, 1, 1, -1])] {
        let error = layers(json!({"no_rope_layers": wrong})).unwrap_err();
        assert!(error.contains("no_rope_layers"), "{error}");
    }
}

#[test]
fn biases_follow_the_family() {
    let biases = |name: &str, fields: Value| {
        let config = parse(name, &fields).unwrap();
        (config.qkv_bias, config.out_bias, config.mlp_bias)
    };
    assert_eq!(biases("SeedOssForCausalLM", json!({})), (true, false, false));
    let all = json!({"attention_out_bias": true, "mlp_bias": true});
    assert_eq!(biases("SeedOssForCausalLM", all), (true, true, true));
    assert_eq!(biases("GraniteForCausalLM", json!({"attention_bias": true})), (true, true, false));
    const ERNIE: &str = "Ernie4_5ForCausalLM";
    assert_eq!(biases(ERNIE, json!({})), (false, false, false));
    assert_eq!(biases(ERNIE, json!({"use_bias": true})), (true, true, true));
    for name in ["GlmForCausalLM", "Glm4ForCausalLM"] {
        assert_eq!(biases(name, json!({})), (true, false, false));
        assert_eq!(biases(name, json!({"attention_bias": false})), (false, false, false));
    }
    for field in ["attention_bias", "mlp_bias"] {
        let error = parse(ERNIE, &json!({field: true})).unwrap_err();
        assert!(error.contains(field), "{error}");
    }
    let moe = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48});
    let config = parse("Qwen2MoeForCausalLM", &moe).unwrap();
    assert!(config.qkv_bias && !config.qk_norm());
    let moe = config.moe.unwrap();
    assert!(moe.has_shared_gate && moe.shared_experts() == 0 && moe.shared_intermediate == 48);
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let smollm3 = parse("SmolLM3ForCausalLM", &json!({})).unwrap();
    assert!(smollm3.tied && smollm3.rope.theta.to_bits() == 2e6f64.to_bits());
    assert!(!parse("GraniteForCausalLM", &json!({})).unwrap().tied);
    // If the field `sliding_window` is absent, Mistral has a sliding window of 4,096 tokens; null means no
    // sliding window.
    let long = json!({"max_position_embeddings": 8192});
    assert_eq!(parse("MistralForCausalLM", &long).unwrap().window_at(0), Some(4096));
    let null = json!({"max_position_embeddings": 8192, "sliding_window": null});
    assert_eq!(parse("MistralForCausalLM", &null).unwrap().layer_attention, None);
}

#[test]
fn phi3_reads_its_original_context_at_the_top() {
    let longrope = |original: Value, nested: Value| {
        let scaling = json!({"type": "longrope", "short_factor": vec![1.0; 8],
            "long_factor": vec![2.0; 8], "original_max_position_embeddings": nested});
        let fields = json!({"max_position_embeddings": 8192, "rope_scaling": scaling,
            "original_max_position_embeddings": original});
        parse("Phi3ForCausalLM", &fields)
    };
    let positions = |config: ModelConfig| match config.rope.scaling {
        RopeScaling::LongRope { original_positions, .. } => original_positions as usize,
        other => panic!("{other:?}"),
    };
    assert_eq!(longrope(json!(2048), Value::Null).map(positions), Ok(2048));
    assert_eq!(longrope(Value::Null, Value::Null).map(positions), Ok(4096));
    for error in [longrope(Value::Null, json!(2048)), longrope(json!(1), Value::Null)] {
        assert!(error.unwrap_err().contains("original_max_position_embeddings"));
    }
}

#[test]
fn experts_of_all_layers_are_bounded() {
    let fields =
        json!({"num_local_experts": 16384, "num_experts_per_tok": 2, "num_hidden_layers": 4096});
    let error = parse("MixtralForCausalLM", &fields).unwrap_err();
    assert!(error.contains("16384 experts in 4096 layers"), "{error}");
}

#[test]
fn olmo_has_output_norms_and_a_qk_norm_over_all_heads() {
    let olmo2 = parse("Olmo2ForCausalLM", &json!({"attention_bias": true})).unwrap();
    assert!(olmo2.full_qk_norm() && !olmo2.qk_norm() && olmo2.qkv_bias && olmo2.out_bias);
    assert_eq!(olmo2.norm_placement(), NormPlacement::Output);
    let names: Vec<String> =
        crate::weight_table::tensors(&olmo2).into_iter().map(|spec| spec.name).collect();
    assert!(names.contains(&"model.layers.0.post_feedforward_layernorm.weight".to_owned()));
    assert!(!names.contains(&"model.layers.0.input_layernorm.weight".to_owned()));
    const OLMO3: &str = "Olmo3ForCausalLM";
    let full = json!({"layer_types": vec!["full_attention"; 6], "max_position_embeddings": 8192,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0},
            "sliding_attention": {"rope_type": "default"}}});
    let olmo3 = parse(OLMO3, &full).unwrap();
    assert_eq!(olmo3.rope.theta.to_bits(), 500_000f64.to_bits());
    assert_eq!(olmo3.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(olmo3.layer_attention, None);
    // RoPE settings that transformers does not read for OLMo 3 are rejected.
    let yarn = |more: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 8.0});
        scaling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        scaling
    };
    let original = "original_max_position_embeddings";
    for (settings, field) in [
        (json!({"rope_parameters": yarn(json!({}))}), "rope_parameters"),
        (json!({"rope_scaling": {"full_attention": yarn(json!({}))}}), "full_attention"),
        (json!({"rope_scaling": yarn(json!({"truncate": false}))}), "truncate"),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "type"),
        (json!({"rope_scaling": yarn(json!({})), original: 64}), original),
    ] {
        let mut fields = json!({"layer_types": vec!["full_attention"; 6]});
        fields.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let error = parse(OLMO3, &fields).unwrap_err();
        assert!(error.contains(field), "{field}: {error}");
    }
}

#[test]
fn dense_granite4_rejects_experts_and_mamba_layers() {
    const NAME: &str = "GraniteMoeHybridForCausalLM";
    let granite4 = |field: &str, value: Value| {
        let mut fields = json!({"num_local_experts": 0, "shared_intermediate_size": 80,
            "layer_types": vec!["attention"; 6], "position_embedding_type": "rope",
            "residual_multiplier": 0.25});
        fields[field] = value;
        parse(NAME, &fields)
    };
    let dense = granite4("attention_bias", json!(false)).unwrap();
    assert_eq!((dense.intermediate, dense.nope_layers.len()), (80, 0));
    assert_eq!(dense.multipliers.residual, 0.25);
    let nope = granite4("position_embedding_type", json!("nope")).unwrap();
    assert_eq!(nope.nope_layers, [0, 1, 2, 3, 4, 5]);
    let mamba = ["mamba", "attention", "mamba", "mamba", "mamba", "attention"];
    for (field, value) in [
        ("num_local_experts", json!(4)),
        ("num_local_experts", Value::Null),
        ("layer_types", json!(mamba)),
        ("layer_types", Value::Null),
    ] {
        let error = granite4(field, value).unwrap_err();
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn ministral3_has_an_attention_temperature() {
    const NAME: &str = "Ministral3ForCausalLM";
    let heads = json!({"num_attention_heads": 32});
    let config = parse(NAME, &heads).unwrap();
    // Absent fields have the default values of transformers `configuration_ministral3.py`.
    assert_eq!((config.kv_heads, config.head_dim), (2, 128));
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { factor, .. } if factor == 16.0));
    let temperature = AttentionTemperatureConfig { beta: 0.1, interval: 16384.0 };
    assert_eq!(config.attention_temperature, Some(temperature));
    let factors = [0, 16383, 16384, 65535].map(|position| temperature.factor(position));
    assert_eq!(factors[..2], [1.0, 1.0]);
    assert!((factors[2] - 1.069_314_7).abs() < 1e-6 && (factors[3] - 1.138_629_4).abs() < 1e-6);
    let rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.5});
    let set = parse(NAME, &json!({"rope_parameters": rope})).unwrap();
    let temperature = AttentionTemperatureConfig { beta: 0.5, interval: 128.0 };
    assert_eq!(set.attention_temperature, Some(temperature));
    let with_beta = |beta: Value| {
        let mut rope = rope.clone();
        rope["llama_4_scaling_beta"] = beta;
        parse(NAME, &json!({"rope_parameters": rope}))
    };
    assert_eq!(with_beta(json!(0)).unwrap().attention_temperature, None);
    for wrong in [json!(-0.5), Value::Null] {
        assert!(with_beta(wrong).unwrap_err().contains("llama_4_scaling_beta"));
    }
    // An empty `rope_scaling` (the old form of the RoPE settings) counts as absent. `rope_theta` at the top
    // level of `config.json` has no effect in transformers and is rejected.
    let above = parse(
        NAME,
        &json!({"original_max_position_embeddings": 128, "rope_parameters":
        {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.5}}),
    );
    assert_eq!(above.unwrap().attention_temperature, Some(temperature));
    let empty = parse(NAME, &json!({"num_attention_heads": 32, "rope_scaling": {}})).unwrap();
    assert_eq!(empty.attention_temperature, config.attention_temperature);
    let theta = parse(NAME, &json!({"num_attention_heads": 32, "rope_theta": 1e8})).unwrap_err();
    assert!(theta.contains("rope_theta"), "{theta}");
    // A sliding window of 16,384 tokens has an effect, because it is shorter than the context length after RoPE
    // scaling.
    let window = json!({"num_attention_heads": 32, "sliding_window": 16384});
    assert_eq!(parse(NAME, &window).unwrap().window_at(0), Some(16384));
    let other = parse("LlamaForCausalLM", &json!({"rope_parameters": rope})).unwrap_err();
    assert!(other.contains("llama_4_scaling_beta"), "{other}");
}

/// Indices of the windowed layers, and their window.
fn windows(name: &str, fields: &Value) -> Result<(Vec<usize>, usize), String> {
    let config = parse(name, fields)?;
    let layers = (0..config.layers).filter(|&i| config.window_at(i).is_some()).collect();
    Ok((layers, config.layer_attention.map_or(0, |attention| attention.window)))
}

#[test]
fn windows_follow_the_family() {
    let all: Vec<usize> = (0..6).collect();
    let moe = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "num_local_experts": 4});
    let read = |name: &str, fields: Value| {
        let mut fields = fields;
        fields.as_object_mut().unwrap().extend(moe.as_object().unwrap().clone());
        windows(name, &fields).unwrap()
    };
    let (mistral, phi3) = ("MistralForCausalLM", "Phi3ForCausalLM");
    for name in [mistral, phi3, "MixtralForCausalLM"] {
        assert_eq!(read(name, json!({"sliding_window": 511})), (all.clone(), 511), "{name}");
        // A window at least as long as the context has no effect.
        assert_eq!(read(name, json!({"sliding_window": 512})), (vec![], 0), "{name}");
    }
    let used = |more: Value| {
        let mut fields = json!({"use_sliding_window": true, "max_position_embeddings": 8192});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    };
    for name in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let upper = json!({"max_window_layers": 4, "sliding_window": 64});
        assert_eq!(read(name, used(upper.clone())), (vec![4, 5], 64), "{name}");
        assert_eq!(read(name, upper), (vec![], 0), "{name}");
        assert_eq!(read(name, used(json!({"max_window_layers": 5}))), (vec![5], 4096), "{name}");
        let null = json!({"max_window_layers": 0, "sliding_window": null});
        assert_eq!(read(name, used(null)), (vec![], 0), "{name}");
    }
    let alternate = used(json!({"max_window_layers": 3, "sliding_window": 64}));
    assert_eq!(read("Qwen2MoeForCausalLM", alternate.clone()), (vec![0, 2], 64));
    // transformers writes the window 0 if it is not used.
    assert_eq!(read("Qwen2MoeForCausalLM", json!({"sliding_window": 0})), (vec![], 0));
    assert_eq!(read("Qwen3MoeForCausalLM", alternate), (all, 64));
    let nope = used(json!({"sliding_window": 64, "no_rope_layers": [1, 0, 1, 1, 0, 1]}));
    assert_eq!(read("SmolLM3ForCausalLM", nope), (vec![1, 4], 64));
    assert_eq!(read("SmolLM3ForCausalLM", used(json!({}))), (vec![], 0));
    assert_eq!(read("LlamaForCausalLM", json!({"sliding_window": 64})), (vec![], 0));
}

#[test]
fn listed_layer_types_must_agree_with_the_window() {
    let mut types = vec!["full_attention"; 6];
    types[2] = "sliding_attention";
    let listed = |more: Value| {
        let mut fields = json!({"layer_types": types, "sliding_window": 64});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    };
    for name in ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"] {
        let used = listed(json!({"use_sliding_window": true}));
        assert_eq!(windows(name, &used), Ok((vec![2], 64)), "{name}");
        let unused = windows(name, &listed(json!({}))).unwrap_err();
        assert!(unused.contains("`sliding_window`"), "{name}: {unused}");
    }
    for name in ["LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM"] {
        let error = windows(name, &listed(json!({}))).unwrap_err();
        assert!(error.contains("`layer_types["), "{name}: {error}");
    }
}

#[test]
fn olmo3_windows_have_rope_without_scaling() {
    const NAME: &str = "Olmo3ForCausalLM";
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    let config = parse(NAME, &json!({"rope_scaling": yarn, "sliding_window": 64})).unwrap();
    let attention = config.layer_attention.clone().unwrap();
    assert_eq!(attention.windowed, [true, true, true, false, true, true]);
    let rope = attention.rope.unwrap();
    assert_eq!((rope.theta.to_bits(), rope.scaling), (5e5f64.to_bits(), RopeScaling::Default));
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { .. }));
    // transformers reads `rope_theta` for the other layers only.
    let theta = parse(NAME, &json!({"rope_theta": 1e6})).unwrap_err();
    assert!(theta.contains("`rope_theta`"), "{theta}");
    let both = json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 2e6}}});
    let both = parse(NAME, &both).unwrap();
    let theta = both.layer_attention.unwrap().rope.unwrap().theta;
    assert_eq!((both.rope.theta.to_bits(), theta.to_bits()), (1e6f64.to_bits(), 2e6f64.to_bits()));
}
