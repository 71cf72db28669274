//! Tests of loading FP8 checkpoints: quantised weights require scales.

use super::*;

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

const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

#[test]
fn quantized_weights_come_with_scales() {
    let folder = CheckpointFolder::of(&quantized_json(blocks()), u64::MAX);
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
    let folder = CheckpointFolder::of(&quantized_json(blocks()), u64::MAX);
    folder.edit(|t| t.get_mut(&format!("{Q}_scale_inv")).unwrap().1.reverse());
    expect![
        "DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.weight_scale_inv`: shape [2, 1], but the configuration requires [1, 2]"
    ]
    .assert_eq(&folder.error());
    check(
        |t| {
            let (dtype, shape, bytes) = t.get_mut(Q).unwrap();
            (*dtype, *bytes) =
                ("F8_E4M3".to_owned(), vec![0; shape.iter().product::<u64>() as usize]);
        },
        expect![
            "DIR/model.safetensors: tensor `model.layers.0.self_attn.q_proj.weight`: dtype F8_E4M3 is not supported for weights; F32, BF16 and F16 are"
        ],
    );
}

/// For the parts of all ranks, values read from files equal the values that the hash function computes.
#[test]
fn quantized_values_match_the_file() {
    let channels = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                "dynamic": true}}}});
    for scales in [blocks(), channels] {
        let folder = CheckpointFolder::of(&quantized_json(scales), u64::MAX);
        let specs = tensors(&folder.config);
        let file = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
        let synth = WeightSource::Synth { seed: 1, threads: 3 };
        for spec in &specs {
            for rank in 0..2 {
                let ranks =
                    ParallelRanks { tp: ParallelRank { rank, size: 2 }, ep: ParallelRank::SINGLE };
                let slice = spec.shard.slice(spec.matrix(), &folder.config, &ranks).unwrap();
                let parts = [&file, &synth].map(|s| s.part(spec, slice.clone()).unwrap());
                let [a, b] = parts.each_ref().map(|part| part.matrix().unwrap());
                assert_eq!(a.dtype(), b.dtype(), "{}", spec.name);
                let mut rows = [vec![0.0; a.cols()], vec![0.0; b.cols()]];
                for r in 0..a.rows() {
                    a.read_row(r, &mut rows[0]);
                    b.read_row(r, &mut rows[1]);
                    assert_eq!(rows[0], rows[1], "{} row {r} of rank {rank}", spec.name);
                }
            }
        }
    }
}

#[test]
fn scales_of_the_cache_are_finite_and_above_zero() {
    const NAME: &str = "model.layers.0.self_attn.k_proj.k_scale";
    let read = |dtype: &str, bytes: Vec<u8>| {
        let folder = CheckpointFolder::new("Qwen3ForCausalLM", u64::MAX);
        folder.edit(|t| drop(t.insert(NAME.into(), (dtype.into(), vec![], bytes))));
        let source =
            WeightSource::open(folder.path(), &folder.config, &tensors(&folder.config)).unwrap();
        source.scale(&[NAME.to_owned()]).map_err(|error| error.to_string())
    };
    assert_eq!(read("F32", 0.5f32.to_le_bytes().to_vec()), Ok(Some(0.5)));
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = read("F32", wrong.to_le_bytes().to_vec()).unwrap_err();
        assert!(error.contains(NAME) && error.contains("finite number"), "{error}");
    }
    let error = read("I32", vec![1, 0, 0, 0]).unwrap_err();
    assert!(error.contains(NAME) && error.contains("I32"), "{error}");
}
