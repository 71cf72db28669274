//! Step preparation on the GPU writes exactly what the CPU writes.

use device::MatMut;
use kernels::StepPreparation;
use kernels::gpu::GpuBackend;
use kernels::step::{
    RowMetadataField, SequenceSamplingParams, SequenceSlotArrays, StagedLogitsRow,
    StagedSequenceInit, StagedStepRow, StagedTableChange, StagingBuffer, StagingBufferView,
    StepInputArrays,
};

use crate::support::{DeviceArray, GpuTestElement, RandomNumbers, S, devices, oracle};

const SEQ_SLOTS: usize = 6;
const WIDTH: usize = 9;
const MAX_LEN: usize = 40;
const MASK_WORDS: usize = 5;
const PARAM_WORDS: usize = 12;
const BLOCK_TOKENS: usize = 4;

/// Contents of all arrays that step preparation writes: state of the sequence slots, inputs of the step, KV
/// slots of its tokens, and the metadata of its rows (one array per `RowMetadataField`).
#[derive(Debug, Clone, PartialEq)]
struct StepTestArrays {
    seq_slots: [Vec<i32>; 5],
    step: [Vec<i32>; 5],
    slots: Vec<i64>,
    facts: Vec<i32>,
}

const SLOT_COLS: [usize; 5] = [3, WIDTH, MAX_LEN, MASK_WORDS, PARAM_WORDS];

/// Sizes of a prepared step, padding included, and its number of KV groups.
#[derive(Debug, Clone, Copy)]
struct StepTestSizes {
    rows: usize,
    tokens: usize,
    logits_rows: usize,
    groups: usize,
}

/// Returns the number of rows of each array of the sequence slots: block tables have one row per group.
fn slot_rows(groups: usize) -> [usize; 5] {
    [SEQ_SLOTS, groups * SEQ_SLOTS, SEQ_SLOTS, SEQ_SLOTS, SEQ_SLOTS]
}

/// Returns the arrays before a step: the state of sequence slots is random, all other arrays contain −7 as
/// the poison value.
fn step_arrays(numbers: &mut RandomNumbers, sizes: StepTestSizes) -> StepTestArrays {
    let StepTestSizes { rows, tokens, logits_rows, groups } = sizes;
    let rows_of = slot_rows(groups);
    let slot_array =
        |i: usize| (0..rows_of[i] * SLOT_COLS[i]).map(|_| numbers.below(99) as i32).collect();
    let slot_arrays = [0, 1, 2, 3, 4].map(slot_array);
    let step = [tokens, tokens, rows + 1, rows, logits_rows].map(|n| vec![-7; n]);
    let facts = vec![-7; RowMetadataField::COUNT * rows];
    StepTestArrays { seq_slots: slot_arrays, step, slots: vec![-7; groups * tokens], facts }
}

/// Builds a step of `real` rows of a model with `groups` KV groups, of which the first row has 11 tokens, and
/// a padding logits row. With `init`, two sequence slots are initialised.
fn stage(numbers: &mut RandomNumbers, real: usize, init: bool, groups: usize) -> StagingBuffer {
    let mut stage = StagingBuffer::default();
    for r in 0..real {
        let len = if r == 0 { 11 } else { 1 + numbers.below(3) };
        let start = numbers.below(WIDTH * BLOCK_TOKENS - len);
        let ids = if r > 0 && r % 2 == 0 {
            // The row's start position and token id come from the latest token of its sequence slot.
            -1 - numbers.below(3) as i32
        } else {
            stage.push_words((0..len as i32).map(|i| 1000 + i))
        };
        let mut changes = (0..groups as i32).map(|group| {
            let len = numbers.below(4) as i32;
            let at = stage.push_words((0..len).map(|i| 500 + 100 * group + 10 * r as i32 + i));
            let from = (start / BLOCK_TOKENS).min(WIDTH - len as usize) as i32;
            StagedTableChange { from, len, at }
        });
        let StagedTableChange { from: table_from, len: table_len, at: table_at } =
            changes.next().unwrap();
        let further_changes: Vec<_> = changes.collect();
        stage.table_changes.extend(further_changes);
        let (seq_slot, start, len, token) =
            ((SEQ_SLOTS - 1 - r) as i32, start as i32, len as i32, stage.tokens as i32);
        stage.rows.push(StagedStepRow {
            seq_slot,
            start,
            len,
            token,
            ids,
            table_from,
            table_len,
            table_at,
        });
        stage.facts.extend((0..RowMetadataField::COUNT).map(|_| numbers.below(9) as i32));
        stage.tokens += len as usize;
        stage.logits_rows.push(StagedLogitsRow {
            token: token + len - 1,
            seq_slot,
            ..StagedLogitsRow::default()
        });
    }
    if init {
        for (seq_slot, mask) in [(2, true), (5, false)] {
            let history_at = stage.push_words((0..7).map(|i| 70 + i));
            let mask_at =
                if mask { stage.push_words((0..MASK_WORDS as i32).map(|i| i * 3)) } else { -1 };
            let params = SequenceSamplingParams {
                temperature: 0.5,
                key: 1 << 40 | 7,
                prompt_len: 3,
                ..SequenceSamplingParams::default()
            };
            let (history_from, history_len) = (4, 7);
            let reserved = [0; 3];
            stage.inits.push(StagedSequenceInit {
                seq_slot,
                history_at,
                history_from,
                history_len,
                mask_at,
                reserved,
                params,
            });
        }
    }
    stage.logits_rows.push(StagedLogitsRow { token: -1, ..StagedLogitsRow::default() });
    stage
}

fn words_of(stage: &StagingBuffer) -> Vec<i32> {
    let mut bytes = vec![0; stage.bytes()];
    stage.write(&mut bytes);
    bytes.chunks_exact(4).map(<i32 as GpuTestElement>::of_bytes).collect()
}

fn on_cpu(mut arrays: StepTestArrays, words: &[i32], sizes: StepTestSizes) -> StepTestArrays {
    let StepTestSizes { rows, tokens, logits_rows, groups } = sizes;
    // The structs in the staging buffer contain 64-bit fields, so the words need the alignment of a device
    // buffer.
    let mut aligned = oracle_buffer(words);
    let bytes = aligned.mat_mut(device::DType::I32, 1, words.len()).unwrap();
    let view = StagingBufferView { bytes: bytes.as_ref(), rows, tokens, logits_rows };
    let [newest, tables, history, masks, params] = &mut arrays.seq_slots;
    let mut slot_arrays = SequenceSlotArrays {
        latest: MatMut::of(newest, SEQ_SLOTS, 3).unwrap(),
        tables: MatMut::of(tables, groups * SEQ_SLOTS, WIDTH).unwrap(),
        history: MatMut::of(history, SEQ_SLOTS, MAX_LEN).unwrap(),
        masks: MatMut::of(masks, SEQ_SLOTS, MASK_WORDS).unwrap(),
        params: MatMut::of(params, SEQ_SLOTS, PARAM_WORDS).unwrap(),
    };
    let [ids, positions, cu_q, context_lens, logits_indices] = &mut arrays.step;
    let mut step = StepInputArrays {
        ids: MatMut::of(ids, 1, tokens).unwrap(),
        positions: MatMut::of(positions, 1, tokens).unwrap(),
        slots: MatMut::of(&mut arrays.slots, groups, tokens).unwrap(),
        cu_q: MatMut::of(cu_q, 1, rows + 1).unwrap(),
        context_lens: MatMut::of(context_lens, 1, rows).unwrap(),
        logits_indices: MatMut::of(logits_indices, 1, logits_rows).unwrap(),
        row_facts: MatMut::of(&mut arrays.facts, RowMetadataField::COUNT, rows).unwrap(),
    };
    oracle()
        .launch(
            &S,
            StepPreparation {
                stage: &view,
                slots: &mut slot_arrays,
                step: &mut step,
                block_tokens: BLOCK_TOKENS,
            },
        )
        .unwrap();
    arrays
}

fn oracle_buffer(words: &[i32]) -> device::Buffer {
    use device::DeviceDriver;
    let cpu = oracle();
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let mut buffer = cpu.alloc(bytes.len()).unwrap();
    cpu.upload(&mut buffer, 0, &bytes).unwrap();
    buffer
}

fn on_device(
    device: &GpuBackend,
    arrays: &StepTestArrays,
    words: &[i32],
    sizes: StepTestSizes,
) -> StepTestArrays {
    let StepTestSizes { rows, tokens, logits_rows, groups } = sizes;
    let words = DeviceArray::row(device, words);
    let view = StagingBufferView { bytes: words.mat(), rows, tokens, logits_rows };
    let rows_of = slot_rows(groups);
    let slot_array =
        |i: usize| DeviceArray::of(device, &arrays.seq_slots[i], rows_of[i], SLOT_COLS[i]);
    let mut device_slots = [0, 1, 2, 3, 4].map(slot_array);
    let mut step_arrays = arrays.step.each_ref().map(|x| DeviceArray::row(device, x));
    let mut slots = DeviceArray::of(device, &arrays.slots, groups, tokens);
    let mut facts = DeviceArray::of(device, &arrays.facts, RowMetadataField::COUNT, rows);
    let [newest, tables, history, masks, params] =
        device_slots.each_mut().map(DeviceArray::mat_mut);
    let mut slot_arrays = SequenceSlotArrays { latest: newest, tables, history, masks, params };
    let [ids, positions, cu_q, context_lens, logits_indices] =
        step_arrays.each_mut().map(DeviceArray::mat_mut);
    let mut step = StepInputArrays {
        ids,
        positions,
        slots: slots.mat_mut(),
        cu_q,
        context_lens,
        logits_indices,
        row_facts: facts.mat_mut(),
    };
    device
        .launch(
            &S,
            StepPreparation {
                stage: &view,
                slots: &mut slot_arrays,
                step: &mut step,
                block_tokens: BLOCK_TOKENS,
            },
        )
        .unwrap();
    StepTestArrays {
        seq_slots: device_slots.each_ref().map(|x| x.read(device)),
        step: step_arrays.each_ref().map(|x| x.read(device)),
        slots: slots.read(device),
        facts: facts.read(device),
    }
}

#[test]
fn prepared_step_matches_the_cpu() {
    let mut numbers = RandomNumbers::fresh(77);
    let steps =
        [(1, 0, false), (3, 0, true), (3, 2, true), (6, 9, false), (6, 0, true), (0, 4, true)];
    for ((real, padding, init), groups) in
        steps.into_iter().flat_map(|step| [1, 2, 3].map(|groups| (step, groups)))
    {
        let staged = stage(&mut numbers, real, init, groups);
        let words = words_of(&staged);
        let sizes = StepTestSizes {
            rows: real + padding,
            tokens: staged.tokens + padding,
            logits_rows: staged.logits_rows.len() + padding,
            groups,
        };
        let before = step_arrays(&mut numbers, sizes);
        let expected = on_cpu(before.clone(), &words, sizes);
        let padding_slots = expected.slots.chunks(sizes.tokens.max(1));
        assert!(padding_slots.into_iter().all(|slots| {
            slots.iter().enumerate().all(|(t, &slot)| (slot == -1) == (t >= staged.tokens))
        }));
        for device in devices() {
            let got = on_device(&device, &before, &words, sizes);
            let arch = device.arch();
            assert_eq!(got, expected, "{arch} {real} rows, {padding} padding, {groups} groups");
        }
    }
}

/// A step of two KV groups: each group has its own KV slots, and its own table of every sequence slot.
#[test]
fn groups_have_separate_tables_and_slots() {
    let mut stage = StagingBuffer::default();
    let ids = stage.push_words([7, 8, 9]);
    let table_at = stage.push_words([40, 41, 50]);
    let row = StagedStepRow { seq_slot: 2, start: 3, len: 3, ids, ..StagedStepRow::default() };
    stage.rows.push(StagedStepRow { table_len: 2, table_at, ..row });
    // Group 1 keeps the first entry of its table.
    stage.table_changes.push(StagedTableChange { from: 1, len: 1, at: table_at + 2 });
    stage.tokens = 3;
    let sizes = StepTestSizes { rows: 1, tokens: 4, logits_rows: 0, groups: 2 };
    let mut before = step_arrays(&mut RandomNumbers::fresh(5), sizes);
    let table = (SEQ_SLOTS + 2) * WIDTH; // Of group 1.
    before.seq_slots[1][table] = 30;
    let after = on_cpu(before.clone(), &words_of(&stage), sizes);
    assert_eq!(after.slots, [163, 164, 165, -1, 123, 200, 201, -1]);
    assert_eq!(after.seq_slots[1][2 * WIDTH..][..2], [40, 41]);
    assert_eq!(after.seq_slots[1][table..][..2], [30, 50]);
    for device in devices() {
        assert_eq!(on_device(&device, &before, &words_of(&stage), sizes), after);
    }
}

/// Compares GPU and CPU for a prompt whose tokens and block table entries several thread blocks prepare.
#[test]
fn long_prompts_are_prepared_by_several_blocks() {
    let (tokens, block_tokens) = (5000_usize, 16_usize);
    let mut stage = StagingBuffer::default();
    let table_len = tokens.div_ceil(block_tokens);
    let ids = stage.push_words((0..tokens as i32).map(|i| i * 7));
    let table_at = stage.push_words((0..table_len as i32).map(|i| 1000 - i));
    let row = StagedStepRow {
        len: tokens as i32,
        ids,
        table_len: table_len as i32,
        table_at,
        ..StagedStepRow::default()
    };
    stage.rows.push(row);
    stage.tokens = tokens;
    let words = words_of(&stage);
    for device in devices() {
        let words = DeviceArray::row(&device, &words);
        let view = StagingBufferView { bytes: words.mat(), rows: 1, tokens, logits_rows: 0 };
        let poisoned = |n| DeviceArray::<i32>::poisoned(&device, 1, n);
        let mut device_slots = [3, table_len + 3, 4, 1, PARAM_WORDS].map(poisoned);
        let mut step_arrays = [tokens, tokens, 2, 1, 1].map(poisoned);
        let mut slots = DeviceArray::<i64>::poisoned(&device, 1, tokens);
        let mut facts = DeviceArray::<i32>::poisoned(&device, RowMetadataField::COUNT, 1);
        let [newest, tables, history, masks, params] =
            device_slots.each_mut().map(DeviceArray::mat_mut);
        let mut slot_arrays = SequenceSlotArrays { latest: newest, tables, history, masks, params };
        let [ids, positions, cu_q, context_lens, logits_indices] =
            step_arrays.each_mut().map(DeviceArray::mat_mut);
        let mut step = StepInputArrays {
            ids,
            positions,
            slots: slots.mat_mut(),
            cu_q,
            context_lens,
            logits_indices,
            row_facts: facts.mat_mut(),
        };
        device
            .launch(
                &S,
                StepPreparation {
                    stage: &view,
                    slots: &mut slot_arrays,
                    step: &mut step,
                    block_tokens,
                },
            )
            .unwrap();
        let expected =
            |t: usize| ((1000 - t / block_tokens) * block_tokens + t % block_tokens) as i64;
        assert_eq!(slots.read(&device), (0..tokens).map(expected).collect::<Vec<_>>());
        assert_eq!(step_arrays[0].read(&device)[4999], 4999 * 7);
        assert_eq!(step_arrays[2].read(&device), [0, tokens as i32]);
        let table = device_slots[1].read(&device);
        assert_eq!((table[table_len - 1], table[table_len]), (1000 - table_len as i32 + 1, -1));
    }
}
