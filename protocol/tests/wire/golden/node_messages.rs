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
        rendezvous: Some("/x".into()),
        one_shot_all_reduce: true,
    };
    check(
        &settings,
        &expect![[r#"
            4844524e11000100020000000000000072000000756f68ed
            dc001da22f6dc0c001a343707590c0c0a7466c6f61743332a44175746f0210cd
            0100cd0100044081a6426c6f636b7340cb3feccccccccccccda74e6f7468696e
            67930381a54e6772616d92020581a953796e74686574696392cd02bc0014c002
            01930201c30291929092cd012c00a22f78c3"#]],
    );
}

#[test]
fn node_message_bytes() {
    let (nonce, proof) = ([1; 32], [255; 32]);
    check(
        &NodeHandshake::Challenge { nonce },
        &expect![[r#"
            4844524e110021000200000000000000240000005ca212c3
            91dc002001010101010101010101010101010101010101010101010101010101
            01010101"#]],
    );
    check(
        &NodeHandshake::Response { nonce, proof },
        &expect![[r#"
            4844524e11002200020000000000000067000000f5b20cc6
            92dc002001010101010101010101010101010101010101010101010101010101
            01010101dc0020ccffccffccffccffccffccffccffccffccffccffccffccffcc
            ffccffccffccffccffccffccffccffccffccffccffccffccffccffccffccffcc
            ffccffccffccff"#]],
    );
    check(
        &NodeHandshake::Welcome { proof },
        &expect![[r#"
            4844524e11002300020000000000000044000000cfd36e28
            91dc0020ccffccffccffccffccffccffccffccffccffccffccffccffccffccff
            ccffccffccffccffccffccffccffccffccffccffccffccffccffccffccffccff
            ccffccff"#]],
    );
    check(&NodeHandshake::Denied, &expect!["4844524e11002e00020000000000000000000000cdde1906"]);
    let parallel = ParallelConfig { tp_size: 1, dp_size: 2, expert_parallel: false };
    let build = "0.1.0".to_owned();
    let node_info = NodeInfo { node: 1, nodes: 2, parallel, build, model_digest: 7 };
    check(
        &NodeEvent::Join(node_info),
        &expect![[r#"
            4844524e1100290002000000000000000e0000003c6f5aa8
            950102930102c2a5302e312e3007"#]],
    );
    let host = HostSettings {
        model_dir: "/m".into(),
        libraries: None,
        kernel_cache: None,
        threads: Some(1),
        rendezvous: None,
    };
    check(
        &NodeEvent::Link(ExecutorLinkRequest { ticket: 9, rank: Rank(1), host }),
        &expect![[r#"
            4844524e11002a0002000000000000000b000000501e7e4f
            93090195a22f6dc0c001c0"#]],
    );
    let text = || "gone".to_owned();
    check(
        &NodeEvent::StartFailed { ticket: 9, reason: text() },
        &expect![[r#"
            4844524e11002b00020000000000000007000000da073c85
            9209a4676f6e65"#]],
    );
    check(
        &NodeEvent::ExecutorExited { rank: Rank(1), epoch: Epoch(2), description: text() },
        &expect![[r#"
            4844524e11002c000200000000000000080000008306ee2b
            930102a4676f6e65"#]],
    );
    check(&NodeEvent::Heartbeat, &expect!["4844524e11002d00020000000000000000000000072110fa"]);
    check(&NodeCommand::Accepted, &expect!["4844524e110024000200000000000000000000009333f505"]);
    check(
        &NodeCommand::Rejected { reason: text() },
        &expect![[r#"
            4844524e110025000200000000000000060000007719f237
            91a4676f6e65"#]],
    );
    let start = NodeCommand::Start { replica: Replica(1), epoch: Epoch(2), ticket: 9 };
    check(
        &start,
        &expect![[r#"
            4844524e11002600020000000000000004000000843195da
            93010209"#]],
    );
    check(&NodeCommand::Leave, &expect!["4844524e1100270002000000000000000000000059ccfcf9"]);
    check(&NodeCommand::Heartbeat, &expect!["4844524e11002800020000000000000000000000a857e6fb"]);
}
