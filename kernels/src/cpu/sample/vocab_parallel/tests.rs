//! Tests of vocab-parallel sampling: random requests are compared with sampling from whole rows; also the
//! number of exchanged words, and which rows are gathered whole.

#[path = "../../../../../tests/support/deadlines.rs"]
mod deadlines;

use std::sync::Mutex;
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::cpu::sample::rules::{LogitEdits, RandomSamplingParams, SamplingRules, TokenOccurrence};
use crate::cpu::sample::tests::{plain, row};
use deadlines::DeadlineBarrier;

/// Tolerance for log-probabilities. Vocab-parallel sampling adds the exponentials of a row shard by shard,
/// sampling from whole rows adds them in another order, so the sums differ by rounding.
const TOLERANCE: f32 = 1e-5;

/// Returns the vocabulary shards of all ranks, as a vocab-parallel LM head is split: every shard has the same
/// number of columns, a multiple of 64; columns after the end of the vocabulary are padding.
fn shards(vocab: usize, ranks: usize) -> Vec<VocabShard> {
    let cols = vocab.next_multiple_of(64 * ranks) / ranks;
    let shard = |rank: usize| {
        let (first, end) = ((rank * cols).min(vocab), ((rank + 1) * cols).min(vocab));
        VocabShard { first_id: first, ids: end - first, cols, vocab, ranks }
    };
    (0..ranks).map(shard).collect()
}

/// All-gather among ranks that are threads of one process.
struct InProcessGather {
    candidates: Vec<Mutex<Vec<u32>>>,
    barrier: DeadlineBarrier,
    /// Shapes (rows, columns) of the local matrices with which rank 0 called `gather`, in order.
    calls: Mutex<Vec<(usize, usize)>>,
}

impl InProcessGather {
    fn gather(&self, rank: usize, local: MatRef<'_>, mut all: MatMut<'_>) -> bool {
        let bits = |r: usize| -> Vec<u32> {
            match local.dtype() {
                device::DType::F32 => local.row::<f32>(r).iter().map(|x| x.to_bits()).collect(),
                _ => local.row::<i32>(r).iter().map(|x| *x as u32).collect(),
            }
        };
        *self.candidates[rank].lock().unwrap() = (0..local.rows()).flat_map(bits).collect();
        if rank == 0 {
            self.calls.lock().unwrap().push((local.rows(), local.cols()));
        }
        self.barrier.wait();
        let (rows, cols) = (all.rows(), all.cols());
        for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
            let of_rank = self.candidates[c / local.cols()].lock().unwrap();
            let word = of_rank[r * local.cols() + c % local.cols()];
            match local.dtype() {
                device::DType::F32 => all.row_mut::<f32>(r)[c] = f32::from_bits(word),
                _ => all.row_mut::<i32>(r)[c] = word as i32,
            }
        }
        self.barrier.wait();
        true
    }
}

/// Samples the rows on `size` ranks. Returns their results, which must be equal, and the shapes of the local
/// matrices that each rank sends in its all-gathers.
fn sample(
    l: &[Vec<f32>],
    size: usize,
    requests: &[SampleRequest<'_>],
) -> (Vec<RowSampleResult>, Vec<(usize, usize)>) {
    let gather = InProcessGather {
        candidates: (0..size).map(|_| Mutex::default()).collect(),
        barrier: DeadlineBarrier::new(size),
        calls: Mutex::default(),
    };
    let work = |rank: usize, shard: VocabShard| {
        let pool = ThreadPool::new(1 + rank % 2).unwrap();
        let mut local = vec![0.0_f32; l.len() * shard.cols]; // Padding columns have logit 0.
        for (row, local) in l.iter().zip(local.chunks_exact_mut(shard.cols)) {
            local[..shard.ids].copy_from_slice(&row[shard.first_id..][..shard.ids]);
        }
        let logits = MatRef::of(&local, l.len(), shard.cols).unwrap();
        let mut gather_fn = |local: MatRef<'_>, all: MatMut<'_>| gather.gather(rank, local, all);
        CpuSampler::new(2)
            .sample_vocab_parallel(&pool, logits, &shard, requests, &mut gather_fn)
            .unwrap()
    };
    let results: Vec<Vec<RowSampleResult>> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..).zip(shards(l[0].len(), size)).collect();
        let ranks = ranks.into_iter().map(|(rank, shard)| scope.spawn(move || work(rank, shard)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(results.iter().all(|of_rank| *of_rank == results[0]), "ranks differ: {results:?}");
    (results.into_iter().next().unwrap(), gather.calls.into_inner().unwrap())
}

/// Asserts that results are equal, except for the rounding of log-probabilities.
fn assert_same(actual: &[RowSampleResult], expected: &[RowSampleResult]) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        let (Ok(actual), Ok(expected)) = (actual, expected) else {
            assert_eq!(actual, expected);
            continue;
        };
        assert_eq!(actual.token, expected.token);
        let (Some(actual), Some(expected)) = (&actual.logprobs, &expected.logprobs) else {
            assert_eq!(actual.logprobs, expected.logprobs);
            continue;
        };
        assert_eq!((actual.rank, actual.top.len()), (expected.rank, expected.top.len()));
        assert!((actual.logprob - expected.logprob).abs() <= TOLERANCE, "{actual:?}, {expected:?}");
        for (a, b) in actual.top.iter().zip(&expected.top) {
            assert!(a.0 == b.0 && (a.1 - b.1).abs() <= TOLERANCE, "{actual:?}, {expected:?}");
        }
    }
}

fn sample_full_rows(l: &[Vec<f32>], requests: &[SampleRequest<'_>]) -> Vec<RowSampleResult> {
    let mut scratch = RowScratch::default();
    l.iter().zip(requests).map(|(l, row)| super::super::sample_row(l, row, &mut scratch)).collect()
}

fn check(l: &[Vec<f32>], requests: &[SampleRequest<'_>]) {
    let expected = sample_full_rows(l, requests);
    for size in [2, 3, 4] {
        assert_same(&sample(l, size, requests).0, &expected);
    }
}

/// Random logit edits of a request.
#[derive(Debug, Clone)]
struct RandomLogitEdits {
    allowed: Option<Vec<u32>>,
    banned: Vec<u32>,
    bias: Vec<(u32, f32)>,
    seen: Vec<TokenOccurrence>,
    penalties: [f32; 3],
}

impl RandomLogitEdits {
    fn edits(&self) -> LogitEdits<'_> {
        let [repetition, frequency, presence] = self.penalties;
        LogitEdits {
            allowed: self.allowed.as_deref(),
            banned: &self.banned,
            bias: &self.bias,
            seen: &self.seen,
            repetition,
            frequency,
            presence,
        }
    }
}

prop_compose! {
    /// Random logit edits of token ids, some of which are after the end of the vocabulary.
    fn changes()(
        allowed in prop::option::weighted(0.2, prop::collection::vec(0_u32..2100, 0..60)),
        banned in prop::collection::vec(0_u32..2100, 0..4),
        bias in prop::collection::vec((0_u32..2100, -9.0_f32..9.0), 0..4),
        seen in prop::collection::btree_map(0_u32..2100, 0_u32..4, 0..30),
        penalties in prop_oneof![Just([1.0_f32, 0.0, 0.0]), Just([1.3, 0.4, 0.2])],
    ) -> RandomLogitEdits {
        let seen = seen.into_iter().map(|(id, count)| TokenOccurrence { id, count }).collect();
        RandomLogitEdits { allowed, banned, bias, seen, penalties }
    }
}

prop_compose! {
    fn draws()(
        temperature in prop_oneof![Just(1.0_f32), 0.05_f32..3.0],
        min_p in prop_oneof![Just(0.0_f32), Just(0.0_f32), 0.0001_f32..1.0],
        top_k in prop_oneof![Just(0_usize), Just(0_usize), 1_usize..70, 1_usize..2100],
        top_p in prop_oneof![Just(1.0_f32), 0.01_f32..1.0],
        key in any::<u64>(),
    ) -> RandomSamplingParams {
        RandomSamplingParams { temperature, min_p, top_k, top_p, ..plain(key, 3) }
    }
}

/// Whether rounding may move a token across the cutoff of a filter: such cases are skipped.
fn is_near_a_cutoff(l: &[f32], changes: &RandomLogitEdits, d: &RandomSamplingParams) -> bool {
    let with_factor = |f: f32| {
        let cut = |p: f32| if p == 0.0 || p >= 1.0 { p } else { p * f };
        let d = RandomSamplingParams { min_p: cut(d.min_p), top_p: cut(d.top_p), ..*d };
        let rules = SamplingRules { edits: changes.edits(), draw: Some(d) };
        let row = SampleRequest { choice: SampleOrScore::Sample(rules), logprobs: None };
        sample_full_rows(&[l.to_vec()], &[row])
    };
    with_factor(1.0 - 1e-5) != with_factor(1.0 + 1e-5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn vocab_parallel_matches_single_rank(
        v in prop_oneof![1_usize..2000, 1000_usize..2000],
        seed in 0_u64..1 << 40,
        scale in prop_oneof![Just(1.0_f32), Just(3.0_f32), Just(0.1_f32)],
        coarse in any::<bool>(),
        requests in prop::collection::vec(
            (
                changes(),
                prop::option::weighted(0.8, draws()),
                prop::option::of(prop_oneof![0_usize..21, Just(usize::MAX)]),
                prop::option::weighted(0.15, 0_u32..2000),
                any::<bool>(),
            ),
            1..5,
        ),
    ) {
        let like = |x: f32| if coarse { (x * scale).round() + 0.0 } else { x * scale };
        let rows = |i: usize| row(v, seed + i as u64).into_iter().map(like).collect();
        let l: Vec<Vec<f32>> = (0..requests.len()).map(rows).collect();
        let off = RandomLogitEdits {
            allowed: None, banned: vec![], bias: vec![], seen: vec![], penalties: [1.0, 0.0, 0.0],
        };
        let requests: Vec<_> = requests.into_iter().map(|(changes, draw, top, known, plain)| {
            (if plain { off.clone() } else { changes }, draw, top, known)
        }).collect();
        for (l, (changes, draw, _, _)) in l.iter().zip(&requests) {
            prop_assume!(draw.is_none_or(|draw| !is_near_a_cutoff(l, changes, &draw)));
        }
        let requests: Vec<SampleRequest<'_>> = requests.iter().map(|(changes, draw, top, known)| {
            let choice = match known {
                Some(id) => SampleOrScore::Score(*id % v as u32),
                None => SampleOrScore::Sample(SamplingRules { edits: changes.edits(), draw: *draw }),
            };
            SampleRequest { choice, logprobs: *top }
        }).collect();
        check(&l, &requests);
    }
}

fn greedy(top: Option<usize>) -> SampleRequest<'static> {
    let rules = SamplingRules { edits: LogitEdits::default(), draw: None };
    SampleRequest { choice: SampleOrScore::Sample(rules), logprobs: top }
}

fn random(draw: RandomSamplingParams) -> SampleRequest<'static> {
    let rules = SamplingRules { edits: LogitEdits::default(), draw: Some(draw) };
    SampleRequest { choice: SampleOrScore::Sample(rules), logprobs: None }
}

#[test]
fn ties_select_the_lowest_id_and_never_padding() {
    // With 4 ranks, the third shard has 2 token ids and the last shard has none. All logits are negative, so
    // they are below the logits of padding columns (0).
    let mut l = vec![-5.0_f32; 130];
    check(&[l.clone()], &[greedy(Some(3))]);
    for at in [129, 128, 127, 64, 63] {
        l[at] = -1.0;
        let results = sample(&[l.clone()], 4, &[greedy(None)]).0;
        assert_eq!(results[0].as_ref().unwrap().token, at as u32);
    }
}

#[test]
fn non_finite_and_masked_rows_fail_alone() {
    let mut l: Vec<Vec<f32>> = (0..3).map(|i| row(1000, i)).collect();
    l[1][777] = f32::NAN;
    let rules = SamplingRules {
        edits: LogitEdits { allowed: Some(&[]), ..LogitEdits::default() },
        draw: None,
    };
    let nothing = SampleRequest { choice: SampleOrScore::Sample(rules), logprobs: Some(2) };
    for size in [2, 4] {
        let requests =
            [greedy(Some(2)), random(RandomSamplingParams { top_p: 0.9, ..plain(1, 1) }), nothing];
        let results = sample(&l, size, &requests).0;
        assert!(results[0].is_ok());
        assert_eq!(results[1..], [Err(SampleError::NonFinite), Err(SampleError::AllMasked)]);
    }
}

/// Samples one row of 151,936 logits on two ranks; returns the number of words that each rank sends in each
/// all-gather.
fn words(l: Vec<f32>, row: SampleRequest<'_>) -> Vec<usize> {
    let l = [l];
    let (actual, calls) = sample(&l, 2, &[row]);
    assert_same(&actual, &sample_full_rows(&l, &[row]));
    calls.into_iter().map(|(rows, cols)| rows * cols).collect()
}

#[test]
fn rows_gather_only_what_sampling_needs() {
    const SHARD: usize = 75_968;
    let l = row(2 * SHARD, 11);
    let peaked: Vec<f32> = l.iter().map(|x| 2.0 * x).collect();
    let flat: Vec<f32> = l.iter().map(|x| 0.1 * x).collect();
    let draw = plain(5, 2);
    assert_eq!(words(l.clone(), greedy(None)), [3]);
    assert_eq!(words(l.clone(), random(draw)), [3]);
    assert_eq!(words(l.clone(), greedy(Some(0))), [7], "a greedy token has rank 1 without a count");
    assert_eq!(words(l.clone(), greedy(Some(20))), [47]);
    let known = SampleRequest { choice: SampleOrScore::Score(9), logprobs: Some(1) };
    assert_eq!(words(l.clone(), known), [8, 1]);
    assert_eq!(words(l.clone(), SampleRequest { logprobs: Some(5), ..random(draw) }), [17, 1]);
    let top_k = RandomSamplingParams { top_k: 50, ..draw };
    assert_eq!(words(flat.clone(), random(top_k)), [101]);
    assert_eq!(
        words(flat.clone(), random(RandomSamplingParams { top_p: 0.9, min_p: 0.01, ..top_k })),
        [101]
    );
    let top_p = random(RandomSamplingParams { top_p: 0.9, ..draw });
    assert_eq!(words(peaked.clone(), top_p), [259]);
    assert_eq!(
        words(flat.clone(), top_p),
        [259, SHARD],
        "the cutoff is after the 128 candidates of a rank"
    );
    let min_p = random(RandomSamplingParams { min_p: 0.1, ..draw });
    assert_eq!(words(peaked, min_p), [257]);
    assert_eq!(words(flat.clone(), min_p), [257, SHARD]);
    let all = SampleRequest { logprobs: Some(usize::MAX), ..greedy(None) };
    assert_eq!(words(flat, all), [SHARD], "as many words as the row has logits");
}

#[test]
fn rows_of_a_batch_share_gathers() {
    let l: Vec<Vec<f32>> = (0..4).map(|i| row(4096, i).iter().map(|x| 0.1 * x).collect()).collect();
    let top_p_row = random(RandomSamplingParams { top_p: 0.9, ..plain(1, 1) });
    let requests = [
        greedy(None),
        top_p_row,
        SampleRequest { logprobs: Some(2), ..top_p_row },
        greedy(Some(1)),
    ];
    let (actual, calls) = sample(&l, 4, &requests);
    assert_same(&actual, &sample_full_rows(&l, &requests));
    let first = 3 + (1 + 2 * 128 + 2) + (1 + 3 * 128 + 2 + 7) + (1 + 3 + 5);
    assert_eq!(calls, [(1, first), (2, 1024)], "a row that is gathered whole needs no rank count");
}

#[test]
fn failed_rank_fails_the_step() {
    let (l, pool) = (row(128, 1), ThreadPool::new(1).unwrap());
    let shard = VocabShard { first_id: 0, ids: 128, cols: 128, vocab: 256, ranks: 2 };
    let logits = MatRef::of(&l, 1, 128).unwrap();
    let results = CpuSampler::new(1).sample_vocab_parallel(
        &pool,
        logits,
        &shard,
        &[greedy(None)],
        &mut |_, _| false,
    );
    assert_eq!(results, Err(DeviceError::PeerRanksFailed));
}
