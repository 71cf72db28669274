//! What simulated users ask: drawn prompts that share, continue and collide, and some that cannot
//! be served at all.

use crate::chance::Chance;
use crate::hash_model::text::{Oracle, Voice};
use crate::setup::Setup;
use protocol::{Replica, RequestId, Sampling, Token};
use scheduler::{ExtraKeys, Submit};
use std::ops::Range;

/// Every request of a world, in order of arrival, with its arrival time.
pub(crate) fn draw(setup: &Setup, chance: &mut Chance) -> Vec<(u64, Submit)> {
    let vocab = setup.engine.limits.vocab_size;
    let text = |chance: &mut Chance| -> Vec<Token> {
        (0..setup.max_model_len()).map(|_| chance.below(u64::from(vocab)) as Token).collect()
    };
    let bases: Vec<Vec<Token>> = (0..chance.between(1, 3)).map(|_| text(chance)).collect();
    let mut asked: Vec<(u64, Submit)> = Vec::new();
    let mut now_ms = 0;
    while asked.len() < setup.load.requests as usize {
        now_ms += chance.below(u64::from(setup.load.gap_ms) + 1);
        let prompt = prompt(setup, chance, &bases, &asked);
        let copies = if chance.hits(100) { chance.between(2, 4) } else { 1 };
        for _ in 0..copies {
            let id = RequestId(asked.len() as u64 + 1);
            asked.push((now_ms, submit(setup, chance, id, prompt.clone())));
        }
    }
    asked
}

/// What a submit is answered with.
pub(crate) fn oracle(submit: &Submit, vocab: Token) -> Oracle {
    let voice = voice(submit, vocab);
    match masked(submit) {
        Some(tokens) => Oracle::constrained(voice, &submit.tokens, tokens),
        None => Oracle::new(voice, &submit.tokens),
    }
}

/// Tokens of a submit's output that masks limit: to the end, or for a while.
pub(crate) fn masked(submit: &Submit) -> Option<Range<u32>> {
    let from = submit.masked_from?;
    let ends = submit.key.is_multiple_of(2).then(|| from + (submit.key / 2 % 9) as u32);
    Some(from..ends.unwrap_or(u32::MAX))
}

/// The voice that answers a submit.
pub(crate) fn voice(submit: &Submit, vocab: Token) -> Voice {
    Voice::new(vocab, submit.sampling.clone(), submit.key, submit.tokens.len() as u32)
}

fn prompt(
    setup: &Setup,
    chance: &mut Chance,
    bases: &[Vec<Token>],
    asked: &[(u64, Submit)],
) -> Vec<Token> {
    let (longest, vocab) = (setup.load.prompt, setup.engine.limits.vocab_size);
    let mut tokens = Vec::new();
    if chance.hits(setup.load.shared) {
        let base = &bases[chance.below(bases.len() as u64) as usize];
        tokens.extend_from_slice(&base[..chance.between(0, longest) as usize]);
    } else if !asked.is_empty() && chance.hits(setup.load.continued) {
        // The next turn of a chat: the earlier prompt, its answer, and something new.
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
        && (tokens.is_empty() || chance.hits(1000 - 1000 / (new + 1)))
    {
        tokens.push(chance.below(u64::from(vocab)) as Token);
    }
    if chance.hits(setup.load.hopeless) {
        match chance.below(4) {
            0 => tokens.clear(),
            1 => tokens.push(vocab + chance.between(0, 5)),
            2 => tokens.resize(setup.max_model_len() as usize + chance.between(0, 9) as usize, 0),
            _ => {}
        }
    }
    tokens
}

fn submit(setup: &Setup, chance: &mut Chance, id: RequestId, tokens: Vec<Token>) -> Submit {
    let limits = &setup.engine.limits;
    let room = setup.max_model_len().saturating_sub(tokens.len() as u32);
    let max_tokens = match chance.below(12) {
        0 => 0,
        1 => room,
        _ => chance.between(1, setup.load.answer).min(room),
    };
    let max_tokens =
        if chance.hits(setup.load.hopeless / 4) { max_tokens + room } else { max_tokens };
    let ids = |chance: &mut Chance, per_mille: u32| -> Vec<Token> {
        let many = if chance.hits(per_mille) { chance.between(1, 3) } else { 0 };
        (0..many).map(|_| chance.below(u64::from(limits.vocab_size)) as Token).collect()
    };
    let (eos_ids, stop_ids) = (ids(chance, 400), ids(chance, 200));
    let sampling = sampling(chance, limits.vocab_size, &eos_ids, &stop_ids);
    let salt = chance.below(u64::from(setup.load.salts) + 1);
    let pinned = chance.hits(100);
    let replica = pinned.then(|| Replica(chance.below(u64::from(setup.engine.replicas)) as u16));
    Submit {
        id,
        tokens,
        max_tokens,
        sampling,
        masked_from: chance
            .hits(setup.load.constrained)
            .then(|| chance.pick(&[0, 0, 0, 1, 2, 5, 17])),
        key: chance.bits(),
        eos_ids,
        stop_ids,
        priority: if setup.load.priorities { chance.pick(&[-1, 0, 0, 0, 2]) } else { 0 },
        extra: ExtraKeys::salted((salt > 0).then(|| format!("tenant-{salt}"))),
        replica: if chance.hits(setup.load.hopeless / 8) { Some(Replica(99)) } else { replica },
        keys: Vec::new(),
    }
}

fn sampling(chance: &mut Chance, vocab: Token, eos: &[Token], stop: &[Token]) -> Sampling {
    let mut sampling = Sampling::greedy();
    sampling.stop_ids = [eos, stop].concat();
    if chance.hits(400) {
        sampling.temperature = 1.0;
    }
    if chance.hits(150) {
        sampling.presence = 0.5;
    }
    if chance.hits(200) {
        sampling.min_tokens = chance.between(1, 12);
    }
    if chance.hits(100) {
        let any = chance.below(u64::from(vocab)) as Token;
        sampling.allowed = Some(vec![any, 0, vocab - 1]);
    }
    if chance.hits(150) {
        sampling.logprobs = Some(chance.between(0, 3));
    }
    if chance.hits(100) {
        sampling.prompt_logprobs = Some(chance.between(0, 2));
    }
    sampling
}
