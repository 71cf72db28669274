//! TMA descriptors (tensor maps) of matrices, which are passed to kernels as `TENSOR_MAP` arguments
//! (`csrc/dev/tensor_map.h`).

use std::ffi::{c_int, c_uint};

use super::device::GpuDevice;
use crate::DeviceError;

/// Number of rows of a TMA box; must equal `BOX_ROWS` in `csrc/dev/tensor_map.h`.
pub const BOX_ROWS: usize = 16;
/// Number of columns of a TMA box: 64 columns of 16-bit elements are 128 bytes.
const BOX_COLUMNS: c_uint = 64;
/// `CU_TENSOR_MAP_SWIZZLE_128B`: permutes the 16-byte chunks of each 128-byte row, as WGMMA requires.
const SWIZZLE_128B: c_int = 3;
/// `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`: L2 fetch granularity of 256 bytes.
const L2_PROMOTION_256B: c_int = 3;

/// TMA descriptor (tensor map) of a matrix, as encoded by the CUDA driver.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// Empty TMA descriptor, for kernels that do not use TMA.
    pub const NONE: Self = Self([0; 16]);
}

/// Matrix of 16-bit elements that kernels copy to shared memory in TMA boxes.
#[derive(Debug, Clone, Copy)]
pub struct TmaMatrix {
    /// Device address of the matrix's first element.
    pub matrix: *const u8,
    /// Number of rows of the matrix.
    pub rows: usize,
    /// Number of columns of the matrix.
    pub columns: usize,
    /// Row stride of the matrix, in elements.
    pub stride: usize,
    /// Number of rows of a TMA box.
    pub box_rows: usize,
}

impl GpuDevice {
    /// Encodes the TMA descriptor of the contiguous matrix `[rows, columns]` at the address `matrix`. The
    /// elements have the device's 16-bit type, and the TMA boxes have [`BOX_ROWS`] rows. Returns an empty
    /// descriptor if the driver does not support TMA.
    pub fn tensor_map(
        &self,
        matrix: *const u8,
        rows: usize,
        columns: usize,
    ) -> Result<TensorMap, DeviceError> {
        let stride = columns;
        self.encode_tensor_map(&TmaMatrix { matrix, rows, columns, stride, box_rows: BOX_ROWS })
    }

    /// Encodes the TMA descriptor of a matrix with any row stride and number of box rows. Returns an empty
    /// descriptor if the driver does not support TMA.
    pub fn encode_tensor_map(&self, m: &TmaMatrix) -> Result<TensorMap, DeviceError> {
        let mut map = TensorMap::NONE;
        let runtime = self.runtime();
        let Some(encode) = runtime.driver.tensor_map_encode else { return Ok(map) };
        runtime.enter()?;
        let (sizes, row_bytes) = ([m.columns as u64, m.rows as u64], [m.stride as u64 * 2]);
        let (box_sizes, element_strides) = ([BOX_COLUMNS, m.box_rows as c_uint], [1, 1]);
        // SAFETY: the output has the size and alignment of a tensor map, and the arrays have one entry per
        // dimension; the driver only stores the address.
        let code = unsafe {
            encode(
                (&raw mut map).cast(),
                self.half_dtype.in_tensor_map(),
                2,
                m.matrix.cast_mut().cast(),
                sizes.as_ptr(),
                row_bytes.as_ptr(),
                box_sizes.as_ptr(),
                element_strides.as_ptr(),
                0,
                SWIZZLE_128B,
                L2_PROMOTION_256B,
                0,
            )
        };
        runtime.check(code, "tensor map")?;
        Ok(map)
    }
}
