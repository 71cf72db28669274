//! Tests of the exact bytes of messages: any change of them requires a new `PROTOCOL_VERSION`.

mod node_messages;

use expect_test::{Expect, expect};
use protocol::codec::WireMessage;
use protocol::frame::{HEADER_BYTES, encode};
use protocol::{
    Batch, BatchRow, BitmaskMessage, BitmaskRow, BlockId, BlockTableUpdate, CollectiveTiming,
    DeviceKind, DraftAcceptanceRule, Epoch, ExecutorCommand, ExecutorEvent, ExecutorHello,
    ExecutorLinkRequest, ExecutorSettings, ExpertPlacement, ExpertTokenCount, GraphCaptureConfig,
    HostSettings, KvCacheDtype, KvCacheSize, KvGroup, KvKind, KvSpec, ModelDtype, NodeCommand,
    NodeEvent, NodeHandshake, NodeInfo, ParallelConfig, ProfilerStatus, Rank, RankEndpoint,
    RequestId, RowDrafts, RowError, RowInput, RowOutput, SamplingParams, SequenceInit,
    SequenceSlot, SpeculativeConfig, SpeculativeMethod, StartupPhase, StateSlot, StateSlotAccess,
    StepCost, StepDrafts, StepId, StepLaunchMode, StepOutput, StepTiming, TokenLogprobs,
    WarmUpReport, WeightsDigest,
};

/// Compares the frame of a message in hexadecimal: the header on one line, then 32 bytes of the body per
/// line.
fn check(message: &impl WireMessage, expected: &Expect) {
    let mut bytes = Vec::new();
    encode(message, Epoch(2), &mut bytes).unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().concat();
    let mut lines = vec![hex(&bytes[..HEADER_BYTES])];
    lines.extend(bytes[HEADER_BYTES..].chunks(32).map(hex));
    expected.assert_eq(&lines.join("\n"));
}

fn row(input: RowInput, init: Option<Box<SequenceInit>>) -> BatchRow {
    BatchRow {
        request: RequestId(300),
        epoch: 1,
        seq_slot: SequenceSlot(4),
        start: 16,
        len: 1,
        drafts: 0,
        samples: true,
        masked: false,
        input,
        table_updates: vec![BlockTableUpdate {
            group: 0,
            first_entry: 1,
            blocks: vec![BlockId(9), BlockId(70_000)].into(),
        }]
        .into(),
        state_slots: vec![StateSlotAccess { group: 1, read: None, write: StateSlot(3) }].into(),
        next_token: None,
        seq_init: init,
    }
}

#[test]
fn batch_bytes() {
    let init = SequenceInit {
        sampling: SamplingParams { logit_bias: vec![(5, -1.0)], ..SamplingParams::greedy() },
        rng_key: 0xfeed,
        prompt_len: 17,
        token_history: vec![1, 2],
    };
    let batch = Batch {
        step: StepId(7),
        epoch: Epoch(2),
        dispatch: StepLaunchMode::Eager { tokens: 2 },
        moe_tokens: 0,
        draft_rows: 0,
        rows: vec![
            row(RowInput::Tokens(vec![151_643].into()), Some(Box::new(init))),
            row(RowInput::SampledAt { step: StepId(6), draft_slack: 3 }, None),
        ],
    };
    check(
        &ExecutorCommand::Batch(batch),
        &expect![[r#"
            4844524e120003000200000000000000aa000000c032e445
            96070281a5456167657291020000929dcd012c0104100100c3c281a6546f6b65
            6e73c4045b50020091930001c4080900000070110100919301c003c0949fca00
            00000000ca3f800000ca00000000ca3f800000ca00000000ca000000000090c4
            0805000000000080bfc090c0c0c0cdfeed11c40801000000020000009dcd012c
            0104100100c3c281a953616d706c6564417492060391930001c4080900000070
            110100919301c003c0c0"#]],
    );
}

#[test]
fn bitmask_bytes() {
    let bitmask = BitmaskMessage {
        step: StepId(7),
        rows: vec![
            BitmaskRow { row: 0, bitmasks: vec![vec![0x8000_0001, 2].into(), vec![3].into()] },
            BitmaskRow { row: 3, bitmasks: vec![] },
        ],
    };
    check(
        &ExecutorCommand::Bitmask(bitmask),
        &expect![[r#"
            4844524e1200060002000000000000001b000000a480bf3f
            92079292009291c408010000800200000091c40403000000920390"#]],
    );
}

#[test]
fn draft_report_bytes() {
    let rows = vec![
        RowDrafts { request: RequestId(300), tokens: vec![151_643, 2].into() },
        RowDrafts { request: RequestId(4), tokens: vec![].into() },
    ];
    check(
        &ExecutorEvent::Drafts(StepDrafts { step: StepId(7), rows }),
        &expect![[r#"
            4844524e12001b0002000000000000001500000012dfcf10
            92079292cd012cc4085b500200020000009204c400"#]],
    );
}

#[test]
fn short_command_bytes() {
    let endpoint = RankEndpoint { rank: Rank(1), address: "h:9".to_owned(), token: [7; 32] };
    check(
        &ExecutorCommand::Endpoints(vec![endpoint.clone()]),
        &expect![[r#"
        4844524e1200070002000000000000002a000000d4208860
        919301a3683a39dc002007070707070707070707070707070707070707070707
        07070707070707070707"#]],
    );
    check(
        &ExecutorEvent::Endpoint(endpoint),
        &expect![[r#"
        4844524e12001c00020000000000000029000000019ebb24
        9301a3683a39dc00200707070707070707070707070707070707070707070707
        070707070707070707"#]],
    );
    check(
        &ExecutorCommand::AllocateKv { blocks: 65_536 },
        &expect![[r#"
            4844524e1200020002000000000000000600000065569eb0
            91ce00010000"#]],
    );
    check(
        &ExecutorCommand::Profile { enabled: true },
        &expect![[r#"
            4844524e1200050002000000000000000200000082d73d31
            91c3"#]],
    );
    check(&ExecutorCommand::Shutdown, &expect!["4844524e12000400020000000000000000000000caa15cb2"]);
}

#[test]
fn step_output_bytes() {
    let top = vec![(3, -0.5), (4, -1.5)];
    let logprobs =
        vec![TokenLogprobs { token: 3, logprob: -0.5, rank: 1, top_logprobs: top }].into();
    let output = StepOutput {
        step: StepId(7),
        epoch: Epoch(2),
        rows: vec![
            RowOutput {
                sampled_tokens: vec![3].into(),
                logprobs,
                drafted: 2,
                ..RowOutput::default()
            },
            RowOutput { error: Some(RowError::AllMasked), ..RowOutput::default() },
        ],
        timing: StepTiming {
            inputs_ns: 1,
            forward_ns: 1_000_000,
            sample_ns: 500,
            replayed: true,
            collectives: CollectiveTiming {
                tp_all_reduce_ns: 1,
                tp_all_gather_ns: 256,
                dp_all_gather_rows_ns: 65_536,
                dp_reduce_scatter_ns: 0,
                dp_exchange_counts_ns: 2,
                dp_all_to_all_ns: 512,
            },
        },
        expert_tokens: vec![ExpertTokenCount { layer: 1, expert: 2, tokens: 3 }],
    };
    check(
        &ExecutorEvent::StepOutput(output),
        &expect![[r#"
            4844524e1200150002000000000000005f000000cd83412a
            9507029296c404030000000200c0919403cabf00000001c41003000000000000
            bf040000000000c0bfc096c4000000a9416c6c4d61736b656490c09501ce000f
            4240cd01f4c39601cd0100ce000100000002cd0200c4080200010003000000"#]],
    );
}

#[test]
fn startup_event_bytes() {
    let hello = ExecutorHello {
        version: 1,
        rank: Rank(0),
        epoch: Epoch(2),
        device: "cpu".to_owned(),
        build: "0.1.0".to_owned(),
        model_digest: u64::MAX,
    };
    check(
        &ExecutorEvent::Hello(hello),
        &expect![[r#"
            4844524e12001100020000000000000017000000bf77714d
            96010002a3637075a5302e312e30cfffffffffffffffff"#]],
    );
    let progress = ExecutorEvent::Progress { phase: StartupPhase::Load, done: 1, total: 1 << 33 };
    check(
        &progress,
        &expect![[r#"
            4844524e12001200020000000000000010000000173152ad
            93a44c6f616401cf0000000200000000"#]],
    );
    let digest = WeightsDigest { common: 1, sharded: 1 << 63, experts: 300 };
    check(
        &ExecutorEvent::WeightsLoaded(digest),
        &expect![[r#"
            4844524e12001a0002000000000000000e000000ec22816a
            9301cf8000000000000000cd012c"#]],
    );
    let group = KvGroup { layers: vec![0, 1], kind: KvKind::Full, bytes_per_block: 8_192 };
    let spec = KvSpec { block_tokens: 16, groups: vec![group] };
    let report = WarmUpReport {
        kv_spec: spec,
        kv_blocks: 500,
        step_cost: StepCost { fixed_ns: 300, per_token_ns: 12 },
    };
    check(
        &ExecutorEvent::WarmUpDone(report),
        &expect![[r#"
            4844524e12001300020000000000000018000000bae0e538
            9392109193920001a446756c6ccd2000cd01f492cd012c0c"#]],
    );
    let fault = ExecutorEvent::Fault { step: Some(StepId(7)), text: "gone".to_owned() };
    check(
        &fault,
        &expect![[r#"
            4844524e1200160002000000000000000700000089e84337
            9207a4676f6e65"#]],
    );
    let status = ProfilerStatus::Started("/t/rank0-1.json".to_owned());
    check(
        &ExecutorEvent::ProfilerStatus(status),
        &expect![[r#"
            4844524e1200180002000000000000001900000018d41362
            81a753746172746564af2f742f72616e6b302d312e6a736f6e"#]],
    );
    let done = ExecutorEvent::StepDone { step: StepId(7), duration_ns: 1_000_000 };
    check(
        &done,
        &expect![[r#"
            4844524e120019000200000000000000070000009d2e601f
            9207ce000f4240"#]],
    );
    check(&ExecutorEvent::Heartbeat, &expect!["4844524e1200170002000000000000000000000055a77d1c"]);
}
