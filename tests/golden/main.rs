//! Compares tiny models with results that HF transformers computed; the results are stored in fixtures, so
//! the tests run without Python.
//!
//! The checkpoint of each fixture is synthesised in a temporary folder and read by the loader of the server.
//! In f32 the logits must equal those of the fixture within 1e-4; the most likely token at each position, the
//! selected experts and all greedy tokens must be equal; and results must be bit-exact for any chunking,
//! batching and prefix hit. `generate.py` creates the fixtures.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]
#![allow(clippy::print_stdout, reason = "prints differences also if they pass")]

mod eagle3;
mod fixture;
mod model_harness;
mod mtp;
mod replica_parallel;
#[path = "../support/seed_cursor.rs"]
#[allow(dead_code, reason = "shared with the simulator")]
mod seed_cursor;
mod tool_checkpoints;

use device::gpu::HalfDtype;
use fixture::{FixtureTolerance, GoldenFixture};
use model_harness::{
    LogprobErrors, ModelHarness, RankContext, SequenceRow, ShardingMode, chunks, closeness,
    difference, run_ranks, top, traced_chunks,
};
use models::{ModelConfig, check_split};
use ops::DType;

/// Maximum absolute difference between logits on the CPU in f32 and logits of HF transformers in f32, which
/// adds in another order.
const LOGIT_TOLERANCE: f32 = 1e-4;

/// Maximum errors in bf16, for the fields `mean`, `p99` and `regret` of `LogprobErrors`. A fixture may
/// multiply them by a factor, and states the reason.
const BF16_GATE: [f32; 3] = [0.06, 0.20, 0.20];

/// Maximum errors of f16 relative to those of bf16. They are lower because f16 has three more mantissa bits.
const F16_SHARE: f32 = 1.0 / 8.0;

/// Maximum errors with an fp8 KV cache, for the fields `mean`, `p99` and `regret` of `LogprobErrors`. Each
/// cached value has a relative error of up to 1/16, and so have the attention scores and outputs of each
/// layer. Largest measured errors in f32 and bf16: mean 0.056, 99th percentile 0.25, and a regret of 0.37 at
/// one of 150 positions.
const FP8_CACHE_GATE: [f32; 3] = [0.10, 0.35, 0.50];

/// Defines one module of tests per fixture, so that the name of a failed test contains the fixture.
macro_rules! cases {
    ($($module:ident => $file:literal),* $(,)?) => {
        const FILES: &[&str] = &[$($file),*];
        $(mod $module {
            #[test]
            fn matches_transformers() {
                let fixture = super::GoldenFixture::read($file);
                super::matches_transformers(&super::RankContext::single(), &fixture);
            }
            #[test]
            fn chunking_and_prefix_hits_are_bit_exact() {
                let fixture = super::GoldenFixture::read($file);
                super::chunking_and_prefix_hits_are_bit_exact(&super::RankContext::single(), &fixture);
            }
            #[test]
            fn greedy_tokens_are_batch_invariant() {
                let fixture = super::GoldenFixture::read($file);
                super::greedy_tokens_are_batch_invariant(&super::RankContext::single(), &fixture);
            }
            #[test]
            fn parallel_ranks_match_one_rank() {
                if super::is_selected(0, $file) {
                    super::parallel_ranks_match_one_rank($file);
                }
            }
            #[test]
            fn bf16_is_close_and_invariant() {
                let fixture = super::GoldenFixture::read($file);
                super::half_is_close_and_invariant(
                    &super::RankContext::single(),
                    &fixture,
                    super::DType::BF16,
                );
            }
            #[test]
            fn f16_is_close_and_invariant() {
                if !super::is_selected(1, $file) {
                    return;
                }
                let fixture = super::GoldenFixture::read($file);
                super::half_is_close_and_invariant(
                    &super::RankContext::single(),
                    &fixture,
                    super::DType::F16,
                );
            }
        })*
    };
}

cases! {
    llama_untied => "llama-untied",
    llama_tied_llama3 => "llama-tied-llama3",
    llama_linear_biases => "llama-linear-biases",
    llama_d64_gqa8 => "llama-d64-gqa8",
    llama_d128_gqa1 => "llama-d128-gqa1",
    mistral_untied => "mistral-untied",
    mistral_d128_gqa4 => "mistral-d128-gqa4",
    mistral_window => "mistral-window",
    mistral3_text => "mistral3-text",
    ministral3_text => "ministral3-text",
    ministral3_tied_d128 => "ministral3-tied-d128",
    mixtral_untied => "mixtral-untied",
    mixtral_window => "mixtral-window",
    qwen2_untied => "qwen2-untied",
    qwen2_upper_windows => "qwen2-upper-windows",
    qwen2_tied_d64_gqa8 => "qwen2-tied-d64-gqa8",
    qwen2_moe_gated_shared => "qwen2_moe-gated-shared",
    qwen2_moe_normalised_d64 => "qwen2_moe-normalised-d64",
    granite_multipliers => "granite-multipliers",
    granite_tied_biases_d64 => "granite-tied-biases-d64",
    granite4_dense => "granite4-dense",
    granite4_nope_tied_d64 => "granite4-nope-tied-d64",
    olmo2_untied => "olmo2-untied",
    olmo2_tied_biases_d64_gqa4 => "olmo2-tied-biases-d64-gqa4",
    olmo3_full_yarn_d128 => "olmo3-full-yarn-d128",
    olmo3_windows_yarn => "olmo3-windows-yarn",
    smollm3_every_fourth => "smollm3-every-fourth",
    smollm3_listed_d128 => "smollm3-listed-d128",
    smollm3_windows => "smollm3-windows",
    seed_oss_biases => "seed_oss-biases",
    seed_oss_all_biases_d128 => "seed_oss-all-biases-d128",
    ernie4_5_tied_d64 => "ernie4_5-tied-d64",
    ernie4_5_biases_d128 => "ernie4_5-biases-d128",
    glm_biases => "glm-biases",
    glm4_sandwich_tied => "glm4-sandwich-tied",
    glm4_biases_d128 => "glm4-biases-d128",
    qwen3_tied => "qwen3-tied",
    qwen3_d64_gqa8 => "qwen3-d64-gqa8",
    qwen3_d128_gqa4 => "qwen3-d128-gqa4",
    qwen3_listed_windows_d128 => "qwen3-listed-windows-d128",
    qwen3_yarn => "qwen3-yarn",
    qwen3_fp8_blocks => "qwen3-fp8-blocks",
    qwen3_fp8_channels => "qwen3-fp8-channels",
    qwen3_fp8_tensors => "qwen3-fp8-tensors",
    llama_fp8_mixed => "llama-fp8-mixed",
    qwen3_moe_fp8_modelopt => "qwen3_moe-fp8-modelopt",
    qwen3_moe_fp8_blocks => "qwen3_moe-fp8-blocks",
    qwen3_moe_fp8_whole_blocks => "qwen3_moe-fp8-whole-blocks",
    qwen3_moe_normalised_dense1 => "qwen3_moe-normalised-dense1",
    qwen3_moe_plain_tied => "qwen3_moe-plain-tied",
    qwen3_moe_step2_d64_gqa8 => "qwen3_moe-step2-d64-gqa8",
    qwen3_vl_tied => "qwen3_vl-tied",
    qwen3_vl_moe_step2 => "qwen3_vl_moe-step2",
    gemma3_d256_gqa2 => "gemma3-d256-gqa2",
    gemma3_text_window64_tied_d64 => "gemma3-text-window64-tied-d64",
    gemma4_dense_shared_values => "gemma4-dense-shared-values",
    gemma4_moe => "gemma4-moe",
    gemma4_layer_inputs => "gemma4-layer-inputs",
    gemma4_unified_d256_d512 => "gemma4-unified-d256-d512",
    gpt_oss_mxfp4 => "gpt_oss-mxfp4",
    gpt_oss_plain_limits => "gpt_oss-plain-limits",
    qwen3_next_grouped => "qwen3_next-grouped",
    qwen3_next_plain_d64 => "qwen3_next-plain-d64",
    qwen3_next_mtp => "qwen3_next-mtp",
    qwen3_next_fp8_blocks_mtp => "qwen3_next-fp8-blocks-mtp",
    qwen3_5_mtp => "qwen3_5-mtp",
    qwen3_5_text_tied => "qwen3_5-text-tied",
    qwen3_5_moe_fp8_blocks => "qwen3_5_moe-fp8-blocks",
    qwen3_5_moe_fused_d256 => "qwen3_5_moe-fused-d256",
    qwen3_5_moe_text_mtp => "qwen3_5_moe-text-mtp",
    phi3_default => "phi3-default",
    phi3_window_tied => "phi3-window-tied",
    phi3_longrope_tied => "phi3-longrope-tied",
    phi3_longrope_short => "phi3-longrope-short",
    deepseek_v2_greedy => "deepseek_v2-greedy",
    deepseek_v2_groups_yarn => "deepseek_v2-groups-yarn",
    deepseek_v3_groups_yarn => "deepseek_v3-groups-yarn",
    deepseek_v3_whole_queries => "deepseek_v3-whole-queries",
    deepseek_v3_mtp => "deepseek_v3-mtp",
    deepseek_v3_fp8_blocks => "deepseek_v3-fp8-blocks",
    deepseek_v3_fp8_ue8m0 => "deepseek_v3-fp8-ue8m0",
}

/// Tests of f16 and of parallel ranks run for one third of the fixtures each, in turns that `HADRON_CURSOR`
/// selects. Returns whether the test with number `test` of the fixture `file` runs.
fn is_selected(test: u64, file: &str) -> bool {
    let fixture = FILES.iter().position(|name| *name == file).unwrap() as u64;
    seed_cursor::is_selected_by_cursor(test + fixture, 3)
}

#[test]
fn every_fixture_has_its_tests() {
    let mut files = FILES.to_vec();
    files.sort_unstable();
    assert_eq!(fixture::names(), files);
}

/// Prefills every prompt, and compares logits, hidden states and selected experts with the fixture. A probe
/// records the hidden states and experts during the forward pass.
fn matches_transformers(rank_context: &RankContext, fixture: &GoldenFixture) {
    let mut harness = ModelHarness::load(rank_context, fixture, DType::F32);
    for &length in &fixture.prompts {
        let row = SequenceRow::new(&mut harness, &fixture.tokens[..length]);
        let seen = harness.run_traced(&row);
        let worst = difference(&seen.logits, &fixture.logits[..length]);
        println!("{length} tokens: logits differ by {worst}");
        assert!(worst <= LOGIT_TOLERANCE, "{length} tokens: logits differ by {worst}");
        for (t, (ours, theirs)) in seen.logits.iter().zip(&fixture.logits).enumerate() {
            assert_eq!(top(ours), top(theirs), "{length} tokens: argmax at {t}");
        }
        for (layer, (ours, theirs)) in seen.routes.iter().zip(&fixture.routes).enumerate() {
            assert_eq!(ours[..], theirs[..length], "{length} tokens: sparse layer {layer}");
        }
        assert_eq!(seen.routes.len(), fixture.routes.len());
        if length == fixture.tokens.len() {
            check_hidden(fixture, &seen.hidden);
        }
    }
}

/// Checks the residual stream after each layer at the last few positions.
fn check_hidden(fixture: &GoldenFixture, hidden: &[Vec<Vec<f32>>]) {
    assert_eq!(hidden.len(), fixture.hidden.len());
    for (layer, (ours, theirs)) in hidden.iter().zip(&fixture.hidden).enumerate() {
        let ours = &ours[ours.len() - theirs.len()..];
        let largest = theirs.iter().flatten().fold(1f32, |m, x| m.max(x.abs()));
        let worst = difference(ours, theirs);
        assert!(worst <= LOGIT_TOLERANCE * largest, "layer {layer}: {worst} of {largest}");
    }
}

/// Checks that logits are bit-exact for chunks of several sizes, for decode after prefill, and for a prefix
/// hit, in which a row uses the KV blocks of another row.
fn chunking_and_prefix_hits_are_bit_exact(rank_context: &RankContext, fixture: &GoldenFixture) {
    let mut harness = ModelHarness::load(rank_context, fixture, DType::F32);
    let whole = SequenceRow::new(&mut harness, &fixture.tokens);
    let expected = harness.run(&[&whole]);
    for size in [1, 7, 16, 64] {
        let row = SequenceRow::new(&mut harness, &fixture.tokens);
        assert!(chunks(&mut harness, &row, size) == expected, "chunks of {size}");
    }
    let row = SequenceRow::new(&mut harness, &fixture.tokens);
    let mut logits = harness.run(&[&row.part(0, 65)]);
    for t in 65..fixture.tokens.len() {
        logits.extend(harness.run(&[&row.part(t, 1)]));
    }
    assert!(logits == expected, "prefill of 65, then decode");
    for start in [16, 64, 144] {
        let hit = SequenceRow::sharing(&mut harness, &whole, start);
        let rest = fixture.tokens.len() - start;
        let logits = harness.run(&[&hit.part(start, rest)]);
        assert!(logits == expected[start..], "prefix hit of {start} tokens");
    }
    let (first, second) = (SequenceRow::new(&mut harness, &fixture.tokens), row.part(65, 30));
    let last = fixture.tokens.len() - 1;
    harness.rewind(&second, 65);
    let selected = harness.run_rows(&[&first, &second], &[last as i32, 0, last as i32 + 30, 64]);
    let expected_rows: Vec<_> = [last, 0, 94, 64].map(|token| expected[token].clone()).into();
    assert!(selected == expected_rows, "logits of selected tokens");
    let synth = ModelHarness::synth(rank_context, fixture, DType::F32).run(&[&whole]);
    assert!(synth == expected, "weights synthesised in memory");
}

/// Checks greedy tokens: all prompts decode together for 64 steps, while another sequence is prefilled in the
/// same batches. The logits of this sequence must not depend on the batch.
fn greedy_tokens_are_batch_invariant(rank_context: &RankContext, fixture: &GoldenFixture) {
    let mut harness = ModelHarness::load(rank_context, fixture, DType::F32);
    let other = SequenceRow::new(&mut harness, &fixture.tokens);
    let separate = harness.run(&[&other]);
    let concurrent = SequenceRow::new(&mut harness, &fixture.tokens);
    let mut rows: Vec<SequenceRow> = fixture
        .prompts
        .iter()
        .map(|n| SequenceRow::new(&mut harness, &fixture.tokens[..*n]))
        .collect();
    let mut parts: Vec<SequenceRow> =
        rows.iter().map(|row| row.part(0, row.tokens.len())).collect();
    let mut found = vec![Vec::new(); rows.len()];
    for step in 0..fixture.greedy[0].len() {
        let chunk = (step * 3 < fixture.tokens.len()).then(|| concurrent.part(step * 3, 3));
        let batch: Vec<&SequenceRow> = parts.iter().chain(&chunk).collect();
        let logits = harness.run(&batch);
        let mut from = 0;
        for (row, (part, found)) in rows.iter_mut().zip(parts.iter_mut().zip(&mut found)) {
            from += part.len;
            let token = top(&logits[from - 1]) as i32;
            found.push(token);
            row.tokens.push(token);
            *part = row.part(row.tokens.len() - 1, 1);
        }
        if let Some(chunk) = chunk {
            let expected = &separate[chunk.start..chunk.start + chunk.len];
            assert!(logits[from..] == *expected, "step {step}: a row depends on its batch");
        }
    }
    assert_eq!(found, fixture.greedy);
}

/// Whether results depend on the number of rows of a step. This is the case for 16-bit types on GPUs:
/// different kernels are used for few and for many rows, and their sums differ in the last bits.
fn depends_on_row_count(dtype: DType) -> bool {
    dtype != DType::F32 && model_harness::on_a_gpu()
}

/// Checks a model in a 16-bit type: its logits are close to those of the fixture and do not depend on
/// chunking.
fn half_is_close_and_invariant(rank_context: &RankContext, fixture: &GoldenFixture, dtype: DType) {
    let mut harness = ModelHarness::load(rank_context, fixture, dtype);
    let whole = SequenceRow::new(&mut harness, &fixture.tokens);
    let expected = harness.run(&[&whole]);
    let row = SequenceRow::new(&mut harness, &fixture.tokens);
    let chunked = chunks(&mut harness, &row, 7);
    let uses_mla = fixture.uses_mla();
    assert!(chunked == expected || uses_mla || depends_on_row_count(dtype), "chunks of 7");
    let routes_may_differ = rank_context.is_shared() || model_harness::on_a_gpu() || uses_mla;
    let found = if routes_may_differ && !fixture.routes.is_empty() {
        let routes = harness.run_traced(&whole).routes;
        closeness_where_routes_agree(fixture, &expected, &routes)
    } else {
        closeness(&expected, &fixture.logits)
    };
    check_half(fixture, &found, dtype);
    if uses_mla {
        // For MLA, short chunks attend to the compressed KV directly (absorbed form), and longer chunks
        // compute keys and values from it. Results of the two forms differ slightly, so they are compared
        // with the fixture separately.
        let seen = traced_chunks(&mut harness, &row, 7);
        assert!(seen.logits == chunked, "the trace probe changes results");
        assert!(chunks(&mut harness, &row, 1) == chunked, "chunks of 1 and of 7");
        let found = closeness_where_routes_agree(fixture, &chunked, &seen.routes);
        check_half(fixture, &found, dtype);
    }
}

/// Returns the tolerance for the tested device. The CPU dequantises fp8 weights. GPUs also quantise the
/// activations of fp8 GEMMs with many rows, so errors on GPUs are larger.
fn device_gate(fixture: &GoldenFixture) -> FixtureTolerance {
    fixture.fp8_gate.filter(|_| model_harness::on_a_gpu()).unwrap_or(fixture.bf16_gate)
}

fn check_half(fixture: &GoldenFixture, found: &LogprobErrors, dtype: DType) {
    println!("{dtype:?} {found:?}");
    // If activations are quantised to fp8, the quantisation error is the largest error, and it is equal in
    // f16 and bf16.
    let coarse = fixture.fp8_gate.is_some() && model_harness::on_a_gpu();
    let share = if dtype == DType::F16 && !coarse { F16_SHARE } else { 1.0 };
    let gate = BF16_GATE.map(|x| x * share * device_gate(fixture).scale);
    let close = found.mean <= gate[0] && found.p99 <= gate[1] && found.regret <= gate[2];
    assert!(close, "{found:?} against {gate:?}");
}

/// Compares log-probabilities at the positions at which the router selects the same experts as in f32. At
/// other positions, nearly equal router scores may be ordered differently, because ranks round partial sums
/// to 16 bits and GPUs add in another order. Such positions are more frequent with sigmoid than with softmax
/// scores.
fn closeness_where_routes_agree(
    fixture: &GoldenFixture,
    logits: &[Vec<f32>],
    routes: &[Vec<Vec<i32>>],
) -> LogprobErrors {
    let agree =
        |t: &usize| routes.iter().zip(&fixture.routes).all(|(ours, f32)| ours[*t] == f32[*t]);
    let positions: Vec<usize> = (0..logits.len()).filter(agree).collect();
    println!("same experts at {} of {} positions", positions.len(), logits.len());
    let least = device_gate(fixture).same_experts * logits.len() as f64;
    assert!(positions.len() as f64 >= least, "{} positions of {}", positions.len(), logits.len());
    let rows =
        |all: &[Vec<f32>]| -> Vec<Vec<f32>> { positions.iter().map(|&t| all[t].clone()).collect() };
    closeness(&rows(logits), &rows(&fixture.logits))
}

/// Fixtures that cannot be sharded, with the number of ranks and the sharding mode.
const UNSUPPORTED_SHARDINGS: &[(&str, usize, ShardingMode)] = &[
    ("llama-d128-gqa1", 4, ShardingMode::TensorParallel), // This model has 2 query heads.
    ("qwen3_5-text-tied", 4, ShardingMode::TensorParallel), // Its gated delta nets have 2 key heads.
    ("qwen3_5-mtp", 4, ShardingMode::TensorParallel),
    // A shard must consist of whole fp8 scale blocks of 128 channels. The 320 and 160 channels of the MLPs
    // cannot be split in this way, and the 256 channels of the attention heads are only two blocks.
    ("qwen3-fp8-blocks", 2, ShardingMode::TensorParallel),
    ("qwen3-fp8-blocks", 4, ShardingMode::TensorParallel),
    ("qwen3_moe-fp8-blocks", 2, ShardingMode::TensorParallel),
    ("qwen3_moe-fp8-blocks", 4, ShardingMode::TensorParallel),
    ("qwen3_moe-fp8-blocks", 2, ShardingMode::ExpertParallel), // Layer 1 is dense, so its MLP is sharded.
    ("qwen3_moe-fp8-blocks", 4, ShardingMode::ExpertParallel),
    ("deepseek_v3-fp8-blocks", 2, ShardingMode::TensorParallel), // Layer 0 is dense, so its MLP is sharded.
    ("deepseek_v3-fp8-blocks", 4, ShardingMode::TensorParallel),
    ("deepseek_v3-fp8-blocks", 2, ShardingMode::ExpertParallel),
    ("deepseek_v3-fp8-blocks", 4, ShardingMode::ExpertParallel),
];

/// Checks models on two and four ranks: with sharded and with replicated KV heads, with sharded and with
/// unsharded experts (expert parallelism), and with data-parallel replicas that share experts. For such
/// replicas, all-gather and all-to-all must give equal bits.
fn parallel_ranks_match_one_rank(name: &str) {
    let fixture = GoldenFixture::read(name);
    let config = ModelConfig::from_json("config.json".as_ref(), &fixture.config).unwrap();
    let mut gathered = None;
    for (size, sharing) in [
        (2, ShardingMode::TensorParallel),
        (4, ShardingMode::TensorParallel),
        (2, ShardingMode::ExpertParallel),
        (4, ShardingMode::ExpertParallel),
        (2, ShardingMode::AttentionReplicas),
        (2, ShardingMode::AllToAllReplicas),
        (4, ShardingMode::AllToAllReplicas),
    ] {
        if sharing != ShardingMode::TensorParallel && config.moe.is_none() {
            continue;
        }
        let split = check_split(&config, &RankContext::ranks(0, size, sharing), None);
        let unsupported = UNSUPPORTED_SHARDINGS.contains(&(name, size, sharing));
        assert_eq!(split.is_err(), unsupported, "{name}, {size} ranks, {sharing:?}: {split:?}");
        if unsupported || !model_harness::has_ranks(size) {
            continue;
        }
        let bits = run_ranks(size, sharing, HalfDtype::BF16, |rank_context| {
            matches_transformers(rank_context, &fixture);
            chunking_and_prefix_hits_are_bit_exact(rank_context, &fixture);
            greedy_tokens_are_batch_invariant(rank_context, &fixture);
            half_is_close_and_invariant(rank_context, &fixture, DType::BF16);
        });
        run_ranks(size, sharing, HalfDtype::F16, |rank_context| {
            half_is_close_and_invariant(rank_context, &fixture, DType::F16);
        });
        match (size, sharing) {
            (2, ShardingMode::AttentionReplicas) => gathered = Some(bits),
            (2, ShardingMode::AllToAllReplicas) => {
                assert_eq!(Some(bits), gathered, "{name}: all-gather and all-to-all differ");
            }
            _ => {}
        }
    }
}

/// With an fp8 KV cache, the errors of the logits are within the bounds for three mantissa bits. On the CPU,
/// the logits do not depend on chunking.
#[test]
fn fp8_kv_cache_is_close_and_invariant() {
    for name in [
        "llama-untied",
        "qwen3-d128-gqa4",
        "qwen3-fp8-blocks",
        "qwen3-fp8-channels",
        "gemma3-d256-gqa2",
    ] {
        let fixture = GoldenFixture::read(name);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let rank_context = RankContext::single();
            let mut harness = ModelHarness::with_fp8_cache(&rank_context, &fixture, dtype);
            let whole = SequenceRow::new(&mut harness, &fixture.tokens);
            let expected = harness.run(&[&whole]);
            let row = SequenceRow::new(&mut harness, &fixture.tokens);
            let chunked = chunks(&mut harness, &row, 7);
            assert!(
                chunked == expected || model_harness::on_a_gpu(),
                "{name} {dtype:?}: chunks of 7"
            );
            let found = closeness(&expected, &fixture.logits);
            println!("{name} {dtype:?} {found:?}");
            // A GPU also quantises the activations of GEMMs with fp8 weights. The bound for this error is
            // added to the bound for the fp8 KV cache.
            let quantises = dtype != DType::F32 && model_harness::on_a_gpu();
            let scale = fixture.fp8_gate.filter(|_| quantises).map_or(0.0, |gate| gate.scale);
            let gate: [f32; 3] = std::array::from_fn(|i| FP8_CACHE_GATE[i] + BF16_GATE[i] * scale);
            let close = found.mean <= gate[0] && found.p99 <= gate[1] && found.regret <= gate[2];
            assert!(close, "{name} {dtype:?}: {found:?} against {gate:?}");
        }
    }
}

/// Tests models whose sizes are not multiples of a SIMD vector or GEMM tile, and head sizes from 16 to 256.
/// No fixture exists for these models; logits must be bit-exact for any chunking and contain no NaN or
/// infinity.
#[test]
fn unusual_sizes_are_invariant() {
    // Each tuple is (hidden size, query heads, KV heads, head size, MLP width, vocabulary size).
    let shapes = [
        (2, 1, 1, 16, 2, 3),
        (34, 3, 1, 48, 6, 33),
        (66, 6, 2, 80, 130, 257),
        (98, 7, 7, 96, 62, 1000),
        (160, 16, 1, 16, 34, 65),
        (256, 2, 1, 256, 18, 31),
    ];
    for (hidden, heads, kv_heads, head_dim, intermediate, vocab) in shapes {
        let config = serde_json::json!({
            "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "num_hidden_layers": 2,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "intermediate_size": intermediate, "vocab_size": vocab, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 512
        });
        let tokens: Vec<i32> = (0..40).map(|i| i * 7 % vocab).collect();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let rank_context = RankContext::single();
            let mut harness = ModelHarness::of(&rank_context, &config.to_string(), 3, dtype);
            let whole = SequenceRow::new(&mut harness, &tokens);
            let expected = harness.run(&[&whole]);
            assert!(expected.iter().flatten().all(|x| x.is_finite()), "{config} {dtype:?}");
            let row = SequenceRow::new(&mut harness, &tokens);
            let equal = chunks(&mut harness, &row, 3) == expected;
            assert!(equal || depends_on_row_count(dtype), "{config} {dtype:?}");
        }
    }
}
