//! GPU launches of embedding lookup and row gather: both use a kernel that copies rows by index.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef, check_dtype, check_size};

use crate::gpu::GpuBackend;
use crate::{GpuKernel, PackedEmbedding, RowGather, TokenEmbedding};

static EMBED: KernelSource = kernel_source!("embed/embed.hip");

/// Maximum number of threads per block: they copy 4 KiB at 16 bytes per thread.
const MAX_THREADS: usize = 256;

impl GpuBackend {
    /// Number of threads per block that copy a row of `bytes` bytes: a thread copies 16 bytes at a time.
    fn copy_threads(&self, bytes: usize) -> usize {
        bytes.div_ceil(16).next_multiple_of(self.warp_size() as usize).min(MAX_THREADS)
    }

    fn copy_rows(
        &self,
        name: &'static str,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: MatRef<'_>,
        ids: MatRef<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        check_dtype(name, "indices", ids.dtype(), DType::I32)?;
        check_dtype(name, "output", y.dtype(), x.dtype())?;
        check_size(name, "columns", y.cols(), x.cols())?;
        check_size(name, "indices", ids.cols(), y.rows())?;
        let size = x.dtype().bytes();
        let bytes = x.cols() * size;
        let threads = self.copy_threads(bytes);
        let kernel = self.kernel(&EMBED, "copy_rows", &[])?;
        let launch = KernelLaunch::new(kernel, [y.rows() as u32, 1, 1], threads as u32, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg(x)
            .arg(ids)
            .u32((y.stride() * size) as u32)
            .u32((x.stride() * size) as u32)
            .u32(bytes as u32)
            .u32(first as u32)
            .u32(x.rows() as u32);
        // SAFETY: `ids` has one index per row of `y`; the kernel only reads valid rows of `x`.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for RowGather<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { y, x, rows } = self;
        gpu.copy_rows("gather_rows", s, y, x, rows, 0)
    }
}

impl GpuKernel for PackedEmbedding<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { y, ids, table, first } = self;
        let rows = table.buffer.mat(table.dtype(), table.n(), table.k())?;
        gpu.copy_rows("embed_packed", s, y, rows, ids, first)
    }
}

impl GpuKernel for TokenEmbedding<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { y, ids, table, first } = self;
        gpu.copy_rows("embed", s, y, table, ids, first)
    }
}
