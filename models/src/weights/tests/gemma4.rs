//! Tests of loading Gemma 4: names of published checkpoints, and layers with fewer weights.

use super::*;

const EXPERTS: &str = "model.language_model.layers.0.experts.gate_up_proj";

/// Fields of a model with one layer with a window and one without, of which the second has no value projection.
fn text_fields() -> Value {
    let mut fields: Value = serde_json::from_str(&tiny_json("Gemma4ForCausalLM")).unwrap();
    let more = json!({"model_type": "gemma4_text", "enable_moe_block": true, "top_k_experts": 2,
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32,
        "num_global_key_value_heads": 1, "attention_k_eq_v": true, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 272});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

#[test]
fn gemma4_text_part_has_the_published_names() {
    let config =
        json!({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text_fields()});
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let plain = TestCheckpointFolder::of(&text_fields().to_string(), u64::MAX);
    assert_eq!(folder.values(), plain.values());
    folder.edit(|t| {
        let layer = "model.language_model.layers.1";
        for name in
            ["layer_scalar", "router.scale", "router.per_expert_scale", "router.proj.weight"]
        {
            assert!(t.contains_key(&format!("{layer}.{name}")), "{name}");
        }
        assert!(t.contains_key("model.language_model.embed_tokens_per_layer.weight"));
        assert!(!t.contains_key(&format!("{layer}.self_attn.v_proj.weight")));
        assert_eq!(t[&format!("{layer}.self_attn.k_proj.weight")].shape, [32, 32]);
        assert_eq!(t[EXPERTS].shape, [4, 2 * 16, 32]);
        for name in [
            "vision_tower.w",
            "vision_embedder.w",
            "audio_tower.w",
            "embed_vision.w",
            "embed_audio.w",
        ] {
            t.insert(format!("model.{name}"), TestTensor::new("F64", vec![1], vec![0; 8]));
        }
    });
    folder.locate().unwrap();
    folder.edit(|t| drop(t.remove(EXPERTS)));
    assert!(folder.error().contains("experts"), "{}", folder.error());
}

/// Published checkpoints of models with shared keys and values have key and value weights for all layers.
#[test]
fn key_weights_of_layers_that_share_keys_are_ignored() {
    let mut fields = text_fields();
    let more = json!({"num_hidden_layers": 4, "num_kv_shared_layers": 2, "attention_k_eq_v": false,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let folder = TestCheckpointFolder::of(&fields.to_string(), u64::MAX);
    let insert = |name: &str| {
        folder.edit(|t| {
            assert!(!t.contains_key(name), "{name}");
            t.insert(name.to_owned(), TestTensor::new("F64", vec![1], vec![0; 8]));
        });
    };
    for module in ["k_proj", "v_proj", "k_norm", "v_norm"] {
        insert(&format!("model.layers.3.self_attn.{module}.weight"));
    }
    folder.locate().unwrap();
    insert("model.layers.1.self_attn.v_norm.weight");
    assert!(folder.error().contains("layers.1.self_attn.v_norm"), "{}", folder.error());
}

#[test]
fn ranks_have_the_heads_of_each_layer() {
    let folder = TestCheckpointFolder::of(&text_fields().to_string(), u64::MAX);
    let ranks = ParallelRanks { tp: ParallelRank { rank: 1, size: 2 }, ep: ParallelRank::SINGLE };
    let rows = |name: &str| {
        let specs = tensors(&folder.config);
        let spec = specs.iter().find(|spec| spec.name == name).unwrap();
        let config = folder.config.at_layer(spec.layer.unwrap());
        spec.shard.slice(spec.matrix(), &config, &ranks).unwrap().rows
    };
    let key = |layer: usize| rows(&format!("model.layers.{layer}.self_attn.k_proj.weight"));
    assert_eq!((key(0), key(1)), (16..32, 0..32), "both ranks have the only head of layer 1");
    assert_eq!(rows("model.layers.1.self_attn.q_proj.weight"), 64..128);
}
