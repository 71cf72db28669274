//! Requests of a mix, drawn from a seed: every sampling option, grammars, priorities, salts, and disconnect
//! times.

use crate::invariance::MAX_MODEL_LEN;
use crate::rng::SimRng;
use grammar::{GrammarSpec, JsonWhitespace};
use protocol::{RequestId, SamplingParams, Token};
use scheduler::{ExtraKeys, RequestSubmission};
use serde_json::json;

/// End-of-sequence ids of the demo model.
const END_IDS: [Token; 2] = [2, 0];
const PROMPT_MAX: u32 = 150;
const ANSWER_MAX: u32 = 60;

/// A request, its arrival time, and its disconnect time.
#[derive(Debug, Clone)]
pub(super) struct GeneratedRequest {
    pub(super) submit: RequestSubmission,
    /// Index of the grammar that its output follows from `RequestSubmission::first_masked_token` on.
    pub(super) grammar: Option<usize>,
    pub(super) at_tick: u64,
    pub(super) disconnects_at_tick: Option<u64>,
}

/// Kinds of options that requests of a seed may use: each is disabled in half of the seeds.
#[derive(Debug, Clone, Copy)]
struct OptionKinds {
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

/// Grammars that `GeneratedRequest::grammar` indexes: one without an end, a choice, and a schema.
pub(super) fn specs() -> [GrammarSpec; 3] {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 99},
        "b": {"enum": ["x", "yes", null]}}, "required": ["a", "b"], "additionalProperties": false});
    [
        GrammarSpec::Regex("([a-z]+|[0-9]{1,3})([ ,.] ?([a-z]+|[0-9]{1,3}))*".to_owned()),
        GrammarSpec::Regex("(yes|no|perhaps|never in a hundred years)".to_owned()),
        GrammarSpec::Json { schema, whitespace: JsonWhitespace::None },
    ]
}

/// The requests of a seed, in order of arrival.
pub(super) fn generate(chance: &mut SimRng, vocab: u32) -> Vec<GeneratedRequest> {
    let mut on = || chance.chance_per_mille(500);
    let kinds = OptionKinds {
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
    let id = |chance: &mut SimRng| 3 + chance.below(u64::from(vocab) - 3) as Token;
    let bases: [Vec<Token>; 3] =
        std::array::from_fn(|_| (0..PROMPT_MAX).map(|_| id(chance)).collect());
    let (requests, gap) = (chance.between(6, 24), chance.pick(&[0, 1, 6]));
    let mut at_tick = 0;
    let mut asked = Vec::new();
    for number in 0..requests {
        at_tick += chance.below(gap + 1);
        let shared = chance.between(0, PROMPT_MAX - 1) as usize;
        let mut tokens = chance.pick(&[&bases[0], &bases[1], &bases[2]])[..shared].to_vec();
        tokens.extend((0..chance.scaled(1, 12)).map(|_| id(chance)));
        let submit = submit(chance, kinds, RequestId(number.into()), tokens, vocab);
        let grammar = submit.first_masked_token.map(|_| chance.below(3) as usize);
        let leaves = kinds.aborts && chance.chance_per_mille(300);
        let gone_at_tick = leaves.then(|| at_tick + chance.below(40));
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
    chance: &mut SimRng,
    kinds: OptionKinds,
    id: RequestId,
    tokens: Vec<Token>,
    vocab: u32,
) -> RequestSubmission {
    let masked = kinds.masks && chance.chance_per_mille(400);
    let ends = masked || kinds.stop_conditions && chance.chance_per_mille(700);
    let eos_ids = if ends { END_IDS.to_vec() } else { Vec::new() };
    let stops = if kinds.stop_conditions { chance.between(0, 3) } else { 0 };
    let stop_ids: Vec<Token> =
        (0..stops).map(|_| chance.below(u64::from(vocab)) as Token).collect();
    let mut sampling = sampling(chance, kinds, vocab);
    sampling.stop_token_ids = [&eos_ids[..], &stop_ids].concat();
    let scores_only = kinds.prompt_logprobs && chance.chance_per_mille(100);
    let max_tokens = if scores_only { 0 } else { chance.scaled(1, ANSWER_MAX) };
    assert!(tokens.len() as u32 + max_tokens <= MAX_MODEL_LEN);
    RequestSubmission {
        id,
        tokens,
        max_tokens,
        sampling,
        first_masked_token: masked.then(|| chance.pick(&[0, 0, 1, 5])),
        rng_key: chance.next_u64(),
        eos_ids,
        stop_ids,
        priority: if kinds.priorities { chance.pick(&[-3, 0, 0, 7]) } else { 0 },
        extra_keys: ExtraKeys::salted(
            (kinds.salts && chance.chance_per_mille(400)).then(|| "other".to_owned()),
        ),
        replica: None,
        block_keys: Vec::new(),
    }
}

fn sampling(chance: &mut SimRng, kinds: OptionKinds, vocab: u32) -> SamplingParams {
    let mut sampling = SamplingParams::greedy();
    let id = |chance: &mut SimRng| chance.below(u64::from(vocab)) as Token;
    if chance.chance_per_mille(600) {
        sampling.temperature = chance.pick(&[0.3, 0.8, 1.0, 1.7]);
    }
    if kinds.sampling_cuts {
        sampling.top_k = chance.pick(&[0, 1, 2, 20, 64, 10_000]);
        sampling.top_p = chance.pick(&[1.0, 0.95, 0.5, 0.01]);
        sampling.min_p = chance.pick(&[0.0, 0.0, 0.05, 0.9]);
    }
    if kinds.penalties {
        sampling.repetition_penalty = chance.pick(&[1.0, 1.2, 0.8]);
        sampling.frequency_penalty = chance.pick(&[0.0, 0.4, -0.4]);
        sampling.presence_penalty = chance.pick(&[0.0, 0.7, -0.7]);
    }
    if kinds.bias {
        let one = |chance: &mut SimRng| (id(chance), chance.pick(&[-100.0, -3.0, 3.0, 100.0]));
        sampling.logit_bias = (0..chance.between(0, 4)).map(|_| one(chance)).collect();
        sampling.logit_bias.sort_unstable_by_key(|(id, _)| *id);
        sampling.logit_bias.dedup_by_key(|(id, _)| *id);
    }
    if kinds.token_lists && chance.chance_per_mille(400) {
        sampling.allowed_token_ids =
            Some((0..vocab).filter(|_| chance.chance_per_mille(300)).collect());
    }
    if kinds.token_lists && chance.chance_per_mille(400) {
        let length = chance.between(1, 3);
        sampling.bad_words = (0..60).map(|_| (0..length).map(|_| id(chance)).collect()).collect();
    }
    if kinds.stop_conditions {
        sampling.min_tokens = chance.pick(&[0, 0, 1, 9]);
    }
    if kinds.logprobs && chance.chance_per_mille(500) {
        sampling.logprobs = Some(chance.pick(&[0, 1, 5, 20]));
    }
    if kinds.prompt_logprobs && chance.chance_per_mille(300) {
        sampling.prompt_logprobs = Some(chance.pick(&[0, 3]));
    }
    sampling
}
