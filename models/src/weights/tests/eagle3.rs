//! Tests of loading EAGLE-3 draft models: optional weights, and draft id offsets that yield invalid target
//! token ids.

use super::*;
use crate::error::StoredTensorError;
use crate::weight_table::DRAFT_TO_TARGET;

fn folder(members: Value) -> TestCheckpointFolder {
    let mut json = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 272, "draft_vocab_size": 40,
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64
    });
    json.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    TestCheckpointFolder::of(&json.to_string(), u64::MAX)
}

fn offsets(folder: &TestCheckpointFolder) -> Result<Vec<i64>, ModelLoadError> {
    let specs = tensors(&folder.config);
    let spec = specs.iter().find(|spec| spec.name == DRAFT_TO_TARGET).unwrap();
    WeightSource::open(folder.path(), &folder.config, &specs)?.offsets(spec, folder.config.vocab)
}

#[test]
fn eagle3_drafts_map_to_target_ids() {
    let written = folder(json!({}));
    let found = offsets(&written).unwrap();
    let ids: Vec<i64> = (0..).zip(&found).map(|(draft, offset)| draft + offset).collect();
    assert!(ids.is_sorted_by(|a, b| a < b) && ids[0] == 0 && ids[39] == 39 * 272 / 40);
    let synth = WeightSource::Synth { seed: 1, threads: 1 };
    let specs = tensors(&written.config);
    let spec = specs.iter().find(|spec| spec.name == DRAFT_TO_TARGET).unwrap();
    assert_eq!(synth.offsets(spec, 272).unwrap(), found);
    // The stored flags `t2d` are consistent with the offsets `d2t`.
    written.edit(|t| {
        let flagged: Vec<i64> =
            (0..).zip(&t["t2d"].bytes).filter(|(_, flag)| **flag == 1).map(|(id, _)| id).collect();
        assert_eq!(flagged, ids);
        let word = |offset: i64| offset.to_le_bytes();
        t.get_mut(DRAFT_TO_TARGET).unwrap().bytes[39 * 8..].copy_from_slice(&word(272 - 39));
    });
    let error = offsets(&written).unwrap_err();
    let fault = StoredTensorError::Offset { draft: 39, offset: 233, ids: 272 };
    assert!(error.to_string().contains(&fault.to_string()), "{error}");
    assert!(
        error.to_string().contains(
            "tensor `d2t`: target id 39 +233 of draft id 39 is outside of the 272 target ids"
        ),
        "{error}"
    );
}

#[test]
fn missing_eagle3_weights_are_named() {
    let broken = |change: fn(&mut StoredTensorMap)| {
        let folder = folder(json!({}));
        folder.edit(change);
        folder.error()
    };
    expect!["DIR: weights do not match the configuration: 2 missing: d2t, midlayer.hidden_norm.weight; 0 unexpected"]
        .assert_eq(&broken(|t| {
            for name in [DRAFT_TO_TARGET, "midlayer.hidden_norm.weight"] {
                t.remove(name);
            }
        }));
    expect![
        "DIR/model.safetensors: tensor `d2t`: dtype F32 is not supported for draft id offsets; I64 is"
    ]
    .assert_eq(&broken(|t| {
        let TestTensor { dtype, bytes, .. } = t.get_mut(DRAFT_TO_TARGET).unwrap();
        *dtype = "F32".to_owned();
        bytes.truncate(40 * 4);
    }));
    expect!["DIR/model.safetensors: tensor `lm_head.weight`: shape [40, 64], but the configuration requires [41, 64]"]
        .assert_eq(&{
            let mut folder = folder(json!({}));
            folder.config.eagle.as_mut().unwrap().vocab = 41;
            folder.edit(|t| {
                let TestTensor { shape, bytes, .. } = t.get_mut(DRAFT_TO_TARGET).unwrap();
                shape[0] += 1;
                bytes.extend([0; 8]);
            });
            folder.error()
        });
}

#[test]
fn eagle3_may_omit_weights_of_the_target() {
    let found = folder(json!({})).locate().unwrap();
    assert!(!found.contains_key("embed_tokens.weight") && found.contains_key(DRAFT_TO_TARGET));
    let all = folder(json!({"draft_vocab_size": 272})).locate().unwrap();
    assert!(!all.contains_key(DRAFT_TO_TARGET), "draft ids equal target ids");
    let narrow = folder(json!({"target_hidden_size": 32}));
    assert!(narrow.locate().unwrap().contains_key("embed_tokens.weight"));
    narrow.edit(|t| drop(t.remove("embed_tokens.weight")));
    assert!(narrow.error().contains("1 missing: embed_tokens.weight"));
}

/// Newer checkpoints have the name prefix `layers.0.` instead of `midlayer.`.
#[test]
fn eagle3_reads_both_spellings() {
    let folder = folder(json!({}));
    folder.edit(|t| {
        let names: Vec<String> =
            t.keys().filter(|name| name.starts_with("midlayer.")).cloned().collect();
        for name in names {
            let weight = t.remove(&name).unwrap();
            t.insert(name.replace("midlayer.", "layers.0."), weight);
        }
    });
    assert!(folder.locate().unwrap().contains_key("midlayer.hidden_norm.weight"));
    assert_eq!(offsets(&folder).unwrap().len(), 40);
}
