//! Arbitrary messages.

use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use protocol::{
    Acceptance, Batch, BlockId, Bucket, Capture, CollectiveTiming, Device, DeviceLibraries,
    Drafter, Dtype, Epoch, ExpertPlacement, ExpertTokens, FromExecutor, FromNode, Handshake, Hello,
    HostSettings, Input, KvDtype, KvGroup, KvKind, KvSize, KvSpec, LinkOffer, Member, Memory, Pace,
    Parallel, Phase, Profiled, Rank, Ready, Replica, RequestId, Row, RowError, RowOutput, Sampling,
    Seat, SeatInit, Settings, Speculation, StepId, StepOutput, StepTiming, TableUpdate, ToExecutor,
    ToNode, Token, TokenLogprobs, WeightsDigest,
};

fn ids() -> impl Strategy<Value = Vec<Token>> {
    vec(any::<u32>(), 0..40)
}

fn weighted_ids() -> impl Strategy<Value = Vec<(Token, f32)>> {
    vec((any::<u32>(), any::<f32>()), 0..12)
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let numbers = (any::<f32>(), any::<u32>(), any::<f32>(), any::<f32>(), any::<f32>());
    let lists = (ids(), weighted_ids(), of(ids()), vec(ids(), 0..3));
    let counts = (any::<f32>(), any::<u32>(), of(any::<u32>()), of(any::<u32>()));
    (numbers, lists, counts).prop_map(|(numbers, lists, counts)| Sampling {
        temperature: numbers.0,
        top_k: numbers.1,
        top_p: numbers.2,
        min_p: numbers.3,
        repetition: numbers.4,
        frequency: counts.0,
        presence: -counts.0,
        min_tokens: counts.1,
        stop_ids: lists.0,
        logit_bias: lists.1,
        allowed: lists.2,
        bad_words: lists.3,
        logprobs: counts.2,
        prompt_logprobs: counts.3,
    })
}

fn init() -> impl Strategy<Value = Box<SeatInit>> {
    (sampling(), any::<u64>(), any::<u32>(), ids()).prop_map(
        |(sampling, key, prompt_len, history)| {
            Box::new(SeatInit { sampling, key, prompt_len, history })
        },
    )
}

fn row() -> impl Strategy<Value = Row> {
    let input = prop_oneof![
        ids().prop_map(|ids| Input::Tokens(ids.into())),
        (any::<u64>(), any::<u16>())
            .prop_map(|(step, slack)| Input::SampledAt { step: StepId(step), slack }),
    ];
    let table = (any::<u8>(), any::<u32>(), vec(any::<u32>().prop_map(BlockId), 0..40));
    let table =
        table.prop_map(|(group, from, blocks)| TableUpdate { group, from, blocks: blocks.into() });
    let numbers = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u8>(), any::<bool>());
    (numbers, input, vec(table, 0..3), of(any::<u32>()), of(init())).prop_map(
        |((request, epoch, start, drafts, samples), input, tables, next, init)| Row {
            request: RequestId(request),
            epoch,
            seat: Seat(epoch ^ start),
            start,
            len: start.rotate_left(7),
            drafts,
            samples,
            masked: drafts == 0 && samples,
            input,
            tables: tables.into(),
            next,
            init,
        },
    )
}

fn batch() -> impl Strategy<Value = Batch> {
    let bucket = prop_oneof![
        (any::<u32>(), any::<u32>()).prop_map(|(rows, width)| Bucket::Graph { rows, width }),
        any::<u32>().prop_map(|tokens| Bucket::Eager { tokens }),
    ];
    let header = (any::<u64>(), any::<u64>(), bucket, any::<u32>(), any::<u32>());
    (header, vec(row(), 0..5)).prop_map(|((step, epoch, bucket, moe_tokens, draft_rows), rows)| {
        Batch { step: StepId(step), epoch: Epoch(epoch), bucket, moe_tokens, draft_rows, rows }
    })
}

fn logprobs() -> impl Strategy<Value = Vec<TokenLogprobs>> {
    let one = (any::<u32>(), any::<f32>(), any::<u32>(), weighted_ids());
    vec(
        one.prop_map(|(token, logprob, rank, top)| TokenLogprobs { token, logprob, rank, top }),
        0..4,
    )
}

fn output() -> impl Strategy<Value = StepOutput> {
    let error = prop_oneof![
        Just(RowError::NonFiniteLogits),
        Just(RowError::AllMasked),
        Just(RowError::MaskLate)
    ];
    let row = (ids(), any::<[u8; 2]>(), of(error), logprobs(), logprobs()).prop_map(
        |(emitted, [drafted, accepted], error, logprobs, prompt_logprobs)| RowOutput {
            emitted: emitted.into(),
            drafted,
            accepted,
            error,
            logprobs: logprobs.into(),
            prompt_logprobs: prompt_logprobs.into(),
        },
    );
    let got = any::<(u16, u16, u32)>();
    let got = got.prop_map(|(layer, expert, tokens)| ExpertTokens { layer, expert, tokens });
    let parts = (any::<u64>(), any::<u64>(), vec(row, 0..5), vec(got, 0..20));
    parts.prop_map(|(step, ns, rows, experts)| StepOutput {
        step: StepId(step),
        epoch: Epoch(ns >> 40),
        rows,
        timing: StepTiming {
            inputs_ns: ns,
            forward_ns: ns >> 9,
            sample_ns: 0,
            replayed: ns % 2 == 1,
            collectives: CollectiveTiming {
                tp_all_reduce_ns: ns >> 1,
                tp_all_gather_ns: ns >> 20,
                dp_all_gather_rows_ns: 0,
                dp_reduce_scatter_ns: ns,
                dp_exchange_counts_ns: ns >> 30,
                dp_all_to_all_ns: ns >> 3,
            },
        },
        experts,
    })
}

fn spec() -> impl Strategy<Value = KvSpec> {
    let group = (vec(any::<u16>(), 0..5), any::<u64>()).prop_map(|(layers, bytes_per_block)| {
        KvGroup { layers, kind: KvKind::Full, bytes_per_block }
    });
    (any::<u32>(), vec(group, 0..3))
        .prop_map(|(block_tokens, groups)| KvSpec { block_tokens, groups })
}

/// Anything the scheduler says.
pub(crate) fn to_executor() -> impl Strategy<Value = ToExecutor> {
    prop_oneof![
        any::<u32>().prop_map(|blocks| ToExecutor::SizeKv { blocks }),
        batch().prop_map(ToExecutor::Batch),
        any::<bool>().prop_map(|on| ToExecutor::Profile { on }),
        Just(ToExecutor::Shutdown),
    ]
}

/// Anything an executor says.
pub(crate) fn from_executor() -> impl Strategy<Value = FromExecutor> {
    let phases =
        [Phase::Device, Phase::Compile, Phase::Load, Phase::WarmUp, Phase::Capture, Phase::Join];
    let hello =
        (any::<u16>(), any::<u64>(), ".{0,20}").prop_map(|(rank, manifest, device)| Hello {
            version: rank ^ 5,
            rank: Rank(rank),
            epoch: Epoch(manifest >> 3),
            device,
            build: "0.1.0".to_owned(),
            manifest,
        });
    prop_oneof![
        hello.prop_map(FromExecutor::Hello),
        (prop::sample::select(phases.to_vec()), any::<u64>(), any::<u64>())
            .prop_map(|(phase, done, total)| FromExecutor::Progress { phase, done, total }),
        any::<[u64; 3]>().prop_map(|[common, sharded, experts]| {
            FromExecutor::Loaded(WeightsDigest { common, sharded, experts })
        }),
        (spec(), any::<u32>(), any::<[u64; 2]>()).prop_map(|(spec, blocks, [fixed, token])| {
            let pace = Pace { fixed_ns: fixed, per_token_ns: token };
            FromExecutor::Memory(Memory { spec, blocks, pace })
        }),
        prop_oneof![
            ".{0,40}".prop_map(Profiled::Started),
            of(".{0,40}").prop_map(Profiled::Stopped),
            ".{0,40}".prop_map(Profiled::Failed),
        ]
        .prop_map(FromExecutor::Profiled),
        (any::<u32>(), ids())
            .prop_map(|(blocks, graph_rows)| FromExecutor::Ready(Ready { blocks, graph_rows })),
        output().prop_map(FromExecutor::StepOutput),
        any::<[u64; 2]>().prop_map(|[step, ns]| FromExecutor::StepDone { step: StepId(step), ns }),
        (of(any::<u64>().prop_map(StepId)), ".{0,60}")
            .prop_map(|(step, text)| FromExecutor::Fault { step, text }),
        Just(FromExecutor::Beat),
    ]
}

/// Anything an executor process can be told at its start.
pub(crate) fn settings() -> impl Strategy<Value = Settings> {
    let path = "/[a-z]{1,12}/[^/\u{0}]{1,12}";
    let devices = [Device::Cpu, Device::Rocm, Device::Cuda];
    let kv = prop_oneof![
        Just(KvSize::Auto),
        any::<u64>().prop_map(KvSize::Bytes),
        any::<u32>().prop_map(KvSize::Blocks),
    ];
    let libraries = of((path, of(path), of(path)));
    let places = (path, of(".{0,30}"), libraries, of(path));
    let choices = (prop::sample::select(devices.to_vec()), kv, of(any::<u64>()), any::<bool>());
    (places, choices, of(any::<u32>()), any::<[u32; 6]>()).prop_map(
        |(
            (dir, overrides, libraries, cache),
            (device, kv, synth_seed, eager),
            threads,
            numbers,
        )| {
            Settings {
                dir: dir.into(),
                draft_dir: eager.then(|| "/drafts".into()),
                overrides,
                synth_seed,
                device,
                libraries: libraries.map(|(driver, compiler, blas)| DeviceLibraries {
                    driver: driver.into(),
                    compiler: compiler.map(Into::into),
                    blas: blas.map(Into::into),
                    emulated_wave: eager.then_some(64),
                    collectives: eager.then(|| "libnccl.so.2".into()),
                }),
                kernel_cache: cache.map(Into::into),
                dtype: if eager { Dtype::Float16 } else { Dtype::Float32 },
                kv_dtype: if eager { KvDtype::Fp8 } else { KvDtype::Auto },
                threads,
                block_tokens: numbers[0],
                max_model_len: numbers[1],
                kv_tokens_min: numbers[2],
                max_num_seqs: numbers[3],
                tokens_per_step: numbers[4],
                kv,
                memory_utilization: f64::from(numbers[5]) / 7.0,
                capture: if eager {
                    Capture::Rows(numbers.to_vec())
                } else {
                    Capture::Usual { rows_max: threads }
                },
                speculation: threads.map(|n| Speculation {
                    drafts: n as u8,
                    drafter: match n % 2 {
                        0 => Drafter::Ngram { min: (n >> 8) as u8, max: (n >> 16) as u8 },
                        _ if n % 5 == 0 => Drafter::Model,
                        _ => Drafter::Layer,
                    },
                    acceptance: match n % 3 {
                        0 => Acceptance::Synthetic { per_mille: (n >> 4) as u16 },
                        _ => Acceptance::Exact,
                    },
                }),
                gpus: numbers.to_vec(),
                logprobs_max: numbers[5],
                profile: eager.then(|| "/traces".into()),
                epoch: Epoch(u64::from(numbers[0]) << 20),
                rank: Rank(numbers[1] as u16),
                parallel: Parallel {
                    tp_size: numbers[2] as u16,
                    dp_size: numbers[3] as u16,
                    experts: eager,
                },
                host_ranks: numbers[4] as u16,
                placement: eager.then(|| ExpertPlacement { layers: vec![vec![], vec![1, 0]] }),
                meeting: eager.then(|| "/proc/7/fd/9".into()),
                one_shot_sums: !eager,
            }
        },
    )
}

pub(crate) fn handshake() -> impl Strategy<Value = Handshake> {
    let words = (any::<[u8; 32]>(), any::<[u8; 32]>());
    prop_oneof![
        words.prop_map(|(nonce, _)| Handshake::Challenge { nonce }),
        words.prop_map(|(nonce, proof)| Handshake::Answer { nonce, proof }),
        words.prop_map(|(_, proof)| Handshake::Welcome { proof }),
        Just(Handshake::Denied),
    ]
}

pub(crate) fn to_node() -> impl Strategy<Value = ToNode> {
    prop_oneof![
        Just(ToNode::Accepted),
        ".{0,40}".prop_map(|text| ToNode::Refused { text }),
        any::<(u16, u64, u64)>().prop_map(|(replica, epoch, ticket)| ToNode::Start {
            replica: Replica(replica),
            epoch: Epoch(epoch),
            ticket,
        }),
        Just(ToNode::Leave),
        Just(ToNode::Beat),
    ]
}

pub(crate) fn from_node() -> impl Strategy<Value = FromNode> {
    let member = (any::<[u16; 4]>(), any::<bool>(), "[0-9.]{1,9}", any::<u64>()).prop_map(
        |([node, nodes, tp_size, dp_size], experts, build, manifest)| {
            let parallel = Parallel { tp_size, dp_size, experts };
            FromNode::Join(Member { node, nodes, parallel, build, manifest })
        },
    );
    let offer = (any::<u64>(), any::<u16>(), settings()).prop_map(|(ticket, rank, settings)| {
        let Settings { dir, libraries, kernel_cache, threads, meeting, .. } = settings;
        let host = HostSettings { dir, libraries, kernel_cache, threads, meeting };
        FromNode::Link(LinkOffer { ticket, rank: Rank(rank), host })
    });
    prop_oneof![
        member,
        offer,
        (any::<u64>(), ".{0,40}").prop_map(|(ticket, text)| FromNode::NotStarted { ticket, text }),
        (any::<(u16, u64)>(), ".{0,40}").prop_map(|((rank, epoch), text)| FromNode::Ended {
            rank: Rank(rank),
            epoch: Epoch(epoch),
            text,
        }),
        Just(FromNode::Beat),
    ]
}
