//! Draws the requests of simulated clients: prompts that share a prefix, continue an earlier chat or collide,
//! and some that cannot be served.

use crate::hash_model::text::{HashOracle, HashSampler};
use crate::rng::SimRng;
use crate::sim_config::SimConfig;
use protocol::{Replica, RequestId, SamplingParams, Token};
use scheduler::{ExtraKeys, RequestSubmission};
use std::ops::Range;

/// Every request of a world, in order of arrival, with its arrival time.
pub(crate) fn draw_requests(
    setup: &SimConfig,
    chance: &mut SimRng,
) -> Vec<(u64, RequestSubmission)> {
    let vocab = setup.scheduler.limits.vocab_size;
    let text = |chance: &mut SimRng| -> Vec<Token> {
        (0..setup.max_model_len()).map(|_| chance.below(u64::from(vocab)) as Token).collect()
    };
    let bases: Vec<Vec<Token>> = (0..chance.between(1, 3)).map(|_| text(chance)).collect();
    let mut asked: Vec<(u64, RequestSubmission)> = Vec::new();
    let mut now_ms = 0;
    while asked.len() < setup.load.requests as usize {
        now_ms += chance.below(u64::from(setup.load.gap_ms) + 1);
        let prompt = prompt(setup, chance, &bases, &asked);
        let copies = if chance.chance_per_mille(100) { chance.between(2, 4) } else { 1 };
        for _ in 0..copies {
            let id = RequestId(asked.len() as u64 + 1);
            asked.push((now_ms, submit(setup, chance, id, prompt.clone())));
        }
    }
    asked
}

/// Oracle of a request's output.
pub(crate) fn oracle(submit: &RequestSubmission, vocab: Token) -> HashOracle {
    let voice = voice(submit, vocab);
    match masked_range(submit) {
        Some(tokens) => HashOracle::constrained(voice, &submit.tokens, tokens),
        None => HashOracle::new(voice, &submit.tokens),
    }
}

/// Output tokens of a request that grammar bitmasks restrict: to the end, or for a range.
pub(crate) fn masked_range(submit: &RequestSubmission) -> Option<Range<u32>> {
    let from = submit.first_masked_token?;
    let ends = submit.rng_key.is_multiple_of(2).then(|| from + (submit.rng_key / 2 % 9) as u32);
    Some(from..ends.unwrap_or(u32::MAX))
}

/// Sampler state of a request.
pub(crate) fn voice(submit: &RequestSubmission, vocab: Token) -> HashSampler {
    HashSampler::new(vocab, submit.sampling.clone(), submit.rng_key, submit.tokens.len() as u32)
}

fn prompt(
    setup: &SimConfig,
    chance: &mut SimRng,
    bases: &[Vec<Token>],
    asked: &[(u64, RequestSubmission)],
) -> Vec<Token> {
    let (longest, vocab) = (setup.load.prompt_len_max, setup.scheduler.limits.vocab_size);
    let mut tokens = Vec::new();
    if chance.chance_per_mille(setup.load.shared) {
        let base = &bases[chance.below(bases.len() as u64) as usize];
        tokens.extend_from_slice(&base[..chance.between(0, longest) as usize]);
    } else if !asked.is_empty() && chance.chance_per_mille(setup.load.continued) {
        // Next turn of a chat: an earlier prompt, its output, and new tokens.
        let earlier = &asked[chance.below(asked.len() as u64) as usize].1;
        tokens.clone_from(&earlier.tokens);
        let answer = oracle(earlier, vocab);
        tokens.extend(answer.take(earlier.max_tokens.min(longest) as usize));
        tokens.truncate(longest as usize);
    }
    let new = match chance.below(4) {
        0 if !tokens.is_empty() => 0,
        1 => longest,
        _ => chance.scaled(1, longest),
    };
    while tokens.len() < longest as usize
        && (tokens.is_empty() || chance.chance_per_mille(1000 - 1000 / (new + 1)))
    {
        tokens.push(chance.below(u64::from(vocab)) as Token);
    }
    if chance.chance_per_mille(setup.load.invalid_requests) {
        match chance.below(4) {
            0 => tokens.clear(),
            1 => tokens.push(vocab + chance.between(0, 5)),
            2 => tokens.resize(setup.max_model_len() as usize + chance.between(0, 9) as usize, 0),
            _ => {}
        }
    }
    tokens
}

fn submit(
    setup: &SimConfig,
    chance: &mut SimRng,
    id: RequestId,
    tokens: Vec<Token>,
) -> RequestSubmission {
    let limits = &setup.scheduler.limits;
    let room = setup.max_model_len().saturating_sub(tokens.len() as u32);
    let max_tokens = match chance.below(12) {
        0 => 0,
        1 => room,
        _ => chance.between(1, setup.load.output_len_max).min(room),
    };
    let max_tokens = if chance.chance_per_mille(setup.load.invalid_requests / 4) {
        max_tokens + room
    } else {
        max_tokens
    };
    let ids = |chance: &mut SimRng, per_mille: u32| -> Vec<Token> {
        let many = if chance.chance_per_mille(per_mille) { chance.between(1, 3) } else { 0 };
        (0..many).map(|_| chance.below(u64::from(limits.vocab_size)) as Token).collect()
    };
    let (eos_ids, stop_ids) = (ids(chance, 400), ids(chance, 200));
    let sampling = sampling(chance, limits.vocab_size, &eos_ids, &stop_ids);
    let salt = chance.below(u64::from(setup.load.salts) + 1);
    let pinned = chance.chance_per_mille(100);
    let replica = pinned.then(|| Replica(chance.below(u64::from(setup.scheduler.replicas)) as u16));
    RequestSubmission {
        id,
        tokens,
        max_tokens,
        sampling,
        first_masked_token: chance
            .chance_per_mille(setup.load.constrained)
            .then(|| chance.pick(&[0, 0, 0, 1, 2, 5, 17])),
        rng_key: chance.next_u64(),
        eos_ids,
        stop_ids,
        priority: if setup.load.priorities { chance.pick(&[-1, 0, 0, 0, 2]) } else { 0 },
        extra_keys: ExtraKeys::salted((salt > 0).then(|| format!("tenant-{salt}"))),
        replica: if chance.chance_per_mille(setup.load.invalid_requests / 8) {
            Some(Replica(99))
        } else {
            replica
        },
        block_keys: Vec::new(),
    }
}

fn sampling(chance: &mut SimRng, vocab: Token, eos: &[Token], stop: &[Token]) -> SamplingParams {
    let mut sampling = SamplingParams::greedy();
    sampling.stop_token_ids = [eos, stop].concat();
    if chance.chance_per_mille(400) {
        sampling.temperature = 1.0;
    }
    if chance.chance_per_mille(150) {
        sampling.presence_penalty = 0.5;
    }
    if chance.chance_per_mille(200) {
        sampling.min_tokens = chance.between(1, 12);
    }
    if chance.chance_per_mille(100) {
        let any = chance.below(u64::from(vocab)) as Token;
        sampling.allowed_token_ids = Some(vec![any, 0, vocab - 1]);
    }
    if chance.chance_per_mille(150) {
        sampling.logprobs = Some(chance.between(0, 3));
    }
    if chance.chance_per_mille(100) {
        sampling.prompt_logprobs = Some(chance.between(0, 2));
    }
    sampling
}
