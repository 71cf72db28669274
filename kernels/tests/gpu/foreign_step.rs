//! Conversion of the arrays of a foreign host on the GPU writes exactly what the CPU writes.

use std::ops::Range;

use device::{MatMut, MatRef};
use kernels::gpu::GpuBackend;
use kernels::{ForeignStepArrays, ForeignStepInputs, ForeignStepPreparation};

use crate::support::{DeviceArray, RandomNumbers, S, devices, oracle};

/// Arrays of a host, in both integer types, with garbage in the padding.
struct HostArrays {
    ids: Vec<i64>,
    positions: Vec<i64>,
    slots: Vec<i64>,
    row_starts: Option<Vec<i32>>,
    context_lens: Vec<i64>,
}

/// Arrays of a forward pass: ids, positions, row boundaries and context lengths, then KV slots.
type ForwardArrays = ([Vec<i32>; 4], Vec<i64>);

fn narrow(wide: &[i64]) -> Vec<i32> {
    wide.iter().map(|&x| x as i32).collect()
}

/// A step of rows of any length, or of `tokens` rows of one token, of which those from `real` on are padding.
fn host_arrays(numbers: &mut RandomNumbers, tokens: usize, real: Option<usize>) -> HostArrays {
    let mut random = |n: usize, range: Range<usize>| -> Vec<i64> {
        (0..n).map(|_| (range.start + numbers.below(range.len())) as i64).collect()
    };
    let (ids, positions) = (random(tokens, 0..9999), random(tokens, 0..5000));
    let slots = random(tokens, 0..70_000).into_iter().map(|slot| slot - 1).collect();
    let Some(real) = real else {
        let rows = tokens.div_ceil(3);
        let starts = (0..=rows).map(|r| (3 * r).min(tokens) as i32).collect();
        let context_lens = random(rows, 1..6000);
        return HostArrays { ids, positions, slots, row_starts: Some(starts), context_lens };
    };
    let mut context_lens = random(tokens, 1..6000);
    context_lens[real..].fill(0);
    HostArrays { ids, positions, slots, row_starts: None, context_lens }
}

fn poisoned(host: &HostArrays) -> ForwardArrays {
    let (tokens, rows) = (host.ids.len(), host.context_lens.len());
    ([tokens, tokens, rows + 1, rows].map(|n| vec![-7; n]), vec![-7; tokens])
}

fn on_cpu(host: &HostArrays) -> ForwardArrays {
    let (mut words, mut slots) = poisoned(host);
    let row = |x| MatRef::of(x, 1, host.ids.len()).unwrap();
    let [ids, positions, cu_q, context_lens] = words.each_mut().map(|x| {
        let len = x.len();
        MatMut::of(x, 1, len).unwrap()
    });
    let slot_count = slots.len();
    let arrays = ForeignStepArrays {
        ids: row(&host.ids),
        positions: row(&host.positions),
        slots: row(&host.slots),
        row_starts: host.row_starts.as_ref().map(|x| MatRef::of(x, 1, x.len()).unwrap()),
        context_lens: MatRef::of(&host.context_lens, 1, host.context_lens.len()).unwrap(),
    };
    let op = ForeignStepPreparation {
        host: arrays,
        step: ForeignStepInputs {
            ids,
            positions,
            slots: MatMut::of(&mut slots, 1, slot_count).unwrap(),
            cu_q,
            context_lens,
        },
    };
    oracle().launch(&S, op).unwrap();
    (words, slots)
}

/// Runs the op with ids of 32 bits and context lengths of 64 bits if `wide`, otherwise the other way round.
fn on_device(device: &GpuBackend, host: &HostArrays, wide: bool) -> ForwardArrays {
    let (words, slots) = poisoned(host);
    let mut words = words.each_ref().map(|x| DeviceArray::row(device, x));
    let mut slots = DeviceArray::row(device, &slots);
    let [ids32, contexts32] =
        [&host.ids, &host.context_lens].map(|x| DeviceArray::row(device, &narrow(x)));
    let [ids64, contexts64, positions, host_slots] =
        [&host.ids, &host.context_lens, &host.positions, &host.slots]
            .map(|x| DeviceArray::row(device, x));
    let starts = host.row_starts.as_ref().map(|x| DeviceArray::row(device, x));
    let [ids, step_positions, cu_q, context_lens] = words.each_mut().map(DeviceArray::mat_mut);
    let arrays = ForeignStepArrays {
        ids: if wide { ids32.mat() } else { ids64.mat() },
        positions: positions.mat(),
        slots: host_slots.mat(),
        row_starts: starts.as_ref().map(DeviceArray::mat),
        context_lens: if wide { contexts64.mat() } else { contexts32.mat() },
    };
    let op = ForeignStepPreparation {
        host: arrays,
        step: ForeignStepInputs {
            ids,
            positions: step_positions,
            slots: slots.mat_mut(),
            cu_q,
            context_lens,
        },
    };
    device.launch(&S, op).unwrap();
    (words.each_ref().map(|x| x.read(device)), slots.read(device))
}

#[test]
fn foreign_steps_are_converted_as_on_the_cpu() {
    let mut numbers = RandomNumbers::fresh(33);
    for device in devices() {
        for (tokens, real) in [(1, None), (300, None), (1, Some(1)), (8, Some(3)), (257, Some(256))]
        {
            let host = host_arrays(&mut numbers, tokens, real);
            let expected = on_cpu(&host);
            for wide in [false, true] {
                assert_eq!(on_device(&device, &host, wide), expected, "{tokens} tokens, {real:?}");
            }
            let real = real.unwrap_or(tokens);
            let [ids, positions, ..] = &expected.0;
            assert_eq!(ids[..real], narrow(&host.ids)[..real]);
            assert!(ids[real..].iter().chain(&positions[real..]).all(|&x| x == 0));
            assert!(expected.1[real..].iter().all(|&slot| slot == -1));
        }
    }
}

#[test]
fn foreign_steps_of_wrong_lengths_are_rejected() {
    let host = host_arrays(&mut RandomNumbers::new(1), 6, None);
    let mut longer = host_arrays(&mut RandomNumbers::new(1), 6, None);
    longer.row_starts = None;
    let error = std::panic::catch_unwind(|| on_cpu(&longer)).unwrap_err();
    let text = error.downcast_ref::<String>().unwrap();
    assert!(text.contains("rows of one token"), "{text}");
    assert_eq!(on_cpu(&host).0[2], [0, 3, 6]);
}
