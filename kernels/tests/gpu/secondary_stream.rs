//! Launches on the secondary stream: their order, capture in a graph, and separate scratch memory per stream.

use crate::emulated_gpu::bounded_child::run_to_end;
use std::sync::Arc;

use std::process::Command;

use device::{CapturedGraph, DType, DeviceDriver, DeviceStream, bf16};
use kernels::{FusedLinear, HostMat, LinearFusion, TensorAdd};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, bytes_of, pairs};
use crate::support::S;

const FLOATS: usize = 1000;

/// Buffers of a test with a chain of additions, one of which runs on the secondary stream.
struct SecondaryStreamCase<'a> {
    pair: &'a CpuGpuPair,
    secondary_stream: DeviceStream,
    x: CpuGpuMatrix,
    before_fork: CpuGpuMatrix,
    on_secondary: CpuGpuMatrix,
    concurrent: CpuGpuMatrix,
    after_join: CpuGpuMatrix,
}

impl<'a> SecondaryStreamCase<'a> {
    fn new(pair: &'a CpuGpuPair) -> Self {
        let secondary_stream =
            pair.gpu.secondary_stream().expect("no kernel timestamps are active");
        let [before_fork, on_secondary, concurrent, after_join] =
            [(); 4].map(|()| pair.poisoned(DType::F32, 1, FLOATS));
        let x = pair.put(&[1f32; FLOATS], 1, FLOATS);
        Self { pair, secondary_stream, x, before_fork, on_secondary, concurrent, after_join }
    }

    /// Computes 7 x by four additions. One runs on the secondary stream, which is joined again if `joined`.
    fn launch(&mut self, joined: bool) {
        let (gpu, x) = (&self.pair.gpu, self.x.gpu());
        gpu.launch(&S, TensorAdd { y: self.before_fork.gpu_mut(), a: x, b: x }).unwrap();
        gpu.stream_wait(&self.secondary_stream, &S).unwrap();
        let before = self.before_fork.gpu();
        gpu.launch(
            &self.secondary_stream,
            TensorAdd { y: self.on_secondary.gpu_mut(), a: before, b: before },
        )
        .unwrap();
        gpu.launch(&S, TensorAdd { y: self.concurrent.gpu_mut(), a: before, b: x }).unwrap();
        if joined {
            gpu.stream_wait(&S, &self.secondary_stream).unwrap();
        }
        gpu.launch(
            &S,
            TensorAdd {
                y: self.after_join.gpu_mut(),
                a: self.on_secondary.gpu(),
                b: self.concurrent.gpu(),
            },
        )
        .unwrap();
    }

    fn capture(&mut self, joined: bool) -> Result<CapturedGraph, device::DeviceError> {
        self.pair.gpu.begin_capture(&S).unwrap();
        self.launch(joined);
        self.pair.gpu.end_capture(&S)
    }

    fn set(&mut self, value: f32) {
        self.pair.gpu.upload(&mut self.x.gpu, 0, &bytes_of(&[value; FLOATS])).unwrap();
    }

    fn check(&self, value: f32) {
        assert_eq!(self.pair.read_gpu::<f32>(&self.after_join), [7.0 * value; FLOATS]);
    }
}

fn check_fork_and_join(pair: &CpuGpuPair) {
    let mut sums = SecondaryStreamCase::new(pair);
    for value in [1.0, 3.0] {
        sums.set(value);
        sums.launch(true);
        sums.check(value);
    }
    let graph = sums.capture(true).unwrap();
    for value in [5.0, 7.0] {
        sums.set(value);
        pair.gpu.replay(&S, &graph).unwrap();
        sums.check(value);
    }
}

#[test]
fn secondary_stream_is_ordered_by_fork_and_join() {
    pairs().iter().for_each(check_fork_and_join);
}

#[test]
#[ignore = "run by independent_streams_run_in_any_order"]
fn lazy_streams() {
    for pair in &pairs() {
        check_fork_and_join(pair);
        check_scratch(pair);
    }
}

/// In lazy mode (`HIPEMU_LAZY` = 1) an emulated device runs a stream only when the host waits for it, so a
/// missing wait between streams gives wrong sums. With `HIPEMU_LAZY` = 2 streams are also interleaved, so
/// scratch memory shared by streams would be overwritten.
#[test]
#[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
fn independent_streams_run_in_any_order() {
    if std::env::var_os("HADRON_GPU").is_some() {
        return; // A real GPU determines the order of its streams itself.
    }
    for lazy in ["1", "2"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--ignored", "--exact", "--nocapture", "secondary_stream::lazy_streams"]);
        let child = run_to_end(child.env("HIPEMU_LAZY", lazy));
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{output}");
    }
}

/// A capture fails if a stream is not joined; the device can capture again afterwards.
#[test]
fn unjoined_capture_fails() {
    for pair in &pairs() {
        let mut sums = SecondaryStreamCase::new(pair);
        sums.launch(true);
        assert!(sums.capture(false).is_err());
        let graph = sums.capture(true).unwrap();
        sums.set(2.0);
        pair.gpu.replay(&S, &graph).unwrap();
        sums.check(2.0);
    }
}

/// While kernel timestamps are recorded, launches are serialised, so there is no secondary stream.
#[test]
fn no_secondary_stream_while_timestamping() {
    for pair in &pairs() {
        let timestamps = pair.gpu.alloc_timestamps(2).unwrap();
        pair.gpu.begin_kernel_timestamps(&timestamps, 0);
        assert_eq!(pair.gpu.secondary_stream(), None);
        assert!(pair.gpu.end_kernel_timestamps().is_empty());
        assert!(pair.gpu.secondary_stream().is_some_and(|stream| stream != S));
    }
}

const ROWS: usize = 24;
const N: usize = 256;
const K: usize = 1024;

/// Checks that streams have separate scratch memory: a norm stores rows there for the next GEMM, so
/// concurrent streams must not share scratch memory.
fn check_scratch(pair: &CpuGpuPair) {
    let (gpu, half) = (&pair.gpu, pair.gpu.half_dtype());
    let [w, _] = pair.pack(&pair.numbers(1).reals::<f32>(N * K), N, K, half);
    if !FusedLinear::supports(&Arc::clone(gpu).into(), ROWS, half, &w) {
        return; // This device fuses no norm into the GEMM, but runs it in a separate launch.
    }
    let norm = pair.put_as(half, &[1.0; K], 1, K);
    let fusion = LinearFusion { norm: Some((norm.gpu(), 1e-6)), ..LinearFusion::default() };
    let streams = [S, gpu.secondary_stream().expect("no kernel timestamps are active")];
    let xs =
        [2, 3].map(|salt| pair.put_as(half, &pair.numbers(salt).reals::<f32>(ROWS * K), ROWS, K));
    let outputs = || [(); 2].map(|()| pair.poisoned(half, ROWS, N));
    let (mut sequential, mut overlapped) = (outputs(), outputs());
    let product = |s: &DeviceStream, y: &mut CpuGpuMatrix, x: &CpuGpuMatrix| {
        gpu.launch(s, FusedLinear { y: y.gpu_mut(), x: x.gpu(), weight: &w, fusion: &fusion })
            .unwrap();
    };
    for (s, (y, x)) in streams.iter().zip(sequential.iter_mut().zip(&xs)) {
        product(s, y, x);
        gpu.synchronize(s).unwrap();
    }
    for _ in 0..20 {
        gpu.stream_wait(&streams[1], &S).unwrap();
        for (s, (y, x)) in streams.iter().zip(overlapped.iter_mut().zip(&xs)) {
            product(s, y, x);
        }
        gpu.stream_wait(&S, &streams[1]).unwrap();
        gpu.synchronize(&S).unwrap();
        for (expected, got) in sequential.iter().zip(&overlapped) {
            assert_eq!(pair.read_gpu::<bf16>(got), pair.read_gpu::<bf16>(expected));
        }
    }
}

#[test]
fn streams_share_no_scratch_memory() {
    pairs().iter().for_each(check_scratch);
}

#[test]
fn fp8_tma_experts_need_warpgroups() {
    for pair in &pairs() {
        let (gpu, half) = (&pair.gpu, pair.gpu.half_dtype());
        let supports = |dtype: DType, scaled: bool| {
            let (bytes, scales) = (vec![0u8; 256 * 128 * 2], vec![1f32; 2]);
            let mat = |n: usize, k: usize| {
                let mat = HostMat::new(&bytes[..n * k * dtype.bytes()], dtype, n, k).unwrap();
                let blocks = n.div_ceil(128) * k.div_ceil(128);
                if scaled { mat.scaled(&scales[..blocks], [128; 2]).unwrap() } else { mat }
            };
            let (gate_up, down) = ([vec![mat(128, 128), mat(128, 128)]], [vec![mat(128, 128)]]);
            pair.backends()[0].has_fp8_tma_experts(&gate_up, &down, 1, half)
        };
        assert!(!supports(DType::BF16, false));
        let streams = gpu.arch() == "sm_90a" || (gpu.arch() == "emulated" && gpu.warp_size() == 32);
        assert_eq!(supports(DType::F8E4M3, true), streams);
    }
}
