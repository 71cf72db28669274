//! Helpers of the GPU tests: GPUs under test, random numbers, and matrices on a GPU.

use std::sync::Arc;

use std::hash::{BuildHasher, RandomState};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use device::gpu::{GpuConfig, GpuLibrarySelection, HalfDtype};
use device::{
    Buffer, CpuConfig, CpuIsa, DType, DeviceDriver, DeviceElement, DeviceStream, MatMut, MatRef,
    bf16, f16,
};
use hip_runtime_sys::GpuApi;
use kernels::cpu::CpuBackend;
use kernels::gpu::GpuBackend;

use crate::emulated_gpu;

pub(crate) const S: DeviceStream = DeviceStream(0);

/// Returns the GPU that `HADRON_GPU` selects; otherwise the emulator with each warp size of
/// `emulated_gpu::warp_sizes`.
pub(crate) fn devices() -> Vec<Arc<GpuBackend>> {
    devices_of(HalfDtype::BF16)
}

/// Returns the devices of `devices` with `half` as their 16-bit type.
#[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
pub(crate) fn devices_of(half: HalfDtype) -> Vec<Arc<GpuBackend>> {
    let configs = match std::env::var("HADRON_GPU") {
        Ok(vendor) => vec![real(&vendor)],
        Err(_) => {
            emulated_gpu::warp_sizes("HADRON_KERNEL_WAVES").into_iter().map(emulator).collect()
        }
    };
    let configs = configs.into_iter().map(|config| GpuConfig { half_dtype: half, ..config });
    configs.map(|config| Arc::new(GpuBackend::open(&config).unwrap())).collect()
}

/// Returns the configuration of the emulator with warps of `wave` lanes.
pub(crate) fn emulator(wave: u32) -> GpuConfig {
    let library = emulated_gpu::library();
    let (driver, rtc) = (library.clone(), library);
    let libraries =
        GpuLibrarySelection::Named { api: GpuApi::Hip, driver, rtc, blas: None, collectives: None };
    let cache_dir = Some(emulated_gpu::kernel_cache());
    GpuConfig { libraries, cache_dir, emulated_warp_size: Some(wave), ..GpuConfig::default() }
}

/// Returns the configuration of a real GPU: `cuda`, `rocm`, or `cuda-alone`, which is CUDA without a BLAS
/// library, so that Hadron's kernels compute all GEMMs. `HADRON_GPU_FOLDERS` adds library folders to those of
/// the loader.
#[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
fn real(vendor: &str) -> GpuConfig {
    let libraries = match vendor {
        "rocm" => GpuLibrarySelection::Rocm,
        "cuda" => GpuLibrarySelection::Cuda,
        "cuda-alone" => GpuLibrarySelection::Named {
            api: GpuApi::Cuda,
            driver: "libcuda.so.1".into(),
            rtc: "libnvrtc.so.13".into(),
            blas: None,
            collectives: None,
        },
        _ => panic!("HADRON_GPU={vendor} is not cuda, cuda-alone or rocm"),
    };
    let folders = std::env::var("HADRON_GPU_FOLDERS").unwrap_or_default();
    let folders = std::env::split_paths(&folders).collect();
    let cache_dir = Some(cache_dir("gpu-kernels-real"));
    GpuConfig { libraries, folders, cache_dir, ..GpuConfig::default() }
}

fn cache_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Returns the CPU backend that every GPU is compared with.
pub(crate) fn oracle() -> CpuBackend {
    CpuBackend::new(CpuConfig { threads: 1, isa: CpuIsa::Portable }).unwrap()
}

/// Random numbers, determined by a seed.
pub(crate) struct RandomNumbers(u64);

impl RandomNumbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns random numbers that differ in every run of the tests, unless `HADRON_SEED` sets the seed.
    /// Within a run, calls with the same `salt` return the same numbers.
    #[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
    pub(crate) fn fresh(salt: u64) -> Self {
        static SEED: LazyLock<u64> = LazyLock::new(|| {
            let given = std::env::var("HADRON_SEED").ok().map(|seed| seed.parse().unwrap());
            given.unwrap_or_else(|| RandomState::new().hash_one(0) >> 40)
        });
        println!("HADRON_SEED={}", *SEED); // Standard output is shown if the test fails.
        Self::new(*SEED ^ salt.wrapping_mul(0x1_0000_0001))
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

    /// Returns a random number in [0, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 8 & 0xff_ffff) as f32 / 16_777_216.0
    }

    /// Returns a random number in (−1, 1).
    pub(crate) fn float(&mut self) -> f32 {
        2.0 * self.unit() - 1.0
    }

    pub(crate) fn reals<T: GpuTestFloat>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::of(self.float())).collect()
    }
}

/// An element type that can be uploaded to a device and read back as bytes.
pub(crate) trait GpuTestElement:
    DeviceElement + PartialEq + std::fmt::Debug + Default
{
    fn bytes(self) -> Vec<u8>;
    fn of_bytes(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($name:ty),*) => {$(
        impl GpuTestElement for $name {
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn of_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}
plain!(f32, bf16, f16, i32, i64);

/// A float type that activations may have.
pub(crate) trait GpuTestFloat: GpuTestElement {
    fn of(x: f32) -> Self;
    fn value(self) -> f32;
}

impl GpuTestFloat for f32 {
    fn of(x: f32) -> Self {
        x
    }
    fn value(self) -> f32 {
        self
    }
}

macro_rules! half {
    ($($name:ty),*) => {$(
        impl GpuTestFloat for $name {
            fn of(x: f32) -> Self {
                Self::from_f32(x)
            }
            fn value(self) -> f32 {
                self.to_f32()
            }
        }
    )*};
}
half!(bf16, f16);

/// A matrix on a GPU with elements of type `T`.
pub(crate) struct DeviceArray<T> {
    pub(crate) buffer: Buffer,
    rows: usize,
    cols: usize,
    kind: PhantomData<T>,
}

impl<T: GpuTestElement> DeviceArray<T> {
    pub(crate) fn of(device: &GpuBackend, data: &[T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.bytes()).collect();
        let mut buffer = device.alloc(bytes.len().max(1)).unwrap();
        device.upload(&mut buffer, 0, &bytes).unwrap();
        Self { buffer, rows, cols, kind: PhantomData }
    }

    pub(crate) fn row(device: &GpuBackend, data: &[T]) -> Self {
        Self::of(device, data, 1, data.len())
    }

    /// Returns a matrix with all bits set, which are NaN as floats and −1 as integers.
    pub(crate) fn poisoned(device: &GpuBackend, rows: usize, cols: usize) -> Self {
        let bytes = vec![0xff; rows * cols * T::DTYPE.bytes()];
        let mut buffer = device.alloc(bytes.len().max(1)).unwrap();
        device.upload(&mut buffer, 0, &bytes).unwrap();
        Self { buffer, rows, cols, kind: PhantomData }
    }

    pub(crate) fn mat(&self) -> MatRef<'_> {
        self.buffer.mat(T::DTYPE, self.rows, self.cols).unwrap()
    }

    pub(crate) fn mat_mut(&mut self) -> MatMut<'_> {
        self.buffer.mat_mut(T::DTYPE, self.rows, self.cols).unwrap()
    }

    pub(crate) fn read(&self, device: &GpuBackend) -> Vec<T> {
        let size = T::DTYPE.bytes();
        let mut bytes = vec![0; self.rows * self.cols * size];
        device.download(&S, &self.buffer, 0, &mut bytes).unwrap();
        bytes.chunks_exact(size).map(T::of_bytes).collect()
    }
}

/// Returns the largest difference between `got` and `expected`, relative to the magnitude of the expected
/// values.
pub(crate) fn error<T: GpuTestFloat>(got: &[T], expected: &[T]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let size = expected.iter().fold(1e-3f32, |m, x| m.max(x.value().abs()));
    let worst = got.iter().zip(expected).map(|(g, e)| (g.value() - e.value()).abs());
    worst.fold(0.0, |m: f32, e| if e.is_nan() { f32::INFINITY } else { m.max(e) }) / size
}

/// Returns the permitted relative error for another order of f32 sums and approximate exponentials: one ulp
/// in 16-bit types, where rounding may differ.
pub(crate) fn tolerance<T: GpuTestFloat>() -> f32 {
    match T::DTYPE {
        DType::BF16 => 8e-3,
        DType::F16 => 1e-3,
        _ => 3e-6,
    }
}
