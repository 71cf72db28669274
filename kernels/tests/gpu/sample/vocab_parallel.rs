//! Vocab-parallel sampling: ranks that each have one vocabulary shard of each row get the results of full
//! rows by an all-gather of a few 32-bit words per row.

use device::{DeviceError, MatMut, MatRef};
use kernels::gpu::GpuBackend;
use kernels::step::{DraftVerification, RULE_MASKED, SequenceSamplingParams, StagedLogitsRow};
use kernels::{KernelBackend, RowGather, VocabParallelSampling, VocabParallelSupport, VocabShard};

use super::{SampleCase, SampleResults, chosen, plain, random_params, row};
use crate::support::{DeviceArray, RandomNumbers, S, devices};

/// Returns the vocabulary shards of all ranks. All have equal numbers of columns; the last ranks have token
/// ids for only some of their columns.
fn shards_of(vocab: usize, ranks: usize) -> Vec<VocabShard> {
    let cols = vocab.div_ceil(ranks).next_multiple_of(64);
    let shard = |rank: usize| {
        let first = (rank * cols).min(vocab);
        VocabShard { first_id: first, ids: (vocab - first).min(cols), cols, vocab, ranks }
    };
    (0..ranks).map(shard).collect()
}

/// Returns the largest top-k that is supported with sharded rows.
fn top_k_of(shard: &VocabShard) -> usize {
    match KernelBackend::from(devices().remove(0)).vocab_parallel_support(shard) {
        VocabParallelSupport::TopK(max_top_k) => max_top_k,
        other => panic!("{other:?} of {shard:?}"),
    }
}

/// Returns random sampling parameters that are supported with sharded rows.
fn shard_params(numbers: &mut RandomNumbers, max_top_k: usize) -> SequenceSamplingParams {
    let params = random_params(numbers);
    match numbers.below(3) {
        0 => SequenceSamplingParams { top_k: 0, top_p: 1.0, min_p: 0.0, ..params },
        1 => SequenceSamplingParams { top_k: max_top_k as i32, ..params },
        _ => SequenceSamplingParams { top_k: 1 + numbers.below(max_top_k) as i32, ..params },
    }
}

fn copy(device: &GpuBackend, to: MatMut<'_>, from: MatRef<'_>, first: &DeviceArray<i32>) {
    device.launch(&S, RowGather { y: to, x: from, rows: first.mat() }).unwrap();
}

impl SampleCase {
    /// Returns a shard's columns of all rows; columns after its ids are NaN.
    fn columns(&self, shard: &VocabShard) -> Vec<f32> {
        let rows = self.logits.chunks(self.vocabulary);
        let own = |row: &[f32]| {
            let mut own = row[shard.first_id..shard.first_id + shard.ids].to_vec();
            own.resize(shard.cols, f32::NAN);
            own
        };
        rows.flat_map(own).collect()
    }

    /// Returns the 32-bit words that the rank with shard `shard` contributes to the all-gather.
    fn exchanged_words(&self, device: &GpuBackend, shard: &VocabShard) -> Vec<i32> {
        let first = DeviceArray::row(device, &[0]);
        let mut exchanged = Vec::new();
        self.sample_with(
            device,
            &self.columns(shard),
            false,
            |logits, stage, prepared, slots, outputs| {
                let mut gather = |own: MatRef<'_>, _: MatMut<'_>| {
                    let mut words = DeviceArray::<i32>::poisoned(device, 1, own.cols());
                    copy(device, words.mat_mut(), own, &first);
                    exchanged = words.read(device);
                    false
                };
                let result = device.launch(
                    &S,
                    VocabParallelSampling {
                        logits,
                        shard,
                        stage,
                        prepared,
                        slots,
                        outputs,
                        gather: &mut gather,
                    },
                );
                assert!(matches!(result, Err(DeviceError::PeerRanksFailed)), "{result:?}");
            },
        );
        exchanged
    }

    /// Returns the results of sampling on `ranks` ranks, after a check that they are equal on all ranks.
    fn vocab_parallel(&self, device: &GpuBackend, ranks: usize, captured: bool) -> SampleResults {
        let shards = shards_of(self.vocabulary, ranks);
        let words_of_ranks: Vec<i32> =
            shards.iter().flat_map(|shard| self.exchanged_words(device, shard)).collect();
        let (all, first) =
            (DeviceArray::row(device, &words_of_ranks), DeviceArray::row(device, &[0]));
        let rank_results = shards.iter().map(|shard| {
            self.sample_with(
                device,
                &self.columns(shard),
                captured,
                |logits, stage, prepared, slots, outputs| {
                    let mut gather = |own: MatRef<'_>, to: MatMut<'_>| {
                        assert_eq!(
                            (own.cols() * ranks, to.cols()),
                            (words_of_ranks.len(), words_of_ranks.len())
                        );
                        copy(device, to, all.mat(), &first);
                        true
                    };
                    device
                        .launch(
                            &S,
                            VocabParallelSampling {
                                logits,
                                shard,
                                stage,
                                prepared,
                                slots,
                                outputs,
                                gather: &mut gather,
                            },
                        )
                        .unwrap();
                },
            )
        });
        let rank_results: Vec<SampleResults> = rank_results.collect();
        let bits = |results: &SampleResults| {
            let SampleResults { sampled, newest, history, .. } = results;
            (sampled.clone(), newest.clone(), history.clone())
        };
        assert!(rank_results.iter().all(|results| bits(results) == bits(&rank_results[0])));
        rank_results.into_iter().next().unwrap()
    }

    /// Compares the results of every device on `ranks` ranks with the CPU's, which has full rows.
    fn check_vocab_parallel(&self, ranks: usize) {
        let expected = self.on_cpu();
        for device in devices() {
            let name = format!("{} of {ranks} on {}", self.vocabulary, device.arch());
            self.compare(&self.vocab_parallel(&device, ranks, false), &expected, &name);
        }
    }
}

#[test]
fn vocab_parallel_matches_full_rows() {
    for (vocabulary, ranks) in [(130, 2), (384, 2), (200, 3), (4500, 2), (6001, 3)] {
        let mut numbers = RandomNumbers::fresh((vocabulary * ranks) as u64);
        let max_top_k = top_k_of(&shards_of(vocabulary, ranks)[0]);
        let mut case = SampleCase::new(vocabulary, 1);
        for q in 0..30 {
            let mut params = shard_params(&mut numbers, max_top_k);
            let coarse = |x: &f32| if q % 3 == 0 { (x * 2.0).round() / 2.0 } else { *x };
            let logits: Vec<f32> = row(&mut numbers, vocabulary).iter().map(coarse).collect();
            let known_ids: Vec<i32> =
                (0..numbers.below(20)).map(|_| numbers.below(vocabulary) as i32).collect();
            let masked = numbers.below(4) == 0;
            params.flags |= if masked { RULE_MASKED } else { 0 };
            let mut logits_row = chosen(-1);
            if numbers.below(6) == 0 {
                logits_row.known_token = numbers.below(vocabulary) as i32;
            }
            if numbers.below(2) == 0 {
                let edits = numbers.below(300);
                (logits_row.edits_at, logits_row.edits) = (case.edits.len() as i32, edits as i32);
                case.add_random_edits(&mut numbers, edits, &known_ids);
            }
            if numbers.below(4) == 0 {
                case.mask_row(&mut numbers, &mut logits_row);
            }
            case.add_row(&logits, params, &known_ids, logits_row);
            if masked {
                (0..numbers.below(40)).for_each(|_| case.allow(numbers.below(vocabulary)));
            }
        }
        case.add_row(
            &vec![0.0; vocabulary],
            plain(),
            &[],
            StagedLogitsRow { token: -1, ..chosen(-1) },
        );
        case.check_vocab_parallel(ranks);
    }
}

/// Checks top-k with two ranks for logits whose most likely ids are all in the shard of rank 0, all in the
/// shard of rank 1, or in both shards, and for equal logits.
#[test]
fn vocab_parallel_top_k_finds_ids_in_any_shard() {
    let (vocabulary, ranks) = (9000, 2);
    let max_top_k = top_k_of(&shards_of(vocabulary, ranks)[0]);
    let mut numbers = RandomNumbers::fresh(5);
    let mut case = SampleCase::new(vocabulary, 1);
    let steep = |i: usize| -0.05 * i as f32;
    let first: Vec<f32> = (0..vocabulary).map(steep).collect();
    let last: Vec<f32> = (0..vocabulary).rev().map(steep).collect();
    let both: Vec<f32> = (0..vocabulary).map(|i| steep(i.min(vocabulary - 1 - i))).collect();
    let level = vec![0.25; vocabulary];
    let flat: Vec<f32> = row(&mut numbers, vocabulary).iter().map(|x| x * 0.1).collect();
    for logits in [&first, &last, &both, &level, &flat] {
        for (key, k) in (1..).zip([1, 2, max_top_k - 1, max_top_k]) {
            let drawn =
                SequenceSamplingParams { temperature: 1.0, top_k: k as i32, key, ..plain() };
            case.add_row(logits, drawn, &[], chosen(-1));
            case.add_row(logits, SequenceSamplingParams { top_p: 0.7, ..drawn }, &[], chosen(-1));
            case.add_row(
                logits,
                SequenceSamplingParams { top_p: 0.9, min_p: 0.3, ..drawn },
                &[],
                chosen(-1),
            );
        }
        case.add_row(logits, plain(), &[], chosen(-1));
        case.add_row(
            logits,
            SequenceSamplingParams { temperature: 1.0, key: 9, ..plain() },
            &[],
            chosen(-1),
        );
    }
    case.check_vocab_parallel(ranks);
}

#[test]
fn non_finite_and_masked_rows_fail_alone_on_all_ranks() {
    let vocabulary = 4100;
    let mut numbers = RandomNumbers::fresh(8);
    let good = row(&mut numbers, vocabulary);
    let mut case = SampleCase::new(vocabulary, 1);
    let drawn = SequenceSamplingParams { temperature: 1.0, top_k: 7, top_p: 0.5, ..plain() };
    for (at, strange) in [(0, f32::NAN), (4099, f32::INFINITY), (2111, f32::NEG_INFINITY)] {
        let mut logits = good.clone();
        logits[at] = strange;
        for params in [plain(), drawn, SequenceSamplingParams { temperature: 0.7, ..plain() }] {
            case.add_row(&logits, params, &[], chosen(-1));
        }
    }
    case.add_row(&good, SequenceSamplingParams { flags: RULE_MASKED, ..plain() }, &[], chosen(-1));
    case.add_row(&good, SequenceSamplingParams { flags: RULE_MASKED, ..drawn }, &[], chosen(-1));
    case.add_row(&good, drawn, &[], chosen(-1));
    case.check_vocab_parallel(2);
    case.check_vocab_parallel(3);
}

#[test]
fn captured_vocab_parallel_matches_eager() {
    let vocabulary = 2500;
    let max_top_k = top_k_of(&shards_of(vocabulary, 2)[0]);
    let mut numbers = RandomNumbers::fresh(23);
    let mut case = SampleCase::new(vocabulary, 1);
    for _ in 0..12 {
        let logits = row(&mut numbers, vocabulary);
        let params = shard_params(&mut numbers, max_top_k);
        case.add_row(&logits, params, &[3, 4, 5, 3], chosen(-1));
    }
    for device in devices() {
        let replayed = case.vocab_parallel(&device, 2, true);
        assert_eq!(replayed.sampled, case.vocab_parallel(&device, 2, false).sampled);
    }
}

/// Shards with fewer ids than the largest supported top-k contribute all of their ids.
#[test]
fn small_vocab_shards_are_gathered_whole() {
    let device = KernelBackend::from(devices().remove(0));
    let of = |cols, ranks| {
        let shard = VocabShard { first_id: 0, ids: cols, cols, vocab: cols * ranks, ranks };
        device.vocab_parallel_support(&shard)
    };
    assert_eq!([of(4, 2), of(64, 2), of(192, 2)], [0, 8, 24].map(in_shards));
    assert_eq!([of(75_968, 2), of(18_992, 8), of(9_536, 32)], [64, 64, 32].map(in_shards));
}

fn in_shards(max_top_k: usize) -> VocabParallelSupport {
    if max_top_k == 0 {
        VocabParallelSupport::Unsupported
    } else {
        VocabParallelSupport::TopK(max_top_k)
    }
}

#[test]
fn vocab_parallel_draft_verification_matches_the_cpu() {
    let mut numbers = RandomNumbers::fresh(6);
    let mut case =
        SampleCase { verification: DraftVerification::MatchSampled, ..SampleCase::new(2051, 1) };
    for r in 0..12 {
        let temperature = [0.0, 0.4][r % 2];
        let params =
            SequenceSamplingParams { temperature, top_k: 9, key: numbers.bits(), ..plain() };
        case.add_draft_rows(&mut numbers, params, r % 4);
    }
    for logits_row in &mut case.logits_rows {
        logits_row.top = -1;
    }
    case.check_vocab_parallel(2);
}
