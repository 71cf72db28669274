//! Tests of MoE on an emulated GPU, with eager launches and graph replay: the numbers of tokens routed to
//! each expert equal those on the CPU, and models with shared experts (experts that process every token) give
//! the same outputs as on the CPU.

use super::CHILD_TEST_TIMEOUT;
use super::emulated_gpu::bounded_child::run_within;
use crate::ranks::join_device_group;
use crate::scheduler_harness::{
    HarnessRequest, SchedulerHarness, mla_model, moe_model, shared, with_expert_placement,
};
use crate::{
    GeneratedTokens, assert_close, assert_near, fp8_model, on_emulator, play, warp_sizes,
    with_few_slots,
};
use executor::{ExecutorConfig, KvCacheDtype, ModelDtype};
use models::config::ModelConfig;
use protocol::{ExpertTokenCount, GraphCaptureConfig, SamplingParams};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Number of decode steps: one more than the number of replayed steps (16) after which the expert load is
/// reported.
const STEPS: usize = 17;

/// Number of tokens routed to each expert, by (layer, expert).
type ExpertTokenTotals = BTreeMap<(u16, u16), u32>;

fn add(totals: &mut ExpertTokenTotals, counts: &[ExpertTokenCount]) {
    for count in counts {
        *totals.entry((count.layer, count.expert)).or_default() += count.tokens;
    }
}

/// Runs three prompts, then decode steps of three rows, then another prompt. Returns the total number of
/// tokens routed to each expert, and the indices of the decode steps with an expert load report.
fn expert_token_totals(harness: &mut SchedulerHarness) -> (ExpertTokenTotals, Vec<usize>) {
    let mut totals = ExpertTokenTotals::new();
    let request = |id: u64| HarnessRequest::new(id, 5 + 3 * id as usize, SamplingParams::greedy());
    let mut requests: Vec<HarnessRequest> = (0..3).map(request).collect();
    for request in &mut requests {
        let len = request.prompt_len;
        add(&mut totals, &harness.step(&mut [request.chunk(len)]).expert_tokens);
    }
    let mut reports = Vec::new();
    for step in 1..=STEPS {
        let output = harness
            .step(&mut requests.iter_mut().map(|request| request.chunk(1)).collect::<Vec<_>>());
        add(&mut totals, &output.expert_tokens);
        reports.extend((!output.expert_tokens.is_empty()).then_some(step));
    }
    let mut last = request(3);
    let len = last.prompt_len;
    add(&mut totals, &harness.step(&mut [last.chunk(len)]).expert_tokens);
    (totals, reports)
}

fn cpu_harness(config: ExecutorConfig) -> SchedulerHarness {
    SchedulerHarness::with(with_few_slots(config))
}

/// A harness that captures graphs of `rows` rows only.
fn harness_capturing_rows(mut config: ExecutorConfig, rows: u32) -> SchedulerHarness {
    config.settings.graph_capture = GraphCaptureConfig::Sizes(vec![rows]);
    SchedulerHarness::with(config)
}

#[test]
fn expert_load_matches_the_cpu() {
    for (warp_size, config) in
        [(64, moe_model(ModelDtype::Float32)), (32, mla_model(ModelDtype::Float32))]
    {
        let (expected, of_each_step) = expert_token_totals(&mut cpu_harness(config.clone()));
        assert_eq!(of_each_step, (1..=STEPS).collect::<Vec<_>>());
        if warp_size == 64 {
            let launched = expert_token_totals(&mut SchedulerHarness::with(on_emulator(
                warp_size,
                config.clone(),
                true,
            )));
            assert_eq!(launched, (expected.clone(), of_each_step), "launched");
        }
        // Steps of three rows replay the graph for four rows; the fourth row is padding.
        let replayed = expert_token_totals(&mut harness_capturing_rows(
            on_emulator(warp_size, config, false),
            4,
        ));
        assert_eq!(replayed, (expected, vec![16]), "replayed, warp size {warp_size}");
    }
}

/// The first rank counts the tokens of all ranks, per logical expert, so the counts do not depend on the
/// expert placement.
#[test]
fn expert_load_is_counted_once_across_ranks() {
    let (expected, _) = expert_token_totals(&mut cpu_harness(moe_model(ModelDtype::Float32)));
    let config = with_expert_placement(shared(moe_model(ModelDtype::Float32), 2, true));
    let mut harness = harness_capturing_rows(join_device_group("counts", 32, config, false), 4);
    assert_eq!(expert_token_totals(&mut harness), (expected, vec![16]));
}

/// In steps with a single row, routing is fused into the expert kernel, so this kernel also counts the routed
/// tokens.
#[test]
fn expert_load_counts_single_row_steps() {
    let config = crate::moe_model(ModelDtype::Bfloat16);
    let mut harness = harness_capturing_rows(on_emulator(32, config, false), 1);
    let mut request = HarnessRequest::new(1, 9, SamplingParams::greedy());
    let mut totals = ExpertTokenTotals::new();
    add(&mut totals, &harness.step(&mut [request.chunk(9)]).expert_tokens);
    for _ in 0..16 {
        add(&mut totals, &harness.step(&mut [request.chunk(1)]).expert_tokens);
    }
    let of = |layer| totals.range((layer, 0)..(layer + 1, 0)).map(|(_, tokens)| tokens).sum();
    // Each token is routed to two experts. For a prompt, the last layer computes only one token, the sample
    // position.
    let found: [u32; 2] = [0, 1].map(of);
    assert_eq!(found, [2 * (9 + 16), 2 * (1 + 16)]);
}

/// Returns a DeepSeek-V2 model with eight routed experts and two shared experts of intermediate size `width`.
/// Its router is plain softmax.
pub(crate) fn shared_expert_model(dtype: ModelDtype, width: usize) -> ExecutorConfig {
    shared_expert_model_of_size(dtype, 64, width)
}

/// Returns a model of hidden size `hidden` with two shared experts of intermediate size `width`.
fn shared_expert_model_of_size(dtype: ModelDtype, hidden: usize, width: usize) -> ExecutorConfig {
    let text = format!(
        r#"{{
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 384,
        "hidden_size": {hidden}, "num_hidden_layers": 2, "num_attention_heads": 4,
        "q_lora_rank": null, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": {width}, "first_k_dense_replace": 0, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "norm_topk_prob": false, "intermediate_size": 96,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512
    }}"#
    );
    let model = ModelConfig::from_json(Path::new("config.json"), &text).unwrap();
    ExecutorConfig { model, ..crate::config(dtype, 2) }
}

/// Checks shared experts in the two ways in which they are computed: fused with the routed experts and, in
/// steps of many rows, overlapped with the routed experts on the secondary stream.
fn fused_and_overlapped_shared_experts(warp_size: u32, expected: &[GeneratedTokens]) {
    let harness = |eager| {
        SchedulerHarness::with(on_emulator(
            warp_size,
            shared_expert_model(ModelDtype::Float32, 64),
            eager,
        ))
    };
    let launched = play(&mut harness(true));
    assert_close(&launched, expected, &format!("warp size {warp_size}"));
    assert_eq!(play(&mut harness(false)), launched, "warp size {warp_size}: replay equals eager");
}

#[test]
#[ignore = "run by secondary_stream_is_joined"]
fn lazily_run_streams() {
    let expected = play(&mut SchedulerHarness::with(with_few_slots(shared_expert_model(
        ModelDtype::Float32,
        64,
    ))));
    fused_and_overlapped_shared_experts(64, &expected);
    streamed_in_fp8();
}

/// Checks fp8 shared experts, which are overlapped with the routed experts in every step, eager and replayed.
fn streamed_in_fp8() {
    let fp8 = |dtype| fp8_model(shared_expert_model_of_size(dtype, 128, 128), KvCacheDtype::Auto);
    let exact = play(&mut SchedulerHarness::with(with_few_slots(fp8(ModelDtype::Float32))));
    let harness = |eager| SchedulerHarness::with(on_emulator(32, fp8(ModelDtype::Bfloat16), eager));
    let launched = play(&mut harness(true));
    assert_near(&launched, &exact, "fp8, warp size 32");
    let mut replaying = harness(false);
    assert_eq!(replaying.graphs, [1, 2, 4, 8]);
    assert_eq!(play(&mut replaying), launched, "fp8: replay equals eager");
}

/// Runs the test on emulated GPUs that execute a stream only when another stream or the host waits for it.
/// The secondary stream runs either as late as possible or alternately with the main stream, so that a
/// missing synchronisation changes the outputs.
#[test]
fn secondary_stream_is_joined() {
    if !crate::is_selected_by_cursor(0, crate::SHARDS) {
        return;
    }
    for lazy in ["1", "2"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--ignored", "--exact", "--nocapture", "experts::lazily_run_streams"]);
        let child = run_within(child.env("HIPEMU_LAZY", lazy), CHILD_TEST_TIMEOUT);
        let stdout = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && stdout.contains("1 passed"), "{stdout}");
    }
}

/// Tests shared experts on one rank, and on two ranks that either split the shared experts or replicate them.
#[test]
fn shared_experts_match_the_cpu() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    let expected = play(&mut SchedulerHarness::with(with_few_slots(shared_expert_model(
        ModelDtype::Float32,
        64,
    ))));
    for warp_size in warp_sizes() {
        fused_and_overlapped_shared_experts(warp_size, &expected);
    }
    for (what, whole) in [("in parts", false), ("whole", true)] {
        let harness = |eager| {
            let config = shared(shared_expert_model(ModelDtype::Float32, 64), 2, whole);
            SchedulerHarness::with(join_device_group("sharing", 64, config, eager))
        };
        let launched = play(&mut harness(true));
        assert_close(&launched, &expected, what);
        assert_eq!(play(&mut harness(false)), launched, "{what}: replay equals eager");
    }
}

/// In bf16 (warp size 32), shared experts run in the grouped GEMM with TMA, and single rows are routed inside
/// the expert kernel. In fp8, shared experts use stacked weights.
#[test]
fn shared_experts_in_half_precision_stay_near() {
    if !crate::is_selected_by_cursor(3, crate::SHARDS) {
        return;
    }
    let exact = play(&mut SchedulerHarness::with(with_few_slots(shared_expert_model(
        ModelDtype::Float32,
        64,
    ))));
    for warp_size in warp_sizes() {
        let harness = |eager| {
            SchedulerHarness::with(on_emulator(
                warp_size,
                shared_expert_model(ModelDtype::Bfloat16, 64),
                eager,
            ))
        };
        let launched = play(&mut harness(true));
        assert_near(&launched, &exact, &format!("bf16, warp size {warp_size}"));
        assert_eq!(play(&mut harness(false)), launched, "bf16, warp size {warp_size}");
    }
    let fp8 = |dtype| fp8_model(shared_expert_model(dtype, 128), KvCacheDtype::Auto);
    let exact = play(&mut SchedulerHarness::with(with_few_slots(fp8(ModelDtype::Float32))));
    let found = play(&mut SchedulerHarness::with(on_emulator(64, fp8(ModelDtype::Bfloat16), true)));
    assert_near(&found, &exact, "fp8");
    streamed_in_fp8();
}
