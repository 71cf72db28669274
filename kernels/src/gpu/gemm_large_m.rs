//! Large-M GEMM with WGMMA and TMA on NVIDIA sm_90a. It is used to fuse a gate activation into the epilogue, and for
//! linear layers if no vendor BLAS is used.

use device::gpu::{BOX_ROWS, KernelLaunch, KernelSource, TmaMatrix};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef};

use super::gemm::{GemmWeightRows, gemm_sizes, has_16_byte_rows};
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{GateActivation, PackedMatrix};

static GEMM_LARGE_M: KernelSource = kernel_source!("gemm_large_m/gemm_large_m.hip");

/// Number of threads per block: 12 warps, of which one is the producer and eight are consumers.
const THREADS: u32 = 12 * 32;
/// Number of blocks per cluster; they share the loaded rows of `W`.
const CLUSTER: usize = 2;
/// Number of rows of `x` per tile of a cluster.
const TILE_ROWS: usize = 256;
/// Number of rows of `W` per tile. With a gate activation, half of them are gate rows, the other half the up rows of
/// the same outputs.
const TILE_COLUMNS: usize = 256;
/// Number of rows of a TMA box of `x` and of `W`.
const INPUT_BOX_ROWS: usize = 128;
/// Number of columns (K) per step.
const COLUMNS: usize = 64;
/// Shared memory per block in bytes: four stages, the output staging buffer, barriers and alignment.
const SHARED_BYTES: u32 = 226 << 10;
/// Minimum number of rows of `x` for this kernel. From this size, fusing the gate activation is faster, since it
/// avoids storing the GEMM output; with fewer rows cuBLASLt is as fast.
const MIN_ROWS: usize = 2048;

impl GpuBackend {
    /// Whether the large-M GEMM supports `rows` rows of type `dtype` with weights `w`, and has enough tiles
    /// to fill the GPU.
    pub(crate) fn fits_large_m(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        let half = dtype == self.half_dtype() && w.dtype() == self.half_dtype();
        let whole = w.k().is_multiple_of(COLUMNS) && w.n().is_multiple_of(16) && w.k() != 0;
        let tiles = rows.div_ceil(TILE_ROWS) * w.n().div_ceil(TILE_COLUMNS);
        half && whole
            && rows >= MIN_ROWS
            && self.has_large_m_kernel()
            && fills_device(tiles, self.multiprocessors() as usize / CLUSTER)
    }

    /// Whether the GPU has WGMMA, TMA and enough shared memory for the large-M GEMM.
    pub(super) fn has_large_m_kernel(&self) -> bool {
        self.shared_bytes() >= SHARED_BYTES && self.has_wgmma_tma()
    }

    /// Whether the rows of `x` and `y` have the alignment that TMA requires, and `y` has the 16-bit type.
    pub(super) fn is_tma_aligned(&self, y: &MatMut<'_>, x: MatRef<'_>) -> bool {
        y.dtype() == self.half_dtype() && has_16_byte_rows(x) && has_16_byte_rows(y.as_ref())
    }

    /// Computes `y = x Wᵀ`, or the activation `gate` of gate and up, which are the first and the second half of
    /// the columns of `x Wᵀ`. `y` has the 16-bit type of the device. The caller has
    /// checked the shapes and that `is_tma_aligned` is true. The result of a row does not depend on the other
    /// rows.
    pub(super) fn gemm_large_m(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: MatRef<'_>,
        w: GemmWeightRows,
        gate: Option<GateActivation>,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&GEMM_LARGE_M, "gemm_large_m", &gated_product_defines(gate))?;
        let (rows, y_stride, outputs) = (x.rows(), y.stride(), y.cols());
        let boxed = |matrix, rows, columns, stride, box_rows| {
            self.encode_tensor_map(&TmaMatrix { matrix, rows, columns, stride, box_rows })
        };
        let y_map = boxed(y.as_mut_ptr().cast_const(), rows, outputs, y_stride, BOX_ROWS)?;
        let x_map = boxed(x.as_ptr(), rows, w.k, x.stride(), INPUT_BOX_ROWS)?;
        let w_map = boxed(w.address, w.n, w.k, w.k, INPUT_BOX_ROWS)?;
        let launch = KernelLaunch::new(
            kernel,
            [self.large_m_blocks(rows, w.n), 1, 1],
            THREADS,
            SHARED_BYTES,
        )
        .out(&mut y)
        .arg(x)
        .arg_ptr(w.address)
        .arg_words(&y_map.0)
        .arg_words(&x_map.0)
        .arg_words(&w_map.0);
        let launch = gemm_sizes(launch, x, w, y_stride as u32);
        // SAFETY: the caller checked the shapes; rows are aligned to 16 bytes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    fn large_m_blocks(&self, rows: usize, weight_rows: usize) -> u32 {
        let tiles = rows.div_ceil(TILE_ROWS) * weight_rows.div_ceil(TILE_COLUMNS);
        (tiles.min(self.multiprocessors() as usize / CLUSTER) * CLUSTER) as u32
    }
}

/// Whether `tiles` tiles keep `clusters` resident clusters at least 90 % busy, over all waves of the grid.
fn fills_device(tiles: usize, clusters: usize) -> bool {
    clusters != 0 && tiles * 10 >= tiles.div_ceil(clusters) * clusters * 9
}

#[cfg(test)]
mod tests {
    use super::fills_device;

    #[test]
    fn partial_last_wave_is_not_full() {
        for (tiles, clusters, expected) in
            [(384, 66, true), (66, 66, true), (67, 66, false), (60, 66, true), (40, 66, false)]
        {
            assert_eq!(
                fills_device(tiles, clusters),
                expected,
                "{tiles} tiles, {clusters} clusters"
            );
        }
        assert!(!fills_device(5, 0));
    }
}
