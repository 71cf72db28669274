//! Parallel weight loader: writes weight matrices to the device, row-major as checkpoints store them.
//!
//! Each reader thread converts some successive rows (a run) into one of its two pinned chunks, and starts an
//! asynchronous copy of the chunk to the device; while the copy is in flight, the thread fills the other
//! chunk. Copies run on a separate stream, and the stream of the steps waits for them on the device: `pack`
//! returns when the last byte has been read from the host matrix, before the copies have completed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use device::gpu::{GpuError, GpuFence, GpuRuntime, memory};
use device::{Buffer, DType, DeviceError, DeviceStream, ThreadPool};

use super::convert::convert;
use super::mxfp4;
use crate::gpu::GpuBackend;
use crate::{HostMat, PackedMatrix};

/// Stream of weight copies; the kernels of steps run on stream 0.
const COPY_STREAM: DeviceStream = DeviceStream(1);
/// Size of a pinned chunk in bytes: large enough to saturate the link to the device, small enough that all
/// reader threads have work.
const CHUNK_BYTES: usize = 4 << 20;
/// Minimum size in bytes of the successive rows (a run) that one thread converts at a time.
const MIN_RUN_BYTES: usize = 256 << 10;
const KERNEL: &str = "pack";
/// Maximum number of threads per device that convert weights and start their copies.
const MAX_READERS: usize = 12;

/// Reader threads of the weight loader, each with its pinned memory.
#[derive(Debug)]
pub(super) struct WeightLoader {
    threads: ThreadPool,
    readers: Vec<Mutex<PinnedDoubleBuffer>>,
}

/// Double buffer of one reader thread: two pinned chunks, used alternately.
#[derive(Debug)]
struct PinnedDoubleBuffer {
    chunks: [PinnedChunk; 2],
    next: usize,
}

/// A chunk of pinned memory, and the fence of the copy that reads it.
#[derive(Debug)]
struct PinnedChunk {
    copied: Option<GpuFence>, // Dropped (waited for) before the memory.
    memory: Buffer,
}

/// Encoding of weights on the device.
#[derive(Debug, Clone, Copy)]
enum WeightEncoding {
    /// Elements of a type. If the type is fp8, scales are not loaded.
    Elements(DType),
    /// MXFP4 (`csrc/dev/mxfp4.h`).
    Mxfp4,
}

impl WeightEncoding {
    fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Elements(dtype) => cols * dtype.bytes(),
            Self::Mxfp4 => mxfp4::row_bytes(cols),
        }
    }

    /// Writes the encoded rows of `from` to `out`; returns false if they cannot be represented exactly in MXFP4.
    fn encode(self, from: HostMat<'_>, out: &mut [u8]) -> bool {
        match self {
            Self::Elements(dtype) => convert(from, dtype, out),
            Self::Mxfp4 => return mxfp4::encode(from, out),
        }
        true
    }
}

/// Successive rows of one source matrix (`parts[part]`) that a thread converts at a time, and their
/// destination.
struct WeightRowRange {
    part: usize,
    row: usize,
    rows: usize,
    /// Byte offset of the rows in the packed matrix.
    at: usize,
}

impl GpuBackend {
    /// Stacks the matrices `parts` by rows and packs them as one matrix. fp8 matrices stay fp8 if the kernels
    /// support their scales and `dtype` is the 16-bit type of the device; otherwise the elements are
    /// converted to `dtype`.
    pub fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<PackedMatrix, DeviceError> {
        match self.linear_block_shape(parts).filter(|_| dtype == self.half_dtype()) {
            Some(grid) => self.load_fp8(parts, grid),
            None => self.load_float(parts, dtype),
        }
    }

    /// Packs `parts` as one matrix in `dtype`, which is f32 or the 16-bit type of the device.
    pub(super) fn load_float(
        &self,
        parts: &[HostMat<'_>],
        dtype: DType,
    ) -> Result<PackedMatrix, DeviceError> {
        if dtype != DType::F32 && dtype != self.half_dtype() {
            return Err(DeviceError::Unsupported { kernel: KERNEL, what: "weight", dtype });
        }
        self.load_as(parts, dtype)
    }

    /// Packs `parts` as one matrix in `dtype`. If `dtype` is fp8, scales are not packed.
    pub(super) fn load_as(
        &self,
        parts: &[HostMat<'_>],
        dtype: DType,
    ) -> Result<PackedMatrix, DeviceError> {
        let loaded = self.load_encoded(parts, dtype, WeightEncoding::Elements(dtype))?;
        let (what, kernel) = ("weight", KERNEL);
        loaded.ok_or(DeviceError::Unsupported { kernel, what, dtype })
    }

    /// Packs `parts` as one matrix in MXFP4, whose elements kernels decode to `dtype`. `None` if the number of columns
    /// is not a multiple of 32, or MXFP4 does not represent all elements exactly.
    pub(super) fn load_mxfp4(
        &self,
        parts: &[HostMat<'_>],
        dtype: DType,
    ) -> Result<Option<PackedMatrix>, DeviceError> {
        if parts.iter().any(|part| !part.cols().is_multiple_of(mxfp4::GROUP)) {
            return Ok(None);
        }
        self.load_encoded(parts, dtype, WeightEncoding::Mxfp4)
    }

    /// Packs `parts` as one matrix; `None` if the encoding cannot represent an element.
    fn load_encoded(
        &self,
        parts: &[HostMat<'_>],
        dtype: DType,
        encoding: WeightEncoding,
    ) -> Result<Option<PackedMatrix>, DeviceError> {
        let k = parts.first().map_or(0, HostMat::cols);
        if let Some(part) = parts.iter().find(|part| part.cols() != k) {
            let (what, got) = ("columns of a part", part.cols());
            return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected: k });
        }
        let n: usize = parts.iter().map(HostMat::rows).sum();
        let row_bytes = encoding.row_bytes(k);
        if row_bytes > CHUNK_BYTES {
            let (what, got) = ("bytes of a row", row_bytes);
            return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected: CHUNK_BYTES });
        }
        let mut buffer = self.weights().alloc(self.runtime(), n * row_bytes)?;
        if n * row_bytes > 0 {
            let mut loader = self.loader();
            let loader = match &mut *loader {
                Some(loader) => loader,
                none => none.insert(WeightLoader::new(self.runtime())?),
            };
            if !loader.load(self.runtime(), &mut buffer, parts, encoding)? {
                return Ok(None);
            }
        }
        Ok(Some(PackedMatrix { buffer, dtype, n, k, scales: None }))
    }
}

impl WeightLoader {
    fn new(runtime: &Arc<GpuRuntime>) -> Result<Self, DeviceError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = ThreadPool::new(cores.min(MAX_READERS))?;
        let chunk = || -> Result<PinnedChunk, GpuError> {
            Ok(PinnedChunk { copied: None, memory: memory::alloc_host(runtime, CHUNK_BYTES)? })
        };
        let reader =
            |_| Ok(Mutex::new(PinnedDoubleBuffer { chunks: [chunk()?, chunk()?], next: 0 }));
        let readers = (0..threads.threads()).map(reader).collect::<Result<_, GpuError>>()?;
        Ok(Self { threads, readers })
    }

    /// Loads `parts` to the start of `to`; returns false if the encoding cannot represent an element.
    fn load(
        &self,
        runtime: &Arc<GpuRuntime>,
        to: &mut Buffer,
        parts: &[HostMat<'_>],
        encoding: WeightEncoding,
    ) -> Result<bool, GpuError> {
        runtime.not_capturing("loading weights")?;
        let runs = row_runs(parts, encoding, self.readers.len());
        let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
        let is_exact = AtomicBool::new(true);
        let target = to.as_mut_ptr().expose_provenance();
        self.threads.run(&|thread| {
            let Ok(mut reader) = self.readers[thread].lock() else { return };
            while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let target = std::ptr::with_exposed_provenance_mut(target + run.at);
                // SAFETY: runs are disjoint ranges of `to`, which is uniquely borrowed until all runs are
                // read; kernels start after the fence below, so after the copies.
                let read = unsafe { reader.read(runtime, target, &parts[run.part], run, encoding) };
                if !matches!(read, Ok(true)) {
                    next.store(runs.len(), Ordering::Relaxed);
                    is_exact.store(false, Ordering::Relaxed);
                }
                if let Err(error) = read {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
            }
        });
        if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        GpuFence::record(runtime, &COPY_STREAM)?.block_stream(&DeviceStream::default())?;
        Ok(is_exact.into_inner())
    }
}

impl PinnedDoubleBuffer {
    /// Converts one run of rows into pinned memory and starts its copy to the device. Returns false, without a copy,
    /// if the encoding cannot represent an element.
    ///
    /// # Safety
    /// `to` is device memory for the whole run, which is not used otherwise until the copy has completed.
    unsafe fn read(
        &mut self,
        runtime: &Arc<GpuRuntime>,
        to: *mut u8,
        from: &HostMat<'_>,
        run: &WeightRowRange,
        encoding: WeightEncoding,
    ) -> Result<bool, GpuError> {
        let chunk = &mut self.chunks[self.next];
        self.next ^= 1;
        if let Some(copied) = chunk.copied.take() {
            copied.wait_event()?;
        }
        let bytes = run.rows * encoding.row_bytes(from.cols());
        let host = chunk.memory.as_mut_ptr();
        // SAFETY: the chunk is host memory that no copy in flight reads; a run fits into it.
        let staged = unsafe { std::slice::from_raw_parts_mut(host, bytes) };
        if !encoding.encode(from.row_range(run.row, run.rows), staged) {
            return Ok(false);
        }
        runtime.enter()?;
        let stream = runtime.stream(&COPY_STREAM)?;
        // SAFETY: source and destination have `bytes` bytes; the chunk is not accessed before the fence has
        // completed.
        let code = unsafe {
            (runtime.driver.copy_to_device)(to.cast(), host.cast_const().cast(), bytes, stream)
        };
        runtime.check(code, "copy to device")?;
        chunk.copied = Some(GpuFence::record(runtime, &COPY_STREAM)?);
        Ok(true)
    }
}

impl Drop for PinnedChunk {
    fn drop(&mut self) {
        if let Some(copied) = self.copied.take() {
            let _ = copied.wait_event(); // An error means that the device has failed.
        }
    }
}

/// Divides the rows of all `parts` into runs (successive rows of one matrix) of about equal size, so that all
/// reader threads have work.
fn row_runs(
    parts: &[HostMat<'_>],
    encoding: WeightEncoding,
    readers: usize,
) -> Vec<WeightRowRange> {
    let row_bytes = parts.first().map_or(1, |p| encoding.row_bytes(p.cols())).max(1);
    let total: usize = parts.iter().map(|p| p.rows() * row_bytes).sum();
    let bytes = (total / (2 * readers)).clamp(MIN_RUN_BYTES, CHUNK_BYTES);
    let step = (bytes / row_bytes).max(1);
    let (mut runs, mut at) = (Vec::new(), 0);
    for (part, mat) in parts.iter().enumerate() {
        for row in (0..mat.rows()).step_by(step) {
            let rows = step.min(mat.rows() - row);
            runs.push(WeightRowRange { part, row, rows, at });
            at += rows * row_bytes;
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_runs_cover_every_row_once_and_fit_a_chunk() {
        let bytes = vec![0u8; 3000 * 700 * 4];
        let whole = HostMat::new(&bytes, DType::F32, 3000, 700).unwrap();
        let parts = [whole.row_range(0, 1), whole.row_range(1, 2990), whole.row_range(2991, 9)];
        for readers in [1, 3, 16] {
            let runs = row_runs(&parts, WeightEncoding::Elements(DType::BF16), readers);
            let (mut at, mut rows) = (0, [0; 3]);
            for run in &runs {
                assert_eq!((run.at, run.row), (at, rows[run.part]));
                assert!(run.rows * 1400 <= CHUNK_BYTES);
                at += run.rows * 1400;
                rows[run.part] += run.rows;
            }
            assert_eq!((at, rows), (3000 * 1400, [1, 2990, 9]));
        }
    }
}
