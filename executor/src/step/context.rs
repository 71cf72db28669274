//! What the stages of one step hand on to each other.

use super::bitmasks::StepBitmasks;
use super::graphs::GraphKey;
use super::logits_rows::LogitsRow;
use super::pending::PendingStep;
use crate::model_context::ModelContext;
use ops::Tensor;
use protocol::Batch;

/// One step from its batch to its launches.
pub(super) struct StepContext<'a> {
    /// What the step computes with.
    pub(super) model: &'a ModelContext,
    /// What the step computes.
    pub(super) batch: &'a Batch,
    /// Logits rows in the order in which they are sampled. Set by `stage`.
    pub(super) logits_rows: Vec<LogitsRow>,
    /// How many of them are sampled with the forward pass; 0 if it does not wait for bitmasks. Set by `stage`.
    pub(super) first_slice: usize,
    /// Whether sampling needs whole rows of logits where ranks share the LM head. Set by `stage`.
    pub(super) full_logits: bool,
    /// The captured graph that serves the step. Set by `forward`.
    pub(super) graph: Option<GraphKey>,
    /// Hidden states `[T or n, H]`; `None` if a graph was replayed. Set by `forward`.
    pub(super) hidden: Option<Tensor>,
    /// Grammar bitmasks of the batch. Set by `sample`.
    pub(super) masks: StepBitmasks,
    /// Slices of logits rows so far.
    pub(super) slices: usize,
    /// What is returned.
    pub(super) pending: PendingStep,
}

impl<'a> StepContext<'a> {
    pub(super) fn new(model: &'a ModelContext, batch: &'a Batch, pending: PendingStep) -> Self {
        Self {
            model,
            batch,
            logits_rows: Vec::new(),
            first_slice: 0,
            full_logits: false,
            graph: None,
            hidden: None,
            masks: StepBitmasks::default(),
            slices: 0,
            pending,
        }
    }

    /// Whether nothing is launched. Where other replicas wait for the experts of this one, a step without rows is one of no
    /// tokens.
    pub(super) fn is_idle(&self) -> bool {
        self.batch.rows.is_empty() && self.model.dp.size() == 1
    }

    /// Whether some row waits for a grammar bitmask.
    pub(super) fn is_masked(&self) -> bool {
        self.batch.rows.iter().any(|row| row.masked)
    }
}
