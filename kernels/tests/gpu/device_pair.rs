//! A GPU paired with the CPU as its reference device, and matrices that exist on both devices.

use std::hash::{BuildHasher, RandomState};

use std::sync::Arc;

use device::gpu::HalfDtype;
use device::{Buffer, CpuConfig, DType, DeviceDriver, DeviceElement, MatMut, MatRef, bf16, f16};
use kernels::cpu::CpuBackend;
use kernels::gpu::GpuBackend;
use kernels::{HostMat, KernelBackend, PackedMatrix};

use crate::support::{RandomNumbers, S, devices, devices_of};

/// Returns every GPU under test, each paired with the CPU as its reference device.
pub(crate) fn pairs() -> Vec<CpuGpuPair> {
    devices().into_iter().map(CpuGpuPair::new).collect()
}

/// Returns every GPU under test with f16 as its 16-bit type. The reference device computes in f32 from values
/// that are exact in f16.
pub(crate) fn f16_pairs() -> Vec<CpuGpuPair> {
    devices_of(HalfDtype::F16).into_iter().map(CpuGpuPair::new).collect()
}

/// Returns the dtype in which the reference device stores a matrix that is `dtype` on the GPU.
pub(crate) fn on_cpu(dtype: DType) -> DType {
    if dtype == DType::F16 { DType::F32 } else { dtype }
}

/// Returns `x` rounded to a value that both devices store exactly: for f16, the reference device stores it as
/// f32.
pub(crate) fn rounded(x: f32, dtype: DType) -> f32 {
    if dtype == DType::F16 { f16::from_f32(x).to_f32() } else { x }
}

/// The GPU under test and its reference device.
pub(crate) struct CpuGpuPair {
    pub(crate) gpu: Arc<GpuBackend>,
    pub(crate) cpu: Arc<CpuBackend>,
    seed: u64,
}

impl CpuGpuPair {
    /// Returns the GPU backend and the CPU backend.
    pub(crate) fn backends(&self) -> [KernelBackend; 2] {
        [Arc::clone(&self.gpu).into(), Arc::clone(&self.cpu).into()]
    }

    #[expect(clippy::disallowed_methods, reason = "the environment selects the GPU under test")]
    pub(crate) fn new(gpu: Arc<GpuBackend>) -> Self {
        let given = std::env::var("HADRON_SEED").ok().map(|seed| seed.parse().unwrap());
        let seed = given.unwrap_or_else(|| RandomState::new().hash_one(0) >> 40);
        println!("{}, HADRON_SEED={seed}", gpu.name()); // Standard output is shown if the test fails.
        let cpu = CpuBackend::new(CpuConfig { threads: 2, ..CpuConfig::default() }).unwrap();
        let cpu = Arc::new(cpu);
        Self { gpu, cpu, seed }
    }

    /// Returns random numbers that differ in every run of the tests. Within a run, calls with the same `salt`
    /// return the same numbers.
    pub(crate) fn numbers(&self, salt: u64) -> RandomNumbers {
        RandomNumbers::new(self.seed ^ salt.wrapping_mul(0x1_0000_0001))
    }

    /// Uploads `data` to both devices.
    pub(crate) fn put<T: DeviceElement>(
        &self,
        data: &[T],
        rows: usize,
        cols: usize,
    ) -> CpuGpuMatrix {
        assert_eq!(data.len(), rows * cols);
        let mut twin = self.zeros(T::DTYPE, rows, cols);
        let bytes = bytes_of(data);
        self.gpu.upload(&mut twin.gpu, 0, &bytes).unwrap();
        let bytes = if T::DTYPE == DType::F16 { bytes_of(&widened(&bytes)) } else { bytes };
        self.cpu.upload(&mut twin.cpu, 0, &bytes).unwrap();
        twin
    }

    /// Returns a matrix of random floats in (−1, 1), as `dtype` on both devices.
    pub(crate) fn random(
        &self,
        numbers: &mut RandomNumbers,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> CpuGpuMatrix {
        self.put_as(dtype, &numbers.reals::<f32>(rows * cols), rows, cols)
    }

    /// Uploads `values`, rounded to `dtype`, to both devices.
    pub(crate) fn put_as(
        &self,
        dtype: DType,
        values: &[f32],
        rows: usize,
        cols: usize,
    ) -> CpuGpuMatrix {
        match dtype {
            DType::BF16 => {
                let values: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                self.put(&values, rows, cols)
            }
            DType::F16 => {
                let values: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
                self.put(&values, rows, cols)
            }
            _ => self.put(values, rows, cols),
        }
    }

    /// Returns a matrix with all bits set, which are NaN as floats and −1 as integers: a kernel must
    /// overwrite every element.
    pub(crate) fn poisoned(&self, dtype: DType, rows: usize, cols: usize) -> CpuGpuMatrix {
        let mut twin = self.zeros(dtype, rows, cols);
        let bytes = vec![0xff; rows * cols * on_cpu(dtype).bytes()];
        self.gpu.upload(&mut twin.gpu, 0, &bytes[..rows * cols * dtype.bytes()]).unwrap();
        self.cpu.upload(&mut twin.cpu, 0, &bytes).unwrap();
        twin
    }

    pub(crate) fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> CpuGpuMatrix {
        let gpu = self.gpu.alloc(rows * cols * dtype.bytes()).unwrap();
        let cpu = self.cpu.alloc(rows * cols * on_cpu(dtype).bytes()).unwrap();
        CpuGpuMatrix { gpu, cpu, dtype, rows, cols }
    }

    /// Packs a weight matrix for each device.
    pub(crate) fn pack(
        &self,
        values: &[f32],
        n: usize,
        k: usize,
        dtype: DType,
    ) -> [PackedMatrix; 2] {
        let values: Vec<f32> = values.iter().map(|x| rounded(*x, dtype)).collect();
        let bytes = bytes_of(&values);
        let parts = [HostMat::new(&bytes, DType::F32, n, k).unwrap()];
        [self.gpu.pack(&parts, dtype).unwrap(), self.cpu.pack(&parts, on_cpu(dtype)).unwrap()]
    }

    /// Returns the contents of both matrices, the GPU's first. Panics for f16, which the reference device
    /// does not support.
    pub(crate) fn read<T: DeviceElement>(&self, twin: &CpuGpuMatrix) -> [Vec<T>; 2] {
        assert_eq!((T::DTYPE, T::DTYPE), (twin.dtype, on_cpu(twin.dtype)));
        let elements = twin.rows * twin.cols;
        let mut bytes = vec![0; elements * twin.dtype.bytes()];
        self.cpu.download(&S, &twin.cpu, 0, &mut bytes).unwrap();
        [self.read_gpu(twin), elements_of(&bytes)]
    }

    /// Returns the contents of the GPU's matrix.
    pub(crate) fn read_gpu<T: DeviceElement>(&self, twin: &CpuGpuMatrix) -> Vec<T> {
        assert_eq!(T::DTYPE, twin.dtype);
        let mut bytes = vec![0; twin.rows * twin.cols * twin.dtype.bytes()];
        self.gpu.download(&S, &twin.gpu, 0, &mut bytes).unwrap();
        elements_of(&bytes)
    }

    /// Returns the contents of both float matrices as f32, the GPU's first.
    pub(crate) fn read_floats(&self, twin: &CpuGpuMatrix) -> [Vec<f32>; 2] {
        match twin.dtype {
            DType::BF16 => {
                self.read::<bf16>(twin).map(|v| v.into_iter().map(bf16::to_f32).collect())
            }
            DType::F16 => {
                let gpu = self.read_gpu::<f16>(twin).into_iter().map(f16::to_f32).collect();
                let mut bytes = vec![0; twin.rows * twin.cols * 4];
                self.cpu.download(&S, &twin.cpu, 0, &mut bytes).unwrap();
                [gpu, elements_of(&bytes)]
            }
            _ => self.read::<f32>(twin),
        }
    }

    /// Panics if the GPU's and the CPU's matrix differ by more than `tolerance` times the largest expected
    /// value.
    pub(crate) fn check(&self, what: &str, twin: &CpuGpuMatrix, tolerance: f32) {
        let [got, expected] = self.read_floats(twin);
        let size = expected.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            let (row, col) = (i / twin.cols, i % twin.cols);
            let close = (g - e).abs() <= tolerance * size; // The comparison is false for NaN.
            assert!(close, "{what}: [{row}, {col}] is {g}, expected {e}, of at most {size}");
        }
    }

    /// Panics if the GPU's and the CPU's matrix differ in any element.
    pub(crate) fn check_equal<T: DeviceElement + PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        twin: &CpuGpuMatrix,
    ) {
        let [got, expected] = self.read::<T>(twin);
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            assert!(
                g == e,
                "{what}: [{}, {}] is {g:?}, expected {e:?}",
                i / twin.cols,
                i % twin.cols
            );
        }
    }
}

/// A matrix that exists on the GPU and on the CPU, with one result on each.
pub(crate) struct CpuGpuMatrix {
    pub(crate) gpu: Buffer,
    pub(crate) cpu: Buffer,
    dtype: DType,
    rows: usize,
    cols: usize,
}

impl CpuGpuMatrix {
    /// Returns a view of the GPU's matrix, for reading.
    pub(crate) fn gpu(&self) -> MatRef<'_> {
        self.gpu.mat(self.dtype, self.rows, self.cols).unwrap()
    }

    /// Returns a view of the CPU's matrix, for reading.
    pub(crate) fn cpu(&self) -> MatRef<'_> {
        self.cpu.mat(on_cpu(self.dtype), self.rows, self.cols).unwrap()
    }

    /// Returns a view of the GPU's matrix, for writing.
    pub(crate) fn gpu_mut(&mut self) -> MatMut<'_> {
        self.gpu.mat_mut(self.dtype, self.rows, self.cols).unwrap()
    }

    /// Returns a view of the CPU's matrix, for writing.
    pub(crate) fn cpu_mut(&mut self) -> MatMut<'_> {
        self.cpu.mat_mut(on_cpu(self.dtype), self.rows, self.cols).unwrap()
    }
}

/// Returns the permitted error, relative to the largest value, for one rounding to `dtype` and another order
/// of summation. For f16 the CPU computes in f32 without intermediate rounding, while a kernel rounds up to
/// three times, with a relative error of up to 2^-11 each.
pub(crate) fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 8e-3,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

/// Converts bytes of f16 numbers to f32 numbers.
fn widened(bytes: &[u8]) -> Vec<f32> {
    elements_of::<f16>(bytes).into_iter().map(f16::to_f32).collect()
}

/// Returns elements as the bytes that a device stores.
pub(crate) fn bytes_of<T: DeviceElement>(data: &[T]) -> Vec<u8> {
    // SAFETY: elements have no padding, so all bytes of `data` are initialised.
    let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) };
    <[u8]>::to_vec(bytes)
}

/// Returns elements from the bytes that a device stores; inverse of `bytes_of`.
pub(crate) fn elements_of<T: DeviceElement>(bytes: &[u8]) -> Vec<T> {
    let size = size_of::<T>();
    assert!(bytes.len().is_multiple_of(size));
    // SAFETY: every bit pattern is a valid element, and `b` has the bytes of one element.
    let element = |b: &[u8]| unsafe { b.as_ptr().cast::<T>().read_unaligned() };
    bytes.chunks_exact(size).map(element).collect()
}
