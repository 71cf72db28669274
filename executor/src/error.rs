//! Why an executor cannot start, or cannot go on.

use protocol::{RequestId, SequenceSlot};

use crate::{SpeculationError, WorldError};

/// What ends an executor.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The checkpoint cannot be read or does not fit its configuration.
    #[error(transparent)]
    Load(#[from] models::ModelLoadError),
    /// The forward pass was refused or failed.
    #[error(transparent)]
    Forward(#[from] models::ForwardError),
    /// An operation beside the forward pass was refused or failed.
    #[error(transparent)]
    Op(#[from] ops::OpError),
    /// The ranks cannot serve this model together.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The ranks do not come together.
    #[error(transparent)]
    Collective(#[from] collectives::CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The link broke; a peer that merely leaves is no error.
    #[error(transparent)]
    Link(protocol::link::LinkError),
    /// A batch came before the size of the KV cache.
    #[error("the KV cache has no size yet")]
    KvCacheNotSized,
    /// A single request of the configured length would not fit.
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
    /// The share of the host's free memory that the KV cache takes by itself does not hold a single request.
    #[error(
        "{free} bytes of memory are free, of which the KV cache takes {taken}; a request of max_model_len \
         {max_model_len} needs {needed}: set --kv-cache-memory-bytes, or lower --max-model-len"
    )]
    KvShareTooSmall {
        /// Bytes free on the host.
        free: u64,
        /// Bytes of the cache that were chosen.
        taken: u64,
        /// Longest request, as configured.
        max_model_len: u32,
        /// Bytes of the cache that it needs.
        needed: u64,
    },
    /// Weights and activations leave no memory for a KV cache.
    #[error(
        "no memory is left for the KV cache: {free} of {total} bytes are free and \
         --gpu-memory-utilization is {utilization}; at least {sufficient:.2} would do"
    )]
    NoKvMemory {
        /// Bytes of the device.
        total: u64,
        /// Bytes that are free.
        free: u64,
        /// Share of the total that may be used.
        utilization: f64,
        /// Share that would hold one block.
        sufficient: f64,
    },
    /// The KV cache that was asked for does not fit into the device.
    #[error("a KV cache of {needed} bytes does not fit: {free} of {total} bytes are free")]
    KvTooLarge {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes of the device.
        total: u64,
    },
    /// A trace cannot be written.
    #[error("trace in {folder}: {error}")]
    Trace {
        /// Where it lies, or should.
        folder: String,
        /// What the system said.
        error: String,
    },
    /// A trace was asked for, but no folder is configured.
    #[error("no folder for traces is configured (--profile DIR)")]
    TracingDisabled,
    /// Latents are to be kept in less than the model's type.
    #[error(
        "--kv-cache-dtype fp8: latent attention has a KV cache in the model's own type only, which is auto"
    )]
    MlaKvDtype,
    /// Drafts are asked for that cannot be made or verified.
    #[error(transparent)]
    Speculation(#[from] SpeculationError),
    /// What masked rows may sample did not come.
    #[error(transparent)]
    TokenBitmask(#[from] TokenBitmaskError),
    /// A batch contradicts itself, or what was agreed at start.
    #[error("impossible batch: {0}")]
    Batch(#[from] BatchError),
}

/// Masks that a step waits for in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenBitmaskError {
    /// They are not the ones of its rows.
    #[error("step {step} has {rows} masked rows and got masks of {got}")]
    Missing {
        /// The step.
        step: u64,
        /// Its masked rows.
        rows: usize,
        /// Of these, how many have a mask.
        got: usize,
    },
    /// They do not come.
    #[error("step {step} has {got} of {rows} masks after {waited_ms} ms")]
    Timeout {
        /// The step.
        step: u64,
        /// Its masked rows.
        rows: usize,
        /// Masks that came.
        got: usize,
        /// Time waited.
        waited_ms: u128,
    },
}

/// A batch that cannot be run. The scheduler never sends one: it is a bug there or here.
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
    /// Layers with experts have no room for what this rank brings, or more than any step fills.
    #[error(
        "room for {capacity} tokens of each replica, this one brings {tokens} and a step has at most {limit}"
    )]
    MoeTokenBudget {
        /// Tokens that there is room for.
        capacity: usize,
        /// Tokens of the batch.
        tokens: usize,
        /// Tokens a step may have.
        limit: usize,
    },
    /// Replicas that step together leave no room for the rows that this one drafts behind, or for more than any has.
    #[error(
        "room for drafts behind {capacity} rows of each replica, this one has {rows} and a step at most {limit}"
    )]
    DraftRowBudget {
        /// Rows that there is room for.
        capacity: u32,
        /// Rows of the batch up to the last with drafts.
        rows: u32,
        /// Rows a step may have.
        limit: usize,
    },
    /// A row's length and its ids differ, or it has none.
    #[error("request {} forwards {len} tokens, {given} are given", request.0)]
    Length {
        /// Whose row.
        request: RequestId,
        /// Length of the row.
        len: u32,
        /// Ids given.
        given: usize,
    },
    /// An id beyond the vocabulary.
    #[error("request {} has token {token}, the vocabulary ends at {limit}", request.0)]
    Vocabulary {
        /// Whose row.
        request: RequestId,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// More drafts than were agreed on.
    #[error("request {} is to verify {drafts} drafts, at most {limit} are made", request.0)]
    TooManyDrafts {
        /// Whose row.
        request: RequestId,
        /// Drafts of the row.
        drafts: u8,
        /// Drafts that rows may have.
        limit: u8,
    },
    /// The row refers to a token that its seat did not sample.
    #[error("request {} refers to a token of step {step} that its seat does not hold", request.0)]
    NotSampled {
        /// Whose row.
        request: RequestId,
        /// The step referred to.
        step: u64,
    },
    /// No such seat.
    #[error("seat {} of {limit}", seq_slot.0)]
    NoSequenceSlot {
        /// The seat.
        seq_slot: SequenceSlot,
        /// Seats.
        limit: usize,
    },
    /// The seat belongs to another request or epoch.
    #[error("request {} does not sit on seat {}", request.0, seq_slot.0)]
    SlotOwnerMismatch {
        /// Whose row.
        request: RequestId,
        /// The seat it names.
        seq_slot: SequenceSlot,
    },
    /// A table update leaves a gap, is too long, or names another group.
    #[error("the table update of request {} does not fit its table", request.0)]
    InvalidTableUpdate {
        /// Whose row.
        request: RequestId,
    },
    /// The row begins behind tokens of which this executor knows no hidden state, which drafts need.
    #[error("request {} goes on at position {position}, inside a block that others have filled", request.0)]
    MissingHiddenState {
        /// Whose row.
        request: RequestId,
        /// Its first position.
        position: u32,
    },
    /// The table does not cover the row.
    #[error("request {} writes position {position}, its table has {entries} entries", request.0)]
    TableTooShort {
        /// Whose row.
        request: RequestId,
        /// The position.
        position: u32,
        /// Entries of the table.
        entries: usize,
    },
    /// No such block.
    #[error("block {block} of {limit}")]
    Block {
        /// The block.
        block: u32,
        /// Blocks of the pool.
        limit: u32,
    },
}
