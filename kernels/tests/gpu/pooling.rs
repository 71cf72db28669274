//! Sums of hidden states on the GPU have the bits of the CPU.

use device::{MatMut, MatRef, bf16};
use kernels::HiddenStateSum;

use crate::support::{DeviceArray, GpuTestFloat, RandomNumbers, S, devices, oracle};

fn one_row(array: &[i32]) -> MatRef<'_> {
    MatRef::of(array, 1, array.len()).unwrap()
}

/// Sums the hidden states of four rows of several lengths. Two rows continue their sequences from an earlier
/// step; one of the five sequence slots is not used.
fn sums<T: GpuTestFloat>(cols: usize) {
    let (tokens, slots) = (300, 5);
    let x = RandomNumbers::fresh(cols as u64).reals::<T>(tokens * cols);
    let before = RandomNumbers::fresh(3).reals::<f32>(slots * cols);
    let (cu_q, seq_slots, continues) = ([0, 1, 9, 266, 300], [4, 1, 0, 2], [1, 0, 0, 1]);
    let mut expected = before.clone();
    let op = HiddenStateSum {
        sums: MatMut::of(&mut expected, slots, cols).unwrap(),
        x: MatRef::of(&x, tokens, cols).unwrap(),
        cu_q: one_row(&cu_q),
        seq_slots: one_row(&seq_slots),
        continues: one_row(&continues),
    };
    oracle().launch(&S, op).unwrap();
    for device in devices() {
        let mut sums = DeviceArray::of(&device, &before, slots, cols);
        let x = DeviceArray::of(&device, &x, tokens, cols);
        let [cu_q, seq_slots, continues] = [&cu_q[..], &seq_slots[..], &continues[..]]
            .map(|array| DeviceArray::row(&device, array));
        let op = HiddenStateSum {
            sums: sums.mat_mut(),
            x: x.mat(),
            cu_q: cu_q.mat(),
            seq_slots: seq_slots.mat(),
            continues: continues.mat(),
        };
        device.launch(&S, op).unwrap();
        assert_eq!(sums.read(&device), expected, "{} {cols} columns", device.arch());
    }
}

#[test]
fn hidden_state_sums_have_the_bits_of_the_cpu() {
    for cols in [33, 128, 200] {
        sums::<f32>(cols);
        sums::<bf16>(cols);
    }
}
