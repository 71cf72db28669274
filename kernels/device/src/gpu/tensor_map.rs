//! How the copy engine sees a matrix: the argument `TENSOR_MAP` of kernels (`csrc/dev/tensor_map.h`).

use std::ffi::{c_int, c_uint};

use super::device::GpuDevice;
use crate::DeviceError;

/// Rows of a box, as `BOX_ROWS` in the header.
pub const BOX_ROWS: usize = 16;
/// Columns of a box: what 128 bytes hold.
const BOX_COLUMNS: c_uint = 64;
/// The pieces of 16 bytes of a row of 128 change places, as products want them.
const SWAPS_PIECES: c_int = 3;
/// What the far cache fetches at once: 256 bytes.
const FETCHES_256_BYTES: c_int = 3;

/// A matrix in boxes, as the driver encodes it.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// Of no matrix: for kernels that look at none.
    pub const NONE: Self = Self([0; 16]);
}

/// A matrix of the device's 16-bit type that the copy engine moves in boxes.
#[derive(Debug, Clone, Copy)]
pub struct TiledMatrix {
    /// Address of the first element.
    pub matrix: *const u8,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Values between rows.
    pub stride: usize,
    /// Rows of a box.
    pub box_rows: usize,
}

impl GpuDevice {
    /// The matrix `[rows, columns]` of the device's 16-bit type at `matrix`, its rows one behind the other; empty where there is no
    /// such engine.
    pub fn tensor_map(
        &self,
        matrix: *const u8,
        rows: usize,
        columns: usize,
    ) -> Result<TensorMap, DeviceError> {
        let stride = columns;
        self.encode_tensor_map(&TiledMatrix { matrix, rows, columns, stride, box_rows: BOX_ROWS })
    }

    /// As `tensor_map`, with gaps between rows and boxes of any height.
    pub fn encode_tensor_map(&self, m: &TiledMatrix) -> Result<TensorMap, DeviceError> {
        let mut map = TensorMap::NONE;
        let runtime = self.runtime();
        let Some(encode) = runtime.driver.tensor_map_encode else { return Ok(map) };
        runtime.enter()?;
        let (sizes, row_bytes) = ([m.columns as u64, m.rows as u64], [m.stride as u64 * 2]);
        let (part, steps) = ([BOX_COLUMNS, m.box_rows as c_uint], [1, 1]);
        // SAFETY: a place of the size and alignment of a map, and arrays of as many entries as dimensions;
        // the address is only written down.
        let code = unsafe {
            encode(
                (&raw mut map).cast(),
                self.half_dtype.in_tensor_map(),
                2,
                m.matrix.cast_mut().cast(),
                sizes.as_ptr(),
                row_bytes.as_ptr(),
                part.as_ptr(),
                steps.as_ptr(),
                0,
                SWAPS_PIECES,
                FETCHES_256_BYTES,
                0,
            )
        };
        runtime.check(code, "tensor map")?;
        Ok(map)
    }
}
