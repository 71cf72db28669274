//! Data movement of speculative decoding with an MTP module: a GPU writes exactly what the CPU writes.

use std::sync::Arc;

use device::{Buffer, DType, DeviceDriver, DeviceError, MatMut, bf16};
use kernels::gpu::GpuBackend;
use kernels::step::{
    DraftHiddenStates, DraftPassArgs, DraftPassArrays, StagedDraftRow, StagingBuffer,
};
use kernels::{
    AllGatherFn, DraftArgmax, DraftHiddenStateGather, DraftHiddenStateWrite, DraftIdTranslation,
    DraftInsertion, DraftPassPreparation, KernelBackend, RowGather, VocabParallelDraftArgmax,
    VocabShard,
};

use crate::support::{DeviceArray, GpuTestElement, RandomNumbers, S, devices, oracle};

const SEQ_SLOTS: usize = 5;
const WIDTH: usize = 6;
const BLOCK_TOKENS: usize = 4;
const BLOCKS: usize = SEQ_SLOTS * WIDTH;
const PASSES: usize = 3;
const DEPTH: usize = PASSES + 2;
const MAX_LEN: usize = 24;

/// Returns the five rows of a step: (1) one token with two draft tokens, and the previous hidden state in the
/// sequence slot; (2) a row that starts at position 0; (3) a prefill chunk after a block of another request;
/// (4) one token with the maximum number of draft tokens, which cross the end of a block; (5) one token
/// without draft tokens.
fn rows() -> [StagedDraftRow; 5] {
    let row = |seq_slot, len, drafts, state_in_slot, boundary_block| StagedDraftRow {
        seq_slot,
        len,
        drafts,
        state_in_slot,
        boundary_block,
        ..StagedDraftRow::default()
    };
    let mut rows = [
        row(4, 1, 2, 1, -1),
        row(0, 1, 0, 0, -1),
        row(2, 7, 0, 0, 3),
        row(1, 1, 3, 1, -1),
        row(3, 1, 0, 1, -1),
    ];
    let mut token = 0;
    for row in &mut rows {
        row.token = token;
        token += row.len + row.drafts;
    }
    rows
}

/// Start position of each row of `rows`.
const STARTS: [i32; 5] = [9, 0, 8, 6, 15];

/// Position of the first hidden state that each sequence slot stores. The hidden state of the position before
/// a row's start is at index 1 of slot 4, index 4 of slot 1, and index 0 of slot 3.
const FIRSTS: [i32; SEQ_SLOTS] = [-7, 1, -7, 14, 7];

fn positions() -> Vec<i32> {
    let row = |(row, start): (&StagedDraftRow, i32)| start..start + row.len + row.drafts;
    rows().iter().zip(STARTS).flat_map(row).collect()
}

fn tokens() -> usize {
    rows().iter().map(|row| (row.len + row.drafts) as usize).sum()
}

fn stage_words() -> Vec<i32> {
    let stage = StagingBuffer { drafts: rows().to_vec(), ..StagingBuffer::default() };
    let mut bytes = vec![0; stage.bytes()];
    stage.write(&mut bytes);
    bytes.chunks_exact(4).map(<i32 as GpuTestElement>::of_bytes).collect()
}

/// Returns a CPU buffer with the words of a staged step (the inputs of a step as uploaded to the device). The
/// staged structs contain 64-bit fields, so the words need the alignment of a device buffer.
fn aligned_buffer(words: &[i32]) -> Buffer {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut buffer = oracle().alloc(bytes.len()).unwrap();
    oracle().upload(&mut buffer, 0, &bytes).unwrap();
    buffer
}

/// Returns the block table of each sequence slot; no two requests write to the same block.
fn tables() -> Vec<i32> {
    (0..BLOCKS as i32).map(|i| i * 7 % BLOCKS as i32).collect()
}

/// Returns `n` random token ids below `limit`.
fn tokens_below(numbers: &mut RandomNumbers, n: usize, limit: usize) -> Vec<i32> {
    (0..n).map(|_| numbers.below(limit) as i32).collect()
}

/// Calls `run` with the staged step (the uploaded inputs of a step) and matrices of `data`, on the CPU and on
/// a GPU; both devices must write the same results.
fn device_and_host<T: GpuTestElement>(
    device: &Arc<GpuBackend>,
    data: &[(&[T], usize)],
    run: impl Fn(&KernelBackend, device::MatRef<'_>, Vec<MatMut<'_>>),
) -> Vec<Vec<T>> {
    let words = stage_words();
    let buffer = aligned_buffer(&words);
    let mut expected: Vec<Vec<T>> = data.iter().map(|(x, _)| x.to_vec()).collect();
    let mats = expected.iter_mut().zip(data);
    let mats = mats.map(|(x, (_, cols))| {
        let rows = x.len() / cols;
        MatMut::of(x, rows, *cols).unwrap()
    });
    run(&oracle().into(), buffer.mat(DType::I32, 1, words.len()).unwrap(), mats.collect());
    let stage = DeviceArray::row(device, &words);
    let mut arrays: Vec<DeviceArray<T>> =
        data.iter().map(|(x, cols)| DeviceArray::of(device, x, x.len() / cols, *cols)).collect();
    run(
        &KernelBackend::from(Arc::clone(device)),
        stage.mat(),
        arrays.iter_mut().map(DeviceArray::mat_mut).collect(),
    );
    let got: Vec<Vec<T>> = arrays.iter().map(|x| x.read(device)).collect();
    assert!(got == expected, "{}: {got:?} for {expected:?}", device.arch());
    got
}

#[test]
fn draft_pass_layout_matches_the_cpu() {
    let mut numbers = RandomNumbers::fresh(31);
    let (rows, count) = (rows().len(), rows().len() + 2); // The count includes two padding rows.
    let ids = tokens_below(&mut numbers, tokens(), 900);
    let drafts = tokens_below(&mut numbers, PASSES * count, 900);
    let (tables, step_positions) = (tables(), positions());
    for device in devices() {
        for pass in 0..PASSES {
            let slots = std::cell::RefCell::new(Vec::new());
            let poison = vec![-7; count + 1];
            let mut data = [(&ids[..], ids.len()), (&drafts, count), (&tables, WIDTH)].to_vec();
            data.push((&step_positions, ids.len()));
            let outputs = [(&poison[..], poison.len()); 5];
            let left = device_and_host(
                &device,
                &[&data[..], &outputs].concat(),
                |backend, stage, mut mats| {
                    let [row_seq_slots, context_lens, cu_q, positions, to_ids] =
                        [0; 5].map(|_| mats.pop().unwrap());
                    let [ids, drafts, tables, at] = [0, 1, 2, 3].map(|i| mats[i].as_ref());
                    let mut on_host = vec![-7i64; count];
                    let mut on_device = DeviceArray::row(&device, &on_host);
                    let cpu = backend.name() == oracle().name();
                    let slots_of = if cpu {
                        MatMut::of(&mut on_host, 1, count).unwrap()
                    } else {
                        on_device.mat_mut()
                    };
                    let mut to = DraftPassArrays {
                        ids: to_ids,
                        positions,
                        slots: slots_of,
                        cu_q,
                        context_lens,
                        row_seq_slots,
                    };
                    let pass = DraftPassArgs {
                        pass,
                        rows: count,
                        ids,
                        positions: at,
                        drafts,
                        tables,
                        block_tokens: BLOCK_TOKENS,
                    };
                    backend
                        .launch(&S, DraftPassPreparation { stage, arrays: &mut to, pass: &pass })
                        .unwrap();
                    slots.borrow_mut().push(if cpu { on_host } else { on_device.read(&device) });
                },
            );
            let slots = slots.into_inner();
            assert_eq!(slots[0], slots[1], "{}, pass {pass}", device.arch());
            let real = |r: usize| r < rows && crate::draft::rows()[r].drafts as usize > pass;
            for r in 0..count {
                assert_eq!(slots[1][r] >= 0, real(r), "row {r}");
                assert_eq!(left[7][r] > 0, real(r), "row {r}");
            }
        }
    }
}

fn check_state_copies<T: GpuTestElement>(
    of: impl Fn(&mut RandomNumbers, usize) -> Vec<T>,
    hidden: usize,
) {
    let mut numbers = RandomNumbers::fresh(hidden as u64);
    let mut states = |n: usize| of(&mut numbers, n * hidden);
    let (slot_states, boundary_states, hidden_states) =
        (states(SEQ_SLOTS * DEPTH), states(BLOCKS), states(tokens()));
    let poison = states(tokens());
    let rows = rows().len();
    for device in devices() {
        let data = [
            (&slot_states[..], hidden),
            (&boundary_states, hidden),
            (&hidden_states, hidden),
            (&poison, hidden),
        ];
        for from_slots_only in [true, false] {
            device_and_host(&device, &data, |backend, stage, mut mats| {
                let (y, hidden_states) = (mats.pop().unwrap(), mats.pop().unwrap());
                let (boundary_states, slot_states) = (mats.pop().unwrap(), mats.pop().unwrap());
                with_words(backend, &device, |[positions, first_positions, _]| {
                    let states = DraftHiddenStates {
                        slot_states,
                        first_positions,
                        states_per_slot: DEPTH,
                        boundary_states,
                    };
                    let hidden = Some(hidden_states.as_ref()).filter(|_| !from_slots_only);
                    backend
                        .launch(
                            &S,
                            DraftHiddenStateGather {
                                stage,
                                positions: positions.as_ref(),
                                rows,
                                y,
                                hidden,
                                states: &states,
                            },
                        )
                        .unwrap();
                });
            });
        }
        let left = device_and_host(&device, &data[..3], |backend, stage, mut mats| {
            let hidden_states = mats.pop().unwrap();
            let (boundary_states, slot_states) = (mats.pop().unwrap(), mats.pop().unwrap());
            let firsts = with_words(backend, &device, |[positions, first_positions, tables]| {
                let mut states = DraftHiddenStates {
                    slot_states,
                    first_positions,
                    states_per_slot: DEPTH,
                    boundary_states,
                };
                backend
                    .launch(
                        &S,
                        DraftHiddenStateWrite {
                            stage,
                            positions: positions.as_ref(),
                            states: &mut states,
                            hidden: hidden_states.as_ref(),
                            rows,
                            tables: tables.as_ref(),
                            block_tokens: BLOCK_TOKENS,
                        },
                    )
                    .unwrap();
            });
            assert_eq!(firsts, [0, 5, 13, 14, 8], "{}", backend.name());
        });
        assert!(left[0] != slot_states && left[1] != boundary_states);
    }
}

/// Calls `run` with the tokens' positions, the sequence slots' first positions (`FIRSTS`) and the block
/// tables in memory of `backend`, and returns the first positions afterwards.
fn with_words(
    backend: &KernelBackend,
    device: &GpuBackend,
    run: impl FnOnce([MatMut<'_>; 3]),
) -> Vec<i32> {
    let words = [(positions(), 1), (FIRSTS.to_vec(), 1), (tables(), SEQ_SLOTS)];
    if backend.name() == oracle().name() {
        let mut words = words;
        run(words.each_mut().map(|(x, rows)| {
            let cols = x.len() / *rows;
            MatMut::of(x, *rows, cols).unwrap()
        }));
        let [_, (firsts, _), _] = words;
        return firsts;
    }
    let mut arrays =
        words.each_ref().map(|(x, rows)| DeviceArray::of(device, x, *rows, x.len() / rows));
    run(arrays.each_mut().map(DeviceArray::mat_mut));
    arrays[1].read(device)
}

#[test]
fn draft_states_match_the_cpu() {
    check_state_copies(RandomNumbers::reals::<f32>, 24);
    check_state_copies(RandomNumbers::reals::<bf16>, 13);
}

#[test]
fn argmax_ids_become_drafts() {
    let mut numbers = RandomNumbers::fresh(8);
    for (rows, vocab) in [(1, 40), (3, 3001), (5, 151)] {
        let mut logits: Vec<f32> = numbers.reals(rows * vocab);
        logits[vocab - 1] = 9.0; // The maximum logit occurs twice; the lower id must be chosen.
        logits[vocab / 3] = 9.0;
        for device in devices() {
            let device_logits = DeviceArray::of(&device, &logits, rows, vocab);
            let mut host_logits = logits.clone();
            let host_logits = MatMut::of(&mut host_logits, rows, vocab).unwrap();
            let drafts = vec![-3; 2 * 7];
            let left = device_and_host(&device, &[(&drafts, 7)], |backend, _, mut mats| {
                let cpu = backend.name() == oracle().name();
                let logits = if cpu { host_logits.as_ref() } else { device_logits.mat() };
                backend
                    .launch(
                        &S,
                        DraftArgmax { drafts: mats.pop().unwrap(), pass: 1, first: 2, logits },
                    )
                    .unwrap();
            });
            assert_eq!(left[0][..10], [[-3; 9].to_vec(), vec![vocab as i32 / 3]].concat());
            assert!(left[0][9 + rows..].iter().all(|&id| id == -3));
        }
    }
}

/// Ranks that have one vocabulary shard of each logits row exchange one candidate id per row, and get the
/// argmax of each full row. The shard of the last rank has no ids.
#[test]
fn vocab_parallel_draft_argmax_matches_full_rows() {
    const RANKS: usize = 3;
    let mut numbers = RandomNumbers::fresh(10);
    let (rows, vocab, cols) = (4, 150, 80);
    let mut logits: Vec<f32> = numbers.reals(rows * vocab);
    // The maximum logit of the first row occurs twice, in two shards; the lower id must be chosen.
    (logits[vocab - 1], logits[70]) = (9.0, 9.0);
    (logits[vocab + 120], logits[2 * vocab], logits[3 * vocab + 79]) = (9.0, 9.0, 9.0);
    let shard = |rank: usize| {
        let first = (rank * cols).min(vocab);
        let ids = cols.min(vocab - first);
        VocabShard { first_id: first, ids, cols, vocab, ranks: RANKS }
    };
    let shard_logits = |shard: &VocabShard| -> Vec<f32> {
        let padding = cols - shard.ids;
        let rows = logits.chunks(vocab).map(|row| &row[shard.first_id..][..shard.ids]);
        // Columns after the ids of a shard are padding, which must not be read as logits.
        rows.flat_map(|row| row.iter().copied().chain(vec![99.0; padding])).collect()
    };
    for device in devices() {
        let zero = DeviceArray::row(&device, &[0]);
        let argmax = |rank: usize, gather: &mut AllGatherFn<'_>| {
            let (shard, mut drafts) = (shard(rank), DeviceArray::of(&device, &[-3; 14], 2, 7));
            let logits = DeviceArray::of(&device, &shard_logits(&shard), rows, cols);
            let result = device.launch(
                &S,
                VocabParallelDraftArgmax {
                    drafts: drafts.mat_mut(),
                    pass: 1,
                    first: 2,
                    logits: logits.mat(),
                    shard: &shard,
                    gather,
                },
            );
            (result, drafts.read(&device))
        };
        let mut exchanged = Vec::new();
        for rank in 0..RANKS {
            let (result, _) = argmax(rank, &mut |own, _| {
                let mut words = DeviceArray::<i32>::poisoned(&device, 1, own.cols());
                device
                    .launch(&S, RowGather { y: words.mat_mut(), x: own, rows: zero.mat() })
                    .unwrap();
                exchanged.extend(words.read(&device));
                false
            });
            assert!(matches!(result, Err(DeviceError::PeerRanksFailed)), "{result:?}");
        }
        let all = DeviceArray::row(&device, &exchanged);
        for rank in 0..RANKS {
            let (result, drafts) = argmax(rank, &mut |own, to| {
                assert_eq!((own.cols(), to.cols()), (2 * rows, exchanged.len()));
                device.launch(&S, RowGather { y: to, x: all.mat(), rows: zero.mat() }).unwrap();
                true
            });
            result.unwrap();
            assert_eq!(drafts[9..13], [70, 120, 0, 79], "{}", device.arch());
            assert!(drafts[..9].iter().chain(&drafts[13..]).all(|&id| id == -3));
        }
    }
}

#[test]
fn draft_ids_are_mapped_to_target_ids() {
    let mut numbers = RandomNumbers::fresh(11);
    let (drafts, target_ids) =
        (tokens_below(&mut numbers, 3 * 300, 50), tokens_below(&mut numbers, 50, 9000));
    for device in devices() {
        let data = [(&drafts[..], 300), (&target_ids[..], 50)];
        let left = device_and_host(&device, &data, |backend, _, mut mats| {
            let target_ids = mats.pop().unwrap();
            backend
                .launch(
                    &S,
                    DraftIdTranslation {
                        drafts: mats.pop().unwrap(),
                        pass: 1,
                        count: 290,
                        ids: target_ids.as_ref(),
                    },
                )
                .unwrap();
        });
        for (i, (mapped, draft)) in left[0].iter().zip(&drafts).enumerate() {
            let expected =
                if (300..590).contains(&i) { target_ids[*draft as usize] } else { *draft };
            assert_eq!(*mapped, expected, "{i}");
        }
    }
}

#[test]
fn drafts_are_inserted_into_ids_and_history() {
    let mut numbers = RandomNumbers::fresh(9);
    let rows = rows().len();
    let ids = tokens_below(&mut numbers, tokens(), 900);
    let history = tokens_below(&mut numbers, SEQ_SLOTS * MAX_LEN, 900);
    let drafts = tokens_below(&mut numbers, PASSES * 8, 900);
    for device in devices() {
        let positions = positions();
        let data = [
            (&ids[..], ids.len()),
            (&history, MAX_LEN),
            (&drafts, 8),
            (&positions, positions.len()),
        ];
        let left = device_and_host(&device, &data, |backend, stage, mut mats| {
            let [positions, drafts, history, ids] = [0; 4].map(|_| mats.pop().unwrap());
            backend
                .launch(
                    &S,
                    DraftInsertion {
                        stage,
                        positions: positions.as_ref(),
                        rows,
                        ids,
                        history,
                        drafts: drafts.as_ref(),
                    },
                )
                .unwrap();
        });
        let row = crate::draft::rows()[3];
        let at = (row.token + row.len) as usize;
        assert_eq!(left[0][at..at + 3], [3, 11, 19].map(|i| drafts[i]));
        assert_eq!(left[1][MAX_LEN + 7..MAX_LEN + 10], [3, 11, 19].map(|i| drafts[i]));
    }
}
