//! Stored tensors that tests modify.

use std::collections::BTreeMap;

/// Tensor of a safetensors file.
#[derive(Debug, Clone)]
pub(super) struct TestTensor {
    /// Name of the dtype as the header of the file spells it.
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

impl TestTensor {
    pub(super) fn new(dtype: &str, shape: Vec<u64>, bytes: Vec<u8>) -> Self {
        Self { dtype: dtype.to_owned(), shape, bytes }
    }
}

/// Stored tensors by name.
pub(super) type StoredTensorMap = BTreeMap<String, TestTensor>;
