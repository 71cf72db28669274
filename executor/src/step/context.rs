//! `StepContext`: the state of one step, passed through the pipeline stages (stage, forward, sample).

use super::bitmasks::StepBitmasks;
use super::graphs::StepGraphKey;
use super::logits_rows::LogitsRow;
use super::pending_step::PendingStep;
use super::pooling::PooledRows;
use crate::model_context::ModelContext;
use ops::{StepShape, Tensor};
use protocol::Batch;
use std::ops::Range;

/// State of one step, from the conversion of its inputs (staging) to the launch of its kernels.
pub(super) struct StepContext<'a> {
    /// Models and communication groups that the step uses.
    pub(super) model: &'a ModelContext,
    /// Batch of the step.
    pub(super) batch: &'a Batch,
    /// Logits rows (one row of vocabulary logits per sampled or scored position) in the order in which they
    /// are sampled. Set by `stage`.
    pub(super) logits_rows: Vec<LogitsRow>,
    /// Rows of pooling requests whose hidden states are returned. Set by `stage`.
    pub(super) pooled_rows: PooledRows,
    /// Number of logits rows that are sampled together with the forward pass; 0 if the step waits for grammar
    /// bitmasks. Set by `stage`.
    pub(super) first_slice: usize,
    /// Range in `logits_rows` of the last slice that was sampled. `pending` copies the outputs of this slice
    /// to the host. Set by `sample`.
    pub(super) last_slice: Range<usize>,
    /// Whether sampling needs full rows of logits, which are all-gathered from the ranks that share the LM
    /// head. Set by `stage`.
    pub(super) full_logits: bool,
    /// Captured graph that the step replays; `None` = the step is launched eagerly. Set by `forward`.
    pub(super) graph: Option<StepGraphKey>,
    /// Hidden states of all tokens, `[tokens, hidden_size]`, or only of the sample positions, `[logits rows,
    /// hidden_size]`; `None` if a graph was replayed. Set by `forward`.
    pub(super) hidden: Option<Tensor>,
    /// Shape of the forward pass, if recurrent states are updated after logits rows that are sampled separately. Set by
    /// `forward`.
    pub(super) unreplayed: Option<StepShape>,
    /// Grammar bitmasks of the batch. Set by `sample`.
    pub(super) masks: StepBitmasks,
    /// Whether the step reports the draft tokens of rows that are sampled under a grammar, from which the
    /// bitmasks are computed. Set before `stage`.
    pub(super) reports_drafts: bool,
    /// Number of slices of `logits_rows` that have been sampled. The memory for logits limits the size of a
    /// slice.
    pub(super) slices: usize,
    /// The step in flight that the pipeline returns.
    pub(super) pending: PendingStep,
}

impl<'a> StepContext<'a> {
    pub(super) fn new(model: &'a ModelContext, batch: &'a Batch, pending: PendingStep) -> Self {
        Self {
            model,
            batch,
            logits_rows: Vec::new(),
            pooled_rows: PooledRows::default(),
            first_slice: 0,
            last_slice: 0..0,
            full_logits: false,
            graph: None,
            hidden: None,
            unreplayed: None,
            masks: StepBitmasks::default(),
            reports_drafts: false,
            slices: 0,
            pending,
        }
    }

    /// Whether the step launches nothing. If other replicas need the experts of this replica, a step without
    /// rows is launched with 0 tokens and is not idle.
    pub(super) fn is_idle(&self) -> bool {
        self.batch.rows.is_empty() && self.model.dp.size() == 1
    }

    /// Whether any row is sampled under a grammar bitmask.
    pub(super) fn is_masked(&self) -> bool {
        self.batch.rows.iter().any(|row| row.masked)
    }

    /// Whether any row that is sampled under a grammar bitmask may have draft tokens.
    pub(super) fn has_masked_drafts(&self) -> bool {
        self.batch.rows.iter().any(|row| row.masked && row.drafts > 0)
    }
}
