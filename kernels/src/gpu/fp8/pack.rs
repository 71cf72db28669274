//! Packing of fp8 weights: elements stay in the row-major layout of the checkpoint, scales are separate f32
//! matrices.

use device::gpu::{Fp8Scaling, KernelLaunch};
use device::{Buffer, DType, DeviceDriver, DeviceError, DeviceStream};

use super::{BLOCK, QUANTIZE, THREADS};
use crate::gpu::GpuBackend;
use crate::{ActivationScaling, HostMat, HostScales, PackedMatrix, PackedScales};

/// Minimum number of outputs (rows) per block scale that kernels support: the small-M kernel uses one scale
/// for the 8 rows of a strip.
const MIN_UNIT: usize = 8;
/// Number of input columns per iteration of the small-M kernel; the number of inputs must be a multiple of
/// it.
const STEP: usize = 64;
/// BLASLt requires that the row stride of scales is a multiple of this.
const SCALE_STRIDE: usize = 4;

/// Numbers of rows and columns of a packed matrix that share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct ScaleBlockShape {
    /// Number of outputs (rows of the matrix) per scale.
    pub(super) rows: usize,
    /// Number of inputs (columns of the matrix) per scale.
    cols: usize,
}

/// Returns the scale block shape of the matrix that stacks all `parts` by rows; `None` if kernels do not
/// support the scales.
pub(in super::super) fn scale_block_shape(parts: &[HostMat<'_>]) -> Option<ScaleBlockShape> {
    let k = parts.first()?.cols();
    if !k.is_multiple_of(STEP) || parts.iter().any(|part| part.dtype() != DType::F8E4M3) {
        return None;
    }
    block_rows(parts).map(|rows| ScaleBlockShape { rows, cols: BLOCK }).or_else(|| {
        let in_rows = |part| has_channel_scales(part) || has_one_scale(part);
        parts.iter().all(in_rows).then_some(ScaleBlockShape { rows: 1, cols: k })
    })
}

/// Returns the number of rows per scale in the matrix that stacks all `parts` by rows; `None` if a part has
/// no block scales, or if kernels do not support this number of rows.
fn block_rows(parts: &[HostMat<'_>]) -> Option<usize> {
    // In the stacked matrix, scale blocks begin anew at the first row of every part, and a part that is a
    // slice of a stored matrix may begin inside a scale block of that matrix. The number of rows per scale is
    // the largest power of two that divides the block size and, for every part, the index of its first row in
    // the packed matrix and in the stored matrix.
    let (mut offsets, mut start) = (BLOCK, 0);
    for part in parts {
        let scales = part.scales()?;
        let first = scales.origin();
        if scales.block_shape() != [BLOCK; 2] || !first[1].is_multiple_of(BLOCK) {
            return None;
        }
        (offsets, start) = (offsets | first[0] | start, start + part.rows());
    }
    let rows = 1 << offsets.trailing_zeros();
    (rows >= MIN_UNIT).then_some(rows)
}

/// Returns the scale block shape of the matrix that stacks the `parts` of all experts. Expert kernels support
/// block scales only: a part with a single scale gets block scales that are all equal to it.
pub(super) fn expert_block_shape(parts: &[HostMat<'_>]) -> Option<ScaleBlockShape> {
    let block = scale_block_shape(parts)?;
    if block.rows > 1 || !parts.iter().all(has_one_scale) {
        return Some(block);
    }
    // The number of rows per scale block is the largest power of two, at most 128, that divides the number of
    // rows of every part, so that no scale block contains rows of two parts.
    let offsets = parts.iter().fold(BLOCK, |offsets, part| offsets | part.rows());
    let rows = 1 << offsets.trailing_zeros();
    (rows >= MIN_UNIT).then_some(ScaleBlockShape { rows, cols: BLOCK })
}

/// Whether dynamic activation scales multiply all `parts`, each of which has one scale.
fn has_dynamic_tensor_scales(parts: &[HostMat<'_>]) -> bool {
    let is_dynamic =
        |part: &HostMat<'_>| matches!(part.activation_scaling(), ActivationScaling::Dynamic);
    parts.iter().all(|part| is_dynamic(part) && has_one_scale(part))
}

/// Whether every row of the matrix has its own scale.
fn has_channel_scales(part: &HostMat<'_>) -> bool {
    let covers_row = |s: &HostScales<'_>| {
        s.block_shape()[0] == 1 && s.block_shape()[1] >= s.origin()[1] + part.cols()
    };
    part.scales().is_some_and(covers_row)
}

/// Whether one scale covers the whole matrix.
fn has_one_scale(part: &HostMat<'_>) -> bool {
    let end = |s: &HostScales<'_>| [s.origin()[0] + part.rows(), s.origin()[1] + part.cols()];
    part.scales()
        .is_some_and(|s| s.block_shape()[0] >= end(s)[0] && s.block_shape()[1] >= end(s)[1])
}

impl GpuBackend {
    /// Returns the scale block shape of the linear layer that stacks all `parts` by rows; `None` if kernels do not
    /// support the scales. Weights with one scale and dynamic activation scales get equal block scales if BLASLt
    /// supports blocks: the op before the layer can then quantise its output in the same kernel
    /// ([`PrologueLinear`](crate::PrologueLinear)), which is not possible with one activation scale per row.
    pub(in super::super) fn linear_block_shape(
        &self,
        parts: &[HostMat<'_>],
    ) -> Option<ScaleBlockShape> {
        let block = scale_block_shape(parts)?;
        // Fused kernels for few rows need whole scale blocks in each half of the outputs.
        let outputs: usize = parts.iter().map(HostMat::rows).sum();
        if !outputs.is_multiple_of(2 * BLOCK) || !has_dynamic_tensor_scales(parts) {
            return Some(block);
        }
        Some(self.equal_block_scales(parts).unwrap_or(block))
    }

    /// Returns the shape of the block scales that replace one scale per part; `None` if a part has more scales, or
    /// if BLASLt does not support blocks of the sizes of `parts`.
    fn equal_block_scales(&self, parts: &[HostMat<'_>]) -> Option<ScaleBlockShape> {
        let is_whole = parts.first()?.cols().is_multiple_of(BLOCK);
        if !is_whole || !parts.iter().all(has_one_scale) {
            return None;
        }
        let supports = self.blaslt()?.supports_fp8_scaling(Fp8Scaling::Blocks);
        expert_block_shape(parts).filter(|blocks| supports && blocks.rows == BLOCK)
    }

    /// Loads `parts` as one fp8 matrix with scale blocks of shape `block`.
    pub(in super::super) fn load_fp8(
        &self,
        parts: &[HostMat<'_>],
        block: ScaleBlockShape,
    ) -> Result<PackedMatrix, DeviceError> {
        let mut packed = self.load_as(parts, DType::F8E4M3)?;
        let (stride, values) = scales(parts, block, packed.k());
        let buffer = self.load_scales(&values)?;
        let activation_scaling =
            ActivationScaling::combined(parts.iter().map(HostMat::activation_scaling));
        let blocks = if block.rows == 1 && activation_scaling.static_scale().is_some() {
            let shape = self.equal_block_scales(parts);
            shape.map(|shape| self.load_scales(&scales(parts, shape, packed.k()).1)).transpose()?
        } else {
            None
        };
        let scales = PackedScales { buffer, rows: block.rows, stride, activation_scaling, blocks };
        packed.scales = Some(scales);
        // NVIDIA GPUs use the fp8 format of checkpoints, OCP e4m3; on other devices the kernel converts to
        // e4m3fnuz if the GPU uses that (gfx942).
        if !self.arch().starts_with("sm_") {
            self.to_device_fp8(&mut packed)?;
        }
        Ok(packed)
    }

    fn load_scales(&self, values: &[f32]) -> Result<Buffer, DeviceError> {
        let bytes: Vec<u8> = values.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let mut buffer = self.weights().alloc(self.runtime(), bytes.len())?;
        self.upload(&mut buffer, 0, &bytes)?;
        Ok(buffer)
    }

    fn to_device_fp8(&self, packed: &mut PackedMatrix) -> Result<(), DeviceError> {
        let words = packed.n() * packed.k() / 4;
        let kernel = self.kernel(&QUANTIZE, "fp8_to_fnuz", &[("CHANNELS", 0), ("SCALING", 0)])?;
        let blocks = words.div_ceil(THREADS as usize).min(1 << 16);
        let launch = KernelLaunch::new(kernel, [blocks as u32, 1, 1], THREADS, 0)
            .arg_ptr(packed.buffer.as_mut_ptr())
            .u32(words as u32);
        // SAFETY: the kernel accesses only the packed matrix, and the stream waits until the matrix is copied
        // to the device.
        unsafe { launch.launch(self, &DeviceStream::default()) }
    }
}

/// Returns the row stride and the row-major scales of the matrix that stacks all `parts` by rows.
fn scales(parts: &[HostMat<'_>], block: ScaleBlockShape, k: usize) -> (usize, Vec<f32>) {
    let cols = k.div_ceil(block.cols);
    let stride = if block.rows == 1 { 1 } else { cols.next_multiple_of(SCALE_STRIDE) };
    let mut values = Vec::new();
    for part in parts {
        let Some(scales) = part.scales() else { continue };
        for row in (0..part.rows()).step_by(block.rows) {
            let from = values.len();
            values.extend((0..cols).map(|col| scales.at(row, col * block.cols)));
            values.resize(from + stride, 0.0);
        }
    }
    (stride, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_as_large_as_stacks_and_slices_allow() {
        let bytes = vec![0; 640 * 192];
        let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let whole = HostMat::new(&bytes, DType::F8E4M3, 640, 192).unwrap();
        let blocks = whole.scaled(&values, [BLOCK; 2]).unwrap();
        let unit = |parts: &[HostMat<'_>]| scale_block_shape(parts).map(|block| block.rows);
        assert_eq!(unit(&[blocks]), Some(128));
        assert_eq!(unit(&[blocks.row_range(0, 320), blocks.row_range(0, 256)]), Some(64));
        assert_eq!(unit(&[blocks.row_range(16, 128)]), Some(16));
        assert_eq!(unit(&[blocks.row_range(0, 4), blocks]), None);
        assert_eq!(unit(&[blocks, whole]), None);
        assert_eq!(unit(&[blocks.column_range(64, 128)]), None);
        let parts = [blocks.row_range(64, 128), blocks.row_range(256, 64)];
        let (stride, found) = scales(&parts, scale_block_shape(&parts).unwrap(), 192);
        assert_eq!((stride, found.len()), (4, 12));
        assert_eq!(
            [found[0], found[1], found[4], found[5], found[8], found[9]],
            [0., 1., 2., 3., 4., 5.]
        );
        let rows: Vec<f32> = (0..640).map(|i| i as f32).collect();
        let channels = whole.scaled(&rows, [1, 192]).unwrap();
        let parts = [channels.row_range(7, 2), channels.row_range(1, 1)];
        assert_eq!(
            scales(&parts, scale_block_shape(&parts).unwrap(), 192),
            (1, vec![7.0, 8.0, 1.0])
        );
    }

    #[test]
    fn parts_with_one_scale_are_packed_per_channel_or_in_blocks() {
        let bytes = vec![0; 48 * 192];
        let of = |scale, rows: usize| {
            let matrix = HostMat::new(&bytes[..rows * 192], DType::F8E4M3, rows, 192).unwrap();
            matrix.scaled(scale, [rows, 192]).unwrap()
        };
        let parts = [of(&[2.0], 48), of(&[3.0], 16).row_range(8, 8).column_range(128, 64)];
        assert_eq!(scale_block_shape(&parts[..1]), Some(ScaleBlockShape { rows: 1, cols: 192 }));
        let expected = [[2.0; 48].as_slice(), &[3.0; 8]].concat();
        assert_eq!(scales(&parts, ScaleBlockShape { rows: 1, cols: 64 }, 64), (1, expected));
        let experts = [of(&[2.0], 32), of(&[3.0], 48)];
        let block = expert_block_shape(&experts).unwrap();
        assert_eq!(block, ScaleBlockShape { rows: 16, cols: BLOCK });
        let (stride, found) = scales(&experts, block, 192);
        assert_eq!((stride, found.len(), found[4], found[8]), (4, 20, 2.0, 3.0));
        assert_eq!(expert_block_shape(&[of(&[2.0], 12)]), None);
    }
}
