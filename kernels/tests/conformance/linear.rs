//! GEMMs of the CPU for shapes that are no multiples of tile sizes, and their independence of batch, threads
//! and tile sizes.

use device::{DType, DeviceStream, MatMut, MatRef, bf16, f16};
use kernels::cpu::CpuBackend;
use kernels::{Linear, PackedMatrix};

use crate::support::{
    CpuTestFloat, SeededNumbers, bytes_of, cast, devices, error, host, tolerance,
};

const S: DeviceStream = DeviceStream(0);

fn run<T: CpuTestFloat>(
    device: &CpuBackend,
    x: &[T],
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    rows: usize,
) -> Vec<T> {
    let mut y = vec![T::of(0.0); rows * w.n()];
    let bias = bias.map(|b| MatRef::of(b, 1, b.len()).unwrap());
    let out = MatMut::of(&mut y, rows, w.n()).unwrap();
    device
        .launch(&S, Linear { y: out, x: MatRef::of(x, rows, w.k()).unwrap(), weight: w, bias })
        .unwrap();
    y
}

fn check<T: CpuTestFloat>(rows: usize, n: usize, k: usize) {
    let mut numbers = SeededNumbers::new((rows * 7919 + n * 31 + k) as u64);
    let (x, w) = (numbers.floats(rows * k), numbers.floats(n * k));
    let bias = numbers.floats(n);
    let expected: Vec<f64> = (0..rows * n)
        .map(|i| {
            let (r, c) = (i / n, i % n);
            let products = (0..k).map(|j| f64::from(x[r * k + j]) * f64::from(w[c * k + j]));
            products.sum::<f64>() + f64::from(bias[c])
        })
        .collect();
    let (bytes, x) = (bytes_of(&w), cast::<T>(&x));
    for device in devices(2) {
        let parts = [host(&bytes, n, k)];
        let packed = device.pack(&parts, T::DTYPE).unwrap();
        let y = run(&device, &x, &packed, Some(&bias), rows);
        let worst = error(&y, &expected);
        let isa = device.isa();
        assert!(worst < tolerance::<T>(), "{rows}x{n}x{k} {isa:?} {:?}: {worst:e}", T::DTYPE);
    }
}

#[test]
fn agrees_with_the_formula() {
    for (rows, n, k) in [
        (1, 1, 2),
        (1, 33, 10),
        (2, 31, 64),
        (3, 64, 130),
        (5, 100, 96),
        (7, 65, 34),
        (11, 32, 256),
        (12, 97, 62),
        (13, 40, 1024),
        (16, 96, 66),
        (25, 200, 18),
        (31, 129, 300),
        (50, 33, 514),
        (14, 40, 2048), // The rows of this shape conflict in the CPU's cache, so they are padded.
    ] {
        check::<f32>(rows, n, k);
        check::<bf16>(rows, n, k);
        check::<f16>(rows, n, k);
    }
    check::<f32>(4, 35, 7); // K may be odd, except for bf16.
    check::<f16>(4, 35, 7);
}

/// Checks that a row of the GEMM output has the same bits alone, in any batch, at any index, and on any
/// number of threads.
fn check_invariance<T: CpuTestFloat>() {
    let (n, k, most) = (70, 130, 30);
    let mut numbers = SeededNumbers::new(11);
    let (x, w) = (cast::<T>(&numbers.floats(most * k)), bytes_of(&numbers.floats(n * k)));
    let mut reference: Vec<Vec<T>> = Vec::new();
    for threads in 1..=3 {
        for (i, device) in devices(threads).iter().enumerate() {
            let packed = device.pack(&[host(&w, n, k)], T::DTYPE).unwrap();
            let single_rows: Vec<T> = (0..most)
                .flat_map(|r| run(device, &x[r * k..(r + 1) * k], &packed, None, 1))
                .collect();
            for rows in 1..=most {
                let y = run(device, &x[..rows * k], &packed, None, rows);
                assert_eq!(y, single_rows[..rows * n], "{rows} rows, {:?}", device.isa());
                let tail = run(device, &x[(most - rows) * k..], &packed, None, rows);
                assert_eq!(tail, single_rows[(most - rows) * n..]);
            }
            match reference.get(i) {
                Some(first) => assert_eq!(&single_rows, first, "{threads} threads"),
                None => reference.push(single_rows),
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    check_invariance::<f32>();
    check_invariance::<bf16>();
    check_invariance::<f16>();
}

fn check_logits<T: CpuTestFloat>() {
    let (rows, n, k) = (3, 40, 64);
    let mut numbers = SeededNumbers::new(5);
    let (x, w) = (cast::<T>(&numbers.floats(rows * k)), numbers.floats(n * k));
    let bytes = bytes_of(&w);
    let expected: Vec<f64> = (0..rows * n)
        .map(|i| {
            let products =
                (0..k).map(|j| f64::from(x[i / n * k + j].value()) * f64::from(w[i % n * k + j]));
            products.sum()
        })
        .collect();
    for device in devices(1) {
        for dtype in [DType::F32, T::DTYPE] {
            let packed = device.pack(&[host(&bytes, n, k)], dtype).unwrap();
            let mut y = vec![0.0f32; rows * n];
            let out = MatMut::of(&mut y, rows, n).unwrap();
            device
                .launch(
                    &S,
                    Linear {
                        y: out,
                        x: MatRef::of(&x, rows, k).unwrap(),
                        weight: &packed,
                        bias: None,
                    },
                )
                .unwrap();
            assert!(error(&y, &expected) < 3e-6, "{dtype:?} on {:?}", device.isa());
        }
    }
}

#[test]
fn logits_are_not_rounded_and_routers_widen() {
    check_logits::<bf16>();
    check_logits::<f16>();
}

/// A GEMM of f16 numbers gives the same bits as a GEMM of the same numbers in f32, including subnormal, large
/// and infinite numbers.
#[test]
fn half_weights_give_the_bits_of_f32_weights() {
    let (rows, n, k) = (13, 70, 37);
    let mut numbers = SeededNumbers::new(17);
    let mut draw = |count: usize| -> Vec<f32> {
        let of = |bits: u64| f16::from_bits((bits & 0xffff) as u16).to_f32();
        let finite = |x: f32| if x.is_finite() { x } else { of(1) };
        (0..count).map(|_| finite(of(numbers.bits()))).collect()
    };
    let (x, mut w) = (draw(rows * k), draw(n * k));
    w[3] = f32::INFINITY;
    let (bytes, halves) = (bytes_of(&w), cast::<f16>(&x));
    for device in devices(2) {
        let product = |dtype, x: MatRef<'_>| {
            let packed = device.pack(&[host(&bytes, n, k)], dtype).unwrap();
            let mut y = vec![0.0f32; rows * n];
            device
                .launch(
                    &S,
                    Linear {
                        y: MatMut::of(&mut y, rows, n).unwrap(),
                        x,
                        weight: &packed,
                        bias: None,
                    },
                )
                .unwrap();
            let bits = |y: f32| if y.is_nan() { f32::NAN.to_bits() } else { y.to_bits() };
            y.into_iter().map(bits).collect::<Vec<_>>()
        };
        let wide = product(DType::F32, MatRef::of(&x, rows, k).unwrap());
        let half = product(DType::F16, MatRef::of(&halves, rows, k).unwrap());
        assert_eq!(half, wide, "{:?}", device.isa());
    }
}

#[test]
fn inconsistent_shapes_are_rejected() {
    let device = &devices(1)[0];
    let bytes = bytes_of(&[0.0; 12]);
    let w = device.pack(&[host(&bytes, 3, 4)], DType::F32).unwrap();
    let x = [0.0f32; 8];
    let mut y = [0.0f32; 6];
    let mut go = |rows, cols, n| {
        let x = MatRef::of(&x[..rows * cols], rows, cols).unwrap();
        device.launch(
            &S,
            Linear {
                y: MatMut::of(&mut y[..rows * n], rows, n).unwrap(),
                x,
                weight: &w,
                bias: None,
            },
        )
    };
    assert!(go(2, 4, 3).is_ok());
    assert!(go(2, 3, 3).is_err());
    assert!(go(2, 4, 2).is_err());
}
