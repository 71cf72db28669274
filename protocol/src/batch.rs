//! One step of one replica as its executors receive it. Every TP rank gets the same bytes.

use crate::{
    BlockId, Epoch, RequestId, SamplingParams, SequenceSlot, StepId, ThinVec, Token, TokenVec,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// What the executors of a replica run in one step. Decode rows come first, then longer chunks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// The step; replies carry it back.
    pub step: StepId,
    /// Generation of the executor group this batch is meant for.
    pub epoch: Epoch,
    /// How the step is dispatched; agreed by assignment, never negotiated between ranks.
    pub dispatch: DispatchMode,
    /// Tokens that every rank of a lockstep group pads its MoE layers to; 0 outside lockstep.
    pub moe_tokens: u32,
    /// The first so many rows of any rank of a lockstep group may have drafts: ranks whose model makes them compute as many
    /// together; 0 = none has, and outside lockstep.
    pub draft_rows: u32,
    /// One row per chunk.
    pub rows: Vec<BatchRow>,
}

/// How a step is dispatched on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DispatchMode {
    /// Replay the graph captured for `rows` rows of `width` tokens each.
    Graph {
        /// Rows the graph was captured for; at least the rows of the batch.
        rows: u32,
        /// Tokens per row: 1, or 1 + drafts.
        width: u32,
    },
    /// Launch every kernel for this many tokens.
    Eager {
        /// Tokens forwarded by the step.
        tokens: u32,
    },
}

/// One chunk of one request: forwards `len + drafts` tokens from position `start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchRow {
    /// Whose tokens these are.
    pub request: RequestId,
    /// Epoch of the request (it grows with preemption and group loss), echoed by `StepOutput` order.
    pub epoch: u32,
    /// The request's row of device state.
    pub seq_slot: SequenceSlot,
    /// Position of the first token, as if no draft of rows under way were accepted: see [`RowInput::SampledAt`].
    pub start: u32,
    /// Known tokens forwarded, at least 1.
    pub len: u32,
    /// Most draft tokens forwarded behind them. They are the seat's, which may hold fewer.
    pub drafts: u8,
    /// Whether a token is sampled behind the last one: true iff no successor is known.
    pub samples: bool,
    /// Whether the sampler waits for this row's mask, which follows in a `GrammarBitmask`: only rows that sample, and
    /// never rows whose input the scheduler has not seen.
    pub masked: bool,
    /// Where the token ids come from.
    pub input: RowInput,
    /// Changes of the block tables since the seat's last row; whole tables with an epoch's first row.
    pub table_updates: ThinVec<BlockTableUpdate>,
    /// Known successor of the chunk's last token (drafters and prompt log-probabilities read it).
    pub next_token: Option<Token>,
    /// Present with the first row of a request's epoch: the seat is initialised from it.
    /// Boxed: it is rare and large, and steps of thousands of rows should stay small.
    pub seq_init: Option<Box<SequenceInit>>,
}

/// Source of a row's token ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowInput {
    /// `len` ids from the host.
    Tokens(TokenVec),
    /// The newest id of this seat, of an earlier step whose output the scheduler has not seen yet. Where it lies the seat
    /// knows: each accepted draft of that step, and of those under way before it, moves the row on by one.
    SampledAt {
        /// The step.
        step: StepId,
        /// Drafts of rows under way: the row begins at most so many positions behind its `start`.
        draft_slack: u16,
    },
}

impl RowInput {
    /// At most so many positions behind its `start` the row begins.
    pub fn draft_slack(&self) -> u32 {
        match self {
            Self::Tokens(_) => 0,
            Self::SampledAt { draft_slack: slack, .. } => (*slack).into(),
        }
    }
}

/// Replaces the entries of one block table from `from` on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTableUpdate {
    /// Index of the KV group in `KvSpec::groups`.
    pub group: u8,
    /// First entry replaced; the table ends behind `blocks`.
    pub first_entry: u32,
    /// The new entries.
    #[serde(with = "crate::packed_list")]
    pub blocks: BlockIds,
}

/// Entries of a block table; the few that a step adds to a decoding request lie in place.
pub type BlockIds = SmallVec<[BlockId; 4]>;

/// What a seat must know about a request before its first row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SequenceInit {
    /// Sampling rules.
    pub sampling: SamplingParams,
    /// Key of the request's random numbers (Philox), drawn once at submit.
    pub rng_key: u64,
    /// Tokens of the prompt; positions from here on are output.
    pub prompt_len: u32,
    /// All ids known so far, prompt and output, if `SamplingParams::needs_token_history` or the drafter does; else empty.
    #[serde(with = "crate::packed_list")]
    pub token_history: Vec<Token>,
}
