//! Drafts of a layer that begins with hidden states of the model (EAGLE-3) change nothing, and are the same guesses whatever
//! happens around them.

use crate::drafts::{job, said};
use crate::player::{BLOCK, Job, Player, config, eagle, eagle_drafting, experts, latents, shared};
use crate::{PROMPT, TOTAL, name, rules};
use executor::{Dtype, Executor, ExecutorConfig, ExecutorError, SpeculationError};
use models::Config;
use models::config::EagleConfig;
use protocol::Speculation;

/// The variants that checkpoints come in: states normed, the residual stream begun with the normed one, and the head's state carried.
fn variant(change: fn(&mut EagleConfig)) -> Config {
    let mut eagle = eagle();
    eagle.eagle.as_mut().map(change).unwrap();
    eagle
}

/// A layer of half the width, with an embedding and all ids of its own.
fn narrow() -> Config {
    let shape = EagleConfig { vocab: 384, ..eagle().eagle.unwrap() };
    Config { hidden: 32, heads: 2, kv_heads: 1, eagle: Some(shape), ..eagle() }
}

/// Alone and over ranks, with models of several kinds.
fn worlds(drafts: u8) -> Vec<ExecutorConfig> {
    use Dtype::{Bfloat16, Float32};
    let by = |config, eagle| eagle_drafting(config, eagle, drafts);
    let normed = variant(|e| (e.state_norms, e.carries_normed) = (true, true));
    vec![
        by(config(Float32, 2), eagle()),
        by(config(Bfloat16, 2), variant(|e| e.normed_residual = true)),
        by(shared(config(Float32, 1), 2, false), variant(|e| e.layers = Some([0, 1, 3]))),
        by(shared(experts(Float32), 2, true), normed),
        by(experts(Float32), narrow()),
        by(latents(Float32), eagle()),
    ]
}

fn in_f32(drafts: u8) -> impl Iterator<Item = ExecutorConfig> {
    worlds(drafts).into_iter().filter(|world| world.settings.dtype == Dtype::Float32)
}

#[test]
fn any_number_of_drafts_changes_nothing() {
    let (mut drafted, mut accepted) = (0, 0);
    for world in worlds(4) {
        let name = name(&world);
        let mut player = Player::with(world);
        for sampling in rules() {
            let mut plain = job(3, &sampling, 0);
            player.finish(&mut plain, PROMPT, TOTAL);
            for drafts in 1..=4 {
                let mut job = job(3, &sampling, drafts);
                player.finish(&mut job, PROMPT, TOTAL);
                assert_eq!(said(&job), said(&plain), "{name}, {drafts} drafts, {sampling:?}");
                assert!(job.drafted >= TOTAL - PROMPT - 2 - job.accepted, "{}", job.drafted);
                drafted += job.drafted;
                accepted += job.accepted;
                player.free(job.table);
            }
            player.free(plain.table);
        }
    }
    println!("{accepted} of {drafted} drafts accepted");
    assert!(accepted < drafted, "{accepted} of {drafted}");
}

/// As of a model without anybody who drafts for it.
#[test]
fn a_model_that_is_watched_says_the_same() {
    for world in worlds(2) {
        let name = name(&world);
        let play = |world: ExecutorConfig, drafts| {
            let mut player = Player::with(world);
            let mut job = job(3, &rules()[1], drafts);
            player.finish(&mut job, 16, TOTAL);
            said(&job)
        };
        let mut alone = world.clone();
        (alone.settings.speculation, alone.settings.draft_dir, alone.draft) = (None, None, None);
        assert_eq!(play(world, 2), play(alone, 0), "{name}");
    }
}

/// A step that is sent before the one in front of it is answered begins where only the device knows. One request is preempted
/// with a row under way.
#[test]
fn steps_sent_ahead_guess_and_say_the_same() {
    for world in in_f32(4) {
        let name = name(&world);
        let mut player = Player::with(world);
        let jobs = |drafts: u8| -> Vec<_> {
            let one = |(i, rules)| job(i, rules, drafts.min(1 + i as u8)).on_seat(i as u32);
            (0..).zip(&rules()).map(one).collect()
        };
        let mut plain = jobs(0);
        player.finish_all(&mut plain, TOTAL);
        for preempted_at in [None, Some(PROMPT + 5)] {
            let (mut ahead, mut left) = (jobs(4), preempted_at);
            player.finish_ahead(&mut ahead, TOTAL, |player, jobs, _| {
                if left.take_if(|at| jobs[2].tokens.len() >= *at).is_some() {
                    let blocks = jobs[2].preempt(30);
                    player.free(blocks);
                }
            });
            assert_eq!(left, None);
            for (ahead, plain) in ahead.iter_mut().zip(&plain) {
                assert_eq!(said(ahead), said(plain), "{name}, preempted at {preempted_at:?}");
                assert!(ahead.drafted > 0, "{name}");
                player.free(std::mem::take(&mut ahead.table));
            }
        }
        for job in plain {
            player.free(job.table);
        }
    }
}

#[test]
fn guesses_are_the_same_in_chunks_after_preemptions_and_behind_prefix_hits() {
    for world in in_f32(3) {
        let name = name(&world);
        let mut player = Player::with(world);
        for sampling in rules() {
            let mut whole = job(3, &sampling, 3);
            player.finish(&mut whole, PROMPT, TOTAL);
            let of = |job: &Job| (said(job), job.drafted, job.accepted);
            for chunk in [1, 7, 33] {
                let mut job = job(3, &sampling, 3).on_seat(17);
                player.finish(&mut job, chunk, TOTAL);
                assert_eq!(of(&job), of(&whole), "{name}, chunks of {chunk}, {sampling:?}");
                player.free(job.table);
            }
            let mut job = job(3, &sampling, 3);
            player.finish(&mut job, 16, PROMPT + 7);
            let blocks = job.preempt(30);
            player.free(blocks);
            player.finish(&mut job, 33, TOTAL);
            assert_eq!(said(&job), said(&whole), "{name}, preempted, {sampling:?}");
            player.free(job.table);
            let mut hit = crate::drafts::job(3, &sampling, 3).on_seat(8);
            hit.table = whole.table[..2].to_vec();
            hit.computed = 2 * BLOCK;
            player.finish(&mut hit, PROMPT, TOTAL);
            assert_eq!(of(&hit), of(&whole), "{name}, behind a hit, {sampling:?}");
            player.free(hit.table.split_off(2));
            player.free(whole.table);
        }
    }
}

/// A layer keeps keys and values of each token, and of each block the state at its end.
#[test]
fn the_size_of_a_block_counts_the_layer() {
    let bytes = |config| Executor::load(config, &mut |_| {}).unwrap().kv_spec().bytes_per_block();
    let model = || config(Dtype::Float32, 1);
    let draft = eagle();
    let layer = BLOCK * 2 * draft.kv_heads * draft.head_dim * 4;
    let drafting = bytes(eagle_drafting(model(), draft.clone(), 1));
    assert_eq!(drafting, bytes(model()) + (layer + draft.hidden * 4) as u64);
}

#[test]
fn what_does_not_fit_the_model_is_refused_by_field() {
    let refused = |config: ExecutorConfig| match Executor::load(config, &mut |_| {}) {
        Err(ExecutorError::Speculation(error)) => error,
        other => panic!("{other:?}"),
    };
    let model = || config(Dtype::Float32, 1);
    let by = |eagle| refused(eagle_drafting(model(), eagle, 2));
    let error = by(Config { vocab: 400, ..eagle() });
    assert_eq!(error, SpeculationError::Vocabulary { draft: 400, model: 384 });
    assert!(error.to_string().contains("vocab_size"), "{error}");
    let error = by(variant(|e| e.target_hidden = 96));
    let expected = SpeculationError::Hidden { field: "target_hidden_size", draft: 96, model: 64 };
    assert_eq!(error, expected);
    let deep = by(variant(|e| e.layers = Some([1, 2, 4])));
    assert_eq!(deep, SpeculationError::States { layer: 4, layers: 3 });
    assert_eq!(by(model().model), SpeculationError::NoEagle);
    let none = ExecutorConfig { draft: None, ..eagle_drafting(model(), eagle(), 2) };
    assert_eq!(refused(none), SpeculationError::NoEagle);
    let mut many = eagle_drafting(model(), eagle(), 2);
    many.settings.speculation =
        Some(Speculation { drafts: 5, ..many.settings.speculation.unwrap() });
    assert_eq!(refused(many), SpeculationError::Drafts { drafts: 5 });
    let mut other = crate::player::model_drafting(model(), eagle(), 2);
    assert_eq!(refused(other.clone()), SpeculationError::OfEagle);
    (other.model, other.settings.speculation) = (eagle(), None);
    other.draft = None;
    let error = Executor::load(other, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("LlamaForCausalLMEagle3 drafts for another model"), "{error}");
    let odd = Config { heads: 3, kv_heads: 3, ..eagle() };
    let split = Executor::load(eagle_drafting(shared(model(), 2, false), odd, 2), &mut |_| {});
    let error = split.unwrap_err().to_string();
    assert!(error.contains("midlayer") && error.contains("num_attention_heads 3"), "{error}");
}
