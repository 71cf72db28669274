//! Weights that are uploaded to a GPU are row-major and bit for bit equal to the CPU's.

use device::{DType, DeviceDriver, bf16};
use kernels::HostMat;

use crate::device_pair::{CpuGpuPair, bytes_of, elements_of, pairs};
use crate::support::S;

/// Uploads weights with more rows than one pinned staging buffer holds, from each kind of source: a whole
/// matrix, a range of rows, a range of columns.
#[test]
fn weights_arrive_unchanged() {
    for pair in &pairs() {
        let mut numbers = pair.numbers(1);
        let (rows, cols) = (1500, 1003);
        let values: Vec<bf16> = numbers.reals(rows * cols);
        let bytes = bytes_of(&values);
        let whole = HostMat::new(&bytes, DType::BF16, rows, cols).unwrap();
        let parts = [whole.row_range(700, 800), whole, whole.row_range(3, 1)];
        let packed = pair.gpu.pack(&parts, DType::BF16).unwrap();
        assert_eq!((packed.n(), packed.k()), (2301, cols));
        let order = (700..1500).chain(0..1500).chain(3..4);
        let expected: Vec<u8> = order.flat_map(|r| whole.row_bytes(r).to_vec()).collect();
        assert!(packed_bytes(pair, &packed, expected.len()) == expected);

        let narrow = [whole.column_range(17, 500)];
        let packed = pair.gpu.pack(&narrow, DType::BF16).unwrap();
        let expected: Vec<u8> = (0..rows).flat_map(|r| narrow[0].row_bytes(r).to_vec()).collect();
        assert!(packed_bytes(pair, &packed, expected.len()) == expected);
    }
}

#[test]
fn weights_are_converted_while_loading() {
    for pair in &pairs() {
        let mut numbers = pair.numbers(2);
        let (rows, cols) = (33, 70);
        let values: Vec<f32> = (0..rows * cols).map(|_| numbers.float() * 1.001).collect();
        let bytes = bytes_of(&values);
        let part = [HostMat::new(&bytes, DType::F32, rows, cols).unwrap()];
        let packed = pair.gpu.pack(&part, DType::BF16).unwrap();
        let got: Vec<bf16> = elements_of(&packed_bytes(pair, &packed, rows * cols * 2));
        let expected: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        assert_eq!(got, expected);
        assert!(pair.gpu.pack(&part, DType::F16).is_err());
    }
}

/// Returns the bytes of a packed matrix, read back from the GPU.
fn packed_bytes(pair: &CpuGpuPair, packed: &kernels::PackedMatrix, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    pair.gpu.download(&S, packed.buffer(), 0, &mut out).unwrap();
    out
}
