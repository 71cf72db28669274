//! Activations and additions of the GPU match the CPU.

use device::{DeviceDriver, MatMut, MatRef, bf16};
use kernels::{
    GateActivation, GatedActivation, GatedProduct, LogitSoftcap, SigmoidGatedAdd, TensorAdd,
    TensorScalarMul,
};

use crate::support::{
    DeviceArray, GpuTestFloat, RandomNumbers, S, devices, error, oracle, tolerance,
};

const GATES: [GateActivation; 3] = [
    GateActivation::Silu,
    GateActivation::GeluTanh,
    GateActivation::ClampedSilu { alpha: 1.702, limit: 7.0 },
];

fn activations<T: GpuTestFloat>() {
    let cpu = oracle();
    for (rows, cols) in [(1, 1), (3, 33), (2, 9000), (5, 768)] {
        let mut numbers = RandomNumbers::fresh(cols as u64 + 7);
        let x: Vec<T> = (0..rows * 2 * cols).map(|_| T::of(numbers.float() * 20.0)).collect();
        let b = numbers.reals::<T>(rows * cols);
        let mut sum = vec![T::of(0.0); rows * cols];
        let wide = MatRef::of(&x, rows, 2 * cols).unwrap();
        let activations = GATES.map(|activation| {
            let mut y = vec![T::of(0.0); rows * cols];
            let out = MatMut::of(&mut y, rows, cols).unwrap();
            cpu.launch(&S, GatedActivation { y: out, x: wide, activation }).unwrap();
            y
        });
        let (left, right) = (wide.columns(0, cols), MatRef::of(&b, rows, cols).unwrap());
        cpu.launch(
            &S,
            TensorAdd { y: MatMut::of(&mut sum, rows, cols).unwrap(), a: left, b: right },
        )
        .unwrap();
        for device in devices() {
            let name = format!("{} {rows} x {cols}", device.name());
            let (wide, b) = (
                DeviceArray::of(&device, &x, rows, 2 * cols),
                DeviceArray::of(&device, &b, rows, cols),
            );
            for (activation, expected) in GATES.into_iter().zip(&activations) {
                let mut y = DeviceArray::<T>::poisoned(&device, rows, cols);
                let op = GatedActivation { y: y.mat_mut(), x: wide.mat(), activation };
                device.launch(&S, op).unwrap();
                let error = error(&y.read(&device), expected);
                assert!(error < tolerance::<T>(), "{name} {activation:?}: {error:e}");
                let [gate, up] = [0, cols].map(|first| wide.mat().columns(first, cols));
                let mut separate = DeviceArray::<T>::poisoned(&device, rows, cols);
                let op = GatedProduct { y: separate.mat_mut(), gate, up, activation };
                device.launch(&S, op).unwrap();
                assert_eq!(separate.read(&device), y.read(&device), "{name} {activation:?}");
            }
            let mut y = DeviceArray::<T>::poisoned(&device, rows, cols);
            device
                .launch(
                    &S,
                    TensorAdd { y: y.mat_mut(), a: wide.mat().columns(0, cols), b: b.mat() },
                )
                .unwrap();
            assert_eq!(y.read(&device), sum, "{name}");
        }
    }
}

fn softcapped<T: GpuTestFloat>() {
    let cpu = oracle();
    for (rows, cols, cap) in [(1, 1, 30.0), (3, 33, 5.0), (2, 9000, 50.0)] {
        let mut numbers = RandomNumbers::fresh(cols as u64 + 3);
        let mut x: Vec<T> = (0..rows * cols).map(|_| T::of(numbers.float() * 90.0)).collect();
        x[0] = T::of(-3e38);
        let mut expected = x.clone();
        let out = MatMut::of(&mut expected, rows, cols).unwrap();
        cpu.launch(&S, LogitSoftcap { x: out, cap }).unwrap();
        for device in devices() {
            let mut y = DeviceArray::of(&device, &x, rows, cols);
            device.launch(&S, LogitSoftcap { x: y.mat_mut(), cap }).unwrap();
            let got = y.read(&device);
            assert!(error(&got, &expected) < tolerance::<T>(), "{rows} x {cols}");
            assert_eq!(error(&got[..1], &[T::of(-cap)]), 0.0, "the least logit is the bound");
        }
    }
}

fn scaled_and_gated<T: GpuTestFloat>() {
    let cpu = oracle();
    for (rows, cols) in [(1, 1), (3, 33), (2, 9000), (5, 768)] {
        let mut numbers = RandomNumbers::fresh(cols as u64 + 11);
        let [x, y] = [(); 2].map(|()| numbers.reals::<T>(rows * cols));
        let mut gate: Vec<f32> = (0..rows).map(|_| numbers.float() * 9.0).collect();
        gate[0] = -200.0;
        let (mut scaled, mut sum) = (x.clone(), y.clone());
        let out = MatMut::of(&mut scaled, rows, cols).unwrap();
        cpu.launch(&S, TensorScalarMul { x: out, factor: 0.22 }).unwrap();
        let (input, logits) = (MatRef::of(&x, rows, cols), MatRef::of(&gate, rows, 1));
        let out = MatMut::of(&mut sum, rows, cols).unwrap();
        let op = SigmoidGatedAdd { y: out, x: input.unwrap(), gate: logits.unwrap() };
        cpu.launch(&S, op).unwrap();
        for device in devices() {
            let name = format!("{} {rows} x {cols}", device.name());
            let mut out = DeviceArray::of(&device, &x, rows, cols);
            device.launch(&S, TensorScalarMul { x: out.mat_mut(), factor: 0.22 }).unwrap();
            assert_eq!(out.read(&device), scaled, "{name}");
            let mut out = DeviceArray::of(&device, &y, rows, cols);
            let input = DeviceArray::of(&device, &x, rows, cols);
            let logits = DeviceArray::of(&device, &gate, rows, 1);
            let op = SigmoidGatedAdd { y: out.mat_mut(), x: input.mat(), gate: logits.mat() };
            device.launch(&S, op).unwrap();
            let got = out.read(&device);
            assert!(error(&got, &sum) < tolerance::<T>(), "{name}");
            assert_eq!(got[..cols], y[..cols], "{name}: a closed gate adds nothing");
        }
    }
}

#[test]
fn scaling_and_gates_agree_with_the_cpu() {
    scaled_and_gated::<f32>();
    scaled_and_gated::<bf16>();
}

#[test]
fn softcap_agrees_with_the_cpu() {
    softcapped::<f32>();
    softcapped::<bf16>();
}

#[test]
fn activations_and_sums_agree_with_the_cpu() {
    activations::<f32>();
    activations::<bf16>();
}
