//! Proptest strategies that generate arbitrary messages.

mod node_messages;

pub(crate) use node_messages::{handshake, node_command, node_event, settings};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use protocol::{
    Batch, BatchRow, BitmaskMessage, BitmaskRow, BlockId, BlockTableUpdate, CollectiveTiming,
    DeviceKind, DeviceLibraries, DraftAcceptanceRule, Epoch, ExecutorCommand, ExecutorEvent,
    ExecutorHello, ExecutorLinkRequest, ExecutorReady, ExecutorSettings, ExpertPlacement,
    ExpertTokenCount, GraphCaptureConfig, HostSettings, KvCacheDtype, KvCacheSize, KvGroup, KvKind,
    KvSpec, ModelDtype, NodeCommand, NodeEvent, NodeHandshake, NodeInfo, ParallelConfig,
    PoolingMethod, ProfilerStatus, PromptResults, Rank, RankEndpoint, RequestId, RowDrafts,
    RowError, RowInput, RowOutput, SamplingParams, SequenceInit, SequenceSlot, SpeculativeConfig,
    SpeculativeMethod, StartupPhase, StateSlot, StateSlotAccess, StepCost, StepDrafts, StepId,
    StepLaunchMode, StepOutput, StepTiming, Token, TokenBitmask, TokenLogprobs, WarmUpReport,
    WeightsDigest,
};

fn ids() -> impl Strategy<Value = Vec<Token>> {
    vec(any::<u32>(), 0..40)
}

fn weighted_ids() -> impl Strategy<Value = Vec<(Token, f32)>> {
    vec((any::<u32>(), any::<f32>()), 0..12)
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let numbers = (any::<f32>(), any::<u32>(), any::<f32>(), any::<f32>(), any::<f32>());
    let lists = (ids(), weighted_ids(), of(ids()), vec(ids(), 0..3));
    let counts = (any::<f32>(), any::<u32>(), of(any::<u32>()), of(any::<u32>()));
    (numbers, lists, counts).prop_map(|(numbers, lists, counts)| SamplingParams {
        temperature: numbers.0,
        top_k: numbers.1,
        top_p: numbers.2,
        min_p: numbers.3,
        repetition_penalty: numbers.4,
        frequency_penalty: counts.0,
        presence_penalty: -counts.0,
        min_tokens: counts.1,
        pooling: pooling(counts.1, &lists.0),
        stop_token_ids: lists.0,
        logit_bias: lists.1,
        allowed_token_ids: lists.2,
        bad_words: lists.3,
        logprobs: counts.2,
        prompt_logprobs: counts.3,
    })
}

/// One of the pooling methods, or none.
fn pooling(number: u32, tokens: &[Token]) -> Option<PoolingMethod> {
    match number % 5 {
        0 => Some(PoolingMethod::LastToken),
        1 => Some(PoolingMethod::Mean),
        2 => Some(PoolingMethod::ClassLogits),
        3 => Some(PoolingMethod::TokenLogprobs(tokens.to_vec())),
        _ => None,
    }
}

fn seq_init() -> impl Strategy<Value = Box<SequenceInit>> {
    (sampling(), any::<u64>(), any::<u32>(), ids()).prop_map(
        |(sampling, key, prompt_len, history)| {
            Box::new(SequenceInit { sampling, rng_key: key, prompt_len, token_history: history })
        },
    )
}

fn row() -> impl Strategy<Value = BatchRow> {
    let input = prop_oneof![
        ids().prop_map(|ids| RowInput::Tokens(ids.into())),
        (any::<u64>(), any::<u16>()).prop_map(|(step, slack)| RowInput::SampledAt {
            step: StepId(step),
            draft_slack: slack
        }),
    ];
    let table = (any::<u8>(), any::<u32>(), vec(any::<u32>().prop_map(BlockId), 0..40));
    let table = table.prop_map(|(group, from, blocks)| BlockTableUpdate {
        group,
        first_entry: from,
        blocks: blocks.into(),
    });
    let numbers = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u8>(), any::<bool>());
    (numbers, input, vec(table, 0..3), of(any::<u32>()), of(seq_init())).prop_map(
        |((request, epoch, start, drafts, samples), input, tables, next, init)| BatchRow {
            request: RequestId(request),
            epoch,
            seq_slot: SequenceSlot(epoch ^ start),
            start,
            len: start.rotate_left(7),
            drafts,
            samples,
            masked: drafts == 0 && samples,
            input,
            table_updates: tables.into(),
            state_slots: (0..start as u8 % 3)
                .map(|group| StateSlotAccess {
                    group,
                    read: samples.then_some(StateSlot(epoch)),
                    write: StateSlot(start),
                })
                .collect(),
            next_token: next,
            seq_init: init,
        },
    )
}

fn kv_kind(bytes: u64) -> KvKind {
    match bytes % 4 {
        0 => KvKind::Full,
        1 => KvKind::Mla,
        2 => KvKind::Window { tokens: bytes as u32 },
        _ => KvKind::State { slots_per_request: bytes as u16, bytes_per_slot: bytes },
    }
}

fn batch() -> impl Strategy<Value = Batch> {
    let dispatch = prop_oneof![
        (any::<u32>(), any::<u32>())
            .prop_map(|(rows, width)| StepLaunchMode::Graph { rows, width }),
        any::<u32>().prop_map(|tokens| StepLaunchMode::Eager { tokens }),
    ];
    let header = (any::<u64>(), any::<u64>(), dispatch, any::<u32>(), any::<u32>());
    (header, vec(row(), 0..5)).prop_map(
        |((step, epoch, dispatch, moe_tokens, draft_rows), rows)| Batch {
            step: StepId(step),
            epoch: Epoch(epoch),
            dispatch,
            moe_tokens,
            draft_rows,
            rows,
        },
    )
}

fn logprobs() -> impl Strategy<Value = Vec<TokenLogprobs>> {
    let one = (any::<u32>(), any::<f32>(), any::<u32>(), weighted_ids());
    vec(
        one.prop_map(|(token, logprob, rank, top)| TokenLogprobs {
            token,
            logprob,
            rank,
            top_logprobs: top,
        }),
        0..4,
    )
}

fn output() -> impl Strategy<Value = StepOutput> {
    let error = prop_oneof![
        Just(RowError::NonFiniteLogits),
        Just(RowError::AllMasked),
        Just(RowError::MaskOverdue)
    ];
    let row = (ids(), any::<[u8; 2]>(), of(error), logprobs(), logprobs()).prop_map(
        |(sampled_tokens, [drafted, accepted], error, logprobs, prompt_logprobs)| RowOutput {
            sampled_tokens: sampled_tokens.into(),
            drafted,
            accepted,
            error,
            prompt: (!prompt_logprobs.is_empty()).then(|| {
                let pooled = logprobs.iter().map(|entry| entry.logprob).collect();
                Box::new(PromptResults { logprobs: prompt_logprobs, pooled })
            }),
            logprobs: logprobs.into(),
        },
    );
    let expert_tokens = any::<(u16, u16, u32)>();
    let expert_tokens = expert_tokens.prop_map(|(layer, expert, tokens)| ExpertTokenCount {
        layer,
        expert,
        tokens,
    });
    let parts = (any::<u64>(), any::<u64>(), vec(row, 0..5), vec(expert_tokens, 0..20));
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
        expert_tokens: experts,
    })
}

fn spec() -> impl Strategy<Value = KvSpec> {
    let group = (vec(any::<u16>(), 0..5), any::<u64>()).prop_map(|(layers, bytes_per_block)| {
        KvGroup { layers, kind: kv_kind(bytes_per_block), bytes_per_block }
    });
    (any::<u32>(), vec(group, 0..3))
        .prop_map(|(block_tokens, groups)| KvSpec { block_tokens, groups })
}

/// Returns a strategy for any message from the scheduler to an executor, except for grammar bitmasks.
pub(crate) fn executor_command() -> impl Strategy<Value = ExecutorCommand> {
    prop_oneof![
        vec(endpoint(), 0..3).prop_map(ExecutorCommand::Endpoints),
        any::<u32>().prop_map(|blocks| ExecutorCommand::AllocateKv { blocks }),
        batch().prop_map(ExecutorCommand::Batch),
        grammar_bitmask().prop_map(ExecutorCommand::Bitmask),
        any::<bool>().prop_map(|enabled| ExecutorCommand::Profile { enabled }),
        Just(ExecutorCommand::Shutdown),
    ]
}

/// Returns a strategy for the endpoint of a rank.
fn endpoint() -> impl Strategy<Value = RankEndpoint> {
    (any::<u16>(), ".{0,20}", any::<[u8; 32]>()).prop_map(|(rank, address, token)| RankEndpoint {
        rank: Rank(rank),
        address,
        token,
    })
}

/// Returns a strategy for grammar bitmasks of up to three rows.
fn grammar_bitmask() -> impl Strategy<Value = BitmaskMessage> {
    let bitmask = vec(any::<u32>(), 0..8).prop_map(TokenBitmask::from);
    let row =
        (any::<u32>(), vec(bitmask, 0..4)).prop_map(|(row, bitmasks)| BitmaskRow { row, bitmasks });
    (any::<u64>(), vec(row, 0..4))
        .prop_map(|(step, rows)| BitmaskMessage { step: StepId(step), rows })
}

/// Returns a strategy for the draft tokens of up to three rows.
fn step_drafts() -> impl Strategy<Value = StepDrafts> {
    let row = (any::<u64>(), vec(any::<u32>(), 0..8))
        .prop_map(|(request, ids)| RowDrafts { request: RequestId(request), tokens: ids.into() });
    (any::<u64>(), vec(row, 0..4)).prop_map(|(step, rows)| StepDrafts { step: StepId(step), rows })
}

/// Returns a strategy for any message from an executor to the scheduler.
pub(crate) fn executor_event() -> impl Strategy<Value = ExecutorEvent> {
    let phases = [
        StartupPhase::Device,
        StartupPhase::Compile,
        StartupPhase::Load,
        StartupPhase::WarmUp,
        StartupPhase::Capture,
        StartupPhase::Join,
    ];
    let hello = (any::<u16>(), any::<u64>(), ".{0,20}").prop_map(|(rank, model_digest, device)| {
        ExecutorHello {
            version: rank ^ 5,
            rank: Rank(rank),
            epoch: Epoch(model_digest >> 3),
            device,
            build: "0.1.0".to_owned(),
            model_digest,
        }
    });
    prop_oneof![
        hello.prop_map(ExecutorEvent::Hello),
        (prop::sample::select(phases.to_vec()), any::<u64>(), any::<u64>())
            .prop_map(|(phase, done, total)| ExecutorEvent::Progress { phase, done, total }),
        endpoint().prop_map(ExecutorEvent::Endpoint),
        any::<[u64; 3]>().prop_map(|[common, sharded, experts]| {
            ExecutorEvent::WeightsLoaded(WeightsDigest { common, sharded, experts })
        }),
        (spec(), any::<u32>(), any::<[u64; 2]>()).prop_map(|(spec, blocks, [fixed, token])| {
            let pace = StepCost { fixed_ns: fixed, per_token_ns: token };
            ExecutorEvent::WarmUpDone(WarmUpReport {
                kv_spec: spec,
                kv_blocks: blocks,
                step_cost: pace,
            })
        }),
        prop_oneof![
            ".{0,40}".prop_map(ProfilerStatus::Started),
            of(".{0,40}").prop_map(ProfilerStatus::Stopped),
            ".{0,40}".prop_map(ProfilerStatus::Failed),
        ]
        .prop_map(ExecutorEvent::ProfilerStatus),
        (any::<u32>(), ids()).prop_map(|(blocks, graph_rows)| ExecutorEvent::Ready(
            ExecutorReady { kv_blocks: blocks, capture_sizes: graph_rows }
        )),
        step_drafts().prop_map(ExecutorEvent::Drafts),
        output().prop_map(ExecutorEvent::StepOutput),
        any::<[u64; 2]>()
            .prop_map(|[step, ns]| ExecutorEvent::StepDone { step: StepId(step), duration_ns: ns }),
        (of(any::<u64>().prop_map(StepId)), ".{0,60}")
            .prop_map(|(step, text)| ExecutorEvent::Fault { step, text }),
        Just(ExecutorEvent::Heartbeat),
    ]
}
