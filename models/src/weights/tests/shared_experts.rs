//! Tests of loading shared experts, which checkpoints store as one MLP of all shared experts.

use super::super::expert_weights::{matrices, same_storage};
use super::super::source::HostWeightShard;
use super::*;
use ops::ExpertMatrices;

/// Configuration of DeepSeek-V2 with one layer and two shared experts, each with the intermediate size
/// `width`.
fn json(width: usize, scales: &Value) -> String {
    let mut config = json!({
        "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 272, "hidden_size": 192,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "q_lora_rank": null,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width,
        "first_k_dense_replace": 0, "n_shared_experts": 2
    });
    if !scales.is_null() {
        config["quantization_config"] = scales.clone();
    }
    config.to_string()
}

fn blocks(ignored: &str) -> Value {
    json!({"quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": [ignored]})
}

const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn spec<'a>(specs: &'a [TensorSpec], of: &str, projection: &str) -> &'a TensorSpec {
    let name = format!("model.layers.0.mlp.{of}.{projection}.weight");
    specs.iter().find(|spec| spec.name == name).unwrap()
}

/// For each intermediate channel: the gate row, the up row and the down column.
type ExpertChannels = Vec<Vec<f32>>;

fn channels(matrices: &[ops::HostMat<'_>; 3]) -> ExpertChannels {
    let values = matrices.map(|matrix| {
        let mut rows = vec![vec![0.0; matrix.cols()]; matrix.rows()];
        rows.iter_mut().enumerate().for_each(|(r, row)| matrix.read_row(r, row));
        rows
    });
    let [gate, up, down] = values;
    let column = |i: usize| down.iter().map(move |row| row[i]);
    let channel = |(i, (gate, up)): (usize, (Vec<f32>, Vec<f32>))| {
        gate.into_iter().chain(up).chain(column(i)).collect()
    };
    gate.into_iter().zip(up).enumerate().map(channel).collect()
}

/// Every intermediate channel, with its gate row, up row and down column, belongs to one shared expert on one
/// rank.
#[test]
fn shared_expert_shards_cover_the_mlp() {
    let cases = [(48, Value::Null, 1), (48, Value::Null, 2), (128, blocks("none"), 1)];
    for (width, scales, size) in cases.into_iter().chain([(256, blocks("none"), 2)]) {
        let folder = TestCheckpointFolder::of(&json(width, &scales), u64::MAX);
        let specs = tensors(&folder.config);
        let source = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
        let parts = |ranks: &ParallelRanks| -> [HostWeightShard<'_>; 3] {
            PROJECTIONS.map(|projection| {
                let spec = spec(&specs, "shared_experts", projection);
                let slice = spec.shard.slice(spec.matrix(), &folder.config, ranks).unwrap();
                source.part(spec, slice).unwrap()
            })
        };
        let whole = parts(&ParallelRanks::SINGLE);
        let whole = channels(&whole.each_ref().map(|part| part.matrix().unwrap()));
        assert_eq!(whole.len(), 2 * width);
        let mut found = ExpertChannels::new();
        for rank in 0..size {
            let part = [parts(&ParallelRanks {
                tp: ParallelRank { rank, size },
                ep: ParallelRank::SINGLE,
            })];
            let ExpertMatrices { gate_up, down } = matrices(&part, 2).unwrap();
            assert_eq!((gate_up.len(), down.len()), (2, 2));
            for (gate_up, down) in gate_up.iter().zip(&down) {
                let ([gate, up], [down]) = (&gate_up[..], &down[..]) else {
                    panic!("a gate, an up and a down projection")
                };
                assert_eq!(gate.rows(), width / size, "width of a sharded expert");
                found.extend(channels(&[*gate, *up, *down]));
            }
        }
        assert!(found == whole, "{width} channels, {size} ranks");
    }
}

/// In fp8, shared experts can only be separated at scale block boundaries. They are not fused with the routed
/// experts if shared and routed experts are stored in different formats.
#[test]
fn differently_stored_shared_experts_stay_separate() {
    let alike = |width: usize, scales: Value| {
        let folder = TestCheckpointFolder::of(&json(width, &scales), u64::MAX);
        let specs = tensors(&folder.config);
        let files = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
        let found = [files, WeightSource::Synth { seed: 1, threads: 1 }].map(|source| {
            let spec = |of, p| spec(&specs, of, p);
            let moe = folder.config.moe.as_ref().unwrap();
            let is_alike =
                |p| same_storage(&source, moe, spec("experts.0", p), spec("shared_experts", p));
            PROJECTIONS.into_iter().all(is_alike)
        });
        assert_eq!(found[0], found[1], "files and synthetic values");
        found[0]
    };
    assert!(alike(48, Value::Null));
    assert!(alike(128, blocks("none")));
    assert!(!alike(192, blocks("none")), "a scale block spans two experts");
    assert!(!alike(128, blocks("model.layers.0.mlp.shared_experts.down_proj")));
    assert!(!alike(128, blocks("model.layers.0.mlp.experts.0.down_proj")));
    let channels = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                "dynamic": true}}}});
    assert!(!alike(128, channels));
}
