//! Weights in the device's format, packed once at load.

use std::sync::{Arc, OnceLock};

use device::DType;
use kernels::PackedMatrix;

use crate::Tensor;
use crate::prefetch::NextLinear;

/// A linear layer `y = x Wᵀ + bias`, packed for the device.
///
/// Made by [`Ops::pack_linear`](crate::Ops::pack_linear) from one or several stacked matrices
/// (q | k | v, gate | up). Cloning shares the weights.
#[derive(Debug, Clone)]
pub struct PackedLinear {
    pub(crate) weight: Arc<PackedMatrix>,
    /// f32 `[N]`.
    pub(crate) bias: Option<Arc<Tensor>>,
    /// The linear layer that is launched after this one.
    pub(crate) next: Arc<OnceLock<NextLinear>>,
}

impl PackedLinear {
    pub(crate) fn new(weight: Arc<PackedMatrix>, bias: Option<Arc<Tensor>>) -> Self {
        Self { weight, bias, next: Arc::default() }
    }

    /// Number of outputs.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.weight.n()
    }

    /// Number of inputs.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.weight.k()
    }

    /// Element type of the weights.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    /// Bytes of the weights on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// Returns the rows of the weight as an embedding table: a tied head is stored once, packed, and the
    /// lookup gathers from its panels. `first` is the vocabulary id of row 0 on this rank.
    #[must_use]
    pub fn tied_embedding(&self, first: usize) -> EmbeddingTable {
        EmbeddingTable { table: EmbeddingStorage::Packed(self.weight.clone()), first }
    }
}

/// Token embeddings; ids outside this rank's shard give zeros, so that an all-reduce completes them.
#[derive(Debug, Clone)]
pub struct EmbeddingTable {
    pub(crate) table: EmbeddingStorage,
    pub(crate) first: usize,
}

#[derive(Debug, Clone)]
pub(crate) enum EmbeddingStorage {
    Rows(Arc<Tensor>),
    Packed(Arc<PackedMatrix>),
}

impl EmbeddingTable {
    /// Makes a table `[V, H]` that is not a tied head; `first` is the vocabulary id of row 0 on this rank.
    #[must_use]
    pub fn from_rows(table: Tensor, first: usize) -> Self {
        Self { table: EmbeddingStorage::Rows(Arc::new(table)), first }
    }

    /// Width of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        match &self.table {
            EmbeddingStorage::Rows(table) => table.cols(),
            EmbeddingStorage::Packed(table) => table.k(),
        }
    }
}
