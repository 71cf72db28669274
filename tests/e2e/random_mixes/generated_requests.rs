//! Random requests of one run, which a seed determines: with every sampling option, grammars, priorities,
//! cache salts, and disconnect times.

use crate::invariance::MAX_MODEL_LEN;
use crate::rng::SimRng;
use grammar::{GrammarSpec, JsonWhitespace};
use protocol::{RequestId, SamplingParams, Token};
use scheduler::{ExtraKeys, RequestSubmission};
use serde_json::json;

/// End-of-sequence token ids of the demo model.
const END_IDS: [Token; 2] = [2, 0];
const PROMPT_MAX: u32 = 150;
const ANSWER_MAX: u32 = 60;

/// A request with its arrival time and the time at which its client disconnects.
#[derive(Debug, Clone)]
pub(super) struct GeneratedRequest {
    pub(super) submit: RequestSubmission,
    /// Index in `specs` of the grammar that the output follows from `RequestSubmission::first_masked_token`
    /// on.
    pub(super) grammar: Option<usize>,
    pub(super) at_tick: u64,
    pub(super) disconnects_at_tick: Option<u64>,
}

/// Kinds of request options that the requests generated from a seed may use; each kind is disabled for half
/// of the seeds.
#[derive(Debug, Clone, Copy)]
struct EnabledRequestOptions {
    sampling_cuts: bool,
    penalties: bool,
    bias: bool,
    token_lists: bool,
    stop_conditions: bool,
    logprobs: bool,
    prompt_logprobs: bool,
    masks: bool,
    salts: bool,
    priorities: bool,
    aborts: bool,
}

/// Grammars that requests use: a regular expression that never has to end, a choice, and a JSON schema.
pub(super) fn specs() -> [GrammarSpec; 3] {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 99},
        "b": {"enum": ["x", "yes", null]}}, "required": ["a", "b"], "additionalProperties": false});
    [
        GrammarSpec::Regex("([a-z]+|[0-9]{1,3})([ ,.] ?([a-z]+|[0-9]{1,3}))*".to_owned()),
        GrammarSpec::Regex("(yes|no|perhaps|never in a hundred years)".to_owned()),
        GrammarSpec::Json { schema, whitespace: JsonWhitespace::None },
    ]
}

/// Returns the requests generated from a seed, in order of arrival.
pub(super) fn generate(rng: &mut SimRng, vocab: u32) -> Vec<GeneratedRequest> {
    let mut on = || rng.chance_per_mille(500);
    let kinds = EnabledRequestOptions {
        sampling_cuts: on(),
        penalties: on(),
        bias: on(),
        token_lists: on(),
        stop_conditions: on(),
        logprobs: on(),
        prompt_logprobs: on(),
        masks: on(),
        salts: on(),
        priorities: on(),
        aborts: on(),
    };
    let id = |rng: &mut SimRng| 3 + rng.below(u64::from(vocab) - 3) as Token;
    let bases: [Vec<Token>; 3] =
        std::array::from_fn(|_| (0..PROMPT_MAX).map(|_| id(rng)).collect());
    let (requests, gap) = (rng.between(6, 24), rng.pick(&[0, 1, 6]));
    let mut at_tick = 0;
    let mut asked = Vec::new();
    for number in 0..requests {
        at_tick += rng.below(gap + 1);
        let shared = rng.between(0, PROMPT_MAX - 1) as usize;
        let mut tokens = rng.pick(&[&bases[0], &bases[1], &bases[2]])[..shared].to_vec();
        tokens.extend((0..rng.scaled(1, 12)).map(|_| id(rng)));
        let submit = submit(rng, kinds, RequestId(number.into()), tokens, vocab);
        let grammar = submit.first_masked_token.map(|_| rng.below(3) as usize);
        let leaves = kinds.aborts && rng.chance_per_mille(300);
        let gone_at_tick = leaves.then(|| at_tick + rng.below(40));
        asked.push(GeneratedRequest {
            submit,
            grammar,
            at_tick,
            disconnects_at_tick: gone_at_tick,
        });
    }
    asked
}

fn submit(
    rng: &mut SimRng,
    kinds: EnabledRequestOptions,
    id: RequestId,
    tokens: Vec<Token>,
    vocab: u32,
) -> RequestSubmission {
    let masked = kinds.masks && rng.chance_per_mille(400);
    let ends = masked || kinds.stop_conditions && rng.chance_per_mille(700);
    let eos_ids = if ends { END_IDS.to_vec() } else { Vec::new() };
    let stops = if kinds.stop_conditions { rng.between(0, 3) } else { 0 };
    let stop_ids: Vec<Token> = (0..stops).map(|_| rng.below(u64::from(vocab)) as Token).collect();
    let mut sampling = sampling(rng, kinds, vocab);
    sampling.stop_token_ids = [&eos_ids[..], &stop_ids].concat();
    let scores_only = kinds.prompt_logprobs && rng.chance_per_mille(100);
    let max_tokens = if scores_only { 0 } else { rng.scaled(1, ANSWER_MAX) };
    assert!(tokens.len() as u32 + max_tokens <= MAX_MODEL_LEN);
    RequestSubmission {
        id,
        tokens,
        max_tokens,
        sampling,
        first_masked_token: masked.then(|| rng.pick(&[0, 0, 1, 5])),
        rng_key: rng.next_u64(),
        eos_ids,
        stop_ids,
        priority: if kinds.priorities { rng.pick(&[-3, 0, 0, 7]) } else { 0 },
        extra_keys: ExtraKeys::salted(
            (kinds.salts && rng.chance_per_mille(400)).then(|| "other".to_owned()),
        ),
        replica: None,
        block_keys: Vec::new(),
    }
}

fn sampling(rng: &mut SimRng, kinds: EnabledRequestOptions, vocab: u32) -> SamplingParams {
    let mut sampling = SamplingParams::greedy();
    let id = |rng: &mut SimRng| rng.below(u64::from(vocab)) as Token;
    if rng.chance_per_mille(600) {
        sampling.temperature = rng.pick(&[0.3, 0.8, 1.0, 1.7]);
    }
    if kinds.sampling_cuts {
        sampling.top_k = rng.pick(&[0, 1, 2, 20, 64, 10_000]);
        sampling.top_p = rng.pick(&[1.0, 0.95, 0.5, 0.01]);
        sampling.min_p = rng.pick(&[0.0, 0.0, 0.05, 0.9]);
    }
    if kinds.penalties {
        sampling.repetition_penalty = rng.pick(&[1.0, 1.2, 0.8]);
        sampling.frequency_penalty = rng.pick(&[0.0, 0.4, -0.4]);
        sampling.presence_penalty = rng.pick(&[0.0, 0.7, -0.7]);
    }
    if kinds.bias {
        let one = |rng: &mut SimRng| (id(rng), rng.pick(&[-100.0, -3.0, 3.0, 100.0]));
        sampling.logit_bias = (0..rng.between(0, 4)).map(|_| one(rng)).collect();
        sampling.logit_bias.sort_unstable_by_key(|(id, _)| *id);
        sampling.logit_bias.dedup_by_key(|(id, _)| *id);
    }
    if kinds.token_lists && rng.chance_per_mille(400) {
        sampling.allowed_token_ids =
            Some((0..vocab).filter(|_| rng.chance_per_mille(300)).collect());
    }
    if kinds.token_lists && rng.chance_per_mille(400) {
        let length = rng.between(1, 3);
        sampling.bad_words = (0..60).map(|_| (0..length).map(|_| id(rng)).collect()).collect();
    }
    if kinds.stop_conditions {
        sampling.min_tokens = rng.pick(&[0, 0, 1, 9]);
    }
    if kinds.logprobs && rng.chance_per_mille(500) {
        sampling.logprobs = Some(rng.pick(&[0, 1, 5, 20]));
    }
    if kinds.prompt_logprobs && rng.chance_per_mille(300) {
        sampling.prompt_logprobs = Some(rng.pick(&[0, 3]));
    }
    sampling
}
