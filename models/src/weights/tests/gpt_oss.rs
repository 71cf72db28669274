//! Tests of loading gpt-oss: experts in MXFP4, unquantised experts whose gate and up rows alternate, and biases.

use super::*;

const BLOCKS: &str = "model.layers.1.mlp.experts.gate_up_proj_blocks";
const SCALES: &str = "model.layers.1.mlp.experts.gate_up_proj_scales";
const FIRST_GATE: &str = "model.layers.1.mlp.experts.0.gate_proj.weight";

fn fields() -> Value {
    json!({"architectures": ["GptOssForCausalLM"], "vocab_size": 272, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "num_local_experts": 3, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "eos_token_id": 1})
}

pub(super) fn mxfp4() -> TestCheckpointFolder {
    let mut fields = fields();
    fields["quantization_config"] = json!({"quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]});
    TestCheckpointFolder::of(&fields.to_string(), u64::MAX)
}

#[test]
fn mxfp4_experts_have_the_published_names() {
    let folder = mxfp4();
    folder.edit(|t| {
        let stored = |name: &str| (t[name].dtype.clone(), t[name].shape.clone());
        assert_eq!(stored(BLOCKS), ("U8".into(), vec![3, 320, 2, 16]));
        assert_eq!(stored(SCALES), ("U8".into(), vec![3, 320, 2]));
        let bias = "model.layers.1.mlp.experts.gate_up_proj_bias";
        assert_eq!(stored(bias), ("BF16".into(), vec![3, 320]));
        for name in ["experts.down_proj_blocks", "experts.down_proj_bias", "router.bias"] {
            assert!(t.contains_key(&format!("model.layers.1.mlp.{name}")), "{name}");
        }
        assert_eq!(stored("model.layers.0.self_attn.sinks"), ("BF16".into(), vec![4]));
    });
    assert_eq!(folder.locate().unwrap()[FIRST_GATE].stored, BLOCKS);
}

#[test]
fn values_of_gpt_oss_match_the_file() {
    mxfp4().assert_synth_equals_files();
    TestCheckpointFolder::of(&fields().to_string(), u64::MAX).assert_synth_equals_files();
}

/// The first row of blocks is the gate of channel 0, the second one is its up projection.
#[test]
fn mxfp4_elements_are_read_low_half_first() {
    let folder = mxfp4();
    folder.edit(|t| {
        t.get_mut(BLOCKS).unwrap().bytes[..3].copy_from_slice(&[0x10, 0xf7, 0x02]);
        t.get_mut(BLOCKS).unwrap().bytes[32] = 0x34;
        t.get_mut(SCALES).unwrap().bytes[..3].copy_from_slice(&[128, 127, 126]);
    });
    let values = folder.values();
    let row = |name: &str| &values.iter().find(|(of, _)| of == name).unwrap().1;
    assert_eq!(row(FIRST_GATE)[..5], [0.0, 1.0, 12.0, -12.0, 2.0]);
    let up = FIRST_GATE.replace("gate", "up");
    assert_eq!(row(&up)[..2], [1.0, 0.75]);
}

/// Returns the error message of loading the gate projection of the first expert.
fn gate_error(folder: &TestCheckpointFolder) -> String {
    let specs = tensors(&folder.config);
    let source = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
    let spec = specs.iter().find(|spec| spec.name == FIRST_GATE).unwrap();
    let slice = spec.shard.slice(spec.matrix(), &folder.config, &ParallelRanks::SINGLE).unwrap();
    source.part(spec, slice).unwrap_err().to_string()
}

/// The down projections of published checkpoints have 90 groups of inputs, which 4 ranks divide within a group.
#[test]
fn ranks_may_divide_a_group_of_mxfp4_weights() {
    let mut fields = fields();
    for (name, size) in
        [("hidden_size", 2880), ("intermediate_size", 2880), ("num_attention_heads", 64)]
    {
        fields[name] = json!(size);
    }
    fields["num_key_value_heads"] = json!(8);
    fields["quantization_config"] = json!({"quant_method": "mxfp4"});
    let config = ModelConfig::from_json(Path::new("config.json"), &fields.to_string()).unwrap();
    for size in [2, 4, 8] {
        let ranks = ParallelRanks { tp: ParallelRank { rank: 1, size }, ep: ParallelRank::SINGLE };
        crate::weights::check_split(&config, &ranks, None).unwrap();
    }
}

#[test]
fn invalid_mxfp4_tensors_are_rejected() {
    let folder = mxfp4();
    folder.edit(|t| t.get_mut(SCALES).unwrap().bytes[5] = 253);
    let error = gate_error(&folder);
    assert!(error.contains(SCALES) && error.contains("scale 8507059"), "{error}");
    folder.edit(|t| t.get_mut(SCALES).unwrap().bytes[5] = u8::MAX);
    let error = gate_error(&folder);
    assert!(error.contains(SCALES) && error.contains("scale NaN"), "{error}");
    folder.edit(|t| t.get_mut(BLOCKS).unwrap().shape.swap(2, 3));
    expect!["DIR/model.safetensors: tensor `model.layers.1.mlp.experts.gate_up_proj_blocks`: shape [3, 320, 16, 2], but the configuration requires [3, 320, 2, 16]"].assert_eq(&folder.error());
    folder.edit(|t| drop(t.remove(BLOCKS)));
    expect!["DIR: weights do not match the configuration: 6 missing: model.layers.1.mlp.experts.0.gate_proj.weight, model.layers.1.mlp.experts.0.up_proj.weight, model.layers.1.mlp.experts.1.gate_proj.weight, model.layers.1.mlp.experts.1.up_proj.weight, model.layers.1.mlp.experts.2.gate_proj.weight, model.layers.1.mlp.experts.2.up_proj.weight; 1 unexpected: model.layers.1.mlp.experts.gate_up_proj_scales"].assert_eq(&folder.error());
}
