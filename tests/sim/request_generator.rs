//! Draws the requests of simulated clients. Some prompts share a prefix, continue an earlier chat or have
//! colliding short block hashes, and some requests cannot be served.

use crate::hash_model::text::{HashOracle, HashSampler};
use crate::rng::SimRng;
use crate::sim_config::SimConfig;
use protocol::{PoolingMethod, Replica, RequestId, SamplingParams, Token};
use scheduler::{ExtraKeys, RequestSubmission};
use std::ops::Range;

/// Request with its arrival time.
pub(crate) struct RequestArrival {
    pub(crate) at_ms: u64,
    pub(crate) request: RequestSubmission,
}

/// Draws all requests of a simulation with their arrival times, in order of arrival.
pub(crate) fn draw_requests(config: &SimConfig, rng: &mut SimRng) -> Vec<RequestArrival> {
    let vocab = config.scheduler.limits.vocab_size;
    let text = |rng: &mut SimRng| -> Vec<Token> {
        (0..config.max_model_len()).map(|_| rng.below(u64::from(vocab)) as Token).collect()
    };
    let bases: Vec<Vec<Token>> = (0..rng.between(1, 3)).map(|_| text(rng)).collect();
    let mut requests: Vec<RequestArrival> = Vec::new();
    let mut now_ms = 0;
    while requests.len() < config.load.requests as usize {
        now_ms += rng.below(u64::from(config.load.gap_ms) + 1);
        let prompt = prompt(config, rng, &bases, &requests);
        let copies = if rng.chance_per_mille(100) { rng.between(2, 4) } else { 1 };
        for _ in 0..copies {
            let id = RequestId(requests.len() as u64 + 1);
            let request = submit(config, rng, id, prompt.clone());
            requests.push(RequestArrival { at_ms: now_ms, request });
        }
    }
    requests
}

/// Returns the oracle of a request, which computes its expected output without a scheduler.
pub(crate) fn oracle(submit: &RequestSubmission, vocab: Token) -> HashOracle {
    let sampler = sampler(submit, vocab);
    match masked_range(submit) {
        Some(tokens) => HashOracle::constrained(sampler, &submit.tokens, tokens),
        None => HashOracle::new(sampler, &submit.tokens),
    }
}

/// Returns the range of output tokens that a grammar restricts. The range may end before the end of the
/// output.
pub(crate) fn masked_range(submit: &RequestSubmission) -> Option<Range<u32>> {
    let from = submit.first_masked_token?;
    let ends = submit.rng_key.is_multiple_of(2).then(|| from + (submit.rng_key / 2 % 9) as u32);
    Some(from..ends.unwrap_or(u32::MAX))
}

/// Returns the sampler of a request, which the simulated device and the oracle (computation of the expected
/// output) use.
pub(crate) fn sampler(submit: &RequestSubmission, vocab: Token) -> HashSampler {
    HashSampler::new(vocab, submit.sampling.clone(), submit.rng_key, submit.tokens.len() as u32)
}

fn prompt(
    config: &SimConfig,
    rng: &mut SimRng,
    bases: &[Vec<Token>],
    requests: &[RequestArrival],
) -> Vec<Token> {
    let (longest, vocab) = (config.load.prompt_len_max, config.scheduler.limits.vocab_size);
    let mut tokens = Vec::new();
    if rng.chance_per_mille(config.load.shared) {
        let base = &bases[rng.below(bases.len() as u64) as usize];
        tokens.extend_from_slice(&base[..rng.between(0, longest) as usize]);
    } else if !requests.is_empty() && rng.chance_per_mille(config.load.continued) {
        // The next prompt of a chat consists of an earlier prompt, its output, and new tokens.
        let earlier = &requests[rng.below(requests.len() as u64) as usize].request;
        tokens.clone_from(&earlier.tokens);
        let output = oracle(earlier, vocab);
        tokens.extend(output.take(earlier.max_tokens.min(longest) as usize));
        tokens.truncate(longest as usize);
    }
    let new = match rng.below(4) {
        0 if !tokens.is_empty() => 0,
        1 => longest,
        _ => rng.scaled(1, longest),
    };
    while tokens.len() < longest as usize
        && (tokens.is_empty() || rng.chance_per_mille(1000 - 1000 / (new + 1)))
    {
        tokens.push(rng.below(u64::from(vocab)) as Token);
    }
    if rng.chance_per_mille(config.load.invalid_requests) {
        match rng.below(4) {
            0 => tokens.clear(),
            1 => tokens.push(vocab + rng.between(0, 5)),
            2 => tokens.resize(config.max_model_len() as usize + rng.between(0, 9) as usize, 0),
            _ => {}
        }
    }
    tokens
}

fn submit(
    config: &SimConfig,
    rng: &mut SimRng,
    id: RequestId,
    tokens: Vec<Token>,
) -> RequestSubmission {
    let limits = &config.scheduler.limits;
    let max_output = config.max_model_len().saturating_sub(tokens.len() as u32);
    let max_tokens = match rng.below(12) {
        0 => 0,
        1 => max_output,
        _ => rng.between(1, config.load.output_len_max).min(max_output),
    };
    let max_tokens = if rng.chance_per_mille(config.load.invalid_requests / 4) {
        max_tokens + max_output
    } else {
        max_tokens
    };
    let ids = |rng: &mut SimRng, per_mille: u32| -> Vec<Token> {
        let count = if rng.chance_per_mille(per_mille) { rng.between(1, 3) } else { 0 };
        (0..count).map(|_| rng.below(u64::from(limits.vocab_size)) as Token).collect()
    };
    let (eos_ids, stop_ids) = (ids(rng, 400), ids(rng, 200));
    let sampling = sampling(rng, limits.vocab_size, &eos_ids, &stop_ids);
    let salt = rng.below(u64::from(config.load.salts) + 1);
    let pinned = rng.chance_per_mille(100);
    let replica = pinned.then(|| Replica(rng.below(u64::from(config.scheduler.replicas)) as u16));
    with_pooling(RequestSubmission {
        id,
        tokens,
        max_tokens,
        sampling,
        first_masked_token: rng
            .chance_per_mille(config.load.constrained)
            .then(|| rng.pick(&[0, 0, 0, 1, 2, 5, 17])),
        rng_key: rng.next_u64(),
        eos_ids,
        stop_ids,
        priority: if config.load.priorities { rng.pick(&[-1, 0, 0, 0, 2]) } else { 0 },
        extra_keys: ExtraKeys::salted((salt > 0).then(|| format!("tenant-{salt}"))),
        replica: if rng.chance_per_mille(config.load.invalid_requests / 8) {
            Some(Replica(99))
        } else {
            replica
        },
        block_keys: Vec::new(),
    })
}

/// Turns some of the requests without output tokens into pooling requests.
fn with_pooling(mut submit: RequestSubmission) -> RequestSubmission {
    let scores_nothing = submit.max_tokens == 0 && submit.sampling.prompt_logprobs.is_none();
    if scores_nothing {
        submit.sampling.pooling = match submit.rng_key % 5 {
            0 => Some(PoolingMethod::LastToken),
            1 => Some(PoolingMethod::Mean),
            2 => Some(PoolingMethod::TokenLogprobs(vec![0, 1])),
            _ => None,
        };
    }
    submit
}

fn sampling(rng: &mut SimRng, vocab: Token, eos: &[Token], stop: &[Token]) -> SamplingParams {
    let mut sampling = SamplingParams::greedy();
    sampling.stop_token_ids = [eos, stop].concat();
    if rng.chance_per_mille(400) {
        sampling.temperature = 1.0;
    }
    if rng.chance_per_mille(150) {
        sampling.presence_penalty = 0.5;
    }
    if rng.chance_per_mille(200) {
        sampling.min_tokens = rng.between(1, 12);
    }
    if rng.chance_per_mille(100) {
        let any = rng.below(u64::from(vocab)) as Token;
        sampling.allowed_token_ids = Some(vec![any, 0, vocab - 1]);
    }
    if rng.chance_per_mille(150) {
        sampling.logprobs = Some(rng.between(0, 3));
    }
    if rng.chance_per_mille(100) {
        sampling.prompt_logprobs = Some(rng.between(0, 2));
    }
    sampling
}
