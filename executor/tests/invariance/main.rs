//! Tests that a request's tokens and log-probabilities are bit-identical in all these cases: alone, in a
//! batch, in chunks, after preemption, after a prefix hit, with other thread counts, and in another sequence
//! slot. If several ranks share the model, the results of all ranks are bit-identical; in f32, their tokens
//! equal those of a single rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
mod drafts;
mod eagle3_drafts;
mod model_drafts;
mod mtp_drafts;
mod pooling;
mod ranks;
mod recurrent_drafts;
mod replicas;
#[path = "../scheduler_harness/mod.rs"]
#[allow(unused_imports, reason = "shared with the tests of emulated GPUs")]
mod scheduler_harness;

use executor::{Executor, ExecutorConfig, ExecutorError, KvCacheSize, ModelDtype, RankRendezvous};
use protocol::{
    Batch, Epoch, KvKind, ParallelConfig, Rank, RowError, SamplingParams, StepId, StepLaunchMode,
    Token, TokenLogprobs,
};
use scheduler_harness::{
    BLOCK, HarnessRequest, SchedulerHarness, VOCAB, config, mla_model, model_drafting, moe_model,
    recurrent_model, shared, two_head_sizes_model, window_model, with_expert_placement,
};

const PROMPT: usize = 50;
const TOTAL: usize = 74;
const DTYPES: [ModelDtype; 3] = [ModelDtype::Float32, ModelDtype::Bfloat16, ModelDtype::Float16];
/// Tolerance of log-probabilities between one rank and several ranks, for a model in f32.
const LOGPROB_TOLERANCE: f32 = 2e-4;

/// Configurations under test: one rank; two ranks with one KV head each; four ranks, where two ranks share
/// each KV head; sliding windows; KV heads of two sizes; recurrent states; experts split over TP ranks;
/// expert parallel ranks; and expert parallel ranks with an expert placement.
fn configs() -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float16, Float32};
    vec![
        config(Float32, 2),
        config(Bfloat16, 2),
        config(Float16, 2),
        window_model(Float32),
        window_model(Bfloat16),
        two_head_sizes_model(Float32),
        two_head_sizes_model(Bfloat16),
        shared(two_head_sizes_model(Float32), 2, false),
        recurrent_model(Float32),
        recurrent_model(Bfloat16),
        shared(recurrent_model(Float32), 2, false),
        shared(moe_model(Float16), 2, false),
        shared(config(Float32, 1), 2, false),
        shared(config(Bfloat16, 1), 4, false),
        shared(moe_model(Bfloat16), 2, false),
        shared(moe_model(Float32), 2, true),
        with_expert_placement(shared(moe_model(Bfloat16), 2, true)),
    ]
}

/// Configurations of `configs` whose models have no recurrent states.
fn configs_without_states() -> Vec<ExecutorConfig> {
    let has_states = |config: &ExecutorConfig| config.model.gated_delta.is_some();
    configs().into_iter().filter(|config| !has_states(config)).collect()
}

fn name(config: &ExecutorConfig) -> String {
    let settings = &config.settings;
    format!("{:?}, {:?}, {:?}", config.model.architecture, settings.dtype, settings.parallel)
}

/// Returns four sets of sampling parameters with log-probabilities: greedy, random, with cutoffs (top-p,
/// top-k, min-p), and with penalties, bad words and logit bias.
fn rules() -> Vec<SamplingParams> {
    let greedy = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    let random = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let with_cutoffs = SamplingParams { top_p: 0.8, top_k: 40, min_p: 0.01, ..random.clone() };
    let penalised = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: 0.2,
        bad_words: vec![vec![7], vec![1, 2]],
        logit_bias: vec![(11, 2.5)],
        min_tokens: 9,
        stop_token_ids: vec![1, 2, 3],
        ..random.clone()
    };
    vec![greedy, random, with_cutoffs, penalised]
}

fn run_single(
    harness: &mut SchedulerHarness,
    sampling: &SamplingParams,
) -> (Vec<Token>, Vec<TokenLogprobs>) {
    let mut request = HarnessRequest::new(3, PROMPT, sampling.clone());
    harness.finish(&mut request, PROMPT, TOTAL);
    let output = request.output();
    assert_eq!((output.0.len(), output.1.len()), (TOTAL - PROMPT, TOTAL - PROMPT));
    harness.free(request.table);
    output
}

/// Whether the log-probabilities of one rank and of several ranks agree within `LOGPROB_TOLERANCE`.
fn close(ours: &[TokenLogprobs], theirs: &[TokenLogprobs]) -> bool {
    let near = |(ours, theirs): (&TokenLogprobs, &TokenLogprobs)| {
        ours.rank == theirs.rank && (ours.logprob - theirs.logprob).abs() <= LOGPROB_TOLERANCE
    };
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(near)
}

#[test]
fn chunks_preemption_and_slots_change_nothing() {
    for config in configs() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let expected = run_single(&mut harness, &sampling);
            for chunk in [1, 7, 16, 64] {
                let mut request = HarnessRequest::new(3, PROMPT, sampling.clone()).in_slot(17);
                harness.finish(&mut request, chunk, TOTAL);
                assert_eq!(request.output(), expected, "{name}, chunks of {chunk}, {sampling:?}");
                harness.free(request.table);
            }
            for at in [PROMPT + 1, PROMPT + 9, TOTAL - 1] {
                let mut request = HarnessRequest::new(3, PROMPT, sampling.clone());
                harness.finish(&mut request, 16, at);
                let blocks = request.preempt(30);
                let mut other = HarnessRequest::new(9, 60, sampling.clone()); // Overwrites the released blocks.
                harness.free(blocks);
                harness.finish(&mut other, 60, 70);
                harness.finish(&mut request, 33, TOTAL);
                assert_eq!(request.output(), expected, "{name}, preempted at {at}, {sampling:?}");
                harness.free(request.table);
                harness.free(other.table);
            }
        }
    }
}

#[test]
fn batch_mates_change_nothing() {
    for config in configs() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        let rules = rules();
        let expected: Vec<_> = rules.iter().map(|s| run_single(&mut harness, s)).collect();
        for (which, expected) in expected.iter().enumerate() {
            let mut requests: Vec<HarnessRequest> = (0..32)
                .map(|i| {
                    if i == 13 {
                        return HarnessRequest::new(3, PROMPT, rules[which].clone()).in_slot(39);
                    }
                    let sampling = rules[i as usize % 4].clone();
                    HarnessRequest::new(100 + i, 5 + (i as usize * 13) % 60, sampling)
                        .in_slot(i as u32)
                })
                .collect();
            harness.finish_all(&mut requests, TOTAL);
            assert_eq!(&requests[13].output(), expected, "{name}, {:?}", rules[which]);
            for request in requests {
                harness.free(request.table);
            }
        }
    }
}

#[test]
fn prefix_hit_changes_nothing() {
    for config in configs_without_states() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for sampling in rules() {
            let mut first = HarnessRequest::new(3, PROMPT, sampling.clone());
            first.table.keeps_blocks = true;
            harness.finish(&mut first, PROMPT, TOTAL);
            for blocks in 1..=PROMPT / BLOCK {
                let mut request = HarnessRequest::new(3, PROMPT, sampling.clone()).in_slot(8);
                request.table = first.table.prefix(blocks);
                request.computed = blocks * BLOCK;
                harness.finish(&mut request, PROMPT, TOTAL);
                assert_eq!(request.output(), first.output(), "{name}, {blocks} blocks shared");
                harness.free(request.table.split_off(blocks));
            }
            harness.free(first.table);
        }
    }
}

/// Requests that continue from a checkpoint read its state slot once, and do not change it.
#[test]
fn prefix_hit_with_states_changes_nothing() {
    for dtype in DTYPES {
        let mut harness = SchedulerHarness::with(recurrent_model(dtype));
        for sampling in rules() {
            let expected = run_single(&mut harness, &sampling);
            let mut prefix = HarnessRequest::new(3, BLOCK, sampling.clone()).in_slot(21);
            prefix.table.keeps_blocks = true;
            harness.finish(&mut prefix, BLOCK, BLOCK + 1); // Its state is that after `BLOCK` tokens.
            for (seq_slot, chunk) in [(8, PROMPT), (9, 5), (8, 1)] {
                let mut request =
                    HarnessRequest::new(3, PROMPT, sampling.clone()).in_slot(seq_slot);
                request.table = prefix.table.prefix(1);
                (request.computed, request.checkpoint) = (BLOCK, Some(21));
                harness.finish(&mut request, chunk, TOTAL);
                assert_eq!(request.output(), expected, "{dtype:?}, chunks of {chunk}");
                harness.free(request.table.split_off(1));
            }
            harness.free(prefix.table);
        }
    }
}

#[test]
fn draft_model_with_states_is_rejected() {
    let draft = recurrent_model(ModelDtype::Float32).model;
    let config = model_drafting(config(ModelDtype::Float32, 2), draft, 2);
    let text = Executor::load(config, &mut |_| {}).unwrap_err().to_string();
    assert!(text.contains("Qwen3_5ForCausalLM is not supported as draft model"), "{text}");
}

#[test]
fn draft_models_with_other_kv_layouts_are_rejected() {
    let two_sizes = || two_head_sizes_model(ModelDtype::Float32);
    let text = |config, draft: ExecutorConfig| {
        let config = model_drafting(config, draft.model, 2);
        Executor::load(config, &mut |_| {}).unwrap_err().to_string()
    };
    let text_of_gemma = text(config(ModelDtype::Float32, 2), two_sizes());
    let expected = "Gemma4ForCausalLM is not supported as draft model: with global_head_dim";
    assert!(text_of_gemma.contains(expected), "{text_of_gemma}");
    let text_of_mla = text(two_sizes(), mla_model(ModelDtype::Float32));
    let expected = "DeepseekV3ForCausalLM is not supported as draft model of Gemma4ForCausalLM";
    assert!(text_of_mla.contains(expected), "{text_of_mla}");
}

#[test]
fn threads_change_nothing() {
    for dtype in DTYPES {
        let mut one = SchedulerHarness::new(dtype, 1);
        let mut three = SchedulerHarness::new(dtype, 3);
        for sampling in rules() {
            assert_eq!(
                run_single(&mut one, &sampling),
                run_single(&mut three, &sampling),
                "{dtype:?}"
            );
        }
    }
}

#[test]
fn tp_ranks_in_f32_match_single_rank() {
    let cases = [
        (config(ModelDtype::Float32, 1), vec![(2, false), (4, false)]),
        (moe_model(ModelDtype::Float32), vec![(2, false), (4, false), (2, true), (4, true)]),
    ];
    for (model, configs) in cases {
        let mut one = SchedulerHarness::with(model.clone());
        let expected: Vec<_> = rules().iter().map(|rule| run_single(&mut one, rule)).collect();
        for (size, expert_parallel) in configs {
            let mut ranks = SchedulerHarness::with(shared(model.clone(), size, expert_parallel));
            for (rule, (tokens, logprobs)) in rules().iter().zip(&expected) {
                let found = run_single(&mut ranks, rule);
                assert_eq!(
                    &found.0, tokens,
                    "{size} ranks, expert parallel: {expert_parallel}, {rule:?}"
                );
                assert!(
                    close(&found.1, logprobs),
                    "{size} ranks, expert parallel: {expert_parallel}, {rule:?}"
                );
            }
        }
    }
}

#[test]
fn overdue_bitmasks_are_the_same_on_all_ranks() {
    let play = |size| {
        let mut harness =
            SchedulerHarness::with(shared(config(ModelDtype::Float32, 1), size, false));
        harness.overdue_bitmasks = true;
        let mut request = HarnessRequest::new(3, PROMPT, rules()[1].clone());
        request.masked = true;
        harness.finish(&mut request, 16, TOTAL);
        request.output().0
    };
    assert_eq!(play(1), play(2));
}

#[test]
fn tp_ranks_split_kv_cache_bytes() {
    let memory = |config: ExecutorConfig| {
        Executor::load(config, &mut |_| {}).unwrap().kv_spec().bytes_per_block()
    };
    let of = |size: u16, rank: u16| {
        let mut config = shared(config(ModelDtype::Float32, 1), size, false);
        let rendezvous = RankRendezvous::new(config.settings.parallel).unwrap();
        config.settings.rendezvous = Some(rendezvous.path().to_owned());
        config.settings.rank = Rank(rank);
        memory(config)
    };
    let single_rank = of(1, 0);
    assert_eq!([of(2, 0), of(2, 1)], [single_rank / 2; 2]);
    assert_eq!(of(4, 3), single_rank / 2, "two ranks hold the same head");
}

#[test]
fn invalid_parallel_sizes_are_rejected() {
    let rejection = |config: ExecutorConfig| {
        Executor::load(config, &mut |_| {}).expect_err("the configuration is invalid").to_string()
    };
    let with = |parallel| {
        let mut config = config(ModelDtype::Float32, 1);
        config.settings.parallel = parallel;
        rejection(config)
    };
    let parallel =
        |tp_size, dp_size, experts| ParallelConfig { tp_size, dp_size, expert_parallel: experts };
    let three = with(parallel(3, 1, false));
    assert!(three.contains("num_attention_heads 4 cannot be split over 3 ranks"), "{three}");
    assert!(three.contains("the nearest number that works is 2"), "{three}");
    let dense = with(parallel(2, 1, true));
    assert!(dense.contains("the model has no experts"), "{dense}");
    let two_ranks = with(parallel(2, 1, false));
    assert!(
        two_ranks.contains("2 ranks of communication groups need rendezvous memory"),
        "{two_ranks}"
    );
    let no_ranks = with(parallel(0, 1, false));
    assert!(no_ranks.contains("rank 0 is outside the world of 0 x 1 ranks"), "{no_ranks}");
    let mut expert_parallel = moe_model(ModelDtype::Float32);
    expert_parallel.settings.parallel = parallel(1, 3, true);
    let text = rejection(expert_parallel.clone());
    assert!(text.contains("num_experts 8 cannot be split over 3 ranks"), "{text}");
    expert_parallel.settings.parallel = parallel(1, 2, true);
    let text = rejection(expert_parallel.clone());
    assert!(text.contains("2 ranks of communication groups need rendezvous memory"), "{text}");
    let mut wrong = with_expert_placement(shared(moe_model(ModelDtype::Float32), 2, true));
    wrong.settings.expert_placement.as_mut().unwrap().layers[2][4] = 6;
    let text = rejection(wrong);
    assert!(text.contains("layer 2: expert 4 has no physical expert"), "{text}");
    let text = rejection(with_expert_placement(moe_model(ModelDtype::Float32)));
    assert!(
        text.contains("an expert placement needs expert parallelism over several ranks"),
        "{text}"
    );
}

#[test]
fn device_tokens_equal_host_tokens() {
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 2);
    for sampling in rules() {
        let expected = run_single(&mut harness, &sampling);
        harness.from_device = true;
        assert_eq!(run_single(&mut harness, &sampling), expected);
        harness.from_device = false;
    }
}

#[test]
fn prompt_logprobs_cover_each_position_once_in_any_chunking() {
    let sampling =
        SamplingParams { prompt_logprobs: Some(2), logprobs: Some(2), ..SamplingParams::greedy() };
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 2);
    let mut score = |chunk| {
        let mut request = HarnessRequest::new(3, PROMPT, sampling.clone());
        harness.finish(&mut request, chunk, PROMPT + 4);
        harness.free(std::mem::take(&mut request.table));
        (request.prompt_logprobs.clone(), request.tokens.clone(), request.output())
    };
    let (in_one_chunk, tokens, output) = score(PROMPT);
    assert_eq!(in_one_chunk.len(), PROMPT - 1);
    for (i, entry) in in_one_chunk.iter().enumerate() {
        assert_eq!(entry.token, tokens[i + 1]);
        assert_eq!(entry.top_logprobs.len(), 2);
        let place = entry.top_logprobs.iter().position(|&(token, _)| token == entry.token);
        assert_eq!(place.map(|p| p as u32 + 1), (entry.rank <= 2).then_some(entry.rank));
    }
    for chunk in [1, 7, 16] {
        assert_eq!(score(chunk), (in_one_chunk.clone(), tokens.clone(), output.clone()), "{chunk}");
    }
}

#[test]
fn full_logprobs_sum_to_one() {
    let sampling = SamplingParams { logprobs: Some(u32::MAX), ..SamplingParams::greedy() };
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 1);
    let (tokens, logprobs) = run_single(&mut harness, &sampling);
    for (token, entry) in tokens.iter().zip(&logprobs) {
        assert_eq!(entry.top_logprobs.len(), VOCAB as usize);
        assert_eq!((entry.rank, entry.top_logprobs[0]), (1, (*token, entry.logprob)));
        let total: f64 = entry.top_logprobs.iter().map(|&(_, l)| f64::from(l).exp()).sum();
        assert!((total - 1.0).abs() < 1e-4, "{total}");
    }
}

#[test]
fn fully_masked_row_fails_alone() {
    let nothing =
        SamplingParams { allowed_token_ids: Some(Vec::new()), ..SamplingParams::greedy() };
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 1);
    let expected = run_single(&mut harness, &rules()[0]);
    let (mut good, mut bad) =
        (HarnessRequest::new(3, PROMPT, rules()[0].clone()), HarnessRequest::new(4, 9, nothing));
    let (_, output) = harness.try_step(&mut [bad.chunk(9), good.chunk(PROMPT)]);
    assert_eq!(output.rows[0].error, Some(RowError::AllMasked));
    assert!(output.rows[0].sampled_tokens.is_empty());
    assert_eq!((output.rows[1].error, output.rows[1].sampled_tokens[0]), (None, expected.0[0]));
}

#[test]
fn empty_step_completes() {
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 1);
    assert!(harness.step(&mut []).rows.is_empty());
}

#[test]
fn batch_before_kv_allocation_is_rejected() {
    let mut executor = Executor::load(config(ModelDtype::Float32, 1), &mut |_| {}).unwrap();
    let dispatch = StepLaunchMode::Eager { tokens: 0 };
    let batch = Batch {
        step: StepId(1),
        epoch: Epoch(1),
        dispatch,
        moe_tokens: 0,
        draft_rows: 0,
        rows: Vec::new(),
    };
    assert!(matches!(executor.step(&batch), Err(ExecutorError::KvCacheNotSized)));
    assert!(matches!(
        executor.size_kv(15, &mut |_| {}),
        Err(ExecutorError::KvTooSmall { blocks: 15, needed: 16, .. })
    ));
    assert_eq!(executor.size_kv(16, &mut |_| {}).unwrap().kv_blocks, 16);
}

#[test]
fn warm_up_measures_and_sizes() {
    let sized = |kv| {
        let mut config = config(ModelDtype::Float32, 2);
        config.settings.kv_cache_size = kv;
        Executor::load(config, &mut |_| {}).unwrap().warm_up(&mut |_| {})
    };
    let memory = sized(KvCacheSize::Blocks(77)).unwrap();
    assert!(
        memory.kv_blocks == 77 && memory.step_cost.fixed_ns + memory.step_cost.per_token_ns > 0
    );
    let bytes = memory.kv_spec.bytes_per_block();
    assert_eq!(bytes, (3 * 2 * 2 * 64 * 4 * BLOCK) as u64);
    assert_eq!(sized(KvCacheSize::Bytes(20 * bytes + 1)).unwrap().kv_blocks, 20);
    assert!(sized(KvCacheSize::Auto).unwrap().kv_blocks > 1000);
    assert!(matches!(sized(KvCacheSize::Bytes(bytes)), Err(ExecutorError::KvTooSmall { .. })));
}

/// Two layers without a window have the bytes of one layer with a window, and take its place in a block.
#[test]
fn blocks_hold_two_layers_of_half_the_size() {
    let harness = SchedulerHarness::with(two_head_sizes_model(ModelDtype::Float32));
    let spec = harness.executor.kv_spec();
    let layers: Vec<_> = spec.groups.iter().map(|group| &group.layers[..]).collect();
    assert_eq!(layers, [&[1, 3][..], &[0], &[2]], "layer 4 has no keys of its own");
    assert_eq!(spec.bytes_per_block(), (2 * 2 * 64 * 4 * BLOCK) as u64);
}

/// A pool of 26 blocks holds a request of 256 tokens, although its three KV groups have 16 blocks each for these
/// tokens: the blocks before the windows are freed.
#[test]
fn windows_free_blocks() {
    let sized = |blocks| {
        let mut config = window_model(ModelDtype::Float32);
        config.settings.tokens_per_step = 16;
        config.settings.kv_cache_size = KvCacheSize::Blocks(blocks);
        config
    };
    let run = |config| {
        let mut harness = SchedulerHarness::with(config);
        let spec = harness.executor.kv_spec().clone();
        let mut request = HarnessRequest::new(3, PROMPT, SamplingParams::greedy());
        harness.finish(&mut request, 16, 256);
        (spec, request.output().0)
    };
    let (spec, expected) = run(sized(512));
    let window = KvKind::Window { tokens: 10 };
    let groups: Vec<_> = spec.groups.iter().map(|group| (&group.layers[..], group.kind)).collect();
    let expected_groups: [(&[u16], KvKind); 3] =
        [(&[1], KvKind::Full), (&[0], window), (&[2], window)];
    assert_eq!(groups, expected_groups);
    assert_eq!(spec.bytes_per_block(), (2 * 2 * 64 * 4 * BLOCK) as u64, "one layer");
    assert_eq!(run(sized(26)).1, expected);
    let small = Executor::load(sized(25), &mut |_| {}).unwrap().size_kv(25, &mut |_| {});
    assert!(matches!(small, Err(ExecutorError::KvTooSmall { blocks: 25, needed: 26, .. })));
}
