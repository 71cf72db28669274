//! Reports the draft tokens of a step's masked rows (rows sampled under a grammar), from which their grammar
//! bitmasks are computed.

use super::StepState;
use super::bitmasks::TokenBitmaskSource;
use super::context::StepContext;
use crate::ExecutorError;
use crate::sequence_slots::HostSequenceState;
use protocol::{RowDrafts, StepDrafts, TokenVec};

impl StepState {
    /// Reports draft tokens that were proposed on the host. Called before the forward pass is launched.
    pub(super) fn report_host_drafts(
        &self,
        context: &StepContext<'_>,
        masks: &mut dyn TokenBitmaskSource,
    ) -> Result<(), ExecutorError> {
        if !context.reports_drafts || self.device.drafts.is_some() {
            return Ok(());
        }
        masks.report_drafts(self.drafts_of(context, |state, _| state.host_drafts[..].into()))
    }

    /// Reports draft tokens that were proposed on the device. Waits until the draft tokens are copied to the
    /// host; the device runs the forward pass meanwhile.
    pub(super) fn report_device_drafts(
        &mut self,
        context: &StepContext<'_>,
        masks: &mut dyn TokenBitmaskSource,
    ) -> Result<(), ExecutorError> {
        if !context.reports_drafts || self.device.drafts.is_none() {
            return Ok(());
        }
        let ids = match &mut self.device.id_copy {
            Some(copy) => copy.wait()?,
            None => Vec::new(),
        };
        let drafts = |state: &HostSequenceState, first: usize| {
            let end = first + usize::from(state.device_drafts);
            ids.get(first..end).unwrap_or_default().into()
        };
        masks.report_drafts(self.drafts_of(context, drafts))
    }

    /// Returns the draft tokens of the masked rows (rows sampled under a grammar). The parameter `drafts`
    /// returns the draft tokens of one row, given its sequence slot and the index of its first draft token in
    /// the step.
    fn drafts_of(
        &self,
        context: &StepContext<'_>,
        drafts: impl Fn(&HostSequenceState, usize) -> TokenVec,
    ) -> StepDrafts {
        let mut end = 0;
        let mut rows = Vec::new();
        for row in &context.batch.rows {
            let state = self.seq_slots.get(row.seq_slot);
            let first_draft = end + row.len as usize;
            end = first_draft + state.drafts() as usize;
            if row.masked && row.drafts > 0 {
                let tokens = drafts(state, first_draft);
                rows.push(RowDrafts { request: row.request, tokens });
            }
        }
        StepDrafts { step: context.batch.step, rows }
    }
}
