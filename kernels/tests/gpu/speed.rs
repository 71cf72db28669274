//! Measurements on a real GPU: replay of an empty graph, loading of weights, and GEMMs of the vendor's BLAS
//! library. Results are printed, not checked.

use std::time::Instant;

use device::{DType, DeviceDriver};
use kernels::{HostMat, Linear, TensorAdd};

use crate::device_pair::{CpuGpuPair, pairs};
use crate::support::S;

/// Returns the microseconds per call, averaged over `times` calls after one call that is not timed.
fn microseconds(pair: &CpuGpuPair, times: usize, mut call: impl FnMut()) -> f64 {
    call();
    pair.gpu.synchronize(&S).unwrap();
    let start = Instant::now();
    (0..times).for_each(|_| call());
    pair.gpu.synchronize(&S).unwrap();
    start.elapsed().as_secs_f64() * 1e6 / times as f64
}

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn speed() {
    for pair in &pairs() {
        replay(pair);
        load(pair);
        products(pair);
    }
}

fn replay(pair: &CpuGpuPair) {
    pair.gpu.begin_capture(&S).unwrap();
    let empty = pair.gpu.end_capture(&S).unwrap();
    let time = microseconds(pair, 1000, || pair.gpu.replay(&S, &empty).unwrap());
    println!("empty graph: {time:.2} us a replay");
    let x = pair.put(&[1f32; 64], 1, 64);
    let mut y = pair.poisoned(DType::F32, 1, 64);
    pair.gpu.launch(&S, TensorAdd { y: y.gpu_mut(), a: x.gpu(), b: x.gpu() }).unwrap();
    pair.gpu.begin_capture(&S).unwrap();
    for _ in 0..100 {
        pair.gpu.launch(&S, TensorAdd { y: y.gpu_mut(), a: x.gpu(), b: x.gpu() }).unwrap();
    }
    let chain = pair.gpu.end_capture(&S).unwrap();
    let time = microseconds(pair, 200, || pair.gpu.replay(&S, &chain).unwrap());
    println!("100 dependent tiny kernels: {time:.1} us a replay");
}

fn load(pair: &CpuGpuPair) {
    let (rows, cols) = (16384, 8192);
    let bytes = vec![1u8; rows * cols * 4];
    for (from, size) in [(DType::BF16, 2), (DType::F32, 4)] {
        let mat = HostMat::new(&bytes[..rows * cols * size], from, rows, cols).unwrap();
        // The first call starts threads and allocates pinned memory, so it is not timed.
        pair.gpu.pack(&[mat.row_range(0, 512)], DType::BF16).unwrap();
        let start = Instant::now();
        let packed: Vec<_> = (0..8).map(|_| pair.gpu.pack(&[mat], DType::BF16).unwrap()).collect();
        pair.gpu.synchronize(&S).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let read = (packed.len() * rows * cols * size) as f64;
        println!("pack from {from:?}: {:.1} GB/s read", read / seconds / 1e9);
    }
}

fn products(pair: &CpuGpuPair) {
    for (m, n, k) in [
        (1, 4096, 1024),
        (64, 4096, 1024),
        (64, 12288, 4096),
        (256, 12288, 4096),
        (2048, 12288, 4096),
        (8192, 8192, 8192),
    ] {
        let mut numbers = pair.numbers(3);
        let x = pair.random(&mut numbers, DType::BF16, m, k);
        let [w, _] = pair.pack(&numbers.reals::<f32>(n * k), n, k, DType::BF16);
        let mut y = pair.poisoned(DType::BF16, m, n);
        let times = if m * n > 1 << 24 { 20 } else { 200 };
        pair.gpu.launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: None }).unwrap();
        pair.gpu.synchronize(&S).unwrap();
        pair.gpu.begin_capture(&S).unwrap();
        for _ in 0..10 {
            pair.gpu
                .launch(&S, Linear { y: y.gpu_mut(), x: x.gpu(), weight: &w, bias: None })
                .unwrap();
        }
        let ten = pair.gpu.end_capture(&S).unwrap();
        let time = microseconds(pair, times, || pair.gpu.replay(&S, &ten).unwrap()) / 10.0;
        let flops = 2.0 * m as f64 * n as f64 * k as f64 / time / 1e6;
        let bytes = ((m * k + n * k + m * n) * 2) as f64 / time / 1e6;
        println!("{m} x {n} x {k}: {time:.1} us, {flops:.1} TFLOP/s, {bytes:.2} TB/s");
    }
}
