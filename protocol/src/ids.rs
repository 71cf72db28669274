//! Identifiers: opaque numbers with equality and order.

use serde::{Deserialize, Serialize};

/// Token id of the vocabulary.
pub type Token = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);
    };
}

id!(
    /// Id of one choice of one user request, unique for the life of the scheduler process.
    RequestId(u64)
);
id!(
    /// Number of a step of one replica, counted from 1.
    StepId(u64)
);
id!(
    /// Generation of an executor group: it increases when the executors are restarted, and messages of older
    /// epochs are dropped.
    Epoch(u64)
);
id!(
    /// Sequence slot: row of persistent per-request state on a device.
    SequenceSlot(u32)
);
id!(
    /// Index of a KV block in its pool.
    BlockId(u32)
);
id!(
    /// Index of a state slot in the pool of its KV group.
    StateSlot(u32)
);
id!(
    /// Rank of a process in a parallel group.
    Rank(u16)
);
id!(
    /// Index of a replica (DP rank). A replica consists of one KV cache and the executors that share it.
    Replica(u16)
);

impl StepId {
    /// Returns the next step.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Epoch {
    /// Returns the next epoch.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl BlockId {
    /// Entry of a block table that holds no block.
    pub const NULL: Self = Self(u32::MAX);
}
