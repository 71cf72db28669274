//! Tests of the parser of `quantization_config` with the fields of published checkpoints, and with unsupported
//! variants of them.
#![allow(clippy::needless_pass_by_value)] // Tests pass JSON literals by value.

use super::tests::{expect_error, parse, qwen3, with};
use super::*;
use ActivationScheme::{Dynamic, PowerOfTwo, Static};
use CheckpointScaleGranularity::{Blocks, Channels, Tensor};

use expect_test::expect;
use serde_json::{Value, json};
use std::fs;

const Q: &str = "model.layers.0.self_attn.q_proj";

fn read(quantization: Value) -> Result<QuantizationConfig, String> {
    let config = parse(&with(qwen3(), json!({"quantization_config": quantization})));
    config.map(|config| config.quantization.unwrap()).map_err(|error| error.to_string())
}

/// Returns the weight scale granularity and the activation scheme of a layer that no group selects by name.
fn format_of(quantization: Value) -> (CheckpointScaleGranularity, ActivationScheme) {
    let format = read(quantization).unwrap().of_layer(&[Q]).unwrap();
    (format.scales, format.activations)
}

/// Returns the error message, without the file name and without the prefix `quantization_config.` of the
/// field.
fn error(quantization: Value) -> String {
    let error = read(quantization).unwrap_err();
    error.strip_prefix("config.json: field `quantization_config.").unwrap().to_owned()
}

fn tensor(strategy: &str, is_dynamic: bool) -> Value {
    json!({"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": is_dynamic,
        "symmetric": true, "observer": null, "observer_kwargs": {}, "group_size": null})
}

fn group(targets: Value, weights: Value, inputs: Value) -> Value {
    json!({"targets": targets, "weights": weights, "input_activations": inputs,
        "output_activations": null})
}

fn compressed(groups: Value, more: Value) -> Value {
    let config = json!({"quant_method": "compressed-tensors", "version": "0.12",
        "format": "float-quantized", "config_groups": groups,
        "quantization_status": "compressed", "kv_cache_scheme": null,
        "sparsity_config": {}, "transform_config": {}, "ignore": ["re:.*lm_head"]});
    with(config, more)
}

#[test]
fn weights_quantised_by_mlx_are_rejected_by_name() {
    let bits = json!({"group_size": 64, "bits": 4});
    let fields = json!({"quantization": bits, "quantization_config": bits});
    let error = parse(&with(qwen3(), fields)).unwrap_err().to_string();
    assert!(error.starts_with("config.json: field `quantization`: "), "{error}");
    assert!(error.ends_with("MLX has quantised are not read; serve the original model"), "{error}");
    assert!(parse(&with(qwen3(), json!({"quantization": null}))).is_ok());
}

#[test]
fn formats_of_published_checkpoints_are_read() {
    let deepseek = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]});
    assert_eq!(format_of(deepseek.clone()), (Blocks, Dynamic));
    assert!(read(deepseek.clone()).unwrap().ignores("lm_head"));
    // Fields that transformers 5 writes in addition to the fields above.
    let written = json!({"scale_fmt": "float", "expert_dtype": "fp8", "modules_to_convert": null});
    assert_eq!(format_of(with(deepseek.clone(), written)), (Blocks, Dynamic));
    assert_eq!(format_of(with(deepseek, json!({"scale_fmt": "ue8m0"}))), (Blocks, PowerOfTwo));
    let qwen35 = json!({"quant_method": "fp8", "activation_scheme": "dynamic",
        "weight_per_tensor": false, "act_per_tensor": false, "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mtp.fc"]});
    assert_eq!(format_of(qwen35.clone()), (Blocks, Dynamic));
    for flag in ["weight_per_tensor", "act_per_tensor"] {
        let message = error(with(qwen35.clone(), json!({flag: true})));
        assert!(
            message.starts_with(&format!("{flag}`")) && message.contains("only false"),
            "{message}"
        );
    }
    let one_scale = with(qwen35, json!({"weight_block_size": null, "weight_per_tensor": true}));
    assert_eq!(format_of(one_scale), (Tensor, Dynamic));
    let auto_fp8 = json!({"quant_method": "fp8", "activation_scheme": "static",
        "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"});
    assert_eq!(format_of(auto_fp8), (Tensor, Static));
    let mistral = json!({"quant_method": "fp8", "weight_block_size": null, "dequantize": false});
    assert_eq!(format_of(mistral), (Tensor, Dynamic));
    for (weights, inputs, expected) in [
        (tensor("channel", false), tensor("token", true), (Channels, Dynamic)),
        (tensor("tensor", false), tensor("tensor", false), (Tensor, Static)),
        (tensor("tensor", false), tensor("token", true), (Tensor, Dynamic)),
        (tensor("channel", false), tensor("tensor", false), (Channels, Static)),
        (
            with(tensor("block", false), json!({"block_structure": [128, 128]})),
            with(tensor("group", true), json!({"group_size": 128})),
            (Blocks, Dynamic),
        ),
    ] {
        let groups = json!({"group_0": group(json!(["Linear"]), weights, inputs)});
        assert_eq!(format_of(compressed(groups, json!({}))), expected);
    }
}

#[test]
fn modelopt_is_read_from_both_files() {
    let float8 = json!({"num_bits": 8, "type": "float", "dynamic": false});
    let config = json!({"quant_method": "modelopt", "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.33"}, "kv_cache_scheme": float8,
        "config_groups": {"group_0":
            {"targets": ["Linear"], "weights": float8, "input_activations": float8}},
        "ignore": ["lm_head", "*.layers.1.mlp*"]});
    assert_eq!(format_of(config.clone()), (Tensor, Static));
    let quantization = read(config.clone()).unwrap();
    assert!(quantization.ignores("model.layers.1.mlp.gate_proj") && !quantization.ignores(Q));
    assert!(error(with(config.clone(), json!({"quant_algo": "NVFP4"}))).contains("FP8, FP8_PER"));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hf_quant_config.json");
    let write = |algorithm: Value| {
        let quantization = json!({"quant_algo": algorithm, "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"]});
        let file = json!({"producer": {"name": "modelopt"}, "quantization": quantization});
        fs::write(&path, file.to_string()).unwrap();
    };
    let from_dir = |more: Value| {
        fs::write(dir.path().join("config.json"), with(qwen3(), more).to_string()).unwrap();
        ModelConfig::from_dir(dir.path()).map_err(|error| error.to_string())
    };
    write(json!("FP8"));
    let found = from_dir(json!({})).unwrap().quantization.unwrap();
    assert_eq!((found.of_layer(&[Q]).unwrap().scales, found.ignores("lm_head")), (Tensor, true));
    write(json!("FP8_PER_CHANNEL_PER_TOKEN"));
    let channels = from_dir(json!({})).unwrap().quantization.unwrap();
    assert_eq!(channels.of_layer(&[Q]).unwrap().scales, Channels);
    let error = from_dir(json!({"quantization_config": config})).unwrap_err();
    assert!(error.contains("quantization.quant_algo`") && error.contains("disagrees"), "{error}");
    // Overrides are merged into the contents of the file.
    let overrides = json!({"quantization_config.exclude_modules": ["*.q_proj"],
        "quantization_config": {"quant_algo": "FP8"}});
    fs::write(dir.path().join("config.json"), qwen3().to_string()).unwrap();
    let overridden = ModelConfig::from_dir_with(dir.path(), overrides.as_object().unwrap());
    let found = overridden.unwrap().quantization.unwrap();
    assert_eq!((found.of_layer(&[Q]).unwrap().scales, found.ignores(Q)), (Tensor, true));
    assert!(!found.ignores("lm_head"));
    for algorithm in ["FP8_PB_WO", "fp8_pb_wo"] {
        write(json!(algorithm));
        let blocks = from_dir(json!({})).unwrap().quantization.unwrap();
        let format = blocks.of_layer(&[Q]).unwrap();
        assert_eq!((format.scales, format.activations), (Blocks, Dynamic));
    }
    write(json!("W4A8_AWQ"));
    let error = from_dir(json!({})).unwrap_err();
    assert!(error.contains("hf_quant_config.json: field `quantization.quant_algo`"), "{error}");
    write(Value::Null);
    assert_eq!(from_dir(json!({})).unwrap().quantization, None);
}

#[test]
fn modelopt_lists_the_layers_of_mixed_precision() {
    let layers = json!({
        Q: {"quant_algo": "FP8"},
        "model.layers.1.mlp.experts": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
    });
    let config = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8", "quantized_layers": layers, "exclude_modules": ["lm_head"]});
    let mixed = read(config.clone()).unwrap();
    let format = |name: &str| mixed.of_layer(&[name]).map(|f| (f.scales, f.activations));
    assert_eq!(format(Q), Some((Tensor, Static)));
    assert_eq!(format("model.layers.0.mlp.down_proj"), Some((Tensor, Static)));
    assert_eq!(format("model.layers.1.mlp.experts.3.up_proj"), Some((Channels, Dynamic)));
    assert_eq!(format("model.layers.0.mlp.up_proj"), None);
    assert_eq!(format("model.layers.10.mlp.experts.3.up_proj"), None);
    assert!(mixed.ignores("lm_head"));

    // ModelOpt also writes groups, which have the layers of `quantized_layers`.
    let static8 = json!({"num_bits": 8, "type": "float", "dynamic": false});
    let groups = |targets: &[&str]| {
        let group = json!({"targets": targets, "weights": static8, "input_activations": static8});
        with(config.clone(), json!({"config_groups": {"group_0": group}}))
    };
    assert_eq!(read(groups(&[Q, "model.layers.0.mlp.down_proj"])).unwrap(), mixed);
    let other = error(groups(&[Q, "lm_head"]));
    assert!(other.starts_with("config_groups.group_0.targets[1]`: \"lm_head\""), "{other}");

    let with_layers =
        |layers: Value| error(with(config.clone(), json!({"quantized_layers": layers})));
    let four_bits = with_layers(json!({Q: {"quant_algo": "NVFP4", "group_size": 16}}));
    assert!(four_bits.starts_with(&format!("quantized_layers.{Q}.")), "{four_bits}");
    let four_bits = with_layers(json!({Q: {"quant_algo": "W4A8_AWQ"}}));
    expect![[r#"quantized_layers.model.layers.0.self_attn.q_proj.quant_algo`: "W4A8_AWQ" is not supported: FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO are"#]]
        .assert_eq(&four_bits);
    let absent = read(with(config.clone(), json!({"quantized_layers": null}))).unwrap_err();
    assert!(absent.contains("quantized_layers"), "{absent}");
    let uniform = error(with(config, json!({"quant_algo": "FP8"})));
    assert!(uniform.starts_with("quantized_layers`"), "{uniform}");
}

/// A group that selects a layer by name takes precedence over a group of all linear layers.
#[test]
fn groups_select_layers_by_name_then_by_class() {
    let groups = json!({
        "group_0": group(json!(["Linear"]), tensor("channel", false), tensor("token", true)),
        "group_1": group(json!(["re:.*down_proj$", "model.layers.0.self_attn.o_proj"]),
            tensor("tensor", false), tensor("tensor", false)),
    });
    let mixed = read(compressed(groups.clone(), json!({"format": "mixed-precision"}))).unwrap();
    let scales = |name: &str| mixed.of_layer(&[name]).map(|format| format.scales);
    assert_eq!(scales(Q), Some(Channels));
    assert_eq!(scales("model.layers.3.mlp.down_proj"), Some(Tensor));
    assert_eq!(scales("model.layers.0.self_attn.o_proj"), Some(Tensor));
    assert_eq!(scales("model.layers.10.self_attn.o_proj"), Some(Channels));
    assert!(mixed.ignores("lm_head") && !mixed.ignores(Q));
    let only_named = json!({"group_1": groups["group_1"]});
    assert_eq!(read(compressed(only_named, json!({}))).unwrap().of_layer(&[Q]), None);
}

#[test]
fn unsupported_formats_are_rejected_by_name() {
    expect_error(
        json!({"quantization_config": {"quant_method": "gptq"}}),
        expect![[
            r#"config.json: field `quantization_config.quant_method`: "gptq" is not supported: fp8, compressed-tensors, modelopt and mxfp4 are; serve the unquantised model, or a checkpoint in one of these formats"#
        ]],
    );
    for method in ["bitsandbytes", "awq", "gguf", "hqq", "quark", "torchao"] {
        let error = error(json!({"quant_method": method}));
        let expected = format!("quant_method`: {method:?} is not supported: fp8,");
        assert!(error.starts_with(&expected), "{error}");
    }
    let fp8 = |more: Value| with(json!({"quant_method": "fp8"}), more);
    let blocks = json!([128, 128]);
    for (more, expected) in [
        (json!({"weight_block_size": [64, 64]}), "weight_block_size`: [64,64]"),
        (
            json!({"weight_block_size": blocks, "activation_scheme": "static"}),
            r#"activation_scheme`: "static" is not supported: only dynamic is, with block scales"#,
        ),
        (json!({"scale_fmt": "ue8m0"}), r#"scale_fmt`: "ue8m0""#),
        (json!({"weight_block_size": blocks, "scale_fmt": "e5m2"}), r#"scale_fmt`: "e5m2""#),
        (json!({"weight_block_size": blocks, "expert_dtype": "fp4"}), r#"expert_dtype`: "fp4""#),
        (json!({"weight_block_size": blocks, "modules_to_convert": ["a"]}), "modules_to_convert"),
        (json!({"kv_cache_scheme": "dynamic"}), r#"kv_cache_scheme`: "dynamic""#),
        (json!({"unknown": 1}), "unknown`: 1"),
        (
            json!({"modules_to_not_convert": ["a"], "ignored_layers": ["b"]}),
            r#"modules_to_not_convert`: ["a"] disagrees"#,
        ),
    ] {
        let error = error(fp8(more));
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn unread_parts_of_compressed_tensors_are_rejected() {
    let config = |more: Value, weights: Value, inputs: Value| {
        let weights = with(tensor("channel", false), weights);
        let inputs = with(tensor("token", true), inputs);
        let groups = json!({"group_0": group(json!(["Linear"]), weights, inputs)});
        compressed(groups, more)
    };
    let none = || json!({});
    assert!(read(config(json!({"sparsity_config": {"format": "dense"}}), none(), none())).is_ok());
    let kv = |more: Value| json!({"kv_cache_scheme": with(tensor("tensor", false), more)});
    assert!(read(config(kv(none()), none(), none())).is_ok());
    for (more, weights, inputs, field) in [
        (json!({"transform_config": {"config_groups": {}}}), none(), none(), "transform_config"),
        (
            json!({"sparsity_config": {"format": "sparse-24-bitmask"}}),
            none(),
            none(),
            "sparsity_config.format",
        ),
        (json!({"format": "pack-quantized"}), none(), none(), "format"),
        (json!({"config_groups": null}), none(), none(), "config_groups"),
        (kv(json!({"num_bits": 4})), none(), none(), "kv_cache_scheme.num_bits"),
        (kv(json!({"dynamic": true})), none(), none(), "kv_cache_scheme.dynamic"),
        (json!({"sparsities": 1}), none(), none(), "sparsities"),
        (none(), json!({"num_bits": 4}), none(), "config_groups.group_0.weights.num_bits"),
        (none(), json!({"strategy": "group"}), none(), "config_groups.group_0.weights.strategy"),
        (none(), json!({"actorder": "group"}), none(), "config_groups.group_0.weights.actorder"),
        (none(), json!({"group_size": 64}), none(), "config_groups.group_0.weights.group_size"),
        (none(), json!({"clip": 1}), none(), "config_groups.group_0.weights.clip"),
        (
            none(),
            none(),
            json!({"dynamic": false}),
            "config_groups.group_0.input_activations.strategy",
        ),
    ] {
        let error = error(config(more, weights, inputs));
        assert!(error.starts_with(&format!("{field}`")), "{error}");
    }
}
