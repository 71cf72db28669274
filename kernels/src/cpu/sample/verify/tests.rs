//! Tests of draft token verification: the outputs of decoding with draft tokens are compared with the exact
//! distribution of decoding without them, computed in f64.

use super::super::tests::{kept, plain, row};
use super::*;
use crate::cpu::sample::rules::{LogitEdits, TokenOccurrence};

/// Vocabulary size.
const V: usize = 6;
/// Number of tokens generated per run.
const LENGTH: usize = 3;
/// Number of runs, each with its own Philox key, in which the generated outputs are counted.
const RUNS: u64 = 120_000;
/// The only token of the prompt of each run.
const FIRST: u32 = 2;
/// `draw` word of the Philox counter for sampling draft tokens.
const DRAW_DRAFT: u32 = 3;

/// Sampling parameters of the requests of a test.
#[derive(Debug, Clone, Copy)]
struct TestSamplingParams {
    draw: RandomSamplingParams,
    banned: &'static [u32],
    bias: &'static [(u32, f32)],
    repetition: f32,
    frequency: f32,
    presence: f32,
}

impl TestSamplingParams {
    fn new(temperature: f32) -> Self {
        let draw = RandomSamplingParams { temperature, ..plain(0, 0) };
        Self { draw, banned: &[], bias: &[], repetition: 1.0, frequency: 0.0, presence: 0.0 }
    }

    /// Sampling parameters with every edit and filter that may change a logit or remove a token.
    fn strict() -> Self {
        let draw = RandomSamplingParams {
            temperature: 1.3,
            min_p: 0.02,
            top_k: 4,
            top_p: 0.95,
            ..plain(0, 0)
        };
        let (banned, bias) = (&[5], &[(1, 0.6)]);
        Self { draw, banned, bias, repetition: 1.2, frequency: 0.5, presence: 0.3 }
    }

    fn seen(&self, tokens: &[u32]) -> Vec<TokenOccurrence> {
        let count = |id: u32| tokens[1..].iter().filter(|&&other| other == id).count() as u32;
        let penalised = self.repetition != 1.0 || self.frequency != 0.0 || self.presence != 0.0;
        let seen = (0..V as u32).filter(|id| tokens.contains(id) && penalised);
        seen.map(|id| TokenOccurrence { id, count: count(id) }).collect()
    }

    fn rules<'a>(&self, key: u64, len: usize, seen: &'a [TokenOccurrence]) -> SamplingRules<'a> {
        let Self { banned, bias, repetition, frequency, presence, .. } = *self;
        let edits =
            LogitEdits { allowed: None, banned, bias, seen, repetition, frequency, presence };
        let greedy = self.draw.temperature < 1e-5;
        let draw =
            (!greedy).then_some(RandomSamplingParams { key, position: len as u32, ..self.draw });
        SamplingRules { edits, draw }
    }

    /// Probabilities, computed in f64, of the token after `tokens` when sampling without draft tokens.
    fn exact(&self, tokens: &[u32]) -> Vec<f64> {
        let mut l = target(tokens[tokens.len() - 1]);
        for &id in self.banned {
            l[id as usize] = f32::NEG_INFINITY;
        }
        for &(id, bias) in self.bias {
            l[id as usize] += bias;
        }
        for TokenOccurrence { id, count } in self.seen(tokens) {
            let x = &mut l[id as usize];
            *x = if *x > 0.0 { *x / self.repetition } else { *x * self.repetition };
            *x -= self.frequency * count as f32 + if count > 0 { self.presence } else { 0.0 };
        }
        let weight = |id: u32| (f64::from(l[id as usize]) / f64::from(self.draw.temperature)).exp();
        let ids = kept(&l, &self.draw);
        let total: f64 = ids.iter().map(|&id| weight(id)).sum();
        let p = |id: u32| if ids.contains(&id) { weight(id) / total } else { 0.0 };
        (0..V as u32).map(p).collect()
    }
}

/// Logits of the target model after token `last`.
fn target(last: u32) -> Vec<f32> {
    row(V, 40 + u64::from(last)).iter().map(|x| 0.6 * x).collect()
}

/// Probabilities of the draft model after token `last`: similar to those of the target model, but not equal.
fn proposed(last: u32) -> Vec<f32> {
    let noise = row(V, 90 + u64::from(last));
    let l: Vec<f32> = target(last).iter().zip(noise).map(|(x, n)| 0.7 * x + 0.35 * n).collect();
    let total: f32 = l.iter().map(|x| x.exp()).sum();
    l.iter().map(|x| x.exp() / total).collect()
}

/// How the draft tokens of a test are proposed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum TestProposalMode {
    /// Most likely token of the proposal distribution.
    Greedy,
    /// Token sampled from the proposal distribution.
    Drawn,
    /// Token sampled from the proposal distribution, but verified with a wrong residual, which subtracts the
    /// proposal probability of the next id.
    OffByOne,
}

/// Numbers of proposed and accepted draft tokens over many runs.
#[derive(Debug, Default)]
struct DraftCounts {
    drafted: u32,
    accepted: u32,
}

/// Proposes a draft token after `tokens`; returns it and the proposal distribution.
fn draft(tokens: &[u32], key: u64, proposer: TestProposalMode) -> (u32, Vec<f32>) {
    let q = proposed(tokens[tokens.len() - 1]);
    let position = tokens.len() as u32;
    let value = |id: u32| match proposer {
        TestProposalMode::Greedy => q[id as usize],
        _ => q[id as usize].ln() + gumbel(word(key, DRAW_DRAFT, id, position)),
    };
    let best = (0..V as u32).reduce(|a, b| if value(b) > value(a) { b } else { a });
    (best.unwrap(), q)
}

/// Runs one decoding step with `k` draft tokens; returns the tokens that follow `tokens`.
fn step(
    style: &TestSamplingParams,
    key: u64,
    tokens: &[u32],
    k: usize,
    proposer: TestProposalMode,
) -> Vec<u32> {
    let (mut draft_context, mut proposals) = (tokens.to_vec(), Vec::new());
    for _ in 0..k {
        let (id, q) = draft(&draft_context, key, proposer);
        draft_context.push(id);
        proposals.push((id, q));
    }
    let lengths = tokens.len()..=draft_context.len();
    let seen: Vec<_> = lengths.clone().map(|end| style.seen(&draft_context[..end])).collect();
    let rules = lengths.clone().zip(&seen).map(|(end, seen)| style.rules(key, end, seen));
    let rules: Vec<_> = rules.collect();
    let logits: Vec<f32> = lengths.flat_map(|end| target(draft_context[end - 1])).collect();
    let logits = MatRef::of(&logits, k + 1, V).unwrap();
    let drawn = proposer != TestProposalMode::Greedy;
    let drafts =
        proposals.iter().map(|(id, q)| DraftToken { id: *id, proposal: drawn.then_some(&q[..]) });
    let drafts: Vec<_> = drafts.collect();
    let mut scratch = RowScratch::default();
    let tokens = if proposer == TestProposalMode::OffByOne {
        let residual = |p: &[f32], q: &[f32], id: usize| p[id] - q[(id + 1) % q.len()];
        verify_by(logits, &rules, &drafts, residual, &mut scratch)
    } else {
        verify_rows(logits, &rules, &drafts, &mut scratch)
    };
    tokens.unwrap()
}

/// Runs one request; returns its first `LENGTH` generated tokens.
fn run(
    style: &TestSamplingParams,
    key: u64,
    k: usize,
    proposer: TestProposalMode,
    count: &mut DraftCounts,
) -> Vec<u32> {
    let mut tokens = vec![FIRST];
    while tokens.len() <= LENGTH {
        let new_tokens = step(style, key, &tokens, k, proposer);
        count.drafted += k as u32;
        count.accepted += new_tokens.len() as u32 - 1;
        tokens.extend(new_tokens);
    }
    tokens[1..=LENGTH].to_vec()
}

/// Returns the number of occurrences of each output over all runs, and the acceptance rate of draft tokens.
fn outputs(style: &TestSamplingParams, k: usize, proposer: TestProposalMode) -> (Vec<u32>, f64) {
    let (mut counts, mut count) = (vec![0; V.pow(LENGTH as u32)], DraftCounts::default());
    for key in 0..RUNS {
        let tokens = run(style, key * 0x9E37_79B9 + k as u64, k, proposer, &mut count);
        counts[tokens.iter().fold(0, |at, &id| at * V + id as usize)] += 1;
    }
    (counts, f64::from(count.accepted) / f64::from(count.drafted.max(1)))
}

/// Returns the expected number of occurrences of each output over all runs, from the probabilities of
/// [`TestSamplingParams::exact`].
fn expected(style: &TestSamplingParams) -> Vec<f64> {
    let mut p = vec![(vec![FIRST], 1.0)];
    for _ in 0..LENGTH {
        let extended = |(tokens, p): (Vec<u32>, f64)| {
            let next = style.exact(&tokens);
            let appended = move |id: usize| ([&tokens[..], &[id as u32]].concat(), p * next[id]);
            (0..V).map(appended).collect::<Vec<_>>()
        };
        p = p.into_iter().flat_map(extended).collect();
    }
    p.into_iter().map(|(_, p)| p * RUNS as f64).collect()
}

/// Returns by how many standard deviations the χ² statistic of `counts`, compared with `expected`, exceeds
/// its mean. Outputs with fewer than 10 expected occurrences are counted together.
fn excess(counts: &[u32], expected: &[f64]) -> f64 {
    let (mut chi2, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
    for (&n, &expected) in counts.iter().zip(expected) {
        let n = f64::from(n);
        if expected < 10.0 {
            rare = (rare.0 + n, rare.1 + expected);
        } else {
            chi2 += (n - expected).powi(2) / expected;
            cells += 1;
        }
    }
    assert!(rare.1 > 0.0 || rare.0 == 0.0, "{} outputs with probability 0", rare.0);
    if rare.1 >= 10.0 {
        chi2 += (rare.0 - rare.1).powi(2) / rare.1;
        cells += 1;
    }
    let freedom = f64::from(cells - 1);
    (chi2 - freedom) / (2.0 * freedom).sqrt()
}

/// Bound on the result of [`excess`] for a correct sampler, in standard deviations. Philox keys are fixed, so
/// the tests are deterministic.
const DEVIATIONS_MAX: f64 = 4.0;

#[test]
fn drafts_do_not_change_the_distribution() {
    for (name, style) in [
        ("0.7", TestSamplingParams::new(0.7)),
        ("1.0", TestSamplingParams::new(1.0)),
        ("strict", TestSamplingParams::strict()),
    ] {
        let expected = expected(&style);
        let without = excess(&outputs(&style, 0, TestProposalMode::Greedy).0, &expected);
        assert!(without < DEVIATIONS_MAX, "{name}: without drafts {without:.1}");
        for (k, proposer) in [
            (1, TestProposalMode::Drawn),
            (2, TestProposalMode::Drawn),
            (3, TestProposalMode::Drawn),
            (2, TestProposalMode::Greedy),
        ] {
            let (counts, rate) = outputs(&style, k, proposer);
            let excess = excess(&counts, &expected);
            println!(
                "{name}, {k} drafts, {proposer:?}: {rate:.2} accepted, {excess:.1} deviations"
            );
            assert!(
                (0.1..0.95).contains(&rate),
                "{name}, {k}, {proposer:?}: acceptance rate {rate:.2}"
            );
            assert!(excess < DEVIATIONS_MAX, "{name}, {k}, {proposer:?}: {excess:.1} deviations");
        }
    }
}

#[test]
fn wrong_residual_is_detected() {
    for temperature in [0.7, 1.0] {
        let style = TestSamplingParams::new(temperature);
        let (counts, _) = outputs(&style, 2, TestProposalMode::OffByOne);
        let excess = excess(&counts, &expected(&style));
        assert!(excess > 10.0 * DEVIATIONS_MAX, "at {temperature}: {excess:.1} deviations");
    }
}

#[test]
fn deterministic_drafts_do_not_change_tokens() {
    let greedy = TestSamplingParams::new(0.0);
    for style in [
        greedy,
        TestSamplingParams::new(0.7),
        TestSamplingParams::new(1.0),
        TestSamplingParams::strict(),
    ] {
        for key in 0..300 {
            let without =
                run(&style, key, 0, TestProposalMode::Greedy, &mut DraftCounts::default());
            for k in 1..=4 {
                let with =
                    run(&style, key, k, TestProposalMode::Greedy, &mut DraftCounts::default());
                assert_eq!(with, without, "{k} drafts, key {key}, {style:?}");
            }
        }
    }
    for key in 0..300 {
        let without = run(&greedy, key, 0, TestProposalMode::Drawn, &mut DraftCounts::default());
        let with = run(&greedy, key, 3, TestProposalMode::Drawn, &mut DraftCounts::default());
        assert_eq!(with, without, "greedy, drawn drafts, key {key}");
    }
}

#[test]
fn non_finite_logits_after_a_rejected_draft_are_ignored() {
    let style = TestSamplingParams::new(1.0);
    let rules: Vec<_> = (1..=2).map(|len| style.rules(1, len, &[])).collect();
    let mut logits = [target(FIRST), vec![f32::NAN; V]].concat();
    let verify = |logits: &[f32], id: u32| {
        let drafts = [DraftToken { id, proposal: None }];
        verify_rows(MatRef::of(logits, 2, V).unwrap(), &rules, &drafts, &mut RowScratch::default())
    };
    let token = sample_token(&logits[..V], &rules[0], &mut RowScratch::default()).unwrap();
    assert_eq!(verify(&logits, (token + 1) % V as u32), Ok(vec![token]));
    assert_eq!(verify(&logits, token), Err(SampleError::NonFinite));
    logits[0] = f32::INFINITY;
    assert_eq!(verify(&logits, (token + 1) % V as u32), Err(SampleError::NonFinite));
}

#[test]
fn drafts_outside_the_filters_are_rejected() {
    let style = TestSamplingParams::strict(); // It bans id 5.
    let q = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
    let mut scratch = RowScratch::default();
    for key in 0..200 {
        let seen = style.seen(&[FIRST]);
        let rules = [style.rules(key, 1, &seen), style.rules(key, 2, &seen)];
        let logits = [target(FIRST), target(5)].concat();
        let logits = MatRef::of(&logits, 2, V).unwrap();
        let drafts = [DraftToken { id: 5, proposal: Some(&q) }];
        let tokens = verify_rows(logits, &rules, &drafts, &mut scratch).unwrap();
        assert!(tokens.len() == 1 && style.exact(&[FIRST])[tokens[0] as usize] > 0.0, "{tokens:?}");
    }
}
