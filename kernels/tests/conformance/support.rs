//! Helpers of the conformance tests: CPU devices, reproducible numbers, tolerances and host matrices.

use device::{CpuConfig, CpuIsa, DType, bf16, f16};
use kernels::HostMat;
use kernels::cpu::CpuBackend;

/// Returns one CPU backend per instruction set that this CPU supports.
pub(crate) fn devices(threads: usize) -> Vec<CpuBackend> {
    let isas = CpuIsa::ALL.into_iter().filter(|isa| isa.available());
    isas.map(|isa| CpuBackend::new(CpuConfig { threads, isa }).unwrap()).collect()
}

/// Returns a CPU backend with one instruction set.
pub(crate) fn device(threads: usize, isa: CpuIsa) -> CpuBackend {
    CpuBackend::new(CpuConfig { threads, isa }).unwrap()
}

/// Random numbers in (−1, 1), determined by a seed; all are exact in bf16 and f16.
pub(crate) struct SeededNumbers(u64);

impl SeededNumbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(crate) fn float(&mut self) -> f32 {
        bf16::from_f32((self.bits() % 255) as f32 / 128.0 - 1.0).to_f32()
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// A float type that activations may have, for generic tests.
pub(crate) trait CpuTestFloat: device::DeviceElement + PartialEq + std::fmt::Debug {
    fn of(x: f32) -> Self;
    fn value(self) -> f32;
}

impl CpuTestFloat for f32 {
    fn of(x: f32) -> Self {
        x
    }
    fn value(self) -> f32 {
        self
    }
}

impl CpuTestFloat for bf16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl CpuTestFloat for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

pub(crate) fn cast<T: CpuTestFloat>(x: &[f32]) -> Vec<T> {
    x.iter().map(|x| T::of(*x)).collect()
}

pub(crate) fn bytes_of(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn host(bytes: &[u8], rows: usize, cols: usize) -> HostMat<'_> {
    HostMat::new(bytes, DType::F32, rows, cols).unwrap()
}

/// Returns the largest difference between `got` and `expected`, relative to the magnitude of the expected
/// values.
pub(crate) fn error<T: CpuTestFloat>(got: &[T], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let size = expected.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(expected).map(|(g, e)| (f64::from(g.value()) - e).abs());
    worst.fold(0.0, |m: f64, e| if e.is_nan() { f64::INFINITY } else { m.max(e) }) / size
}

/// Returns the permitted relative error for rounding to the activation type and f32 sums.
pub(crate) fn tolerance<T: CpuTestFloat>() -> f64 {
    match T::DTYPE {
        DType::BF16 => 6e-3,
        DType::F16 => 6e-3 / 8.0,
        _ => 3e-6,
    }
}
