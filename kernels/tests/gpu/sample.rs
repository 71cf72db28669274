//! Sampling on the GPU against the CPU: every sampling parameter, alone and combined, and a row's
//! independence of its batch.

use device::{Buffer, DType, DeviceDriver, MatMut, MatRef};
use kernels::RowSampling;
use kernels::gpu::GpuBackend;
use kernels::step::{
    DraftVerification, PreparedStep, RULE_HISTORY, RULE_MASKED, SAMPLE_ALL_MASKED,
    SAMPLE_DRAFT_ACCEPTED, SAMPLE_NON_FINITE, SAMPLE_OK, SamplerOutputArrays,
    SequenceSamplingParams, SequenceSlotArrays, StagedLogitEdit, StagedLogitsRow, StagingBuffer,
    StagingBufferView,
};

use crate::support::{DeviceArray, GpuTestElement, RandomNumbers, S, devices, oracle};

mod vocab_parallel;

const MAX_LEN: usize = 64;
const PARAM_WORDS: usize = 12;

/// Inputs of the sampling kernels: logits, the metadata of each logits row (token and sequence slot), and the
/// sampling parameters and token history of each sequence slot.
#[derive(Clone)]
struct SampleCase {
    vocabulary: usize,
    max_top: usize,
    logits: Vec<f32>,
    logits_rows: Vec<StagedLogitsRow>,
    edits: Vec<StagedLogitEdit>,
    words: Vec<i32>,
    sampling_params: Vec<SequenceSamplingParams>,
    history: Vec<i32>,
    masks: Vec<i32>,
    /// Newest tokens of the sequence slots before the step; empty if there are none.
    latest: Vec<i32>,
    /// Token ids of the step's tokens.
    ids: Vec<i32>,
    /// Positions of the step's tokens.
    positions: Vec<i32>,
    verification: DraftVerification,
}

/// All outputs of the sampling kernels of one device.
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

/// Returns sampling parameters of greedy sampling with every option off.
fn plain() -> SequenceSamplingParams {
    SequenceSamplingParams { top_p: 1.0, repetition: 1.0, ..SequenceSamplingParams::default() }
}

fn mask_words(vocabulary: usize) -> usize {
    vocabulary.div_ceil(32)
}

/// Returns random logits with a realistic distribution: many are small, a few are large.
fn row(numbers: &mut RandomNumbers, vocabulary: usize) -> Vec<f32> {
    let one = |n: &mut RandomNumbers| {
        let bulk: f32 = (0..4).map(|_| n.float()).sum::<f32>() * 1.5;
        if n.below(100) == 0 { bulk + 6.0 * n.unit() } else { bulk }
    };
    (0..vocabulary).map(|_| one(numbers)).collect()
}

impl SampleCase {
    fn new(vocabulary: usize, max_top: usize) -> Self {
        Self {
            vocabulary,
            max_top,
            logits: Vec::new(),
            logits_rows: Vec::new(),
            edits: Vec::new(),
            words: Vec::new(),
            sampling_params: Vec::new(),
            history: Vec::new(),
            masks: Vec::new(),
            latest: Vec::new(),
            ids: Vec::new(),
            positions: Vec::new(),
            verification: DraftVerification::NoDrafts,
        }
    }

    /// Adds a logits row in a new sequence slot whose request has the token ids `known_ids` before the row's
    /// position.
    fn add_row(
        &mut self,
        logits: &[f32],
        params: SequenceSamplingParams,
        known_ids: &[i32],
        logits_row: StagedLogitsRow,
    ) {
        let slot = self.add_sequence(params, known_ids);
        let token = if logits_row.token < 0 { -1 } else { self.token(0, known_ids.len()) };
        self.logits_rows.push(StagedLogitsRow { seq_slot: slot, token, ..logits_row });
        self.logits.extend_from_slice(logits);
    }

    /// Adds a sequence slot of a request with the token ids `known_ids`.
    fn add_sequence(&mut self, params: SequenceSamplingParams, known_ids: &[i32]) -> i32 {
        self.sampling_params.push(params);
        self.history.extend_from_slice(known_ids);
        self.history.resize(self.sampling_params.len() * MAX_LEN, -7);
        self.masks.resize(self.sampling_params.len() * mask_words(self.vocabulary), 0);
        self.sampling_params.len() as i32 - 1
    }

    /// Adds a token to the step, at the position before `position`.
    fn token(&mut self, id: i32, position: usize) -> i32 {
        self.ids.push(id);
        self.positions.push(position as i32 - 1);
        self.ids.len() as i32 - 1
    }

    /// Adds the logits rows of a request with `drafts` draft tokens. Most draft tokens are the most likely id
    /// of their row, and some rows have a NaN logit.
    fn add_draft_rows(
        &mut self,
        numbers: &mut RandomNumbers,
        params: SequenceSamplingParams,
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
        let slot = self.add_sequence(params, &ids);
        for (i, mut logits) in rows.into_iter().enumerate() {
            if numbers.below(12) == 0 {
                logits[numbers.below(vocabulary)] = f32::NAN;
            }
            let token = self.token(ids[5 + i], 6 + i);
            let (draft_index, has_draft) = (i as i32, i32::from(i < drafts));
            let mut logits_row =
                StagedLogitsRow { seq_slot: slot, token, draft_index, has_draft, ..chosen(1) };
            if drafts.is_multiple_of(2) {
                self.mask_row(numbers, &mut logits_row);
            }
            self.logits_rows.push(logits_row);
            self.logits.extend_from_slice(&logits);
        }
    }

    /// Returns the case with only the logits rows `rows`. If `left`, the results of earlier rows, is given,
    /// the sequence slots start with the newest tokens and token histories of `left`.
    fn slice_rows(&self, rows: std::ops::Range<usize>, left: Option<&SampleResults>) -> Self {
        let v = self.vocabulary;
        let mut part = self.clone();
        part.logits = self.logits[rows.start * v..rows.end * v].to_vec();
        part.logits_rows = self.logits_rows[rows].to_vec();
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

    /// Allows a token id in the mask of the sequence slot added last.
    fn allow(&mut self, id: usize) {
        let slot = self.sampling_params.len() - 1;
        self.masks[slot * mask_words(self.vocabulary) + id / 32] |= 1 << (id % 32);
    }

    /// Adds a random grammar bitmask for a logits row to the staged inputs of the step. The bitmask allows
    /// about three quarters of the token ids, or only a few.
    fn mask_row(&mut self, numbers: &mut RandomNumbers, logits_row: &mut StagedLogitsRow) {
        let words = mask_words(self.vocabulary);
        (logits_row.mask_at, logits_row.mask_words) = (self.words.len() as i32, words as i32);
        let few = numbers.below(3) == 0;
        let mut bits = || numbers.bits() as i32;
        for _ in 0..words {
            let (a, b) = (bits(), bits());
            self.words.push(if few { a & b & bits() & bits() } else { a | b });
        }
    }

    /// Adds random logit edits to the staged inputs of the step; some edits apply only after certain token
    /// ids at the end of `known_ids`.
    fn add_random_edits(&mut self, numbers: &mut RandomNumbers, edits: usize, known_ids: &[i32]) {
        for _ in 0..edits {
            let id = numbers.below(self.vocabulary + 3) as u32;
            let banned = numbers.below(5) == 0;
            let value = if banned { f32::NEG_INFINITY } else { 3.0 * numbers.float() };
            if numbers.below(8) == 0 {
                let when_at = (known_ids.len() + numbers.below(3)) as i32 - 1;
                self.edits.push(StagedLogitEdit { id, value, when_at, when_len: -1 });
                continue;
            }
            let tail = if numbers.below(3) == 0 { known_ids.len().min(2) } else { 0 };
            let wrong = i32::from(numbers.below(2) == 0);
            let when_at = self.words.len() as i32;
            self.words.extend(known_ids[known_ids.len() - tail..].iter().map(|id| id + wrong));
            self.edits.push(StagedLogitEdit { id, value, when_at, when_len: tail as i32 });
        }
    }

    /// Returns the case with logits row `q` alone, in its sequence slot.
    fn single_row(&self, q: usize) -> Self {
        self.slice_rows(q..q + 1, None)
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
        bytes.chunks_exact(4).map(<i32 as GpuTestElement>::of_bytes).collect()
    }

    fn param_words(&self) -> Vec<i32> {
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
        let (n, seq_slots, max_top) =
            (self.logits_rows.len(), self.sampling_params.len(), self.max_top);
        let words = self.stage();
        // The structs in the staging buffer contain 64-bit fields, so the words need the alignment of a
        // device buffer.
        let buffer: Buffer = {
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let mut buffer = cpu.alloc(bytes.len()).unwrap();
            cpu.upload(&mut buffer, 0, &bytes).unwrap();
            buffer
        };
        let bytes = buffer.mat(DType::I32, 1, words.len()).unwrap();
        let view = StagingBufferView { bytes, rows: 0, tokens: 0, logits_rows: n };
        let (mut newest, mut tables) = (self.newest(), vec![0; seq_slots]);
        let (mut history, mut masks, mut params) =
            (self.history.clone(), self.masks.clone(), self.param_words());
        let mut slot_arrays = SequenceSlotArrays {
            latest: MatMut::of(&mut newest, seq_slots, 3).unwrap(),
            tables: MatMut::of(&mut tables, seq_slots, 1).unwrap(),
            history: MatMut::of(&mut history, seq_slots, MAX_LEN).unwrap(),
            masks: MatMut::of(&mut masks, seq_slots, mask_words(self.vocabulary)).unwrap(),
            params: MatMut::of(&mut params, seq_slots, PARAM_WORDS).unwrap(),
        };
        let mut sampled = vec![-1; n * 4];
        let (mut top_ids, mut top_logprobs) = (vec![-1; n * max_top], vec![f32::NAN; n * max_top]);
        let mut out = SamplerOutputArrays {
            sampled: MatMut::of(&mut sampled, n, 4).unwrap(),
            top_ids: MatMut::of(&mut top_ids, n, max_top).unwrap(),
            top_logprobs: MatMut::of(&mut top_logprobs, n, max_top).unwrap(),
        };
        let logits = MatRef::of(&self.logits, n, self.vocabulary).unwrap();
        let row = |x| MatRef::of(x, 1, self.ids.len()).unwrap();
        let prepared = PreparedStep {
            ids: row(&self.ids),
            positions: row(&self.positions),
            verification: self.verification,
        };
        cpu.launch(
            &S,
            RowSampling {
                logits,
                stage: &view,
                prepared: &prepared,
                slots: &mut slot_arrays,
                outputs: &mut out,
            },
        )
        .unwrap();
        SampleResults { sampled, top_ids, top_logprobs, newest, history }
    }

    fn on(&self, device: &GpuBackend) -> SampleResults {
        self.launch(device, false)
    }

    /// Returns the results of a launch; if `captured`, of a replay of the captured launch, with the outputs
    /// poisoned before the replay.
    fn launch(&self, device: &GpuBackend, captured: bool) -> SampleResults {
        self.sample_with(
            device,
            &self.logits,
            captured,
            |logits, stage, prepared, slots, outputs| {
                device.launch(&S, RowSampling { logits, stage, prepared, slots, outputs }).unwrap();
            },
        )
    }

    /// Calls `sample` with the rows of `logits` and the state of the case on `device`; returns its results,
    /// from a launch or a replay.
    fn sample_with(
        &self,
        device: &GpuBackend,
        logits: &[f32],
        captured: bool,
        mut sample: impl FnMut(
            MatRef<'_>,
            &StagingBufferView<'_>,
            &PreparedStep<'_>,
            &mut SequenceSlotArrays<'_>,
            &mut SamplerOutputArrays<'_>,
        ),
    ) -> SampleResults {
        let (n, seq_slots, max_top) =
            (self.logits_rows.len(), self.sampling_params.len(), self.max_top);
        let words = DeviceArray::row(device, &self.stage());
        let view = StagingBufferView { bytes: words.mat(), rows: 0, tokens: 0, logits_rows: n };
        let mut newest = DeviceArray::of(device, &self.newest(), seq_slots, 3);
        let [ids, positions] = [&self.ids, &self.positions].map(|x| DeviceArray::row(device, x));
        let mut tables = DeviceArray::<i32>::poisoned(device, seq_slots, 1);
        let mut history = DeviceArray::of(device, &self.history, seq_slots, MAX_LEN);
        let mut masks =
            DeviceArray::of(device, &self.masks, seq_slots, mask_words(self.vocabulary));
        let mut params = DeviceArray::of(device, &self.param_words(), seq_slots, PARAM_WORDS);
        let mut slot_arrays = SequenceSlotArrays {
            latest: newest.mat_mut(),
            tables: tables.mat_mut(),
            history: history.mat_mut(),
            masks: masks.mat_mut(),
            params: params.mat_mut(),
        };
        let mut sampled = DeviceArray::<i32>::poisoned(device, n, 4);
        let mut top_ids = DeviceArray::<i32>::poisoned(device, n, max_top);
        let mut top_logprobs = DeviceArray::<f32>::poisoned(device, n, max_top);
        let logits = DeviceArray::of(device, logits, n, logits.len() / n);
        let mut out = SamplerOutputArrays {
            sampled: sampled.mat_mut(),
            top_ids: top_ids.mat_mut(),
            top_logprobs: top_logprobs.mat_mut(),
        };
        let prepared = PreparedStep {
            ids: ids.mat(),
            positions: positions.mat(),
            verification: self.verification,
        };
        sample(logits.mat(), &view, &prepared, &mut slot_arrays, &mut out);
        if captured {
            device.begin_capture(&S).unwrap();
            sample(logits.mat(), &view, &prepared, &mut slot_arrays, &mut out);
            let graph = device.end_capture(&S).unwrap();
            device.upload(&mut sampled.buffer, 0, &vec![0xff; n * 16]).unwrap();
            device.replay(&S, &graph).unwrap();
        }
        SampleResults {
            sampled: sampled.read(device),
            top_ids: top_ids.read(device),
            top_logprobs: top_logprobs.read(device),
            newest: newest.read(device),
            history: history.read(device),
        }
    }

    /// Returns whether rounding differences can explain the sampled token `token`: whether the CPU samples it
    /// too after small random changes of the logits, top-p and min-p.
    fn within_rounding(&self, q: usize, token: i32) -> bool {
        let slot = self.logits_rows[q].seq_slot as usize;
        let drawn =
            self.logits_rows[q].known_token < 0 && self.sampling_params[slot].temperature >= 1e-5;
        drawn
            && (1..=64).any(|trial| {
                let mut numbers = RandomNumbers::new(trial);
                let mut one = self.single_row(q);
                for x in &mut one.logits {
                    *x += 2e-6 * (1.0 + x.abs()) * numbers.float();
                }
                one.sampling_params[slot].min_p *= 1.0 + 1e-5 * numbers.float();
                if one.sampling_params[slot].top_p < 1.0 {
                    one.sampling_params[slot].top_p *= 1.0 + 1e-5 * numbers.float();
                }
                one.on_cpu().token(0) == token
            })
    }

    /// Compares the results of every device with the CPU's, and returns the CPU's results.
    fn check(&self) -> SampleResults {
        let expected = self.on_cpu();
        for device in devices() {
            self.compare(&self.on(&device), &expected, device.arch());
        }
        expected
    }

    /// Panics if results differ from the CPU's by more than rounding explains.
    fn compare(&self, got: &SampleResults, expected: &SampleResults, device: &str) {
        let mut slots_equal = vec![true; self.sampling_params.len()];
        for q in 0..self.logits_rows.len() {
            if !slots_equal[self.logits_rows[q].seq_slot as usize] {
                continue; // This draft token follows one that only this device has accepted.
            }
            if got.token(q) != expected.token(q) && self.within_rounding(q, got.token(q)) {
                println!("{device}: logits_row {q} was decided by rounding");
                slots_equal[self.logits_rows[q].seq_slot as usize] = false;
                continue;
            }
            let params = &self.sampling_params[self.logits_rows[q].seq_slot as usize];
            let name = format!("{device}: {q} {:?} {params:?}", self.logits_rows[q]);
            assert_eq!(got.token(q), expected.token(q), "{name}");
            assert_eq!(got.status(q), expected.status(q), "{name}");
            assert_eq!(got.rank(q), expected.rank(q), "{name}");
            assert!((got.logprob(q) - expected.logprob(q)).abs() < 1e-5, "{name}");
            let list = q * self.max_top..(q + 1) * self.max_top;
            assert_eq!(got.top_ids[list.clone()], expected.top_ids[list.clone()], "{name}");
            for (a, b) in got.top_logprobs[list.clone()].iter().zip(&expected.top_logprobs[list]) {
                assert!((a - b).abs() < 1e-5 || (a.is_nan() && b.is_nan()), "{a} {b} {name}");
            }
        }
        for slot in (0..self.sampling_params.len()).filter(|slot| slots_equal[*slot]) {
            let newest = slot * 3..(slot + 1) * 3;
            assert_eq!(got.newest[newest.clone()], expected.newest[newest], "slot {slot}");
            let ids = slot * MAX_LEN..(slot + 1) * MAX_LEN;
            assert_eq!(got.history[ids.clone()], expected.history[ids]);
        }
    }
}

fn chosen(top: i32) -> StagedLogitsRow {
    StagedLogitsRow { known_token: -1, top, ..StagedLogitsRow::default() }
}

/// Returns random sampling parameters, each of which may be off.
fn random_params(numbers: &mut RandomNumbers) -> SequenceSamplingParams {
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
fn random_sampling_params_match_the_cpu() {
    for vocabulary in [1, 37, 2048, 2049, 6001] {
        let mut numbers = RandomNumbers::fresh(vocabulary as u64);
        let mut case = SampleCase::new(vocabulary, 8);
        for q in 0..40 {
            let mut params = random_params(&mut numbers);
            let coarse = |x: &f32| if q % 3 == 0 { (x * 2.0).round() / 2.0 } else { *x };
            let logits: Vec<f32> = row(&mut numbers, vocabulary).iter().map(coarse).collect();
            let known_ids: Vec<i32> =
                (0..numbers.below(20)).map(|_| numbers.below(vocabulary.min(30)) as i32).collect();
            let masked = numbers.below(4) == 0;
            params.flags |= if masked { RULE_MASKED } else { 0 };
            let mut logits_row = chosen([-1, 0, 3, 8][numbers.below(4)]);
            if numbers.below(6) == 0 {
                logits_row.known_token = numbers.below(vocabulary) as i32;
            }
            if numbers.below(2) == 0 {
                logits_row.edits_at = case.edits.len() as i32;
                logits_row.edits = numbers.below(600) as i32;
                case.add_random_edits(&mut numbers, logits_row.edits as usize, &known_ids);
            }
            if numbers.below(4) == 0 {
                case.mask_row(&mut numbers, &mut logits_row);
            }
            case.add_row(&logits, params, &known_ids, logits_row);
            if masked {
                (0..numbers.below(80)).for_each(|_| case.allow(numbers.below(vocabulary)));
            }
        }
        let results = case.check();
        assert!((0..40).any(|q| results.status(q) == SAMPLE_OK));
    }
}

#[test]
fn filters_over_a_real_vocabulary() {
    let vocabulary = 151_937; // The vocabulary size is odd, so that rows are not aligned.
    let mut numbers = RandomNumbers::fresh(3);
    let mut case = SampleCase::new(vocabulary, 1024);
    let logits = row(&mut numbers, vocabulary);
    let flat: Vec<f32> = logits.iter().map(|x| x * 0.1).collect();
    let drawn = |key| SequenceSamplingParams { temperature: 1.0, key, ..plain() };
    case.add_row(&logits, plain(), &[], chosen(20));
    case.add_row(&logits, drawn(1), &[], chosen(1024));
    case.add_row(&flat, drawn(2), &[], chosen(0));
    case.add_row(&flat, SequenceSamplingParams { top_p: 0.95, ..drawn(3) }, &[], chosen(-1));
    case.add_row(&flat, SequenceSamplingParams { top_p: 0.1, ..drawn(4) }, &[], chosen(-1));
    case.add_row(
        &flat,
        SequenceSamplingParams { top_k: 50, top_p: 0.9, ..drawn(5) },
        &[],
        chosen(-1),
    );
    case.add_row(
        &flat,
        SequenceSamplingParams { top_k: 20_000, top_p: 0.9, ..drawn(6) },
        &[],
        chosen(-1),
    );
    case.add_row(&logits, SequenceSamplingParams { min_p: 0.05, ..drawn(7) }, &[], chosen(-1));
    case.add_row(&flat, SequenceSamplingParams { top_k: 1, ..drawn(8) }, &[], chosen(-1));
    case.check();
}

/// Gemma 3 has 262,208 token ids, more than 128 chunks of a logits row; the second size is the largest.
#[test]
fn large_vocabularies_agree_with_the_cpu() {
    for vocabulary in [262_208, 524_288] {
        let mut numbers = RandomNumbers::fresh(vocabulary as u64);
        let mut case = SampleCase::new(vocabulary, 20);
        let mut logits = row(&mut numbers, vocabulary);
        logits[vocabulary - 1] = 40.0;
        let drawn = |key| SequenceSamplingParams { temperature: 1.0, key, ..plain() };
        case.add_row(&logits, plain(), &[], chosen(20));
        logits[vocabulary - 1] = 0.0;
        let filtered = SequenceSamplingParams { top_k: 200, top_p: 0.9, ..drawn(1) };
        case.add_row(&logits, filtered, &[], chosen(-1));
        let results = case.check();
        assert_eq!(results.token(0), vocabulary as i32 - 1);
    }
}

/// If all logits are equal, the top-k tokens are in ascending order of their ids.
#[test]
fn equal_logits_are_ordered_by_id() {
    let vocabulary = 5000;
    let level = vec![0.25; vocabulary];
    let mut case = SampleCase::new(vocabulary, 1024);
    let drawn = |key| SequenceSamplingParams { temperature: 1.0, key, ..plain() };
    case.add_row(&level, plain(), &[], chosen(1000));
    case.add_row(&level, SequenceSamplingParams { top_k: 1300, ..drawn(1) }, &[], chosen(1024));
    case.add_row(&level, SequenceSamplingParams { top_k: 3, ..drawn(2) }, &[], chosen(-1));
    case.add_row(&level, SequenceSamplingParams { top_p: 0.01, ..drawn(3) }, &[], chosen(-1));
    let zeros: Vec<f32> = (0..vocabulary).map(|i| if i % 2 == 0 { -0.0 } else { 0.0 }).collect();
    case.add_row(&zeros, plain(), &[], chosen(7));
    let results = case.check();
    assert_eq!(results.token(0), 0);
    assert_eq!(results.top_ids[..1000], (0..1000).collect::<Vec<_>>());
    assert!(results.token(2) < 3 && results.token(3) < 50);
}

#[test]
fn non_finite_and_masked_rows_fail_alone() {
    let vocabulary = 4100;
    let mut numbers = RandomNumbers::fresh(8);
    let good = row(&mut numbers, vocabulary);
    let mut case = SampleCase::new(vocabulary, 2);
    for (at, strange) in [(0, f32::NAN), (4099, f32::INFINITY), (2048, f32::NEG_INFINITY)] {
        let mut logits = good.clone();
        logits[at] = strange;
        case.add_row(&logits, plain(), &[], chosen(-1));
        case.add_row(
            &logits,
            SequenceSamplingParams { temperature: 1.0, top_p: 0.5, ..plain() },
            &[],
            chosen(2),
        );
        case.add_row(
            &logits,
            plain(),
            &[],
            StagedLogitsRow { known_token: 5, top: 1, ..StagedLogitsRow::default() },
        );
        case.add_row(
            &logits,
            plain(),
            &[],
            StagedLogitsRow { known_token: 5, top: -1, ..StagedLogitsRow::default() },
        );
    }
    case.add_row(&good, SequenceSamplingParams { flags: RULE_MASKED, ..plain() }, &[], chosen(-1));
    case.add_row(
        &good,
        SequenceSamplingParams { flags: RULE_MASKED, temperature: 1.0, ..plain() },
        &[],
        chosen(1),
    );
    case.add_row(&good, plain(), &[], StagedLogitsRow { token: -1, ..chosen(1) });
    let results = case.check();
    let statuses: Vec<u32> = (0..case.logits_rows.len()).map(|q| results.status(q)).collect();
    let (ok, bad, masked) = (SAMPLE_OK, SAMPLE_NON_FINITE, SAMPLE_ALL_MASKED);
    assert_eq!(statuses, [[bad, bad, bad, ok].repeat(3), vec![masked, masked, ok]].concat());
    assert_eq!(results.token(14), -1);
}

/// Compares the GPU with the CPU for the verification of draft tokens in one launch, and with a request's
/// logits rows split over two launches.
#[test]
fn draft_verification_matches_the_cpu() {
    for (seed, verification) in [
        (1, DraftVerification::MatchSampled),
        (2, DraftVerification::Synthetic { per_mille: 700, decrease: 0 }),
        (3, DraftVerification::Synthetic { per_mille: 1600, decrease: 1000 }),
    ] {
        let mut numbers = RandomNumbers::fresh(seed);
        let mut case = SampleCase { verification, ..SampleCase::new(2051, 2) };
        for r in 0..24 {
            let params = SequenceSamplingParams {
                temperature: [0.0, 0.4][r % 2],
                presence: 0.5,
                flags: if r % 3 == 0 { RULE_HISTORY } else { 0 },
                key: numbers.bits(),
                ..plain()
            };
            case.add_draft_rows(&mut numbers, params, r % 5);
        }
        let full = case.check();
        let accepted =
            (0..case.logits_rows.len()).filter(|&q| full.status(q) == SAMPLE_DRAFT_ACCEPTED);
        let drafts = case.logits_rows.iter().filter(|row| row.has_draft != 0).count();
        assert!((1..drafts).contains(&accepted.count()));
        let in_two_launches = |on: &dyn Fn(&SampleCase) -> SampleResults, cut| {
            let first = on(&case.slice_rows(0..cut, None));
            let second = on(&case.slice_rows(cut..case.logits_rows.len(), Some(&first)));
            ([first.sampled, second.sampled].concat(), second.newest, second.history)
        };
        for cut in 1..9 {
            let expected = (full.sampled.clone(), full.newest.clone(), full.history.clone());
            assert_eq!(in_two_launches(&SampleCase::on_cpu, cut), expected, "cut at {cut}");
        }
        for device in devices() {
            let SampleResults { sampled, newest, history, .. } = case.on(&device);
            for cut in [1, 2, 4, 5, 8] {
                let expected = (sampled.clone(), newest.clone(), history.clone());
                let found = in_two_launches(&|case| case.on(&device), cut);
                assert_eq!(found, expected, "{}, cut at {cut}", device.arch());
            }
        }
    }
}

#[test]
fn sampling_is_batch_invariant() {
    let vocabulary = 6001;
    let mut numbers = RandomNumbers::fresh(21);
    let mut case = SampleCase::new(vocabulary, 5);
    for _ in 0..70 {
        let logits = row(&mut numbers, vocabulary);
        let known_ids: Vec<i32> = (0..9).map(|_| numbers.below(30) as i32).collect();
        case.add_row(&logits, random_params(&mut numbers), &known_ids, chosen(5));
    }
    for device in devices() {
        let all = case.on(&device);
        for q in [0, 1, 2, 33, 69] {
            let one = case.single_row(q).on(&device);
            assert_eq!(one.sampled[..4], all.sampled[4 * q..][..4], "{}", device.arch());
            assert_eq!(one.top_logprobs[..5], all.top_logprobs[5 * q..][..5]);
        }
    }
}

#[test]
fn captured_sampling_matches_eager() {
    let vocabulary = 2500;
    let mut numbers = RandomNumbers::fresh(22);
    let mut case = SampleCase::new(vocabulary, 5);
    for _ in 0..12 {
        let logits = row(&mut numbers, vocabulary);
        case.add_row(&logits, random_params(&mut numbers), &[3, 4, 5, 3], chosen(5));
    }
    for device in devices() {
        assert_eq!(case.launch(&device, true), case.on(&device), "{}", device.arch());
    }
}

/// Compares the frequencies of sampled tokens with the softmax.
#[test]
fn frequencies_follow_the_softmax() {
    let vocabulary = 12;
    let logits: Vec<f32> = (0..vocabulary).map(|i| (i * 5 % 12) as f32 / 4.0).collect();
    let (draws, temperature) = (1500, 0.8);
    let mut case = SampleCase::new(vocabulary, 1);
    for key in 0..draws {
        case.add_row(
            &logits,
            SequenceSamplingParams { temperature, key, ..plain() },
            &[],
            chosen(-1),
        );
    }
    let p: Vec<f32> = logits.iter().map(|x| (x / temperature).exp()).collect();
    let total: f32 = p.iter().sum();
    for device in devices() {
        let results = case.on(&device);
        let mut counts = vec![0.0; vocabulary];
        (0..draws as usize).for_each(|q| counts[results.token(q) as usize] += 1.0);
        let chi2: f32 = counts
            .iter()
            .zip(&p)
            .map(|(n, p)| (n - draws as f32 * p / total).powi(2) / (draws as f32 * p / total))
            .sum();
        // chi2 has 11 degrees of freedom: mean 11, standard deviation 4.7. The samples are the same in every
        // run.
        assert!(chi2 < 27.0, "{}: chi2 {chi2}", device.arch());
    }
}

#[test]
fn top_logprobs_over_kernel_limit_are_rejected() {
    let mut case = SampleCase::new(50, 1025);
    case.add_row(&[0.0; 50], plain(), &[], chosen(1));
    let device = &devices()[0];
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.on(device)));
    assert!(result.is_err());
}
