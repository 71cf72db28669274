//! Strategies for executor settings and for messages between nodes.

use super::*;

/// Returns a strategy for any settings of an executor process.
pub(crate) fn settings() -> impl Strategy<Value = ExecutorSettings> {
    let path = "/[a-z]{1,12}/[^/\u{0}]{1,12}";
    let devices = [DeviceKind::Cpu, DeviceKind::Rocm, DeviceKind::Cuda];
    let kv = prop_oneof![
        Just(KvCacheSize::Auto),
        any::<u64>().prop_map(KvCacheSize::Bytes),
        any::<u32>().prop_map(KvCacheSize::Blocks),
    ];
    let libraries = of((path, of(path), of(path)));
    let paths = (path, of(".{0,30}"), libraries, of(path));
    let choices = (prop::sample::select(devices.to_vec()), kv, of(any::<u64>()), any::<bool>());
    (paths, choices, of(any::<u32>()), any::<[u32; 6]>()).prop_map(
        |(
            (model_dir, config_overrides, libraries, kernel_cache),
            (device, kv, synth_seed, eager),
            threads,
            numbers,
        )| {
            ExecutorSettings {
                model_dir: model_dir.into(),
                draft_model_dir: eager.then(|| "/drafts".into()),
                config_overrides,
                synth_seed,
                device,
                libraries: libraries.map(|(driver, compiler, blas)| DeviceLibraries {
                    driver: driver.into(),
                    compiler: compiler.map(Into::into),
                    blas: blas.map(Into::into),
                    emulated_warp_size: eager.then_some(64),
                    collectives: eager.then(|| "libnccl.so.2".into()),
                }),
                kernel_cache: kernel_cache.map(Into::into),
                dtype: if eager { ModelDtype::Float16 } else { ModelDtype::Float32 },
                kv_cache_dtype: if eager { KvCacheDtype::Fp8 } else { KvCacheDtype::Auto },
                threads,
                block_tokens: numbers[0],
                max_model_len: numbers[1],
                kv_tokens_min: numbers[2],
                max_num_seqs: numbers[3],
                tokens_per_step: numbers[4],
                kv_cache_size: kv,
                memory_utilization: f64::from(numbers[5]) / 7.0,
                graph_capture: if eager {
                    GraphCaptureConfig::Sizes(numbers.to_vec())
                } else {
                    GraphCaptureConfig::DefaultSizes { max_size: threads }
                },
                speculative: threads.map(|n| SpeculativeConfig {
                    draft_tokens: n as u8,
                    method: match n % 2 {
                        0 => SpeculativeMethod::Ngram {
                            lookup_min: (n >> 8) as u8,
                            lookup_max: (n >> 16) as u8,
                        },
                        _ if n % 5 == 0 => SpeculativeMethod::DraftModel,
                        _ => SpeculativeMethod::Mtp,
                    },
                    acceptance: match n % 3 {
                        0 => DraftAcceptanceRule::Synthetic {
                            per_mille: (n >> 4) as u16,
                            decrease: (n >> 8) as u16,
                        },
                        _ => DraftAcceptanceRule::Exact,
                    },
                }),
                gpus: numbers.to_vec(),
                max_logprobs: numbers[5],
                profile_dir: eager.then(|| "/traces".into()),
                epoch: Epoch(u64::from(numbers[0]) << 20),
                rank: Rank(numbers[1] as u16),
                parallel: ParallelConfig {
                    tp_size: numbers[2] as u16,
                    dp_size: numbers[3] as u16,
                    expert_parallel: eager,
                },
                ranks_on_host: numbers[4] as u16,
                expert_placement: eager
                    .then(|| ExpertPlacement { layers: vec![vec![], vec![1, 0]] }),
                host_address: eager.then(|| "10.0.0.2".to_owned()),
                rendezvous: eager.then(|| "/proc/7/fd/9".into()),
                one_shot_all_reduce: !eager,
            }
        },
    )
}

pub(crate) fn handshake() -> impl Strategy<Value = NodeHandshake> {
    let words = (any::<[u8; 32]>(), any::<[u8; 32]>());
    prop_oneof![
        words.prop_map(|(nonce, _)| NodeHandshake::Challenge { nonce }),
        words.prop_map(|(nonce, proof)| NodeHandshake::Response { nonce, proof }),
        words.prop_map(|(_, proof)| NodeHandshake::Welcome { proof }),
        Just(NodeHandshake::Denied),
    ]
}

pub(crate) fn node_command() -> impl Strategy<Value = NodeCommand> {
    prop_oneof![
        Just(NodeCommand::Accepted),
        ".{0,40}".prop_map(|text| NodeCommand::Rejected { reason: text }),
        any::<(u16, u16, u64, u64)>().prop_map(|(first_rank, count, epoch, ticket)| {
            NodeCommand::Start { first_rank: Rank(first_rank), count, epoch: Epoch(epoch), ticket }
        }),
        Just(NodeCommand::Leave),
        Just(NodeCommand::Heartbeat),
    ]
}

pub(crate) fn node_event() -> impl Strategy<Value = NodeEvent> {
    let node_info = (any::<[u16; 4]>(), any::<bool>(), "[0-9.]{1,9}", any::<u64>()).prop_map(
        |([node, nodes, tp_size, dp_size], expert_parallel, build, model_digest)| {
            let parallel = ParallelConfig { tp_size, dp_size, expert_parallel };
            NodeEvent::Join(NodeInfo { node, nodes, parallel, build, model_digest })
        },
    );
    let offer = (any::<u64>(), any::<u16>(), settings()).prop_map(|(ticket, rank, settings)| {
        let ExecutorSettings {
            model_dir,
            libraries,
            kernel_cache,
            threads,
            rendezvous,
            gpus,
            host_address,
            ..
        } = settings;
        let host = HostSettings {
            model_dir,
            libraries,
            kernel_cache,
            threads,
            rendezvous,
            gpus,
            host_address,
        };
        NodeEvent::Link(ExecutorLinkRequest { ticket, rank: Rank(rank), host })
    });
    prop_oneof![
        node_info,
        offer,
        (any::<u64>(), ".{0,40}")
            .prop_map(|(ticket, text)| NodeEvent::StartFailed { ticket, reason: text }),
        (any::<(u16, u64)>(), ".{0,40}").prop_map(|((rank, epoch), text)| {
            NodeEvent::ExecutorExited { rank: Rank(rank), epoch: Epoch(epoch), description: text }
        }),
        Just(NodeEvent::Heartbeat),
    ]
}
