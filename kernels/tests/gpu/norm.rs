//! Norms of the GPU match the CPU, for row lengths that together cover every code path of the kernel.

use device::{DeviceDriver, MatMut, MatRef, bf16};
use kernels::{AddRmsNorm, RmsNorm};

use crate::support::{
    DeviceArray, GpuTestFloat, RandomNumbers, S, devices, error, oracle, tolerance,
};

const SHAPES: [(usize, usize); 8] =
    [(1, 1), (2, 17), (5, 96), (3, 1000), (1, 1024), (2, 4096), (1, 10_240), (1, 20_000)];

fn norms<T: GpuTestFloat, W: GpuTestFloat>() {
    let cpu = oracle();
    for (rows, cols) in SHAPES {
        let mut numbers = RandomNumbers::fresh(cols as u64);
        let x = numbers.reals::<T>(rows * cols);
        let delta = numbers.reals::<T>(rows * cols);
        let w = numbers.reals::<W>(cols);
        let [mut normed, mut y] = [(); 2].map(|()| vec![T::of(0.0); rows * cols]);
        let mut summed = x.clone();
        let weight = MatRef::of(&w, 1, cols).unwrap();
        let out = MatMut::of(&mut normed, rows, cols).unwrap();
        cpu.launch(
            &S,
            RmsNorm { y: out, x: MatRef::of(&x, rows, cols).unwrap(), weight, eps: 1e-5 },
        )
        .unwrap();
        let (out, stream) = (MatMut::of(&mut y, rows, cols), MatMut::of(&mut summed, rows, cols));
        let addend = MatRef::of(&delta, rows, cols).unwrap();
        cpu.launch(
            &S,
            AddRmsNorm { y: out.unwrap(), x: stream.unwrap(), delta: addend, weight, eps: 1e-5 },
        )
        .unwrap();
        for device in devices() {
            let name = format!("{} {rows} x {cols}", device.name());
            let weight = DeviceArray::row(&device, &w);
            let mut residual = DeviceArray::of(&device, &x, rows, cols);
            let addend = DeviceArray::of(&device, &delta, rows, cols);
            let mut out = DeviceArray::<T>::poisoned(&device, rows, cols);
            device
                .launch(
                    &S,
                    RmsNorm {
                        y: out.mat_mut(),
                        x: residual.mat(),
                        weight: weight.mat(),
                        eps: 1e-5,
                    },
                )
                .unwrap();
            assert!(error(&out.read(&device), &normed) < tolerance::<T>(), "{name}");
            let mut out = DeviceArray::<T>::poisoned(&device, rows, cols);
            let stream = residual.mat_mut();
            device
                .launch(
                    &S,
                    AddRmsNorm {
                        y: out.mat_mut(),
                        x: stream,
                        delta: addend.mat(),
                        weight: weight.mat(),
                        eps: 1e-5,
                    },
                )
                .unwrap();
            assert_eq!(residual.read(&device), summed, "{name}");
            assert!(error(&out.read(&device), &y) < tolerance::<T>(), "{name}");
        }
    }
}

#[test]
fn norms_agree_with_the_cpu() {
    norms::<f32, f32>();
    norms::<bf16, bf16>();
    norms::<bf16, f32>();
}

#[test]
fn norm_rows_are_batch_invariant() {
    let (rows, cols) = (7, 1024);
    let mut numbers = RandomNumbers::fresh(5);
    let (x, w) = (numbers.reals::<bf16>(rows * cols), numbers.reals::<bf16>(cols));
    for device in devices() {
        let weight = DeviceArray::row(&device, &w);
        let norm = |x: &[bf16], rows| {
            let mut y = DeviceArray::<bf16>::poisoned(&device, rows, cols);
            let x = DeviceArray::of(&device, x, rows, cols);
            device
                .launch(&S, RmsNorm { y: y.mat_mut(), x: x.mat(), weight: weight.mat(), eps: 1e-6 })
                .unwrap();
            y.read(&device)
        };
        let all = norm(&x, rows);
        for (row, expected) in x.chunks(cols).zip(all.chunks(cols)) {
            assert_eq!(norm(row, 1), expected);
        }
    }
}
