//! Commands of a mask session, and its queue of commands.

use super::super::step_mask_collector::StepMaskCollector;
use protocol::TokenVec;
use std::sync::Arc;
use std::time::Instant;

/// Handle that cancels a mask computation, with the start time of the computation in progress.
pub(super) struct MaskCancellation {
    pub(super) handle: llguidance::CancellationHandle,
    /// Start time of the mask computation in progress.
    pub(super) started_at: Option<Instant>,
}

/// Commands that a mask session has received but not yet executed.
#[derive(Default)]
pub(super) struct MaskCommandInbox {
    pub(super) commands: Vec<MaskCommand>,
    /// Whether the session is queued for a worker thread or is being run by one.
    pub(super) scheduled: bool,
    pub(super) ended: bool,
}

/// Command for a mask session.
pub(crate) enum MaskCommand {
    /// Advances the grammar and the thinking budget by tokens committed to the output.
    Tokens(TokenVec),
    /// Computes the mask of the next token for a step that samples it.
    Compute {
        /// Batch row that samples the token.
        request: PendingMaskRow,
        /// Whether the row may have draft tokens. A later `FollowDrafts` command then completes the row.
        awaits_drafts: bool,
    },
    /// Computes the token bitmasks for the positions after the draft tokens of a row, and completes the
    /// row. This command follows the `Compute` command for the row.
    FollowDrafts {
        /// Batch row that has the draft tokens.
        request: PendingMaskRow,
        /// Draft tokens of the row.
        drafts: TokenVec,
    },
}

/// Batch row of a step that needs token bitmasks from the session.
#[derive(Clone)]
pub(crate) struct PendingMaskRow {
    /// Collector of the token bitmasks for all rows of the step.
    pub(crate) collector: Arc<StepMaskCollector>,
    /// Index of the row in the batch.
    pub(crate) row: u32,
}
