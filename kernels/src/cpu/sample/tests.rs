//! Tests every sampling parameter against a naive f64 reference that sorts the logits, and random sampling
//! against the softmax distribution.

use super::*;
use crate::cpu::sample::rules::{
    LogitEdits, RandomSamplingParams, SampleError, SamplingRules, TokenOccurrence,
};
use proptest::prelude::*;

/// A row of `v` logits with a realistic spread, different for each `seed`.
pub(super) fn row(v: usize, seed: u64) -> Vec<f32> {
    let unit = |w: u32| (w >> 8) as f32 / 16_777_216.0;
    (0..v)
        .map(|i| {
            let [a, b, c, d] = philox4x32_10(seed, [i as u32, 7, 7, 7]).map(unit);
            3.0 * (a + b + c + d - 2.0) + if d > 0.99 { 6.0 * c } else { 0.0 }
        })
        .collect()
}

pub(super) fn plain(key: u64, position: u32) -> RandomSamplingParams {
    RandomSamplingParams { temperature: 1.0, min_p: 0.0, top_k: 0, top_p: 1.0, key, position }
}

fn sample_one(l: &[f32], rules: &SamplingRules<'_>) -> Result<u32, SampleError> {
    sample_token(l, rules, &mut RowScratch::default())
}

fn drawn(l: &[f32], draw: RandomSamplingParams) -> u32 {
    sample_one(l, &SamplingRules { edits: LogitEdits::default(), draw: Some(draw) }).unwrap()
}

/// Reference for the filters: returns the ids that they keep, by sorting the logits.
pub(super) fn kept(l: &[f32], d: &RandomSamplingParams) -> Vec<u32> {
    let scaled: Vec<f32> = l.iter().map(|x| x * d.temperature.recip()).collect();
    let mut ids: Vec<u32> = (0..l.len() as u32).filter(|&i| l[i as usize] > f32::MIN).collect();
    ids.sort_by(|&a, &b| scaled[b as usize].total_cmp(&scaled[a as usize]).then(a.cmp(&b)));
    let best = scaled[ids[0] as usize];
    let p = |id: u32| f64::from(scaled[id as usize] - best).exp();
    if d.min_p > 0.0 {
        ids = ids.iter().copied().filter(|&id| p(id) >= f64::from(d.min_p)).collect();
    }
    if d.top_k > 0 {
        ids.truncate(d.top_k);
    }
    if d.top_p < 1.0 {
        let total: f64 = ids.iter().map(|&id| p(id)).sum();
        let mut sum = 0.0;
        let reached = ids.iter().position(|&id| {
            sum += p(id);
            sum >= total * f64::from(d.top_p)
        });
        ids.truncate(reached.map_or(ids.len(), |i| i + 1));
    }
    ids
}

/// Reference for random sampling: adds noise to the logit of every kept id, then takes the argmax.
fn naive_draw(l: &[f32], d: &RandomSamplingParams) -> u32 {
    let value = |id: u32| {
        let words = philox4x32_10(d.key, [id / 4, DRAW_TOKEN, d.position, 0]);
        l[id as usize] * d.temperature.recip() + gumbel(words[id as usize % 4])
    };
    let better = |a: u32, b: u32| value(b) < value(a) || (value(a) == value(b) && a < b);
    kept(l, d).into_iter().reduce(|a, b| if better(b, a) { b } else { a }).unwrap()
}

#[test]
fn philox_matches_reference_vectors() {
    let zero = philox4x32_10(0, [0; 4]);
    assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    let seeded = philox4x32_10(0x57e1_faba_6510_7204, [0, 0, 7, 0]);
    assert_eq!(seeded, [0xde75_1995, 0xc136_19a3, 0x8301_e08e, 0x35fa_3925]);
}

#[test]
fn noise_is_finite_and_decreases_with_the_word() {
    let words = [0, 1, 1000, 1 << 20, 1 << 31, u32::MAX - 300, u32::MAX];
    let noise = words.map(gumbel);
    assert!(noise.iter().all(|g| g.is_finite()), "{noise:?}");
    assert!(noise.windows(2).all(|w| w[0] >= w[1]), "{noise:?}");
}

#[test]
fn greedy_takes_the_lowest_id_of_the_largest_logits() {
    let greedy = SamplingRules { edits: LogitEdits::default(), draw: None };
    for v in [1, 63, 64, 65, 1000, 4096] {
        let mut l = row(v, v as u64);
        let best = l.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(sample_one(&l, &greedy), Ok(l.iter().position(|&x| x == best).unwrap() as u32));
        l[v / 2] = 1e4;
        l[v - 1] = 1e4;
        assert_eq!(sample_one(&l, &greedy), Ok((v / 2) as u32));
    }
}

#[test]
fn non_finite_logits_are_rejected_anywhere() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 63, 64, 129, 199] {
            let mut l = row(200, 1);
            l[at] = bad;
            for draw in [None, Some(plain(1, 1))] {
                let rules = SamplingRules { edits: LogitEdits::default(), draw };
                assert_eq!(sample_one(&l, &rules), Err(SampleError::NonFinite));
            }
            assert_eq!(logprobs(&l, 0, 1, &mut RowScratch::default()), Err(SampleError::NonFinite));
        }
    }
}

#[test]
fn edits_apply_in_order() {
    let l = [1.0, 4.0, -2.0, 3.0, 0.5];
    let check = |edits: LogitEdits<'_>, expected: Result<u32, SampleError>| {
        assert_eq!(sample_one(&l, &SamplingRules { edits, draw: None }), expected, "{edits:?}");
        let draw = Some(RandomSamplingParams { temperature: 1e-4, ..plain(3, 5) });
        assert_eq!(sample_one(&l, &SamplingRules { edits, draw }), expected, "drawn, {edits:?}");
    };
    let off = LogitEdits::default();
    check(off, Ok(1));
    check(LogitEdits { allowed: Some(&[0, 2, 99]), ..off }, Ok(0));
    check(LogitEdits { allowed: Some(&[]), ..off }, Err(SampleError::AllMasked));
    check(LogitEdits { banned: &[1, 99], ..off }, Ok(3));
    check(LogitEdits { banned: &[1], allowed: Some(&[1]), ..off }, Err(SampleError::AllMasked));
    check(LogitEdits { banned: &[1], bias: &[(1, 100.0), (4, 3.0)], ..off }, Ok(4));
    let seen = [
        TokenOccurrence { id: 1, count: 0 },
        TokenOccurrence { id: 2, count: 2 },
        TokenOccurrence { id: 3, count: 1 },
    ];
    check(LogitEdits { seen: &seen, repetition: 1.2, ..off }, Ok(1)); // 4/1.2 against 3/1.2
    check(LogitEdits { seen: &seen[..1], repetition: 1.5, ..off }, Ok(3)); // 4/1.5 < 3
    check(LogitEdits { seen: &seen[..1], frequency: 9.0, presence: 9.0, ..off }, Ok(1)); // not output
    let bias = [(2, 9.0)]; // -2 + 9 = 7
    check(LogitEdits { bias: &bias, seen: &seen, frequency: 2.0, ..off }, Ok(1)); // 7 - 4 < 4
    check(LogitEdits { bias: &bias, seen: &seen, presence: 2.0, ..off }, Ok(2)); // 7 - 2 > 4
    let low = [(1, -9.0), (3, -9.0), (0, -9.0), (4, -9.0)]; // 2 stays at -2, the best
    check(LogitEdits { bias: &low, ..off }, Ok(2));
    check(LogitEdits { bias: &low, seen: &seen[1..2], repetition: 3.0, ..off }, Ok(1)); // -6 < -5
}

#[test]
fn frequencies_follow_the_softmax() {
    let l: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 / 25.0).collect();
    for (temperature, draws) in [(1.0, 200_000_u32), (0.6, 200_000), (1.7, 200_000)] {
        let d = RandomSamplingParams { temperature, ..plain(0x1234_5678_9abc_def0, 0) };
        let mut scratch = RowScratch::default();
        let mut counts = vec![0_u32; l.len()];
        for position in 0..draws {
            let draw = Some(RandomSamplingParams { position, ..d });
            let rules = SamplingRules { edits: LogitEdits::default(), draw };
            counts[sample_token(&l, &rules, &mut scratch).unwrap() as usize] += 1;
        }
        let p: Vec<f64> = l.iter().map(|x| f64::from(x / temperature).exp()).collect();
        let total: f64 = p.iter().sum();
        let chi2: f64 = counts
            .iter()
            .zip(&p)
            .map(|(&n, p)| {
                let expected = f64::from(draws) * p / total;
                (f64::from(n) - expected).powi(2) / expected
            })
            .sum();
        // The χ² statistic of 100 tokens has 99 degrees of freedom, so mean 99 and standard deviation 14. The
        // samples depend on the key only, so the test is deterministic.
        assert!(chi2 < 155.0, "temperature {temperature}: chi2 {chi2}");
    }
}

#[test]
fn sampling_noise_depends_on_key_and_position_only() {
    let l = row(5000, 3);
    let mut used = RowScratch::default();
    let rules = |key, position| SamplingRules {
        edits: LogitEdits::default(),
        draw: Some(RandomSamplingParams { top_p: 0.9, ..plain(key, position) }),
    };
    for position in 0..50 {
        let _ = sample_token(&row(777, 9), &rules(1, 1), &mut used);
        let again = sample_token(&l, &rules(42, position), &mut used);
        assert_eq!(again, sample_one(&l, &rules(42, position)));
    }
    let distinct =
        |of: &dyn Fn(u32) -> u32| (0..40).map(of).collect::<std::collections::BTreeSet<_>>().len();
    assert!(distinct(&|i| drawn(&l, plain(u64::from(i), 1))) > 10);
    assert!(distinct(&|i| drawn(&l, plain(1, i))) > 10);
}

#[test]
fn large_logits_keep_all_candidates_despite_rounding() {
    let l: Vec<f32> = (0..3000).map(|i| 1.0e6 + (i % 3) as f32 * 0.0625).collect();
    for position in 0..200 {
        let d = plain(9, position);
        assert_eq!(drawn(&l, d), naive_draw(&l, &d), "position {position}");
    }
}

#[test]
fn logprobs_use_the_raw_logits() {
    let mut l = row(1000, 8);
    l[10] = 9.5;
    l[20] = 9.5;
    let total: f64 = l.iter().map(|&x| f64::from(x).exp()).sum();
    let expected = |id: usize| (f64::from(l[id]) - total.ln()) as f32;
    let mut ids: Vec<usize> = (0..l.len()).collect();
    ids.sort_by(|&a, &b| l[b].total_cmp(&l[a]).then(a.cmp(&b)));
    for top in [0, 1, 5, 20, 1000, usize::MAX] {
        for rank in [0, 1, 2, 500, 999] {
            let id = ids[rank];
            let got = logprobs(&l, id as u32, top, &mut RowScratch::default()).unwrap();
            assert_eq!(got.rank as usize, rank + 1);
            assert!((got.logprob - expected(id)).abs() < 2e-6);
            assert_eq!(got.top.len(), top.min(1000));
            for (&(id, logprob), &expected_id) in got.top.iter().zip(&ids) {
                assert_eq!(id as usize, expected_id);
                assert!((logprob - expected(expected_id)).abs() < 2e-6);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn filters_agree_with_sorting(
        v in 1_usize..1500,
        seed in 0_u64..1 << 40,
        temperature in prop_oneof![Just(1.0_f32), 0.05_f32..3.0],
        min_p in prop_oneof![Just(0.0_f32), 0.001_f32..1.0],
        top_k in prop_oneof![Just(0_usize), 1_usize..8, 1_usize..1600],
        top_p in prop_oneof![Just(1.0_f32), 0.01_f32..1.0],
        coarse in any::<bool>(),
    ) {
        let mut l = row(v, seed);
        if coarse {
            l = l.iter().map(|x| x.round() + 0.0).collect(); // many ties, no -0
        }
        let d = RandomSamplingParams { temperature, min_p, top_k, top_p, ..plain(seed, v as u32) };
        // Rounding may move an id across the cutoff of min-p or top-p, in the sampler or in the reference:
        // such cases are skipped.
        let nudge = |f: f32| {
            let cut = |p: f32| if p == 0.0 || p >= 1.0 { p } else { p * f };
            kept(&l, &RandomSamplingParams { min_p: cut(min_p), top_p: cut(top_p), ..d })
        };
        prop_assume!(nudge(1.0 - 1e-5) == nudge(1.0 + 1e-5));
        for position in 0..4 {
            let d = RandomSamplingParams { position, ..d };
            prop_assert_eq!(drawn(&l, d), naive_draw(&l, &d));
        }
    }
}

#[test]
#[ignore = "measures times: `just rows`"]
fn time_rows_of_a_real_vocabulary() {
    let l = row(151_936, 11);
    let flat: Vec<f32> = l.iter().map(|x| x * 0.1).collect();
    let mut scratch = RowScratch::default();
    let mut time = |name: &str, f: &mut dyn FnMut(&mut RowScratch, u32)| {
        f(&mut scratch, 0);
        let start = std::time::Instant::now();
        (0..200).for_each(|i| f(&mut scratch, i));
        println!("{name:32} {:>8.1} us", start.elapsed().as_secs_f64() * 1e6 / 200.0);
    };
    for (kind, l) in [("peaked", &l), ("flat", &flat)] {
        let mut draws = |name: &str, d: RandomSamplingParams| {
            time(&format!("{name}, {kind}"), &mut |s, i| {
                let rules = SamplingRules {
                    edits: LogitEdits::default(),
                    draw: Some(RandomSamplingParams { position: i, ..d }),
                };
                std::hint::black_box(sample_token(l, &rules, s).unwrap());
            });
        };
        draws("temperature", plain(5, 0));
        draws("top_p 0.95", RandomSamplingParams { top_p: 0.95, ..plain(5, 0) });
        draws("top_k 50", RandomSamplingParams { top_k: 50, ..plain(5, 0) });
        draws(
            "top_k 20, top_p 0.95",
            RandomSamplingParams { top_k: 20, top_p: 0.95, ..plain(5, 0) },
        );
        draws("min_p 0.05", RandomSamplingParams { min_p: 0.05, ..plain(5, 0) });
        time(&format!("greedy, {kind}"), &mut |s, _| {
            let rules = SamplingRules { edits: LogitEdits::default(), draw: None };
            std::hint::black_box(sample_token(l, &rules, s).unwrap());
        });
        time(&format!("logprobs 20, {kind}"), &mut |s, _| {
            std::hint::black_box(logprobs(l, 77, 20, s).unwrap());
        });
    }
}

#[test]
fn rows_do_not_depend_on_batch_or_threads() {
    let (n, v) = (37, 3000);
    let mut l: Vec<f32> = (0..n).flat_map(|r| row(v, r as u64)).collect();
    l[5 * v + 100] = f32::NAN;
    let allowed = [7, 8, 9];
    let request = |r: usize| SampleRequest {
        choice: match r % 4 {
            0 => SampleOrScore::Score(r as u32),
            1 => SampleOrScore::Sample(SamplingRules { edits: LogitEdits::default(), draw: None }),
            _ => SampleOrScore::Sample(SamplingRules {
                edits: LogitEdits {
                    allowed: (r % 4 == 3).then_some(&allowed),
                    ..LogitEdits::default()
                },
                draw: Some(RandomSamplingParams { top_p: 0.9, ..plain(r as u64, 4) }),
            }),
        },
        logprobs: (r.is_multiple_of(3) || r.is_multiple_of(4)).then_some(r % 7),
    };
    let rows: Vec<_> = (0..n).map(request).collect();
    let all = |threads| {
        let pool = ThreadPool::new(threads).unwrap();
        CpuSampler::new(threads).sample_rows(&pool, MatRef::of(&l, n, v).unwrap(), &rows)
    };
    let expected: Vec<_> = (0..n)
        .map(|r| sample_row(&l[r * v..][..v], &rows[r], &mut RowScratch::default()))
        .collect();
    assert_eq!(expected[5], Err(SampleError::NonFinite));
    assert_eq!(expected.iter().filter(|result| result.is_err()).count(), 1);
    for threads in [1, 2, 5] {
        assert_eq!(all(threads), expected, "{threads} threads");
    }
}
