//! Tests of loading MTP modules: a module is loaded only if `load_mtp` is set, and its copies of weights of
//! the target model must equal the originals.

use super::*;

const EH_PROJ: &str = "model.layers.2.eh_proj.weight";
const HEAD: &str = "model.layers.2.shared_head.head.weight";
const EMBEDDING: &str = "model.layers.2.embed_tokens.weight";

fn json() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 272, "hidden_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "q_lora_rank": null,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "num_nextn_predict_layers": 1
    })
}

fn folder(json: &Value, load_mtp: bool) -> TestCheckpointFolder {
    let mut folder = TestCheckpointFolder::of(&json.to_string(), u64::MAX);
    assert!(!folder.config.load_mtp, "not set by files");
    folder.config.load_mtp = load_mtp;
    folder
}

#[test]
fn mtp_module_is_read_only_when_drafting() {
    let plain = folder(&json(), false).locate().unwrap();
    assert!(plain.keys().all(|name| !name.starts_with("model.layers.2.")));
    let found = folder(&json(), true).locate().unwrap();
    let mtp: Vec<&String> =
        found.keys().filter(|name| name.starts_with("model.layers.2.")).collect();
    // The module has 3 norms and `eh_proj`; 2 norms of its decoder layer; 5 attention weights; the router and
    // its bias; 3 weights of the shared expert; and 12 weights of routed experts.
    assert_eq!(mtp.len(), 4 + 2 + 5 + 1 + 1 + 3 + 12, "{mtp:?}");
    assert_eq!(found.len(), plain.len() + mtp.len());

    let broken = folder(&json(), true);
    broken.edit(|t| drop(t.remove(EH_PROJ)));
    expect![
        "DIR: weights do not match the configuration: 1 missing: model.layers.2.eh_proj.weight; 0 unexpected"
    ]
    .assert_eq(&broken.error());
}

#[test]
fn mtp_copies_must_equal_the_model() {
    let edit = |load_mtp: bool, name: &str| {
        let folder = folder(&json(), load_mtp);
        folder.edit(|t| t.get_mut(name).unwrap().bytes[7] ^= 1);
        folder
    };
    expect![
        "DIR/model.safetensors: tensor `model.layers.2.shared_head.head.weight`: differs from `lm_head.weight`, of which it must be a copy"
    ]
    .assert_eq(&edit(true, HEAD).error());
    expect![
        "DIR/model.safetensors: tensor `model.layers.2.embed_tokens.weight`: differs from `model.embed_tokens.weight`, of which it must be a copy"
    ]
    .assert_eq(&edit(true, EMBEDDING).error());
    assert!(edit(false, HEAD).locate().is_ok(), "not loaded");
    let absent = folder(&json(), true);
    absent.edit(|t| [HEAD, EMBEDDING].iter().for_each(|name| drop(t.remove(*name))));
    assert!(absent.locate().is_ok(), "copies are optional");
}

/// In published fp8 checkpoints, `eh_proj` is not quantised.
#[test]
fn mtp_eh_proj_is_not_quantized() {
    let mut json = json();
    json["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let found = folder(&json, true).locate().unwrap();
    assert_eq!((found[EH_PROJ].dtype, &found[EH_PROJ].scales), (StoredDType::BF16, &None));
    let output = "model.layers.2.self_attn.o_proj.weight";
    assert_eq!(found[output].dtype, StoredDType::F8E4M3);
}
