//! Tests of the executor on an emulated GPU: sampled tokens equal those on the CPU, with eager launches and
//! with graph replay.
//!
//! Only the hardware is emulated. Kernels that are compiled at start-up, copies, sequence slots and captured
//! graphs are the same as on a GPU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
mod drafts;
#[path = "../../../kernels/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
mod experts;
mod families;
mod memory;
mod op_bench;
mod ranks;
#[path = "../scheduler_harness/mod.rs"]
#[allow(dead_code, unused_imports, reason = "shared with the invariance tests")]
mod scheduler_harness;
#[path = "../../../tests/support/seed_cursor.rs"]
#[allow(dead_code, reason = "these tests have shards, but no seeds")]
mod seed_cursor;
mod trace;

use executor::{Executor, ExecutorConfig, KvCacheDtype, KvCacheSize, ModelDtype};
use models::config::{
    ActivationScheme, CheckpointScaleGranularity, LayerQuantization, ModelConfig,
    QuantizationConfig,
};
use protocol::{
    DeviceKind, DeviceLibraries, ExecutorSettings, GraphCaptureConfig, SamplingParams, Token,
    TokenLogprobs,
};
use scheduler_harness::{HarnessRequest, HarnessRequestChunk, SchedulerHarness, config};
use seed_cursor::is_selected_by_cursor;
use std::path::Path;
use std::time::Duration;

/// Timeout of a test in a child process, which runs emulated GPUs on a machine under load.
const CHILD_TEST_TIMEOUT: Duration = Duration::from_mins(30);

/// Maximum mean difference of log-probabilities if every layer input is rounded to fp8. Measured: 0.107; a
/// wrong scale or a misplaced element gives differences above 1.
const NEAR: f32 = 0.2;

/// Maximum mean difference of log-probabilities if activations, weights and the KV cache are rounded to f16.
const HALF_NEAR: f32 = 1e-2;

/// Warp sizes that this test run covers.
fn warp_sizes() -> Vec<u32> {
    emulated_gpu::warp_sizes("HADRON_EXECUTOR_WAVES")
}

/// Number of shards into which the slowest tests are split, of which CI runs one at a time.
const SHARDS: u64 = 4;

/// Reduces the number of sequence slots and the step size, because the emulator executes every GPU thread on
/// the CPU.
fn with_few_slots(config: ExecutorConfig) -> ExecutorConfig {
    let settings = ExecutorSettings {
        max_model_len: 96,
        kv_tokens_min: 96,
        max_num_seqs: 8,
        tokens_per_step: 64,
        kv_cache_size: KvCacheSize::Blocks(40),
        max_logprobs: 5,
        ..config.settings
    };
    ExecutorConfig { settings, ..config }
}

fn gpu_config(warp_size: u32, dtype: ModelDtype, enforce_eager: bool) -> ExecutorConfig {
    on_emulator(warp_size, config(dtype, 2), enforce_eager)
}

fn on_emulator(warp_size: u32, config: ExecutorConfig, enforce_eager: bool) -> ExecutorConfig {
    let libraries = DeviceLibraries {
        driver: emulated_gpu::library(),
        compiler: None,
        blas: None,
        emulated_warp_size: Some(warp_size),
        collectives: None,
    };
    let cache = emulated_gpu::kernel_cache();
    let config = with_few_slots(config);
    let settings = ExecutorSettings {
        device: DeviceKind::Rocm,
        libraries: Some(libraries),
        kernel_cache: Some(cache),
        graph_capture: if enforce_eager {
            GraphCaptureConfig::Disabled
        } else {
            GraphCaptureConfig::default()
        },
        ..config.settings
    };
    ExecutorConfig { settings, ..config }
}

/// Block-wise weight scales, and activation scales that are powers of two, as in DeepSeek-V3.1.
const BLOCKS: LayerQuantization = LayerQuantization {
    scales: CheckpointScaleGranularity::Blocks,
    activations: ActivationScheme::PowerOfTwo,
    suffixes: &["_scale_inv"],
};
/// Per-tensor weight scales and static activation scales.
const STATIC_TENSORS: LayerQuantization = LayerQuantization {
    scales: CheckpointScaleGranularity::Tensor,
    activations: ActivationScheme::Static,
    suffixes: &["_scale"],
};

/// Configures fp8 weights with block-wise scales for linear layers and experts.
fn fp8_model(config: ExecutorConfig, kv_dtype: KvCacheDtype) -> ExecutorConfig {
    let format = LayerQuantization { activations: ActivationScheme::Dynamic, ..BLOCKS };
    quantized_model(config, kv_dtype, format)
}

/// Configures fp8 weights of format `format` for linear layers and experts.
fn quantized_model(
    mut config: ExecutorConfig,
    kv_dtype: KvCacheDtype,
    format: LayerQuantization,
) -> ExecutorConfig {
    config.settings.kv_cache_dtype = kv_dtype;
    config.model.quantization = Some(QuantizationConfig::uniform(format, Vec::new()));
    config
}

/// Returns an MoE model of eight experts, two per token.
fn moe_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 96, "hidden_act": "silu",
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": false, "attention_bias": false, "torch_dtype": "bfloat16"
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

/// Returns an MLA model with shared experts and expert groups.
fn mla_model(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "norm_topk_prob": true, "intermediate_size": 96,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

/// Returns one model of each kind: dense, MoE (`experts`) and MLA.
fn models(dtype: ModelDtype) -> [(&'static str, ExecutorConfig); 3] {
    [("dense", config(dtype, 2)), ("experts", moe_model(dtype)), ("mla", mla_model(dtype))]
}

/// Returns two sets of greedy sampling parameters: the first without further parameters, the second with
/// penalties, bad words, logit bias, stop ids and allowed ids.
fn rules() -> [SamplingParams; 2] {
    let greedy = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    let strict = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: 0.2,
        bad_words: vec![vec![7], vec![1, 2]],
        logit_bias: vec![(11, 2.5)],
        min_tokens: 9,
        stop_token_ids: vec![1, 2, 3],
        allowed_token_ids: Some((0..300).collect()),
        ..greedy.clone()
    };
    [greedy, strict]
}

/// Generated tokens of a request, and their log-probabilities.
type GeneratedTokens = (Vec<Token>, Vec<TokenLogprobs>);

/// Pairs each request with its number of tokens in a step.
fn chunks_of(
    requests: &mut [HarnessRequest],
    lens: impl IntoIterator<Item = usize>,
) -> Vec<HarnessRequestChunk<'_>> {
    requests.iter_mut().zip(lens).map(|(request, len)| request.chunk(len)).collect()
}

/// Runs six requests in shared batches with chunked prefill. The requests alternate between the two sets of
/// sampling parameters of `rules`; one request is preempted.
fn play(harness: &mut SchedulerHarness) -> Vec<GeneratedTokens> {
    play_masked(harness, &[])
}

/// Runs the requests of `play`; the requests with indices in `masked` are sampled under grammar bitmasks.
fn play_masked(harness: &mut SchedulerHarness, masked: &[usize]) -> Vec<GeneratedTokens> {
    let mut requests: Vec<HarnessRequest> = (0..6)
        .map(|id| HarnessRequest::new(id, 9 + 5 * id as usize, rules()[id as usize % 2].clone()))
        .collect();
    for &request in masked {
        requests[request].masked = true;
    }
    let chunks = |requests: &[HarnessRequest]| {
        requests.iter().map(|request| request.remaining().min(10)).collect::<Vec<_>>()
    };
    for turn in 0..8 {
        let lens = chunks(&requests);
        let mut rows = chunks_of(&mut requests, lens);
        rows.sort_by_key(|chunk| chunk.len > 1); // Decode rows come first.
        harness.step(&mut rows);
        if turn == 5 {
            let blocks = requests[2].preempt(7);
            harness.free(blocks);
        }
    }
    while requests.iter().any(|request| request.remaining() > 1) {
        let lens = chunks(&requests);
        let mut rows = chunks_of(&mut requests, lens);
        rows.sort_by_key(|chunk| chunk.len > 1);
        harness.step(&mut rows);
    }
    for _ in 0..6 {
        harness.from_device = true; // Rows refer to the step that sampled their token.
        harness.step(&mut requests.iter_mut().map(|request| request.chunk(1)).collect::<Vec<_>>());
    }
    requests.iter().map(HarnessRequest::output).collect()
}

fn assert_close(found: &[GeneratedTokens], expected: &[GeneratedTokens], what: &str) {
    for (i, ((tokens, logprobs), (right, right_logprobs))) in found.iter().zip(expected).enumerate()
    {
        assert_eq!(tokens, right, "{what}: tokens of request {i}");
        for (l, r) in logprobs.iter().zip(right_logprobs) {
            assert!((l.logprob - r.logprob).abs() < 2e-4, "{what}: request {i}: {l:?} for {r:?}");
            let ids =
                |l: &TokenLogprobs| l.top_logprobs.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!((l.rank, ids(l)), (r.rank, ids(r)), "{what}: request {i}");
        }
    }
}

/// Checks that GPU outputs agree with CPU outputs within the tolerance `NEAR`. Used for GPU kernels that
/// round layer inputs to fp8; CPU kernels do not round them.
fn assert_near(found: &[GeneratedTokens], expected: &[GeneratedTokens], what: &str) {
    assert_within(found, expected, NEAR, what);
}

/// Checks that the mean difference of log-probabilities is below `near`. Each request is compared up to the
/// first token that differs.
fn assert_within(found: &[GeneratedTokens], expected: &[GeneratedTokens], near: f32, what: &str) {
    let (mut sum, mut count) = (0.0, 0);
    for ((tokens, logprobs), (right, right_logprobs)) in found.iter().zip(expected) {
        let same = tokens.iter().zip(right).take_while(|(token, right)| token == right).count();
        for (l, r) in logprobs.iter().zip(right_logprobs).take(same) {
            sum += (l.logprob - r.logprob).abs();
            count += 1;
        }
    }
    let mean = sum / count as f32;
    assert!(count >= found.len() && mean <= near, "{what}: {mean} over {count} tokens");
}

#[test]
fn eager_and_replayed_tokens_match_the_cpu() {
    for (what, of) in
        [("dense", config(ModelDtype::Float32, 2)), ("experts", moe_model(ModelDtype::Float32))]
    {
        let expected = play(&mut SchedulerHarness::with(with_few_slots(of.clone())));
        for warp_size in warp_sizes() {
            let harness = |eager| SchedulerHarness::with(on_emulator(warp_size, of.clone(), eager));
            let launched = play(&mut harness(true));
            assert_close(&launched, &expected, &format!("{what}, warp size {warp_size}"));
            let mut replaying = harness(false);
            assert_eq!(replaying.graphs, [1, 2, 4, 8]);
            assert_eq!(
                play(&mut replaying),
                launched,
                "{what}, warp size {warp_size}: replay equals eager"
            );
        }
    }
}

#[test]
fn mla_models_run_and_replay() {
    let expected =
        play(&mut SchedulerHarness::with(with_few_slots(mla_model(ModelDtype::Float32))));
    for warp_size in warp_sizes() {
        let harness = |eager| {
            SchedulerHarness::with(on_emulator(warp_size, mla_model(ModelDtype::Float32), eager))
        };
        let launched = play(&mut harness(true));
        assert_close(&launched, &expected, &format!("warp size {warp_size}"));
        assert_eq!(
            play(&mut harness(false)),
            launched,
            "warp size {warp_size}: replay equals eager"
        );
    }
}

#[test]
fn configured_row_counts_are_captured_and_gpu_opened() {
    let of = |capture, gpus| {
        let mut config = gpu_config(64, ModelDtype::Float32, false);
        (config.settings.graph_capture, config.settings.gpus) = (capture, gpus);
        config
    };
    let mut named =
        SchedulerHarness::with(of(GraphCaptureConfig::Sizes(vec![6, 3, 6, 99]), vec![0]));
    assert_eq!(named.graphs, [3, 6]);
    let expected =
        play(&mut SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 2))));
    assert_close(&play(&mut named), &expected, "rows of 3 and 6 replayed");
    let missing =
        Executor::load(of(GraphCaptureConfig::Disabled, vec![8]), &mut |_| {}).err().unwrap();
    let error = missing.to_string();
    assert!(error.contains("no device 8:") && error.contains("finds 8"), "{error}");
}

/// Steps with rows that are sampled under a grammar are launched eagerly; other steps are replayed. The
/// requests with a grammar use both sets of sampling parameters of `rules`.
#[test]
fn masked_rows_match_the_cpu() {
    let masked = [1, 2];
    let expected = play_masked(
        &mut SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 2))),
        &masked,
    );
    let free = play(&mut SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 2))));
    assert!(expected[0] == free[0] && expected[1] != free[1] && expected[2] != free[2]);
    for warp_size in warp_sizes() {
        let found = play_masked(
            &mut SchedulerHarness::with(gpu_config(warp_size, ModelDtype::Float32, false)),
            &masked,
        );
        assert_close(&found, &expected, &format!("warp size {warp_size}"));
    }
}

/// The grammar of a request may end in the middle of its output, even if the last bitmask allowed a single
/// token or was overdue. The token ids banned by the last bitmask are then allowed again, unless the sampling
/// parameters ban them.
#[test]
fn bitmask_limits_a_single_token() {
    let ended = |config: ExecutorConfig, preempted: bool| {
        let mut harness = SchedulerHarness::with(config);
        let mut requests =
            [0, 1].map(|id| HarnessRequest::new(id, 9, rules()[id as usize].clone()));
        for request in &mut requests {
            request.masked = true;
            harness.finish(request, 9, 14);
            request.masked = false;
            if preempted {
                let blocks = request.preempt(7);
                harness.free(blocks);
            }
            harness.finish(request, 14, 26);
        }
        requests.map(|request| request.output())
    };
    let expected = ended(with_few_slots(config(ModelDtype::Float32, 2)), true);
    assert_close(&ended(with_few_slots(config(ModelDtype::Float32, 2)), false), &expected, "cpu");
    for warp_size in warp_sizes() {
        let found = ended(gpu_config(warp_size, ModelDtype::Float32, false), false);
        assert_close(&found, &expected, &format!("warp size {warp_size}"));
    }
}

/// A row with an overdue grammar bitmask changes neither its sequence slot nor other rows.
#[test]
fn overdue_bitmasks_delay_rows_without_changes() {
    let masked = [1, 2];
    let expected = play_masked(
        &mut SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 2))),
        &masked,
    );
    let with_overdue = |config| {
        let mut harness = SchedulerHarness::with(config);
        harness.overdue_bitmasks = true;
        play_masked(&mut harness, &masked)
    };
    let check = |found: &[GeneratedTokens], what: &str| {
        let lens: Vec<_> = found.iter().map(|(tokens, _)| tokens.len()).collect();
        for (i, (len, (tokens, _))) in lens.iter().zip(&expected).enumerate() {
            assert!(*len > 2 && (*len < tokens.len()) == masked.contains(&i), "{what}: {lens:?}");
        }
        let prefix = |((tokens, logprobs), len): (&GeneratedTokens, &usize)| {
            (tokens[..*len].to_vec(), logprobs[..*len].to_vec())
        };
        let expected: Vec<GeneratedTokens> = expected.iter().zip(&lens).map(prefix).collect();
        assert_close(found, &expected, what);
    };
    check(&with_overdue(with_few_slots(config(ModelDtype::Float32, 2))), "cpu");
    for warp_size in warp_sizes() {
        check(
            &with_overdue(gpu_config(warp_size, ModelDtype::Float32, false)),
            &format!("warp size {warp_size}"),
        );
    }
}

#[test]
fn bf16_replay_equals_eager() {
    if !is_selected_by_cursor(2, SHARDS) {
        return;
    }
    for (what, of) in models(ModelDtype::Bfloat16) {
        for warp_size in warp_sizes() {
            let harness = |eager| SchedulerHarness::with(on_emulator(warp_size, of.clone(), eager));
            assert_eq!(
                play(&mut harness(false)),
                play(&mut harness(true)),
                "{what}, warp size {warp_size}"
            );
        }
    }
}

/// f16 has eight times finer rounding steps than bf16, so f16 results are near the f32 results of the CPU.
#[test]
fn f16_replay_equals_eager_and_is_near_f32() {
    if !is_selected_by_cursor(3, SHARDS) {
        return;
    }
    for ((what, of), (_, exact)) in
        models(ModelDtype::Float16).into_iter().zip(models(ModelDtype::Float32))
    {
        let exact = play(&mut SchedulerHarness::with(with_few_slots(exact)));
        for warp_size in warp_sizes() {
            let harness = |eager| SchedulerHarness::with(on_emulator(warp_size, of.clone(), eager));
            let launched = play(&mut harness(true));
            assert_eq!(play(&mut harness(false)), launched, "{what}, warp size {warp_size}");
            assert_within(&launched, &exact, HALF_NEAR, &format!("{what}, warp size {warp_size}"));
        }
    }
}

/// In f32, fp8 weights are dequantised, as on the CPU. In bf16, the fp8 kernels run, with attention over an
/// fp8 KV cache.
#[test]
fn fp8_weights_and_cache_run_and_replay() {
    if !is_selected_by_cursor(0, SHARDS) {
        return;
    }
    check_fp8("dense", |dtype| config(dtype, 2));
}

/// Tests fp8 experts with many tokens per expert (prompt chunks) and with few (decode steps).
#[test]
fn fp8_experts_run_and_replay() {
    if !is_selected_by_cursor(1, SHARDS) {
        return;
    }
    check_fp8("experts", moe_model);
}

/// Linear layers and experts run the fp8 kernels with per-tensor weight scales and static activation scales,
/// and with block-wise weight scales and power-of-two activation scales.
#[test]
fn fp8_activation_scales_run_on_emulated_gpus() {
    if !is_selected_by_cursor(2, SHARDS) {
        return;
    }
    /// Function that returns the executor configuration of a test model with the given element type.
    type ConfigForDtype = fn(ModelDtype) -> ExecutorConfig;
    let models: [ConfigForDtype; 2] =
        [|dtype| config(dtype, 2), |dtype| experts::shared_expert_model(dtype, 128)];
    for model in models {
        for format in [BLOCKS, STATIC_TENSORS] {
            let quantized = |dtype| quantized_model(model(dtype), KvCacheDtype::Auto, format);
            let exact = with_few_slots(quantized(ModelDtype::Float32));
            let exact = play(&mut SchedulerHarness::with(exact));
            let on_gpu = on_emulator(64, quantized(ModelDtype::Bfloat16), true);
            let found = play(&mut SchedulerHarness::with(on_gpu));
            assert_near(&found, &exact, &format!("{format:?}"));
        }
    }
}

fn check_fp8(what: &str, of: impl Fn(ModelDtype) -> ExecutorConfig) {
    let f32_config = || fp8_model(of(ModelDtype::Float32), KvCacheDtype::Auto);
    let bf16_config = || fp8_model(of(ModelDtype::Bfloat16), KvCacheDtype::Fp8);
    let expected = play(&mut SchedulerHarness::with(with_few_slots(f32_config())));
    let near = play(&mut SchedulerHarness::with(with_few_slots(bf16_config())));
    for warp_size in warp_sizes() {
        let multiplied_out = on_emulator(warp_size, f32_config(), true);
        let found = play(&mut SchedulerHarness::with(multiplied_out));
        assert_close(&found, &expected, &format!("{what}, warp size {warp_size}"));
        let harness = |eager| SchedulerHarness::with(on_emulator(warp_size, bf16_config(), eager));
        let launched = play(&mut harness(true));
        let replayed = play(&mut harness(false));
        assert_eq!(replayed, launched, "{what}, warp size {warp_size}: replay equals eager");
        assert_near(&launched, &near, &format!("{what}, warp size {warp_size}"));
    }
}
