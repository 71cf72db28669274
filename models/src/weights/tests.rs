//! Tests with modified checkpoints: each modification causes an error that names the file and the tensor, or
//! does not change the loaded weights.
#![allow(clippy::needless_pass_by_value)] // Tests pass closures and JSON literals by value.

mod digest;
mod eagle3;
mod gemma3;
mod gemma4;
mod gpt_oss;
mod mtp;
mod quantized_weights;
mod shared_experts;
mod test_tensor;

use super::WeightSource;
use super::checkpoint::SafetensorsCheckpoint;
use super::header::{self, StoredDType, StoredTensor};
use super::stored_names::canonical_name;
use super::tensor_plan::{WeightLocation, locate};
use crate::sharding::{AttentionHeadKind, ParallelRank, ParallelRanks, ShardSpec, WeightSlice};
use crate::synth::{self, SynthDType, SynthOptions};
use crate::weight_table::{TensorSpec, tensors, tests::tiny_json};
use crate::{ModelConfig, ModelLoadError};
use expect_test::{Expect, expect};
use ops::ActivationScaling;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use tempfile::TempDir;
use test_tensor::{StoredTensorMap, TestTensor};

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Synthetic checkpoint in a temporary folder, and its configuration.
struct TestCheckpointFolder {
    dir: TempDir,
    config: ModelConfig,
}

impl TestCheckpointFolder {
    fn new(architecture: &str, shard_bytes: u64) -> Self {
        Self::of(&tiny_json(architecture), shard_bytes)
    }

    fn of(json: &str, shard_bytes: u64) -> Self {
        let dir = TempDir::new().unwrap();
        let source = dir.path().join("source.json");
        fs::write(&source, json).unwrap();
        let options = SynthOptions { seed: 1, dtype: SynthDType::BF16, shard_bytes };
        synth::write(&source, dir.path(), &options, &mut |_, _| ()).unwrap();
        let config = ModelConfig::from_dir(dir.path()).unwrap();
        Self { dir, config }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn locate(&self) -> Result<BTreeMap<String, WeightLocation>, ModelLoadError> {
        let mut checkpoint = SafetensorsCheckpoint::open(self.path())?;
        checkpoint.rename(|stored| canonical_name(&self.config, stored))?;
        locate(&checkpoint, &self.config, &tensors(&self.config))
    }

    /// Returns the values of all weights, by canonical name.
    fn values(&self) -> Vec<(String, Vec<f32>)> {
        self.values_in(|n| 0..n)
    }

    /// Returns values of all weights, by canonical name: each weight is restricted to a range of rows and a
    /// range of columns that are not aligned to scale blocks.
    fn slices(&self) -> Vec<(String, Vec<f32>)> {
        self.values_in(|n| n / 3..n - n / 4)
    }

    fn values_in(&self, range: fn(usize) -> Range<usize>) -> Vec<(String, Vec<f32>)> {
        let specs = tensors(&self.config);
        let source = WeightSource::open(self.path(), &self.config, &specs).unwrap();
        let values = |spec: &TensorSpec| {
            let [rows, cols] = spec.matrix().map(range);
            let slice = WeightSlice { rows: rows.clone(), cols: cols.clone(), padding: 0 };
            let part = source.part(spec, slice).unwrap();
            let matrix = part.matrix().unwrap();
            let mut values = vec![0.0; rows.len() * cols.len()];
            for (r, row) in values.chunks_mut(cols.len()).enumerate() {
                matrix.read_row(r, row);
            }
            values
        };
        specs.iter().map(|spec| (spec.name.clone(), values(spec))).collect()
    }

    /// Asserts for the part of each weight on each of two ranks that the values that are read from files equal the
    /// values that the hash function computes.
    fn assert_synth_equals_files(&self) {
        let specs = tensors(&self.config);
        let file = WeightSource::open(self.path(), &self.config, &specs).unwrap();
        let synth = WeightSource::Synth { seed: 1, threads: 3 };
        let slice_of = |spec: &TensorSpec, rank| {
            let tp = ParallelRank { rank, size: 2 };
            let ranks = ParallelRanks { tp, ep: ParallelRank::SINGLE };
            spec.shard.slice(spec.matrix(), &self.config, &ranks).unwrap()
        };
        for (spec, rank) in specs.iter().flat_map(|spec| [(spec, 0), (spec, 1)]) {
            let slice = slice_of(spec, rank);
            let parts = [&file, &synth].map(|s| s.part(spec, slice.clone()).unwrap());
            let [a, b] = parts.each_ref().map(|part| part.matrix().unwrap());
            assert_eq!(a.dtype(), b.dtype(), "{}", spec.name);
            assert_eq!(a.activation_scaling(), b.activation_scaling(), "{}", spec.name);
            let mut rows = [vec![0.0; a.cols()], vec![0.0; b.cols()]];
            for r in 0..a.rows() {
                a.read_row(r, &mut rows[0]);
                b.read_row(r, &mut rows[1]);
                assert_eq!(rows[0], rows[1], "{} row {r} of rank {rank}", spec.name);
            }
        }
    }

    /// Returns the error message of `locate`, with the path of the folder replaced by `DIR`.
    fn error(&self) -> String {
        let text = self.locate().unwrap_err().to_string();
        text.replace(&self.path().display().to_string(), "DIR")
    }

    /// Applies `change` to the stored tensors and writes them back to the
    /// file.
    fn edit(&self, change: impl FnOnce(&mut StoredTensorMap)) {
        let path = self.path().join(FILE);
        let bytes = fs::read(&path).unwrap();
        let mut map = BTreeMap::new();
        for (name, StoredTensor { dtype, shape, bytes: range }) in header::parse(&bytes).unwrap() {
            map.insert(name, TestTensor::new(dtype.name(), shape, bytes[range].to_vec()));
        }
        change(&mut map);
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, TestTensor { dtype, shape, bytes }) in map {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            data.extend(bytes);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        fs::write(path, file).unwrap();
    }

    fn edit_index(&self, change: impl FnOnce(&mut Value)) {
        let path = self.path().join(INDEX);
        let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut index["weight_map"]);
        fs::write(path, index.to_string()).unwrap();
    }
}

/// Applies `change` to the tensors of a tiny Qwen3 checkpoint and expects the error `expected`.
fn check(change: impl FnOnce(&mut StoredTensorMap), expected: Expect) {
    let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", u64::MAX);
    folder.edit(change);
    expected.assert_eq(&folder.error());
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

#[test]
fn weights_that_contradict_the_configuration_are_named() {
    check(
        |t| drop(t.remove(Q)),
        expect![
            "DIR: weights do not match the configuration: 1 missing: model.layers.0.self_attn.q_proj.weight; 0 unexpected"
        ],
    );
    check(
        |t| drop(t.insert("model.layers.0.self_attn.q_proj.bias".into(), t[Q].clone())),
        expect![
            "DIR: weights do not match the configuration: 0 missing; 1 unexpected: model.layers.0.self_attn.q_proj.bias"
        ],
    );
    check(
        |t| t.get_mut(Q).unwrap().shape.reverse(),
        expect![
            "DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.weight`: shape [32, 64], but the configuration requires [64, 32]"
        ],
    );
    check(
        |t| {
            let q = t.get_mut(Q).unwrap();
            (q.dtype, q.shape) = ("I8".into(), vec![64, 64]);
        },
        expect![
            "DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.weight`: dtype I8 is not supported for weights; F32, BF16 and F16 are"
        ],
    );
    check(
        |t| {
            for name in t.keys().cloned().collect::<Vec<_>>() {
                let tensor = t.remove(&name).unwrap();
                t.insert(name.replace("model.layers", "transformer.h"), tensor);
            }
        },
        expect![
            "DIR: weights do not match the configuration: 22 missing: model.layers.0.input_layernorm.weight, model.layers.0.post_attention_layernorm.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight, model.layers.0.self_attn.o_proj.weight, model.layers.0.self_attn.q_norm.weight, model.layers.0.self_attn.k_norm.weight, model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight, model.layers.0.mlp.down_proj.weight, model.layers.1.input_layernorm.weight, model.layers.1.post_attention_layernorm.weight, model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.k_proj.weight, model.layers.1.self_attn.v_proj.weight, ...; 22 unexpected: transformer.h.0.input_layernorm.weight, transformer.h.0.mlp.down_proj.weight, transformer.h.0.mlp.gate_proj.weight, transformer.h.0.mlp.up_proj.weight, transformer.h.0.post_attention_layernorm.weight, transformer.h.0.self_attn.k_norm.weight, transformer.h.0.self_attn.k_proj.weight, transformer.h.0.self_attn.o_proj.weight, transformer.h.0.self_attn.q_norm.weight, transformer.h.0.self_attn.q_proj.weight, transformer.h.0.self_attn.v_proj.weight, transformer.h.1.input_layernorm.weight, transformer.h.1.mlp.down_proj.weight, transformer.h.1.mlp.gate_proj.weight, transformer.h.1.mlp.up_proj.weight, transformer.h.1.post_attention_layernorm.weight, ..."
        ],
    );
}

#[test]
fn rotary_table_is_ignored() {
    let folder = TestCheckpointFolder::new("LlamaForCausalLM", u64::MAX);
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    folder.edit(|t| drop(t.insert(name.into(), TestTensor::new("F32", vec![1], vec![0; 4]))));
    assert_eq!(folder.locate().unwrap().len(), tensors(&folder.config).len());
}

#[test]
fn stored_tied_head_must_equal_the_embedding() {
    let json = tiny_json("LlamaForCausalLM").replacen('{', r#"{"tie_word_embeddings":true,"#, 1);
    let folder = TestCheckpointFolder::of(&json, u64::MAX);
    folder.edit(|t| {
        let embedding = t["model.embed_tokens.weight"].clone();
        t.insert("lm_head.weight".into(), embedding);
    });
    folder.locate().unwrap();
    folder.edit(|t| t.get_mut("lm_head.weight").unwrap().bytes[7] ^= 1);
    expect!["DIR/model.safetensors: tensor `lm_head.weight`: differs from the embedding, but tie_word_embeddings is true"].assert_eq(&folder.error());
}

/// Replaces the expert weights of layer 1 by fused tensors that contain all experts, as in published
/// checkpoints.
fn fuse(t: &mut StoredTensorMap, keep_separate: bool) {
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for e in 0..4 {
        let mut take = |weight: &str| {
            let name = format!("model.layers.1.mlp.experts.{e}.{weight}_proj.weight");
            if keep_separate { t[&name].bytes.clone() } else { t.remove(&name).unwrap().bytes }
        };
        gate_up.extend(take("gate"));
        gate_up.extend(take("up"));
        down.extend(take("down"));
    }
    let at = |name: &str| format!("model.layers.1.mlp.experts.{name}");
    t.insert(at("gate_up_proj"), TestTensor::new("BF16", vec![4, 32, 32], gate_up));
    t.insert(at("down_proj"), TestTensor::new("BF16", vec![4, 32, 16], down));
}

#[test]
fn fused_experts_load_equal_bytes() {
    let folder = TestCheckpointFolder::new("Qwen3MoeForCausalLM", u64::MAX);
    let separate = folder.values();
    folder.edit(|t| fuse(t, false));
    assert_eq!(folder.values(), separate);

    let folder = TestCheckpointFolder::new("Qwen3MoeForCausalLM", u64::MAX);
    folder.edit(|t| fuse(t, true));
    expect!["DIR/model.safetensors: tensor `model.layers.1.mlp.experts.gate_up_proj`: contains the weight `model.layers.1.mlp.experts.0.gate_proj.weight`, which is also stored separately"].assert_eq(&folder.error());
}

/// Replaces the fp8 expert weights of layer 1 by fused tensors with one grid of scales per expert.
fn fuse_fp8(
    t: &mut StoredTensorMap,
    scale: &str,
    fused_scales: impl Fn(&str, usize, Vec<Vec<u8>>) -> TestTensor,
) {
    for (fused, parts, shape) in
        [("gate_up", &["gate", "up"][..], [4, 32, 32]), ("down", &["down"], [4, 32, 16])]
    {
        let (mut weights, mut scales, mut scale_shape) = (Vec::new(), Vec::new(), Vec::new());
        for e in 0..4 {
            let mut take = |suffix: &str| -> Vec<Vec<u8>> {
                let at =
                    |part| format!("model.layers.1.mlp.experts.{e}.{part}_proj.weight{suffix}");
                parts.iter().map(|part| t.remove(&at(part)).unwrap().bytes).collect()
            };
            weights.extend(take("").concat());
            let of_expert = fused_scales(fused, e, take(scale));
            scales.extend(of_expert.bytes);
            scale_shape = of_expert.shape;
        }
        let at = format!("model.layers.1.mlp.experts.{fused}_proj");
        t.insert(at.clone(), TestTensor::new("F8_E4M3", shape.to_vec(), weights));
        let shape = [4].into_iter().chain(scale_shape).collect();
        t.insert(format!("{at}{scale}"), TestTensor::new("F32", shape, scales));
    }
}

/// Static activation scales of fused experts: one per expert, one for all, and a wrong number of them.
#[test]
fn fused_fp8_experts_use_their_largest_static_scale() {
    let mut config: Value = serde_json::from_str(&tiny_json("Qwen3MoeForCausalLM")).unwrap();
    config["quantization_config"] = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let expert = |e: usize, part: &str| format!("model.layers.1.mlp.experts.{e}.{part}_proj");
    let of = |found: &BTreeMap<String, WeightLocation>, part: &str| {
        [0, 3].map(|e| found[&format!("{}.weight", expert(e, part))].activation_scaling)
    };
    let separate = folder.locate().unwrap();
    folder.edit(|t| {
        for (fused, parts) in [("gate_up", &["gate", "up"][..]), ("down", &["down"])] {
            let mut scales: Vec<u8> = Vec::new();
            for e in 0..4 {
                let mut take = |part: &str| {
                    t.remove(&format!("{}.input_scale", expert(e, part))).unwrap().bytes
                };
                let scale = |bytes: &Vec<u8>| f32::from_le_bytes(bytes[..4].try_into().unwrap());
                let taken: Vec<f32> = parts.iter().map(|part| scale(&take(part))).collect();
                scales.extend(taken.into_iter().fold(0.0, f32::max).to_le_bytes());
            }
            let name = format!("model.layers.1.mlp.experts.{fused}_proj.input_scale");
            t.insert(name, TestTensor::new("F32", vec![4], scales));
        }
        fuse_fp8(t, "_scale_inv", |_, _, parts| {
            TestTensor::new("F32", vec![1, 1], parts[0].clone())
        });
    });
    let found = folder.locate().unwrap();
    for part in ["gate", "up", "down"] {
        assert_eq!(of(&found, part), of(&separate, part), "{part}");
        assert!(matches!(of(&found, part)[0], ActivationScaling::Static(_)));
    }
    let down = "model.layers.1.mlp.experts.down_proj.input_scale";
    folder.edit(|t| {
        drop(t.insert(down.into(), TestTensor::new("F32", vec![], 3f32.to_le_bytes().into())));
    });
    assert_eq!(of(&folder.locate().unwrap(), "down"), [ActivationScaling::Static(3.0); 2]);
    folder.edit(|t| drop(t.insert(down.into(), TestTensor::new("F32", vec![3], vec![0; 12]))));
    expect!["DIR/model.safetensors: tensor `model.layers.1.mlp.experts.down_proj.input_scale`: shape [3], but the configuration requires [4]"].assert_eq(&folder.error());
}

/// Transposes the fused experts of layer 1 and their scales, and gives them the names of Qwen3-VL-MoE.
fn transpose_experts(t: &mut StoredTensorMap) {
    for (name, tensor) in t.iter_mut().filter(|(name, _)| name.contains(".experts.")) {
        let TestTensor { dtype, shape, bytes } = tensor;
        let size = if dtype == "F32" { 4 } else { 1 };
        let [experts, rows, cols] = [0, 1, 2].map(|i| shape[i] as usize);
        let mut transposed = Vec::new();
        for e in 0..experts {
            for (c, r) in (0..cols).flat_map(|c| (0..rows).map(move |r| (c, r))) {
                let start = ((e * rows + r) * cols + c) * size;
                transposed.extend_from_slice(&bytes[start..start + size]);
            }
        }
        *bytes = transposed;
        shape.swap(1, 2);
        assert!(name.starts_with("model.layers.1."));
    }
}

#[test]
fn fused_fp8_experts_load_equal_values() {
    let channels = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": true,
            "strategy": "token", "dynamic": true}}}});
    let mut config: Value = serde_json::from_str(&tiny_json("Qwen3MoeForCausalLM")).unwrap();
    config["quantization_config"] = channels;
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let separate = folder.values();
    let stack = |fused: &str, _: usize, parts: Vec<Vec<u8>>| {
        assert!(["gate_up", "down"].contains(&fused));
        TestTensor::new("F32", vec![32, 1], parts.concat())
    };
    folder.edit(|t| fuse_fp8(t, "_scale", stack));
    assert_eq!(folder.values(), separate);

    let plain = config.to_string();
    let mut text = config.clone();
    text["model_type"] = json!("qwen3_vl_moe_text");
    let quantization = text.as_object_mut().unwrap().remove("quantization_config");
    let architecture = "Qwen3VLMoeForConditionalGeneration";
    let config = json!({"architectures": [architecture], "text_config": text,
        "quantization_config": quantization});
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    folder.edit(|t| {
        let stored = std::mem::take(t);
        t.extend(
            stored.into_iter().map(|(n, v)| (n.replace("model.language_model.", "model."), v)),
        );
        fuse_fp8(t, "_scale", stack);
        transpose_experts(t);
    });
    assert_eq!(folder.values(), separate, "transposed");
    assert_eq!(
        folder.slices(),
        TestCheckpointFolder::of(&plain, u64::MAX).slices(),
        "transposed slices"
    );
    folder.edit(|t| {
        let scales = t.get_mut("model.layers.1.mlp.experts.down_proj_scale").unwrap();
        scales.shape = vec![4, 32];
    });
    expect!["DIR/model.safetensors: tensor `model.layers.1.mlp.experts.down_proj_scale`: shape [4, 32], but the configuration requires [4, 1, 32]"]
    .assert_eq(&folder.error());
}

#[test]
fn fused_fp8_experts_have_scale_blocks_of_their_own() {
    let mut config: Value = serde_json::from_str(&tiny_json("Qwen3MoeForCausalLM")).unwrap();
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let values = |scale: fn(usize) -> f32| -> Vec<(String, Vec<f32>)> {
        let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
        let scales = |_: &str, e, _: Vec<Vec<u8>>| {
            TestTensor::new("F32", vec![1, 1], scale(e).to_le_bytes().to_vec())
        };
        folder.edit(|t| fuse_fp8(t, "_scale_inv", scales));
        folder.values()
    };
    let (elements, scaled) = (values(|_| 1.0), values(|e| [1.0, 2.0, 4.0, 8.0][e]));
    let mut experts = 0;
    for ((name, elements), (_, scaled)) in elements.iter().zip(&scaled) {
        let Some((_, expert)) = name.split_once("layers.1.mlp.experts.") else { continue };
        let scale = [1.0, 2.0, 4.0, 8.0][expert[..1].parse::<usize>().unwrap()];
        assert!(elements.iter().zip(scaled).all(|(x, y)| x * scale == *y), "{name}");
        experts += 1;
    }
    assert_eq!(experts, 12);
}

/// Stores the attention projections and MLPs of all layers as fused tensors.
fn fuse_rows(t: &mut StoredTensorMap) {
    for layer in 0..2 {
        for (fused, parts) in [
            (
                "self_attn.qkv_proj",
                &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..],
            ),
            ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
        ] {
            let take = |t: &mut BTreeMap<_, _>, suffix| {
                let name = |part: &str| format!("model.layers.{layer}.{part}.weight{suffix}");
                let taken: Vec<TestTensor> =
                    parts.iter().filter_map(|part| t.remove(&name(part))).collect();
                let Some(first) = taken.first() else { return };
                let rows = taken.iter().map(|tensor| tensor.shape[0]).sum();
                let (dtype, shape) = (first.dtype.clone(), vec![rows, first.shape[1]]);
                let bytes = taken.into_iter().flat_map(|tensor| tensor.bytes).collect();
                t.insert(name(fused), TestTensor { dtype, shape, bytes });
            };
            take(t, "");
            take(t, "_scale");
        }
    }
}

#[test]
fn fused_projections_load_equal_values() {
    let channels = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": true,
            "strategy": "token", "dynamic": true}}}});
    for quantization in [Value::Null, channels] {
        let mut config: Value = serde_json::from_str(&tiny_json("LlamaForCausalLM")).unwrap();
        config["quantization_config"] = quantization;
        let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
        let separate = folder.values();
        folder.edit(fuse_rows);
        assert!(folder.locate().unwrap()[Q].stored.ends_with("qkv_proj.weight"));
        assert_eq!(folder.values(), separate);
    }
}

#[test]
fn scale_blocks_may_contain_rows_of_two_projections() {
    // 4 query heads and 2 KV heads of 48 channels: the scale block of rows 128 to 255 contains rows of all
    // three projections.
    let mut config: Value = serde_json::from_str(&tiny_json("LlamaForCausalLM")).unwrap();
    config["head_dim"] = json!(48);
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let separate = folder.values();
    folder.edit(|t| {
        fuse_rows(t);
        for layer in 0..2 {
            let name = |part: &str| format!("model.layers.{layer}.{part}_proj.weight_scale_inv");
            for part in ["self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"] {
                t.remove(&name(part));
            }
            let scales = [1.0f32, 2.0, 4.0].map(f32::to_le_bytes);
            t.insert(name("self_attn.qkv"), TestTensor::new("F32", vec![3, 1], scales.concat()));
            t.insert(name("mlp.gate_up"), TestTensor::new("F32", vec![1, 1], scales[0].to_vec()));
        }
    });
    let fused: BTreeMap<_, _> = folder.values().into_iter().collect();
    let separate: BTreeMap<_, _> = separate.into_iter().collect();
    // The ratio of two weights with equal fp8 elements equals the ratio of their scales.
    let k = "model.layers.0.self_attn.k_proj.weight";
    let ratio = |i: usize| fused[k][i * 32] / separate[k][i * 32];
    assert_eq!(ratio(63), ratio(0), "rows 192 to 255 of the fused tensor have one scale");
    assert_eq!(ratio(64), 2.0 * ratio(0), "row 256 has the next scale");
}

#[test]
fn weights_with_two_spellings_are_rejected_by_both_names() {
    let mut config: Value = serde_json::from_str(&tiny_json("MixtralForCausalLM")).unwrap();
    config["num_local_experts"] = json!(4);
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let gate = "model.layers.1.block_sparse_moe.experts.3.w1.weight";
    folder.edit(|t| {
        assert!(t.contains_key(gate), "synthetic checkpoints have the names of their family");
        t.insert("model.layers.1.mlp.experts.3.gate_proj.weight".into(), t[gate].clone());
    });
    expect!["DIR/model.safetensors: tensor `model.layers.1.mlp.experts.3.gate_proj.weight`: is another spelling of `model.layers.1.block_sparse_moe.experts.3.w1.weight`, which is also stored"]
    .assert_eq(&folder.error());
    folder.edit(|t| drop(t.remove("model.layers.1.mlp.experts.3.gate_proj.weight")));
    folder.locate().unwrap();
    folder.edit(|t| drop(t.remove(gate)));
    expect!["DIR: weights do not match the configuration: 1 missing: model.layers.1.block_sparse_moe.experts.3.w1.weight; 0 unexpected"]
    .assert_eq(&folder.error());
}

#[test]
fn text_part_is_loaded_without_vision_tensors() {
    let mut text: Value = serde_json::from_str(&tiny_json("Qwen3MoeForCausalLM")).unwrap();
    text["model_type"] = json!("qwen3_vl_moe_text");
    let architecture = "Qwen3VLMoeForConditionalGeneration";
    let config = json!({"architectures": [architecture], "text_config": text});
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let plain = TestCheckpointFolder::new("Qwen3MoeForCausalLM", u64::MAX);
    assert_eq!(folder.values(), plain.values(), "transposed experts have equal values");
    folder.edit(|t| {
        let experts = &t["model.language_model.layers.1.mlp.experts.gate_up_proj"];
        assert_eq!(experts.shape, [4, 32, 32]);
        t.insert(
            "model.visual.blocks.0.norm1.weight".into(),
            TestTensor::new("F64", vec![1], vec![0; 8]),
        );
    });
    folder.locate().unwrap();
    folder.edit(|t| {
        drop(t.insert("audio.weight".into(), TestTensor::new("F32", vec![1], vec![0; 4])));
    });
    expect!["DIR: weights do not match the configuration: 0 missing; 1 unexpected: audio.weight"]
        .assert_eq(&folder.error());
}

/// Applies `change` to the index of a checkpoint with several files and expects the error `expected`.
fn check_index(change: impl FnOnce(&mut Value), expected: Expect) {
    let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", 20_000);
    folder.locate().unwrap();
    folder.edit_index(change);
    // The column in the error message depends on the key order in the index, so it is removed.
    let error = folder.error();
    expected.assert_eq(error.split(" column ").next().unwrap());
}

#[test]
fn index_must_agree_with_its_files() {
    check_index(
        |m| m["lm_head.weight"] = json!("model-00003-of-00005.safetensors"),
        expect![
            "DIR/model-00003-of-00005.safetensors: tensor `lm_head.weight`: is in the index but not in the file"
        ],
    );
    check_index(
        |m| m["extra.weight"] = json!("model-00001-of-00005.safetensors"),
        expect![
            "DIR/model-00001-of-00005.safetensors: tensor `extra.weight`: is in the index but not in the file"
        ],
    );
    check_index(
        |m| drop(m.as_object_mut().unwrap().remove(Q)),
        expect![
            "DIR/model-00003-of-00005.safetensors: tensor `model.layers.0.self_attn.q_proj.weight`: is in the file, but the index does not contain it"
        ],
    );
    check_index(
        |m| m[Q] = json!("../model-00001-of-00005.safetensors"),
        expect![
            "DIR/model.safetensors.index.json: `../model-00001-of-00005.safetensors` is not the name of a file in this folder"
        ],
    );
    check_index(
        |m| m[Q] = json!("/etc/passwd"),
        expect![
            "DIR/model.safetensors.index.json: `/etc/passwd` is not the name of a file in this folder"
        ],
    );
    check_index(
        |m| m[Q] = json!(".."),
        expect!["DIR/model.safetensors.index.json: `..` is not the name of a file in this folder"],
    );
    check_index(
        |m| m[Q] = json!("missing.safetensors"),
        expect!["DIR/missing.safetensors: No such file or directory (os error 2)"],
    );
    check_index(
        |m| m[Q] = json!(3),
        expect![
            "DIR/model.safetensors.index.json: invalid index: invalid type: integer `3`, expected a string at line 1"
        ],
    );
}

#[test]
fn duplicate_name_in_two_files_is_rejected() {
    let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", 20_000);
    let from = folder.path().join("model-00001-of-00005.safetensors");
    fs::copy(from, folder.path().join("copy.safetensors")).unwrap();
    folder.edit_index(|m| m["other"] = json!("copy.safetensors"));
    expect!["DIR/model-00001-of-00005.safetensors: tensor `model.embed_tokens.weight`: is also stored in DIR/copy.safetensors"].assert_eq(&folder.error());
}

#[test]
fn folders_without_weights_list_their_content() {
    let dir = TempDir::new().unwrap();
    let error = |dir: &TempDir| {
        let text = SafetensorsCheckpoint::open(dir.path()).unwrap_err().to_string();
        text.replace(&dir.path().display().to_string(), "DIR")
    };
    expect!["DIR: no model.safetensors and no model.safetensors.index.json"]
        .assert_eq(&error(&dir));
    fs::write(dir.path().join("pytorch_model.bin"), "x").unwrap();
    expect!["DIR: no model.safetensors and no model.safetensors.index.json; pickle files (.bin, .pth) can run code and are not read: convert them with save_pretrained(safe_serialization=True) of transformers"].assert_eq(&error(&dir));
    fs::create_dir(dir.path().join(FILE)).unwrap();
    expect!["DIR/model.safetensors: not a regular file"].assert_eq(&error(&dir));
}

#[test]
fn every_truncation_is_an_error() {
    let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", u64::MAX);
    let bytes = fs::read(folder.path().join(FILE)).unwrap();
    for end in 0..bytes.len() {
        assert!(header::parse(&bytes[..end]).is_err(), "{end} of {} bytes", bytes.len());
    }
    assert!(header::parse(&bytes).is_ok());
}

/// Names and locations of all stored tensors; `None` if the header is rejected.
fn outcome(file: &[u8], specs: &[TensorSpec]) -> Option<Vec<(String, StoredTensor)>> {
    let mut tensors = header::parse(file).ok()?;
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let fits = |spec: &TensorSpec| {
        let found = tensors.iter().find(|(name, _)| *name == spec.name);
        found.is_some_and(|(_, t)| t.shape.iter().copied().eq(spec.shape.iter().map(|d| *d as u64)))
    };
    (tensors.len() == specs.len() && specs.iter().all(fits)).then_some(tensors)
}

#[test]
fn mutated_header_is_rejected_or_equivalent() {
    let folder = TestCheckpointFolder::new("Qwen3MoeForCausalLM", u64::MAX);
    let specs = tensors(&folder.config);
    let original = fs::read(folder.path().join(FILE)).unwrap();
    let intact = outcome(&original, &specs).unwrap();
    let data_start = intact.iter().map(|(_, t)| t.bytes.start).min().unwrap();
    let (mut equivalent, mut state) = (0, 1u64);
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    const MUTATIONS: usize = 30_000;
    for round in 0..MUTATIONS {
        let mut bytes = original.clone();
        for _ in 0..=random(3) {
            let at = random(data_start);
            match random(4) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = b"0123456789,:[]{}\" "[random(18)],
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random(256) as u8),
            }
        }
        if let Some(tensors) = outcome(&bytes, &specs) {
            let read = |file: &[u8], t: &[(String, StoredTensor)]| -> Vec<(String, Vec<u8>)> {
                t.iter().map(|(n, t)| (n.clone(), file[t.bytes.clone()].to_vec())).collect()
            };
            assert_eq!(read(&bytes, &tensors), read(&original, &intact), "round {round}");
            equivalent += 1;
        }
    }
    assert!(equivalent < MUTATIONS / 10, "{equivalent} of {MUTATIONS} mutations are accepted");
}

/// One rank's part of a weight as f32 rows, without padding rows.
fn part(
    source: &WeightSource,
    spec: &TensorSpec,
    config: &ModelConfig,
    ranks: &ParallelRanks,
) -> Vec<Vec<f32>> {
    let slice = spec.shard.slice(spec.matrix(), config, ranks).unwrap();
    let part = source.part(spec, slice).unwrap();
    let matrix = part.matrix().unwrap();
    let row = |r| {
        let mut row = vec![0.0; matrix.cols()];
        matrix.read_row(r, &mut row);
        row
    };
    (0..matrix.rows()).map(row).collect()
}

/// Combines the parts of all ranks into the whole weight, according to its sharding.
fn join(spec: &TensorSpec, parts: Vec<Vec<Vec<f32>>>) -> Vec<Vec<f32>> {
    match spec.shard {
        ShardSpec::Replicated => parts.into_iter().next().unwrap(),
        ShardSpec::Rows(_) | ShardSpec::ExpertRows => {
            let rows = 0..parts[0].len();
            rows.map(|r| parts.iter().flat_map(|p| p[r].clone()).collect()).collect()
        }
        ShardSpec::Heads(AttentionHeadKind::KeyValue) => {
            let mut rows = Vec::new();
            for part in parts {
                if rows.len() < part.len() || !rows.ends_with(&part) {
                    rows.extend(part); // A KV head on several ranks occurs several times.
                }
            }
            rows
        }
        _ => parts.into_iter().flatten().collect(),
    }
}

#[test]
fn shards_of_all_ranks_reassemble_files_and_synth() {
    for architecture in ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"] {
        let folder = TestCheckpointFolder::new(architecture, 20_000);
        let specs = tensors(&folder.config);
        let files = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
        let synth = WeightSource::Synth { seed: 1, threads: 3 };
        for spec in &specs {
            let whole = part(&files, spec, &folder.config, &ParallelRanks::SINGLE);
            for (source, size) in [(&files, 2), (&files, 4), (&synth, 1), (&synth, 2), (&synth, 4)]
            {
                let ranks = |rank| ParallelRanks {
                    tp: ParallelRank { rank, size },
                    ep: ParallelRank::SINGLE,
                };
                let parts = (0..size).map(|r| part(source, spec, &folder.config, &ranks(r)));
                assert!(join(spec, parts.collect()) == whole, "{} over {size}", spec.name);
            }
        }
    }
}

#[test]
fn all_dtypes_load_equal_values() {
    let folder = TestCheckpointFolder::new("Qwen3MoeForCausalLM", u64::MAX);
    folder.edit(|t| {
        for (i, TestTensor { dtype, bytes, .. }) in t.values_mut().enumerate() {
            let floats = bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b));
            let floats: Vec<f32> = floats.map(half::bf16::to_f32).collect();
            match i % 3 {
                0 => {}
                1 => {
                    *bytes = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
                    *dtype = "F32".into();
                }
                _ => {
                    let f16 = |x: &f32| half::f16::from_f32(*x).to_le_bytes();
                    *bytes = floats.iter().flat_map(f16).collect();
                    *dtype = "F16".into();
                }
            }
        }
    });
    let specs = tensors(&folder.config);
    let files = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
    let synth = WeightSource::Synth { seed: 1, threads: 1 };
    for spec in &specs {
        let read = |source| part(source, spec, &folder.config, &ParallelRanks::SINGLE);
        assert!(read(&files) == read(&synth), "{}", spec.name);
    }
}
