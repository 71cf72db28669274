//! The GPU executor on an emulated GPU: the tokens of the CPU, launch by launch and replayed.
//!
//! Everything but the silicon is what a GPU runs: kernels compiled at start, copies, seats, recorded steps.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod drafts;
#[path = "../../../kernels/tests/emulated/mod.rs"]
mod emulated;
mod experts;
mod memory;
mod op_bench;
#[path = "../invariance/player.rs"]
#[allow(dead_code, reason = "shared with the invariance tests")]
mod player;
mod ranks;
mod trace;

use executor::{Dtype, Executor, ExecutorConfig, KvDtype, KvSize};
use models::config::{Config, Quantization, ScaleGrid};
use player::{Job, Player, config};
use protocol::{Capture, Device, DeviceLibraries, Sampling, Settings, Token, TokenLogprobs};
use std::path::Path;

/// Mean difference of log-probabilities that rounding every input of a layer to fp8 may make. Found: 0.107; a scale
/// or an element in the wrong place gives whole units.
const NEAR: f32 = 0.2;

/// The same of rounding activations, weights and the KV cache to f16.
const HALF_NEAR: f32 = 1e-2;

/// Widths of a wavefront that a run of these tests takes.
fn waves() -> Vec<u32> {
    emulated::waves("HADRON_EXECUTOR_WAVES")
}

/// Whether this run takes the longest tests of turn `turn` (0 or 1): all turns without `HADRON_CURSOR`, else the one that follows from it.
#[allow(clippy::disallowed_methods, reason = "the gate says which tests take their turn")]
fn in_turn(turn: u64) -> bool {
    let cursor = std::env::var("HADRON_CURSOR").ok().map_or(0, |text| text.parse().unwrap());
    cursor == 0 || cursor % 2 == turn
}

/// Few seats and steps: every lane of the emulated GPU is work for the CPU.
fn small(config: ExecutorConfig) -> ExecutorConfig {
    let settings = Settings {
        max_model_len: 96,
        kv_tokens_min: 96,
        max_num_seqs: 8,
        tokens_per_step: 64,
        kv: KvSize::Blocks(40),
        logprobs_max: 5,
        ..config.settings
    };
    ExecutorConfig { settings, ..config }
}

fn gpu_config(wave: u32, dtype: Dtype, enforce_eager: bool) -> ExecutorConfig {
    on_emulator(wave, config(dtype, 2), enforce_eager)
}

fn on_emulator(wave: u32, config: ExecutorConfig, enforce_eager: bool) -> ExecutorConfig {
    let libraries = DeviceLibraries {
        driver: emulated::library(),
        compiler: None,
        blas: None,
        emulated_wave: Some(wave),
        collectives: None,
    };
    let cache = emulated::kernel_cache();
    let config = small(config);
    let settings = Settings {
        device: Device::Rocm,
        libraries: Some(libraries),
        kernel_cache: Some(cache),
        capture: if enforce_eager { Capture::Nothing } else { Capture::default() },
        ..config.settings
    };
    ExecutorConfig { settings, ..config }
}

/// The same model with linear layers, and experts if it has any, in fp8.
fn quantised(mut config: ExecutorConfig, kv_dtype: KvDtype) -> ExecutorConfig {
    config.settings.kv_dtype = kv_dtype;
    let (scales, suffix, ignored) = (ScaleGrid::Blocks, "_scale_inv", Vec::new());
    config.model.quantization = Some(Quantization { scales, suffix, ignored });
    config
}

/// A model of eight experts of which a token takes two.
fn experts(dtype: Dtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 96, "hidden_act": "silu",
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": false, "attention_bias": false, "torch_dtype": "bfloat16"
    }"#;
    let model = Config::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

/// A model that keeps latents, with shared experts and experts in groups.
fn latents(dtype: Dtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 384,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "norm_topk_prob": true, "intermediate_size": 96,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512
    }"#;
    let model = Config::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

/// One of each kind.
fn models(dtype: Dtype) -> [(&'static str, ExecutorConfig); 3] {
    [("dense", config(dtype, 2)), ("experts", experts(dtype)), ("latents", latents(dtype))]
}

/// Greedy, and all rules at once.
fn rules() -> [Sampling; 2] {
    let greedy = Sampling { logprobs: Some(3), ..Sampling::greedy() };
    let strict = Sampling {
        repetition: 1.3,
        frequency: 0.4,
        presence: 0.2,
        bad_words: vec![vec![7], vec![1, 2]],
        logit_bias: vec![(11, 2.5)],
        min_tokens: 9,
        stop_ids: vec![1, 2, 3],
        allowed: Some((0..300).collect()),
        ..greedy.clone()
    };
    [greedy, strict]
}

type Output = (Vec<Token>, Vec<TokenLogprobs>);

/// Six requests of both rules in chunks beside each other; one is preempted on its way.
fn play(player: &mut Player) -> Vec<Output> {
    play_masked(player, &[])
}

/// The same, where some of the requests have masks.
fn play_masked(player: &mut Player, masked: &[usize]) -> Vec<Output> {
    let mut jobs: Vec<Job> = (0..6)
        .map(|id| Job::new(id, 9 + 5 * id as usize, rules()[id as usize % 2].clone()))
        .collect();
    for &job in masked {
        jobs[job].masked = true;
    }
    let chunks = |jobs: &[Job]| jobs.iter().map(|job| job.want().min(10)).collect::<Vec<_>>();
    for turn in 0..8 {
        let lens = chunks(&jobs);
        let mut rows: Vec<(&mut Job, usize)> = jobs.iter_mut().zip(lens).collect();
        rows.sort_by_key(|(_, len)| *len > 1); // Decode rows come first.
        player.step(&mut rows);
        if turn == 5 {
            let blocks = jobs[2].preempt(7);
            player.free(blocks);
        }
    }
    while jobs.iter().any(|job| job.want() > 1) {
        let lens = chunks(&jobs);
        let mut rows: Vec<(&mut Job, usize)> = jobs.iter_mut().zip(lens).collect();
        rows.sort_by_key(|(_, len)| *len > 1);
        player.step(&mut rows);
    }
    for _ in 0..6 {
        player.from_device = true; // The host names the step, not the token.
        player.step(&mut jobs.iter_mut().map(|job| (job, 1)).collect::<Vec<_>>());
    }
    jobs.iter().map(Job::output).collect()
}

fn assert_close(found: &[Output], expected: &[Output], what: &str) {
    for (i, ((tokens, logprobs), (right, right_logprobs))) in found.iter().zip(expected).enumerate()
    {
        assert_eq!(tokens, right, "{what}: tokens of request {i}");
        for (l, r) in logprobs.iter().zip(right_logprobs) {
            assert!((l.logprob - r.logprob).abs() < 2e-4, "{what}: request {i}: {l:?} for {r:?}");
            let ids = |l: &TokenLogprobs| l.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!((l.rank, ids(l)), (r.rank, ids(r)), "{what}: request {i}");
        }
    }
}

/// For kernels that quantise what the CPU does not.
fn assert_near(found: &[Output], expected: &[Output], what: &str) {
    assert_within(found, expected, NEAR, what);
}

/// The mean difference of what is told of the tokens that both chose, up to the first that only one of them did.
fn assert_within(found: &[Output], expected: &[Output], near: f32, what: &str) {
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
fn tokens_are_those_of_the_cpu_launched_and_replayed() {
    for (what, of) in [("dense", config(Dtype::Float32, 2)), ("experts", experts(Dtype::Float32))] {
        let expected = play(&mut Player::with(small(of.clone())));
        for wave in waves() {
            let player = |eager| Player::with(on_emulator(wave, of.clone(), eager));
            let launched = play(&mut player(true));
            assert_close(&launched, &expected, &format!("{what}, wave {wave}"));
            let mut replaying = player(false);
            assert_eq!(replaying.graphs, [1, 2, 4, 8]);
            assert_eq!(
                play(&mut replaying),
                launched,
                "{what}, wave {wave}: a recording changes no bit"
            );
        }
    }
}

#[test]
fn latents_run_and_replay() {
    let expected = play(&mut Player::with(small(latents(Dtype::Float32))));
    for wave in waves() {
        let player = |eager| Player::with(on_emulator(wave, latents(Dtype::Float32), eager));
        let launched = play(&mut player(true));
        assert_close(&launched, &expected, &format!("wave {wave}"));
        assert_eq!(play(&mut player(false)), launched, "wave {wave}: a recording changes no bit");
    }
}

#[test]
fn named_row_counts_are_recorded_and_named_gpus_opened() {
    let of = |capture, gpus| {
        let mut config = gpu_config(64, Dtype::Float32, false);
        (config.settings.capture, config.settings.gpus) = (capture, gpus);
        config
    };
    let mut named = Player::with(of(Capture::Rows(vec![6, 3, 6, 99]), vec![0]));
    assert_eq!(named.graphs, [3, 6]);
    let expected = play(&mut Player::with(small(config(Dtype::Float32, 2))));
    assert_close(&play(&mut named), &expected, "rows of 3 and 6 replayed");
    let missing = Executor::load(of(Capture::Nothing, vec![1]), &mut |_| {}).err().unwrap();
    let told = missing.to_string();
    assert!(told.contains("no device 1:") && told.contains("finds 1"), "{told}");
}

/// Steps with masked rows are launched, the others replayed; both kinds of rules meet masks.
#[test]
fn masked_rows_are_those_of_the_cpu() {
    let masked = [1, 2];
    let expected = play_masked(&mut Player::with(small(config(Dtype::Float32, 2))), &masked);
    let free = play(&mut Player::with(small(config(Dtype::Float32, 2))));
    assert!(expected[0] == free[0] && expected[1] != free[1] && expected[2] != free[2]);
    for wave in waves() {
        let found =
            play_masked(&mut Player::with(gpu_config(wave, Dtype::Float32, false)), &masked);
        assert_close(&found, &expected, &format!("wave {wave}"));
    }
}

/// Masks may end in the middle of an output, where the last one forced a token or its row went without: what it forbade
/// is allowed behind it, but for what the request forbids itself.
#[test]
fn a_mask_limits_one_token_and_none_behind_it() {
    let ended = |config: ExecutorConfig, preempted: bool| {
        let mut player = Player::with(config);
        let mut jobs = [0, 1].map(|id| Job::new(id, 9, rules()[id as usize].clone()));
        for job in &mut jobs {
            job.masked = true;
            player.finish(job, 9, 14);
            job.masked = false;
            if preempted {
                let blocks = job.preempt(7);
                player.free(blocks);
            }
            player.finish(job, 14, 26);
        }
        jobs.map(|job| job.output())
    };
    let expected = ended(small(config(Dtype::Float32, 2)), true);
    assert_close(&ended(small(config(Dtype::Float32, 2)), false), &expected, "cpu");
    for wave in waves() {
        let found = ended(gpu_config(wave, Dtype::Float32, false), false);
        assert_close(&found, &expected, &format!("wave {wave}"));
    }
}

/// A row without its mask leaves nothing behind: not on its seat, not in the rows beside it.
#[test]
fn late_masks_delay_their_rows_and_change_nothing() {
    let masked = [1, 2];
    let expected = play_masked(&mut Player::with(small(config(Dtype::Float32, 2))), &masked);
    let late = |config| {
        let mut player = Player::with(config);
        player.late_masks = true;
        play_masked(&mut player, &masked)
    };
    let check = |found: &[Output], what: &str| {
        let lens: Vec<_> = found.iter().map(|(tokens, _)| tokens.len()).collect();
        for (i, (len, (tokens, _))) in lens.iter().zip(&expected).enumerate() {
            assert!(*len > 2 && (*len < tokens.len()) == masked.contains(&i), "{what}: {lens:?}");
        }
        let begun = |((tokens, told), len): (&Output, &usize)| {
            (tokens[..*len].to_vec(), told[..*len].to_vec())
        };
        let expected: Vec<Output> = expected.iter().zip(&lens).map(begun).collect();
        assert_close(found, &expected, what);
    };
    check(&late(small(config(Dtype::Float32, 2))), "cpu");
    for wave in waves() {
        check(&late(gpu_config(wave, Dtype::Float32, false)), &format!("wave {wave}"));
    }
}

#[test]
fn bf16_replays_what_it_launches() {
    if !in_turn(1) {
        return;
    }
    for (what, of) in models(Dtype::Bfloat16) {
        for wave in waves() {
            let player = |eager| Player::with(on_emulator(wave, of.clone(), eager));
            assert_eq!(play(&mut player(false)), play(&mut player(true)), "{what}, wave {wave}");
        }
    }
}

/// f16 is rounded as bf16 is, with eight times finer steps: the CPU in f32 is near.
#[test]
fn f16_replays_what_it_launches_near_f32() {
    if !in_turn(0) {
        return;
    }
    for ((what, of), (_, exact)) in models(Dtype::Float16).into_iter().zip(models(Dtype::Float32)) {
        let exact = play(&mut Player::with(small(exact)));
        for wave in waves() {
            let player = |eager| Player::with(on_emulator(wave, of.clone(), eager));
            let launched = play(&mut player(true));
            assert_eq!(play(&mut player(false)), launched, "{what}, wave {wave}");
            assert_within(&launched, &exact, HALF_NEAR, &format!("{what}, wave {wave}"));
        }
    }
}

/// In f32 weights are multiplied out, as on the CPU; in bf16 fp8 kernels run, and attention over an fp8 cache.
#[test]
fn fp8_weights_and_cache_run_and_replay() {
    if !in_turn(1) {
        return;
    }
    check_fp8("dense", |dtype| config(dtype, 2));
}

/// Chunks of prompts are many rows an expert, decode is few.
#[test]
fn fp8_experts_run_and_replay() {
    if !in_turn(0) {
        return;
    }
    check_fp8("experts", experts);
}

fn check_fp8(what: &str, of: impl Fn(Dtype) -> ExecutorConfig) {
    let f32_config = || quantised(of(Dtype::Float32), KvDtype::Auto);
    let bf16_config = || quantised(of(Dtype::Bfloat16), KvDtype::Fp8);
    let expected = play(&mut Player::with(small(f32_config())));
    let near = play(&mut Player::with(small(bf16_config())));
    for wave in waves() {
        let multiplied_out = on_emulator(wave, f32_config(), true);
        let found = play(&mut Player::with(multiplied_out));
        assert_close(&found, &expected, &format!("{what}, wave {wave}"));
        let player = |eager| Player::with(on_emulator(wave, bf16_config(), eager));
        let launched = play(&mut player(true));
        let replayed = play(&mut player(false));
        assert_eq!(replayed, launched, "{what}, wave {wave}: a recording changes no bit");
        assert_near(&launched, &near, &format!("{what}, wave {wave}"));
    }
}
