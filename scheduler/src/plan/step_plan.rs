//! Plan of one step: rows, admissions and preemptions.

use super::VictimBlockRefs;
use crate::scheduling_state::BlockedQueueHead;
use crate::slab::SlabSlot;
use kvcache::PrefixHit;
use protocol::BlockId;

/// Plan of one step: its rows, and the admissions and preemptions that precede the rows.
#[derive(Debug, Default)]
pub(crate) struct StepPlan {
    /// Rows in batch order.
    pub(crate) rows: Vec<PlannedRow>,
    /// Number of decode rows (pass 1 of `plan`), which are `rows[..decode_rows]`.
    pub(crate) decode_rows: usize,
    /// Requests to admit. Their rows are the last rows of the plan, in the same order.
    pub(crate) admit: Vec<PlannedAdmission>,
    /// Blocks of the prefix hits of all requests to admit in all KV groups, concatenated in the order of `admit`.
    pub(crate) hits: Vec<BlockId>,
    /// Running requests to preempt before the step, which frees their blocks for the rows of the plan.
    pub(crate) preempt: Vec<SlabSlot>,
    /// Number of requests that are preempted for decode rows: `preempt[..decode_preempts]`.
    pub(super) decode_preempts: usize,
    /// The head of the waiting queue, if it cannot be admitted for lack of KV blocks.
    pub(crate) blocked_head: Option<BlockedQueueHead>,
    /// Total uncomputed tokens of the requests that have prefill rows (passes 2 and 3 of `plan`), including
    /// tokens beyond the chunks of this step.
    pub(crate) pending_prefill_tokens: u64,
    /// Positions in the running queue of requests that do not decode. Only these requests can have prefill
    /// chunks in pass 2.
    pub(super) non_decoding: Vec<usize>,
    /// For each block, the number of its references that are held by the requests to preempt.
    pub(super) victim_blocks: VictimBlockRefs,
}

/// One row of the plan: a chunk of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedRow {
    pub(crate) slot: SlabSlot,
    pub(crate) start: u32,
    pub(crate) len: u32,
    pub(crate) drafts: u8,
    /// Number of blocks that are appended to the request's block tables before the row is sent.
    pub(crate) new_blocks: u32,
}

/// A waiting request to admit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedAdmission {
    pub(crate) slot: SlabSlot,
    /// Prefix hit of the request.
    pub(crate) hit: PrefixHit,
    /// Number of entries that the block tables of window groups need for the first chunk.
    pub(crate) window_entries: u32,
    /// Number of blocks to reserve, if the request is non-preemptible.
    pub(crate) reserved_blocks: u32,
    /// Position at which the request makes a checkpoint because its prefix hit was shortened; 0 = none.
    pub(crate) demand: u32,
}

impl StepPlan {
    /// Returns the number of tokens that the step forwards, draft tokens included.
    pub(crate) fn tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.len + u32::from(row.drafts)).sum()
    }

    /// Returns the number of rows up to the last row with draft tokens.
    pub(crate) fn draft_rows(&self) -> u32 {
        self.rows.iter().rposition(|row| row.drafts > 0).map_or(0, |last| last as u32 + 1)
    }

    /// Returns whether the plan contains a prefill chunk, that is, a row that forwards several known tokens.
    pub(crate) fn has_chunk(&self) -> bool {
        self.rows.iter().any(|row| row.len > 1)
    }

    /// Returns whether the plan contains a row that continues a partially prefilled prompt.
    pub(crate) fn has_partial_prefill(&self) -> bool {
        self.rows.len() > self.decode_rows + self.admit.len()
    }

    /// Removes the rows of passes 2 and 3, because the lockstep group delays prefill.
    pub(crate) fn delay_prefill(&mut self) {
        self.rows.truncate(self.decode_rows);
        self.preempt.truncate(self.decode_preempts);
        self.admit.clear();
        self.hits.clear();
    }

    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.decode_rows = 0;
        self.admit.clear();
        self.hits.clear();
        self.preempt.clear();
        self.decode_preempts = 0;
        self.blocked_head = None;
        self.pending_prefill_tokens = 0;
        self.non_decoding.clear();
        self.victim_blocks.clear();
    }
}
