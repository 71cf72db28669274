//! Weights in the device's format, packed once when the model is loaded.

use std::sync::{Arc, OnceLock};

use device::DType;
use kernels::PackedMatrix;

use crate::Tensor;
use crate::prefetch::NextLinearLayer;

/// Linear layer `y = x Wᵀ + bias`, packed for the device.
///
/// Made by [`Ops::pack_linear`](crate::Ops::pack_linear) from one or several stacked matrices (q | k | v,
/// gate | up). Cloning shares the weights.
#[derive(Debug, Clone)]
pub struct PackedLinear {
    pub(crate) weight: Arc<PackedMatrix>,
    /// Bias, f32 `[outputs]`.
    pub(crate) bias: Option<Arc<Tensor>>,
    /// Fused linear layer that is launched after this one, known after the first pass that launches both;
    /// this layer prefetches the weights of the next one.
    pub(crate) next: Arc<OnceLock<NextLinearLayer>>,
}

impl PackedLinear {
    pub(crate) fn new(weight: Arc<PackedMatrix>, bias: Option<Arc<Tensor>>) -> Self {
        Self { weight, bias, next: Arc::default() }
    }

    /// Number of outputs of the layer.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.weight.n()
    }

    /// Number of inputs of the layer.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.weight.k()
    }

    /// Element type of the weights.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    /// Size of the weights on the device, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// Returns the rows of the weight as an embedding table. An LM head that is tied to the embedding is
    /// stored once, packed, and the embedding lookup gathers rows from the packed matrix. `first` is the
    /// vocabulary id of row 0 on this rank.
    #[must_use]
    pub fn tied_embedding(&self, first: usize) -> EmbeddingTable {
        EmbeddingTable { table: EmbeddingStorage::Packed(self.weight.clone()), first }
    }
}

/// Token embeddings. Ids outside this rank's vocabulary shard give zeros, so that an all-reduce sums to the
/// embedding.
#[derive(Debug, Clone)]
pub struct EmbeddingTable {
    pub(crate) table: EmbeddingStorage,
    pub(crate) first: usize,
}

/// Storage of an embedding table: rows, or a packed matrix that is shared with the LM head.
#[derive(Debug, Clone)]
pub(crate) enum EmbeddingStorage {
    Rows(Arc<Tensor>),
    Packed(Arc<PackedMatrix>),
}

impl EmbeddingTable {
    /// Creates an embedding table that is not tied to an LM head, `[vocabulary shard, hidden_size]`. `first`
    /// is the vocabulary id of row 0 on this rank.
    #[must_use]
    pub fn from_rows(table: Tensor, first: usize) -> Self {
        Self { table: EmbeddingStorage::Rows(Arc::new(table)), first }
    }

    /// Hidden size: width of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        match &self.table {
            EmbeddingStorage::Rows(table) => table.cols(),
            EmbeddingStorage::Packed(table) => table.k(),
        }
    }
}
