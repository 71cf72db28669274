//! Errors of starting and running an executor.

use protocol::{RequestId, SequenceSlot};

use crate::{SpeculationError, WorldError};

/// An executor failure. All are final.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The checkpoint cannot be read or does not fit its configuration.
    #[error(transparent)]
    Load(#[from] models::ModelLoadError),
    /// The forward pass was rejected or failed.
    #[error(transparent)]
    Forward(#[from] models::ForwardError),
    /// An op outside the forward pass was rejected or failed.
    #[error(transparent)]
    Op(#[from] ops::OpError),
    /// The parallel configuration does not fit the model.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The ranks failed to join their groups, or a collective failed.
    #[error(transparent)]
    Collective(#[from] collectives::CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The link broke; a peer that closes the link is no error.
    #[error(transparent)]
    Link(protocol::link::LinkError),
    /// A batch was submitted before the KV cache was allocated.
    #[error("the KV cache is not allocated yet")]
    KvCacheNotSized,
    /// A single request of the configured length does not fit.
    #[error(
        "max_model_len {max_model_len} does not fit into {blocks} KV blocks of {block_tokens} tokens: \
         at most {longest} fits"
    )]
    KvTooSmall {
        /// Blocks of the pool.
        blocks: u32,
        /// Positions per block.
        block_tokens: u32,
        /// Longest request, as configured.
        max_model_len: u32,
        /// Longest request that fits.
        longest: u64,
    },
    /// The automatic share of the host's free memory for the KV cache cannot hold a single request.
    #[error(
        "{free} bytes of memory are free, of which the KV cache takes {taken}; a request of max_model_len \
         {max_model_len} needs {needed}: set --kv-cache-memory-bytes, or lower --max-model-len"
    )]
    KvShareTooSmall {
        /// Bytes free on the host.
        free: u64,
        /// Bytes chosen for the KV cache.
        taken: u64,
        /// Longest request, as configured.
        max_model_len: u32,
        /// Bytes of KV cache that such a request needs.
        needed: u64,
    },
    /// Weights and activations leave no memory for a KV cache.
    #[error(
        "no memory is left for the KV cache: {free} of {total} bytes are free and \
         --gpu-memory-utilization is {utilization}; at least {sufficient:.2} is needed"
    )]
    NoKvMemory {
        /// Total bytes of the device.
        total: u64,
        /// Free bytes.
        free: u64,
        /// Share of the total that may be used.
        utilization: f64,
        /// Share that would hold one block.
        sufficient: f64,
    },
    /// The requested KV cache does not fit on the device.
    #[error("a KV cache of {needed} bytes does not fit: {free} of {total} bytes are free")]
    KvTooLarge {
        /// Requested bytes.
        needed: u64,
        /// Free bytes.
        free: u64,
        /// Total bytes of the device.
        total: u64,
    },
    /// A trace cannot be written.
    #[error("trace in {folder}: {error}")]
    Trace {
        /// Folder of the trace.
        folder: String,
        /// Error of the operating system.
        error: String,
    },
    /// A trace was requested, but no folder is configured.
    #[error("no folder for traces is configured (--profile DIR)")]
    TracingDisabled,
    /// MLA with a KV cache type other than the model's type.
    #[error(
        "--kv-cache-dtype fp8 is not supported with MLA: the KV cache has the type of the model (auto)"
    )]
    MlaKvDtype,
    /// Draft tokens of this configuration cannot be proposed or verified.
    #[error(transparent)]
    Speculation(#[from] SpeculationError),
    /// Grammar bitmasks of masked rows are missing.
    #[error(transparent)]
    TokenBitmask(#[from] TokenBitmaskError),
    /// A batch contradicts itself, or the settings of the start.
    #[error("invalid batch: {0}")]
    Batch(#[from] BatchError),
}

/// Grammar bitmasks that a step did not get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenBitmaskError {
    /// The bitmasks do not cover the masked rows of the step.
    #[error("step {step} has {rows} masked rows and received {received} grammar bitmasks")]
    Missing {
        /// The step.
        step: u64,
        /// Number of masked rows.
        rows: usize,
        /// Number of masked rows with a bitmask.
        received: usize,
    },
    /// The bitmasks did not arrive before the timeout.
    #[error("step {step} received {received} of {rows} grammar bitmasks within {waited_ms} ms")]
    Timeout {
        /// The step.
        step: u64,
        /// Number of masked rows.
        rows: usize,
        /// Number of bitmasks that arrived.
        received: usize,
        /// Time waited, in milliseconds.
        waited_ms: u128,
    },
}

/// A batch that cannot be run. The scheduler never sends such a batch: the error is a bug in the scheduler or
/// in the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// More tokens than a step may have.
    #[error("{tokens} tokens, at most {limit} per step")]
    TooManyTokens {
        /// Tokens of the batch.
        tokens: usize,
        /// Tokens a step may have.
        limit: usize,
    },
    /// More rows than a step may have.
    #[error("{rows} rows, at most {limit} per step")]
    TooManyRows {
        /// Rows of the batch.
        rows: usize,
        /// Rows a step may have.
        limit: usize,
    },
    /// `Batch::moe_tokens` is less than the tokens of this replica, or more than a step may have.
    #[error(
        "moe_tokens is {capacity}: at least the {tokens} tokens of this replica, at most {limit}"
    )]
    MoeTokenBudget {
        /// Tokens that MoE layers are padded to.
        capacity: usize,
        /// Tokens of the batch.
        tokens: usize,
        /// Tokens a step may have.
        limit: usize,
    },
    /// `Batch::draft_rows` is less than the drafting rows of this replica, or more than the rows that a step
    /// may have.
    #[error(
        "draft_rows is {capacity}: at least the {rows} drafting rows of this replica, at most {limit}"
    )]
    DraftRowBudget {
        /// Rows that draft passes are padded to.
        capacity: u32,
        /// Rows of the batch up to the last row with draft tokens.
        rows: u32,
        /// Rows a step may have.
        limit: usize,
    },
    /// The length of a row differs from its number of token ids, or is 0.
    #[error("request {} has a row of {len} tokens with {token_ids} token ids", request.0)]
    Length {
        /// Request of the row.
        request: RequestId,
        /// Length of the row.
        len: u32,
        /// Number of token ids.
        token_ids: usize,
    },
    /// A token id outside the vocabulary.
    #[error("request {} has token id {token}, the vocabulary has {limit} ids", request.0)]
    Vocabulary {
        /// Request of the row.
        request: RequestId,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// More draft tokens than configured.
    #[error("request {} has {drafts} draft tokens, at most {limit} are configured", request.0)]
    TooManyDrafts {
        /// Request of the row.
        request: RequestId,
        /// Draft tokens of the row.
        drafts: u8,
        /// Maximum number of draft tokens of a row.
        limit: u8,
    },
    /// The row refers to a token that its sequence slot did not sample.
    #[error("request {} refers to a token of step {step} that its sequence slot did not sample", request.0)]
    NotSampled {
        /// Request of the row.
        request: RequestId,
        /// The step referred to.
        step: u64,
    },
    /// The sequence slot does not exist.
    #[error("sequence slot {} is out of range: there are {limit}", seq_slot.0)]
    NoSequenceSlot {
        /// The sequence slot.
        seq_slot: SequenceSlot,
        /// Number of sequence slots.
        limit: usize,
    },
    /// The sequence slot is assigned to another request or epoch.
    #[error("request {} is not assigned to sequence slot {}", request.0, seq_slot.0)]
    SlotOwnerMismatch {
        /// Request of the row.
        request: RequestId,
        /// Sequence slot of the row.
        seq_slot: SequenceSlot,
    },
    /// A block table update leaves a gap, is too long, or names another KV cache group.
    #[error("the block table update of request {} does not fit its block table", request.0)]
    InvalidTableUpdate {
        /// Request of the row.
        request: RequestId,
    },
    /// The executor has no hidden state of the token before the row, which draft passes need.
    #[error("request {} starts at position {position}: the hidden state before it is not available", request.0)]
    MissingHiddenState {
        /// Request of the row.
        request: RequestId,
        /// First position of the row.
        position: u32,
    },
    /// The block table does not cover the row.
    #[error("request {} writes position {position}, its block table has {entries} entries", request.0)]
    TableTooShort {
        /// Request of the row.
        request: RequestId,
        /// First position without an entry.
        position: u32,
        /// Entries of the block table.
        entries: usize,
    },
    /// The block does not exist.
    #[error("block {block} is out of range: the pool has {limit}")]
    Block {
        /// The block.
        block: u32,
        /// Blocks of the pool.
        limit: u32,
    },
}
