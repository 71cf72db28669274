//! Exact bytes of executor settings and of messages between nodes.

use super::*;

#[test]
fn executor_settings_bytes() {
    let settings = ExecutorSettings {
        model_dir: "/m".into(),
        draft_model_dir: None,
        config_overrides: None,
        synth_seed: Some(1),
        device: DeviceKind::Cpu,
        gpus: Vec::new(),
        libraries: None,
        kernel_cache: None,
        dtype: ModelDtype::Float32,
        kv_cache_dtype: KvCacheDtype::Auto,
        threads: Some(2),
        block_tokens: 16,
        max_model_len: 256,
        kv_tokens_min: 256,
        max_num_seqs: 4,
        tokens_per_step: 64,
        kv_cache_size: KvCacheSize::Blocks(64),
        memory_utilization: 0.9,
        graph_capture: GraphCaptureConfig::Disabled,
        speculative: Some(SpeculativeConfig {
            draft_tokens: 3,
            method: SpeculativeMethod::Ngram { lookup_min: 2, lookup_max: 5 },
            acceptance: DraftAcceptanceRule::Synthetic { per_mille: 700, decrease: 0 },
        }),
        max_logprobs: 20,
        profile_dir: None,
        epoch: Epoch(2),
        rank: Rank(1),
        parallel: ParallelConfig { tp_size: 2, dp_size: 1, expert_parallel: true },
        ranks_on_host: 2,
        expert_placement: Some(ExpertPlacement { layers: vec![vec![], vec![300, 0]] }),
        host_address: None,
        rendezvous: Some("/x".into()),
        one_shot_all_reduce: true,
    };
    check(
        &settings,
        &expect![[r#"
            4844524e120001000200000000000000730000001acf6cf0
            dc001ea22f6dc0c001a343707590c0c0a7466c6f61743332a44175746f0210cd
            0100cd0100044081a6426c6f636b7340cb3feccccccccccccda74e6f7468696e
            67930381a54e6772616d92020581a953796e74686574696392cd02bc0014c002
            01930201c30291929092cd012c00c0a22f78c3"#]],
    );
}

#[test]
fn node_message_bytes() {
    let (nonce, proof) = ([1; 32], [255; 32]);
    check(
        &NodeHandshake::Challenge { nonce },
        &expect![[r#"
            4844524e1200210002000000000000002400000053c94d2a
            91dc002001010101010101010101010101010101010101010101010101010101
            01010101"#]],
    );
    check(
        &NodeHandshake::Response { nonce, proof },
        &expect![[r#"
            4844524e12002200020000000000000067000000322befcc
            92dc002001010101010101010101010101010101010101010101010101010101
            01010101dc0020ccffccffccffccffccffccffccffccffccffccffccffccffcc
            ffccffccffccffccffccffccffccffccffccffccffccffccffccffccffccffcc
            ffccffccffccff"#]],
    );
    check(
        &NodeHandshake::Welcome { proof },
        &expect![[r#"
            4844524e120023000200000000000000440000000abda90c
            91dc0020ccffccffccffccffccffccffccffccffccffccffccffccffccffccff
            ccffccffccffccffccffccffccffccffccffccffccffccffccffccffccffccff
            ccffccff"#]],
    );
    check(&NodeHandshake::Denied, &expect!["4844524e12002e000200000000000000000000003ebee115"]);
    let parallel = ParallelConfig { tp_size: 1, dp_size: 2, expert_parallel: false };
    let build = "0.1.0".to_owned();
    let node_info = NodeInfo { node: 1, nodes: 2, parallel, build, model_digest: 7 };
    check(
        &NodeEvent::Join(node_info),
        &expect![[r#"
            4844524e1200290002000000000000000e00000027ac9796
            950102930102c2a5302e312e3007"#]],
    );
    let host = HostSettings {
        model_dir: "/m".into(),
        libraries: None,
        kernel_cache: None,
        threads: Some(1),
        rendezvous: None,
        gpus: vec![3],
        host_address: Some("h".to_owned()),
    };
    check(
        &NodeEvent::Link(ExecutorLinkRequest { ticket: 9, rank: Rank(1), host }),
        &expect![[r#"
            4844524e12002a0002000000000000000f000000b1f86833
            93090197a22f6dc0c001c09103a168"#]],
    );
    let text = || "gone".to_owned();
    check(
        &NodeEvent::StartFailed { ticket: 9, reason: text() },
        &expect![[r#"
            4844524e12002b000200000000000000070000009217481b
            9209a4676f6e65"#]],
    );
    check(
        &NodeEvent::ExecutorExited { rank: Rank(1), epoch: Epoch(2), description: text() },
        &expect![[r#"
            4844524e12002c00020000000000000008000000e037d2e0
            930102a4676f6e65"#]],
    );
    check(&NodeEvent::Heartbeat, &expect!["4844524e12002d00020000000000000000000000f441e8e9"]);
    check(&NodeCommand::Accepted, &expect!["4844524e1200240002000000000000000000000060530d16"]);
    check(
        &NodeCommand::Rejected { reason: text() },
        &expect![[r#"
            4844524e12002500020000000000000006000000ab2accd3
            91a4676f6e65"#]],
    );
    let start = NodeCommand::Start { first_rank: Rank(1), count: 2, epoch: Epoch(2), ticket: 9 };
    check(
        &start,
        &expect![[r#"
            4844524e12002600020000000000000005000000d184dc8d
            9401020209"#]],
    );
    check(&NodeCommand::Leave, &expect!["4844524e12002700020000000000000000000000aaac04ea"]);
    check(&NodeCommand::Heartbeat, &expect!["4844524e120028000200000000000000000000005b371ee8"]);
}
