//! Errors of starting and running an executor.

use protocol::{RequestId, SequenceSlot};

use crate::{ParallelConfigError, SpeculationError, VocabularyLimitError};

/// Failure of an executor. After any failure, the executor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The checkpoint cannot be read or does not fit its configuration.
    #[error(transparent)]
    Load(#[from] models::ModelLoadError),
    /// The forward pass failed, or its inputs were invalid.
    #[error(transparent)]
    Forward(#[from] models::ForwardError),
    /// An op outside the forward pass failed, or its inputs were invalid.
    #[error(transparent)]
    Op(#[from] ops::OpError),
    /// The parallel configuration does not fit the model.
    #[error(transparent)]
    World(#[from] ParallelConfigError),
    /// The ranks failed to form their communication groups, or a collective failed.
    #[error(transparent)]
    Collective(#[from] collectives::CollectiveError),
    /// An operation of the compute device failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The link to the scheduler failed. If the peer closes the link, that is a shutdown and not an error.
    #[error(transparent)]
    Link(protocol::link::LinkError),
    /// A batch was submitted before the KV cache was allocated.
    #[error("the KV cache is not allocated yet")]
    KvCacheNotSized,
    /// The KV cache cannot store one request of `--max-model-len` tokens or, without that flag, one block of
    /// tokens.
    #[error(
        "the pool has {blocks} KV blocks of {block_tokens} tokens, {kv_tokens_min} tokens \
         (--max-model-len, or one block without it) need {needed}: raise --kv-cache-memory-bytes or \
         --num-gpu-blocks-override, or lower --max-model-len"
    )]
    KvTooSmall {
        /// Number of blocks in the KV pool.
        blocks: u32,
        /// Number of blocks that a request of `kv_tokens_min` tokens needs, in all KV groups together.
        needed: u32,
        /// Number of positions per block.
        block_tokens: u32,
        /// Minimum number of token positions of the KV cache (`ExecutorSettings::kv_tokens_min`).
        kv_tokens_min: u32,
    },
    /// With `KvCacheSize::Auto` on a CPU, the KV cache takes a share of the host's free memory. This share is
    /// too small for `kv_tokens_min` tokens.
    #[error(
        "{free} bytes of memory are free, of which the KV cache takes {taken}; {kv_tokens_min} tokens \
         (--max-model-len, or one block without it) need {needed}: set --kv-cache-memory-bytes, or lower \
         --max-model-len"
    )]
    KvShareTooSmall {
        /// Free memory of the host in bytes.
        free: u64,
        /// Size of the KV cache in bytes, computed from the free memory.
        taken: u64,
        /// Minimum number of token positions of the KV cache (`ExecutorSettings::kv_tokens_min`).
        kv_tokens_min: u32,
        /// Bytes of KV cache that `kv_tokens_min` token positions need.
        needed: u64,
    },
    /// The recurrent states of all state slots do not fit in the free memory.
    #[error(
        "{slots} state slots need {needed} bytes of memory and {free} are free for them: lower --max-num-seqs"
    )]
    StatesTooLarge {
        /// Number of state slots.
        slots: usize,
        /// Bytes of all state slots.
        needed: u64,
        /// Free memory for the states of this rank in bytes.
        free: u64,
    },
    /// No device memory is left for a KV cache after weights and activations are allocated.
    #[error(
        "no memory is left for the KV cache: {free} of {total} bytes are free and \
         --gpu-memory-utilization is {utilization}; at least {sufficient:.2} is needed"
    )]
    NoKvMemory {
        /// Total memory of the device in bytes.
        total: u64,
        /// Free memory of the device in bytes.
        free: u64,
        /// Configured share of the total memory that may be used.
        utilization: f64,
        /// Minimum value of `utilization` (share of the total memory that may be used) with which at least
        /// one KV block would fit.
        sufficient: f64,
    },
    /// No device memory is left for a KV cache after weights, activations and recurrent states are allocated.
    #[error(
        "no memory is left for the KV cache: {free} of {total} bytes are free, recurrent states take {states}, and \
         --gpu-memory-utilization is {utilization}; lower --max-num-seqs, or set at least {sufficient:.2}"
    )]
    NoKvMemoryAfterStates {
        /// Total memory of the device in bytes.
        total: u64,
        /// Free memory of the device in bytes.
        free: u64,
        /// Configured share of the total memory that may be used.
        utilization: f64,
        /// Minimum value of `utilization` with which at least one KV block would fit.
        sufficient: f64,
        /// Bytes of the recurrent states.
        states: u64,
    },
    /// The requested KV cache does not fit on the device.
    #[error(
        "a KV cache of {needed} bytes does not fit: {free} of {total} bytes are free; lower \
         --kv-cache-memory-bytes or --num-gpu-blocks-override"
    )]
    KvTooLarge {
        /// Requested size of the KV cache in bytes.
        needed: u64,
        /// Free memory of the device in bytes.
        free: u64,
        /// Total memory of the device in bytes.
        total: u64,
    },
    /// A trace file cannot be written.
    #[error("trace in {folder}: {error}")]
    Trace {
        /// Folder of the trace files.
        folder: String,
        /// Error text of the operating system.
        error: String,
    },
    /// A trace was requested, but no trace folder is configured.
    #[error("no folder for traces is configured (--profile DIR)")]
    TracingDisabled,
    /// The KV cache dtype differs from the model dtype, but MLA requires equal dtypes.
    #[error(
        "--kv-cache-dtype fp8 is not supported with MLA: the KV cache has the type of the model (auto)"
    )]
    MlaKvDtype,
    /// The speculative decoding settings are not supported for this model.
    #[error(transparent)]
    Speculation(#[from] SpeculationError),
    /// The device cannot sample from the vocabulary of this model.
    #[error(transparent)]
    VocabularyLimit(#[from] VocabularyLimitError),
    /// Grammar bitmasks are missing for rows that must be sampled under a grammar.
    #[error(transparent)]
    TokenBitmask(#[from] TokenBitmaskError),
    /// A batch is inconsistent, or exceeds the limits fixed at start-up.
    #[error("invalid batch: {0}")]
    Batch(#[from] BatchError),
}

/// Failure to receive the grammar bitmasks of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenBitmaskError {
    /// Some rows of the step that must be sampled under a grammar (masked rows) received no bitmask.
    #[error("step {step} has {rows} masked rows and received {received} grammar bitmasks")]
    Missing {
        /// Id of the step.
        step: u64,
        /// Number of masked rows of the step: rows that sample under a grammar.
        rows: usize,
        /// Number of these masked rows for which a grammar bitmask was received.
        received: usize,
    },
    /// Not all grammar bitmasks of the step arrived before the timeout.
    #[error("step {step} received {received} of {rows} grammar bitmasks within {waited_ms} ms")]
    Timeout {
        /// Id of the step.
        step: u64,
        /// Number of masked rows of the step: rows that sample under a grammar.
        rows: usize,
        /// Number of these masked rows for which a grammar bitmask arrived before the timeout.
        received: usize,
        /// Time that the step waited, in milliseconds.
        waited_ms: u128,
    },
}

/// Reason why a batch cannot be run. The scheduler never sends such a batch, so each error is a bug in the
/// scheduler or in the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// A row has state slots of another number of state groups than the model has.
    #[error("{request:?} has slots of {groups} state groups, the model has {expected}")]
    StateGroups {
        /// Request of the row.
        request: RequestId,
        /// Number of state groups with slots.
        groups: usize,
        /// Number of state groups of the model.
        expected: usize,
    },
    /// A state slot of a row is out of range, or a row that continues a sequence reads no state.
    #[error("{request:?} reads state slot {read:?} and writes {write}, the pool has {limit}")]
    StateSlot {
        /// Request of the row.
        request: RequestId,
        /// Slot that the row reads; `None` = the row starts with the initial state.
        read: Option<u32>,
        /// Slot that the row writes.
        write: u32,
        /// Number of state slots.
        limit: usize,
    },
    /// With recurrent states, rows with draft tokens must precede rows of prompts, because the inputs of the state updates are
    /// stored for the first tokens of a step.
    #[error(
        "draft tokens of {request:?} end at token {tokens} of the step; rows with draft tokens must be within the first {limit}"
    )]
    DraftsAfterPrefill {
        /// Request of the row.
        request: RequestId,
        /// Number of tokens of the step up to the last draft token of the row.
        tokens: usize,
        /// Maximum number of tokens of all decode rows of a step.
        limit: usize,
    },
    /// The batch has more tokens than the maximum per step.
    #[error("{tokens} tokens, at most {limit} per step")]
    TooManyTokens {
        /// Number of tokens in the batch.
        tokens: usize,
        /// Maximum number of tokens per step.
        limit: usize,
    },
    /// The batch has more rows than the maximum per step.
    #[error("{rows} rows, at most {limit} per step")]
    TooManyRows {
        /// Number of rows in the batch.
        rows: usize,
        /// Maximum number of rows per step.
        limit: usize,
    },
    /// `Batch::moe_tokens`, the number of tokens that MoE layers are padded to, is less than the number of
    /// tokens of this replica, or more than the maximum per step.
    #[error(
        "moe_tokens is {capacity}: at least the {tokens} tokens of this replica, at most {limit}"
    )]
    MoeTokenBudget {
        /// Number of tokens that MoE layers are padded to (`Batch::moe_tokens`).
        capacity: usize,
        /// Number of tokens in the batch.
        tokens: usize,
        /// Maximum number of tokens per step.
        limit: usize,
    },
    /// `Batch::draft_rows`, the number of rows that draft passes are padded to, is less than the number of
    /// rows up to the last row with draft tokens, or more than the maximum number of rows per step.
    #[error(
        "draft_rows is {capacity}: at least the {rows} drafting rows of this replica, at most {limit}"
    )]
    DraftRowBudget {
        /// Number of rows that draft passes are padded to (`Batch::draft_rows`).
        capacity: u32,
        /// Number of rows of the batch up to the last row with draft tokens.
        rows: u32,
        /// Maximum number of rows per step.
        limit: usize,
    },
    /// The length of a row differs from its number of token ids, or is 0.
    #[error("request {} has a row of {len} tokens with {token_ids} token ids", request.0)]
    Length {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// Length of the row in tokens (`BatchRow::len`).
        len: u32,
        /// Number of token ids that the row contains.
        token_ids: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("request {} has token id {token}, the vocabulary has {limit} ids", request.0)]
    Vocabulary {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// Token id outside the vocabulary.
        token: u32,
        /// Number of token ids in the vocabulary.
        limit: usize,
    },
    /// A row has more draft tokens than configured.
    #[error("request {} has {drafts} draft tokens, at most {limit} are configured", request.0)]
    TooManyDrafts {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// Number of draft tokens of the row.
        drafts: u8,
        /// Maximum number of draft tokens of a row.
        limit: u8,
    },
    /// The input of the row is the token sampled in an earlier step, but the row's sequence slot (the state
    /// of one running request) did not sample in that step.
    #[error("request {} refers to a token of step {step} that its sequence slot did not sample", request.0)]
    NotSampled {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// Id of the step in which the input token of the row should have been sampled.
        step: u64,
    },
    /// The sequence slot (the state of one running request) of a row does not exist.
    #[error("sequence slot {} is out of range: there are {limit}", seq_slot.0)]
    NoSequenceSlot {
        /// Sequence slot of the row.
        seq_slot: SequenceSlot,
        /// Number of sequence slots of the executor.
        limit: usize,
    },
    /// The sequence slot is assigned to another request, or to another epoch of the same request (the epoch
    /// changes when the request is preempted or its executor restarts).
    #[error("request {} is not assigned to sequence slot {}", request.0, seq_slot.0)]
    SlotOwnerMismatch {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// Sequence slot of the row.
        seq_slot: SequenceSlot,
    },
    /// A block table update leaves a gap in the block table, exceeds the maximum length of a block table, or
    /// replaces more entries than a request can hold blocks of the KV group.
    #[error(
        "the block table update of request {} does not fit its block table of KV group {group}",
        request.0
    )]
    InvalidTableUpdate {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// KV group of the block table.
        group: u8,
    },
    /// A block table update names a KV group that the model does not have.
    #[error("request {} updates a block table of KV group {group}, the model has {groups}", request.0)]
    UnknownKvGroup {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// KV group of the update.
        group: u8,
        /// Number of KV groups of the model.
        groups: usize,
    },
    /// The block table of a window begins after the first key that the row reads.
    #[error(
        "request {} reads position {position}, its block table of KV group {group} begins at entry {first}",
        request.0
    )]
    WindowNotCovered {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// KV group of the block table.
        group: usize,
        /// First position that the row reads.
        position: u32,
        /// First entry of the block table.
        first: usize,
    },
    /// Draft passes need the hidden state of the token before the row, but the device does not store this
    /// hidden state.
    #[error("request {} starts at position {position}: the hidden state before it is not available", request.0)]
    MissingHiddenState {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// First position of the row.
        position: u32,
    },
    /// The block table does not cover all positions of the row.
    #[error(
        "request {} writes position {position}, its block table of KV group {group} has {entries} entries",
        request.0
    )]
    TableTooShort {
        /// Id of the request that the row belongs to.
        request: RequestId,
        /// KV group of the block table.
        group: usize,
        /// First position of the row without a block table entry.
        position: u32,
        /// Number of entries in the block table.
        entries: usize,
    },
    /// A block table update contains a block that is not in the pool.
    #[error("block {block} is out of range: the pool has {limit}")]
    Block {
        /// Id of the KV block that is not in the pool.
        block: u32,
        /// Number of blocks in the pool.
        limit: u32,
    },
}
