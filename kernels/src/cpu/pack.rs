//! Packs weight matrices into panels of 32 outputs, on all threads.

use device::{DType, DeviceDriver, DeviceError, FloatElement, bf16, f16};

use super::shared_rows::SendPtr;
use crate::cpu::CpuBackend;
use crate::{HostMat, PANEL_COLUMNS, PackedMatrix};

const KERNEL: &str = "pack";

impl CpuBackend {
    /// Packs `parts` as [`KernelBackend::pack`](crate::KernelBackend::pack) does, into panels of 32 outputs.
    ///
    /// Errors: the numbers of columns differ, the type is unsupported, bf16 has an odd number of columns, or
    /// allocation fails.
    pub fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<PackedMatrix, DeviceError> {
        let k = parts.first().map_or(0, HostMat::cols);
        if let Some(part) = parts.iter().find(|part| part.cols() != k) {
            let (what, got) = ("columns of a part", part.cols());
            return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected: k });
        }
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(DeviceError::Unsupported { kernel: KERNEL, what: "weight", dtype });
        }
        if dtype == DType::BF16 && !k.is_multiple_of(2) {
            let (what, expected) = ("columns (bf16 inputs are paired)", k + 1);
            return Err(DeviceError::Shape { kernel: KERNEL, what, got: k, expected });
        }
        let n: usize = parts.iter().map(HostMat::rows).sum();
        let bytes = n.next_multiple_of(PANEL_COLUMNS) * k * dtype.bytes();
        let mut packed = PackedMatrix { buffer: self.alloc(bytes)?, dtype, n, k, scales: None };
        match dtype {
            DType::BF16 => self.fill::<bf16>(&mut packed, parts),
            DType::F16 => self.fill::<f16>(&mut packed, parts),
            _ => self.fill::<f32>(&mut packed, parts),
        }
        Ok(packed)
    }

    fn fill<T: FloatElement>(&self, packed: &mut PackedMatrix, parts: &[HostMat<'_>]) {
        let (n, panels, panel_len) = (packed.n, packed.panels(), PANEL_COLUMNS * packed.k);
        let (k, dtype) = (packed.k, packed.dtype);
        let base = SendPtr(packed.buffer.as_mut_ptr().cast::<T>());
        self.threads().split(panels, 1, 2, &|range| {
            let mut row = vec![0.0; k];
            for p in range {
                // SAFETY: panel `p` is inside the buffer and only this thread writes it.
                let panel = unsafe {
                    std::slice::from_raw_parts_mut(base.get().add(p * panel_len), panel_len)
                };
                for column in 0..PANEL_COLUMNS.min(n - p * PANEL_COLUMNS) {
                    read_stacked(parts, p * PANEL_COLUMNS + column, &mut row);
                    scatter(panel, column, &row, dtype);
                }
            }
        });
    }
}

/// Writes row `n` of the matrix that results from stacking all `parts` by rows to `row`, as f32.
fn read_stacked(parts: &[HostMat<'_>], mut n: usize, row: &mut [f32]) {
    for part in parts {
        if n < part.rows() {
            return part.read_row(n, row);
        }
        n -= part.rows();
    }
}

/// Writes `row`, the weights of one output, to column `column` of a panel.
fn scatter<T: FloatElement>(panel: &mut [T], column: usize, row: &[f32], dtype: DType) {
    if dtype == DType::BF16 {
        for (pairs, x) in panel.chunks_exact_mut(2 * PANEL_COLUMNS).zip(row.as_chunks::<2>().0) {
            pairs[2 * column] = T::store(x[0]);
            pairs[2 * column + 1] = T::store(x[1]);
        }
    } else {
        for (line, x) in panel.chunks_exact_mut(PANEL_COLUMNS).zip(row) {
            line[column] = T::store(*x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::CpuConfig;

    #[test]
    fn packed_parts_stack_and_keep_every_element() {
        let device = CpuBackend::new(CpuConfig { threads: 2, ..CpuConfig::default() }).unwrap();
        let k = 6;
        let value = |n: usize, k: usize| ((n * 8 + k) % 256) as f32;
        let host = |from: usize, rows: usize| -> Vec<u8> {
            let of = |n: usize| (0..k).flat_map(move |j| value(n, j).to_le_bytes());
            (from..from + rows).flat_map(of).collect()
        };
        let (a, b) = (host(0, 19), host(19, 22));
        let parts = [
            HostMat::new(&a, DType::F32, 19, k).unwrap(),
            HostMat::new(&b, DType::F32, 22, k).unwrap(),
        ];
        let packed = device.pack(&parts, DType::F32).unwrap();
        let all = packed.buffer.mat(DType::F32, 1, 64 * k).unwrap();
        for n in 0..41 {
            for j in 0..k {
                assert_eq!(all.row::<f32>(0)[packed.index(n, j)], value(n, j));
            }
        }
        let packed = device.pack(&parts, DType::F16).unwrap();
        let all = packed.buffer.mat(DType::F16, 1, 64 * k).unwrap();
        for n in 0..41 {
            for j in 0..k {
                assert_eq!(all.row::<f16>(0)[packed.index(n, j)].to_f32(), value(n, j));
            }
        }
        let packed = device.pack(&parts, DType::BF16).unwrap();
        let all = packed.buffer.mat(DType::BF16, 1, 64 * k).unwrap();
        for n in 0..41 {
            for j in 0..k {
                assert_eq!(all.row::<bf16>(0)[packed.index(n, j)].to_f32(), value(n, j));
            }
        }
    }

    #[test]
    fn odd_bf16_inputs_and_ragged_parts_are_rejected() {
        let device = CpuBackend::new(CpuConfig::default()).unwrap();
        let bytes = [0; 4 * 3 * 4];
        let odd = HostMat::new(&bytes, DType::F32, 4, 3).unwrap();
        assert!(device.pack(&[odd], DType::BF16).is_err());
        assert!(device.pack(&[odd], DType::F32).is_ok());
        assert!(device.pack(&[odd, odd.column_range(0, 2)], DType::F32).is_err());
        assert!(device.pack(&[odd], DType::F16).is_ok());
        assert!(device.pack(&[odd], DType::F8E4M3).is_err());
    }
}
