//! Tests of loading FP8 checkpoints: quantised weights require scales.

use super::super::source::{HostWeightShard, WeightScales};
use super::*;
use ops::DType;

/// Configuration of a tiny model with fp8 linear layers; `scales` selects block scales or channel scales.
fn quantized_json(scales: Value) -> String {
    let mut config: Value = serde_json::from_str(&tiny_json("Qwen3ForCausalLM")).unwrap();
    config["hidden_size"] = json!(192);
    config["quantization_config"] = scales;
    config.to_string()
}

fn blocks() -> Value {
    json!({"quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.1.mlp.down_proj"]})
}

fn static_tensors() -> Value {
    json!({"quant_method": "fp8", "activation_scheme": "static",
        "ignored_layers": ["model.layers.1.mlp.down_proj"]})
}

const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

#[test]
fn quantized_weights_come_with_scales() {
    let folder = TestCheckpointFolder::of(&quantized_json(blocks()), u64::MAX);
    let found = folder.locate().unwrap();
    assert_eq!(found[Q].scales.as_deref(), Some(&*format!("{Q}_scale_inv")));
    assert_eq!((found[DOWN].dtype, &found[DOWN].scales), (StoredDType::BF16, &None));
    assert_eq!(found["lm_head.weight"].dtype, StoredDType::BF16);

    folder.edit(|t| drop(t.remove(&format!("{Q}_scale_inv"))));
    expect![
        "DIR: weights do not match the configuration: 1 missing: model.layers.0.self_attn.q_proj.weight_scale_inv; 0 unexpected"
    ]
    .assert_eq(&folder.error());
}

#[test]
fn mismatched_scales_and_undeclared_fp8_are_rejected() {
    let folder = TestCheckpointFolder::of(&quantized_json(blocks()), u64::MAX);
    folder.edit(|t| t.get_mut(&format!("{Q}_scale_inv")).unwrap().shape.reverse());
    expect![
        "DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.weight_scale_inv`: shape [2, 1], but the configuration requires [1, 2]"
    ]
    .assert_eq(&folder.error());
    check(
        |t| {
            let TestTensor { dtype, shape, bytes } = t.get_mut(Q).unwrap();
            (*dtype, *bytes) =
                ("F8_E4M3".to_owned(), vec![0; shape.iter().product::<u64>() as usize]);
        },
        expect![
            "DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.weight`: dtype F8_E4M3 is not supported for weights; F32, BF16 and F16 are"
        ],
    );
}

/// For each rank's part of a weight, the values that are read from files equal the values that the hash
/// function computes.
#[test]
fn quantized_values_match_the_file() {
    let channels = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                "dynamic": true}}}});
    for scales in [blocks(), channels, static_tensors()] {
        let folder = TestCheckpointFolder::of(&quantized_json(scales), u64::MAX);
        folder.assert_synth_equals_files();
    }
}

/// A scale may be stored under either of two names; if it is stored under both, the two values must be equal.
#[test]
fn both_names_of_a_scale_are_read_and_must_agree() {
    let [inverse, plain] = ["_scale_inv", "_scale"].map(|suffix| format!("{Q}{suffix}"));
    let module = Q.strip_suffix(".weight").unwrap();
    let [input, activation] =
        ["input_scale", "activation_scale"].map(|name| format!("{module}.{name}"));
    let folder = TestCheckpointFolder::of(&quantized_json(static_tensors()), u64::MAX);
    let before = folder.locate().unwrap()[Q].clone();
    assert_eq!(before.scales.as_ref(), Some(&inverse));
    folder.edit(|t| {
        for (from, to) in [(&inverse, &plain), (&input, &activation)] {
            let mut scale = t.remove(from).unwrap();
            scale.shape = vec![1]; // One scale is stored as `[]` or as `[1]`.
            t.insert(to.clone(), scale);
        }
    });
    let after = folder.locate().unwrap()[Q].clone();
    assert_eq!(after.scales.as_ref(), Some(&plain));
    assert_eq!(after.activation_scaling, before.activation_scaling);
    assert!(matches!(after.activation_scaling, ActivationScaling::Static(scale) if scale > 0.0));

    folder.edit(|t| drop(t.insert(input.clone(), t[&activation].clone())));
    assert_eq!(folder.locate().unwrap()[Q], after);
    folder.edit(|t| t.get_mut(&activation).unwrap().bytes = 3f32.to_le_bytes().to_vec());
    expect!["DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.activation_scale`: differs from `model.layers.0.self_attn.q_proj.input_scale`, which is another name of this scale"].assert_eq(&folder.error());
    folder.edit(|t| {
        t.remove(&activation);
        t.get_mut(&input).unwrap().bytes = 0f32.to_le_bytes().to_vec();
    });
    expect!["DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.input_scale`: scale 0 is not a finite number above 0"].assert_eq(&folder.error());
    folder.edit(|t| drop(t.remove(&input)));
    expect!["DIR: weights do not match the configuration: 1 missing: model.layers.0.self_attn.q_proj.input_scale; 0 unexpected"].assert_eq(&folder.error());
}

/// Scales that are powers of two may be stored as exponents (E8M0).
#[test]
fn e8m0_scales_are_read() {
    let folder =
        TestCheckpointFolder::of(&quantized_json(with_power_of_two_scales(blocks())), u64::MAX);
    let specs = tensors(&folder.config);
    let spec = specs.iter().find(|spec| spec.name == Q).unwrap();
    let row = || {
        let source = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
        let slice =
            spec.shard.slice(spec.matrix(), &folder.config, &ParallelRanks::SINGLE).unwrap();
        let part = source.part(spec, slice).unwrap();
        let matrix = part.matrix().unwrap();
        assert_eq!(matrix.activation_scaling(), ActivationScaling::PowerOfTwo);
        let mut row = vec![0.0; matrix.cols()];
        matrix.read_row(3, &mut row);
        row
    };
    let before = row();
    folder.edit(|t| {
        let TestTensor { dtype, bytes, .. } = t.get_mut(&format!("{Q}_scale_inv")).unwrap();
        let exponent = |word: &[u8; 4]| (u32::from_le_bytes(*word) >> 23) as u8;
        let bits = bytes.as_chunks::<4>().0.iter().map(exponent).collect();
        (*dtype, *bytes) = ("F8_E8M0".to_owned(), bits);
    });
    assert_eq!(row(), before);
}

fn with_power_of_two_scales(mut config: Value) -> Value {
    config["scale_fmt"] = json!("ue8m0");
    config
}

#[test]
fn scales_of_the_cache_are_finite_and_above_zero() {
    const NAME: &str = "model.layers.0.self_attn.k_proj.k_scale";
    let read_shape = |dtype: &str, shape: Vec<u64>, bytes: Vec<u8>| {
        let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", u64::MAX);
        folder.edit(|t| drop(t.insert(NAME.into(), TestTensor::new(dtype, shape, bytes))));
        let source =
            WeightSource::open(folder.path(), &folder.config, &tensors(&folder.config)).unwrap();
        source.head_scales(&[NAME.to_owned()], 3).map_err(|error| error.to_string())
    };
    let read = |dtype: &str, bytes: Vec<u8>| read_shape(dtype, vec![], bytes);
    let bytes = |scales: &[f32]| scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let per_head = vec![0.5, 2.0, 1.0];
    assert_eq!(read_shape("F32", vec![3, 1, 1], bytes(&per_head)), Ok(Some(per_head)));
    assert_eq!(read_shape("F32", vec![3], bytes(&[0.5; 3])), Ok(Some(vec![0.5])));
    assert_eq!(read("F32", bytes(&[0.5])), Ok(Some(vec![0.5])));
    let error = read_shape("F32", vec![2], bytes(&[0.5, 2.0])).unwrap_err();
    assert!(error.contains("2 scales") && error.contains("3 KV heads"), "{error}");
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = read("F32", wrong.to_le_bytes().to_vec()).unwrap_err();
        assert!(error.contains(NAME) && error.contains("finite number"), "{error}");
    }
    let error = read("I32", vec![1, 0, 0, 0]).unwrap_err();
    assert!(error.contains(NAME) && error.contains("I32"), "{error}");
}

/// The inputs of `o_proj` are attention outputs that are divided by the value scale of the fp8 KV cache. The
/// weight is therefore multiplied by the value scale, and the static activation scale is divided by it.
#[test]
fn scaled_weights_divide_their_static_scale() {
    let slice = WeightSlice { rows: 0..1, cols: 0..1, padding: 0 };
    let shard = HostWeightShard {
        bytes: vec![0x38].into(), // 1 in FP8 e4m3
        dtype: DType::F8E4M3,
        full_shape: [1, 1],
        slice,
        scales: None,
        activation_scaling: ActivationScaling::Static(0.5),
    };
    let scaled = shard.scaled(&[0.25]);
    let matrix = scaled.matrix().unwrap();
    let mut value = [0.0];
    matrix.read_row(0, &mut value);
    assert_eq!((value, scaled.activation_scaling), ([0.25], ActivationScaling::Static(2.0)));
}

/// Each head has its value scale: the columns of its channels are multiplied by it, whatever blocks share a
/// scale in the file.
#[test]
fn columns_are_scaled_by_the_value_scale_of_their_head() {
    let factors = [0.5, 4.0];
    let [rows, cols] = [256, 512];
    let column = |col: usize| factors[col / 256];
    for (block_shape, blocks) in
        [(None, [128, 128]), (Some([128, 128]), [128, 128]), (Some([1, 512]), [1, 128])]
    {
        let scale = |row: usize, col: usize| {
            block_shape.map_or(1.0, |[r, c]: [usize; 2]| (1 + row / r + 3 * (col / c)) as f32)
        };
        let values = |[r, c]: [usize; 2]| -> Vec<f32> {
            let places = (0..rows).step_by(r);
            places.flat_map(|row| (0..cols).step_by(c).map(move |col| scale(row, col))).collect()
        };
        let shard = HostWeightShard {
            bytes: vec![0x38; rows * cols].into(), // 1 in FP8 e4m3
            dtype: DType::F8E4M3,
            full_shape: [rows, cols],
            slice: WeightSlice { rows: 0..rows, cols: 128..512, padding: 0 },
            scales: block_shape
                .map(|shape| WeightScales { values: values(shape), block_shape: shape }),
            activation_scaling: ActivationScaling::Static(0.5),
        };
        let scaled = shard.scaled(&factors);
        assert_eq!(scaled.activation_scaling, ActivationScaling::default());
        let matrix = scaled.matrix().unwrap();
        assert_eq!(matrix.scales().unwrap().block_shape(), blocks);
        let mut found = vec![0.0; 384];
        for row in [0, 127, 128, 255] {
            matrix.read_row(row, &mut found);
            let expected: Vec<f32> = (128..512).map(|col| scale(row, col) * column(col)).collect();
            assert_eq!(found, expected, "row {row} of {block_shape:?}");
        }
    }
}
