//! Samples the logits rows of a step that were not sampled together with the forward pass.

use super::StepState;
use super::bitmasks::{StepBitmasks, TokenBitmaskSource};
use super::context::StepContext;
use super::logits_rows::{self, LogitsRow};
use crate::ExecutorError;
use protocol::Batch;

impl StepState {
    /// Waits for grammar bitmasks, then samples the remaining logits rows in slices, and waits for the
    /// results of all slices except the last. In a step with masked rows (rows sampled under a grammar), no
    /// logits rows were sampled together with the forward pass.
    pub(super) fn sample(
        &mut self,
        context: &mut StepContext<'_>,
        masks: &mut dyn TokenBitmaskSource,
    ) -> Result<(), ExecutorError> {
        context.masks = StepBitmasks::wait(context.batch, masks)?;
        logits_rows::limit_to_bitmasks(&mut context.logits_rows, &context.masks);
        context.pending.overdue_rows = context.masks.overdue_rows();
        let (mut slice, all) = (0..context.first_slice, context.logits_rows.len());
        context.slices = usize::from(slice.end == all || slice.end > 0);
        while slice.end < all {
            if !slice.is_empty() {
                self.read_slice(context, slice.clone())?;
            }
            let staged = self.sample_slice(context, slice.end)?;
            slice = slice.end..slice.end + staged;
            context.slices += 1;
        }
        if let Some(shape) = context.unreplayed.take() {
            self.device.replay_states(context.model, shape)?;
        }
        context.last_slice = slice.start..all;
        Ok(())
    }

    /// Waits for the sampled tokens of a slice other than the last slice, and writes them to the outputs of
    /// the batch rows.
    fn read_slice(
        &mut self,
        context: &mut StepContext<'_>,
        slice: std::ops::Range<usize>,
    ) -> Result<(), ExecutorError> {
        let rows = &context.logits_rows[slice];
        let with_top_logprobs = logits_rows::needs_top_logprobs(rows);
        let memory = self.output_memory.take();
        let outputs = self.device.buffers.download(
            &context.model.ops,
            memory,
            rows.len(),
            with_top_logprobs,
        )?;
        let outputs = outputs.wait()?;
        logits_rows::write_outputs(rows, &outputs, &mut context.pending.rows);
        self.output_memory.release(outputs.into_memory());
        Ok(())
    }

    /// Stages and launches the sampling of a slice of logits rows, starting at row `first`. Returns the
    /// number of logits rows in the slice.
    fn sample_slice(
        &mut self,
        context: &mut StepContext<'_>,
        first: usize,
    ) -> Result<usize, ExecutorError> {
        let hidden = context.hidden.as_ref().expect("a graph samples all logits rows at once");
        self.staging.stage.clear();
        let rows = &context.logits_rows[first..];
        let count = self.stage_slice(context.batch, &context.masks, rows);
        self.staging.upload(&context.model.ops, &mut self.device.buffers)?;
        let (model, full_logits) = (context.model, context.full_logits);
        let timing = &mut context.pending.timing;
        self.device.sample_slice(model, hidden, count, full_logits, timing)?;
        Ok(count)
    }

    /// Writes a slice of logits rows to the staging buffer: the first of the logits rows `rows`, up to the
    /// maximum size of a slice. Returns the number of staged logits rows.
    pub(super) fn stage_slice(
        &mut self,
        batch: &Batch,
        masks: &StepBitmasks,
        rows: &[LogitsRow],
    ) -> usize {
        let limits = &self.size.limits;
        let (edits_max, words_max) = (logits_rows::edits_max(limits), self.staging.words_max);
        let max_rows = rows.len().min(self.size.logits_rows);
        let stage = &mut self.staging.stage;
        for (n, row) in rows[..max_rows].iter().enumerate() {
            let (edits, words, inits) = (stage.edits.len(), stage.words.len(), stage.inits.len());
            let one = std::slice::from_ref(row);
            let (slots, vocab) = (&self.seq_slots, limits.vocab);
            logits_rows::stage_logits_rows(one, batch, slots, masks, vocab, stage);
            let full = stage.edits.len() > edits_max || stage.words.len() > words_max;
            if full && n > 0 {
                stage.logits_rows.pop();
                stage.inits.truncate(inits);
                stage.edits.truncate(edits);
                stage.words.truncate(words);
                return n;
            }
        }
        max_rows
    }
}
