//! Tests of the parser with published configurations, and with unsupported or invalid variants of them.
#![allow(clippy::needless_pass_by_value)] // Tests pass JSON literals by value.

use super::*;

use expect_test::{Expect, expect};
use serde_json::{Value, json};

pub(super) fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "bos_token_id": 151_643,
        "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1_000_000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151_936
    })
}

pub(super) fn with(mut base: Value, changes: Value) -> Value {
    for (field, value) in changes.as_object().unwrap() {
        if value == "REMOVE" {
            base.as_object_mut().unwrap().remove(field);
        } else {
            base[field] = value.clone();
        }
    }
    base
}

pub(super) fn parse(value: &Value) -> Result<ModelConfig, ModelConfigError> {
    ModelConfig::from_json(Path::new("config.json"), &value.to_string())
}

pub(super) fn expect_error(changes: Value, expected: Expect) {
    expected.assert_eq(&parse(&with(qwen3(), changes)).unwrap_err().to_string());
}

#[test]
fn folder_without_config_names_the_format_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let error = || {
        let error = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
        error.replace(&dir.path().display().to_string(), "DIR")
    };
    expect!["DIR: no config.json"].assert_eq(&error());
    std::fs::write(dir.path().join("model.gguf"), "GGUF").unwrap();
    expect!["DIR: no config.json; GGUF is not supported: serve the original model, which has safetensors files"]
        .assert_eq(&error());
}

#[test]
fn published_configs_are_read() {
    let config = parse(&qwen3()).unwrap();
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (16, 8, 128));
    assert_eq!(config.rope, plain_rope(1e6, RopeScaling::Default));
    assert!(config.tied && !config.qkv_bias && config.qk_norm());
    assert_eq!((config.eos, config.dtype), (vec![151_645], Some(CheckpointDType::BF16)));

    let llama = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_attention_heads": 32,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "head_dim": null, "rope_theta": 500_000.0, "eos_token_id": [128_001, 128_008, 128_009]
    });
    let config = parse(&with(qwen3(), llama)).unwrap();
    assert_eq!((config.head_dim, config.eos.len()), (64, 3));
    assert!(matches!(config.rope.scaling, RopeScaling::Llama3 { factor: 32.0, .. }));
}

#[test]
fn rope_is_read_from_both_forms() {
    let read = |changes| parse(&with(qwen3(), changes)).unwrap().rope;
    let linear = plain_rope(5e5, RopeScaling::Linear { factor: 4.0 });
    let new = json!({"rope_theta": "REMOVE",
        "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5}});
    let old = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}});
    assert_eq!((read(new), read(old)), (linear.clone(), linear));
    let bare = read(json!({"rope_theta": "REMOVE"}));
    assert_eq!(bare, plain_rope(1e4, RopeScaling::Default));
    let yarn = read(json!({"rope_scaling":
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}));
    let RopeScaling::Yarn { attention_factor, .. } = yarn.scaling else { panic!("{yarn:?}") };
    assert!((attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
}

#[test]
fn context_max_follows_rope_scaling() {
    let longest =
        |scaling| parse(&with(qwen3(), json!({"rope_scaling": scaling}))).unwrap().context_max();
    assert_eq!(longest(Value::Null), 40_960);
    // As in the Qwen3 model card, `max_position_embeddings` stays unchanged when YaRN is enabled.
    let yarn =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    assert_eq!(longest(yarn), 131_072);
    assert_eq!(longest(json!({"rope_type": "linear", "factor": 2.0})), 81_920);
    let llama3 = json!({"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192});
    assert_eq!(longest(llama3), 40_960);
    let endless = json!({"rope_scaling": {"rope_type": "linear", "factor": 1e9}});
    let error = parse(&with(qwen3(), endless)).unwrap_err().to_string();
    assert!(error.contains("rope_scaling") && error.contains("40960000000000"), "{error}");
}

#[test]
fn override_adds_missing_fields() {
    let dir = tempfile::tempdir().unwrap();
    let incomplete = with(qwen3(), json!({"intermediate_size": "REMOVE"}));
    std::fs::write(dir.path().join("config.json"), incomplete.to_string()).unwrap();
    let error = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("intermediate_size"), "{error}");
    let Value::Object(added) = json!({"intermediate_size": 64}) else { unreachable!() };
    assert_eq!(ModelConfig::from_dir_with(dir.path(), &added).unwrap().intermediate, 64);
}

#[test]
fn override_reaches_nested_fields() {
    let dir = tempfile::tempdir().unwrap();
    let yarn =
        json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768});
    let quantization = json!({"quant_method": "fp8", "weight_block_size": [128, 128],
        "unknown": 1});
    let config = with(qwen3(), json!({"rope_scaling": yarn, "quantization_config": quantization}));
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let read =
        |overrides: Value| ModelConfig::from_dir_with(dir.path(), overrides.as_object().unwrap());
    let error = read(json!({})).unwrap_err().to_string();
    assert!(error.contains("`quantization_config.unknown`"), "{error}");
    let overrides = json!({"quantization_config.unknown": null, "rope_scaling": {"factor": 4.0}});
    assert_eq!(read(overrides).unwrap().context_max(), 131_072);
    let error = read(json!({"quantization_config": null, "rope_scaling.type": "linear"}));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("disagrees with `rope_scaling.type`"), "{error}");
}

#[test]
fn different_spellings_must_agree() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5,
        "original_max_position_embeddings": 32768});
    for (changes, field, other) in [
        (json!({"rope_scaling": yarn}), "rope_scaling.rope_theta", "rope_theta"),
        (
            json!({"rope_theta": 5e5, "rope_scaling": yarn,
                "original_max_position_embeddings": 4096}),
            "rope_scaling.original_max_position_embeddings",
            "original_max_position_embeddings",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0}}),
            "rope_scaling.rope_type",
            "rope_scaling.type",
        ),
        (
            json!({"rope_theta": 5e5, "rope_parameters": yarn,
                "rope_scaling": {"type": "yarn", "factor": 2.0}}),
            "rope_parameters.factor",
            "rope_scaling.factor",
        ),
        (
            json!({"rope_theta": 5e5, "rope_parameters": yarn,
                "rope_scaling": {"type": "linear", "factor": 4.0}}),
            "rope_parameters.rope_type",
            "rope_scaling.type",
        ),
        (json!({"dtype": "float16"}), "dtype", "torch_dtype"),
    ] {
        let error = parse(&with(qwen3(), changes)).unwrap_err().to_string();
        let expected = format!("config.json: field `{field}`: ");
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.contains(&format!("disagrees with `{other}`")), "{error}");
    }
    let equal = json!({"rope_theta": 500_000, "rope_parameters": yarn, "rope_scaling": yarn,
        "dtype": "bfloat16"});
    assert_eq!(parse(&with(qwen3(), equal)).unwrap().rope.theta, 5e5);
}

#[test]
fn unknown_rope_fields_are_rejected_by_name() {
    for (changes, field) in [
        (json!({"rope_ratio": 2.0}), "rope_ratio"),
        (
            json!({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}),
            "rope_scaling.mrope_section",
        ),
        (
            json!({"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", "scale": 2.0}}),
            "rope_parameters.scale",
        ),
    ] {
        let error = parse(&with(qwen3(), changes)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("config.json: field `{field}`: ")), "{error}");
    }
}

#[test]
fn moe_layers_follow_step_and_list() {
    let moe = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true,
        "decoder_sparse_step": 2, "mlp_only_layers": [3]
    });
    let config = parse(&with(qwen3(), moe)).unwrap();
    let sparse: Vec<_> = (0..6).filter(|i| config.moe_at(*i).is_some()).collect();
    assert_eq!(sparse, [1, 5]);
}

#[test]
fn biases_depend_on_the_architecture() {
    let qwen2 = json!({"architectures": ["Qwen2ForCausalLM"], "head_dim": "REMOVE"});
    let config = parse(&with(qwen3(), qwen2)).unwrap();
    assert!(config.qkv_bias && !config.out_bias && config.head_dim == 64);
    let llama = json!({"architectures": ["LlamaForCausalLM"], "attention_bias": true,
        "mlp_bias": true});
    let config = parse(&with(qwen3(), llama)).unwrap();
    assert!(config.qkv_bias && config.out_bias && config.mlp_bias);
}

fn plain_rope(theta: f64, scaling: RopeScaling) -> RopeConfig {
    RopeConfig { theta, scaling, partial_rotary_factor: 1.0 }
}

fn phi4_mini(members: Value) -> Value {
    let mut config = json!({
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "num_attention_heads": 24,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 8192,
        "vocab_size": 200_064, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "sliding_window": 262_144, "attention_bias": false, "lm_head_bias": false,
        "rope_scaling": {"type": "longrope", "short_factor": vec![1.0; 48],
            "long_factor": vec![2.0; 48]}
    });
    config.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    config
}

#[test]
fn phi3_has_longrope_and_partial_rotation() {
    let config = parse(&phi4_mini(json!({}))).unwrap();
    let RopeScaling::LongRope { short_factors, attention_factor, original_positions, .. } =
        &config.rope.scaling
    else {
        panic!("{:?}", config.rope)
    };
    assert_eq!((config.head_dim, config.rotated_channels(), short_factors.len()), (128, 96, 48));
    assert!((attention_factor - (1.0 + 32f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-12);
    assert_eq!((*original_positions, config.context_max()), (4096.0, 131_072));
    for (members, field) in [
        (json!({"sliding_window": 0}), "sliding_window"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 0.5}), "rope_scaling"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"lm_head_bias": true}), "lm_head_bias"),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "rope_scaling.type"),
        (json!({"rope_scaling": {"type": "longrope"}}), "rope_scaling.short_factor"),
    ] {
        let error = parse(&phi4_mini(members)).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    }
}

#[test]
fn text_part_has_fields_of_the_outer_object() {
    let mut text = qwen3();
    text["model_type"] = json!("qwen3_vl_text");
    let fields = text.as_object_mut().unwrap();
    let moved = ["eos_token_id", "torch_dtype"].map(|field| (field, fields.remove(field)));
    let outer = |members: Value| {
        let mut outer = json!({
            "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text,
            "vision_config": {"hidden_size": 1}, "hidden_size": 7
        });
        for (field, value) in &moved {
            outer[*field] = value.clone().unwrap_or(Value::Null);
        }
        outer.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        outer
    };
    let plain = parse(&qwen3()).unwrap();
    let config = parse(&outer(json!({}))).unwrap();
    assert_eq!(config.architecture, ModelArchitecture::Qwen3Vl);
    assert_eq!(ModelConfig { architecture: plain.architecture, ..config }, plain);
    let float16 = parse(&outer(json!({"torch_dtype": "float16"}))).unwrap();
    assert_eq!(float16.dtype, Some(CheckpointDType::F16));
    let error = |members| parse(&outer(members)).unwrap_err().to_string();
    let tied = !plain.tied;
    // A value of `tie_word_embeddings` in the outer object takes precedence, as in transformers.
    assert_eq!(parse(&outer(json!({"tie_word_embeddings": tied}))).unwrap().tied, tied);
    let found = error(json!({"rope_scaling": {"rope_type": "yarn"}}));
    assert!(
        found.contains("`rope_scaling`") && found.contains("text_config.rope_scaling"),
        "{found}"
    );
    let found = error(json!({"quantization_config": {"quant_method": "awq"}}));
    assert!(found.contains("`quantization_config.quant_method`"), "{found}");
    let found = error(json!({"text_config": {"model_type": "qwen2"}}));
    assert!(found.contains("`text_config.model_type`"), "{found}");
    let found = error(json!({"text_config": null}));
    assert!(found.contains("`text_config` is missing"), "{found}");
}

#[test]
fn shared_fields_of_wrong_types_are_rejected_at_both_levels() {
    let shared = [
        ("quantization_config", json!({"quant_method": "fp8"}), json!("fp8")),
        ("compression_config", Value::Null, json!([])),
        ("bos_token_id", json!(1), json!("<s>")),
        ("eos_token_id", json!([2, 3]), json!([2, "</s>"])),
        ("dtype", json!("bfloat16"), json!(16)),
        ("torch_dtype", json!("bfloat16"), json!(["bfloat16"])),
        ("tie_word_embeddings", json!(true), json!("false")),
    ];
    for (field, valid, wrong) in &shared {
        let error = |outer: &Value, inner: &Value| {
            let mut config = json!({"architectures": ["Qwen3VLForConditionalGeneration"],
                "text_config": with(qwen3(), json!({"model_type": "qwen3_vl_text", (*field): inner}))});
            config[*field] = outer.clone();
            parse(&config).unwrap_err().to_string()
        };
        for other in [valid, &Value::Null] {
            let (outer, inner) = (error(wrong, other), error(other, wrong));
            let prefix = format!("`{field}");
            assert!(outer.contains(&prefix) && outer.contains("expected"), "{outer}");
            let prefix = format!("`text_config.{field}");
            assert!(inner.contains(&prefix) && inner.contains("expected"), "{inner}");
        }
    }
}

#[test]
fn errors_of_long_lists_name_the_wrong_entry() {
    let mut types = vec![json!("full_attention"); 28];
    types[23] = json!("chunked_attention");
    let factors = |entry: Value| {
        let mut factors = vec![json!(1.5); 48];
        factors[40] = entry;
        factors
    };
    let rope = json!({"rope_scaling": {"type": "longrope", "long_factor": vec![1.0; 48],
        "short_factor": factors(json!(-1))}});
    let ignored = vec!["lm_head"; 30].into_iter().chain(["re:("]).collect::<Vec<_>>();
    for (config, field, found) in [
        (with(qwen3(), json!({"layer_types": types})), "layer_types[23]", r#""chunked_attention""#),
        (with(qwen3(), json!({"layer_types": factors(json!(1))})), "layer_types[0]", "1.5"),
        (phi4_mini(rope), "rope_scaling.short_factor[40]", "-1"),
        (
            with(
                qwen3(),
                json!({"quantization_config": {"quant_method": "fp8",
                    "modules_to_not_convert": ignored}}),
            ),
            "quantization_config.modules_to_not_convert[30]",
            r#""re:(""#,
        ),
    ] {
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")) && error.contains(found), "{error}");
    }
}

#[test]
fn unsupported_fields_are_rejected_by_name() {
    let error = parse(&with(qwen3(), json!({"architectures": ["GPT2LMHeadModel"]}))).unwrap_err();
    let names = ModelArchitecture::ALL.map(ModelArchitecture::name).join(", ");
    let field =
        "config.json: field `architectures`: `GPT2LMHeadModel` is not supported; supported are";
    assert_eq!(error.to_string(), format!("{field} {names}"));
    expect_error(
        json!({"architectures": "REMOVE"}),
        expect!["config.json: field `architectures` is missing"],
    );
    expect_error(
        json!({"hidden_act": "gelu"}),
        expect![[r#"config.json: field `hidden_act`: "gelu" is not supported: only silu is"#]],
    );
    expect_error(
        json!({"torch_dtype": "float8_e4m3fn"}),
        expect![[
            r#"config.json: field `torch_dtype`: "float8_e4m3fn" is not supported: supported are float32, bfloat16 and float16"#
        ]],
    );
}

#[test]
fn unsupported_attention_is_rejected_by_name() {
    expect_error(
        json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        expect![[
            r#"config.json: field `rope_scaling.rope_type`: "dynamic" is not supported: supported are default, linear, llama3 and yarn"#
        ]],
    );
    expect_error(
        json!({"rope_parameters": {"type": "longrope", "factor": 2.0}}),
        expect![[
            r#"config.json: field `rope_parameters.type`: "longrope" is not supported: supported are default, linear, llama3 and yarn"#
        ]],
    );
    expect_error(
        json!({"partial_rotary_factor": 0.5}),
        expect![
            "config.json: field `partial_rotary_factor`: 0.5 is not supported: only full rotation (1.0) is"
        ],
    );
    expect_error(
        json!({"layer_types": ["sliding_attention"]}),
        expect!["config.json: field `layer_types`: 1 entries for 28 layers"],
    );
    expect_error(
        json!({"layer_types": ["chunked_attention"]}),
        expect![[
            r#"config.json: field `layer_types[0]`: "chunked_attention" is not supported: supported are full_attention and sliding_attention"#
        ]],
    );
}

#[test]
fn invalid_values_are_rejected_by_name() {
    expect_error(
        json!({"hidden_size": "REMOVE"}),
        expect!["config.json: field `hidden_size` is missing"],
    );
    expect_error(
        json!({"hidden_size": -1}),
        expect![
            "config.json: field `hidden_size`: expected a whole number from 1 to 1048576, found -1"
        ],
    );
    expect_error(
        json!({"vocab_size": 1e300}),
        expect![
            "config.json: field `vocab_size`: expected a whole number from 1 to 16777216, found 1e+300"
        ],
    );
    expect_error(
        json!({"num_hidden_layers": "28"}),
        expect![[
            r#"config.json: field `num_hidden_layers`: expected a whole number from 1 to 4096, found "28""#
        ]],
    );
    expect_error(
        json!({"rms_norm_eps": 0}),
        expect!["config.json: field `rms_norm_eps`: expected a number above zero, found 0"],
    );
    expect_error(
        json!({"eos_token_id": [1, -2]}),
        expect!["config.json: field `eos_token_id[1]`: expected a token id, found -2"],
    );
    expect_error(
        json!({"num_key_value_heads": 3}),
        expect![
            "config.json: field `num_key_value_heads`: 3 does not divide num_attention_heads 16"
        ],
    );
    expect_error(
        json!({"head_dim": null, "hidden_size": 1000, "num_attention_heads": 48}),
        expect![
            "config.json: field `num_attention_heads`: 48 does not divide hidden_size 1000, and head_dim is absent"
        ],
    );
    expect_error(
        json!({"head_dim": 63}),
        expect![
            "config.json: field `head_dim`: 63 channels per head; kernels need a multiple of 16"
        ],
    );
    expect_error(
        json!({"rope_scaling": [1]}),
        expect!["config.json: field `rope_scaling`: expected an object, found [1]"],
    );
}

#[test]
fn any_input_is_an_error_or_a_config() {
    let text = qwen3().to_string();
    for end in 0..text.len() {
        let error = ModelConfig::from_json(Path::new("c"), &text[..end]).unwrap_err();
        assert!(error.to_string().starts_with("c: not a JSON object"), "{error}");
    }
    for field in qwen3().as_object().unwrap().keys() {
        for value in [json!([]), json!({}), json!(-3), json!(0.5), json!("x"), json!(1e99)] {
            let _ = parse(&with(qwen3(), json!({ field: value })));
        }
    }
}
