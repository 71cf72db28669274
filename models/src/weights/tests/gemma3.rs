//! Tests of loading Gemma 3: zero-centred sandwich norms, and the text part of the multimodal models.

use super::*;

const MULTIMODAL: &str = "Gemma3ForConditionalGeneration";
const NORM: &str = "language_model.model.layers.0.pre_feedforward_layernorm.weight";

fn text_fields() -> Value {
    let mut fields: Value = serde_json::from_str(&tiny_json("Gemma3ForCausalLM")).unwrap();
    fields["model_type"] = json!("gemma3_text");
    fields
}

#[test]
fn gemma3_text_part_has_the_published_names() {
    let config = json!({"architectures": [MULTIMODAL], "text_config": text_fields()});
    let folder = TestCheckpointFolder::of(&config.to_string(), u64::MAX);
    let plain = TestCheckpointFolder::of(&text_fields().to_string(), u64::MAX);
    assert_eq!(folder.values(), plain.values());
    folder.edit(|t| {
        assert!(t.contains_key(NORM) && t.contains_key("language_model.model.norm.weight"));
        for name in ["multi_modal_projector.mm_soft_emb_norm.weight", "vision_tower.w"] {
            t.insert(name.into(), TestTensor::new("F64", vec![1], vec![0; 8]));
        }
    });
    folder.locate().unwrap();
    folder.edit(|t| drop(t.remove(NORM)));
    expect![
        "DIR: weights do not match the configuration: 1 missing: language_model.model.layers.0.pre_feedforward_layernorm.weight; 0 unexpected"
    ]
    .assert_eq(&folder.error());
}

#[test]
fn synthetic_norms_of_gemma3_are_centred_at_zero() {
    let folder = TestCheckpointFolder::of(&text_fields().to_string(), u64::MAX);
    let norms: Vec<_> =
        folder.values().into_iter().filter(|(name, _)| name.ends_with("norm.weight")).collect();
    // Each of two layers has four norms of the residual stream and its outputs, and two of queries and keys.
    assert_eq!(norms.len(), 1 + 2 * 6);
    for (name, values) in norms {
        assert!(values.iter().all(|v| (-0.0625..=0.054_687_5).contains(v)), "{name}: {values:?}");
        assert!(values.iter().any(|v| *v < 0.0) && values.iter().any(|v| *v > 0.0), "{name}");
    }
}
