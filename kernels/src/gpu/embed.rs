//! Embedding lookups and gathers: rows copied by index.

use super::check::{check_dtype, check_size};
use super::device::GpuDevice;
use super::kernel_launch::KernelLaunch;
use super::kernel_source::KernelSource;
use crate::{DType, DeviceError, DeviceStream, MatMut, MatRef, PackedMatrix};

static EMBED: KernelSource =
    KernelSource { name: "embed/embed.hip", text: include_str!("../../csrc/embed/embed.hip") };

/// Threads of a block: enough for 4 KiB at 16 bytes each.
const MAX_THREADS: usize = 256;

impl GpuDevice {
    pub(super) fn embed_table(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: MatRef<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.copy_rows("embed", s, y, table, ids, first)
    }

    /// A matrix on a GPU is kept row by row, so a tied head is an embedding table as it is.
    pub(super) fn embed_matrix(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: &PackedMatrix,
        first: usize,
    ) -> Result<(), DeviceError> {
        let rows = table.buffer.mat(table.dtype(), table.n(), table.k())?;
        self.copy_rows("embed_packed", s, y, rows, ids, first)
    }

    /// Indices are on the device: rows that do not exist become zeros instead of an error.
    pub(super) fn gather(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        rows: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.copy_rows("gather_rows", s, y, x, rows, 0)
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
        let threads =
            bytes.div_ceil(16).next_multiple_of(self.warp_size() as usize).min(MAX_THREADS);
        let kernel = self.kernel(&EMBED, "copy_rows", &[])?;
        let launch = KernelLaunch::new(kernel, (y.rows() as u32, 1, 1), threads as u32, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg(x)
            .arg(ids)
            .u32((y.stride() * size) as u32)
            .u32((x.stride() * size) as u32)
            .u32(bytes as u32)
            .u32(first as u32)
            .u32(x.rows() as u32);
        // SAFETY: one index per row of y; the kernel reads only rows that x has.
        unsafe { launch.launch(self, s) }
    }
}
