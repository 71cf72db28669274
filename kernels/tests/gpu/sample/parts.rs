//! Rows of which each rank has a part: the answers of one that has them whole, from a few words of each rank.

use kernels::hip::HipDevice;
use kernels::step::{Judge, RULE_MASKED, SeatRules, StageQuestion};
use kernels::{DeviceError, InParts, Kernels, Mat, MatMut, VocabPart};

use super::{Answered, Asked, any_rules, chosen, plain, row};
use crate::support::{Array, Numbers, S, devices};

/// The parts of a vocabulary, as ranks hold them: equal columns, and so many ids as are left.
fn parts_of(vocab: usize, ranks: usize) -> Vec<VocabPart> {
    let cols = vocab.div_ceil(ranks).next_multiple_of(64);
    let part = |rank: usize| {
        let first = (rank * cols).min(vocab);
        VocabPart { first, ids: (vocab - first).min(cols), cols, vocab, ranks }
    };
    (0..ranks).map(part).collect()
}

/// The largest top-k that is answered in parts.
fn top_k_of(part: &VocabPart) -> usize {
    match devices()[0].samples_in_parts(part) {
        InParts::TopK(most) => most,
        other => panic!("{other:?} of {part:?}"),
    }
}

/// Rules by chance that are answered in parts.
fn part_rules(numbers: &mut Numbers, most: usize) -> SeatRules {
    let rules = any_rules(numbers);
    match numbers.below(3) {
        0 => SeatRules { top_k: 0, top_p: 1.0, min_p: 0.0, ..rules },
        1 => SeatRules { top_k: most as i32, ..rules },
        _ => SeatRules { top_k: 1 + numbers.below(most) as i32, ..rules },
    }
}

fn copy(device: &HipDevice, to: MatMut<'_>, from: Mat<'_>, first: &Array<i32>) {
    device.gather_rows(&S, to, from, first.mat()).unwrap();
}

impl Asked {
    /// The columns of a part; what lies behind its ids is nobody's.
    fn columns(&self, part: &VocabPart) -> Vec<f32> {
        let rows = self.logits.chunks(self.vocabulary);
        let own = |row: &[f32]| {
            let mut own = row[part.first..part.first + part.ids].to_vec();
            own.resize(part.cols, f32::NAN);
            own
        };
        rows.flat_map(own).collect()
    }

    /// What a rank tells the others.
    fn told(&self, device: &HipDevice, part: &VocabPart) -> Vec<i32> {
        let first = Array::row(device, &[0]);
        let mut told = Vec::new();
        self.sampled(device, &self.columns(part), false, |logits, asked, seats, answers| {
            let mut gather = |own: Mat<'_>, _: MatMut<'_>| {
                let mut words = Array::<i32>::poisoned(device, 1, own.cols());
                copy(device, words.mat_mut(), own, &first);
                told = words.read(device);
                false
            };
            let answered =
                device.sample_parts(&S, (logits, part), asked, seats, answers, &mut gather);
            assert!(matches!(answered, Err(DeviceError::Peers)), "{answered:?}");
        });
        told
    }

    /// The answers of all ranks, which are one.
    fn in_parts(&self, device: &HipDevice, ranks: usize, recorded: bool) -> Answered {
        let parts = parts_of(self.vocabulary, ranks);
        let told: Vec<i32> = parts.iter().flat_map(|part| self.told(device, part)).collect();
        let (all, first) = (Array::row(device, &told), Array::row(device, &[0]));
        let answers = parts.iter().map(|part| {
            self.sampled(device, &self.columns(part), recorded, |logits, asked, seats, answers| {
                let mut gather = |own: Mat<'_>, to: MatMut<'_>| {
                    assert_eq!((own.cols() * ranks, to.cols()), (told.len(), told.len()));
                    copy(device, to, all.mat(), &first);
                    true
                };
                device
                    .sample_parts(&S, (logits, part), asked, seats, answers, &mut gather)
                    .unwrap();
            })
        });
        let answers: Vec<Answered> = answers.collect();
        let bits = |answered: &Answered| {
            let Answered { answers, newest, history, .. } = answered;
            (answers.clone(), newest.clone(), history.clone())
        };
        assert!(answers.iter().all(|of_rank| bits(of_rank) == bits(&answers[0])));
        answers.into_iter().next().unwrap()
    }

    /// Holds every device to the CPU, which has whole rows.
    fn check_parts(&self, ranks: usize) {
        let expected = self.on_cpu();
        for device in devices() {
            let name = format!("{} of {ranks} on {}", self.vocabulary, device.arch());
            self.compare(&self.in_parts(&device, ranks, false), &expected, &name);
        }
    }
}

#[test]
fn parts_answer_as_whole_rows_do() {
    for (vocabulary, ranks) in [(130, 2), (384, 2), (200, 3), (4500, 2), (6001, 3)] {
        let mut numbers = Numbers::fresh((vocabulary * ranks) as u64);
        let most = top_k_of(&parts_of(vocabulary, ranks)[0]);
        let mut asked = Asked::new(vocabulary, 1);
        for q in 0..30 {
            let mut rules = part_rules(&mut numbers, most);
            let coarse = |x: &f32| if q % 3 == 0 { (x * 2.0).round() / 2.0 } else { *x };
            let logits: Vec<f32> = row(&mut numbers, vocabulary).iter().map(coarse).collect();
            let known: Vec<i32> =
                (0..numbers.below(20)).map(|_| numbers.below(vocabulary) as i32).collect();
            let masked = numbers.below(4) == 0;
            rules.flags |= if masked { RULE_MASKED } else { 0 };
            let mut question = chosen(-1);
            if numbers.below(6) == 0 {
                question.known = numbers.below(vocabulary) as i32;
            }
            if numbers.below(2) == 0 {
                let edits = numbers.below(300);
                (question.edits_at, question.edits) = (asked.edits.len() as i32, edits as i32);
                asked.edit_by_chance(&mut numbers, edits, &known);
            }
            asked.ask(&logits, rules, &known, question);
            if masked {
                (0..numbers.below(40)).for_each(|_| asked.allow(numbers.below(vocabulary)));
            }
        }
        asked.ask(&vec![0.0; vocabulary], plain(), &[], StageQuestion { token: -1, ..chosen(-1) });
        asked.check_parts(ranks);
    }
}

/// The likeliest ids lie on one rank, on the other, on both; or all are equal.
#[test]
fn cuts_find_their_ids_wherever_they_lie() {
    let (vocabulary, ranks) = (9000, 2);
    let most = top_k_of(&parts_of(vocabulary, ranks)[0]);
    let mut numbers = Numbers::fresh(5);
    let mut asked = Asked::new(vocabulary, 1);
    let steep = |i: usize| -0.05 * i as f32;
    let first: Vec<f32> = (0..vocabulary).map(steep).collect();
    let last: Vec<f32> = (0..vocabulary).rev().map(steep).collect();
    let both: Vec<f32> = (0..vocabulary).map(|i| steep(i.min(vocabulary - 1 - i))).collect();
    let level = vec![0.25; vocabulary];
    let flat: Vec<f32> = row(&mut numbers, vocabulary).iter().map(|x| x * 0.1).collect();
    for logits in [&first, &last, &both, &level, &flat] {
        for (key, k) in (1..).zip([1, 2, most - 1, most]) {
            let drawn = SeatRules { temperature: 1.0, top_k: k as i32, key, ..plain() };
            asked.ask(logits, drawn, &[], chosen(-1));
            asked.ask(logits, SeatRules { top_p: 0.7, ..drawn }, &[], chosen(-1));
            asked.ask(logits, SeatRules { top_p: 0.9, min_p: 0.3, ..drawn }, &[], chosen(-1));
        }
        asked.ask(logits, plain(), &[], chosen(-1));
        asked.ask(logits, SeatRules { temperature: 1.0, key: 9, ..plain() }, &[], chosen(-1));
    }
    asked.check_parts(ranks);
}

#[test]
fn strange_and_masked_rows_fail_alone_on_all_ranks() {
    let vocabulary = 4100;
    let mut numbers = Numbers::fresh(8);
    let good = row(&mut numbers, vocabulary);
    let mut asked = Asked::new(vocabulary, 1);
    let drawn = SeatRules { temperature: 1.0, top_k: 7, top_p: 0.5, ..plain() };
    for (at, strange) in [(0, f32::NAN), (4099, f32::INFINITY), (2111, f32::NEG_INFINITY)] {
        let mut logits = good.clone();
        logits[at] = strange;
        for rules in [plain(), drawn, SeatRules { temperature: 0.7, ..plain() }] {
            asked.ask(&logits, rules, &[], chosen(-1));
        }
    }
    asked.ask(&good, SeatRules { flags: RULE_MASKED, ..plain() }, &[], chosen(-1));
    asked.ask(&good, SeatRules { flags: RULE_MASKED, ..drawn }, &[], chosen(-1));
    asked.ask(&good, drawn, &[], chosen(-1));
    asked.check_parts(2);
    asked.check_parts(3);
}

#[test]
fn a_recording_answers_parts_as_a_launch_does() {
    let vocabulary = 2500;
    let most = top_k_of(&parts_of(vocabulary, 2)[0]);
    let mut numbers = Numbers::fresh(23);
    let mut asked = Asked::new(vocabulary, 1);
    for _ in 0..12 {
        let logits = row(&mut numbers, vocabulary);
        let rules = part_rules(&mut numbers, most);
        asked.ask(&logits, rules, &[3, 4, 5, 3], chosen(-1));
    }
    for device in devices() {
        let replayed = asked.in_parts(&device, 2, true);
        assert_eq!(replayed.answers, asked.in_parts(&device, 2, false).answers);
    }
}

/// Nobody lists more than there is.
#[test]
fn small_parts_are_brought_whole() {
    let device = &devices()[0];
    let of = |cols, ranks| {
        let part = VocabPart { first: 0, ids: cols, cols, vocab: cols * ranks, ranks };
        device.samples_in_parts(&part)
    };
    assert_eq!([of(4, 2), of(64, 2), of(192, 2)], [0, 8, 24].map(in_parts));
    assert_eq!([of(75_968, 2), of(18_992, 8), of(9_536, 32)], [64, 64, 32].map(in_parts));
}

fn in_parts(most: usize) -> InParts {
    if most == 0 { InParts::Nothing } else { InParts::TopK(most) }
}

#[test]
fn drafts_are_judged_where_tokens_are_found_in_parts() {
    let mut numbers = Numbers::fresh(6);
    let mut asked = Asked { judge: Judge::Answers, ..Asked::new(2051, 1) };
    for r in 0..12 {
        let temperature = [0.0, 0.4][r % 2];
        let rules = SeatRules { temperature, top_k: 9, key: numbers.bits(), ..plain() };
        asked.ask_drafts(&mut numbers, rules, r % 4);
    }
    for question in &mut asked.questions {
        question.top = -1;
    }
    asked.check_parts(2);
}
