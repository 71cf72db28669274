//! Sampling against the CPU: every sampling parameter, alone and combined, and a row's independence of its
//! batch.

use device::{Buffer, DType, DeviceDriver, MatMut, MatRef};
use kernels::RowSampling;
use kernels::gpu::GpuBackend;
use kernels::step::{
    DraftVerification, PreparedStep, RULE_HISTORY, RULE_MASKED, SAMPLE_ALL_MASKED,
    SAMPLE_DRAFT_ACCEPTED, SAMPLE_NON_FINITE, SAMPLE_OK, SamplerOutputArrays,
    SequenceSamplingParams, SequenceSlotArrays, StageEdit, StageLogitsRow, StageView,
    StagingBuffer,
};

use crate::support::{DeviceArray, PlainElement, RandomNumbers, S, devices, oracle};

mod vocab_parallel;

const LONGEST: usize = 64;
const RULE_WORDS: usize = 12;

/// Logits, logits rows, and the sampling parameters of their sequence slots.
#[derive(Clone)]
struct SampleCase {
    vocabulary: usize,
    most: usize,
    logits: Vec<f32>,
    logits_rows: Vec<StageLogitsRow>,
    edits: Vec<StageEdit>,
    words: Vec<i32>,
    sampling_params: Vec<SequenceSamplingParams>,
    history: Vec<i32>,
    masks: Vec<i32>,
    /// Newest tokens of the sequence slots before the step; empty = none.
    latest: Vec<i32>,
    /// Ids and positions of the step's tokens.
    ids: Vec<i32>,
    positions: Vec<i32>,
    verification: DraftVerification,
}

/// All outputs of a device.
#[derive(Debug, Clone, PartialEq)]
struct SampleResults {
    sampled: Vec<i32>,
    top_ids: Vec<i32>,
    top_logprobs: Vec<f32>,
    newest: Vec<i32>,
    history: Vec<i32>,
}

impl SampleResults {
    fn token(&self, q: usize) -> i32 {
        self.sampled[4 * q]
    }
    fn status(&self, q: usize) -> u32 {
        self.sampled[4 * q + 1].cast_unsigned()
    }
    fn logprob(&self, q: usize) -> f32 {
        f32::from_bits(self.sampled[4 * q + 2].cast_unsigned())
    }
    fn rank(&self, q: usize) -> i32 {
        self.sampled[4 * q + 3]
    }
}

/// Greedy, with every option off.
fn plain() -> SequenceSamplingParams {
    SequenceSamplingParams { top_p: 1.0, repetition: 1.0, ..SequenceSamplingParams::default() }
}

fn mask_words(vocabulary: usize) -> usize {
    vocabulary.div_ceil(32)
}

/// Logits with a realistic distribution: many small, a few large.
fn row(numbers: &mut RandomNumbers, vocabulary: usize) -> Vec<f32> {
    let one = |n: &mut RandomNumbers| {
        let bulk: f32 = (0..4).map(|_| n.float()).sum::<f32>() * 1.5;
        if n.below(100) == 0 { bulk + 6.0 * n.unit() } else { bulk }
    };
    (0..vocabulary).map(|_| one(numbers)).collect()
}

impl SampleCase {
    fn new(vocabulary: usize, most: usize) -> Self {
        let (logits, questions, edits, words) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (rules, history, masks) = (Vec::new(), Vec::new(), Vec::new());
        let (newest, ids, positions, judge) =
            (Vec::new(), Vec::new(), Vec::new(), DraftVerification::NoDrafts);
        Self {
            vocabulary,
            most,
            logits,
            logits_rows: questions,
            edits,
            words,
            sampling_params: rules,
            history,
            masks,
            latest: newest,
            ids,
            positions,
            verification: judge,
        }
    }

    /// Adds a logits row, in a new sequence slot with ids `known` before the position.
    fn add_row(
        &mut self,
        logits: &[f32],
        rules: SequenceSamplingParams,
        known: &[i32],
        question: StageLogitsRow,
    ) {
        let seat = self.add_sequence(rules, known);
        let token = if question.token < 0 { -1 } else { self.token(0, known.len()) };
        self.logits_rows.push(StageLogitsRow { seq_slot: seat, token, ..question });
        self.logits.extend_from_slice(logits);
    }

    /// Adds a sequence slot of a request with the ids `known`.
    fn add_sequence(&mut self, rules: SequenceSamplingParams, known: &[i32]) -> i32 {
        self.sampling_params.push(rules);
        self.history.extend_from_slice(known);
        self.history.resize(self.sampling_params.len() * LONGEST, -7);
        self.masks.resize(self.sampling_params.len() * mask_words(self.vocabulary), 0);
        self.sampling_params.len() as i32 - 1
    }

    /// Adds a token of the step, followed by the one at `position`.
    fn token(&mut self, id: i32, position: usize) -> i32 {
        self.ids.push(id);
        self.positions.push(position as i32 - 1);
        self.ids.len() as i32 - 1
    }

    /// Adds logits rows with `drafts` draft tokens, most of them equal to the top ids, and occasionally with
    /// a NaN logit.
    fn add_draft_rows(
        &mut self,
        numbers: &mut RandomNumbers,
        rules: SequenceSamplingParams,
        drafts: usize,
    ) {
        let vocabulary = self.vocabulary;
        let mut ids: Vec<i32> = (0..6).map(|_| numbers.below(vocabulary) as i32).collect();
        let rows: Vec<Vec<f32>> = (0..=drafts).map(|_| row(numbers, vocabulary)).collect();
        for logits in &rows[..drafts] {
            let larger = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
            let wrong = usize::from(numbers.below(4) == 0);
            ids.push((((0..vocabulary).fold(0, larger) + wrong) % vocabulary) as i32);
        }
        let seat = self.add_sequence(rules, &ids);
        for (i, mut logits) in rows.into_iter().enumerate() {
            if numbers.below(12) == 0 {
                logits[numbers.below(vocabulary)] = f32::NAN;
            }
            let token = self.token(ids[5 + i], 6 + i);
            let (place, draft) = (i as i32, i32::from(i < drafts));
            self.logits_rows.push(StageLogitsRow {
                seq_slot: seat,
                token,
                draft_index: place,
                has_draft: draft,
                ..chosen(1)
            });
            self.logits.extend_from_slice(&logits);
        }
    }

    /// A part of the logits rows, starting from the slot state `left` by earlier ones.
    fn shard(&self, questions: std::ops::Range<usize>, left: Option<&SampleResults>) -> Self {
        let v = self.vocabulary;
        let mut part = self.clone();
        part.logits = self.logits[questions.start * v..questions.end * v].to_vec();
        part.logits_rows = self.logits_rows[questions].to_vec();
        if let Some(left) = left {
            (part.latest, part.history) = (left.newest.clone(), left.history.clone());
        }
        part
    }

    fn newest(&self) -> Vec<i32> {
        if self.latest.is_empty() {
            vec![-1; self.sampling_params.len() * 3]
        } else {
            self.latest.clone()
        }
    }

    /// Allows an id in the mask of the newest sequence slot.
    fn allow(&mut self, id: usize) {
        let seat = self.sampling_params.len() - 1;
        self.masks[seat * mask_words(self.vocabulary) + id / 32] |= 1 << (id % 32);
    }

    /// Stages random logit edits, some of them conditional on the last of `known`.
    fn edit_by_chance(&mut self, numbers: &mut RandomNumbers, edits: usize, known: &[i32]) {
        for _ in 0..edits {
            let id = numbers.below(self.vocabulary + 3) as u32;
            let banned = numbers.below(5) == 0;
            let value = if banned { f32::NEG_INFINITY } else { 3.0 * numbers.float() };
            if numbers.below(8) == 0 {
                let when_at = (known.len() + numbers.below(3)) as i32 - 1;
                self.edits.push(StageEdit { id, value, when_at, when_len: -1 });
                continue;
            }
            let tail = if numbers.below(3) == 0 { known.len().min(2) } else { 0 };
            let wrong = i32::from(numbers.below(2) == 0);
            let when_at = self.words.len() as i32;
            self.words.extend(known[known.len() - tail..].iter().map(|id| id + wrong));
            self.edits.push(StageEdit { id, value, when_at, when_len: tail as i32 });
        }
    }

    /// Logits row `q` alone, in its sequence slot.
    fn alone(&self, q: usize) -> Self {
        self.shard(q..q + 1, None)
    }

    fn stage(&self) -> Vec<i32> {
        let stage = StagingBuffer {
            logits_rows: self.logits_rows.clone(),
            words: self.words.clone(),
            edits: self.edits.clone(),
            ..StagingBuffer::default()
        };
        let mut bytes = vec![0; stage.bytes()];
        stage.write(&mut bytes);
        bytes.chunks_exact(4).map(<i32 as PlainElement>::of_bytes).collect()
    }

    fn rule_words(&self) -> Vec<i32> {
        let words = |r: &SequenceSamplingParams| {
            let floats = [r.temperature, r.top_p, r.min_p].map(|x| x.to_bits().cast_signed());
            let penalties =
                [r.repetition, r.frequency, r.presence].map(|x| x.to_bits().cast_signed());
            let rest = [r.flags, r.key as u32, (r.key >> 32) as u32].map(u32::cast_signed);
            [&floats[..], &[r.top_k], &penalties, &rest, &[r.prompt_len, 0]].concat()
        };
        self.sampling_params.iter().flat_map(words).collect()
    }

    fn on_cpu(&self) -> SampleResults {
        let cpu = oracle();
        let (n, seats, most) = (self.logits_rows.len(), self.sampling_params.len(), self.most);
        let words = self.stage();
        // Records contain 64-bit numbers, so the words must have the alignment of a device buffer.
        let buffer: Buffer = {
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let mut buffer = cpu.alloc(bytes.len()).unwrap();
            cpu.upload(&mut buffer, 0, &bytes).unwrap();
            buffer
        };
        let bytes = buffer.mat(DType::I32, 1, words.len()).unwrap();
        let view = StageView { bytes, rows: 0, tokens: 0, logits_rows: n };
        let (mut newest, mut tables) = (self.newest(), vec![0; seats]);
        let (mut history, mut masks, mut rules) =
            (self.history.clone(), self.masks.clone(), self.rule_words());
        let mut seat_arrays = SequenceSlotArrays {
            latest: MatMut::of(&mut newest, seats, 3).unwrap(),
            tables: MatMut::of(&mut tables, seats, 1).unwrap(),
            history: MatMut::of(&mut history, seats, LONGEST).unwrap(),
            masks: MatMut::of(&mut masks, seats, mask_words(self.vocabulary)).unwrap(),
            params: MatMut::of(&mut rules, seats, RULE_WORDS).unwrap(),
        };
        let mut answers = vec![-1; n * 4];
        let (mut top_ids, mut top_logprobs) = (vec![-1; n * most], vec![f32::NAN; n * most]);
        let mut out = SamplerOutputArrays {
            sampled: MatMut::of(&mut answers, n, 4).unwrap(),
            top_ids: MatMut::of(&mut top_ids, n, most).unwrap(),
            top_logprobs: MatMut::of(&mut top_logprobs, n, most).unwrap(),
        };
        let logits = MatRef::of(&self.logits, n, self.vocabulary).unwrap();
        let row = |x| MatRef::of(x, 1, self.ids.len()).unwrap();
        let laid = PreparedStep {
            ids: row(&self.ids),
            positions: row(&self.positions),
            verification: self.verification,
        };
        cpu.launch(
            &S,
            RowSampling {
                logits,
                stage: &view,
                prepared: &laid,
                slots: &mut seat_arrays,
                outputs: &mut out,
            },
        )
        .unwrap();
        SampleResults { sampled: answers, top_ids, top_logprobs, newest, history }
    }

    fn on(&self, device: &GpuBackend) -> SampleResults {
        self.launched(device, false)
    }

    /// Results of a launch, or of a replay of the captured launch after the outputs were poisoned again.
    fn launched(&self, device: &GpuBackend, recorded: bool) -> SampleResults {
        self.sampled(device, &self.logits, recorded, |logits, asked, seats, answers| {
            device
                .launch(
                    &S,
                    RowSampling {
                        logits,
                        stage: asked.0,
                        prepared: asked.1,
                        slots: seats,
                        outputs: answers,
                    },
                )
                .unwrap();
        })
    }

    /// Results of `sample` on rows of `logits`, launched or replayed.
    fn sampled(
        &self,
        device: &GpuBackend,
        logits: &[f32],
        recorded: bool,
        mut sample: impl FnMut(
            MatRef<'_>,
            (&StageView<'_>, &PreparedStep<'_>),
            &mut SequenceSlotArrays<'_>,
            &mut SamplerOutputArrays<'_>,
        ),
    ) -> SampleResults {
        let (n, seats, most) = (self.logits_rows.len(), self.sampling_params.len(), self.most);
        let words = DeviceArray::row(device, &self.stage());
        let view = StageView { bytes: words.mat(), rows: 0, tokens: 0, logits_rows: n };
        let mut newest = DeviceArray::of(device, &self.newest(), seats, 3);
        let [ids, positions] = [&self.ids, &self.positions].map(|x| DeviceArray::row(device, x));
        let mut tables = DeviceArray::<i32>::poisoned(device, seats, 1);
        let mut history = DeviceArray::of(device, &self.history, seats, LONGEST);
        let mut masks = DeviceArray::of(device, &self.masks, seats, mask_words(self.vocabulary));
        let mut rules = DeviceArray::of(device, &self.rule_words(), seats, RULE_WORDS);
        let mut seat_arrays = SequenceSlotArrays {
            latest: newest.mat_mut(),
            tables: tables.mat_mut(),
            history: history.mat_mut(),
            masks: masks.mat_mut(),
            params: rules.mat_mut(),
        };
        let mut answers = DeviceArray::<i32>::poisoned(device, n, 4);
        let mut top_ids = DeviceArray::<i32>::poisoned(device, n, most);
        let mut top_logprobs = DeviceArray::<f32>::poisoned(device, n, most);
        let logits = DeviceArray::of(device, logits, n, logits.len() / n);
        let mut out = SamplerOutputArrays {
            sampled: answers.mat_mut(),
            top_ids: top_ids.mat_mut(),
            top_logprobs: top_logprobs.mat_mut(),
        };
        let laid = PreparedStep {
            ids: ids.mat(),
            positions: positions.mat(),
            verification: self.verification,
        };
        let asked = (&view, &laid);
        sample(logits.mat(), asked, &mut seat_arrays, &mut out);
        if recorded {
            device.begin_capture(&S).unwrap();
            sample(logits.mat(), asked, &mut seat_arrays, &mut out);
            let graph = device.end_capture(&S).unwrap();
            device.upload(&mut answers.buffer, 0, &vec![0xff; n * 16]).unwrap();
            device.replay(&S, &graph).unwrap();
        }
        SampleResults {
            sampled: answers.read(device),
            top_ids: top_ids.read(device),
            top_logprobs: top_logprobs.read(device),
            newest: newest.read(device),
            history: history.read(device),
        }
    }

    /// Whether `token` can be explained by rounding: the CPU also samples it with tiny changes of logits and
    /// cutoffs.
    fn within_rounding(&self, q: usize, token: i32) -> bool {
        let seat = self.logits_rows[q].seq_slot as usize;
        let drawn =
            self.logits_rows[q].known_token < 0 && self.sampling_params[seat].temperature >= 1e-5;
        drawn
            && (1..=64).any(|trial| {
                let mut numbers = RandomNumbers::new(trial);
                let mut one = self.alone(q);
                for x in &mut one.logits {
                    *x += 2e-6 * (1.0 + x.abs()) * numbers.float();
                }
                one.sampling_params[seat].min_p *= 1.0 + 1e-5 * numbers.float();
                if one.sampling_params[seat].top_p < 1.0 {
                    one.sampling_params[seat].top_p *= 1.0 + 1e-5 * numbers.float();
                }
                one.on_cpu().token(0) == token
            })
    }

    /// Compares every device with the CPU, and returns the CPU's results.
    fn check(&self) -> SampleResults {
        let expected = self.on_cpu();
        for device in devices() {
            self.compare(&self.on(&device), &expected, device.arch());
        }
        expected
    }

    /// Fails if results differ from the CPU's by more than rounding explains.
    fn compare(&self, got: &SampleResults, expected: &SampleResults, device: &str) {
        let mut seats_alike = vec![true; self.sampling_params.len()];
        for q in 0..self.logits_rows.len() {
            if !seats_alike[self.logits_rows[q].seq_slot as usize] {
                continue; // Drafts after one that only this device accepted.
            }
            if got.token(q) != expected.token(q) && self.within_rounding(q, got.token(q)) {
                println!("{device}: question {q} was decided by rounding");
                seats_alike[self.logits_rows[q].seq_slot as usize] = false;
                continue;
            }
            let rules = &self.sampling_params[self.logits_rows[q].seq_slot as usize];
            let name = format!("{device}: {q} {:?} {rules:?}", self.logits_rows[q]);
            assert_eq!(got.token(q), expected.token(q), "{name}");
            assert_eq!(got.status(q), expected.status(q), "{name}");
            assert_eq!(got.rank(q), expected.rank(q), "{name}");
            assert!((got.logprob(q) - expected.logprob(q)).abs() < 1e-5, "{name}");
            let list = q * self.most..(q + 1) * self.most;
            assert_eq!(got.top_ids[list.clone()], expected.top_ids[list.clone()], "{name}");
            for (a, b) in got.top_logprobs[list.clone()].iter().zip(&expected.top_logprobs[list]) {
                assert!((a - b).abs() < 1e-5 || (a.is_nan() && b.is_nan()), "{a} {b} {name}");
            }
        }
        for seat in (0..self.sampling_params.len()).filter(|seat| seats_alike[*seat]) {
            let newest = seat * 3..(seat + 1) * 3;
            assert_eq!(got.newest[newest.clone()], expected.newest[newest], "seat {seat}");
            let ids = seat * LONGEST..(seat + 1) * LONGEST;
            assert_eq!(got.history[ids.clone()], expected.history[ids]);
        }
    }
}

fn chosen(top: i32) -> StageLogitsRow {
    StageLogitsRow { known_token: -1, top, ..StageLogitsRow::default() }
}

/// Random sampling parameters of every kind.
fn any_rules(numbers: &mut RandomNumbers) -> SequenceSamplingParams {
    let maybe = |n: &mut RandomNumbers, off: f32, on: f32| if n.below(2) == 0 { off } else { on };
    let temperature = [0.0, 1.0, 0.3, 1.7][numbers.below(4)];
    let (p, m) = (0.05 + 0.9 * numbers.unit(), 0.2 * numbers.unit());
    SequenceSamplingParams {
        temperature,
        top_p: maybe(numbers, 1.0, p),
        min_p: maybe(numbers, 0.0, m),
        top_k: [0, 1, 5, 40, 1500, 1 << 30][numbers.below(6)],
        repetition: maybe(numbers, 1.0, 1.3),
        frequency: maybe(numbers, 0.0, 0.4),
        presence: maybe(numbers, 0.0, 0.7),
        flags: if numbers.below(2) == 0 { RULE_HISTORY } else { 0 },
        key: numbers.bits() << 32 | numbers.bits(),
        prompt_len: 3,
        reserved: 0,
    }
}

#[test]
fn every_rule_by_chance() {
    for vocabulary in [1, 37, 2048, 2049, 6001] {
        let mut numbers = RandomNumbers::fresh(vocabulary as u64);
        let mut asked = SampleCase::new(vocabulary, 8);
        for q in 0..40 {
            let mut rules = any_rules(&mut numbers);
            let coarse = |x: &f32| if q % 3 == 0 { (x * 2.0).round() / 2.0 } else { *x };
            let logits: Vec<f32> = row(&mut numbers, vocabulary).iter().map(coarse).collect();
            let known: Vec<i32> =
                (0..numbers.below(20)).map(|_| numbers.below(vocabulary.min(30)) as i32).collect();
            let masked = numbers.below(4) == 0;
            rules.flags |= if masked { RULE_MASKED } else { 0 };
            let mut question = chosen([-1, 0, 3, 8][numbers.below(4)]);
            if numbers.below(6) == 0 {
                question.known_token = numbers.below(vocabulary) as i32;
            }
            if numbers.below(2) == 0 {
                question.edits_at = asked.edits.len() as i32;
                question.edits = numbers.below(600) as i32;
                asked.edit_by_chance(&mut numbers, question.edits as usize, &known);
            }
            asked.add_row(&logits, rules, &known, question);
            if masked {
                (0..numbers.below(80)).for_each(|_| asked.allow(numbers.below(vocabulary)));
            }
        }
        let answered = asked.check();
        assert!((0..40).any(|q| answered.status(q) == SAMPLE_OK));
    }
}

#[test]
fn filters_over_a_real_vocabulary() {
    let vocabulary = 151_937; // Odd: rows are not aligned.
    let mut numbers = RandomNumbers::fresh(3);
    let mut asked = SampleCase::new(vocabulary, 1024);
    let logits = row(&mut numbers, vocabulary);
    let flat: Vec<f32> = logits.iter().map(|x| x * 0.1).collect();
    let drawn = |key| SequenceSamplingParams { temperature: 1.0, key, ..plain() };
    asked.add_row(&logits, plain(), &[], chosen(20));
    asked.add_row(&logits, drawn(1), &[], chosen(1024));
    asked.add_row(&flat, drawn(2), &[], chosen(0));
    asked.add_row(&flat, SequenceSamplingParams { top_p: 0.95, ..drawn(3) }, &[], chosen(-1));
    asked.add_row(&flat, SequenceSamplingParams { top_p: 0.1, ..drawn(4) }, &[], chosen(-1));
    asked.add_row(
        &flat,
        SequenceSamplingParams { top_k: 50, top_p: 0.9, ..drawn(5) },
        &[],
        chosen(-1),
    );
    asked.add_row(
        &flat,
        SequenceSamplingParams { top_k: 20_000, top_p: 0.9, ..drawn(6) },
        &[],
        chosen(-1),
    );
    asked.add_row(&logits, SequenceSamplingParams { min_p: 0.05, ..drawn(7) }, &[], chosen(-1));
    asked.add_row(&flat, SequenceSamplingParams { top_k: 1, ..drawn(8) }, &[], chosen(-1));
    asked.check();
}

/// All logits are equal: the order is that of the ids.
#[test]
fn equal_logits_are_ordered_by_id() {
    let vocabulary = 5000;
    let level = vec![0.25; vocabulary];
    let mut asked = SampleCase::new(vocabulary, 1024);
    let drawn = |key| SequenceSamplingParams { temperature: 1.0, key, ..plain() };
    asked.add_row(&level, plain(), &[], chosen(1000));
    asked.add_row(&level, SequenceSamplingParams { top_k: 1300, ..drawn(1) }, &[], chosen(1024));
    asked.add_row(&level, SequenceSamplingParams { top_k: 3, ..drawn(2) }, &[], chosen(-1));
    asked.add_row(&level, SequenceSamplingParams { top_p: 0.01, ..drawn(3) }, &[], chosen(-1));
    let zeros: Vec<f32> = (0..vocabulary).map(|i| if i % 2 == 0 { -0.0 } else { 0.0 }).collect();
    asked.add_row(&zeros, plain(), &[], chosen(7));
    let answered = asked.check();
    assert_eq!(answered.token(0), 0);
    assert_eq!(answered.top_ids[..1000], (0..1000).collect::<Vec<_>>());
    assert!(answered.token(2) < 3 && answered.token(3) < 50);
}

#[test]
fn non_finite_and_masked_rows_fail_alone() {
    let vocabulary = 4100;
    let mut numbers = RandomNumbers::fresh(8);
    let good = row(&mut numbers, vocabulary);
    let mut asked = SampleCase::new(vocabulary, 2);
    for (at, strange) in [(0, f32::NAN), (4099, f32::INFINITY), (2048, f32::NEG_INFINITY)] {
        let mut logits = good.clone();
        logits[at] = strange;
        asked.add_row(&logits, plain(), &[], chosen(-1));
        asked.add_row(
            &logits,
            SequenceSamplingParams { temperature: 1.0, top_p: 0.5, ..plain() },
            &[],
            chosen(2),
        );
        asked.add_row(
            &logits,
            plain(),
            &[],
            StageLogitsRow { known_token: 5, top: 1, ..StageLogitsRow::default() },
        );
        asked.add_row(
            &logits,
            plain(),
            &[],
            StageLogitsRow { known_token: 5, top: -1, ..StageLogitsRow::default() },
        );
    }
    asked.add_row(&good, SequenceSamplingParams { flags: RULE_MASKED, ..plain() }, &[], chosen(-1));
    asked.add_row(
        &good,
        SequenceSamplingParams { flags: RULE_MASKED, temperature: 1.0, ..plain() },
        &[],
        chosen(1),
    );
    asked.add_row(&good, plain(), &[], StageLogitsRow { token: -1, ..chosen(1) });
    let answered = asked.check();
    let statuses: Vec<u32> = (0..asked.logits_rows.len()).map(|q| answered.status(q)).collect();
    let (ok, bad, masked) = (SAMPLE_OK, SAMPLE_NON_FINITE, SAMPLE_ALL_MASKED);
    assert_eq!(statuses, [[bad, bad, bad, ok].repeat(3), vec![masked, masked, ok]].concat());
    assert_eq!(answered.token(14), -1);
}

/// Accepted drafts and the newest token, in one launch and with a row's logits rows split over two launches.
#[test]
fn draft_verification_matches_the_cpu() {
    for (seed, judge) in
        [(1, DraftVerification::MatchSampled), (2, DraftVerification::Synthetic { per_mille: 700 })]
    {
        let mut numbers = RandomNumbers::fresh(seed);
        let mut asked = SampleCase { verification: judge, ..SampleCase::new(2051, 2) };
        for r in 0..24 {
            let rules = SequenceSamplingParams {
                temperature: [0.0, 0.4][r % 2],
                presence: 0.5,
                flags: if r % 3 == 0 { RULE_HISTORY } else { 0 },
                key: numbers.bits(),
                ..plain()
            };
            asked.add_draft_rows(&mut numbers, rules, r % 5);
        }
        let whole = asked.check();
        let standing =
            (0..asked.logits_rows.len()).filter(|&q| whole.status(q) == SAMPLE_DRAFT_ACCEPTED);
        let drafts = asked.logits_rows.iter().filter(|question| question.has_draft != 0).count();
        assert!((1..drafts).contains(&standing.count()));
        let halves = |on: &dyn Fn(&SampleCase) -> SampleResults, cut| {
            let first = on(&asked.shard(0..cut, None));
            let second = on(&asked.shard(cut..asked.logits_rows.len(), Some(&first)));
            ([first.sampled, second.sampled].concat(), second.newest, second.history)
        };
        for cut in 1..9 {
            let expected = (whole.sampled.clone(), whole.newest.clone(), whole.history.clone());
            assert_eq!(halves(&SampleCase::on_cpu, cut), expected, "cut at {cut}");
        }
        for device in devices() {
            let SampleResults { sampled: answers, newest, history, .. } = asked.on(&device);
            for cut in [1, 2, 4, 5, 8] {
                let expected = (answers.clone(), newest.clone(), history.clone());
                let found = halves(&|asked| asked.on(&device), cut);
                assert_eq!(found, expected, "{}, cut at {cut}", device.arch());
            }
        }
    }
}

#[test]
fn sampling_is_batch_invariant() {
    let vocabulary = 6001;
    let mut numbers = RandomNumbers::fresh(21);
    let mut asked = SampleCase::new(vocabulary, 5);
    for _ in 0..70 {
        let logits = row(&mut numbers, vocabulary);
        let known: Vec<i32> = (0..9).map(|_| numbers.below(30) as i32).collect();
        asked.add_row(&logits, any_rules(&mut numbers), &known, chosen(5));
    }
    for device in devices() {
        let all = asked.on(&device);
        for q in [0, 1, 2, 33, 69] {
            let one = asked.alone(q).on(&device);
            assert_eq!(one.sampled[..4], all.sampled[4 * q..][..4], "{}", device.arch());
            assert_eq!(one.top_logprobs[..5], all.top_logprobs[5 * q..][..5]);
        }
    }
}

#[test]
fn captured_sampling_matches_eager() {
    let vocabulary = 2500;
    let mut numbers = RandomNumbers::fresh(22);
    let mut asked = SampleCase::new(vocabulary, 5);
    for _ in 0..12 {
        let logits = row(&mut numbers, vocabulary);
        asked.add_row(&logits, any_rules(&mut numbers), &[3, 4, 5, 3], chosen(5));
    }
    for device in devices() {
        assert_eq!(asked.launched(&device, true), asked.on(&device), "{}", device.arch());
    }
}

/// Frequencies of sampled tokens against the softmax.
#[test]
fn frequencies_follow_the_softmax() {
    let vocabulary = 12;
    let logits: Vec<f32> = (0..vocabulary).map(|i| (i * 5 % 12) as f32 / 4.0).collect();
    let (draws, temperature) = (1500, 0.8);
    let mut asked = SampleCase::new(vocabulary, 1);
    for key in 0..draws {
        asked.add_row(
            &logits,
            SequenceSamplingParams { temperature, key, ..plain() },
            &[],
            chosen(-1),
        );
    }
    let p: Vec<f32> = logits.iter().map(|x| (x / temperature).exp()).collect();
    let total: f32 = p.iter().sum();
    for device in devices() {
        let answered = asked.on(&device);
        let mut counts = vec![0.0; vocabulary];
        (0..draws as usize).for_each(|q| counts[answered.token(q) as usize] += 1.0);
        let chi2: f32 = counts
            .iter()
            .zip(&p)
            .map(|(n, p)| (n - draws as f32 * p / total).powi(2) / (draws as f32 * p / total))
            .sum();
        // 11 degrees of freedom: mean 11, standard deviation 4.7; the samples are determined by their keys.
        assert!(chi2 < 27.0, "{}: chi2 {chi2}", device.arch());
    }
}

#[test]
fn lists_longer_than_the_kernel_sorts_are_refused() {
    let mut asked = SampleCase::new(50, 1025);
    asked.add_row(&[0.0; 50], plain(), &[], chosen(1));
    let device = &devices()[0];
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| asked.on(device)));
    assert!(refused.is_err());
}
