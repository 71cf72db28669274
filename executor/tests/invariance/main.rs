//! A request's tokens and log-probabilities are bit-identical whatever happens around it: alone, in a batch,
//! in chunks, after preemption, after a prefix hit, with other thread counts, in another sequence slot. Where
//! several ranks share the model, all of them get the same bits, and in f32 the tokens of one rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod drafts;
mod eagle3_drafts;
mod model_drafts;
mod mtp_drafts;
mod ranks;
mod replicas;
mod scheduler_harness;

use executor::{Executor, ExecutorConfig, ExecutorError, KvCacheSize, ModelDtype, RankRendezvous};
use protocol::{
    Batch, DispatchMode, Epoch, ParallelConfig, Rank, RowError, SamplingParams, StepId, Token,
    TokenLogprobs,
};
use scheduler_harness::{
    BLOCK, SchedulerHarness, ScriptedRequest, VOCAB, config, moe_model, shared,
    with_expert_placement,
};

const PROMPT: usize = 50;
const TOTAL: usize = 74;
const DTYPES: [ModelDtype; 3] = [ModelDtype::Float32, ModelDtype::Bfloat16, ModelDtype::Float16];
/// Tolerance of log-probabilities between one rank and several ranks, for a model in f32.
const LOGPROB_TOLERANCE: f32 = 2e-4;

/// Configurations under test: one rank; two ranks with one KV head each; four ranks that replicate the two KV
/// heads; experts split (TP), expert parallel (EP), and with an expert placement.
fn worlds() -> Vec<ExecutorConfig> {
    use ModelDtype::{Bfloat16, Float16, Float32};
    vec![
        config(Float32, 2),
        config(Bfloat16, 2),
        config(Float16, 2),
        shared(moe_model(Float16), 2, false),
        shared(config(Float32, 1), 2, false),
        shared(config(Bfloat16, 1), 4, false),
        shared(moe_model(Bfloat16), 2, false),
        shared(moe_model(Float32), 2, true),
        with_expert_placement(shared(moe_model(Bfloat16), 2, true)),
    ]
}

fn name(config: &ExecutorConfig) -> String {
    let settings = &config.settings;
    format!("{:?}, {:?}, {:?}", config.model.architecture, settings.dtype, settings.parallel)
}

/// Sampling parameters with history, cutoffs, random sampling and log-probabilities.
fn rules() -> Vec<SamplingParams> {
    let greedy = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    let drawn = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let cut = SamplingParams { top_p: 0.8, top_k: 40, min_p: 0.01, ..drawn.clone() };
    let penalised = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: 0.2,
        bad_words: vec![vec![7], vec![1, 2]],
        logit_bias: vec![(11, 2.5)],
        min_tokens: 9,
        stop_token_ids: vec![1, 2, 3],
        ..drawn.clone()
    };
    vec![greedy, drawn, cut, penalised]
}

fn alone(
    player: &mut SchedulerHarness,
    sampling: &SamplingParams,
) -> (Vec<Token>, Vec<TokenLogprobs>) {
    let mut job = ScriptedRequest::new(3, PROMPT, sampling.clone());
    player.finish(&mut job, PROMPT, TOTAL);
    let output = job.output();
    assert_eq!((output.0.len(), output.1.len()), (TOTAL - PROMPT, TOTAL - PROMPT));
    player.free(job.table);
    output
}

/// Whether log-probabilities of one rank and of several ranks agree within the tolerance.
fn close(ours: &[TokenLogprobs], theirs: &[TokenLogprobs]) -> bool {
    let near = |(ours, theirs): (&TokenLogprobs, &TokenLogprobs)| {
        ours.rank == theirs.rank && (ours.logprob - theirs.logprob).abs() <= LOGPROB_TOLERANCE
    };
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(near)
}

#[test]
fn chunks_preemption_and_slots_change_nothing() {
    for world in worlds() {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        for sampling in rules() {
            let expected = alone(&mut player, &sampling);
            for chunk in [1, 7, 16, 64] {
                let mut job = ScriptedRequest::new(3, PROMPT, sampling.clone()).in_slot(17);
                player.finish(&mut job, chunk, TOTAL);
                assert_eq!(job.output(), expected, "{name}, chunks of {chunk}, {sampling:?}");
                player.free(job.table);
            }
            for at in [PROMPT + 1, PROMPT + 9, TOTAL - 1] {
                let mut job = ScriptedRequest::new(3, PROMPT, sampling.clone());
                player.finish(&mut job, 16, at);
                let blocks = job.preempt(30);
                let mut other = ScriptedRequest::new(9, 60, sampling.clone()); // Overwrites the released blocks.
                player.free(blocks);
                player.finish(&mut other, 60, 70);
                player.finish(&mut job, 33, TOTAL);
                assert_eq!(job.output(), expected, "{name}, preempted at {at}, {sampling:?}");
                player.free(job.table);
                player.free(other.table);
            }
        }
    }
}

#[test]
fn batch_mates_change_nothing() {
    for world in worlds() {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        let rules = rules();
        let expected: Vec<_> = rules.iter().map(|s| alone(&mut player, s)).collect();
        for (which, expected) in expected.iter().enumerate() {
            let mut jobs: Vec<ScriptedRequest> = (0..32)
                .map(|i| {
                    if i == 13 {
                        return ScriptedRequest::new(3, PROMPT, rules[which].clone()).in_slot(39);
                    }
                    let sampling = rules[i as usize % 4].clone();
                    ScriptedRequest::new(100 + i, 5 + (i as usize * 13) % 60, sampling)
                        .in_slot(i as u32)
                })
                .collect();
            player.finish_all(&mut jobs, TOTAL);
            assert_eq!(&jobs[13].output(), expected, "{name}, {:?}", rules[which]);
            for job in jobs {
                player.free(job.table);
            }
        }
    }
}

#[test]
fn a_prefix_hit_changes_nothing() {
    for world in worlds() {
        let name = name(&world);
        let mut player = SchedulerHarness::with(world);
        for sampling in rules() {
            let mut first = ScriptedRequest::new(3, PROMPT, sampling.clone());
            player.finish(&mut first, PROMPT, TOTAL);
            for blocks in 1..=PROMPT / BLOCK {
                let mut job = ScriptedRequest::new(3, PROMPT, sampling.clone()).in_slot(8);
                job.table = first.table[..blocks].to_vec();
                job.computed = blocks * BLOCK;
                player.finish(&mut job, PROMPT, TOTAL);
                assert_eq!(job.output(), first.output(), "{name}, {blocks} blocks shared");
                player.free(job.table.split_off(blocks));
            }
            player.free(first.table);
        }
    }
}

#[test]
fn threads_change_nothing() {
    for dtype in DTYPES {
        let mut one = SchedulerHarness::new(dtype, 1);
        let mut three = SchedulerHarness::new(dtype, 3);
        for sampling in rules() {
            assert_eq!(alone(&mut one, &sampling), alone(&mut three, &sampling), "{dtype:?}");
        }
    }
}

#[test]
fn tp_ranks_in_f32_match_single_rank() {
    let cases = [
        (config(ModelDtype::Float32, 1), vec![(2, false), (4, false)]),
        (moe_model(ModelDtype::Float32), vec![(2, false), (4, false), (2, true), (4, true)]),
    ];
    for (model, worlds) in cases {
        let mut one = SchedulerHarness::with(model.clone());
        let expected: Vec<_> = rules().iter().map(|rule| alone(&mut one, rule)).collect();
        for (size, spread) in worlds {
            let mut ranks = SchedulerHarness::with(shared(model.clone(), size, spread));
            for (rule, (tokens, logprobs)) in rules().iter().zip(&expected) {
                let found = alone(&mut ranks, rule);
                assert_eq!(&found.0, tokens, "{size} ranks, spread: {spread}, {rule:?}");
                assert!(close(&found.1, logprobs), "{size} ranks, spread: {spread}, {rule:?}");
            }
        }
    }
}

#[test]
fn overdue_bitmasks_are_the_same_on_all_ranks() {
    let play = |size| {
        let mut player =
            SchedulerHarness::with(shared(config(ModelDtype::Float32, 1), size, false));
        player.overdue_bitmasks = true;
        let mut job = ScriptedRequest::new(3, PROMPT, rules()[1].clone());
        job.masked = true;
        player.finish(&mut job, 16, TOTAL);
        job.output().0
    };
    assert_eq!(play(1), play(2));
}

#[test]
fn ranks_share_the_bytes_of_a_cache() {
    let memory = |config: ExecutorConfig| {
        Executor::load(config, &mut |_| {}).unwrap().kv_spec().bytes_per_block()
    };
    let of = |size: u16, rank: u16| {
        let mut config = shared(config(ModelDtype::Float32, 1), size, false);
        let meeting = RankRendezvous::new(config.settings.parallel).unwrap();
        config.settings.rendezvous = Some(meeting.path().to_owned());
        config.settings.rank = Rank(rank);
        memory(config)
    };
    let whole = of(1, 0);
    assert_eq!([of(2, 0), of(2, 1)], [whole / 2; 2]);
    assert_eq!(of(4, 3), whole / 2, "two ranks hold the same head");
}

#[test]
fn invalid_parallel_sizes_are_rejected() {
    let refused = |config: ExecutorConfig| {
        Executor::load(config, &mut |_| {}).expect_err("a refusal").to_string()
    };
    let with = |parallel| {
        let mut config = config(ModelDtype::Float32, 1);
        config.settings.parallel = parallel;
        refused(config)
    };
    let parallel =
        |tp_size, dp_size, experts| ParallelConfig { tp_size, dp_size, expert_parallel: experts };
    let three = with(parallel(3, 1, false));
    assert!(three.contains("num_attention_heads 4 cannot be split over 3 ranks"), "{three}");
    assert!(three.contains("the nearest number that works is 2"), "{three}");
    let dense = with(parallel(2, 1, true));
    assert!(dense.contains("the model has no experts"), "{dense}");
    let alone = with(parallel(2, 1, false));
    assert!(alone.contains("2 ranks that share layers need shared memory"), "{alone}");
    let nobody = with(parallel(0, 1, false));
    assert!(nobody.contains("rank 0 is none of 0 x 1 ranks"), "{nobody}");
    let mut spread = moe_model(ModelDtype::Float32);
    spread.settings.parallel = parallel(1, 3, true);
    let text = refused(spread.clone());
    assert!(text.contains("num_experts 8 cannot be split over 3 ranks"), "{text}");
    spread.settings.parallel = parallel(1, 2, true);
    let text = refused(spread.clone());
    assert!(text.contains("2 ranks that share layers need shared memory"), "{text}");
    let mut wrong = with_expert_placement(shared(moe_model(ModelDtype::Float32), 2, true));
    wrong.settings.expert_placement.as_mut().unwrap().layers[2][4] = 6;
    let text = refused(wrong);
    assert!(text.contains("layer 2: expert 4 has no place"), "{text}");
    let text = refused(with_expert_placement(moe_model(ModelDtype::Float32)));
    assert!(text.contains("a placement of experts needs several ranks"), "{text}");
}

#[test]
fn tokens_still_on_the_device_equal_tokens_from_the_host() {
    let mut player = SchedulerHarness::new(ModelDtype::Float32, 2);
    for sampling in rules() {
        let expected = alone(&mut player, &sampling);
        player.from_device = true;
        assert_eq!(alone(&mut player, &sampling), expected);
        player.from_device = false;
    }
}

#[test]
fn prompt_logprobs_cover_each_position_once_in_any_chunking() {
    let sampling =
        SamplingParams { prompt_logprobs: Some(2), logprobs: Some(2), ..SamplingParams::greedy() };
    let mut player = SchedulerHarness::new(ModelDtype::Float32, 2);
    let mut score = |chunk| {
        let mut job = ScriptedRequest::new(3, PROMPT, sampling.clone());
        player.finish(&mut job, chunk, PROMPT + 4);
        player.free(std::mem::take(&mut job.table));
        (job.prompt_logprobs.clone(), job.tokens.clone(), job.output())
    };
    let (whole, tokens, output) = score(PROMPT);
    assert_eq!(whole.len(), PROMPT - 1);
    for (i, entry) in whole.iter().enumerate() {
        assert_eq!(entry.token, tokens[i + 1]);
        assert_eq!(entry.top_logprobs.len(), 2);
        let place = entry.top_logprobs.iter().position(|&(token, _)| token == entry.token);
        assert_eq!(place.map(|p| p as u32 + 1), (entry.rank <= 2).then_some(entry.rank));
    }
    for chunk in [1, 7, 16] {
        assert_eq!(score(chunk), (whole.clone(), tokens.clone(), output.clone()), "{chunk}");
    }
}

#[test]
fn full_logprobs_sum_to_one() {
    let sampling = SamplingParams { logprobs: Some(u32::MAX), ..SamplingParams::greedy() };
    let mut player = SchedulerHarness::new(ModelDtype::Float32, 1);
    let (tokens, logprobs) = alone(&mut player, &sampling);
    for (token, entry) in tokens.iter().zip(&logprobs) {
        assert_eq!(entry.top_logprobs.len(), VOCAB as usize);
        assert_eq!((entry.rank, entry.top_logprobs[0]), (1, (*token, entry.logprob)));
        let total: f64 = entry.top_logprobs.iter().map(|&(_, l)| f64::from(l).exp()).sum();
        assert!((total - 1.0).abs() < 1e-4, "{total}");
    }
}

#[test]
fn masking_everything_fails_the_row_alone() {
    let nothing =
        SamplingParams { allowed_token_ids: Some(Vec::new()), ..SamplingParams::greedy() };
    let mut player = SchedulerHarness::new(ModelDtype::Float32, 1);
    let expected = alone(&mut player, &rules()[0]);
    let (mut good, mut bad) =
        (ScriptedRequest::new(3, PROMPT, rules()[0].clone()), ScriptedRequest::new(4, 9, nothing));
    let (_, output) = player.try_step(&mut [(&mut bad, 9), (&mut good, PROMPT)]);
    assert_eq!(output.rows[0].error, Some(RowError::AllMasked));
    assert!(output.rows[0].sampled_tokens.is_empty());
    assert_eq!((output.rows[1].error, output.rows[1].sampled_tokens[0]), (None, expected.0[0]));
}

#[test]
fn empty_step_completes() {
    let mut player = SchedulerHarness::new(ModelDtype::Float32, 1);
    assert!(player.step(&mut []).rows.is_empty());
}

#[test]
fn batches_before_the_cache_has_a_size_are_refused() {
    let mut executor = Executor::load(config(ModelDtype::Float32, 1), &mut |_| {}).unwrap();
    let bucket = DispatchMode::Eager { tokens: 0 };
    let batch = Batch {
        step: StepId(1),
        epoch: Epoch(1),
        dispatch: bucket,
        moe_tokens: 0,
        draft_rows: 0,
        rows: Vec::new(),
    };
    assert!(matches!(executor.step(&batch), Err(ExecutorError::KvCacheNotSized)));
    assert!(matches!(
        executor.size_kv(15, &mut |_| {}),
        Err(ExecutorError::KvTooSmall { longest: 240, .. })
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
