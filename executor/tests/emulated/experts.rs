//! What routers choose on a GPU is counted there: the numbers of the CPU, launched and replayed. And experts that nobody chooses, as every
//! token goes to them.

use crate::player::{Job, Player, experts, latents, placed, shared};
use crate::ranks::on_gpus;
use crate::{Output, assert_close, assert_near, on_emulator, play, quantised, small, waves};
use executor::{Dtype, ExecutorConfig, KvDtype};
use models::config::Config;
use protocol::{Capture, ExpertTokens, Sampling};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Decode steps; more than lie between two reports of replayed ones.
const STEPS: usize = 17;

/// Tokens by layer and expert.
type Totals = BTreeMap<(u16, u16), u32>;

fn add(totals: &mut Totals, counts: &[ExpertTokens]) {
    for count in counts {
        *totals.entry((count.layer, count.expert)).or_default() += count.tokens;
    }
}

/// Three prompts, decode steps of three rows, then a prompt; and which of the decode steps reported.
fn counted(player: &mut Player) -> (Totals, Vec<usize>) {
    let mut totals = Totals::new();
    let job = |id: u64| Job::new(id, 5 + 3 * id as usize, Sampling::greedy());
    let mut jobs: Vec<Job> = (0..3).map(job).collect();
    for job in &mut jobs {
        let len = job.prompt_len;
        add(&mut totals, &player.step(&mut [(job, len)]).experts);
    }
    let mut reports = Vec::new();
    for step in 1..=STEPS {
        let output = player.step(&mut jobs.iter_mut().map(|job| (job, 1)).collect::<Vec<_>>());
        add(&mut totals, &output.experts);
        reports.extend((!output.experts.is_empty()).then_some(step));
    }
    let mut last = job(3);
    let len = last.prompt_len;
    add(&mut totals, &player.step(&mut [(&mut last, len)]).experts);
    (totals, reports)
}

fn alone(config: ExecutorConfig) -> Player {
    Player::with(small(config))
}

/// It records steps of `rows` rows and no others.
fn recording(mut config: ExecutorConfig, rows: u32) -> Player {
    config.settings.capture = Capture::Rows(vec![rows]);
    Player::with(config)
}

#[test]
fn experts_are_counted_as_on_the_cpu() {
    for (wave, config) in [(64, experts(Dtype::Float32)), (32, latents(Dtype::Float32))] {
        let (expected, of_each_step) = counted(&mut alone(config.clone()));
        assert_eq!(of_each_step, (1..=STEPS).collect::<Vec<_>>());
        if wave == 64 {
            let launched = counted(&mut Player::with(on_emulator(wave, config.clone(), true)));
            assert_eq!(launched, (expected.clone(), of_each_step), "launched");
        }
        // Three rows are replayed as four, and the fourth is nobody's.
        let replayed = counted(&mut recording(on_emulator(wave, config, false), 4));
        assert_eq!(replayed, (expected, vec![16]), "replayed, wave {wave}");
    }
}

/// The first rank counts for all, by the experts' own numbers, wherever they lie.
#[test]
fn ranks_count_once() {
    let (expected, _) = counted(&mut alone(experts(Dtype::Float32)));
    let config = placed(shared(experts(Dtype::Float32), 2, true));
    let mut player = recording(on_gpus("counts", 32, config, false), 4);
    assert_eq!(counted(&mut player), (expected, vec![16]));
}

/// A lone row's experts are chosen where they are computed.
#[test]
fn choices_of_a_lone_row_are_counted() {
    let config = crate::experts(Dtype::Bfloat16);
    let mut player = recording(on_emulator(32, config, false), 1);
    let mut job = Job::new(1, 9, Sampling::greedy());
    let mut totals = Totals::new();
    add(&mut totals, &player.step(&mut [(&mut job, 9)]).experts);
    for _ in 0..16 {
        add(&mut totals, &player.step(&mut [(&mut job, 1)]).experts);
    }
    let of = |layer| totals.range((layer, 0)..(layer + 1, 0)).map(|(_, tokens)| tokens).sum();
    // The last layer computes of a prompt what is asked about; each token goes to two experts.
    let found: [u32; 2] = [0, 1].map(of);
    assert_eq!(found, [2 * (9 + 16), 2 * (1 + 16)]);
}

/// A model of V2 whose layers have two shared experts of so many channels beside eight: their router is softmax alone.
pub(crate) fn sharing(dtype: Dtype, width: usize) -> ExecutorConfig {
    sharing_of(dtype, (64, width))
}

/// The same of so many channels of the stream.
fn sharing_of(dtype: Dtype, (hidden, width): (usize, usize)) -> ExecutorConfig {
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
    let model = Config::from_json(Path::new("config.json"), &text).unwrap();
    ExecutorConfig { model, ..crate::config(dtype, 2) }
}

/// Among the others and, in steps of many rows, beside them.
fn among_and_beside(wave: u32, expected: &[Output]) {
    let player = |eager| Player::with(on_emulator(wave, sharing(Dtype::Float32, 64), eager));
    let launched = play(&mut player(true));
    assert_close(&launched, expected, &format!("wave {wave}"));
    assert_eq!(play(&mut player(false)), launched, "wave {wave}: a recording changes no bit");
}

#[test]
#[ignore = "run by what_runs_beside_a_step_is_waited_for"]
fn lazily() {
    let expected = play(&mut Player::with(small(sharing(Dtype::Float32, 64))));
    among_and_beside(64, &expected);
    streamed_in_fp8();
}

/// Beside the others in every step, launched and replayed.
fn streamed_in_fp8() {
    let fp8 = |dtype| quantised(sharing_of(dtype, (128, 128)), KvDtype::Auto);
    let exact = play(&mut Player::with(small(fp8(Dtype::Float32))));
    let player = |eager| Player::with(on_emulator(32, fp8(Dtype::Bfloat16), eager));
    let launched = play(&mut player(true));
    assert_near(&launched, &exact, "fp8, wave 32");
    let mut replaying = player(false);
    assert_eq!(replaying.graphs, [1, 2, 4, 8]);
    assert_eq!(play(&mut replaying), launched, "fp8: a recording changes no bit");
}

/// On emulated GPUs that run a stream only when somebody waits for it: the second one as late as may be, or in turn with the first.
#[test]
fn what_runs_beside_a_step_is_waited_for() {
    if !crate::in_turn(0) {
        return;
    }
    for lazy in ["1", "2"] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "experts::lazily"])
            .env("HIPEMU_LAZY", lazy)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }
}

/// On one rank and in parts on two.
#[test]
fn experts_that_all_tokens_share_give_the_tokens_of_the_cpu() {
    if !crate::in_turn(0) {
        return;
    }
    let expected = play(&mut Player::with(small(sharing(Dtype::Float32, 64))));
    for wave in waves() {
        among_and_beside(wave, &expected);
    }
    for (what, whole) in [("in parts", false), ("whole", true)] {
        let world = |eager| {
            let world = shared(sharing(Dtype::Float32, 64), 2, whole);
            Player::with(on_gpus("sharing", 64, world, eager))
        };
        let launched = play(&mut world(true));
        assert_close(&launched, &expected, what);
        assert_eq!(play(&mut world(false)), launched, "{what}: a recording changes no bit");
    }
}

/// Streamed in bf16 (wave 32), where lone rows route for themselves; in fp8 from weights that lie in a stack.
#[test]
fn experts_that_all_tokens_share_are_near_in_few_bits() {
    if !crate::in_turn(1) {
        return;
    }
    let exact = play(&mut Player::with(small(sharing(Dtype::Float32, 64))));
    for wave in waves() {
        let player = |eager| Player::with(on_emulator(wave, sharing(Dtype::Bfloat16, 64), eager));
        let launched = play(&mut player(true));
        assert_near(&launched, &exact, &format!("bf16, wave {wave}"));
        assert_eq!(play(&mut player(false)), launched, "bf16, wave {wave}");
    }
    let fp8 = |dtype| quantised(sharing(dtype, 128), KvDtype::Auto);
    let exact = play(&mut Player::with(small(fp8(Dtype::Float32))));
    let found = play(&mut Player::with(on_emulator(64, fp8(Dtype::Bfloat16), true)));
    assert_near(&found, &exact, "fp8");
    streamed_in_fp8();
}
