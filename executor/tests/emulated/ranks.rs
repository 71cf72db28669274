//! Ranks on GPUs: the tokens of one of them, launched and replayed, and an end for all when one is gone.

use crate::player::{Job, Pact, Player, config, experts, placed, shared};
use crate::{
    HALF_NEAR, Output, assert_close, assert_within, emulated, on_emulator, play, rules, small,
};
use collectives::{CallState, Operation};
use executor::{Dtype, ExecutorConfig};
use ops::DType;
use protocol::{Capture, Parallel, Sampling};
use std::sync::Arc;
use std::thread;

/// Group steps of replicas: what they are too many for is idle in the end.
const STEPS: usize = 24;

/// Ranks of the same world, each on an emulated GPU; tests that run side by side have worlds of their own.
pub(crate) fn on_gpus(
    world: &str,
    wave: u32,
    config: ExecutorConfig,
    enforce_eager: bool,
) -> ExecutorConfig {
    let mut config = on_emulator(wave, config, enforce_eager);
    let ranks = usize::from(config.settings.parallel.world_size());
    (1..ranks).for_each(|rank| drop(emulated::library_of(world, rank)));
    config.settings.libraries.as_mut().unwrap().driver = emulated::library_of(world, 0);
    config.settings.gpus = vec![0; ranks];
    config
}

#[test]
fn ranks_of_a_replica_find_the_tokens_of_one_launched_and_replayed() {
    let dense = |dtype| shared(config(dtype, 2), 2, false);
    let split = |dtype| shared(experts(dtype), 2, false);
    let spread = |dtype| shared(experts(dtype), 2, true);
    let alone = |config: ExecutorConfig| ExecutorConfig {
        settings: protocol::Settings {
            parallel: Parallel::default(),
            placement: None,
            ..config.settings.clone()
        },
        ..config
    };
    let worlds = [
        ("dense", 64, dense(Dtype::Float32)),
        ("experts in parts", 32, split(Dtype::Float32)),
        ("experts whole", 64, spread(Dtype::Float32)),
        ("experts placed", 32, placed(spread(Dtype::Float32))),
    ];
    for (what, wave, world) in worlds {
        let expected = play(&mut Player::with(small(alone(world.clone()))));
        let launched = play(&mut Player::with(on_gpus("replica", wave, world.clone(), true)));
        assert_close(&launched, &expected, what);
        let mut replaying = Player::with(on_gpus("replica", wave, world, false));
        assert_eq!(replaying.graphs, [1, 2, 4, 8], "{what}");
        assert_eq!(play(&mut replaying), launched, "{what}");
    }
}

/// Requests whose tokens are found in parts of rows, and at last one that wants whole rows.
fn samplings() -> [Sampling; 6] {
    let drawn = |temperature| Sampling { temperature, ..Sampling::greedy() };
    let strict = Sampling { logprobs: None, ..rules()[1].clone() };
    [
        Sampling::greedy(),
        drawn(0.8),
        Sampling { top_k: 5, top_p: 0.9, ..drawn(1.0) },
        Sampling { temperature: 1.3, top_k: 24, min_p: 0.05, ..strict.clone() },
        strict,
        Sampling { top_p: 0.8, ..drawn(1.0) },
    ]
}

/// Elements, rows and columns that the first rank brought to a gather.
type Brought = Option<(DType, u32, u32)>;

/// The same of the newest one.
fn brought(player: &Player) -> Brought {
    let calls = player.pact.meeting.calls();
    let of_first = &calls.first()?.calls;
    let gather = of_first.iter().rfind(|call| call.operation == Operation::AllGather)?;
    Some((gather.dtype, gather.rows, gather.cols))
}

/// Tokens of each, and what was brought to a decode step of the first five, of all six, and of five again, one of which is masked.
fn sample(player: &mut Player) -> (Vec<Output>, [Brought; 3]) {
    let job = |(id, sampling): (u64, Sampling)| Job::new(id, 4 + 3 * id as usize, sampling);
    let mut jobs: Vec<Job> = (0..).zip(samplings()).map(job).collect();
    let decode = |player: &mut Player, jobs: &mut [Job], steps: usize| {
        for step in 0..steps {
            player.from_device = step > 0;
            player.step(&mut jobs.iter_mut().map(|job| (job, 1)).collect::<Vec<_>>());
        }
        player.from_device = false;
        brought(player)
    };
    let mut found = [None; 3];
    for job in &mut jobs[..5] {
        let len = job.prompt_len;
        player.step(&mut [(job, len)]);
    }
    found[0] = decode(player, &mut jobs[..5], 4);
    let len = jobs[5].prompt_len;
    player.step(&mut [(&mut jobs[5], len)]);
    found[1] = decode(player, &mut jobs, 3);
    jobs[0].masked = true;
    found[2] = decode(player, &mut jobs[..5], 2);
    (jobs.iter().map(Job::output).collect(), found)
}

#[test]
fn ranks_find_the_tokens_of_one_by_a_few_words_of_each_row() {
    let (expected, _) = sample(&mut Player::with(small(config(Dtype::Float32, 2))));
    for (wave, enforce_eager) in [(64, true), (32, false)] {
        let world = shared(config(Dtype::Float32, 2), 2, false);
        let mut world = on_gpus("parts", wave, world, enforce_eager);
        if !enforce_eager {
            world.settings.capture = Capture::Rows(vec![8]);
        }
        let mut player = Player::with(world);
        let (found, brought) = sample(&mut player);
        assert_eq!(found, expected, "wave {wave}");
        // Of 192 ids 24 are listed: 52 words a row, or all 192. Five or six rows are replayed as eight; with masks they are not.
        let rows = if enforce_eager { [5, 6] } else { [8, 8] };
        let in_parts = |rows: u32| Some((DType::I32, 1, 52 * rows));
        let whole = Some((DType::F32, rows[1], 192));
        assert_eq!(brought, [in_parts(rows[0]), whole, in_parts(5)], "wave {wave}");
    }
}

#[test]
fn sums_by_the_library_find_the_same_tokens() {
    let mut world = on_gpus("sums", 64, shared(config(Dtype::Float32, 2), 2, false), true);
    let found = play(&mut Player::with(world.clone()));
    world.settings.one_shot_sums = false;
    assert_eq!(play(&mut Player::with(world)), found);
}

/// Sums in f16 round on their way, in one shot and in the library alike.
#[test]
fn ranks_in_f16_stay_near_one_in_f32() {
    if !crate::in_turn(0) {
        return;
    }
    let expected = play(&mut Player::with(small(config(Dtype::Float32, 2))));
    let mut world = on_gpus("halves", 32, shared(config(Dtype::Float16, 2), 2, false), false);
    let replayed = play(&mut Player::with(world.clone()));
    assert_within(&replayed, &expected, HALF_NEAR, "one shot");
    world.settings.one_shot_sums = false;
    let launched = play(&mut Player::with(world));
    assert_within(&launched, &expected, HALF_NEAR, "by the library");
}

/// Requests of one replica, one after the other on the odd ones, which are idle at first.
fn play_replica(player: &mut Player, replica: u16) -> Vec<Output> {
    let job = |i: u16| {
        let sampling = Sampling { logprobs: Some(3), ..Sampling::greedy() };
        let id = u64::from(1 + replica * 7 + i);
        Job::new(id, 9 + usize::from(5 * i + 3 * replica), sampling).on_seat(u32::from(i))
    };
    let mut jobs: Vec<Job> = (0..2).map(job).collect();
    for step in 0..STEPS {
        let mut rows: Vec<(&mut Job, usize)> = Vec::new();
        let idle = replica % 2 == 1 && step < 3;
        for job in jobs.iter_mut().filter(|job| !idle && job.tokens.len() < job.prompt_len + 4) {
            if replica.is_multiple_of(2) || rows.is_empty() {
                let len = job.want().min(1 + (step * 11) % 30);
                rows.push((job, len));
            }
        }
        rows.sort_by_key(|(_, len)| *len > 1); // Decode rows come first.
        player.step(&mut rows);
    }
    assert!(jobs.iter().all(|job| job.tokens.len() == job.prompt_len + 4), "too few steps");
    jobs.iter().map(Job::output).collect()
}

#[test]
fn replicas_that_share_experts_find_the_tokens_of_one() {
    let mut world = experts(Dtype::Float32);
    let alone = |replica| play_replica(&mut Player::with(small(experts(Dtype::Float32))), replica);
    world.settings.parallel = Parallel { tp_size: 1, dp_size: 2, experts: true };
    for (wave, enforce_eager) in [(64, true), (32, false)] {
        let config = on_gpus("replicas", wave, world.clone(), enforce_eager);
        let pact = Arc::new(Pact::new(&config));
        let start = |replica| {
            let (config, pact) = (config.clone(), Arc::clone(&pact));
            thread::spawn(move || {
                let mut player = Player::of_replica(config, replica, Arc::clone(&pact));
                let found = play_replica(&mut player, replica);
                pact.agree(0); // Who leaves ends the group for those who have not finished their last step.
                found
            })
        };
        let replicas = [start(0), start(1)];
        for (replica, found) in (0..).zip(replicas) {
            let found = found.join().unwrap();
            assert_close(&found, &alone(replica), &format!("replica {replica}, wave {wave}"));
        }
        // Recorded steps have fixed sizes; all others send tokens to those who hold an expert of theirs.
        let calls: Vec<_> = pact.meeting.calls().into_iter().flat_map(|rank| rank.calls).collect();
        let called = |operation| calls.iter().any(|call| call.operation == operation);
        assert!(called(Operation::AllToAll), "wave {wave}");
        assert_eq!(called(Operation::ReduceScatter), !enforce_eager, "wave {wave}");
    }
}

/// What each rank last did can be read from outside, replayed steps included.
#[test]
fn calls_of_recordings_are_told_by_each_replay() {
    let mut player =
        Player::with(on_gpus("calls", 64, shared(config(Dtype::Float32, 2), 2, false), false));
    let mut job = Job::new(1, 9, Sampling::greedy());
    player.step(&mut [(&mut job, 9)]);
    let before = player.pact.meeting.calls()[0].calls.last().unwrap().sequence;
    player.step(&mut [(&mut job, 1)]);
    for rank in player.pact.meeting.calls() {
        let calls: Vec<_> = rank.calls.iter().filter(|call| call.sequence > before).collect();
        let gathers = calls.iter().filter(|call| call.operation == Operation::AllGather).count();
        // The embedding, two of each of three layers, and the logits.
        assert_eq!((calls.len(), gathers), (8, 1), "rank {}", rank.rank.0);
        assert!(calls.iter().all(|call| call.state == CallState::Done), "{calls:?}");
    }
}
