//! Batch: one step of one replica as sent to its executors. Every TP rank receives the same bytes.

use crate::{
    BlockId, Epoch, RequestId, SamplingParams, SequenceSlot, StateSlot, StepId, ThinVec, Token,
    TokenVec,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// A step for the executors of a replica. Decode rows come first, then prefill chunks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Step id, repeated in the output.
    pub step: StepId,
    /// Epoch of the executor group that the batch is sent to: a number that increases when the executors are
    /// restarted.
    pub epoch: Epoch,
    /// How the step is launched: by a captured graph or eagerly. The scheduler decides this for all ranks.
    pub dispatch: StepLaunchMode,
    /// Number of tokens to which each rank pads its MoE layers if replicas share experts and step together
    /// (lockstep); otherwise 0.
    pub moe_tokens: u32,
    /// Number of leading rows that may have draft tokens on any rank, if replicas share experts and step
    /// together (lockstep); the ranks run the MTP module or draft model on this number of rows. 0 without
    /// draft tokens or without lockstep.
    pub draft_rows: u32,
    /// Rows of the batch, one per request.
    pub rows: Vec<BatchRow>,
}

/// How a step is launched on a device: as a captured graph, or kernel by kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepLaunchMode {
    /// Replays the graph captured for `rows` rows of `width` tokens each.
    Graph {
        /// Rows of the captured graph; at least the rows of the batch.
        rows: u32,
        /// Tokens per row: 1, or 1 + draft tokens.
        width: u32,
    },
    /// Launches each kernel separately, without a captured graph.
    Eager {
        /// Number of tokens forwarded by the step.
        tokens: u32,
    },
}

/// One chunk of one request: forwards `len + drafts` tokens from position `start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchRow {
    /// Request that the tokens belong to.
    pub request: RequestId,
    /// Epoch of the request, incremented by preemption and executor failure. Step outputs do not contain it,
    /// because their rows are in batch order.
    pub epoch: u32,
    /// Sequence slot of the request.
    pub seq_slot: SequenceSlot,
    /// Position of the first token, assuming that no draft token of the steps in flight is accepted: see
    /// [`RowInput::SampledAt`].
    pub start: u32,
    /// Number of known tokens forwarded, at least 1.
    pub len: u32,
    /// Maximum number of draft tokens forwarded after the known tokens. The draft tokens are stored in the
    /// sequence slot, which may have fewer.
    pub drafts: u8,
    /// Whether the row samples: true iff the token after the row's last token is unknown.
    pub samples: bool,
    /// Whether the sampler waits for the grammar bitmasks of this row, which follow in a `BitmaskMessage`. If
    /// `drafts` is above 0, the executor first reports the draft tokens of the row (`StepDrafts`). Only for
    /// rows that sample, and never for rows with `RowInput::SampledAt`.
    pub masked: bool,
    /// Source of the token ids.
    pub input: RowInput,
    /// Changes of the block table since the last row of the sequence slot. The first row after admission or
    /// preemption of the request, or after an executor restart, contains the whole table.
    pub table_updates: ThinVec<BlockTableUpdate>,
    /// State slots that the row reads and writes, one entry for each state group, in order of the groups; empty
    /// without state groups.
    pub state_slots: ThinVec<StateSlotAccess>,
    /// Known token after the chunk's last token, for draft proposers and for prompt logprobs; `None` = not
    /// known.
    pub next_token: Option<Token>,
    /// Initial state of the sequence slot. Present in the first row after admission or preemption of the
    /// request, or after an executor restart. Boxed because it is rare and large, and steps have thousands of
    /// rows.
    pub seq_init: Option<Box<SequenceInit>>,
}

/// Source of a row's token ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowInput {
    /// The `len` token ids themselves.
    Tokens(TokenVec),
    /// The newest token of the sequence slot, sampled by an earlier step whose output the scheduler has not
    /// received yet. The sequence slot stores the position: each draft token accepted in that step, or in an
    /// earlier step in flight, moves the row by one position.
    SampledAt {
        /// Step that sampled the token.
        step: StepId,
        /// Number of draft tokens of the steps in flight. If they are accepted, the row starts up to this
        /// number of positions after `start`.
        draft_slack: u16,
    },
}

impl RowInput {
    /// Returns the maximum number of positions by which the row starts after `start`.
    pub fn draft_slack(&self) -> u32 {
        match self {
            Self::Tokens(_) => 0,
            Self::SampledAt { draft_slack, .. } => (*draft_slack).into(),
        }
    }
}

/// Replaces the entries of one block table from `first_entry` on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTableUpdate {
    /// Index of the KV group in `KvSpec::groups`.
    pub group: u8,
    /// Index of the first entry to replace; after the update, the table ends with the new entries.
    pub first_entry: u32,
    /// New entries.
    #[serde(with = "crate::packed_list")]
    pub blocks: BlockIds,
}

/// State slots of one row in one state group.
///
/// The row reads the state before its first position and writes the state after its last position; with draft tokens, it is
/// the state after the accepted draft tokens. Rows of one
/// step may read the same slot; a slot that a row writes is read or written by no other row of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateSlotAccess {
    /// Index of the KV group in `KvSpec::groups`.
    pub group: u8,
    /// Slot with the state before the row; `None` = the row starts at position 0, with the initial state.
    pub read: Option<StateSlot>,
    /// Slot of the state after the row; may be the slot that the row reads.
    pub write: StateSlot,
}

/// Entries of a block table; the few that a decode step adds are stored inline.
pub type BlockIds = SmallVec<[BlockId; 4]>;

/// State with which a sequence slot is initialised for a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SequenceInit {
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Philox key of the request's random numbers, drawn once at submit.
    pub rng_key: u64,
    /// Number of prompt tokens; later positions are output.
    pub prompt_len: u32,
    /// All known token ids, prompt and output, if `SamplingParams::needs_token_history` or the proposer needs
    /// them; otherwise empty.
    #[serde(with = "crate::packed_list")]
    pub token_history: Vec<Token>,
}
